"""Folders for results: numbered by themselves, written whole, not overwritten by accident, gone if a run fails."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from align_circuits.jobs.files import check_name, writable_folder
from align_circuits.jobs.folders import clear, finish_moves, replacing_in
from align_circuits.jobs.locks import claimed, locked

LATEST = "latest"
"""The link to the latest numbered folder of a verb."""

RESULTS = (
    *("table.csv", "table.csv.xz", "values.safetensors", "report.html"),
    *("baselines", "patching_effects", "ablation_effects", "set_ablations", "group_ablations"),
    *("interchanges", "heads", "over_seeds", "call"),
)
"""What an earlier run may have left beside its provenance: deleted when another run replaces that run's results."""

STATE = ("training/log.csv", "probes/step-*.safetensors", "jobs/*-*.json", "jobs/*-*.error", "trained/*-*/log.csv")
"""Files from which a run that was stopped goes on: they stay, whatever becomes of the results."""


@dataclass(frozen=True)
class Results:
    """Where a verb writes."""

    new: Path
    """A hidden folder for its results, which are moved to `folder` together once the verb has finished."""
    folder: Path
    """Where the results will be, and where `STATE` is kept while the verb runs."""


@contextmanager
def results_folder(
    folder: Path | None, numbered_in: Path, *, overwrite: bool, renews: Mapping[str, Any] | None = None
) -> Iterator[Results]:
    """Yields folders for the results of a run; if the block fails, nothing has changed but `STATE`.

    Args:
        folder: The one that was asked for. None: the next numbered one.
        numbered_in: Where they stand: `0001`, `0002`, ..., and the link `latest`, to the last whose run has finished.
        overwrite: Whether the folder may hold the results of an earlier run, which are removed, or other files, of
            which those that have the name of a result are replaced.
        renews: The verb and settings of earlier results that may be replaced without `overwrite`.
    """
    if folder is not None:
        with _alone_in(folder):
            going = _check(folder, overwrite=overwrite, renews=renews)
            with replacing_in(folder, going) as new:
                yield Results(new, folder)
        return
    check_name(numbered_in)
    if (latest := numbered_in / LATEST).is_dir() and not latest.is_symlink():
        raise ValueError(f"{str(latest)!r} is a folder, where a link to the results goes: rename it, or add --out")
    new_folders = [path for path in (numbered_in, *numbered_in.parents) if not path.exists()]
    writable_folder(numbered_in)
    with ExitStack() as stack:
        stack.callback(_remove_empty, new_folders)
        # The lock: before something stands in a new folder, another process would take it for abandoned.
        with locked(numbered_in):
            target = _next_folder(numbered_in)
            stack.callback(_remove_empty, [target])
            new = stack.enter_context(replacing_in(target))
        yield Results(new, target)
    if target.is_dir():
        _link(latest, target.name)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Refuses a folder that another process is about to write its results to."""
    check_name(folder)
    folder = Path(os.path.realpath(folder))
    new_folders = [path for path in folder.parents if not path.exists()]
    with ExitStack() as stack:
        stack.callback(_remove_empty, new_folders)
        # Beside the folder, which comes into being by a rename; within it where its parent cannot be written.
        for claimable in (folder, *([folder / "run"] if folder.is_dir() else [])):
            with suppress(OSError):  # what cannot be written either is refused where the results would go
                claimable.parent.mkdir(parents=True, exist_ok=True)
                if not stack.enter_context(claimed(claimable)):
                    raise ValueError(f"another run is writing to {str(folder)!r}: wait for it, or give another --out")
                break
        yield


def _check(folder: Path, *, overwrite: bool, renews: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the names of results that may go, or raises unless results may be written to a folder."""
    check_name(folder)
    if not folder.is_dir():
        return ()
    finish_moves(folder)
    entries = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and _holds_files(path))
    earlier = _made_by(folder)
    if earlier is not None:
        if not overwrite and (renews is None or any(earlier.get(name) != value for name, value in renews.items())):
            shown = f" ({earlier['verb']} {earlier['name']})" if isinstance(earlier.get("name"), str) else ""
            raise ValueError(
                f"{str(folder)!r} holds the results of an earlier run{shown}: give another --out, or add --overwrite"
            )
        return RESULTS
    if entries and not overwrite and not any(any(folder.glob(files)) for files in STATE):
        raise ValueError(
            f"{str(folder)!r} holds files that are no results of this program ({', '.join(entries[:3])}"
            f"{', ...' if len(entries) > 3 else ''}): give another --out, or add --overwrite, which replaces files of "
            "the names of results and leaves all others"
        )
    return ()


def _holds_files(path: Path) -> bool:
    """Whether a path is a file or a folder with any that is not hidden: killed runs leave folders without."""
    return not path.is_dir() or any(file.is_file() and not file.name.startswith(".") for file in path.rglob("*"))


def _made_by(folder: Path) -> dict[str, Any] | None:
    """The verb whose results a folder holds, and its settings, by their provenance."""
    try:
        provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        settings = provenance.get("settings", {})
        return {**settings, "verb": provenance["verb"]} if "align-circuits" in provenance["versions"] else None
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):  # of others
        return None


def _next_folder(parent: Path) -> Path:
    """Makes the folder after the last one, without those that killed runs left with nothing in them."""
    numbered = sorted(path for path in parent.iterdir() if path.name.isdigit() and path.is_dir())
    for path in (path for path in numbered if not (path / "provenance.json").exists()):
        clear(path)
        _remove_empty([path])
    number = max((int(path.name) for path in numbered if path.exists()), default=0) + 1
    (parent / f"{number:04d}").mkdir()
    return parent / f"{number:04d}"


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _link(link: Path, name: str) -> None:
    """Points a link to a folder beside it, at once: a reader finds the old or the new one."""
    temporary = link.with_name(f".{link.name}.{uuid4().hex[:8]}")
    temporary.symlink_to(name, target_is_directory=True)
    temporary.replace(link)
