"""How a model is run, whatever is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from align_circuits.checks import checked

Engine = Literal["auto", "fast", "reference"]


@checked
@dataclass(frozen=True)
class RunOptions:
    """How a model is run on prompts. It changes time and memory; results agree up to rounding.

    Raises:
        ValueError: An unknown engine, or a batch size below 1.
    """

    engine: Engine = "auto"
    """`"fast"` is Hugging Face's own attention on the same weights, or a hand-built model's parts without its hooks;
    `"reference"` is TransformerLens's hooks; `"auto"` takes the fast one wherever it applies and every hook fires.
    Edited runs are replayed under `"fast"` and `"auto"` where they can be (`run.edited_runs.run_edited`)."""
    batch_size: int | Literal["auto"] = "auto"
    """Prompts at a time; `"auto"` fits it to the device and halves it when memory runs out."""
    progress: bool | Literal["auto"] = "auto"
    """Whether sweeps of more than a second draw a bar with the time left; `"auto"`: on a terminal and in a notebook."""
    cache_dir: str | Path | None = None
    """A folder that keeps the parts of sweeps over patches, ablations, edges, paths and prompts: the same call goes on
    where a killed one stopped, and processes that make it at once share the parts. A part of a sweep over heads holds
    some of them on some of the prompts. Another call has its own parts: all that the numbers rest on names them
    (`jobs.identity`). None keeps nothing."""

    def __post_init__(self):
        if self.engine not in ("auto", "fast", "reference"):
            raise ValueError(f"engine={self.engine!r}: choose 'auto', 'fast' or 'reference'")
        if self.progress not in (True, False, "auto"):
            raise ValueError(f"progress={self.progress!r}: choose True, False or 'auto'")
        if self.batch_size != "auto" and (isinstance(self.batch_size, str) or self.batch_size < 1):
            raise ValueError(f"batch_size={self.batch_size!r}: give a positive number of prompts, or 'auto'")

    @property
    def identity(self) -> dict[str, Any]:
        """The options that can change a number, be it in its last bits."""
        return {name: value for name, value in vars(self).items() if name not in ("progress", "cache_dir")}

    def prompts_at_once(self, fitting: int) -> int:
        """Returns the batch size, given how many prompts fit."""
        return fitting if self.batch_size == "auto" else self.batch_size

    def halve_to(self, tokens: int) -> int | None:
        """Returns down to how many tokens a batch may be halved when memory runs out; None: a given size stays."""
        return tokens if self.batch_size == "auto" else None


def progress_bar(options: RunOptions, total: int, unit: str) -> "tqdm[Any]":
    """Returns a bar that appears after a second, unless the output is a log or the options say otherwise."""
    disable = None if options.progress == "auto" else not options.progress  # None: where there is no terminal
    return tqdm(total=total, disable=disable, delay=1.0, unit=unit, leave=False)
