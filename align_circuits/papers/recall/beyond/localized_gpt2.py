"""Beyond the paper: the heads that `localize` names in the trained GPT-2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Bool
from numpy import ndarray

from align_circuits.heads.localize_heads import localize
from align_circuits.hooks.heads import heads_of
from align_circuits.papers.claims import Check, Claim, share_of
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.common import (
    SOURCE,
    drawn_if_facts_are_learned,
    measured_after_facts,
    only_if_facts_are_learned,
    study,
)
from align_circuits.papers.study import Experiment, Inputs, Measurement
from align_circuits.report import plots
from align_circuits.tables.tables import Table

ROLES = ("subject", "grammar", "query_subject", "same_type")


@dataclass(frozen=True)
class Localized:
    """The models on which `localize` runs."""

    setup: gpt2.GPT2Setup
    kind: gpt2.Finetuned = "icl"
    n: int = 128
    """Prompts, half of which select heads and half of which test them."""


def _jobs(config: Localized, inputs: Inputs) -> list[Measurement]:
    return gpt2.each_seed(localize_gpt2, config.setup, inputs, {"n": config.n // 2}, kind=config.kind, n=config.n)


def localize_gpt2(
    *, setup: Mapping[str, Any], kind: gpt2.Finetuned, trained: str, n: int, seed: int
) -> list[dict[str, Any]]:
    """Runs `localize` on the model before training, pretrained and finetuned; the function of a job.

    Returns:
        Rows keyed by stage (`"untrained"`, `"pt"`, `"ft"`), sequences (`"pretraining"`; `"in context"`, about held-out
        subjects), role, layer, head and metric (`"named"`, 0 or 1; `"attention"`, the share on keys).
    """
    made = gpt2.GPT2Setup.from_config(setup)
    kinds: dict[str, gpt2.Kind] = {"untrained": "untrained", "pt": "pt", "ft": kind}
    in_context = made.demonstrations(seed, "icl", held_out=True)
    tasks: dict[str, Any] = {"pretraining": made.facts(seed), "in context": in_context}
    rows = []
    for stage, of_stage in kinds.items():
        model = gpt2.model_of(setup, of_stage, seed, trained)
        for sequences, task in tasks.items():
            localization = localize(model, task, n, seed=seed, draws=0)
            for role in (role for role in ROLES if role in localization.heads_by_role):
                attention = localization.table.where(role=role, metric="attention").grid("attention")
                for layer, head in heads_of(model.cfg):
                    keys = {"stage": stage, "sequences": sequences, "role": role, "layer": layer, "head": head}
                    named = float((layer, head) in localization.heads_by_role[role])
                    rows.append({**keys, "metric": "named", "value": named})
                    rows.append({**keys, "metric": "attention", "value": attention[layer, head]})
    return rows


def _named(table: Table, stage: str, sequences: str, role: str) -> Bool[ndarray, " seed"]:
    """Whether any head of each seed has the role."""
    rows: Any = table.where(stage=stage, sequences=sequences, role=role, metric="named").frame
    return rows.groupby("seed")["value"].max().to_numpy(float) > 0


def _check(table: Table) -> list[Check]:
    return [
        Claim(f"localize names a head for {role!r} on {sequences} sequences, {caption} (share of seeds)").at_least(
            1.0, share_of(_named(table, stage, key, role)), share_of(_named(table, before, key, role)), control_is
        )
        for role, stage, key, sequences, caption, before, control_is in (
            ("subject", "pt", "pretraining", "pretraining", "pretrained", "untrained", "before training"),
            ("grammar", "pt", "pretraining", "pretraining", "pretrained", "untrained", "before training"),
            ("same_type", "ft", "in context", "in-context", "finetuned", "pt", "before finetuning"),
        )
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for stage, sequences in (("pt", "pretraining"), ("ft", "in context")):
        rows: Any = table.where(stage=stage, sequences=sequences, metric="attention").frame
        rows = rows.assign(name="L" + rows["layer"].astype(str) + "H" + rows["head"].astype(str))
        means = rows.groupby(["name", "role"], sort=False)["value"].mean()
        panels[f"{stage}, {sequences}"] = means.unstack("role")
    return {"": plots.accuracy_grids(panels, x="attends to", y="head", value="share of attention")}


LOCALIZED = Experiment(
    "recall/localized",
    "Which heads of the trained GPT-2 does localize name?",
    f"Beyond {SOURCE}",
    study(
        "recall/localized",
        *(Localized(gpt2.SMOKE, n=16), Localized(gpt2.CPU_TWELVE), Localized(gpt2.PAPER)),
        jobs=_jobs,
        train=gpt2.pretrainings,
        summarize=measured_after_facts,
    ),
    drawn_if_facts_are_learned(_draw),
    only_if_facts_are_learned(_check),
    "The paper describes heads of attention-only models alone.",
)
