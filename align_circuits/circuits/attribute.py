"""Attribution patching: what patching each head or edge would do, from gradients, at the price of a few passes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import on_merged_weights, residual_edges_of
from align_circuits.hooks.edits import Patch, check_heads_apart
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.graph import Graph, Reading
from align_circuits.hooks.heads import heads_of, layers_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import LAYER_SITES, Site, name_of
from align_circuits.hooks.probes import Change, evaluating
from align_circuits.hooks.residual_edges import (
    EMBEDDED,
    PatchEdges,
    ResidualEdges,
    columns_of,
    hook_points,
    lands_at,
    reads_from,
    sent_from,
    sites_of,
    written_by,
)
from align_circuits.models.parameters import check_fits, device_of
from align_circuits.run.forward_pass import capture, choose_engine, forward
from align_circuits.run.memory import check_memory, of_edges, of_gradients
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import CachedPair, Pair
from align_circuits.run.target_metrics import STEPS, repeat
from align_circuits.tables.tables import Table, with_level

HeadMethod = Literal["atp", "atp_star", "ig_inputs"]
"""How the score of a head is made."""

EdgeMethod = Literal["eap", "eap_ig_inputs", "eap_ig_activations", "eap_ig_all_activations", "atp_star"]
"""How the score of an edge is made."""


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
        sites: As for `patch_heads`.
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
    if not sites:
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
    pair = _checked(model, pair, steps, options, of_gradients)
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
            for _, between, share in _runs("eap_ig_inputs" if method == "ig_inputs" else "eap", cached, names, steps):
                changes = {**between, **_without(dropped)}
                inputs, metric = part.inputs(device), part.mean_metric
                grads = gradients_at(model, *inputs, cached_names, part.queries, metric, changes, fast=engine == "fast")
                for point, (name, change) in moves.items():
                    weight = 0.0 if point in (("z", dropped), ("mlp_out", dropped)) else share  # what is dropped
                    sums[point] = sums[point] + weight * _by_head(change * grads[name][1], name, point[0], cfg)
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


@checked
@leaves_as_found
@on_merged_weights
def attribute_edges(
    model: HookedModel,
    pair: Pair,
    *,
    method: EdgeMethod = "eap_ig_inputs",
    steps: int = 5,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns for every edge an estimate of what `patch_edges` would measure, without patching any.

    With z_u what sender u writes, x_v what receiver v reads, and M the metric, the score of an edge is
    Σ_positions <z_u(source) - z_u(base), ∂M/∂x_v>. With `direction="denoise"` the base run is that of the corrupted
    prompts, and an edge that restores some of the answer lies above zero; with `"noise"` it is the clean run, as
    published, and an edge that the model needs lies below zero. The gradient is taken

    - `"eap"`: in the base run. Source: Nanda (2023), "Attribution Patching"; Syed et al. (2023), "Attribution
      Patching Outperforms Automated Circuit Discovery", Eq. 2.
    - `"eap_ig_inputs"`: in the mean over runs whose embeddings lie between the two, k/m of the way to the base run's,
      k = 1, ..., m. Source: Hanna et al. (2024), "Have Faith in Faithfulness", Eq. 3.
    - `"eap_ig_activations"`: in the mean over base runs in which the output of the sender's layer (its heads, or its
      MLP, or the embedding) lies between the two. Source: Hanna et al. (2024); Mueller et al. (2025), "MIB", §3.
    - `"eap_ig_all_activations"`: in the mean over those runs of all senders, for every edge, as the code released with
      Hanna et al. (2024) has it: in each of them only one layer's output is moved.
    - `"atp_star"`: in the base run, but for edges into queries and keys attention is computed anew from what the
      patched edge brings, and its change is multiplied by ∂M/∂pattern. It takes a run for each sender and layer, many
      in a batch. Source: the QK fix of Kramár et al. (2024), "AtP*", §3.1, for edges.

    Misleads where the metric is flat at one end (saturated attention, a model that is sure): `"eap"` then sees no
    gradient, and its signs mean nothing. The control is `patch_edges` on the edges that matter, and `faithfulness` of
    the circuit.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another.
        method: How the gradient is taken.
        steps: m, for integrated gradients.
        options: Engine and batch size.

    Returns:
        A table keyed by `sender` and `receiver` (names as in `Graph`), `direction` and `metric`, with intervals over
        prompts.

    Raises:
        ValueError: Prompts that do not match, an unknown method, no steps, or a model that is not the sum of its parts.
    """
    if method not in get_args(EdgeMethod):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(EdgeMethod)))}")
    pair = _checked(model, pair, steps, options, of_edges)
    residual_edges = residual_edges_of(model, pair.base)
    graph, device = residual_edges.graph, device_of(model)
    senders, sites, columns = sent_from(graph), sites_of(graph), columns_of(graph)
    patterns = [name_of("pattern", layer) for layer in range(graph.n_layers)] if method == "atp_star" else []
    hooked = [*hook_points(graph), *patterns]
    engine = choose_engine(model, options, hooked, by_hooks=True)
    run_alike, flat = replace(options, engine=engine), "prompt pos place d_model -> prompt place (pos d_model)"
    reading: dict[str, list[tuple[Reading, int]]] = {}
    for site in sites:
        reading.setdefault(reads_from(graph, *site), []).append(site)

    def score(part: Pair) -> Float[Tensor, "run_or_edge prompt"]:
        scores = torch.zeros(len(graph.receivers), len(graph.senders), len(part.base), dtype=torch.float64)
        cached = part.cache(model, senders, run_alike, device)
        embedded = cached.base[EMBEDDED].flatten(1)
        written = embedded.new_empty(len(embedded), len(graph.senders), embedded.shape[1])
        for name in senders:
            written[:, columns[name]] = rearrange(written_by(residual_edges, name, cached.change(name)), flat)
        for names, changes, share in _runs(method, cached, senders, steps):
            inputs, metric = part.inputs(device), part.mean_metric
            grads = gradients_at(model, *inputs, hooked, part.queries, metric, changes, fast=engine == "fast")
            for stream, readers in reading.items():
                # Senders stand in the order in which they write: those that write before the stream is read come first.
                before = int(graph.edges[sites[readers[0]].start].sum())
                scored = slice(columns[names[0]].start, min(columns[names[-1]].stop, before))
                if scored.start >= scored.stop:
                    continue
                pulled: dict[tuple[Reading, int], Float[Tensor, "prompt receiver pos_d"]] = {}
                for site in readers:
                    if lands_at(graph, *site) in changes:  # its output is replaced, so what it reads has no effect
                        continue
                    if patterns and site[0] in ("q", "k"):
                        scores[sites[site]] = _through_attention(model, residual_edges, part, cached, site, grads).cpu()
                        continue
                    gradient = grads[lands_at(graph, *site)][1]
                    gradient = gradient if site[0] in ("q", "k", "v") else gradient[:, :, None]
                    pulled[site] = rearrange(residual_edges.pulled(*site, grads[stream][0], gradient), flat)
                if pulled:
                    # One product for all readers: to fetch what senders wrote takes longer than to multiply it.
                    products = written[:, scored] @ torch.cat([*pulled.values()], 1).mT
                    by_edge = rearrange(products, "prompt sender receiver -> receiver sender prompt").cpu()
                    receivers = torch.cat([torch.arange(len(graph.receivers))[sites[site]] for site in pulled])
                    scores[receivers, scored] += share * by_edge
        return torch.cat([cached.metrics, scores[graph.edges]])

    settings = {"method": method, "steps": steps}
    kept_parts = pair.sweep_parts("attribute_edges", model, settings, options)
    with evaluating(model):  # gradients pass through its MLPs without its forward pass
        measured = pair.in_batches(score, kept_parts, options).numpy()
    provenance = pair.provenance("attribute_edges", model, settings, engine)
    return pair.edge_table(graph, graph.edges, measured[2:], provenance, measured[:2])


