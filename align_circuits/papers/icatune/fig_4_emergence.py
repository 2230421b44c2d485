"""Fig. 4 of The Missing Alignment Link (Agarwal and Sarawagi, 2025): accuracy, alignment and lookup emerge."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim, checks_of
from align_circuits.papers.icatune.tuned_models import (
    ICA,
    PAPER_ICA,
    SAME_RECIPE,
    SMOKE_ICA,
    SMOLLM2_ARMS,
    Tunings,
    at_ends,
    tuned_study,
)
from align_circuits.papers.icatune.tuning_courses import (
    ABOVE_HISTORY,
    BEST_ALIGNER,
    FIRST,
    SHOWN,
    draw_course,
    order,
    summarize_courses,
)
from align_circuits.papers.lab import Experiment, grids, seed_dots
from align_circuits.papers.statistics import Measured, exact, over_seeds, per_seed
from align_circuits.tables.tables import Table


def _arms_of(table: Table) -> dict[str, Table]:
    """Returns the rows of each arm by a text for titles: its name, or nothing where there is one arm."""
    arms = [str(arm) for arm in table.frame["arm"].dropna().unique()]
    return {f"{arm}: " if len(arms) > 1 else "": table.where(arm=arm) for arm in arms}


_WORST, _BEST_BEFORE = FIRST.at(part="after").lowest(), FIRST.at(part="before").highest()
_ALIGNS, _ALIGNS_BEFORE = BEST_ALIGNER.at(part="after").lowest(), BEST_ALIGNER.at(part="before").highest()

_EVEN = exact(0.1)
"""The share of a rise at an even pace that comes within a tenth of the steps."""


def _abrupt(what: str, metric: str, published: str) -> Claim:
    steepest = per_seed(part="abruptness", metric=metric).map(over_seeds)
    claim = Claim(f"{what} rises abruptly (share of the rise within a tenth of the steps)", published)
    return claim.at_least(0.5, steepest, _EVEN, "a rise at an even pace")


_CLAIMS = (
    *(
        claim
        for condition in SHOWN
        for claim in (
            Claim(f"Before, {condition}: the first token is no better than the history ceiling (difference)").at_most(
                0.0, *ABOVE_HISTORY.at(condition=condition).beside("part", "before", "after"), "after"
            ),
            Claim(f"After, {condition}: the first token is right, in the worst seed", "about 1.0").at_least(
                0.95, _WORST.at(condition=condition), _BEST_BEFORE.at(condition=condition), "best before"
            ),
        )
    ),
    Claim("Before, no head aligns (best align_query), in the highest seed").at_most(
        0.5, _ALIGNS_BEFORE, _ALIGNS, "after"
    ),
    Claim(
        "A head aligns (best align_query), in the worst seed", "layers 15 and 16 about 1.0, layer 14 about .8"
    ).at_least(0.8, _ALIGNS, _ALIGNS_BEFORE, "best before"),
    Claim("It reads the examples: with their labels corrupted the first token falls to the history ceiling").at_most(
        0.0,
        *ABOVE_HISTORY.at(part="after").beside("condition", "labels corrupted", "in distribution"),
        "labels as they are",
    ),
)

_GAIN_AT_FIRST = Claim("The gain in accuracy is at the first token of a phrase").at_least(
    0.3, *FIRST.rise("part", "before", "after").beside("kind", "first", "later"), "later tokens"
)

ABRUPTNESS = (
    _abrupt("Accuracy of first tokens", "accuracy", "most of it at once"),
    _abrupt("Alignment, in the head that is best at the end,", "align_query", "between steps 75 and 90 of 200"),
)


def _check_emergence(table: Table) -> list[Check]:
    frame: Any = table.frame
    by_seed = Table(frame[frame["part"] != "course"].replace({"arm": SAME_RECIPE}), table.provenance)
    return [
        replace(check, claim=title + check.claim)
        for title, arm in _arms_of(by_seed).items()
        for check in checks_of(
            [
                *_CLAIMS,
                *([_GAIN_AT_FIRST] if "later" in set(arm.frame["kind"]) else []),  # phrases of one letter have none
                *order("near steps 85 and 110", "layers 17 to 19 above 14 to 16"),
                *(ABRUPTNESS if "abruptness" in set(arm.frame["part"]) else []),  # not in older results
            ],
            arm,
        )
    ]


def lag(table: Table, arm: str | set[str], first: str, second: str) -> Measured:
    """Returns how many steps `second` emerged after `first`, the mean over the seeds of arms in which both did."""
    steps: Any = table.where(part="emergence", arm=arm).frame
    wide = steps.pivot(index="seed", columns="metric", values="value")
    return over_seeds((wide[second] - wide[first]).to_numpy(float))


def _draw_emergence(table: Table) -> Mapping[str, go.Figure]:
    figures = {}
    for title, arm in _arms_of(table).items():
        right: Any = arm.where(part="course", of="model").frame
        right = right[(right["kind"] != "all") & (right["metric"] != "oracle")]
        which = right["kind"].where(right["metric"] == "accuracy", "history ceiling, " + right["kind"])
        best = {"part": "course", "of": "best head", "condition": "in distribution"}
        layers = {metric: {**best, "metric": metric} for metric in ("align_query", "align_key", "lookup")}
        figures |= {
            f"{title}steps of emergence": _draw_steps(arm.where(part="emergence").frame),
            f"{title}accuracy": draw_course(right.assign(of=which), "of"),
            f"{title}layers": grids("step", "layer", layers, value="score of the best head")(arm),
        }
    return figures


def _draw_steps(steps: Any) -> go.Figure:
    """Draws when what emerged, seed by seed and on average over those in which it did."""
    steps = steps.assign(what=steps["metric"].replace("accuracy", "first token"))
    mean = pd.DataFrame(
        {"what": what, "seed": "mean", **over_seeds(rows.to_numpy(float)).row}
        for what, rows in steps.groupby("what", sort=False)["value"]
    )
    return seed_dots(steps, "what", "step of emergence", mean)


FIG4 = Experiment(
    "icatune/fig4",
    "How accuracy, alignment and lookup emerge in context",
    "Agarwal and Sarawagi (2025), Fig. 4",
    tuned_study(
        "icatune/fig4",
        summarize_courses,
        smoke=Tunings((SMOKE_ICA,), n=4, every=1),
        cpu=Tunings((ICA,)),
        paper=Tunings((PAPER_ICA,)),
        smollm2=Tunings(SMOLLM2_ARMS, n=32, n_claimed=160, every=1),
        measured=[at_ends],
    ),
    _draw_emergence,
    _check_emergence,
    "Llama 3 8B: accuracy jumps most at the first token of a phrase; alignment accuracy rises abruptly near step "
    "85 in layers 14 to 16 (counted from 1), lookup near step 110 in layers 17 to 19.",
)
