"""p-values of means over prompts, and their correction over many tests."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import stdtr

from align_circuits.tables.intervals import ROUNDING, jackknife, weight_shares, weighted_mean


def p_above_zero(values: Float[ndarray, "row prompt"], weights: Float[ndarray, "row prompt"]) -> Float[ndarray, " row"]:
    """Returns the one-sided p-value of each row's mean over prompts: of no mean above 0 in the population.

    The test that `mean_interval` inverts: p is at most .025 exactly where the lower end is above 0. But where all n
    prompts agree there is no spread to judge by, and p is that of the sign test, 2^-n, if they lie above 0. 1 for a row
    with weight in fewer than two prompts.

    Args:
        values: As for `mean_interval`.
        weights: As for `mean_interval`.
    """
    mean, (errors, prompts) = weighted_mean(values, weights), jackknife(values, weights)
    error = np.linalg.norm(errors, axis=1)
    spread = error > ROUNDING * np.abs(mean)
    t = np.divide(mean, error, out=np.zeros(len(mean)), where=spread)
    relative = np.divide(errors, error[:, None], out=np.zeros(errors.shape), where=spread[:, None])
    skew, pull = (relative**3).sum(1), (relative * weight_shares(weights)).sum(1)
    bends = np.stack([skew, skew - 3 * pull])
    p = stdtr(np.maximum(prompts - 1, 1), -(t + bends * t**2 / 3 + bends**2 * t**3 / 27 + skew / 6)).max(0)
    alike = np.where(mean > 0, 0.5 ** (weights > 0).sum(1), 1.0)
    several = prompts > 1 + 1e-9  # (Σw)²/Σw² of one prompt is 1 but for rounding
    return np.where(several, np.where(spread, p, alike), 1.0)


def benjamini_hochberg(p: Float[ndarray, " test"]) -> Float[ndarray, " test"]:
    """Returns the smallest false discovery rate at which each test is a discovery (Benjamini and Hochberg, 1995)."""
    order = p.argsort()[::-1]  # scipy.stats has this too, but takes .3 s to import
    q = p[order] * len(p) / np.arange(len(p), 0, -1)
    # From the largest p down, so that no larger p has a smaller q.
    return np.minimum.accumulate(q)[order.argsort()]