def _checked(
    model: HookedModel, pair: Pair, steps: int, options: RunOptions, bytes_of: Callable[[HookedModel, int, int], float]
) -> Pair:
    """The pair, with all that its metric needs; `bytes_of` estimates the memory of a batch."""
    if steps < 1:
        raise ValueError(f"steps={steps}: integrated gradients take at least 1")
    if pair.metric in STEPS:
        raise ValueError(f"metric={pair.metric!r} has no gradient: choose 'log_prob', 'logit', 'prob' or 'logit_diff'")
    check_fits(model, pair.clean)
    whole = pair.base.mask.shape[1]

    def needed(length: int) -> float:
        tokens = length * pair.prompts_at_once(length, options)
        return bytes_of(model, tokens, tokens * len(pair.queries) // whole * model.cfg.d_vocab)

    check_memory("attribution", model, needed, whole, ", a smaller RunOptions(batch_size=...)")
    return pair.prepared(model, options)


def _runs(
    method: str, cached: CachedPair, names: Sequence[str], steps: int
) -> Iterator[tuple[Sequence[str], Mapping[str, Change], float]]:
    """The hook points scored in each run with gradients, what is changed in it, and the weight of its gradients.

    EAP takes one run, the base run. Integrated gradients average over `steps` runs on the way from source to base: with
    the embedding moved, or with one sender's output moved.
    """
    if method in ("eap", "atp_star"):
        yield names, {}, 1.0
        return
    moved = [EMBEDDED] if method == "eap_ig_inputs" else names
    for name in moved:
        # As published, a run in which one sender is moved scores that sender; as released, it scores them all.
        scored = [name] if method == "eap_ig_activations" else names
        share = 1 / steps if method == "eap_ig_activations" else 1 / (steps * len(moved))
        for step in range(1, steps + 1):
            value = cached.between(name, step / steps)
            yield scored, {name: lambda now, value=value: value.to(now.device)}, share


def _without(layer: int | None) -> Mapping[str, Change]:
    """Stops gradients through the outputs of a layer."""
    # What a layer adds to the stream comes from these two; the stream past it keeps its gradient.
    points = () if layer is None else (name_of("z", layer), name_of("mlp_out", layer))
    return {name: lambda activation: activation.detach() for name in points}


def _by_head(product: Tensor, name: str, site: str, cfg: Any) -> Float[Tensor, "prompt column"]:
    """Sums over positions; a column for each head or key head that the site has, one for a site of layers."""
    if name.endswith("hook_pattern"):
        score = product.sum((2, 3))
        return score.unflatten(1, (Graph.of(cfg).n_key_heads, -1)).sum(2) if site == "k" else score
    return product.sum((1, 3)) if product.ndim == 4 else product.sum((1, 2))[:, None]


def _through_attention(
    model: HookedModel,
    residual_edges: ResidualEdges,
    part: Pair,
    cached: CachedPair,
    site: tuple[Reading, int],
    at: Mapping[str, tuple[Tensor, Tensor]],
) -> Float[Tensor, "receiver sender prompt"]:
    """The scores of all edges into queries or keys of a layer: the change of its attention, times its gradient."""
    graph, count, name = residual_edges.graph, len(part.base), name_of("pattern", site[1])
    receivers, (before, gradient) = sites_of(graph)[site], at[name]
    senders = graph.edges[receivers.start].nonzero()[:, 0]
    # Each sender's edge is patched in a copy of the prompts, so that one forward pass serves all. The hook at the
    # pattern then reads the exact change of attention, which a gradient through a saturated softmax would miss.
    patched = torch.zeros(len(senders), *graph.edges.shape, dtype=torch.bool)
    for copy, sender in enumerate(senders.tolist()):
        patched[copy, receivers, sender] = True
    scores = gradient.new_zeros(receivers.stop - receivers.start, len(graph.senders), count)

    def keep(rows: Int[Tensor, " batch"], pattern: Float[Tensor, "batch head pos pos"]) -> None:
        size, prompt = pattern.shape[-1], (rows % count).to(before.device)
        same = (prompt, slice(None), slice(-size, None), slice(-size, None))
        score = _by_head((pattern - before[same]) * gradient[same], name, site[0], model.cfg)
        scores[:, senders[rows // count].to(before.device), prompt] = score.T

    forward(
        model,
        repeat(part.base, len(senders)),
        prompt=torch.arange(count * len(senders)),
        query=torch.full((count * len(senders),), part.base.mask.shape[1] - 1),
        on_activation={name: keep},
        edits=[PatchEdges(residual_edges, cached.source, patched)],
        options=RunOptions(engine="reference"),
    )
    return scores
