"""Abrupt learning (Reddy, 2024): both solutions at once, and as many labels as pairs, Figs. A.1 and A.5."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.ensemble_runs import (
    CPU,
    PAPER,
    SMOKE,
    Size,
    Sweep,
    at_end,
    by_seed,
    cells_of,
    curves_only,
    mean_curves,
)
from align_circuits.papers.abrupt.figs_1_3_4_network import BOTH, SOURCE, on
from align_circuits.papers.claims import Check, Experiment, controlled, measured
from align_circuits.report import plots
from align_circuits.tables.tables import Table


def _cells(table: Table, *columns: str) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in cells_of(table, columns).itertuples(index=False)]


# Figure A.1


def _draw_a1(table: Table) -> dict[str, go.Figure]:
    cells = _cells(table, "p_burst", "p_context")
    panels: Mapping[str, pd.DataFrame] = {
        f"p_B {cell['p_burst']:g}, p_C {cell['p_context']:g}": mean_curves(table, BOTH, **cell) for cell in cells
    }
    return {"figA1": plots.curves(panels, x="step", by="measure", label="step")}


def _check_a1(table: Table) -> list[Check]:
    cells = _cells(table, "p_burst", "p_context")
    both = [cell for cell in cells if cell["p_context"] > 0]
    weights = next(cell for cell in cells if cell["p_context"] == 0)

    def least(cell: Mapping[str, Any]) -> Float[ndarray, " seed"]:
        return np.minimum(at_end(table, "icl", **cell), at_end(table, "iwl", **cell))

    def gap(cell: Mapping[str, Any]) -> Float[ndarray, " seed"]:
        return at_end(table, "iwl", **cell) - at_end(table, "icl", **cell)

    return [
        Check(
            "0 < p_C < 1 and p_B < 1: both are learned (the lower of the two accuracies, the worst cell)",
            relation=">=",
            threshold=0.8,
            **measured(min((least(cell) for cell in both), key=np.mean)),
            **controlled(least(weights), "p_C = 0"),
        ),
        Check(
            "p_B < 1 and p_C = 0 ends in weights (accuracy in weights minus in context)",
            relation=">=",
            threshold=0.5,
            **measured(gap(weights)),
            **controlled(max((gap(cell) for cell in both), key=np.mean), "0 < p_C < 1"),
        ),
    ]


def _figa1(size: Size, n_classes: int) -> Sweep:
    cells = tuple({"p_burst": b, "p_context": c} for b, c in ((0.5, 0.0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.8)))
    return Sweep(on(size, n_classes=n_classes, burst=1, noise=0.0), cells)


FIGA1 = Experiment(
    name="abrupt/figA1",
    title="Both solutions at once, where only both reach zero loss",
    source=f"{SOURCE}, Fig. A.1",
    scales={"smoke": _figa1(SMOKE, 16), "cpu": _figa1(replace(CPU, seeds=3), 64), "paper": _figa1(PAPER, 256)},
    run=curves_only,
    draw=_draw_a1,
    check=_check_a1,
    makes_models=True,
    published="In all cases of 0 < p_B < 1 and 0 < p_C < 1 it learns both; with p_B < 1 and p_C = 0, the weights.",
)


# Figure A.5


def _draw_a5(table: Table) -> dict[str, go.Figure]:
    panels: dict[str, pd.DataFrame] = {}
    for cell in _cells(table, "n_labels", "n_pairs"):
        curves = by_seed(table, "icl", **cell)
        long = curves.reset_index().melt("step", var_name="seed").assign(low=np.nan, high=np.nan)
        panels[f"L {cell['n_labels']}, N {cell['n_pairs']}"] = long
    return {"figA5": plots.curves(panels, x="step", by="seed", label="step", value="IC accuracy")}


def stalled(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Which seeds did not learn in context: 1 where the accuracy at the end is below one half."""
    return (at_end(table, "icl", **where) < 0.5).astype(float)


def _check_a5(table: Table) -> list[Check]:
    cells = _cells(table, "n_labels", "n_pairs")
    more = np.concatenate([stalled(table, **cell) for cell in cells if cell["n_labels"] > cell["n_pairs"]])
    equal = np.concatenate([stalled(table, **cell) for cell in cells if cell["n_labels"] == cell["n_pairs"]])
    return [
        Check(
            "L = N stalls some seeds (share of seeds)",
            relation=">=",
            threshold=1 / 6,
            published="some of six",
            **measured(equal),
            **controlled(more, "L > N"),
        ),
        Check(
            "L > N stalls none (share of seeds)",
            relation="<=",
            threshold=0.0,
            **measured(more),
            **controlled(equal, "L = N"),
            published="none of six",
        ),
    ]


def _figa5(size: Size, n_classes: int, pairs: Sequence[int], labels: Sequence[int]) -> Sweep:
    cells = tuple({"n_pairs": n, "n_labels": count} for n in pairs for count in labels if count >= n)
    return Sweep(on(size, n_classes=n_classes, burst=1, noise=0.0, p_context=0.8), cells)


FIGA5 = Experiment(
    name="abrupt/figA5",
    title="As many labels as pairs: the transition may fail to come",
    source=f"{SOURCE}, Fig. A.5",
    scales={
        "smoke": _figa5(SMOKE, 16, (2,), (2, 8)),
        "cpu": _figa5(CPU, 64, (4,), (4, 8, 16)),
        "paper": _figa5(PAPER, 256, (4, 8, 16), (4, 8, 16, 32)),
    },
    run=curves_only,
    draw=_draw_a5,
    check=_check_a5,
    makes_models=True,
    published="Six seeds for each pair of L and N: robust if L > N, not if L = N.",
)
