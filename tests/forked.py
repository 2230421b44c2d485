"""Processes for tests that kill: one server forks them all, with what they need imported already.

The list of modules belongs to the interpreter, and the last one to set it wins: a list in each file would leave others
to import PyTorch in every process.
"""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "align_circuits.jobs.jobs",
        "align_circuits.training.loop",
        "hypothesis",
        "pytest",
        "transformers.models.llama.modeling_llama",
    ]
)


def peak_of(make: Callable[..., Any], n: int, *arguments: Any) -> int:
    """Returns by how many bytes the memory of a process grows at the most while `make(n, *arguments)` runs.

    On Linux alone. What is imported or set up once does not count: `make(2, *arguments)` ran before.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send_peak, args=(sender, make, n, *arguments))
    process.start()
    sender.close()
    peak = receiver.recv()
    process.join()
    return peak


def _send_peak(sender: Any, make: Callable[..., Any], n: int, *arguments: Any) -> None:
    make(2, *arguments)
    sender.send(peak_here(lambda: make(n, *arguments)))


def peak_here(work: Callable[[], Any]) -> int:
    """Returns by how many bytes the memory of this process grows at the most during a call. On Linux alone."""

    def kilobytes(name: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what is free already would be used, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    made = work()
    peak = 1024 * (kilobytes("VmHWM") - before)
    del made
    return peak
