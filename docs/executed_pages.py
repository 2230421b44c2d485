"""Where the outputs of executed pages are kept, and whether the notebooks of the tutorials still show them.

They are kept in a folder named by all that they use besides their own code:
jupyter-cache finds a page's outputs by the code of its cells alone. After a change of the package it would show old
numbers; so every state of the package, of its data and of the environment has a cache of its own.
"""

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from nbformat import NotebookNode

FOLDERS = ("align_circuits", "hooks", "benchmarks/validation", "benchmarks/beyond", "docs/results")
"""What pages import and read: the package and its data, what validates it and goes beyond it, the kept results."""

FILES = (
    "constraints.txt",
    "pyproject.toml",
    "docs/kept_results.py",
    "docs/scoreboard.py",
    "docs/conf.py",
    "docs/executed_pages.py",
)

KEPT = 3
"""So many caches stay, those used last: two checkouts that are built in turn do not delete each other's."""


def files_used(root: Path) -> Iterator[Path]:
    """Yields, in a fixed order, the files of a checkout on which the outputs of pages depend."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield from (root / name for name in FILES)


def state(root: Path) -> str:
    """Returns the hash of those files, of the interpreter, the machine and every installed package."""
    digest = hashlib.sha256()

    def add(*parts: str | bytes) -> None:
        for part in parts:
            content = part.encode() if isinstance(part, str) else part
            digest.update(f"{len(content)}:".encode() + content)

    add(sys.version, platform.platform(), platform.processor())
    add(*sorted(f"{package.name}=={package.version}" for package in distributions()))
    for path in files_used(root):
        add(path.relative_to(root).as_posix(), path.read_bytes())
    return digest.hexdigest()[:32]


def cache_folder(root: Path) -> Path:
    """Returns the folder of the caches for the present state, and deletes all but the few used last."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "align_circuits" / "pages"
    folder = home / state(root)
    folder.mkdir(parents=True, exist_ok=True)
    _ = get_cache(folder).db  # makes its tables, which two processes that read pages would else make at once
    os.utime(folder)
    for old in sorted(home.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def words_printed(notebook: NotebookNode) -> set[str]:
    """Returns the words that an executed notebook prints, without its numbers and names of heads."""
    printed = [each.text for cell in notebook.cells for each in cell.get("outputs", ()) if each.get("name") == "stdout"]
    return {word for text in printed for word in re.findall(r"[^\W\d_]{2,}", text)}


def check_notebooks(folder: Path, kept: Path) -> None:
    """Compares what tutorials print now with what their notebooks show; numbers differ between machines.

    Args:
        folder: The cache. What `myst_nb` writes beside the pages has outputs only where they were not found in it.
        kept: Of the notebooks.

    Raises:
        ValueError: A notebook prints other words.
    """
    cache = get_cache(folder)
    for path in sorted(kept.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        executed = cache.get_cache_bundle(cache.match_cache_notebook(notebook).pk).nb
        now, shown = words_printed(executed), words_printed(notebook)
        if now != shown:
            apart = f"lacks {sorted(now - shown)} and still has {sorted(shown - now)}"
            raise ValueError(f"demos/{path.name} is out of date: it {apart}; run docs/notebooks.py --again {path.stem}")
