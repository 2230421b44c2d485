"""What heads do for the answer: what they add to its logit directly, and which task they carry."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import check_same, on_merged_weights, residual_edges_of
from align_circuits.heads.score import score_heads
from align_circuits.hooks.compat import architectures, stored_weights
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.head_names import HeadLike, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import name_of
from align_circuits.hooks.residual_edges import reads_from, sent_from, written_by
from align_circuits.jobs.identity import identity_of
from align_circuits.models.parameters import device_of, provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture, choose_engine
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.prompt_checks import check_fits
from align_circuits.run.target_metrics import TargetMetrics, name_of_metric, wrong_tokens
from align_circuits.tables.intervals import weighted_mean
from align_circuits.tables.tables import YES_OR_NO, Table, with_level

PROFILE = ("lookup_attention", "induction_attention")
"""The attention scores of `head_profile`: of all that a head attends to, the share on keys."""


@checked
@leaves_as_found
@on_merged_weights
def direct_logit_attribution(
    model: HookedModel,
    prompts: Prompts,
    *,
    metric: Literal["logit", "logit_diff"] = "logit",
    kind: str = "all",
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what every part of a model adds directly to the gold token's logit, above the mean or the wrong one.

    What a head writes at the position that predicts, through the last norm, on the gold token's direction in the
    unembedding less the mean direction, or less that of the wrong answer; the norm divides by what it divides by in
    this run. The parts, with the biases as `"rest"`, sum to the metric. Source: nostalgebraist (2020), "interpreting
    GPT: the logit lens"; Elhage et al. (2021); Wang et al. (2022), §3.

    Misleads for heads that others read, whose work shows elsewhere. The control is `patch_edges` to `"logits"`.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        prompts: Prompts with targets.
        metric: `"logit"`, above the mean logit, or `"logit_diff"`, minus the logit of the wrong answer.
        kind: Which targets count: `"all"`, `"first"` or `"later"`.
        options: Engine and batch size.

    Returns:
        A table keyed by `sender` (names as in `Graph`, and `"rest"`), level, layer, head and metric
        `"direct_logit"` or `"direct_logit_diff"`, with intervals over prompts.

    Raises:
        ValueError: Another metric, no wrong answers to compare with, no targets of that kind, or a model whose parts do
            not sum to its logits.
    """
    check_fits(model, prompts)
    if metric not in ("logit", "logit_diff"):
        raise ValueError(f"metric={metric!r}: choose 'logit' or 'logit_diff', which are linear in what parts write")
    targets, residual_edges = TargetMetrics.of(prompts, (metric,), kind), residual_edges_of(model, prompts)
    graph, device = residual_edges.graph, device_of(model)
    last = reads_from(graph, "logits", graph.n_layers)
    names = [*sent_from(graph), last]
    options = replace(options, engine=choose_engine(model, options, names))
    total, engine = targets.measure(model, options=options)
    cached = capture(model, prompts, names, options=options)
    at_targets = {name: cached[name][targets.prompt, targets.query].to(device) for name in names}
    with torch.no_grad():
        against = None if metric == "logit" else wrong_tokens(targets.targets, model.cfg.d_vocab)
        direction, offset = _readout(model, at_targets[last], targets.token.to(device), against)
        written = [written_by(residual_edges, name, at_targets[name][:, None])[:, 0] for name in sent_from(graph)]
        rest = at_targets[last] - torch.cat(written, dim=1).sum(1)
        direct = torch.einsum("tsd,td->st", torch.cat([*written, rest[:, None]], dim=1), direction)
        direct[-1] += offset
        measured = torch.from_numpy(total[0, 0]).to(direct)
        # As a share of what the parts add up to without their signs: a sum near 0 rounds as its summands do.
        check_same(f"the {metric} of the targets", direct.sum(0), measured, direct.abs().sum(0))
    senders = [(sender.name, sender.layer, sender.head) for sender in graph.senders]
    keys = pd.DataFrame([*senders, ("rest", None, None)], columns=["sender", "layer", "head"])
    keys = with_level(keys).assign(metric=f"direct_{metric}")
    values, _ = targets.by_prompt(direct.cpu().double().numpy())
    provenance = provenance_of("direct_logit_attribution", model, prompts, engine, {"metric": metric, "kind": kind})
    return targets.table(keys, values, provenance)


