"""ACDC: greedy pruning of edges, from the logits back, as long as the prediction stays what it was."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.circuits.decomposition import on_merged_weights
from align_circuits.circuits.faithful import CircuitRuns
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.run.options import RunOptions, progress_bar
from align_circuits.run.pairs import Pair
from align_circuits.tables import intervals as stats
from align_circuits.tables.tables import Table

_AHEAD = 16
"""Edges that are tried side by side: most are removed, so that trying them one by one would waste the batch."""


@checked
@leaves_as_found
@on_merged_weights
def prune_edges(model: HookedModel, pair: Pair, *, cut: float = 0.01, options: RunOptions = RunOptions()) -> Table:
    """Returns by how much the divergence of the prediction rose when each edge was tried: the ACDC algorithm.

    From the last receiver to the first, and for each from its last sender to its first, an edge is patched from the
    corrupted prompts on top of all edges that were removed before. With H what is left and G the model, it is removed
    for good if D(G || H without the edge) - D(G || H) < cut, with D the divergence of the predictions at the targets in
    nats; otherwise it is kept. What a receiver without a way left to the logits reads is not tried: its rise is 0.

    Costs about a run for each edge into a part that stays, and up to 16 more for each edge that is kept.

    Source: Conmy et al. (2023), "Towards Automated Circuit Discovery", Algorithm 1. Misleads where parts stand in for
    each other: of them it keeps those that come first in its order, or none that is worth less than the cut; and the
    order of edges decides. The control is `faithfulness` of what is kept.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks and weights.
        pair: Clean and corrupted prompts; the metric is the divergence `"kl"` always, and the direction `"noise"`.
        cut: In nats, above 0: the paper's τ.
        options: Engine and batch size. Each edge depends on those before, so that no part of the work is kept.

    Returns:
        A table keyed by `sender`, `receiver`, `direction` and `metric`: the rise in nats, with intervals over prompts.
        Kept are the edges whose `value` is at least the cut.

    Raises:
        ValueError: A cut that is not above 0, prompts that do not match, or a model that is not the sum of its parts.
    """
    if not cut > 0:
        raise ValueError(f"cut={cut}: give how many nats an edge must be worth, above 0")
    pair = replace(pair, metric="kl", direction="noise")
    # One bar for all edges, in place of one for each batch.
    runs = CircuitRuns(model, pair, replace(options, cache_dir=None, progress=False))
    graph, kept = runs.graph, runs.graph.edges.clone()
    rises = np.zeros((*kept.shape, len(pair.clean)))
    current = runs.measure(kept[None])[0]
    with progress_bar(options, int(kept.sum()), "edge") as bar:
        for receiver in reversed(range(len(graph.receivers))):
            # The published order, from the last sender to the first; another one keeps other edges.
            senders = graph.edges[receiver].nonzero()[:, 0].tolist()[::-1]
            bar.update(len(senders))
            if not _leads_on(graph, kept, receiver):
                kept[receiver] = False
                continue
            while senders:
                ahead = senders[:_AHEAD]  # side by side: circuit i lacks the first i + 1 of them
                circuits = kept.repeat(len(ahead), 1, 1)
                for count in range(len(ahead)):
                    circuits[count, receiver, ahead[: count + 1]] = False
                values = np.concatenate([current[None], runs.measure(circuits)])
                rise = np.diff(values, axis=0)
                mean = stats.weighted_mean(rise, np.broadcast_to(runs.targets.weights, rise.shape))
                # Those before the first that must stay are removed; what was tried after it, was tried without it.
                removed = int((mean >= cut).argmax()) if (mean >= cut).any() else len(ahead)
                kept[receiver, ahead[:removed]] = False
                current, tried = values[removed], ahead[: removed + 1]
                rises[receiver, tried] = rise[: len(tried)]
                senders = senders[len(tried) :]
    return pair.edge_table(graph, graph.edges, rises[graph.edges.numpy()], runs.provenance("prune_edges", {"cut": cut}))


def _leads_on(graph: Graph, kept: Bool[Tensor, "receiver sender"], receiver: int) -> bool:
    """Whether an edge is kept that leaves the part to which a receiver belongs."""
    reader = graph.receivers[receiver]
    heads = [None] if reader.head is None else range(reader.head * reader.shared, (reader.head + 1) * reader.shared)
    written = [sender.layer == reader.layer and sender.head in heads for sender in graph.senders]
    return reader.site == "logits" or bool(kept[:, torch.tensor(written)].any())
