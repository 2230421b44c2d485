"""Intervals: most resample prompts, the unit that is drawn independently."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import binomtest, false_discovery_control

COVERAGE = 0.95
"""The coverage of every interval in the package."""

TAILS = ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
"""The quantiles at the ends of such an interval."""

RESAMPLES = 2000
_NUMBERS_AT_ONCE = 2**21


def weighted_mean(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> Float[ndarray, " row"]:
    """Returns each row's mean over prompts, a prompt counting by its weight (its number of targets).

    A row whose weights are all zero has no mean: NaN.
    """
    total = weights.sum(1)
    return np.divide(_weighted(values, weights).sum(1), total, out=np.full(len(values), np.nan), where=total > 0)


def bootstrap(
    values: Float[ndarray, "row prompt"],
    weights: Float[ndarray, "row prompt"],
    minus: tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns the percentile-bootstrap interval of each row's weighted mean over prompts.

    Prompts are resampled whole, since the targets of one prompt share its examples (a cluster bootstrap). All rows
    share the resamples, so two rows may be compared; with `minus`, the interval is that of the difference
    "row minus the same row of `minus`", paired by prompt.

    A mean on the edge of its range, such as an accuracy of 1.0 in every prompt, has no spread to resample, and the
    interval has length zero: for a proportion use `proportion`, which then falls back on an exact bound.
    The interval is too short for few prompts (Efron and Tibshirani, 1993, ch. 13): below about 20, read it as rough.

    Args:
        values: A mean for each row and prompt; anything, NaN included, where the weight is 0.
        weights: How many targets each mean rests on; 0 where there is none.
        minus: Values and weights of the other side of a paired difference.
        resamples: How many times the prompts are redrawn.
        seed: Of the resamples.

    Returns:
        Lower and upper ends; NaN for a row with weight in fewer than two prompts.
    """
    generator = np.random.default_rng(seed)
    n_prompts = values.shape[1]
    if n_prompts == 0:
        raise ValueError("no prompts to resample: give at least one")
    # A resample matters only by how often it holds each prompt. So it is a column of counts, and one matrix product
    # gives the weighted sums of all rows in all resamples.
    draws = generator.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=resamples).T.astype(float)
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    step = max(1, _NUMBERS_AT_ONCE // resamples)
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        means = _resampled(values[rows], weights[rows], draws)
        if minus is not None:
            means = means - _resampled(minus[0][rows], minus[1][rows], draws)
        missing = np.isnan(means)
        # numpy sorts whole rows together, but rows with gaps one by one
        for known, quantile in ((~missing.any(1), np.quantile), (missing.any(1) & ~missing.all(1), np.nanquantile)):
            if known.any():
                low[rows][known], high[rows][known] = quantile(means[known], TAILS, axis=1)
    alone = (weights > 0).sum(1) < 2  # one prompt has no spread
    low[alone], high[alone] = np.nan, np.nan
    return low, high


def proportion(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns `bootstrap`'s interval for means in [0, 1], not of length zero at either end.

    Where every prompt is all right or all wrong the bootstrap sees no spread. There the bound is the exact binomial
    one (Clopper and Pearson, 1934) with a prompt as one trial: the other end is (α/2)^(1/n), α = 1 - `COVERAGE`.
    """
    low, high = bootstrap(values, weights)
    counts = (weights > 0).sum(1)
    reach = TAILS[0] ** (1 / np.maximum(counts, 1))
    mean = weighted_mean(values, weights)
    low, high = np.where(mean == 0, 0.0, low), np.where(mean == 1, 1.0, high)
    return np.where(mean == 1, reach, low), np.where(mean == 0, 1 - reach, high)


def binomial_interval(successes: int, trials: int, *, coverage: float = COVERAGE) -> tuple[float, float]:
    """Returns the exact interval of the chance of success behind `successes` of `trials` (Clopper and Pearson, 1934).

    At the lower end as many successes or more have the probability (1 - coverage)/2, at the upper end as many or fewer.
    Covers at least as often as promised; misleads where trials depend on each other. NaN without trials.

    Args:
        successes: 0 to `trials`.
        trials: Independent ones, such as seeds.
        coverage: In (0, 1).

    Raises:
        ValueError: More successes than trials, or fewer than none.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: give 0 to {trials}")
    if trials == 0:
        return np.nan, np.nan
    interval = binomtest(successes, trials).proportion_ci(coverage, "exact")
    return float(interval.low), float(interval.high)


def ratio(
    above: Float[ndarray, "row prompt"], below: Float[ndarray, " prompt"], weights: Float[ndarray, " prompt"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns each row's ratio of weighted means over prompts, with its percentile-bootstrap interval.

    Prompts are resampled whole, above and below the line together. Where the mean below is near 0 the interval is wide
    or wild, as it should be.

    Args:
        above: A mean for each row and prompt.
        below: The same for the denominator, which all rows share.
        weights: How many targets each prompt's means rest on.

    Returns:
        The ratios, and the lower and upper ends.
    """
    rows = np.concatenate([above, below[None]])
    wide = np.broadcast_to(weights, rows.shape)
    means = weighted_mean(rows, wide)
    draws = np.random.default_rng(0).multinomial(len(weights), np.full(len(weights), 1 / len(weights)), RESAMPLES)
    resampled = _resampled(rows, wide, draws.T.astype(float))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(resampled[:-1] / resampled[-1], TAILS, axis=1)
    return means[:-1] / means[-1], low, high


def benjamini_hochberg(p: Float[ndarray, " test"]) -> Float[ndarray, " test"]:
    """Returns the smallest false discovery rate at which each test is a discovery (Benjamini and Hochberg, 1995)."""
    return false_discovery_control(p) if len(p) else p


def _resampled(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"], draws: Float[ndarray, "prompt draw"]
) -> Float[ndarray, "row draw"]:
    total = weights @ draws
    return np.divide(_weighted(values, weights) @ draws, total, out=np.full(total.shape, np.nan), where=total > 0)


def _weighted(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> Float[ndarray, "row prompt"]:
    """Values times weights; a value without weight may be NaN."""
    return np.where(weights > 0, values, 0) * weights
