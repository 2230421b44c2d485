"""Beyond the paper: over seeds, does the subject head suppress others' values or boost those of the subject?"""

from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Claim, share_of
from align_circuits.papers.recall.figures.attention_only_models import PAPER
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import (
    CPU,
    KEYS,
    SMOKE,
    Heads,
    head_of,
    heads_jobs,
    heads_table,
)
from align_circuits.papers.recall.figures.gpt2_models import SOURCE
from align_circuits.papers.study import Experiment, Study
from align_circuits.report import plots
from align_circuits.tables.tables import Table

Strategy = Literal["suppress", "boost"]

CAPTIONS: dict[Strategy, str] = {"suppress": "taken from others' values", "boost": "added to its own values"}


def strength(table: Table, stage: str, strategy: Strategy) -> Float[ndarray, " seed"]:
    """Returns the logits that attention to a subject adds to its values (boost), or takes from others (suppress).

    They are relative to those that it adds to tokens that are no values. The head is the one that attends to the
    subject after pretraining.
    """
    weights: Any = table.where(stage=stage, metric="weight").frame
    head = head_of(table, "subject", "relative")
    rows = weights[weights["head"].to_numpy() == head[weights["seed"].to_numpy()]]
    grid = rows.pivot(index="seed", columns="what", values="value")
    values = grid["subject to own" if strategy == "boost" else "subject to other values"].to_numpy(float)
    return (1 if strategy == "boost" else -1) * (values - grid["subject to other tokens"].to_numpy(float))


def _check(table: Table) -> list[Check]:
    def accuracy(stage: str) -> Float[ndarray, " seed"]:
        frame = table.where(stage=stage, sequences="pretraining", metric="exact").frame
        return frame.sort_values("seed")["value"].to_numpy(float)

    checks = [
        Claim("The models have learned their facts (exact match on pretraining sequences)").at_least(
            0.8, accuracy("pretrained"), accuracy("untrained"), "before training"
        )
    ]
    for stage in ("pretrained", "finetuned"):
        suppresses = strength(table, stage, "suppress") > strength(table, stage, "boost")
        checks.append(
            Claim(
                f"The subject head suppresses others' values more than it boosts its own, {stage} (share of seeds)",
                "some seeds boost",
            ).at_least(0.9, share_of(suppresses), share_of(~suppresses), "seeds in which it boosts more")
        )
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for stage in ("pretrained", "finetuned"):
        curves = [
            pd.DataFrame({"curve": caption, "value": strength(table, stage, strategy)})
            .rename_axis("seed")
            .reset_index()
            for strategy, caption in CAPTIONS.items()
        ]
        panels[stage] = pd.concat(curves).assign(low=np.nan, high=np.nan)
    value = "mean logit from attending to a subject"
    return {"": plots.curves(panels, x="seed", by="curve", label="seed", value=value)}


STRATEGIES = Experiment(
    "recall/strategies",
    "Does the subject head suppress or boost?",
    f"Beyond {SOURCE}",
    Study(
        "recall/strategies",
        {
            "smoke": Heads(SMOKE, 2, ("relative",)),
            "cpu": Heads(CPU, 10, ("relative",)),
            "paper": Heads(PAPER, 10, ("relative",)),
        },
        heads_jobs,
        lambda _, rows: heads_table(rows, KEYS[:7], ("weight", "attention", "exact")),
    ),
    _draw,
    _check,
    "'Changing the initialization seed can lead to' a head that boosts (App. A); how often is not told.",
)
