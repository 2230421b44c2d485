"""Long sweeps: a bar with the time left, and parts kept in a folder, so that a killed sweep goes on.

Processes that make the same sweep with the same folder share its parts.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from align_circuits.jobs.files import Taken, claimed, remove_partial, replacing, shared_folder, until_done
from align_circuits.jobs.jobs import Progress, progress_of
from align_circuits.run.options import RunOptions

Part = tuple[Float[ndarray, "..."], str]
"""Numbers, and the engine that ran."""

Compute = Callable[[], Part]

EDIT_SETS_A_PART = 32
"""Edited runs in one part of a sweep that is kept."""

_PLAN = ".plan.json"

PROMPTS_A_PART = 32
"""Prompts in such a part, rounded up to whole batches where the caller chose their size."""


def progress_bar(options: RunOptions, total: int, unit: str) -> "tqdm[Any]":
    """Returns a bar that appears after a second, unless the output is a log or the options say otherwise."""
    disable = None if options.progress == "auto" else not options.progress  # None: where there is no terminal
    return tqdm(total=total, disable=disable, delay=1.0, unit=unit, leave=False)


class SweepParts:
    """The parts of one sweep, each in a file of `options.out`, or nowhere if that is None.

    Args:
        options: Where the parts are kept.
        what: What is measured, for people.
        identity: What tells this sweep from all others, as JSON: the model's weights, the prompts, the edits, the
            metrics. Parts of other sweeps in the same folder are not read.
    """

    def __init__(self, options: RunOptions, what: str, identity: Mapping[str, Any]):
        self._what = what
        self._folder: Path | None = None
        if options.out is not None:
            text = json.dumps(identity, sort_keys=True, default=str)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._folder = shared_folder(Path(options.out) / name)

    @property
    def kept(self) -> bool:
        """Whether the parts are kept."""
        return self._folder is not None

    def measure(self, parts: Mapping[str, Compute]) -> Iterator[tuple[str, Float[ndarray, "..."], str]]:
        """Yields the name, the numbers and the engine of each part: read if they are there, else computed and kept.

        Several processes may measure a sweep together: a part that another one is at comes last, and is read.
        """
        if self._folder is None:
            for name, compute in parts.items():
                yield name, *compute()
            return
        paths = {self._folder / f"{name}.safetensors": compute for name, compute in parts.items()}
        _write_plan(self._folder / _PLAN, self._what, [path.name for path in paths])
        for path, (values, engine) in until_done(paths, _attempts):
            yield path.stem, values, engine


def read_sweeps(folder: str | Path) -> list[Progress]:
    """Returns how far each sweep is whose parts are kept in a folder, the latest first.

    Args:
        folder: What `RunOptions.out` was.
    """
    plans = [(plan.parent, json.loads(plan.read_text(encoding="utf-8"))) for plan in Path(folder).glob(f"*/{_PLAN}")]
    found = [
        # Sweeps of 0.2.0 before its release have not written what they measure.
        progress_of(plan.get("what", "sweep"), plan["started"], [sweep / name for name in plan["parts"]], {})
        for sweep, plan in plans
    ]
    return sorted(found, key=lambda progress: -progress.started)


def _write_plan(path: Path, what: str, names: Sequence[str]) -> None:
    """Lists the parts of a sweep, for `read_sweeps`; the same sweep again replaces the list."""
    with claimed(path) as mine:
        if mine:  # else another process of the same sweep is writing it
            remove_partial(path)
            with replacing(path) as temporary:
                plan = {"started": time.time(), "what": what, "parts": names}
                temporary.write_text(json.dumps(plan) + "\n", encoding="utf-8")


def _attempts(paths: Mapping[Path, Compute]) -> Iterator[tuple[Path, Part | Taken]]:
    for path, compute in paths.items():
        if path.is_file():
            yield path, _read(path)
            continue
        with claimed(path) as mine:
            if not mine:
                part = Taken.TAKEN
            elif path.is_file():  # another process was faster
                part = _read(path)
            else:
                part = compute()
                remove_partial(path)
                with replacing(path) as temporary:
                    save_file({"values": np.ascontiguousarray(part[0])}, temporary, {"engine": part[1]})
        yield path, part


def _read(path: Path) -> Part:
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor("values"), (file.metadata() or {})["engine"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is no part of a sweep ({error}): remove it, or give another out=") from error
