"""What the bundled model must be able to do, and must not: a gap for in-context tuning to close."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.score import score_heads
from align_circuits.models.planted.model import planted_circuit
from align_circuits.papers.accuracy import measure
from align_circuits.papers.claims import Check, Experiment, difference_of, extreme_of, mean_of
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS
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
    def tasks(self) -> list[dict[str, int | str | bool]]:
        """Pre-aligned over the grid, single symbols, and the gap with and without the grammar."""
        common = {"n_examples": self.n_examples}
        pre = [{"style": "pre-aligned", "x_len": m, "phrase_len": c} for m in self.x_lens for c in self.phrase_lens]
        single = [{"style": "standard", "x_len": 1, "phrase_len": c} for c in self.phrase_lens]
        return [task | {"ood": False} | common for task in pre + single] + self.gap

    @property
    def gap(self) -> list[dict[str, int | str | bool]]:
        """The prompts that need alignment."""
        m, c = self.x_lens[-2], self.phrase_lens[1]
        return [
            {"style": "standard", "x_len": m, "phrase_len": c, "ood": ood, "n_examples": self.n_examples}
            for ood in (False, True)
        ]


def _run(config: Criteria, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    right = measure("accuracy", models, config.tasks, n=config.n, jobs=jobs, folder=folder)
    scored = measure("scores", models, config.gap, n=config.n, jobs=jobs, folder=folder).heads()
    frames = [right.frame, scored.where(metric="align_query").frame, *(_aligner(task) for task in config.gap)]
    return Table(pd.concat(frames, ignore_index=True), right.provenance)


def _aligner(arguments: Mapping[str, Any]) -> pd.DataFrame:
    """The same scores of a circuit that does align: the control of "no head aligns"."""
    task = Seq2SeqTask(**arguments)
    model = planted_circuit(task)
    scored = score_heads(model, task.sample(64, model.tokenizer), ["align_query"]).heads()
    return scored.frame.assign(model=PLANTED, **arguments)


def _right(table: Table, **where: Any) -> Table:
    return table.where(metric="accuracy", offset=ALL_OFFSETS, **where)


def _check(table: Table) -> list[Check]:
    first = {"kind": "first", "predictor": "model"}
    pre = _right(table, style="pre-aligned", **first)
    single = _right(table, style="standard", x_len=1, **first)
    scored = table.where(metric="align_query")
    (model,) = set(scored.frame["model"]) - {PLANTED}
    heads, aligner = scored.where(model=model), scored.where(model=PLANTED)
    of_gap = scored.frame.iloc[0]
    standard = {"style": "standard", "x_len": int(of_gap["x_len"]), "phrase_len": int(of_gap["phrase_len"])}
    gap = mean_of(_right(table, ood=False, **standard, **first))
    checks = [
        Check(
            claim="Pre-aligned prompts: first-token accuracy, mean over all m and c",
            measured=mean_of(pre),
            relation=">=",
            threshold=0.95,
            control=gap,
            control_is="standard prompts",
        ),
        Check(
            claim="Pre-aligned prompts: first-token accuracy, the worst m and c",
            measured=extreme_of(pre, highest=False),
            relation=">=",
            threshold=0.9,
            control=gap,
            control_is="standard prompts",
        ),
        Check(
            claim="Standard prompts of one symbol: first-token accuracy, the worst c",
            measured=extreme_of(single, highest=False),
            relation=">=",
            threshold=0.9,
            control=gap,
            control_is="standard prompts of several symbols",
        ),
    ]
    for ood, where in ((False, "within the grammar"), (True, "OOD")):

        def right(predictor: str, kind: str, ood: bool = ood) -> Table:
            return _right(table, ood=ood, predictor=predictor, kind=kind, **standard)

        checks += [
            Check(
                claim=f"Standard prompts, {where}: the first token is no better than the history ceiling (difference)",
                measured=difference_of(right("model", "first"), right("history", "first")),
                relation="<=",
                threshold=0.0,
                control=difference_of(right("oracle", "first"), right("history", "first")),
                control_is="the oracle",
            ),
            Check(
                claim=f"Standard prompts, {where}: later tokens are near the oracle (oracle minus model)",
                measured=difference_of(right("oracle", "later"), right("model", "later")),
                relation="<=",
                threshold=0.1,
                control=difference_of(right("oracle", "first"), right("model", "first")),
                control_is="first tokens",
            ),
            Check(
                claim=f"Standard prompts, {where}: no head aligns (highest align_query)",
                measured=extreme_of(heads.where(ood=ood), highest=True),
                relation="<=",
                threshold=0.5,
                control=extreme_of(aligner.where(ood=ood), highest=True),
                control_is="a planted circuit",
            ),
        ]
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    rows = _right(table, style="pre-aligned", kind="first", predictor="model").frame
    grid = rows.pivot(index="x_len", columns="phrase_len", values="value")
    panels = {"pre-aligned, first token of a phrase": grid}
    return {"criteria": plots.accuracy_grids(panels, x="phrase length c", y="input length m")}


CRITERIA = Experiment(
    name="toy-llama/criteria",
    title="What the bundled model can do in context, and the gap that it leaves",
    source="the package's own promise; after Agarwal and Sarawagi (2025), Fig. 3",
    scales={
        "smoke": Criteria(n=6, n_examples=4, x_lens=(2, 3), phrase_lens=(1, 2)),
        "cpu": Criteria(),
        "paper": Criteria(),
    },
    run=_run,
    draw=_draw,
    check=_check,
)
