"""How often a 95% interval over prompts holds the truth, and how long it is: ours beside a percentile bootstrap.

Drawn values of known mean, shaped as our metrics are: targets of one prompt that depend on each other (beta-binomial
with an intraclass correlation), attention near 0 or 1, ratios of sums, effects in nats. And `--heads` with the heads of
the bundled Llama and of a planted circuit: the truth is the mean over a pool of prompts, from which experiments draw.

    python benchmarks/coverage.py [--experiments 2000] [--heads] [--every 3] [--pool 1000]

It prints coverage, and median length over that of the percentile bootstrap, for 8, 16, 32 and 64 prompts.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

import align_circuits as ac
from align_circuits.models.planted.model import planted_circuit
from align_circuits.tables import intervals as stats

PROMPTS = (8, 16, 32, 64)
METRICS = ("align_query", "align_query_attention", "lookup", "lookup_attention", "sink")

Case = tuple[str, bool, np.ndarray, np.ndarray, float]
"""Name, whether the values lie in [0, 1], values, weights, and the true mean."""


def drawn(experiments: int, n: int, rng: np.random.Generator) -> Iterator[Case]:
    """Draws experiments of each shape."""
    size = (experiments, n)
    ones, targets = np.ones(size), rng.integers(1, 9, size).astype(float)
    yield "effect, symmetric, 1 to 8 targets", False, rng.normal(0, 1, size) / targets**0.5, targets, 0.0
    for sigma in (0.5, 1.0):
        yield f"effect, log-normal {sigma}", False, rng.lognormal(0, sigma, size), ones, float(np.exp(sigma**2 / 2))
    pairs = rng.random((2, *size))
    yield "difference of shares .9 and .7", False, (pairs[0] < 0.9) * 1.0 - (pairs[1] < 0.7), ones, 0.2
    for a, b in ((0.3, 3), (3, 0.3), (20, 20)):
        yield f"attention, beta({a}, {b})", True, rng.beta(a, b, size), ones, a / (a + b)
    below = rng.beta(0.7, 3, size)
    yield "ratio of sums", True, rng.beta(4, 4, size), below, 0.5
    yield "ratio that rises with its weight", True, 0.2 + 0.6 * below, below, 0.2 + 0.6 * 1.7 / 4.7
    for share in (0.02, 0.1, 0.5, 0.9, 0.98):
        for correlation in (0.3, 0.8):
            within = (1 - correlation) / correlation
            rate = rng.beta(share * within, (1 - share) * within, size)
            name = f"share {share}, 4 targets, correlation {correlation}"
            yield name, True, rng.binomial(4, rate) / 4, 4 * ones, share
    for share in (0.1, 0.5):
        yield f"share {share}, one target", True, (rng.random(size) < share) * 1.0, ones, share


def of_heads(
    experiments: int, n: int, rng: np.random.Generator, tables: dict[str, ac.Table], every: int
) -> Iterator[Case]:
    """Draws experiments from a pool of prompts, for one in `every` heads of each metric that is neither 0 nor 1."""
    for model, table in tables.items():
        assert table.values is not None and table.weights is not None
        for metric in METRICS:
            rows: Any = table.frame.index[(table.frame["metric"] == metric) & (table.frame["level"] == "head")]
            for row in rows[::every]:
                values, weights = table.values[row], table.weights[row]
                truth = float(stats.weighted_mean(values[None], weights[None])[0])
                if 0.005 < truth < 0.995:
                    chosen = rng.integers(0, len(values), (experiments, n))
                    yield f"{model}: {metric}", True, values[chosen], weights[chosen], truth


def percentile(values: np.ndarray, weights: np.ndarray, bounded: bool) -> tuple[np.ndarray, np.ndarray]:
    """The percentile bootstrap, with an exact bound where all prompts are right or wrong."""
    n = values.shape[1]
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), 600).T.astype(float)
    parts = np.where(weights > 0, values, 0) * weights
    with np.errstate(invalid="ignore"):
        low, high = np.nanquantile(parts @ draws / (weights @ draws), stats.TAILS, axis=1)
    if bounded:
        mean, reach = stats.weighted_mean(values, weights), stats.TAILS[0] ** (1 / n)
        low, high = np.where(mean == 1, reach, low), np.where(mean == 0, 1 - reach, high)
    return low, high


def measured(cases: Iterator[Case], n: int) -> list[dict[str, Any]]:
    """Coverage and relative length in each case."""
    rows = []
    for name, bounded, values, weights, truth in cases:
        ours = (stats.proportion if bounded else stats.mean_interval)(values, weights)
        row: dict[str, Any] = {"case": name, "n": n}
        for method, (low, high) in (("bootstrap", percentile(values, weights, bounded)), ("ours", ours)):
            row |= {
                method: ((low <= truth + 1e-12) & (truth - 1e-12 <= high)).mean(),
                method[0]: np.nanmedian(high - low),
            }
        of_bootstrap, of_ours = row.pop("b"), row.pop("o")
        rows.append(row | {"length": of_ours / of_bootstrap if of_bootstrap > 0 else np.nan})
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--heads", action="store_true")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--pool", type=int, default=1000)
    args = parser.parse_args()
    tables: dict[str, ac.Table] = {}
    if args.heads:
        task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)
        for name, model in (("toy-llama", ac.load("toy-llama")), ("planted", planted_circuit(task, strength=0.4))):
            tables[name] = ac.score_heads(model, task.sample(args.pool, model.tokenizer, seed=1), list(METRICS))
    rows = []
    for n in PROMPTS:
        rng = np.random.default_rng(n)
        cases = drawn(args.experiments, n, rng)
        if args.heads:
            cases = of_heads(args.experiments, n, rng, tables, args.every)
        rows += measured(cases, n)
    frame = pd.DataFrame(rows)
    columns = ["bootstrap", "ours", "length"]
    by_case: Any = frame.groupby(["n", "case"], sort=False)[columns]
    print(by_case.mean().to_string(float_format="{:.3f}".format))
    if args.heads:
        print("\nlowest of the heads", by_case.min().to_string(float_format="{:.3f}".format), sep="\n")
    print("\nmean, lowest and highest of the cases")
    print(frame.groupby("n")[columns].agg(["mean", "min", "max"]).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
