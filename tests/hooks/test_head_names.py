"""Heads as pairs and as names, and what is refused as one."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import raised, refused

import align_circuits as ac
from align_circuits.circuits.edge_patching import patch_edges, patch_paths
from align_circuits.circuits.faithful import completeness, faithfulness, minimality
from align_circuits.hooks import residual_edges
from align_circuits.hooks.edits import edits_provenance
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.head_names import describe, head_of, heads_of, layers_of
from align_circuits.report.plots import head_maps

CFG = SimpleNamespace(n_layers=3, n_heads=12, n_key_value_heads=6)
ALL = [(layer, head) for layer in range(3) for head in range(12)]
TASK = ac.Seq2SeqTask(x_len=2, phrase_len=1, n_examples=2)


@pytest.mark.parametrize("head", ALL)
def test_a_name_is_its_pair(head):
    assert head_of(describe([head])) == head_of(head) == head_of(list(head)) == head_of(np.array(head)) == head
    assert head_of((torch.tensor(head[0]), np.int32(head[1]))) == head


def test_names_and_pairs_may_be_mixed_and_count_once():
    assert heads_of(CFG, ["L2H11", (0, 3), "L0H3", (2, 11)]) == [(2, 11), (0, 3)]
    assert heads_of(CFG) == ALL and heads_of(CFG, []) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("L2KV0.k", "'L2KV0.k' is the input of a key head, which several heads share (an edge's receiver), not a head"),
        ("L2H0.q", "'L2H0.q' is an input of a head (an edge's receiver), not a head"),
        ("L2KV0", "'L2KV0' is a key head, which several heads share, not a head"),
        ("M1", "'M1' is an MLP, not a head"),
        ("input", "'input' is the embedding, not a head"),
        ("logits", "'logits' is the logits (an edge's receiver), not a head"),
        ("L1H2 L0H1", "'L1H2 L0H1' is several heads in one string, not a head"),
        ("2.3", "'2.3' is no head"),
        (" L1H2", "' L1H2' is no head"),
        (3, "3 is no head"),
        ((1, 2, 3), "(1, 2, 3) is no head"),
        ((1.0, 2), "(1.0, 2) is no head"),
        (None, "None is no head"),
    ],
)
def test_what_is_no_head_is_called_what_it_is(given, message):
    advice = "give pairs of layer and head, such as [(2, 0), (3, 1)], or names, such as ['L2H0', 'L3H1']"
    for refuse in (lambda: head_of(given), lambda: inspect.unwrap(heads_of)(CFG, [given])):
        with pytest.raises(ValueError) as error:
            refuse()
        assert str(error.value) == f"{message}: {advice}"


def test_heads_that_the_model_does_not_have():
    for head, name in (("L3H0", "L3H0"), ((3, 0), "L3H0"), ("L0H12", "L0H12"), ((-1, 0), "L-1H0"), ((0, -1), "L0H-1")):
        with pytest.raises(ValueError, match=f"no head {name}: this model has layers 0 to 2 with heads 0 to 11"):
            heads_of(CFG, ["L0H0", head, (5, 5)])
    refused(r"heads='L1H2' is one string: give a list, such as \['L2H0'", heads_of, CFG, "L1H2")


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_the_model_does_not_have(layer):
    refused(f"no layer {layer}: this model has layers 0 to 2", layers_of, CFG, "resid_pre", [], [0, layer, 7])


def test_senders_and_receivers_are_told_apart():
    graph = Graph(2, 4, 2)
    assert graph.sender("L1H2") == graph.sender((1, 2))
    assert torch.equal(graph.select([((0, 1), "L1H2.q")]), graph.select([("L0H1", "L1H2.q")]))
    assert torch.equal(graph.among(["L0H1", (1, 2)]), graph.among([(0, 1), (1, 2)]))
    assert graph.select([("L0H1", "M0")]).sum() == 1, "unless it is told to be parallel"
    with pytest.raises(KeyError, match=r"no sender 'L1H2.q' .*; L1H2.q reads the residual stream: it is a receiver"):
        graph.sender("L1H2.q")
    for name in ("L1H3", "L1H3.k"):
        with pytest.raises(KeyError, match=rf"no receiver '{name}' .*; L1H3 reads through L1H3\.q, L1KV1\.k, L1KV1\.v"):
            graph.receiver(name)
    named = "L0H0.q, L0H1.q, L0H2.q, L0H3.q, L0KV0.k, L0KV1.k, ..., logits"
    raised(KeyError, f"no receiver 'L9H0' in this model: it has {named}\"$", graph.receiver, "L9H0")
    raised(KeyError, r"no sender 'M2' in this model: it has input, L0H0, .*, L0H3, M0, ..., M1", graph.sender, "M2")


@pytest.fixture(scope="module")
def clean(char_tokenizer):
    return TASK.sample(3, char_tokenizer, seed=0)


def test_every_verb_takes_names(llama, clean):
    """And gives what it gives for pairs."""
    corrupted = TASK.corrupt(clean, "query", seed=1)
    noise = ac.Pair(clean, corrupted, direction="noise")
    scores = ac.attribute_edges(llama, noise, method="eap")
    names: Any = ["L1H0", "L0H3"]
    pairs = [(1, 0), (0, 3)]
    baseline = ac.ablation_baseline(llama, clean)
    verbs: list[Any] = [
        lambda heads: ac.ablate_heads(llama, clean, heads=heads),
        lambda heads: ac.patch_heads(llama, noise, heads=heads),
        lambda heads: ac.function_vectors(llama, [ac.Pair(clean, corrupted)], heads=heads),
        lambda heads: ac.evaluate(llama, clean, edits=[ac.Ablate(heads, how="mean", baseline=baseline)]),
        lambda heads: ac.evaluate(llama, clean, edits=[ac.Clamp(heads, "lookup")]),
        lambda heads: faithfulness(llama, noise, scores, fractions=[0.5], heads={"some": heads}),
        lambda heads: completeness(llama, heads, noise, draws=1),
        lambda heads: minimality(llama, heads, noise, draws=1),
        lambda heads: patch_paths(llama, noise, senders=heads),
        lambda heads: patch_edges(llama, noise, edges=[(head, "logits") for head in heads]),
    ]
    for verb in verbs:
        by_name, by_pair = verb(names), verb(pairs)
        pd.testing.assert_frame_equal(by_name.frame, by_pair.frame, check_exact=True)
        assert by_name.provenance == by_pair.provenance
    assert edits_provenance([ac.Ablate(names, how="zero")]) == edits_provenance([ac.Ablate(pairs, how="zero")])
    views = [ac.plots.attention(llama, clean[0], heads) for heads in (names, pairs)]
    assert list(views[0].rows) == list(views[1].rows) == pairs
    assert views[0].to_html("L1H0", "lookup") == views[0].to_html((1, 0), "lookup")
    table = ac.score_heads(llama, clean, ["lookup"])
    drawn = [head_maps(table, ["lookup"], marked={"lookup": heads}).to_json() for heads in (names, pairs)]
    assert drawn[0] == drawn[1]


def test_names_of_senders_and_receivers():
    def of(graph: Graph) -> tuple[str, str]:
        return " ".join(one.name for one in graph.senders), " ".join(one.name for one in graph.receivers)

    reads = "L0H0.q L0H1.q L0H2.q L0H3.q L0KV0.k L0KV1.k L0KV0.v L0KV1.v M0 logits"
    assert of(Graph(1, 4, 2)) == ("input L0H0 L0H1 L0H2 L0H3 M0", reads)
    assert of(Graph(1, 2, 2, mlps=False)) == ("input L0H0 L0H1", "L0H0.q L0H1.q L0H0.k L0H1.k L0H0.v L0H1.v logits")
    assert of(Graph(2, 1, 1))[0] == "input L0H0 M0 L1H0 M1"


def test_a_graph_is_read_off_a_configuration():
    sizes = {"n_layers": 2, "n_heads": 6}
    assert Graph.of(SimpleNamespace(**sizes)) == Graph(2, 6, 6, mlps=True, parallel=False)
    told = SimpleNamespace(**sizes, n_key_value_heads=3, attn_only=True, parallel_attn_mlp=True)
    assert Graph.of(told) == Graph(2, 6, 3, mlps=False, parallel=True)
    assert Graph.of(SimpleNamespace(**sizes, n_key_value_heads=None)).n_key_heads == 6


def named(graph: Graph, edges: torch.Tensor) -> set[tuple[str, str]]:
    return {(graph.senders[j].name, graph.receivers[i].name) for i, j in edges.nonzero().tolist()}


def test_every_edge_leads_forward():
    first, second = ([*(f"L{layer}H0.{site}" for site in "qkv"), f"M{layer}"] for layer in (0, 1))
    of_parallel = {("input", read) for read in [*first, *second]}
    of_parallel |= {(sent, read) for sent in ("L0H0", "M0") for read in second}
    of_parallel |= {(sent, "logits") for sent in ("input", "L0H0", "M0", "L1H0", "M1")}
    for parallel, more in [(True, set()), (False, {("L0H0", "M0"), ("L1H0", "M1")})]:
        graph = Graph(2, 1, 1, parallel=parallel)
        assert named(graph, graph.edges) == of_parallel | more


@pytest.mark.parametrize(("head", "key_head"), [("L0H1", "L0KV0"), ("L0H2", "L0KV1")])
def test_a_circuit_of_one_head_holds_the_key_head_that_it_shares(head, key_head):
    graph = Graph(1, 4, 2)
    of_head = {("input", read) for read in (f"{head}.q", f"{key_head}.k", f"{key_head}.v")}
    rest = {("input", "M0"), ("input", "logits"), (head, "M0"), (head, "logits"), ("M0", "logits")}
    assert named(graph, graph.among([head])) == of_head | rest


def test_what_is_no_edge():
    graph = Graph(2, 4, 2)
    wrong: list[Any] = ["ab", ("L0H1",), ("L0H1", "L1H0.q", "L1H1.q"), ("L0H1", (1, 0))]
    for edge in wrong:
        refused("is no edge: give a pair of sender and receiver", inspect.unwrap(Graph.select), graph, [edge])
    raised(KeyError, "; logits reads the residual stream: it is a receiver", graph.sender, "logits")
    with pytest.raises(KeyError) as unknown:
        graph.sender("L9H0")
    assert "reads" not in str(unknown.value)


def test_places_of_senders_and_receivers_at_hook_points():
    graph = Graph(2, 4, 2)
    assert residual_edges.columns_of(graph) == {
        "blocks.0.hook_resid_pre": slice(0, 1),
        "blocks.0.attn.hook_z": slice(1, 5),
        "blocks.0.hook_mlp_out": slice(5, 6),
        "blocks.1.attn.hook_z": slice(6, 10),
        "blocks.1.hook_mlp_out": slice(10, 11),
    }
    assert residual_edges.sites_of(graph) == {
        ("q", 0): slice(0, 4),
        ("k", 0): slice(4, 6),
        ("v", 0): slice(6, 8),
        ("mlp", 0): slice(8, 9),
        ("q", 1): slice(9, 13),
        ("k", 1): slice(13, 15),
        ("v", 1): slice(15, 17),
        ("mlp", 1): slice(17, 18),
        ("logits", 2): slice(18, 19),
    }


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mlps", [False, True])
def test_hook_points_of_edges(parallel, mlps):
    points = {"blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"}
    points |= {f"blocks.0.attn.hook_{site}" for site in "qkvz"} | ({"blocks.0.hook_mlp_out"} if mlps else set())
    points |= {"blocks.0.hook_resid_mid"} if mlps and not parallel else set()
    assert residual_edges.hook_points(Graph(1, 2, 2, mlps, parallel)) == sorted(points)
