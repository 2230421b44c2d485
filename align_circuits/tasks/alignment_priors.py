"""The alignment of output phrases with input positions (Agarwal & Sarawagi, 2025, Eq. 2)."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.tasks.rng import Rng

AlignmentKind = Literal["monotonic", "reversed", "prior", "permutation"]
PriorForm = Literal["text", "code"]


def alignment_prior(x_len: int, decay: float, form: PriorForm = "text") -> Float[Tensor, "phrase pos"]:
    r"""Returns the probability that each phrase p is aligned with each input position q.

    `"text"`: P(q | p) = exp(-λ |q - p|) / Z. `"code"`: P(q | p) = exp(-λ |q - p| / m) / Z, positions divided by the
    input length as the released code and fast_align (Dyer et al., 2013) do: m times weaker at the same λ. The values of
    the paper's Fig. 7 (λ = 1, 4, 16) fit `"code"` only.

    Args:
        x_len: m, the input length and the number of phrases.
        decay: λ, from 0 (uniform) up.
        form: Which of the two definitions.

    Source: Missing Alignment Link, Eq. 2; its released code.
    """
    position = torch.arange(x_len, dtype=torch.float64)
    distance = (position[:, None] - position).abs() / (x_len if form == "code" else 1)
    return torch.softmax(-decay * distance, dim=1)


def sample_alignment(
    rng: Rng, kind: AlignmentKind, x_len: int, decay: float | None = None, form: PriorForm = "text"
) -> tuple[int, ...]:
    """Draws the input position, counted from 0, that each phrase is aligned with.

    `"monotonic"`: p to p. `"reversed"`: the last position first. `"prior"`: each phrase independently from
    `alignment_prior`, so that two phrases may share a position. `"permutation"`: uniform among all permutations except
    the identity, since it is the control for `"monotonic"`; with one symbol only the identity exists.
    """
    if kind == "monotonic" or x_len == 1:
        return tuple(range(x_len))
    if kind == "reversed":
        return tuple(reversed(range(x_len)))
    if kind == "prior":
        assert decay is not None
        # The last edge, 1 up to rounding, is left out: a number just below 1 must not fall beyond the last position.
        edges = alignment_prior(x_len, decay, form).cumsum(1)[:, :-1].contiguous()
        drawn = rng.uniform("alignment", x_len, 1).double()
        return tuple(torch.searchsorted(edges, drawn, right=True)[:, 0].tolist())
    while True:
        # Drawn again where it is the identity: the other permutations stay equally likely.
        order = tuple(rng.order("alignment", x_len).tolist())
        if order != tuple(range(x_len)):
            return order
