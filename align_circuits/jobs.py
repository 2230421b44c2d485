"""Sweeps: a cell is a function, a config and a seed, and leaves one file; what is finished is never done again."""

import ast
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from tqdm.auto import tqdm

from align_circuits.files import replacing, writable_folder

PACKAGE = "align_circuits"


@dataclass(frozen=True)
class Job:
    """One call of a function.

    Raises:
        ValueError: A function or config that cannot be named in a file.
    """

    function: str
    """`"module:name"`, importable by a new process; called as `function(**config, seed=seed)`, it returns rows: a
    DataFrame or a list of mappings from column to number, text or None."""
    config: Mapping[str, Any]
    """Its keyword arguments, as JSON."""
    seed: int | None = 0
    """Fixes whatever the function draws; None if it draws nothing: it is called without, and its rows have none."""

    def __post_init__(self):
        module, _, name = self.function.partition(":")
        if not module or not name or module == "__main__":
            raise ValueError(
                f"function={self.function!r}: give 'module:name' of a function in a module that can be imported"
            )
        try:
            json.dumps(self.config)
        except TypeError as error:
            raise ValueError(
                f"config={self.config!r} is not JSON ({error}): give names, numbers, texts, lists, mappings"
            ) from error

    @property
    def seeded(self) -> dict[str, int]:
        """The seed as an argument, if there is one."""
        return {} if self.seed is None else {"seed": self.seed}


@dataclass(frozen=True)
class Failure:
    """A cell that raised, or whose process died."""

    cell: Job
    """Which one."""
    error: str
    """The traceback, or how the process ended."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a list of cells gave."""

    frame: pd.DataFrame
    """The rows of all finished cells, in the order of the cells: config and seed, then the columns of the row, which
    stand in for a config entry of the same name."""
    failures: tuple[Failure, ...]
    """The cells without rows; the next `run_jobs` tries them again."""
    rows: tuple[list[dict[str, Any]], ...]
    """What each cell returned, without its config, in the order of the cells; nothing where it failed."""

    def whole(self) -> pd.DataFrame:
        """Returns the rows of all cells.

        Raises:
            ValueError: A cell failed.
        """
        if self.failures:
            first = self.failures[0]
            raise ValueError(
                f"{len(self.failures)} cells failed, the first with {first.cell.config}:\n{first.error}\n"
                "Finished cells are kept: run it again when the cause is gone"
            )
        return self.frame


def run_jobs(cells: Sequence[Job], folder: str | Path, *, jobs: int = 1, progress: bool = True) -> Sweep:
    """Runs the cells that have no result in `folder` yet, and returns the results of all.

    Each result is one JSON file, written whole or not at all, whose name ends in a hash of function, config, seed and
    code (see `code_version`). So a killed sweep goes on with the cells that were not finished, and a changed config,
    seed or function is another cell; the files of old code stay, unread. A cell that fails leaves a `.error` file with
    its config and traceback, and the others go on.

    With one job the cells run in this process; with more, in new processes that share the cores, and die with this one.

    Args:
        cells: What to run; a cell that is listed twice runs once.
        folder: Where the files are.
        jobs: The number of processes.
        progress: Whether to draw a progress bar over the cells.

    Raises:
        ValueError: A function that cannot be found, `jobs` below 1, a folder that cannot be written.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: give at least 1")
    folder = writable_folder(folder)
    versions = {name: code_version(name) for name in dict.fromkeys(cell.function for cell in cells)}
    paths = {_path(folder, cell, versions[cell.function]): cell for cell in cells}
    waiting = {path: cell for path, cell in paths.items() if not path.exists()}
    attempts = _attempts(waiting) if jobs == 1 else _parallel_attempts(waiting, min(jobs, len(waiting)))
    failures = []
    with tqdm(total=len(paths), initial=len(paths) - len(waiting), disable=not progress, unit="cell") as bar:
        for path, error in attempts:
            if error is not None:
                failures.append(Failure(paths[path], error))
                _write(path.with_suffix(".error"), json.dumps(asdict(paths[path]), indent=2) + "\n\n" + error)
            bar.set_postfix(failed=len(failures), refresh=False)
            bar.update()
    rows = {path: json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else [] for path in paths}
    whole = [{**cell.config, **cell.seeded, **row} for path, cell in paths.items() for row in rows[path]]
    each = tuple(rows[_path(folder, cell, versions[cell.function])] for cell in cells)
    return Sweep(pd.DataFrame(whole), tuple(failures), each)


def code_version(function: str) -> str:
    """Returns a hash of the code that a function stands on.

    That is its module, and those modules of this package and of its own that it imports, directly or not, as syntax
    trees without docstrings: a comment, a docstring or the layout does not make another version. Other packages do not
    count; their versions are the business of the environment.

    Raises:
        ValueError: There is no such function.
    """
    module, _, _ = function.partition(":")
    _find(function)
    roots, trees, waiting = {PACKAGE, module.partition(".")[0]}, {}, [module]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name)
        if name in trees or spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        waiting += _imports(tree, package, roots)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [part for part in node.body if not _is_text(part)]
        trees[name] = ast.dump(tree)
    return hashlib.sha256(json.dumps(trees, sort_keys=True).encode()).hexdigest()[:16]


def _imports(tree: ast.Module, package: str, roots: set[str]) -> Iterator[str]:
    """The modules under `roots` that a module of `package` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in roots)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.partition(".")[0] in roots:
                names = [f"{base}.{alias.name}" for alias in node.names]
                submodules = [name for name in names if _is_module(name)]
                yield from submodules
                if len(submodules) < len(names):
                    yield base


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _find(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"function={function!r} cannot be found ({error}): give 'module:name'") from error
    return found  # pyright: ignore[reportReturnType]


