"""Folders of results: all files of a run move in together, or none does."""

import errno
import glob
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from align_circuits.jobs.files import UNIQUE, as_any_file, check_name, short_name, unwritable
from align_circuits.jobs.locks import claimed, locked

Read = TypeVar("Read")

MARKS = ("config.json", "adapter_config.json", "call.json", "provenance.json")
"""Files that say that a folder is one of results, and complete: they leave it first and enter it last."""

_OLD, _GOING = ".old", ".going"
"""In a folder of results that is being moved in: what it replaces, and the names of what it does away with."""


@contextmanager
def replacing_in(folder: str | Path, going: Collection[str] = ()) -> Iterator[Path]:
    """Yields a new, hidden folder, whose entries move into `folder` when the block succeeds: all of them or none.

    A `folder` that does not exist yet comes into being by a single rename. In one that does, entries of the same names
    are replaced, those called `going` removed, and all others stay. If the block raises, nothing has changed. A process
    that is killed while entries move leaves a folder without a provenance, and whoever opens it next, here or with
    `finish_moves`, goes on with the move; what was killed before it is cleared away.

    Args:
        folder: Where to; made if missing.
        going: Names of files, and of folders of results, of the same writer that do not belong beside what is written.

    Yields:
        The folder to write to.

    Raises:
        ValueError: `folder` cannot be written, or holds what no result may replace: a folder where a file is written, a
            file where a folder is, or a folder that is not one of results.
    """
    folder = Path(folder)
    check_name(folder)
    if folder.is_symlink() and not folder.exists():
        to = str(folder.readlink())
        raise ValueError(f"{str(folder)!r} is a link to {to!r}, which does not exist: make it, or write elsewhere")
    new, made_folders = None, []
    try:
        try:
            made_folders = [path for path in (folder, *folder.parents) if not path.exists()]
            clear(folder)
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            inside = folder.is_dir()
            # Else beside it. Inside: its parent may be read-only, or another file system.
            parent = folder if inside else folder.parent
            parent.mkdir(parents=True, exist_ok=True)
            name = "" if inside else f".{short_name(folder.name)}"
            new = parent / f"{name}.{uuid4().hex[:8]}.partial"
            new.mkdir()
        except OSError as error:
            raise unwritable(folder, error) from error
        # It is made anew where another process has cleared it away before it was locked.
        with locked(new, make=partial(Path.mkdir, exist_ok=True)):
            yield new
            for path in new.rglob("*.safetensors"):
                as_any_file(path)
            _move_in(new, folder, going)
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        # Innermost first, so that each is empty when its turn comes.
        for path in made_folders:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def finish_moves(folder: str | Path) -> None:
    """Goes on with moves into a folder that a kill cut off (`replacing_in`)."""
    if _moves_into(folder):
        with _alone_to_move(Path(folder)):
            pass


def read_whole(folder: Path, read: Callable[[Path], Read]) -> Read:
    """Returns what a function reads from a folder of results; anew where other results moved in meanwhile."""
    while True:
        finish_moves(folder)
        before = _state(folder)
        try:
            content = read(folder)
        except (ValueError, OSError):
            if _state(folder) == before:
                raise
        else:
            if _state(folder) == before:
                return content


def _moves_into(folder: str | Path) -> list[Path]:
    return [path for path in Path(folder).glob(f".{UNIQUE}.complete") if not path.is_symlink()]


def _state(folder: Path) -> Any:
    """What differs after a move into a folder: `MARKS` leave it first and enter it last, and a rename is a change."""
    if _moves_into(folder):
        return object()  # equal to nothing
    try:
        status = (folder / "provenance.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def clear(folder: Path) -> None:
    """Finishes the moves into a folder that were cut off, and removes what was never finished."""
    if folder.is_dir():
        with _alone_to_move(folder):
            pass
    if folder.parent.is_dir():
        beside = folder.parent.glob(f".{glob.escape(short_name(folder.absolute().name))}.{UNIQUE}.partial")
        for abandoned in (*folder.glob(f".{UNIQUE}.partial"), *beside):
            if abandoned.is_dir() and not abandoned.is_symlink():
                _remove_unlocked(abandoned)


def _move_in(new: Path, folder: Path, going: Collection[str]) -> None:
    written = {path.name for path in new.iterdir()}
    if not written:
        return
    if not folder.exists():
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        else:
            return
    for name in sorted(written):
        _check_replaceable(new / name, folder / name)
    # What needs room on the disk is done before the first entry moves.
    (new / _OLD).mkdir()
    gone = sorted(name for name in {*going} - written if (folder / name).is_file() or _is_of_results(folder / name))
    (new / _GOING).write_text("\n".join(gone), encoding="utf-8")
    with _alone_to_move(folder):
        complete = folder / f".{uuid4().hex[:8]}.complete"
        new.rename(complete)
        _finish(complete)


@contextmanager
def _alone_to_move(folder: Path) -> Iterator[None]:
    """Keeps other processes from moving entries into a folder, once the moves that were cut off are finished."""
    with claimed(folder / "moves", seconds=math.inf):  # the lock of the folder may be this process's own: `new`
        for complete in _moves_into(folder):
            _finish(complete)
        yield


def _finish(complete: Path) -> None:
    """Moves the entries of a complete folder into the one that it stands in; from any point where a kill stopped it."""
    folder, old = complete.parent, complete / _OLD
    names = [path.name for path in complete.iterdir() if path.name not in (_OLD, _GOING)]
    entering = sorted(names, key=lambda name: (MARKS.index(name) if name in MARKS else -1, name))
    # Once all entries have moved, a killed `rmtree` may have taken the list away.
    going = (complete / _GOING).read_text(encoding="utf-8").splitlines() if names else []
    # A list that was tampered with leads nowhere else: only plain names count.
    for name in [*reversed(entering), *(name for name in going if Path(name).name == name)]:
        if os.path.lexists(folder / name):
            # A new name each time: a move that goes on may put a second entry of this name aside.
            (folder / name).rename(old / f"{name}.{uuid4().hex[:8]}")
    for name in entering:
        (complete / name).rename(folder / name)
    shutil.rmtree(complete)


def _check_replaceable(new: Path, there: Path) -> None:
    """Raises unless an entry may take the place of what stands there."""
    if not os.path.lexists(there):
        return
    if new.is_dir() != there.is_dir():
        kinds = ("folder", "file") if there.is_dir() else ("file", "folder")
        raise ValueError(
            f"{str(there)!r} is a {kinds[0]}, results need a {kinds[1]} there: move it, or write elsewhere"
        )
    if new.is_dir() and any(there.iterdir()) and not _is_of_results(there):
        raise ValueError(f"{str(there)!r} is a folder of other files, where results go: move it, or write elsewhere")


def _is_of_results(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def _remove_unlocked(folder: Path) -> None:
    """Removes a hidden folder of `replacing_in`, unless a process that is alive writes to it."""
    with suppress(FileNotFoundError), locked(folder, seconds=0.0) as unused:
        if unused:
            shutil.rmtree(folder, ignore_errors=True)
