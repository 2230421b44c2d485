"""Metrics of recall: what is right about a predicted attribute, and how representations cluster by type."""

import torch
from jaxtyping import Float, Int
from sklearn.metrics import silhouette_samples
from torch import Tensor, nn

MATCHES = ("exact", "type", "subject", "attribute")
"""What can be right about a predicted attribute."""


def recall_matches(
    predicted: Int[Tensor, " prompt"],
    subject: Int[Tensor, " prompt"],
    type_: Int[Tensor, " prompt"],
    facts: Int[Tensor, "type subject"],
) -> dict[str, Float[Tensor, " prompt"]]:
    """Returns, as 0 or 1, what is right about a predicted token, by the names of `MATCHES`.

    `exact`: it is the subject's value of the type; `type`: some subject's value of that type; `subject`: the subject's
    value of some type; `attribute`: a value at all. Source: Vasudeva et al. (2026), §3.1.

    Misleads where types have few values: a model that knows the type alone has an exact match of 1 / values of it, one
    that knows the subject alone of 1 / types. Refuted by shuffled facts.

    Args:
        predicted: Token ids.
        subject: The subject of each prompt.
        type_: The type of attribute that is to be recalled.
        facts: The token id of each subject's value of each type; no two types share a value.
    """
    equal = predicted[:, None, None] == facts
    rows = torch.arange(len(predicted))
    matches = {
        "exact": equal[rows, type_, subject],
        "type": equal[rows, type_].any(1),
        "subject": equal[rows, :, subject].any(1),
        "attribute": equal.flatten(1).any(1),
    }
    return {name: right.double() for name, right in matches.items()}


def group_cosines(
    representations: Float[Tensor, "group context d"], *, with_itself: bool = True
) -> Float[Tensor, "group group"]:
    """Returns the mean cosine of the contexts of every two groups, C(l, l') = 1/K² Σ_kk' cos(f_lk, f_l'k'), in [-1, 1].

    Source: Vasudeva et al. (2026), §3.4, whose mean within a group includes k = k', each of which is 1.

    Args:
        representations: K vectors of each group; a vector of zeros has the cosine 0 with all others and itself.
        with_itself: Whether the mean within a group includes a context with itself (printed) or not (needs K >= 2).
    """
    unit = nn.functional.normalize(representations, dim=-1)
    k = unit.shape[1]
    sums = unit.sum(1) @ unit.sum(1).T
    if with_itself:
        return sums / k**2
    if k < 2:
        raise ValueError("one context a group: without pairs of a context with itself, give at least 2")
    own = unit.square().sum((1, 2))
    return sums.sub(own.diag()) / torch.eye(len(unit), dtype=unit.dtype).mul(-k).add(k**2)


def silhouette(representations: Float[Tensor, "group context d"]) -> Float[Tensor, "group context"]:
    """Returns the silhouette of each context with the cosine distance, in [-1, 1], by scikit-learn.

    Its mean is the clustering strength of Vasudeva et al. (2026), App. B.3; near 0 where groups overlap, whatever they
    are. Refuted by shuffled groups.

    Raises:
        ValueError: Fewer than two groups or two contexts in each.
    """
    groups, k, _ = representations.shape
    if groups < 2 or k < 2:
        raise ValueError(f"{groups} groups of {k} contexts: give at least 2 of each")
    labels = torch.arange(groups).repeat_interleave(k)
    each = silhouette_samples(representations.double().flatten(0, 1).numpy(), labels.numpy(), metric="cosine")
    return torch.from_numpy(each).view(groups, k)
