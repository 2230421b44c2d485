"""localize names the heads that have a role, none where there is none, and says what a task cannot establish."""

import json
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from align_circuits.heads.head_sets import Verdict, layer_matched, score_matched

import align_circuits as ac
from align_circuits.heads import head_sets, localize_heads
from align_circuits.heads.head_groups import GroupMember
from align_circuits.heads.thresholds import Thresholds
from align_circuits.report import save_localization
from align_circuits.tables.tables import Provenance
from align_circuits.validation.localize_ground_truth import of_random

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)
ROLES = TASK.roles


@pytest.fixture(scope="module")
def model():
    return ac.planted_circuit(TASK, seed=3)


@pytest.fixture(scope="module")
def circuit(model):
    # With three draws the smallest p-value is a quarter.
    return model, ac.localize(model, TASK, n=24, seed=1, draws=3, smallest=True, thresholds=Thresholds(alpha=0.25))


def test_every_planted_role_is_named_and_no_decoy(circuit):
    model, result = circuit
    for role in ROLES:
        assert set(result.heads(role)) == {head for head, true in model.roles.items() if true == role}, role


def test_named_heads_are_ablated_beside_as_many_others(circuit):
    _, result = circuit
    first = result.group_ablations.where(kind="first").frame.set_index("ablated")["value"]
    assert first["nothing"] == 1
    assert first["named"] < 0.5
    assert (first["random"] > 0.9).all()
    assert len(first["random"]) == 3
    assert first["rest"] < 1, "the boundary head has no role and is needed"
    assert {"align_query", "align_key", "lookup", "previous"} < set(first.index)
    assert (first["matched"] > 0.9).all() and len(first["matched"]) == 3
    assert not {"rest of random", "rest of matched"} & set(first.index), "the named heads keep too little by themselves"


def test_necessity_and_sufficiency_are_two_verdicts(circuit):
    """The boundary head has no role and is needed: the named heads are necessary, and suffice only together with it."""
    model, result = circuit
    named, boundary = set(result.named_heads), {head for head, kind in model.kinds.items() if kind == "boundary"}
    verdicts = {(verdict.claim, verdict.smallest): verdict for verdict in result.verdicts if verdict.role is None}
    necessary, sufficient = verdicts["necessary", False], verdicts["sufficient", False]
    assert set(necessary.heads) == set(sufficient.heads) == named
    assert necessary.holds and necessary.value < 0.5 < min(necessary.controls["layers"])
    assert not sufficient.holds and sufficient.value < 0.5
    smaller, enough = verdicts["necessary", True], verdicts["sufficient", True]
    assert smaller.holds and set(smaller.heads) < named
    assert enough.holds and enough.value > 0.9 and named | boundary <= set(enough.heads)
    assert "Necessary: with the named 5 of 24 heads ablated" in result.summary
    assert "Not shown to be sufficient: with all but the named 5 of 24 heads ablated" in result.summary


@pytest.mark.parametrize(("total", "said"), [(24, None), (16, None), (15, "33%"), (8, "62%")])
def test_a_large_share_of_the_model_is_said_to_be(circuit, total, said):
    """Five heads are named."""
    _, result = circuit
    result = replace(result, verdicts=tuple(replace(verdict, total=total) for verdict in result.verdicts))
    assert ("of the model's" in result.caveats) is (said is not None)
    assert said is None or f"The named heads are {said} of the model's" in result.summary


def test_only_all_named_heads_together_are_a_share_of_the_model():
    def share(**of: Any) -> list[str]:
        controls: Any = {}
        verdict = Verdict("necessary", ((0, 0), (0, 1)), 4, 1.0, 0.5, 0.4, 0.6, controls, 0.1, 0.05, **of)
        return localize_heads.Localization._share_sentences(SimpleNamespace(verdicts=(verdict,)))  # pyright: ignore

    assert share() and not share(role="lookup") and not share(smallest=True)


