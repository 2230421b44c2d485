"""The base classes of the verbs, and what they write and print."""

import json
import shlex
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import tyro

from align_circuits.cli.folders import Results
from align_circuits.cli.own_task import identity_of_task, load_task
from align_circuits.heads.localization_rows import formatted
from align_circuits.hooks.compat import bridges
from align_circuits.hooks.head_names import Head
from align_circuits.models.loading import BUNDLED, load
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.models.quantization import Quantization
from align_circuits.prompts.jsonl import read_jsonl
from align_circuits.prompts.prompts import WRONG, Prompts
from align_circuits.prompts.token_html import several
from align_circuits.report import plots
from align_circuits.report.page import Section, TooLarge, write_report
from align_circuits.report.plots.figure_parts import kinds_of
from align_circuits.run.options import Engine, RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import Task, sampled

METRICS = ("align_query", "align_key", "lookup", "induction", "previous", "duplicate")
"""The metrics of heads in reports, in this order."""

MOST_THREADS = 1024
"""More would take the memory of the machine for their stacks."""

SMALL = 20_000_000
"""Models with fewer parameters run on one thread by default."""


@dataclass(frozen=True, kw_only=True)
class Verb(ABC):
    """A command with its options; calling it runs it."""

    out: Path | None = None
    """The folder for the results; by default a new one, runs/VERB/0001 and so on, to which runs/VERB/latest points."""
    overwrite: bool = False
    """Whether --out may hold the results of an earlier run, which are replaced, or other files: those that have the
    name of a result are replaced too, all others stay."""

    @abstractmethod
    def __call__(self, results: Results) -> str | None:
        """Runs the verb and writes its results into a folder; returns what is wrong with them, if something is."""

    @property
    def verb(self) -> str:
        """The name of the verb."""
        return type(self).__name__.lower()

    @property
    def settings(self) -> dict[str, Any]:
        """The options as JSON."""
        return json.loads(json.dumps(asdict(self), default=str))

    @property
    def folder(self) -> Path | None:
        """The folder for the results, or None for a new numbered one."""
        return self.out

    @property
    def renews(self) -> dict[str, Any] | None:
        """The verb and settings of earlier results that are replaced without --overwrite; None: of none."""
        return None

    @property
    def facts(self) -> dict[str, str]:
        """What the report says on top."""
        return {}

    def provenance_of(self, table: Table) -> Provenance:
        """The provenance of a table that the verb writes."""
        return replace(table.provenance, verb=self.verb, settings=self.settings)

    def with_defaults(self, arguments: Sequence[str]) -> "Verb":  # noqa: ARG002 - for subclasses
        """Returns the verb with the defaults that depend on other options."""
        return self

    def finish(self, results: Results, table: Table, *, settings: Mapping[str, Any] | None = None, **report: Any):
        """Writes the report, and the table with the verb and its settings, by default all of them."""
        written = self.provenance_of(table)
        written = written if settings is None else replace(written, settings=dict(settings))
        replace(table, provenance=written, call=None).save(results.new)
        try:
            write_report(results.new / "report.html", provenance=written, **{"facts": self.facts, **report})
        except TooLarge as error:  # what was measured stays
            print(f"\nno report: {error}\nthe numbers: {results.folder / 'table.csv'}", file=sys.stderr)
        else:
            print(f"\nreport: {results.folder / 'report.html'}")


