"""Which edges a circuit uses: those along which one part writes a subspace that another reads."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.hooks.graph import Graph, Receiver, Sender
from align_circuits.hooks.head_names import Head
from align_circuits.models.planted.head_builder import HeadSpec, ReLUUnits, Subspaces

Coordinates = Bool[Tensor, " d_model"]


def used_edges(
    graph: Graph,
    stream: Subspaces,
    embedded: Coordinates,
    heads: Mapping[Head, HeadSpec],
    units: Mapping[int, Sequence[ReLUUnits]],
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Returns the subspaces that each edge of a circuit carries, by the names of sender and receiver in `graph`.

    An edge is used if its sender writes a coordinate that its receiver reads. Heads read by the query, key and input
    directions of their terms, MLPs by their units, the logits read predictions.

    Args:
        graph: All edges of the model.
        stream: The subspaces of its residual stream, each a set of coordinates.
        embedded: The coordinates that the embeddings write.
        heads: How the heads of the circuit are specified; others have no edges.
        units: The circuit's units in each layer that has any.
    """

    def touched(directions: Sequence[Tensor]) -> Coordinates:
        return torch.cat([torch.zeros(len(embedded), 0), *directions], 1).any(1)

    def writes(sender: Sender) -> Coordinates:
        if sender.layer is None:
            return embedded
        if sender.head is None:
            return touched([group.writes for group in units.get(sender.layer, ())])
        head = heads.get((sender.layer, sender.head), HeadSpec())
        # A term of weight 0 writes nothing.
        return touched([term.write * term.weight for term in head.ov])

    def reads(receiver: Receiver) -> Coordinates:
        if receiver.site == "logits":
            return touched([stream["prediction"]])
        if receiver.site == "mlp" or receiver.head is None:
            return touched([group.reads for group in units.get(receiver.layer, ())])
        numbers = range(receiver.head * receiver.shared, (receiver.head + 1) * receiver.shared)
        specs = [heads[receiver.layer, number] for number in numbers if (receiver.layer, number) in heads]
        if receiver.site == "v":
            return touched([term.read for spec in specs for term in spec.ov])
        return touched([term.query if receiver.site == "q" else term.key for spec in specs for term in spec.qk])

    written, read = [writes(sender) for sender in graph.senders], [reads(receiver) for receiver in graph.receivers]
    pairs = graph.edges.nonzero().tolist()
    carried = {
        (graph.senders[sender].name, graph.receivers[receiver].name): tuple(
            name for name, basis in stream.items() if (basis.any(1) & written[sender] & read[receiver]).any()
        )
        for receiver, sender in pairs
    }
    return {edge: names for edge, names in carried.items() if names}
