"""What the figures of tuned models share: tables of their courses, statistics on them, claims and curves."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import ATTENDED, Tunings, courses, emerged, ended
from align_circuits.papers.lab import Rows
from align_circuits.papers.statistics import as_rows, rows, statistic
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SHOWN = ("in distribution", "OOD")
"""The conditions that figures show."""

KEYS = ("arm", "part", "seed", "condition", "step", "metric", "kind", "layer", "of")
"""The key columns of tables about courses; missing where one does not apply, such as the seed of a mean over seeds."""

FIRST = rows(metric="accuracy", kind="first", condition="in distribution", of="model")
"""First tokens, a row for each seed `before` and `after`; `kind` and `condition` may be others."""

ABOVE_HISTORY = FIRST - FIRST.at(metric="history")
"""By how much they are more accurate than the ceiling without alignment."""

BEST_ALIGNER = rows(metric="align_query", condition="in distribution", of="best head")
"""Of each seed, the highest `align_query` of any head."""


def summarize_courses(config: Tunings, rows: Rows) -> pd.DataFrame:
    """Returns courses, steps of emergence, and what holds before and after, where that was measured."""
    after = [ended(rows["ends"])] if "ends" in rows else []
    return as_rows([courses(rows["course"], config.every), emerged(rows["course"]), *after], KEYS)


def before_in(first: str, second: str) -> Any:
    """Returns in which seeds one metric emerged before another, or alone, of those in which either emerged."""

    def earlier(table: Table) -> Bool[ndarray, " seed"]:
        steps = table.frame.pivot(index=["arm", "seed"], columns="metric", values="value")
        steps = steps.reindex(columns=[first, second]).dropna(how="all")
        return (steps[first] < steps[second].fillna(np.inf)).to_numpy()

    return statistic(earlier).at(part="emergence")


def _layers_apart(table: Table) -> Float[ndarray, " seed"]:
    aligner, lookup = (table.where(metric=metric).frame.set_index("seed")["layer"] for metric in ATTENDED)
    return (lookup - aligner).to_numpy(float)


LAYERS_APART = statistic(_layers_apart).at(condition="in distribution", of="best head")
"""By how many layers the best lookup head lies above the best aligner in each seed, `before` or `after`.

The best are those that give the right keys the most attention: by their share alone, many tie at 1."""


def order(steps: str, layers: str) -> tuple[Claim, Claim]:
    """Returns the claims that alignment comes before lookup, and below it, with what the paper has of a figure."""
    return (
        Claim(
            "Alignment emerges before lookup, in the heads that are best at the end (share of seeds)", steps
        ).at_least(
            0.5, before_in("align_query", "lookup"), before_in("lookup", "align_query"), "lookup before alignment"
        ),
        Claim("Lookup heads lie above aligners (layers between the best of each)", layers).at_least(
            1.0, *LAYERS_APART.beside("part", "after", "before"), "before tuning"
        ),
    )


def at_the_end(course: Table) -> Table:
    """Returns the rows of the last step."""
    return course.where(step=course.frame["step"].max())


def draw_course(rows: Any, by: str) -> go.Figure:
    """Draws accuracy over the steps of tuning, a panel for each of the conditions that figures show."""
    return plots.curves(by_condition(rows), x="step", by=by, label="step")


def by_condition(rows: Any) -> Mapping[str, pd.DataFrame]:
    """Returns a panel for each of the conditions that figures show."""
    return {condition: rows[rows["condition"] == condition] for condition in SHOWN}
