"""Intervals: beside a loop over resamples, scipy, and their promised coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

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


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_bootstrap_is_a_loop_over_resampled_prompts(rows, prompts, seed, paired):
    values, weights = drawn(rows, prompts, seed)
    other = drawn(rows, prompts, seed + 1)
    low, high = stats.bootstrap(values, weights, minus=other if paired else None, resamples=50, seed=3)
    generator = np.random.default_rng(3)
    counts = generator.multinomial(prompts, [1 / prompts] * prompts, size=50)
    for row in range(rows):
        means = []
        for count in counts:
            chosen = [prompt for prompt, times in enumerate(count) for _ in range(times)]
            sides = []
            for side_values, side_weights in ((values, weights), other):
                total = sum(side_weights[row, prompt] for prompt in chosen)
                part = sum(side_values[row, prompt] * side_weights[row, prompt] for prompt in chosen)
                sides.append(part / total if total else np.nan)
            means.append(sides[0] - sides[1] if paired else sides[0])
        means = [mean for mean in means if not np.isnan(mean)]
        several = means and (weights[row] > 0).sum() > 1
        expected = np.quantile(means, [0.025, 0.975]) if several else [np.nan, np.nan]
        assert [low[row], high[row]] == pytest.approx(list(expected), nan_ok=True)


def test_a_value_without_weight_may_be_nan_and_counts_for_nothing():
    values, weights = np.array([[0.2, np.nan, 0.6]]), np.array([[1.0, 0.0, 3.0]])
    clean = np.array([[0.2, 99.0, 0.6]])
    assert stats.weighted_mean(values, weights) == pytest.approx([0.5])
    assert np.array_equal(stats.bootstrap(values, weights), stats.bootstrap(clean, weights))
    assert np.isnan(stats.weighted_mean(values, np.array([[1.0, 1.0, 1.0]]))).all()


def test_a_row_without_weight_has_no_interval():
    values, weights = np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([[0.0, 0.0], [1.0, 1.0]])
    for interval in (stats.bootstrap, stats.proportion):
        low, high = interval(values, weights)
        assert np.isnan([low[0], high[0]]).all()
        assert not np.isnan([low[1], high[1]]).any()


def test_one_prompt_has_no_interval():
    """It has no spread to resample, and an interval of length zero would say that nothing is uncertain."""
    low, high = stats.bootstrap(np.array([[0.4, 7.0]]), np.array([[3.0, 0.0]]))
    assert np.isnan(low).all() and np.isnan(high).all()


def test_chunks_of_rows_do_not_change_the_interval(monkeypatch):
    values, weights = drawn(7, 5, 0)
    whole = stats.bootstrap(values, weights, resamples=100)
    monkeypatch.setattr(stats, "_NUMBERS_AT_ONCE", 250)
    assert np.allclose(whole, stats.bootstrap(values, weights, resamples=100))


@pytest.mark.parametrize("prompts", [1, 3, 40])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_right_and_all_wrong_get_the_exact_binomial_bound(prompts, right):
    values, weights = np.full((1, prompts), right), np.full((1, prompts), 4.0)
    low, high = stats.proportion(values, weights)
    exact = binomtest(int(right) * prompts, prompts).proportion_ci(0.95, "exact")
    assert [low[0], high[0]] == pytest.approx([exact.low, exact.high])


def test_prompts_without_targets_are_no_trials():
    values, weights = np.ones((1, 6)), np.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    assert stats.proportion(values, weights)[0] == pytest.approx(binomtest(2, 2).proportion_ci(0.95, "exact").low)


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
        with pytest.raises(ValueError, match=f"{successes} successes of {trials} trials: give 0 to {trials}"):
            stats.binomial_interval(successes, trials)


def test_coverage_is_what_it_says():
    """400 experiments of 60 prompts whose targets share a prompt effect: about 95% of intervals hold the truth."""
    generator = np.random.default_rng(0)
    prompt_rate = generator.beta(2, 3, (400, 60))
    weights = np.full((400, 60), 5.0)
    values = generator.binomial(5, prompt_rate) / 5
    low, high = stats.proportion(values, weights)
    covered = ((low <= 0.4) & (high >= 0.4)).mean()
    assert 0.91 <= covered <= 0.98
    naive = 1.96 * np.sqrt(0.4 * 0.6 / 300)  # as if all 300 targets were independent: too short
    assert (np.abs(values.mean(1) - 0.4) <= naive).mean() < 0.9


def test_a_paired_difference_is_tighter_than_its_sides():
    generator = np.random.default_rng(0)
    hard = generator.random((1, 50))
    weights = np.ones((1, 50))
    low, high = stats.bootstrap(np.clip(hard + 0.1, 0, 1), weights, minus=(hard, weights))
    sides = stats.bootstrap(hard, weights)
    assert (high - low)[0] < 0.2 * (sides[1] - sides[0])[0]
    assert low[0] > 0


def test_no_prompts_have_no_interval():
    with pytest.raises(ValueError, match="no prompts to resample"):
        stats.bootstrap(np.empty((2, 0)), np.empty((2, 0)))
