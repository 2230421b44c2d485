"""How often a 95% interval over prompts holds the truth, and how long it is: ours beside a percentile bootstrap.

Drawn values of known mean, shaped as our metrics are: targets of one prompt that depend on each other (beta-binomial
with an intraclass correlation), attention near 0 or 1, the same value in all prompts but few, ratios of sums, effects
in nats and their paired differences. And `--heads` with the heads of the bundled Llama and of a planted circuit: the
truth is the mean over a pool of prompts, from which experiments draw.

    python benchmarks/coverage.py [--experiments 2000] [--heads] [--every 3] [--pool 1000] [--out FILE]

It prints, for 3 to 64 prompts, how often each interval covers, its mean length, its median length over that of
the percentile bootstrap, and of means in [0, 1] coverage and mean length of `betting_interval`, which bounds it.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

import align_circuits as ac
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.tables import intervals as stats

PROMPTS = (3, 4, 6, 8, 16, 32, 64)
METRICS = ("align_query", "align_query_attention", "lookup", "lookup_attention", "sink")

Kind = Literal["effect", "difference", "proportion", "ratio"]
"""Which interval: `mean_interval`, alone or with `minus`, `proportion`, or `ratio` of sums."""

Case = tuple[str, Kind, np.ndarray, np.ndarray, float]
"""Name, interval, values (of a difference both sides), weights (of a ratio what stands below), and the true mean."""


def drawn(experiments: int, n: int, rng: np.random.Generator) -> Iterator[Case]:
    """Draws experiments of each shape."""
    size = (experiments, n)
    ones, targets = np.ones(size), rng.integers(1, 9, size).astype(float)
    yield "effect, symmetric, 1 to 8 targets", "effect", rng.normal(0, 1, size) / targets**0.5, targets, 0.0
    for sigma in (0.5, 1.0):
        yield f"effect, log-normal {sigma}", "effect", rng.lognormal(0, sigma, size), ones, float(np.exp(sigma**2 / 2))
    effects = rng.normal(0, 1, size)
    sides = np.stack([effects, effects / 2 + rng.normal(0, 1, size)])
    yield "difference of effects, 1 to 8 targets", "difference", sides, targets, 0.0
    yield "difference of shares .9 and .7", "difference", rng.random((2, *size)) < [[[0.9]], [[0.7]]], ones, 0.2
    for a, b in ((0.3, 3), (3, 0.3), (20, 20), (2, 2)):
        yield f"attention, beta({a}, {b})", "proportion", rng.beta(a, b, size), ones, a / (a + b)
    below = rng.beta(0.7, 3, size)
    for kind in ("proportion", "ratio"):
        yield f"{kind} of sums", kind, rng.beta(4, 4, size), below, 0.5
        yield f"{kind} that rises with its weight", kind, 0.2 + 0.6 * below, below, 0.2 + 0.6 * 1.7 / 4.7
    yield "ratio of effects", "ratio", rng.normal(0.5, 1, size), rng.lognormal(0, 0.5, size), 0.5
    for share in (0.02, 0.1, 0.5, 0.9, 0.98):
        for correlation in (0.3, 0.8):
            within = (1 - correlation) / correlation
            rate = rng.beta(share * within, (1 - share) * within, size)
            name = f"share {share}, 4 targets, correlation {correlation}"
            yield name, "proportion", rng.binomial(4, rate) / 4, 4 * ones, share
    for share in (0.1, 0.5):
        yield f"share {share}, one target", "proportion", (rng.random(size) < share) * 1.0, ones, share
    for same in (0.0, 0.25, 0.5, 1.0):
        for few in (0.001, 0.01, 0.05, 0.2):
            for name, others, mean in (
                ("0 or 1/2", rng.choice([0.0, 0.5], size, p=[0.7, 0.3]), 0.15),
                ("anywhere", rng.random(size), 0.5),
            ):
                values = np.where(rng.random(size) < few, others, same)
                truth = (1 - few) * same + few * mean
                yield f"{same} but in {few} of prompts, there {name}", "proportion", values, 4 * ones, truth


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
                    yield f"{model}: {metric}", "proportion", values[chosen], weights[chosen], truth


def interval(kind: Kind, values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ours, of one kind."""
    if kind == "ratio":
        found = [stats.ratio((v * w)[None], w, np.ones(len(w)))[1:] for v, w in zip(values, weights, strict=True)]
        return tuple(np.array(found)[..., 0].T)
    if kind == "difference":
        return stats.mean_interval(values[0] * 1.0, weights, minus=(values[1] * 1.0, weights))
    return (stats.proportion if kind == "proportion" else stats.mean_interval)(values, weights)


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
    for name, kind, values, weights, truth in cases:
        bounded, paired = kind == "proportion", values[0] * 1.0 - values[1] if kind == "difference" else values
        ends = {"bootstrap": percentile(paired, weights, bounded), "ours": interval(kind, values, weights)}
        if bounded:
            ends["betting"] = stats.betting_interval(values, weights)
        row: dict[str, Any] = {"case": name, "interval": kind, "n": n}
        for method, (low, high) in ends.items():
            row[method] = ((low <= truth + 1e-12) & (truth - 1e-12 <= high)).mean()
            row[f"length of {method}"] = np.nanmean(high - low)
        middle = {method: np.nanmedian(high - low) for method, (low, high) in ends.items()}
        of_bootstrap = middle["bootstrap"]
        rows.append(row | {"length": middle["ours"] / of_bootstrap if of_bootstrap > 1e-9 else np.nan})
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--heads", action="store_true")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--pool", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="a CSV file to keep the table in")
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
    if args.out:
        frame.groupby(["n", "case", "interval"], sort=False).mean().round(4).to_csv(args.out)
    columns = ["bootstrap", "ours", "betting", "length of ours", "length of betting", "length"]
    by_case: Any = frame.groupby(["n", "case"], sort=False)[columns]
    print(by_case.mean().to_string(float_format="{:.3f}".format))
    if args.heads:
        print("\nlowest of the heads", by_case.min().to_string(float_format="{:.3f}".format), sep="\n")
    print("\nmean, lowest and highest of the cases")
    print(frame.groupby("n")[columns].agg(["mean", "min", "max"]).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
