"""Does `localize` name what is there, and nothing where nothing is? Circuits with known roles, and random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.localize_heads import localize
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Check, Claim, Measured, value_of
from align_circuits.papers.study import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.report import plots
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tables.tables import Table
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
    """Compares names with true roles in one planted circuit; the function of a job.

    Returns:
        For each role the number of heads that were built for it, that were named for it, and both; and the number of
        those that a score alone would name, and of the right ones among them.
    """
    seq2seq = Seq2SeqTask(**task)
    model = planted_circuit(seq2seq, seed=seed, strength=strength)
    localization = localize(model, seq2seq, n, seed=seed, draws=0)
    rows = []
    for role, heads in localization.heads_by_role.items():
        true = {head for head, kind in model.kinds.items() if ("lookup" if kind == "backup" else kind) == role}
        grid = localization.table.where(role=role, metric="score").grid("score")
        scored = {(int(layer), int(head)) for layer, head in np.argwhere(grid >= localization.thresholds.score)}
        sets = {"true": true, "named": heads, "both": true & set(heads), "scored": scored, "scored true": true & scored}
        rows.append({"role": role, **{name: len(members) for name, members in sets.items()}})
    return rows


def of_random(*, task: Mapping[str, Any], gain: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Localizes in one model of random weights; the function of a job.

    Returns:
        For each role the number of heads named for it, and for each head its p-value.
    """
    network: Any = untrained(_RANDOM, seed)
    for layer in network.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(gain**0.5)
    model = load(network, tokenizer=char_tokenizer())
    localization = localize(model, Seq2SeqTask(**task), n, seed=seed, draws=0)
    return [
        {"role": role, "named": len(heads), "p": float(p)}
        for role, heads in localization.heads_by_role.items()
        for p in localization.table.where(role=role, metric="p").frame["value"]
    ]


_RANDOM = Recipe(TrainConfig(steps=1), (), n_layers=4, n_heads=4, d_model=64, d_mlp=128, n_ctx=512)


def _jobs(config: GroundTruth, _: Inputs) -> list[Measurement]:
    common = {"task": dict(config.task), "n": config.n}
    strengths = [(strength, config.weaker) for strength in config.strengths] + [(1.0, config.planted)]
    planted = [
        Measurement(of_planted, {**common, "strength": strength}, seed, {"strength": strength})
        for strength, count in strengths
        for seed in range(count)
    ]
    gains = [(seed, config.gains[seed % len(config.gains)]) for seed in range(config.random)]
    return [*planted, *(Measurement(of_random, {**common, "gain": gain}, seed) for seed, gain in gains)]


def _summarize(_: GroundTruth, rows: Rows) -> pd.DataFrame:
    known: Any = rows["of_planted"]
    random: Any = rows["of_random"]
    full = known[known["strength"] == 1]
    shares: list[dict[str, Any]] = []

    def add(models: str, role: str, at: float, metric: str, part: Any, total: Any) -> None:
        """A share with its exact binomial interval."""
        low, high = binomial_interval(int(part), int(total))
        share = {"value": part / total if total else np.nan, "low": low, "high": high, "n": int(total)}
        shares.append({"models": models, "role": role, "at": at, "metric": metric, **share})

    for (strength, role), group in known.groupby(["strength", "role"]):
        sums = group[["true", "named", "both"]].sum()
        if role in TRUE:
            add("planted", role, strength, "recall", sums["both"], sums["true"])
        add("planted", role, strength, "precision", sums["both"], sums["named"])
    sums = full[["named", "both", "scored", "scored true"]].sum()
    add("planted", "any", 1.0, "precision", sums["both"], sums["named"])
    add("planted", "any", 1.0, "precision by score", sums["scored true"], sums["scored"])
    for models, frame in (("planted", full), ("random", random)):
        named = frame.groupby("seed")["named"].sum() > 0
        add(models, "any", 1.0, "named", named.sum(), len(named))
    for role, group in random.groupby("role"):
        for level in LEVELS:
            add("random", role, level, "p at most", (group["p"] <= level + 1e-12).sum(), len(group))
    return pd.DataFrame(shares)


def _check(table: Table) -> list[Check]:
    def value(metric: str, role: str = "any", at: float = 1.0, models: str = "planted") -> Measured:
        return value_of(table, models=models, metric=metric, role=role, at=at)

    def upper(measured: Measured) -> Measured:
        return Measured(measured.high, measured.low, measured.high)

    return [
        *(
            Claim(f"Planted circuits: every {role} head is named (recall)").at_least(
                1.0, value("recall", role), value("recall", role, 0.0), "circuits of strength 0"
            )
            for role in TRUE
        ),
        Claim("Planted circuits: nobody else is named, whatever the role (precision)").at_least(
            1.0, value("precision"), value("precision by score"), "heads named by score alone"
        ),
        Claim("Random weights: the upper 95% limit of the share of models in which any head is named").at_most(
            0.05, upper(value("named", models="random")), upper(value("named")), "planted circuits"
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    planted = table.where(models="planted", role=TRUE)
    panels = {metric: planted.where(metric=metric).frame for metric in ("recall", "precision")}
    p = {"random weights": table.where(models="random", metric="p at most").frame}
    uniform = plots.curves(p, x="at", by="role", label="p", value="share of heads with a p-value up to p")
    uniform.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="uniform", line={"dash": "dot", "color": "#808080"})
    return {
        "strength": plots.curves(panels, x="at", by="role", label="strength of the circuit", value="share of heads"),
        "p-values": uniform,
    }


GROUND_TRUTH = Experiment(
    "localize/ground-truth",
    "Does localize name what is there, and nobody where nobody is?",
    "the package's own promise",
    Study(
        "localize/ground-truth",
        {
            "smoke": GroundTruth(
                planted=1,
                weaker=1,
                strengths=(0.0,),
                random=2,
                n=16,
                task={"x_len": 5, "phrase_len": 2, "n_examples": 3},
            ),
            "cpu": GroundTruth(),
            "paper": GroundTruth(),
        },
        _jobs,
        _summarize,
    ),
    _draw,
    _check,
)
