"""Atomic writes: a file, or a folder of results, is written completely or not at all."""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

Work = TypeVar("Work")
Outcome = TypeVar("Outcome")

MARKS = ("config.json", "adapter_config.json", "provenance.json")
"""Files that say that a folder is one of results, and complete: they leave it first and enter it last."""

_UNIQUE = "[0-9a-f]" * 8
"""What the names of hidden files and folders end with, as a pattern: no file of another program is taken for ours."""

PATIENCE = 0.2
"""Seconds between questions whether another process has finished a file."""


class Taken(Enum):
    """In place of an outcome: another process is at the file, so ask again later."""

    TAKEN = "another process is at it"


_OLD, _GOING = ".old", ".going"
"""In a folder of results that is being moved in: what it replaces, and the names of what it does away with."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` and renames it onto `path` when the block succeeds.

    If the block raises, the temporary file is removed and the old file, if any, remains.

    Args:
        path: The file to write; its folder is made if missing.

    Yields:
        The path to write to.

    Raises:
        ValueError: `path` has a part that is too long for a name.
        PermissionError: The folder cannot be written.

    Source: POSIX `rename(2)` is atomic within a file system.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> [file.name for file in folder.iterdir()]
    ['a.txt']
    """
    path = Path(path)
    check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside `path`, since a rename is atomic only within a file system; hidden, so that no glob takes it for a result.
    temporary = path.with_name(f".{_short(path.name)}.{uuid4().hex[:8]}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Removes what killed processes had begun to write with `replacing`. Call it where no other process writes it."""
    for abandoned in path.parent.glob(f".{glob.escape(_short(path.name))}.{_UNIQUE}.partial"):
        abandoned.unlink(missing_ok=True)


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
    new, made = None, []
    try:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            clear(folder)
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            inside = folder.is_dir()
            # Else beside it. Inside: its parent may be read-only, or another file system.
            parent = folder if inside else folder.parent
            parent.mkdir(parents=True, exist_ok=True)
            name = "" if inside else f".{_short(folder.name)}"
            new = parent / f"{name}.{uuid4().hex[:8]}.partial"
            new.mkdir()
        except OSError as error:
            raise _unwritable(folder, error) from error
        with locked(new):
            new.mkdir(exist_ok=True)  # another process may have cleared it away before it was locked
            yield new
            _move_in(new, folder, going)
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def finish_moves(folder: str | Path) -> None:
    """Goes on with moves into a folder that a kill cut off (`replacing_in`). Call it before reading the folder."""
    for complete in Path(folder).glob(f".{_UNIQUE}.complete"):
        with suppress(FileNotFoundError), locked(complete):  # suppressed: the process that wrote it was faster
            _finish(complete)


def clear(folder: Path) -> None:
    """Finishes the moves into a folder that were cut off, and removes what was never finished."""
    if folder.is_dir():
        finish_moves(folder)
    if folder.parent.is_dir():
        beside = folder.parent.glob(f".{glob.escape(_short(folder.absolute().name))}.{_UNIQUE}.partial")
        for abandoned in (*folder.glob(f".{_UNIQUE}.partial"), *beside):
            if abandoned.is_dir():
                _remove_unlocked(abandoned)


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a folder, which the system releases with the process, however it ends.

    Raises:
        BlockingIOError: With `wait=False`, another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yields whether this process holds the claim on a file that it wants to write, which no two processes ever do.

    The claim is a locked hidden file beside `path`; it goes with the block, or with the process, however that ends.
    Processes of several hosts exclude each other where the file system passes locks on: NFS 4, Lustre with `flock`.

    Raises:
        OSError: The file system has no locks.
    """
    claim = _claim(path)
    handle = os.open(claim, os.O_RDWR | os.O_CREAT, 0o666)  # for writing, as NFS wants it
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        if not _stands_at(handle, claim):  # its last owner removed it after it was opened here
            yield False
            return
        try:
            yield True
        finally:
            claim.unlink(missing_ok=True)
    finally:
        os.close(handle)


def is_claimed(path: Path) -> bool:
    """Returns whether a process that is alive holds the claim on a file."""
    try:
        handle = os.open(_claim(path), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def until_done(
    work: Mapping[Path, Work], attempts: Callable[[Mapping[Path, Work]], Iterator[tuple[Path, Outcome | Taken]]]
) -> Iterator[tuple[Path, Outcome]]:
    """Yields the outcome of what writes each file; what other processes are at is attempted again once they ended.

    Args:
        work: What writes each file.
        attempts: Does it and yields each outcome, or `Taken.TAKEN` where another process holds the claim on the file.
    """
    while work:
        taken = {}
        for path, outcome in attempts(work):
            if isinstance(outcome, Taken):
                taken[path] = work[path]
            else:
                yield path, outcome
        work = taken
        while work and all(is_claimed(path) for path in work):
            time.sleep(PATIENCE)


def shared_folder(path: str | Path) -> Path:
    """Returns `writable_folder(path)`, absolute, after a look whether processes can exclude each other there.

    Raises:
        ValueError: As `writable_folder`, or the file system has no locks.
    """
    folder = writable_folder(path).absolute()
    try:
        with claimed(folder / "probe"):
            return folder
    except OSError as error:
        raise ValueError(
            f"{str(folder)!r} is on a file system without locks ({error.strerror}), where two processes could do the "
            "same work: give a folder on another one"
        ) from error


def _claim(path: Path) -> Path:
    return path.with_name(f".{_short(path.name)}.claim")


def _stands_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _move_in(new: Path, folder: Path, going: Collection[str]) -> None:
    written = {path.name for path in new.iterdir()}
    if not written:
        return
    if not folder.exists():
        new.rename(folder)
        return
    for name in sorted(written):
        _check_replaceable(new / name, folder / name)
    # What needs room on the disk is done before the first entry moves.
    (new / _OLD).mkdir()
    gone = sorted(name for name in {*going} - written if (folder / name).is_file() or _is_of_results(folder / name))
    (new / _GOING).write_text("\n".join(gone), encoding="utf-8")
    complete = folder / f".{uuid4().hex[:8]}.complete"
    new.rename(complete)
    _finish(complete)


def _finish(complete: Path) -> None:
    """Moves the entries of a complete folder into the one that it stands in; from any point where a kill stopped it."""
    if not complete.is_dir():  # another process has finished it
        return
    folder, old = complete.parent, complete / _OLD
    names = [path.name for path in complete.iterdir() if path.name not in (_OLD, _GOING)]
    entering = sorted(names, key=lambda name: (MARKS.index(name) if name in MARKS else -1, name))
    going = (complete / _GOING).read_text(encoding="utf-8").splitlines() if names else []
    for name in [*reversed(entering), *going]:
        if os.path.lexists(folder / name):
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
    with suppress(BlockingIOError, FileNotFoundError), locked(folder, wait=False):
        shutil.rmtree(folder, ignore_errors=True)


def _short(name: str) -> str:
    """A name that leaves room for what is added to it: names have up to 255 bytes."""
    return name if len(name.encode()) <= 200 else hashlib.sha256(name.encode()).hexdigest()[:16]


def writable_folder(path: str | Path) -> Path:
    """Returns `path` as a folder that can be written. Call it before the work whose results it will hold.

    Raises:
        ValueError: `path` is a file, or cannot be created or written.
    """
    path = Path(path)
    check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Only writing shows whether a folder can be written: permissions say little to root and on network drives.
        probe = path / f".{uuid4().hex[:8]}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"cannot write results to {str(path)!r} ({error.strerror}): "
        "give a folder that does not exist yet or that you may write"
    )


def is_path(name: str | Path) -> bool:
    """Returns whether a name could be one of a file or folder; `Path.is_file` raises where it could not."""
    text = str(name)
    return (
        "\0" not in text and len(os.fsencode(text)) < 4096 and all(len(os.fsencode(p)) < 256 for p in Path(text).parts)
    )


def check_name(path: Path) -> None:
    """Raises a ValueError unless `path` could be the name of a file or folder."""
    if not is_path(path):
        raise ValueError(f"{str(path)[:60]!r}... cannot be written: give a name of parts of at most 255 bytes")
