"""ACDC beside a twin that tries every edge by itself, in the order of the paper."""

from typing import Any

import numpy as np
import pytest
import torch
from legs import slow_but
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.decomposition import residual_edges_of
from align_circuits.circuits.pruning import prune_edges
from align_circuits.hooks.residual_edges import PatchEdges, sent_from
from align_circuits.run.forward_pass import capture

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)


@pytest.fixture(scope="module")
def pair(char_tokenizer):
    clean = TASK.sample(2, char_tokenizer, seed=0)
    return ac.Pair(clean, TASK.corrupt(clean, "query", seed=1))


def pruned_one_by_one(model: Any, pair: ac.Pair, cut: float) -> dict[tuple[str, str], float]:
    """Algorithm 1 of Conmy et al.: a run for each edge, those into parts without a way on included."""
    residual_edges = residual_edges_of(model, pair.clean)
    graph = residual_edges.graph
    source = capture(model, pair.corrupted, sent_from(graph))
    rows = [pair.clean.column(name) for name in ("prompt", "query_pos")]

    def log_probs(patched: torch.Tensor) -> torch.Tensor:
        edit = PatchEdges(residual_edges, source, patched[None])
        with torch.no_grad():
            logits = model.run_with_hooks(pair.clean.tokens, fwd_hooks=edit.fwd_hooks(model, pair.clean))
        return logits[tuple(rows)].log_softmax(-1)

    patched = torch.zeros_like(graph.edges)
    whole, now, rises = log_probs(patched), 0.0, {}
    for receiver in reversed(range(len(graph.receivers))):
        for sender in reversed(range(len(graph.senders))):
            if graph.edges[receiver, sender]:
                patched[receiver, sender] = True
                without = float((whole.exp() * (whole - log_probs(patched))).sum(-1).mean())
                rises[graph.senders[sender].name, graph.receivers[receiver].name] = without - now
                patched[receiver, sender] = without - now < cut
                now = without if without - now < cut else now
    return rises


@pytest.mark.parametrize("size", slow_but([(1, 1e-3)], [(1, 1e-3), (2, 1e-3), (2, 2e-2)]))
def test_pruning_is_what_trying_edges_one_by_one_gives(random_hf_model, char_tokenizer, pair, size):
    layers, cut = size
    llama = ac.load(random_hf_model("llama", num_hidden_layers=layers), tokenizer=char_tokenizer)
    expected = pruned_one_by_one(llama, pair, cut)
    frame: Any = prune_edges(llama, pair, cut=cut).frame
    found = frame.set_index(["sender", "receiver"])["value"].to_dict()
    assert found == pytest.approx(expected, abs=1e-5)
    kept = [edge for edge, rise in expected.items() if rise >= cut]
    assert 0 < len(kept) < 0.9 * len(expected)
    assert set(kept) == {edge for edge, rise in found.items() if rise >= cut}
    assert set(frame["metric"]) == {"kl"} and set(frame["direction"]) == {"noise"}
    if size != (2, 1e-3):
        without_way = {f"L{layer}H{head}" for layer in range(layers) for head in range(4)} - {edge[0] for edge in kept}
        assert without_way, "heads from which nothing is kept, so that what they read is not tried"


def test_a_planted_circuit_is_what_remains():
    model = ac.planted_circuit(TASK, seed=0, decoys=("random", "off_by_one"))
    clean = TASK.sample(3, model.tokenizer, seed=0)
    frame: Any = prune_edges(model, ac.Pair(clean, TASK.corrupt(clean, "query", seed=1), direction="noise")).frame
    kept = set(map(tuple, frame.loc[frame["value"] >= 0.01, ["sender", "receiver"]].to_numpy()))
    assert kept <= set(model.edges) and any(edge[1] == "logits" for edge in kept)


def test_what_cannot_be_pruned_is_refused(llama, pair):
    refused(r"cut=0\.0: give how many nats", prune_edges, llama, pair, cut=0.0)


def test_a_prompt_without_targets_changes_nothing(llama, char_tokenizer):
    clean = TASK.sample(3, char_tokenizer, seed=0)
    pair = ac.Pair(clean, TASK.corrupt(clean, "query", seed=1))

    def first_two(targets: Any) -> Any:
        return targets["prompt"] < 2

    def kept_of(clean: ac.Prompts, corrupted: ac.Prompts) -> Any:
        few = ac.Pair(clean.select_targets(first_two), corrupted.select_targets(first_two))
        return prune_edges(llama, few, cut=0.05).frame["value"].to_numpy()

    two = kept_of(pair.clean[:2], pair.corrupted[:2])
    assert np.isfinite(two).any()
    np.testing.assert_allclose(kept_of(pair.clean, pair.corrupted), two, atol=1e-5)
