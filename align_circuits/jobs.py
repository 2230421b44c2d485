"""Resumable jobs: each is a function, a config and a seed, and writes one file; finished jobs never run again."""

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
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from tqdm.auto import tqdm

from align_circuits.files import remove_partial, replacing, writable_folder


@dataclass(frozen=True)
class Job:
    """One call of a function.

    Raises:
        ValueError: The function has no importable name, or the config is not JSON.
    """

    function: str
    """`"module:name"`, importable by a new process; called as `function(**config, seed=seed)`, it returns rows: a
    DataFrame or a list of mappings from column to number, text or None."""
    config: Mapping[str, Any]
    """Its keyword arguments, as JSON."""
    seed: int | None = 0
    """Fixes what the function draws at random; None if it draws nothing, and is called without."""

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
class JobFailure:
    """A job that raised, or whose process died."""

    job: Job
    error: str
    """The traceback, or how the process ended."""


@dataclass(frozen=True, eq=False)
class JobResults:
    """The results of a list of jobs."""

    frame: pd.DataFrame
    """The rows of all finished jobs, in the order of the jobs: config and seed, then the columns of the row, which
    replace a config entry of the same name."""
    failures: tuple[JobFailure, ...]
    """The jobs without results; the next `run_jobs` runs them again."""
    rows: tuple[list[dict[str, Any]], ...]
    """What each job returned, without its config, in the order of the jobs; nothing where it failed."""

    def all_rows(self) -> pd.DataFrame:
        """Returns the rows of all jobs.

        Raises:
            ValueError: A job failed.
        """
        if self.failures:
            first = self.failures[0]
            raise ValueError(
                f"{len(self.failures)} jobs failed, the first with {first.job.config}:\n{first.error}\n"
                "Finished jobs are kept: run it again when the cause is removed"
            )
        return self.frame


def run_jobs(jobs: Sequence[Job], folder: str | Path, *, processes: int = 1, progress: bool = True) -> JobResults:
    """Runs the jobs that have no result in `folder` yet, and returns the results of all.

    Each result is one JSON file, written atomically, whose name ends in hashes of function, code (see `code_version`),
    and config and seed. So a killed run goes on with the unfinished jobs, and another config, seed or function is
    another job; files of earlier code are ignored, and removed once all jobs of a function are finished. A job that
    fails leaves a `.error` file with its config and traceback, and the others go on.

    With one process the jobs run in this one; with more, in new processes that share the cores and end with this one.

    Args:
        jobs: The jobs; one that is listed twice runs once.
        folder: Where the files are.
        processes: The number of processes.
        progress: Whether to draw a progress bar over the jobs.

    Raises:
        ValueError: A function cannot be imported, `processes` is below 1, or the folder cannot be written.
    """
    if processes < 1:
        raise ValueError(f"processes={processes}: give at least 1")
    folder = writable_folder(folder)
    versions = {name: code_version(name) for name in dict.fromkeys(job.function for job in jobs)}
    paths = {_path(folder, job, versions[job.function]): job for job in jobs}
    waiting = {path: job for path, job in paths.items() if not path.exists()}
    attempts = _attempts_here(waiting) if processes == 1 else _parallel_attempts(waiting, min(processes, len(waiting)))
    failures = []
    with tqdm(total=len(paths), initial=len(paths) - len(waiting), disable=not progress, unit="job") as bar:
        for path, error in attempts:
            if error is not None:
                failures.append(JobFailure(paths[path], error))
                _write(path.with_suffix(".error"), json.dumps(asdict(paths[path]), indent=2) + "\n\n" + error)
            bar.set_postfix(failed=len(failures), refresh=False)
            bar.update()
    if not failures:
        for function, version in versions.items():
            for of_function in (f"{_prefix(function)}-*", f".{_prefix(function)}-*.partial"):
                for path in folder.glob(of_function):
                    if f"-{version}-" not in path.name:
                        path.unlink(missing_ok=True)
    rows = {path: json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else [] for path in paths}
    joined = [{**job.config, **job.seeded, **row} for path, job in paths.items() for row in rows[path]]
    by_job = tuple(rows[_path(folder, job, versions[job.function])] for job in jobs)
    return JobResults(pd.DataFrame(joined), tuple(failures), by_job)