def test_a_verdict_is_read_from_the_rows_of_its_claim():
    rows = {"nothing": [0.9], "named": [0.2], "rest": [0.7], "random": [0.8, 0.85], "rest of random": [0.3, 0.35]}
    rows |= {"matched": [0.75], "rest of matched": [0.25], "lookup": [0.6]}
    values = [("all", name, value, value - 0.1, value + 0.1) for name, drawn in rows.items() for value in drawn]
    frame = pd.DataFrame(values, columns=["kind", "ablated", "value", "low", "high"]).assign(n=5)
    sets: Any = head_sets.HeadSets.__new__(head_sets.HeadSets)
    sets._kind, sets._thresholds, sets._heads = "all", Thresholds(), [(0, head) for head in range(6)]
    necessary, sufficient = sets.verdicts([(0, 1), (0, 3)], ac.Table(frame, Provenance("localize")))
    for verdict, value, controls in (
        (necessary, 0.2, {"layers": (0.8, 0.85), "scores": (0.75,)}),
        (sufficient, 0.7, {"layers": (0.3, 0.35), "scores": (0.25,)}),
    ):
        assert (verdict.intact, verdict.value, verdict.controls) == (0.9, value, controls)
        assert (verdict.low, verdict.high) == pytest.approx((value - 0.1, value + 0.1))
        assert (verdict.heads, verdict.total, verdict.alpha) == (((0, 1), (0, 3)), 6, Thresholds().alpha)
    assert (necessary.claim, necessary.least) == ("necessary", Thresholds().loss)
    assert (sufficient.claim, sufficient.least) == ("sufficient", Thresholds().kept)
    named: Any = frame[~frame["ablated"].str.startswith("rest")]
    without_rest = ac.Table(named, Provenance("localize"))
    _, sufficient = sets.verdicts(sets._heads, without_rest)
    assert sufficient.value == 0.9 and sufficient.controls == {}, "with all heads named there is no rest"


def test_the_heads_of_each_role_are_tested_alone(circuit):
    _, result = circuit
    of_roles = {verdict.role: verdict for verdict in result.verdicts if verdict.role is not None}
    assert set(of_roles) == {role for role, heads in result.heads_by_role.items() if heads}
    first = result.group_ablations.where(kind="first", draw=None).frame.set_index("ablated")["value"]
    for role, verdict in of_roles.items():
        assert verdict.claim == "necessary" and list(verdict.heads) == result.heads(role)
        assert verdict.value == pytest.approx(first[role]), role
    assert of_roles["align_query"].holds and min(of_roles["align_query"].controls["unnamed"]) > 0.9
    assert "Necessary, role by role: align_query (accuracy 0." in result.summary


def test_a_verdict_by_hand():
    def verdict(claim: Any, value: float, *draws: float, **changes: Any) -> Verdict:
        controls = {"layers": draws} if draws else {}
        least = 0.1 if claim == "necessary" else 0.9
        fields = {"heads": ((0, 1),), "total": 8, "intact": 0.8, "low": 0.0, "high": 1.0, "least": least, "alpha": 0.25}
        return Verdict(claim=claim, value=value, controls=controls, **{**fields, **changes})

    assert verdict("necessary", 0.3, 0.3, 0.4, 0.2).p == {"layers": 3 / 4}
    assert verdict("sufficient", 0.3, 0.3, 0.4, 0.2).p == {"layers": 3 / 4}
    assert verdict("sufficient", 0.3, 0.1, 0.2, 0.2).p == {"layers": 1 / 4}
    assert verdict("necessary", 0.3, 0.6, 0.7, 0.8).holds
    assert not verdict("necessary", 0.75, 0.8, 0.8, 0.8).holds, "the loss is small"
    assert not verdict("necessary", 0.3, 0.6, 0.7, 0.3).holds, "another set does as much"
    assert not verdict("necessary", 0.3).holds, "there is no control"
    assert verdict("sufficient", 0.72, 0.1, 0.1, 0.1).holds
    assert not verdict("sufficient", 0.71, 0.1, 0.1, 0.1).holds
    assert not verdict("sufficient", 0.0, 0.0, 0.0, 0.0, intact=0.0).holds
    assert not verdict("sufficient", 0.72, 0.1, 0.1, 0.72).holds
    few = verdict("necessary", 0.3, 0.6, 0.7)
    assert not few.holds and "(these are too few for p to reach 0.25)." in few.sentence
    assert "too few" not in verdict("necessary", 0.3, 0.2, 0.7).sentence


