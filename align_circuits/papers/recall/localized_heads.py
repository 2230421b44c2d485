"""Contextual recall, beyond the paper: does `localize` name heads of the trained GPT-2 too?"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.localize_heads import localize
from align_circuits.hooks.heads import heads_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Experiment, share_of
from align_circuits.papers.recall.small_gpt2 import small_gpt2
from align_circuits.papers.recall.trainings import CPU, PAPER, SMOKE, SOURCE, Finetuned, Size, finetuned, pretrained
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table

ROLES = ("subject", "grammar", "query_subject", "same_type")


@dataclass(frozen=True)
class Localized:
    """Which models are looked at."""

    size: Size
    kind: Finetuned = "icl"
    n: int = 128
    """Prompts, half to find heads and half to test them."""


def run(config: Localized, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Runs `localize` on the model before training, pretrained and finetuned.

    Returns:
        A table keyed by stage (`"untrained"`, `"pt"`, `"ft"`), sequences (`"pretraining"`; `"in context"`, about
        held-out subjects), seed, role, layer, head and metric (`"named"`, 0 or 1; `"attention"`, the share on keys).
    """
    size, rows = config.size, []
    for seed in range(size.seeds):
        nets = {
            "untrained": small_gpt2(size.world.d_vocab, size.n_ctx, d_model=size.d_model, seed=seed),
            "pt": pretrained(size, seed, folder).model,
            "ft": finetuned(size, seed, config.kind, folder).model,
        }
        tasks: dict[str, Any] = {
            "pretraining": size.facts(seed),
            "in context": size.demonstrations(seed, "icl", held_out=True),
        }
        for stage, net in nets.items():
            model = load(copy.deepcopy(net))
            for sequences, task in tasks.items():
                found = localize(model, task, config.n, seed=seed, draws=0)
                for role in (role for role in ROLES if role in found.heads_by_role):
                    attention = found.table.where(role=role, metric="attention").grid("attention")
                    for layer, head in heads_of(model.cfg):
                        where = {"stage": stage, "sequences": sequences, "seed": seed, "role": role, "layer": layer}
                        values = {
                            "named": float((layer, head) in found.heads_by_role[role]),
                            "attention": attention[layer, head],
                        }
                        rows += [{**where, "head": head, "metric": name, "value": v} for name, v in values.items()]
    frame = pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=config.n // 2)
    return Table(frame, Provenance("recall_localized", asdict(config)))


def _named(table: Table, stage: str, sequences: str, role: str) -> Float[ndarray, " seed"]:
    """Whether any head of each seed has the role."""
    rows: Any = table.where(stage=stage, sequences=sequences, role=role, metric="named").frame
    return rows.groupby("seed")["value"].max().to_numpy(float)


def _check(table: Table) -> list[Check]:
    return [
        Check(
            f"localize names a head for {role!r} on {said} (share of seeds)",
            relation=">=",
            threshold=1.0,
            measured=share_of(_named(table, stage, sequences, role) > 0),
            control=share_of(_named(table, before, sequences, role) > 0),
            control_is=control_is,
        )
        for role, stage, sequences, said, before, control_is in (
            ("subject", "pt", "pretraining", "pretraining sequences, pretrained", "untrained", "before training"),
            ("grammar", "pt", "pretraining", "pretraining sequences, pretrained", "untrained", "before training"),
            ("same_type", "ft", "in context", "in-context sequences, finetuned", "pt", "before finetuning"),
        )
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for stage, sequences in (("pt", "pretraining"), ("ft", "in context")):
        rows: Any = table.where(stage=stage, sequences=sequences, metric="attention").frame
        name = "L" + rows["layer"].astype(str) + "H" + rows["head"].astype(str)
        panels[f"{stage}, {sequences}"] = (
            rows.assign(name=name).groupby(["name", "role"], sort=False)["value"].mean().unstack("role")
        )
    return {"": plots.accuracy_grids(panels, x="attends to", y="head", value="share of attention")}


LOCALIZED = Experiment(
    name="recall/localized",
    title="Which heads of the trained GPT-2 does localize name?",
    source=f"Beyond {SOURCE}",
    scales={"smoke": Localized(SMOKE, n=16), "cpu": Localized(CPU), "paper": Localized(PAPER)},
    run=run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="The paper describes heads of attention-only models alone.",
)
