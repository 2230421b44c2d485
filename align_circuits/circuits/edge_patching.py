"""Path patching: exactly what one edge, or one path, carries from a clean run to a corrupted one, or back."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import check_reads_apart, on_merged_weights, residual_edges_of
from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.graph import Graph, Sender
from align_circuits.hooks.head_names import HeadLike
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import name_of
from align_circuits.hooks.residual_edges import (
    EMBEDDED,
    PatchEdges,
    PatchReceivers,
    hook_points,
    lands_at,
    sent_from,
    sites_of,
)
from align_circuits.run.forward_pass import capture, choose_engine
from align_circuits.run.options import RunOptions, progress_bar
from align_circuits.run.pairs import CachedPair, Pair
from align_circuits.run.prompt_checks import check_fits
from align_circuits.tables.tables import Table


@checked
@leaves_as_found
@on_merged_weights
def patch_edges(
    model: HookedModel,
    pair: Pair,
    *,
    edges: Iterable[tuple[HeadLike, str]] | None = None,
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what patching each edge alone does: the change of the metric.

    The receiver reads the residual stream of the run that is measured, but for what the sender wrote, which it reads as
    in the other run. Nothing else changes before it; everything after it is computed anew. Exact, with one run for
    each edge; many edges share a batch.

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1; Conmy et al. (2023). Misleads where two edges do
    the same work (both are then dispensable alone). The control is `faithfulness`, which leaves only a circuit.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another.
        edges: Pairs of the names of sender and receiver, as in `Graph`; all by default. A head that sends may also be a
            pair of layer and head.
        options: Engine and batch size.

    Returns:
        A table keyed by `sender`, `receiver`, `direction` and `metric`, with intervals over prompts.

    Raises:
        KeyError: An edge between names that the model does not have.
        ValueError: Prompts that do not match, an edge that leads backwards, or a model that is not the sum of its
            parts.
    """
    check_fits(model, pair.clean)
    residual_edges = residual_edges_of(model, pair.base)
    pair = pair.prepared(model, options)
    graph, targets = residual_edges.graph, pair.target_metrics
    selected = graph.edges if edges is None else graph.select(edges)
    options = replace(options, engine=choose_engine(model, options, hook_points(graph)))
    cached = replace(pair.cache(model, sent_from(graph), options), base={})  # only the other run is put in
    before = cached.metrics[0].numpy()

    def patch(receiver: int) -> tuple[Float[ndarray, "sender prompt"], str]:
        # A batch for each receiver: all its senders are patched side by side, in as many copies of the prompts.
        senders = selected[receiver].nonzero()[:, 0]
        patched = torch.zeros(len(senders), *selected.shape, dtype=torch.bool)  # one edge in each copy of the prompts
        patched[torch.arange(len(senders)), receiver, senders] = True
        edit = PatchEdges(residual_edges, cached.source, patched)
        after, engine = targets.measure(model, [edit], len(senders), options=options)
        return targets.by_prompt(after[0])[0] - before, engine

    computes = {f"receiver-{index:05d}": partial(patch, index) for index in selected.any(1).nonzero()[:, 0].tolist()}
    sweep = pair.sweep_parts("patch_edges", model, {"edges": selected.nonzero().tolist()}, options)
    effects = sweep.measure_all(computes, progress_bar(options, int(selected.sum()), "edge"))
    provenance = pair.provenance("patch_edges", model, {}, options.engine)
    return pair.edge_table(graph, selected, np.concatenate(effects), provenance, cached.metrics.numpy(), changes=True)


