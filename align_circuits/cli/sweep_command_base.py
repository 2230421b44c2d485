"""The base class of verbs whose sweep several processes may share."""

import shutil
import sys
from abc import abstractmethod
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from align_circuits.cli.command_base import PromptVerb
from align_circuits.cli.entry import verb_class
from align_circuits.cli.folders import Results
from align_circuits.cli.workers import Workers
from align_circuits.jobs.jobs import Job, run_jobs
from align_circuits.run.options import RunOptions


@dataclass(frozen=True)
class SweepVerb(PromptVerb):
    """A verb that measures parts of a sweep, each of which may come from another process."""

    parts: Path | None = None
    """A folder that keeps the parts of the sweep, so that the same command goes on where a killed one stopped, and
    commands that run at once share the work; by default none, and runs/parts with --jobs or --on."""
    workers: tyro.conf.OmitArgPrefixes[Workers] = field(default_factory=Workers)
    """Who shares the sweep."""

    @abstractmethod
    def measure(self, results: Results) -> None:
        """Measures in this process what no other one is at, and writes the results into a folder."""

    @property
    def options(self) -> RunOptions:
        """How the model is run."""
        return RunOptions(self.engine, self.batch_size, cache_dir=self.parts)

    @property
    def settings(self) -> dict[str, Any]:
        """The options but for those that say where the work is done: a repetition does it anew."""
        return {name: value for name, value in super().settings.items() if name not in ("parts", "workers")}

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        count = self.workers.jobs
        if self.workers == Workers():
            return self.measure(results)
        parts_folder = self.parts or Path("runs") / "parts"
        config = {"verb": self.verb, "settings": self.settings, "parts": str(parts_folder)}
        folders = {"new": str(results.new), "folder": str(results.folder)}
        jobs = [Job(f"{__name__}:work", {**config, **folders, "worker": worker}, None) for worker in range(count)]
        with self.workers.executor(parts_folder, shared=True) as executor:
            print(f"progress: align-circuits status {parts_folder}", file=sys.stderr)
            processes = count if executor is None else 1
            done = run_jobs(jobs, results.new / "jobs", executor=executor, processes=processes, progress=False)
        if done.failures:
            error = done.failures[0].last_line
            raise ValueError(f"{len(done.failures)} of {count} jobs failed, finished parts are kept: {error}")
        shutil.rmtree(results.new / "jobs")
        print(done.rows[0][0]["printed"], end="")
        return None


def work(
    *, verb: str, settings: dict[str, Any], parts: str, new: str, folder: str, worker: int
) -> list[dict[str, Any]]:
    """Does the share of one process; the first one also writes the results into `new`."""
    sharing = replace(verb_class(verb).from_settings(settings, Path(folder)), parts=Path(parts))
    with TemporaryDirectory() as nowhere, redirect_stdout(StringIO()) as printed:
        sharing.measure(Results(Path(nowhere if worker else new), Path(folder)))
    return [{"printed": printed.getvalue()}]
