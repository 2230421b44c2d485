"""Heads without a role: all heads ranked by their effect, and those that stand out."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads import heads_without_role as module
from align_circuits.heads.heads_without_role import UnnamedHead, effects_of_others, unnamed_heads
from align_circuits.heads.role_tests import RoleTests
from align_circuits.heads.thresholds import Thresholds
from align_circuits.tables.provenance import Provenance

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=3)


@pytest.fixture(scope="module")
def pair() -> ac.Pair:
    return ac.Pair(*TASK.pairs(TASK.sample(8, ac.planted_circuit(TASK, seed=0).tokenizer), 0))


@pytest.mark.parametrize(("costs", "share"), [(4, None), (0, 0.1)])
def test_every_head_has_an_effect_exact_where_it_is_among_the_largest(pair, costs, share, monkeypatch):
    """As patching each head alone has it; of the others the estimates of a screen."""
    monkeypatch.setattr(module, "GRADIENT_COSTS", costs)
    model, options = ac.planted_circuit(TASK, seed=0), ac.RunOptions()
    candidates = [(3, 3), (0, 0)]
    found = effects_of_others(model, pair, ac.patch_heads(model, pair, heads=candidates), options)
    every = ac.patch_heads(model, pair).where(kind="all", metric="log_prob")
    of_all: Any = found.where(kind="all", metric="log_prob")
    assert sorted(of_all.head_indices) == sorted(every.head_indices)
    exact = of_all.where(estimated=False)
    expected = dict(zip(every.head_indices, every.frame["value"], strict=True))
    assert exact.frame["value"].tolist() == pytest.approx([expected[head] for head in exact.head_indices], abs=1e-5)
    assert set(candidates) <= set(exact.head_indices)
    if share is None:
        assert len(exact) == len(every)
        return
    others = [head for head in every.head_indices if head not in candidates]
    assert len(exact) == len(candidates) + np.ceil(share * len(others))
    screened = ac.patch_heads(model, pair, heads=others, screen=share)
    assert set(screened.where(estimated=False).head_indices) | set(candidates) == set(exact.head_indices)


def test_what_stands_out():
    """By an effect of a tenth of the difference, either way, or by a score; the best of a role without names."""
    tested: Any = [
        # head, role, score, attention, q
        (0, "a", 0.1, 0.0, None),  # of large effect
        (1, "a", 0.1, 0.0, None),  # of large effect, the other way; nearer to b
        (1, "b", 0.3, 0.0, None),
        (2, "a", 0.9, 0.5, 1.0),  # of high score
        (3, "a", 0.9, 0.5, 0.01),  # named
        (4, "b", 0.4, 0.2, None),  # the best of a role that has none
        (5, "a", 0.1, 0.0, None),  # of large effect by an estimate alone
        (6, "a", 0.1, 0.0, None),  # of an effect that may be 0
        (7, "a", 0.1, 0.0, None),  # of small effect
    ]
    rows = [
        (head, role, metric, value)
        for head, role, *values in tested
        for metric, value in zip(("score", "attention", "q"), values, strict=True)
        if value is not None
    ]
    frame = pd.DataFrame(rows, columns=["head", "role", "metric", "value"]).assign(layer=0, low=0.0, high=1.0, n=4)
    tests = RoleTests(ac.Table(frame, Provenance("localize")), ["a", "b"], Thresholds())
    effect = {0: 1.0, 1: -0.9, 2: 0.0, 3: 2.0, 4: 0.0, 5: 1.0, 6: 1.0, 7: 0.39}
    noise = np.array([0.01, -0.01, 0.02, -0.02])
    values = np.array([value + noise * (500 if head == 6 else 1) for head, value in effect.items()])
    keys = pd.DataFrame({"level": "head", "layer": 0, "head": [*effect], "estimated": [head == 5 for head in effect]})
    keys = keys.assign(kind="all", metric="log_prob", direction="denoise")
    table = ac.Table.from_prompts(keys, values, np.ones(values.shape), Provenance("patch_heads"), bounded=False)
    runs = pd.DataFrame({"run": ["clean - corrupted"], "kind": "all", "metric": "log_prob"})
    gap = ac.Table.from_prompts(runs, 4 + noise[None], np.ones((1, 4)), table.provenance, bounded=False)
    table = ac.Table(table.frame, table.provenance, table.values, table.weights, gap)

    def found(effects: ac.Table) -> list[UnnamedHead]:
        return list(unnamed_heads(tests, {"a": [(0, 3)], "b": []}, effects))

    heads = found(table)
    assert [(each.head[1], each.role, each.large, each.high) for each in heads] == [
        (0, "a", True, False),
        (1, "b", True, False),
        (2, "a", False, True),
        (4, "b", False, False),
    ]
    possible = unnamed_heads(tests, {"a": [(0, 3)], "b": []}, table, {"b": 0.1})
    assert [(each.head[1], each.role) for each in possible] == [(0, "a"), (1, "a"), (2, "a")], "none for b"
    none = unnamed_heads(tests, {"a": [(0, 3)], "b": []}, table, {"a": 0.1, "b": 0.1})
    assert [(each.head[1], each.large) for each in none] == [(0, True), (1, True)], "effects need no p-value of a role"
    assert heads[1].share == pytest.approx(-0.225, abs=0.01) and heads[1].effect == pytest.approx(-0.9)
    assert heads[2].failed == (
        "effect below 0.01 nats on the prompts that choose",
        "no effect of 0.01 nats with an interval above 0",
    )
    assert str(heads[0]).startswith(
        "L0H0: large effect, +1.00 nats, 25% of the difference between clean and corrupted prompts; a: "
    )
    assert (
        heads[3].why == "b: score 0.40, below 0.50"
        and heads[0].size == "+1.00 nats, 25% of the difference between clean and corrupted prompts"
    )
    # A difference that is not well known widens the interval of the share alone: the effect is there all the same.
    unsure = ac.Table.from_prompts(runs, 4 + 100 * noise[None], np.ones((1, 4)), table.provenance, bounded=False)
    spread = ac.Table.from_prompts(keys, values + 19 * noise, np.ones(values.shape), table.provenance, bounded=False)
    spread = ac.Table(spread.frame, spread.provenance, spread.values, spread.weights, unsure)
    share: Any = spread.normalized().frame.iloc[1]
    assert share["low"] < 0 < share["high"] and [each.head[1] for each in found(spread) if each.large] == [0, 1]
    nothing = ac.Table.from_prompts(runs, 500 * noise[None], np.ones((1, 4)), table.provenance, bounded=False)
    same = found(ac.Table(table.frame, table.provenance, table.values, table.weights, nothing))
    assert not any(each.large for each in same), "where clean and corrupted prompts may be alike, no effect is large"
    assert [each.head[1] for each in same] == [2, 4] and same[0].size == "+0.00 nats"
