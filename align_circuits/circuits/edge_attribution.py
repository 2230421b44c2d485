"""Attribution to edges: what patching each edge would do (EAP, EAP-IG, AtP*), from gradients, in a few passes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import on_merged_weights, residual_edges_of
from align_circuits.circuits.integrated_gradients import gradient_runs, prepared_pair, summed_by_head
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.graph import Reading
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import evaluating
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
from align_circuits.models.parameters import device_of
from align_circuits.run.forward_pass import choose_engine, forward
from align_circuits.run.memory_checks import of_edges
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import CachedPair, Pair
from align_circuits.run.target_metrics import repeat
from align_circuits.tables.tables import Table

EdgeMethod = Literal["eap", "eap_ig_inputs", "eap_ig_activations", "eap_ig_all_activations", "atp_star"]
"""How the score of an edge is made."""


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
    pair = prepared_pair(model, pair, method, steps, options, of_edges)
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
        for names, changes, share in gradient_runs(method, cached, senders, steps):
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
        score = summed_by_head((pattern - before[same]) * gradient[same], name, site[0], model.cfg)
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
