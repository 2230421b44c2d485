"""Figures of heads: maps over layers and heads, and the best heads of each metric."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from align_circuits.checks import checked, listed
from align_circuits.hooks.head_names import HeadLike, head_of
from align_circuits.report.plots.colours import BLANK, COLOURS, NOTED
from align_circuits.report.plots.figure_parts import (
    CAPTIONS,
    SHARES,
    UNITS,
    cells,
    coloured,
    interval_grids,
    panel_grid,
    plain,
    plain_list,
    points,
    rings,
    styled,
    unit_of,
)
from align_circuits.tables.tables import Table

GAP = 65
"""Pixels between rows of maps, for the numbers of heads and the captions of the next row."""


@checked
def head_map(table: Table, metric: str | None = None, title: str | None = None, unit: str = "") -> go.Figure:
    """Returns one metric of every head as a map, layers from bottom to top.

    The map has a place for every head of the model, as the table's provenance knows it; heads without a row stay grey.
    A difference of tables (any value below zero) is drawn on a diverging scale around zero.

    Args:
        table: With key columns layer, head and metric, one row per head.
        metric: Which to draw; may be left out where the table has one.
        title: Above the map; the metric's name by default.
        unit: The unit of the numbers, as in `head_maps`.

    Raises:
        ValueError: Nothing to draw: no rows of single heads, or no number among them; several rows for a head; or
            several metrics and none named.
    """
    metric = metric or table.only_metric("head_map(table, {!r})")
    return head_maps(table, [metric], title or metric, captions=False, unit=unit)


@checked
def head_maps(
    table: Table,
    panels: str | Sequence[str] | None = None,
    title: str = "",
    captions: bool = True,
    *,
    by: str = "metric",
    unit: str = "",
    marked: Mapping[str, Sequence[HeadLike]] | None = None,
    noted: Mapping[str, Sequence[HeadLike]] | None = None,
    shape: tuple[int, int] | None = None,
) -> go.Figure:
    """Returns a map for each metric side by side, all on one scale.

    Args:
        table: With key columns layer and head; one row per head in each panel.
        panels: What to draw, one or several, in order: metrics, or values of the column `by`. By default all that have
            the unit of the first, since they share one scale: scores up to 1 without the entropy, log-probability
            without accuracy.
        title: Above the maps.
        captions: Whether each map is headed by its panel's name.
        by: The key column that the panels are values of.
        unit: The unit of the numbers, such as `"nats"`, for the colour bar: they are effects, on a diverging scale that
            ends at the largest one. Without it they are scores, and the scale ends at 1 or above, but for a metric that
            has a unit, such as the entropy.
        marked: Heads to circle, by panel.
        noted: Other heads to frame with a diamond of another colour, by panel.
        shape: The model's numbers of layers and heads; by default those of the table's provenance, or as many as the
            table needs. Heads without a row stay grey.

    Raises:
        ValueError: No panels, no rows of single heads, no number among them, a head outside the shape, or more than one
            row for a head in a panel.
    """
    panels = _of_one_unit(table, by) if panels is None else listed(panels)
    if not panels:
        raise ValueError(f"no panels: name at least one value of {by!r}")
    frames = [_one_row_per_head(table.where(**{by: panel}), by) for panel in panels]
    layers, heads = _shape(table, frames, shape)
    known = np.concatenate([frame["value"].to_numpy(dtype=float) for frame in frames])
    known = known[np.isfinite(known)]
    if not len(known):
        raise ValueError(f"no head has a value of {', '.join(map(str, panels))}: there is nothing to draw")
    signed = bool(unit) or bool((known < 0).any())
    unit = unit or unit_of(table.where(**{by: panels[0]}))
    bound = max(float(np.abs(known).max(initial=0)), 0.0 if unit else 1.0) or 1.0  # a scale of no width shows nothing
    named = [CAPTIONS.get(panel, panel) if captions else "" for panel in panels]
    of_a_row = 150 + 16 * min(layers, 32)  # in pixels
    figure, panels_at = panel_grid(named, GAP / of_a_row, "head", horizontal_spacing=0.07)
    lines = panels_at[-1]["row"]
    for panel, frame, at_panel in zip(panels, frames, panels_at, strict=True):
        columns, rows = list(range(heads)), list(range(layers))
        z, *ends = interval_grids(frame, ("layer", rows), ("head", columns))
        hover = f"L%{{y}}H%{{x}} {plain(panel)}: %{{z:.3f}} [%{{customdata[0]:.3f}}, %{{customdata[1]:.3f}}]"
        figure.add_trace(cells(z, columns, rows, hover, customdata=np.stack(ends, -1)), **at_panel)
        for heads_of_panel, style in ((marked, {}), (noted, NOTED)):
            if framed := [head_of(head) for head in (heads_of_panel or {}).get(panel, ())]:
                layer, head = zip(*framed, strict=True)
                figure.add_trace(rings(head, layer, 13, 3, **style), **at_panel)
    figure.update_xaxes(dtick=1 if heads <= 16 else 4, showgrid=False)
    figure.update_yaxes(dtick=1 if layers <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    coloured(figure, unit or ("change" if signed else "score"), bound, signed=signed)
    drawn = styled(figure, title, height=of_a_row * lines + 60)
    gaps = len(known) < len(panels) * layers * heads
    return drawn.update_layout(plot_bgcolor=BLANK) if gaps else drawn


@checked
def top_heads(
    table: Table,
    metrics: str | Sequence[str] | None = None,
    n: int = 5,
    title: str = "",
    by: Literal["highest", "lowest", "absolute"] | None = None,
    *,
    normalized: bool = False,
) -> go.Figure:
    """Returns the best heads of each metric with their 95% intervals, one panel per metric, as `Table.top` ranks them.

    Args:
        table: With key columns layer, head and metric, one row per head.
        metrics: Which to draw, one or several, in order; by default all that have the unit of the first, as in
            `head_maps`.
        n: How many heads of each.
        title: Above the panels.
        by: What comes first, as for `Table.top`.
        normalized: Whether the effect as `Table.normalized` gives it stands behind each name, in percent.

    Raises:
        ValueError: No metrics.
    """
    metrics = _of_one_unit(table, "metric") if metrics is None else listed(metrics)
    if not metrics:
        raise ValueError("no metrics: name at least one value of 'metric'")
    units = [unit_of(table.where(metric=metric)) for metric in metrics]
    captions = [CAPTIONS.get(name, name) + f" ({of})" * bool(of) for name, of in zip(metrics, units, strict=True)]
    figure, panels = panel_grid(captions, 0.28, horizontal_spacing=0.09)
    shown: list[Any] = []
    for index, (metric, panel) in enumerate(zip(metrics, panels, strict=True)):
        top = table.top(metric, n, by=by)
        shown.append(top.frame)
        # Turned round: plotly draws the first category at the bottom.
        best, names = top.frame[::-1], _names(top.frame)
        if normalized:
            shares = top.normalized().frame["value"]
            # Plus 0, or a small fall would be printed as -0%.
            shares = [f" ({round(share, 2) + 0.0:.0%})" if np.isfinite(share) else "" for share in shares]
            names = [f"{name}{share}" for name, share in zip(names, shares, strict=True)]
        dots = points(
            best,
            along="x",
            y=plain_list(names[::-1]),
            showlegend=False,
            marker={"size": 9, "color": COLOURS[index % len(COLOURS)]},
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
        figure.add_trace(dots, **panel)
    values = np.concatenate([frame[["value", "low", "high"]].to_numpy(float).ravel() for frame in shown])
    values = values[~np.isnan(values)]
    if ((values >= 0) & (values <= 1)).all() and not UNITS.keys() & {*metrics}:  # nats have a scale of their own
        figure.update_xaxes(range=SHARES, dtick=0.25)
    else:
        figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(type="category")
    return styled(figure, title, height=(110 + 26 * n) * panels[-1]["row"] + 40)


def _of_one_unit(table: Table, by: str) -> list[str]:
    """The values of a key column whose rows have the unit of the first, in order."""
    values: Any = dict(iter(table.frame.groupby(by, sort=False)["value"])) if by in table.keys else {}
    units = {name: UNITS.get(name, "share" if of.abs().max() <= 1 else name) for name, of in values.items()}
    return [name for name, unit in units.items() if unit == next(iter(units.values()))]


def _names(frame: Any) -> list[str]:
    """Heads, layers or edges, as people write them."""
    if "sender" in frame and "receiver" in frame:
        return [f"{sender} to {receiver}" for sender, receiver in zip(frame["sender"], frame["receiver"], strict=True)]
    if "head" not in frame or frame["head"].isna().all():
        suffixes = [f" at {position}" for position in frame["position"]] if "position" in frame else [""] * len(frame)
        return [f"L{layer}{suffix}" for layer, suffix in zip(frame["layer"], suffixes, strict=True)]
    return [f"L{layer}H{head}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]


def _one_row_per_head(table: Table, by: str) -> Any:
    """The rows of single heads, one for each."""
    table = table.of_all_targets()
    table.check_not_mixed()
    frame = table.heads().frame if {"layer", "head"} <= set(table.keys) else table.frame.iloc[:0]
    if not len(frame):
        levels = " and ".join(sorted(set(table.frame["level"]))) if "level" in table.keys else "unknown"
        raise ValueError(
            f"no rows of single heads, but of the level {levels}: a map of heads draws what score_heads, ablate_heads, "
            "patch_heads and attribute_heads return; edge_map draws edges"
        )
    if frame.duplicated(["layer", "head"]).any():
        further = [key for key in table.keys if key not in ("level", "layer", "head", by)]
        several = [key for key in further if len(frame[key].unique()) > 1] or further
        raise ValueError(f"several rows per head: choose one value of {' and '.join(several)} with .where(...) first")
    return frame


def _shape(table: Table, frames: Sequence[Any], shape: tuple[int, int] | None) -> tuple[int, int]:
    """The numbers of layers and heads of a map."""
    last_layer, last_head = (max(int(frame[key].max()) for frame in frames) for key in ("layer", "head"))
    model = table.provenance.model
    if shape is None and {"n_layers", "n_heads"} <= model.keys():
        shape = model["n_layers"], model["n_heads"]
    layers, heads = shape or (last_layer + 1, last_head + 1)
    if last_layer >= layers or last_head >= heads:
        raise ValueError(
            f"the table has L{last_layer} and H{last_head}, but the map is of {layers} layers with {heads} heads: give "
            "the shape of the model that was measured"
        )
    return layers, heads
