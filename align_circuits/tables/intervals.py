"""Intervals: over prompts or seeds, the units that are drawn independently."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.special import betaincinv, expit, logit, ndtri, stdtrit

COVERAGE = 0.95
"""The coverage of every interval in the package."""

TAILS = ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
"""The quantiles at the ends of such an interval."""

ROUNDING = 1e-6
"""Numbers that differ by less, as a share of their mean or of 1, are equal but for the rounding of float32."""

_WINS = float(np.log(1 / TAILS[0]))
"""The logarithm of the gain at which a gambler has shown a mean to lie elsewhere."""

_ORDERS = 8
"""How many orders of the prompts bets are averaged over."""


def weighted_mean(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> Float[ndarray, " row"]:
    """Returns each row's mean over prompts, a prompt counting by its weight (its number of targets).

    A row whose weights are all zero has no mean: NaN.
    """
    total = weights.sum(1)
    return np.divide(_weighted(values, weights).sum(1), total, out=np.full(len(values), np.nan), where=total > 0)


def by_group(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"], group: Int[ndarray, " prompt"]
) -> tuple[Float[ndarray, "row group"], Float[ndarray, "row group"]]:
    """Returns each row's mean over the prompts of each group, and their weight together.

    Groups are the unit that intervals rest on where prompts of a group are related (a cluster mean; Donner and Klar,
    2000, "Design and Analysis of Cluster Randomization Trials").
    """
    member = (group[:, None] == np.unique(group)).astype(float)
    total = weights @ member
    means = np.full(total.shape, np.nan)
    return np.divide(_weighted(values, weights) @ member, total, out=means, where=total > 0), total


def mean_interval(
    values: Float[ndarray, "row prompt"],
    weights: Float[ndarray, "row prompt"],
    minus: tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]] | None = None,
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns the interval of each row's weighted mean over prompts: Student's t, corrected for skew (Hall, 1992).

    Prompts are the unit, since the targets of one prompt share its examples. The spread is that of the means without
    one prompt each (the jackknife); a row has as many degrees of freedom as prompts of equal weight would have, less
    one (Kish, 1965: their number is (Σw)²/Σw²). Where weights differ, mean and spread also rise together or apart,
    which is corrected like skew. With `minus`, the interval is that of the difference "row minus the same row of
    `minus`", paired by prompt.

    Where all prompts agree there is no spread to judge by, and the interval has length zero: that is no certainty. For
    a proportion use `proportion`, which then has an exact bound. `benchmarks/coverage.py` shows how often it covers.

    Args:
        values: A mean for each row and prompt; anything, NaN included, where the weight is 0.
        weights: How many targets each mean rests on; 0 where there is none.
        minus: Values and weights of the other side of a paired difference.

    Returns:
        Lower and upper ends; NaN for a row with weight in fewer than two prompts.

    Raises:
        ValueError: No prompts.
    """
    mean, errors, prompts = weighted_mean(values, weights), *jackknife(values, weights)
    shares = weight_shares(weights)
    if minus is not None:
        other_errors, other_prompts = jackknife(*minus)
        mean, prompts = mean - weighted_mean(*minus), np.fmin(prompts, other_prompts)
        # By how much a row's own mean rises where the difference rises by 1.
        of_difference = errors - other_errors
        square = (of_difference**2).sum(1)
        slope = np.divide((errors * of_difference).sum(1), square, out=np.zeros(len(square)), where=square > 0)[:, None]
        errors, shares = of_difference, slope * shares + (1 - slope) * weight_shares(minus[1])
    return _skewed_t(mean, errors, shares, prompts)


