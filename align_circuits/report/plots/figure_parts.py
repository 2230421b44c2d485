"""What figures share: texts drawn letter for letter, units, panels, marks, scales and the layout of the whole."""

import html
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from align_circuits.jobs.control_characters import printable
from align_circuits.report.plots.colours import COLOURS, DIVERGING, GREY, RING, SEQUENTIAL, SYMBOLS
from align_circuits.report.plots.notebook_figure import Figure
from align_circuits.tables.tables import Table, joined_in

MAX_COLUMNS = 3
"""Panels side by side."""

CAPTION = 84
"""The letters of captions that fit side by side into the narrowest figure (`.plotly-graph-div` of the pages)."""

CAPTIONS = {"log_prob": "log-probability", "logit_diff": "logit difference", "kl": "KL divergence"}
"""Metrics with a unit as a caption writes them, where that is another word."""

UNITS = {"log_prob": "nats", "kl": "nats", "entropy": "nats", "logit": "logits", "logit_diff": "logits"}
"""The unit of each metric that has one."""

SHARES = [-0.04, 1.06]
"""The range of an axis from 0 to 1, with room for the markers at its ends."""


def plain(text: str) -> str:
    """Returns a text such that plotly draws it letter for letter, and a line break as one.

    plotly reads `<b>`, `<a href>` and entities as markup, `$x$` as a formula where MathJax is loaded, and `%{x}` in
    what appears on hovering as a field. Control characters are escaped.
    """
    escaped = html.escape(printable(text), quote=False).replace("$", "&#36;").replace("%{", "&#37;{")
    return escaped.replace("\n", "<br>")


def plain_list(labels: Iterable[Any]) -> list[Any]:
    """Returns each text as `plain` does; numbers stay what they are."""
    return [plain(label) if isinstance(label, str) else label for label in labels]


