"""Figures of tables: plotly figures for notebooks and reports, legible on light and on dark pages.

Tables, or frames made of them, come in; plotly figures go out, which `save` writes as pictures. `attention` returns a
widget. Titles, captions, labels and names are drawn letter for letter, without plotly's markup; a line break stays one.
"""

from align_circuits.report.attention_view import EARLIER, AttentionView, attention
from align_circuits.report.plots.accuracy_figures import ablation, accuracy, accuracy_grids
from align_circuits.report.plots.attention_figures import attention_course, attention_maps
from align_circuits.report.plots.circuit_figures import edge_map, faithfulness
from align_circuits.report.plots.colours import COLOURS, DIVERGING, SEQUENTIAL
from align_circuits.report.plots.curve_figures import beside, curves, dots
from align_circuits.report.plots.figure_parts import styled
from align_circuits.report.plots.head_figures import head_map, head_maps, top_heads
from align_circuits.report.plots.pictures import save
from align_circuits.report.plots.position_figures import position_map

__all__ = [
    "COLOURS",
    "DIVERGING",
    "EARLIER",
    "SEQUENTIAL",
    "AttentionView",
    "ablation",
    "accuracy",
    "accuracy_grids",
    "attention",
    "attention_course",
    "attention_maps",
    "beside",
    "curves",
    "dots",
    "edge_map",
    "faithfulness",
    "head_map",
    "head_maps",
    "position_map",
    "save",
    "styled",
    "top_heads",
]
