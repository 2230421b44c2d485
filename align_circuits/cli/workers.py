"""Where the jobs of a verb run: local processes, or a cluster."""

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from align_circuits.jobs.executors import connected
from align_circuits.jobs.files import inside


@dataclass(frozen=True)
class Workers:
    """Local processes or a cluster."""

    jobs: int = 1
    """How many local processes; with --on, how many jobs of the cluster share a sweep. `reproduce`, `each` and
    `benchmark` take this or --on, not both: with --on they use all workers."""
    on: str | None = None
    """Where the jobs run in place of local processes: dask://HOST:PORT, the scheduler of a Dask cluster, or slurm. Its
    workers need this working directory, on a disk that all of them share, and the same version of this package."""
    slurm_partition: str | None = None
    """The partition of --on slurm; by default Slurm's own."""
    slurm_gpus: int = 0
    """The GPUs of a Slurm job."""
    slurm_minutes: int = 60
    """The time limit of a Slurm job, which is requeued up to three times when it is over."""
    array: int = 40
    """How many Slurm jobs run at a time."""

    def executor(self, folder: Path, *, shared: bool = False) -> AbstractContextManager[Executor | None]:
        """Returns what runs the jobs: a cluster, or None for local processes.

        What is submitted to Slurm is kept in the folder. Jobs that share one sweep may be several on a cluster, too.
        """
        if self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs}: give at least 1")
        if self.on is not None and self.jobs > 1 and not shared:
            raise ValueError(
                f"--jobs {self.jobs} --on {self.on}: give one of them; with --on, all workers are used (of Slurm, as "
                "many as --array)"
            )
        if self.on != "slurm" and replace(self, jobs=1, on=None) != Workers():
            raise ValueError("--array and --slurm-... are options of --on slurm: add that, or leave them out")
        if self.on is None:
            return nullcontext()
        return connected(
            self.on,
            inside(folder, "submitted"),
            partition=self.slurm_partition,
            gpus=self.slurm_gpus,
            minutes=self.slurm_minutes,
            array=self.array,
        )
