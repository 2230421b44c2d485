"""The checkpoint of a training run: one safetensors file in its folder, replaced as a whole."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from align_circuits.jobs.files import replacing, writable_folder
from align_circuits.jobs.locks import locked, new_file

NAME = "checkpoint.safetensors"

PATIENCE_S = 5.0
"""For how long a run waits for another process in its folder: one that only loads a finished run is soon done."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rest of a run depends on."""

    step: int
    loss_sum: float
    """The sum of the losses since the last row of the log."""
    log: list[dict[str, Any]]
    """The rows of the log so far, from column to number."""
    tensors: Mapping[str, Shaped[Tensor, "..."]]
    """The state of the model and the optimisers, by name."""


@contextmanager
def run_folder(path: str | Path) -> Iterator[Path]:
    """Yields a folder that no other process trains in; the system releases it when this process ends in any way.

    Raises:
        ValueError: The folder cannot be written, or another process trains there.
    """
    folder = writable_folder(path)
    # Jobs that build on one pretrained model open its folder at the same time, each only to load the finished run.
    with locked(folder / ".lock", make=new_file, seconds=PATIENCE_S) as mine:
        if not mine:
            raise ValueError(f"another process is training in {str(path)!r}: wait for it, or give another folder")
        for pattern in (".*.partial", ".tmp*"):  # what a killed process was writing: `replacing`, safetensors itself
            for abandoned in folder.glob(pattern):
                abandoned.unlink()
        yield folder


def save_checkpoint(folder: Path, settings: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Replaces the checkpoint in a folder, and `log.csv` beside it.

    A process that dies meanwhile leaves the earlier checkpoint whole, since a rename is atomic. The log is written
    first: a run that goes on from the earlier checkpoint writes the same rows again, and none is ever missing.
    """
    with replacing(folder / "log.csv") as path:
        pd.DataFrame(checkpoint.log).to_csv(path, index=False, na_rep="nan")
    progress = {"step": checkpoint.step, "loss_sum": checkpoint.loss_sum, "log": checkpoint.log}
    # safetensors refuses strided tensors.
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    with replacing(folder / NAME) as path:
        save_file(tensors, path, {"settings": json.dumps(settings), "progress": json.dumps(progress)})
        with path.open("rb") as file:
            os.fsync(file.fileno())  # otherwise the new name could reach the disk before the data does


def load_checkpoint(folder: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
    """Returns the checkpoint that `save_checkpoint` wrote to a folder, on the CPU, or None where there is none.

    Raises:
        ValueError: The file is broken or no checkpoint, or is that of a run with other settings.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            saved, progress = (json.loads(file.metadata()[name]) for name in ("settings", "progress"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        # By way of JSON, as the saved ones went: tuples become lists, and keys texts.
        if not (differences := list(_differences(saved, json.loads(json.dumps(settings))))):
            return Checkpoint(**progress, tensors=tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is broken or no checkpoint ({error}): delete it to start anew, or give another folder"
        ) from error
    raise ValueError(f"{str(folder)!r} holds another run ({'; '.join(differences)}): give another folder, or delete it")


def _differences(saved: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings in which two runs differ."""
    for name in sorted(saved.keys() | given.keys()):
        old, new = saved.get(name), given.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new and name == "code_version":  # a hash, which tells people nothing
            yield "code of the model or of this package, or a version of a library, has changed"
        elif old != new:
            yield f"{prefix}{name} was {old!r}, now {new!r}"
