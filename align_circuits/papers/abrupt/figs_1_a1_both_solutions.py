"""Abrupt learning (Reddy, 2024): learning in context and in weights, the one or both, Figs. 1 (d) and A.1."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, by_seed, conditions_of, draw_means
from align_circuits.papers.abrupt.grid import BOTH, CPU, LEARNED, PAPER, SMOKE, SOURCE, Grid, grid_study
from align_circuits.papers.lab import Claim, Experiment
from align_circuits.tables.tables import Table

# Figure 1 d


def _draw_fig1(table: Table) -> dict[str, go.Figure]:
    panel = {"": {"burst": table.frame["burst"].max()}}
    return {
        "accuracy": draw_means(table, BOTH | {"swap": "swapped labels"}, panel),
        "loss": draw_means(table, {"loss_icl": "in context"}, panel, "loss (nats)"),
    }


def _check_fig1(table: Table) -> list[Claim]:
    bursty, plain = {"burst": table.frame["burst"].max()}, {"burst": 0}

    def over_peak(where: Mapping[str, Any]) -> Float[ndarray, " seed"]:
        curves = by_seed(table, "icl", **where)
        return (curves.iloc[-2:].mean() / curves.rolling(2).mean().max()).to_numpy()

    return [
        Claim("With B = 2 the network learns to answer in context (accuracy at the end)").at_least(
            LEARNED, at_end(table, "icl", **bursty), at_end(table, "icl", **plain), "B = 0"
        ),
        Claim("It follows swapped labels (accuracy at the end)").at_least(
            LEARNED, at_end(table, "swap", **bursty), at_end(table, "swap", **plain), "B = 0"
        ),
        Claim("Learning in context does not fade (accuracy at the end over its peak)").at_least(
            0.95, over_peak(bursty), over_peak(plain), "B = 0, where there is nothing to keep"
        ),
    ]


_SIZES = (SMOKE, CPU.with_task(n_classes=512), PAPER.with_task(n_classes=512))

FIG1 = Experiment(
    name="abrupt/fig1",
    title="Loss and accuracy, in context and in weights",
    source=f"{SOURCE}, Fig. 1 (d)",
    study=grid_study("abrupt/fig1", *(Grid(size, ({"burst": 2}, {"burst": 0})) for size in _SIZES)),
    figures=_draw_fig1,
    claims=_check_fig1,
    published="Six seeds, B = 2, K = 512: accuracy in context rises abruptly to 1 and stays.",
)


# Figure A.1


def _draw_a1(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"p_B {condition['p_burst']:g}, p_C {condition['p_context']:g}": condition
        for condition in conditions_of(table, ("p_burst", "p_context"))
    }
    return {"figA1": draw_means(table, BOTH, panels)}


def _check_a1(table: Table) -> list[Claim]:
    conditions = sorted(conditions_of(table, ("p_burst", "p_context")), key=lambda condition: condition["p_context"])
    weights, *both = [[at_end(table, measure, **condition) for measure in ("icl", "iwl")] for condition in conditions]
    lower = [np.minimum(icl, iwl) for icl, iwl in both]
    gap = [iwl - icl for icl, iwl in both]
    return [
        Claim("0 < p_C < 1 and p_B < 1: both are learned (the lower of the two accuracies, the worst cell)").at_least(
            0.8, min(lower, key=np.mean), np.minimum(*weights), "p_C = 0"
        ),
        Claim("p_B < 1 and p_C = 0 ends in weights (accuracy in weights minus in context)").at_least(
            0.5, weights[1] - weights[0], max(gap, key=np.mean), "0 < p_C < 1"
        ),
    ]


_SHARES = [
    {"p_burst": p_burst, "p_context": p_context}
    for p_burst, p_context in ((0.5, 0.0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.8))
]

_LONGER = replace(CPU, steps=9000, first_seed=3, log_every=300)
"""After 3,000 steps, on seeds 0 to 2, both were not yet learned where p_C = 0.8."""

FIGA1 = Experiment(
    name="abrupt/figA1",
    title="Both solutions at once, where only both reach zero loss",
    source=f"{SOURCE}, Fig. A.1",
    study=grid_study(
        "abrupt/figA1",
        *(Grid(size.with_task(noise=0.0), _SHARES) for size in (SMOKE, _LONGER, PAPER.with_task(n_classes=256))),
    ),
    figures=_draw_a1,
    claims=_check_a1,
    published="In all cases of 0 < p_B < 1 and 0 < p_C < 1 it learns both; with p_B < 1 and p_C = 0, the weights.",
)
