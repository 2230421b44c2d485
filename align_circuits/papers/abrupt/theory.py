"""The theory: the loss of an induction head and its classifier in three numbers, and its gradient flow."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.integrate import odeint
from scipy.special import expit

Numbers = Float[ndarray, "..."] | float


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

    parameters: ClassVar[tuple[str, ...]] = ("xi", "alpha", "beta_1")
    """In the order of every vector of parameters: ξ, α, and the logits whose attentions multiply α."""

    n_labels: int = 32
    """L, at least N."""
    n_pairs: int = 8
    """N."""

    def __post_init__(self):
        if not 2 <= self.n_pairs <= self.n_labels:
            raise ValueError(
                f"n_pairs is {self.n_pairs}, n_labels {self.n_labels}: give at least 2 pairs and as many labels"
            )

    def __call__(self, at: Float[ndarray, "... parameter"]) -> Numbers:
        """Returns the loss at these parameters."""
        return self.of_score(at[..., 0], self.score(at))

    def score(self, at: Float[ndarray, "... parameter"]) -> Numbers:
        """Returns y, the score of the right label in the second layer."""
        return _attended(at[..., 1], self._attention(at[..., 2:]))

    def of_score(self, xi: Numbers, y: Numbers) -> Numbers:
        """Returns the loss at (ξ, y), the only two numbers through which it depends on the others."""
        near, far = self._margins(y)
        with np.errstate(divide="ignore"):  # at L = N there are no other labels: log 0
            counts = np.log([self.n_pairs - 1.0, float(self.n_labels - self.n_pairs)])
        return np.logaddexp(np.logaddexp(0.0, counts[0] - xi * near), counts[1] - xi * far)

    def gradient(self, at: Float[ndarray, "... parameter"]) -> Float[ndarray, "... parameter"]:
        """Returns the derivatives of the loss by its parameters, in closed form."""
        xi, alpha = at[..., 0], at[..., 1]
        attention = self._attention(at[..., 2:])
        near, far = self._margins(_attended(alpha, attention))
        rise_far = far * (1 - far)
        rise_near = rise_far * (1 + 1 / (2 * self.n_pairs))
        among, beyond = (self.n_pairs - 1) * np.exp(-xi * near), (self.n_labels - self.n_pairs) * np.exp(-xi * far)
        total = 1 + among + beyond
        among, beyond = among / total, beyond / total  # the probabilities of labels in the context, and of the others
        by_xi, by_y = -(among * near + beyond * far), -xi * (among * rise_near + beyond * rise_far)
        by_alpha = _attended(by_y, attention)
        by_logits = (by_alpha * alpha)[..., None] * (1 - attention)
        return np.concatenate([np.stack([by_xi, by_alpha], -1), by_logits], -1)

    def gradient_flow(
        self, times: Float[ndarray, " time"], start: Float[ndarray, " parameter"] | None = None, precision: float = 1e-9
    ) -> Float[ndarray, "time parameter"]:
        """Returns the path of steepest descent, whose time is learning rate times steps, from `start`.

        Args:
            times: Ascending, from 0.
            start: Where the path begins; the origin by default.
            precision: The relative error of a step.

        Raises:
            ValueError: Times that do not ascend from 0.
            RuntimeError: The integrator failed.
        """
        if not len(times) or times[0] != 0 or (np.diff(times) <= 0).any():
            raise ValueError(f"times from {times[:1].tolist()}: give ascending times that start at 0")
        start = np.zeros(len(self.parameters)) if start is None else np.asarray(start, dtype=float)
        if len(times) == 1:
            return start[None]
        path, info = odeint(
            lambda _, at: -self.gradient(at),
            start,
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

    def _attention(self, logit: Float[ndarray, "..."]) -> Float[ndarray, "..."]:
        """The attention e^s / (e^s + N) that a logit s gives to the right one, such as a label's to the item before."""
        return expit(logit - math.log(self.n_pairs))

    def _margins(self, y: Numbers) -> tuple[Numbers, Numbers]:
        """z/ξ and z'/ξ."""
        odds = math.log(2 * self.n_pairs)
        far = expit(y - odds)  # e^y / (e^y + 2N)
        return far - expit(odds - y) / (2 * self.n_pairs), far


def _attended(value: Numbers, attention: Float[ndarray, "... logit"]) -> Numbers:
    """A value times the attention of each logit, in their order: the order of factors decides the last digit."""
    for logit in range(attention.shape[-1]):
        value = value * attention[..., logit]
    return value
