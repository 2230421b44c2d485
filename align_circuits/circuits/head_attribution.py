"""Attribution to heads and sites: what patching each would do (AtP, AtP*), from gradients, in a few passes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.integrated_gradients import gradient_runs, prepared_pair, summed_by_head
from align_circuits.hooks.edits import Patch, check_heads_apart
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.head_names import heads_of, layers_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import LAYER_SITES, Site, name_of
from align_circuits.hooks.probes import Change
from align_circuits.hooks.residual_edges import EMBEDDED
from align_circuits.models.parameters import device_of
from align_circuits.run.forward_pass import capture, choose_engine
from align_circuits.run.memory_checks import of_gradients
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table, with_level

HeadMethod = Literal["atp", "atp_star", "ig_inputs"]
"""How the score of a head is made."""


@checked
@leaves_as_found
def attribute_heads(
    model: HookedModel,
    pair: Pair,
    *,
    method: HeadMethod = "atp",
    sites: Sequence[Site] = ("z",),
    grad_drop: bool = False,
    steps: int = 5,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns for every head an estimate of what `patch_heads` would measure, without patching any.

    With x a head's output (or query, or key, or value) and M the metric, its score is
    Σ_positions <x(source) - x(base), ∂M/∂x>. With `direction="denoise"` the base run is that of the corrupted prompts:
    above zero, the head suffices to restore some of the answer. With `"noise"` it is the clean run, as published:
    below zero, the model needs the head. The same pair thus gives `patch_heads` and its estimate the same sign.

    - `"atp"`: the gradient of the base run. Source: Nanda (2023), "Attribution Patching".
    - `"atp_star"`: the same, but at `"q"` and `"k"` attention is computed anew from the patched queries or keys, and
      its change is multiplied by ∂M/∂pattern (the QK fix): a saturated softmax has no gradient where a patch still
      moves it. All positions of a head are patched together. Source: Kramár et al. (2024), "AtP*", §3.1.
    - `"ig_inputs"`: the mean gradient over runs whose embeddings lie between the two, as in `attribute_edges`.

    Misleads where M bends between the two runs, and where effects of a head on two later layers cancel. Against the
    second there is `grad_drop`; the control of all is `patch_heads` on the heads that matter.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another.
        method: How the score is made.
        sites: As for `patch_heads`, but `resid_mid`; with `grad_drop` neither `attn_out` nor `mlp_post`.
        grad_drop: Scores without a sign: the gradient is dropped where it comes through one layer after the other, and
            the absolute scores are averaged over the layers, a head's own left out, so that no cancellation hides a
            head. Source: Kramár et al. (2024), §3.2.
        steps: For integrated gradients.
        options: Engine and batch size.

    Returns:
        A table keyed by `site`, layer, head, `direction` and `metric`, with intervals over prompts. Heads that share a
        key head have equal rows at `"k"` and `"v"`.

    Raises:
        ValueError: Prompts that do not match, an unknown method or site, no site, no steps, or one layer with
            `grad_drop`.
    """
    if method not in get_args(HeadMethod):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(HeadMethod)))}")
    layers = range(model.cfg.n_layers)
    if grad_drop and len(layers) < 2:
        raise ValueError("grad_drop leaves one layer out at a time, and this model has one: leave it off")
    if not (sites := tuple(dict.fromkeys(sites))):
        raise ValueError("no site to attribute to: give at least one, such as 'z'")
    for site in sites:
        at_layers = site in LAYER_SITES
        layers_of(model.cfg, site, [] if at_layers else heads_of(model.cfg), list(layers) if at_layers else [])
        if site == "resid_mid" or (grad_drop and site in ("attn_out", "mlp_post")):
            raise ValueError(
                f"no {'scores without a sign' if grad_drop else 'gradient'} at site={site!r}: take 'resid_pre', "
                "'resid_post', 'mlp_out' or a site of heads; patch_sites measures it"
            )
        for layer in layers:
            check_heads_apart(model, layer, site)
    pair = prepared_pair(model, pair, method, steps, options, of_gradients)
    cfg, device = model.cfg, device_of(model)
    points: list[tuple[Site, int]] = [(site, layer) for site in sites for layer in layers]
    names = [*dict.fromkeys(name_of(site, layer) for site, layer in points)]
    fixed = [point for point in points if method == "atp_star" and point[0] in ("q", "k")]
    patterns = [*dict.fromkeys(name_of("pattern", layer) for _, layer in fixed)]
    cached_names = [*dict.fromkeys((EMBEDDED, *names, *patterns))]
    hooked = [*cached_names, *(name for layer in layers if grad_drop for name in _without(layer))]
    engine = choose_engine(model, options, hooked, by_hooks=True)
    run_alike, reference = replace(options, engine=engine), replace(options, engine="reference")

    def score(part: Pair) -> Float[Tensor, "run_or_score prompt"]:
        scores = torch.zeros(len(points), cfg.n_heads, len(part.base), dtype=torch.float64)
        cached = part.cache(model, cached_names, run_alike, device)
        moves: dict[tuple[Site, int], tuple[str, Tensor]]
        moves = {(site, layer): (name_of(site, layer), cached.change(name_of(site, layer))) for site, layer in points}
        for site, layer in fixed:
            pattern, heads = name_of("pattern", layer), [head for head in heads_of(cfg) if head[0] == layer]
            # All heads of a layer at once: a head's pattern depends on its own queries and keys alone.
            edit = Patch(heads, site=site, values=cached.source)
            patched = capture(model, part.base, [pattern], edits=[edit], options=reference)[pattern].to(device)
            moves[site, layer] = (pattern, patched - cached.base[pattern])
        for dropped in layers if grad_drop else [None]:
            sums: dict[tuple[Site, int], Tensor] = dict.fromkeys(points, torch.zeros(()))
            for _, between, share in gradient_runs(
                "eap_ig_inputs" if method == "ig_inputs" else "eap", cached, names, steps
            ):
                changes = {**between, **_without(dropped)}
                inputs, metric = part.inputs(device), part.mean_metric
                grads = gradients_at(model, *inputs, cached_names, part.queries, metric, changes, fast=engine == "fast")
                for point, (name, change) in moves.items():
                    weight = 0.0 if point in (("z", dropped), ("mlp_out", dropped)) else share  # what is dropped
                    sums[point] = sums[point] + weight * summed_by_head(change * grads[name][1], name, point[0], cfg)
            for index, point in enumerate(points):
                # Its own layer does not count: with the gradient stopped at its output, a head has none.
                averaged = len(layers) - (point[0] not in ("resid_pre", "resid_post"))
                by_head = sums[point].abs() / averaged if grad_drop else sums[point]
                scores[index] += by_head.repeat_interleave(cfg.n_heads // by_head.shape[1], 1).T.cpu()
        return torch.cat([cached.metrics, scores.flatten(0, 1)])

    settings = {"method": method, "grad_drop": grad_drop, "steps": steps}
    kept_parts = pair.sweep_parts("attribute_heads", model, settings | {"sites": list(sites)}, options)
    runs, scores = pair.in_batches(score, kept_parts, options).split([2, len(points) * cfg.n_heads])
    heads = {site: [None] if site in LAYER_SITES else list(range(cfg.n_heads)) for site in sites}
    keys = [(index, head) for index, (site, _) in enumerate(points) for head in heads[site]]
    values = [scores[index * cfg.n_heads + (head or 0)].numpy() for index, head in keys]
    frame = pd.DataFrame([(*points[index], head) for index, head in keys], columns=["site", "layer", "head"])
    frame = with_level(frame).assign(direction=pair.direction, metric=pair.target_metrics.names[0])
    provenance = pair.provenance("attribute_heads", model, settings, engine)
    return pair.effects_table(frame, np.stack(values), provenance, runs.numpy())


def _without(layer: int | None) -> Mapping[str, Change]:
    """Stops gradients through the outputs of a layer."""
    # What a layer adds to the stream comes from these two; the stream past it keeps its gradient.
    points = () if layer is None else (name_of("z", layer), name_of("mlp_out", layer))
    return {name: lambda activation: activation.detach() for name in points}
