"""p-values of means beside the intervals that they invert, and their correction beside SciPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from align_circuits.tables.intervals import mean_interval
from align_circuits.tables.p_values import benjamini_hochberg, p_above_zero


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.integers(0, 99))
def test_a_p_value_is_where_the_interval_ends(prompts, seed):
    generator = np.random.default_rng(seed)
    values, weights = generator.random((1, prompts)), generator.integers(0, 5, (1, prompts)).astype(float)
    weights[:, :2] += 1
    for sign in (1, -1):
        (low,), _ = mean_interval(sign * values, weights)
        assert p_above_zero(sign * values - low, weights) == pytest.approx([0.025], rel=1e-3)
    alike = np.array([[0.1], [-0.1], [0.0]]) * (1 + 6e-8 * generator.random(prompts))  # but for float32's rounding
    assert p_above_zero(alike, np.ones(alike.shape)).tolist() == [0.5**prompts, 1, 1]
    assert p_above_zero(values, np.eye(1, prompts)).tolist() == [1], "one prompt shows no spread"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_correction_over_many_tests_is_that_of_scipy(p):
    assert benjamini_hochberg(np.array(p)) == pytest.approx(false_discovery_control(p))
