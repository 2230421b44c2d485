"""Reports: figures, attention widgets and self-contained HTML pages.

Tables, prompts and what `localize` returns come in; plotly figures, widgets and files go out. Nothing is measured in
this room but the attention on a single prompt.
"""

from align_circuits.report import plots
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.localize_report import save_localization
from align_circuits.report.page import write_report

__all__ = ["AttentionView", "plots", "save_localization", "write_report"]
