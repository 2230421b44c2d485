"""Evidence about heads: what a table says of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads.evidence import evidence_table
from align_circuits.tables.provenance import Provenance

NONE = ac.Table(pd.DataFrame(columns=["layer", "head", "kind", "metric", "value", "low", "high", "n"]), Provenance(""))


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
