"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): does a tuned model align at other input lengths?

With phrases of one letter and monotonic alignment, the aligned symbol always stands m tokens before the query. A head
that attends there scores 1 by `align_query` without knowing which symbol is next; at another length it looks at a
wrong one.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.figs_3_9_accuracy import accuracy, all_offsets, on_tasks
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import rows
from align_circuits.report import plots
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Lengths:
    """Standard prompts of several lengths, for a model and the same model tuned at one of them, or the latter alone."""

    x_lens: tuple[int, ...] = (3, 4, 5, 6, 7)
    tuned_on: int = 5
    phrase_len: int = 2
    n_examples: int = 10
    n: int = 64
    """Prompts of each length."""


def _jobs(config: Lengths, inputs: Inputs) -> list[Measurement]:
    about = {"phrase_len": config.phrase_len, "n_examples": config.n_examples}
    return on_tasks(accuracy, inputs, [{"x_len": m, **about} for m in config.x_lens], n=config.n)


def _summarize(config: Lengths, rows: Rows) -> pd.DataFrame:
    """First tokens; `length` tells the length that the model was tuned on from others."""
    frame: Any = all_offsets(config, rows)
    frame = frame[(frame["kind"] == "first") & frame["predictor"].isin(["model", "history", "memoryless"])]
    return frame.assign(length=(frame["x_len"] == config.tuned_on).map({True: "as tuned", False: "other"}))


_FIRST = rows(metric="accuracy", predictor="model")


def _check(table: Table) -> list[Claim]:
    first, *others = table.frame["model"].unique()
    above, memoryless = (_FIRST.rise("predictor", "history", of) for of in ("model", "memoryless"))
    tuned, control, control_is = (
        (*above.beside("model", others[-1], first), "the model before tuning")
        if others
        else (above, memoryless, "a memoryless predictor")
    )
    return [
        Claim(f"{where}: the tuned model's first token is above the history ceiling (difference)").at_least(
            0.0, tuned.at(length=length), control.at(length=length), control_is
        )
        for length, where in (("as tuned", "At the length of its tuning"), ("other", "At other lengths"))
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    first: Any = table.where(metric="accuracy", predictor=["model", "history"]).frame
    who = first["model"].where(first["predictor"] == "model", "history ceiling")
    panels = {"first token of a phrase": first.assign(who=who).drop_duplicates(["who", "x_len"])}
    return {"lengths": plots.curves(panels, x="x_len", by="who", label="input length m")}


LENGTHS = Experiment(
    "icatune/lengths",
    "Does a tuned model align at other lengths than that of its tuning?",
    "beyond Agarwal and Sarawagi (2025); the claims were written after a look at eight prompts of each length",
    Study(
        "icatune/lengths",
        {
            "smoke": Lengths(x_lens=(3, 5), n_examples=2, n=4),
            "cpu": Lengths(),
            "paper": Lengths(n=500),
            "smollm2": Lengths(n_examples=15, n=24),
        },
        _jobs,
        _summarize,
        models="several",
    ),
    _draw,
    _check,
    about=About.BEYOND,
)
