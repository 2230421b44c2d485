"""Intervals: beside a loop over prompts left out, scipy, and their promised coverage."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legs import slow_but
from refusals import refused
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import binomtest, multinomial
from scipy.stats import t as student

from align_circuits.tables import intervals as stats


def drawn(rows: int, prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.random((rows, prompts)), generator.integers(0, 5, (rows, prompts)).astype(float)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_weighted_mean_is_the_mean_over_targets(rows, prompts, seed):
    values, weights = drawn(rows, prompts, seed)
    for row, got in enumerate(stats.weighted_mean(values, weights)):
        targets = [v for v, w in zip(values[row], weights[row], strict=True) for _ in range(int(w))]
        assert got == pytest.approx(np.mean(targets) if targets else np.nan, nan_ok=True)


def by_leaving_out(values, weights, minus=None):
    """Value, standard error, degrees of freedom, A and K of a mean or a difference, by a loop over prompts left out."""
    sides = [(values, weights), *([minus] if minus else [])]
    means, moved, equal = [], [], []
    for v, w in sides:
        kept = [(x, y) for x, y in zip(v, w, strict=True) if y > 0]
        mean = sum(x * y for x, y in kept) / sum(y for _, y in kept)
        m = len(kept)
        errors = []
        for i, y in enumerate(w):
            rest = [(x, z) for j, (x, z) in enumerate(zip(v, w, strict=True)) if j != i and z > 0]
            without = sum(x * z for x, z in rest) / sum(z for _, z in rest) if y > 0 else mean
            errors.append((mean - without) * math.sqrt((m - 1) / m))
        means.append(mean)
        moved.append(errors)
        equal.append(sum(y for _, y in kept) ** 2 / sum(y**2 for _, y in kept))
    errors = moved[0] if len(sides) == 1 else [x - y for x, y in zip(*moved, strict=True)]
    error = math.sqrt(sum(e**2 for e in errors))
    skew = sum(e**3 for e in errors) / error**3
    # The part of a change of the difference that is its first side's, and minus the second side's.
    parts = [sum(e * own for e, own in zip(errors, side, strict=True)) / error**2 for side in moved]
    parts = [parts[0], -parts[1]] if len(sides) == 2 else parts
    pull = sum(
        part * sum(e * y for e, y in zip(errors, w, strict=True)) / error / sum(w)
        for part, (_, w) in zip(parts, sides, strict=True)
    )
    return means[0] - (means[1] if len(sides) == 2 else 0), error, max(min(equal) - 1, 1), skew, pull


def inverses(skew: float, pull: float, quantile: Any) -> list[Any]:
    """Where Hall's cubic has this value, without the pull of unequal weights and with it."""

    def cubic(x: float, a: float) -> float:
        return x + a * x**2 + a**2 * x**3 / 3 + skew / 6 - quantile

    return [brentq(cubic, -1e6, 1e6, args=(skew / 3 - each,), xtol=1e-13) for each in (0, pull)]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(0, 99), st.booleans())
def test_the_interval_is_that_of_a_loop_over_prompts_left_out(prompts, seed, paired):
    """At its ends Hall's cubic of T gives the quantiles of Student's t."""
    values, weights = drawn(1, prompts, seed)
    weights[:, :2] += 1
    other = drawn(1, prompts, seed + 1)[0], weights + drawn(1, prompts, seed + 2)[1]
    (low,), (high,) = stats.mean_interval(values, weights, minus=other if paired else None)
    both = (other[0][0], other[1][0]) if paired else None
    mean, error, freedom, skew, pull = by_leaving_out(values[0], weights[0], both)
    for end, tail, outer in ((low, 0.975, max), (high, 0.025, min)):
        assert (mean - end) / error == pytest.approx(outer(inverses(skew, pull, student.ppf(tail, freedom))), rel=1e-4)
    assert low < mean < high


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(0, 99))
def test_the_interval_of_a_proportion_is_hall_s_in_log_odds(prompts, seed):
    values, weights = drawn(1, prompts, seed)
    weights[:, :2] += 1
    (low,), (high,) = stats.proportion(values, weights)
    p, error, freedom, skew, pull = by_leaving_out(values[0], weights[0])
    spread = error / (p * (1 - p))
    n = weights.sum() ** 2 / (weights**2).sum()
    binomial, alike = (1 - 2 * p) * spread, min(n * error**2 / (p * (1 - p)), 1)
    skews = [skew - binomial, skew - binomial + binomial * (1 - alike) ** n]
    bounds = stats.betting_interval(values, weights)
    for end, tail, outer, bound, inner in ((low, 0.975, max, bounds[0], max), (high, 0.025, min, bounds[1], min)):
        moved = outer(moved for each in skews for moved in inverses(each, pull, student.ppf(tail, freedom)))
        assert end == pytest.approx(inner(expit(logit(p) - spread * moved), bound[0]), abs=1e-6)


