"""Claims about trained circuits can fail, and a model that did not learn its circuit is shown and counted."""

from typing import Any

import pandas as pd
import pytest

from align_circuits.localizers.benchmarked_head_methods import METHODS
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES
from align_circuits.papers.localizer_zoo import BY_SCORE, overview
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.validation.circuits_in_trained_models import (
    BEFORE,
    ENOUGH,
    MISSED,
    REACHED,
    TRAINED_ZOO,
    TrainedZoo,
    trained_task,
)

SEEDS = range(10)


def table_of(reached=1.0, ranked=1.0, false=0.0, missed=()):
    """A table of models that all reach and score the same, but for those of `missed`, which do not align."""
    training = []
    for seed in SEEDS:
        for name in (*ENOUGH, *(f"another head, {role}" for role in CIRCUIT_ROLES), "roles exchanged"):
            metric, _, role = name.partition(", ")
            value = reached if name in ENOUGH else 0.1
            if seed in missed and name == "interchange accuracy, align_key":
                value = 0.5
            training.append({"metric": metric, "role": role or "all", "value": value, "seed": seed})
    scored = [
        {"method": method, "metric": metric, "role": role, "value": value, "seed": seed, "steps": steps}
        for seed in SEEDS
        for steps in (5, 0)
        for method in METHODS
        for role in CIRCUIT_ROLES
        for metric, value in (
            ("auroc", ranked if steps else 0.5),
            ("recall_at_size", ranked if steps else 0.0),
            *((("recall", float(steps > 0)), ("false_discoveries", false)) if method.startswith("localize") else ()),
        )
    ]
    scored += [
        {"method": BY_SCORE, "metric": "false_discoveries", "role": role, "value": 0.5, "seed": seed, "steps": 5}
        for seed in SEEDS
        for role in CIRCUIT_ROLES
    ]
    rows = {"train_one": pd.DataFrame(training).assign(method="training"), "compare_trained": pd.DataFrame(scored)}
    return Table(TRAINED_ZOO.study.summarize(TrainedZoo(), rows), Provenance("test"))


def verdicts(table, word=""):
    return {check.verdict for check in TRAINED_ZOO.check(table) if word in check.claim}


@pytest.mark.slow
def test_claims_hold_where_all_is_as_claimed_and_fail_where_it_is_not():
    checks = list(TRAINED_ZOO.check(table_of()))
    assert {check.verdict for check in checks} == {"holds"} and len(checks) == 5 + len(METHODS) + 4
    assert verdicts(table_of(ranked=0.5), "rank above") == {"fails"}
    assert verdicts(table_of(false=0.5), "that it does not have") == {"fails"}
    assert verdicts(table_of(reached=0.96), "Exchanging") == {"holds"}
    assert verdicts(table_of(reached=0.8), "Exchanging") == {"fails"}


def test_models_that_did_not_learn_are_counted_and_left_out_of_the_methods():
    table = table_of(missed=range(3))
    assert [len(set(table.where(trait=trait, method="training").frame["at"])) for trait in (REACHED, MISSED)] == [7, 3]
    assert set(table.where(trait=BEFORE, metric="auroc").frame["at"]) == {str(seed) for seed in SEEDS}
    (of_key,) = (check for check in TRAINED_ZOO.check(table) if "align_key does" in check.claim)
    assert of_key.measured.value == pytest.approx(0.7), "of all models"
    assert set(table.where(trait="circuits", at=REACHED, metric="auroc").frame["n"]) == {7}
    assert overview(table, REACHED).loc["EAP", "AUROC, lookup"] == 1
    drawn: Any = TRAINED_ZOO.draw(table)["what training reached"]
    assert len(drawn.data) == len(SEEDS)
    none = table_of(reached=0.5)
    assert len(list(TRAINED_ZOO.check(none))) == 5, "no model has known heads: nothing is claimed of methods"
    assert len(TRAINED_ZOO.draw(none)) == 2


def test_tasks_differ_in_an_alignment_that_no_distance_follows():
    aligned = {trained_task(seed).aligned for seed in range(20)}
    assert len(aligned) > 3
    for places in aligned:
        distances = [2 * phrase - place for phrase, place in enumerate(places)]
        assert max(distances.count(each) for each in distances) <= 2
