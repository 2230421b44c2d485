"""Methods that find edges: from a model and a pair of prompts to a table of scores, one for each edge of the model.

Scores are changes of the metric when corrupted activations are put into the clean run: where an edge is needed they lie
below zero, or above it for metrics that rise with damage (`RISE_WITH_DAMAGE`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from align_circuits.circuits.edge_attribution import EdgeMethod, attribute_edges
from align_circuits.circuits.edge_patching import patch_edges, patch_paths
from align_circuits.circuits.pruning import prune_edges
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table

EdgeLocalizer = Callable[[HookedModel, Pair], Table]
"""A method that finds edges. The table has a `value` for each edge, by the names of `sender` and `receiver`, as
`patch_edges` returns it."""

CUTS = (0.1, 0.01)
"""The cuts of ACDC in nats, from coarse circuits to fine ones."""


def edge_patching(model: HookedModel, pair: Pair) -> Table:
    """Scores edges by patching each alone (`patch_edges`).

    Source: Conmy et al. (2023), "Towards Automated Circuit Discovery".
    """
    return patch_edges(model, replace(pair, direction="noise"))


def path_patching(model: HookedModel, pair: Pair) -> Table:
    """Scores edges by what a sender does to a receiver by all paths that pass no other head (`patch_paths`).

    Source: Wang et al. (2022), "Interpretability in the Wild", §3.1.
    """
    graph = Graph.of(model.cfg)
    senders, receivers = ([end.name for end in ends] for ends in (graph.senders, graph.receivers))
    return patch_paths(model, replace(pair, direction="noise"), senders=senders, receivers=receivers)


def attribution(method: EdgeMethod, model: HookedModel, pair: Pair) -> Table:
    """Scores edges by an estimate of what patching each would do, from gradients (`attribute_edges`)."""
    return attribute_edges(model, replace(pair, direction="noise"), method=method)


def pruning(model: HookedModel, pair: Pair) -> Table:
    """Scores edges by ACDC, in nats of `"kl"`: the largest of `CUTS` at which an edge is kept, 0 where none keeps it.

    Source: Conmy et al. (2023), whose curves go through such thresholds (§4).
    """
    tables = {cut: prune_edges(model, replace(pair, direction="noise"), cut=cut) for cut in CUTS}
    kept = [np.where(table.frame["value"] >= cut, cut, 0) for cut, table in tables.items()]
    last = tables[CUTS[-1]]
    return Table(last.frame.assign(value=np.max(kept, axis=0), low=np.nan, high=np.nan), last.provenance)


EDGE_METHODS: Mapping[str, EdgeLocalizer] = {
    "edge patching": edge_patching,
    "path patching": path_patching,
    "EAP": partial(attribution, "eap"),
    "EAP-IG, inputs": partial(attribution, "eap_ig_inputs"),
    "EAP-IG, activations": partial(attribution, "eap_ig_activations"),
    "ACDC": pruning,
}
"""The methods of this package, by name."""
