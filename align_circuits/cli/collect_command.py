"""`align-circuits collect`, and what `align-circuits status` prints."""

import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from align_circuits.cli.command_base import Verb
from align_circuits.cli.folders import Results
from align_circuits.jobs.jobs import Progress, collect_rows, read_progress
from align_circuits.jobs.sweeps import read_sweeps


@dataclass(frozen=True)
class Collect(Verb):
    """Writes rows.csv, the rows of all jobs that are done: their settings, then what they measured."""

    run: tyro.conf.Positional[Path]
    """The folder --out of `reproduce`, `each` or `benchmark`; if none was given runs, runs/each/0001 and so on, or
    runs/benchmark."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        try:
            rows = collect_rows(_jobs_folder(self.run))
        except ValueError:
            if not _sweeps(self.run):
                raise
            raise ValueError(
                f"{str(self.run)!r} holds parts of sweeps, which only the verbs that began them can merge: give the "
                "same command again; align-circuits status says how far it is"
            ) from None
        rows.to_csv(results.new / "rows.csv", index=False)
        print_progress(self.run)
        print(f"{len(rows)} rows: {results.folder / 'rows.csv'}")


def print_progress(run: Path) -> None:
    """Prints how far the runs and the sweeps in a folder are, a line each, and the jobs that failed."""
    sweeps = _sweeps(run)
    try:
        runs = read_progress(_jobs_folder(run))
    except ValueError:
        if not sweeps:
            raise
        runs = []
    for unit, in_progress in (("jobs", runs), ("parts", sweeps)):
        for progress in in_progress:
            try:
                started = time.strftime("%Y-%m-%d %H:%M", time.localtime(progress.started))
            except (ValueError, OverflowError, OSError) as error:
                raise ValueError(
                    f"a plan in {str(run)!r} has begun at no time ({progress.started}): remove .plan*.json there, and "
                    "give the same command again"
                ) from error
            counts = f"{progress.done} done, {progress.running} running, {progress.waiting} waiting"
            left = progress.seconds_left
            soon = "" if left is None else f", {max(left, 1) / 60:.1f} minutes left"
            print(f"{progress.what}, started {started}, {unit}: {counts}, {len(progress.failures)} failed{soon}")
            for failure in progress.failures:
                print(f"  failed: {failure}")


def _sweeps(run: Path) -> list[Progress]:
    """How far the sweeps of a folder are."""
    return [*read_sweeps(run), *read_sweeps(run / "parts")]


def _jobs_folder(run: Path) -> Path:
    """The folder of the jobs: that of a verb's results, or itself."""
    return run / "jobs" if (run / "jobs").is_dir() else run
