"""How often verdicts on means over seeds are wrong: those by the t interval alone, and those with the seeds counted.

Seeds are drawn whose mean is known. Most end near a value, and a share of them elsewhere, as where training stalls. A
claim asks for a mean of so much at least; by its t interval alone it holds where all of that lies above. Two things may
be meant by such a claim, that the mean is as high or that most seeds are: the table says which is true.

    python benchmarks/verdicts.py [--experiments 2000] [--out docs/results/verdict_rule.csv]

For 3 to 24 seeds it prints how often the t interval covers the mean, and the share of experiments in which a claim
holds and fails, by the t interval alone (`before`) and by `Check` (`now`).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from align_circuits.papers.claims import Check
from align_circuits.papers.statistics import exact, over_seeds

SEEDS = (3, 4, 5, 6, 8, 12, 24)

STALLED = 0.1

CASES = {
    "all near .95": (0.9, 0.95, 0.02, 0.0),
    "all near .9": (0.9, 0.9, 0.02, 0.0),
    "all near .85": (0.9, 0.85, 0.02, 0.0),
    "15% stall, others near .97": (0.9, 0.97, 0.01, 0.15),
    "60% stall, others near .97": (0.9, 0.97, 0.01, 0.6),
    "none stalls, all 1": (0.9, 1.0, 0.0, 0.0),
    "5% stall, others 1": (0.9, 1.0, 0.0, 0.05),
    "15% stall, others 1": (0.9, 1.0, 0.0, 0.15),
    "half stall, others 1": (0.9, 1.0, 0.0, 0.5),
    "70% stall, others 1": (0.3, 1.0, 0.0, 0.7),
}
"""The threshold, where seeds end, how far they scatter, and which share of them ends at `STALLED`."""


def simulated(experiments: int) -> Iterator[dict[str, object]]:
    """Yields a row for each case and number of seeds."""
    for name, (threshold, middle, scatter, stalled) in CASES.items():
        mean = (1 - stalled) * middle + stalled * STALLED
        above = (1 - stalled) * (0.5 if middle == threshold else float(middle > threshold))
        for n in SEEDS:
            rng = np.random.default_rng(n)
            values = middle + scatter * rng.normal(size=(experiments, n))
            values[rng.random((experiments, n)) < stalled] = STALLED
            found = [over_seeds(of_seeds) for of_seeds in values]
            low, high = (np.array([getattr(each, end) for each in found]) for end in ("low", "high"))
            now = [Check("", each, ">=", threshold, exact(0), "").verdict for each in found]
            yield {
                "case": name,
                "seeds": n,
                "asked": threshold,
                "mean": mean,
                "meet it": above,
                "t covers": ((low <= mean + 1e-9) & (mean - 1e-9 <= high)).mean(),
                "holds before": (low >= threshold).mean(),
                "holds now": now.count("holds") / experiments,
                "fails before": (high < threshold).mean(),
                "fails now": now.count("fails") / experiments,
            }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a CSV file to keep the table in")
    args = parser.parse_args()
    frame = pd.DataFrame(simulated(args.experiments))
    if args.out:
        frame.round(4).to_csv(args.out, index=False)
    print(frame.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
