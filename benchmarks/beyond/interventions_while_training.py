"""Beyond abrupt learning: operations of the head given, removed, or their suspected causes fixed, from the start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.abrupt.grid import CPU, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.interventions import INTERVENTIONS, OPERATION_SITES
from align_circuits.papers.abrupt.progress_measures import FORMED, NAMES, TRANSITION, training_courses
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import About, Experiment, Study
from align_circuits.papers.statistics import Statistic, at_start, late_mean, measured, rows
from align_circuits.tables.tables import Table

NOTHING = "nothing"

HYPOTHESES = (
    ("H1: CLA → TLA2 → ILA1 and TILA2", "TLA2"),
    ("H1: CLA → TLA2 → ILA1 and TILA2", "CLA"),
    ("H2: TLA2 → ILA1 and TILA2", "TLA2"),
    ("H3: CLA → ILA1 and TILA2", "CLA"),
)
"""What the paper considers as the cause of the transition, and a measure that, fixed, cannot cause it."""

_HYPOTHESES = f"beyond {SOURCE}: its hypotheses H1 to H3 by intervention"


def brought_forward(intervention: str) -> Statistic:
    """Returns how much earlier the transition comes, as a share of its step; without one it counts at the end."""
    step = TRANSITION.map(lambda steps, icl: np.nan_to_num(steps, nan=icl.frame["step"].max()), rows("icl"))
    free, changed = (step.at(intervention=name) for name in (NOTHING, intervention))
    return (free - changed) / free


def hypotheses(table: Table) -> pd.DataFrame:
    """Returns which of H1 to H3 the interventions exclude.

    A hypothesis is excluded if a cause that it names was fixed from the start and the head formed in every seed all the
    same (`progress_measures.FORMED`). The bound on TILA2 was set after the kept results of `abrupt/clamped` were seen;
    the first, one half, cannot be reached while TLA2 is fixed. `abrupt/confirmed` repeats the test on fresh seeds.

    Args:
        table: Of `abrupt/clamped` or `abrupt/confirmed`.
    """
    found = []
    for hypothesis, cause in HYPOTHESES:
        formed = FORMED.at(intervention=f"{cause} fixed")(table)
        steps = [measured(TRANSITION.at(intervention=name)(table)) for name in (f"{cause} fixed", NOTHING)]
        found.append(
            {
                "hypothesis": hypothesis,
                "fixed": cause,
                "seeds in which the head forms": str(measured(formed)),
                "step": f"{steps[0]:.0f}",
                "step, nothing fixed": f"{steps[1]:.0f}",
                "excluded": "yes" if formed.all() else "no",
            }
        )
    return pd.DataFrame(found)


def _study(name: str, interventions: Iterable[str], *sizes: Size) -> Study:
    conditions = [{"intervention": each} for each in interventions]
    return grid_study(name, *(Grid(size.with_task(**PLATEAU), conditions) for size in sizes))


def _figures(
    families: Mapping[str, Sequence[str]], shown: Sequence[str] = ("icl", "tila2", "tla2")
) -> dict[str, Callable[[Table], go.Figure]]:
    """One figure for each family of interventions, a panel for each of them."""
    names = {measure: NAMES[measure] for measure in shown}
    return {
        title: training_courses(names, {each: {"intervention": each} for each in (NOTHING, *family)}, "measure")
        for title, family in families.items()
    }


_PAPER = PAPER.with_task(n_classes=256)

STUDY = _study("abrupt/interventions", INTERVENTIONS, SMOKE, replace(CPU, first_seed=40, steps=2000), _PAPER)

# Operations given, causes fixed

_ITEMS = brought_forward("previous, items"), "only items clamped"

CLAMPED = Experiment(
    name="abrupt/clamped",
    title="Operations given, and their suspected causes fixed, while the network trains",
    source=_HYPOTHESES,
    study=STUDY,
    figures=_figures(
        {
            "given while training": ("previous", "previous, labels", "previous, items", "target's label"),
            "fixed while training": ("TLA2 fixed", "CLA fixed"),
        }
    ),
    claims=[
        Claim(
            "Layer 1 clamped to the previous token from the start brings the transition forward (share of its step)"
        ).at_least(0.2, brought_forward("previous"), *_ITEMS),
        Claim("It is the labels' attention that matters (only labels clamped; share of its step)").at_least(
            0.2, brought_forward("previous, labels"), *_ITEMS
        ),
        Claim(
            "TLA2 is not needed (accuracy at the end while the target cannot prefer labels): H1 and H2 are excluded"
        ).at_least(
            0.9,
            late_mean("icl", intervention="TLA2 fixed"),
            late_mean("tla2", intervention="TLA2 fixed"),
            "TLA2 there, which must stay low",
        ),
        Claim(
            "CLA need not be learned (accuracy at the end while labels outside the context are ruled out): H1 and H3 "
            "are excluded"
        ).at_least(
            0.9,
            late_mean("icl", intervention="CLA fixed"),
            at_start("icl", intervention="CLA fixed"),
            "there before training",
        ),
    ],
    published="Not in the paper, which holds beta_2 = 0 in the reduced model (Fig. 6 b) and sets L = N (Fig. 6 c).",
    about=About.BEYOND,
)


# Operations removed


def _lost(intervention: str) -> Statistic:
    return late_mean("icl", intervention=NOTHING) - late_mean("icl", intervention=intervention)


WITHOUT = Experiment(
    name="abrupt/without",
    title="Each operation removed while the network trains",
    source=f"beyond {SOURCE}: Fig. 5 by intervention",
    study=STUDY,
    figures=_figures(
        {
            "removed while training": [f"no {operation}" for operation in OPERATION_SITES],
            "the same elsewhere": [f"no {operation}, elsewhere" for operation in OPERATION_SITES],
        }
    ),
    claims=[
        Claim(
            f"Taken away from the start, nothing takes its place: {site.description} (accuracy lost at the end)"
        ).at_least(
            0.4, _lost(f"no {operation}"), _lost(f"no {operation}, elsewhere"), "the same where the operation is not"
        )
        for operation, site in OPERATION_SITES.items()
    ],
    published="Not in the paper.",
    about=About.BEYOND,
)


# Causes fixed once more, by a criterion that was fixed before the seeds were seen

_CONFIRMED = ("TLA2 fixed", "CLA fixed", "no match")
"""Last, the control of the criterion: a network that cannot have the third operation."""

_FRESH = (replace(size, first_seed=first) for size, first in ((SMOKE, 2), (CPU, 6), (_PAPER, 6)))
_FORMED = {name: FORMED.at(intervention=name) for name in (NOTHING, *_CONFIRMED)}
_CANNOT_MATCH = _FORMED["no match"], "the target cannot match"

CONFIRMED = Experiment(
    name="abrupt/confirmed",
    title="TLA2 and CLA fixed, on fresh seeds and by a criterion set beforehand",
    source=_HYPOTHESES,
    study=_study("abrupt/confirmed", _FORMED, *_FRESH),
    figures=_figures({"fixed from the start": _CONFIRMED}, ("icl", "ila1", "tila2", "tla2", "cla")),
    claims=[
        Claim("With nothing held the head forms in every seed (share of seeds)").at_least(
            1.0, _FORMED[NOTHING], *_CANNOT_MATCH
        ),
        Claim("With TLA2 held the head forms in every seed: H1 and H2 are excluded (share of seeds)").at_least(
            1.0, _FORMED["TLA2 fixed"], *_CANNOT_MATCH
        ),
        Claim("With CLA held the head forms in no seed: H3 is not excluded (share of seeds)").at_most(
            0.0, _FORMED["CLA fixed"], _FORMED[NOTHING], "nothing held"
        ),
    ],
    published="Not in the paper. What abrupt/clamped found, stated as claims before these seeds were trained.",
    about=About.BEYOND,
)
