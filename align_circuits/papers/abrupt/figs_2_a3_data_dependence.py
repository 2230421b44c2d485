"""Abrupt learning (Reddy, 2024): which data bring which learning, Figs. 2 and A.3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, conditions_of
from align_circuits.papers.abrupt.grid import BOTH, CPU, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.lab import Claim, Experiment, Study, over_seeds
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_ORDER = {"iwl": BOTH["iwl"], "icl": BOTH["icl"]}
_BY_RANK = {"iwl_common": "in weights, the most frequent eighth", "iwl_rare": "in weights, the less frequent half"}
_KEYS = ["n_classes", "burst", "noise", "zipf"]


def accuracy_grid(table: Table, measure: str) -> pd.DataFrame:
    """Returns panel (a): burstiness down, classes across, means over seeds at the end."""
    rows = [{**row, "value": at_end(table, measure, **row).mean()} for row in _varied(table, "n_classes", "burst")]
    return pd.DataFrame(rows).pivot(index="burst", columns="n_classes", values="value")


def _base(table: Table) -> dict[str, Any]:
    """The value of each number where it is not varied; K is that of the conditions with another noise."""
    conditions: Any = pd.DataFrame(conditions_of(table, _KEYS))
    noise = conditions["noise"].mode()[0]
    n_classes = conditions.loc[conditions["noise"] != noise, "n_classes"].iloc[0]
    return {"n_classes": n_classes, "burst": 1, "noise": noise, "zipf": 0.0}


def _varied(table: Table, *names: str) -> list[dict[str, Any]]:
    """The conditions in which nothing but some numbers differs from the base, sorted by these."""
    conditions = conditions_of(table, _KEYS)
    base = _base(table)
    if names == ("zipf",):
        base["n_classes"] = next(row["n_classes"] for row in conditions if row["zipf"] > 0)
    fixed = {name: value for name, value in base.items() if name not in names}
    chosen = [row for row in conditions if fixed.items() <= row.items()]
    return sorted(chosen, key=lambda row: [row[name] for name in names])


def _along(table: Table, name: str, measures: Mapping[str, str]) -> pd.DataFrame:
    return pd.DataFrame(
        {name: row[name], "measure": title, **vars(over_seeds(at_end(table, measure, **row)))}
        for row in _varied(table, name)
        for measure, title in measures.items()
    )


def _draw(table: Table) -> dict[str, go.Figure]:
    grids = {title: accuracy_grid(table, measure) for measure, title in _ORDER.items()}
    for grid in grids.values():  # powers of two, evenly spaced
        grid.index, grid.columns = grid.index.astype(str), grid.columns.astype(str)
    noise, zipf = _along(table, "noise", _ORDER), _along(table, "zipf", _ORDER | _BY_RANK)
    return {
        "a": plots.accuracy_grids(grids, x="classes K", y="burstiness B"),
        "b": plots.curves({"": noise}, x="noise", by="measure", label="within-class variability ε"),
        "c": plots.curves({"": zipf}, x="zipf", by="measure", label="exponent α of the rank-frequency distribution"),
    }


def _check(table: Table) -> list[Claim]:
    grid, zipfs = _varied(table, "n_classes", "burst"), _varied(table, "zipf")
    noises = sorted(row["noise"] for row in _varied(table, "noise"))
    counts, bursts = ({int(row[name]) for row in grid} for name in ("n_classes", "burst"))
    few, many = min(counts), max(counts)
    most = sorted(bursts)[-2] if len(bursts) > 3 else max(bursts)  # B = N leaves one label in the context: trivial
    base = _base(table)
    middle, skewed = int(base["n_classes"]), {"n_classes": zipfs[0]["n_classes"]}
    low, high, steep = noises[0], noises[-1], zipfs[-1]["zipf"]

    def end(measure: str, **changes: Any) -> Float[ndarray, " seed"]:
        return at_end(table, measure, **(base | changes))

    def rise(measure: str, name: str, first: Any, last: Any, **where: Any) -> Float[ndarray, " seed"]:
        """How much higher a measure ends with one value of a number than with another."""
        return end(measure, **where | {name: last}) - end(measure, **where | {name: first})

    def lower_of_both(zipf: float) -> Float[ndarray, " seed"]:
        return np.minimum(*(end(measure, **skewed, zipf=zipf) for measure in ("icl", "iwl_common")))

    k, b = ("n_classes", few, many), ("burst", 1, most)
    plain_b, noise = ("burst", 0, 1), ("noise", low, high)
    common, rare = (end(measure, **skewed, zipf=1.0) for measure in _BY_RANK)
    return [
        Claim(f"K raises learning in context (K = {many} minus {few}, B = 1)").at_least(
            0.3, rise("icl", *k, burst=1), rise("icl", *k, burst=0), "B = 0"
        ),
        Claim(f"K lowers learning in weights (K = {few} minus {many}, B = 1)").at_least(
            0.3, -rise("iwl", *k, burst=1), -rise("iwl", *k, burst=0), "B = 0: any K can be learned in weights"
        ),
        Claim(f"B raises learning in context (B = {most} minus 1, K = {middle})").at_least(
            0.15, rise("icl", *b), rise("icl", *plain_b, n_classes=few), f"B = 1 minus 0, K = {few}"
        ),
        Claim(f"B lowers learning in weights (B = 1 minus {most}, K = {middle})").at_least(
            0.15, -rise("iwl", *b), -rise("iwl", *plain_b, n_classes=few), f"B = 0 minus 1, K = {few}"
        ),
        Claim(f"Noise raises learning in context (ε = {high:g} minus {low:g}, K = {middle})").at_least(
            0.15, rise("icl", *noise), rise("icl", *noise, burst=0), "B = 0"
        ),
        Claim("α = 1 keeps both (the lower of accuracy in context and in weights on frequent classes)").at_least(
            0.5, lower_of_both(1.0), lower_of_both(0.0), "α = 0"
        ),
        Claim("α = 1 leaves rare classes unlearned in weights (accuracy on the less frequent half)").at_most(
            0.3, rare, common, "the most frequent eighth"
        ),
        Claim(f"α = {steep:g} does not bring learning in context (α = 1 minus it)").at_least(
            0.3, rise("icl", "zipf", steep, 1.0, **skewed), rise("icl", "zipf", 0.0, 1.0, **skewed), "α = 0"
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
    conditions = [base | change | model for change in changes]
    return Grid(size, [each for place, each in enumerate(conditions) if each not in conditions[:place]])


def _study(name: str, paper: Size, **model: str) -> Study:
    cpu = replace(CPU, first_seed=30, log_every=300).with_task(n_classes=128)
    powers = [2**power for power in range(7, 12)]
    noises = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
    zipfs = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
    return grid_study(
        name,
        _grid(SMOKE, (8, 16), (0, 1, 2), (0.1, 1.0), (0.0, 1.0, 1.5), 16, **model),
        _grid(cpu, (32, 128, 512), (0, 1, 2), (0.1, 0.4, 0.8, 1.6), (0.0, 0.5, 1.0, 1.5), 512, **model),
        _grid(replace(paper, log_every=15_000), powers, (0, 1, 2, 4), noises, zipfs, paper.task.n_classes, **model),
    )


FIG2 = Experiment(
    name="abrupt/fig2",
    title="Learning in weights and in context against the data",
    source=f"{SOURCE}, Fig. 2",
    study=_study("abrupt/fig2", PAPER),
    figures=_draw,
    claims=_check,
    published="K, B and ε raise learning in context and lower it in weights; α = 1 brings both, not of rare classes.",
)

FIGA3 = Experiment(
    name="abrupt/figA3",
    title="The same of the two-parameter induction head",
    source=f"{SOURCE}, Fig. A.3",
    study=_study("abrupt/figA3", PAPER.with_task(n_classes=512, d_content=64), model="two"),
    figures=_draw,
    claims=_check,
    published="Every dependence of the full network is found again.",
)