@dataclass(frozen=True)
class PromptVerb(Verb):
    """A verb that needs a model, the prompts of a task, and a folder for the results."""

    model: str = "planted"
    """A folder, a GGUF file, a hub name, "sparse-gpt2", "toy-llama", "toy-llama-ica" (the same tuned in context),
    "smollm2" and "smollm2-ica" (a pretrained Llama, if its package is installed), or "planted": a circuit built by hand
    for the task."""
    tokenizer: str | None = None
    """A folder or GGUF file with the tokenizer; by default that of the model."""
    revision: str | None = None
    """The branch, tag or commit on the hub."""
    prompts: Path | None = None
    """A file with a JSON object a line, such as {"text": "Ann met Bob; Bob saw", "answer": " Ann", "corrupted": "Ann
    met Bob; Ann saw", "positions": {"name": "Ann", "other": [" Bob", 0]}, "relations": {"finds the name": {"query":
    "END", "keys": ["name"], "candidates": ["name", "other"]}}}; all but "text" may be left out. See
    docs/your-own-data.md. By default prompts of the task are sampled."""
    own_task: Annotated[str | None, tyro.conf.arg(name="task", metavar="MODULE:CLASS")] = None
    """A task of your own, as package.module:Class or path/file.py:Class: see
    docs/write-your-own-task.md. Its code is run. By default the translation task, which the task options set."""
    task: tyro.conf.OmitArgPrefixes[Seq2SeqTask] = field(default_factory=Seq2SeqTask)
    """The translation task that prompts are sampled from, without --prompts and --task."""
    n: int | None = None
    """How many prompts: by default 64 if a task samples them, and all of a file, or its first N lines."""
    targets: Literal["all", "first"] = "all"
    """Of a file's answers of several tokens, whether all tokens count or the first alone."""
    seed: int = 0
    """The seed of all that is drawn, such as a task's prompts; a file of prompts is read as it stands."""
    engine: Engine = "auto"
    """"fast" is Hugging Face's attention, "reference" TransformerLens's hooks; "auto" takes the fast one if it can."""
    batch_size: int | Literal["auto"] = "auto"
    """Prompts at a time."""
    device: str | None = None
    """Where the model runs, such as "cuda"; by default the GPU, if there is one."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """The data type of the weights: by default float32 for the models of this package, for others as they are stored,
    but float32 for bfloat16 on a device that has no instructions for it."""
    device_map: str | None = None
    """"auto", "balanced" or "sequential" spreads the layers over all GPUs, in place of --device."""
    quantization: Quantization | None = None
    """Reads the weights inside the layers into 4 or 8 bits each (bitsandbytes)."""
    threads: int | None = None
    """Threads of the CPU. By default one for models below twenty million parameters and all cores for others: with two
    threads small models take nearly half the time on an idle machine, but many times as long on a busy one."""

    @property
    def options(self) -> RunOptions:
        """How the model is run."""
        return RunOptions(self.engine, self.batch_size)

    @property
    def wrong_for(self) -> str | None:
        """The option that needs wrong answers, as it was given; None if none was."""
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """The options as JSON; files and folders with their whole paths, so that `rerun` finds them from anywhere."""
        settings = super().settings
        for name in ("prompts", "model", "tokenizer"):
            value = settings[name]
            if value is not None and value not in BUNDLED and value != "planted" and Path(value).exists():
                settings[name] = str(Path(value).resolve())
        if self.own_task is not None and (parts := self.own_task.rpartition(":"))[0].endswith(".py"):
            settings["own_task"] = f"{Path(parts[0]).resolve()}:{parts[2]}"
        return settings

    @cached_property
    def source(self) -> Task:
        """The task that prompts are sampled from, if they come from no file."""
        own = "--task" if self.own_task is not None else "--prompts" if self.prompts is not None else None
        if own and (options := [*_options(self.task, Seq2SeqTask())]):
            raise ValueError(f"{options[0]} is an option of the translation task: leave it out, or {own}")
        if self.own_task is None:
            return self.task
        return load_task(self.own_task)

    def provenance_of(self, table: Table) -> Provenance:
        """The provenance of a table that the verb writes, with what tells the code of a task of the user's own.

        And with what was warned of when prompts were read.
        """
        made = super().provenance_of(table)
        data = dict(made.data)
        if warned := self.read.get("warnings"):
            data["warnings"] = warned
        if self.own_task is not None:
            own = {"class": made.settings["own_task"], "identity": identity_of_task(self.source)}
            data["task"] = {**data.get("task", {}), **own}
        return replace(made, data=data)

    @cached_property
    def read(self) -> dict[str, Any]:
        """What reading a file of prompts told: `warnings`, and how many `groups` they fall in (0: none)."""
        return {}

    @property
    def count(self) -> int:
        """How many prompts are sampled from a task."""
        return 64 if self.n is None else self.n

    def prepare(self, *, with_corrupted: bool = False) -> tuple[Any, Prompts, Prompts | None]:
        """Loads the model and makes the prompts, clean ones and, if asked for, their partners if a file has any.

        Bad input is refused before any long work.
        """
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"--threads {self.threads}: give 1 to {MOST_THREADS}, or leave it out")
        if self.prompts is not None:
            read_jsonl(self.prompts)  # refuses what is no such file
        elif self.targets != "all":
            raise ValueError("--targets first is about the answers of a file: leave it out, or give --prompts")
        options = self.options  # refuses a bad batch size before the model is loaded
        assert options
        own = "--prompts" if self.prompts is not None else "--task" if self.own_task is not None else None
        if self.prompts is not None and self.own_task is not None:
            raise ValueError("--prompts and --task: give one of them, a file of prompts or a task that samples them")
        if self.model == "planted" and own:
            raise ValueError(
                f"{own} needs --model, such as smollm2: the planted circuit, which is the default, knows the prompts "
                "of the translation task alone"
            )
        source = self.source  # refuses a task that cannot be imported before the model is loaded
        if self.model == "planted":
            names = ("device", "dtype", "device_map", "quantization", "tokenizer", "revision")
            if given := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]:
                raise ValueError(
                    "the planted circuit runs on the CPU in float32, with a tokenizer of its own: leave out "
                    + ", ".join(given)
                )
            model = planted_circuit(self.task, seed=self.seed)
        else:
            dtype = getattr(torch, self.dtype) if self.dtype else None
            model = load(
                self.model,
                self.device,
                dtype,
                self.tokenizer,
                self.revision,
                device_map=self.device_map,
                quantization=self.quantization,
            )
        small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
        if threads := self.threads or int(small):  # threads that wait for each other lose most of the time
            torch.set_num_threads(threads)
        loaded = _how_loaded(self.model, model)
        if model.tokenizer is None:
            raise ValueError(
                f"{self.model!r} has no tokenizer, but prompts are written in the tokens of one: give --tokenizer, a "
                "folder that has it"
            )
        if self.prompts is None:
            clean, corrupted = sampled(source, self.count, model.tokenizer, self.seed), None
        else:
            with warnings.catch_warnings(record=True) as doubts:
                warnings.simplefilter("always")
                clean, corrupted = Prompts.from_jsonl(self.prompts, model.tokenizer, with_corrupted=with_corrupted)
            for doubt in doubts:
                warnings.warn_explicit(doubt.message, doubt.category, doubt.filename, doubt.lineno)
            self.read["warnings"] = [str(doubt.message) for doubt in doubts]
            if self.n is not None and not 1 <= self.n <= len(clean):
                count = len(clean)
                raise ValueError(f"--n {self.n}: {str(self.prompts)!r} has {count} prompts; give 1 to {count}")
            clean, corrupted = clean[: self.n], None if corrupted is None else corrupted[: self.n]
            self.read["groups"] = 0 if clean.group is None else clean.n_groups
            if self.targets == "first":
                clean = clean.select_targets(_is_first)
                corrupted = None if corrupted is None else corrupted.select_targets(_is_first)
        self._check_wrong(clean)
        print(*self.notes(clean, corrupted), loaded, sep="\n", flush=True)
        return model, clean, corrupted

    def notes(self, clean: Prompts, corrupted: Prompts | None) -> list[str]:  # noqa: ARG002 - for subclasses
        """Returns what the prompts do not allow, which is printed before anything else."""
        return []

    def _check_wrong(self, prompts: Prompts) -> None:
        """Refuses metrics that need wrong answers for prompts without them."""
        if (asked := self.wrong_for) is None:
            return
        if WRONG not in prompts.targets:
            remedy = 'give --prompts, a file with a "wrong" in each line, or choose another metric'
            if self.prompts is not None:
                remedy = f'give each line of {str(self.prompts)!r} a "wrong", or choose another metric'
            raise ValueError(f"{asked} compares with a wrong answer, and these prompts have none: {remedy}")
        if self.prompts is not None and (unknown := prompts.targets[WRONG].isna().to_numpy()).any():
            of_targets = prompts.column("prompt")
            prompt = int(of_targets[int(unknown.argmax())])
            count, line = int((of_targets == prompt).sum()), read_jsonl(self.prompts)[1][prompt]
            raise ValueError(
                f"{str(self.prompts)!r}, line {line}: the answer has {count} tokens and the wrong one another "
                f"number, or some of the same, so that {asked} can compare their first tokens alone: add --targets "
                "first, or give answers of equally many tokens, none in common"
            )

    @property
    def corruption(self) -> str:
        """How corrupted prompts differ from clean ones."""
        if self.prompts is not None:
            return 'Corrupted prompts are the "corrupted" texts of the file.'
        if self.own_task is not None:
            return f"Corrupted prompts are those of {self.own_task}."
        return "Corrupted prompts have another test input: another symbol is to be translated at every position."

    def prepare_pair(self, **settings: Any) -> tuple[Any, Pair]:
        """Loads the model and makes a pair: of the lines of a file, or of a task's prompts and their partners."""
        model, clean, corrupted = self.prepare(with_corrupted=True)
        if self.prompts is None:
            clean, corrupted = self.source.pairs(clean, self.seed)
        if corrupted is None:
            raise ValueError(
                f'{str(self.prompts)!r} has no corrupted texts to patch from: give each line a "corrupted" and an '
                '"answer"'
            )
        return model, Pair(clean, corrupted, **settings)

    @property
    def facts(self) -> dict[str, str]:
        """What the report says on top: how many prompts, what was warned of, the command that repeats the run."""
        number = str(self.count)
        if self.prompts is not None:
            _, lines = read_jsonl(self.prompts)
            number = f"{self.n or f'all {len(lines)}'} of {self.prompts}"
            number += f", in {several(groups, 'group')}" if (groups := self.read.get("groups")) else ""
        warned = " ".join(f"{warned}." for warned in self.read.get("warnings", ()))
        task = {} if self.own_task is None else {"task": self.own_task}  # else that of the provenance
        return {**task, "prompts": number, "warning": warned, "command": command_line(self.verb, self, self.default)}

    @property
    def default(self) -> "PromptVerb":
        """The verb as a command without options gives it; what differs stands in the report's command."""
        return type(self)()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], out: Path) -> "PromptVerb":
        """Makes a verb from its `settings`."""
        default = cls(out=out)
        if unknown := sorted(settings.keys() - {option.name for option in fields(cls)}):
            raise ValueError(f"{unknown[0]!r} is no option of {default.verb}: it was written by another version")
        # A run of an earlier version has no settings for later options: these keep their defaults.
        values = _with_tuples({name: settings[name] for name in settings.keys() - {"out", "overwrite"}})
        if values.get("prompts") is not None:
            values["prompts"] = Path(values["prompts"])
        for name in ("task", "config"):  # of `tune`
            if name in values:
                values[name] = type(getattr(default, name))(**_with_tuples(values[name]))
        return replace(default, **values)


