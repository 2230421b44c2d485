"""The loss of an induction head and its classifier in three numbers: nested logits and their gradient flow."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.integrate import solve_ivp
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
        return self.at(xi, alpha * self._looks_back(beta_1))

    def at(self, xi: Numbers, y: Numbers) -> Numbers:
        """Returns the loss at (ξ, y), the only two numbers through which it depends on the three."""
        terms = self._terms(xi, y)[0]
        return np.logaddexp.reduce(terms, axis=0)

    def gradient(self, parameters: Float[ndarray, "... 3"]) -> Float[ndarray, "... 3"]:
        """Returns the derivatives of the loss by (ξ, α, β_1), in closed form."""
        xi, alpha, beta_1 = np.moveaxis(parameters, -1, 0)
        back = self._looks_back(beta_1)
        terms, near, far, rise_near, rise_far = self._terms(xi, alpha * back)
        weight = np.exp(terms - np.logaddexp.reduce(terms, axis=0))  # of the labels in the context, and of the others
        by_xi = -(weight[1] * near + weight[2] * far)
        by_y = -xi * (weight[1] * rise_near + weight[2] * rise_far)
        return np.stack([by_xi, by_y * back, by_y * alpha * back * (1 - back)], -1)

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
            RuntimeError: The integrator gave up.
        """
        if not len(times) or times[0] != 0 or (np.diff(times) <= 0).any():
            raise ValueError(f"times from {times[:1].tolist()}: give ascending times that start at 0")
        origin = np.zeros(3) if start is None else np.asarray(start, dtype=float)
        if len(times) == 1:
            return origin[None]
        path = solve_ivp(
            lambda _, at: -self.gradient(at), (0.0, float(times[-1])), origin, "LSODA", times, rtol=1e-9, atol=1e-12
        )
        if not path.success:
            raise RuntimeError(f"the flow could not be followed: {path.message}")
        return path.y.T

    def _looks_back(self, beta_1: Numbers) -> Numbers:
        """The attention of a label to the item before it, e^β_1 / (e^β_1 + N)."""
        return expit(beta_1 - np.log(self.n_pairs))

    def _terms(self, xi: Numbers, y: Numbers) -> tuple[Numbers, ...]:
        """The logarithms of the three terms of the loss; z/ξ and z'/ξ; their derivatives by y."""
        odds = np.log(2 * self.n_pairs)
        far = expit(y - odds)  # e^y / (e^y + 2N)
        near = far - expit(odds - y) / (2 * self.n_pairs)
        rise_far = far * (1 - far)
        rise_near = rise_far * (1 + 1 / (2 * self.n_pairs))
        with np.errstate(divide="ignore"):  # at L = N there are no other labels: log 0
            counts = np.log([self.n_pairs - 1.0, float(self.n_labels - self.n_pairs)])
        terms = np.stack(np.broadcast_arrays(0.0 * xi * y, counts[0] - xi * near, counts[1] - xi * far))
        return terms, near, far, rise_near, rise_far
