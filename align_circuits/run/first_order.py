"""First-order effects of edits: what each would change, from the gradients of the unedited run."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.decoders import rotates_by_length
from align_circuits.hooks.edits import Ablate, BatchContext, Patch
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.head_names import shared_at
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.names import Site, name_of
from align_circuits.hooks.replay import first_difference
from align_circuits.models.parameters import device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.batch_sizes import CPU_TOKENS, in_batches
from align_circuits.run.forward_pass import capture, choose_engine, widened
from align_circuits.run.options import RunOptions
from align_circuits.run.prompt_checks import check_fits
from align_circuits.run.target_metrics import TargetMetrics

THROUGH_ATTENTION = ("q", "k")
"""Sites that act through attention: its gradient stands in for theirs, which a saturated softmax hides (the QK fix)."""

_PRODUCTS = {True: "phij,sphij->hsp", False: "pihj,spihj->hsp"}
"""Sums over all dimensions but scalar, prompt and head, of a pattern and of other activations of heads."""

_AT_POSITIONS = "pihj,spihj->hspi"
"""The same of activations of heads, position by position."""


def first_order_effects(
    model: HookedModel,
    targets: TargetMetrics,
    kinds: Mapping[str, Bool[ndarray, " target"]],
    edits: Mapping[tuple[Site, int, str], Ablate] | Mapping[tuple[Site, int, str], Ablate | Patch],
    *,
    source: Prompts | None = None,
    by_position: bool = False,
    options: RunOptions = RunOptions(),
) -> Float[ndarray, "edit head metric kind prompt"] | Float[ndarray, "edit head metric kind prompt pos"]:
    """Returns what editing each head alone would change to first order, from one pass forward and a few back.

    With x the activation of a head, x' what an edit makes of it, and M the metric, the effect is
    Σ_positions <x' - x, ∂M/∂x>. At the sites `"q"` and `"k"` attention is computed anew from x', and its change is
    multiplied by ∂M/∂pattern.

    Source: Nanda (2023), "Attribution Patching"; Kramár et al. (2024), "AtP*", §3.1. Misleads where M bends between x
    and x'; the control is `TargetMetrics.measure_edited`.

    Args:
        model: A model with TransformerLens's hooks.
        targets: The prompts that run, and metrics with a gradient.
        kinds: The kinds of targets to report, each a mask over targets.
        edits: Each edits all heads of a layer at a site of heads, each of them as if it were alone; by site, layer and
            any name.
        source: Other prompts, token by token alike in shape, whose activations a `Patch` without values puts in.
        by_position: Whether the terms of the sum over positions are returned, in single precision.
        options: Engine and batch size.

    Returns:
        Each prompt's mean over its targets of a kind, NaN where it has none. Heads that share a key head have equal
        numbers at `"k"` and `"v"`.

    Raises:
        ValueError: Prompts that do not fit the model, a metric of the user's own that has no gradient, or
            `by_position` with patches or with edits at `"q"` and `"k"`, whose terms are not of single positions.
    """
    if by_position and (source is not None or any(site in THROUGH_ATTENTION for site, _, _ in edits)):
        raise ValueError("by_position: patches, and edits at 'q' or 'k', have no terms of single positions")
    check_fits(model, targets.prompts)
    cfg, device, (count, length) = model.cfg, device_of(model), targets.prompts.mask.shape
    edited = [*dict.fromkeys(name_of(site, layer) for site, layer, _ in edits)]
    read = [name_of("pattern" if site in THROUGH_ATTENTION else site, layer) for site, layer, _ in edits]
    engine = choose_engine(model, options, [*edited, *read], by_hooks=True)
    alike, reference = (replace(options, engine=name) for name in (engine, "reference"))
    queries = targets.query.unique()
    # Kinds overlap: gradients are taken once for all targets that are of the same kinds, and added up.
    of_kind, label_of = np.unique(np.stack([*kinds.values()]), axis=1, return_inverse=True)
    label_of, labels = label_of.reshape(-1), range(of_kind.shape[1])
    shape = (len(edits), cfg.n_heads, len(targets.metrics), len(labels), count)
    sums = np.zeros((*shape, length), np.float32) if by_position else np.zeros(shape)

    def run(batch: Int[Tensor, " batch"], _tokens: int) -> None:
        rows = slice(int(batch[0]), int(batch[-1]) + 1)
        some = targets.select(rows)
        # As an array: numpy takes a tensor of one truth value for a number.
        chosen = ((targets.prompt >= rows.start) & (targets.prompt < rows.stop)).numpy()
        label = torch.from_numpy(label_of[chosen])

        def scalars(logits: Float[Tensor, "prompt query d_vocab"]) -> Float[Tensor, " metric_label"]:
            target_rows = (some.prompt.to(logits.device), torch.searchsorted(queries, some.query).to(logits.device))
            numbers = some.numbers(widened(logits[target_rows]), torch.arange(len(some.token)))
            zeros = numbers.new_zeros(len(numbers), len(labels))
            return zeros.index_add(1, label.to(numbers.device), numbers).flatten()

        # Prompts do not interact, so the gradient of a sum over prompts holds that of each.
        inputs = some.prompts.tokens.to(device), some.prompts.mask.to(device)
        first = 0
        if source is not None and engine == "fast" and not rotates_by_length(model):
            # Before the first other token nothing changes, and at all queries logits are read.
            first = min(first_difference(some.prompts.tokens, source[rows].tokens), int(queries.min()))
        fast = engine == "fast"
        gradients = gradients_at(model, *inputs, dict.fromkeys(read), queries, scalars, fast=fast, first=first)
        values = {} if source is None else capture(model, source[rows], edited, options=alike)
        context = replace(BatchContext.all_of(some.prompts), span=slice(first, length))
        for index, ((site, layer, _), edit, name) in enumerate(zip(edits, edits.values(), read, strict=True)):
            edit_here = _of_prompts(edit, rows, values)
            (before, gradient), by_pattern = gradients[name], site in THROUGH_ATTENTION
            if by_pattern:
                after = capture(model, some.prompts, [name], edits=[edit_here], options=reference)[name].to(device)
            else:
                after = edit_here.changes(cfg, context)[name_of(site, layer)](before)
            assert after is not None
            real = inputs[1][:, None, :, None] if by_pattern else inputs[1][:, first:, None, None]
            # Not a product with the mask: padding may hold NaN, and 0 times NaN is NaN.
            change = widened((after - before).where(real, 0))
            product = _AT_POSITIONS if by_position else _PRODUCTS[by_pattern]
            by_column = torch.einsum(product, change, gradient.to(change))
            if by_pattern:  # a key head changes the patterns of all heads that share it
                by_column = by_column.unflatten(0, (-1, shared_at(cfg, site))).sum(1)
            # The query heads that share a key head stand side by side.
            by_head = by_column.repeat_interleave(cfg.n_heads // len(by_column), 0)
            sums[index, :, :, :, rows] = by_head.unflatten(1, (-1, len(labels))).cpu().numpy()

    if edits:
        tokens = options.prompts_at_once(max(1, CPU_TOKENS // length)) * length
        in_batches(run, torch.arange(count), length, tokens, halve_to=options.halve_to(length))
    by_prompt = np.stack([np.bincount(targets.prompt, kind, count) for kind in kinds.values()])
    totals = np.einsum("ehmlp...,kl->ehmkp...", sums, of_kind.astype(sums.dtype))
    by_prompt = by_prompt[..., None] if by_position else by_prompt
    return np.divide(totals, by_prompt, out=np.full_like(totals, np.nan), where=by_prompt > 0)


def _of_prompts(edit: Ablate | Patch, rows: slice, values: Mapping[str, Float[Tensor, "prompt ..."]]) -> Ablate | Patch:
    """The edit of some of the prompts, a patch with its values."""
    if isinstance(edit.positions, Tensor):
        edit = replace(edit, positions=edit.positions[rows])
    return replace(edit, values=values) if isinstance(edit, Patch) else edit
