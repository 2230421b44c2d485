"""The names of hook points, as TransformerLens spells them."""

import re
from typing import Literal, cast, get_args

HeadSite = Literal["z", "q", "k", "v", "pattern"]
"""Activations of single heads. `z`: the mixture of values, before the output matrix; `q`, `k`, `v`: before rotation.
All are `[prompt pos head d_head]`, with fewer heads in `k` and `v` under grouped-query attention, but for `pattern`:
attention after the softmax, `[prompt head query key]`."""

RotatedSite = Literal["rot_q", "rot_k"]
"""`q` and `k` after rotation, as attention uses them: `[prompt pos head d_head]`, with fewer heads in `rot_k` under
grouped-query attention. TransformerLens names them for every model with rotation, but their hooks never fire in its
GPT-NeoX; the fast engine reads them there too."""

LayerSite = Literal["resid_pre", "resid_post", "mlp_out"]
"""Activations of whole layers, `[prompt pos d_model]`: the residual stream before and after one, its MLP's output."""

Site = HeadSite | RotatedSite | LayerSite

HEAD_SITES: tuple[HeadSite, ...] = get_args(HeadSite)
ROTATED_SITES: tuple[RotatedSite, ...] = get_args(RotatedSite)
INSIDE_SITES: tuple[Site, ...] = (*ROTATED_SITES, "v", "pattern", "z")
"""The activations inside an attention function, in the order in which it computes them."""
LAYER_SITES: tuple[LayerSite, ...] = get_args(LayerSite)


def name_of(site: Site, layer: int) -> str:
    """Returns the hook point of a site in a layer."""
    return f"blocks.{layer}.hook_{site}" if site in LAYER_SITES else f"blocks.{layer}.attn.hook_{site}"


def site_of(name: str) -> tuple[int, Site] | None:
    """Returns layer and site of a hook point, or None for a hook point of no site."""
    match = re.fullmatch(r"blocks\.(\d+)\.(attn\.)?hook_(\w+)", name)
    if match is None or match[3] not in (HEAD_SITES + ROTATED_SITES if match[2] else LAYER_SITES):
        return None
    return int(match[1]), cast(Site, match[3])
