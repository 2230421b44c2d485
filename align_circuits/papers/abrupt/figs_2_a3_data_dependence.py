"""Abrupt learning (Reddy, 2024): which data bring which learning, Figs. 2 and A.3."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.abrupt.grid import CPU, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.progress_measures import BOTH
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Study, lines
from align_circuits.papers.statistics import MIDDLE, Statistic, late_mean, levels
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_NAMES = {"iwl": BOTH["iwl"], "icl": BOTH["icl"]}
_BY_RANK = {"iwl_common": "in weights, the most frequent eighth", "iwl_rare": "in weights, the less frequent half"}


def _bases(table: Table) -> tuple[dict[str, Any], dict[str, Any]]:
    """The value of each number where it is not varied, and where the rank-frequency exponent is."""
    frame: Any = table.frame
    noise = frame["noise"].mode()[0]
    n_classes, skewed = (
        int(frame.loc[varied, "n_classes"].iloc[0]) for varied in (frame["noise"] != noise, frame["zipf"] > 0)
    )
    base = {"n_classes": n_classes, "burst": 1, "noise": noise, "zipf": 0.0}
    return base, base | {"n_classes": skewed}


def accuracy_grid(table: Table, measure: str) -> pd.DataFrame:
    """Returns panel (a): burstiness down, classes across, means over seeds at the end; NaN where none was trained."""
    end = late_mean(measure, **_bases(table)[0])
    bursts, classes = levels(table, "burst"), levels(table, "n_classes")
    by_seed = [[end.at(burst=burst, n_classes=count)(table) for count in classes] for burst in bursts]
    means = [[each.mean() if len(each) else np.nan for each in row] for row in by_seed]
    return pd.DataFrame(means, bursts, classes)


def _draw(table: Table) -> dict[str, go.Figure]:
    base, skewed = _bases(table)
    grids = {  # powers of two, evenly spaced
        name: accuracy_grid(table, measure).rename(index=str, columns=str) for measure, name in _NAMES.items()
    }
    noise = {name: late_mean(measure, **base) for measure, name in _NAMES.items()}
    zipf = {name: late_mean(measure, **skewed) for measure, name in (_NAMES | _BY_RANK).items()}
    return {
        "a": plots.accuracy_grids(grids, x="classes K", y="burstiness B"),
        "b": lines(noise, "noise", label="within-class variability ε")(table),
        "c": lines(zipf, "zipf", label="exponent α of the rank-frequency distribution")(table),
    }


def _check(table: Table) -> list[Claim]:
    base, skewed = _bases(table)
    most = levels(table, "burst")[-1]
    k, few = base["n_classes"], levels(table, "n_classes")[0]
    icl, iwl = (late_mean(measure, **base) for measure in ("icl", "iwl"))
    skewed_icl, common, rare = (late_mean(measure, **skewed) for measure in ("icl", *_BY_RANK))
    lower = skewed_icl.map(np.minimum, common)
    return [
        Claim("K raises learning in context (K = {n_classes.high} minus {n_classes.low}, B = 1)").at_least(
            0.3, icl.rise("n_classes"), icl.at(burst=0).rise("n_classes"), "B = 0"
        ),
        Claim("K lowers learning in weights (K = {n_classes.low} minus {n_classes.high}, B = 1)").at_least(
            0.3, iwl.fall("n_classes"), iwl.at(burst=0).fall("n_classes"), "B = 0: any K can be learned in weights"
        ),
        Claim(f"B raises learning in context (B = {most} minus 1, K = {k})").at_least(
            0.15, icl.rise("burst", 1, most), icl.at(n_classes=few).rise("burst", 0, 1), f"B = 1 minus 0, K = {few}"
        ),
        Claim(f"B lowers learning in weights (B = 1 minus {most}, K = {k})").at_least(
            0.15, iwl.fall("burst", 1, most), iwl.at(n_classes=few).fall("burst", 0, 1), f"B = 0 minus 1, K = {few}"
        ),
        Claim(f"Noise raises learning in context (ε = {{noise.high:g}} minus {{noise.low:g}}, K = {k})").at_least(
            0.15, icl.rise("noise"), icl.at(burst=0).rise("noise"), "B = 0"
        ),
        Claim("α = 1 keeps both (the lower of accuracy in context and in weights on frequent classes)").at_least(
            0.5, lower.at(zipf=1.0), lower, "α = 0"
        ),
        Claim("α = 1 leaves rare classes unlearned in weights (accuracy on the less frequent half)").at_most(
            0.3, rare.at(zipf=1.0), common.at(zipf=1.0), "the most frequent eighth"
        ),
        Claim("α = {zipf.high:g} does not bring learning in context (α = 1 minus it)").at_least(
            0.3, skewed_icl.fall("zipf", 1.0), skewed_icl.rise("zipf", 0.0, 1.0), "α = 0"
        ),
    ]


def _grid(
    size: Size,
    classes: Sequence[int],
    bursts: Sequence[int],
    noises: Sequence[float],
    zipfs: Sequence[float],
    skewed: int,
    **model: str,
) -> Grid:
    base = {"n_classes": size.task.n_classes, "burst": 1, "noise": size.task.noise, "zipf": 0.0}
    changes = [
        *({"n_classes": k, "burst": b} for k in classes for b in bursts),
        *({"noise": noise} for noise in noises),
        *({"noise": noise, "burst": 0} for noise in (noises[0], noises[-1])),
        *({"n_classes": skewed, "zipf": zipf} for zipf in zipfs),
    ]
    return Grid(size, _without_repeats([base | change | model for change in changes]))


def _without_repeats(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for place, each in enumerate(conditions) if each not in conditions[:place]]


def _paper_cells(paper: Size, **model: Any) -> Grid:
    """The cells that the claims speak of, then some between them, seed by seed: a run may stop after the former."""
    size, low, base, high = replace(paper, log_every=5000), 128, paper.task.n_classes, 2048
    grids = (
        _grid(size, (low, base), (0, 1, 2), (0.1, 6.4), (0.0, 1.0, 1.75), base, **model),
        _grid(size, (high,), (0, 1), (0.1,), (0.0,), base, **model),
        _grid(size, (low, base, high), (0, 1, 2), (0.1, 0.4, 1.6, 6.4), (0.0, 0.5, 1.0, 1.5, 1.75), base, **model),
    )
    cells = _without_repeats([dict(each) for grid in grids for each in grid.conditions])
    return Grid(size, cells, together=6, seeds_together=1)


def _study(name: str, paper: Size, *, seeds: int, **model: Any) -> Study:
    """Returns the study of one model; `seeds` are those of its `cpu` scale.

    Six were run first. The others were registered after these were seen, as many as would decide what was undecided.
    """
    cpu = replace(CPU, seeds=seeds, first_seed=30, log_every=300).with_task(n_classes=128)
    powers = [2**power for power in range(7, 12)]
    noises = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
    zipfs = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
    base = paper.task.n_classes
    return grid_study(
        name,
        _grid(SMOKE, (8, 16), (0, 1, 2), (0.1, 1.0), (0.0, 1.0, 1.5), 16, **model),
        _grid(cpu, (32, 128, 512), (0, 1, 2), (0.1, 0.4, 0.8, 1.6), (0.0, 0.5, 1.0, 1.5), 512, **model),
        _grid(replace(paper, log_every=15_000), powers, (0, 1, 2, 4), noises, zipfs, base, **model),
        paper_cells=_paper_cells(paper, **model),
    )


FIG2 = Experiment(
    name="abrupt/fig2",
    title="Learning in weights and in context against the data",
    source=f"{SOURCE}, Fig. 2",
    study=_study("abrupt/fig2", PAPER, seeds=30),
    figures=_draw,
    claims=_check,
    published="K, B and ε raise learning in context and lower it in weights; α = 1 brings both, not of rare classes.",
)

FIGA3 = Experiment(
    name="abrupt/figA3",
    title="The same of the two-parameter induction head",
    source=f"{SOURCE}, Fig. A.3",
    study=_study("abrupt/figA3", PAPER.with_task(n_classes=512, d_content=64), seeds=12, model="two"),
    figures=_draw,
    claims=_check,
    published="Every dependence of the full network is found again.",
)


# Noise against learning in weights

_IWL, _ICL = (late_mean(measure, burst=1) for measure in _NAMES)


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


def _noise_grid(size: Size, noises: Sequence[float]) -> Grid:
    return Grid(size, [{"noise": noise, "burst": burst} for burst in (0, 1) for noise in noises])


NOISE = Experiment(
    name="abrupt/noise",
    title="Variation within classes against learning in weights",
    source=f"{SOURCE}, Fig. 2 (b)",
    study=grid_study(
        "abrupt/noise",
        _noise_grid(SMOKE, (0.1, 0.5, 1.0)),
        _noise_grid(replace(CPU, first_seed=20).with_task(n_classes=128), (0.1, 0.4, 0.8, 1.6)),
        _noise_grid(replace(PAPER, log_every=5000), (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)),
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
        ).at_least(0.3, _IWL.fall("noise"), _ICL.fall("noise"), "accuracy in context"),
        Claim("It does so from each ε to the next (accuracy in weights, the smallest fall, B = 1)").at_least(
            0.02, _least_fall(_IWL), _least_fall(_ICL), "accuracy in context"
        ),
        Claim(
            "It does so more where the context holds the answer (fall from ε = {noise.low:g} to {noise.middle:g}, "
            "B = 1 minus B = 0)"
        ).at_least(0.1, _fall_beyond_unmixed(_IWL), _fall_beyond_unmixed(_ICL), "accuracy in context"),
    ],
    published="With more variation within classes accuracy in weights falls and accuracy in context rises.",
)
