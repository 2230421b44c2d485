"""Names and verdicts, from tables written by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import refused
from scipy.special import stdtr

import align_circuits as ac
from align_circuits.heads.candidates import attending, attending_diffusely, causal_p_values, corrected
from align_circuits.heads.role_tests import RoleTests, diffuse_aligners, named_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import Verdict, verdict_of
from align_circuits.tables.intervals import proportion_change
from align_circuits.tables.provenance import Provenance

FOUND = {"score": 0.5, "attention": 0.3, "q": 0.05, "ablation": 0.01, "denoising": -0.2}
"""What a head just has to reach."""


def table_of(*rows: Any) -> ac.Table:
    """A table of role, metric, head of layer 1, value and lower end."""
    frame = pd.DataFrame(rows, columns=["role", "metric", "head", "value", "low"]).assign(layer=1, high=1.0, n=4)
    return ac.Table(frame, Provenance("localize"))


def scores_of(**by_metric: list[float]) -> ac.Table:
    rows = [(metric, head, value) for metric, values in by_metric.items() for head, value in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["metric", "head", "value"]).assign(level="head", layer=0, low=0, high=1, n=4)
    return ac.Table(frame, Provenance("score_heads"))


def test_candidates_attend_as_their_role_requires():
    scores = scores_of(
        **{"align_query": [0.9, 0.9, 0.4, 0.9], "align_query_attention": [0.5, 0.05, 0.5, 0.3]},
        **{"lookup": [0.1, 0.6, 0.1, 0.6], "lookup_attention": [0.0, 0.02, 0.0, 0.4]},
    )
    roles = ["align_query", "lookup"]
    assert attending(scores, roles, Thresholds()) == [((0, 0), "align_query"), ((0, 3), "lookup")]
    # Compared with attention to keys of aligners alone.
    assert attending_diffusely(scores, roles, Thresholds()) == [((0, 1), "align_query"), ((0, 3), "align_query")]
    assert attending_diffusely(scores, ["lookup"], Thresholds()) == []
    assert attending(scores, roles, Thresholds(), {"lookup": 0.9}) == [((0, 0), "align_query")], "hardly above chance"


@pytest.mark.parametrize(("of_effects", "first"), [((0.5, 0.001, 0.0), 0.02), ((0.0, 0.03, 0.0), 0.04)])
def test_p_values_are_corrected_in_each_family(of_effects, first):
    """A candidate's is the larger one of its attention and its effects."""
    p = {"lookup": np.array([[0.5, 0.01, 0.04]])}
    matters = {((0, head), "lookup"): value for head, value in enumerate(of_effects)}
    families = [[((0, 1), "lookup"), ((0, 2), "lookup")], [((0, 0), "lookup")]]
    assert corrected(p, families, matters) == {
        ((0, 1), "lookup"): pytest.approx(first),
        ((0, 2), "lookup"): pytest.approx(0.04),
        ((0, 0), "lookup"): 0.5,
    }
    assert corrected(p, [[], []], {}) == {}


