"""Jobs on the Slurm that `slurm.sh` has started: an array, preemption with requeue, and a job that is cancelled."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from align_circuits.jobs.executors import connected
from align_circuits.jobs.jobs import Job, JobResults, run_jobs

CODE = """
import os
import time
from pathlib import Path


def wait(*, x, notes, stop, seed):
    with Path(notes).open("a") as file:
        array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))  # a single job has none
        file.write(f"{x} {array}_{task}\\n")
    while x == 0 and Path(stop).exists():
        time.sleep(0.1)
    return [{"y": x**2}]
"""


def begun(notes: Path) -> list[list[str]]:
    """The calls so far: job, and array with task."""
    return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []


def when_begun(notes: Path, count: int, then: list[str]) -> threading.Thread:
    """Does something to the Slurm job of x = 0 once that has begun a number of times, or after five minutes."""
    limit = time.monotonic() + 300

    def act() -> None:
        while len(ids := [name for x, name in begun(notes) if x == "0"]) < count and time.monotonic() < limit:
            time.sleep(0.2)
        subprocess.run([part.replace("ID", ids[-1]) for part in then], check=True)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Runs the jobs and checks them."""
    folder = Path(tempfile.mkdtemp())
    (folder / "waiting.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])  # that of the nodes
    stop = folder / "stop"

    def run(name: str) -> tuple[JobResults, Path]:
        notes = folder / f"{name}.notes"
        jobs = [Job("waiting:wait", {"x": x, "notes": str(notes), "stop": str(stop)}) for x in range(6)]
        with connected("slurm", folder / "submitted", partition="low", array=3, minutes=5) as executor:
            return run_jobs(jobs, folder / name, executor=executor, progress=False), notes

    def check(results: JobResults, missing: int) -> None:
        assert len(results.failures) == missing, results.failures
        assert results.frame["y"].tolist() == [x**2 for x in range(missing, 6)]

    results, notes = run("array")
    check(results, 0)
    names = [name for _, name in begun(notes)]
    assert len(names) == 6 and len({name.partition("_")[0] for name in names}) < 6, names
    print(f"array: 6 jobs in {len({name.partition('_')[0] for name in names})} submissions, all done")

    stop.touch()
    urgent = ["sbatch", "--partition=high", "--cpus-per-task=3", "--output=/dev/null", "--wrap=sleep 1"]
    notes = folder / "preempted.notes"
    when_begun(notes, 1, urgent)
    when_begun(notes, 2, ["rm", str(stop)])
    results, notes = run("preempted")
    check(results, 0)
    times = sum(x == "0" for x, _ in begun(notes))
    assert times == 2, f"the job began {times} times"
    print("preemption: the job was requeued, began anew and finished")

    stop.touch()
    when_begun(folder / "cancelled.notes", 1, ["scancel", "ID"])
    results, notes = run("cancelled")
    check(results, 1)
    stop.unlink()
    before = len(begun(notes))
    results, notes = run("cancelled")
    check(results, 0)
    assert len(begun(notes)) == before + 1, "a finished job was run again"
    print("cancellation: one job failed, and the second run did that one alone")


if __name__ == "__main__":
    main()