def test_controls_are_as_many_other_heads_of_the_same_layers_or_of_similar_scores():
    everywhere = [(layer, head) for layer in range(3) for head in range(4)]
    scores = {"a": np.zeros((3, 4)), "b": np.zeros((3, 4))}
    scores["a"][0, :2] = 0.9, 0.8
    scores["b"][2, 1:] = 0.7, 0.6, 0.5
    tested = [(0, 0), (2, 1)]
    others = [head for head in everywhere if head not in tested]
    for seed in range(20):
        by_layer = layer_matched(tested, others, np.random.default_rng(seed))
        assert sorted(layer for layer, _ in by_layer) == [0, 2] and not set(by_layer) & set(tested)
        by_score = score_matched(tested, others, scores, np.random.default_rng(seed))
        assert (0, 1) in by_score and len(set(by_score) & {(2, 2), (2, 3)}) == 1 and len(by_score) == 2
    alone = {"a": np.zeros((3, 4))}
    alone["a"][2, 0] = 1  # no other head scores like it
    for seed in range(5):
        [(layer, _)] = score_matched([(2, 0)], [(0, 0), (1, 0), (2, 3)], alone, np.random.default_rng(seed))
        assert layer == 2, "then one of the same layer"
    rest = everywhere[2:]
    assert set(layer_matched([(0, 0), (0, 1)], rest, np.random.default_rng(0))) == {(0, 2), (0, 3)}
    assert len(layer_matched(everywhere[:10], everywhere[10:], np.random.default_rng(0))) == 2


def test_control_sets_differ_from_each_other():
    """A set that is drawn twice would count twice in a p-value, which three sets cannot take below a quarter."""
    sets: Any = head_sets.HeadSets.__new__(head_sets.HeadSets)
    sets._heads = [(layer, head) for layer in range(4) for head in range(3)]
    sets._scores = {"a": np.linspace(0, 1, 12).reshape(4, 3)}
    for tested, most in (([(1, 0), (1, 1)], 20), ([(1, 0)], 11)):
        for kind, drawn in sets.controls(tested, 20, seed=0).items():
            distinct = {frozenset(heads) for heads in drawn}
            assert len(distinct) == len(drawn) == most, kind
            assert all(len(heads) == len(tested) and not heads & set(tested) for heads in distinct), kind
    assert [layer for [(layer, _)] in sets.controls([(1, 0)], 2, seed=0)["layers"]] == [1, 1], "nearest layers first"


def test_controls_of_other_layers_and_scores_come_where_there_are_too_few():
    """The nearest first."""
    sets: Any = head_sets.HeadSets.__new__(head_sets.HeadSets)
    sets._heads, sets._scores = [(layer, head) for layer in range(4) for head in range(2)], {"a": np.zeros((4, 2))}
    drawn = sets.controls([(0, 0)], 20, seed=0)["layers"]
    assert [layer for [(layer, _)] in drawn] == [0, 1, 1, 2, 2, 3, 3]
    others = sets._heads[1:]
    for width, layers in ((0, {0}), (1, {0, 1}), (2, {0, 1, 2})):
        found = [layer_matched([(0, 0)], others, np.random.default_rng(seed), width) for seed in range(30)]
        assert {layer for [(layer, _)] in found} == layers
    assert sets.controls(sets._heads, 20, seed=0) == {"layers": [], "scores": []}, "none is left"
    sets._heads, sets._scores = [(layer, 0) for layer in range(4)], {"a": np.array([[1.0], [0.9], [0.6], [0.4]])}
    assert sets.controls([(0, 0)], 20, seed=0)["scores"] == [[(1, 0)], [(2, 0)], [(3, 0)]]
    assert sets.controls([(0, 0)], 2, seed=0)["scores"] == [[(1, 0)], [(2, 0)]]
    scores = {"a": np.array([[0.5, 0.0], [0.75, 0.0]])}
    for seed in range(10):
        generator = np.random.default_rng(seed)
        assert score_matched([(0, 0)], [(0, 1), (1, 0)], scores, generator) == [(1, 0)], "as far as a score may lie"


