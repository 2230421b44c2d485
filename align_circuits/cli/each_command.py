"""`align-circuits each`: one command for several models, seeds and settings, each with results of its own."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from hashlib import file_digest, sha256
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro
from markupsafe import Markup

from align_circuits.cli.command_base import PromptVerb, Verb
from align_circuits.cli.entry import PROGRAM, main, parse_verb
from align_circuits.cli.folders import Results
from align_circuits.cli.workers import Workers
from align_circuits.jobs.files import inside, is_path, replacing
from align_circuits.jobs.identity import told
from align_circuits.jobs.jobs import Job, run_jobs
from align_circuits.models.folder_checks import settings_in
from align_circuits.prompts.token_html import several
from align_circuits.report.page import Section
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table

OUTPUT = "output.txt"
"""What a verb printed, beside its results."""


@dataclass(frozen=True)
class Each(Verb):
    """Runs a verb for each of several models, seeds and variants, as jobs that resume."""

    command: tyro.conf.Positional[tuple[str, ...]]
    """After "--": a verb that takes a model, with its options, such as: -- tune --steps 100."""
    models: tuple[str, ...] = ()
    """The models to run the verb on, one run each; replaces the --model of the verb."""
    seeds: tuple[int, ...] = (0,)
    """In place of --seed. With several, means over seeds and their 95% t intervals are in the folder over_seeds."""
    variants: tuple[str, ...] = ("",)
    """Further options, one text for each variant, such as --variants "x-len=3" "x-len=5 style=marked"."""
    workers: tyro.conf.OmitArgPrefixes[Workers] = field(default_factory=Workers)
    """Who runs the jobs; `status` and `collect` follow them from elsewhere."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        runs = list(self.runs(results.folder))
        count = self.workers.jobs
        jobs = [Job(f"{__name__}:run_once", run, None) for run in runs]
        with self.workers.executor(results.folder) as executor:
            done = run_jobs(jobs, inside(results.folder, "jobs"), executor=executor, processes=count)
        if done.failures:
            first = done.failures[0]
            raise ValueError(
                f"{len(done.failures)} of {len(runs)} runs failed, the first ({_name(first.job.config)}) with "
                f"{first.last_line!r}; finished runs are kept, and the same command with --out "
                f"{results.folder} goes on"
            )
        tables = [_table_of(run, rows) for run, rows in zip(runs, done.rows, strict=True)]
        frames = [table.frame.assign(**_keys(run)) for table, run in zip(tables, runs, strict=True)]
        rows = pd.concat(frames, ignore_index=True)
        keys = [*_keys(runs[0]), *(column for column in tables[0].frame if column not in VALUES)]
        made = {"tables": [asdict(table.provenance) for table in tables]}
        provenance = Provenance("each", self.settings, model={}, data=made)
        table = Table(rows.loc[:, [*keys, *(column for column in rows if column not in keys)]], provenance)
        sections: list[Section] = [("Runs", "Each has a report of its own.", _links(runs, results))]
        if len(self.seeds) > 1:
            means = table.over_seeds()
            means.save(results.new / "over_seeds")
            of_seeds: Any = rows.groupby([key for key in keys if key != "seed"], dropna=False)["value"]
            told = "Means with 95% t intervals; n: the number of seeds."
            if (of_seeds.nunique(dropna=False) == 1).all():
                told = "No intervals: all seeds gave the same numbers."
            sections.append(("Over seeds", told, means))
        for run in runs:
            text = (Path(run["folder"]) / OUTPUT).read_text(encoding="utf-8")
            print(f"== {_name(run)}: {run['folder']}\n{text}")
        verb = self.command[0]
        summary = f"{verb} for {several(len(runs), 'run')}: {', '.join(map(_name, runs))}."
        self.finish(results, table, title=f"{verb}: {several(len(runs), 'run')}", summary=summary, sections=sections)

    def runs(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Yields what is run, as the arguments of `run_once`."""
        if not self.command:
            raise ValueError('no verb: give one behind "--", such as: each --seeds 0 1 2 -- tune --steps 100')
        for option in ("models", "seeds", "variants"):
            given = getattr(self, option)
            if repeated := [value for value in given if given.count(value) > 1]:
                raise ValueError(f"--{option} has {repeated[0]!r} twice: give each once, or its runs would count twice")
        words = [*self.command[1:], *(word for variant in self.variants for word in _options(variant))]
        taken = {"--out", "--overwrite", "--jobs", "--on", "--seed"} | ({"--model"} if self.models else set())
        if refused := sorted(taken & {word.partition("=")[0] for word in words}):
            raise ValueError(
                f"{refused[0]} behind the verb: each run has its own; give it, or --models and --seeds, to each"
            )
        wanted = [*product(self.models or (None,), self.variants, self.seeds)]
        names = [_folder_name(*run) for run in wanted]
        for (model, variant, seed), name in zip(wanted, names, strict=True):
            if names.count(name) > 1:  # "a/b" and "a-b"
                name += "_" + sha256(repr((model, variant)).encode()).hexdigest()[:8]
            run = {"command": list(self.command), "model": model, "variant": variant, "run_seed": seed}
            verb = _parsed(_arguments(**run))
            named = [str(value) for value in (verb.model, verb.tokenizer, verb.prompts) if value is not None]
            read = {name: _contents(Path(name)) for name in named if name and is_path(name) and Path(name).exists()}
            if verb.own_task is not None:
                read[verb.own_task] = told(f"the results of --task {verb.own_task}", verb.source)
            yield {**run, "folder": str(inside(folder, name)), "read": read}


def _folder_name(model: str | None, variant: str, seed: int) -> str:
    names = [model or "", variant, f"seed-{seed}"]
    return "_".join(name for name in (re.sub(r"[^\w.]+", "-", raw).strip("-.") for raw in names) if name)


def _table_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table in the folder of a run that is done; made anew if another command has written there meanwhile."""
    folder = Path(run["folder"])
    values = pd.DataFrame(rows, columns=["value"])["value"].to_numpy(dtype=float)
    earlier = Table.load(folder) if (folder / "provenance.json").is_file() else None
    if earlier is None or not np.array_equal(earlier.frame["value"].to_numpy(dtype=float), values, equal_nan=True):
        run_once(**run)
    return Table.load(folder)


def run_once(
    *,
    command: Sequence[str],
    model: str | None,
    variant: str,
    run_seed: int,
    folder: str,
    read: Mapping[str, str],  # noqa: ARG001 - it tells jobs apart
) -> pd.DataFrame:
    """Runs a verb with one model and seed, which writes its results into a folder; the function of a job.

    `read` has a hash of each file, folder or task that is named. Returns the rows of its table; an error of the verb is
    a RuntimeError.
    """
    printed, complaint = StringIO(), StringIO()
    with redirect_stdout(printed), redirect_stderr(complaint):
        arguments = _arguments(command, model, variant, run_seed)
        # A killed job may have left results of its own in the folder.
        status = main([*arguments, "--overwrite", "--out", folder])
    if status != 0:
        # The error is the last line; warnings may stand above it.
        said = complaint.getvalue().strip().splitlines() or [f"exit status {status}"]
        raise RuntimeError(said[-1].removeprefix(f"{PROGRAM}: "))
    with replacing(Path(folder) / OUTPUT) as temporary:
        temporary.write_text(printed.getvalue(), encoding="utf-8")
    return Table.load(folder).frame


def _options(variant: str) -> list[str]:
    """The options of a variant, NAME=VALUE each, as words of a command line."""
    words = []
    for word in shlex.split(variant):
        name, equals, value = word.partition("=")
        if not name or name.startswith("-") or not equals:
            raise ValueError(f"--variants {variant!r}: {word!r} is not NAME=VALUE, such as x-len=3")
        words += [f"--{name}", value]
    return words


def _contents(path: Path, above: Sequence[Path] = ()) -> str:
    """A hash of a file, or of the files of a folder; of an adapter with those of its base model, if that is here."""
    sha = sha256()
    if (path / "adapter_config.json").is_file() and path.resolve() not in above:
        name = str(settings_in(path, "adapter_config.json").get("base_model_name_or_path"))
        # As `load` reads it: a folder within that of the adapter comes first.
        if base := next((each for each in (path / name, Path(name)) if is_path(name) and each.exists()), None):
            sha.update(_contents(base, [*above, path.resolve()]).encode())
    for entry in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if entry.is_file():
            with entry.open("rb") as file:
                sha.update(str(entry).encode() + file_digest(file, "sha256").digest())
    return sha.hexdigest()[:16]


def _arguments(command: Sequence[str], model: str | None, variant: str, run_seed: int) -> list[str]:
    return [*command, *_options(variant), *(() if model is None else ("--model", model)), "--seed", str(run_seed)]


def _parsed(arguments: Sequence[str]) -> PromptVerb:
    """The verb of a run; wrong options end as they do without `each`."""
    verbs = _verbs()
    if arguments[0] not in verbs:
        raise ValueError(f"no verb {arguments[0]!r} for several models or seeds: give one of {', '.join(verbs)}")
    return parse_verb(*arguments)


def _verbs() -> dict[str, type[PromptVerb]]:
    """The verbs that take a model and a seed. Imported by name: so the version of a job's code covers theirs."""
    from align_circuits.cli.ablate_command import Ablate
    from align_circuits.cli.attribute_command import Attribute
    from align_circuits.cli.evaluate_command import Evaluate
    from align_circuits.cli.localize_command import Localize
    from align_circuits.cli.patch_command import Patch
    from align_circuits.cli.score_command import Score
    from align_circuits.cli.tune_command import Tune

    return {verb.__name__.lower(): verb for verb in (Score, Evaluate, Ablate, Patch, Attribute, Localize, Tune)}


def _keys(run: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that tell the rows of a run from those of others."""
    named = {"model": run["model"], "variant": run["variant"] or None, "seed": run["run_seed"]}
    return {name: value for name, value in named.items() if value is not None}


def _name(run: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if name != "seed" else f"seed {value}" for name, value in _keys(run).items())


def _links(runs: Sequence[dict[str, Any]], results: Results) -> str:
    """A list of the reports, with paths from the folder of all."""
    row = Markup('<li><a href="{}">{}</a></li>')
    folders = {_name(run): Path(run["folder"]).relative_to(results.folder) for run in runs}
    return f"<ul>{''.join(row.format(folder / 'report.html', name) for name, folder in folders.items())}</ul>"
