"""Every method finds the edges of a plain circuit; methods of other packages join by their entry points."""

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.circuits.pruning import prune_edges
from align_circuits.localizers import edge_methods, registry
from align_circuits.localizers.comparison import agreement
from align_circuits.localizers.edge_methods import EDGE_METHODS, pruning
from align_circuits.localizers.registry import edge_localizer, edge_method_names
from align_circuits.models.planted.model import planted_circuit
from align_circuits.papers.validation.localizer_edges import EDGE_ZOO, Edges, known_edges, overview
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import exchanged

TASK = Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3, alignment="permutation")


@pytest.fixture(scope="module")
def circuit():
    model = planted_circuit(TASK, seed=0, n_layers=4, n_ctx=96, strength=0.7, decoys=("random", "off_by_one"))
    return model, Pair(*exchanged(TASK.sample(2, model.tokenizer, seed=0)))


@pytest.mark.parametrize("name", EDGE_METHODS)
def test_a_method_finds_the_edges_of_a_plain_circuit(circuit, name):
    model, pair = circuit
    frame = edge_localizer(name)(model, pair).frame
    scores = frame.set_index(["sender", "receiver"])["value"].to_dict()
    positive, negative = known_edges(model)
    assert set(scores) >= {*positive, *negative}
    assert agreement({edge: abs(value) for edge, value in scores.items()}, [*positive], negative)["auroc"] > 0.99
    if "EAP" not in name:  # whose signs mean nothing where the model is sure
        assert all(scores[edge] < 0 for edge in positive), "the circuit needs them"


def test_pruning_scores_are_the_largest_cuts_that_keep_an_edge(circuit, monkeypatch):
    model, pair = circuit
    coarse = prune_edges(model, replace(pair, direction="noise"), cut=0.4).frame["value"] >= 0.4
    monkeypatch.setattr(edge_methods, "CUTS", (0.4, 0.01))
    scores = pruning(model, pair).frame["value"].to_numpy()
    assert set(scores) == {0.0, -0.01, -0.4}
    assert np.array_equal(scores == -0.4, coarse)


def test_other_packages_add_methods(monkeypatch):
    entry = EntryPoint("mine", f"{__name__}:circuit", registry.EDGE_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [entry] if group == entry.group else [])  # noqa: ARG005
    assert edge_method_names() == [*EDGE_METHODS, "mine"]
    assert "mine" not in registry.method_names()
    assert edge_localizer("mine") is circuit


def test_the_experiment_takes_circuits_of_one_shape_and_checks_what_was_measured():
    assert len(Edges(100).seeds) == EDGE_ZOO.scales["cpu"].circuits
    rows = [
        {"method": method, "shared": shared, "metric": metric, "seed": seed, "value": value + 0.01 * seed}
        for method, value in {**dict.fromkeys(EDGE_METHODS, 0.97), "random order": 0.02}.items()
        for shared in ("all", "alone", "5 or more")
        for metric in (
            *("auroc", "average_precision", "recall_at_size", "circuit_performance_ratio", "circuit_model_distance"),
            *("kept at 0.1", "kept at 0.01", "false, kept at 0.01", "cost"),
        )
        for seed in (0, 1)
    ]
    table = Table(EDGE_ZOO.study.summarize(Edges(2), {"compare_edges": pd.DataFrame(rows)}), Provenance("test"))
    checks = {check.claim: check for check in EDGE_ZOO.check(table)}
    assert len(checks) == 15 and all(np.isfinite(check.measured.value) for check in checks.values())
    assert checks["EAP finds the edges (average precision)"].measured.value == pytest.approx(0.975)
    assert checks["EAP finds the edges (average precision)"].control.value == pytest.approx(0.025)
    distance = checks["EAP-IG (inputs) comes close to edge patching (average precision, difference)"]
    assert (distance.measured.value, distance.control.value) == pytest.approx((0, -0.95))
    assert not checks["ACDC keeps few others, cut 0.01 (share)"].met
    assert list(overview(table).index) == [*EDGE_METHODS, "random order"]
    others: Any = table.frame.query("method != 'ACDC'")
    assert not EDGE_ZOO.check(Table(others, table.provenance))
