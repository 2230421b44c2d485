"""`align-circuits score`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from align_circuits.cli.command_base import (
    METRICS,
    PromptVerb,
    accuracy_sections,
    counted,
    first_token,
    head_value,
    intervals_over,
)
from align_circuits.cli.folders import Results
from align_circuits.heads.candidates import chance_of, position_notes
from align_circuits.heads.one_pass import score_and_evaluate
from align_circuits.heads.score import MEASURES, resolve
from align_circuits.heads.thresholds import Thresholds
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.page import legend_of
from align_circuits.tables.tables import Table
from align_circuits.tasks.own_prompts import as_task
from align_circuits.tasks.task import TOKEN_ROLES

LEAST_SHOWN = 0.005
"""Scores below this would be printed as 0.00: their heads are not listed among the best."""

LEAST_ATTENTION = Thresholds().attention
"""The least share of all its attention that a head pays to the keys, to stand before heads that pay less."""


@dataclass(frozen=True)
class Score(PromptVerb):
    """Scores every head, as `score_heads` does, and evaluates the model in the same pass."""

    metrics: tuple[str, ...] | None = None
    """What is scored: names of relations, such as lookup, also with the suffix _hit, _mass, _attention (the share of
    all attention) or _mean; sink or entropy. By default each relation, lookup_mean, sink and entropy; of each relation
    that is asked for, the share of all attention too."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        model, prompts, _ = self.prepare()
        asked = self.metrics or tuple(resolve(prompts, None))
        table, accuracy = score_and_evaluate(model, prompts, with_shares(prompts, asked), options=self.options)
        known = table.frame[table.frame["value"].notna()]
        of_file = [name for name in prompts.relations if name not in METRICS]  # of a file: what the reader asks about
        metrics = [metric for metric in self.metrics or (*of_file, *METRICS) if metric in set(known["metric"])]
        of_metric = {metric: ranked(table, metric) for metric in metrics}
        best = {metric: rows[rows["value"] >= LEAST_SHOWN].head(3) for metric, rows in of_metric.items()}
        some_low = any(_low(rows[rows.index < 5]).any() for rows in of_metric.values())
        suffixes = {"", *(f"_{measure}" for measure in MEASURES)}
        measured = [name for name in prompts.relations if {name + suffix for suffix in suffixes} & {*metrics}]
        notes = position_notes(prompts, measured)
        by_chance = chance_of(prompts, [name for name in best if name in prompts.relations and name not in TOKEN_ROLES])
        told = ", ".join(f"{of:.2f} ({name})" for name, of in by_chance.items())
        chance = f"A head that attends to all candidates alike scores {told}. " if told else ""
        last = f"Heads that pay the keys less than {LEAST_ATTENTION:g} of all their attention come last. " * some_low
        of_attending = (
            f", of heads that pay the keys at least {LEAST_ATTENTION:g} of all their attention, where there are such"
        ) * some_low
        roles = getattr(model, "roles", None)
        print(
            f"{self.model}: {counted(prompts, rest=f' of {_lengths(prompts)} tokens')}, "
            f"{table.provenance.engine} engine"
        )
        width = max(12, *map(len, best))
        print(f"\n  {'metric':<{width}} best heads ({intervals_over(table)}{'; planted role' if roles else ''})")
        for metric, rows in best.items():
            heads = "   ".join(head_value(row, roles) for _, row in rows.iterrows())
            print(f"  {metric:<{width}} {heads or 'no head scores above 0'}")
        for note in [*filter(None, (chance.rstrip(), last.rstrip())), *notes]:
            print(f"\n{note}")
        leaders = ", ".join(f"{name} {head_value(rows.iloc[0])}" for name, rows in [*best.items()][:3] if len(rows))
        task = self.source if self.prompts is None else as_task(prompts)
        right = f"{task.target_name} is correct in {first_token(accuracy)} of cases."
        references = [name for name in dict.fromkeys(accuracy.frame["predictor"]) if name != "model"]
        beside = f"With {intervals_over(accuracy)}, beside references: {', '.join(references)}."
        self.finish(
            results,
            table,
            title=f"Attention heads of {self.model}",
            summary="\n\n".join(
                [
                    f"Highest scores: {leaders or 'none above 0'}. {chance}{last}{right} Scores describe where heads "
                    "attend, not what the model uses: no head was ablated.",
                    *notes,
                ]
            ),
            roles=task.roles,
            sections=[
                *accuracy_sections(accuracy, beside * bool(references)),
                (
                    "The best heads",
                    f"The highest scores, with {intervals_over(table)}{of_attending}.",
                    plots.top_heads(_attending(table, of_metric), metrics),
                ),
                (
                    "All heads",
                    "The scores of all heads, also of those that pay the keys next to nothing of their attention: such "
                    "a score is a share of little. Grey: no attention to any candidate. Tap or hover for one and its "
                    "interval.",
                    plots.head_maps(table, metrics),
                ),
                ("A prompt", legend_of(prompts), prompts.to_html(0)),
            ],
        )


def _lengths(prompts: Prompts) -> str:
    """The least and the most tokens of a prompt."""
    lengths = prompts.mask.sum(1)
    return " to ".join(map(str, sorted({int(lengths.min()), int(lengths.max())})))


def with_shares(prompts: Prompts, asked: Collection[str]) -> list[str]:
    """Returns metrics, and for each that is a relation the share of all attention that its keys get: for `ranked`."""
    shares = [f"{name}_attention" for name in asked if name in prompts.relations and name not in TOKEN_ROLES]
    return [*dict.fromkeys((*asked, *shares))]


def ranked(table: Table, metric: str) -> Any:
    """Returns the rows of heads from the highest score down, with `attention`, the share of all that their keys get.

    Heads below `LEAST_ATTENTION` come last; the index is the place by score alone.
    """
    rows = table.top(metric, len(table)).frame.reset_index(drop=True)
    shares = table.frame.loc[table.frame["metric"] == f"{metric}_attention"].set_index(["layer", "head"])
    rows = rows.join(shares[["value"]].rename(columns={"value": "attention"}), on=["layer", "head"])
    return rows.loc[_low(rows).sort_values(kind="stable").index]


def _low(rows: Any) -> Any:
    return rows["attention"] < LEAST_ATTENTION


def _attending(table: Table, of_metric: dict[str, Any]) -> Table:
    """The table without the rows of heads below `LEAST_ATTENTION`, for each metric that other heads have."""
    keep = np.ones(len(table), dtype=bool)
    for metric, rows in of_metric.items():
        low = rows[_low(rows)].set_index(["layer", "head"]).index
        if len(low) < len(rows):
            heads = table.frame.set_index(["layer", "head"]).index
            keep &= ~((table.frame["metric"] == metric).to_numpy() & heads.isin(low))
    return table._rows(np.flatnonzero(keep))