@pytest.fixture
def stubbed(monkeypatch):
    """Sets of the heads of three layers of four, each of which costs so much accuracy when it is ablated."""

    class Sets(head_sets.HeadSets):
        def __init__(self) -> None:
            self._heads = [(layer, head) for layer in range(3) for head in range(4)]
            self._scores, self._thresholds = {"a": np.zeros((3, 4))}, Thresholds(alpha=0.25)
            self._tested, self._kind = ac.Prompts.from_tokens([[1, 2, 3]] * 2), "all"
            self._model = self._provenance = None
            self._whole: Any = {}
            self._costs: dict[Any, float] = {}

        @property
        def costs(self) -> dict[Any, float]:
            self._whole.clear()  # what was measured before
            return self._costs

        @costs.setter
        def costs(self, costs: dict[Any, float]) -> None:
            self._whole.clear()
            self._costs = costs

        def _accuracies(self, prompts, sets, rows=slice(None)) -> Any:
            right = np.array([1 - sum(self._costs.get(head, 0.0) for head in heads) for heads in sets])
            return right[:, None].repeat(len(prompts[rows].targets), 1), "fast"

        def _smallest(self, named) -> Any:
            return {"necessary": [(0, 0)], "sufficient": named} if len(named) == 2 else {"sufficient": self._heads}

    monkeypatch.setattr(head_sets, "provenance_of", lambda *_: Provenance("localize"))
    return Sets()


def test_which_sets_are_ablated(stubbed):
    roles, none = {"a": [(0, 1)], "b": []}, {"layers": [], "scores": []}

    def ablated(named: Any, controls: Any) -> list[str]:
        return stubbed.ablate(named, controls, roles).where(kind="all").frame["ablated"].tolist()

    assert ablated([], none) == ["nothing", "a"]
    assert ablated([(0, 1)], none) == ["nothing", "a", "named", "rest"]
    assert ablated(stubbed._heads, none) == ["nothing", "a", "named"], "there is no rest"
    stubbed.costs = {(0, 1): 0.5}
    one = {"layers": [[(1, 0)]], "scores": [[(1, 1)], [(1, 2)]]}
    assert ablated([(0, 1)], one) == [
        *("nothing", "a", "named", "rest", "random", "matched", "matched"),
        *("rest of random", "rest of matched", "rest of matched"),
    ]


def test_heads_of_a_role_are_tested_beside_heads_without_any(stubbed):
    stubbed.costs = {(0, 0): 0.5, (0, 1): 0.05}
    roles = {"a": [(0, 0)], "b": [(0, 1)], "c": []}
    necessary, needless = stubbed.verdicts_of_roles(roles, 6, seed=0)
    assert (necessary.role, necessary.heads, necessary.claim) == ("a", ((0, 0),), "necessary")
    assert necessary.holds and necessary.controls == {"unnamed": (1.0,) * 6} and not necessary.smallest
    assert needless.role == "b" and not needless.holds and needless.value == 0.95
    layers, scores = (stubbed.controls([(0, 0)], 3, 0, stubbed._heads[2:])[kind] for kind in ("layers", "scores"))
    stubbed.costs |= {scores[0][0]: 0.4, layers[0][0]: 0.3}
    controls = stubbed.verdicts_of_roles(roles, 3, seed=0)[0].controls["unnamed"]
    assert controls[:2] == pytest.approx((0.7, 0.6)), "one of the same layers, then one of similar scores"
    assert stubbed.verdicts_of_roles({"a": [(0, 0)], "b": [(0, 0)], "c": []}, 6, seed=0) == (), "all named heads"


