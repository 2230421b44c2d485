"""Figures of sites: maps over layers and positions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Int
from plotly.subplots import make_subplots
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import readable
from align_circuits.report.plots.colours import BLANK
from align_circuits.report.plots.figure_parts import cells, coloured, interval_grids, plain, plain_list, styled, unit_of
from align_circuits.tables.tables import Table

WITHOUT_LAYER = "-"
"""The row of a site outside the layers."""


@checked
def position_map(
    table: Table, metric: str | None = None, title: str = "", *, prompts: Prompts | None = None
) -> go.Figure:
    """Returns what patching changes as maps, layers from bottom to top and positions across, a panel for each site.

    All panels share one diverging scale around zero. What was not measured is grey.

    Args:
        table: With key columns site, layer and position, one row for each: `patch_sites`. Of several kinds of
            targets all are drawn together.
        metric: Which to draw; by default that of the pair that was patched, the first in the table.
        title: Above the maps.
        prompts: The prompts that were patched. A position at which all of them have one token is labelled with it, any
            other with its name or number.

    Raises:
        ValueError: A table that lacks one of the keys, has no rows or several rows for a place, or has columns that the
            prompts do not.
    """
    keys = ["site", "layer", "position"]
    table = table.of_all_targets()
    frame = table.frame
    if missing := [key for key in keys if key not in frame]:
        raise ValueError(
            f"no key column {missing[0]!r} in this table of {table.provenance.verb!r}: give one of patch_sites"
        )
    if frame.empty:
        raise ValueError("a table without rows has no map: patch at least one site, layer and position")
    table = table.where(metric=metric or frame["metric"].iloc[0]) if "metric" in frame else table
    frame = table.frame
    if frame.duplicated(keys).any():
        several = {key: list(frame[key].unique()) for key in table.keys if key not in (*keys, "level")}
        choose = [f"{key} ({', '.join(map(str, values))})" for key, values in several.items() if len(values) > 1]
        raise ValueError(f"several rows for a place: choose one {' and one '.join(choose)} with .where(...) first")
    positions = list(dict.fromkeys(frame["position"]))
    raw = position_labels(positions, prompts)
    labels = plain_list(raw)
    frame = frame.assign(row=[WITHOUT_LAYER if pd.isna(layer) else int(layer) for layer in frame["layer"]])
    rows_of = {site: list(rows.unique()) for site, rows in frame.groupby("site", sort=False)["row"]}
    layers = sorted({layer for rows in rows_of.values() for layer in rows if layer != WITHOUT_LAYER})
    shown = {site: list(rows) if WITHOUT_LAYER in rows else layers for site, rows in rows_of.items()}
    heights = [24 + 18 * min(len(rows), 32) for rows in shown.values()]
    height, size = sum(heights) + 40 * len(heights) + 130, len(positions)
    figure = make_subplots(
        len(shown),
        1,
        subplot_titles=plain_list(shown),
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=40 / height,
    )
    for panel, (site, rows) in enumerate(shown.items(), start=1):
        z, *ends = interval_grids(frame.loc[frame["site"] == site], ("row", rows), ("position", positions))
        # As objects, or numpy would make texts of the numbers, which the hover text rounds.
        details = np.stack([*ends, np.tile(np.array(labels), (len(rows), 1))], -1, dtype=object)
        hover = f"{plain(str(site))} of layer %{{y}} at %{{customdata[2]}}: %{{z:.3f}} "
        hover += "[%{customdata[0]:.3f}, %{customdata[1]:.3f}]"
        figure.add_trace(cells(z, list(range(size)), list(map(str, rows)), hover, customdata=details), row=panel, col=1)
    upright = max(map(len, raw)) * size > 90
    figure.update_xaxes(
        tickvals=list(range(size)),
        ticktext=labels,
        tickangle=90 if upright else 0,
        tickfont={"size": max(6, min(12, 420 // size))},
        range=[-0.5, size - 0.5],
        showgrid=False,
    )
    # Not numbers, since a site outside the layers has a row as well.
    figure.update_yaxes(type="category", title="layer", showgrid=False)
    bound = float(np.nanmax(frame["value"].abs().to_numpy(dtype=float), initial=0)) or 1.0
    bar = {"lenmode": "pixels", "len": min(240, height - 120), "y": 1, "yanchor": "top"}
    coloured(figure, _scale_title(table), bound, signed=True, **bar)
    return styled(figure, title, height).update_layout(plot_bgcolor=BLANK)


def _scale_title(table: Table) -> str:
    """What the colours mean, with the unit."""
    metric, unit = table.frame["metric"].iloc[0] if "metric" in table.frame else "value", unit_of(table)
    return f"{metric},\nnormalised" if unit == "share" else f"change of\n{metric}" + f"\n({unit})" * bool(unit)


def position_labels(positions: Sequence[Any], prompts: Prompts | None) -> list[str]:
    """Returns what stands below each position: its name, and the token that all prompts have there; else its number.

    Behind the last position that predicts, where nothing can matter, an answer that differs has no number.
    """
    if prompts is None:
        return [str(position) for position in positions]
    length, last = prompts.mask.shape[1], prompts.targets["query_pos"].max()  # NaN without targets
    labels = []
    for position in positions:
        if isinstance(position, str):
            name, columns = position, prompts.positions.get(position)
        else:
            columns = torch.full((len(prompts),), position)
            name = next((name for name, column in prompts.positions.items() if torch.equal(column, columns)), "")
        if columns is not None and not 0 <= int(columns.min()) <= int(columns.max()) < length:
            raise ValueError(
                f"position {position} is not in these prompts of {length} tokens: give those that were patched"
            )
        token = "" if columns is None else _common_token(prompts, columns)
        number = "answer" if not isinstance(position, str) and position > last else str(position)
        labels.append(": ".join(filter(None, [name, token])) or number)
    return labels


def _common_token(prompts: Prompts, columns: Int[Tensor, " prompt"]) -> str:
    """The token that all prompts have in their column, to be read; empty where they differ or one has padding."""
    rows = torch.arange(len(prompts))
    same = (prompts.tokens[rows, columns] == prompts.tokens[0, columns[0]]) & prompts.mask[rows, columns]
    return readable(prompts.texts_at(0)[int(columns[0])]) if same.all() else ""
