"""Figures of attention patterns: on one prompt, and over steps of training."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from align_circuits.hooks.head_names import describe
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.plots.figure_parts import cells, coloured, panel_grid, plain_list, rings, styled


def attention_maps(attention: AttentionView, relation: str | None = None, title: str = "") -> go.Figure:
    """Returns the attention of each head as a map, queries down and keys across: the widget as a static figure.

    Args:
        attention: The result of `attention`.
        relation: The relation whose keys are circled, one of the prompt's.
        title: Above the maps.
    """
    figure, panels = panel_grid([describe([head]) for head in attention.rows], 0.2, horizontal_spacing=0.07)
    size, tokens = len(attention.tokens), np.array(plain_list(attention.tokens), dtype=object)
    text = np.stack(np.broadcast_arrays(tokens[:, None], tokens), -1)
    for pattern, panel in zip(attention.pattern.numpy(), panels, strict=True):
        future = np.triu(np.ones((size, size), dtype=bool), 1)
        hover = "%{customdata[0]} to %{customdata[1]}: %{z:.3f}"
        blank = np.where(future, np.nan, pattern.round(3))
        # Cells by number and not by token: plotly would merge the columns of a token that occurs twice.
        figure.add_trace(cells(blank, None, None, hover, None, customdata=text), **panel)
        if relation is not None:
            query, key = attention.key_mask(relation).nonzero().T.tolist()
            figure.add_trace(rings(key, query, 8, 2), **panel)
    small = {"size": max(6, min(11, 280 // size))}
    ticks = {"tickvals": list(range(size)), "ticktext": list(tokens), "showgrid": False, "tickfont": small}
    figure.update_xaxes(**ticks, range=[-0.5, size - 0.5], tickangle=0 if max(map(len, attention.tokens)) == 1 else 90)
    figure.update_yaxes(**ticks, range=[size - 0.5, -0.5])
    coloured(figure, "attention", lenmode="pixels", len=240, y=1, yanchor="top")
    return styled(figure, title, height=(340 if len(panels) > 2 else 460) * panels[-1]["row"] + 60)


def attention_course(maps: Mapping[str, pd.DataFrame], title: str = "") -> go.Figure:
    """Returns attention maps above each other, with a slider if they were measured at several steps.

    Args:
        maps: A frame for each map by its caption, with the columns step, query, key and value.
        title: Above the maps.

    Raises:
        ValueError: The maps were measured at different steps.
    """
    steps = [sorted(frame["step"].unique().tolist()) for frame in maps.values()]
    if any(other != steps[0] for other in steps):
        raise ValueError(f"maps measured at different steps: {steps}; measure each at every step")
    heights = [len(np.unique(frame["query"].to_numpy())) for frame in maps.values()]
    height = 220 + sum(min(30 * rows, 480) for rows in heights)

    def drawn(frame: pd.DataFrame, step: int) -> go.Heatmap:
        grid = frame[frame["step"] == step].pivot(index="query", columns="key", values="value")
        names = plain_list(grid.columns), plain_list(map(str, grid.index))
        return cells(grid.to_numpy().round(3), *names, "%{y} to %{x}: %{z:.3f}", None)

    figure = make_subplots(
        len(maps),
        1,
        row_heights=heights,
        subplot_titles=plain_list(maps),
        shared_xaxes=True,
        vertical_spacing=50 / height,
    )
    for row, frame in enumerate(maps.values(), start=1):
        figure.add_trace(drawn(frame, steps[0][0]), row=row, col=1)
    figure.frames = [
        go.Frame(data=[drawn(frame, step) for frame in maps.values()], name=str(step)) for step in steps[0]
    ]
    shown = {"mode": "immediate", "frame": {"duration": 0}}
    slider = [{"label": str(step), "method": "animate", "args": [[str(step)], shown]} for step in steps[0]]
    figure.update_layout(
        sliders=[{"currentvalue": {"prefix": "step "}, "steps": slider, "pad": {"t": 40}}] if len(slider) > 1 else []
    )
    coloured(figure, "attention")
    figure.update_yaxes(autorange="reversed", title="from", showgrid=False)
    figure.update_xaxes(title="to", row=len(maps), col=1, showgrid=False)
    return styled(figure, title, height=height)
