"""Activation patching: what one head, or one site, alone carries from clean prompts to corrupted ones, or back."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.heads.effects import check_screen, edit_effects
from align_circuits.hooks.edits import Patch, edits_provenance
from align_circuits.hooks.head_names import Head, HeadLike, heads_of, shared_at
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, ROTATED_SITES, Site
from align_circuits.hooks.probes import check_hook_points
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import BOTH, TargetMetrics, by_kind
from align_circuits.tables.tables import Table

EVERYWHERE = "all"
"""The `positions` of a patch of every token."""

EACH = "each"
"""The `positions` of one patch for every column of tokens."""

Positions = Mapping[str, Bool[Tensor, "prompt pos"]] | Sequence[str] | str | None
"""Tokens to patch, one group at a time: masks by name; names of `Prompts.positions`; `"groups"` for
`position_groups(clean)`; None for all tokens at once."""


@checked
@leaves_as_found
def patch_heads(
    model: HookedModel,
    pair: Pair,
    *,
    sites: Sequence[Site] = ("z",),
    heads: Sequence[HeadLike] | None = None,
    positions: Positions = None,
    screen: float | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what patching each head alone changes: by default the log-probability of the targets, and the accuracy.

    With `direction="denoise"` the corrupted prompts run with the head's activation from the clean ones: above zero, the
    head suffices to restore some of the answer. With `"noise"` the clean prompts run with its activation from the
    corrupted ones: below zero, the head is needed. Targets and correct answers are those of the clean prompts in both.

    Source: Zhang and Nanda (2024), "Towards Best Practices of Activation Patching". Misleads where a head matters only
    together with others (a backup head): the single effects then do not add up.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pair: Clean and corrupted prompts, and the direction. With a metric or a kind of targets, only that is reported.
        sites: What is patched: of each head (`"z"`, `"q"`, `"k"`, `"v"`, `"rot_q"`, `"rot_k"`, `"pattern"`), or of each
            layer (`"resid_pre"`, `"attn_out"`, `"resid_mid"`, `"mlp_post"`, `"mlp_out"`, `"resid_post"`), whose rows
            have no head. Under grouped-query attention the heads that share a key head are patched together at `"k"`,
            `"rot_k"` and `"v"`, and have equal rows.
        heads: Which heads, as `(2, 3)` or `"L2H3"` (of keys all that share them), or the layers of which; or all.
        positions: At which tokens: masks by name, or names of `pair.clean.positions`, each patched on its own;
            `"groups"` for `position_groups(clean)`; by default all tokens at once.
        screen: A share of the heads, such as .25, at each site and group of positions: only those whose effect is
            largest by the estimate of `attribute_heads(method="atp_star")` are patched, and the others' estimates take
            the place of their effects. The first metric that has a gradient ranks them. By default all are patched.
        options: Engine and batch size.

    Returns:
        A table keyed by `site`, level, layer, head, `positions`, `direction` (the pair's), `kind` (`"all"`, `"first"`,
        `"later"` targets) and `metric`: `"log_prob"`, the change of the mean log-probability of the target's token in
        nats, and `"accuracy"`.
        The 95% intervals are over prompts, paired. `Table.baselines` has the metrics without a patch, and
        `Table.normalized` the effects on their scale. With `screen` there is a column `estimated`; estimates of a
        metric without a gradient (`"accuracy"`) are NaN, and `Table.top` takes either the estimates or the others,
        chosen with `.where(estimated=False)`.

    Raises:
        KeyError: A named position that the prompts do not have.
        ValueError: An unknown site, a head that the model does not have, positions that are no masks of the prompts, a
            screen that is no share, of other sites than `"z"`, `"q"`, `"k"` and `"v"`, or without a metric that has a
            gradient.
    """
    check_screen(screen, sites)
    selected, masks = heads_of(model.cfg, heads), _masks_of(pair.clean, positions)
    keys: list[tuple[Site, int, int | None, str]] = []
    patches: list[Patch] = []
    patch_of: list[int] = []
    for site in dict.fromkeys(sites):
        for layer in sorted({layer for layer, _ in selected}):
            for together in _patched_together(model.cfg, site, layer, selected):
                of_heads = [(layer, head) for head in together if head is not None]
                for name, mask in masks.items():
                    keys.extend((site, layer, head, name) for head in together)
                    # Heads that share a key head have a row each, but one patch, which runs once.
                    patch_of += [len(patches)] * len(together)
                    patches.append(Patch(of_heads, site, layers=[] if of_heads else [layer], positions=mask))
    frame = pd.DataFrame(keys, columns=["site", "layer", "head", "positions"])
    return _patching_table("patch_heads", model, pair, frame, patches, patch_of, {}, options, screen)


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
    by_column = isinstance(positions, str) and positions == EACH
    mask, held = pair.clean.mask, pair.clean.mask.any(0).nonzero()[:, 0].tolist()
    at = torch.arange(mask.shape[1])
    masks = {column: mask & (at == column) for column in held} if by_column else _masks_of(pair.clean, positions)
    keys = []
    patches: list[Patch] = []
    for site, layer, fields in _places(model, sites, layers):
        keys += [(site, layer, name) for name in masks]
        patches += [Patch(**fields, **columns, positions=mask) for mask in masks.values()]
    frame = pd.DataFrame(keys, columns=["site", "layer", "position"])
    # Of a patch at any hook point, since the record of one at a site would name the site, which is a key column.
    record = edits_provenance([Patch(hook="", **columns)])["edits"][0]
    names = {"neurons": "neurons", "direction": "direction_digest"}  # the pair's "direction" says which way it patches
    settings = {name: record[field] for field, name in names.items() if field in record}
    return _patching_table("patch_sites", model, pair, frame, patches, range(len(patches)), settings, options)


