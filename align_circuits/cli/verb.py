"""The base classes of the verbs, and what they write and print."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from align_circuits.files import writable_folder
from align_circuits.hooks.heads import Head
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.prompts.prompts import Prompts
from align_circuits.report.page import write_report
from align_circuits.run.options import RunOptions
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

METRICS = ("align_query", "align_key", "lookup", "induction", "previous", "duplicate")
"""The metrics of heads in reports, in this order."""

SMALL = 20_000_000
"""Models with fewer parameters run on one thread by default."""


class Verb(ABC):
    """A command with its options; calling it runs it."""

    @abstractmethod
    def __call__(self) -> None:
        """Runs the verb."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder for the results."""

    def with_defaults(self, arguments: Sequence[str]) -> "Verb":  # noqa: ARG002 - for subclasses
        """Returns the verb with the defaults that depend on other options."""
        return self


@dataclass(frozen=True)
class PromptVerb(Verb):
    """A verb that needs a model, the prompts of a task, and a folder for the results."""

    model: str = "planted"
    """A folder, a GGUF file, a hub name, "toy-llama", "smollm2" (a pretrained Llama, if its package is installed), or
    "planted": a circuit built by hand for the task."""
    task: tyro.conf.OmitArgPrefixes[Seq2SeqTask] = field(default_factory=Seq2SeqTask)
    """The task that prompts are sampled from."""
    n: int = 64
    """How many prompts."""
    seed: int = 0
    """Of the prompts, and of the positions of a planted circuit's heads."""
    out: Path = Path("runs/latest")
    """The folder for the results."""
    options: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)
    """How the model is run."""
    device: str | None = None
    """Such as "cuda"; by default the GPU, if there is one."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Of the weights; by default as they are stored."""
    threads: int | None = None
    """Of the CPU. By default one for models below twenty million parameters and all cores for others: small models take
    nearly half the time with two threads on an idle machine, but many times as long on a busy one."""

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return self.out

    def prepare(self) -> tuple[Any, Prompts]:
        """Loads the model and samples the prompts; bad input is refused before any long work."""
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads}: give at least 1, or leave it out")
        writable_folder(self.out)
        if self.model == "planted":
            if self.device or self.dtype:
                raise ValueError("the planted circuit runs on the CPU in float32: leave out --device and --dtype")
            model: Any = planted_circuit(self.task, seed=self.seed)
        else:
            model = load(self.model, device=self.device, dtype=getattr(torch, self.dtype) if self.dtype else None)
        small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
        if threads := self.threads or int(small):  # threads that wait for each other lose most of the time
            torch.set_num_threads(threads)
        if model.tokenizer is None:
            raise ValueError(
                f"{self.model!r} has no tokenizer, but the task is written in the tokens of one: add it to the folder"
            )
        return model, self.task.sample(self.n, model.tokenizer, seed=self.seed)

    def finish(self, verb: str, table: Table, **report: Any) -> None:
        """Writes the table, the report and the provenance."""
        provenance = replace(table.provenance, verb=verb, settings=as_json(self))
        write_results(self.out, replace(table, provenance=provenance), **report)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], out: Path) -> "PromptVerb":
        """Makes a verb from the settings that `finish` wrote."""
        values: dict[str, Any] = {"out": out}
        for option in fields(cls):
            if option.name in settings and option.name != "out":
                value = settings[option.name]
                if option.default_factory is not MISSING:  # a task, a configuration, or options
                    parts = {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()}
                    value = option.default_factory(**parts)  # pyright: ignore[reportCallIssue]
                values[option.name] = value
        return cls(**values)


def write_results(out: Path, table: Table, **report: Any) -> None:
    """Writes the report, the table and its provenance, which comes last: a folder that has it is complete."""
    (out / "provenance.json").unlink(missing_ok=True)
    path = write_report(out / "report.html", provenance=table.provenance, **report)
    table.save(out)
    print(f"\nreport: {path}")


def as_json(settings: Any) -> dict[str, Any]:
    """Returns a dataclass as JSON."""
    return json.loads(json.dumps(asdict(settings), default=str))


def interval(row: Any) -> str:
    """Returns the value of a row with its interval."""
    return f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def head_value(row: Any, roles: Mapping[Head, str | None] | None = None) -> str:
    """Returns the head of a row with its value and, in a planted circuit, its role."""
    text = f"L{row['layer']}H{row['head']} {interval(row)}"
    return text if roles is None else f"{text} ({roles.get((row['layer'], row['head'])) or 'none'})"


def first_token(table: Table, predictor: str = "model") -> str:
    """Returns a predictor's accuracy on the first tokens of phrases, with its interval."""
    return interval(table.where(metric="accuracy", kind="first", predictor=predictor).frame.iloc[0])
