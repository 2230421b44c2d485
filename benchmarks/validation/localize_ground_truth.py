"""Does `localize` name what is there, and nothing where nothing is? Circuits with known roles, and random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.heads.candidates import ALIGNERS
from align_circuits.heads.localize_heads import localize
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models.loading import load
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.statistics import Measured, value_of
from align_circuits.report import plots
from align_circuits.tables.intervals import binomial_interval, t_interval
from align_circuits.tables.tables import Table
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import Task
from align_circuits.training.loop import TrainConfig
from align_circuits.training.toy_llama import Recipe, untrained

TRUE = ("align_query", "align_key", "lookup", "previous")
"""The roles that planted circuits have."""

LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Where the distribution of p-values is read."""


FAMILIES = ("standard", "marked", "pre-aligned", "repeated", "facts", "demonstrations")
"""Prompts of in-context translation in three styles, random tokens repeated, and prompts of contextual recall before
and after finetuning."""


@dataclass(frozen=True)
class GroundTruth:
    """How many models of which kind."""

    planted: int = 50
    """Circuits at full strength, each with heads and decoys in other places."""
    weaker: int = 10
    """Circuits at each lower strength."""
    strengths: tuple[float, ...] = (0.0, 0.2, 0.3, 0.4, 0.5, 0.7)
    random: int = 400
    """Models of random weights for each family of prompts."""
    families: tuple[str, ...] = FAMILIES
    """What models of random weights read."""
    first: Mapping[str, int] = field(
        default_factory=lambda: {"facts": 400, "demonstrations": 400} | dict.fromkeys(FAMILIES[:4], 800)
    )
    """The seed of a family's first model. With seeds 0 to 399, .06 [.04, .09] of the models that read demonstrations
    had a named head; then the null of keys at the same positions in all prompts was changed. And up to .06 of the
    p-values for `duplicate` were below .01, up to .09 of those for `previous` below .05; then their nulls were
    changed."""
    gains: tuple[float, ...] = (1.0, 4.0)
    """By what their query and key weights are multiplied, in turn: diffuse attention, and sharp."""
    n: int = 32
    """Prompts for each planted circuit, half to find candidates."""
    n_random: int = 24
    """The same for models of random weights."""
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 5, "phrase_len": 2, "n_examples": 6})


def of_planted(*, task: Mapping[str, Any], strength: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Compares names with true roles in one planted circuit; the function of a job.

    Returns:
        For each role the number of heads that were built for it, that were named for it, and both; and the number of
        diffuse aligners and of those that a score alone would name, and of the right ones among them; and how many of
        the right ones have a p-value up to .05.
    """
    seq2seq = Seq2SeqTask(**task)
    model = planted_circuit(seq2seq, seed=seed, strength=strength)
    localization = localize(model, seq2seq, n, seed=seed, n_controls=0)
    rows = []
    for role, heads in localization.heads_by_role.items():
        true = {head for head, kind in model.kinds.items() if ("lookup" if kind == "backup" else kind) == role}
        grid = localization.table.where(role=role, metric="score").to_array("score")
        scored = {(int(layer), int(head)) for layer, head in np.argwhere(grid >= localization.thresholds.score)}
        p = localization.table.where(role=role, metric="p").to_array("p")
        diffuse = set(localization.diffuse_aligners.get(role, ()))
        sets = {
            "true": true,
            "named": heads,
            "both": true & set(heads),
            "diffuse": diffuse,
            "diffuse true": true & diffuse,
            "scored": scored,
            "scored true": true & scored,
            "true, p at most .05": {head for head in true if p[head] <= 0.05},
        }
        rows.append({"role": role, **{name: len(members) for name, members in sets.items()}})
    return rows


def of_random(*, family: str, gain: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Localizes in one model of random weights, on prompts whose shape the seed draws; the function of a job.

    Returns:
        For each role the number of heads named for it, diffuse aligners included, and for each head its p-value.
    """
    localization = localize(random_model(family, gain, seed), random_task(family, seed), n, seed=seed, n_controls=0)
    return [
        {"role": role, "named": len(heads) + len(localization.diffuse_aligners.get(role, ())), "p": float(p)}
        for role, heads in localization.heads_by_role.items()
        for p in localization.table.where(role=role, metric="p").frame["value"]
    ]


_WORLD = RecallWorld.small(relation_tokens=True, n_grammar=3)


def random_task(family: str, seed: int) -> Task:
    """Prompts of a family in a random shape."""
    draw = np.random.default_rng(seed)
    if family == "repeated":
        return RepeatedTokensTask(length=int(draw.integers(10, 31)), repeats=int(draw.integers(2, 4)))
    if family == "facts":
        return FactsTask(_WORLD, int(draw.integers(2, 5)), int(draw.integers(3, 7)), p_grammar=0.0)
    if family == "demonstrations":
        return DemonstrationsTask(_WORLD, int(draw.integers(6, 17)))
    shape = {"x_len": (4, 7), "phrase_len": (1, 4), "n_examples": (3, 6)}
    return Seq2SeqTask(style=family, **{name: int(draw.integers(*ends)) for name, ends in shape.items()})  # pyright: ignore[reportArgumentType]


def random_model(family: str, gain: float, seed: int, embeddings: int | None = None) -> HookedModel:
    """A Llama with rotary positions for text, a GPT-2 with learned positions for recall.

    Args:
        family: Of prompts.
        gain: By what query and key weights are multiplied.
        seed: Of the weights.
        embeddings: Of token embeddings in place of the model's own, if given.
    """
    if family in ("facts", "demonstrations"):
        gpt2: Any = small_gpt2(_WORLD.d_vocab, 128, seed=seed, d_model=64, n_layers=4, n_heads=4)
        for name, weight in gpt2.named_parameters():
            if "wte" in name or "wpe" in name:
                weight.data.mul_(0.5 / 0.02)
            elif weight.ndim == 2:  # to the standard deviation 1/√fan_in, [in, out]
                weight.data.mul_(1 / (0.02 * weight.shape[0] ** 0.5))
        for block in gpt2.transformer.h:
            block.attn.c_attn.weight.data[:, :128] *= gain**0.5  # queries and keys
        return load(_with_embeddings(gpt2, embeddings))
    llama: Any = untrained(_RANDOM, seed)
    for layer in llama.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(gain**0.5)
    return load(_with_embeddings(llama, embeddings), tokenizer=char_tokenizer())


def _with_embeddings(network: Any, seed: int | None) -> Any:
    """The network with token embeddings drawn anew, as large as its own."""
    if seed is not None:
        weight = network.get_input_embeddings().weight.data
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * weight.std())
    return network


