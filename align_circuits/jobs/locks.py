"""Locks among processes, and work that is shared by them: each file is written by one process, once.

The system releases a lock with its process, however that ends. Processes of several hosts exclude each other where the
file system passes locks on: NFS 4, Lustre with `flock`.
"""

import math
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import lock_descriptor

from align_circuits.jobs.files import remove_partial, replacing, short_name, writable_folder

Work = TypeVar("Work")
Outcome = TypeVar("Outcome")

# Refuses a link put there between the check for one and the opening. Windows has no such flag.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)

PATIENCE = 0.2
"""Seconds between questions whether another process has finished a file."""


@contextmanager
def locked(path: Path, *, make: Callable[[Path], None] | None = None, seconds: float = math.inf) -> Iterator[bool]:
    """Yields whether this process holds the lock of a file or folder, within the block.

    Args:
        path: The file or folder, which may be renamed meanwhile: `filelock.FileLock` locks no folder, leaves its file
            behind, and trusts that no one removes it.
        make: Makes it where it is missing, such as `new_file`.
        seconds: For how long to wait for a process that holds it.

    Raises:
        ValueError: A file that is a link, or has other names: who locks it could change the file behind.
        FileNotFoundError: There is no such file, also where another process has removed it meanwhile.
        OSError: The file system has no locks.
    """
    give_up = time.monotonic() + seconds
    while True:
        handle = _opened(path, make)
        try:
            if lock_descriptor(handle, blocking=False) and _stands_at(handle, path):
                yield True
                return
        finally:
            os.close(handle)
        if time.monotonic() >= give_up:
            yield False
            return
        time.sleep(0.05)


def _opened(path: Path, make: Callable[[Path], None] | None) -> int:
    while True:
        if make is not None:
            make(path)
        if path.is_symlink() and not path.is_dir():
            raise _linked(path)
        try:
            # NFS locks what is open for writing.
            handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | _NO_LINK)
        except FileNotFoundError:
            if make is None:
                raise
            continue
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            os.close(handle)
            raise _linked(path)
        return handle


def new_file(path: Path) -> None:
    """Makes an empty file unless one is there; never that which a link points to."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _linked(path: Path) -> ValueError:
    return ValueError(f"{str(path)!r} is a link to another file, which is not locked instead: remove the link")


def _stands_at(handle: int, path: Path) -> bool:
    """Whether an open file is still there: its last owner may have removed it after it was opened here."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def claimed(path: Path, *, seconds: float = 0.0) -> Iterator[bool]:
    """Yields whether this process holds the claim on a file that it wants to write, which no two processes ever do.

    The claim is a locked hidden file beside `path`, which is removed at the end of the block.

    Args:
        path: The file.
        seconds: For how long to wait for a process that holds it.

    Raises:
        OSError: The file system has no locks.
    """
    with locked(_claim(path), make=new_file, seconds=seconds) as mine:
        try:
            yield mine
        finally:
            if mine:
                # While it is still locked: afterwards it could be another process's.
                _claim(path).unlink(missing_ok=True)


def is_claimed(path: Path) -> bool:
    """Returns whether a process that is alive holds the claim on a file."""
    try:
        with locked(_claim(path), seconds=0.0) as free:
            return not free
    except FileNotFoundError:
        return False


def _claim(path: Path) -> Path:
    return path.with_name(f".{short_name(path.name)}.claim")


def written_once(path: Path, write: Callable[[Path], None]) -> bool:
    """Writes a file unless it is there; returns whether it is there now, and not left to another process that is at it.

    Args:
        path: The file.
        write: Takes the temporary path to write to (`replacing`).
    """
    if path.exists():
        return True
    with claimed(path) as mine:
        if mine and not path.exists():  # another process may have been faster
            remove_partial(path)  # of a killed attempt
            with replacing(path) as temporary:
                write(temporary)
        return mine


def until_done(
    work: Mapping[Path, Work], attempts: Callable[[Mapping[Path, Work]], Iterator[tuple[Path, Outcome | None]]]
) -> Iterator[tuple[Path, Outcome]]:
    """Yields the outcome of what writes each file; what other processes are at is attempted again once they ended.

    Args:
        work: What writes each file.
        attempts: Does it and yields each outcome, or None where another process holds the claim on the file.
    """
    while work:
        taken = {}
        for path, outcome in attempts(work):
            if outcome is None:
                taken[path] = work[path]
            else:
                yield path, outcome
        work = taken
        # A claim that is free means a file that is done, or a process that died: both are for another attempt.
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
