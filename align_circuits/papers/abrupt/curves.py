"""Curves of many seeds: where they end, when they cross a level, and their means as figures draw them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.report import plots
from align_circuits.tables.intervals import t_interval
from align_circuits.tables.tables import Table


def conditions_of(table: Table, columns: Sequence[str]) -> list[dict[Any, Any]]:
    """Returns the conditions of a table: each combination of values that its columns have."""
    return pd.DataFrame(table.frame[list(columns)]).drop_duplicates().to_dict("records")


def by_seed(table: Table, measure: str, **where: Any) -> pd.DataFrame:
    """Returns one measure's curves, steps down and seeds across."""
    frame = table.where(measure=measure, **where).frame
    return frame.pivot(index="step", columns="seed", values="value").sort_index()


def at_start(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the untrained networks' values."""
    return by_seed(table, measure, **where).iloc[0].to_numpy()


def at_end(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the mean of each seed's last tenth of probes, two at least."""
    curves = by_seed(table, measure, **where)
    return curves.iloc[-max(2, len(curves) // 10) :].mean().to_numpy()


def stalled(table: Table, **where: Any) -> Bool[ndarray, " seed"]:
    """Returns for each seed whether its accuracy in context ends below one half."""
    return at_end(table, "icl", **where) < 0.5


def last_crossing(steps: Float[ndarray, " probe"], values: Float[ndarray, " probe"], level: float = 0.5) -> float:
    """Returns the step at which a curve crosses `level` for good, between probes by a straight line; NaN if never.

    For good: at all later probes it stays at or above the level. A curve that is above it from the first probe on has
    no crossing.

    Raises:
        ValueError: Not one value for each of ascending steps.

    >>> last_crossing(np.array([0.0, 10, 20, 30]), np.array([0.1, 0.6, 0.4, 0.8]))
    22.5
    """
    if len(steps) != len(values) or not len(steps) or (np.diff(steps) <= 0).any():
        raise ValueError(f"{len(values)} values at {len(steps)} steps: give one value for each of ascending steps")
    below = np.flatnonzero(~(values >= level))
    if not len(below) or below[-1] == len(values) - 1:
        return float("nan")
    last = int(below[-1])
    share = (level - values[last]) / (values[last + 1] - values[last])
    return float(steps[last] + share * (steps[last + 1] - steps[last]))


def transitions(
    table: Table, measure: str = "icl", level: float | Float[ndarray, " seed"] = 0.5, **where: Any
) -> Float[ndarray, " seed"]:
    """Returns the step at which each seed's curve crosses `level`; NaN where it never does."""
    curves = by_seed(table, measure, **where)
    steps, levels = curves.index.to_numpy(float), np.broadcast_to(level, curves.shape[1])
    return np.array(
        [last_crossing(steps, curves[seed].to_numpy(), at) for seed, at in zip(curves, levels, strict=True)]
    )


def half_rises(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the step at which each seed's curve crosses the middle between its first value and its end."""
    middle = (at_start(table, measure, **where) + at_end(table, measure, **where)) / 2
    return transitions(table, measure, middle, **where)


def has_formed(table: Table, **where: Any) -> Bool[ndarray, " seed"]:
    """Returns in which seeds the induction head forms.

    A seed makes the transition, and ends with ILA1 above one half and TILA2 above one half of TLA2, which bounds it.
    """
    ila1, tila2, tla2 = (at_end(table, measure, **where) for measure in ("ila1", "tila2", "tla2"))
    return ~np.isnan(transitions(table, **where)) & (ila1 > 0.5) & (tila2 > tla2 / 2)


def mean_curves(table: Table, measures: Mapping[str, str], **where: Any) -> pd.DataFrame:
    """Returns curves over steps, means over seeds with 95% intervals, as `plots.curves` draws them.

    Args:
        table: Of a grid.
        measures: The name to draw for each measure.
        **where: Which condition.
    """
    return pd.concat(
        [_means(name, by_seed(table, measure, **where)) for measure, name in measures.items()], ignore_index=True
    )


def draw_means(
    table: Table, measures: Mapping[str, str], panels: Mapping[str, Mapping[str, Any]], value: str = "accuracy"
) -> go.Figure:
    """Returns the mean curves of several conditions as a figure.

    Args:
        table: Of a grid.
        measures: The name to draw for each measure.
        panels: The condition of each panel, by its caption.
        value: The title of the y axis.
    """
    curves = {caption: mean_curves(table, measures, **where) for caption, where in panels.items()}
    return plots.curves(curves, x="step", by="measure", label="step", value=value)


def aligned_curves(table: Table, measures: Mapping[str, str], **where: Any) -> pd.DataFrame:
    """Returns the same, each seed's steps counted from where its accuracy in context crosses one half.

    Seeds that never cross it are left out; values between probes lie on straight lines, and steps that not all seeds
    reach are left out.
    """
    zero = transitions(table, **where)
    curves = {name: by_seed(table, measure, **where) for measure, name in measures.items()}
    steps = next(iter(curves.values())).index.to_numpy(float)
    crossing = np.flatnonzero(~np.isnan(zero))
    if not len(crossing):
        return mean_curves(table, measures, **where)
    gap = steps[1] - steps[0]
    first, last = (steps[0] - zero[crossing]).max(), (steps[-1] - zero[crossing]).min()
    grid = np.arange(np.ceil(first / gap), np.floor(last / gap) + 1) * gap
    frames = []
    for name, frame in curves.items():
        shifted = [np.interp(grid + zero[seed], steps, frame.iloc[:, seed].to_numpy()) for seed in crossing]
        frames.append(_means(name, pd.DataFrame(np.stack(shifted, 1), index=pd.Index(grid, name="step"))))
    return pd.concat(frames, ignore_index=True)


def single_curves(table: Table, measure: str, **where: Any) -> pd.DataFrame:
    """Returns one measure's curves, each seed's by itself, as `plots.curves` draws them."""
    curves = by_seed(table, measure, **where)
    return curves.reset_index().melt("step", var_name="seed").assign(low=np.nan, high=np.nan)


def _means(name: str, curves: pd.DataFrame) -> pd.DataFrame:
    values = curves.to_numpy(float)
    low, high = t_interval(values)
    frame = pd.DataFrame({"step": curves.index, "measure": name, "low": low, "high": high})
    return frame.assign(value=np.nanmean(values, 1))
