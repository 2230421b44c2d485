"""Figures of tables: plotly figures that read on light and on dark pages and by colour-blind people."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from align_circuits.evaluate import ALL_OFFSETS, REFERENCES
from align_circuits.tables import Table

SEQUENTIAL = "Cividis"
"""For values in [0, 1]; made for colour-blind readers (Nuñez et al., 2018)."""

DIVERGING = "PuOr"
"""For differences; its ends differ in hue and its middle is pale (Brewer, 2003)."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008), without black and yellow, which vanish on dark and light pages."""

SYMBOLS = ("circle", "x", "triangle-down", "triangle-up", "star", "diamond")
_GREY = "#808080"  # the one text colour with contrast on white and on black
_COLUMNS = 3


def head_map(table: Table, metric: str, title: str | None = None) -> go.Figure:
    """Returns one metric of every head as a map, layers from bottom to top.

    A difference of tables (any value below zero) is drawn on a diverging scale around zero.

    Args:
        table: With key columns layer, head and metric, one row a head.
        metric: Which to draw.
        title: Above the map; the metric's name by default.
    """
    return head_maps(table, [metric], title or metric, captions=False)


def head_maps(table: Table, metrics: Sequence[str], title: str = "", captions: bool = True) -> go.Figure:
    """Returns a map for each metric side by side, all on one scale.

    Args:
        table: With key columns layer, head and metric, one row a head.
        metrics: Which to draw, in order.
        title: Above the maps.
        captions: Whether each map is headed by its metric's name.
    """
    grids = [table.grid(metric) for metric in metrics]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    signed = bool((known < 0).any())
    bound = max(1.0, float(np.abs(known).max(initial=0)))
    columns = min(_COLUMNS, len(metrics))
    figure = make_subplots(
        -(-len(metrics) // columns), columns, subplot_titles=list(metrics) if captions else None,
        horizontal_spacing=0.07, vertical_spacing=0.32 / -(-len(metrics) // columns),
    )  # fmt: skip
    for place, (metric, grid) in enumerate(zip(metrics, grids, strict=True)):
        rows = table.where(metric=metric).heads().frame
        ends = [rows.pivot(index="layer", columns="head", values=end).to_numpy(dtype=float) for end in ("low", "high")]
        heat = go.Heatmap(
            z=grid, x=sorted(rows["head"].unique()), y=sorted(rows["layer"].unique()), customdata=np.stack(ends, -1),
            coloraxis="coloraxis", xgap=1, ygap=1,
            hovertemplate=f"L%{{y}}H%{{x}} {metric}: %{{z:.3f}} "
            "[%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra></extra>",
        )  # fmt: skip
        figure.add_trace(heat, row=place // columns + 1, col=place % columns + 1)
    layers, heads = grids[0].shape
    figure.update_xaxes(dtick=1 if heads <= 16 else 4, showgrid=False)
    figure.update_xaxes(title="head", row=-(-len(metrics) // columns))
    figure.update_yaxes(dtick=1 if layers <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    scale = {"colorscale": DIVERGING, "cmin": -bound} if signed else {"colorscale": SEQUENTIAL, "cmin": 0}
    figure.update_layout(coloraxis={**scale, "cmax": bound, "colorbar": {"title": "change" if signed else "score"}})
    return _styled(figure, title, height=(150 + 16 * min(layers, 32)) * -(-len(metrics) // columns) + 60)


def top_heads(table: Table, metrics: Sequence[str], n: int = 5, title: str = "") -> go.Figure:
    """Returns the best heads of each metric with their 95% intervals, a panel a metric.

    Args:
        table: With key columns layer, head and metric, one row a head.
        metrics: Which to draw, in order.
        n: How many heads of each.
        title: Above the panels.
    """
    columns = min(_COLUMNS, len(metrics))
    lines = -(-len(metrics) // columns)
    figure = make_subplots(
        lines, columns, subplot_titles=list(metrics), horizontal_spacing=0.09, vertical_spacing=0.28 / lines
    )
    for place, metric in enumerate(metrics):
        best = table.top(metric, n).frame[::-1]
        dots = go.Scatter(
            y=[f"L{layer}H{head}" for layer, head in zip(best["layer"], best["head"], strict=True)],
            x=best["value"], error_x=_error_bars(best), mode="markers", showlegend=False,
            marker={"size": 9, "color": COLOURS[place % len(COLOURS)]}, hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(dots, row=place // columns + 1, col=place % columns + 1)
    figure.update_xaxes(range=[-0.04, 1.06], dtick=0.25)
    figure.update_yaxes(type="category")
    return _styled(figure, title, height=(110 + 26 * n) * lines + 40)


def accuracy(table: Table, title: str = "") -> go.Figure:
    """Returns accuracy by kind of target, the model's beside chance, blind ceilings and oracle, with 95% intervals.

    Args:
        table: What `evaluate` returned.
        title: Above the figure.
    """
    frame = table.where(metric="accuracy", offset=ALL_OFFSETS).frame
    figure = go.Figure()
    for place, predictor in enumerate(("model", *REFERENCES)):
        rows = frame[frame["predictor"] == predictor]
        if rows.empty:
            continue
        figure.add_scatter(
            x=rows["kind"], y=rows["value"], error_y=_error_bars(rows), mode="markers", name=predictor,
            marker={"size": 13 if predictor == "model" else 10, "symbol": SYMBOLS[place], "color": COLOURS[place]},
        )  # fmt: skip
    figure.update_yaxes(title="accuracy", range=[-0.04, 1.06])
    figure.update_xaxes(title="target tokens")
    figure.update_layout(scattermode="group", scattergap=0.6)
    return _styled(figure, title, height=380)


def accuracy_grids(panels: Mapping[str, pd.DataFrame], x: str, y: str, title: str = "") -> go.Figure:
    """Returns grids of accuracies side by side, on one scale from 0 to 1, with the number in each cell.

    Args:
        panels: A frame for each panel by its caption: columns along x, index along y.
        x: What the columns are.
        y: What the rows are.
        title: Above the panels.
    """
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.06)
    for place, frame in enumerate(panels.values(), start=1):
        heat = go.Heatmap(
            z=frame.to_numpy(), x=list(frame.columns), y=list(frame.index), coloraxis="coloraxis", xgap=1, ygap=1,
            texttemplate="%{z:.2f}", hovertemplate=f"{x} %{{x}}, {y} %{{y}}: %{{z:.3f}}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(heat, row=1, col=place)
    figure.update_xaxes(title=x, dtick=1, showgrid=False)
    figure.update_yaxes(dtick=1, showgrid=False)
    figure.update_yaxes(title=y, col=1)
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": {"title": "accuracy"}})
    return _styled(figure, title, height=130 + 36 * max(map(len, panels.values())))


def curves(panels: Mapping[str, pd.DataFrame], x: str, by: str, label: str, title: str = "") -> go.Figure:
    """Returns values over `x` with 95% intervals, a panel each, a colour and a symbol for each value of `by`.

    Args:
        panels: A frame for each panel by its caption, with the columns `x`, `by`, value, low and high.
        x: The column along x.
        by: The column that is told apart.
        label: What x is.
        title: Above the panels.
    """
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), shared_yaxes=True, horizontal_spacing=0.05)
    for panel, frame in enumerate(panels.values(), start=1):
        for place, (name, rows) in enumerate(frame.groupby(by, sort=False)):
            line = go.Scatter(
                x=rows[x], y=rows["value"], error_y=_error_bars(rows), mode="lines+markers", name=str(name),
                legendgroup=str(name), showlegend=panel == 1,
                marker={"size": 9, "symbol": SYMBOLS[place % len(SYMBOLS)], "color": COLOURS[place % len(COLOURS)]},
            )  # fmt: skip
            figure.add_trace(line, row=1, col=panel)
    figure.update_xaxes(title=label, dtick=1)
    figure.update_yaxes(range=[-0.04, 1.06])
    figure.update_yaxes(title="accuracy", col=1)
    return _styled(figure, title, height=380)


def _error_bars(frame: Any) -> dict:
    above, below = frame["high"] - frame["value"], frame["value"] - frame["low"]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.4, "width": 4}


def _styled(figure: go.Figure, title: str, height: int) -> go.Figure:
    """Transparent and grey-lettered, so that light and dark pages both work; no template is registered."""
    figure.update_layout(
        title={"text": title, "font": {"size": 15}}, height=height, template=None, font={"color": _GREY, "size": 13},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 20, "t": 60 if title else 35, "b": 55},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"},
    )  # fmt: skip
    axis = {"gridcolor": "rgba(128,128,128,.25)", "linecolor": _GREY, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure
