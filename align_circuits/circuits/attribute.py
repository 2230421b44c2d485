"""Attribution patching: what patching each head or edge would do, from gradients, at the price of a few passes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.circuits.decomposition import residual_edges_of
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.gradients import gradients
from align_circuits.hooks.graph import Graph, Reading
from align_circuits.hooks.heads import heads_of, layers_of
from align_circuits.hooks.names import LAYER_SITES, Site, name_of
from align_circuits.hooks.probes import Change
from align_circuits.hooks.residual_edges import (
    EMBEDDED,
    PatchEdges,
    ResidualEdges,
    columns_of,
    lands_at,
    reads_from,
    sent_from,
    sites_of,
    touched,
    written_by,
)
from align_circuits.models.protocol import check_fits, device_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture, choose, forward
from align_circuits.run.pairs import CachedPair, Direction, Pair
from align_circuits.run.target_metrics import Metric, repeated
from align_circuits.tables.tables import Table, with_level

HeadMethod = Literal["atp", "atp_star", "ig_inputs"]
"""How the score of a head is made."""

EdgeMethod = Literal["eap", "eap_ig_inputs", "eap_ig_activations", "eap_ig_all_activations", "atp_star"]
"""How the score of an edge is made."""


def attribute_heads(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    method: HeadMethod = "atp",
    sites: Sequence[Site] = ("z",),
    graddrop: bool = False,
    steps: int = 5,
    metric: Metric = "log_prob",
    kind: str = "all",
    direction: Direction = "noise",
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns for every head an estimate of what `patch_heads` would measure, without patching any.

    With x what a head says (or asks, or is asked by) and M the metric, its score in a clean run is
    Σ_positions <x(corrupted) - x(clean), ∂M/∂x>: below zero, the model needs the head.

    - `"atp"`: the gradient of the clean run. Source: Nanda (2023), "Attribution Patching".
    - `"atp_star"`: the same, but at `"q"` and `"k"` attention is computed anew from the patched queries or keys, and
      its change is multiplied by ∂M/∂pattern (the QK fix): a saturated softmax has no gradient where a patch still
      moves it. All positions of a head are patched together. Source: Kramár et al. (2024), "AtP*", §3.1.
    - `"ig_inputs"`: the mean gradient over runs whose embeddings lie between the two, as in `attribute_edges`.

    Misleads where M bends between the two runs, and where effects of a head on two later layers cancel. Against the
    second there is `graddrop`; the control of all is `patch_heads` on the heads that matter.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        method: How the score is made.
        sites: As for `patch_heads`.
        graddrop: Scores without a sign: the gradient is dropped where it comes through one layer after the other, and
            the absolute scores are averaged over the layers, a head's own left out, so that no cancellation hides a
            head. Source: Kramár et al. (2024), §3.2.
        steps: For integrated gradients.
        metric: `"log_prob"` of the gold token, in nats, or its `"logit"` above the mean.
        kind: Which targets count: `"all"`, `"first"` or `"later"`.
        direction: `"noise"` scores corrupted heads in clean runs, `"denoise"` clean heads in corrupted runs.
        engine: As for `evaluate`.
        batch_size: Prompts at a time; `"auto"` halves them on out-of-memory. It changes no result.

    Returns:
        A table keyed by `site`, layer, head and `metric`, with intervals over prompts. Heads that share a key head have
        equal rows at `"k"` and `"v"`.

    Raises:
        ValueError: Prompts that do not match, an unknown method or site, no steps, or one layer with `graddrop`.
    """
    if method not in get_args(HeadMethod):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(HeadMethod)))}")
    layers = range(model.cfg.n_layers)
    if graddrop and len(layers) < 2:
        raise ValueError("graddrop leaves one layer out at a time, and this model has one: leave it off")
    for site in sites:
        at_layers = site in LAYER_SITES
        layers_of(model.cfg, site, [] if at_layers else heads_of(model.cfg), list(layers) if at_layers else [])
    pair = _checked(model, clean, corrupted, direction, metric, kind, steps)
    cfg, device = model.cfg, device_of(model)
    places: list[tuple[Site, int]] = [(site, layer) for site in sites for layer in layers]
    names = [*dict.fromkeys(name_of(site, layer) for site, layer in places)]
    fixed = [place for place in places if method == "atp_star" and place[0] in ("q", "k")]
    patterns = [*dict.fromkeys(name_of("pattern", layer) for _, layer in fixed)]
    asked = [*dict.fromkeys((EMBEDDED, *names, *patterns))]
    names_touched = [*asked, *(name for layer in layers if graddrop for name in _without(layer))]
    ran = choose(model, engine, names_touched, by_hooks=True)

    def scored(part: Pair) -> Float[Tensor, "place head prompt"]:
        scores = torch.zeros(len(places), cfg.n_heads, len(part.base), dtype=torch.float64)
        held = part.held(model, asked, ran, device)
        moves: dict[tuple[Site, int], tuple[str, Tensor]]
        moves = {(site, layer): (name_of(site, layer), held.change(name_of(site, layer))) for site, layer in places}
        for site, layer in fixed:
            pattern, whole = name_of("pattern", layer), [head for head in heads_of(cfg) if head[0] == layer]
            edit = Patch(whole, site=site, values=held.source)
            patched = capture(model, part.base, [pattern], edits=[edit], engine="reference")[pattern].to(device)
            moves[site, layer] = (pattern, patched - held.base[pattern])
        for dropped in layers if graddrop else [None]:
            found: dict[tuple[Site, int], Tensor] = dict.fromkeys(places, torch.zeros(()))
            for _, between, share in _runs("eap_ig_inputs" if method == "ig_inputs" else "eap", held, names, steps):
                changes = {**between, **_without(dropped)}
                at = gradients(model, *part.inputs(device), asked, part.mean_outcome, changes, fast=ran == "fast")
                for place, (name, change) in moves.items():
                    weight = 0.0 if place in (("z", dropped), ("mlp_out", dropped)) else share  # what is dropped
                    found[place] = found[place] + weight * _by_head(change * at[name][1], name, place[0], cfg)
            for index, place in enumerate(places):
                averaged = len(layers) - (place[0] not in ("resid_pre", "resid_post"))
                score = found[place].abs() / averaged if graddrop else found[place]
                scores[index] += score.repeat_interleave(cfg.n_heads // score.shape[1], 1).T.cpu()
        return scores

    scores = pair.in_batches(scored, batch_size)
    heads = {site: [None] if site in LAYER_SITES else list(range(cfg.n_heads)) for site in sites}
    keys = [(index, head) for index, (site, _) in enumerate(places) for head in heads[site]]
    values = [scores[index, head or 0].numpy() for index, head in keys]
    frame = pd.DataFrame([(*places[index], head) for index, head in keys], columns=["site", "layer", "head"])
    frame = with_level(frame).assign(metric=metric)
    settings = {"method": method, "graddrop": graddrop, "steps": steps, "kind": kind}
    return pair.outcome.table(frame, np.stack(values), pair.provenance("attribute_heads", model, settings, ran))


def attribute_edges(
    model: Any,
    *,
    clean: Prompts,
    corrupted: Prompts,
    method: EdgeMethod = "eap_ig_inputs",
    steps: int = 5,
    metric: Metric = "log_prob",
    kind: str = "all",
    direction: Direction = "noise",
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns for every edge an estimate of what `patch_edges` would measure, without patching any.

    With z_u what sender u writes, x_v what receiver v reads, and M the metric, the score of an edge in a clean run is
    Σ_positions <z_u(corrupted) - z_u(clean), ∂M/∂x_v>: below zero, the model needs the edge. The gradient is taken

    - `"eap"`: in the clean run. Source: Nanda (2023), "Attribution Patching"; Syed et al. (2023), "Attribution
      Patching Outperforms Automated Circuit Discovery", Eq. 2.
    - `"eap_ig_inputs"`: in the mean over runs whose embeddings lie between the two, k/m of the way to the clean ones,
      k = 1, ..., m. Source: Hanna et al. (2024), "Have Faith in Faithfulness", Eq. 3.
    - `"eap_ig_activations"`: in the mean over clean runs in which what the sender's layer says (its heads, or its MLP,
      or the embedding) lies between the two. Source: Hanna et al. (2024); Mueller et al. (2025), "MIB", §3.
    - `"eap_ig_all_activations"`: in the mean over those runs of all senders, for every edge, as the code released with
      Hanna et al. (2024) has it: in each of them only one layer's output is moved.
    - `"atp_star"`: in the clean run, but for edges into queries and keys attention is computed anew from what the
      patched edge brings, and its change is multiplied by ∂M/∂pattern. It takes a run for each sender and layer, many
      in a batch. Source: the QK fix of Kramár et al. (2024), "AtP*", §3.1, for edges.

    Misleads where the metric is flat at one end (saturated attention, a model that is sure): `"eap"` then sees no
    gradient, and its signs mean nothing. The control is `patch_edges` on the edges that matter, and `faithfulness` of
    the circuit.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        clean: Prompts with targets.
        corrupted: Their other halves, as many and as long: what `task.corrupt(clean, ...)` returns.
        method: How the gradient is taken.
        steps: m, for integrated gradients.
        metric: `"log_prob"` of the gold token, in nats, or its `"logit"` above the mean.
        kind: Which targets count: `"all"`, `"first"` or `"later"`.
        direction: `"noise"` scores corrupted edges in clean runs, `"denoise"` clean edges in corrupted runs (then read
            "corrupted" for "clean" above, and the reverse).
        engine: As for `evaluate`.
        batch_size: Prompts at a time; `"auto"` halves them on out-of-memory. It changes no result.

    Returns:
        A table keyed by `sender` and `receiver` (names as in `Graph`) and `metric`, with intervals over prompts.

    Raises:
        ValueError: Prompts that do not match, an unknown method, no steps, or a model that is not the sum of its parts.
    """
    if method not in get_args(EdgeMethod):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(EdgeMethod)))}")
    pair = _checked(model, clean, corrupted, direction, metric, kind, steps)
    wires = residual_edges_of(model, pair.base)
    graph, device = wires.graph, device_of(model)
    speaking, sites, columns = sent_from(graph), sites_of(graph), columns_of(graph)
    patterns = [name_of("pattern", layer) for layer in range(graph.n_layers)] if method == "atp_star" else []
    asked = [*touched(graph), *patterns]
    ran = choose(model, engine, asked, by_hooks=True)

    def scored(part: Pair) -> Float[Tensor, "receiver sender prompt"]:
        scores = torch.zeros(len(graph.receivers), len(graph.senders), len(part.base), dtype=torch.float64)
        held = part.held(model, speaking, ran, device)
        said = {name: written_by(wires, name, held.change(name)) for name in speaking}
        for names, changes, share in _runs(method, held, speaking, steps):
            at = gradients(model, *part.inputs(device), asked, part.mean_outcome, changes, fast=ran == "fast")
            for site, places in sites.items():
                if lands_at(graph, *site) in changes:  # what it makes of what it reads is replaced, so nothing passes
                    continue
                if patterns and site[0] in ("q", "k"):
                    scores[places] = _through_attention(model, wires, part, held, site, at).cpu()
                    continue
                stream, gradient = at[reads_from(graph, *site)][0], at[lands_at(graph, *site)][1]
                gradient = gradient if site[0] in ("q", "k", "v") else gradient[:, :, None]
                pulled = wires.pulled(*site, stream, gradient)
                for name in names:
                    score = torch.einsum("npsd,nprd->rsn", said[name], pulled)
                    scores[places, columns[name]] += share * score.cpu()
        return scores

    scores = pair.in_batches(scored, batch_size)
    provenance = pair.provenance("attribute_edges", model, {"method": method, "steps": steps, "kind": kind}, ran)
    return pair.edges(graph, graph.edges, scores[graph.edges].numpy(), provenance)


def _checked(
    model: Any, clean: Prompts, corrupted: Prompts, direction: str, metric: str, kind: str, steps: int
) -> Pair:
    if steps < 1:
        raise ValueError(f"steps={steps}: integrated gradients take at least 1")
    check_fits(model, clean)
    return Pair.of(clean, corrupted, direction, metric, kind)


def _runs(
    method: str, held: CachedPair, names: Sequence[str], steps: int
) -> Iterator[tuple[Sequence[str], Mapping[str, Change], float]]:
    """What is scored in a run, what is changed in it, and by what its gradients count."""
    if method in ("eap", "atp_star"):
        yield names, {}, 1.0
        return
    moved = [EMBEDDED] if method == "eap_ig_inputs" else names
    for name in moved:
        scored = [name] if method == "eap_ig_activations" else names
        share = 1 / steps if method == "eap_ig_activations" else 1 / (steps * len(moved))
        for step in range(1, steps + 1):
            there = held.between(name, step / steps)
            yield scored, {name: lambda _, there=there: there}, share


def _without(layer: int | None) -> Mapping[str, Change]:
    """Stops gradients where they come through what a layer says."""
    points = () if layer is None else (name_of("z", layer), name_of("mlp_out", layer))
    return {name: lambda activation: activation.detach() for name in points}


def _by_head(product: Tensor, name: str, site: str, cfg: Any) -> Float[Tensor, "prompt column"]:
    """Sums over positions; a column for each head or key head that the site has, one for a site of layers."""
    if name.endswith("hook_pattern"):
        score = product.sum((2, 3))
        return score.unflatten(1, (Graph.of(cfg).n_key_heads, -1)).sum(2) if site == "k" else score
    return product.sum((1, 3)) if product.ndim == 4 else product.sum((1, 2))[:, None]


def _through_attention(
    model: Any,
    wires: ResidualEdges,
    part: Pair,
    held: CachedPair,
    site: tuple[Reading, int],
    at: Mapping[str, tuple[Tensor, Tensor]],
) -> Float[Tensor, "receiver sender prompt"]:
    """The scores of all edges into queries or keys of a layer: the change of its attention, times its gradient."""
    graph, count, name = wires.graph, len(part.base), name_of("pattern", site[1])
    places, (before, gradient) = sites_of(graph)[site], at[name]
    senders = graph.edges[places.start].nonzero()[:, 0]
    cells = torch.zeros(len(senders), *graph.edges.shape, dtype=torch.bool)
    for cell, sender in enumerate(senders.tolist()):
        cells[cell, places, sender] = True
    scores = gradient.new_zeros(places.stop - places.start, len(graph.senders), count)

    def keep(rows: Int[Tensor, " batch"], pattern: Float[Tensor, "batch head pos pos"]) -> None:
        size, prompt = pattern.shape[-1], (rows % count).to(before.device)
        there = (prompt, slice(None), slice(-size, None), slice(-size, None))
        score = _by_head((pattern - before[there]) * gradient[there], name, site[0], model.cfg)
        scores[:, senders[rows // count].to(before.device), prompt] = score.T

    forward(
        model,
        repeated(part.base, len(senders)),
        prompt=torch.arange(count * len(senders)),
        query=torch.full((count * len(senders),), part.base.mask.shape[1] - 1),
        on_activation={name: keep},
        edits=[PatchEdges(wires, held.source, cells)],
        engine="reference",
    )
    return scores
