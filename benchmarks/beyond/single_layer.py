"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): why does tuning one layer not suffice?

The paper tunes the queries and keys of one layer of 32 and sees alignment and lookup form (Fig. 10). In the bundled
Llama the best layer of seven does not suffice (`icatune/fig10`): after too few steps, by too few projections, or
because it is one layer.
"""

from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import (
    ICA,
    PAPER,
    PAPER_ICA,
    SMOKE,
    SMOKE_ICA,
    TOY,
    Arm,
    Tunings,
    at_ends,
    courses,
    ended,
    tuned_study,
)
from align_circuits.papers.icatune.tuning_courses import FIRST, KEYS, draw_course
from align_circuits.papers.lab import About, Experiment, Rows
from align_circuits.papers.statistics import as_rows
from align_circuits.tables.tables import Table

_QUERIES_AND_KEYS = {"projections": ("q", "k")}
_MORE_STEPS, _MORE_PROJECTIONS, _MORE_LAYERS = (
    "one layer, five times the steps",
    "one layer, all projections",
    "all layers",
)
_CLAIMS = {
    _MORE_STEPS: "With five times the steps queries and keys of the best layer suffice",
    _MORE_PROJECTIONS: "With values and outputs as well the best layer suffices",
    _MORE_LAYERS: "Queries and keys of all layers suffice",
}
"""What would make up for what is lacking, of which each arm changes one."""


def _arms(ica: Arm, layer: int, steps: int) -> Tunings:
    """The arms beside `icatune/fig10`, which tunes queries and keys of one layer for `steps`."""
    changes: dict[str, dict[str, Any]] = {
        _MORE_STEPS: {**_QUERIES_AND_KEYS, "layers": layer, "steps": 5 * steps},
        _MORE_PROJECTIONS: {"layers": layer},
        _MORE_LAYERS: _QUERIES_AND_KEYS,
    }
    arms = (replace(ica, name=name, config={**ica.config, "steps": steps, **each}) for name, each in changes.items())
    return Tunings(tuple(arms), n=4 if ica.config is SMOKE else 64)


def _summarize(_: Tunings, rows: Rows) -> pd.DataFrame:
    """The courses of first tokens, and what holds before and after."""
    course: Any = courses(rows["course"], 2)
    return as_rows([course[(course["of"] == "model") & (course["kind"] == "first")], ended(rows["ends"])], KEYS)


def _check(_: Table) -> list[Claim]:
    return [
        Claim(f"{claim} (first token)").at_least(
            0.95, *FIRST.at(arm=arm).beside("part", "after", "before"), "before tuning"
        )
        for arm, claim in _CLAIMS.items()
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    first = table.where(part="course", metric="accuracy", kind="first", condition="in distribution").frame
    return {"accuracy": draw_course(first, "arm")}


SINGLE_LAYER = Experiment(
    "icatune/single-layer",
    "Why does tuning one layer not suffice?",
    "beyond Agarwal and Sarawagi (2025), Fig. 10; layer 2, the best of the bundled Llama there, was known",
    tuned_study(
        "icatune/single-layer",
        _summarize,
        [at_ends],
        smoke=_arms(SMOKE_ICA, 1, 2),
        cpu=_arms(replace(ICA, config={**TOY, "probe_every": 20}), 2, 200),
        paper=_arms(replace(PAPER_ICA, config=PAPER, seeds=(0,)), 13, 1000),
    ),
    _draw,
    _check,
    about=About.BEYOND,
)
