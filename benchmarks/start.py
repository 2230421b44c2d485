"""How long the command line takes to start: `align-circuits --help` beside a Python that imports `typing`.

The two take turns; the clock counts, since that is what one waits for. The ratio is the median over rounds of the
ratio within a round.

    python benchmarks/start.py [--rounds 15]
"""

import argparse
import subprocess
import sys
import time
from statistics import median

HELP = "import sys; from align_circuits.cli import main; sys.exit(main(['--help']))"


def seconds(code: str) -> float:
    """Returns how long a new Python takes to run a line."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Prints the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = [(seconds("import typing"), seconds(HELP)) for _ in range(parser.parse_args().rounds)]
    ratios = sorted(ours / theirs for theirs, ours in rounds)
    print(f"python: {median(theirs for theirs, _ in rounds):.2f} s; --help: {median(ours for _, ours in rounds):.2f} s")
    print(f"ratio: {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")


if __name__ == "__main__":
    main()
