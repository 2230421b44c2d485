"""Which prompt stands in for another: one that is not related to it."""

import pandas as pd
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
    same = prompts.inputs.unique(dim=0, return_inverse=True)[1] if prompts.group is None else prompts.group
    # Numbered as they begin, so that without related prompts the order is that of the prompts.
    related = torch.from_numpy(pd.factorize(same.numpy())[0])
    order = related.argsort(stable=True)
    # As far on as the largest set is long: what lies there is of another set, if that is no more than half.
    further = min(int(related.bincount().max()), len(prompts) - 1)
    partner = torch.empty_like(order)
    partner[order] = order.roll(-step * further)
    return partner
