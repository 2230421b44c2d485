"""Where jobs run: processes of this machine, the workers of a Dask cluster, or the nodes of a Slurm cluster.

Each is an `Executor` of the standard library, so that `run_jobs` knows no other.
"""

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

from align_circuits.jobs.files import writable_folder
from align_circuits.jobs.locks import locked, new_file

MOST_IN_AN_ARRAY = 1000
"""Jobs that are submitted to Slurm at once: by default it takes no larger arrays (`MaxArraySize`)."""

SECONDS_TO_ANSWER = 20.0
"""A Dask scheduler that has not answered by then is taken for absent."""


class ProcessExecutor(Executor):
    """New processes of this machine, which share its cores and its CUDA devices, and end with this one.

    A process that dies takes only its own call along, and is replaced. Where there are several CUDA devices, each
    process sees one of them.

    Args:
        processes: Their number, from 1.
        seconds: The longest that a call may run: then its process is ended and replaced; None: as long as it takes.
    """

    def __init__(self, processes: int, *, seconds: float | None = None):
        self._seconds = seconds
        # Each process would take all cores, and threads that wait for each other are slower than one.
        threads = max(1, (os.cpu_count() or 1) // processes)
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = torch.cuda.device_count()
        # Devices that the user selected may be named by UUID, so names are passed on as they are.
        devices = [] if count < 2 else named.split(",")[:count] if named else [str(device) for device in range(count)]
        self._places = TemporaryDirectory(prefix="align-circuits-")
        # A forked process inherits torch's thread pool without its threads, and hangs on first use.
        context: Any = multiprocessing.get_context("spawn")
        start = (threads, devices, processes, self._places.name)
        self._pool = ProcessPool(processes, initializer=_start_worker, initargs=start, context=context)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Runs a call in one of the processes."""
        return self._pool.schedule(fn, args, kwargs, self._seconds)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - it always waits
        """Ends the processes, after their calls or at once."""
        if cancel_futures:
            self._pool.stop()
        else:
            self._pool.close()
        self._pool.join()
        self._places.cleanup()


def _start_worker(threads: int, devices: list[str], processes: int, places: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A worker at work would outlive a parent that is killed.
    # Not `sys.exit`, which would end only the thread.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    if devices:
        # In time: CUDA reads it at its first use, which is in a job.
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[_take_place(places, processes) % len(devices)]


_HELD = ExitStack()
"""The locks that this process holds until it ends."""


def _take_place(places: str, processes: int) -> int:
    """Takes the first free place among the processes; the system frees it when this process ends, however it ends."""
    while True:
        for number in range(processes):
            if _HELD.enter_context(locked(Path(places) / str(number), make=new_file, seconds=0.0)):
                return number
        time.sleep(0.05)  # that of a process which is just ending


class SubmittedExecutor(Executor):
    """Calls as jobs of a submitit executor, whose jobs are no futures: one thread submits them and asks for results.

    Calls that are waiting together are submitted as one array. A future that is cancelled cancels its job. What is
    preempted or runs out of time is requeued, and begins the call anew. That a job was cancelled or its node lost,
    Slurm tells by `sacct`: without its accounting, such a job is waited for.

    Args:
        submitter: Such as `submitit.SlurmExecutor(folder)`, with its parameters set.
        seconds: Between questions for results.
    """

    def __init__(self, submitter: Any, *, seconds: float = 1.0):
        self._submitter, self._seconds = submitter, seconds
        self._new: list[tuple[Future[Any], Any]] = []
        self._ending = self._cancelling = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Submits a call with those that follow at once."""
        from submitit.helpers import FunctionSequence

        call: Any = FunctionSequence()  # which submitit may begin anew where it was preempted
        call.add(fn, *args, **kwargs)
        future: Future[Any] = Future()
        with self._changed:
            # The thread is not woken: calls that follow within `seconds` join the same array.
            self._new.append((future, call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the thread when all jobs are finished, or after cancelling them."""
        with self._changed:
            self._ending, self._cancelling = True, cancel_futures
            self._changed.notify()
        if wait:
            self._thread.join()

    def _follow(self) -> None:
        running: dict[Future[Any], Any] = {}
        while True:
            with self._changed:
                self._changed.wait(self._seconds)
                new, self._new = self._new[:MOST_IN_AN_ARRAY], self._new[MOST_IN_AN_ARRAY:]
                ending = self._ending and not self._new
            if self._cancelling:
                for future in (*running, *(future for future, _ in new)):
                    future.cancel()
            running |= self._submit([(future, call) for future, call in new if not future.cancelled()])
            for future, job in [*running.items()]:
                if future.cancelled():
                    # Unchecked, since the job may have ended meanwhile.
                    job.cancel(check=False)
                    del running[future]
                elif job.done():
                    _settle(future, job)
                    del running[future]
            if ending and not running:
                return

    def _submit(self, new: "list[tuple[Future[Any], Any]]") -> "dict[Future[Any], Any]":
        if not new:
            return {}
        try:
            with self._submitter.batch():
                jobs = [self._submitter.submit(call) for _, call in new]
        except Exception as error:  # such as a partition that does not exist: told by each future
            for future, _ in new:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            return {}
        return dict(zip((future for future, _ in new), jobs, strict=True))


def _settle(future: "Future[Any]", job: Any) -> None:
    """Gives a future the outcome of a job that has ended."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(job.result()[0])
        except Exception as error:  # what the job raised, or that it never completed
            future.set_exception(error)


@contextmanager
def connected(
    on: str, folder: str | Path, *, partition: str | None = None, gpus: int = 0, minutes: int = 60, array: int = 40
) -> Iterator[Executor]:
    """Yields the executor of a cluster.

    Args:
        on: `"dask://HOST:PORT"`, the address of a scheduler whose workers share `folder`, the working directory and the
            code with this machine, with one thread each; or `"slurm"`, whose nodes do.
        folder: Where submitit keeps what it submits, and the logs.
        partition: Of Slurm; None: its default.
        gpus: Of each Slurm job.
        minutes: The time limit of a Slurm job, which is requeued up to three times when it is over.
        array: How many Slurm jobs may run at a time.

    Raises:
        ValueError: Another `on`, a number below its range, no answer, or no Slurm here.
        ImportError: What it needs is not installed.
    """
    if on.startswith("dask://"):
        with _dask_client(address := on.removeprefix("dask://")) as client:
            if not client.scheduler_info()["workers"]:
                warnings.warn(
                    f"the Dask scheduler at {address} has no workers yet, and jobs wait for them: "
                    f"dask worker {address} --nthreads 1",
                    stacklevel=3,
                )
            # Of a pure function Dask would give a call with equal arguments the earlier result, a failure included.
            yield client.get_executor(pure=False)
    elif on == "slurm":
        if gpus < 0 or minutes < 1 or array < 1:
            raise ValueError(f"gpus={gpus}, minutes={minutes}, array={array}: give at least 0, 1 and 1")
        try:
            import submitit
        except ImportError as error:
            raise ImportError("Slurm needs submitit: pip install 'align-circuits[slurm]'") from error
        try:
            submitter = submitit.SlurmExecutor(writable_folder(folder))
        except RuntimeError as error:
            raise ValueError("on='slurm': there is no srun here; start it on a login node of the cluster") from error
        parameters = {"partition": partition, "gpus_per_node": gpus or None}
        set_parameters = {name: value for name, value in parameters.items() if value is not None}
        submitter.update_parameters(job_name="align-circuits", time=minutes, array_parallelism=array, **set_parameters)
        with SubmittedExecutor(submitter) as executor:
            yield executor
    else:
        raise ValueError(f"on={on!r}: give 'dask://HOST:PORT' or 'slurm'")


def _dask_client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("Dask needs distributed: pip install 'align-circuits[dask]'") from error
    try:
        return Client(f"tcp://{address}", timeout=SECONDS_TO_ANSWER)
    except (OSError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {address!r} ({error}): give dask://HOST:PORT") from error


def why_lost(error: BaseException) -> str:
    """Returns why an executor has no outcome of a call, as a line."""
    if isinstance(error, TimeoutError):
        return "it took longer than its executor allows\n"
    if isinstance(error, ProcessExpired):
        return f"its process died with exit code {error.exitcode} (-9: killed, perhaps for memory)\n"
    return f"its executor lost it: {type(error).__name__}: {error}\n"
