"""What the verbs of effects (ablate, patch, attribute) share: options, what they print and what they draw."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_verb import SweepVerb
from align_circuits.cli.verb import head_value
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.page import Section
from align_circuits.report.plots.position_figures import UNITS
from align_circuits.run.pairs import Direction
from align_circuits.tables.tables import Table

OF_TARGETS = tyro.conf.arg(help='What is measured of each target; "logit_diff" needs a file with wrong answers.')
EffectMetric = Annotated[Literal["log_prob", "logit", "logit_diff", "prob", "kl", "accuracy"], OF_TARGETS]
PairDirection = Annotated[
    Direction,
    tyro.conf.arg(
        help='"denoise" puts clean activations into corrupted runs, "noise" corrupted ones into clean runs. A '
        "corrupted prompt of the task has another test input, so that another symbol is to be translated at every "
        "position."
    ),
]


@dataclass(frozen=True)
class EffectVerb(SweepVerb):
    """A verb that measures an effect of every head."""

    def write(
        self, results: Results, table: Table, prompts: Prompts, metric: str, how: str, title: str, what: str, but: str
    ) -> None:
        """Prints how it was measured and the heads that matter most; writes the results, with `what` and `but`."""
        rows: Any = _of_all(table, metric).top(metric, 5).frame
        best = "   ".join(head_value(row) for _, row in rows.iterrows())
        print(f"{self.model}: {how}\n\n  {best}")
        summary = f"{what}, largest first: {best}. {but}"
        sections = list(_sections(table, metric, prompts))
        self.finish(results, table, title=title, summary=summary, sections=sections)


def _sections(table: Table, metric: str, prompts: Prompts) -> Iterator[Section]:
    """Yields the sections of a report: the heads that matter most, maps of all heads, a prompt, the table."""
    of_all, unit = _of_all(table, metric), UNITS.get(metric, "share")
    yield "The heads that matter most", "With 95% intervals over prompts.", plots.top_heads(of_all, [metric], 10)
    if "kind" in table.keys:
        kinds = list(dict.fromkeys(table.frame["kind"]))
        maps = plots.head_maps(_measured(table).where(metric=metric), kinds, by="kind", unit=unit)
    else:
        maps = plots.head_maps(of_all, [metric], unit=unit)
    yield "All heads", "Hover for a number and its interval.", maps
    if "estimated" in table.keys and True in set(table.frame["estimated"]):
        estimates = table.where(metric=metric, kind="all", estimated=True)
        drawn = plots.head_maps(estimates, [metric], unit=unit)
        yield "Estimates", "To first order: these heads were screened out, and not run.", drawn
    yield "A prompt", "", prompts.to_html(0)
    yield "All numbers", "", table


def _of_all(table: Table, metric: str) -> Table:
    """The measured rows of one metric over all targets."""
    of_all = {"kind": "all"} if "kind" in table.keys else {}
    return _measured(table).where(metric=metric, **of_all)


def _measured(table: Table) -> Table:
    """The rows that are no estimates of a screen."""
    return table.where(estimated=False) if "estimated" in table.keys else table
