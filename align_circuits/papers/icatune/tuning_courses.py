"""What the figures of tuned models share: tables of their courses, checks and curves."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.icatune.tuned_models import ATTENDED, Tunings, as_rows, courses, emerged, ended
from align_circuits.papers.lab import Claim, Measured, Rows, over_seeds, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SHOWN = ("in distribution", "OOD")
"""The conditions that figures show."""


def summarize_courses(config: Tunings, rows: Rows) -> pd.DataFrame:
    """Returns courses, steps of emergence, and what holds before and after, where that was measured."""
    after = [ended(rows["ends"])] if "ends" in rows else []
    return as_rows([courses(rows["course"], config.every), emerged(rows["course"]), *after])


def first_token(
    table: Table, part: str, condition: str = "in distribution", metric: str = "accuracy", kind: str = "first"
) -> Table:
    """Returns the rows of first tokens, or of another `kind`, before or after, one a seed."""
    return table.where(part=part, condition=condition, metric=metric, kind=kind, of="model")


def best_heads(table: Table, part: str, metric: str) -> Table:
    """Returns the rows of the best heads before or after, one a seed."""
    return table.where(part=part, condition="in distribution", metric=metric, of="best head")


def before_in(table: Table, first: str, second: str) -> Measured:
    """Returns in what share of seeds one metric emerged before another, or alone; the interval is exact binomial."""
    rows = table.where(part="emergence").frame
    steps = rows.pivot(index=["arm", "seed"], columns="metric", values="value").reindex(columns=[first, second])
    return share_of((steps[first] < steps[second].fillna(np.inf)).to_numpy())


def layers_apart(table: Table, part: str) -> Measured:
    """Returns by how many layers the best lookup head lies above the best aligner, on average over seeds.

    The best are those that give the right keys the most attention: by their share alone, many tie at 1.
    """
    aligner, lookup = (best_heads(table, part, metric).frame.set_index("seed")["layer"] for metric in ATTENDED)
    return over_seeds((lookup - aligner).to_numpy(float))


def order_checks(table: Table) -> list[Claim]:
    """Returns the checks that alignment comes before lookup, and below it."""
    orders = before_in(table, "align_query", "lookup"), before_in(table, "lookup", "align_query")
    return [
        Claim(
            "Alignment emerges before lookup, in the heads that are best at the end (share of seeds)",
            "near steps 85 and 110",
        ).at_least(0.8, *orders, "lookup before alignment"),
        Claim(
            "Lookup heads lie above aligners (layers between the best of each)", "layers 17 to 19 above 14 to 16"
        ).at_least(1.0, layers_apart(table, "after"), layers_apart(table, "before"), "before tuning"),
    ]


def at_the_end(course: Table) -> Table:
    """The rows of the last step."""
    return course.where(step=course.frame["step"].max())


def by_condition(rows: Any) -> dict[str, pd.DataFrame]:
    """Returns a panel for each of the conditions that figures show."""
    return {condition: rows[rows["condition"] == condition] for condition in SHOWN}


def draw_course(panels: Mapping[str, pd.DataFrame], by: str, value: str = "accuracy") -> go.Figure:
    """Draws values over the steps of tuning; the arguments are those of `plots.curves`."""
    return plots.curves(panels, x="step", by=by, label="step", value=value).update_xaxes(dtick=None)


def draw_layers(course: Table, panels: Mapping[str, str]) -> go.Figure:
    """Draws how the best head of each layer rose, steps across and layers from the bottom.

    Args:
        course: Rows of best heads by step, metric and layer.
        panels: The metric of each panel, by its title.
    """
    grids: Any = {
        title: course.where(metric=metric).frame.pivot(index="layer", columns="step", values="value").map(float)
        for title, metric in panels.items()
    }
    return plots.accuracy_grids(grids, x="step", y="layer", value="score of the best head")
