"""Fig. 10 of The Missing Alignment Link (Agarwal and Sarawagi, 2025): tuning a single layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.icatune.tuned_models import (
    ICA,
    PAPER,
    PAPER_ICA,
    SMOKE,
    SMOKE_ICA,
    SMOLLM2,
    SMOLLM2_ICA,
    TOY,
    Arm,
    courses,
    emerged,
    ended,
    ends,
    tuned_study,
)
from align_circuits.papers.icatune.tuning_courses import FIRST, KEYS, ORDER, draw_course
from align_circuits.papers.lab import Check, Claim, Experiment, Inputs, Rows, Statistic, as_rows, checks_of, grids
from align_circuits.tables.tables import Provenance, Table


@dataclass(frozen=True)
class Layers:
    """Queries and keys of a single layer are tuned."""

    arm: Arm = field(default_factory=lambda: replace(ICA, config={**TOY, "projections": ("q", "k")}))
    layers: tuple[int, ...] | None = None
    """Which, one at a time; all by default."""
    n: int = 64

    def arms(self, inputs: Inputs) -> list[Arm]:
        """One for each layer."""
        ((_, model),) = inputs.models.items()
        return [
            replace(self.arm, name=f"layer {layer}", config={**self.arm.config, "layers": layer})
            for layer in self.layers or range(model["n_layers"])
        ]


_AFTER = FIRST.at(part="after")


def _accuracy_by_arm(table: Table) -> Any:
    """On average over seeds."""
    return _AFTER(table).frame.groupby("arm", sort=False)["value"].mean()


def best_arm(frame: pd.DataFrame) -> str:
    """Returns the arm whose first tokens are best after tuning, of the rows of `ends`, on average over seeds."""
    return str(_accuracy_by_arm(Table(ended(frame), Provenance("ended"))).idxmax())


def _summarize_layers(_: Layers, rows: Rows) -> pd.DataFrame:
    """The courses of first tokens, and of heads in the best layer; steps of emergence; what holds before and after."""
    course: Any = courses(rows["course"], 2)
    shown = ((course["of"] == "model") & (course["kind"] == "first")) | (course["arm"] == best_arm(rows["ends"]))
    return as_rows([course[shown], emerged(rows["course"]), ended(rows["ends"])], KEYS)


def _check_layers(table: Table) -> list[Claim | Check]:
    means = _accuracy_by_arm(table)
    best, names = str(means.idxmax()), [*means.index]
    third = max(1, len(names) // 3)

    def gain(arms: list[str], over: list[str]) -> Statistic:
        return _AFTER.rise("arm", over, arms)

    even_and_odd = gain(names[::2], names[1::2] or names), "even minus odd layers"
    return [
        Claim("Tuning queries and keys of one layer suffices (first token, the best layer)").at_least(
            0.95, *_AFTER.beside("arm", best, names[-1]), "the highest layer"
        ),
        Claim(
            "The best layer is a middle one (its gain over the mean of the first and the last)", "layer 13 of 32"
        ).at_least(0.1, gain([best], [names[0], names[-1]]), *even_and_odd),
        Claim("Early layers help more than high ones (first third minus last third)").at_least(
            0.05, gain(names[:third], names[-third:]), *even_and_odd
        ),
        *checks_of(ORDER, table.where(arm=best)),
    ]


def _draw_layers(table: Table) -> Mapping[str, go.Figure]:
    best = table.where(part="course", of="best head").frame["arm"].iloc[0]
    layers = {"part": "course", "of": "best head"}
    panels = {f"{best} tuned, {metric}": {**layers, "metric": metric} for metric in ("align_query", "lookup")}
    first = table.where(part="course", metric="accuracy", kind="first", of="model").frame
    return {
        "accuracy": draw_course(first, "arm"),
        "layers": grids("step", "layer", panels, value="score of the best head")(table),
    }


FIG10 = Experiment(
    "icatune/fig10",
    "Tuning a single layer",
    "Agarwal and Sarawagi (2025), Fig. 10 and App. E.2",
    tuned_study(
        "icatune/fig10",
        _summarize_layers,
        smoke=Layers(replace(SMOKE_ICA, config={**SMOKE, "projections": ("q", "k")}, seeds=(0,)), n=4),
        cpu=Layers(),
        paper=Layers(
            replace(PAPER_ICA, config={**PAPER, "steps": 1000}, seeds=(0,)), (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31)
        ),
        smollm2=Layers(
            replace(SMOLLM2_ICA, config={**SMOLLM2, "projections": ("q", "k")}, seeds=(0,)), (4, 8, 12, 16, 20), n=32
        ),
        measured=[ends],
        arms=Layers.arms,
    ),
    _draw_layers,
    _check_layers,
    "Llama 3 8B: layer 13 is best; layers below 5 help more than high ones; alignment emerges near step 430, "
    "lookup near 470.",
)