def test_a_smallest_set_is_tested_where_it_is_another(stubbed):
    stubbed.costs = {(0, 0): 0.5, (0, 1): 0.2}
    (verdict,) = stubbed.verdicts_of_smallest([(0, 0), (0, 1)], 4, seed=0)
    assert (verdict.claim, verdict.heads, verdict.smallest) == ("necessary", ((0, 0),), True)
    assert verdict.holds and {name: len(drawn) for name, drawn in verdict.controls.items()} == {
        "layers": 4,
        "scores": 4,
    }
    assert stubbed.verdicts_of_smallest([(0, 0)], 4, seed=0) == (), "all heads are no small set"
    assert stubbed.verdicts_of_smallest([], 4, seed=0) == ()


@pytest.fixture
def small() -> ac.Localization:
    """A result by hand: one head is named, with some evidence."""
    columns = ["kind", "ablated", "value", "low", "high", "n"]
    found = [("all", "nothing", 0.25, 0.2, 0.3, 4), ("first", "nothing", 0.75, 0.5, 0.875, 4)]
    ablations = ac.Table(pd.DataFrame(found, columns=columns), Provenance("localize"))
    rows = [(1, 2, "lookup", "score", 0.625), (1, 2, "lookup", "q", 0.03), (1, 2, "previous", "score", 0.125)]
    frame = pd.DataFrame(rows, columns=["layer", "head", "role", "metric", "value"]).assign(low=0.0, high=1.0, n=4)
    table = ac.Table(frame.assign(level="head"), Provenance("localize"))
    return ac.Localization(
        *(table, {"lookup": ((1, 2),), "previous": ()}, table, table, ablations),
        *(ac.Prompts.from_tokens([[1, 2], [3, 4]]), {}, [], Thresholds(), {}),
        notes=("A < B.",),
    )


def test_a_result_shows_itself(small):
    assert repr(small) == "Localization(lookup: L1H2; tested on 2 x tokens)"
    none = replace(small, heads_by_role={"lookup": ()})
    assert repr(none) == "Localization(no head named; tested on 2 x tokens)"
    assert small.summary == "lookup: L1H2. A token is correct in 0.75 [0.50, 0.88] of cases. A < B."
    assert none.summary == "No head passes every test. A < B."
    (shown,) = pd.read_html(StringIO(small._repr_html_()))
    assert shown.iloc[0].dropna().to_dict() == {"role": "lookup", "head": "L1H2", "score": 0.62, "q": 0.03}
    assert "A &lt; B." in small._repr_html_() and none._repr_html_() == "<p>No head passes every test. A &lt; B.</p>"


def test_members_of_a_group_are_told_by_how_they_were_found(small):
    def member(head: Any, number: int, single: bool) -> GroupMember:
        return GroupMember(head, number, 0.5, 0.1, 0.9, single)

    members = (member((1, 2), 1, True), member((0, 1), 1, False), member((0, 2), 2, False), member((0, 3), 3, False))
    grouped = replace(small, groups={"lookup": members, "previous": ()})
    assert grouped.caveats == (
        "Also lookup, one for another: L0H1. Backups of lookup, once the others are ablated: L0H2 L0H3. A < B."
    )
    assert grouped.group("lookup") == [(1, 2), (0, 1), (0, 2), (0, 3)]
    assert grouped.group("previous") == [] and small.group("lookup") == [(1, 2)]


