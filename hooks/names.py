"""The names of hook points, as TransformerLens spells them."""

import re
from typing import Literal, get_args

HeadSite = Literal["z", "q", "k", "v", "pattern"]
"""Activations of single heads. `z`: the mixture of values, before the output matrix; `q`, `k`, `v`: before rotation.
All are `[prompt pos head d_head]`, with fewer heads in `k` and `v` under grouped-query attention, but for `pattern`:
attention after the softmax, `[prompt head query key]`."""

RotatedSite = Literal["rot_q", "rot_k"]
"""`q` and `k` after rotation, as attention uses them: `[prompt pos head d_head]`, with fewer heads in `rot_k` under
grouped-query attention. TransformerLens names them for every model with rotation, but their hooks never fire in its
GPT-NeoX; the fast engine reads them there too."""

LayerSite = Literal["resid_pre", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post"]
"""Activations of whole layers, in the order in which a layer computes them, all but one `[prompt pos d_model]`: the
residual stream before it, what its attention adds, the stream after that, the MLP's neurons after the activation
function (`[prompt pos d_mlp]`; of a gated MLP times the other branch, what its output matrix reads), what the MLP adds,
and the stream after the layer. Where attention and MLP read the same stream (GPT-NeoX) there is no `resid_mid`."""

Site = HeadSite | RotatedSite | LayerSite

HEAD_SITES: tuple[HeadSite, ...] = get_args(HeadSite)
ROTATED_SITES: tuple[RotatedSite, ...] = get_args(RotatedSite)
INSIDE_SITES: tuple[Site, ...] = (*ROTATED_SITES, "v", "pattern", "z")
"""The activations inside an attention function, in the order in which it computes them."""
LAYER_SITES: tuple[LayerSite, ...] = get_args(LayerSite)
SITES: tuple[Site, ...] = (*HEAD_SITES, *ROTATED_SITES, *LAYER_SITES)


def name_of(site: Site, layer: int) -> str:
    """Returns the hook point of a site in a layer."""
    if site == "mlp_post":
        return f"blocks.{layer}.mlp.hook_post"
    return f"blocks.{layer}.hook_{site}" if site in LAYER_SITES else f"blocks.{layer}.attn.hook_{site}"


def site_of(name: str) -> tuple[int, Site] | None:
    """Returns layer and site of a hook point, or None for a hook point of no site."""
    match = re.fullmatch(r"blocks\.(0|[1-9][0-9]*)\.(.+)", name)
    site = _SITE_OF.get(match[2]) if match else None
    return (int(match[1]), site) if match and site else None


_SITE_OF: dict[str, Site] = {name_of(site, 0).removeprefix("blocks.0."): site for site in SITES}
"""The sites by the names of their hook points within a layer."""


def is_pattern(name: str) -> bool:
    """Whether the activation at a hook point is `[prompt head query key]`, and not `[prompt pos ...]`."""
    return name.endswith(("hook_pattern", "hook_attn_scores"))


def at_padding(name: str) -> float:
    """Returns what an edit puts at padding, which nothing reads: 0, or 1 where activations are divided by it."""
    return float(name.endswith(".hook_scale"))


def has_heads_first(name: str) -> bool:
    """Whether the activation at a hook point is `[prompt head pos ...]`, as that of the norms of queries and keys."""
    return re.search(r"\.[qk]_norm\.|_[qk]_normed$", name) is not None
