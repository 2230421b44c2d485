"""Figures of tables: plotly figures that read on light and on dark pages and by colour-blind people."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from align_circuits.files import replacing
from align_circuits.hooks.heads import Head, describe
from align_circuits.prompts.prompts import REFERENCES
from align_circuits.report.widgets import EARLIER, Attention, attention
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.tables import Table

__all__ = [
    "EARLIER",
    "Attention",
    "ablation",
    "accuracy",
    "accuracy_grids",
    "attention",
    "attention_course",
    "attention_maps",
    "curves",
    "edge_map",
    "faithfulness",
    "head_map",
    "head_maps",
    "save",
    "top_heads",
]

SEQUENTIAL = "Cividis"
"""For values in [0, 1]; made for colour-blind readers (Nuñez et al., 2018)."""

DIVERGING = "PuOr"
"""For differences; its ends differ in hue and its middle is pale (Brewer, 2003)."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008), without black and yellow, which vanish on dark and light pages."""

SYMBOLS = ("circle", "x", "triangle-down", "triangle-up", "star", "diamond", "square")
"""One more than there are colours, so that a pair of both does not come back before the 43rd."""
_GREY = "#808080"  # the one text colour with contrast on white and on black
_RING = "#D55E00"  # stands out from every colour of both scales
_MOST_NUMBERS = 100
_COLUMNS = 3
_ABLATED = {
    "nothing": "nothing ablated",
    "found": "found heads ablated",
    "random": "as many random heads of the same layers",
    "rest": "all other heads ablated",
}