def test_without_skew_and_with_equal_weights_it_is_student_s_interval():
    values = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    expected = student.interval(0.95, 4, 3, math.sqrt(2.5 / 5))
    assert np.ravel(stats.mean_interval(values, np.full((1, 5), 2.0))) == pytest.approx(expected, abs=1e-4)
    assert np.ravel(stats.t_interval(np.append(values, [[np.nan]], 1))) == pytest.approx(expected)


def test_seeds_that_agree_and_a_single_one_have_no_interval():
    values = np.array([[0.1, 0.1, 0.1 + 6e-9], [0.3, np.nan, np.nan], [np.nan] * 3, [0.1, 0.2, np.nan]])
    low, high = stats.t_interval(values)
    assert np.isnan([low[:3], high[:3]]).all()
    assert [low[3], high[3]] == pytest.approx([0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05], rel=1e-5)


def test_prompts_that_agree_have_an_interval_of_length_zero_but_for_means_in_0_and_1():
    values, weights = np.array([[0.0] * 3, [0.3] * 3, [1.0, 1 - 6e-8, 1.0]]), np.array([[1.0, 2.0, 4.0]] * 3)
    low, high = stats.mean_interval(values, weights)
    assert [low, high] == [pytest.approx(values[:, 0], abs=1e-6)] * 2
    low, high = stats.proportion(values, weights)
    assert (high - low > 0.5).all()


@pytest.mark.parametrize("prompts", [5, 16, 60])
def test_another_value_than_all_prompts_have_is_a_binomial_event(prompts):
    u = binomtest(0, prompts).proportion_ci(0.95, "exact").high
    (low,), (high,) = stats.proportion(np.full((1, prompts), 0.25), np.full((1, prompts), 4.0))
    assert [low, high] == pytest.approx([0.25 * (1 - u), 0.25 + 0.75 * u])
    (low,), (high,) = stats.proportion(np.eye(1, prompts), np.ones((1, prompts)))
    assert low == 0 and high <= binomtest(1, prompts).proportion_ci(0.95, "exact").high + 1e-9


def bets(values: list[float], weights: list[float], m: float) -> float:
    """The gain of the bets that a mean exceeds m, on average over eight orders of the prompts."""
    ranked = sorted((x, w / max(weights)) for x, w in zip(values, weights, strict=True) if w > 0)
    keys = [np.random.default_rng(seed).random(len(ranked)) for seed in range(8)]
    orders = [[ranked[place] for place in np.argsort(of_order)] for of_order in keys]
    return sum(gain_of(order, m) for order in orders) / 8


def gain_of(prompts: list[tuple[float, float]], m: float) -> float:
    """The gain of the bets on prompts in their order, by a loop."""
    n, gain = len(prompts), 1.0
    total, heard, squares, variance = 0.5, 1.0, 0.25, 0.25
    for t, (x, w) in enumerate(prompts, 1):
        stake = min(math.sqrt(2 * math.log(40) / (variance * n)), 0.75 / m)
        gain *= 1 + stake * w * (x - m)
        total, heard = total + w * x, heard + w
        squares += (w * (x - total / heard)) ** 2
        variance = squares / (t + 1)
    return gain


@pytest.mark.parametrize("interval", [stats.proportion, stats.proportion_change, stats.betting_interval])
def test_the_order_of_prompts_makes_no_difference(interval):
    values, weights = drawn(5, 24, 0)
    values[0], values[1] = np.repeat([1.0, 0.0], 12), np.repeat([0.5, 0.0], [6, 18])  # as in a sorted file
    weights[:2] = 1
    ends = np.array(interval(values, weights))
    assert (ends[0, :2] < values[:2].mean(1) - 0.05).all() and (ends[1, :2] > values[:2].mean(1) + 0.05).all()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(24)
        np.testing.assert_allclose(interval(values[:, order], weights[:, order]), ends, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(0, 99))
