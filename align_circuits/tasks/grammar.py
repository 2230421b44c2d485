"""The two-part grammar of the inputs (Agarwal & Sarawagi, 2025, App. B.1)."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from align_circuits.tasks.rng import Rng


def first_part(x_len: int) -> int:
    """Returns how many of the symbols 0, 1, ..., x_len - 1 make up the first part: half of them, rounded up."""
    return (x_len + 1) // 2


def sample_orders(rng: Rng, n: int, count: int, x_len: int) -> Int[Tensor, "prompt example pos"]:
    """Draws inputs of the grammar R -> XY | YX, X -> orders of U1, Y -> orders of U2, all derivations equally likely.

    `U1` is the first half of the symbols (rounded up), `U2` the rest, which is empty if there is one symbol.

    Args:
        rng: The random generator.
        n: The number of prompts.
        count: The number of inputs for each prompt.
        x_len: The number of symbols in an input, from 1 up.

    Returns:
        The symbol (0 to x_len - 1) at each position.

    Source: Missing Alignment Link, App. B.1.
    """
    second = torch.arange(x_len) >= first_part(x_len)
    swapped = rng.uniform("grammar.swap", n, count, 1) < 0.5
    return rng.order("grammar.order", n, count, x_len, late=(second ^ swapped).long())


def sample_uniform_orders(rng: Rng, n: int, count: int, x_len: int) -> Int[Tensor, "prompt example pos"]:
    """Draws out-of-distribution inputs: uniformly random permutations of the symbols."""
    return rng.order("ood.order", n, count, x_len)


def shapes(x_len: int, ood: bool) -> Bool[Tensor, "shape pos symbol"]:
    """Returns which symbols may stand at each position under each of the equally likely shapes of an input.

    The grammar has two shapes, XY and YX; an out-of-distribution input has one, which permits all orders. Within a
    shape all permitted orders are equally likely.
    """
    if ood or x_len == 1:
        return torch.ones(1, x_len, x_len, dtype=torch.bool)
    first = first_part(x_len)
    index = torch.arange(x_len)
    early, late = index < first, index >= x_len - first
    return torch.stack([early[:, None] == (index < first), late[:, None] == (index < first)])