def proportion(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns `mean_interval`'s interval for means in [0, 1], made on the scale of log odds, so that it stays inside.

    Near 0 and 1 the end that is farther from there leaves room for rare values, which few prompts mostly miss.
    Where every prompt is all right or all wrong there is no spread. There the bound is the exact binomial one (Clopper
    and Pearson, 1934) with a prompt as one trial: the other end is (α/2)^(1/n), α = 1 - `COVERAGE`.

    Where most prompts have the same value c between 0 and 1, or all but one have c = 0 or c = 1, the spread rests on
    the few others. There the interval is [c - u c, c + u (1 - c)], u the exact binomial bound of the chance of another
    value, which may lie anywhere. No interval is longer than that of `betting_interval`.

    Args:
        values: A mean for each row and prompt, in [0, 1]; anything, NaN included, where the weight is 0.
        weights: How many targets each mean rests on; 0 where there is none.

    Returns:
        Lower and upper ends; NaN for a row with weight in fewer than two prompts.

    Raises:
        ValueError: No prompts.
    """
    mean, (errors, prompts) = weighted_mean(values, weights), jackknife(values, weights)
    counts = (weights > 0).sum(1)
    reach = TAILS[0] ** (1 / np.maximum(counts, 1))
    low, high = _skewed_t(mean, errors, weight_shares(weights), prompts, odds=True)
    same, share, differ = _majority(values, weights)  # of the prompts with other values: their share and their number
    u = betaincinv(prompts * share + 1, prompts * (1 - share), TAILS[1])
    alike = (2 * differ < counts) & ((differ <= 1) | (same > 0) & (same < 1))  # none differ: 1 but for rounding
    # In this order: `select` takes the first that applies.
    kinds = [counts < 2, mean == 0, mean == 1, alike]
    low = np.select(kinds, [np.nan, 0.0, reach, same - u * same], low)
    high = np.select(kinds, [np.nan, 1 - reach, 1.0, same + u * (1 - same)], high)
    return _betting_low(values, weights, low), 1 - _betting_low(1 - values, weights, 1 - high)


def proportion_change(
    values: Float[ndarray, "row prompt"],
    weights: Float[ndarray, "row prompt"],
    yes_or_no: Bool[ndarray, " row"] | bool = False,
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns an interval of mean changes of a proportion, in [-1, 1]: that of `proportion` for (1 + change)/2.

    So it stays inside, and is exact where a proportion changes alike in all prompts or in none, as accuracy often does:
    there `mean_interval` has no spread to judge by.

    Where each prompt is one target, which is right or wrong before and after, nothing lies between the changes -1, 0
    and 1, and the interval is that of the score test of paired proportions (Tango, 1998, "Equivalence test and
    confidence interval for the difference in proportions for the paired-sample design").

    Args:
        values: A mean change for each row and prompt, in [-1, 1]; anything, NaN included, where the weight is 0.
        weights: How many targets each mean rests on; 0 where there is none.
        yes_or_no: The rows of which every target is right or wrong, and no share.

    Returns:
        Lower and upper ends; NaN for a row with weight in fewer than two prompts.

    Raises:
        ValueError: No prompts.
    """
    counts = (weights > 0).sum(1)
    single = yes_or_no & np.isin(weights, (0, 1)).all(1) & (np.isin(values, (-1, 0, 1)) | (weights == 0)).all(1)
    single &= counts > 1
    low, high = np.empty((2, len(values)))
    low[~single], high[~single] = (2 * end - 1 for end in proportion((1 + values[~single]) / 2, weights[~single]))
    change, counted = values[single], weights[single] > 0
    gained, lost = (((change == sign) & counted).sum(1) for sign in (1, -1))
    low[single], high[single] = _paired_score_interval(gained, lost, counts[single])
    return low, high


def _paired_score_interval(
    gained: Int[ndarray, " row"], lost: Int[ndarray, " row"], n: Int[ndarray, " row"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Tango's interval of (gained - lost)/n, found by bisection: the score falls as the supposed difference rises."""
    mean = (gained - lost) / n

    def score(difference: ndarray) -> ndarray:
        # The most likely chance of a loss if the difference is this is the root of a quadratic, over 4n.
        linear = (2 * n - gained + lost) * difference - gained - lost
        root = np.sqrt(np.maximum(linear**2 + 8 * n * lost * difference * (1 - difference), 0))
        variance = n * ((root - linear) / (2 * n) + difference * (1 - difference))
        with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 at means of -1 and 1, which are left out below
            return n * (mean - difference) / np.sqrt(np.maximum(variance, 0))

    def crossing(low: Float[ndarray, " row"], high: Float[ndarray, " row"], level: float) -> Float[ndarray, " row"]:
        for _ in range(50):
            middle = (low + high) / 2
            above = score(middle) > level
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return (low + high) / 2

    quantile, ones = float(ndtri(TAILS[1])), np.ones(len(mean))
    ends = crossing(-ones, mean, quantile), crossing(mean, ones, -quantile)
    return np.where(mean == -1, -1.0, ends[0]), np.where(mean == 1, 1.0, ends[1])


def betting_interval(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns an interval of means in [0, 1] that covers at any number of prompts of like weight, whatever they hold.

    A gambler bets on each prompt in turn that its value exceeds m, knowing those before it. Where m is the truth, no
    bet gains on average, so that 2/α times the stake is reached with a chance of α/2 at most: every m at which it is
    lies outside. These are the bets of Waudby-Smith and Ramdas (2023, Theorem 3, for a fixed number of draws, at most
    .75/m). A prompt's bet counts by its share of the largest weight. Gains are averaged over some fixed orders of the
    sorted prompts, so that it makes no difference in which they are given.

    It is 1.3 to 1.4 times as long as `proportion` (beta(2, 2), 3 to 64 prompts), and so a bound of it.

    Args and errors as in `proportion`.
    """
    if values.shape[1] == 0:
        raise ValueError("no prompts, so no interval: give at least one")
    ends = np.where((weights > 0).sum(1) < 2, np.nan, 0.0)
    return _betting_low(values, weights, ends), 1 - _betting_low(1 - values, weights, ends)


def t_interval(values: Float[ndarray, "row seed"]) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns Student's interval of each row's mean over seeds, mean ± t s/√n; a value of NaN does not count.

    Few seeds tell too little of a distribution to correct for its skew. NaN for a row with fewer than two values, and
    where all are equal: they do not tell how far another seed would fall from them.
    """
    known = ~np.isnan(values)
    n = known.sum(1)
    mean = weighted_mean(values, known.astype(float))
    square = (np.where(known, values - mean[:, None], 0) ** 2).sum(1) / np.maximum(n - 1, 1)
    equal = np.sqrt(square) <= ROUNDING * np.abs(mean)
    quantile = stdtrit(np.maximum(n - 1, 1), TAILS[1])  # of Student's t
    half = np.where((n < 2) | equal, np.nan, quantile * np.sqrt(square / np.maximum(n, 1)))
    return mean - half, mean + half


def unpaired_difference(
    one: Float[ndarray, "row 3"], other: Float[ndarray, "row 3"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns the interval of the difference one minus other of independent numbers, made of the intervals of both.

    Zou and Donner (2008, "Construction of Confidence Limits about Effect Measures", Eqs. 6 and 7): each end is as far
    from the difference as the root of the squared distances of those two ends that it rests on. So it is as skewed as
    they are, and stays within the bounds of shares. Of numbers that rise together it is too wide.

    Args:
        one: A value and the ends of its interval, by row.
        other: The same of what is subtracted.
    """
    (a, a_low, a_high), (b, b_low, b_high) = one.T, other.T
    return a - b - np.hypot(a - a_low, b_high - b), a - b + np.hypot(a_high - a, b - b_low)


def over_seeds(
    values: Float[ndarray, "row seed"], yes_or_no: Bool[ndarray, " row"] | bool = False
) -> dict[str, ndarray]:
    """Returns each row's `value` (its mean over seeds), `low`, `high` and `n`; what `Table.over_seeds` computes.

    Args:
        values: A seed without a value (NaN) does not count.
        yes_or_no: The rows of 0 and 1 with `binomial_interval`, not `t_interval`; a single seed has neither.
    """
    known = ~np.isnan(values)
    n = known.sum(1)
    mean = weighted_mean(values, known.astype(float))
    low, high = t_interval(values)
    for row in np.flatnonzero(yes_or_no & (n > 1)):
        low[row], high[row] = binomial_interval(int(np.nansum(values[row])), int(n[row]))
    return {"value": mean, "low": low, "high": high, "n": n}


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
    from scipy.stats import binomtest  # takes .3 s to import

    interval = binomtest(successes, trials).proportion_ci(coverage, "exact")
    return float(interval.low), float(interval.high)


def ratio(
    above: Float[ndarray, "row prompt"],
    below: Float[ndarray, " prompt"],
    weights: Float[ndarray, " prompt"],
    shares: bool = False,
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Returns each row's ratio of weighted means over prompts, with an interval as by `mean_interval`.

    Each prompt is left out above and below the line together. Where the mean below is near 0 the interval is wide or
    wild, as it should be. Changes of shares may be alike in all prompts that were drawn and not in others: each end is
    then the outer one of this interval's and of `proportion_change`'s over the mean below.

    Args:
        above: A mean for each row and prompt.
        below: The same for the denominator, which all rows share.
        weights: How many targets each prompt's means rest on.
        shares: Whether what stands above are changes of shares, in [-1, 1].

    Returns:
        The ratios, and the lower and upper ends.
    """
    rows, wide = np.concatenate([above, below[None]]), np.broadcast_to(weights, (len(above) + 1, len(weights)))
    means = weighted_mean(rows, wide)
    weighted = _weighted(rows, wide)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = means[:-1] / means[-1]
        without = (weighted[:-1].sum(1, keepdims=True) - weighted[:-1]) / (weighted[-1].sum() - weighted[-1])
        of_weight = weighted[-1:] / weighted[-1].sum()
    errors = np.where(weights > 0, ratios[:, None] - without, 0) * _share_of_variance(wide[:1])
    ends = np.stack(_skewed_t(ratios, errors, of_weight, jackknife(rows, wide)[1][:-1]))
    if shares:
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = np.stack(proportion_change(above, wide[:-1], yes_or_no=True)) / means[-1]
        ends = np.stack([np.fmin(ends[0], bounds.min(0)), np.fmax(ends[1], bounds.max(0))])
    return ratios, *ends


def jackknife(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> tuple[Float[ndarray, "row prompt"], Float[ndarray, " row"]]:
    """Returns how far each row's mean lies from that without each prompt, and the number of prompts of equal weight.

    The former are scaled so that their squares sum to the variance of the mean; they are 0 for a prompt without weight.
    The number is (Σw)²/Σw² (Kish, 1965); NaN for a row without any weight.
    """
    if values.shape[1] == 0:
        raise ValueError("no prompts, so no interval: give at least one")
    total, squares = weights.sum(1), (weights**2).sum(1)
    equal = np.divide(total**2, squares, out=np.full(len(values), np.nan), where=squares > 0)
    mean = np.nan_to_num(weighted_mean(values, weights))[:, None]
    rest = total[:, None] - weights
    moved = np.divide(_weighted(values, weights) - mean * weights, rest, out=np.zeros(values.shape), where=rest > 0)
    return moved * _share_of_variance(weights)[:, None], equal


def weight_shares(weights: Float[ndarray, "row prompt"]) -> Float[ndarray, "row prompt"]:
    """Returns each prompt's share of its row's weight; 0 in a row without any."""
    total = weights.sum(1, keepdims=True)
    return np.divide(weights, total, out=np.zeros(weights.shape), where=total > 0)


def _majority(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"], Int[ndarray, " row"]]:
    """The value that most prompts of a row have, if there is one, the share of weight with others, and their number."""
    counts = (weights > 0).sum(1)
    ordered = np.sort(np.where(weights > 0, values, np.inf), axis=1)
    same = np.take_along_axis(ordered, np.maximum(counts - 1, 0)[:, None] // 2, axis=1)
    # Negated, so that NaN differs.
    differ = (weights > 0) & ~(np.abs(values - same) <= ROUNDING)
    return same[:, 0], (weight_shares(weights) * differ).sum(1), differ.sum(1)


def _betting_low(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"], floor: Float[ndarray, " row"]
) -> Float[ndarray, " row"]:
    """The lower end of `betting_interval`, or `floor` where that is higher; at most the mean. NaN where `floor` is."""
    mean, counted = weighted_mean(values, weights), weights > 0
    share = weights / np.maximum(weights.max(1, keepdims=True), 1e-300)  # not 0 / 0 in a row without weight
    # What counts comes first, by value, so that the order in which prompts were given is gone.
    known = np.where(counted, values, 0)
    in_order = np.lexsort((share, known, ~counted))
    known, share, counted = (np.take_along_axis(each, in_order, axis=1) for each in (known, share, counted))
    # By random keys, so that among the prompts that count the order is the same whatever stands behind them.
    orders = [np.random.default_rng(seed).random(values.shape[1]).argsort() for seed in range(_ORDERS)]

    # Inner functions name no shapes, which tests would check in each of some hundred thousand calls.
    def bets(rows: Any) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
        """The values of prompts in an order, what is bet on each, and the most that may be for a mean of 1."""
        for order in orders:
            value, weight, has_weight = (each[rows][:, order] for each in (known, share, counted))
            means = (0.5 + (weight * value).cumsum(1)) / (1 + weight.cumsum(1))
            spread = (0.25 + (weight**2 * (value - means) ** 2).cumsum(1)) / (1 + has_weight.cumsum(1))
            # Shifted by one, since a bet must not know its own prompt; 1/4 is the largest variance of values in [0, 1].
            before = np.concatenate([np.full((len(rows), 1), 0.25), spread[:, :-1]], axis=1)
            stake = np.sqrt(2 * _WINS / (np.maximum(has_weight.sum(1, keepdims=True), 1) * before)) * weight
            yield value, stake, 0.75 * weight

    def won(bets: Iterable[tuple[ndarray, ndarray, ndarray]], m: ndarray) -> ndarray:
        """Where bets that values exceed m win, by the logarithm of what they make of the stake."""
        m = m[:, None]
        gains = [
            np.log1p(np.minimum(stake, most / np.maximum(m, 1e-300)) * (value - m)).sum(1)
            for value, stake, most in bets
        ]
        return np.logaddexp.reduce(gains) - np.log(_ORDERS) >= _WINS

    rows = np.flatnonzero(floor < mean)  # not where there is none
    rows = rows[won(bets(rows), floor[rows])]
    low, high, placed = floor[rows], mean[rows], [*bets(rows)]
    for _ in range(40 if len(rows) else 0):  # bisection, to 2^-40 < 1e-12
        middle = (low + high) / 2
        excluded = won(placed, middle)
        low, high = np.where(excluded, middle, low), np.where(excluded, high, middle)
    ends = floor.astype(float)
    ends[rows] = low
    return ends


def _share_of_variance(weights: Float[ndarray, "row prompt"]) -> Float[ndarray, " row"]:
    """√((n - 1)/n) for n prompts with weight, by which the jackknife scales how far each of them moves a mean."""
    n = np.maximum((weights > 0).sum(1), 1)
    return np.sqrt((n - 1) / n)


def _skewed_t(
    mean: Float[ndarray, " row"],
    errors: Float[ndarray, "row prompt"],
    shares: Float[ndarray, "#row prompt"],
    prompts: Float[ndarray, " row"],
    *,
    odds: bool = False,
) -> tuple[Float[ndarray, " row"], Float[ndarray, " row"]]:
    """Student's interval of means from how far each prompt moves them, corrected for skew and for unequal weights.

    T = (mean - truth)/se is skewed where the values are, by A = their skewness/√n. It is skewed, too, where prompts
    with much weight move the mean one way: both se and the mean change with them. With K the sum over prompts of
    (what it moves the mean by, in se) times (its share of the weight), T gains K T² to first order; K = 0 where all
    weigh the same. So Hall's cubic g(T) = T + (A - 3K) T²/3 + (A - 3K)² T³/27 + A/6 (K = 0 in his paper) is not skewed,
    and grows with T, so its inverse turns quantiles of Student's t into those of T. Few prompts tell little of K, so
    each end is the outer one of those with K and without.

    On the scale of log odds the skew that a binomial has by itself, b = (1 - 2p)/√(p (1 - p) n) times √ρ, is gone, and
    only what exceeds it is corrected. Here ρ is the values' variance over p (1 - p): as if each were a yes or no with
    the chance ρ, and p otherwise (a mean with a point mass, Aitchison, 1955). Then the skew of n values shows the part
    b only if one of them is a yes or no. The chance of that is 1 - (1 - ρ)^n, so b (1 - (1 - ρ)^n) is what the skew
    holds of it on average, and what may be taken off: all of b for shares of right answers, next to nothing for
    attention that is small everywhere. Each end is also the outer one of those with all of b taken off and with this.
    """
    error = np.linalg.norm(errors, axis=1)
    relative = np.divide(errors, error[:, None], out=np.zeros(errors.shape), where=error[:, None] > 0)
    skew, pull = (relative**3).sum(1), (relative * shares).sum(1)
    # Log odds are infinite at 0 and 1, where the callers have other bounds.
    scale, within, skews = np.ones(len(mean)), np.clip(mean, 1e-9, 1 - 1e-9), skew[None]
    if odds:
        scale = 1 / (within * (1 - within))
        binomial = (1 - 2 * within) * scale * error
        unseen = (1 - np.clip(prompts * scale * error**2, 0, 1)) ** prompts
        skews = np.stack([skew - binomial, skew - binomial * (1 - unseen)])
    bends = np.stack([skews, skews - 3 * pull])
    bends = np.where(np.abs(bends) < 1e-6, 1e-6, bends)  # the cubic is a line at 0, where its inverse is 0/0
    quantile = stdtrit(np.maximum(prompts - 1, 1), TAILS[1])  # of Student's t; scipy.stats takes .3 s to import
    ends = []
    for x, outer in ((quantile, np.max), (-quantile, np.min)):
        moved = -error * scale * outer(3 / bends * (np.cbrt(1 + bends * (x - skews / 6)) - 1), axis=(0, 1))
        ends.append(expit(logit(within) + moved) if odds else mean + moved)
    low, high = np.fmin(ends[0], mean), np.fmax(ends[1], mean)  # rounding where there is no spread
    alone = ~(prompts > 1 + 1e-9)  # one prompt has no spread
    return np.where(alone, np.nan, low), np.where(alone, np.nan, high)


def _weighted(
    values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]
) -> Float[ndarray, "row prompt"]:
    """Values times weights; a value without weight may be NaN."""
    return np.where(weights > 0, values, 0) * weights
