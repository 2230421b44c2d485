"""How long experiments take, for `align-circuits reproduce --list`: the processor time of each, on one thread.

Each starts in a new folder, so that nothing is shared with others. What has been measured is skipped; what takes longer
than the limit, or refuses the bundled model, is left out.

    python benchmarks/experiments.py --scale smoke
    python benchmarks/experiments.py --scale cpu --limit 60 [--only icatune/fig3 recall/fig1]
"""

import argparse
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from align_circuits.cli.experiments_list import DURATIONS, durations
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.lab import Study


class OverLimit(BaseException):
    """A study has taken its time; no error of a job, which would be caught with the job."""


def stop(*_: Any) -> None:
    """Ends a study."""
    raise OverLimit


def seconds(study: Study, scale: Any) -> float:
    """Returns the processor time of a study, on the bundled model if it takes one."""
    models = () if study.models == "none" else ("toy-llama",)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        study.run(study.scales[scale], models=models, folder=folder)
        return time.process_time() - start


def main() -> None:
    """Measures what is missing, and writes after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("smoke", "cpu"), default="smoke")
    parser.add_argument("--limit", type=float, default=1800, help="seconds, for each")
    parser.add_argument("--only", nargs="+", default=[*EXPERIMENTS], help="names of experiments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, stop)
    known = durations()
    for name, study in {EXPERIMENTS[each].study.name: EXPERIMENTS[each].study for each in arguments.only}.items():
        if (name, arguments.scale) in known:
            continue
        with suppress(OverLimit, ValueError):  # too long, or not for the bundled model
            signal.setitimer(signal.ITIMER_PROF, arguments.limit)
            known[name, arguments.scale] = seconds(study, arguments.scale)
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines = (f"{study},{scale},{max(taken, 0.1):.1f}" for (study, scale), taken in sorted(known.items()))
        Path(str(DURATIONS)).write_text("\n".join(("study,scale,seconds", *lines)) + "\n", encoding="utf-8")
        print(name, arguments.scale, round(known.get((name, arguments.scale), float("inf")), 1), flush=True)


if __name__ == "__main__":
    main()
