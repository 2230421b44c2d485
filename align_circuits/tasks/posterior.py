"""The probability of the next symbol for a predictor that knows the automata and the grammar but not the input."""

from functools import lru_cache
from itertools import combinations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_SYMBOLS = 14
"""The longest input whose orders are summed over: the sum has 2^m terms."""


def symbol_posterior(
    likelihood: Float[Tensor, "prompt phrase symbol"],
    aligned: tuple[int, ...],
    shapes: Bool[Tensor, "shape pos symbol"],
) -> Float[Tensor, "prompt phrase symbol"]:
    """Returns the probability of the symbol that each phrase translates, given all earlier phrases.

    P(x_Ã(p) = s | w_1 ... w_{p-1}), with the input x uniform over the shapes' orders: a ratio of permanents, summed
    over subsets of symbols, so exact in 2^m m steps where there are m! orders.

    Args:
        likelihood: P(w_p | s), the probability of each phrase under each symbol's automaton.
        aligned: The input position of each phrase.
        shapes: The symbols that each position permits under each of the equally likely shapes of an input.

    Raises:
        ValueError: More symbols than `MAX_SYMBOLS`.
    """
    n, _, m = likelihood.shape
    if m > MAX_SYMBOLS:
        raise ValueError(
            f"x_len is {m}: the history reference sums over the orders of at most {MAX_SYMBOLS} symbols; "
            "sample with references=False"
        )
    weights = torch.ones(n, m, m, dtype=torch.float64)  # of each symbol at each position, by the phrases so far
    posterior = torch.empty(n, m, m, dtype=torch.float64)
    for phrase, position in enumerate(aligned):
        marginal = sum(_marginal(weights * shape, position) for shape in shapes)
        assert isinstance(marginal, Tensor)
        posterior[:, phrase] = marginal / marginal.sum(-1, keepdim=True)
        scale = likelihood[:, phrase].amax(-1, keepdim=True)  # long phrases have tiny probabilities
        weights[:, position] *= likelihood[:, phrase] / scale
    return posterior


def _marginal(weights: Float[Tensor, "prompt pos symbol"], place: int) -> Float[Tensor, "prompt symbol"]:
    """The weight of all orders that put each symbol at `place`; an order weighs the product over its positions."""
    # A dynamic programme over positions: `total` has, for every set of as many symbols as positions so far, the weight
    # of all ways to place them there. The next position adds one symbol to a set, so the sum needs 2^m m steps. `place`
    # comes last and is not summed: what is left for it is one symbol.
    n, m, _ = weights.shape
    total = torch.ones(n, 1, dtype=weights.dtype)
    other_positions = [position for position in range(m) if position != place]
    for size, position in enumerate(other_positions, start=1):
        members, before = _subsets(m, size)
        total = (total[:, before] * weights[:, position][:, members]).sum(-1)
    members, before = _subsets(m, m)
    marginal = torch.empty(n, m, dtype=weights.dtype)
    marginal[:, members[0]] = total[:, before[0]] * weights[:, place][:, members[0]]
    return marginal


@lru_cache(maxsize=256)
def _subsets(m: int, size: int) -> tuple[Int[Tensor, "subset member"], Int[Tensor, "subset member"]]:
    """The sets of `size` of `m` symbols, and for each member the index of the set without it among the smaller sets."""
    smaller = {subset: index for index, subset in enumerate(combinations(range(m), size - 1))}
    sets = list(combinations(range(m), size))
    without = [[smaller[subset[:i] + subset[i + 1 :]] for i in range(size)] for subset in sets]
    return torch.tensor(sets), torch.tensor(without)
