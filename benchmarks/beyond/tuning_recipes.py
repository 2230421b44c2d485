"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): by which tuning does a model learn to align?

- The paper tunes the queries and keys of one layer of 32 and sees alignment and lookup form (Fig. 10). In the bundled
  Llama the best layer of seven does not suffice (`icatune/fig10`): after too few steps, by too few projections, or
  because it is one layer (`icatune/single-layer`).
- By the paper's recipe, made for 8 billion parameters, neither the bundled Llama nor SmolLM2 learns to align; by
  another one both do. The two differ in learning rate, loss, LoRA and batch (`icatune/recipe`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import (
    ICA,
    PAPER,
    PAPER_ICA,
    SMOKE_ICA,
    SMOLLM2,
    SMOLLM2_ICA,
    TOY,
    Arm,
    Tunings,
    at_ends,
    courses,
    ended,
    tuned_study,
)
from align_circuits.papers.icatune.tuning_courses import FIRST, KEYS, draw_course
from align_circuits.papers.lab import About, Experiment, Rows
from align_circuits.papers.statistics import as_rows
from align_circuits.tables.tables import Table
from align_circuits.training.tuning import TuneConfig

Changes = Mapping[str, Mapping[str, Any]]
"""By arm, the arguments of `TuneConfig` in which it differs."""


def _arms(of: Arm, changes: Changes, n: int = 64) -> Tunings:
    """One arm for each change of a tuning."""
    return Tunings(tuple(replace(of, name=name, config={**of.config, **each}) for name, each in changes.items()), n=n)


def _summarize(_: Tunings, rows: Rows) -> pd.DataFrame:
    """The courses of first tokens, and what holds before and after."""
    course: Any = courses(rows["course"], 2)
    return as_rows([course[(course["of"] == "model") & (course["kind"] == "first")], ended(rows["ends"])], KEYS)


def _suffices(claims: Mapping[str, str]) -> Callable[[Table], list[Claim]]:
    """By arm, the claim that the model learns to align by it: a first letter is right only if its symbol is known."""
    return lambda _: [
        Claim(f"{claim} (first token)").at_least(
            0.95, *FIRST.at(arm=arm).beside("part", "after", "before"), "before tuning"
        )
        for arm, claim in claims.items()
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    first = table.where(part="course", metric="accuracy", kind="first", condition="in distribution").frame
    return {"accuracy": draw_course(first, "arm")}


_STEPS, _PROJECTIONS, _LAYERS = "one layer, five times the steps", "one layer, all projections", "all layers"


def _single_layer(layer: int, steps: int) -> Changes:
    """Each makes up for one thing that tuning queries and keys of one layer for `steps` may lack."""
    queries_and_keys = {"projections": ("q", "k")}
    return {
        _STEPS: {**queries_and_keys, "layers": layer, "steps": 5 * steps},
        _PROJECTIONS: {"projections": ("q", "k", "v", "o"), "layers": layer, "steps": steps},
        _LAYERS: {**queries_and_keys, "steps": steps},
    }


SINGLE_LAYER = Experiment(
    "icatune/single-layer",
    "Why does tuning one layer not suffice?",
    "beyond Agarwal and Sarawagi (2025), Fig. 10; layer 2, the best of the bundled Llama there, was known",
    tuned_study(
        "icatune/single-layer",
        _summarize,
        [at_ends],
        smoke=_arms(SMOKE_ICA, _single_layer(1, 2), n=4),
        cpu=_arms(replace(ICA, config={**TOY, "probe_every": 20}), _single_layer(2, 200)),
        paper=_arms(replace(PAPER_ICA, config=PAPER, seeds=(0,)), _single_layer(13, 1000)),
    ),
    _draw,
    _suffices(
        {
            _STEPS: "With five times the steps queries and keys of the best layer suffice",
            _PROJECTIONS: "With values and outputs as well the best layer suffices",
            _LAYERS: "Queries and keys of all layers suffice",
        }
    ),
    about=About.BEYOND,
)


_DEFAULTS = TuneConfig()
_PARTS: dict[str, dict[str, Any]] = {
    "the paper's learning rate": {"lr": _DEFAULTS.lr},
    "the paper's loss": {"loss_on": _DEFAULTS.loss_on},
    "the paper's LoRA": {"alpha": _DEFAULTS.alpha, "dropout": _DEFAULTS.dropout, "projections": ("q", "k", "v")},
    "the paper's batch": {"batch": _DEFAULTS.prompts_per_step},
}
"""The parts of the paper's recipe, by the arm that has one of them and all else from the recipe for small models."""

_FASTER = "the paper's recipe, fifteen times its learning rate"


def _recipe(steps: int, batch: int, of_paper: int = _DEFAULTS.steps) -> Changes:
    """Each part of the paper's recipe alone, for as many prompts as `steps` of `batch`, and the whole, faster."""
    whole: dict[str, Any] = {name: value for part in _PARTS.values() for name, value in part.items()}
    return {name: {**part, "steps": steps * batch if "batch" in part else steps} for name, part in _PARTS.items()} | {
        _FASTER: {**whole, "steps": of_paper, "warmup": 0, "lr": 15 * _DEFAULTS.lr}
    }


RECIPE = Experiment(
    "icatune/recipe",
    "What of its recipe does a small model need to learn to align?",
    "beyond Agarwal and Sarawagi (2025), Fig. 4; that the whole recipe does not suffice was known",
    tuned_study(
        "icatune/recipe",
        _summarize,
        [at_ends],
        smoke=_arms(SMOKE_ICA, _recipe(3, 2, of_paper=3), n=4),
        cpu=_arms(replace(ICA, config={**TOY, "probe_every": 50}), _recipe(TOY["steps"], TOY["batch"])),
        paper=_arms(replace(PAPER_ICA, config={**SMOLLM2, **PAPER}, seeds=(0,)), _recipe(400, 2)),
        smollm2=_arms(SMOLLM2_ICA, _recipe(SMOLLM2["steps"], SMOLLM2["batch"]), n=32),
    ),
    _draw,
    _suffices(
        {
            **{name: f"It is learned with {name}" for name in _PARTS},
            _FASTER: "It is learned by the paper's recipe with fifteen times its learning rate",
        }
    ),
    about=About.BEYOND,
)
