"""What the bundled model must be able to do, and must not: a gap for in-context tuning to close."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.score import score_heads
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.figs_3_9_accuracy import accuracy, on_tasks
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Study, stored
from align_circuits.papers.statistics import Measured, difference_of, extreme_of, mean_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

PLANTED = "planted"
"""The name of the control in the table."""


@dataclass(frozen=True)
class Criteria:
    """How many prompts, and of how many examples."""

    n: int = 500
    n_examples: int = 15
    x_lens: tuple[int, ...] = (2, 3, 4, 5, 6)
    phrase_lens: tuple[int, ...] = (1, 2, 3)

    @property
    def gap(self) -> list[dict[str, int | str | bool]]:
        """The prompts that need alignment."""
        m, c = self.x_lens[-2], self.phrase_lens[1]
        return [
            {"style": "standard", "x_len": m, "phrase_len": c, "ood": ood, "n_examples": self.n_examples}
            for ood in (False, True)
        ]


def head_scores(*, model: str, task: Mapping[str, Any], n: int, seed: int, **_: str) -> pd.DataFrame:
    """Scores a model's heads on fresh prompts; the function of a job. Arguments as for `accuracy`."""
    loaded = stored(model)
    return score_heads(loaded, Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed), ["align_query"]).heads().frame


def planted_scores(*, task: Mapping[str, Any]) -> pd.DataFrame:
    """Scores a circuit that does align, the control of "no head aligns"; the function of a job."""
    seq2seq = Seq2SeqTask(**task)
    model = planted_circuit(seq2seq)
    return score_heads(model, seq2seq.sample(64, model.tokenizer), ["align_query"]).heads().frame


def _jobs(config: Criteria, inputs: Inputs) -> list[Measurement]:
    """Pre-aligned prompts over the grid, single symbols, and the gap with and without the grammar."""
    common = {"ood": False, "n_examples": config.n_examples}
    pre = [{"style": "pre-aligned", "x_len": m, "phrase_len": c} for m in config.x_lens for c in config.phrase_lens]
    single = [{"style": "standard", "x_len": 1, "phrase_len": c} for c in config.phrase_lens]
    tasks = [task | common for task in pre + single]
    return [
        *on_tasks(accuracy, inputs, tasks + config.gap, n=config.n),
        *on_tasks(head_scores, inputs, config.gap, n=config.n),
        *(Measurement(planted_scores, {"task": task}, None, {"model": PLANTED, **task}) for task in config.gap),
    ]


def _right(table: Table, **where: Any) -> Table:
    return table.where(metric="accuracy", offset=None, **where)


def _check(table: Table) -> list[Claim]:
    first = {"kind": "first", "predictor": "model"}
    pre = _right(table, style="pre-aligned", **first)
    single = _right(table, style="standard", x_len=1, **first)
    scored = table.where(metric="align_query")
    (model,) = set(scored.frame["model"]) - {PLANTED}
    of_gap = scored.frame.iloc[0]
    standard = {"style": "standard", "x_len": int(of_gap["x_len"]), "phrase_len": int(of_gap["phrase_len"])}
    gap = mean_of(_right(table, ood=False, **standard, **first))

    def minus(ood: bool, minuend: str, subtrahend: str, kind: str = "first") -> Measured:
        rows = (_right(table, ood=ood, predictor=name, kind=kind, **standard) for name in (minuend, subtrahend))
        return difference_of(*rows)

    def aligns(ood: bool, model: str) -> Measured:
        return extreme_of(scored.where(ood=ood, model=model), highest=True)

    checks = [
        Claim("Pre-aligned prompts: first-token accuracy, mean over all m and c").at_least(
            0.95, mean_of(pre), gap, "standard prompts"
        ),
        Claim("Pre-aligned prompts: first-token accuracy, the worst m and c").at_least(
            0.9, extreme_of(pre, highest=False), gap, "standard prompts"
        ),
        Claim("Standard prompts of one symbol: first-token accuracy, the worst c").at_least(
            0.9, extreme_of(single, highest=False), gap, "standard prompts of several symbols"
        ),
    ]
    for ood, where in ((False, "within the grammar"), (True, "OOD")):
        checks += [
            Claim(
                f"Standard prompts, {where}: the first token is no better than the history ceiling (difference)"
            ).at_most(0.0, minus(ood, "model", "history"), minus(ood, "oracle", "history"), "the oracle"),
            Claim(f"Standard prompts, {where}: later tokens are near the oracle (oracle minus model)").at_most(
                0.1, minus(ood, "oracle", "model", "later"), minus(ood, "oracle", "model"), "first tokens"
            ),
            Claim(f"Standard prompts, {where}: no head aligns (highest align_query)").at_most(
                0.5, aligns(ood, model), aligns(ood, PLANTED), "a planted circuit"
            ),
        ]
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    rows = _right(table, style="pre-aligned", kind="first", predictor="model").frame
    grid = rows.pivot(index="x_len", columns="phrase_len", values="value")
    panels = {"pre-aligned, first token of a phrase": grid}
    return {"criteria": plots.accuracy_grids(panels, x="phrase length c", y="input length m")}


CRITERIA = Experiment(
    "toy-llama/criteria",
    "What the bundled model can do in context, and the gap that it leaves",
    "the package's own promise; after Agarwal and Sarawagi (2025), Fig. 3",
    Study(
        "toy-llama/criteria",
        {
            "smoke": Criteria(n=6, n_examples=4, x_lens=(2, 3), phrase_lens=(1, 2)),
            "cpu": Criteria(),
            "paper": Criteria(),
        },
        _jobs,
        lambda _, rows: pd.concat(rows.values(), ignore_index=True).drop(columns="seed"),
        models="one",
    ),
    _draw,
    _check,
)