@checked
@leaves_as_found
def patch_paths(
    model: HookedModel,
    pair: Pair,
    *,
    senders: Sequence[HeadLike] | None = None,
    receivers: Sequence[str] = ("logits",),
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns what each sender alone does through each receiver alone, by all paths that pass no other head.

    Three runs give a number. The first records the output of every head. In the second, heads keep these outputs, but
    for the sender, which has its output of the source run; MLPs are computed anew. In the third, the receiver reads
    what it read in the second, and everything after it is computed anew. Unlike in `patch_edges`, the sender's output
    thus also arrives through MLPs between the two.

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1 and App. B; Goldowsky-Dill et al. (2023),
    "Localizing Model Behavior with Path Patching". Misleads as `patch_edges` does.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        pair: Clean and corrupted prompts; the metric is the log-probability of all targets unless the pair has another.
        senders: Names as in `Graph`: `"L1H2"` or `(1, 2)`, `"M1"`, `"input"`; all heads by default.
        receivers: Names as in `Graph`: `"L3H0.q"`, `"L3H0.k"` (`"L3KV0.k"` where heads share keys), `"M3"`, `"logits"`.
        options: Engine and batch size.

    Returns:
        A table keyed by `sender`, `receiver`, `direction` and `metric`, with intervals over prompts; pairs in which the
        receiver comes first are left out.

    Raises:
        KeyError: A name that the model does not have.
        ValueError: Prompts that do not match, no receiver after a sender, or a query or key that is normed with others.
    """
    check_fits(model, pair.clean)
    pair = pair.prepared(model, options)
    graph, targets = Graph.of(model.cfg), pair.target_metrics
    heads = [sender.name for sender in graph.senders if sender.head is not None]
    reads = torch.tensor([graph.receiver(name) for name in receivers], dtype=torch.long)
    writes = torch.tensor([graph.sender(name) for name in (heads if senders is None else senders)], dtype=torch.long)
    selected = torch.zeros_like(graph.edges)
    selected[reads[:, None], writes] = graph.edges[reads[:, None], writes]
    if not selected.any():
        raise ValueError("none of the receivers comes after one of the senders: name later receivers, such as 'logits'")
    for receiver in (graph.receivers[index] for index in reads):
        check_reads_apart(model, receiver.layer, receiver.site)
    options = replace(options, engine=choose_engine(model, options, hook_points(graph)))
    cached = pair.cache(model, sent_from(graph), options)
    before = cached.metrics[0].numpy()

    def patch(sender: int) -> tuple[Float[ndarray, "receiver prompt"], str]:
        readers = selected[:, sender].nonzero()[:, 0]
        given = torch.zeros(len(readers), len(selected), dtype=torch.bool)  # one receiver in each copy of the prompts
        given[torch.arange(len(readers)), readers] = True
        ends = {lands_at(graph, *site) for site, at_site in sites_of(graph).items() if given[:, at_site].any()}
        edits = _patch_sender(graph, graph.senders[sender], cached)
        received = capture(model, pair.base, sorted(ends), edits=edits, options=options)
        edit = PatchReceivers(graph, received, given)
        after, engine = targets.measure(model, [edit], len(readers), options=options)
        return targets.by_prompt(after[0])[0] - before, engine

    sweep = pair.sweep_parts("patch_paths", model, {"edges": selected.nonzero().tolist()}, options)
    computes = {f"sender-{sender:05d}": partial(patch, sender) for sender in selected.any(0).nonzero()[:, 0].tolist()}
    by_sender = np.concatenate(sweep.measure_all(computes, progress_bar(options, int(selected.sum()), "path")))
    effects = by_sender[selected.T.nonzero()[:, 1].argsort(stable=True).numpy()]  # receiver by receiver
    provenance = pair.provenance("patch_paths", model, {}, options.engine)
    return pair.edge_table(graph, selected, effects, provenance, cached.metrics.numpy(), changes=True)


def _patch_sender(graph: Graph, sender: Sender, cached: CachedPair) -> list[Edit]:
    """Edits that give every head its output of the base run, and the sender its output of the source run."""
    # With all heads held at their outputs, only MLPs are left to carry the sender's change to the receiver.
    outputs = {name: value for name, value in cached.base.items() if name.endswith("hook_z")}
    edits: list[Edit] = []
    if sender.head is not None and sender.layer is not None:
        name = name_of("z", sender.layer)
        outputs[name] = outputs[name].clone()
        outputs[name][:, :, sender.head] = cached.source[name][:, :, sender.head]
    elif sender.layer is not None:
        edits = [Patch(site="mlp_out", layers=[sender.layer], values=cached.source)]
    else:
        edits = [Patch(site="resid_pre", layers=[0], values={EMBEDDED: cached.source[EMBEDDED]})]
    return [*edits, Patch(heads=graph.heads, site="z", values=outputs)]
