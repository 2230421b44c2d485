"""Long sweeps: a bar with the time left, and parts kept in a folder, so that a killed sweep goes on."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm.auto import tqdm

from align_circuits.files import remove_partial, replacing, writable_folder
from align_circuits.run.options import RunOptions

EDIT_SETS_A_PART = 32
"""Edited runs in one part of a sweep that is kept."""


def progress_bar(options: RunOptions, total: int, unit: str) -> "tqdm[Any]":
    """Returns a bar that appears after a second, unless the output is a log or the options say otherwise."""
    disable = None if options.progress == "auto" else not options.progress  # None: where there is no terminal
    return tqdm(total=total, disable=disable, delay=1.0, unit=unit, leave=False)


class SweepParts:
    """The parts of one sweep, each in a file of `options.out`, or nowhere if that is None.

    Args:
        options: Where the parts are kept.
        identity: What tells this sweep from all others, as JSON: the model's weights, the prompts, the edits, the
            metrics. Parts of other sweeps in the same folder are not read.
    """

    def __init__(self, options: RunOptions, identity: Mapping[str, Any]):
        self._folder: Path | None = None
        if options.out is not None:
            text = json.dumps(identity, sort_keys=True, default=str)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._folder = writable_folder(Path(options.out) / name)

    @property
    def kept(self) -> bool:
        """Whether the parts are kept."""
        return self._folder is not None

    def measure(
        self, name: str, compute: Callable[[], tuple[Float[ndarray, "..."], str]]
    ) -> tuple[Float[ndarray, "..."], str]:
        """Returns the numbers of a part and the engine that ran: read if they are there, else computed and kept."""
        if self._folder is None:
            return compute()
        path = self._folder / f"{name}.safetensors"
        if path.is_file():
            try:
                with safe_open(path, "np") as file:
                    return file.get_tensor("values"), (file.metadata() or {})["engine"]
            except (SafetensorError, KeyError) as error:
                raise ValueError(
                    f"{str(path)!r} is no part of a sweep ({error}): remove it, or give another out="
                ) from error
        values, engine = compute()
        remove_partial(path)
        with replacing(path) as temporary:
            save_file({"values": np.ascontiguousarray(values)}, temporary, {"engine": engine})
        return values, engine
