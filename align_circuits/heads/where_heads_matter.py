"""The attention of heads where their output matters, which need not be where the model predicts.

A previous-token head of an induction circuit works at the letters that are found later: there it attends to the token
before, and what it does at the positions that predict has no consequence. So `localize` looks for it in both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.redrawn_keys import Distances
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.edits import Ablate, AblationBaseline
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
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table, with_level

ROLE = "previous"
"""The role that a head can have at every token after the first."""

METRICS = (ROLE, f"{ROLE}_attention")
"""The metrics of `score_heads` that are measured: one number, since all tokens up to the query are candidates."""

CHOOSING = 16
"""Prompts, of those that choose candidates, on which it is looked for heads that work elsewhere."""

AT_ONCE = 64
"""Prompts of which sizes and attention are held in memory together: numbers for each head and position."""

_KEYS = ["layer", "head", "metric"]


@dataclass(frozen=True)
class Elsewhere:
    """How a head is judged as a previous-token head where its output matters."""

    chance: float
    """The score there of a head that attends to all tokens up to the query alike."""
    smallest_p: float
    """The smallest p-value that it could have there."""
    attention: float
    """Its attention to the token before where the model predicts."""


@dataclass(frozen=True, eq=False)
class WhereHeadsMatter:
    """What `previous_where_heads_matter` returns."""

    table: Table
    """As of `score_heads`, with rows of heads for `METRICS`; NaN where the output of a head matters nowhere."""
    chance: Float[ndarray, "layer head"]
    """The score of a head that attends to all tokens up to the query alike, at the positions where each matters."""
    p: Mapping[Head, float]
    """The p-values of the heads that were asked for."""
    smallest_p: Mapping[Head, float]
    """The smallest that each of them could be."""

    def attending(self, scores: Table, roles: Sequence[str], needed: Thresholds) -> Bool[ndarray, "layer head"]:
        """Returns which heads attend as the role requires there, and less to the keys of their other roles."""
        score, attention = (self.table.to_array(metric) for metric in METRICS)
        others = [scores.to_array(f"{role}_attention") for role in roles if role != ROLE]
        best = np.max([attention, *others], axis=0)
        return needed.attends(score, attention, best) & (score >= self.chance + needed.above_chance)


def spread(prompts: Prompts, most: int) -> Prompts:
    """Returns at most so many of the prompts, spread over all of them: those of one group stand side by side."""
    return prompts[np.unique(np.linspace(0, len(prompts) - 1, min(most, len(prompts))).astype(int)).tolist()]


def sizes_of_effects(
    model: HookedModel, prompts: Prompts, means: AblationBaseline, options: RunOptions = RunOptions()
) -> Float[ndarray, "layer head prompt pos"]:
    """Returns how much the output of each head matters at each position, in nats of the targets' log-probability.

    It is the size of the first-order effect of mean ablation there (`first_order_effects`) on the mean over a prompt's
    targets. Positions are not added up with their signs, since what a head writes at one may make the targets likelier
    and at another less likely.

    Args:
        model: The model.
        prompts: Prompts with targets.
        means: What `ablation_baseline` returned for `"mean"`: what a head writes in every prompt alike tells nothing of
            this one.
        options: Engine and batch size.
    """
    layers = range(model.cfg.n_layers)
    edits: dict[tuple[Site, int, str], Ablate] = {
        ("z", layer, ""): Ablate([(layer, head) for head in range(model.cfg.n_heads)], how="mean", baseline=means)
        for layer in layers
    }
    targets = TargetMetrics.of(prompts, ("log_prob",))
    kinds = {"all": np.full(len(targets.token), True)}
    effects = first_order_effects(model, targets, kinds, edits, by_position=True, options=options)
    return np.abs(effects[:, :, 0, 0])


def previous_where_heads_matter(
    model: HookedModel,
    prompts: Prompts,
    heads: Collection[Head] = (),
    *,
    by: Literal["position"] | None = None,
    options: RunOptions = RunOptions(),
) -> WhereHeadsMatter:
    """Returns how far heads attend to the token before where their output matters, and the p-values of some.

    The attention of all positions after a prompt's first token, averaged with `sizes_of_effects` as weights: a position
    at which the output of the head changes nothing does not count, and each prompt counts once. The p-value is that of
    `permutation_tests.p_values` for `previous`, with the same weights: how many other distances the head attends to as
    much, of those that a quarter of its weight reaches.

    Misleads where the model bends between the output and its mean, so that first-order effects are small where a head
    is needed. The control is the causal test that `localize` asks of each head beside.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets, alike in layout.
        heads: Whose p-values are returned; none by default.
        by: Whether means are over single positions, for prompts of one length, or over all.
        options: Engine and batch size.

    Raises:
        ValueError: As `ablation_baseline` and `first_order_effects`.
    """
    prompt, before = (prompts.mask[:, 1:] & prompts.mask[:, :-1]).nonzero().T
    relation = previous_token(
        prompts.inputs, prompts.mask, target=torch.zeros_like(prompt), prompt=prompt, query=before + 1
    )
    tested = sorted(heads)
    weights_of_tested = torch.zeros(len(tested), len(relation), 1)
    test = Distances(relation, prompts, len(tested), 1, weights_of_tested) if tested else None
    means = ablation_baseline(model, prompts, "mean", by=by, options=options)
    # Gradients and attention of all positions take four times what other runs do.
    at_once = options.prompts_at_once(max(1, CPU_TOKENS // prompts.mask.shape[1]))
    options = replace(options, batch_size=max(1, min(at_once, len(prompts)) // 4))
    reach = relation.query - prompts.mask.int().argmax(1)[relation.prompt]
    parts, engine = [], ""
    for some in torch.arange(len(prompts)).split(AT_ONCE):
        first, last = torch.searchsorted(relation.prompt, torch.stack([some[0], some[-1] + 1])).tolist()
        at, here = slice(first, last), prompts[int(some[0]) : int(some[-1]) + 1]
        in_chunk, query = relation.prompt[at] - some[0], relation.query[at]
        sizes = torch.from_numpy(sizes_of_effects(model, here, means, options))
        weights = rearrange(sizes[:, :, in_chunk, query], "layer head row -> layer row head")
        totals = torch.zeros(len(weights), len(here), weights.shape[2]).index_add_(1, in_chunk, weights)
        weights = weights / totals[:, in_chunk].clamp(min=torch.finfo(weights.dtype).tiny)
        for place, (layer, head) in enumerate(tested):
            weights_of_tested[place, at, 0] = weights[layer, :, head]
        attention = torch.zeros_like(weights)

        def read(
            rows: Int[Tensor, " row"],
            layer: int,
            pattern: Float[Tensor, "row head pos"],
            attention: Tensor = attention,
            query: Tensor = query,
            first: int = first,
        ) -> None:
            key = query[rows] - 1
            attention[layer, rows] = pattern[torch.arange(len(rows)), :, key.to(pattern.device)].float().cpu()
            for place, (of_layer, head) in enumerate(tested):
                if of_layer == layer and test is not None:
                    test.add(first + rows, place, pattern[:, head, None].cpu())

        engine = forward_alike(model, [Rows.joined(here, [(in_chunk, query, read)])], options=options)
        known = (totals > 0).float()
        uniform = (weights / (reach[at, None] + 1)).float()
        sums = [torch.zeros_like(totals).index_add_(1, in_chunk, of_rows) for of_rows in (weights * attention, uniform)]
        parts.append(torch.stack([of_prompt.where(known > 0, torch.nan) for of_prompt in sums]))
    means_of_prompts, uniform_of_prompts = torch.cat(parts, 2)
    provenance = provenance_of("localize", model, prompts, engine)
    values = rearrange(means_of_prompts, "layer prompt head -> (layer head) prompt").numpy()
    keys = pd.DataFrame(heads_of(model.cfg), columns=["layer", "head"])
    both = pd.concat([keys.assign(metric=metric) for metric in METRICS], ignore_index=True)
    table = Table.from_prompts(
        with_level(both),
        np.concatenate([values] * len(METRICS)),
        np.concatenate([(~np.isnan(values)).astype(float)] * len(METRICS)),
        provenance,
        group=prompts.group,
    )
    p, smallest = (test.p_values(np.random.default_rng(0))[:, 0], test.smallest_of_heads()[:, 0]) if test else ((), ())
    return WhereHeadsMatter(
        table,
        uniform_of_prompts.nanmean(1).nan_to_num(1.0).numpy(),
        dict(zip(tested, map(float, p), strict=True)),
        dict(zip(tested, map(float, smallest), strict=True)),
    )


def resampling_effects(model: HookedModel, prompts: Prompts, heads: Sequence[Head], options: RunOptions) -> Table:
    """Returns what replacing the output of each head by that on another prompt changes; empty without heads.

    Empty, too, where prompts differ in length, so that there is no output at the same position, and of a single prompt.
    """
    if not heads or len(prompts) < 2 or not prompts.of_one_length:
        return Table(pd.DataFrame(columns=["level", *_KEYS, "kind", *VALUES]), Provenance("ablate"))
    return ablate_heads(model, prompts, "resample", heads=heads, options=options)


def with_rows_of(scores: Table, other: Table, heads: Collection[Head]) -> Table:
    """Returns a table of `score_heads` with the rows of another one for some heads, without per-prompt values."""
    frame = scores.frame.copy()
    place = {key: row for row, key in enumerate(frame[_KEYS].itertuples(index=False, name=None))}
    for row, key in enumerate(other.frame[_KEYS].itertuples(index=False, name=None)):
        if key[:2] in heads:
            frame.loc[place[key], [*VALUES]] = other.frame.loc[row, [*VALUES]]
    return replace(scores, frame=frame, values=None, weights=None)
