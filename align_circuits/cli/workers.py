"""Where the jobs of a verb run: local processes, or a cluster."""

from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from align_circuits.executors import connected


@dataclass(frozen=True)
class Workers:
    """Local processes or a cluster."""

    jobs: int = 1
    """How many local processes; with --on, how many jobs of the cluster share a sweep. `reproduce` and `each` take
    either this or --on."""
    on: str | None = None
    """Where the jobs run in place of local processes: dask://HOST:PORT, the scheduler of a Dask cluster, or slurm. Its
    workers share this folder and this code."""
    slurm_partition: str | None = None
    """The partition of --on slurm; by default Slurm's own."""
    slurm_gpus: int = 0
    """The GPUs of a Slurm job."""
    slurm_minutes: int = 60
    """The time limit of a Slurm job, which is requeued up to three times when it is over."""
    array: int = 40
    """How many Slurm jobs run at a time."""

    def executor(self, folder: Path) -> AbstractContextManager[Executor | None]:
        """Returns what runs the jobs: a cluster, or None for local processes.

        Raises:
            ValueError: No jobs, options of Slurm without it, or as `connected`.
        """
        if self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs}: give at least 1")
        if self.on != "slurm" and replace(self, jobs=1, on=None) != Workers():
            raise ValueError("--array and --slurm-... are options of --on slurm: add that, or leave them out")
        if self.on is None:
            return nullcontext()
        return connected(
            self.on,
            folder / "submitted",
            partition=self.slurm_partition,
            gpus=self.slurm_gpus,
            minutes=self.slurm_minutes,
            array=self.array,
        )
