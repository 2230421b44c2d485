"""Contextual recall, beyond the paper: over seeds, does the subject head suppress other values or boost its own?"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.jobs import Job, run_jobs
from align_circuits.papers.claims import Check, Experiment, over_seeds, share_of
from align_circuits.papers.recall import figs_9_to_12_20_to_26_heads as heads
from align_circuits.papers.recall.figs_9_to_12_20_to_26_heads import KEYS, SOURCE, Training, Trainings, named
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table

KEPT = ("weight", "attention", "exact")
"""The metrics of `heads.heads_cell` that are needed."""

Strategy = Literal["suppress", "boost"]

_SAID: dict[Strategy, str] = {"suppress": "taken from others' values", "boost": "added to its own values"}


def run(config: Trainings, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Trains models with relative positions as `recall/heads` does, over more seeds; its table, without maps."""
    size = {"positions": "relative", **asdict(config.size)}
    cells = [Job(f"{heads.__name__}:heads_cell", size, seed) for seed in range(config.seeds)]
    frame: Any = run_jobs(cells, folder, jobs=jobs).whole()
    frame = frame[frame["metric"].isin(KEPT)].reindex(columns=[*KEYS[:7], "value", "n"])
    frame = frame.assign(value=frame["value"].astype(float).round(4), head=frame["head"].fillna(-1).astype(int))
    return Table(frame.assign(low=np.nan, high=np.nan), Provenance("strategies", asdict(config)))


def strength(table: Table, stage: str, strategy: Strategy) -> Float[ndarray, " seed"]:
    """Returns what attending to a subject adds to its own values (boost), or takes from others (suppress).

    Zero is what attending there adds to tokens that are no values. The head is the one that attends to the subject
    after pretraining.
    """
    weights: Any = table.where(stage=stage, metric="weight").frame
    head = named(table, "subject", "relative")
    rows = weights[weights["head"].to_numpy() == head[weights["seed"].to_numpy()]]
    grid = rows.pivot(index="seed", columns="what", values="value")
    values = grid["subject to own" if strategy == "boost" else "subject to other values"].to_numpy(float)
    return (1 if strategy == "boost" else -1) * (values - grid["subject to other tokens"].to_numpy(float))


def _check(table: Table) -> list[Check]:
    suppresses = {
        stage: strength(table, stage, "suppress") > strength(table, stage, "boost")
        for stage in ("untrained", "pretrained", "finetuned")
    }
    learned = table.where(stage="pretrained", sequences="pretraining", metric="exact").frame
    before = table.where(stage="untrained", sequences="pretraining", metric="exact").frame
    right, at_first = (frame.sort_values("seed")["value"].to_numpy(float) for frame in (learned, before))
    return [
        Check(
            "The models have learned their facts (exact match on pretraining sequences)",
            relation=">=",
            threshold=0.8,
            measured=over_seeds(right),
            control=over_seeds(at_first),
            control_is="before training",
        ),
        *(
            Check(
                f"The subject head suppresses others' values more than it boosts its own, {stage} (share of seeds)",
                relation=">=",
                threshold=0.9,
                measured=share_of(suppresses[stage]),
                control=share_of(~suppresses[stage]),
                control_is="seeds in which it boosts more",
                published="some seeds boost",
            )
            for stage in ("pretrained", "finetuned")
        ),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for stage in ("pretrained", "finetuned"):
        rows = []
        for strategy, said in _SAID.items():
            values = strength(table, stage, strategy)
            rows.append(pd.DataFrame({"seed": np.arange(len(values)), "curve": said, "value": values}))
        panels[stage] = pd.concat(rows).assign(low=np.nan, high=np.nan)
    return {
        "": plots.curves(panels, x="seed", by="curve", label="seed", value="mean logit from attending to a subject")
    }


STRATEGIES = Experiment(
    name="recall/strategies",
    title="Does the subject head suppress or boost?",
    source=f"Beyond {SOURCE}",
    scales={"smoke": Trainings(heads.SMOKE, 2), "cpu": Trainings(heads.CPU, 10), "paper": Trainings(Training(), 10)},
    run=run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="'Changing the initialization seed can lead to' a head that boosts (App. A); how often is not told.",
)