def _patching_table(
    verb: str,
    model: HookedModel,
    pair: Pair,
    keys: pd.DataFrame,
    patches: Sequence[Patch],
    patch_of: Sequence[int],
    settings: Mapping[str, Any],
    options: RunOptions,
    screen: float | None = None,
) -> Table:
    """Returns what putting the source run's activations into the base run changes, as a table (`edit_effects`).

    `settings` is what the provenance says beside the pair's own settings.
    """
    metrics = BOTH if pair.metric is None else (pair.metric,)
    targets = TargetMetrics.of(pair.base, metrics, pair.kind or "all")
    # From the clean prompts in both directions: "kl" tells how far a run is from the one that answers.
    targets = targets.with_reference(model, pair.clean, options=options)
    # Where the pair names a kind, the targets are all of it already.
    kinds = by_kind(pair.base) if pair.kind is None else {pair.kind: np.full(len(targets.token), True)}
    settings = {**settings, "metric": targets.names, "kind": list(kinds)}
    settings |= {} if screen is None else {"screen": screen}
    return edit_effects(
        model,
        targets,
        kinds,
        keys.assign(direction=pair.direction),
        patches,
        patch_of,
        lambda engine: pair.provenance(verb, model, settings, engine),
        base=pair.base_run,
        source=pair.source,
        paired=True,
        screen=screen,
        options=options,
    )


def position_groups(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns the tokens of the earlier examples, of the test input, and of the test output from the colon on."""
    tested = (prompts.example == prompts.example.amax(1, keepdim=True)) & prompts.mask
    symbols = tested & (prompts.token_kinds == TokenKind.INPUT)
    return {"examples": prompts.mask & ~tested, "test input": symbols, "test output": tested & ~symbols}


def _masks_of(clean: Prompts, positions: Positions) -> dict[str, Bool[Tensor, "prompt pos"] | None]:
    """Returns the tokens that are patched, by name; None for all, which spares a comparison at each of them."""
    if isinstance(positions, str):
        groups = {name: mask for name, mask in position_groups(clean).items() if mask.any()}
        return {**groups} if positions == "groups" else {positions: clean.mask_of(positions)}
    if positions is None:
        return {EVERYWHERE: None}
    if isinstance(positions, Sequence) and positions and all(isinstance(name, str) for name in positions):
        return {name: clean.mask_of(name) for name in positions}
    if not isinstance(positions, Mapping) or not positions:
        raise ValueError(
            f"positions={positions!r}: give masks by name, 'groups', or nothing for all tokens; or the names of "
            f"positions, of which these prompts have {', '.join(map(repr, clean.positions)) or 'none'}"
        )
    for name, mask in positions.items():
        if mask.dtype != torch.bool or mask.shape != clean.mask.shape:
            raise ValueError(
                f"positions[{name!r}] is {mask.dtype} of {tuple(mask.shape)}: give a boolean mask with an entry for "
                f"each token of the prompts, {tuple(clean.mask.shape)}"
            )
    return dict(positions)


def _patched_together(cfg: Any, site: Site, layer: int, selected: Sequence[Head]) -> Sequence[Sequence[int | None]]:
    """The heads of a layer that are patched at once: those that share a key head, or none for a whole layer."""
    if site in LAYER_SITES:
        return [[None]]
    shared = shared_at(cfg, site)
    firsts = sorted({head // shared * shared for of_layer, head in selected if of_layer == layer})
    return [range(first, first + shared) for first in firsts]


def _places(
    model: HookedModel, sites: Sequence[str] | str, layers: Sequence[int] | None
) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Site, layer and the fields of a patch for each place that is patched."""
    of_heads, patched = (*HEAD_SITES, *ROTATED_SITES), []
    for site in dict.fromkeys([sites] if isinstance(sites, str) else sites):
        if site in (*LAYER_SITES, *of_heads):
            for layer in range(model.cfg.n_layers) if layers is None else dict.fromkeys(layers):
                heads = [(layer, head) for head in range(model.cfg.n_heads)] if site in of_heads else []
                patched.append((site, layer, {"site": site, "heads": heads, "layers": [] if heads else [layer]}))
        elif site in model.hook_dict:
            of_layer = re.match(r"blocks\.(\d+)\.", site)
            patched.append((site, None if of_layer is None else int(of_layer[1]), {"hook": site}))
        elif "." in site or site.startswith("hook_"):
            check_hook_points(model, [site])
        else:
            raise ValueError(
                f"site={site!r}: choose one of {', '.join((*LAYER_SITES, *of_heads))}, or the full name of a hook point"
            )
    return patched
