"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): what tuning in context does, step by step."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim, Measured, difference_of, extreme_of, over_seeds, share_of
from align_circuits.papers.icatune.tuned_models import (
    ATTENDED,
    PAPER,
    SMOKE,
    SMOKE_TASK,
    Arm,
    Tunings,
    as_rows,
    courses,
    emerged,
    ended,
    ends,
    of_tuned,
    tuned_study,
)
from align_circuits.papers.study import Experiment, Rows
from align_circuits.report import plots
from align_circuits.tables.tables import Table

ICA = Arm("ICA-Tune")
"""The tuning of the bundled model that most figures are about."""

PAPER_ICA = Arm("ICA-Tune", {"x_len": 5, "phrase_len": 2, "n_examples": 15}, {**PAPER, "steps": 200}, (0, 1, 2, 3))
SMOKE_ICA = Arm("ICA-Tune", SMOKE_TASK, SMOKE, (0, 1))


SHOWN = ("in distribution", "OOD")
"""The conditions that figures show."""


def summarize_courses(config: Tunings, rows: Rows) -> pd.DataFrame:
    """Returns courses, steps of emergence, and what holds before and after, where that was measured."""
    after = [ended(rows["ends"])] if "ends" in rows else []
    return as_rows([courses(rows["course"], config.every), emerged(rows["course"]), *after])


def first_token(table: Table, part: str, condition: str = "in distribution", metric: str = "accuracy") -> Table:
    """Returns the rows of first tokens before or after, one a seed."""
    return table.where(part=part, condition=condition, metric=metric, kind="first", of="model")


def best_heads(table: Table, part: str, metric: str, condition: str = "in distribution") -> Table:
    """Returns the rows of the best heads before or after, one a seed."""
    return table.where(part=part, condition=condition, metric=metric, of="best head")


def before_in(table: Table, first: str, second: str, **where: Any) -> Measured:
    """Returns in what share of seeds one metric emerged before another, or alone; the interval is exact binomial."""
    rows = table.where(part="emergence", **where).frame
    steps = rows.pivot(index=["arm", "seed"], columns="metric", values="value").reindex(columns=[first, second])
    return share_of((steps[first] < steps[second].fillna(np.inf)).to_numpy())


def layers_apart(table: Table, part: str) -> Measured:
    """Returns by how many layers the best lookup head lies above the best aligner, on average over seeds.

    The best are those that give the right keys the most attention: by their share alone, many tie at 1.
    """
    aligner, lookup = (best_heads(table, part, metric).frame for metric in ATTENDED)
    apart: Any = (lookup.set_index("seed")["layer"] - aligner.set_index("seed")["layer"]).astype(float)
    reach = 1.96 * float(apart.std(ddof=1)) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return Measured(float(apart.mean()), float(apart.mean()) - reach, float(apart.mean()) + reach)


# Figure 4


def _check_emergence(table: Table) -> list[Check]:
    def gain(kind: str) -> Measured:
        after, before = (
            table.where(part=part, condition="in distribution", metric="accuracy", kind=kind, of="model")
            for part in ("after", "before")
        )
        return difference_of(after, before)

    def above_history(part: str, condition: str) -> Measured:
        return difference_of(*(first_token(table, part, condition, metric) for metric in ("accuracy", "history")))

    checks = []
    for condition in ("in distribution", "OOD"):
        worst, best = (
            extreme_of(first_token(table, part, condition), highest=part == "before") for part in ("after", "before")
        )
        checks += [
            Claim(f"Before, {condition}: the first token is no better than the history ceiling (difference)").at_most(
                0.0, above_history("before", condition), above_history("after", condition), "after"
            ),
            Claim(f"After, {condition}: the first token is right, in the worst seed", "about 1.0").at_least(
                0.95, worst, best, "best before"
            ),
        ]
    before, after = (
        extreme_of(best_heads(table, part, "align_query"), highest=part == "before") for part in ("before", "after")
    )
    return [
        *checks,
        Claim("Before, no head aligns (best align_query), in the highest seed").at_most(0.5, before, after, "after"),
        Claim(
            "A head aligns (best align_query), in the worst seed", "layers 15 and 16 about 1.0, layer 14 about .8"
        ).at_least(0.8, after, before, "best before"),
        Claim(
            "It reads the examples: with their labels corrupted the first token falls to the history ceiling"
        ).at_most(
            0.0,
            above_history("after", "labels corrupted"),
            above_history("after", "in distribution"),
            "labels as they are",
        ),
        Claim("The gain in accuracy is at the first token of a phrase").at_least(
            0.3, gain("first"), gain("later"), "later tokens"
        ),
        *order_checks(table),
    ]


def order_checks(table: Table) -> list[Check]:
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


def _draw_emergence(table: Table) -> Mapping[str, go.Figure]:
    course = table.where(part="course")
    right: Any = course.where(of="model", kind=["first", "later"]).frame
    right = right[right["metric"] != "oracle"]
    which = right["kind"].where(right["metric"] == "accuracy", "history ceiling, " + right["kind"])
    panels = {condition: right.assign(of=which)[right["condition"] == condition] for condition in SHOWN}
    layers = course.where(of="best head", condition="in distribution")
    return {
        "steps of emergence": _draw_steps(table.where(part="emergence")),
        "accuracy": plots.curves(panels, by="of", x="step", label="step").update_xaxes(dtick=None),
        "layers": draw_layers(layers, {metric: metric for metric in ("align_query", "align_key", "lookup")}),
    }


def _draw_steps(table: Table) -> go.Figure:
    """Draws when what emerged, seed by seed and on average over those in which it did."""
    steps: Any = table.frame.assign(what=table.frame["metric"].replace("accuracy", "first token"))
    mean = pd.DataFrame(
        {"what": what, "seed": "mean", **asdict(over_seeds(rows.to_numpy(float)))}
        for what, rows in steps.groupby("what", sort=False)["value"]
    )
    seeds = steps.assign(seed="seed " + steps["seed"].astype(str))
    return plots.dots(pd.concat([seeds, mean]), "what", "seed", "step of emergence")


def draw_layers(course: Table, panels: Mapping[str, str]) -> go.Figure:
    """Draws how the best head of each layer rose.

    Args:
        course: Rows of best heads by step, metric and layer.
        panels: The metric of each panel, by its title.
    """
    rows: Any = course.frame.assign(layer="layer " + course.frame["layer"].astype(str))
    heads = {title: rows[rows["metric"] == metric] for title, metric in panels.items()}
    drawn = plots.curves(heads, by="layer", value="best head of the layer", x="step", label="step")
    return drawn.update_xaxes(dtick=None)


FIG4 = Experiment(
    "icatune/fig4",
    "How accuracy, alignment and lookup come about in context",
    "Agarwal and Sarawagi (2025), Fig. 4",
    tuned_study(
        "icatune/fig4",
        smoke=Tunings((SMOKE_ICA,), n=4, every=1),
        cpu=Tunings((ICA,)),
        paper=Tunings((PAPER_ICA,)),
        jobs=lambda config, inputs: of_tuned(ends, config.arms, inputs, prompts=config.n),
        summarize=summarize_courses,
    ),
    _draw_emergence,
    _check_emergence,
    "Llama 3 8B: accuracy jumps most at the first token of a phrase; alignment accuracy rises abruptly near step "
    "85 in layers 14 to 16 (counted from 1), lookup near step 110 in layers 17 to 19.",
)
