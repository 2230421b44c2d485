"""What is counted of methods on redundant circuits, how thresholds are chosen, and claims that can fail."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.localizers.benchmarked_head_methods import METHODS
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES
from align_circuits.papers.localizer_zoo import GROUPS
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.validation import redundancy, redundant_circuits
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.redundancy import (
    BACKUP,
    COPY,
    DECOY,
    ENOUGH,
    NAMED,
    ONE_BY_ONE,
    OTHER,
    PRIMARY,
    RANKED,
    REDUNDANCY,
    REDUNDANCY_TUNING,
    SINGLE,
    Models,
    class_of,
    f1,
    measured_by_model,
    overview,
    reached_enough,
    recall,
    rows_of,
    thresholds_on,
)
from align_circuits.validation.redundant_circuits import train_redundant_circuit

HEADS = {
    "a": (SINGLE, "previous"),
    "b": (SINGLE, "lookup"),
    "c": (COPY, "align_key"),
    "d": (COPY, "align_key"),
    "e": (PRIMARY, "align_query"),
    "f": (BACKUP, "align_query"),
    "g": (DECOY, None),
    "h": (OTHER, None),
    "i": (OTHER, None),
}


def scored(scores, method="ablation, mean", seed=0) -> Any:
    """Rows of one method and model: a score for each head, of all roles, or a mapping from roles to some."""
    return pd.DataFrame(
        {"method": method, "head": head, "for": role, "seed": seed, "kind": kind, "role": own}
        | {"value": float(scores.get((head, role), scores.get(head, 0)))}
        for head, (kind, own) in HEADS.items()
        for role in CIRCUIT_ROLES
    )


def threshold(method, value):
    return pd.DataFrame([{"method": method, "metric": "threshold", "value": value}])


def value(rows: Any, metric, of="all", role="all"):
    (found,) = rows[(rows["metric"] == metric) & (rows["of"] == of) & (rows["role"] == role)]["value"]
    return float(found)


def test_what_is_named_is_counted_by_class_and_role():
    rows = measured_by_model(scored({"a": 3, "c": 2, "g": 2, "h": 1}), threshold("ablation, mean", 2.0))
    assert value(rows, "named", SINGLE) == 0.5 and value(rows, "named", SINGLE, "previous") == 1
    assert value(rows, "named", COPY) == value(rows, "named of 2", COPY) == 0.5
    assert value(rows, "named", DECOY) == 1
    assert value(rows, "named", OTHER) == value(rows, "named", BACKUP) == 0
    assert value(rows, "precision") == pytest.approx(2 / 3)
    assert "false_discoveries" not in set(rows["metric"]), "ablation names no roles"
    # Of the role previous the only head scores higher than all three without a role; lookup's ties with one of them.
    assert value(rows, "auroc", role="previous") == 1
    assert value(rows, "auroc", role="lookup") == pytest.approx(0.5 / 3)


def test_a_name_for_another_role_is_false_but_its_head_has_one():
    scores = {("a", "previous"): 1, ("b", "previous"): 1, ("g", "lookup"): 1}
    rows = measured_by_model(scored(scores, "attention"), threshold("attention", 0.5))
    assert value(rows, "false_discoveries") == value(rows, "precision") == pytest.approx(2 / 3)
    assert value(rows, "named", SINGLE) == 1


def test_a_threshold_has_the_highest_mean_f1_over_models():
    """With 2 all six heads and no other in the first model, and half of them in the second; with 1 decoys too."""
    first = scored({**dict.fromkeys("abcdef", 2), "g": 1, "h": 1, "i": 1})
    second = scored({**dict.fromkeys("abc", 2), **dict.fromkeys("defghi", 1)}, seed=1)
    chosen: Any = thresholds_on(pd.concat([first, second])).set_index("metric")["value"]
    assert chosen["threshold"] == 2 and chosen["f1"] == pytest.approx((1 + 2 * 3 / 9) / 2)
    kept: Any = thresholds_on(pd.concat([first, second]).assign(method="localize")).set_index("metric")["value"]
    assert kept["threshold"] == 1, "it names heads by itself"


def test_classes_are_those_of_the_assignment(monkeypatch):
    monkeypatch.setattr(redundant_circuits, "what_was_reached", lambda *_, **__: {})
    model = train_redundant_circuit(trained_task(1), 1, steps=0)
    kinds = [class_of(model, head) for head in model.kinds]
    copies = max(len(heads) for heads in model.assignment.copies.values())
    assert {kind: kinds.count(kind) for kind in (SINGLE, COPY, PRIMARY, BACKUP, DECOY)} == {
        SINGLE: 2,
        COPY: copies,
        PRIMARY: 1,
        BACKUP: 1,
        DECOY: 2,
    }
    grids = {role: np.full((4, 4), float(place)) for place, role in enumerate(CIRCUIT_ROLES)}
    rows = list(rows_of(model, "attention", grids))
    assert len(rows) == 64 and {row["for"]: row["value"] for row in rows} == dict(
        zip(CIRCUIT_ROLES, range(4), strict=True)
    )


def test_a_model_must_reach_every_measure():
    reached = {f"{name}, lookup": 1.0 for name in ENOUGH} | {"role dropped, lookup": 0.0}
    assert reached_enough(reached)
    assert all(not reached_enough(reached | {f"{name}, previous": least - 0.01}) for name, least in ENOUGH.items())


SEEDS = range(10)


def table_of(ours=1.0, single=0.0, decoys=0.0, of_attention=1.0, pruned=0.5, auroc=0.9):
    """A table in which localize with redundant heads names a share of redundant heads, and others as told."""
    rows = []
    for method in METHODS:
        redundant = ours if method == GROUPS else pruned if method in ("pruning", "learned masks") else single
        for seed in SEEDS:
            named = {SINGLE: 1.0, COPY: redundant, PRIMARY: redundant, BACKUP: redundant, OTHER: 0.0}
            named[DECOY] = of_attention if method == "attention" else decoys
            false = of_attention if method == "attention" else decoys
            about = {"method": method, "seed": seed, "role": "all"}
            rows += [about | {"metric": "named", "of": of, "value": share} for of, share in named.items()]
            rows += [
                about | {"metric": "named", "of": of, "value": redundant, "role": "lookup" if seed else "previous"}
                for of in (COPY, BACKUP)
            ]
            rows += [about | {"metric": "false_discoveries", "of": "all", "value": false}]
            rows += [about | {"metric": "precision", "of": "all", "value": 1.0}]
            area = auroc if method != GROUPS else 0.95
            area = 0.5 if method in ("attention", "head detector") else area
            rows += [about | {"metric": "auroc", "of": "all", "role": "lookup", "value": area + seed / 1000}]
        f1 = 0.5 + 0.1 * (method == ONE_BY_ONE[1]) + 0.2 * (method == "EAP")
        rows += [{"method": method, "metric": "f1", "of": "all", "role": "all", "seed": -1, "value": f1}]
    return Table(pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1), Provenance("test"))


def test_claims_hold_where_all_is_as_claimed_and_fail_where_it_is_not():
    def verdicts(word, **given):
        return {check.verdict for check in REDUNDANCY.check(table_of(**given)) if word in check.claim}

    checks = REDUNDANCY.check(table_of())
    assert len(checks) == 21

    def told(word):
        return {check.verdict for check in checks if word in check.claim}

    for word in ("names more of", "promises", "names decoys", "the best other method", "attention ranks heads better"):
        assert told(word) == {"holds"}
    (copies,) = (check for check in checks if "previous" in check.claim and "copies" in check.claim)
    assert copies.verdict == "holds" and len(copies.measured.seeds) == len(SEEDS) - 1, "the first has none such"
    assert told("learned masks names the") == told("EAP-IG names the") == {"fails"}
    assert verdicts("localize with redundant heads names more of", ours=0.1) == {"fails"}
    assert verdicts("learned masks names the", pruned=1.0) == {"holds"}
    assert verdicts("pruning names more of", pruned=0.0) == {"fails"}
    assert verdicts("promises", decoys=0.5) == {"fails"}
    assert verdicts("Attention names decoys", of_attention=0.1) == {"fails"}
    assert verdicts("the best other method", auroc=0.99) == {"fails"}
    assert verdicts("redundant heads names the backups", single=1.0) == {"no evidence"}


def test_recall_counts_heads_and_f1_its_mean_with_precision():
    table = table_of(ours=0.5)  # of three copies
    np.testing.assert_allclose(recall(table, GROUPS), (2 + 3 * 0.5 + 0.5 + 0.5) / 7)
    np.testing.assert_allclose(f1(table, GROUPS), 2 * 4.5 / (4.5 + 7))
    two: Any = table.frame[
        (table.frame["metric"] == "named") & (table.frame["of"] == COPY) & (table.frame["role"] == "all")
    ]
    both = Table(pd.concat([table.frame, two.assign(metric="named of 2")]), table.provenance)
    np.testing.assert_allclose(recall(both, GROUPS), (2 + 2 * 0.5 + 0.5 + 0.5) / 6)


def test_figures_order_methods_by_f1_and_have_those_of_other_packages():
    table = table_of()
    peer: Any = table.frame[table.frame["method"] == "EAP"].assign(method="a peer")
    both = Table(pd.concat([table.frame, peer.replace({"value": {0.7: 0.9}})]), table.provenance)
    drawn: Any = REDUNDANCY.draw(both)
    assert drawn[NAMED].data[0].y[0] == "a peer" and drawn[NAMED].data[0].y[1] == "EAP"
    assert set(drawn[RANKED].data[0].y) == set(METHODS), "the peer has no AUROC in planted circuits"
    shown = overview(both).loc[GROUPS]
    assert shown["lookup"] == shown["copy"] == 1 and shown["false discoveries"] == 0 and np.isnan(shown["cost"])


def test_thresholds_of_another_table_are_used(monkeypatch):
    kept = pd.DataFrame([{"method": "attention", "metric": "threshold", "value": 7.0}])
    monkeypatch.setattr(redundancy, "kept_thresholds", lambda *_: kept)
    reached = pd.DataFrame({"metric": ["accuracy"] * 2, "value": [1.0, 0.5], "seed": [0, 1]})
    scores = pd.concat([scored({"a": 8, "b": 6}, "attention", seed) for seed in (0, 1)])
    table = REDUNDANCY.study.summarize(Models(0, 2, tuned="cpu"), {"train_one": reached, "score_one": scores})
    assert set(table[table["metric"] == "precision"]["seed"]) == {0}, "the second model did not reach enough"
    assert value(table[table["method"] == "attention"], "named", SINGLE) == 0.5
    assert not REDUNDANCY_TUNING.claims