@pytest.mark.parametrize("intact", [1.0, 0.9])
def test_the_smallest_sets_are_beginnings_of_one_order(intact, monkeypatch):
    costs = {(0, 1): 0.5, (1, 0): 0.3, (0, 3): 0.03, (1, 2): 0.12}
    loss = {(0, 1): -3.0, (1, 0): -2.0, (0, 3): -1.0, (1, 2): -0.5}

    class Sets(head_sets.HeadSets):
        def _accuracies(self, prompts, sets, rows=slice(None)) -> Any:  # noqa: ARG002
            right = [intact - sum(costs.get(head, 0.0) for head in heads) for heads in sets]
            return np.array(right)[:, None].repeat(2, 1), "fast"

    table = SimpleNamespace(frame={"value": [loss.get((layer, head), 0.0) for layer in range(2) for head in range(4)]})
    monkeypatch.setattr(head_sets, "ablate_heads", lambda *_, **__: SimpleNamespace(where=lambda **_: table))
    prompts = ac.Prompts.from_tokens([[1, 2, 3]])
    sets: Any = Sets.__new__(Sets)
    sets._discovery, sets._kind, sets._thresholds, sets._options = prompts, "all", Thresholds(), ac.RunOptions()
    sets._model, sets._heads = None, [(layer, head) for layer in range(2) for head in range(4)]
    # 0.8 of 0.83 is lost with two heads; 0.88 is kept with three.
    assert sets._smallest([(0, 3), (1, 0), (0, 1)]) == {
        "necessary": [(0, 1), (1, 0)],
        "sufficient": [(0, 1), (1, 0), (0, 3), (1, 2)],
    }
    assert "necessary" not in sets._smallest([(0, 3)]), "it costs 0.03"
    for most in (1, 2, 7):
        assert [head_sets._first(most, lambda size, least=least: size >= least) for least in range(1, most + 1)] == [
            *range(1, most + 1)
        ]


def test_the_table_holds_every_head_and_the_tests_of_candidates(circuit):
    model, result = circuit
    heads = model.cfg.n_layers * model.cfg.n_heads
    for metric in ("score", "attention", "p", "control"):
        assert len(result.table.where(metric=metric)) == heads * len(ROLES)
    tested = result.table.where(metric="q").frame
    assert {("align_query", *result.heads("align_query")[0])} <= set(
        zip(tested["role"], tested["layer"], tested["head"], strict=True)
    )
    decoy = next(head for head, kind in model.kinds.items() if kind == "gold_without_output")
    rows = result.table.where(layer=decoy[0], head=decoy[1], role="align_query").frame.set_index("metric")["value"]
    assert rows["score"] == 1
    assert rows["q"] <= 0.05
    assert abs(rows["ablation"]) < 1e-6, "it looks like an aligner, and nothing depends on it"
    assert decoy not in result.named_heads


def test_a_loss_is_minus_a_change_and_candidates_are_corrected_together():
    def table(*rows: Any) -> ac.Table:
        columns = ["layer", "head", "kind", "metric", "value", "low", "high"]
        return ac.Table(pd.DataFrame(rows, columns=columns).assign(level="head", n=5), Provenance("localize"))

    metrics = ("lookup", "lookup_attention")
    scores = table(*[(0, head, "all", metric, 0.9, 0.8, 1.0) for metric in metrics for head in range(3)])
    change = table((0, 1, "all", "log_prob", -0.5, -0.7, -0.2), (0, 2, "all", "log_prob", -0.1, -0.3, 0.1))
    gain = table((0, 1, "all", "log_prob", 0.4, 0.1, 0.6), (0, 2, "all", "log_prob", 0.0, -0.1, 0.2))
    p, family = {"lookup": np.array([[0.5, 0.01, 0.04]])}, [((0, 1), "lookup"), ((0, 2), "lookup")]
    evidence = localize_heads._evidence(scores, None, p, [family], change, gain, ["lookup"], Provenance("localize"))
    keyed = evidence.frame.set_index(["metric", "head"])[["value", "low", "high"]]
    for metric, head, expected in (
        ("ablation", 1, (0.5, 0.2, 0.7)),
        ("ablation", 2, (0.1, -0.1, 0.3)),
        ("denoising", 1, (0.4, 0.1, 0.6)),
        ("denoising", 2, (0.0, -0.1, 0.2)),
        ("p", 0, (0.5, np.nan, np.nan)),
        ("q", 1, (0.02, np.nan, np.nan)),
        ("q", 2, (0.04, np.nan, np.nan)),
    ):
        assert keyed.loc[metric, head].tolist() == pytest.approx(expected, nan_ok=True), (metric, head)
    assert ("q", 0) not in keyed.index and ("control", 0) not in keyed.index


def test_numbers_come_from_prompts_that_had_no_part_in_the_search(circuit):
    model, result = circuit
    prompts = TASK.sample(24, model.tokenizer, seed=1)
    assert result.prompts.digest == prompts[12:].digest
    score = ac.score_heads(model, prompts[12:], ["lookup"]).grid("lookup")
    np.testing.assert_allclose(result.table.where(role="lookup", metric="score").grid("score"), score, rtol=1e-5)


