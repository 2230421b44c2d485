"""Abrupt learning (Reddy, 2024): variation within classes lowers learning in weights, Fig. 2 (b)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from align_circuits.papers.abrupt.grid import CPU, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.progress_measures import BOTH
from align_circuits.papers.lab import MIDDLE, Claim, Experiment, Statistic, late_mean, levels, lines

IWL, ICL = (late_mean(measure, burst=1) for measure in ("iwl", "icl"))


def _least_fall(accuracy: Statistic) -> Statistic:
    """The smallest fall from one level of noise to the next."""
    return Statistic(
        lambda table, _: min(
            (accuracy.fall("noise", *pair)(table) for pair in pairwise(levels(table, "noise"))), key=np.mean
        )
    )


def _fall_beyond_unmixed(accuracy: Statistic) -> Statistic:
    """How much more it falls where the context holds the answer than where it does not."""
    fall = accuracy.fall("noise", last=MIDDLE)
    return fall - fall.at(burst=0)


def _grid(size: Size, noises: Sequence[float]) -> Grid:
    return Grid(size, [{"noise": noise, "burst": burst} for burst in (0, 1) for noise in noises])


NOISE = Experiment(
    name="abrupt/noise",
    title="Variation within classes against learning in weights",
    source=f"{SOURCE}, Fig. 2 (b)",
    study=grid_study(
        "abrupt/noise",
        _grid(SMOKE, (0.1, 0.5, 1.0)),
        _grid(replace(CPU, first_seed=20).with_task(n_classes=128), (0.1, 0.4, 0.8, 1.6)),
        _grid(replace(PAPER, log_every=5000), (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)),
    ),
    figures={
        "": lines(
            {name: late_mean(measure) for measure, name in BOTH.items()},
            "noise",
            {f"B = {burst}": {"burst": burst} for burst in (1, 0)},
            label="within-class variability ε",
        )
    },
    claims=[
        Claim(
            "Noise lowers learning in weights (accuracy in weights, ε = {noise.low:g} minus {noise.high:g}, B = 1)"
        ).at_least(0.3, IWL.fall("noise"), ICL.fall("noise"), "accuracy in context"),
        Claim("It does so from each ε to the next (accuracy in weights, the smallest fall, B = 1)").at_least(
            0.02, _least_fall(IWL), _least_fall(ICL), "accuracy in context"
        ),
        Claim(
            "It does so more where the context holds the answer (fall from ε = {noise.low:g} to {noise.middle:g}, "
            "B = 1 minus B = 0)"
        ).at_least(0.1, _fall_beyond_unmixed(IWL), _fall_beyond_unmixed(ICL), "accuracy in context"),
    ],
    published="With more variation within classes accuracy in weights falls and accuracy in context rises.",
)