def code_version(function: str) -> str:
    """Returns a hash of the code on which a function depends.

    It covers the function's module and the modules of this package and of the function's own that it imports, directly
    or not, as syntax trees without docstrings: comments, docstrings and layout do not change the version, nor do other
    packages.

    Raises:
        ValueError: There is no such function.
    """
    module, _, _ = function.partition(":")
    _find(function)
    roots, hashes, waiting = frozenset({"align_circuits", module.partition(".")[0]}), {}, [module]
    while waiting:
        name = waiting.pop()
        if name in hashes:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        # Relative imports count from the package: that is the module itself if it is an `__init__`.
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        hashes[name], imported = _read_module(spec.origin, Path(spec.origin).stat().st_mtime_ns, package, roots)
        waiting += imported
    return _digest(hashes)


@cache
def _read_module(path: str, _mtime_ns: int, package: str, roots: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    """A hash of a module without its docstrings, and the modules that it imports.

    The time of the last change is an argument so that an edited file is read again: every study asks for the version of
    several functions, and parsing the whole package takes a second.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    imported = tuple(_imports(tree, package, roots))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported


def _imports(tree: ast.Module, package: str, roots: frozenset[str]) -> Iterator[str]:
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
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"function={function!r} cannot be imported ({error}): give 'module:name'") from error
    return value  # pyright: ignore[reportReturnType]


def _path(folder: Path, job: Job, version: str) -> Path:
    return folder / f"{_prefix(job.function)}-{version}-{_digest([job.config, job.seed])}.json"


def _prefix(function: str) -> str:
    """What the names of the files of a function begin with; the hash tells functions of equal names apart."""
    return f"{function.rpartition(':')[2]}-{_digest(function)[:8]}"


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _attempts_here(jobs: Mapping[Path, Job]) -> Iterator[tuple[Path, str | None]]:
    """Runs each job in this process, and sets back the number of threads that a job may choose for itself."""
    threads = torch.get_num_threads()
    for path, job in jobs.items():
        try:
            error = _attempt(path, job)
        finally:
            torch.set_num_threads(threads)
        yield path, error


def _parallel_attempts(jobs: Mapping[Path, Job], processes: int) -> Iterator[tuple[Path, str | None]]:
    """Gives each process one job at a time; a process that dies ends only its own job, and is replaced."""
    # Each process would take all cores, and threads that wait for each other are slower than one.
    threads = max(1, (os.cpu_count() or 1) // max(processes, 1))
    waiting = deque(jobs.items())
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Path]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                worker = idle.pop() if idle else _Worker(threads)
                path, job = waiting.popleft()
                worker.connection.send((path, job))
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
    """A process that runs the jobs it is sent, and replies to each with its error or None."""

    def __init__(self, threads: int):
        # A forked process inherits torch's thread pool without its threads, and hangs on first use.
        context = multiprocessing.get_context("spawn")
        own_end, other_end = context.Pipe()
        self.connection = cast(Connection, own_end)
        self._process = context.Process(target=_work, args=(other_end, threads), daemon=True)
        self._process.start()
        # While this process holds the other end too, `recv` would wait for a dead worker instead of raising EOFError.
        other_end.close()

    def end(self) -> int | None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _work(connection: Connection, threads: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # `daemon` ends a worker only if its parent exits in order; one that is killed would leave workers behind.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    while True:
        connection.send(_attempt(*connection.recv()))


def _attempt(path: Path, job: Job) -> str | None:
    """Runs a job and writes its result; returns the traceback if it fails."""
    remove_partial(path)  # of a killed attempt at this very job; other jobs may be writing now
    try:
        frame = pd.DataFrame(_find(job.function)(**job.config, **job.seeded))
        rows = frame.to_dict("records")
        _write(path, json.dumps({**asdict(job), "rows": rows}, indent=1, default=_null) + "\n")
    except Exception:  # any error is the job's own: it is reported with the job, and the others go on
        return traceback.format_exc()
    path.with_suffix(".error").unlink(missing_ok=True)
    return None


def _null(value: Any) -> None:
    """A missing key of a table, as JSON."""
    if value is not pd.NA:
        raise TypeError(f"{value!r} is not JSON serializable: return numbers, texts and None")


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
