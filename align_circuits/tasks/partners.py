"""Which prompt stands in for another: one that is not related to it."""

import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.prompts.prompts import Prompts


def next_unrelated(prompts: Prompts, step: int = 1) -> Int[Tensor, " prompt"]:
    """Returns for each prompt another one: neither of its group nor equal to it, where at most half of all are.

    Each is the partner of exactly one prompt, and nothing is drawn. Where no prompts are related it is the next one, or
    the one before (`step=-1`).

    Args:
        prompts: Two or more.
        step: 1 or -1, the direction.
    """
    if prompts.group is None:
        related = prompts.inputs.unique(dim=0, return_inverse=True)[1]
    else:
        related = prompts.group.unique(return_inverse=True)[1]
    # In the order in which sets of related prompts begin, so that without any the order is that of the prompts.
    begins = torch.full((int(related.max()) + 1,), len(prompts)).scatter_reduce(
        0, related, torch.arange(len(prompts)), "amin"
    )
    order = begins[related].argsort(stable=True)
    # As far on as the largest set is long: what lies there is of another set, if that is no more than half.
    further = min(int(related.bincount().max()), len(prompts) - 1)
    partner = torch.empty_like(order)
    partner[order] = order.roll(-step * further)
    return partner