def _with_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from JSON, with its lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def counted(prompts: Prompts, noun: str = "prompt", rest: str = "") -> str:
    """Returns how many prompts there are, and groups of related ones, over which intervals are."""
    in_groups = "" if prompts.group is None else f" in {several(prompts.n_groups, 'group')}"
    return f"{several(len(prompts), noun)}{rest}{in_groups}"


def _is_first(targets: pd.DataFrame) -> Any:
    """Which targets are first tokens of answers; a name would mean a position that is called `first`."""
    return targets["kind"] == "first"


def _how_loaded(name: str, model: Any) -> str:
    """A model's commit on the hub, its weights' data type, where they are, and in which other type they are stored."""
    read = bridges.wrapped(model)
    weights = next(read.parameters())
    stored = getattr(read, "stored_dtype", weights.dtype)
    dtype_now, dtype_stored = (str(dtype).removeprefix("torch.") for dtype in (weights.dtype, stored))
    kept = "" if dtype_now == dtype_stored else f" (stored in {dtype_stored}, which --dtype {dtype_stored} keeps)"
    revision = f", revision {read.revision[:10]}" if getattr(read, "revision", None) else ""
    return f"{name}{revision}: {dtype_now} on {weights.device}{kept}"


def command_line(verb: str, settings: Any, default: Any) -> str:
    """Returns the command that repeats a run, with what is not at its default but for where it works and writes."""
    return shlex.join(["align-circuits", *verb.split(), *_options(settings, default)])


