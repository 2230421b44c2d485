"""What a result says of itself: its sentences, from a result by hand."""

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads.evidence import Evidence
from align_circuits.heads.heads_without_role import UnnamedHead
from align_circuits.heads.localization import TaskFacts
from align_circuits.heads.redundant_heads import RedundantHead
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import Verdict
from align_circuits.tables.provenance import Provenance


@pytest.fixture
def small() -> ac.Localization:
    """One head is named, with some evidence."""
    columns = ["kind", "ablated", "value", "low", "high", "n"]
    found = [("all", "nothing", 0.25, 0.2, 0.3, 4), ("first", "nothing", 0.75, 0.5, 0.875, 4)]
    ablations = ac.Table(pd.DataFrame(found, columns=columns).assign(metric="accuracy"), Provenance("localize"))
    rows = [(1, 2, "lookup", "score", 0.625), (1, 2, "lookup", "q", 0.03), (1, 2, "previous", "score", 0.125)]
    frame = pd.DataFrame(rows, columns=["layer", "head", "role", "metric", "value"]).assign(low=0.0, high=1.0, n=4)
    table = ac.Table(frame.assign(level="head"), Provenance("localize"))
    heads, prompts = {"lookup": ((1, 2),), "previous": ()}, ac.Prompts.from_tokens([[1, 2], [3, 4]])
    facts = TaskFacts(notes=("A < B.",))
    return ac.Localization(table, heads, Evidence(table, table, ablations), prompts, Thresholds(), facts)


def test_a_result_shows_itself(small):
    assert repr(small) == "Localization(lookup: L1H2; tested on 2 prompts)"
    none = replace(small, heads_by_role={"lookup": ()})
    assert repr(none) == "Localization(no head named; tested on 2 prompts)"
    assert small.summary == "lookup: L1H2.\nA token is correct in 0.75 [0.50, 0.88] of cases (2 test prompts).\nA < B."
    intact = "A token is correct in 0.75 [0.50, 0.88] of cases (2 test prompts)."
    assert none.summary == f"No head passes every test.\n{intact}\nA < B."
    verdict = Verdict("necessary", ((1, 2),), 8, 1.0, 0.5, 0.4, 0.6, (0.4, 0.6), {"layers": (0.9,)}, 0.1, 0.5)
    judged = replace(small, verdicts=(verdict,), task=TaskFacts(notes=("A < B.", "C.", "D.")))
    heads, sets = pd.read_html(StringIO(judged._repr_html_()))
    evidence = {"score": "0.62 [0.00, 1.00]", "corrected p": 0.03}
    assert heads.to_dict("records") == [{"head": "L1H2", "role": "lookup", **evidence}]
    accuracies = {"accuracy": "0.50 [0.40, 0.60]", "intact": 1.0}
    of_set = {"set": "all named", "verdict": "necessary", "ablated": "the set", **accuracies, "heads": "1 of 8: L1H2"}
    assert sets.to_dict("records") == [of_set]
    words = re.sub(r"\s+", " ", re.sub("<.*?>", "", judged._repr_html_()))
    assert words.startswith(intact) and words.endswith(
        "Caveat: A &lt; B. .summary has the whole result in words, with 2 more caveats."
    )
    page = none._repr_html_()
    assert f"No head passes every test.\n{intact}" in page and "A &lt; B." in page and "<table" not in page
    assert "Caveat" not in replace(small, task=TaskFacts())._repr_html_()
    with pytest.raises(KeyError, match="no role 'copying'"):
        small.heads("copying")


def test_members_of_a_group_are_told_by_how_they_were_found(small):
    def member(head: Any, number: int, single: bool) -> RedundantHead:
        return RedundantHead(head, number, 0.5, 0.1, 0.9, single)

    members = (member((1, 2), 1, True), member((0, 1), 1, False), member((0, 2), 2, False), member((0, 3), 3, False))
    grouped = replace(small, redundant={"lookup": members, "previous": ()})
    assert grouped.caveat_sentences == [
        "Also lookup, one for another: L0H1.",
        "Backups of lookup, once the others are ablated: L0H2 L0H3.",
        "A < B.",
    ]
    assert grouped.redundant_heads("lookup") == [(1, 2), (0, 1), (0, 2), (0, 3)]
    assert grouped.redundant_heads("previous") == [] and small.redundant_heads("lookup") == [(1, 2)]