def _path(folder: Path, cell: Job, version: str) -> Path:
    identity = json.dumps([cell.function, cell.config, cell.seed, version], sort_keys=True)
    return folder / f"{cell.function.rpartition(':')[2]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _attempts(cells: Mapping[Path, Job]) -> Iterator[tuple[Path, str | None]]:
    for path, cell in cells.items():
        yield path, _attempt(path, cell)


def _parallel_attempts(cells: Mapping[Path, Job], jobs: int) -> Iterator[tuple[Path, str | None]]:
    """Gives each process a cell at a time; one that dies takes only its own cell along, and is replaced."""
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))
    waiting = deque(cells.items())
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Path]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker = idle.pop() if idle else _Worker(threads)
                path, cell = waiting.popleft()
                worker.connection.send((path, cell))
                busy[worker.connection] = worker, path
            for connection in wait(list(busy)):
                worker, path = busy.pop(cast(Connection, connection))
                try:
                    yield path, worker.connection.recv()
                    idle.append(worker)
                except EOFError:
                    yield path, f"its process died with exit code {worker.end()} (-9: killed, perhaps for memory)\n"
    finally:
        for worker in [*(worker for worker, _ in busy.values()), *idle]:
            worker.end()


class _Worker:
    """A process that attempts the cells it is sent, and answers each with its error or None."""

    def __init__(self, threads: int):
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.connection = cast(Connection, here)
        self._process = context.Process(target=_work, args=(there, threads), daemon=True)
        self._process.start()
        there.close()

    def end(self) -> int | None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _work(connection: Connection, threads: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    while True:
        connection.send(_attempt(*connection.recv()))


def _attempt(path: Path, cell: Job) -> str | None:
    """Runs a cell and writes its result; returns the traceback if that fails."""
    for abandoned in path.parent.glob(f".{path.name}.*.partial"):
        abandoned.unlink()
    try:
        frame = pd.DataFrame(_find(cell.function)(**cell.config, **cell.seeded))
        rows = frame.to_dict("records")
        _write(path, json.dumps({**asdict(cell), "rows": rows}, indent=1, default=_null) + "\n")
    except Exception:  # whatever it is, it is this cell's, and is reported with it
        return traceback.format_exc()
    path.with_suffix(".error").unlink(missing_ok=True)
    return None


def _null(value: Any) -> None:
    """A missing key of a table, as JSON."""
    if value is not pd.NA:
        raise TypeError(f"{value!r} is no number, text or None")


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
