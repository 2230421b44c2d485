"""Figures of values: curves over steps and other scales, dots in labelled rows, and two measurements of the same."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.report.plots.colours import COLOURS, GREY
from align_circuits.report.plots.figure_parts import SHARES, marker, panel_grid, plain, plain_list, points, styled


def curves(
    panels: Mapping[str, pd.DataFrame], x: str, by: str, label: str, title: str = "", *, value: str = "accuracy"
) -> go.Figure:
    """Returns values over `x` with 95% intervals, a colour and a symbol for each value of `by`.

    Args:
        panels: A frame for each panel by its caption, with the columns `x`, `by`, value, low and high.
        x: The column along x.
        by: The column whose values differ in colour and symbol.
        label: The title of the x axis.
        title: Above the panels.
        value: The title of the y axis, with the unit.
    """
    figure, cells = panel_grid(list(panels), 0.24, label, shared_yaxes="all", horizontal_spacing=0.05)
    lines = cells[-1]["row"]
    colour_of: dict[str, int] = {}
    for cell, frame in zip(cells, panels.values(), strict=True):
        for name, rows in frame.groupby(by, sort=False):
            new, colour = str(name) not in colour_of, colour_of.setdefault(str(name), len(colour_of))
            line = points(
                rows,
                x=rows[x],
                mode="lines+markers",
                name=plain(str(name)),
                legendgroup=plain(str(name)),
                showlegend=new,
                marker=marker(colour),
                line={"dash": ("solid", "dash", "dot")[colour // len(COLOURS) % 3]},  # where colours come again
            )
            figure.add_trace(line, **cell)
    along = np.concatenate([frame[x].to_numpy(float) for frame in panels.values()])
    values = np.concatenate([frame[["value", "low", "high"]].to_numpy(float).ravel() for frame in panels.values()])
    figure.update_xaxes(dtick=1 if (along == along.round()).all() and np.ptp(along) <= 16 else None)  # counts
    figure.update_yaxes(range=SHARES if np.nanmin(values) >= 0 and np.nanmax(values) <= 1 else None)
    figure.update_yaxes(title=plain(value), col=1)
    return styled(figure, title, height=380 if lines == 1 else 290 * lines + 60)


def dots(frame: pd.DataFrame, row: str, by: str, label: str, title: str = "") -> go.Figure:
    """Returns values with 95% intervals in labelled rows, a colour and a symbol for each value of `by`.

    Args:
        frame: With the columns `row`, `by`, value, low and high.
        row: The column whose values are rows, in order from the top.
        by: The column whose values differ in colour and symbol.
        label: The title of the values, with their unit.
        title: Above the figure.
    """
    figure = go.Figure()
    for index, (name, rows) in enumerate(frame.groupby(by, sort=False)):
        style = {"name": plain(str(name)), "orientation": "h", "marker": marker(index, 8)}
        figure.add_trace(points(rows, along="x", y=plain_list(rows[row]), **style))
    names = plain_list(dict.fromkeys(frame[row]))
    figure.update_xaxes(title=plain(label), side="top")
    # In this order, or series that lack a row would change it; turned round, since plotly begins at the bottom.
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], tickson="boundaries")
    figure.update_layout(scattermode="group", scattergap=0.3)
    drawn = styled(figure, title, height=130 + 46 * len(names))
    return drawn.update_layout(margin={"t": 95 if title else 60}, legend={"y": -0.02})


def beside(
    panels: Mapping[str, pd.DataFrame], x: str, y: str, label: str, title: str = "", *, opposite: bool = False
) -> go.Figure:
    """Returns what was measured twice as points; on the dashed line both numbers are equal.

    Args:
        panels: A frame for each panel by its caption, with the columns `x`, `y` and `label`.
        x: The column along x.
        y: The column along y.
        label: The column with the name of each point, which appears on hovering.
        title: Above the panels.
        opposite: Whether a gain in one is a loss in the other: on the line one is the negative of the other.
    """
    figure, cells = panel_grid([*panels], 0.3, x, horizontal_spacing=0.09)
    for cell, frame in zip(cells, panels.values(), strict=True):
        both = frame[[x, y]].to_numpy(dtype=float)
        along, across = both[:, 0], both[:, 1] * (-1 if opposite else 1)
        ends = np.array([min(along.min(), across.min()), max(along.max(), across.max())])
        dashed = {"mode": "lines", "line": {"color": GREY, "dash": "dash", "width": 1}, "hoverinfo": "skip"}
        figure.add_trace(go.Scatter(x=ends, y=-ends if opposite else ends, **dashed), **cell)
        hover = f"%{{text}}<br>{plain(x)} %{{x:.3g}}<br>{plain(y)} %{{y:.3g}}<extra></extra>"
        named = {"text": plain_list(frame[label]), "hovertemplate": hover}
        figure.add_trace(go.Scatter(x=both[:, 0], y=both[:, 1], mode="markers", marker=marker(0, 7), **named), **cell)
    figure.update_yaxes(title=plain(y), col=1)
    figure.update_layout(showlegend=False)
    return styled(figure, title, height=120 + 270 * cells[-1]["row"])
