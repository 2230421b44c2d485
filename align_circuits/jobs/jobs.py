"""Resumable jobs: each is a function, a config and a seed, and writes one file; finished jobs never run again."""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from align_circuits.jobs.code_versions import code_version, function_of
from align_circuits.jobs.executors import ProcessExecutor, why_lost
from align_circuits.jobs.files import inside, read_object, remove_partial, replacing
from align_circuits.jobs.locks import claimed, is_claimed, shared_folder, until_done, written_once

Attempts = Iterator[tuple[Path, str | None]]
"""The path of each job with its error, which is empty if there is none; None where another process is at the job."""


@dataclass(frozen=True)
class Job:
    """One call of a function.

    Raises:
        ValueError: The function has no importable name, or the config is not JSON.
    """

    function: str
    """What is called as `function(**config, seed=seed)` and returns rows, a DataFrame or a list of mappings from column
    to number, text or None; a new process imports it by this name, `"module:name"`."""
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
            json.dumps({**self.config})
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

    def __str__(self) -> str:
        """The job and the last line of its error."""
        name = self.job.function.rpartition(":")[2]
        settings = ", ".join(f"{key}={value!r}" for key, value in {**self.job.config, **self.job.seeded}.items())
        return f"{name}({settings[:120]}): {self.last_line[:200]}"

    @property
    def last_line(self) -> str:
        """The last line of its error."""
        return (self.error.strip().splitlines() or [""])[-1]


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
                f"{len(self.failures)} of {len(self.rows)} jobs failed, the first with {first.job.config}: "
                f"{first.last_line}\nFinished jobs are kept: run it again when the cause is removed.\n{first.error}"
            )
        return self.frame


def run_jobs(
    jobs: Sequence[Job],
    folder: str | Path,
    *,
    executor: Executor | None = None,
    processes: int = 1,
    progress: bool = True,
) -> JobResults:
    """Runs the jobs that have no result in `folder` yet, and returns the results of all.

    Each result is one JSON file, written atomically, whose name ends in hashes of function, code (see `code_version`),
    and config and seed. So a killed run goes on with the unfinished jobs, and another config, seed or function is
    another job; files of earlier code are ignored, and removed once all jobs of a function are finished. A file that a
    function reads does not count: give a hash of it in the config. A job that fails leaves a `.error` file with its
    config and traceback, and the others go on.

    Several runs may share a folder, on one host or several: a job that another process is at is left to it, and done
    here only if that fails. A file with the list of jobs lets `read_progress` follow the run.

    With one process the jobs run in this one; with more, in new processes that share cores and CUDA devices and end
    with this one; with an executor, wherever that runs them.

    Args:
        jobs: The jobs; one that is listed twice runs once.
        folder: Where the files are.
        executor: Of the standard library's kind, such as `distributed.Client(...).get_executor()`. Its workers share
            the folder, the working directory and the code with this process: where `code_version` differs the job
            fails.
        processes: The number of processes, without an executor.
        progress: Whether to draw a progress bar over the jobs, and to name those that fail.

    Raises:
        ValueError: A function cannot be imported or told from others, `processes` is below 1 or given beside an
            executor, or the folder cannot be written or locked.
    """
    if processes < 1:
        raise ValueError(f"processes={processes}: give at least 1")
    if executor is not None and processes != 1:
        raise ValueError(f"processes={processes} beside an executor, which has its own: leave one of them out")
    folder = shared_folder(folder)
    code_versions = {name: code_version(name) for name in dict.fromkeys(job.function for job in jobs)}
    _VERSIONS.update(code_versions)
    paths = {_path(folder, job, code_versions[job.function]): job for job in jobs}
    waiting = {path: job for path, job in paths.items() if not path.exists()}
    if paths:
        listed = {path.name: asdict(job) for path, job in paths.items()}
        # Named by its jobs: the same run again replaces its plan, another run has its own.
        write_plan(folder / f".plan-{_digest(sorted(listed))}.json", {"jobs": listed})
    if executor is not None:
        attempts = until_done(waiting, lambda left: _attempts_on(executor, left, code_versions))
    elif processes == 1:
        attempts = until_done(waiting, _attempts_here)
    else:
        attempts = until_done(waiting, lambda left: _attempts_in_processes(left, code_versions, processes))
    failures = []
    with tqdm(total=len(paths), initial=len(paths) - len(waiting), disable=not (progress and paths), unit="job") as bar:
        for path, error in attempts:
            if error:
                failures.append(JobFailure(paths[path], error))
                # Another process may have done the job meanwhile: its result stands, and the error is told but not
                # kept.
                if not path.exists():
                    _write(path.with_suffix(".error"), json.dumps(asdict(paths[path]), indent=2) + "\n\n" + error)
                if progress:
                    # Above the bar, which a plain print would break.
                    bar.write(f"failed: {failures[-1]}", file=sys.stderr)
            bar.set_postfix(failed=len(failures), refresh=False)
            bar.update()
    if not failures:
        _remove_earlier(folder, code_versions)
    rows = {path: _rows(path) for path in paths}
    joined = [row for path, job in paths.items() for row in _with_config(job, rows[path])]
    by_job = tuple(rows[_path(folder, job, code_versions[job.function])] for job in jobs)
    return JobResults(pd.DataFrame(joined), tuple(failures), by_job)


@dataclass(frozen=True, eq=False)
class Progress:
    """How far a run of `run_jobs` is, or a sweep whose parts are kept, by the files of its folder."""

    what: str
    """What is measured, for people."""
    started: float
    """When, in seconds since 1970; of a run that was repeated, the last time."""
    done: int
    running: int
    """Jobs that a process is at now."""
    waiting: int
    """Jobs that are neither done, running nor failed."""
    failures: tuple[JobFailure, ...]
    """Jobs whose last attempt failed and that no process is at."""
    seconds_left: float | None
    """At the speed since the start; None before the first job is done, and where nothing runs."""


def read_progress(folder: str | Path) -> list[Progress]:
    """Returns how far each run in a folder of `run_jobs` is, the latest first, while it runs or afterwards.

    Raises:
        ValueError: No run has begun there.
    """
    return [_progress(Path(folder), plan) for plan in _plans(folder)]


def collect_rows(folder: str | Path) -> pd.DataFrame:
    """Returns the rows of all jobs that are done in a folder of `run_jobs`, as in `JobResults`, while others run.

    Raises:
        ValueError: No run has begun there.
    """
    jobs = {path: job for plan in _plans(folder) for path, job in _jobs_of(Path(folder), plan).items()}
    return pd.DataFrame([row for path, job in jobs.items() for row in _with_config(job, _rows(path))])


def _plans(folder: str | Path) -> list[dict[str, Any]]:
    """What `write_plan` wrote, the latest first."""
    plans = [read_object(plan, jobs=dict, started=(int, float)) for plan in Path(folder).glob(".plan-*.json")]
    if not plans:
        raise ValueError(f"{str(folder)!r} holds no run of jobs: give the folder of a run that has begun")
    return sorted(plans, key=lambda plan: -plan["started"])


def _jobs_of(folder: Path, plan: Mapping[str, Any]) -> dict[Path, Job]:
    """The jobs of a plan, by the files of their results.

    Raises:
        ValueError: The plan was edited, such that a job is none.
    """
    try:
        return {inside(folder, name): Job(**job) for name, job in plan["jobs"].items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"a plan in {str(folder)!r} lists what is no job ({error}): remove .plan-*.json there, and give the same "
            "command again"
        ) from error


def _progress(folder: Path, plan: Mapping[str, Any]) -> Progress:
    jobs = _jobs_of(folder, plan)
    failed = {
        path: JobFailure(job, error.read_text(encoding="utf-8", errors="replace"))
        for path, job in jobs.items()
        if (error := path.with_suffix(".error")).exists()
    }
    what = ", ".join(dict.fromkeys(job.function.partition(":")[2] for job in jobs.values()))
    return progress_of(what, float(plan["started"]), jobs, failed)


def progress_of(what: str, started: float, paths: Collection[Path], failed: Mapping[Path, JobFailure]) -> Progress:
    """Returns how far the work is that writes some files, of which the last attempt at some failed."""
    done = {path for path in paths if path.exists()}
    running = {path for path in paths if path not in done and is_claimed(path)}
    failures = tuple(failure for path, failure in failed.items() if path not in done | running)
    # What an earlier run has left took no time of this one.
    fresh = sum(path.stat().st_mtime >= started for path in done)
    waiting = len(paths) - len(done) - len(running) - len(failures)
    a_job = (time.time() - started) / fresh if fresh else None
    left = a_job * (waiting + len(running)) if a_job is not None and running else None
    return Progress(what, started, len(done), len(running), waiting, failures, left)


