"""Atomic writes: a file is written completely or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` and renames it onto `path` when the block succeeds.

    If the block raises, the temporary file is removed and the old file, if any, remains.

    Args:
        path: The file to write; its folder is made if missing.

    Yields:
        The path to write to.

    Raises:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside `path`, since a rename is atomic only within a file system; hidden, so that no glob takes it for a result.
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def writable_folder(path: str | Path) -> Path:
    """Returns `path` as a folder that can be written. Call it before the work whose results it will hold.

    Raises:
        ValueError: `path` is a file, or cannot be created or written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Only writing shows whether a folder can be written: permissions say little to root and on network drives.
        probe = path / f".{uuid4().hex[:8]}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write results to {str(path)!r} ({error.strerror}): "
            "give a folder that does not exist yet or that you may write"
        ) from error
    return path


def is_path(name: str | Path) -> bool:
    """Returns whether a name could be one of a file or folder; `Path.is_file` raises where it could not."""
    return "\0" not in str(name) and all(len(part.encode()) < 256 for part in Path(name).parts)
