"""The comparison of methods that find edges: its circuits, and claims that can fail."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.localizers.benchmarked_edge_methods import EDGE_METHODS
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.validation.localizer_edges import EDGE_ZOO, Edges, overview


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
