"""What the verbs of effects (ablate, patch, attribute) print and draw of a table of heads."""

from collections.abc import Iterator
from typing import Any, Literal

from align_circuits.cli.verb import head_value
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.page import Section
from align_circuits.tables.tables import Table

MetricName = Literal["log_prob", "logit", "logit_diff", "prob", "kl", "accuracy"]

UNITS = {"log_prob": "nats", "kl": "nats", "logit": "logits", "logit_diff": "logits"}
"""The units of the metrics; the others are shares."""


def best_heads(table: Table, metric: str, count: int = 5) -> str:
    """Returns the heads that matter most for all targets, with their intervals."""
    rows: Any = _of_all(table, metric).top(metric, count).frame
    return "   ".join(head_value(row) for _, row in rows.iterrows())


def sections(table: Table, metric: str, prompts: Prompts) -> Iterator[Section]:
    """Yields the sections of a report: the heads that matter most, maps of all heads, a prompt, the table."""
    measured, of_all = _measured(table), _of_all(table, metric)
    unit = UNITS.get(metric, "")
    yield "The heads that matter most", "With 95% intervals over prompts.", plots.top_heads(of_all, [metric], 10)
    if "kind" in table.keys:
        kinds = list(dict.fromkeys(table.frame["kind"]))
        maps = plots.head_maps(measured.where(metric=metric), kinds, by="kind", unit=unit or "share")
    else:
        maps = plots.head_maps(of_all, [metric], unit=unit or "share")
    yield "All heads", "Hover for a number and its interval.", maps
    if "estimated" in table.keys and True in set(table.frame["estimated"]):
        estimates = table.where(metric=metric, kind="all", estimated=True)
        drawn = plots.head_maps(estimates, [metric], unit=unit or "share")
        yield "Estimates", "To first order: these heads were screened out, and not run.", drawn
    yield "A prompt", "", prompts.drawing(0)
    yield "All numbers", "", table


def _of_all(table: Table, metric: str) -> Table:
    """The measured rows of one metric over all targets."""
    table = _measured(table)
    return table.where(metric=metric, kind="all") if "kind" in table.keys else table.where(metric=metric)


def _measured(table: Table) -> Table:
    """The rows that are no estimates of a screen."""
    return table.where(estimated=False) if "estimated" in table.keys else table
