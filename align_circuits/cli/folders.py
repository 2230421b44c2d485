"""Folders for results: numbered by themselves, not overwritten by accident, removed if a run leaves them empty."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from align_circuits.files import writable_folder

LATEST = "latest"
"""The link to the latest numbered folder of a verb."""


@contextmanager
def results_folder(folder: Path | None, numbered_in: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields the folder for the results of a run; if the block fails, folders made for it that are empty are removed.

    Args:
        folder: The folder that was asked for. None: the next numbered one.
        numbered_in: Where numbered folders stand: `0001`, `0002`, ..., and the link `latest`, which points to a folder
            once its run has finished.
        overwrite: Whether the results of an earlier run may be replaced.

    Raises:
        ValueError: The folder cannot be written, or holds the results of an earlier run.
    """
    wanted = numbered_in if folder is None else folder
    new = [path for path in (wanted, *wanted.parents) if not path.exists()]
    # The provenance is written last, so a folder without it is of a run that was stopped: it may go on.
    if folder is not None and (folder / "provenance.json").exists() and not overwrite:
        raise ValueError(f"{str(folder)!r} holds the results of an earlier run: give another --out, or add --overwrite")
    target = writable_folder(folder) if folder is not None else _next_folder(numbered_in)
    if folder is None:
        new.insert(0, target)
    try:
        yield target
        if folder is None:
            _link(numbered_in / LATEST, target.name)
    finally:
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _next_folder(parent: Path) -> Path:
    """Makes the folder after the last one; making it claims it, also among several processes."""
    writable_folder(parent)
    number = max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    while True:
        number += 1
        try:
            (parent / f"{number:04d}").mkdir()
        except FileExistsError:
            continue
        return parent / f"{number:04d}"


def _link(link: Path, name: str) -> None:
    """Points a link to a folder beside it, at once: a reader finds the old or the new one."""
    temporary = link.with_name(f".{link.name}.{uuid4().hex[:8]}")
    temporary.symlink_to(name, target_is_directory=True)
    temporary.replace(link)
