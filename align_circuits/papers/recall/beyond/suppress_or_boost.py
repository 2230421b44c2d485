"""Beyond the paper: over seeds, does the subject head suppress others' values or boost those of the subject?"""

from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Claim, share_of
from align_circuits.papers.recall.figures.attention_only_models import PAPER, AttentionOnlyModels
from align_circuits.papers.recall.figures.common import SOURCE, per_seed, study
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import (
    CPU,
    KEYS,
    SMOKE,
    head_of,
    heads_jobs,
    heads_table,
)
from align_circuits.papers.study import Experiment
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
    head = head_of(table, "subject")
    rows = weights[weights["head"].to_numpy() == head[weights["seed"].to_numpy()]]
    grid = rows.pivot(index="seed", columns="what", values="value")
    values = grid["subject to own" if strategy == "boost" else "subject to other values"].to_numpy(float)
    return (1 if strategy == "boost" else -1) * (values - grid["subject to other tokens"].to_numpy(float))


def _check(table: Table) -> list[Check]:
    untrained, trained = (
        per_seed(table, stage=stage, sequences="pretraining", metric="exact") for stage in ("untrained", "pretrained")
    )
    claim = "The models have learned their facts (exact match on pretraining sequences)"
    checks = [Claim(claim).at_least(0.8, trained, untrained, "before training")]
    for stage in ("pretrained", "finetuned"):
        suppresses = strength(table, stage, "suppress") > strength(table, stage, "boost")
        claim = f"The subject head suppresses others' values more than it boosts its own, {stage} (share of seeds)"
        checks.append(
            Claim(claim, "some seeds boost").at_least(
                0.9, share_of(suppresses), share_of(~suppresses), "seeds in which it boosts more"
            )
        )
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for stage in ("pretrained", "finetuned"):
        curves = pd.DataFrame({caption: strength(table, stage, strategy) for strategy, caption in CAPTIONS.items()})
        long = curves.rename_axis("seed").reset_index().melt("seed", var_name="curve")
        panels[stage] = long.assign(low=np.nan, high=np.nan)
    value = "mean logit from attending to a subject"
    return {"": plots.curves(panels, x="seed", by="curve", label="seed", value=value)}


_RELATIVE = ({"positions": "relative"},)

STRATEGIES = Experiment(
    "recall/strategies",
    "Does the subject head suppress or boost?",
    f"Beyond {SOURCE}",
    study(
        "recall/strategies",
        *(AttentionOnlyModels(setup, seeds, _RELATIVE) for setup, seeds in ((SMOKE, 2), (CPU, 10), (PAPER, 10))),
        jobs=heads_jobs,
        summarize=lambda _, rows: heads_table(rows, KEYS[:7], ("weight", "attention", "exact")),
    ),
    _draw,
    _check,
    "'Changing the initialization seed can lead to' a head that boosts (App. A); how often is not told.",
)
