"""Variations of planted circuits: grouped queries, split roles, self-repair, noise, decoys; and the zoo of them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, DECOYS, OTHER_DECOYS, ROLE_OF_KIND
from align_circuits.models.planted.zoo import HELD_OUT, PUBLIC, zoo_circuit
from align_circuits.run.target_metrics import TargetMetrics

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=5, alignment="permutation")
COPIES = {"previous": 3, "align_query": 4, "align_key": 2, "lookup": 5}


@pytest.fixture(scope="module")
def prompts(char_tokenizer):
    return TASK.sample(12, char_tokenizer, seed=5)


def logits(model, prompts):
    with torch.no_grad():
        return model(prompts.tokens)[prompts.column("prompt"), prompts.column("query_pos")]


def log_prob(model, prompts, ablated=()):
    baseline = ac.ablation_baseline(model, prompts, "mean")
    edits = [ac.Ablate(ablated, how="mean", baseline=baseline)] if ablated else []
    return float(TargetMetrics.of(prompts, ("log_prob",)).measure_edited(model, [edits])[0].mean())


def of_kind(model, kind):
    return [head for head, own in model.kinds.items() if own == kind]


def test_grouped_queries_compute_the_same(prompts):
    whole = ac.planted_circuit(TASK, seed=2, n_heads=8)
    grouped = ac.planted_circuit(TASK, seed=2, n_heads=8, n_key_value_heads=2)
    assert grouped.W_K.shape[1] == 2 and grouped.kinds == whole.kinds
    torch.testing.assert_close(logits(grouped, prompts), logits(whole, prompts), atol=1e-4, rtol=1e-4)


def test_split_roles_compute_the_same(prompts):
    one = ac.planted_circuit(TASK, seed=2, n_heads=8, decoys=())
    split = ac.planted_circuit(TASK, seed=2, n_heads=8, decoys=(), copies=COPIES)
    assert {role: len(of_kind(split, role)) for role in COPIES} == COPIES
    torch.testing.assert_close(logits(split, prompts), logits(one, prompts), atol=1e-3, rtol=1e-4)


def test_a_head_that_repairs_is_idle_until_the_others_are_gone(prompts):
    model = ac.planted_circuit(TASK, seed=1, self_repair=True)
    (repair,), lookups = of_kind(model, "repair"), of_kind(model, "lookup") + of_kind(model, "backup")
    intact = log_prob(model, prompts)
    alone, without, all_gone = (log_prob(model, prompts, heads) for heads in ([repair], lookups, [*lookups, repair]))
    assert repair[0] > lookups[0][0]
    assert intact - alone < 0.05 < 0.5 < without - all_gone
    plain = ac.planted_circuit(TASK, seed=1)
    assert log_prob(plain, prompts, [head for head, role in plain.roles.items() if role == "lookup"]) < without - 0.5


def test_bias_and_noise_leave_the_circuit_at_work(prompts):
    variations: list[dict[str, Any]] = [{"positional_bias": 0.05}, {"noise": 0.005, "decoys": ["random", "off_by_one"]}]
    for settings in variations:
        model = ac.planted_circuit(TASK, seed=3, **settings)
        assert not torch.equal(logits(model, prompts), logits(ac.planted_circuit(TASK, seed=3), prompts))
        assert TargetMetrics.of(prompts, ("accuracy",)).measure_edited(model, [[]])[0].mean() > 0.9


def test_decoys_without_output_attend_as_the_circuit_does(prompts):
    model = ac.planted_circuit(TASK, seed=4, n_heads=8, decoys=[*DECOYS, *OTHER_DECOYS])
    _, cache = model.run_with_cache(prompts.tokens)
    for decoy, kind in (("previous_without_output", "previous"), ("lookup_without_output", "lookup")):
        patterns = [cache["pattern", layer][:, head] for layer, head in (of_kind(model, k)[0] for k in (decoy, kind))]
        rows = prompts.column("prompt"), prompts.column("query_pos")
        torch.testing.assert_close(patterns[0][rows], patterns[1][rows], atol=1e-3, rtol=1e-3)
    intact = log_prob(model, prompts)
    for decoy in OTHER_DECOYS:
        assert abs(log_prob(model, prompts, of_kind(model, decoy)) - intact) < 1e-4, decoy
    (sink,) = of_kind(model, "sink")
    assert cache["pattern", sink[0]][:, sink[1], :, 0].min() > 0.99


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_key_value_heads": 3}, "a divisor of 4"),
        ({"copies": {"induction": 2}}, "choose among previous"),
        ({"copies": {"lookup": 0}}, "at least 1 of lookup"),
        ({"copies": {"align_query": 4}}, "needs 5 heads and has 4"),
        ({"self_repair": True, "n_layers": 4}, "one more than 4"),
        ({"noise": -1.0}, "from 0 on"),
        ({"decoys": ["sinks"]}, "letter_bias"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    refused(message, ac.planted_circuit, TASK, **settings)


class TestZoo:
    def test_circuits_vary_in_all_traits(self):
        traits = [zoo_circuit(seed).traits for seed in PUBLIC]
        for name in traits[0]:
            assert len({each[name] for each in traits}) > 1, name
        for role in CIRCUIT_ROLES:
            assert {each[f"copies of {role}"] for each in traits} == {1, 2, 3, 4, 5, 6}
        kinds = {kind for seed in PUBLIC for kind in zoo_circuit(seed).circuit["decoys"]}
        assert len(kinds) == 12 and all(ROLE_OF_KIND[kind] is None for kind in kinds)
        assert len(PUBLIC) + len(HELD_OUT) >= 200 and not set(PUBLIC) & set(HELD_OUT)

    def test_every_circuit_works(self):
        accuracies = []
        for seed in itertools.chain(PUBLIC[:8], HELD_OUT[:4]):
            model = zoo_circuit(seed).build()
            prompts = model.task.sample(8, model.tokenizer, seed=1)
            first = TargetMetrics.of(prompts, ("accuracy",), "first")
            accuracies.append(first.measure_edited(model, [[]])[0].mean())
        assert np.min(accuracies) > 0.7

    def test_a_seed_gives_the_same_circuit(self):
        first, again = (zoo_circuit(7).build() for _ in range(2))
        assert first.kinds == again.kinds and torch.equal(first.W_Q, again.W_Q)
        refused("0 or more", zoo_circuit, -1)
