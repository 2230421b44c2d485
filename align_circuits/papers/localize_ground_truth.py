"""Does `localize` name what is there, and nobody where nobody is? Circuits with known roles, and random weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.localize_heads import Localization, localize
from align_circuits.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Check, Experiment, Measured, value_of
from align_circuits.report import plots
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.loop import TrainConfig
from align_circuits.training.toy_llama import Recipe, untrained

TRUE = ("align_query", "align_key", "lookup", "previous")
"""The roles that planted circuits have."""

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Where the distribution of p-values is read."""


@dataclass(frozen=True)
class GroundTruth:
    """How many models of which kind."""

    planted: int = 50
    """Circuits at full strength, each with heads and decoys in other places."""
    weaker: int = 10
    """Circuits at each lower strength."""
    strengths: tuple[float, ...] = (0.0, 0.2, 0.3, 0.4, 0.5, 0.7)
    random: int = 400
    """Models of random weights."""
    gains: tuple[float, ...] = (1.0, 4.0)
    """By what their query and key weights are multiplied, in turn: diffuse attention, and sharp."""
    n: int = 32
    """Prompts for each model, half to find candidates."""
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 5, "phrase_len": 2, "n_examples": 6})


def of_planted(*, task: Mapping[str, Any], strength: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Compares names with true roles in one planted circuit; the function of a cell.

    Returns:
        For each role the number of heads that were built for it, that were named for it, and both; and the number of
        those that a score alone would name, and of the right ones among them.
    """
    seq2seq = Seq2SeqTask(**task)
    model = planted_circuit(seq2seq, seed=seed, strength=strength)
    found = localize(model, seq2seq, n, seed=seed, draws=0)
    rows = []
    for role, heads in found.heads_by_role.items():
        true = {head for head, kind in model.kinds.items() if _ROLE_OF.get(kind) == role}
        grid = found.table.where(role=role, metric="score").grid("score")
        scored = {(int(layer), int(head)) for layer, head in np.argwhere(grid >= found.thresholds.score)}
        rows.append(
            {
                "role": role,
                "true": len(true),
                "named": len(heads),
                "both": len(true & set(heads)),
                "scored": len(scored),
                "scored true": len(true & scored),
            }
        )
    return rows


_ROLE_OF = {
    "align_query": "align_query",
    "align_key": "align_key",
    "lookup": "lookup",
    "backup": "lookup",
    "previous": "previous",
}


def of_random(*, task: Mapping[str, Any], gain: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Localizes in one model of random weights; the function of a cell.

    Returns:
        For each role the number of heads named for it, and for each head its p-value.
    """
    network: Any = untrained(_RANDOM, seed)
    for layer in network.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(gain**0.5)
    found: Localization = localize(
        load(network, tokenizer=char_tokenizer()), Seq2SeqTask(**task), n, seed=seed, draws=0
    )
    return [
        {"role": role, "named": len(heads), "p": float(p)}
        for role, heads in found.heads_by_role.items()
        for p in found.table.where(role=role, metric="p").frame["value"]
    ]


_RANDOM = Recipe(TrainConfig(steps=1), (), n_layers=4, n_heads=4, d_model=64, d_mlp=128, n_ctx=512)


def _run(config: GroundTruth, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - its own
    common = {"task": dict(config.task), "n": config.n}
    strengths = [(strength, config.weaker) for strength in config.strengths] + [(1.0, config.planted)]
    circuits = [
        Job(f"{__name__}:of_planted", {**common, "strength": strength}, seed)
        for strength, count in strengths
        for seed in range(count)
    ]
    networks = [
        Job(f"{__name__}:of_random", {**common, "gain": config.gains[seed % len(config.gains)]}, seed)
        for seed in range(config.random)
    ]
    rows: list[dict[str, Any]] = []
    known: Any = run_jobs(circuits, folder / "cells", jobs=jobs).whole()
    unknown: Any = run_jobs(networks, folder / "cells", jobs=jobs).whole()
    for (strength, role), some in known.groupby(["strength", "role"]):
        sums = some[["true", "named", "both"]].sum()
        about = {"models": "planted", "role": role, "at": strength}
        if role in TRUE:
            rows.append({**about, "metric": "recall", **_share(sums["both"], sums["true"])})
        rows.append({**about, "metric": "precision", **_share(sums["both"], sums["named"])})
    full = known[known["strength"] == 1][["named", "both", "scored", "scored true"]].sum()
    about = {"models": "planted", "role": "any", "at": 1.0}
    rows.append({**about, "metric": "precision", **_share(full["both"], full["named"])})
    rows.append({**about, "metric": "precision by score", **_share(full["scored true"], full["scored"])})
    for models_are, some in (("planted", known[known["strength"] == 1]), ("random", unknown)):
        anybody = some.groupby("seed")["named"].sum() > 0
        about = {"models": models_are, "role": "any", "at": 1.0, "metric": "named"}
        rows.append({**about, **_share(anybody.sum(), len(anybody))})
    for role, some in unknown.groupby("role"):
        for level in LEVELS:
            rows.append(
                {
                    "models": "random",
                    "role": role,
                    "at": level,
                    "metric": "p at most",
                    **_share((some["p"] <= level + 1e-12).sum(), len(some)),
                }
            )
    settings = {"planted": config.planted, "random": config.random, "n": config.n, "task": dict(config.task)}
    return Table(pd.DataFrame(rows), Provenance("measure", settings))


def _share(part: Any, whole: Any) -> dict[str, float]:
    """A share with its exact binomial interval."""
    low, high = binomial_interval(int(part), int(whole))
    return {"value": part / whole if whole else np.nan, "low": low, "high": high, "n": int(whole)}


def _check(table: Table) -> list[Check]:
    recall = {"models": "planted", "metric": "recall"}
    checks = [
        Check(
            claim=f"Planted circuits: every {role} head is named (recall)",
            measured=value_of(table, role=role, at=1.0, **recall),
            relation=">=",
            threshold=1.0,
            control=value_of(table, role=role, at=0.0, **recall),
            control_is="circuits of strength 0",
        )
        for role in TRUE
    ]
    random = value_of(table, models="random", metric="named", role="any")
    named = {"models": "planted", "role": "any", "at": 1.0}
    checks.append(
        Check(
            claim="Planted circuits: nobody else is named, whatever the role (precision)",
            measured=value_of(table, metric="precision", **named),
            relation=">=",
            threshold=1.0,
            control=value_of(table, metric="precision by score", **named),
            control_is="heads named by score alone",
        )
    )
    whole = value_of(table, models="planted", metric="named", role="any")
    checks.append(
        Check(
            claim="Random weights: the upper 95% limit of the share of models in which any head is named",
            measured=Measured(random.high, random.low, random.high),
            relation="<=",
            threshold=0.05,
            control=Measured(whole.high, whole.low, whole.high),
            control_is="planted circuits",
        )
    )
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    planted_rows: Any = table.where(models="planted", metric=["recall", "precision"]).frame
    panels = {
        metric: planted_rows[(planted_rows["metric"] == metric) & planted_rows["role"].isin(TRUE)]
        for metric in ("recall", "precision")
    }
    p = {"random weights": table.where(models="random", metric="p at most").frame}
    uniform = plots.curves(p, x="at", by="role", label="p", value="share of heads with a p-value up to p")
    uniform.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="uniform", line={"dash": "dot", "color": "#808080"})
    return {
        "strength": plots.curves(panels, x="at", by="role", label="strength of the circuit", value="share of heads"),
        "p-values": uniform,
    }


GROUND_TRUTH = Experiment(
    name="localize/ground-truth",
    title="Does localize name what is there, and nobody where nobody is?",
    source="the package's own promise",
    scales={
        "smoke": GroundTruth(
            planted=1, weaker=1, strengths=(0.0,), random=2, n=16, task={"x_len": 5, "phrase_len": 2, "n_examples": 3}
        ),
        "cpu": GroundTruth(),
        "paper": GroundTruth(),
    },
    run=_run,
    draw=_draw,
    check=_check,
    makes_models=True,
)
