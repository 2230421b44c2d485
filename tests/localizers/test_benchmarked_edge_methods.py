"""Every method finds the edges of a plain circuit; methods of other packages join by their entry points."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from legs import slow_but

import align_circuits as ac
from align_circuits.circuits.faithful import _order
from align_circuits.circuits.pruning import prune_edges
from align_circuits.hooks.graph import Graph
from align_circuits.localizers import benchmarked_edge_methods, registry
from align_circuits.localizers.benchmarked_edge_methods import EDGE_METHODS, pruning
from align_circuits.localizers.comparison import agreement
from align_circuits.localizers.registry import edge_localizer, edge_method_names
from align_circuits.tasks.task import exchanged
from align_circuits.validation.localizer_edges import known_edges

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3, alignment="permutation")


@pytest.fixture(scope="module")
def circuit():
    model = ac.planted_circuit(TASK, seed=0, n_layers=4, n_ctx=96, strength=0.7, decoys=("random", "off_by_one"))
    return model, ac.Pair(*exchanged(TASK.sample(2, model.tokenizer, seed=0)))


SLOW = {"path patching", "ACDC", "edge patching", "EAP-IG, activations"}
"""Each has a near relative here or in tests/circuits, which patches and prunes edges."""


@pytest.mark.parametrize("name", slow_but({*EDGE_METHODS} - SLOW, EDGE_METHODS))
def test_a_method_finds_the_edges_of_a_plain_circuit(circuit, name):
    model, pair = circuit
    table = edge_localizer(name)(model, pair)
    scores = table.frame.set_index(["sender", "receiver"])["value"].to_dict()
    positive, negative = known_edges(model)
    assert set(scores) >= {*positive, *negative}
    assert agreement({edge: abs(value) for edge, value in scores.items()}, [*positive], negative)["auroc"] > 0.99
    if "EAP" not in name:  # whose signs mean nothing where the model is sure
        harm = 1 if name == "ACDC" else -1  # its divergence rises where an edge is missed
        assert all(harm * scores[edge] > 0 for edge in positive), "the circuit needs them"
        graph = Graph.of(model.cfg)
        kept = _order(table, graph, "signed")[: len(positive)]
        first = {(graph.senders[sender].name, graph.receivers[receiver].name) for receiver, sender in kept.tolist()}
        assert all(harm * scores[edge] > 0 for edge in first), "what costs most is kept first"


def test_pruning_scores_are_the_largest_cuts_that_keep_an_edge(circuit, monkeypatch):
    model, pair = circuit
    coarse = prune_edges(model, replace(pair, direction="noise"), cut=0.4).frame["value"] >= 0.4
    monkeypatch.setattr(benchmarked_edge_methods, "CUTS", (0.4, 0.01))
    scores = pruning(model, pair).frame["value"].to_numpy()
    assert set(scores) == {0.0, 0.01, 0.4}
    assert np.array_equal(scores == 0.4, coarse)


def test_other_packages_add_methods(monkeypatch):
    entry = EntryPoint("mine", f"{__name__}:circuit", registry.EDGE_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [entry] if group == entry.group else [])  # noqa: ARG005
    assert edge_method_names() == [*EDGE_METHODS, "mine"]
    assert "mine" not in registry.method_names()
    assert edge_localizer("mine") is circuit
