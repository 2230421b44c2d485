"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): what a pretrained model does in context."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, grids, rows_along, stored
from align_circuits.papers.statistics import HIGH, Statistic, levels, rows
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

STYLES = ("standard", "pre-aligned")


def accuracy(*, model: str, task: Mapping[str, Any], n: int, seed: int, **_: str) -> pd.DataFrame:
    """Returns what `evaluate` does of a model on fresh prompts of a task; the function of a job.

    Args:
        model: What `load` takes.
        task: The task's arguments.
        n: Prompts.
        seed: Of the prompts.
        **_: The hash of the model's weights, as a name can get other weights.
    """
    loaded = stored(model)
    return evaluate(loaded, Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed)).frame


def all_offsets(_: Any, rows: Rows) -> pd.DataFrame:
    """Returns the rows of `accuracy` that are not about single places in a phrase."""
    frame = rows["accuracy"]
    return frame[frame["offset"].isna()].drop(columns="seed")


def on_tasks(
    function: Callable[..., pd.DataFrame], inputs: Inputs, tasks: Iterable[Mapping[str, Any]], *, n: int
) -> list[Measurement]:
    """Returns `accuracy`, or another function of its arguments, of every model on every task.

    Keys are `model` and the tasks' arguments. Each task has prompts of its own, so that its rows are independent of
    another task's.
    """
    return [
        Measurement(
            function,
            {"model": model, "weights": about["weights"], "task": task, "n": n},
            _seed_of(task),
            {"model": model, **task},
        )
        for model, about in inputs.models.items()
        for task in map(dict, tasks)
    ]