def head_map(table: Table, metric: str, title: str | None = None, unit: str = "") -> go.Figure:
    """Returns one metric of every head as a map, layers from bottom to top.

    A difference of tables (any value below zero) is drawn on a diverging scale around zero.

    Args:
        table: With key columns layer, head and metric, one row a head.
        metric: Which to draw.
        title: Above the map; the metric's name by default.
        unit: What the numbers are, as in `head_maps`.
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
    marked: Mapping[str, Sequence[Head]] | None = None,
    shape: tuple[int, int] | None = None,
) -> go.Figure:
    """Returns a map for each metric side by side, all on one scale.

    Args:
        table: With key columns layer and head; one row a head in each panel.
        panels: What to draw, in order: metrics, or values of the column `by`.
        title: Above the maps.
        captions: Whether each map is headed by its panel's name.
        by: The key column that tells the panels apart.
        unit: What the numbers are, such as `"nats"`: written on the colour bar, whose scale then ends at the largest
            number. Without it they are scores, and the scale ends at 1 at the least.
        marked: Heads to circle, by panel.
        shape: The model's layers and heads, where the table does not hold all of them: the others stay grey.

    Raises:
        ValueError: A head has more than one row in a panel.
    """
    frames = [_one_row_a_head(table.where(**{by: panel}).heads(), by) for panel in panels]
    known = np.concatenate([frame["value"].to_numpy(dtype=float) for frame in frames])
    known = known[np.isfinite(known)]
    signed = bool((known < 0).any())
    bound = max(float(np.abs(known).max(initial=0)), 0.0 if unit else 1.0) or 1.0
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = make_subplots(
        lines,
        columns,
        subplot_titles=list(panels) if captions else None,
        horizontal_spacing=0.07,
        vertical_spacing=0.32 / lines,
    )
    for place, (panel, frame) in enumerate(zip(panels, frames, strict=True)):
        at: dict[str, Any] = {"row": place // columns + 1, "col": place % columns + 1}
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
        figure.add_trace(heat, **at)
        if circled := list((marked or {}).get(panel, ())):
            ring = {"symbol": "circle-open", "size": 13, "color": _RING, "line": {"width": 3}}
            layer, head = zip(*circled, strict=True)
            figure.add_scatter(x=head, y=layer, mode="markers", marker=ring, showlegend=False, hoverinfo="skip", **at)
    layers, heads = shape or (len(set(frames[0][key])) for key in ("layer", "head"))
    figure.update_xaxes(dtick=1 if heads <= 16 else 4, showgrid=False)
    figure.update_xaxes(title="head", row=lines)
    figure.update_yaxes(dtick=1 if layers <= 16 else 4, showgrid=False)
    figure.update_yaxes(title="layer", col=1)
    scale = {"colorscale": DIVERGING, "cmin": -bound} if signed else {"colorscale": SEQUENTIAL, "cmin": 0}
    label = unit or ("change" if signed else "score")
    figure.update_layout(coloraxis={**scale, "cmax": bound, "colorbar": {"title": label}})
    drawn = styled(figure, title, height=(150 + 16 * min(layers, 32)) * lines + 60)
    return drawn if shape is None else drawn.update_layout(plot_bgcolor="rgba(128,128,128,.3)")  # behind what is blank


def _one_row_a_head(table: Table, by: str) -> pd.DataFrame:
    if table.frame.duplicated(["layer", "head"]).any():
        others = [key for key in table.keys if key not in ("level", "layer", "head", by)]
        raise ValueError(f"several rows a head: choose one value of {' and '.join(others)} with .where(...) first")
    return table.frame


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
            x=best["value"],
            error_x=_error_bars(best),
            mode="markers",
            showlegend=False,
            marker={"size": 9, "color": COLOURS[place % len(COLOURS)]},
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
        figure.add_trace(dots, row=place // columns + 1, col=place % columns + 1)
    figure.update_xaxes(range=[-0.04, 1.06], dtick=0.25)
    figure.update_yaxes(type="category")
    return styled(figure, title, height=(110 + 26 * n) * lines + 40)


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
            x=rows["kind"],
            y=rows["value"],
            error_y=_error_bars(rows),
            mode="markers",
            name=predictor,
            marker={"size": 13 if predictor == "model" else 10, "symbol": SYMBOLS[place], "color": COLOURS[place]},
        )
    figure.update_yaxes(title="accuracy", range=[-0.04, 1.06])
    figure.update_xaxes(title="target tokens")
    figure.update_layout(scattermode="group", scattergap=0.6)
    return styled(figure, title, height=380)


def ablation(verdict: Table, title: str = "") -> go.Figure:
    """Returns accuracy with nothing, the found heads, as many random heads, and all the rest ablated.

    Every draw of random heads is a dot; the others have their 95% intervals over prompts.

    Args:
        verdict: With the key columns `ablated` (`"nothing"`, `"found"`, `"random"`, `"rest"`, or a role), `draw`,
            `kind` and `metric`, as `localize` makes it.
        title: Above the figure.
    """
    frame: Any = verdict.where(metric="accuracy").frame
    kinds, there = list(dict.fromkeys(frame["kind"])), list(dict.fromkeys(frame["ablated"]))
    sets = [name for name in _ABLATED if name in there] + [name for name in there if name not in _ABLATED]
    slot = 0.84 / len(sets)
    figure = go.Figure()
    for place, ablated in enumerate(sets):
        rows, dots, main = frame[frame["ablated"] == ablated], ablated == "random", ablated in _ABLATED
        at = np.array([kinds.index(kind) for kind in rows["kind"]]) + (place - (len(sets) - 1) / 2) * slot
        if dots:
            draw = rows["draw"].to_numpy(dtype=float)
            at += 0.8 * slot * (draw / max(1, draw.max()) - 0.5)
        name = _ABLATED[ablated] if main else f"only {ablated} heads ablated"
        style = list(_ABLATED).index(ablated) if main else place
        symbol = "circle" if dots else SYMBOLS[style % len(SYMBOLS)] + ("" if main else "-open")
        figure.add_scatter(
            x=at,
            y=rows["value"],
            error_y=None if dots else _error_bars(rows),
            mode="markers",
            name=name,
            customdata=rows["draw"] if dots else None,
            hovertemplate="%{y:.3f}" + (", draw %{customdata}" if dots else "") + f"<extra>{name}</extra>",
            marker={
                "size": 6 if dots else 11,
                "symbol": symbol,
                "opacity": 0.75 if dots else 1,
                "color": COLOURS[style] if main else _GREY,
            },
        )
    figure.update_yaxes(title="accuracy", range=[-0.04, 1.06])
    figure.update_xaxes(
        title="target tokens",
        tickvals=list(range(len(kinds))),
        ticktext=kinds,
        range=[-0.5, len(kinds) - 0.5],
        showgrid=False,
    )
    return styled(figure, title, height=470)


def accuracy_grids(
    panels: Mapping[str, pd.DataFrame], x: str, y: str, title: str = "", *, value: str = "accuracy"
) -> go.Figure:
    """Returns grids of accuracies or other shares side by side, on one scale from 0 to 1, with the number in each cell.

    Columns and rows are evenly spaced, whatever they are. Rows that all panels share are named once. Grids of more
    than 100 cells show numbers only under the mouse.

    Args:
        panels: A frame for each panel by its caption: columns along x, index along y.
        x: What the columns are.
        y: What the rows are.
        title: Above the panels.
        value: What the numbers are.
    """
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.06)
    for place, frame in enumerate(panels.values(), start=1):
        heat = go.Heatmap(
            z=frame.to_numpy(),
            x=list(frame.columns),
            y=list(frame.index),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            texttemplate="%{z:.2f}" if frame.size <= _MOST_NUMBERS else None,
            hovertemplate=f"{x} %{{x}}, {y} %{{y}}: %{{z:.3f}}<extra></extra>",
        )
        figure.add_trace(heat, row=1, col=place)
    figure.update_xaxes(type="category", title=x, dtick=1, showgrid=False)  # "6" and "20" are names, not numbers
    figure.update_yaxes(type="category", dtick=1, showgrid=False)
    figure.update_yaxes(title=y, col=1)
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": {"title": value}})
    if len({tuple(frame.index) for frame in panels.values()}) == 1:
        for place in range(2, len(panels) + 1):
            figure.update_yaxes(showticklabels=False, col=place)
    return styled(figure, title, height=130 + 36 * max(map(len, panels.values())))


def curves(
    panels: Mapping[str, pd.DataFrame], x: str, by: str, label: str, title: str = "", *, value: str = "accuracy"
) -> go.Figure:
    """Returns values over `x` with 95% intervals, a panel each, a colour and a symbol for each value of `by`.

    Args:
        panels: A frame for each panel by its caption, with the columns `x`, `by`, value, low and high.
        x: The column along x.
        by: The column that is told apart.
        label: What x is, such as steps of training.
        title: Above the panels.
        value: What the values are, with their unit if they have one.
    """
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), shared_yaxes=True, horizontal_spacing=0.05)
    places: dict[str, int] = {}
    for panel, frame in enumerate(panels.values(), start=1):
        for name, rows in frame.groupby(by, sort=False):
            new, place = str(name) not in places, places.setdefault(str(name), len(places))
            line = go.Scatter(
                x=rows[x],
                y=rows["value"],
                error_y=_error_bars(rows),
                mode="lines+markers",
                name=str(name),
                legendgroup=str(name),
                showlegend=new,
                marker={"size": 9, "symbol": SYMBOLS[place % len(SYMBOLS)], "color": COLOURS[place % len(COLOURS)]},
            )
            figure.add_trace(line, row=1, col=panel)
    along, values = (
        np.concatenate([frame[name].to_numpy(float) for frame in panels.values()]) for name in (x, "value")
    )
    counts = (along == along.round()).all() and np.ptp(along) <= 16
    figure.update_xaxes(title=label, dtick=1 if counts else None)
    figure.update_yaxes(range=[-0.04, 1.06] if np.nanmin(values) >= 0 and np.nanmax(values) <= 1 else None)
    figure.update_yaxes(title=value, col=1)
    return styled(figure, title, height=380)


def dots(frame: pd.DataFrame, row: str, by: str, label: str, title: str = "") -> go.Figure:
    """Returns values with 95% intervals in named rows, a colour and a symbol for each value of `by`.

    Args:
        frame: With the columns `row`, `by`, value, low and high.
        row: The column whose values are rows, in order from the top.
        by: The column that is told apart.
        label: What the values are, with their unit if they have one.
        title: Above the figure.
    """
    figure = go.Figure()
    for place, (name, rows) in enumerate(frame.groupby(by, sort=False)):
        figure.add_scatter(
            x=rows["value"],
            y=rows[row],
            error_x=_error_bars(rows),
            mode="markers",
            name=str(name),
            orientation="h",
            marker={"size": 8, "symbol": SYMBOLS[place % len(SYMBOLS)], "color": COLOURS[place % len(COLOURS)]},
        )
    names = list(dict.fromkeys(frame[row]))
    figure.update_xaxes(title=label, side="top")
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], tickson="boundaries")
    figure.update_layout(scattermode="group", scattergap=0.3)
    drawn = styled(figure, title, height=130 + 46 * len(names))
    return drawn.update_layout(margin={"t": 95 if title else 60}, legend={"y": -0.02})


def edge_map(table: Table, title: str = "", unit: str = "nats") -> go.Figure:
    """Returns a table of edges or paths as a map, senders across and receivers from bottom to top.

    Args:
        table: With key columns sender and receiver, one row for each pair: `patch_edges`, `patch_paths` or
            `attribute_edges`. Pairs that it does not hold stay blank.
        title: Above the map.
        unit: What the numbers are.

    Raises:
        ValueError: A pair has more than one row.
    """
    frame = table.frame
    if frame.duplicated(["sender", "receiver"]).any():
        raise ValueError("several rows for a sender and a receiver: choose one metric with .where(...) first")
    order = {name: list(dict.fromkeys(frame[name])) for name in ("sender", "receiver")}
    grid: Any = frame.pivot(index="receiver", columns="sender", values="value")
    grid = grid.reindex(index=order["receiver"], columns=order["sender"])
    bound = float(np.nanmax(np.abs(grid.to_numpy(dtype=float)))) or 1.0
    heat = go.Heatmap(
        z=grid.to_numpy(dtype=float),
        x=order["sender"],
        y=order["receiver"],
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        hovertemplate="%{x} to %{y}: %{z:.3f}<extra></extra>",
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title="sender", type="category", showgrid=False)
    figure.update_yaxes(title="receiver", type="category", showgrid=False)
    figure.update_layout(
        coloraxis={"colorscale": DIVERGING, "cmin": -bound, "cmax": bound, "colorbar": {"title": unit}}
    )
    return styled(figure, title, height=140 + 18 * min(len(grid), 40))


def faithfulness(tables: Mapping[str, Table], title: str = "") -> go.Figure:
    """Returns faithfulness over the share of edges kept, a line for each table; named sets of heads are single points.

    Args:
        tables: What `faithfulness` returned, by what scored the edges.
        title: Above the figure.
    """
    figure = go.Figure()
    for place, (name, table) in enumerate(tables.items()):
        frame: Any = table.where(metric="faithfulness").frame
        colour = COLOURS[place % len(COLOURS)]
        rows = frame[(frame["circuit"] == "edges") & (frame["fraction"] > 0)]
        figure.add_scatter(
            x=rows["fraction"],
            y=rows["value"],
            error_y=_error_bars(rows),
            mode="lines+markers",
            name=name,
            marker={"size": 8, "symbol": SYMBOLS[place % len(SYMBOLS)], "color": colour},
        )
    sets: Any = pd.concat([table.where(metric="faithfulness").frame for table in tables.values()])
    sets = sets[sets["circuit"] != "edges"].drop_duplicates("circuit")
    if len(sets):
        figure.add_scatter(
            x=sets["fraction"],
            y=sets["value"],
            error_y=_error_bars(sets),
            mode="markers+text",
            text=sets["circuit"],
            textposition="top center",
            cliponaxis=False,
            name="all edges among heads",
            marker={"size": 11, "symbol": "diamond-open", "color": _RING, "line": {"width": 2}},
        )
    for level in (0, 1):
        figure.add_hline(y=level, line={"dash": "dot", "color": _GREY, "width": 1})
    figure.update_xaxes(title="share of edges kept", type="log")
    figure.update_yaxes(title="faithfulness")
    return styled(figure, title, height=400)


def attention_maps(attention: Attention, relation: str | None = None, title: str = "") -> go.Figure:
    """Returns the attention of each head as a map, queries down and keys across: the widget as a static figure.

    Args:
        attention: What `attention` returned.
        relation: Whose gold keys to circle, one of the prompt's relations.
        title: Above the maps.
    """
    columns = min(_COLUMNS, len(attention.rows))
    lines = -(-len(attention.rows) // columns)
    figure = make_subplots(
        lines,
        columns,
        subplot_titles=[describe([head]) for head in attention.rows],
        horizontal_spacing=0.07,
        vertical_spacing=0.2 / lines,
    )
    size, tokens = len(attention.tokens), np.array(attention.tokens, dtype=object)
    text = np.stack(np.broadcast_arrays(tokens[:, None], tokens), -1)
    for place, pattern in enumerate(attention.pattern.numpy()):
        at: dict[str, Any] = {"row": place // columns + 1, "col": place % columns + 1}
        future = np.triu(np.ones((size, size), dtype=bool), 1)
        heat = go.Heatmap(
            z=np.where(future, np.nan, pattern.round(3)),
            coloraxis="coloraxis",
            customdata=text,
            hovertemplate="%{customdata[0]} to %{customdata[1]}: %{z:.3f}<extra></extra>",
        )
        figure.add_trace(heat, **at)
        if relation is not None:
            query, key = attention.gold(relation).nonzero().T.tolist()
            ring = {"symbol": "circle-open", "size": 8, "color": _RING, "line": {"width": 2}}
            figure.add_scatter(x=key, y=query, mode="markers", marker=ring, showlegend=False, hoverinfo="skip", **at)
    small = {"size": max(6, min(11, 280 // size))}
    ticks = {"tickvals": list(range(size)), "ticktext": list(tokens), "showgrid": False, "tickfont": small}
    figure.update_xaxes(**ticks, range=[-0.5, size - 0.5], tickangle=0 if max(map(len, tokens)) == 1 else 90)
    figure.update_yaxes(**ticks, range=[size - 0.5, -0.5])
    colorbar = {"title": "attention", "lenmode": "pixels", "len": 240, "y": 1, "yanchor": "top"}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": colorbar})
    return styled(figure, title, height=(340 if columns == 3 else 460) * lines + 60)


def attention_course(maps: Mapping[str, pd.DataFrame], title: str = "") -> go.Figure:
    """Returns attention maps above each other, with a slider if they were read at several steps.

    Args:
        maps: By its caption, a frame for each map with the columns step, query, key and value; queries run down.
        title: Above the maps.

    Raises:
        ValueError: The maps were not read at the same steps.
    """
    steps = [sorted(frame["step"].unique().tolist()) for frame in maps.values()]
    if any(other != steps[0] for other in steps):
        raise ValueError(f"maps read at different steps: {steps}; give each at every step")
    heights = [len(np.unique(frame["query"].to_numpy())) for frame in maps.values()]
    height = 220 + sum(min(30 * rows, 480) for rows in heights)

    def drawn(step: int) -> list[go.Heatmap]:
        grids = (
            frame[frame["step"] == step].pivot(index="query", columns="key", values="value") for frame in maps.values()
        )
        return [
            go.Heatmap(
                z=grid.to_numpy().round(3),
                x=list(grid.columns),
                y=[str(query) for query in grid.index],
                coloraxis="coloraxis",
                hovertemplate="%{y} to %{x}: %{z:.3f}<extra></extra>",
            )
            for grid in grids
        ]

    figure = make_subplots(
        len(maps), 1, row_heights=heights, subplot_titles=list(maps), shared_xaxes=True, vertical_spacing=50 / height
    )
    for row, heat in enumerate(drawn(steps[0][0]), start=1):
        figure.add_trace(heat, row=row, col=1)
    figure.frames = [go.Frame(data=drawn(step), name=str(step)) for step in steps[0]]
    shown = {"mode": "immediate", "frame": {"duration": 0}}
    slider = [{"label": str(step), "method": "animate", "args": [[str(step)], shown]} for step in steps[0]]
    figure.update_layout(
        sliders=[{"currentvalue": {"prefix": "step "}, "steps": slider, "pad": {"t": 40}}] if len(slider) > 1 else [],
        coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": {"title": "attention"}},
    )
    figure.update_yaxes(autorange="reversed", title="from", showgrid=False)
    figure.update_xaxes(title="to", row=len(maps), col=1, showgrid=False)
    return styled(figure, title, height=height)


def save(figure: go.Figure | Attention, path: str | Path, *, width: int = 1000, scale: int = 2) -> Path:
    """Writes a figure as a static picture, without a network.

    Args:
        figure: A figure, or attention, which is drawn as `attention_maps`.
        path: Ends in `.png`, `.svg` or `.pdf`.
        width: In pixels; the height is the figure's own.
        scale: Pixels of a PNG for each pixel of the figure.

    Returns:
        The path.

    Raises:
        ValueError: Another ending, or the package kaleido or the browser that it draws with is missing.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"cannot write a picture to {path.name!r}: give a name that ends in .png, .svg or .pdf")
    if find_spec("kaleido") is None:
        raise ValueError("pictures need the package kaleido: pip install 'align-circuits[pictures]'")
    import kaleido
    from kaleido.errors import ChromeNotFoundError

    drawn = attention_maps(figure) if isinstance(figure, Attention) else figure
    options = {"format": path.suffix[1:], "width": width, "height": drawn.layout["height"] or 450, "scale": scale}
    try:
        picture = kaleido.calc_fig_sync(drawn, opts=options, kopts={"mathjax": False})  # MathJax would be downloaded
    except ChromeNotFoundError as error:
        raise ValueError(
            "pictures are drawn with Chrome or Chromium, and none was found: install one (apt-get install chromium), "
            "or name it in the environment variable BROWSER_PATH"
        ) from error
    with replacing(path) as temporary:
        temporary.write_bytes(picture)
    return path


def _error_bars(frame: Any) -> dict:
    above, below = frame["high"] - frame["value"], frame["value"] - frame["low"]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.4, "width": 4}


def styled(figure: go.Figure, title: str, height: int) -> go.Figure:
    """Transparent and grey-lettered, so that light and dark pages both work; no template is registered."""
    top, bottom, below = 60 if title else 35, 55, 85  # in pixels; the legend stands below the title of the x axis
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        height=height,
        template=None,
        font={"color": _GREY, "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 60, "r": 20, "t": top, "b": bottom},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": _GREY, "activecolor": _GREY},
        legend={"orientation": "h", "y": -below / (height - top - bottom), "yanchor": "top", "x": 0, "xanchor": "left"},
    )
    axis = {"gridcolor": "rgba(128,128,128,.25)", "linecolor": _GREY, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis, automargin=True)  # long names of rows need more room on the left
    return figure
