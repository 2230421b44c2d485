"""Long sweeps whose parts are kept in a folder, so that a killed sweep goes on.

Processes that make the same sweep with the same folder share its parts.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from align_circuits.jobs.files import inside, read_object
from align_circuits.jobs.identity import release, settings_of_the_process, told
from align_circuits.jobs.jobs import Progress, progress_of, write_plan
from align_circuits.jobs.locks import shared_folder, until_done, written_once

Part = tuple[Float[ndarray, "..."], str]
"""Numbers, and the engine that ran."""

Compute = Callable[[], Part]

_PLAN = ".plan.json"


class SweepParts:
    """The parts of one sweep, each in a file of a folder, or nowhere if that is None.

    Args:
        folder: Where the parts are kept, beside those of other sweeps, which are not read.
        what: What is measured, for people.
        identity: All that the numbers rest on, by name, for `identity_of`: the model, the prompts, the edits, the
            metrics. The code of this package and the settings of the process are added.

    Raises:
        ValueError: The identity of a part of it cannot be told, such as that of a function that reads a file.
    """

    def __init__(self, folder: str | Path | None, what: str, identity: Mapping[str, Any]):
        self._what = what
        self._folder: Path | None = None
        if folder is not None:
            rests_on = {"release": release(), "process": settings_of_the_process(), **identity}
            # Sorted, so that the order of a caller's mapping makes no other folder.
            settings = [(key, rests_on[key]) for key in sorted(rests_on)]
            name = told(f"{what} in {str(folder)!r}", settings, otherwise="; or keep nothing")
            self._folder = shared_folder(inside(folder, name))

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
        write_plan(self._folder / _PLAN, {"what": self._what, "parts": [path.name for path in paths]})
        for path, (values, engine) in until_done(paths, _attempts):
            yield path.stem, values, engine

    def measure_all(self, parts: Mapping[str, Compute], bar: "tqdm[Any]") -> list[Float[ndarray, "..."]]:
        """Returns the numbers of all parts, in their order, while a bar counts their entries."""
        measured: dict[str, Float[ndarray, ...]] = {}
        with bar:
            for name, measured[name], _ in self.measure(parts):
                bar.update(len(measured[name]))
        return [measured[name] for name in parts]


def read_sweeps(folder: str | Path) -> list[Progress]:
    """Returns how far each sweep is whose parts are kept in a folder, the latest first.

    Args:
        folder: As of `SweepParts`.
    """
    sweeps = []
    for path in Path(folder).glob(f"*/{_PLAN}"):
        plan = read_object(path, parts=list, started=(int, float))
        parts = [inside(path.parent, str(name)) for name in plan["parts"]]
        # Sweeps of 0.2.0 before its release have not written what they measure.
        sweeps.append(progress_of(str(plan.get("what", "sweep")), float(plan["started"]), parts, {}))
    return sorted(sweeps, key=lambda progress: -progress.started)


def _attempts(paths: Mapping[Path, Compute]) -> Iterator[tuple[Path, Part | None]]:
    for path, compute in paths.items():

        def write(temporary: Path, compute: Compute = compute) -> None:
            values, engine = compute()
            save_file({"values": np.ascontiguousarray(values)}, temporary, {"engine": engine})

        yield path, _read(path) if written_once(path, write) else None


def _read(path: Path) -> Part:
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor("values"), (file.metadata() or {})["engine"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"{str(path)!r} is no part of a sweep ({error}): remove it, or give other --parts (cache_dir=)"
        ) from error
