"""Which prompts are related, and which stands in for another: one that is not related to it."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from scipy.sparse import block_array, coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from align_circuits.prompts.prompts import Prompts


def chains(one: Int[Tensor, " prompt"], other: Int[Tensor, " prompt"]) -> Int[Tensor, " prompt"]:
    """Returns the number of the chain of each prompt, in which each shares a group with the next.

    Args:
        one: The numbers of the prompts' groups.
        other: Those of another division into groups.
    """
    rows, columns = (np.unique(group.numpy(), return_inverse=True)[1] for group in (one, other))
    shared = coo_array((np.ones(len(rows)), (rows, columns)), shape=(rows.max() + 1, columns.max() + 1))
    _, chain = connected_components(block_array([[None, shared], [shared.T, None]]))
    return torch.from_numpy(chain[rows].astype(np.int64))


def next_unrelated(prompts: Prompts, step: int = 1) -> Int[Tensor, " prompt"]:
    """Returns for each prompt another one: neither of its group nor equal to it, nor in a chain of such prompts.

    So it is where at most half of all prompts are in one chain.

    Each is the partner of exactly one prompt, and nothing is drawn. Where no prompts are related it is the next one, or
    the one before (`step=-1`).

    Args:
        prompts: Two or more.
        step: 1 or -1, the direction.
    """
    equal = prompts.inputs.unique(dim=0, return_inverse=True)[1]
    same = equal if prompts.group is None else chains(prompts.group, equal)
    # Numbered as they begin, so that without related prompts the order is that of the prompts.
    related = torch.from_numpy(pd.factorize(same.numpy())[0])
    order = related.argsort(stable=True)
    # As far on as the largest set is long: what lies there is of another set, if that is no more than half.
    further = min(int(related.bincount().max()), len(prompts) - 1)
    partner = torch.empty_like(order)
    partner[order] = order.roll(-step * further)
    return partner
