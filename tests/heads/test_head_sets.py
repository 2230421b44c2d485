"""Sets of heads ablated together: which are measured, beside which others, and what is said of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused

import align_circuits as ac
from align_circuits.heads import head_sets
from align_circuits.heads.head_sets import HeadSets, ablate_together, smallest_sets
from align_circuits.heads.thresholds import Thresholds
from align_circuits.tables.provenance import Provenance

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=2)
HEADS = [(layer, head) for layer in range(3) for head in range(4)]
BOTH: Any = ("necessary", "sufficient")


@pytest.fixture
def costing(monkeypatch):
    """Sets of the heads of three layers of four, each of which costs so much accuracy when it is ablated."""
    monkeypatch.setattr(head_sets, "provenance_of", lambda *_: Provenance("localize"))

    def right(_: Any, prompts: Any, sets: Any, rows: slice = slice(None), **__: Any) -> Any:
        values = np.array([costs.intact - sum(costs.of.get(head, 0.0) for head in heads) for heads in sets])
        return values[:, None].repeat(len(prompts[rows].targets), 1), "fast"

    def sets(of: dict, draws: int = 20) -> HeadSets:
        costs.of = of
        model: Any = ac.planted_circuit(TASK, seed=0, n_layers=4)
        monkeypatch.setattr(head_sets, "heads_of", lambda _: HEADS)
        prompts, scores = ac.Prompts.from_tokens([[1, 2, 3]] * 40), {"a": np.zeros((3, 4))}
        return HeadSets(model, prompts, scores, Thresholds(alpha=0.25), draws, 0, ac.RunOptions())

    costs = SimpleNamespace(intact=1.0, of={})
    monkeypatch.setattr(head_sets, "right_ablated", right)
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
    monkeypatch.setattr(head_sets, "ablate_heads", lambda *_, **__: SimpleNamespace(where=lambda **_: table))
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
    monkeypatch.setattr(head_sets, "CPU_TOKENS", 1)  # asks after every prompt
    heads = [[head] for head in model.roles][:3] + [[(layer, 0)] for layer in range(model.cfg.n_layers)]
    whole, drawn = sets._accuracies(heads), [("random", draw, control) for draw, control in enumerate(heads)]
    tested = np.arange(len(prompts.targets)) % 4 / 3
    right = sets._right_beside("necessary", tested, drawn)
    known = ~np.isnan(right)
    np.testing.assert_array_equal(right[known], whole[known])
    assert (known.any(1) & ~known.all(1)).any()
    table = sets._table([(name, draw) for name, draw, _ in drawn], [*right]).where(kind="first")
    assert table.frame["n"].tolist() == known[:, (prompts.targets["kind"] == "first").to_numpy()].sum(1).tolist()
    rows: Any = table.frame[table.frame["n"] > 0]
    assert ((rows["low"] <= rows["value"]) & (rows["value"] <= rows["high"])).all()


def test_the_heads_of_a_planted_circuit_are_needed_and_suffice():
    """Beside a loop that ablates each set on its own; heads without a part in the circuit do neither."""
    task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)
    model = ac.planted_circuit(task, seed=0)
    prompts = task.sample(24, model.tokenizer, seed=1)
    of_circuit = ("align_query", "align_key", "lookup", "boundary", "previous")
    parts = [head for head, kind in model.kinds.items() if kind in of_circuit]
    table, verdicts = ablate_together(model, prompts, parts, seed=2)
    assert [(verdict.claim, verdict.holds) for verdict in verdicts] == [("necessary", True), ("sufficient", True)]
    assert all(len(draws) == 20 for verdict in verdicts for draws in verdict.controls.values())
    baseline = ac.ablation_baseline(model, prompts)
    for name, heads in {"nothing": [], "named": parts, "rest": [h for h in model.kinds if h not in parts]}.items():
        edits = [ac.Ablate(heads, how="mean", baseline=baseline)] if heads else []
        alone = ac.evaluate(model, prompts, edits=edits).where(metric="accuracy", kind="first", predictor="model")
        assert table.where(ablated=name, kind="first").frame["value"].item() == pytest.approx(alone.frame["value"][0])
    assert table.provenance.verb == "ablate_together"
    idle = [head for head in model.kinds if head not in parts][:2]
    without_idle, of_idle = ablate_together(model, prompts, idle)
    assert not any(verdict.large for verdict in of_idle)
    rows = {"ablated": "named", "kind": "first"}
    fall = (table.where(**rows) - without_idle.where(**rows)).frame.iloc[0]
    assert -1 <= fall["low"] < fall["value"] < fall["high"] < 0, "a difference of accuracies lies in [-1, 1]"
    assert (fall["low"], fall["high"]) == pytest.approx((-verdicts[0].lost[1], -verdicts[0].lost[0]))


@pytest.mark.parametrize(
    ("heads", "count", "more", "said"),
    [
        ([], 4, {}, "0 of 24 heads: give at least one, and not all"),
        (["L0H0"], 4, {"n_controls": -1}, "n_controls=-1: give the number of sets of random heads"),
        (["L9H0"], 4, {}, "L9H0"),
        (["L0H0"], 1, {}, "1 of at least two prompts: give dozens"),
    ],
)
def test_a_wrong_set_is_refused(heads, count, more, said):
    model = ac.planted_circuit(TASK, seed=0)
    prompts = TASK.sample(count, model.tokenizer, seed=1)
    refused(said, ablate_together, model, prompts, heads, **more)