def _seed_of(task: Mapping[str, Any]) -> int:
    digest = hashlib.sha256(json.dumps([dict(task), 0], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big")


ACCURACY = rows(metric="accuracy", kind="all", predictor="model")
FIRST = ACCURACY.at(kind="first")


def above_history(first: Statistic = FIRST) -> Statistic:
    """Returns by how much first tokens are more accurate than the ceiling without alignment on the same prompts."""
    return first - first.at(predictor="history")


def _both(statistic: Statistic) -> tuple[Statistic, Statistic, str]:
    """Of standard prompts, and as the control of pre-aligned ones."""
    return *statistic.beside("style", *STYLES), "pre-aligned prompts"


# Figures 3 and 9


@dataclass(frozen=True)
class Grid:
    """Prompts of every input length and phrase length, monotonic."""

    x_lens: tuple[int, ...] = tuple(range(1, 9))
    phrase_lens: tuple[int, ...] = tuple(range(1, 9))
    n_examples: int = 15
    n: int = 100
    """Prompts a cell, each with its own automata."""
    n_compared: int | None = None
    """Standard prompts of the longest inputs with the shortest and with the longest phrases, which a claim compares;
    None: as many as of the others."""


N_COMPARED = 600
"""Registered after 150 were seen, of which the first are: .18 [.15, .21] left the claim, .2, undecided."""


def _jobs(config: Grid, inputs: Inputs) -> list[Measurement]:
    ends = min(config.phrase_lens), max(config.phrase_lens)
    jobs = []
    for style, m, c in product(STYLES, config.x_lens, config.phrase_lens):
        task = {"style": style, "x_len": m, "phrase_len": c, "n_examples": config.n_examples}
        is_compared = style == "standard" and m == max(config.x_lens) and c in ends
        jobs += on_tasks(accuracy, inputs, [task], n=(is_compared and config.n_compared) or config.n)
    return jobs


def _several_symbols(table: Table) -> Table:
    return table.where(x_len=[m for m in levels(table, "x_len") if m > 1])


_LONGEST = ACCURACY.at(x_len=HIGH)
_CELL = {"metric": "accuracy", "predictor": "model"}

FIG3 = Experiment(
    "icatune/fig3",
    "Accuracy in context by input length and phrase length",
    "Agarwal and Sarawagi (2025), Fig. 3",
    Study(
        "icatune/fig3",
        {
            "smoke": Grid(x_lens=(1, 3), phrase_lens=(1, 2), n_examples=4, n=6),
            "cpu": Grid(n=100),
            "paper": Grid(n=500),
            "smollm2": Grid(x_lens=(1, 3, 5, 8), phrase_lens=(1, 2, 4, 8), n=150, n_compared=N_COMPARED),
        },
        _jobs,
        all_offsets,
        models="one",
    ),
    {
        "fig3": grids(
            "phrase_len",
            "x_len",
            {
                "(a) standard, all tokens": {"style": "standard", "kind": "all", **_CELL},
                "(b) standard, first token of a phrase": {"style": "standard", "kind": "first", **_CELL},
                "(c) pre-aligned, all tokens": {"style": "pre-aligned", "kind": "all", **_CELL},
            },
            x="phrase length c",
            y="input length m",
        )
    },
    [
        Claim("Accuracy drops with input length (m = 1 minus m = {x_len.high}, mean over c)").at_least(
            0.2, *_both(ACCURACY.fall("x_len", 1))
        ),
        Claim(
            "Accuracy rises with phrase length (c = {phrase_len.high} minus c = 1 at m = {x_len.high})",
            ".71 - .33 = .38",
        ).at_least(0.2, *_both(_LONGEST.rise("phrase_len", 1))),
        Claim(
            "The loss is at the first token of a phrase (all minus first at m = {x_len.high}, c = {phrase_len.high})",
            ".71 - .14 = .57",
        ).at_least(0.2, *_both(_LONGEST.at(phrase_len=HIGH).fall("kind", "all", "first"))),
        Claim(
            "Writing the aligned symbol before its phrase brings accuracy back (m = {x_len.high}, mean over c)",
            ".90 to .99",
        ).at_least(0.9, *_LONGEST.beside("style", *STYLES[::-1]), "standard prompts"),
        Claim("Standard prompts: the first token is no better than the history ceiling (difference, m > 1)").at_most(
            0.0, *_both(above_history(FIRST.map(_several_symbols)))
        ),
    ],
    "Llama 3 8B at m = 8, all tokens: 33% (c = 1), 48% (c = 2), 60% (c = 4), 71% (c = 8); "
    "first token at c = 8: 14%; pre-aligned at m = 8: 90 to 99%.",
)


def _claims_of_models(table: Table) -> list[Claim]:
    names, claims = table.frame["model"].unique(), []
    for name in names:
        of_model = ACCURACY.at(model=name)
        claims += [
            Claim(
                f"{name}: accuracy rises with phrase length (c = {{phrase_len.high}} minus c = {{phrase_len.low}})",
                "in all models",
            ).at_least(0.2, *_both(of_model.rise("phrase_len"))),
            Claim(f"{name}: accuracy is high at every c on pre-aligned prompts (the worst c)", "also 1B").at_least(
                0.9, *of_model.lowest().beside("style", *STYLES[::-1]), "standard prompts"
            ),
        ]
    return claims + [
        Claim(f"{larger} is more accurate than {smaller} (mean over c, difference)", "larger models are").at_least(
            0.05, *_both(ACCURACY.rise("model", smaller, larger))
        )
        for smaller, larger in pairwise(names)
    ]


FIG9 = Experiment(
    "icatune/fig9",
    "Accuracy in context of several models, at the longest inputs",
    "Agarwal and Sarawagi (2025), Fig. 9",
    Study(
        "icatune/fig9",
        {
            "smoke": Grid(x_lens=(3,), phrase_lens=(1, 2), n_examples=4, n=6),
            "cpu": Grid(x_lens=(8,), n=100),
            "paper": Grid(x_lens=(8,), n=500),
            "smollm2": Grid(x_lens=(8,), phrase_lens=(1, 2, 4, 8), n=150, n_compared=N_COMPARED),
        },
        _jobs,
        all_offsets,
        models="several",
    ),
    {
        "fig9": rows_along(
            "phrase_len",
            "model",
            {style: {"style": style, "kind": "all", **_CELL} for style in STYLES},
            label="phrase length c",
        )
    },
    _claims_of_models,
    published="Llama 3.2 1B and 3B and Llama 3 8B: larger models are better, and all are good on pre-aligned prompts.",
)


# The prompts of Table 1, in symbols of several kinds

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


def _claims_of_symbols(table: Table) -> list[Claim]:
    claims = []
    for name in table.frame["symbols"].unique():
        standard, aligned = above_history().at(symbols=name).beside("style", *STYLES)
        claims += [
            Claim(f"In {name}: the first token of standard prompts is no better than the history ceiling").at_most(
                0.0, standard, aligned, "pre-aligned prompts"
            ),
            Claim(f"In {name}: that of pre-aligned prompts is (difference)").at_least(
                0.1, aligned, standard, "standard prompts"
            ),
        ]
    return claims


def _draw_symbols(table: Table) -> dict[str, go.Figure]:
    first: Any = table.where(kind="first", metric="accuracy").frame
    return {
        str(symbols): plots.dots(of, "predictor", "style", f"first token, in {symbols}")
        for symbols, of in first.groupby("symbols", sort=False)
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
            "smollm2": Symbols(n=300),
        },
        _symbol_jobs,
        all_offsets,
        models="one",
    ),
    _draw_symbols,
    _claims_of_symbols,
)
