"""Abrupt learning (Reddy, 2024): which data bring which learning, Figs. 2 and A.3."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.ensemble_runs import CPU, PAPER, SMOKE, Size, Sweep, at_end, cells_of, curves_only
from align_circuits.papers.abrupt.figs_1_3_4_network import SOURCE, on
from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SEEN = {"iwl": "in weights", "icl": "in context"}
RARE = {"iwl_common": "in weights, the most frequent eighth", "iwl_rare": "in weights, the less frequent half"}
_KEYS = ["n_classes", "burst", "noise", "zipf"]


def grid_of(table: Table, measure: str) -> pd.DataFrame:
    """Returns panel (a): burstiness down, classes across, means over seeds at the end."""
    cells = _varied(table, "n_classes", "burst")
    cells["value"] = [at_end(table, measure, **_cell(row)).mean() for _, row in cells.iterrows()]
    return cells.pivot(index="burst", columns="n_classes", values="value")


def _cell(row: Any) -> dict[str, Any]:
    return {name: row[name] for name in _KEYS}


def _base(table: Table) -> dict[str, Any]:
    """What a number is where it is not varied; K is that of the cells with another noise."""
    cells: Any = cells_of(table, _KEYS)
    noise = cells["noise"].mode()[0]
    n_classes = cells.loc[cells["noise"] != noise, "n_classes"].iloc[0]
    return {"n_classes": n_classes, "burst": 1, "noise": noise, "zipf": 0.0}


def _varied(table: Table, *names: str) -> pd.DataFrame:
    """The cells in which nothing but some numbers differs from the base."""
    cells: Any = cells_of(table, _KEYS)
    base = _base(table)
    others = [name for name in _KEYS if name not in names]
    if names == ("zipf",):
        base["n_classes"] = cells.loc[cells["zipf"] > 0, "n_classes"].iloc[0]
    keep = np.logical_and.reduce([cells[name] == base[name] for name in others])
    return cells[keep].sort_values(list(names)).reset_index(drop=True)


def _along(table: Table, name: str, measures: dict[str, str]) -> pd.DataFrame:
    rows = []
    for _, row in _varied(table, name).iterrows():
        for measure, said in measures.items():
            found = over_seeds(at_end(table, measure, **_cell(row)))
            rows.append({name: row[name], "measure": said, **vars(found)})
    return pd.DataFrame(rows)


def _draw(table: Table) -> dict[str, go.Figure]:
    grids = {said: grid_of(table, measure) for measure, said in SEEN.items()}
    for grid in grids.values():  # powers of two, evenly spaced
        grid.index, grid.columns = grid.index.astype(str), grid.columns.astype(str)
    noise, zipf = _along(table, "noise", SEEN), _along(table, "zipf", SEEN | RARE)
    return {
        "a": plots.accuracy_grids(grids, x="classes K", y="burstiness B"),
        "b": plots.curves({"": noise}, x="noise", by="measure", label="within-class variability ε"),
        "c": plots.curves({"": zipf}, x="zipf", by="measure", label="exponent α of the rank-frequency distribution"),
    }


def _check(table: Table) -> list[Check]:
    grid: Any = _varied(table, "n_classes", "burst")
    noise, zipf = (np.sort(_varied(table, name)[name].to_numpy(float)) for name in ("noise", "zipf"))
    few, many = int(grid["n_classes"].min()), int(grid["n_classes"].max())
    low, high, steep = noise[0], noise[-1], zipf[-1]
    skewed = int(_varied(table, "zipf")["n_classes"].to_numpy()[0])
    base = _base(table)

    def end(measure: str, **changes: Any) -> Float[ndarray, " seed"]:
        return at_end(table, measure, **(base | changes))

    def over_k(measure: str, burst: int) -> Float[ndarray, " seed"]:
        return end(measure, n_classes=many, burst=burst) - end(measure, n_classes=few, burst=burst)

    def over_b(measure: str, most: int, least: int, n_classes: int) -> Float[ndarray, " seed"]:
        return end(measure, n_classes=n_classes, burst=most) - end(measure, n_classes=n_classes, burst=least)

    bursts = sorted(int(burst) for burst in grid["burst"].unique())
    most = bursts[-2] if len(bursts) > 3 else bursts[-1]  # B = N leaves one label in the context: a trivial case
    middle = int(base["n_classes"])

    def both(at: float) -> Float[ndarray, " seed"]:
        where = {"n_classes": skewed, "zipf": at}
        return np.minimum(end("icl", **where), end("iwl_common", **where))

    return [
        Check(
            f"K raises learning in context (K = {many} minus {few}, B = 1)",
            relation=">=",
            threshold=0.3,
            **measured(over_k("icl", 1)),
            **controlled(over_k("icl", 0), "B = 0"),
        ),
        Check(
            f"K lowers learning in weights (K = {few} minus {many}, B = 1)",
            relation=">=",
            threshold=0.3,
            **measured(-over_k("iwl", 1)),
            **controlled(-over_k("iwl", 0), "B = 0: any K can be learned in weights"),
        ),
        Check(
            f"B raises learning in context (B = {most} minus 1, K = {middle})",
            relation=">=",
            threshold=0.15,
            **measured(over_b("icl", most, 1, middle)),
            **controlled(over_b("icl", 1, 0, few), f"B = 1 minus 0, K = {few}"),
        ),
        Check(
            f"B lowers learning in weights (B = 1 minus {most}, K = {middle})",
            relation=">=",
            threshold=0.15,
            **measured(-over_b("iwl", most, 1, middle)),
            **controlled(-over_b("iwl", 1, 0, few), f"B = 0 minus 1, K = {few}"),
        ),
        Check(
            f"Noise raises learning in context (ε = {high:g} minus {low:g}, K = {middle})",
            relation=">=",
            threshold=0.15,
            **measured(end("icl", noise=high) - end("icl", noise=low)),
            **controlled(end("icl", noise=high, burst=0) - end("icl", noise=low, burst=0), "B = 0"),
        ),
        Check(
            "α = 1 keeps both (the lower of accuracy in context and in weights on frequent classes)",
            relation=">=",
            threshold=0.5,
            **measured(both(1.0)),
            **controlled(both(0.0), "α = 0"),
        ),
        Check(
            "α = 1 leaves rare classes unlearned in weights (accuracy on the less frequent half)",
            relation="<=",
            threshold=0.3,
            **measured(end("iwl_rare", n_classes=skewed, zipf=1.0)),
            **controlled(end("iwl_common", n_classes=skewed, zipf=1.0), "the most frequent eighth"),
        ),
        Check(
            f"α = {steep:g} does not bring learning in context (α = 1 minus it)",
            relation=">=",
            threshold=0.3,
            **measured(end("icl", n_classes=skewed, zipf=1.0) - end("icl", n_classes=skewed, zipf=steep)),
            **controlled(end("icl", n_classes=skewed, zipf=1.0) - end("icl", n_classes=skewed), "α = 0"),
        ),
    ]


def _sweep(
    size: Size,
    classes: tuple[int, ...],
    bursts: tuple[int, ...],
    noises: tuple[float, ...],
    zipfs: tuple[float, ...],
    skewed: int,
    model: str = "network",
) -> Sweep:
    base = {"n_classes": size.task.n_classes, "burst": 1, "noise": size.task.noise, "zipf": 0.0}
    cells = [
        *({"n_classes": k, "burst": b} for k in classes for b in bursts),
        *({"noise": noise} for noise in noises),
        *({"noise": noise, "burst": 0} for noise in (noises[0], noises[-1])),
        *({"n_classes": skewed, "zipf": zipf} for zipf in zipfs),
    ]
    full = [base | cell | ({} if model == "network" else {"model": model}) for cell in cells]
    return Sweep(size, tuple(cell for place, cell in enumerate(full) if cell not in full[:place]))


def _scales(cpu: Size, paper: Size, model: str = "network") -> dict[Any, Sweep]:
    smoke = on(SMOKE, n_classes=16, noise=0.1)
    doubled = tuple(2**power for power in range(7, 12))
    alphas = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
    return {
        "smoke": _sweep(smoke, (8, 16), (0, 1, 2), (0.1, 1.0), (0.0, 1.0, 1.5), 16, model),
        "cpu": _sweep(cpu, (32, 128, 512), (0, 1, 2), (0.1, 0.4, 0.8, 1.6), (0.0, 0.5, 1.0, 1.5), 512, model),
        "paper": _sweep(
            paper, doubled, (0, 1, 2, 4), (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4), alphas, paper.task.n_classes, model
        ),
    }


FIG2 = Experiment(
    name="abrupt/fig2",
    title="Learning in weights and in context against the data",
    source=f"{SOURCE}, Fig. 2",
    scales=_scales(
        on(replace(CPU, seeds=3, log_every=300), n_classes=128, noise=0.1), replace(PAPER, log_every=15_000)
    ),
    run=curves_only,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="K, B and ε raise learning in context and lower it in weights; α = 1 brings both, not of rare classes.",
)

FIGA3 = Experiment(
    name="abrupt/figA3",
    title="The same of the two-parameter induction head",
    source=f"{SOURCE}, Fig. A.3",
    scales=_scales(
        on(replace(CPU, seeds=3, log_every=300), n_classes=128, noise=0.1),
        on(replace(PAPER, log_every=15_000), n_classes=512, d_content=64),
        model="two",
    ),
    run=curves_only,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="Every dependence of the full network is found again.",
)
