"""`align-circuits rerun`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import torch
import tyro

import align_circuits as ac
from align_circuits.checks import check_argument
from align_circuits.cli.command_base import Verb
from align_circuits.cli.entry import VERBS, verb_class
from align_circuits.cli.folders import Results
from align_circuits.models.loading import load
from align_circuits.tables.calls import FOLDER, Call
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Rerun(Verb):
    """Repeats another verb."""

    run: tyro.conf.Positional[Path]
    """A folder that another verb wrote, or Table.save."""
    out: Path | None = field(default=None, kw_only=True)
    """The folder for the repetition; by default PATH/rerun."""
    model: str | None = field(default=None, kw_only=True)
    """What the model is loaded from, in runs of one model; by default what the run or the table's provenance names."""
    task: Annotated[str | None, tyro.conf.arg(metavar="MODULE:CLASS")] = field(default=None, kw_only=True)
    """Of a run with --task: the same task again. It is code, which is run only if you name it."""

    @property
    def folder(self) -> Path:
        """The folder for the repetition."""
        return self.out or self.run / "rerun"

    def __call__(self, results: Results) -> str | None:
        """Runs the verb."""
        before = Table.load(self.run)
        if called := (self.run / FOLDER).is_dir():
            self._called(before).save(results.new)
        else:
            self._verb(before, results.folder)(results)
        after = Table.load(results.new)
        if called or len(after) == len(before):  # what was saved from Python may be a selection
            after = _with_rows_of(before, after)
        # Before all numbers, which would differ for this reason alone.
        if (old := before.provenance.data.get("digest")) != (new := after.provenance.data.get("digest")):
            return f"the prompts have changed since the first run, {old} -> {new}: their numbers do not compare"
        first, second = (table.frame["value"].to_numpy(dtype=float) for table in (before, after))
        if len(first) != len(second) or (np.isnan(first) != np.isnan(second)).any():
            return f"the rows differ: {len(first)} in the first run, {len(second)} in this one; compare the tables"
        differ = np.flatnonzero((first != second) & ~np.isnan(first))  # NaN differs even from NaN
        if len(differ):
            most = differ[np.abs(second - first)[differ].argmax()]
            keys = after.frame.iloc[most].drop(["value", "low", "high"], errors="ignore").dropna()
            print(
                f"differs: {len(differ)} of {len(first)} numbers, by {abs(second[most] - first[most]):.2g} at most "
                f"({', '.join(f'{name} {key}' for name, key in keys.items())}: {first[most]:.6g} -> {second[most]:.6g})"
            )
        else:
            print(f"same: all {len(first)} numbers are those of the first run")
        if _task_of(before) != _task_of(after):
            print("  changed since then: the code of the task")
        # A folder's whole path, which its name in the first run may be a part of.
        first_path, path = (table.provenance.settings.get("model") for table in (before, after))
        for entry in ("versions", "model"):
            old, new = getattr(before.provenance, entry), getattr(after.provenance, entry)
            for name in old.keys() | new.keys():
                if old.get(name) != new.get(name) and not (name == "name" and path == first_path is not None):
                    print(f"  changed since then: {name}, {old.get(name)} -> {new.get(name)}")
        return None

    def _called(self, before: Table) -> Table:
        """The table that the same call of a public function returns now."""
        classes = {name: public for name in ac.__all__ if isinstance(public := getattr(ac, name), type)}
        call, saved = Call.load(self.run / FOLDER, classes), before.provenance.model
        function: Any = getattr(ac, call.function, None) if call.function in ac.__all__ else None
        if not hasattr(function, "runs_a_model"):
            raise ValueError(f"{call.function!r} is no function of align_circuits that runs a model: call it in Python")
        dtype, name = getattr(torch, saved["dtype"]), self.model or saved["name"]
        revision = None if self.model or Path(name).exists() else saved.get("revision")
        try:
            model = load(name, saved["device"], dtype, revision=revision, quantization=saved.get("quantization"))
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"the model of this table cannot be loaded by its name ({error}): give --model, a folder or file that "
                "holds it; one that was only in memory, such as a planted circuit, is measured again in Python"
            ) from error
        return function(model, **call.arguments)

    def _verb(self, before: Table, folder: Path) -> Verb:
        """The verb that wrote a table, with its settings."""
        name, settings = before.provenance.verb, before.provenance.settings
        repeated: Any = verb_class(name) if name in VERBS else None
        if not hasattr(repeated, "from_settings") or not {"model", "models", "methods"} & settings.keys():
            raise ValueError(
                f"{str(self.run)!r} was written by {name!r} or from Python, without the settings to repeat it: give a "
                "folder that another verb of align-circuits wrote, or a table as a function returned it"
            )
        if (own := settings.get("own_task")) != self.task and None in (own, self.task):
            raise ValueError(
                f"--task {self.task}: the run was not made with --task; leave it out"
                if own is None
                else f"the run is of the task {own}, which is code and is run only if you name it: give --task {own}"
            )
        if self.model and not isinstance(settings.get("model"), str):
            raise ValueError(f"--model {self.model}: this run of {name!r} names no single model; leave it out")
        try:
            given = {"own_task": self.task} if own else {}
            given |= {"model": self.model} if self.model else {}
            verb = repeated.from_settings({**settings, **given}, folder)
            # The settings come from a file, past the parser that checks options.
            for option, kind in get_type_hints(repeated).items():
                check_argument(name, option, getattr(verb, option), kind)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"the settings in {str(self.run / 'provenance.json')!r} cannot be used ({error}): give the verb anew"
            ) from error
        return verb


def _task_of(table: Table) -> str | None:
    """What tells the code of a task of the user's own."""
    task = table.provenance.data.get("task")
    return task.get("identity") if isinstance(task, dict) else None


def _with_rows_of(before: Table, after: Table) -> Table:
    """The rows of a table that another one has too, in its order, where it has them all: it may be a selection."""
    if before.keys != after.keys:
        return after
    rows_after = after.frame[after.keys].assign(_place=np.arange(len(after)))
    chosen: Any = before.frame[before.keys].merge(rows_after, how="left", on=before.keys)["_place"]
    if chosen.isna().any() or len(chosen) != len(before):
        return after
    return replace(after, frame=after.frame.iloc[chosen.astype(int)].reset_index(drop=True), values=None, weights=None)
