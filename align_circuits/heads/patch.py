"""Activation patching: what one head alone carries from a clean prompt to a corrupted one, or back."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.heads.ablate import change, effects_table
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.heads import Head, heads_of, shared_at
from align_circuits.hooks.names import LAYER_SITES, Site
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.run.evaluation import predict_with_edits
from align_circuits.tables.tables import Provenance, Table

EVERYWHERE = "all"
"""The `positions` of a patch of every token."""


def patch_heads(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    direction: Literal["denoise", "noise"] = "denoise",
    sites: Sequence[Site] = ("z",),
    heads: Sequence[Head] | None = None,
    positions: Mapping[str, Bool[Tensor, "prompt pos"]] | Literal["groups"] | None = None,
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns what patching each head alone does: the change of log-probability and of accuracy on the gold phrases.

    `"denoise"` runs the corrupted prompts and puts in what the head said on the clean ones: above zero, the head is
    enough to bring some of the answer back. `"noise"` runs the clean prompts and puts in what it said on the corrupted
    ones: below zero, the head is needed. Targets and what is accepted are those of the clean prompts in both.

    Source: Zhang and Nanda (2024), "Towards Best Practices of Activation Patching". Misleads where a head matters only
    together with others (a backup head): the single effects then do not add up.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        direction: Which run is patched.
        sites: What is patched: of each head (`"z"`, `"q"`, `"k"`, `"v"`, `"rot_q"`, `"rot_k"`, `"pattern"`), or of each
            layer (`"resid_pre"`, `"resid_post"`, `"mlp_out"`), whose rows have no head. Under grouped-query attention
            the heads that share a key head are patched together at `"k"`, `"rot_k"` and `"v"`, and have equal rows.
        heads: Which heads, or the layers of which heads; all by default.
        positions: At which tokens: masks by name, each patched on its own; `"groups"` for `position_groups(clean)`; by
            default all tokens at once.
        engine: As for `evaluate`.
        batch_size: As for `evaluate`.

    Returns:
        A table keyed by `site`, level, layer, head, `positions`, `kind` (`"all"`, `"first"`, `"later"` targets) and
        `metric`: `"log_prob"`, the change of the mean log-probability of the target's token in nats, and `"accuracy"`.
        The 95% bootstrap intervals are over prompts, paired.

    Raises:
        ValueError: Clean and corrupted prompts that do not match, an unknown site or direction, a head that the model
            does not have, or positions that are no masks of the prompts.
    """
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction={direction!r}: choose 'denoise' (clean into corrupted) or 'noise'")
    check_pair(clean, corrupted)
    chosen, masks = heads_of(model.cfg, heads), _masks(clean, positions)
    run, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    keys: list[tuple[Site, list[tuple[int, int | None]], str]] = []
    cells: list[list[Patch]] = [[]]  # the first is the run before
    for site in sites:
        for layer in sorted({layer for layer, _ in chosen}):
            for together in _together(model.cfg, site, layer, chosen):
                place: dict[str, Any] = {"layers": [layer]} if site in LAYER_SITES else {"heads": together}
                for name, mask in masks.items():
                    everywhere = name == EVERYWHERE and bool((mask == clean.mask).all())
                    cells.append([Patch(**place, site=site, positions=None if everywhere else mask)])
                    keys.append((site, together, name))
    (before, *after), ran = predict_with_edits(model, run, cells, source=source, engine=engine, batch_size=batch_size)
    changes = {
        (site, *head, name): difference
        for (site, together, name), found in zip(keys, after, strict=True)
        for difference in [change(before, found)]
        for head in together
    }
    provenance = Provenance(
        "patch_heads",
        settings={"direction": direction, "corrupted": dict(corrupted.task), "corrupted_digest": corrupted.digest},
        model=model_provenance(model),
        data=clean.provenance,
        engine=ran,
    )
    return effects_table(clean, changes, ("site", "layer", "head", "positions"), provenance)


def position_groups(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns the tokens of the earlier examples, of the test input, and of the test output from the colon on."""
    tested = (prompts.example == prompts.example.amax(1, keepdim=True)) & prompts.mask
    symbols = tested & (prompts.roles == Role.INPUT)
    return {"examples": prompts.mask & ~tested, "test input": symbols, "test output": tested & ~symbols}


def check_pair(clean: Prompts, corrupted: Prompts) -> None:
    """Raises unless two sets of prompts are halves of minimal pairs.

    Raises:
        ValueError: They differ in number, in length, or in their targets, or are given the wrong way round.
    """
    if "corrupted" in clean.task and "corrupted" not in corrupted.task:
        raise ValueError(
            "clean= got what task.corrupt made, and corrupted= what it was made from: swap them; to put clean "
            "activations into corrupted runs, take direction='denoise'"
        )
    if clean.mask.shape != corrupted.mask.shape or not bool((clean.mask == corrupted.mask).all()):
        raise ValueError(
            f"clean prompts {tuple(clean.mask.shape)} and corrupted ones {tuple(corrupted.mask.shape)} do not match "
            "token by token: make the corrupted ones with task.corrupt(clean, ...)"
        )
    same = ["prompt", "query_pos", "target_pos", "token"]
    if not clean.targets[same].equals(corrupted.targets[same]):
        raise ValueError(
            "clean and corrupted prompts ask for different targets: make the corrupted ones with "
            "task.corrupt(clean, ...), which keeps them"
        )


def _masks(
    clean: Prompts, positions: Mapping[str, Bool[Tensor, "prompt pos"]] | Literal["groups"] | None
) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """The tokens that are patched, by name."""
    if positions == "groups":
        return position_groups(clean)
    if positions is None:
        return {EVERYWHERE: clean.mask}
    if not isinstance(positions, Mapping) or not positions:
        raise ValueError(f"positions={positions!r}: give masks by name, 'groups', or nothing for all tokens")
    for name, mask in positions.items():
        if mask.dtype != torch.bool or mask.shape != clean.mask.shape:
            raise ValueError(
                f"positions[{name!r}] is {mask.dtype} of {tuple(mask.shape)}: give a boolean mask with an entry for "
                f"each token of the prompts, {tuple(clean.mask.shape)}"
            )
    return dict(positions)


def _together(cfg: Any, site: Site, layer: int, chosen: Sequence[Head]) -> list[list[tuple[int, int | None]]]:
    """The heads of a layer that are patched at once: those that share a key head, or a whole layer."""
    if site in LAYER_SITES:
        return [[(layer, None)]]
    shared = shared_at(cfg, site)
    firsts = sorted({head // shared * shared for where, head in chosen if where == layer})
    return [[(layer, first + place) for place in range(shared)] for first in firsts]
