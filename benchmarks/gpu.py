"""All that a GPU should be asked, in one command (`make gpu`), in under 25 minutes; `--pretend` tries it on a CPU.

The tests of `tests/on_a_gpu.py`; `real_shapes.py` at the shapes of 1B and 8B in bf16, beside a bare forward pass of
Hugging Face with torch's fused attention, TransformerLens and nnsight, then with as much memory as "What fits" of "Your
own model" allows; `ensembles.py`; in what is left of the time, experiments of the papers at their own scale, job by job
(`CELLS`). Then the checks: no step failed, the ensemble against its floor. A step that fails or takes too long does not
keep the others from running. Tables go to `--out`, by default `docs/results/benchmarks/DEVICE-STEP`; the rows of the
jobs that are done to `DEVICE-EXPERIMENT/rows.csv`; the jobs stay in runs/gpu, where the next call goes on.

`--pretend`: small sizes on the CPU, without 8B, so that what is wrong with this script is found before the minutes of a
GPU count. The floor is printed there, not checked. Tables go to runs/benchmarks.

    python benchmarks/gpu.py [--pretend] [--out FOLDER]
"""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from align_circuits.tables.tables import Table

HERE = Path(__file__).parent
VERB = ("-c", "import sys; from align_circuits.cli import main; sys.exit(main())")
JOBS = Path("runs") / "gpu"
FLOOR = 5.0
"""How many times as fast as plain loops an ensemble of six must be."""

MINUTES = 22.5
"""What all steps may take together, but for the collection of rows."""

TO_COLLECT = 1.0
"""Minutes for the rows of an experiment: most of it passes while Python starts on a busy machine."""

CELLS = ("icatune/fig3", "abrupt/fig1")
"""The experiments that fill the time that is left, in this order."""

FITS = {"1b": 4.0, "8b": 20.0}
"""The memory that "What fits" allows, in GB."""


@dataclass(frozen=True)
class Step:
    """One script."""

    name: str
    minutes: float
    """When it is stopped."""
    command: tuple[str, ...]
    keeps: bool = False
    """Whether it takes `--out`."""
    resumes: bool = False
    """Whether the next call goes on where it was stopped, which is then no failure."""


def steps(*, pretend: bool) -> list[Step]:
    """Returns what runs, the tests first."""
    device = "cpu" if pretend else "cuda"
    small = ("--layers", "1", "--heads", "2", "--theirs", "1", "--rounds", "1") if pretend else ()
    scale = "smoke" if pretend else "paper"
    few = ("--size", "cpu", "--steps", "2", "--rounds", "1") if pretend else ()
    shapes = [
        Step(
            f"real-shapes-{shape}",
            minutes,
            (str(HERE / "real_shapes.py"), "--shape", shape, "--device", device, *small),
            keeps=True,
        )
        for shape, minutes in (("1b", 4.0), ("8b", 8.0))
        if shape == "1b" or not pretend
    ]
    within = [
        Step(
            f"fits-{shape}",
            3.0,
            (
                str(HERE / "real_shapes.py"),
                *("--shape", shape, "--memory", f"{most:g}", "--theirs", "0", "--rounds", "1"),
            ),
        )
        for shape, most in FITS.items()
        if not pretend
    ]
    return [
        Step("tests", 6.0, ("-m", "pytest", "-q", "-m", "", str(HERE.parent / "tests" / "test_on_a_gpu.py"))),
        *shapes,
        *within,
        Step("ensembles", 4.0, (str(HERE / "ensembles.py"), "--device", device, *few), keeps=True),
        *(
            Step(name, MINUTES, (*VERB, "reproduce", name, "--scale", scale, "--out", str(JOBS / name)), resumes=True)
            for name in CELLS
        ),
    ]


def run(step: Step, out: Path, ends: float) -> bool:
    """Runs a step, until `ends` on the monotonic clock at most, and shows its output; returns if it succeeded."""
    keep = ["--out", str(out)] if step.keeps else []
    print(f"\n== {step.name}", flush=True)
    started = time.monotonic()
    seconds = max(1.0, min(60 * step.minutes, ends - started))
    try:
        done = subprocess.run(
            [sys.executable, *step.command, *keep],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        ended, output = f"exit status {done.returncode}", done.stdout
    except subprocess.TimeoutExpired as error:
        ended, output = "stopped, the next call goes on" if step.resumes else "stopped", (error.stdout or b"").decode()
    print(f"{output}{step.name}: {ended}, {time.monotonic() - started:.0f} s", flush=True)
    return ended == "exit status 0" or (step.resumes and ended.startswith("stopped"))


def main() -> int:
    """Runs all steps; returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.pretend and not torch.cuda.is_available():
        print("no CUDA device: --pretend tries everything on the CPU", file=sys.stderr)
        return 2
    name = "pretended" if arguments.pretend else torch.cuda.get_device_name()
    kept = Path("runs" if arguments.pretend else "docs/results") / "benchmarks"
    out = arguments.out or kept
    device = re.sub(r"[^a-z0-9]+", "-", name.lower())
    todo, ends = steps(pretend=arguments.pretend), time.monotonic() + 60 * MINUTES
    succeeded = {step.name: run(step, out / f"{device}-{step.name}", ends) for step in todo}
    for cells in CELLS:
        if (JOBS / cells / "jobs").is_dir():
            place = str(out / f"{device}-{cells.replace('/', '-')}")
            rows = Step(
                f"rows of {cells}", TO_COLLECT, (*VERB, "collect", str(JOBS / cells), "--overwrite", "--out", place)
            )
            succeeded[rows.name] = run(rows, out, ends + 60 * TO_COLLECT * len(CELLS))
    print(f"\n== {name}")
    checks: list[tuple[str, bool | None]] = [(f"{step} ran", ran) for step, ran in succeeded.items()]
    if succeeded["ensembles"]:
        fast = float(Table.load(out / f"{device}-ensembles").where(measure="times as fast").frame["value"].iloc[0])
        checks.append(
            (f"ensembles: {fast:g} times plain loops, at least {FLOOR:g}", None if arguments.pretend else fast >= FLOOR)
        )
    for text, holds in checks:
        print(f"{'not checked' if holds is None else 'ok' if holds else 'FAIL':<11} {text}")
    return 1 if any(holds is False for _, holds in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