def test_attention_of_named_heads_is_kept_for_the_first_prompt(circuit):
    _, result = circuit
    assert set(result.example_attention) == set(result.named_heads)
    head = result.heads("align_query")[0]
    relation = result.prompts[:1].relations["align_query"]
    for row, query in enumerate(relation.query.tolist()):
        attention = result.example_attention[head][result.example_positions.index(query)]
        assert attention.argmax() in relation.keys_of(row)
        torch.testing.assert_close(attention.sum(), torch.tensor(1.0))


def test_an_example_is_drawn_with_the_token_before_it():
    prompts = ac.Prompts.from_tokens([[5, 6, 7, 8, 9], [5, 6]])
    for column, positions in ((0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (3, [2, 3, 4])):
        example = torch.zeros_like(prompts.example)
        example[:, column:] = 1
        assert localize_heads._example_positions(replace(prompts, example=example)[:1]).tolist() == positions
    padded = replace(prompts, example=torch.zeros_like(prompts.example))[1:]
    assert localize_heads._example_positions(padded).tolist() == [3, 4], "no padding"


def test_a_localization_is_written_completely(circuit, tmp_path):
    _, result = circuit
    report = save_localization(result, tmp_path / "run")
    assert report == tmp_path / "run" / "report.html"
    assert result.summary[:40] in report.read_text(encoding="utf-8")
    again = ac.Table.load(tmp_path / "run")
    assert len(again) == len(result.table)
    assert again.provenance.settings["thresholds"]["fdr"] == 0.05
    assert len(ac.Table.load(tmp_path / "run" / "group_ablations")) == len(result.group_ablations)
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["verb"] == "localize"


def test_no_head_is_named_among_random_weights():
    rows = of_random(family="standard", gain=4.0, n=16, seed=0)
    assert sum(row["named"] for row in rows) == 0
    assert {row["role"] for row in rows} == set(ROLES)
    assert all(0 < row["p"] <= 1 for row in rows)


def test_thresholds_decide(circuit):
    model, _ = circuit
    strict = ac.localize(model, TASK, n=8, draws=0, thresholds=Thresholds(effect=100.0))
    assert strict.named_heads == []
    assert strict.summary == "No head passes every test."
    assert len(strict.example_attention) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, True),
        ({"score": 0.49}, False),
        ({"attention": 0.09}, False),
        ({"q": 0.051}, False),
        ({"ablation": 0.009}, False),
        ({"low of ablation": 0.0}, False),
        ({"low of ablation": 0.0, "denoising": 0.01, "low of denoising": 0.001}, True),
        ({"attention of induction": 0.34}, False),
        ({"attention of induction": 0.33}, True),
    ],
)
def test_what_names_a_candidate(change, named):
    """A score, attention that is the head's best, a corrected p-value, and an effect with an interval above zero."""
    found: dict[str, float] = {"score": 0.5, "attention": 0.3, "q": 0.05, "ablation": 0.01, "denoising": -0.2}
    found |= {"low of ablation": 0.001, "low of denoising": -0.4, "attention of induction": 0.0} | change
    rows = [("lookup", metric, found[metric], found.get(f"low of {metric}")) for metric in list(found)[:5]]
    rows += [("induction", "attention", found["attention of induction"], None), ("previous", "attention", 0.9, None)]
    frame = pd.DataFrame(rows, columns=["role", "metric", "value", "low"]).assign(layer=1, head=2, high=1.0, n=4)
    table, prompts = ac.Table(frame, Provenance("localize")), ac.Prompts.from_tokens([[1, 2, 3]])
    candidates = [((1, 2), "lookup"), ((1, 2), "previous")]
    found_heads = localize_heads._named(table, candidates, ["lookup", "induction"], Thresholds(), prompts)
    assert found_heads == {"lookup": ((1, 2),) if named else (), "induction": ()}


