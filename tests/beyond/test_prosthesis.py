"""Alignment given to an untuned model: what is clamped where, and at which depth it helps."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from legs import slow_but
from measured import table_of

import align_circuits as ac
from align_circuits.beyond import prosthesis
from align_circuits.beyond.prosthesis import (
    GOLD,
    KEY,
    LOOKUP,
    MATCHED,
    METRICS,
    QUERY,
    RANDOM,
    TUNED,
    UNTUNED,
    WRONG,
    aligners,
    drawn,
    elsewhere,
    in_layers,
    last_layer,
    matched,
    measure_pairs,
    of_single_head,
    overview,
    rank_of_layers,
    restored,
    share,
)
from align_circuits.hooks.edits import Clamp
from align_circuits.models.planted.head_builder import HeadSpec
from align_circuits.models.planted.planted_model import PlantedModel, planted_circuit
from align_circuits.models.tokenizer import char_tokenizer as the_tokenizer
from align_circuits.prompts.prompts import TokenKind
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tasks.seq2seq import Seq2SeqTask

TASK: dict[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 4}


def test_the_key_side_reads_the_examples_and_the_query_side_the_test_example():
    prompts, _ = drawn(the_tokenizer(), TASK, 3, seed=1)
    test = TASK["n_examples"]
    for side, examples in ((KEY, range(test)), (QUERY, [test])):
        gold, wrong = (prompts.relations[f"{of} {side}"] for of in (GOLD, WRONG))
        assert len(gold) == len(prompts) * len(examples) * TASK["x_len"]
        for row, (prompt, query) in enumerate(zip(gold.prompt.tolist(), gold.query.tolist(), strict=True)):
            letter = query + (side == QUERY)
            ((key,), (other,)) = gold.keys_of(row), wrong.keys_of(row)
            example = prompts.example[prompt]
            assert example[letter] == example[key] == example[other]
            assert example[letter] in examples
            kinds = prompts.token_kinds[prompt]
            assert kinds[letter] == TokenKind.OUTPUT
            assert kinds[key] == kinds[other] == TokenKind.INPUT
            first = int((example == example[letter]).nonzero()[0])  # the first symbol of the example
            phrase = (letter - first - TASK["x_len"] - 1) / TASK["phrase_len"]
            assert key - first == phrase  # the alignment is monotonic, and only first letters have rows
            assert other - first == (phrase + 1 + 1 % (TASK["x_len"] - 1)) % TASK["x_len"] != phrase


def test_pairs_are_what_runs_with_both_edits_give(random_hf_model, char_tokenizer):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    prompts, _ = drawn(char_tokenizer, {**TASK, "x_len": 3}, 2, seed=0)
    keys = [[], [Clamp([(0, 0), (0, 1)], f"{GOLD} {KEY}")], [Clamp([(1, 0)], f"{WRONG} {KEY}")]]
    queries = [[Clamp([(1, 1)], f"{GOLD} {QUERY}")], [], [Clamp([(0, 0)], f"{WRONG} {QUERY}")]]
    pairs = measure_pairs(model, prompts, keys, queries)
    targets = TargetMetrics.of(prompts, METRICS, "first")
    twin, _ = targets.measure_edited(model, [[*key, *query] for key in keys for query in queries])
    np.testing.assert_allclose(pairs.reshape(twin.shape), twin, atol=1e-5)
    assert np.ptp(twin[1].mean(1)) > 1e-3


def without_alignment(seed: int) -> PlantedModel:
    """A planted circuit that does not align, but in each layer has a head that could: it copies what it attends to."""
    model = planted_circuit(Seq2SeqTask(**TASK), seed, decoys=(), n_layers=8, n_heads=4)
    aligning = {model.kinds[head]: (head, spec) for head, spec in model.specs.items() if "align" in model.kinds[head]}
    (_, query), (_, key) = aligning["align_query"], aligning["align_key"]
    # Without its first term an aligner attends to the latest delimiter, which has no symbol.
    blind = HeadSpec(query.qk[1:], (*query.ov, *key.ov))
    idle = {layer: head for (layer, head), kind in model.kinds.items() if kind == "inert"}
    heads = [head for head, _ in aligning.values()]
    with torch.no_grad():
        for layer, head in heads:
            attention = model.blocks[layer].attn
            for weight in (attention.W_Q, attention.W_K, attention.W_V, attention.W_O):
                weight[head] = 0
    for layer, head in idle.items():
        blind.write(model, layer, head)
    return model


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_in_a_planted_circuit_alignment_comes_too_late_from_the_lookup_on(seed, monkeypatch):
    model = without_alignment(seed)
    monkeypatch.setattr(prosthesis, "loaded", lambda _: model)
    table = table_of(restored(model="", task=TASK, prompts=4, key_heads=1, draws=2, seed=seed).assign(seed=seed))
    lookup = next(layer for (layer, _), kind in model.kinds.items() if kind == "lookup")
    pair: Any = table.where(part="pair", metric="accuracy").frame.groupby("of")["value"].mean()
    assert pair[GOLD] == 1
    alone = [f"{side} side alone" for side in (KEY, QUERY)]
    assert pair[[UNTUNED, WRONG, *alone]].max() <= 0.6, "neither one side alone, nor other symbols"
    able = {head for head, kind in model.kinds.items() if kind == "inert" and head[0] < lookup}
    for side in (KEY, QUERY):
        assert last_layer(table, side).tolist() == [lookup - 1]
        heads: Any = table.where(part="heads", side=side, metric="accuracy").frame.set_index(["layer", "head"])["value"]
        # One idle head of each layer copies symbols.
        assert {head for head, value in heads.items() if value == 1} <= able
        assert sorted(layer for (layer, _), value in heads.items() if value == 1) == list(range(lookup))


def test_controls_are_other_heads():
    heads = [(1, 0), (1, 1)]
    scores = pd.DataFrame(
        [(0, 0, 0.2), (0, 1, 0.75), (1, 0, 0.7), (1, 1, 0.72), (2, 0, 0.9), (2, 1, 0.6)],
        columns=["layer", "head", "value"],
    )
    assert matched(heads, scores) == [(0, 1), (2, 1)]  # the nearest one is taken already
    among = [(layer, head) for layer in range(3) for head in range(2)]
    drawn_heads = elsewhere(heads, among, np.random.default_rng(0))
    assert len(set(drawn_heads)) == 2
    assert not {layer for layer, _ in drawn_heads} & {1}


def table_of_shares() -> Any:
    """Two seeds of prompts, three layers of two heads, and two tuned seeds."""
    accuracy = {"metric": "accuracy", "part": "pair"}
    pairs = {UNTUNED: (0.2, 0.4), TUNED: (1.0, 0.8), GOLD: (0.8, 0.6), f"{KEY} side alone": (0.3, 0.5)}
    pairs |= dict.fromkeys((f"{QUERY} side alone", WRONG, MATCHED, RANDOM), (0.2, 0.7))
    rows: list[dict[str, Any]] = [
        {**accuracy, "of": of, "seed": seed, "prompt": prompt, "value": value + (-0.1, 0.1)[prompt]}
        for of, values in pairs.items()
        for seed, value in enumerate(values)
        for prompt in range(2)
    ]
    about = {"of": GOLD, "side": QUERY}
    for metric, layers in {"accuracy": ([0.5, 0.7, 0.35], [0.6, 0.9, 0.8]), "log_prob": ([-3, -1, -2],) * 2}.items():
        rows += [
            {**about, "part": "layers", "metric": metric, "seed": seed, "layer": float(layer), "value": float(value)}
            for seed, values in enumerate(layers)
            for layer, value in enumerate(values)
        ]
    heads = {(0, 0): (0.3, 0.9), (0, 1): (0.4, 0.6), (1, 0): (0.9, 0.5), (None, None): (0.3, 0.5)}
    rows += [
        {**about, "part": "heads", "metric": "accuracy", "seed": seed, "layer": layer, "head": head, "value": value}
        for (layer, head), values in heads.items()
        for seed, value in enumerate(values)
    ]
    for side, layers in ((QUERY, (1, 2)), (LOOKUP, (0, 0))):
        rows += [
            {"part": "aligner", "side": side, "seed": seed, "layer": float(layer)} for seed, layer in enumerate(layers)
        ]
    return table_of(rows)


def test_shares_ranks_and_depths_by_hand():
    table = table_of_shares()
    both = share(statistic_of(GOLD))(table)
    np.testing.assert_allclose(both, [0.6 / 0.6, 0.2 / 0.6])  # of the mean gain of .8 and .4
    assert last_layer(table, QUERY).tolist() == [1, 2]  # rises of .2, .4, .05 and .1, .4, .3 beyond the key side
    assert rank_of_layers(QUERY, QUERY)(table).tolist() == [1, 0.5]
    assert rank_of_layers(QUERY, LOOKUP)(table).tolist() == [0, 0]
    np.testing.assert_allclose(in_layers(QUERY, 1 / 3, 1)(table), [0.525, 0.85])
    # Seed 1 likes L0H0 best and seed 0 L1H0, which are tested on each other.
    np.testing.assert_allclose(of_single_head(QUERY, 1.0)(table), [0, 0], atol=1e-12)
    np.testing.assert_allclose(of_single_head(QUERY, 0.5)(table), [0.1 / 0.6, 0.1 / 0.6])


def test_the_overview_tells_shares_of_what_tuning_gains():
    shown: Any = overview(table_of_shares())[0]
    assert shown["accuracy, untuned"].startswith("0.30 [") and shown["accuracy, tuned"].startswith("0.90 [")
    assert shown["both sides"].startswith("0.67 [")
    assert shown["key side alone"] == "0.17 [no interval]"  # both seeds gain .1 of .6
    assert len(shown) == 8 and shown["random other heads"].startswith("0.25 [")


def statistic_of(of: str) -> Any:
    return prosthesis._PAIR.at(of=of)


def test_tuned_seeds_are_those_in_which_a_head_aligns():
    kept = aligners("smollm2")
    seeds = kept.groupby("arm")["seed"].unique().map(sorted).to_dict()
    expected = {"larger steps": [1, 2, 3], "phrases of one letter": [*range(9)], "six more seeds": [4, 5, 6, 8, 9]}
    assert seeds == expected | {"another six seeds": [*range(10, 16)]}, "by the paper's recipe none, and not seed 7"
    assert kept.groupby("side").size().to_dict() == {KEY: 23, QUERY: 23, LOOKUP: 23}
    first = kept[(kept["arm"] == "larger steps") & (kept["side"] == QUERY)].set_index("seed")["layer"]
    assert first.to_dict() == {1: 19, 2: 21, 3: 19}  # an earlier run of seed 1 is bundled: L19H2