def test_outside_the_betting_interval_bets_gain_forty_times_the_stake(prompts, seed):
    values, weights = drawn(1, prompts, seed)
    weights[:, :2] += 1
    (low,), (high,) = stats.betting_interval(values, weights)
    mean = stats.weighted_mean(values, weights)[0]
    for end, x in ((low, values[0]), (1 - high, 1 - values[0])):
        if end > 0:
            assert bets(list(x), list(weights[0]), end * (1 - 1e-6)) >= 40
        if end < min(mean, 1 - mean) - 1e-6:
            assert bets(list(x), list(weights[0]), end + 1e-6) < 40
    assert low <= mean <= high


@pytest.mark.parametrize(("n", "length"), [(12, 0.45), (16, 0.38), (32, 0.23), (64, 0.155)])
def test_no_proportion_has_a_longer_interval_than_one_that_covers_at_any_number_of_prompts(n, length):
    rng = np.random.default_rng(0)
    values, ones = rng.beta(2, 2, (500, n)), np.ones((500, n))
    low, high = stats.betting_interval(values, ones)
    assert (high - low).mean() <= length and ((low <= 0.5) & (high >= 0.5)).mean() >= 0.95
    near_one = rng.uniform(0.945, 1, (200, n))
    for each in (values, near_one, rng.beta(0.05, 0.05, (200, n))):
        bounds, ends = stats.betting_interval(each, ones[: len(each)]), stats.proportion(each, ones[: len(each)])
        assert (ends[0] >= bounds[0] - 1e-9).all() and (ends[1] <= bounds[1] + 1e-9).all()


