"""The theory: the loss of an induction head and its classifier in three numbers, or four, and its gradient flow."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.integrate import odeint
from scipy.special import expit

Numbers = Float[ndarray, "..."] | float

PARAMETERS = ("xi", "alpha", "beta_1")
"""In the order of every vector of parameters."""


@dataclass(frozen=True)
class NestedLogits:
    """The phenomenological loss of a two-parameter induction head in front of a softmax classifier (Eqs. 7 to 10).

        loss = log(1 + (N-1) exp(-z) + (L-N) exp(-z')),
        z = ξ (e^y - 1) / (e^y + 2N),   z' = ξ e^y / (e^y + 2N),   y = α e^β_1 / (e^β_1 + N).

    ξ is how well the classifier's vectors match the labels, z' its margin over labels that are not in the context, z
    its margin over those that are, y the score of the right label in the second layer. In nats.

    It leaves out noise, the items in what the classifier reads, and finite dimension. Where it would mislead: at L = N
    the slow branch is no minimum, the loss keeps falling along it (`gradient_flow` to long times).

    Source: Reddy (2024), §3.

    >>> float(NestedLogits(n_labels=32, n_pairs=8)(np.zeros(3)).round(6)), float(np.log(32).round(6))
    (3.465736, 3.465736)
    """

    n_labels: int = 32
    """L, at least N."""
    n_pairs: int = 8
    """N."""

    def __post_init__(self):
        if not 2 <= self.n_pairs <= self.n_labels:
            raise ValueError(
                f"n_pairs is {self.n_pairs}, n_labels {self.n_labels}: give at least 2 pairs and as many labels"
            )

    def __call__(self, parameters: Float[ndarray, "... 3"]) -> Numbers:
        """Returns the loss at (ξ, α, β_1)."""
        xi, alpha, beta_1 = np.moveaxis(parameters, -1, 0)
        return self.at(xi, alpha * self.attention(beta_1))

    def at(self, xi: Numbers, y: Numbers) -> Numbers:
        """Returns the loss at (ξ, y), the only two numbers through which it depends on the three."""
        near, far, *_ = self._margins(y)
        with np.errstate(divide="ignore"):  # at L = N there are no other labels: log 0
            counts = np.log([self.n_pairs - 1.0, float(self.n_labels - self.n_pairs)])
        return np.logaddexp(np.logaddexp(0.0, counts[0] - xi * near), counts[1] - xi * far)

    def gradient(self, parameters: Float[ndarray, "... 3"]) -> Float[ndarray, "... 3"]:
        """Returns the derivatives of the loss by (ξ, α, β_1), in closed form."""
        xi, alpha, beta_1 = np.moveaxis(parameters, -1, 0)
        previous = self.attention(beta_1)
        by_xi, by_y = self.slopes(xi, alpha * previous)
        return np.stack([by_xi, by_y * previous, by_y * alpha * previous * (1 - previous)], -1)

    def slopes(self, xi: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the derivatives of the loss by ξ and by y."""
        near, far, rise_near, rise_far = self._margins(y)
        among, beyond = (self.n_pairs - 1) * np.exp(-xi * near), (self.n_labels - self.n_pairs) * np.exp(-xi * far)
        total = 1 + among + beyond
        among, beyond = among / total, beyond / total  # the odds of labels in the context, and of the others
        return -(among * near + beyond * far), -xi * (among * rise_near + beyond * rise_far)

    def gradient_flow(
        self, times: Float[ndarray, " time"], start: Float[ndarray, " 3"] | None = None
    ) -> Float[ndarray, "time 3"]:
        """Returns the path of steepest descent, d(ξ, α, β_1)/dt = -gradient, from `start` (the origin by default).

        Gradient descent with a small learning rate η is at t = η · steps.

        Args:
            times: Ascending, from 0.
            start: Where the path begins.

        Raises:
            ValueError: Times that do not ascend from 0.
            RuntimeError: The integrator failed.
        """
        return descent(self.gradient, times, np.zeros(3) if start is None else start)

    def attention(self, beta_1: Numbers) -> Numbers:
        """Returns the attention that a logit gives to the right one, such as a label's to the item before it.

        It is e^β_1 / (e^β_1 + N).
        """
        return expit(beta_1 - math.log(self.n_pairs))

    def _margins(self, y: Numbers) -> tuple[Numbers, ...]:
        """z/ξ and z'/ξ, and their derivatives by y."""
        odds = math.log(2 * self.n_pairs)
        far = expit(y - odds)  # e^y / (e^y + 2N)
        near = far - expit(odds - y) / (2 * self.n_pairs)
        rise_far = far * (1 - far)
        return near, far, rise_far * (1 + 1 / (2 * self.n_pairs)), rise_far


@dataclass(frozen=True)
class AlignedLogits:
    """The same loss where the query must find its key by an alignment: a fourth nested logit, κ.

    What the target brings to the match is no longer given: it is fetched from the input by an aligner, whose attention
    to the right one of N symbols is e^κ / (e^κ + N), in the form of Eq. 10's attention to the item before:

        y = α · e^β_1 / (e^β_1 + N) · e^κ / (e^κ + N),   the loss as in `NestedLogits`.

    For κ → ∞ it is Eq. 10. Beside what that leaves out, it takes a tuning for plain gradient flow with one rate for all
    four. Where it would mislead: with another optimiser, or heads that share the work. The control is a forecast from
    the other seeds alone (`onset_forecast.forecast`).

    Source: ours, after Reddy (2024), Eq. 10.
    """

    n_labels: int = 26
    """L, the letters that a phrase may hold."""
    n_pairs: int = 5
    """N, the symbols of an input; each has its phrase."""

    @property
    def unaligned(self) -> NestedLogits:
        """Eq. 10 at the same L and N."""
        return NestedLogits(self.n_labels, self.n_pairs)

    def __call__(self, parameters: Float[ndarray, "... 4"]) -> Numbers:
        """Returns the loss at (ξ, α, β_1, κ), in nats."""
        return self.unaligned.at(parameters[..., 0], self._score(parameters))

    def gradient(self, parameters: Float[ndarray, "... 4"]) -> Float[ndarray, "... 4"]:
        """Returns the derivatives of the loss by (ξ, α, β_1, κ), in closed form."""
        xi, alpha, beta_1, kappa = np.moveaxis(parameters, -1, 0)
        loss = self.unaligned
        previous, aligned = loss.attention(beta_1), loss.attention(kappa)
        by_xi, by_y = loss.slopes(xi, alpha * previous * aligned)
        by_alpha = by_y * previous * aligned
        return np.stack([by_xi, by_alpha, by_alpha * alpha * (1 - previous), by_alpha * alpha * (1 - aligned)], -1)

    def measures(self, parameters: Float[ndarray, "... 4"], floor: float = 0.0) -> dict[str, Numbers]:
        """Returns what probes of a tuning measure there, each from 0 to 1.

        `align_query`, `align_key` and `lookup`: the share of the attention on N candidates that is on the right one,
        e^s / (e^s + N - 1) with s = κ, β_1, y. `accuracy`: the probability p of the right label, from 1/L to 1,
        stretched so that 1/L stands at `floor`.

        Args:
            parameters: (ξ, α, β_1, κ).
            floor: The accuracy of a uniform guess.
        """
        score, others = self._score(parameters), np.log(self.n_pairs - 1)
        guess = 1 / self.n_labels
        known = (np.exp(-self.unaligned.at(parameters[..., 0], score)) - guess) / (1 - guess)
        return {
            "align_query": expit(parameters[..., 3] - others),
            "align_key": expit(parameters[..., 2] - others),
            "lookup": expit(score - others),
            "accuracy": floor + (1 - floor) * known,
        }

    def _score(self, parameters: Float[ndarray, "... 4"]) -> Numbers:
        """The score y of the right label in the second layer."""
        attention = self.unaligned.attention
        return parameters[..., 1] * attention(parameters[..., 2]) * attention(parameters[..., 3])


def descent(
    gradient: Callable[[Float[ndarray, " n"]], Float[ndarray, " n"]],
    times: Float[ndarray, " time"],
    start: Float[ndarray, " n"],
    precision: float = 1e-9,
) -> Float[ndarray, "time n"]:
    """Returns the path of steepest descent from `start`.

    Args:
        gradient: Of a loss.
        times: Ascending, from 0.
        start: Where the path begins.
        precision: The relative error of a step.

    Raises:
        ValueError: Times that do not ascend from 0.
        RuntimeError: The integrator failed.
    """
    if not len(times) or times[0] != 0 or (np.diff(times) <= 0).any():
        raise ValueError(f"times from {times[:1].tolist()}: give ascending times that start at 0")
    if len(times) == 1:
        return np.asarray(start, dtype=float)[None]
    path, info = odeint(
        lambda _, parameters: -gradient(parameters),
        np.asarray(start, dtype=float),
        times,
        tfirst=True,
        rtol=precision,
        atol=precision / 1000,
        mxstep=100_000,
        full_output=True,
    )
    if info["message"] != "Integration successful.":
        raise RuntimeError(f"the gradient flow could not be integrated: {info['message']}")
    return path
