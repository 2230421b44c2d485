"""Does attribution order edges as exact patches do? Circuits with known edges, and random grouped-query Llamas."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.circuits.edge_attribution import EdgeMethod, attribute_edges
from align_circuits.circuits.edge_patching import patch_edges
from align_circuits.circuits.faithful import circuit_model_distance, circuit_performance_ratio, faithfulness
from align_circuits.models.loading import load
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread
from align_circuits.papers.statistics import mean_row, seed_rows
from align_circuits.report import plots
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

METHODS: tuple[EdgeMethod, ...] = get_args(EdgeMethod)
SHUFFLED = "shuffled"
"""The control: the scores of `eap_ig_inputs`, each given to another edge."""

RUNS = ("clean", "both")
"""Where exact effects are measured: each edge is patched alone in the clean run, or the effect is the mean of that and
of what patching it back makes good in the corrupted run. Where effects add up, the two are the same."""

MATTER = 0.01
"""Edges matter whose exact effect is at least this share of the largest: in a planted circuit nearly all have none."""


@dataclass(frozen=True)
class Exact:
    """How many models of which kind."""

    planted: int = 16
    """Circuits at each strength."""
    strengths: tuple[float, ...] = (0.4, 0.5, 1.0)
    """β: how sharply the circuit attends; at 1 the softmax is saturated."""
    random: int = 32
    """Llamas of random weights at each spread, 3 layers of 4 heads with 2 key heads."""
    spreads: tuple[float, ...] = (0.1, 0.2)
    """The standard deviation of their weights; 0.2 is about 1 / sqrt(d_model), and attention far from uniform."""
    first_seed: int = 100
    """What is claimed of both runs was first seen on models of seeds below; these were new to it."""
    n: int = 4
    """Prompts for each model."""
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 3, "phrase_len": 1, "n_examples": 4})


def compare(
    *, task: Mapping[str, Any], models: Literal["planted", "random"], sharpness: float, n: int, seed: int
) -> pd.DataFrame:
    """Compares every method's scores with exact patches of all edges in one model; the function of a job.

    Args:
        task: The task's arguments.
        models: A planted circuit or a random Llama.
        sharpness: The strength of the circuit, or the spread of the Llama's weights.
        n: Prompts.
        seed: Of model, prompts and control.

    Returns:
        For each method and each of `RUNS` its rank correlation, sign agreement and relative error, on the edges that
        matter; and its faithfulness curve with the two areas.
    """
    on_one_thread()
    seq2seq = Seq2SeqTask(**task)
    model: Any = (
        planted_circuit(seq2seq, seed=seed, strength=sharpness, n_layers=4)
        if models == "planted"
        else load(_random(sharpness, seed), tokenizer=char_tokenizer())
    )
    prompts = seq2seq.sample(n, model.tokenizer, seed=seed)
    pair = Pair(prompts, seq2seq.corrupt(prompts, "query", seed=seed), direction="noise")
    exact = patch_edges(model, pair)
    clean = exact.frame["value"].to_numpy(dtype=float)
    back = patch_edges(model, replace(pair, direction="denoise")).frame["value"].to_numpy(dtype=float)
    effects = dict(zip(RUNS, (clean, (clean - back) / 2), strict=True))
    tables = {"exact": exact, **{method: attribute_edges(model, pair, method=method) for method in METHODS}}
    order = np.random.default_rng(seed).permutation(len(exact))
    mixed = tables["eap_ig_inputs"].frame["value"].to_numpy()[order]
    tables[SHUFFLED] = Table(exact.frame.assign(value=mixed), exact.provenance)
    rows: list[tuple[str, str, str, float, float]] = []
    for method, table in tables.items():
        for runs, effect in effects.items():
            agreement = _agreement(table.frame["value"].to_numpy(dtype=float), effect)
            rows += [(method, runs, metric, 0.0, value) for metric, value in agreement.items()]
        signed, absolute = (faithfulness(model, pair, table, by=by) for by in ("signed", "absolute"))
        rows.append((method, RUNS[0], "circuit_performance_ratio", 0.0, circuit_performance_ratio(signed)))
        rows.append((method, RUNS[0], "circuit_model_distance", 0.0, circuit_model_distance(absolute)))
        curve = signed.where(circuit="edges", metric="faithfulness").frame
        for fraction, value in zip(curve["fraction"], curve["value"], strict=True):
            rows.append((method, RUNS[0], "faithfulness", fraction, value))
    return pd.DataFrame(rows, columns=["method", "runs", "metric", "fraction", "value"])


def _random(spread: float, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(char_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=spread,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def _agreement(score: Float[ndarray, " edge"], effect: Float[ndarray, " edge"]) -> dict[str, float]:
    """How scores compare with exact effects on the edges that matter; scores that are all equal order nothing."""
    matter = np.abs(effect) >= MATTER * np.abs(effect).max()
    score, effect = score[matter], effect[matter]
    return {
        "rank": float(spearmanr(score, effect)[0]) if np.ptp(score) else 0.0,  # pyright: ignore[reportArgumentType]
        "sign": float((np.sign(score) == np.sign(effect)).mean()),
        "error": float(np.abs(score - effect).sum() / np.abs(effect).sum()),
    }


def _jobs(config: Exact, _: Inputs) -> list[Measurement]:
    common = {"task": dict(config.task), "n": config.n}
    kinds = [("planted", at, config.planted, f"planted, strength {at:g}") for at in config.strengths]
    kinds += [("random", at, config.random, f"random Llama, spread {at:g}") for at in config.spreads]
    return [
        Measurement(compare, {**common, "models": kind, "sharpness": sharpness}, seed, {"models": name})
        for kind, sharpness, count, name in kinds
        for seed in range(config.first_seed, config.first_seed + count)
    ]


def _summarize(_: Exact, rows: Rows) -> pd.DataFrame:
    columns = ["models", "method", "runs", "metric", "fraction"]
    wide: Any = rows["compare"].pivot_table(index=columns, columns="seed", values="value")
    parts = []
    for _, group in wide.groupby(level="models"):  # which differ in the number of models
        group = group.dropna(axis=1, how="all")
        paired = group[group.index.isin(["rank", "sign"], level="metric")]
        eap = group.xs("eap", level="method").reindex(paired.index.droplevel("method"))
        for frame, suffix in ((group, ""), (paired - eap.to_numpy(), " above eap")):
            keys = frame.index.to_frame(index=False)
            keys["metric"] += suffix
            parts.append(seed_rows(keys, frame.to_numpy(dtype=float)))
    return pd.concat(parts, ignore_index=True)


def _check(table: Table) -> list[Claim]:
    measures = (
        ("rank", "clean", "rank correlation"),
        ("sign", "clean", "sign agreement"),
        ("rank", "both", "rank correlation with the mean effect in both runs"),
    )
    checks = []
    for models in dict.fromkeys(table.frame["models"]):
        for (metric, runs, words), between in itertools.product(measures, ("inputs", "activations", "all_activations")):
            above = mean_row(models=models, metric=f"{metric} above eap", runs=runs)
            checks.append(
                Claim(
                    f"{models}: EAP-IG ({between.replace('_', ' ')}) is at least as good as EAP ({words}, difference)"
                ).at_least(
                    0.0, *above.beside("method", f"eap_ig_{between}", SHUFFLED), "scores of EAP-IG (inputs), shuffled"
                )
            )
        sign = mean_row(models=models, metric="sign", runs=RUNS[0])
        checks.append(
            Claim(f"{models}: EAP-IG (inputs) has the sign of the exact effect on most edges that matter").at_least(
                0.8, *sign.beside("method", "eap_ig_inputs", SHUFFLED), "its scores shuffled"
            )
        )
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    frame: Any = table.where(metric="faithfulness").frame
    panels = {models: rows[rows["fraction"] > 0] for models, rows in frame.groupby("models", sort=False)}
    curves = plots.curves(panels, x="fraction", by="method", label="share of edges kept", value="faithfulness")
    return {"faithfulness": curves.update_xaxes(type="log")}


EXACT = Experiment(
    "attribution/exact",
    "Does attribution order edges as exact patches do?",
    "after Syed et al. (2023), Hanna et al. (2024), Kramár et al. (2024) and Mueller et al. (2025)",
    Study(
        "attribution/exact",
        {
            "smoke": Exact(
                planted=0,  # thousands of edges: a minute
                random=1,
                spreads=(0.1,),
                n=1,
                task={"x_len": 3, "phrase_len": 1, "n_examples": 2},
            ),
            "cpu": Exact(),
            "paper": Exact(),
        },
        _jobs,
        _summarize,
    ),
    _draw,
    _check,
)
