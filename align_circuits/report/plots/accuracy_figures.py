"""Figures of accuracy: by kind of target, with heads ablated, and as grids."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.checks import checked
from align_circuits.prompts.prompts import REFERENCES
from align_circuits.report.plots.colours import COLOURS, GREY, SYMBOLS
from align_circuits.report.plots.figure_parts import (
    SHARES,
    cells,
    coloured,
    kinds_of,
    marker,
    panel_grid,
    plain,
    plain_list,
    points,
    styled,
)
from align_circuits.tables.tables import Table

MAX_NUMBERS = 100
"""Cells of a grid that shows its numbers."""

MAX_LABELS = 20
"""Labels along a side of a grid; of more, every second or third is shown."""

_ABLATED = {
    "nothing": "nothing ablated",
    "named": "named heads ablated",
    "random": "as many random heads of the same layers ablated",
    "matched": "as many other heads of similar scores ablated",
    "rest": "all other heads ablated",
    "rest of random": "all but these random heads ablated",
    "rest of matched": "all but these heads of similar scores ablated",
}
_DRAWN = ("random", "matched", "rest of random", "rest of matched")


@checked
def accuracy(table: Table, title: str = "") -> go.Figure:
    """Returns accuracy by kind of target with 95% intervals: the model's and the reference accuracies.

    Args:
        table: What `evaluate` returned.
        title: Above the figure.
    """
    frame = table.where(metric="accuracy", offset=None).frame
    frame = frame.loc[frame["kind"].isin(kinds_of(frame))]
    figure = go.Figure()
    for index, predictor in enumerate(("model", *REFERENCES)):
        rows = frame.loc[frame["predictor"] == predictor]
        if rows.empty:
            continue
        style = marker(index, 13 if predictor == "model" else 10)
        figure.add_trace(points(rows, x=plain_list(rows["kind"]), name=predictor, marker=style))
    figure.update_yaxes(title="accuracy", range=SHARES)
    figure.update_xaxes(title="target tokens")
    figure.update_layout(scattermode="group", scattergap=0.6)
    return styled(figure, title, height=380)


@checked
def ablation(set_ablations: Table, title: str = "") -> go.Figure:
    """Returns accuracy with nothing, the named heads, as many other heads, and all other heads ablated.

    Each draw of control heads that was measured is a dot; the others have 95% intervals over prompts.

    Args:
        set_ablations: Of a `Localization`, with the key columns `ablated`, `draw`, `kind` and `metric`.
        title: Above the figure.
    """
    frame = set_ablations.frame.dropna(subset=["value"])  # NaN: not measured
    kinds, names = kinds_of(frame), [*dict.fromkeys(frame["ablated"])]
    frame = frame.loc[frame["kind"].isin(kinds)]
    sets = [name for name in _ABLATED if name in names] + [name for name in names if name not in _ABLATED]
    slot = 0.84 / len(sets)
    figure = go.Figure()
    for index, ablated in enumerate(sets):
        rows, dots, main = frame.loc[frame["ablated"] == ablated], ablated in _DRAWN, ablated in _ABLATED
        x = np.array([kinds.index(kind) for kind in rows["kind"]]) + (index - (len(sets) - 1) / 2) * slot
        if dots:
            draw = rows["draw"].to_numpy(dtype=float)
            x += 0.8 * slot * (draw / max(1, draw.max()) - 0.5)
        name = _ABLATED[ablated] if main else plain(f"only {ablated} heads ablated")
        style = list(_ABLATED).index(ablated) if main else index
        symbol = "circle" if dots else SYMBOLS[style % len(SYMBOLS)] + ("" if main else "-open")
        drawn = points(
            rows,
            bars=not dots,
            x=x,
            name=name,
            customdata=rows["draw"].to_numpy(dtype=int) if dots else None,
            hovertemplate="%{y:.3f}" + (", draw %{customdata}" if dots else "") + f"<extra>{name}</extra>",
            marker={
                "size": 6 if dots else 11,
                "symbol": symbol,
                "opacity": 0.75 if dots else 1,
                "color": COLOURS[style % len(COLOURS)] if main else GREY,
            },
        )
        figure.add_trace(drawn)
    chooses = "choice_accuracy" in set(frame["metric"])
    figure.update_yaxes(title="accuracy between two answers" if chooses else "accuracy", range=SHARES)
    figure.update_xaxes(
        title="target tokens",
        tickvals=list(range(len(kinds))),
        ticktext=plain_list(kinds),
        range=[-0.5, len(kinds) - 0.5],
        showgrid=False,
    )
    return styled(figure, title, height=470)


def accuracy_grids(
    panels: Mapping[str, pd.DataFrame], x: str, y: str, title: str = "", *, value: str = "accuracy"
) -> go.Figure:
    """Returns grids of accuracies or other shares side by side, on one scale from 0 to 1, a number in each cell.

    Columns and rows are evenly spaced. If all panels have the same rows, these are labelled once. Grids of more than
    `MAX_NUMBERS` cells show numbers only on hovering.

    Args:
        panels: A frame for each panel by its caption: columns along x, index along y.
        x: The title of the columns.
        y: The title of the rows.
        title: Above the panels.
        value: The title of the scale.
    """
    figure, cells_of = panel_grid(list(panels), 0.3, x, horizontal_spacing=0.06)
    hover = f"{plain(x)} %{{x}}, {plain(y)} %{{y}}: %{{z:.3f}}"
    for cell, frame in zip(cells_of, panels.values(), strict=True):
        numbers = "%{z:.2f}" if frame.size <= MAX_NUMBERS else None
        names = plain_list(frame.columns), plain_list(frame.index)
        figure.add_trace(cells(frame.to_numpy(), *names, hover, texttemplate=numbers), **cell)
    rows, columns = np.max([frame.shape for frame in panels.values()], axis=0).tolist()
    # "6" and "20" are labels, not numbers.
    figure.update_xaxes(type="category", dtick=-(-columns // MAX_LABELS), showgrid=False)
    figure.update_yaxes(type="category", dtick=-(-rows // MAX_LABELS), showgrid=False)
    figure.update_yaxes(title=plain(y), col=1)
    coloured(figure, value)
    if len({tuple(frame.index) for frame in panels.values()}) == 1:
        for cell in cells_of:
            if cell["col"] > 1:
                figure.update_yaxes(showticklabels=False, **cell)
    numbers = all(frame.size <= MAX_NUMBERS for frame in panels.values())
    height = 36 if numbers else 20 if rows <= MAX_LABELS else 14  # of a row, in pixels
    return styled(figure, title, height=(130 + height * rows) * cells_of[-1]["row"])