def panel_grid(
    captions: Sequence[Any], gap: float, x: str = "", **options: Any
) -> tuple[go.Figure, list[dict[str, Any]]]:
    """Returns an empty figure with a panel for each caption, and the place of each panel, as plotly takes it.

    Rows are as even as they can be: four panels make two of two. Long captions and titles are broken, such that those
    of panels side by side do not meet.

    Args:
        captions: What stands above each panel; empty texts for nothing.
        gap: Between rows, as a share of the height of one.
        x: The title of the x axes, below the lowest panel of each column.
        **options: Of `make_subplots`.
    """
    rows = -(-len(captions) // MAX_COLUMNS)
    columns = -(-len(captions) // rows)
    titles = [wrapped(str(caption), CAPTION // columns) for caption in captions]
    options |= {"subplot_titles": titles if any(titles) else None, "vertical_spacing": gap / rows}
    figure = make_subplots(rows, columns, **options)
    figure.update_annotations(font={"size": 13})
    panels: list[dict[str, Any]] = [
        {"row": index // columns + 1, "col": index % columns + 1} for index in range(len(titles))
    ]
    for lowest in panels[-columns:]:
        figure.update_xaxes(title=wrapped(x, CAPTION // columns), **lowest)
    return figure, panels


def unit_of(table: Table, otherwise: str = "") -> str:
    """Returns the unit of the numbers of a table of one metric: "share" if they are normalised."""
    if any(made.settings.get("normalized") for made in joined_in(table)):
        return "share"
    return UNITS.get(str(table.frame["metric"].iloc[0]), otherwise) if "metric" in table.frame else otherwise


def kinds_of(frame: Any) -> list[str]:
    """Returns the kinds of targets in a table's rows, without a kind that holds the same targets as all."""
    kinds = list(dict.fromkeys(frame["kind"]))
    return ["all"] if len(kinds) == 2 and "all" in kinds else kinds


def wrapped(text: str, letters: int) -> str:
    """Returns a text as `plain` does, with line breaks between words such that no line is longer, where that can be."""
    return plain("\n".join(textwrap.wrap(text, letters, break_long_words=False)))


def marker(place: int, size: int = 9) -> dict[str, Any]:
    """Returns the colour and the symbol of the series at this place."""
    return {"size": size, "symbol": SYMBOLS[place % len(SYMBOLS)], "color": COLOURS[place % len(COLOURS)]}


def rings(x: Sequence[int], y: Sequence[int], size: int, width: int, **marker: Any) -> go.Scatter:
    """Returns rings around cells of a map, or frames of another symbol and colour, each with a white edge."""
    colours = [colour for colour in ("#fff", marker.pop("color", RING)) for _ in x]  # a loss has about the ring's own
    widths = [each for each in (width + 3, width) for _ in x]
    style = {"symbol": "circle-open", "size": size, "color": colours, "line": {"width": widths}, **marker}
    return go.Scatter(x=[*x, *x], y=[*y, *y], mode="markers", marker=style, showlegend=False, hoverinfo="skip")


def points(
    rows: Any, *, bars: bool = True, mode: str = "markers", along: Literal["x", "y"] = "y", **options: Any
) -> go.Scatter:
    """Returns the values of a table's rows, with bars for their intervals; `options` are those of `go.Scatter`."""
    above, below = rows["high"] - rows["value"], rows["value"] - rows["low"]
    style = {"type": "data", "symmetric": False, "thickness": 1.4, "width": 4}
    ends = {**style, "array": above, "arrayminus": below} if bars else None
    return go.Scatter({along: rows["value"], f"error_{along}": ends, "mode": mode, **options})


def cells(z: Any, x: Any, y: Any, hover: str, gap: int | None = 1, **options: Any) -> go.Heatmap:
    """Returns a map of numbers on the figure's common scale; `options` are those of `go.Heatmap`."""
    return go.Heatmap(
        z=z, x=x, y=y, coloraxis="coloraxis", xgap=gap, ygap=gap, hovertemplate=f"{hover}<extra></extra>", **options
    )


def interval_grids(frame: Any, rows: tuple[str, Sequence[Any]], columns: tuple[str, Sequence[Any]]) -> list[Any]:
    """Returns the values of a table as a grid, and the ends of their intervals as two more.

    Args:
        frame: One row for each cell, at most.
        rows: The key of the rows, and its values in order.
        columns: The same of the columns.
    """
    (index, down), (column, across) = rows, columns
    return [
        frame.pivot(index=index, columns=column, values=end).reindex(index=down, columns=across).to_numpy(dtype=float)
        for end in ("value", "low", "high")
    ]


def coloured(figure: go.Figure, title: str, bound: float = 1, *, signed: bool = False, **bar: Any) -> None:
    """Sets the common scale of a figure's maps: from 0 to a bound, or around zero; `bar` is of its colour bar."""
    colours, lowest = (DIVERGING, -bound) if signed else (SEQUENTIAL, 0)
    bar = {"title": plain(title), "exponentformat": "e", **bar}  # by default plotly writes 40µ for 4e-5
    figure.update_layout(coloraxis={"colorscale": colours, "cmin": lowest, "cmax": bound, "colorbar": bar})


def styled(drawn: go.Figure, title: str, height: int) -> Figure:
    """Returns the figure with a transparent ground and grey letters, for light and dark pages; no template is set."""
    figure = Figure(drawn)
    top, bottom, below = 60 if title else 35, 55, 85  # in pixels; the legend stands below the title of the x axis
    figure.update_layout(
        title={"text": plain(title), "font": {"size": 15}},
        height=height,
        template=None,
        font={"color": GREY, "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 20, "t": top, "b": bottom},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": GREY},
        hoverlabel={"namelength": -1},  # whole: cut at 15 letters, an entity would be cut in two
        legend={"orientation": "h", "y": -below / (height - top - bottom), "yanchor": "top", "x": 0, "xanchor": "left"},
    )
    axis: dict[str, Any] = {
        "gridcolor": "rgba(128,128,128,.25)",
        "linecolor": GREY,
        "zeroline": False,
        "ticks": "outside",
        "title_font_size": 13,
        "automargin": True,  # long names of rows and columns need more room
    }
    figure.update_xaxes(**axis, title_standoff=8)  # near the labels, away from the legend
    figure.update_yaxes(**axis)
    return figure
