"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): what a pretrained model does in context."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.accuracy import measure
from align_circuits.papers.claims import Check, Experiment, Measured, difference_of, mean_of
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

STYLES = ("standard", "pre-aligned")
ALL = range(1, 9)


@dataclass(frozen=True)
class Grid:
    """Prompts of every input length and phrase length, monotonic."""

    x_lens: tuple[int, ...] = tuple(ALL)
    phrase_lens: tuple[int, ...] = tuple(ALL)
    n_examples: int = 15
    n: int = 100
    """Prompts a cell, each with its own automata."""

    @property
    def tasks(self) -> list[dict[str, int | str]]:
        """The arguments of each task."""
        return [
            {"style": style, "x_len": m, "phrase_len": c, "n_examples": self.n_examples}
            for style in STYLES
            for m in self.x_lens
            for c in self.phrase_lens
        ]


def _run(config: Grid, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    table = measure("accuracy", models, config.tasks, n=config.n, jobs=jobs, folder=folder)
    return table.where(offset=ALL_OFFSETS)


# Figure 3


def _accuracy(table: Table, style: str, kind: str) -> Table:
    """The rows of one panel: `kind` is "all" or "first"."""
    return table.where(style=style, kind=kind, predictor="model", metric="accuracy")


PANELS = {
    "a": ("standard", "all", "(a) standard, all tokens"),
    "b": ("standard", "first", "(b) standard, first token of a phrase"),
    "c": ("pre-aligned", "all", "(c) pre-aligned, all tokens"),
}


def _draw_grids(table: Table) -> dict[str, go.Figure]:
    grids = {}
    for style, kind, title in PANELS.values():
        rows = _accuracy(table, style, kind).frame
        grids[title] = rows.pivot(index="x_len", columns="phrase_len", values="value")
    return {"fig3": plots.accuracy_grids(grids, x="phrase length c", y="input length m")}


def _check_grids(table: Table) -> list[Check]:
    m, c = (int(table.frame[column].to_numpy().max()) for column in ("x_len", "phrase_len"))

    def both(statistic: Callable[[str], Measured]) -> dict[str, Any]:
        control = {"control": statistic("pre-aligned"), "control_is": "pre-aligned prompts"}
        return {"measured": statistic("standard"), **control}

    def at(style: str, kind: str = "all", **where: int) -> Table:
        return _accuracy(table, style, kind).where(**where)

    return [
        Check(
            claim=f"Accuracy drops with input length (m = 1 minus m = {m}, mean over c)",
            relation=">=",
            threshold=0.2,
            **both(lambda style: difference_of(at(style, x_len=1), at(style, x_len=m))),
        ),
        Check(
            claim=f"Accuracy rises with phrase length (c = {c} minus c = 1 at m = {m})",
            relation=">=",
            threshold=0.2,
            published=".71 - .33 = .38",
            **both(lambda style: difference_of(at(style, x_len=m, phrase_len=c), at(style, x_len=m, phrase_len=1))),
        ),
        Check(
            claim=f"The loss is at the first token of a phrase (all minus first at m = {m}, c = {c})",
            relation=">=",
            threshold=0.2,
            published=".71 - .14 = .57",
            **both(
                lambda style: difference_of(at(style, x_len=m, phrase_len=c), at(style, "first", x_len=m, phrase_len=c))
            ),
        ),
        Check(
            claim=f"Writing the aligned symbol before its phrase brings accuracy back (m = {m}, mean over c)",
            measured=mean_of(at("pre-aligned", x_len=m)),
            relation=">=",
            threshold=0.9,
            control=mean_of(at("standard", x_len=m)),
            control_is="standard prompts",
            published=".90 to .99",
        ),
    ]


SMOKE = Grid(x_lens=(1, 3), phrase_lens=(1, 2), n_examples=4, n=6)

FIG3 = Experiment(
    name="icatune/fig3",
    title="Accuracy in context by input length and phrase length",
    source="Agarwal and Sarawagi (2025), Fig. 3",
    scales={"smoke": SMOKE, "cpu": Grid(n=100), "paper": Grid(n=500)},
    run=_run,
    draw=_draw_grids,
    check=_check_grids,
    published=(
        "Llama 3 8B at m = 8, all tokens: 33% (c = 1), 48% (c = 2), 60% (c = 4), 71% (c = 8); "
        "first token at c = 8: 14%; pre-aligned at m = 8: 90 to 99%."
    ),
)


# Figure 9


def _draw_models(table: Table) -> dict[str, go.Figure]:
    panels = {style: _accuracy(table, style, "all").frame for style in STYLES}
    return {"fig9": plots.curves(panels, x="phrase_len", by="model", label="phrase length c")}


FIG9 = Experiment(
    name="icatune/fig9",
    title="Accuracy in context of several models, at the longest inputs",
    source="Agarwal and Sarawagi (2025), Fig. 9",
    scales={
        "smoke": Grid(x_lens=(3,), phrase_lens=(1, 2), n_examples=4, n=6),
        "cpu": Grid(x_lens=(8,), n=100),
        "paper": Grid(x_lens=(8,), n=500),
    },
    run=_run,
    draw=_draw_models,
    compares_models=True,
    published="Llama 3.2 1B and 3B and Llama 3 8B: larger models are better, and all are good on pre-aligned prompts.",
)


# Table 1


@dataclass(frozen=True)
class Example:
    """The prompts of Table 1: m = 3, c = 2, three examples."""

    seed: int = 0


def _prompts(config: Example, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    rows = []
    for style in STYLES:
        task = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=3, style=style)
        prompts = task.sample(1, char_tokenizer(), config.seed)
        text = prompts.text[0].removeprefix("<bos>")
        rows.append({"style": style, "prompt": text, "value": prompts.inputs.shape[1], "n": 1})
    return Table(pd.DataFrame(rows).assign(low=float("nan"), high=float("nan")), Provenance("table1"))


def _no_figures(_: Table) -> Mapping[str, go.Figure]:
    return {}


TABLE1 = Experiment(
    name="icatune/table1",
    title="A standard and a pre-aligned prompt (value: tokens)",
    source="Agarwal and Sarawagi (2025), Table 1",
    scales={"smoke": Example(), "cpu": Example(), "paper": Example()},
    run=_prompts,
    draw=_no_figures,
)