def test_named_heads_come_best_first():
    rows: list[Any] = []
    for head, score in ((0, 0.6), (1, 0.9), (2, 0.7)):
        found = {"score": score, "attention": 0.3, "q": 0.01, "ablation": 0.5, "denoising": 0.0}
        rows += [("lookup", metric, value, 0.1, 1, head) for metric, value in found.items()]
    frame = pd.DataFrame(rows, columns=["role", "metric", "value", "low", "layer", "head"]).assign(high=1.0, n=4)
    candidates = [((1, head), "lookup") for head in range(3)]
    table, prompts = ac.Table(frame, Provenance("localize")), ac.Prompts.from_tokens([[1, 2, 3]])
    named = localize_heads._named(table, candidates, ["lookup"], Thresholds(), prompts)
    assert named == {"lookup": ((1, 1), (1, 2), (1, 0))}


def test_one_distance_cannot_tell_an_aligner():
    """With one letter a phrase, a monotonic aligner looks a fixed distance back; a permuted one does not."""
    task = replace(TASK, phrase_len=1, n_examples=3)
    monotonic = ac.localize(ac.planted_circuit(task, seed=1), task, n=12, draws=0)
    assert monotonic.heads("align_query") == []
    assert monotonic.heads("lookup")
    assert "one distance" in monotonic.summary
    permuted = replace(task, alignment="permutation")
    model = ac.planted_circuit(permuted, seed=1)
    result = ac.localize(model, permuted, n=12, draws=0)
    assert result.heads("align_query") == [head for head, role in model.roles.items() if role == "align_query"]


def test_induction_heads_are_named_on_repeated_tokens():
    """The bundled model's; all prompts have their keys at the same positions, so tokens are renamed."""
    model, task = ac.load("toy-llama"), ac.RepeatedTokensTask(length=20)
    result = ac.localize(model, task, n=16, draws=0)
    scores = ac.score_heads(model, task.sample(16, model.tokenizer, seed=7), ["induction_attention"])
    best = scores.top("induction_attention", 1).frame.iloc[0]
    assert (best["layer"], best["head"]) in result.heads("induction")
    assert "same positions" not in result.summary
    assert not any(verdict.smallest for verdict in result.verdicts), "the smallest sets are looked for on request"


def test_diffuse_aligners_are_told():
    """At this strength the head that aligns keys keeps .07 of its attention on the aligned symbol, and has effect."""
    task = replace(TASK, n_examples=3)
    model = ac.planted_circuit(task, seed=0, strength=0.35)
    result = ac.localize(model, task, n=16, draws=0)
    (aligner,) = (head for head, role in model.roles.items() if role == "align_key")
    assert aligner in result.diffuse_aligners["align_key"] and aligner not in result.heads("align_key")
    assert f"Aligned but diffuse (align_key): L{aligner[0]}H{aligner[1]}" in result.summary
    attention = result.table.where(metric="attention", role="align_key").grid("attention")
    assert attention[aligner] < result.thresholds.attention


def test_few_symbols_cannot_establish_an_aligner():
    task = replace(TASK, x_len=3, n_examples=2)
    result = ac.localize(ac.planted_circuit(task, seed=0), task, n=8, draws=0)
    assert result.heads("align_query") == []
    assert "3 input symbols have 6 orders" in result.summary


def test_64_prompts_are_sampled_by_default(model, monkeypatch):
    asked = []

    def sample(_, n: int, *__: Any, **___: Any) -> None:
        asked.append(n)
        raise InterruptedError

    monkeypatch.setattr(ac.Seq2SeqTask, "sample", sample)
    with pytest.raises(InterruptedError):
        ac.localize(model, TASK)
    assert asked == [64]


def test_too_few_prompts_are_refused(model):
    for n in (4, 7):
        with pytest.raises(ValueError, match=f"n={n}: give at least 8"):
            ac.localize(model, TASK, n=n)


def test_bad_input_is_refused(circuit):
    model, result = circuit
    with pytest.raises(ValueError, match="draws=-1: give the number of sets"):
        ac.localize(model, TASK, n=8, draws=-1)
    with pytest.raises(KeyError, match="no role 'copying'"):
        result.heads("copying")
