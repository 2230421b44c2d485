"""Agreement of scores with known heads, beside brute force."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from refusals import refused

import align_circuits as ac
from align_circuits.hooks.head_names import heads_of
from align_circuits.localizers.comparison import agreement, head_faithfulness, names_agreement
from align_circuits.tasks.task import exchanged


@pytest.mark.parametrize("seed", range(5))
def test_agreement_is_what_counting_gives(seed):
    draw = np.random.default_rng(seed)
    grid = draw.integers(0, 4, (3, 4)).astype(float)  # with ties
    heads = list(itertools.product(range(3), range(4)))
    positive, negative = heads[:4], heads[4:11]
    found = agreement(grid, positive, negative)
    pairs = [(grid[p] > grid[n]) + 0.5 * (grid[p] == grid[n]) for p in positive for n in negative]
    assert found["auroc"] == pytest.approx(np.mean(pairs))
    shares = []
    for _ in range(4000):  # ties in a random order
        order = sorted([*positive, *negative], key=lambda head: (-grid[head], draw.random()))
        shares.append(np.mean([head in positive for head in order[:4]]))
    assert found["recall_at_size"] == pytest.approx(np.mean(shares), abs=0.02)
    precision = []
    for head in positive:
        taken = [other for other in [*positive, *negative] if grid[other] >= grid[head]]
        precision.append(np.mean([other in positive for other in taken]))
    assert found["average_precision"] == pytest.approx(np.mean(precision))


def test_perfect_scores_agree_and_nothing_to_compare_is_refused():
    grid = np.array([[2.0, 1.0], [0.0, 0.5]])
    assert set(agreement(grid, [(0, 0), (0, 1)], [(1, 0), (1, 1)]).values()) == {1.0}
    refused("0 heads that matter and 1 that do not", agreement, grid, [], [(0, 0)])


def test_names():
    assert names_agreement({(0, 0), (1, 1)}, {(0, 0), (0, 1), (2, 2)}) == {"recall": 1 / 3, "false_discoveries": 0.5}
    assert np.isnan(names_agreement(set(), {(0, 0)})["false_discoveries"])


def test_circuits_are_faithful_as_far_as_their_heads_matter():
    task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=4)
    model = ac.planted_circuit(task, seed=0, decoys=())
    pair = ac.Pair(*exchanged(task.sample(4, model.tokenizer, seed=0)))
    true, false = np.zeros((6, 4)), np.zeros((6, 4))
    for head in heads_of(model.cfg):
        (true if model.roles[head] or model.kinds[head] == "boundary" else false)[head] = 1
    areas = head_faithfulness(model, pair, {"true": true, "false": false}, (0.25, 0.3, 0.5))
    assert areas["true"]["circuit_performance_ratio"] > 0.8 > 0.3 > areas["false"]["circuit_performance_ratio"]
    assert areas["true"]["circuit_model_distance"] < 0.2
    assert head_faithfulness(model, pair, {"true": true}, (0.5, 0.3, 0.25))["true"] == pytest.approx(areas["true"])
    for fractions in ((), (0.0, 0.5), (0.5, 2.0)):
        refused("give shares of heads above 0, at most 1", head_faithfulness, model, pair, {"true": true}, fractions)
    others: Any = ({"metric": "prob"}, {"kind": "first"})
    for other in others:
        refused("this measures log_prob of all", head_faithfulness, model, replace(pair, **other), {}, (0.5,))
    refused("change no prediction", head_faithfulness, model, ac.Pair(pair.clean, pair.clean), {"true": true}, (0.5,))
