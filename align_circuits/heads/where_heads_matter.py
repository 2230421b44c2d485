"""The attention of heads where their output matters, which need not be where the model predicts.

A previous-token head of an induction circuit works at the letters that are found later: there it attends to the token
before, and what it does at the positions that predict has no consequence. So `localize` looks for it in both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.candidates import attending
from align_circuits.heads.permutation_tests import Distances
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.names import Site
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import previous_token
from align_circuits.run.alike_prompts import Rows, forward_alike
from align_circuits.run.batch_sizes import CPU_TOKENS
from align_circuits.run.first_order import first_order_effects
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import VALUES, Table, with_level

ROLE = "previous"
"""The role that a head can have at every token after the first."""

METRICS = (ROLE, f"{ROLE}_attention")
"""The metrics of `score_heads` that are measured: one number, since all tokens up to the query are candidates."""

CHOOSING = 16
"""Prompts, of those that choose candidates, on which it is looked for heads that work elsewhere."""

_KEYS = ["layer", "head", "metric"]


def sizes_of_effects(
    model: HookedModel, prompts: Prompts, options: RunOptions = RunOptions()
) -> Float[ndarray, "layer head prompt pos"]:
    """Returns how much the output of each head matters at each position, in nats of the targets' log-probability.

    It is the size of the first-order effect of mean ablation there (`first_order_effects`), over single positions where
    all prompts have one length: what a head writes in every prompt alike tells nothing of this one. Sizes are not added
    up with their signs, since what a head writes may make one target likelier and another one less likely.
    """
    by, layers = "position" if prompts.mask.all() else None, range(model.cfg.n_layers)
    means = ablation_baseline(model, prompts, "mean", by=by, options=options)
    edits: dict[tuple[Site, int, str], Ablate] = {
        ("z", layer, ""): Ablate([(layer, head) for head in range(model.cfg.n_heads)], how="mean", baseline=means)
        for layer in layers
    }
    targets = TargetMetrics.of(prompts, ("log_prob",))
    kinds = {"all": np.full(len(targets.token), True)}
    effects = first_order_effects(model, targets, kinds, edits, by_position=True, options=options)
    return np.abs(effects[:, :, 0, 0])


def previous_where_heads_matter(
    model: HookedModel, prompts: Prompts, heads: Collection[Head] | None = None, *, options: RunOptions = RunOptions()
) -> tuple[Table, dict[Head, float]]:
    """Returns how far heads attend to the token before where their output matters, and the p-values of some.

    The attention of all positions after a prompt's first token, averaged with `sizes_of_effects` as weights: a position
    at which the output of the head changes nothing does not count. The p-value is that of `permutation_tests.p_values`
    for `previous`, with the same weights: how many other distances the head attends to as much.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets, alike in layout.
        heads: Whose p-values are returned; none by default.
        options: Engine and batch size.

    Returns:
        A table as of `score_heads`, with rows of heads for `METRICS`, in which each prompt counts once; NaN where the
        output of a head matters nowhere. And the p-values.
    """
    prompt, before = (prompts.mask[:, 1:] & prompts.mask[:, :-1]).nonzero().T
    relation = previous_token(
        prompts.inputs, prompts.mask, target=torch.zeros_like(prompt), prompt=prompt, query=before + 1
    )
    # Gradients and attention of all positions take four times what other runs do.
    at_once = options.prompts_at_once(max(1, CPU_TOKENS // prompts.mask.shape[1]))
    options = replace(options, batch_size=max(1, min(at_once, len(prompts)) // 4))
    sizes = torch.from_numpy(sizes_of_effects(model, prompts, options)).float()
    weights = rearrange(sizes[:, :, relation.prompt, relation.query], "layer head row -> layer row head")
    tested = sorted(heads or ())
    of_tested = torch.stack([weights[layer, :, head, None] for layer, head in tested]) if tested else None
    test = Distances(relation, prompts, len(tested), 1, of_tested)
    attention = torch.zeros_like(weights)

    def read(rows: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        key = relation.query[rows] - 1
        attention[layer, rows] = pattern[torch.arange(len(rows)), :, key.to(pattern.device)].float().cpu()
        for place, (of_layer, head) in enumerate(tested):
            if of_layer == layer:
                test.add(rows, place, pattern[:, head, None].cpu())

    rows = Rows.joined(prompts, [(relation.prompt, relation.query, read)])
    provenance = provenance_of("localize", model, prompts, forward_alike(model, [rows], options=options))
    layers, _, n_heads = weights.shape
    part, whole = (
        torch.zeros(layers, len(prompts), n_heads).index_add_(1, relation.prompt, of_rows)
        for of_rows in (weights * attention, weights)
    )
    means = rearrange(part / whole, "layer prompt head -> (layer head) prompt").numpy()
    keys = pd.DataFrame(heads_of(model.cfg), columns=["layer", "head"])
    both = pd.concat([keys.assign(metric=metric) for metric in METRICS], ignore_index=True)
    values = np.concatenate([means] * len(METRICS))
    known = (~np.isnan(values)).astype(float)
    table = Table.from_prompts(with_level(both), values, known, provenance, group=prompts.group)
    p = test.p_values(np.random.default_rng())[:, 0] if tested else ()
    return table, dict(zip(tested, map(float, p), strict=True))


def joined_by_others(
    scores: Table, where: Table, roles: Sequence[str], needed: Thresholds, chance: Mapping[str, float]
) -> tuple[Table, tuple[Head, ...]]:
    """Returns scores, and the heads whose rows are those of `where`: they attend so there and not by the scores."""
    of_role = {head for head, role in attending(scores, roles, needed, chance) if role == ROLE}
    others = {*where.head_indices} - of_role
    found = attending(with_rows_of(scores, where, others), roles, needed, chance)
    heads = tuple(head for head, role in found if role == ROLE and head in others)
    return with_rows_of(scores, where, heads), heads


def resampling_effects(model: HookedModel, prompts: Prompts, heads: Sequence[Head], options: RunOptions) -> Table:
    """Returns what replacing the output of each head by that on another prompt changes; empty without heads.

    Empty, too, where prompts differ in length, so that there is no output at the same position.
    """
    if not bool(prompts.mask.all()):
        return ablate_heads(model, prompts, heads=(), options=options)
    return ablate_heads(model, prompts, "resample", heads=heads, options=options)


def with_rows_of(scores: Table, other: Table, heads: Collection[Head]) -> Table:
    """Returns a table of `score_heads` with the rows of another one for some heads, without per-prompt values."""
    frame = scores.frame.copy()
    place = {key: row for row, key in enumerate(frame[_KEYS].itertuples(index=False, name=None))}
    for row, key in enumerate(other.frame[_KEYS].itertuples(index=False, name=None)):
        if key[:2] in heads:
            frame.loc[place[key], [*VALUES]] = other.frame.loc[row, [*VALUES]]
    return replace(scores, frame=frame, values=None, weights=None)