def test_a_head_matters_by_either_effect():
    """Twice the smaller p-value, as `scipy` has it; at most 1."""
    values = np.array([[1.0, 2.0, 4.0, 3.0], [0.1, -0.1, 0.2, -0.2]])
    keys = pd.DataFrame({"level": "head", "layer": 0, "head": [0, 1], "kind": "all", "metric": "log_prob"})
    loss, gain = (
        ac.Table.from_prompts(keys, rows, np.ones((2, 4)), Provenance("patch_heads"), bounded=False)
        for rows in (-values, values[::-1] / 10)
    )
    p = causal_p_values((loss, gain), signs=(-1, 1))
    t = values[0].mean() / values[0].std(ddof=1) * 2  # no skew to correct for: these are symmetric but for the ends
    assert p[0, 0] == pytest.approx(2 * float(stdtr(3, -t)), rel=0.3)
    assert p[0, 1] == pytest.approx(p[0, 0]) and causal_p_values((loss,), signs=(-1,))[0, 1] > 0.4
    assert causal_p_values((loss, gain))[0, 0] == 1.0, "neither is above 0"
    assert (
        causal_p_values([ac.Table(keys.iloc[:0].assign(value=[], low=[], high=[], n=[]), Provenance("x"))], [1]) == {}
    )


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, None),
        ({"score": 0.49}, "score 0.49, below 0.50"),
        ({"score": 0.4966}, "score 0.497, below 0.50"),
        ({"attention": 0.09}, "diffuse: 0.09 of its attention on the keys, below 0.1"),
        ({"q": 0.051}, "corrected p = 0.051, above 0.05"),
        ({"q": 0.3, "p": 0.2}, "attention p = 0.2, above 0.05: its positional bias may explain it"),
        ({"q": 0.3, "p": 0.107}, "attention p = 0.11, above 0.05: no p-value on these prompts is smaller"),
        ({"q": 0.3, "causal_p": 0.2}, "causal p = 0.2, above 0.05: no loss by ablation or gain by patching is shown"),
        ({"q": 1.0}, "effect below 0.01 nats on the prompts that choose"),
        ({"q": np.nan}, "attends so on the prompts that test, but not on those that chose the candidates"),
        ({"ablation": 0.009}, "no effect of 0.01 nats with an interval above 0"),
        ({"low of ablation": 0.0}, "no effect of 0.01 nats with an interval above 0"),
        ({"causal_p": 0.2, "low of ablation": 0.0}, "no effect of 0.01 nats with an interval above 0"),
        ({"low of ablation": 0.0, "denoising": 0.01, "low of denoising": 0.001}, None),
        ({"attention of induction": 0.34}, "more attention to the keys of induction (0.34) than of lookup (0.30)"),
        ({"attention of induction": 0.33}, None),
    ],
)
def test_what_names_a_candidate_and_what_is_said_of_another(change, failed):
    """A score, attention that is the head's best, a corrected p-value, and an effect with an interval above zero."""
    found = {**FOUND, "low of ablation": 0.001, "low of denoising": -0.4, "attention of induction": 0.0, **change}
    tested = (*FOUND, *(metric for metric in ("p", "causal_p") if metric in change))
    rows = [("lookup", metric, 2, found[metric], found.get(f"low of {metric}")) for metric in tested]
    rows += [("induction", "attention", 2, found["attention of induction"], None), ("previous", "attention", 2, 0.9, 0)]
    candidates = [((1, 2), "lookup"), ((1, 2), "previous")]
    roles, table = ["lookup", "induction"], table_of(*rows)
    tests = RoleTests(table, roles, Thresholds(), smallest_p={"lookup": 0.1})
    assert named_heads(tests, candidates) == {"lookup": () if failed else ((1, 2),), "induction": ()}
    assert tests.failed((1, 2), "lookup") == ((failed,) if failed else ())


def test_named_heads_come_best_first():
    rows = [
        ("lookup", metric, head, value, 0.001)
        for head, score in enumerate((0.6, 0.9, 0.7))
        for metric, value in {**FOUND, "score": score}.items()
    ]
    candidates = [((1, head), "lookup") for head in range(3)]
    assert named_heads(RoleTests(table_of(*rows), ["lookup"], Thresholds()), candidates)["lookup"] == (
        (1, 1),
        (1, 2),
        (1, 0),
    )


def test_an_aligner_at_one_distance_needs_the_control_and_a_diffuse_one_is_told_apart():
    role, needed = "align_key", Thresholds()
    found = [{**FOUND, "attention": attention} for attention in (0.3, 0.05)]
    rows = [(role, metric, head, of_head[metric], 0.001) for head, of_head in enumerate(found) for metric in of_head]
    candidates: Any = [((1, 0), role), ((1, 1), role)]
    tests = RoleTests(table_of(*rows), [role], needed)
    named = named_heads(tests, candidates)
    assert named == {role: ((1, 0),)}
    assert diffuse_aligners(tests, candidates, named) == {role: ((1, 1),)}
    by_place = replace(tests, confounded=[role])
    assert named_heads(by_place, candidates) == {role: ()}, "there is no control"
    assert by_place.failed((1, 0), role) == ("no score on the control, below 0.5: it may attend at a fixed distance",)
    for control, kept in ((0.49, ()), (0.5, ((1, 0),))):
        controlled = table_of(*rows, (role, "control", 0, control, None))
        assert named_heads(replace(by_place, table=controlled), candidates) == {role: kept}


