"""Abrupt learning (Reddy, 2024): learning in context and in weights, the one or both, Figs. 1 (d) and A.1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.grid import CPU, LEARNED, PAPER, SMOKE, SOURCE, Grid, grid_study
from align_circuits.papers.abrupt.progress_measures import BOTH, training_courses
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment
from align_circuits.papers.statistics import Statistic, courses_of, late_mean, rows
from align_circuits.tables.tables import Table

_ICL, _IWL, _SWAPPED = (late_mean(measure) for measure in ("icl", "iwl", "swap"))

# Figure 1 d


def _of_peak(accuracy: Table) -> Float[ndarray, " seed"]:
    courses = courses_of(accuracy)
    return (courses.iloc[-2:].mean() / courses.rolling(2).mean().max()).to_numpy()


_OVER_PEAK = rows("icl").map(_of_peak)
_BURSTY, _PLAIN = {"burst": 2}, {"burst": 0}
_BURSTY_OR_NOT = (_BURSTY, _PLAIN)

FIG1 = Experiment(
    name="abrupt/fig1",
    title="Loss and accuracy, in context and in weights",
    source=f"{SOURCE}, Fig. 1 (d)",
    study=grid_study(
        "abrupt/fig1",
        Grid(SMOKE, _BURSTY_OR_NOT),
        Grid(CPU.with_task(n_classes=512), _BURSTY_OR_NOT),
        # A condition of three seeds takes two to three hours of one core. Three were registered and run first, the
        # other three after these had left it undecided whether learning in context fades.
        Grid(PAPER.with_task(n_classes=512), _BURSTY_OR_NOT, together=1, seeds_together=3),
    ),
    figures={
        "accuracy": training_courses(BOTH | {"swap": "swapped labels"}, {"": _BURSTY}),
        "loss": training_courses({"loss_icl": "in context"}, {"": _BURSTY}, "loss (nats)"),
    },
    claims=[
        Claim("With B = 2 the network learns to answer in context (accuracy at the end)").at_least(
            LEARNED, _ICL.at(**_BURSTY), _ICL.at(**_PLAIN), "B = 0"
        ),
        Claim("It follows swapped labels (accuracy at the end)").at_least(
            LEARNED, _SWAPPED.at(**_BURSTY), _SWAPPED.at(**_PLAIN), "B = 0"
        ),
        Claim("Learning in context does not fade (accuracy at the end over its peak)").at_least(
            0.95, _OVER_PEAK.at(**_BURSTY), _OVER_PEAK.at(**_PLAIN), "B = 0, where there is nothing to keep"
        ),
    ],
    published="Six seeds, B = 2, K = 512: accuracy in context rises abruptly to 1 and stays.",
)


# Figure A.1

_WEIGHTS_ALONE, *_MIXED = (
    {"p_burst": p_burst, "p_context": p_context}
    for p_burst, p_context in ((0.5, 0.0), (0.25, 0.5), (0.5, 0.5), (0.5, 0.8))
)
_CONDITIONS = (_WEIGHTS_ALONE, *_MIXED)
_LOWER, _GAP = _ICL.map(np.minimum, _IWL), _IWL - _ICL


def _extreme(statistic: Statistic, extreme: Callable[..., Any]) -> Statistic:
    """A statistic in that cell with 0 < p_C < 1 in which its mean is the lowest (`min`) or the highest (`max`)."""
    first, *others = (statistic.at(**condition) for condition in _MIXED)
    return first.map(lambda *cells: extreme(cells, key=np.mean), *others)


_LONGER = replace(CPU, steps=9000, first_seed=3, log_every=300)
"""After 3,000 steps, on seeds 0 to 2, both were not yet learned where p_C = 0.8."""

FIGA1 = Experiment(
    name="abrupt/figA1",
    title="Both solutions at once, where only both reach zero loss",
    source=f"{SOURCE}, Fig. A.1",
    study=grid_study(
        "abrupt/figA1",
        Grid(SMOKE.with_task(noise=0.0), _CONDITIONS),
        Grid(_LONGER.with_task(noise=0.0), _CONDITIONS),
        Grid(PAPER.with_task(noise=0.0, n_classes=256), _CONDITIONS, together=3),
    ),
    figures={
        "figA1": training_courses(
            BOTH, {f"p_B {each['p_burst']:g}, p_C {each['p_context']:g}": each for each in _CONDITIONS}
        )
    },
    claims=[
        Claim("0 < p_C < 1 and p_B < 1: both are learned (the lower of the two accuracies, the worst cell)").at_least(
            0.8, _extreme(_LOWER, min), _LOWER.at(**_WEIGHTS_ALONE), "p_C = 0"
        ),
        Claim("p_B < 1 and p_C = 0 ends in weights (accuracy in weights minus in context)").at_least(
            0.5, _GAP.at(**_WEIGHTS_ALONE), _extreme(_GAP, max), "0 < p_C < 1"
        ),
    ],
    published="In all cases of 0 < p_B < 1 and 0 < p_C < 1 it learns both; with p_B < 1 and p_C = 0, the weights.",
)
