"""Does attribution order edges as exact patches do? Circuits with known edges, and random grouped-query Llamas."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.circuits.attribute import EdgeMethod, attribute_edges
from align_circuits.circuits.edge_patching import patch_edges
from align_circuits.circuits.faithful import circuit_model_distance, circuit_performance_ratio, faithfulness
from align_circuits.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Check, Experiment, value_of
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table
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
) -> list[dict[str, Any]]:
    """Compares every method's scores with exact patches of all edges in one model; the function of a cell.

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
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # waiting for each other, threads make a small model slower
    seq2seq = Seq2SeqTask(**task)
    model: Any = (
        planted_circuit(seq2seq, seed=seed, strength=sharpness, n_layers=4)
        if models == "planted"
        else load(_random(sharpness, seed), tokenizer=char_tokenizer())
    )
    prompts = seq2seq.sample(n, model.tokenizer, seed=seed)
    pair: dict[str, Any] = {"clean": prompts, "corrupted": seq2seq.corrupt(prompts, "query", seed=seed)}
    exact = patch_edges(model, **pair)
    back = patch_edges(model, **pair, direction="denoise").frame["value"]
    both = Table(exact.frame.assign(value=(exact.frame["value"] - back) / 2), exact.provenance)
    effects = dict(zip(RUNS, (exact, both), strict=True))
    tables = {method: attribute_edges(model, **pair, method=method) for method in METHODS}
    order = np.random.default_rng(seed).permutation(len(exact))
    mixed = tables["eap_ig_inputs"].frame["value"].to_numpy()[order]
    tables[SHUFFLED] = Table(exact.frame.assign(value=mixed), exact.provenance)
    rows = []
    for method, table in {"exact": exact, **tables}.items():
        curves = {by: faithfulness(model, table, **pair, by=by) for by in ("signed", "absolute")}
        found = [(runs, metric, 0.0, v) for runs, of in effects.items() for metric, v in _agreement(table, of).items()]
        areas = {
            "circuit_performance_ratio": circuit_performance_ratio(curves["signed"]),
            "circuit_model_distance": circuit_model_distance(curves["absolute"]),
        }
        found += [(RUNS[0], metric, 0.0, value) for metric, value in areas.items()]
        curve = curves["signed"].where(circuit="edges", metric="faithfulness").frame
        found += [(RUNS[0], "faithfulness", *point) for point in zip(curve["fraction"], curve["value"], strict=True)]
        columns = ("runs", "metric", "fraction", "value")
        rows += [{"method": method, **dict(zip(columns, row, strict=True))} for row in found]
    return rows


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
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def _agreement(scores: Table, exact: Table) -> dict[str, float]:
    """How scores compare with exact effects on the edges that matter; scores that are all equal order nothing."""
    score, effect = (table.frame["value"].to_numpy(dtype=float) for table in (scores, exact))
    matter = np.abs(effect) >= MATTER * np.abs(effect).max()
    score, effect = score[matter], effect[matter]
    return {
        "rank": float(spearmanr(score, effect)[0]) if np.ptp(score) else 0.0,  # pyright: ignore[reportArgumentType]
        "sign": float((np.sign(score) == np.sign(effect)).mean()),
        "error": float(np.abs(score - effect).sum() / np.abs(effect).sum()),
    }


def _run(config: Exact, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - its own
    common = {"task": dict(config.task), "n": config.n}
    kinds = [("planted", strength, config.planted) for strength in config.strengths]
    kinds += [("random", spread, config.random) for spread in config.spreads]
    cells = [
        Job(f"{__name__}:compare", {**common, "models": kind, "sharpness": sharpness}, seed)
        for kind, sharpness, count in kinds
        for seed in range(config.first_seed, config.first_seed + count)
    ]
    frame: Any = run_jobs(cells, folder / "cells", jobs=jobs).whole()
    frame["models"] = [
        f"planted, strength {sharpness:g}" if kind == "planted" else f"random Llama, spread {sharpness:g}"
        for kind, sharpness in zip(frame["models"], frame["sharpness"], strict=True)
    ]
    wide = frame.pivot_table(index=["models", "method", "runs", "metric", "fraction"], columns="seed", values="value")
    keys = wide.index.to_frame(index=False)
    parts = []
    for _, some in keys.groupby("models"):  # which differ in the number of models
        values = wide.to_numpy(dtype=float)[some.index]
        values = values[:, ~np.isnan(values).all(0)]
        plain = dict(zip(some.itertuples(index=False, name=None), values, strict=True))
        paired = some[some["metric"].isin(["rank", "sign"])]
        above = [
            plain[models, method, *at] - plain[models, "eap", *at]
            for models, method, *at in paired.itertuples(index=False, name=None)
        ]
        less, renamed = np.stack(above), paired.assign(metric=paired["metric"] + " above eap")
        for those, rows in ((some, values), (renamed, less)):
            weights = (~np.isnan(rows)).astype(float)
            parts.append(Table.from_prompts(those, rows, weights, Provenance("measure"), bounded=False).frame)
    return Table(pd.concat(parts, ignore_index=True), Provenance("measure", asdict(config)))


def _check(table: Table) -> list[Check]:
    checks = []
    for models in dict.fromkeys(table.frame["models"]):
        measures = (
            ("rank", "clean", "rank correlation"),
            ("sign", "clean", "sign agreement"),
            ("rank", "both", "rank correlation with the mean effect in both runs"),
        )
        for (metric, runs, words), between in itertools.product(measures, ("inputs", "activations", "all_activations")):
            at = {"models": models, "runs": runs, "metric": f"{metric} above eap"}
            said = f"EAP-IG ({between.replace('_', ' ')})"
            checks.append(
                Check(
                    claim=f"{models}: {said} is at least as good as EAP ({words}, difference)",
                    measured=value_of(table, method=f"eap_ig_{between}", **at),
                    relation=">=",
                    threshold=0.0,
                    control=value_of(table, method=SHUFFLED, **at),
                    control_is="scores of EAP-IG (inputs), shuffled",
                )
            )
        at = {"models": models, "runs": RUNS[0], "metric": "sign"}
        checks.append(
            Check(
                claim=f"{models}: EAP-IG (inputs) has the sign of the exact effect on most edges that matter",
                measured=value_of(table, method="eap_ig_inputs", **at),
                relation=">=",
                threshold=0.8,
                control=value_of(table, method=SHUFFLED, **at),
                control_is="its scores shuffled",
            )
        )
    return checks


def _draw(table: Table) -> Mapping[str, go.Figure]:
    frame: Any = table.where(metric="faithfulness").frame
    panels = {models: rows[rows["fraction"] > 0] for models, rows in frame.groupby("models", sort=False)}
    curves = plots.curves(panels, x="fraction", by="method", label="share of edges kept", value="faithfulness")
    return {"faithfulness": curves.update_xaxes(type="log")}


EXACT = Experiment(
    name="attribution/exact",
    title="Does attribution order edges as exact patches do?",
    source="after Syed et al. (2023), Hanna et al. (2024), Kramár et al. (2024) and Mueller et al. (2025)",
    scales={
        "smoke": Exact(
            planted=1,
            strengths=(0.5,),
            random=1,
            spreads=(0.1,),
            n=1,
            task={"x_len": 3, "phrase_len": 1, "n_examples": 2},
        ),
        "cpu": Exact(),
        "paper": Exact(),
    },
    run=_run,
    draw=_draw,
    check=_check,
    makes_models=True,
)