def sets_of(**shares: Sequence[float]) -> ac.Table:
    """Accuracy on twenty prompts of one target with each set ablated: the first of them are right."""
    named = [(name.replace("_", " "), share) for name, drawn in shares.items() for share in drawn]
    right = np.array([np.arange(20) < round(20 * share) for _, share in named], dtype=float)
    keys = pd.DataFrame([name for name, _ in named], columns=["ablated"])
    return ac.Table.from_prompts(keys, right, np.ones_like(right), Provenance("localize"))


def test_a_verdict_is_read_from_the_rows_of_its_claim():
    rows = {"nothing": [0.9], "named": [0.2], "rest": [0.7], "random": [0.8, 0.85], "rest_of_random": [0.3, 0.35]}
    rows |= {"matched": [0.75], "rest_of_matched": [0.25], "lookup": [0.6]}
    table, heads, needed = sets_of(**rows), [(0, 1), (0, 3)], Thresholds()
    cases: Any = (
        ("necessary", 0.2, {"layers": (0.8, 0.85), "scores": (0.75,)}, needed.min_drop),
        ("sufficient", 0.7, {"layers": (0.3, 0.35), "scores": (0.25,)}, needed.min_retained),
    )
    for claim, value, controls, least in cases:
        verdict = verdict_of(claim, heads, table, 6, needed, role="lookup")
        assert (verdict.intact, verdict.value, verdict.least) == pytest.approx((0.9, value, least))
        assert verdict.controls == {kind: pytest.approx(draws) for kind, draws in controls.items()}
        own: Any = table.frame[table.frame["value"].round(2) == value]
        assert (verdict.low, verdict.high) == (own["low"].item(), own["high"].item())
        assert (verdict.heads, verdict.total, verdict.alpha) == (((0, 1), (0, 3)), 6, needed.alpha)
        assert (verdict.claim, verdict.role, verdict.smallest) == (claim, "lookup", False)
    del rows["rest"], rows["rest_of_random"], rows["rest_of_matched"]
    verdict = verdict_of("sufficient", heads, sets_of(**rows), 2, needed)
    assert verdict.value == 0.9 and verdict.controls == {}, "with all heads named there is no rest"


def test_a_set_is_not_necessary_where_what_it_costs_may_be_nothing():
    """Of twenty prompts three are lost: more than a tenth, but [-.04, .36]; six are [.11, .52]."""
    for value, holds in ((0.85, False), (0.7, True)):
        verdict = verdict_of("necessary", [(0, 1)], sets_of(nothing=[1.0], named=[value]), 6, Thresholds())
        change = -1.0 * (np.arange(20) >= round(20 * value))
        low, high = proportion_change(change[None], np.ones((1, 20)), yes_or_no=True)
        assert verdict.lost == pytest.approx((-high.item(), -low.item()))
        assert verdict.large is holds and verdict.unclear is not holds
    few = verdict_of("necessary", [(0, 1)], sets_of(nothing=[1.0], named=[0.85]), 6, Thresholds())
    assert few.sentence == (
        "Not shown to be necessary: with the named 1 of 6 heads ablated, accuracy is 0.85 [0.60, 0.96] (a loss of 0.15 "
        "[-0.04, 0.36] may be none, so no control sets were measured: take more prompts)."
    )


def test_a_verdict_by_hand():
    def verdict(claim: Any, value: float, *draws: float, **changes: Any) -> Verdict:
        controls = {"layers": draws} if draws else {}
        least = 0.1 if claim == "necessary" else 0.9
        fields = {"heads": ((0, 1),), "total": 8, "intact": 0.8, "low": 0.0, "high": 1.0, "least": least, "alpha": 0.25}
        fields |= {"lost": (0.01, 1.0)}
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
    assert few.too_few and not verdict("necessary", 0.3, 0.6, 0.7, 0.8).too_few
    assert "too few" not in verdict("necessary", 0.3, 0.2, 0.7).sentence


@pytest.mark.parametrize("wrong", [{"fdr": 5}, {"alpha": -0.1}, {"share": 1.5}, {"effect": float("nan")}])
def test_thresholds_are_shares(wrong):
    refused("give a (share from 0 to 1|finite number)", Thresholds, **wrong)
