"""A sweep on a Dask cluster of three worker processes, which are killed at random while they work.

    python tests/cluster/kills.py --kills 30 --jobs 60

Nothing may be lost, nothing that has finished run again, and the frame must be that of one process.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import dask.config
import pandas as pd
from distributed import Client, Scheduler, Worker

from align_circuits.jobs.jobs import Job, run_jobs

FORK: Any = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["align_circuits.jobs.jobs", "distributed"])

CODE = """
import time
from pathlib import Path

import numpy as np


def draw(*, x, seconds, notes, seed):
    with Path(notes).open("a") as file:
        file.write(f"{x} {time.time_ns()}\\n")
    time.sleep(seconds)
    return [{"y": value} for value in np.random.default_rng(seed).normal(size=3).tolist()]
"""


def schedule(address: Any) -> None:
    """Runs a scheduler, which gives a task as many tries as there may be kills."""
    dask.config.set({"distributed.scheduler.allowed-failures": 1000})

    async def main() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            address.send(scheduler.address)
            await scheduler.finished()

    asyncio.run(main())


def work(address: str, path: str) -> None:
    """Runs a worker of one thread."""
    sys.path.insert(0, path)

    async def main() -> None:
        async with Worker(address, nthreads=1, host="127.0.0.1", dashboard=False, local_directory=path) as worker:
            await worker.finished()

    asyncio.run(main())


def sweep(kills: int, number: int, seconds: float, seed: int, folder: Path) -> int:
    """Runs the sweep and checks it; returns how many jobs were begun more than once.

    Raises:
        AssertionError: A job was lost, or run again after it had finished, or the frames differ.
    """
    (folder / "drawing.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    notes = folder / "notes"

    def jobs(seconds: float) -> list[Job]:
        return [Job("drawing:draw", {"x": x, "seconds": seconds, "notes": str(notes)}, x) for x in range(number)]

    here, there = FORK.Pipe()
    scheduler = FORK.Process(target=schedule, args=(there,))
    scheduler.start()
    address = here.recv()
    workers: list[Any] = []

    def begin() -> None:
        workers.append(FORK.Process(target=work, args=(address, str(folder))))
        workers[-1].start()

    draw, done, killed = random.Random(seed), threading.Event(), 0

    def kill() -> None:
        nonlocal killed
        while killed < kills and not done.wait(draw.uniform(0.1, 0.5) * number * seconds / max(kills, 1)):
            victim = workers.pop(draw.randrange(len(workers)))
            victim.kill()
            victim.join()
            killed += 1
            begin()

    killer = threading.Thread(target=kill)
    try:
        for _ in range(3):
            begin()
        with Client(address) as client:
            client.wait_for_workers(3)
            killer.start()
            results = run_jobs(jobs(seconds), folder / "on_dask", executor=client.get_executor(), progress=False)
    finally:
        done.set()
        if killer.ident:
            killer.join()
        for process in (*workers, scheduler):
            process.kill()
            process.join()
    assert not results.failures, results.failures[0].error
    begun = [tuple(map(int, line.split())) for line in notes.read_text().splitlines()]
    for path in (folder / "on_dask").glob("draw-*.json"):
        x = json.loads(path.read_text())["config"]["x"]
        late = [each for each in begun if each[0] == x and each[1] > path.stat().st_mtime_ns]
        assert not late, f"job {x} was run again after it had finished"
    alone = run_jobs(jobs(0), folder / "alone", progress=False)
    there, here = (frame.drop(columns="seconds") for frame in (results.frame, alone.frame))
    pd.testing.assert_frame_equal(there, here, check_exact=True)
    assert len(results.frame) == 3 * number
    assert killed == kills, f"only {killed} workers were killed before the sweep ended: give more jobs"
    return len(begun) - len({x for x, _ in begun})


def main() -> None:
    """Runs it with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        again = sweep(options.kills, options.jobs, options.seconds, options.seed, Path(folder))
    print(
        f"{options.jobs} jobs, {options.kills} workers killed: nothing lost, nothing finished run again, the frame is "
        f"that of one process; {again} jobs that a kill cut off were begun again; {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
