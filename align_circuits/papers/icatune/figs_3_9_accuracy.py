"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): what a pretrained model does in context."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.lab import (
    Claim,
    Experiment,
    Inputs,
    Measured,
    Measurement,
    Rows,
    Study,
    both,
    difference_of,
    extreme_of,
    mean_of,
    stored,
)
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

STYLES = ("standard", "pre-aligned")


@dataclass(frozen=True)
class Grid:
    """Prompts of every input length and phrase length, monotonic."""

    x_lens: tuple[int, ...] = tuple(range(1, 9))
    phrase_lens: tuple[int, ...] = tuple(range(1, 9))
    n_examples: int = 15
    n: int = 100
    """Prompts a cell, each with its own automata."""


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


def _jobs(config: Grid, inputs: Inputs) -> list[Measurement]:
    tasks = [
        {"style": style, "x_len": m, "phrase_len": c, "n_examples": config.n_examples}
        for style in STYLES
        for m in config.x_lens
        for c in config.phrase_lens
    ]
    return on_tasks(accuracy, inputs, tasks, n=config.n)


def _summarize(_: Grid, rows: Rows) -> pd.DataFrame:
    frame = rows["accuracy"]
    return frame[frame["offset"].isna()].drop(columns="seed")


def _accuracy(table: Table, style: str, kind: str = "all", **where: int | str) -> Table:
    return table.where(style=style, kind=kind, predictor="model", metric="accuracy", **where)


# Figure 3


def _draw_grids(table: Table) -> dict[str, go.Figure]:
    panels = {
        "(a) standard, all tokens": _accuracy(table, "standard"),
        "(b) standard, first token of a phrase": _accuracy(table, "standard", "first"),
        "(c) pre-aligned, all tokens": _accuracy(table, "pre-aligned"),
    }
    grids = {
        title: rows.frame.pivot(index="x_len", columns="phrase_len", values="value") for title, rows in panels.items()
    }
    return {"fig3": plots.accuracy_grids(grids, x="phrase length c", y="input length m")}


def _check_grids(table: Table) -> list[Claim]:
    m, c = (int(table.frame[column].to_numpy().max()) for column in ("x_len", "phrase_len"))

    at = partial(_accuracy, table)

    def above_history(style: str) -> Measured:
        """First tokens of inputs of more than one symbol; the ceiling is that of the same prompts."""
        longer = {"x_len": [length for length in table.frame["x_len"].unique() if length > 1]}
        first = table.where(style=style, kind="first", metric="accuracy", **longer)
        return difference_of(first.where(predictor="model"), first.where(predictor="history"))

    def beside(statistic: Callable[[str], Measured]) -> tuple[Measured, Measured, str]:
        return *both(statistic, *STYLES), "pre-aligned prompts"

    return [
        Claim(f"Accuracy drops with input length (m = 1 minus m = {m}, mean over c)").at_least(
            0.2, *beside(lambda style: difference_of(at(style, x_len=1), at(style, x_len=m)))
        ),
        Claim(f"Accuracy rises with phrase length (c = {c} minus c = 1 at m = {m})", ".71 - .33 = .38").at_least(
            0.2, *beside(lambda style: difference_of(*(at(style, x_len=m, phrase_len=length) for length in (c, 1))))
        ),
        Claim(
            f"The loss is at the first token of a phrase (all minus first at m = {m}, c = {c})", ".71 - .14 = .57"
        ).at_least(
            0.2, *beside(lambda style: difference_of(*(at(style, k, x_len=m, phrase_len=c) for k in ("all", "first"))))
        ),
        Claim(
            f"Writing the aligned symbol before its phrase brings accuracy back (m = {m}, mean over c)", ".90 to .99"
        ).at_least(0.9, mean_of(at("pre-aligned", x_len=m)), mean_of(at("standard", x_len=m)), "standard prompts"),
        Claim("Standard prompts: the first token is no better than the history ceiling (difference, m > 1)").at_most(
            0.0, above_history("standard"), above_history("pre-aligned"), "pre-aligned prompts"
        ),
    ]


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
            "smollm2": Grid(x_lens=(1, 3, 5, 8), phrase_lens=(1, 2, 4, 8), n=50),
        },
        _jobs,
        _summarize,
        models="one",
    ),
    _draw_grids,
    _check_grids,
    "Llama 3 8B at m = 8, all tokens: 33% (c = 1), 48% (c = 2), 60% (c = 4), 71% (c = 8); "
    "first token at c = 8: 14%; pre-aligned at m = 8: 90 to 99%.",
)


# Figure 9


def _draw_models(table: Table) -> dict[str, go.Figure]:
    panels = {style: _accuracy(table, style).frame for style in STYLES}
    return {"fig9": plots.curves(panels, x="phrase_len", by="model", label="phrase length c")}


def _check_models(table: Table) -> list[Claim]:
    names = [str(name) for name in table.frame["model"].unique()]
    c = sorted(int(length) for length in table.frame["phrase_len"].unique())

    def rise(model: str, style: str) -> Measured:
        return difference_of(*(_accuracy(table, style, model=model, phrase_len=length) for length in (c[-1], c[0])))

    def worst(model: str, style: str) -> Measured:
        return extreme_of(_accuracy(table, style, model=model), highest=False)

    checks = []
    for name in names:
        checks += [
            Claim(
                f"{name}: accuracy rises with phrase length (c = {c[-1]} minus c = {c[0]})", "in all models"
            ).at_least(0.2, *both(partial(rise, name), *STYLES), "pre-aligned prompts"),
            Claim(f"{name}: accuracy is high at every c on pre-aligned prompts (the worst c)", "also 1B").at_least(
                0.9, *both(partial(worst, name), *STYLES[::-1]), "standard prompts"
            ),
        ]
    for smaller, larger in pairwise(names):
        gap, control = (
            difference_of(*(_accuracy(table, style, model=model) for model in (larger, smaller))) for style in STYLES
        )
        checks.append(
            Claim(f"{larger} is more accurate than {smaller} (mean over c, difference)", "larger models are").at_least(
                0.05, gap, control, "pre-aligned prompts"
            )
        )
    return checks


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
            "smollm2": Grid(x_lens=(8,), phrase_lens=(1, 2, 4, 8), n=50),
        },
        _jobs,
        _summarize,
        models="several",
    ),
    _draw_models,
    _check_models,
    published="Llama 3.2 1B and 3B and Llama 3 8B: larger models are better, and all are good on pre-aligned prompts.",
)