def write_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Writes what a run is to do, and when it began, for `progress_of`; the same run again replaces the file."""
    with claimed(path) as mine:
        if mine:  # else another process of the same run is writing it
            remove_partial(path)
            _write(path, json.dumps({"started": time.time(), **plan}) + "\n")


def _remove_earlier(folder: Path, code_versions: Mapping[str, str]) -> None:
    """Removes what earlier code has left of functions whose jobs are all finished."""
    gone = set()
    for function, version in code_versions.items():
        for pattern in ("{}-*", ".{}-*.partial", ".{}-*.claim"):
            for path in folder.glob(pattern.format(_prefix(function))):
                if f"-{version}-" not in path.name:
                    path.unlink(missing_ok=True)
                    gone.add(path.name)
    for plan in folder.glob(".plan-*.json") if gone else ():
        if gone & read_object(plan, jobs=dict)["jobs"].keys():
            plan.unlink(missing_ok=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = read_object(path, rows=list)["rows"] if path.exists() else []
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{str(path)!r} is broken (a row is no object): remove it, and give the same command again")
    return rows


def _with_config(job: Job, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**job.config, **job.seeded, **row} for row in rows]


def _path(folder: Path, job: Job, version: str) -> Path:
    return folder / f"{_prefix(job.function)}-{version}-{_digest([job.config, job.seed])}.json"


def _prefix(function: str) -> str:
    """What the names of the files of a function begin with; the hash tells functions of equal names apart."""
    return f"{function.rpartition(':')[2]}-{_digest(function)[:8]}"


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _attempts_here(jobs: Mapping[Path, Job]) -> Attempts:
    """Runs each job in this process, and sets back the number of threads that a job may choose for itself."""
    threads = torch.get_num_threads()
    for path, job in jobs.items():
        try:
            error = _attempt(path, job)
        finally:
            torch.set_num_threads(threads)
        yield path, error


def _attempts_in_processes(jobs: Mapping[Path, Job], code_versions: Mapping[str, str], processes: int) -> Attempts:
    executor = ProcessExecutor(min(processes, len(jobs)))
    try:
        yield from _attempts_on(executor, jobs, code_versions)
    finally:  # also after an interrupt: no one waits for what is running
        executor.shutdown(cancel_futures=True)


def _attempts_on(executor: Executor, jobs: Mapping[Path, Job], code_versions: Mapping[str, str]) -> Attempts:
    folder = Path.cwd()
    futures = {
        executor.submit(_attempt, path, job, code_versions[job.function], folder): path for path, job in jobs.items()
    }
    try:
        for future in as_completed(futures):
            try:
                error = future.result()
            except (Exception, CancelledError) as lost:  # the job's own errors are returned
                error = why_lost(lost)
            yield futures[future], error
    finally:
        # After an error or an interrupt nothing more is to begin.
        for future in futures:
            future.cancel()


def _attempt(path: Path, job: Job, version: str | None = None, folder: Path | None = None) -> str | None:
    """Runs a job, of this code version where one is given, in this folder where one is given, and writes its result.

    Returns the traceback if it fails, "" if not, and None where another process is at it.
    """

    def run(temporary: Path) -> None:
        if version not in (None, _version_here(job.function)):
            raise RuntimeError(
                f"{job.function} is not that of the process which submits it: give both the same code, versions and "
                "settings of PyTorch, and start the worker anew"
            )
        rows = pd.DataFrame(function_of(job.function)(**job.config, **job.seeded)).to_dict("records")
        text = json.dumps({**asdict(job), "rows": rows}, indent=1, default=_null) + "\n"
        temporary.write_text(text, encoding="utf-8")

    try:
        if folder is not None:
            os.chdir(folder)  # for good: a worker of several threads would set it back under its other jobs
        if not written_once(path, run):
            return None
        path.with_suffix(".error").unlink(missing_ok=True)
    except Exception:  # any error is the job's own: it is reported with the job, and the others go on
        return traceback.format_exc()
    return ""


def _version_here(function: str) -> str:
    """As it was before this process ran any of its jobs, which may fill a cache of the function's."""
    if function not in _VERSIONS:
        _VERSIONS[function] = code_version(function)
    return _VERSIONS[function]


_VERSIONS: dict[str, str] = {}
"""Of the functions whose jobs this process submits or runs for another one."""


def _null(value: Any) -> None:
    """A missing key of a table, as JSON."""
    if value is not pd.NA:
        raise TypeError(f"{value!r} is not JSON serializable: return numbers, texts and None")


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
