"""Abrupt learning (Reddy, 2024): the reduced induction head, and as many labels as pairs, Figs. 6, A.2 and A.5."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from align_circuits.papers.abrupt.figs_3_4_5_transition import alignment_claims, draw_measures
from align_circuits.papers.abrupt.grid import CPU, LEARNED, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.progress_measures import BOTH, training_courses
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, seed_courses
from align_circuits.papers.statistics import HIGH, LOW, Statistic, late_mean
from align_circuits.tables.tables import Table

_ICL = late_mean("icl")
_STALLED = _ICL < 0.5

_THREE, _TWO, _NONE = ({"model": model} for model in ("three", "two", "none"))
_UNTRAINED = "alpha, beta_1 and beta_2 all held at 0"


def _stall_claims(equal: Statistic, more: Statistic, published: str) -> list[Claim]:
    """The claims about which seeds stall, at L = N and at L > N."""
    return [
        Claim("L = N stalls some seeds (share of seeds)", published).at_least(1 / 6, equal, more, "L > N"),
        Claim("L > N stalls none (share of seeds)", "none of six").at_most(0.0, more, equal, "L = N"),
    ]


# Figure 6

_MORE, _EQUAL = {"n_labels": HIGH}, {"n_labels": LOW}
"""L > N and L = N."""


def _fig6(size: Size, seeds_equal: int | None = None) -> Grid:
    """The grid of a size; of L = N `seeds_equal` seeds, or as many as of the others."""
    more, equal = ({"n_labels": count} for count in (size.task.n_labels, size.task.n_pairs))
    seeds = (*[size.seeds] * 3, seeds_equal) if seeds_equal else None
    return Grid(size.with_task(**PLATEAU), [_THREE | more, _TWO | more, _NONE | more, _TWO | equal], seeds=seeds)


_FIG6_PAPER = _fig6(PAPER.with_task(d_content=64, n_classes=256), seeds_equal=21)
"""Of L = N six seeds were run first, of which none stalled; 15 more were registered then, as many as would decide."""


FIG6 = Experiment(
    name="abrupt/fig6",
    title="The reduced induction head: with beta_2, without it, and with as many labels as pairs",
    source=f"{SOURCE}, Fig. 6",
    study=grid_study("abrupt/fig6", _fig6(SMOKE), _fig6(CPU), _FIG6_PAPER),
    figures={
        "a, three parameters": draw_measures(**_THREE, **_MORE),
        "b, beta_2 = 0": draw_measures(**_TWO, **_MORE),
        "c, L = N": seed_courses({"": {"measure": "loss_icl"} | _TWO | _EQUAL}, value="loss in context (nats)"),
    },
    claims=[
        *(
            Claim(f"{name} suffice for learning in context (accuracy at the end)").at_least(
                LEARNED, _ICL.at(**model, **_MORE), _ICL.at(**_NONE, **_MORE), _UNTRAINED
            )
            for model, name in ((_THREE, "Three parameters"), (_TWO, "Two parameters (beta_2 = 0)"))
        ),
        # The paper says of CLA that this head's earlier transition masks its slow phase. TLA2 cannot rise by itself
        # without beta_2.
        *alignment_claims("Three parameters: ", ("tla2",), **_THREE, **_MORE),
        *alignment_claims("beta_2 = 0: ", (), **_TWO, **_MORE),
        *_stall_claims(_STALLED.at(**_TWO, **_EQUAL), _STALLED.at(**_TWO, **_MORE), published="four of six"),
    ],
    published="(a), (b): an abrupt transition with and without beta_2. (c): two of six seeds learn at L = N = 8.",
)


# Figure A.2

_PANELS = {"three parameters": _THREE, "two parameters": _TWO}
_SIZES = (SMOKE, CPU.with_task(n_classes=512), PAPER.with_task(n_classes=512, d_content=64))

FIGA2 = Experiment(
    name="abrupt/figA2",
    title="Loss and accuracy of the minimal model",
    source=f"{SOURCE}, Fig. A.2",
    study=grid_study("abrupt/figA2", *(Grid(size.with_task(burst=2), (_THREE, _TWO, _NONE)) for size in _SIZES)),
    figures={
        "accuracy": training_courses(BOTH, _PANELS),
        "loss": training_courses({"loss_icl": "in context"}, _PANELS, "loss (nats)"),
    },
    claims=[
        Claim("The minimal model learns in context without context sequences (accuracy at the end)").at_least(
            LEARNED, _ICL.at(**_THREE), _ICL.at(**_NONE), _UNTRAINED
        )
    ],
    published="K = 512, D = 64, B = 2: an abrupt rise of accuracy in context.",
)


# Figure A.5


def _conditions(table: Table) -> list[dict[Any, Any]]:
    frame: Any = table.frame
    return frame[["n_labels", "n_pairs"]].drop_duplicates().to_dict("records")


def _draw_a5(table: Table) -> dict[str, go.Figure]:
    panels = {f"L {each['n_labels']}, N {each['n_pairs']}": {"measure": "icl", **each} for each in _conditions(table)}
    return {"figA5": seed_courses(panels, value="IC accuracy")(table)}


def _stalled(*, more: bool) -> Statistic:
    """Which seeds stall, of all conditions with L > N or with L = N."""
    return Statistic(
        lambda table, _: np.ma.concatenate(
            [_STALLED.at(**each)(table) for each in _conditions(table) if (each["n_labels"] > each["n_pairs"]) == more]
        )
    )


def _figa5(size: Size, pairs: Sequence[int], labels: Sequence[int]) -> Grid:
    conditions = [{"n_pairs": n, "n_labels": count} for n in pairs for count in labels if count >= n]
    return Grid(size.with_task(**PLATEAU), conditions)


FIGA5 = Experiment(
    name="abrupt/figA5",
    title="As many labels as pairs: the transition may fail to come",
    source=f"{SOURCE}, Fig. A.5",
    study=grid_study(
        "abrupt/figA5",
        _figa5(SMOKE, (2,), (2, 8)),
        _figa5(CPU, (4,), (4, 8, 16)),
        _figa5(PAPER.with_task(n_classes=256), (4, 8, 16), (4, 8, 16, 32)),
    ),
    figures=_draw_a5,
    claims=_stall_claims(_stalled(more=False), _stalled(more=True), published="some of six"),
    published="Six seeds for each pair of L and N: robust if L > N, not if L = N.",
)
