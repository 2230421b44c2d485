"""Activation patching: what one head alone carries from clean prompts to corrupted ones, or back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.heads.effects import check_screen, edit_effects
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.heads import Head, HeadLike, heads_of, shared_at
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import LAYER_SITES, Site
from align_circuits.models.protocol import HookedModel
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import BOTH, TargetMetrics, by_kind
from align_circuits.tables.tables import Table

EVERYWHERE = "all"
"""The `positions` of a patch of every token."""

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
        heads: Which heads, as `(2, 3)` or `"L2H3"`, or the layers of which heads; all by default.
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
        The 95% intervals are over prompts, paired. With `screen` there is a column `estimated`; estimates of a metric
        without a gradient (`"accuracy"`) are NaN, and `Table.top` takes either the estimates or the others, chosen with
        `.where(estimated=False)`.

    Raises:
        KeyError: A named position that the prompts do not have.
        ValueError: An unknown site, a head that the model does not have, positions that are no masks of the prompts, a
            screen that is no share, of other sites than `"z"`, `"q"`, `"k"` and `"v"`, or without a metric that has a
            gradient.
    """
    check_screen(screen, sites)
    selected, masks = heads_of(model.cfg, heads), masks_of(pair.clean, positions)
    keys: list[tuple[Site, int, int | None, str]] = []
    patches: list[Patch] = []
    patch_of: list[int] = []
    for site in dict.fromkeys(sites):
        for layer in sorted({layer for layer, _ in selected}):
            for together in _patched_together(model.cfg, site, layer, selected):
                of_heads = [(layer, head) for head in together if head is not None]
                for name, mask in masks.items():
                    keys.extend((site, layer, head, name) for head in together)
                    patch_of += [len(patches)] * len(together)
                    patches.append(Patch(of_heads, site, layers=[] if of_heads else [layer], positions=mask))
    frame = pd.DataFrame(keys, columns=["site", "layer", "head", "positions"])
    return patching_table("patch_heads", model, pair, frame, patches, patch_of, {}, options, screen)


def patching_table(
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
    targets = targets.with_reference(model, pair.clean, options=options)
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
        intact=pair.direction == "noise",
        source=pair.source,
        screen=screen,
        options=options,
    )


def position_groups(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns the tokens of the earlier examples, of the test input, and of the test output from the colon on."""
    tested = (prompts.example == prompts.example.amax(1, keepdim=True)) & prompts.mask
    symbols = tested & (prompts.roles == Role.INPUT)
    return {"examples": prompts.mask & ~tested, "test input": symbols, "test output": tested & ~symbols}


def masks_of(clean: Prompts, positions: Positions) -> dict[str, Bool[Tensor, "prompt pos"] | None]:
    """Returns the tokens that are patched, by name; None for all, which spares a comparison at each of them.

    Raises:
        KeyError: A named position that the prompts do not have.
        ValueError: A mask that is none of these prompts, or no positions at all.
    """
    if isinstance(positions, str):
        return {**position_groups(clean)} if positions == "groups" else {positions: clean.mask_of(positions)}
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
