"""The known edges of planted circuits, beside exact patches of every edge."""

from typing import Any

import pytest
import torch
from legs import slow_but

import align_circuits as ac
from align_circuits.circuits.decomposition import residual_edges_of
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.residual_edges import PatchEdges, sent_from
from align_circuits.models.planted.circuit_parts import CONTENT
from align_circuits.models.planted.planted_model import OTHER_DECOYS, planted_circuit, planted_competitors
from align_circuits.run.forward_pass import capture
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tasks.task import exchanged
from align_circuits.validation.localizer_edges import known_edges

DECOYS = ("random", "off_by_one", "gold_without_output", "positional_lookup")


def task(phrase_len: int) -> ac.Seq2SeqTask:
    small: Any = {"alphabet": "ABCDEFGH", "letters": "abcdefgh", "alphabet_range": (4, 8)}
    return ac.Seq2SeqTask(x_len=4, phrase_len=phrase_len, n_examples=3, alignment="permutation", **small)


def changes(model: Any, pair: ac.Pair, edges: Any, *, zero: bool) -> dict[tuple[str, str], float]:
    """The largest change of a target's log-probability when an edge carries nothing, or what it carries elsewhere."""
    residual_edges = residual_edges_of(model, pair.clean)
    graph = residual_edges.graph
    source = capture(model, pair.corrupted, sent_from(graph))
    source = {name: torch.zeros_like(value) for name, value in source.items()} if zero else source
    patched = torch.zeros(len(edges), *graph.edges.shape, dtype=torch.bool)
    for copy, (sender, receiver) in enumerate(edges):
        patched[copy, graph.receiver(receiver), graph.sender(sender)] = True
    targets = TargetMetrics.of(pair.clean, ("log_prob",))
    before, after = targets.measure(model)[0][0], []
    for part in patched.split(64):
        after += [*targets.measure(model, [PatchEdges(residual_edges, source, part)], len(part))[0][0]]
    return {edge: float(abs(values - before[0]).max()) for edge, values in zip(edges, after, strict=True)}


@pytest.mark.parametrize("phrase_len", slow_but([1], [1, 2]))
def test_known_edges_matter_and_others_do_not(phrase_len):
    """Alone of its kind each known edge is needed; one that carries places shows when it carries nothing."""
    model = planted_circuit(task(phrase_len), seed=2, n_ctx=96, n_layers=5, decoys=DECOYS, n_key_value_heads=2)
    pair = ac.Pair(*exchanged(model.task.sample(4, model.tokenizer, seed=1)), direction="noise")
    positive, negative = known_edges(model)
    places = [edge for edge, names in model.edges.items() if not set(names) & set(CONTENT)]
    assert len(positive) >= 6 and len(places) > 15 and set(positive.values()) == {1}
    assert not set(positive) & set(negative) and not set(model.edges) & set(negative)
    exchange = changes(model, pair, [*positive, *negative, *places], zero=False)
    assert min(exchange[edge] for edge in positive) > 0.05
    assert max(exchange[edge] for edge in (*negative, *places)) < 1e-5
    assert min(changes(model, pair, places, zero=True).values()) > 1e-4


@pytest.mark.slow
def test_split_roles_share_the_work_and_decoys_have_no_known_edge():
    """Circuits with all that can be left out: a head that repairs, and one that says which letters occur."""
    shape: Any = {"n_ctx": 96, "n_layers": 5, "n_heads": 6}
    copies = {"align_query": 2, "lookup": 3}
    decoys = ("diffuse", *OTHER_DECOYS)
    model = planted_circuit(task(1), seed=1, **shape, decoys=decoys, copies=copies, self_repair=True)
    positive, negative = known_edges(model)
    of = {f"L{layer}H{head}": kind for (layer, head), kind in model.kinds.items()}
    work = {(of.get(sender), of.get(receiver.split(".")[0])): count for (sender, receiver), count in positive.items()}
    assert work == {
        (None, "align_query"): 2,
        (None, "align_key"): 1,
        (None, "lookup"): 3,
        ("align_query", "lookup"): 6,
        ("align_key", "lookup"): 3,
        ("lookup", None): 3,
    }
    left_out = {kind for edge in negative for kind in (of.get(edge[0]), of.get(edge[1].split(".")[0]))}
    assert not left_out & {"repair", "diffuse"} and {"letter_bias", "sink", "lookup"} <= left_out
    assert ("sure",) in model.edges.values() and ("looked up",) in model.edges.values()
    pair = ac.Pair(*exchanged(model.task.sample(2, model.tokenizer, seed=1)), direction="noise")
    assert max(changes(model, pair, negative[::4], zero=False).values()) < 1e-5
    assert min(changes(model, pair, [*positive], zero=False).values()) > 1e-3


def test_competitors_have_their_edges_as_well():
    model = planted_competitors(task(2), seed=0)
    place = {kind: f"L{layer}H{head}" for (layer, head), kind in model.kinds.items()}
    assert model.edges[place["induction"], "logits"] == ("prediction",)
    assert "1 before" in model.edges[place["previous"], f"{place['induction']}.k"]
    (mlp,) = [edge[1] for edge, names in model.edges.items() if names == ("spare",)]
    assert (mlp, "logits") in model.edges and (place["function_vector"], mlp) in model.edges


def test_at_strength_zero_no_head_chooses():
    weak = planted_circuit(task(1), seed=2, n_ctx=96, strength=0.0)
    assert not [edge for edge in weak.edges if edge[1].endswith((".q", ".k"))]
    assert len(weak.edges) < Graph.of(weak.cfg).edges.sum()
