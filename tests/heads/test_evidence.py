"""Evidence about heads and sets of heads: what is measured, and what a table says of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads import evidence
from align_circuits.heads.evidence import HeadSets, evidence_table, smallest_sets
from align_circuits.heads.thresholds import Thresholds
from align_circuits.tables.provenance import Provenance

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=2)
HEADS = [(layer, head) for layer in range(3) for head in range(4)]
NONE = ac.Table(pd.DataFrame(columns=["layer", "head", "kind", "metric", "value", "low", "high", "n"]), Provenance(""))
BOTH: Any = ("necessary", "sufficient")


def test_a_loss_is_minus_a_change_and_candidates_are_corrected_together():
    def table(*rows: Any) -> ac.Table:
        columns = ["layer", "head", "kind", "metric", "value", "low", "high"]
        return ac.Table(pd.DataFrame(rows, columns=columns).assign(level="head", n=5), Provenance("localize"))

    metrics = ("lookup", "lookup_attention")
    scores = table(*[(0, head, "all", metric, 0.9, 0.8, 1.0) for metric in metrics for head in range(3)])
    change = table((0, 1, "all", "log_prob", -0.5, -0.7, -0.2), (0, 2, "all", "log_prob", -0.1, -0.3, 0.1))
    gain = table((0, 1, "all", "log_prob", 0.4, 0.1, 0.6), (0, 2, "all", "log_prob", 0.0, -0.1, 0.2))
    by_prompt = {"values": np.array([[-0.5, -0.4], [-0.1, 0.1]]), "weights": np.ones((2, 2))}
    change, gain = (replace(effects, **by_prompt) for effects in (change, gain))
    control = scores
    p, family = {"lookup": np.array([[0.5, 0.01, 0.04]])}, [((0, 1), "lookup"), ((0, 2), "lookup")]

    def of_table(*heads: Any, resampled: ac.Table = NONE, apart: Any = ()) -> ac.Table:
        mattered, of_heads = [(head, "lookup") for head in heads], (change, gain, resampled)
        others = [candidate for candidate in family if candidate not in apart]
        return evidence_table(scores, control, p, [others], apart, mattered, *of_heads, Provenance("localize"))

    of_one: Any = of_table((0, 1)).frame.set_index(["metric", "head"])["value"]
    assert of_one["q", 1] == of_one["causal_p", 1] and of_one["q", 2] == 1, "one test alone needs no correction"
    found = of_table((0, 1), (0, 2))
    keyed = found.frame.set_index(["metric", "head"])[["value", "low", "high"]]
    for metric, head, expected in (
        ("ablation", 1, (0.5, 0.2, 0.7)),
        ("ablation", 2, (0.1, -0.1, 0.3)),
        ("denoising", 1, (0.4, 0.1, 0.6)),
        ("denoising", 2, (0.0, -0.1, 0.2)),
        ("p", 0, (0.5, np.nan, np.nan)),
        ("causal_p", 1, (p_of_two := 2 * np.arctan(0.05 / 0.45) / np.pi, np.nan, np.nan)),
        ("causal_p", 2, (1.0, np.nan, np.nan)),
        ("q", 1, (2 * p_of_two, np.nan, np.nan)),
        ("q", 2, (1.0, np.nan, np.nan)),
    ):
        assert keyed.loc[metric, head].tolist() == pytest.approx(expected, nan_ok=True), (metric, head)
    assert ("q", 0) not in keyed.index and ("control", 0) in keyed.index
    # Of the second head, which now has three chances, resampling alone shows an effect.
    one = table((0, 2, "all", "log_prob", -0.5, -0.7, -0.2))
    resampled = replace(one, values=by_prompt["values"][:1], weights=np.ones((1, 2)))
    three: Any = of_table((0, 1), (0, 2), resampled=resampled, apart=family[1:]).frame
    of_three = three.set_index(["metric", "head"])["value"]
    # It is corrected on its own, and has no score on the control.
    assert of_three["q", 2] == of_three["causal_p", 2] and of_three["q", 1] == of_three["causal_p", 1]
    assert ("control", 2) not in of_three.index and of_three["control", 1] == 0.9
    assert of_three["resampling", 2] == 0.5 and ("resampling", 1) not in of_three.index
    assert of_three["causal_p", 1] == pytest.approx(p_of_two)
    assert of_three["causal_p", 2] == pytest.approx(1.5 * p_of_two)


@pytest.fixture
def costing(monkeypatch):
    """Sets of the heads of three layers of four, each of which costs so much accuracy when it is ablated."""
    monkeypatch.setattr(evidence, "provenance_of", lambda *_: Provenance("localize"))

    def right(_: Any, prompts: Any, sets: Any, rows: slice = slice(None), **__: Any) -> Any:
        values = np.array([costs.intact - sum(costs.of.get(head, 0.0) for head in heads) for heads in sets])
        return values[:, None].repeat(len(prompts[rows].targets), 1), "fast"

    def sets(of: dict, draws: int = 20) -> HeadSets:
        costs.of = of
        model: Any = ac.planted_circuit(TASK, seed=0, n_layers=4)
        monkeypatch.setattr(evidence, "heads_of", lambda _: HEADS)
        prompts, scores = ac.Prompts.from_tokens([[1, 2, 3]] * 2), {"a": np.zeros((3, 4))}
        return HeadSets(model, prompts, scores, Thresholds(alpha=0.25), draws, 0, ac.RunOptions())

    costs = SimpleNamespace(intact=1.0, of={})
    monkeypatch.setattr(evidence, "right_ablated", right)
    return SimpleNamespace(sets=sets, costs=costs)


def test_which_sets_are_ablated(costing):
    roles, one = {"a": [(0, 1)], "b": []}, {"layers": [[(1, 0)]], "scores": [[(1, 1)], [(1, 2)]]}

    def ablated(named: Any, cost: float = 0.0, claims: Any = BOTH) -> list[str]:
        table, _ = costing.sets({(0, 1): cost}).test(named, claims, one, roles)
        return table.where(kind="all").frame["ablated"].tolist()

    assert ablated([], claims=()) == ["nothing", "a"]
    few = [*("nothing", "a", "named", "rest"), *("rest of random", "rest of matched", "rest of matched")]
    assert ablated([(0, 1)]) == few, "a set that costs too little has no controls"
    assert ablated(HEADS) == ["nothing", "a", "named"], "there is no rest"
    assert ablated([(0, 1)], 0.5) == [*few[:4], *("random", "matched", "matched"), *few[4:]]


def test_heads_of_a_role_are_tested_beside_heads_without_any(costing):
    costs: dict[Any, float] = {(0, 0): 0.5, (0, 1): 0.05}
    roles = {"a": [(0, 0)], "b": [(0, 1)], "c": []}
    necessary, needless = costing.sets(costs, draws=6).test_roles(roles)
    assert (necessary.role, necessary.heads, necessary.claim) == ("a", ((0, 0),), "necessary")
    assert necessary.holds and necessary.controls == {"unnamed": (1.0,) * 6} and not necessary.smallest
    assert needless.role == "b" and not needless.holds and needless.value == 0.95
    sets = costing.sets(costs, draws=3)
    layers, scores = (sets.controls([(0, 0)], HEADS[2:])[kind] for kind in ("layers", "scores"))
    costs |= {scores[0][0]: 0.4, layers[0][0]: 0.3}
    controls = sets.test_roles(roles)[0].controls["unnamed"]
    assert controls[:2] == pytest.approx((0.7, 0.6)), "one of the same layers, then one of similar scores"
    assert sets.test_roles({"a": [(0, 0)], "b": [(0, 0)], "c": []}) == [], "all named heads"


@pytest.mark.parametrize("intact", [1.0, 0.9])
def test_the_smallest_sets_are_beginnings_of_one_order(intact, costing, monkeypatch):
    loss = {(0, 1): -3.0, (1, 0): -2.0, (0, 3): -1.0, (1, 2): -0.5}
    table = SimpleNamespace(frame={"value": [loss.get(head, 0.0) for head in HEADS]})
    monkeypatch.setattr(evidence, "ablate_heads", lambda *_, **__: SimpleNamespace(where=lambda **_: table))
    costing.sets({(0, 1): 0.5, (1, 0): 0.3, (0, 3): 0.03, (1, 2): 0.12})
    costing.costs.intact = intact
    model, prompts = ac.planted_circuit(TASK, seed=0), ac.Prompts.from_tokens([[1, 2, 3]])

    def smallest(named: Any) -> Any:
        return smallest_sets(model, prompts, named, "all", Thresholds(), ac.RunOptions())

    # 0.8 of 0.83 is lost with two heads; 0.88 is kept with three.
    assert smallest([(0, 3), (1, 0), (0, 1)]) == {
        "necessary": [(0, 1), (1, 0)],
        "sufficient": [(0, 1), (1, 0), (0, 3), (1, 2)],
    }
    assert "necessary" not in smallest([(0, 3)]), "it costs 0.03"
    assert smallest([(0, 1)]).keys() == {"sufficient"}, "all named heads are no smaller set"


def test_prompts_are_measured_in_batches_as_all_at_once(monkeypatch):
    """And a table counts the prompts that a control set was measured on."""
    model = ac.planted_circuit(TASK, seed=0, strength=0.6)
    prompts = TASK.sample(6, model.tokenizer, seed=0)
    scores = {"lookup": np.zeros((model.cfg.n_layers, model.cfg.n_heads))}
    sets = HeadSets(model, prompts, scores, Thresholds(alpha=1.0), 3, 0, ac.RunOptions())
    monkeypatch.setattr(evidence, "CPU_TOKENS", 1)  # asks after every prompt
    heads = [[head] for head in model.roles][:3] + [[(layer, 0)] for layer in range(model.cfg.n_layers)]
    whole, drawn = sets._accuracies(heads), [("random", draw, control) for draw, control in enumerate(heads)]
    tested = np.arange(len(prompts.targets)) % 4 / 3
    right = sets._right_beside("necessary", tested, drawn)
    known = ~np.isnan(right)
    np.testing.assert_array_equal(right[known], whole[known])
    partly = known.any(1) & ~known.all(1)
    assert partly.any()
    table = sets._table([(name, draw) for name, draw, _ in drawn], [*right]).where(kind="first")
    first = (prompts.targets["kind"] == "first").to_numpy()
    assert table.frame["n"].tolist() == known[:, first].sum(1).tolist()
    rows: Any = table.frame[table.frame["n"] > 0]
    assert ((rows["low"] <= rows["value"]) & (rows["value"] <= rows["high"])).all()
