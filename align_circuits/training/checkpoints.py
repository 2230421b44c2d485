"""What a run leaves in its folder, such that it can be killed at any moment: checkpoints and a log."""

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from align_circuits.files import replacing, writable_folder

NEGATIVE = b"\xff"
"""The last byte of a negative int64: written alone, it makes the step negative, and one byte is never half there."""


class Checkpoints:
    """Two safetensors files that are overwritten in turn: while one is written, the other stands.

    Overwriting in place costs one copy into the page cache, about a tenth of filling and renaming a new file, so a
    run can afford it after every step. The step, a tensor in the file, becomes negative before anything else is written
    and gets its value after everything else is. What a process wrote before it was killed stays, in that order, so a
    file whose step is not negative is whole.

    This holds for a process that dies in any way, `kill -9` included. Where the whole machine may die, call `sync`: of
    what was written since, any part may be lost.

    One process at a time holds the folder; the system takes it back when that process dies.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any]):
        """Takes hold of a folder, and finds the newest whole checkpoint in it.

        Args:
            folder: Where the two files live; made if missing.
            about: What defines the run, as JSON: a checkpoint of another run is refused.

        Raises:
            ValueError: The folder cannot be written, is held by another process, or has a checkpoint of another run.
        """
        self.folder = writable_folder(folder)
        self._about = json.loads(json.dumps(about))
        self._paths = [self.folder / f"checkpoint-{turn}.safetensors" for turn in (0, 1)]
        self._offsets: list[dict[str, int]] = [{}, {}]
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            steps = [self._read_step(path) for path in self._paths]
        except BlockingIOError as error:
            self.close()
            raise ValueError(
                f"another process is training in {str(folder)!r}: wait for it, or give another folder"
            ) from error
        except ValueError:
            self.close()
            raise
        for unfinished in (".*.partial", ".tmp*"):  # ours, and what safetensors renames at its end
            for abandoned in self.folder.glob(unfinished):
                abandoned.unlink()
        self.step: int = max(*steps, 0)
        """The step of the newest whole checkpoint; 0 where there is none."""
        self._older = 0 if steps[0] < steps[1] else 1

    def load(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns the tensors of the newest whole checkpoint, by name, on the CPU."""
        return load_file(self._paths[1 - self._older])

    def save(self, step: int, tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
        """Writes a checkpoint over the older of the two.

        Args:
            step: Its number, at least 1.
            tensors: What to keep, by name; the shapes and dtypes of a name never change.
        """
        path, offsets = self._paths[self._older], self._offsets[self._older]
        number, torn = torch.tensor(step), torch.tensor(-1)
        if offsets.keys() == tensors.keys() | {"step"}:
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), NEGATIVE, offsets["step"] + number.nbytes - 1)
                data = [bytes_of(tensors.get(name, torn)) for name in offsets]
                _write(file.fileno(), data, min(offsets.values()))
                os.pwrite(file.fileno(), bytes_of(number), offsets["step"])
        else:
            whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            with replacing(path) as temporary:
                save_file(whole | {"step": number}, temporary, metadata={"about": json.dumps(self._about)})
            self._offsets[self._older] = _read_offsets(path)
        self.step, self._older = step, 1 - self._older

    def sync(self) -> None:
        """Waits until the files are on the disk."""
        for path in self._paths:
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def close(self) -> None:
        """Gives the folder back."""
        self._lock.close()

    def _read_step(self, path: Path) -> int:
        if not path.exists():
            return -1
        try:
            with safe_open(path, framework="pt") as file:
                there = json.loads(file.metadata()["about"])
                step = int(file.get_tensor("step"))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} is no checkpoint of a training: delete it, or give another folder"
            ) from error
        if changes := list(_changes(there, self._about)):
            raise ValueError(
                f"{str(self.folder)!r} holds another run ({'; '.join(changes)}): give another folder, or delete it"
            )
        return step


def _changes(there: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """What tells two runs apart, number by number."""
    for name in sorted(there.keys() | now.keys()):
        before, after = there.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{within}{name}.")
        elif before != after:
            yield f"{within}{name} was {before!r}, now {after!r}"


class Log:
    """Rows of numbers by step, in a CSV file where there is a path; the file never keeps half a row or a step twice."""

    def __init__(self, path: Path | None, step: int):
        """Continues an earlier log from `step` on: its later rows are dropped, at step 0 the whole log."""
        self._path = path
        self._lines: list[str] = []
        if path is None:
            return
        if step and path.exists():
            header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
            self._lines = [header] + [row for row in rows if row.endswith("\n") and _step_of(row) <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(self._lines), encoding="utf-8")

    @property
    def step(self) -> int:
        """The step of the last row; -1 where there is none."""
        return _step_of(self._lines[-1]) if len(self._lines) > 1 else -1

    def append(self, step: int, row: Mapping[str, float]) -> None:
        """Adds a row.

        Raises:
            ValueError: Its columns are not those of the rows before.
        """
        header = ",".join(["step", *row]) + "\n"
        line = ",".join([str(step), *(repr(float(value)) for value in row.values())]) + "\n"
        if self._lines and self._lines[0] != header:
            raise ValueError(
                f"the log has the columns {self._lines[0]!r}, step {step} gives {header!r}: keep to the first"
            )
        added = [line] if self._lines else [header, line]
        self._lines += added
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(added))

    def frame(self) -> pd.DataFrame:
        """Returns the rows; floats are as they were given, to the bit."""
        header, *rows = (line.rstrip("\n").split(",") for line in self._lines)
        return pd.DataFrame([map(float, row) for row in rows], columns=header).astype({"step": int})


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Yields a list of the SIGINT and SIGTERM that come; they are delivered when the block is left."""
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in handlers:
        signal.signal(number, lambda came, _: held.append(came))
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def bytes_of(tensor: Shaped[Tensor, "..."]) -> memoryview:
    """Returns a tensor's values as they stand in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: int, data: list[memoryview], offset: int) -> None:
    """Writes pieces one after the other, in as few calls as the system allows."""
    while data:
        written = os.pwritev(file, data[:1024], offset)
        offset += written
        while data and written >= len(data[0]):
            written -= len(data.pop(0))
        if written:
            data[0] = data[0][written:]


def _read_offsets(path: Path) -> dict[str, int]:
    """Returns where in a safetensors file the bytes of each tensor begin, in the order of the file, without gaps."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    return {name: 8 + length + starts[name] for name in sorted(starts, key=starts.__getitem__)}


def _step_of(row: str) -> int:
    return int(row.split(",")[0])