@checked
@leaves_as_found
def function_vectors(
    model: HookedModel,
    pairs: Sequence[Pair],
    *,
    heads: Sequence[HeadLike] | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns each head's function-vector score: the mean over tasks of its average indirect effect.

    For each task, the mean output of the head where clean prompts predict (z, over prompts and targets) is put where
    prompts with uninformative examples predict. The effect is the change of the metric, by default by how much more
    likely the gold token becomes: a head that carries which task it is, whatever the prompt, restores the answer; one
    that carries an answer does not, since its mean over prompts carries none. Source: Todd et al. (2024), "Function
    Vectors in Large Language Models", Eqs. 3 to 5.

    Misleads with one task, where the mean may hold a favourite answer. The control is the score on tasks whose answers
    do not follow from the task alone.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pairs: For each task, clean prompts and the same with examples that do not show the task, such as
            `Pair(prompts, task.corrupt(prompts, "labels"))`; the metric is the probability of all targets (as
            published) unless a pair has another.
        heads: The heads to score, as `(2, 3)` or `"L2H3"`; all by default.
        options: Engine and batch size.

    Returns:
        A table keyed by layer, head and metric `"function_vector"`; with two tasks or more the intervals are over
        tasks, and `n` is their number; with one they are over its prompts.

    Raises:
        ValueError: No tasks, pairs of direction `"noise"` or with several metrics, or a head that the model does not
            have.
    """
    if not pairs:
        raise ValueError("no tasks: give a Pair of clean and corrupted prompts for each")
    if len(metrics := {name_of_metric(pair.metric or "prob") for pair in pairs}) > 1:
        raise ValueError(f"metrics {' and '.join(sorted(metrics))}: a mean over tasks takes one metric")
    if any(pair.direction != "denoise" for pair in pairs):
        raise ValueError("direction='noise': function vectors of clean prompts go into corrupted runs, 'denoise'")
    selected = heads_of(model.cfg, heads)
    if not selected:
        raise ValueError("no heads: name at least one")
    names = [name_of("z", layer) for layer in sorted({layer for layer, _ in selected})]
    options = replace(options, engine=choose_engine(model, options, names))
    effects, tasks, engine = [], [], ""
    for pair in pairs:
        check_fits(model, pair.clean)
        targets = TargetMetrics.of(pair.corrupted, (pair.metric or "prob",), pair.kind or "all")
        targets = targets.with_reference(model, pair.clean, options=options)
        cached = capture(model, pair.clean, names, options=options)
        queries = torch.zeros_like(pair.clean.mask)
        queries[targets.prompt, targets.query] = True
        # Expanded and not copied: every prompt and position is given the same vector.
        means = {name: value[targets.prompt, targets.query].mean(0).expand_as(value) for name, value in cached.items()}
        edits = [Patch([head], site="z", positions=queries, values=means) for head in selected]
        # The run without an edit comes first: effects are counted from it.
        values, engine = targets.measure_edited(model, [[], *([edit] for edit in edits)], options=options)
        effects.append(targets.by_prompt(values[0, 1:] - values[0, 0]))
        tasks.append({**pair.clean.task, "metric": targets.names[0], "kind": pair.kind or "all"})
    keys = with_level(pd.DataFrame(selected, columns=["layer", "head"])).assign(metric="function_vector")
    provenance = provenance_of("function_vectors", model, pairs[0].clean, engine, {"tasks": tasks})
    (values, weights), group = effects[0], pairs[0].clean.group
    if len(pairs) > 1:
        # A task counts once, however many prompts it has: tasks are what the intervals draw.
        values = np.stack([weighted_mean(*of_task) for of_task in effects], axis=1)
        weights, group = np.ones_like(values), None
        # Tables are paired, task by task, where all of their tasks are the same.
        data = {"task": dict(pairs[0].clean.task), "digest": identity_of([each.clean.digest for each in pairs])}
        provenance = replace(provenance, data=data)
    changes = metrics <= {*YES_OR_NO}
    return Table.from_prompts(keys, values, weights, provenance, bounded=False, changes=changes, group=group)


@checked
@leaves_as_found
def head_profile(
    model: HookedModel,
    prompts: Prompts,
    pairs: Sequence[Pair],
    *,
    kind: str = "all",
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns four numbers a head that distinguish lookup, induction and function-vector heads, in one table.

    - `"lookup_attention"` and `"induction_attention"`: the head's attention where the model predicts;
    - `"direct_logit"`: what it adds to the target's logit directly;
    - `"function_vector"`: what its mean output on a task restores where examples do not show the task.

    A lookup head attends to earlier translations and writes the answer, and its mean output restores nothing; an
    induction head does the same with what followed the same token; a function-vector head writes little directly, but
    its mean output restores the answer.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        prompts: For attention and logits.
        pairs: As for `function_vectors`.
        kind: Which targets count for the logits: `"all"`, `"first"` or `"later"`.
        options: Engine and batch size.

    Returns:
        A table keyed by layer, head and metric.

    Raises:
        KeyError: Prompts without the relations lookup and induction.
        ValueError: As `direct_logit_attribution` and `function_vectors` do.
    """
    tables = [
        score_heads(model, prompts, list(PROFILE), options=options),
        direct_logit_attribution(model, prompts, kind=kind, options=options).heads(),
        function_vectors(model, pairs, options=options),
    ]
    columns = ["level", "layer", "head", "metric", "value", "low", "high", "n"]
    frame = pd.concat([table.heads().frame.loc[:, columns] for table in tables], ignore_index=True)
    settings = {"kind": kind, **tables[2].provenance.settings}
    return Table(frame, provenance_of("head_profile", model, prompts, tables[0].provenance.engine, settings))


def _readout(
    model: Any,
    residual: Float[Tensor, "target d_model"],
    gold: Int[Tensor, " target"],
    wrong: Int[Tensor, " target"] | None,
) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, " target"]]:
    """The direction of the residual stream that is the gold logit above the mean or the wrong one, and what biases add.

    The last norm is linear once what it divides by is known.
    """
    norm = getattr(model, "ln_final", None)
    centred = str(model.cfg.normalization_type).startswith("LN")
    with stored_weights.onloaded(getattr(model, "unembed", None), norm):
        unembedding = model.W_U.detach().to(residual.device) * architectures.logit_scale(model)
        scale, shift = stored_weights.norm_weights(norm)
        bias, scale, shift = (
            None if weight is None else weight.detach().to(residual.device)
            for weight in (getattr(model, "b_U", None), scale, shift if centred else None)
        )
    # Centred over the vocabulary, since a constant added to all logits changes no prediction.
    reference = unembedding.mean(1, keepdim=True) if wrong is None else unembedding[:, wrong]
    direction = (unembedding[:, gold] - reference).T
    offset = direction.new_zeros(len(gold))
    if bias is not None:
        offset = bias[gold] - (bias.mean() if wrong is None else bias[wrong])
    if norm is None:
        return direction, offset
    if shift is not None:
        offset = offset + direction @ shift
    if scale is not None:  # else it was folded into the unembedding
        direction = direction * scale
    stream = residual - residual.mean(1, keepdim=True) if centred else residual
    # A layer norm subtracts the mean of what it reads; subtracting the direction's mean gives the same product with
    # every part, none of which then has to be centred.
    direction = direction - direction.mean(1, keepdim=True) if centred else direction
    return direction / (stream.pow(2).mean(1, keepdim=True) + model.cfg.eps).sqrt(), offset