@pytest.mark.parametrize("n", slow_but([8, 32], [8, 16, 32, 64]))
@pytest.mark.parametrize("few", [0.001, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("same", [0.0, 0.25, 0.5, 1.0])
def test_values_that_are_the_same_in_all_prompts_but_few_are_covered(same, few, n):
    """2,000 experiments each. By the spread alone as few as .02 are covered, where no prompt shows another value."""
    rng = np.random.default_rng(4)
    for others, mean in ((rng.choice([0.0, 0.5], (2000, n), p=[0.7, 0.3]), 0.15), (rng.random((2000, n)), 0.5)):
        values = np.where(rng.random((2000, n)) < few, others, same)
        low, high = stats.proportion(values, np.full((2000, n), 4.0))
        truth = (1 - few) * same + few * mean
        assert ((low <= truth + 1e-12) & (truth - 1e-12 <= high)).mean() >= 0.925


def test_a_value_without_weight_may_be_nan_and_counts_for_nothing():
    values, weights = np.array([[0.2, np.nan, 0.6]]), np.array([[1.0, 0.0, 3.0]])
    clean = np.array([[0.2, 99.0, 0.6]])
    assert stats.weighted_mean(values, weights) == pytest.approx([0.5])
    assert np.array_equal(stats.mean_interval(values, weights), stats.mean_interval(clean, weights))
    assert np.isnan(stats.weighted_mean(values, np.array([[1.0, 1.0, 1.0]]))).all()


@pytest.mark.parametrize("interval", [stats.mean_interval, stats.proportion])
def test_a_row_without_weight_or_of_one_prompt_has_no_interval(interval):
    """One prompt has no spread, and an interval of length zero would say that nothing is uncertain."""
    values = np.array([[0.5, 0.5], [0.4, 0.7], [0.0, 0.7], [1.0, 0.7], [0.5, 0.5]])
    ends = np.array(interval(values, np.array([[0.0, 0.0], *[[3.0, 0.0]] * 3, [1.0, 1.0]])))
    assert np.isnan(ends[:, :4]).all() and not np.isnan(ends[:, 4]).any()


def test_empty_prompts_and_other_rows_do_not_change_the_interval():
    values, weights = drawn(4, 6, 0)
    weights[:, 0] += 1
    weights[:, 1] += 2
    padded = [np.append(each, np.zeros((4, 3)), 1) for each in (values, weights)]
    for interval in (stats.mean_interval, stats.proportion):
        whole = np.array(interval(values, weights))
        assert np.allclose(whole, interval(padded[0], padded[1]))
        assert np.allclose(whole[:, 2], np.ravel(interval(values[2:3], weights[2:3])))


@pytest.mark.parametrize("prompts", [2, 3, 40])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_right_and_all_wrong_get_the_exact_binomial_bound(prompts, right):
    values, weights = np.full((1, prompts), right), np.full((1, prompts), 4.0)
    low, high = stats.proportion(values, weights)
    exact = binomtest(int(right) * prompts, prompts).proportion_ci(0.95, "exact")
    assert [low[0], high[0]] == pytest.approx([exact.low, exact.high])


def chance_of(successes: range, trials: int, rate: float) -> float:
    return sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in successes)


@pytest.mark.parametrize("coverage", [0.5, 0.95])
@pytest.mark.parametrize("trials", [1, 5, 12])
def test_the_ends_of_a_binomial_interval_leave_each_tail_its_half(trials, coverage):
    """Clopper and Pearson's own definition, with the probabilities summed by hand."""
    for successes in range(trials + 1):
        low, high = stats.binomial_interval(successes, trials, coverage=coverage)
        as_many, as_few = range(successes, trials + 1), range(successes + 1)
        tail = pytest.approx((1 - coverage) / 2)
        assert (low == 0) if successes == 0 else (chance_of(as_many, trials, low) == tail)
        assert (high == 1) if successes == trials else (chance_of(as_few, trials, high) == tail)


def test_no_trials_have_no_interval_and_impossible_counts_are_refused():
    assert np.isnan(stats.binomial_interval(0, 0)).all()
    for successes, trials in ((3, 2), (-1, 2)):
        message = f"{successes} successes of {trials} trials: give 0 to {trials}"
        refused(message, stats.binomial_interval, successes, trials)


def test_coverage_is_what_it_says():
    """400 experiments of 60 prompts whose targets share a prompt effect: about 95% of intervals hold the truth."""
    generator = np.random.default_rng(0)
    prompt_rate = generator.beta(2, 3, (400, 60))
    weights = np.full((400, 60), 5.0)
    values = generator.binomial(5, prompt_rate) / 5
    low, high = stats.proportion(values, weights)
    assert 0.91 <= ((low <= 0.4) & (high >= 0.4)).mean() <= 0.98
    naive = 1.96 * np.sqrt(0.4 * 0.6 / 300)  # as if all 300 targets were independent: too short
    assert (np.abs(values.mean(1) - 0.4) <= naive).mean() < 0.9


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize(("kind", "truth"), [("sink", 1 / 11), ("share", 0.9), ("effect", math.exp(0.125))])
def test_skewed_metrics_are_covered_with_few_prompts(n, kind, truth):
    """2,000 experiments each; a percentile bootstrap covers .84 to .90 of them at 16 prompts."""
    rng, weights = np.random.default_rng(1), np.full((2000, n), 4.0)
    draw = {
        "sink": lambda: rng.beta(0.3, 3, (2000, n)),
        "share": lambda: rng.binomial(4, rng.beta(0.9, 0.1, (2000, n))) / 4,
        "effect": lambda: rng.lognormal(0, 0.5, (2000, n)),
    }
    interval = stats.mean_interval if kind == "effect" else stats.proportion
    low, high = interval(draw[kind](), weights)
    assert 0.925 <= ((low <= truth) & (truth <= high)).mean() <= 0.985


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize(("a", "b"), [(0.15, 7.0), (0.3, 30.0), (7.0, 0.15), (30.0, 0.3)])
def test_values_near_a_bound_and_rarely_far_from_it_are_covered(n, a, b):
    """2,000 experiments each: without the skew that few prompts do not show, .88 to .92 are covered at 16 prompts."""
    low, high = stats.proportion(np.random.default_rng(3).beta(a, b, (2000, n)), np.ones((2000, n)))
    assert 0.925 <= ((low <= a / (a + b)) & (a / (a + b) <= high)).mean() <= 0.975


@pytest.mark.parametrize("n", [4, 12, 24])
@pytest.mark.parametrize(
    "lost_same_won", [(0, 0.2, 0.8), (0, 0.97, 0.03), (0.05, 0.9, 0.05), (0.02, 0.08, 0.9), (0.5, 0, 0.5)]
)
def test_changes_of_accuracy_are_covered_where_most_prompts_change_alike(n, lost_same_won):
    """2,000 experiments each: Student's interval, corrected for skew, covers .12 to .93 of some, and leaves [-1, 1]."""
    truth = lost_same_won[2] - lost_same_won[0]
    values = np.random.default_rng(4).choice([-1.0, 0.0, 1.0], p=lost_same_won, size=(2000, n))
    low, high = stats.proportion_change(values, np.ones((2000, n)))
    assert ((low <= truth) & (truth <= high)).mean() >= 0.94
    assert ((low >= -1) & (low <= values.mean(1) + 1e-12) & (values.mean(1) - 1e-12 <= high) & (high <= 1)).all()


def test_student_s_interval_does_not_cover_changes_of_accuracy():
    """What the change log says."""
    values = np.random.default_rng(4).choice([0.0, 1.0], p=[0.97, 0.03], size=(2000, 4))
    low, high = stats.mean_interval(values, np.ones((2000, 4)))
    assert ((low <= 0.03) & (high >= 0.03)).mean() < 0.15


def changes_of(gained: Iterable[int], lost: Iterable[int], n: int) -> Any:
    """Changes of one target a prompt: that of each prompt, for each row's numbers of gains and losses."""
    place = np.arange(n)
    rows = [
        (place < won) * 1.0 - ((place >= won) & (place < won + gone)) for won, gone in zip(gained, lost, strict=True)
    ]
    return np.array(rows, float)


@pytest.mark.parametrize(
    ("gained", "lost", "n", "yes_or_no", "ends"),
    [
        # Computed by others: Fagerland, Lydersen and Laake (2014, Statistics in Medicine 33), airway reactivity.
        (1, 7, 21, True, (-0.517, -0.026)),
        # `docs/intervals.md`
        (0, 0, 12, True, (-0.24, 0.24)),
        (10, 0, 12, True, (0.39, 0.95)),
        (0, 9, 32, True, (-0.45, -0.14)),
        (0, 0, 12, False, (-0.26, 0.26)),
        (10, 0, 12, False, (0.42, 0.97)),
        (0, 9, 32, False, (-0.47, -0.05)),
        # All alike
        (0, 12, 12, True, (-1.0, -0.52)),
        (12, 0, 12, True, (0.52, 1.0)),
    ],
)
def test_changes_of_one_target_a_prompt(gained, lost, n, yes_or_no, ends):
    values = changes_of([gained], [lost], n)
    interval = np.ravel(stats.proportion_change(values, np.ones((1, n)), yes_or_no))
    np.testing.assert_allclose(interval, ends, atol=5e-4 if n == 21 else 5e-3)


@pytest.mark.parametrize(
    ("n", "on_average", "at_worst"), [(3, 0.98, 0.86), (6, 0.97, 0.91), (12, 0.97, 0.91), (32, 0.96, 0.93)]
)
def test_changes_of_one_target_a_prompt_are_covered_whatever_their_chances(n, on_average, at_worst):
    """Exactly, over all outcomes, for a grid of chances; and intervals are shorter than with values between.

    `docs/intervals.md` has the numbers.
    """
    gained, lost = (each.ravel() for each in np.indices((n + 1, n + 1)))
    possible = gained + lost <= n
    gained, lost = gained[possible], lost[possible]
    values, ones = changes_of(gained, lost, n), np.ones((len(gained), n))
    low, high = stats.proportion_change(values, ones, yes_or_no=True)
    wide = np.subtract(*stats.proportion_change(values, ones)[::-1])
    outcomes = np.stack([gained, lost, n - gained - lost], 1)
    chances = [0.01, 0.02, 0.03, *np.linspace(0, 1, 21)]
    rows = []
    for win, lose in ((win, lose) for win in chances for lose in chances if win + lose <= 1 + 1e-9):
        weight = multinomial.pmf(outcomes, n, [win, lose, max(0.0, 1 - win - lose)])
        inside = (low <= win - lose + 1e-9) & (win - lose - 1e-9 <= high)
        rows.append([(weight * each).sum() for each in (inside, high - low, wide)])
    covered, lengths, wider = np.transpose(rows)
    assert round(covered.mean(), 2) == on_average and round(covered.min(), 2) == at_worst
    assert lengths.mean() <= 0.9 * wider.mean()


def test_where_a_share_may_be_asked_of_several_targets_values_between_are_guarded_against():
    values, weights = changes_of([0, 0], [9, 9], 32), np.ones((2, 32))
    weights[1, 0] = 2
    low, high = stats.proportion_change(values, weights, np.array([True, True]))
    np.testing.assert_array_equal((low[1], high[1]), np.ravel(stats.proportion_change(values[1:], weights[1:])))
    assert high[0] < high[1]


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize("of", ["share", "effect", "difference", "ratio"])
def test_prompts_of_very_different_weight_are_covered(n, of):
    """2,000 experiments each; corrected for skew alone, .90 to .92 of them are covered."""
    rng = np.random.default_rng(2)
    weights, shares, effects = rng.lognormal(0, 1, (2000, n)), rng.beta(2, 4, (2000, n)), rng.normal(0, 1, (2000, n))
    other = effects / 2 + rng.normal(0, 1, (2000, n))
    if of == "share":
        low, high = stats.proportion(shares, weights)
    elif of == "ratio":
        parts = zip(weights * shares, weights, strict=True)
        found = [stats.ratio(above[None], below, np.ones(n))[1:] for above, below in parts]
        low, high = np.array(found)[..., 0].T
    else:
        low, high = stats.mean_interval(effects, weights, minus=(other, weights) if of == "difference" else None)
    truth = 1 / 3 if of in ("share", "ratio") else 0
    assert 0.925 <= ((low <= truth) & (truth <= high)).mean() <= 0.975


@pytest.mark.parametrize(("n", "chance"), [(3, 0.8), (8, 0.95), (16, 0.95)])
def test_shares_of_a_change_that_few_prompts_lack_are_covered(n, chance):
    """2,000 experiments each; without the bound of the change itself .15 to .57 are covered."""
    above = (np.random.default_rng(0).random((2000, n)) < chance).astype(float)
    _, low, high = stats.ratio(above, np.ones(n), np.ones(n), shares=True)
    assert ((low <= chance) & (chance <= high)).mean() > 0.95 and (low < high).all()
    _, low, high = stats.ratio(-above, -np.ones(n), np.ones(n), shares=True)
    assert ((low <= chance) & (chance <= high)).mean() > 0.95


def test_each_row_of_a_ratio_is_as_alone():
    rng = np.random.default_rng(5)
    above, below, weights = rng.random((3, 9)), 1 + rng.random(9), 1.0 + np.arange(9)
    alone = [np.concatenate(stats.ratio(above[[row]], below, weights)) for row in range(3)]
    np.testing.assert_allclose(np.transpose(stats.ratio(above, below, weights)), alone)


@pytest.mark.parametrize(("n", "other_n"), [(8, 8), (8, 40), (40, 12)])
def test_differences_of_independent_prompts_are_covered_and_those_of_shares_stay_within_bounds(n, other_n):
    generator = np.random.default_rng(n + other_n)

    def sides(draw, interval, *truths):
        for size, truth in zip((n, other_n), truths, strict=True):
            values = draw(truth, (2000, size)).astype(float)
            yield np.stack([values.mean(1), *interval(values, np.ones(values.shape))], 1)

    def covered(made, truth):
        low, high = stats.unpaired_difference(*made)
        return np.mean((low <= truth) & (truth <= high))

    assert covered(sides(lambda m, size: generator.normal(m, 1 + m, size), stats.mean_interval, 0.5, 2.0), -1.5) > 0.93
    shares = [*sides(lambda share, size: generator.random(size) < share, stats.proportion, 0.9, 0.5)]
    assert covered(shares, 0.4) > 0.94
    low, high = stats.unpaired_difference(*shares)
    assert (low >= -1).all() and (high <= 1).all() and (low <= high).all()


def test_the_ends_of_an_unpaired_difference_are_those_of_zou_and_donner_s_formula():
    one, other = np.array([[0.7, 0.5, 0.8]]), np.array([[0.4, 0.1, 0.6]])
    low, high = np.ravel(stats.unpaired_difference(one, other))
    assert low == pytest.approx(0.3 - math.sqrt(0.2**2 + 0.2**2)) and high == pytest.approx(
        0.3 + math.sqrt(0.1**2 + 0.3**2)
    )
    assert np.isnan(stats.unpaired_difference(one, other * [[1.0, np.nan, 1.0]])[1]).all()


def test_no_prompts_have_no_interval():
    refused("no prompts, so no interval", stats.mean_interval, np.empty((2, 0)), np.empty((2, 0)))
    for interval in (stats.proportion, stats.betting_interval):
        refused("no prompts, so no interval", interval, np.empty((2, 0)), np.empty((2, 0)))


def test_a_single_low_value_among_six_makes_the_interval_long_downwards():
    """As `docs/intervals.md` tells."""
    values = np.array([[2.8, 1.9, 1.7, 0.3, 2.3, 2.0]])
    assert np.concatenate(stats.mean_interval(values, np.ones_like(values))).round(1).tolist() == [-1.6, 2.5]
    assert np.concatenate(stats.t_interval(values)).round(1).tolist() == [0.9, 2.7]