@pytest.mark.parametrize(
    ("total", "of", "said"),
    [(16, {}, None), (15, {}, "33%"), (8, {}, "62%"), (8, {"role": "lookup"}, None), (8, {"smallest": True}, None)],
)
def test_a_large_share_of_the_model_is_said_to_be(small, total, of, said):
    """Of all named heads together."""
    heads = tuple((0, head) for head in range(5))
    verdict = Verdict("necessary", heads, total, 1.0, 0.5, 0.4, 0.6, (0.4, 0.6), {}, 0.1, 0.05, **of)
    summary = replace(small, verdicts=(verdict,)).summary
    assert ("of the model's" in summary) is (said is not None)
    assert said is None or f"The named heads are {said} of the model's" in summary


def test_verdicts_on_roles_are_told_by_whether_they_hold(small):
    def verdict(role: str, value: float, controls: Any) -> Verdict:
        return Verdict("necessary", ((1, 2),), 8, 1.0, value, 0.0, 1.0, (0.01, 1.0), controls, 0.1, 0.5, role=role)

    verdicts = (
        verdict("a", 0.95, {}),
        verdict("b", 0.5, {"unnamed": (0.8, float("nan"), 0.9)}),
        verdict("c", 0.5, {"unnamed": (0.4,)}),
    )
    assert replace(small, verdicts=verdicts, task=TaskFacts()).summary.split(" test prompts).\n")[1] == (
        "Necessary, role by role: b (accuracy 0.50 without L1H2; 0.80 to 0.90 without as many others).\n"
        "Not shown to be necessary, role by role: a (accuracy 0.95 without L1H2; this loses less than is needed, so no "
        "control sets were measured), c (accuracy 0.50 without L1H2; 0.40 without as many others)."
    )


def test_heads_that_stand_out_without_a_role_are_told_with_what_they_failed(small):
    def unnamed(head: Any, role: str, effect: float, high: bool, large: bool) -> UnnamedHead:
        interval = (effect - 0.1, effect + 0.1)
        return UnnamedHead(head, role, 0.5, ("it fell",), effect, interval, False, effect / 4, high=high, large=large)

    found = (
        unnamed((0, 1), "previous", 2.0, True, True),
        unnamed((0, 2), "lookup", 0.0, True, False),
        unnamed((1, 2), "previous", 1.0, True, False),
        unnamed((0, 3), "previous", 0.0, False, False),
    )
    caveats = replace(small, unnamed=found).caveat_sentences
    assert caveats == [
        "Large effect, but not named: L0H1 (+2.00 nats, 50% of the difference between clean and corrupted prompts; "
        "previous: it fell).",
        "High score, but not named: L0H2 for lookup.",
        "A < B.",
    ], "what has a role is not told again"
    none = replace(small, unnamed=found, heads_by_role={"lookup": (), "previous": ()})
    assert none.answer.startswith(
        "No head passes every test. Nearest: L0H2 (lookup: it fell), L0H1 (previous: it fell).\nA token is correct"
    )


def test_named_heads_that_fail_the_control_are_the_first_caveat_after_warnings(small):
    frame = small.table.frame
    control = frame.assign(metric="control", head=[2, 3, 4], role=["lookup", "lookup", "previous"])
    table = ac.Table(pd.concat([frame, control.assign(value=[0.1, 0.6, 0.1])]), small.table.provenance)
    failing = replace(small, table=table, heads_by_role={"lookup": ((1, 2), (1, 3)), "previous": ((1, 4),)})
    assert failing.caveat_sentences[0] == (
        "Heads named for lookup (L1H2) and previous (L1H4) score below 0.5 on the control: they follow something that "
        "it changes."
    )
    every = replace(failing, heads_by_role={"lookup": ((1, 2),), "previous": ()})
    assert every.caveat_sentences[0].startswith("All heads named for lookup (L1H2) score")
    assert replace(failing, heads_by_role={"lookup": ((1, 3),)}).caveat_sentences == ["A < B."]
