"""How weak may an aligner be, and how few the prompts and symbols, for `localize` to name it? A curve of its power."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.candidates import ALIGNERS
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import HIGH, LOW, the_row
from align_circuits.report import plots
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tables.tables import Table
from align_circuits.validation.localize_ground_truth import of_planted


@dataclass(frozen=True)
class Power:
    """Which circuits, and how many."""

    circuits: int = 6
    """At each strength, number of prompts and number of symbols."""
    strengths: tuple[float, ...] = (0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0)
    ns: tuple[int, ...] = (16, 32, 64)
    """Prompts, half to find candidates."""
    x_lens: tuple[int, ...] = (4, 5, 7)
    """Symbols of an input: 24, 120 and 5,040 orders."""


def _jobs(config: Power, _: Inputs) -> list[Measurement]:
    return [
        Measurement(
            of_planted,
            {"task": {"x_len": x_len, "phrase_len": 2, "n_examples": 6}, "strength": strength, "n": n},
            1000 + seed,  # other circuits than those of localize/ground-truth
            {"strength": strength, "n": n, "x_len": x_len},
        )
        for x_len in config.x_lens
        for n in config.ns
        for strength in config.strengths
        for seed in range(config.circuits)
    ]


def _summarize(_: Power, rows: Rows) -> pd.DataFrame:
    known: Any = rows["of_planted"]
    shares = []
    for (x_len, n, strength), group in known[known["role"].isin(ALIGNERS)].groupby(["x_len", "n", "strength"]):
        true, named, diffuse = (int(group[column].sum()) for column in ("true", "both", "diffuse true"))
        for metric, part in (("named", named), ("named or diffuse", named + diffuse)):
            low, high = binomial_interval(part, true)
            share = {"value": part / true, "low": low, "high": high, "n": true}
            shares.append({"x_len": x_len, "prompts": n, "strength": strength, "metric": metric, **share})
    return pd.DataFrame(shares)


def _draw(table: Table) -> Mapping[str, go.Figure]:
    figures = {}
    for metric in table.frame["metric"].unique():
        frame = table.where(metric=metric).frame
        panels = {f"{x_len} symbols": part for x_len, part in frame.groupby("x_len")}
        panels = {name: part.assign(prompts=part["prompts"].astype(str) + " prompts") for name, part in panels.items()}
        figures[metric] = plots.curves(
            panels, x="strength", by="prompts", label="strength of the circuit", value=f"share of aligners {metric}"
        )
    return figures


POWER = Experiment(
    "localize/power",
    "How weak an aligner, how few prompts and symbols, for localize to name it?",
    "the package's own promise",
    Study(
        "localize/power",
        {"smoke": Power(circuits=1, strengths=(0.25, 1.0), ns=(16,), x_lens=(5,)), "cpu": Power(), "paper": Power(20)},
        _jobs,
        _summarize,
    ),
    _draw,
    [
        Claim("All aligners of full strength are named").at_least(
            1.0,
            *the_row(prompts=HIGH, x_len=HIGH, metric="named").beside("strength", HIGH, LOW),
            "the weakest circuits",
        )
    ],
)
