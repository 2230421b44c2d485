"""Figures of heads: maps over layers and heads, and the best heads of each metric."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from align_circuits.hooks.heads import HeadLike, head_of
from align_circuits.report.plots.style import (
    COLOURS,
    DIVERGING,
    SEQUENTIAL,
    SHARES,
    error_bars,
    panel_places,
    rings,
    styled,
)
from align_circuits.tables.tables import Table


def head_map(table: Table, metric: str, title: str | None = None, unit: str = "") -> go.Figure:
    """Returns one metric of every head as a map, layers from bottom to top.

    A difference of tables (any value below zero) is drawn on a diverging scale around zero.

    Args:
        table: With key columns layer, head and metric, one row per head.
        metric: Which to draw.
        title: Above the map; the metric's name by default.
        unit: The unit of the numbers, as in `head_maps`.
    """
    return head_maps(table, [metric], title or metric, captions=False, unit=unit)


def head_maps(
    table: Table,
    panels: Sequence[str],
    title: str = "",
    captions: bool = True,
    *,
    by: str = "metric",
    unit: str = "",
    marked: Mapping[str, Sequence[HeadLike]] | None = None,
    shape: tuple[int, int] | None = None,
) -> go.Figure:
    """Returns a map for each metric side by side, all on one scale.

    Args:
        table: With key columns layer and head; one row per head in each panel.
        panels: What to draw, in order: metrics, or values of the column `by`.
        title: Above the maps.
        captions: Whether each map is headed by its panel's name.
        by: The key column that the panels are values of.
        unit: The unit of the numbers, such as `"nats"`, for the colour bar; the scale then ends at the largest number.
            Without it they are scores, and the scale ends at 1 or above.
        marked: Heads to circle, by panel.
        shape: The model's numbers of layers and heads, if the table lacks heads: those stay grey.

    Raises:
        ValueError: A head has more than one row in a panel.
    """
    frames = [_one_row_per_head(table.where(**{by: panel}).heads(), by) for panel in panels]
    known = np.concatenate([frame["value"].to_numpy(dtype=float) for frame in frames])
    known = known[np.isfinite(known)]
    signed = bool((known < 0).any())
    bound = max(float(np.abs(known).max(initial=0)), 0.0 if unit else 1.0) or 1.0
    lines, columns, places = panel_places(len(panels))
    figure = make_subplots(
        lines,
        columns,
        subplot_titles=list(panels) if captions else None,
        horizontal_spacing=0.07,
        vertical_spacing=0.32 / lines,
    )
    for panel, frame, place in zip(panels, frames, places, strict=True):
        z, low, high = (frame.pivot(index="layer", columns="head", values=end) for end in ("value", "low", "high"))
        if shape is not None:
            z, low, high = (part.reindex(range(shape[0])).reindex(range(shape[1]), axis=1) for part in (z, low, high))
        heat = go.Heatmap(
            z=z.to_numpy(dtype=float),
            x=list(z.columns),
            y=list(z.index),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            customdata=np.stack([low.to_numpy(dtype=float), high.to_numpy(dtype=float)], -1),
            hovertemplate=f"L%{{y}}H%{{x}} {panel}: %{{z:.3f}} "
            "[%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra></extra>",
        )
        figure.add_trace(heat, **place)
        if circled := [head_of(head) for head in (marked or {}).get(panel, ())]:
            layer, head = zip(*circled, strict=True)
            figure.add_trace(rings(head, layer, 13, 3), **place)
    layers, heads = shape or (len(set(frames[0][key])) for key in ("layer", "head"))
    figure.update_xaxes(dtick=1 if heads <= 16 else 4, showgrid=False)
    figure.update_xaxes(title="head", row=lines)
    figure.update_yaxes(dtick=1 if layers <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    scale = {"colorscale": DIVERGING, "cmin": -bound} if signed else {"colorscale": SEQUENTIAL, "cmin": 0}
    label = unit or ("change" if signed else "score")
    figure.update_layout(coloraxis={**scale, "cmax": bound, "colorbar": {"title": label}})
    drawn = styled(figure, title, height=(150 + 16 * min(layers, 32)) * lines + 60)
    return drawn if shape is None else drawn.update_layout(plot_bgcolor="rgba(128,128,128,.3)")  # behind blank cells


def top_heads(table: Table, metrics: Sequence[str], n: int = 5, title: str = "") -> go.Figure:
    """Returns the best heads of each metric with their 95% intervals, one panel per metric.

    Args:
        table: With key columns layer, head and metric, one row per head.
        metrics: Which to draw, in order.
        n: How many heads of each.
        title: Above the panels.
    """
    lines, columns, places = panel_places(len(metrics))
    figure = make_subplots(
        lines, columns, subplot_titles=list(metrics), horizontal_spacing=0.09, vertical_spacing=0.28 / lines
    )
    for index, (metric, place) in enumerate(zip(metrics, places, strict=True)):
        best = table.top(metric, n).frame[::-1]
        dots = go.Scatter(
            y=[f"L{layer}H{head}" for layer, head in zip(best["layer"], best["head"], strict=True)],
            x=best["value"],
            error_x=error_bars(best),
            mode="markers",
            showlegend=False,
            marker={"size": 9, "color": COLOURS[index % len(COLOURS)]},
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
        figure.add_trace(dots, **place)
    figure.update_xaxes(range=SHARES, dtick=0.25)
    figure.update_yaxes(type="category")
    return styled(figure, title, height=(110 + 26 * n) * lines + 40)


def _one_row_per_head(table: Table, by: str) -> pd.DataFrame:
    if table.frame.duplicated(["layer", "head"]).any():
        others = [key for key in table.keys if key not in ("level", "layer", "head", by)]
        raise ValueError(f"several rows per head: choose one value of {' and '.join(others)} with .where(...) first")
    return table.frame