def _options(settings: Any, default: Any) -> Iterator[str]:
    """The settings that differ from their defaults, as words of a command line."""
    for option in fields(settings):
        value, usual = getattr(settings, option.name), getattr(default, option.name)
        name = {"own_task": "task"}.get(option.name, option.name).replace("_", "-")
        if value == usual or option.name in ("out", "overwrite", "parts", "workers"):
            continue
        if is_dataclass(value):
            yield from _options(value, usual)
        elif isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list | tuple):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", str(value))


def interval(row: Any) -> str:
    """Returns the value of a row with its interval, if it has one."""
    return formatted((row["value"], row["low"], row["high"]), "")


def head_value(row: Any, roles: Mapping[Head, str | None] | None = None) -> str:
    """Returns the head of a row, or its layer and position, with its value.

    In brackets stand the share of all its attention, if the row has it, and its role in a planted circuit.
    """
    head = "" if pd.isna(row.get("head")) else f"H{row['head']}"
    position = f" at {row['position']}" if "position" in row else ""
    text = f"L{row['layer']}{head}{position} {interval(row)}"
    notes = [] if pd.isna(row.get("attention")) else [f"{row['attention']:.2f} of its attention"]
    notes += [] if roles is None else [roles.get((row["layer"], row["head"])) or "none"]
    return f"{text} ({'; '.join(notes)})" if notes else text


