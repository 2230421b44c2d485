"""Figures of circuits: effects of edges, and the faithfulness of subgraphs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.checks import checked
from align_circuits.report.plots.colours import GREY, RING
from align_circuits.report.plots.figure_parts import (
    cells,
    coloured,
    interval_grids,
    marker,
    plain,
    plain_list,
    points,
    styled,
    unit_of,
)
from align_circuits.tables.tables import Table


@checked
def edge_map(table: Table, title: str = "", unit: str | None = None) -> go.Figure:
    """Returns a table of edges or paths as a map, senders across and receivers from bottom to top.

    Args:
        table: With key columns sender and receiver, one row for each pair: `patch_edges`, `patch_paths` or
            `attribute_edges`. Missing pairs stay blank.
        title: Above the map.
        unit: The unit of the numbers; by default that of the table's metric.

    Raises:
        ValueError: No row with a number, or several rows for a pair.
    """
    frame: Any = table.frame
    if frame["value"].isna().all():
        raise ValueError("no edge with a number to draw: give a table that has one")
    if frame.duplicated(["sender", "receiver"]).any():
        raise ValueError("several rows for a sender and a receiver: choose one metric with .where(...) first")
    senders, receivers = (list(dict.fromkeys(frame[key])) for key in ("sender", "receiver"))
    z, *_ = interval_grids(frame, ("receiver", receivers), ("sender", senders))
    bound = float(np.nanmax(np.abs(z))) or 1.0
    figure = go.Figure(cells(z, plain_list(senders), plain_list(receivers), "%{x} to %{y}: %{z:.3f}"))
    figure.update_xaxes(title="sender", type="category", showgrid=False)
    figure.update_yaxes(title="receiver", type="category", showgrid=False)
    coloured(figure, unit_of(table, "change") if unit is None else unit, bound, signed=True)
    return styled(figure, title, height=140 + 18 * min(len(receivers), 40))


@checked
def faithfulness(tables: Mapping[str, Table], title: str = "") -> go.Figure:
    """Returns faithfulness over the share of edges kept, one line per table; named sets of heads are points.

    Args:
        tables: The results of `faithfulness`, by the method that scored the edges.
        title: Above the figure.
    """
    figure = go.Figure()
    for index, (name, table) in enumerate(tables.items()):
        frame = table.where(metric="faithfulness").frame
        # The axis is logarithmic, and 0 has no place there.
        rows = frame[(frame["circuit"] == "edges") & (frame["fraction"] > 0)]
        style = marker(index, 8)
        figure.add_trace(points(rows, x=rows["fraction"], mode="lines+markers", name=plain(name), marker=style))
    measured = [table.where(metric="faithfulness").frame.assign(table=name) for name, table in tables.items()]
    sets = pd.concat(measured)
    # A set of heads of one model is the same circuit in every table, however its edges were scored.
    sets = sets.loc[sets["circuit"] != "edges"].drop_duplicates(["circuit", "fraction", "value"])
    if len(sets):
        again = sets["circuit"].duplicated(keep=False)
        sets["circuit"] = sets["circuit"].where(~again, sets["circuit"] + " (" + sets["table"] + ")")
        named = points(
            sets,
            x=sets["fraction"],
            mode="markers+text",
            text=plain_list(sets["circuit"]),
            textposition="top center",
            cliponaxis=False,
            name="all edges among heads",
            marker={"size": 11, "symbol": "diamond-open", "color": RING, "line": {"width": 2}},
        )
        figure.add_trace(named)
    for level in (0, 1):
        figure.add_hline(y=level, line={"dash": "dot", "color": GREY, "width": 1})
    figure.update_xaxes(title="share of edges kept", type="log")
    figure.update_yaxes(title="faithfulness")
    return styled(figure, title, height=400)
