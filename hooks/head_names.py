"""Heads and layers of a model, and their columns in its activations."""

import re
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from align_circuits.hooks.names import LAYER_SITES, SITES

Head = tuple[int, int]
"""(layer, head), both from 0; written `L2H3`."""

HeadLike = Head | str
"""A head as people give it: `(2, 3)` or `"L2H3"`."""


def describe(heads: Sequence[Head]) -> str:
    """Returns heads as text: `L2H3 L4H0`."""
    return " ".join(f"L{layer}H{head}" for layer, head in heads)


def head_of(given: Any) -> Head:
    """Returns a head from a pair of layer and head, or from its name.

    Raises:
        ValueError: Neither; if it is the name of another part of the model, of which.

    >>> head_of("L2H3"), head_of((2, 3))
    ((2, 3), (2, 3))
    """
    if isinstance(given, str):
        if match := re.fullmatch(r"L(\d+)H(\d+)", given):
            return int(match[1]), int(match[2])
        kind = next((kind for pattern, kind in _OTHER_PARTS.items() if re.fullmatch(pattern, given)), "no head")
        raise ValueError(f"{given!r} is {kind}: {_GIVE_HEADS}")
    try:
        layer, head = given
        return index(layer), index(head)
    except (TypeError, ValueError):
        raise ValueError(f"{given!r} is no head: {_GIVE_HEADS}") from None


def heads_of(cfg: Any, heads: Sequence[HeadLike] | None = None) -> list[Head]:
    """Returns heads without repetition, after a check that the model has them; all heads by default.

    Every argument `heads=` goes through here (or, without a model, through `head_of`).

    Raises:
        ValueError: Neither a pair of layer and head nor the name of a head, or a head that the model does not have.
    """
    if heads is None:
        return [(layer, head) for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]
    if isinstance(heads, str):
        raise ValueError(f"heads={heads!r} is one string: give a list, such as ['L2H0', 'L3H1']")
    if len(heads) == 2 and all(isinstance(number, int) for number in heads):
        raise ValueError(f"heads={heads!r} is one head: give a list of heads, [{tuple(heads)!r}]")
    selected = list(dict.fromkeys(map(head_of, heads)))
    unknown = [head for head in selected if not (0 <= head[0] < cfg.n_layers and 0 <= head[1] < cfg.n_heads)]
    if unknown:
        raise ValueError(
            f"no head {describe(unknown[:1])}: this model has layers 0 to {cfg.n_layers - 1} with heads 0 to "
            f"{cfg.n_heads - 1}"
        )
    return selected


_GIVE_HEADS = "give pairs of layer and head, such as [(2, 0), (3, 1)], or names, such as ['L2H0', 'L3H1']"

_OTHER_PARTS = {
    r"L\d+KV\d+\.[kv]": "the input of a key head, which several heads share (an edge's receiver), not a head",
    r"L\d+H\d+\.[qkv]": "an input of a head (an edge's receiver), not a head",
    r"L\d+KV\d+": "a key head, which several heads share, not a head",
    r"M\d+": "an MLP, not a head",
    r"input": "the embedding, not a head",
    r"logits": "the logits (an edge's receiver), not a head",
    r"(L\d+H\d+\s*)+": "several heads in one string, not a head",
}
"""The names of other parts of a model, and what they stand for."""


def shared_at(cfg: Any, site: str) -> int:
    """Returns how many heads share each head of a site: more than one in `k` and `v` under grouped-query attention."""
    # `HookedTransformer.set_ungroup_grouped_query_attention` repeats keys and values for every head.
    if site not in ("k", "v", "rot_k") or getattr(cfg, "ungroup_grouped_query_attention", False):
        return 1
    return cfg.n_heads // (getattr(cfg, "n_key_value_heads", None) or cfg.n_heads)


def layers_of(cfg: Any, site: str, heads: Sequence[HeadLike], layers: Sequence[int] = ()) -> dict[int, Tensor | None]:
    """Returns the columns of a site's activation that belong to the given heads, by layer; None for a site of layers.

    Raises:
        ValueError: An unknown site, a head or layer that the model does not have, heads at a site of layers or layers
            at a site of heads, or only a part of the heads that share a key head.
    """
    if site not in SITES:
        raise ValueError(f"site={site!r}: choose one of {', '.join(SITES)}")
    if site in LAYER_SITES:
        if not len(layers) or len(heads):
            raise ValueError(f"an edit of {site!r} takes place at layers: name at least one, and no heads")
        if unknown := [layer for layer in layers if not 0 <= layer < cfg.n_layers]:
            raise ValueError(f"no layer {unknown[0]}: this model has layers 0 to {cfg.n_layers - 1}")
        return dict.fromkeys(layers)
    if not len(heads) or len(layers):
        raise ValueError(f"an edit of {site!r} takes place at heads: name at least one, and no layers")
    selected, shared = heads_of(cfg, heads), shared_at(cfg, site)
    columns: dict[int, Tensor | None] = {}
    for layer in sorted({layer for layer, _ in selected}):
        in_layer = {head for layer_of_head, head in selected if layer_of_head == layer}
        # One key or value serves all heads of a group: an edit of some would silently change the others too.
        groups = {head // shared * shared + member for head in in_layer for member in range(shared)}
        if groups != in_layer:
            raise ValueError(
                f"heads that share a key head cannot change their {site} apart: name all of "
                f"{describe([(layer, head) for head in sorted(groups)])}"
            )
        columns[layer] = torch.tensor(sorted({head // shared for head in in_layer}))
    return columns
