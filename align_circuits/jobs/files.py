"""Files that are written completely or not at all."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

UNIQUE = "[0-9a-f]" * 8
"""What the names of hidden files and folders end with, as a pattern: no file of another program is taken for ours."""


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
    temporary = path.with_name(f".{short_name(path.name)}.{uuid4().hex[:8]}.partial")
    try:
        yield temporary
        as_any_file(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def as_any_file(path: Path) -> None:
    """Gives a file the rights that new files have: safetensors writes files that nobody else may read."""
    mask = os.umask(0o022)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def read_object(path: Path, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Returns the JSON object in a file that the package wrote.

    Args:
        path: The file.
        **kinds: The types of entries that it must have.

    Raises:
        ValueError: It is truncated, or another file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is broken ({error}): remove it, and give the same command again") from error
    wrong = [
        name for name, kind in kinds.items() if not isinstance(content, dict) or not isinstance(content.get(name), kind)
    ]
    if wrong:
        raise ValueError(f"{str(path)!r} is broken (no {wrong[0]}): remove it, and give the same command again")
    return content


def remove_partial(path: Path) -> None:
    """Removes what killed processes had begun to write with `replacing`. Call it where no other process writes it."""
    for abandoned in path.parent.glob(f".{glob.escape(short_name(path.name))}.{UNIQUE}.partial"):
        abandoned.unlink(missing_ok=True)


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
        raise unwritable(path, error) from error
    return path


def inside(folder: str | Path, name: str) -> Path:
    """Returns the path of a file or folder in a folder.

    Raises:
        ValueError: It leads out of the folder, by a link or by a name such as `"../a"`; or no file can be called so.
    """
    # The folder itself may stand behind a link, so both are resolved.
    path, home = Path(folder) / name, os.path.realpath(folder)
    check_name(path)
    if not Path(os.path.realpath(path)).is_relative_to(home):
        raise ValueError(
            f"{str(path)!r} leads out of its folder, to {os.path.realpath(path)!r}: remove what leads there"
        )
    return path


def unwritable(path: Path, error: OSError) -> ValueError:
    """Returns the error of a folder that cannot be written."""
    return ValueError(
        f"cannot write results to {str(path)!r} ({error.strerror}): "
        "give a folder that does not exist yet or that you may write"
    )


def is_path(name: str | Path) -> bool:
    """Returns whether a name could be one of a file or folder; `Path.is_file` raises where it could not."""
    text = str(name)
    try:
        sizes = [len(name_part.encode()) for name_part in (text, *Path(text).parts)]
    except UnicodeEncodeError:  # half a character, or a name on the disk that is not UTF-8
        return False
    # PATH_MAX and NAME_MAX of Linux.
    return "\0" not in text and sizes[0] < 4096 and max(sizes[1:], default=0) < 256


def check_name(path: Path) -> None:
    """Raises a ValueError unless `path` could be the name of a file or folder."""
    if not is_path(path):
        raise ValueError(f"{str(path)[:60]!r}... cannot be written: give a name of parts of at most 255 bytes of UTF-8")


def short_name(name: str) -> str:
    """A name that leaves room for what is added to it: names have up to 255 bytes."""
    return name if len(name.encode()) <= 200 else hashlib.sha256(name.encode()).hexdigest()[:16]
