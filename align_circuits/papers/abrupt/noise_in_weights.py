"""Abrupt learning (Reddy, 2024): variation within classes lowers learning in weights, Fig. 2 (b)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, conditions_of
from align_circuits.papers.abrupt.grid import BOTH, CPU, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.claims import Check, Claim, over_seeds
from align_circuits.papers.study import Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table


def _levels(table: Table) -> list[float]:
    return sorted(each["noise"] for each in conditions_of(table, ("noise",)))


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"B = {burst}": pd.DataFrame(
            {"noise": noise, "measure": name, **vars(over_seeds(at_end(table, measure, burst=burst, noise=noise)))}
            for noise in _levels(table)
            for measure, name in BOTH.items()
        )
        for burst in (1, 0)
    }
    return {"": plots.curves(panels, x="noise", by="measure", label="within-class variability ε")}


def _check(table: Table) -> list[Check]:
    levels = _levels(table)
    low, middle, high = levels[0], levels[len(levels) // 2], levels[-1]

    def fall(measure: str, first: float, last: float, burst: int = 1) -> Float[ndarray, " seed"]:
        """How much lower a measure ends with more noise."""
        return at_end(table, measure, burst=burst, noise=first) - at_end(table, measure, burst=burst, noise=last)

    def least_fall(measure: str) -> Float[ndarray, " seed"]:
        return min((fall(measure, *pair) for pair in pairwise(levels)), key=np.mean)

    def more_than_unmixed(measure: str) -> Float[ndarray, " seed"]:
        return fall(measure, low, middle) - fall(measure, low, middle, burst=0)

    icl = "accuracy in context"
    return [
        Claim(f"Noise lowers learning in weights (accuracy in weights, ε = {low:g} minus {high:g}, B = 1)").at_least(
            0.3, fall("iwl", low, high), fall("icl", low, high), icl
        ),
        Claim("It does so from each ε to the next (accuracy in weights, the smallest fall, B = 1)").at_least(
            0.02, least_fall("iwl"), least_fall("icl"), icl
        ),
        Claim(
            f"It does so more where the context holds the answer (fall from ε = {low:g} to {middle:g}, B = 1 minus B = "
            "0)"
        ).at_least(0.1, more_than_unmixed("iwl"), more_than_unmixed("icl"), icl),
    ]


def _grid(size: Size, noises: Sequence[float]) -> Grid:
    return Grid(size, [{"noise": noise, "burst": burst} for burst in (0, 1) for noise in noises])


NOISE = Experiment(
    name="abrupt/noise",
    title="Variation within classes against learning in weights",
    source=f"{SOURCE}, Fig. 2 (b)",
    study=grid_study(
        "abrupt/noise",
        _grid(SMOKE, (0.1, 0.5, 1.0)),
        _grid(replace(CPU, first_seed=20).with_task(n_classes=128), (0.1, 0.4, 0.8, 1.6)),
        _grid(replace(PAPER, log_every=5000), (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)),
    ),
    draw=_draw,
    check=_check,
    published="With more variation within classes accuracy in weights falls and accuracy in context rises.",
)
