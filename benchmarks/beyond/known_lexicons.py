"""Is alignment missing where the lexicon is known from pretraining? Short lists of words, in three orders."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, stored
from align_circuits.papers.statistics import rows
from align_circuits.report import plots
from align_circuits.run.target_metrics import Metric, TargetMetrics
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.lexicon import LexiconTask, Order

ORDERS = get_args(Order)
STYLES = ("standard", "pre-aligned")
WORDS = {False: "other words", True: "the same words"}
"""What the examples hold, by `LexiconTask.shared`."""
SINGLE = "single words"
FALSE = "single words, false examples"


@dataclass(frozen=True)
class Lists:
    """Every lexicon in every order and style, with examples of other words and of the same."""

    lexicons: tuple[str, ...] = ("upper case", "digits", "antonyms", "plurals")
    x_len: int = 5
    n_examples: int = 8
    permutations: int = 4
    """Tasks of a cell, each with a permutation of its own where the order is permuted."""
    n: int = 4
    """Prompts of each of them."""


def list_accuracy(
    *, model: str, task: Mapping[str, Any], permutations: int, n: int, false: bool, seed: int, **_: str
) -> pd.DataFrame:
    """Measures what a model answers to lists; the function of a job.

    Args:
        model: What `load` takes.
        task: The arguments of `LexiconTask`, without `task_seed`.
        permutations: How many tasks, of the seeds 0, 1, ...; their prompts count alike.
        n: Prompts of each.
        false: Whether the examples translate each word as another one (`LexiconTask.corrupt`, `"labels"`).
        seed: Of the prompts.
        **_: The hash of the model's weights, as a name can get other weights.

    Returns:
        Shares of outputs: of the model `"accuracy"`, `"translated"` (any word of the test input is translated, right or
        not) and `"copied"` (a word of the test input); of `"history"`, the ceiling without alignment, and of the
        `"oracle"`, accuracy. With 95% intervals over prompts.
    """
    loaded, values = stored(model), []
    for task_seed in range(permutations):
        lists = LexiconTask(**task, task_seed=task_seed)
        prompts = lists.sample(n, loaded.tokenizer, seed + task_seed)
        prompts = lists.corrupt(prompts, "labels", seed=seed) if false else prompts
        ids = torch.tensor(prompts.task["symbols"])[prompts.latent["symbols"][:, : lists.x_len]]
        answers = prompts.answer_tokens[prompts.latent["symbols"][:, : lists.x_len]]
        metrics: list[Metric] = ["accuracy", _among("translated", answers), _among("copied", ids)]
        targets = TargetMetrics.of(prompts, metrics)
        measured, _engine = targets.measure(loaded)
        references = prompts.targets[["history", "oracle"]].to_numpy().T
        values.append(targets.by_prompt(np.concatenate([measured[:, 0], references]))[0])
    of = [("model", "accuracy"), ("model", "translated"), ("model", "copied"), ("history", "accuracy")]
    keys = pd.DataFrame([*of, ("oracle", "accuracy")], columns=["predictor", "metric"])
    pooled = np.concatenate(values, 1)
    return Table.from_prompts(keys, pooled, np.ones_like(pooled), Provenance("lists")).frame


def _among(name: str, tokens: Tensor) -> Any:
    """A metric: whether the prediction is one of some tokens, which differ from prompt to prompt."""

    def metric(logits: Float[Tensor, "target d_vocab"], targets: pd.DataFrame) -> Float[Tensor, " target"]:
        of_prompt = tokens[torch.tensor(targets["prompt"].to_numpy(copy=True))].to(logits.device)
        return (logits.argmax(1)[:, None] == of_prompt).any(1).to(logits.dtype)

    metric.__name__ = name
    return metric


def _jobs(config: Lists, inputs: Inputs) -> list[Measurement]:
    def measured(task: Mapping[str, Any], order: str, shared: bool = False) -> Measurement:
        style = task.get("style", STYLES[0])
        keys = {"lexicon": task["lexicon"], "order": order, "style": style, "examples": WORDS[shared]}
        given = {"task": {**task, "n_examples": config.n_examples}, "permutations": config.permutations, "n": config.n}
        return Measurement(list_accuracy, {**inputs.model, **given, "false": order == FALSE}, 0, keys)

    lists = [
        measured(
            {"lexicon": lexicon, "x_len": config.x_len, "alignment": order, "style": style, "shared": shared},
            order,
            shared,
        )
        for lexicon, shared, style, order in product(config.lexicons, WORDS, STYLES, ORDERS)
    ]
    single = product(config.lexicons, (SINGLE, FALSE))
    return [*lists, *(measured({"lexicon": lexicon, "x_len": 1}, order) for lexicon, order in single)]


def _summarize(_: Lists, rows: Rows) -> pd.DataFrame:
    return rows["list_accuracy"].drop(columns="seed")


_ACCURACY = rows(metric="accuracy", style=STYLES[0], examples=WORDS[False], predictor="model")


def _claims_of(examples: str) -> list[Claim]:
    """Thresholds were fixed after a look at six prompts of some cells (seed 900), and before this run."""
    accuracy = _ACCURACY.at(examples=examples)
    monotonic, reverse, permuted = (accuracy.at(order=order) for order in ORDERS)
    return [
        *(
            Claim(
                f"{order.capitalize()} lists, {examples} in the examples: no better than the ceiling without alignment "
                "(model minus history, mean over lexicons)"
            ).at_most(
                0.0,
                *(accuracy.at(order=order).rise("predictor", "history", of) for of in ("model", "oracle")),
                "the oracle",
            )
            for order in ORDERS
        ),
        Claim(f"Monotonic lists are translated better than reversed ones, {examples} (difference)").at_least(
            0.1, monotonic - reverse, permuted - reverse, "permuted minus reversed"
        ),
        Claim(f"Copies of the words bring accuracy back, {examples} (pre-aligned, reversed)").at_least(
            0.7, *accuracy.at(order="reversed").beside("style", *STYLES[::-1]), "standard prompts"
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    lists: Any = table.where(predictor="model", order=list(ORDERS)).frame
    figures = {}
    for metric, of_metric in lists.groupby("metric", sort=False):
        panels = {
            f"{style}, {examples}": cells.pivot(index="lexicon", columns="order", values="value")[list(ORDERS)]
            for (style, examples), cells in of_metric.groupby(["style", "examples"], sort=False)
        }
        figures[metric] = plots.accuracy_grids(panels, x="order of the output", y="lexicon", value=str(metric))
    return figures


LEXICON = Experiment(
    "icatune/lexicon",
    "Lists of words whose lexicon is known from pretraining, in three orders",
    "after Agarwal and Sarawagi (2025), Fig. 3; thresholds were set after a look at six prompts of some cells",
    Study(
        "icatune/lexicon",
        {
            "smoke": Lists(("small letters",), x_len=3, n_examples=2, permutations=2, n=3),
            "cpu": Lists(),
            "paper": Lists(n_examples=15, n=25),
        },
        _jobs,
        _summarize,
        models="one",
    ),
    _draw,
    [
        Claim("The lexicon is known: accuracy on single words, mean over lexicons").at_least(
            0.7, *_ACCURACY.beside("order", SINGLE, FALSE), "false translations in the examples"
        ),
        *(claim for examples in WORDS.values() for claim in _claims_of(examples)),
    ],
    about=About.BEYOND,
)
