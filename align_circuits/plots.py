"""Figures of tables: plotly figures that read on light and on dark pages and by colour-blind people."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from align_circuits.evaluate import ALL_OFFSETS
from align_circuits.tables import Table

SEQUENTIAL = "Cividis"
"""For values in [0, 1]; made for colour-blind readers (Nuñez et al., 2018)."""

DIVERGING = "PuOr"
"""For differences; its ends differ in hue and its middle is pale (Brewer, 2003)."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_GREY = "#808080"  # the one text colour with contrast on white and on black


def head_map(table: Table, metric: str, title: str | None = None) -> go.Figure:
    """Returns one metric of every head as a map, layers from bottom to top.

    A difference of tables (any value below zero) is drawn on a diverging scale around zero.

    Args:
        table: With key columns layer, head and metric.
        metric: Which to draw.
        title: Above the map; the metric's name by default.
    """
    rows = table.where(metric=metric).heads().frame
    grid = table.grid(metric)
    low, high = (rows.pivot(index="layer", columns="head", values=end).to_numpy(dtype=float) for end in ("low", "high"))
    bound = max(1.0, float(np.nanmax(np.abs(grid)))) if np.isfinite(grid).any() else 1.0
    signed = bool((grid[np.isfinite(grid)] < 0).any())
    heat = go.Heatmap(
        z=grid, x=sorted(rows["head"].unique()), y=sorted(rows["layer"].unique()), customdata=np.stack([low, high], -1),
        colorscale=DIVERGING if signed else SEQUENTIAL, zmin=-bound if signed else 0, zmax=bound, xgap=1, ygap=1,
        hovertemplate="L%{y}H%{x}: %{z:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]<extra></extra>",
    )  # fmt: skip
    figure = go.Figure(heat)
    figure.update_xaxes(title="head", dtick=1 if grid.shape[1] <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="layer", dtick=1 if grid.shape[0] <= 16 else 4, showgrid=False)
    return _styled(figure, title or metric, height=220 + 18 * min(grid.shape[0], 32))


def top_heads(table: Table, metrics: Sequence[str], n: int = 6) -> go.Figure:
    """Returns the best heads of each metric with their 95% intervals, side by side.

    Args:
        table: With key columns layer, head and metric.
        metrics: Which to draw, one colour each.
        n: How many heads of each.
    """
    figure = go.Figure()
    for colour, metric in zip(COLOURS, metrics, strict=False):
        best = table.top(metric, n).frame
        figure.add_scatter(
            x=[f"L{layer}H{head}<br>{metric}" for layer, head in zip(best["layer"], best["head"], strict=True)],
            y=best["value"], mode="markers", name=metric, marker={"size": 9, "color": colour},
            error_y=_error_bars(best["value"], best["low"], best["high"]),
        )  # fmt: skip
    figure.update_yaxes(title="score", range=[-0.03, 1.05])
    return _styled(figure, f"The {n} best heads of each metric, with 95% intervals over prompts", height=420)


def accuracy(table: Table, title: str = "Accuracy beside its references") -> go.Figure:
    """Returns accuracy by target kind, the model's beside chance, blind ceilings and oracle, with 95% intervals.

    Args:
        table: What `evaluate` returned.
        title: Above the figure.
    """
    frame = table.where(metric="accuracy", offset=ALL_OFFSETS).frame
    figure = go.Figure()
    symbols = {"model": "circle", "chance": "x", "memoryless": "triangle-down", "history": "triangle-up", "oracle": "star"}
    for colour, predictor in zip(COLOURS, [name for name in symbols if name in set(frame["predictor"])], strict=False):
        rows = frame[frame["predictor"] == predictor]
        figure.add_scatter(
            x=rows["kind"], y=rows["value"], mode="markers", name=predictor,
            marker={"size": 13 if predictor == "model" else 9, "symbol": symbols[predictor], "color": colour},
            error_y=_error_bars(rows["value"], rows["low"], rows["high"]),
        )  # fmt: skip
    figure.update_yaxes(title="accuracy", range=[-0.03, 1.05])
    figure.update_xaxes(title="target tokens")
    return _styled(figure, title, height=380)


def _error_bars(value, low, high) -> dict:  # noqa: ANN001 - pandas series
    return {"type": "data", "symmetric": False, "array": high - value, "arrayminus": value - low, "thickness": 1.2}


def _styled(figure: go.Figure, title: str, height: int) -> go.Figure:
    """Transparent and grey-lettered, so that light and dark pages both work; no template is registered."""
    figure.update_layout(
        title={"text": title, "font": {"size": 15}}, height=height, template=None, font={"color": _GREY, "size": 13},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", margin={"l": 60, "r": 20, "t": 50, "b": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    )  # fmt: skip
    axis = {"gridcolor": "rgba(128,128,128,.25)", "linecolor": _GREY, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure
