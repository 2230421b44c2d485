"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): the prompts of Table 1, in symbols of several kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.icatune.figs_3_9_accuracy import STYLES, accuracy, on_tasks
from align_circuits.papers.lab import Claim, Experiment, Inputs, Measured, Measurement, Rows, Study, both, difference_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

INPUTS = (
    "apple bread chair cloud dance dream earth field flower garden glass green heart horse house island king lake "
    "light moon mountain night ocean paper river road"
)
OUTPUTS = "act age aim air arm art ask bad bag bar bed big bit box boy bus buy can cap car cat cold come cook cool cut"

SYMBOLS: Mapping[str, Mapping[str, Any]] = {
    "letters": {},
    "words": {"alphabet": INPUTS.split(), "letters": OUTPUTS.split()},
    "numbers": {"alphabet": "0123456789", "spaced": False},
}
"""What prompts are written in: as many words as there are letters; digits as symbols, and letters in the output."""


@dataclass(frozen=True)
class Symbols:
    """The prompts of Table 1, written in letters and otherwise."""

    symbols: tuple[str, ...] = ("letters", "words", "numbers")
    """Of `SYMBOLS`, those that the model's tokenizer has."""
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 5, "phrase_len": 2, "n_examples": 15})
    n: int = 50


def _symbol_jobs(config: Symbols, inputs: Inputs) -> list[Measurement]:
    return [
        replace(job, keys={"symbols": name, "style": style})
        for name in config.symbols
        for style in STYLES
        for job in on_tasks(accuracy, inputs, [{**config.task, "style": style, **SYMBOLS[name]}], n=config.n)
    ]


def _summarize(_: Symbols, rows: Rows) -> pd.DataFrame:
    frame = rows["accuracy"]
    return frame[frame["offset"].isna()].drop(columns="seed")


def _check_symbols(table: Table) -> list[Claim]:
    def first(symbols: str, style: str, predictor: str = "model") -> Table:
        return table.where(symbols=symbols, style=style, kind="first", metric="accuracy", predictor=predictor)

    def above_history(symbols: str, style: str) -> Measured:
        return difference_of(first(symbols, style), first(symbols, style, "history"))

    checks = []
    for name in table.frame["symbols"].unique():
        standard, aligned = both(partial(above_history, name), *STYLES)
        checks += [
            Claim(f"In {name}: the first token of standard prompts is no better than the history ceiling").at_most(
                0.0, standard, aligned, "pre-aligned prompts"
            ),
            Claim(f"In {name}: that of pre-aligned prompts is (difference)").at_least(
                0.1, aligned, standard, "standard prompts"
            ),
        ]
    return checks


def _draw_symbols(table: Table) -> dict[str, go.Figure]:
    rows: Any = table.where(kind="first", metric="accuracy").frame
    return {
        str(symbols): plots.dots(of, "predictor", "style", f"first token, in {symbols}")
        for symbols, of in rows.groupby("symbols", sort=False)
    }


SYMBOLS_OF_TABLE1 = Experiment(
    "icatune/symbols",
    "The prompts of Table 1 in letters, in words and in numbers",
    "Agarwal and Sarawagi (2025), Table 1",
    Study(
        "icatune/symbols",
        {
            "smoke": Symbols(("letters",), {"x_len": 3, "phrase_len": 2, "n_examples": 3}, n=4),
            "cpu": Symbols(("letters",), n=100),
            "paper": Symbols(n=500),
            "smollm2": Symbols(),
        },
        _symbol_jobs,
        _summarize,
        models="one",
    ),
    _draw_symbols,
    _check_symbols,
)
