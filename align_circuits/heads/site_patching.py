"""Activation patching of whole sites: which layer carries at which token what the answer depends on."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.heads.patch import Positions, masks_of, patching_table
from align_circuits.hooks.edits import Patch, edits_provenance
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, ROTATED_SITES, Site
from align_circuits.hooks.probes import check_hook_points
from align_circuits.models.protocol import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table

EACH = "each"
"""The `positions` of one patch for every column of tokens."""


@checked
@leaves_as_found
def patch_sites(
    model: HookedModel,
    pair: Pair,
    sites: Sequence[Site | str] = ("resid_pre", "attn_out", "mlp_out"),
    *,
    layers: Sequence[int] | None = None,
    positions: Positions = EACH,
    neurons: Sequence[int] | None = None,
    direction: Float[Tensor, " d"] | Float[Tensor, "k d"] | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what patching each site in each layer changes, at each position alone.

    With `direction="denoise"` of the pair, the corrupted prompts run with one activation from the clean ones: above
    zero, the answer passes there. The residual stream shows where the information lies, what attention and MLPs add to
    it shows who moves it. `plots.position_map` draws the table.

    Source: Meng et al. (2022), "Locating and Editing Factual Associations in GPT", causal tracing; Zhang and Nanda
    (2024), "Towards Best Practices of Activation Patching"; with `direction`, Geiger et al. (2024), "Finding Alignments
    Between Interpretable Causal Variables and Distributed Neural Representations". Misleads where the prompts do not
    share a layout: a column then holds other tokens in each of them, so name positions instead. The control of a
    direction is a random one.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pair: Clean and corrupted prompts, and the direction. With a metric or a kind of targets, only that is reported.
        sites: Which activations: sites of layers (`"resid_pre"`, `"attn_out"`, `"resid_mid"`, `"mlp_post"`,
            `"mlp_out"`, `"resid_post"`); sites of heads, all heads of a layer at once; or full names of hook points,
            such as `"hook_embed"` or `"ln_final.hook_normalized"`.
        layers: Which layers, at the sites; all by default.
        positions: At which tokens: `"each"` column of tokens alone; names of `pair.clean.positions`; masks by name;
            `"groups"` for `position_groups`; None for all tokens at once.
        neurons: Which columns of the activation's last dimension; all by default.
        direction: A vector or orthonormal rows: only the component within their span is patched.
        options: Engine and batch size.

    Returns:
        A table keyed by `site`, level, layer, `position` (the column of the tokens in `pair.clean.tokens`, counted with
        the padding, or the name), `kind` and `metric`, as `patch_heads` has them. A hook point outside the layers has
        no layer. The 95% intervals are over prompts, paired.

    Raises:
        KeyError: A named position that the prompts do not have.
        ValueError: An unknown site or hook point, a layer or neuron that the model does not have, or a direction of
            another size.
    """
    columns: dict[str, Any] = {"neurons": neurons, "direction": direction}
    each = isinstance(positions, str) and positions == EACH
    masks = _each_column(pair.clean) if each else masks_of(pair.clean, positions)
    keys = []
    patches: list[Patch] = []
    for site, layer, place in _places(model, sites, layers):
        keys += [(site, layer, name) for name in masks]
        patches += [Patch(**place, **columns, positions=mask) for mask in masks.values()]
    frame = pd.DataFrame(keys, columns=["site", "layer", "position"])
    record = edits_provenance([Patch(hook="", **columns)])["edits"][0]
    names = {"neurons": "neurons", "direction": "direction_digest"}  # the pair's "direction" says which way it patches
    settings = {name: record[field] for field, name in names.items() if field in record}
    return patching_table("patch_sites", model, pair, frame, patches, range(len(patches)), settings, options)


def _places(
    model: HookedModel, sites: Sequence[str] | str, layers: Sequence[int] | None
) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Site, layer and the fields of a patch for each place that is patched."""
    of_heads, places = (*HEAD_SITES, *ROTATED_SITES), []
    for site in dict.fromkeys([sites] if isinstance(sites, str) else sites):
        if site in (*LAYER_SITES, *of_heads):
            for layer in range(model.cfg.n_layers) if layers is None else dict.fromkeys(layers):
                heads = [(layer, head) for head in range(model.cfg.n_heads)] if site in of_heads else []
                places.append((site, layer, {"site": site, "heads": heads, "layers": [] if heads else [layer]}))
        elif site in model.hook_dict:
            of_layer = re.match(r"blocks\.(\d+)\.", site)
            places.append((site, None if of_layer is None else int(of_layer[1]), {"hook": site}))
        elif "." in site or site.startswith("hook_"):
            check_hook_points(model, [site])
        else:
            raise ValueError(
                f"site={site!r}: choose one of {', '.join((*LAYER_SITES, *of_heads))}, or the full name of a hook point"
            )
    return places


def _each_column(prompts: Prompts) -> dict[int, Bool[Tensor, "prompt pos"]]:
    """Each column that holds a token in any prompt."""
    columns = prompts.mask.any(0).nonzero()[:, 0].tolist()
    return {column: prompts.mask & (torch.arange(prompts.mask.shape[1]) == column) for column in columns}
