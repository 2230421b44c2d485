"""Abrupt learning (Reddy, 2024): as many labels as pairs, Fig. A.5."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from align_circuits.papers.abrupt.curves import conditions_of, single_curves, stalled
from align_circuits.papers.abrupt.grid import CPU, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.study import Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"L {condition['n_labels']}, N {condition['n_pairs']}": single_curves(table, "icl", **condition)
        for condition in conditions_of(table, ("n_labels", "n_pairs"))
    }
    return {"figA5": plots.curves(panels, x="step", by="seed", label="step", value="IC accuracy")}


def _check(table: Table) -> list[Check]:
    shares = {True: [], False: []}
    for condition in conditions_of(table, ("n_labels", "n_pairs")):
        shares[condition["n_labels"] > condition["n_pairs"]].append(stalled(table, **condition))
    more, equal = (np.concatenate(shares[key]) for key in (True, False))
    return stall_checks(equal, more, published="some of six")


def stall_checks(equal: np.ndarray, more: np.ndarray, published: str) -> list[Check]:
    """Returns the claims about which seeds stall, at L = N and at L > N."""
    return [
        Claim("L = N stalls some seeds (share of seeds)", published).at_least(1 / 6, equal, more, "L > N"),
        Claim("L > N stalls none (share of seeds)", "none of six").at_most(0.0, more, equal, "L = N"),
    ]


def _grid(size: Size, n_classes: int, pairs: Sequence[int], labels: Sequence[int]) -> Grid:
    conditions = tuple({"n_pairs": n, "n_labels": count} for n in pairs for count in labels if count >= n)
    return Grid(size.with_task(n_classes=n_classes, burst=1, noise=0.0, p_context=0.8), conditions)


FIGA5 = Experiment(
    name="abrupt/figA5",
    title="As many labels as pairs: the transition may fail to come",
    source=f"{SOURCE}, Fig. A.5",
    study=grid_study(
        "abrupt/figA5",
        _grid(SMOKE, 16, (2,), (2, 8)),
        _grid(CPU, 64, (4,), (4, 8, 16)),
        _grid(PAPER, 256, (4, 8, 16), (4, 8, 16, 32)),
    ),
    draw=_draw,
    check=_check,
    published="Six seeds for each pair of L and N: robust if L > N, not if L = N.",
)
