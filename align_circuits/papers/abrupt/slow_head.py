"""Beyond abrupt learning: a reduced head that learns slowly, and none, show when the guess of the context rises."""

from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, at_start, conditions_of, draw_means, half_rises, transitions
from align_circuits.papers.abrupt.grid import CPU, NAMES, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.study import Experiment
from align_circuits.tables.tables import Table


def _conditions(table: Table) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The head at its own rate, at the slowest, and none."""
    conditions = conditions_of(table, ("model", "head_rate"))
    heads = sorted((each for each in conditions if each["model"] != "none"), key=lambda each: -each["head_rate"])
    return heads[0], heads[-1], next(each for each in conditions if each["model"] == "none")


def _check(table: Table) -> list[Check]:
    own, slow, none = _conditions(table)
    last = float(table.frame["step"].to_numpy().max())

    def lead(where: dict[str, Any]) -> Float[ndarray, " seed"]:
        """How far before the transition CLA makes half of its rise, over the transition's step; else the end's."""
        at = np.nan_to_num(transitions(table, **where), nan=last)
        return (at - np.nan_to_num(half_rises(table, "cla", **where), nan=last)) / at

    rise = at_end(table, "cla", **none) - at_start(table, "cla", **none)
    in_context = at_end(table, "icl", **none) - at_start(table, "icl", **none)
    head = np.nan_to_num(transitions(table, **own), nan=last)
    alone = np.nan_to_num(half_rises(table, "cla", **none), nan=last)
    return [
        Claim("The classifier learns the guess without the head (rise of CLA)").at_least(
            0.2, rise, in_context, "rise of accuracy in context there"
        ),
        Claim(
            "The head forms first (half of that rise comes later than its transition, over the transition's step)"
        ).at_least(0.2, (alone - head) / head, -lead(own), "the same of CLA with the head, which brings it"),
        Claim(
            f"Where the head learns at a rate of {slow['head_rate']:g}, CLA rises before it (lead, over its step)"
        ).at_least(0.1, lead(slow), lead(own), "at its own rate"),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {
        "no head" if each["model"] == "none" else f"head at a rate of {each['head_rate']:g}": each
        for each in conditions_of(table, ("model", "head_rate"))
    }
    return {"": draw_means(table, {name: NAMES[name] for name in ("icl", "cla", "tila2")}, panels, "measure")}


def _grid(size: Size) -> Grid:
    heads = [{"model": "three", "head_rate": rate} for rate in (1.0, 1 / 16, 1 / 64)]
    return Grid(size.with_task(**PLATEAU), [*heads, {"model": "none", "head_rate": 1.0}])


SLOW_HEAD = Experiment(
    name="abrupt/slow-head",
    title="When the reduced head forms before the guess of the context's labels",
    source=f"beyond {SOURCE}, Fig. 6",
    study=grid_study(
        "abrupt/slow-head",
        _grid(SMOKE),
        _grid(replace(CPU, steps=6000, first_seed=20)),
        _grid(PAPER.with_task(d_content=64, n_classes=256)),
    ),
    draw=_draw,
    check=_check,
    published="Not in the paper, whose reduced head guesses before it forms (Fig. 6 a).",
)