def accuracy_sections(table: Table, note: str = "", heading: str = "Accuracy") -> list[Section]:
    """Returns the figure of accuracy as a section; none where it would be a single dot, which the summary says."""
    places: Any = distinct(table).where(metric="accuracy").frame["offset"]
    return [(heading, note, plots.accuracy(table))] if places.isna().sum() > 1 else []


def intervals_over(table: Table) -> str:
    """Returns what the intervals of a table are over, in words; of a single prompt, that there are none."""
    known = table.frame["low"].notna().to_numpy().any()
    return f"95% intervals over {table.unit}" if known else "no intervals: take more prompts"


def distinct(table: Table) -> Table:
    """Returns a table without rows that repeat others: of answers of one token the first token is all.

    A place of targets (offset) is left out where its rows are those of a kind: place 0 of the first tokens, and place 1
    of the later ones where no phrase has a third. For tables of `evaluate` and of effects, whose kinds are all targets,
    the first ones and later ones: an experiment may have others.
    """
    if "kind" in table.keys:
        table = table.where(kind=kinds_of(table.frame))
    if "offset" not in table.keys:
        return table
    places = table.frame["offset"].dropna().unique()
    if {*places} == {0}:
        return table.where(offset=None)

    def numbers(**chosen: Any) -> list[tuple[float, int]]:
        return [*table.where(**chosen).frame[["value", "n"]].itertuples(index=False, name=None)]

    kinds = {0: "first"} | ({1: "later"} if {*places} == {0, 1} else {})
    known = {place: kind for place, kind in kinds.items() if kind in set(table.frame["kind"])}
    repeated = [place for place, kind in known.items() if numbers(offset=place) == numbers(kind=kind)]
    return table._rows(np.flatnonzero(~table.frame["offset"].isin(repeated)))


def first_token(table: Table, predictor: str = "model") -> str:
    """Returns a predictor's accuracy on the first tokens of phrases, where there are such, with its interval."""
    kind = "first" if "first" in set(table.frame["kind"]) else "all"
    return interval(table.where(metric="accuracy", kind=kind, predictor=predictor).frame.iloc[0])