_RANDOM = Recipe(TrainConfig(steps=1), (), n_layers=4, n_heads=4, d_model=64, d_mlp=128, n_ctx=512)


def _jobs(config: GroundTruth, _: Inputs) -> list[Measurement]:
    common = {"task": dict(config.task), "n": config.n}
    strengths = [(strength, config.weaker) for strength in config.strengths] + [(1.0, config.planted)]
    planted = [
        Measurement(of_planted, {**common, "strength": strength}, seed, {"strength": strength})
        for strength, count in strengths
        for seed in range(count)
    ]
    random = [
        Measurement(
            of_random,
            {"family": family, "gain": config.gains[seed % len(config.gains)], "n": config.n_random},
            seed,
            {"family": family},
        )
        for family in config.families
        for seed in range(config.first.get(family, 0), config.first.get(family, 0) + config.random)
    ]
    return [*planted, *random]


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
        sums = group[["true", "named", "both", "diffuse", "diffuse true"]].sum()
        if role in TRUE:
            add("planted", role, strength, "recall", sums["both"], sums["true"])
        add("planted", role, strength, "precision", sums["both"], sums["named"])
        if role in ALIGNERS:
            add("planted", role, strength, "diffuse precision", sums["diffuse true"], sums["diffuse"])
    sums = full[["true", "named", "both", "scored", "scored true", "true, p at most .05"]].sum()
    add("planted", "any", 0.05, "p at most", sums["true, p at most .05"], sums["true"])
    add("planted", "any", 1.0, "precision", sums["both"], sums["named"])
    add("planted", "any", 1.0, "precision by score", sums["scored true"], sums["scored"])
    for models, frame in (("planted", full), *((f"random, {name}", rows) for name, rows in random.groupby("family"))):
        named = frame.groupby("seed")["named"].sum() > 0
        add(models, "any", 1.0, "named", named.sum(), len(named))
    for (family, role), group in random.groupby(["family", "role"]):
        seeds = group.groupby("seed")["p"]
        for level in LEVELS:
            # Heads of one model are no independent observations.
            at_most = seeds.apply(lambda p, level=level: (p <= level + 1e-12).mean()).to_numpy()
            low, high = t_interval(at_most[None])
            share = {"value": at_most.mean(), "low": low[0], "high": high[0], "n": len(at_most)}
            shares.append({"models": f"random, {family}", "role": role, "at": level, "metric": "p at most", **share})
    return pd.DataFrame(shares)


def _check(table: Table) -> list[Claim]:
    def value(metric: str, role: str = "any", at: float = 1.0, models: str = "planted") -> Measured:
        return value_of(table, models=models, metric=metric, role=role, at=at)

    return [
        *(
            Claim(f"Planted circuits: every {role} head is named (recall)").at_least(
                1.0, value("recall", role), value("recall", role, 0.0), "circuits of strength 0"
            )
            for role in TRUE
        ),
        Claim("Planted circuits: only planted heads are named, whatever the role (precision)").at_least(
            1.0, value("precision"), value("precision by score"), "heads named by score alone"
        ),
        *(
            Claim(f"{name}: the share of models in which any head is named").at_most(
                0.05, value("named", models=name), value("named"), "planted circuits"
            )
            for name in _random(table)
        ),
        *(
            Claim(f"{name}, {role}: the share of p-values up to .05").at_most(
                0.07, value("p at most", role, 0.05, name), value("p at most", at=0.05), "planted heads"
            )
            for name in _random(table)
            for role in table.where(models=name, metric="p at most").frame["role"].unique()
        ),
    ]


def _random(table: Table) -> list[str]:
    """What the kinds of models of random weights are called."""
    return [name for name in table.frame["models"].unique() if name.startswith("random")]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    planted = table.where(models="planted", role=TRUE)
    panels = {metric: planted.where(metric=metric).frame for metric in ("recall", "precision")}
    p = {name: table.where(models=name, metric="p at most").frame for name in _random(table)}
    uniform = plots.curves(p, x="at", by="role", label="p", value="share of heads with a p-value up to p")
    uniform.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="uniform", line={"dash": "dot", "color": "#808080"})
    return {
        "strength": plots.curves(panels, x="at", by="role", label="strength of the circuit", value="share of heads"),
        "p-values": uniform,
    }


GROUND_TRUTH = Experiment(
    "localize/ground-truth",
    "Does localize name the heads that are there, and none where there are none?",
    "the package's own promise",
    Study(
        "localize/ground-truth",
        {
            "smoke": GroundTruth(
                planted=1,
                weaker=1,
                strengths=(0.0,),
                random=1,
                families=("standard", "repeated", "demonstrations"),
                n_random=12,
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
