"""How long help takes: `align-circuits --help` and `align-circuits tune --help` beside a Python that imports `typing`.

They take turns; the clock counts, since that is what one waits for. The ratio is the median over rounds of the
ratio within a round.

    python benchmarks/start.py [--rounds 15]
"""

import argparse
import subprocess
import sys
import time
from statistics import median

HELP = "import sys; from align_circuits.cli import main; sys.exit(main({}))"


def seconds(code: str) -> float:
    """Returns how long a new Python takes to run a line."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Prints the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args().rounds
    for arguments in (["--help"], ["tune", "--help"]):
        rounds = [(seconds("import typing"), seconds(HELP.format(arguments))) for _ in range(given)]
        ratios = sorted(ours / theirs for theirs, ours in rounds)
        theirs, ours = (median(times) for times in zip(*rounds, strict=True))
        print(f"python: {theirs:.2f} s; {' '.join(arguments)}: {ours:.2f} s", end="; ")
        print(f"ratio {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")


if __name__ == "__main__":
    main()
