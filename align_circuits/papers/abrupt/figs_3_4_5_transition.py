"""Abrupt learning (Reddy, 2024): the full network, Figs. 1, 3 and 4."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.names import name_of
from align_circuits.papers.abrupt.ensemble_runs import (
    CPU,
    PAPER,
    SMOKE,
    Size,
    Sweep,
    aligned_curves,
    at_end,
    by_seed,
    curves_only,
    half_rises,
    mean_curves,
    network,
    train_sweep,
    transitions,
)
from align_circuits.papers.abrupt.ensembles import train_ensemble
from align_circuits.papers.abrupt.exemplar_task import Worlds
from align_circuits.papers.abrupt.progress_measures import PROGRESS
from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SOURCE = "Reddy (2024)"
LEARNED = 0.9
"""The accuracy from which on something counts as learned."""

ACCURACIES = {"icl": "in context", "iwl": "in weights", "swap": "swapped labels"}
BOTH = {"icl": "in context", "iwl": "in weights"}
NAMES = {"ila1": "ILA1", "tila2": "TILA2", "cla": "CLA", "tla2": "TLA2", "icl": "IC accuracy"}


def first_probe(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """The untrained network's value."""
    return by_seed(table, measure, **where).iloc[0].to_numpy()


def on(size: Size, **changes: Any) -> Size:
    """A size whose base task differs."""
    return replace(size, task=replace(size.task, **changes))


# Figure 1 d


def _draw_fig1(table: Table) -> dict[str, go.Figure]:
    where = {"burst": table.frame["burst"].max()}
    return {
        "accuracy": plots.curves({"": mean_curves(table, ACCURACIES, **where)}, x="step", by="measure", label="step"),
        "loss": plots.curves(
            {"": mean_curves(table, {"loss_icl": "in context"}, **where)},
            x="step",
            by="measure",
            label="step",
            value="loss (nats)",
        ),
    }


def _check_fig1(table: Table) -> list[Check]:
    bursty, plain = ({"burst": burst} for burst in (table.frame["burst"].max(), 0))
    icl = by_seed(table, "icl", **bursty)
    weights = by_seed(table, "icl", **plain)

    def kept(curves: pd.DataFrame) -> Float[ndarray, " seed"]:
        return (curves.iloc[-2:].mean() / curves.rolling(2).mean().max()).to_numpy()

    return [
        Check(
            "With B = 2 the network learns to answer in context (accuracy at the end)",
            relation=">=",
            threshold=LEARNED,
            **measured(at_end(table, "icl", **bursty)),
            **controlled(at_end(table, "icl", **plain), "B = 0"),
        ),
        Check(
            "It follows swapped labels (accuracy at the end)",
            relation=">=",
            threshold=LEARNED,
            **measured(at_end(table, "swap", **bursty)),
            **controlled(at_end(table, "swap", **plain), "B = 0"),
        ),
        Check(
            "Learning in context does not fade (accuracy at the end over its peak)",
            relation=">=",
            threshold=0.95,
            **measured(kept(icl)),
            **controlled(kept(weights), "B = 0, where there is nothing to keep"),
        ),
    ]


def _fig1(size: Size, n_classes: int) -> Sweep:
    return Sweep(on(size, n_classes=n_classes), ({"burst": 2}, {"burst": 0}))


FIG1 = Experiment(
    name="abrupt/fig1",
    title="Loss and accuracy, in context and in weights",
    source=f"{SOURCE}, Fig. 1 (d)",
    scales={"smoke": _fig1(SMOKE, 16), "cpu": _fig1(on(CPU, noise=0.1), 512), "paper": _fig1(PAPER, 512)},
    run=curves_only,
    draw=_draw_fig1,
    check=_check_fig1,
    makes_models=True,
    published="Six seeds, B = 2, K = 512: accuracy in context rises abruptly to 1 and stays.",
)


# Figure 3


@dataclass(frozen=True)
class Course:
    """A sweep, and at which shares of the way to the first seed's transition its attention is kept."""

    sweep: Sweep
    shares: tuple[float, ...] = (0.0, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)


def _run_fig3(config: Course, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    table, _ = train_sweep(config.sweep, folder)
    size, cell = config.sweep.size, config.sweep.cells[0]
    steps = size.steps if np.isnan(at := transitions(table)[0]) else at
    worlds = Worlds([config.sweep.task(cell)], [0], torch.get_default_device())
    frames = [table.frame.assign(query=-1, key=-1)]
    for stop in sorted({min(size.steps, round(share * steps)) for share in config.shares}):
        net = network(size, worlds.shape, "network", [0])  # the first seed alone is the first member of the ensemble
        if stop:
            train = replace(size.train, steps=stop, log_every=stop, checkpoint_every=stop)
            train_ensemble(net, worlds, train, batch_size=size.batch_size, probe=size.probe, progress=False)
        frames += _maps(net, worlds, stop)
    return replace(table, frame=pd.concat(frames, ignore_index=True))


def _maps(net: Any, worlds: Worlds, step: int) -> list[pd.DataFrame]:
    """Both layers' attention on one sequence of novel classes; of the second, the target's."""
    _, cache = net.run_with_cache(worlds.batch(0, 1, "icl").inputs)
    length = worlds.shape.length
    frames = []
    for layer, queries in ((0, range(length)), (1, [length - 1])):
        pattern: Tensor = cache[name_of("pattern", layer)][0, 0]
        rows = [
            {"query": query, "key": key, "value": round(pattern[query, key].item(), 6)}
            for query in queries
            for key in range(query + 1)
        ]
        frames.append(pd.DataFrame(rows).assign(measure=f"attention_{layer + 1}", step=step, seed=0, n=1))
    return frames


def _draw_fig3(table: Table) -> dict[str, go.Figure]:
    course = mean_curves(_curves(table), {"icl": "IC accuracy"})
    return {
        "a": plots.curves({"": course}, x="step", by="measure", label="step"),
        "b": plots.attention_course(_attention(table)),
    }


def _curves(table: Table) -> Table:
    return table.where(key=-1)


def _attention(table: Table) -> dict[str, pd.DataFrame]:
    frame: Any = table.frame[table.frame["key"] >= 0]
    names = {"attention_1": "layer 1", "attention_2": "layer 2, the target"}
    return {name: frame[frame["measure"] == measure] for measure, name in names.items()}


def _check_fig3(table: Table) -> list[Check]:
    table = _curves(table)
    n_labels, n_pairs = int(table.frame["n_labels"].iloc[0]), int(table.frame["n_pairs"].iloc[0])
    icl, at = by_seed(table, "icl"), transitions(table)
    steps = icl.index.to_numpy(float)

    def reached(share: float) -> Float[ndarray, " seed"]:
        """IC accuracy at a share of the way to the transition, in units of 1/N; the end where there was none."""
        stops = np.where(np.isnan(at), steps[-1], at) * share
        return n_pairs * np.array([np.interp(stop, steps, icl[seed]) for stop, seed in zip(stops, icl, strict=True)])

    def width(measure: str, floor: float) -> Float[ndarray, " seed"]:
        """Steps from 20% to 80% of the way from a floor to 1, over the step of the transition; 1 without one."""
        first, last = (transitions(table, measure, floor + share * (1 - floor)) for share in (0.2, 0.8))
        return np.nan_to_num((last - first) / at, nan=1.0)

    return [
        Check(
            f"Before the transition the accuracy has gone from 1/L to 1/N (three quarters of the way, times N; 1/L is "
            f"{n_pairs / n_labels:.2f})",
            relation=">=",
            threshold=0.7,
            **measured(reached(0.75)),
            **controlled(reached(0.0), "before training"),
        ),
        Check(
            "It waits there: three quarters of the way to the transition, times N",
            relation="<=",
            threshold=1.5,
            **measured(reached(0.75)),
            **controlled(reached(1.25), "a quarter after the transition"),
        ),
        Check(
            "The transition is abrupt (steps from 20% to 80% of it, over the step where it is)",
            relation="<=",
            threshold=0.4,
            **measured(width("icl", 1 / n_pairs)),
            **controlled(width("cla", n_pairs / n_labels), "CLA, which rises from N/L all along"),
        ),
    ]


def _fig3(size: Size, n_classes: int) -> Course:
    task = {"n_classes": n_classes, "burst": 1, "noise": 0.0}
    cell = {"p_context": 0.8, "n_labels": size.task.n_labels, "n_pairs": size.task.n_pairs}
    return Course(Sweep(on(size, **task), (cell,)))


FIG3 = Experiment(
    name="abrupt/fig3",
    title="The plateau, the transition, and attention before and after",
    source=f"{SOURCE}, Fig. 3",
    scales={"smoke": _fig3(SMOKE, 16), "cpu": _fig3(CPU, 64), "paper": _fig3(PAPER, 256)},
    run=_run_fig3,
    draw=_draw_fig3,
    check=_check_fig3,
    makes_models=True,
    published="A slow phase, then an abrupt transition; attention is patternless before, an induction head's after.",
)


# Figure 4


def check_alignment(table: Table, **where: Any) -> list[Check]:
    """The claims about the order of the progress measures."""
    at = transitions(table, **where)

    def lead(measure: str) -> Float[ndarray, " seed"]:
        """How long before the transition a measure has made half of its rise, over the step of the transition."""
        return (at - half_rises(table, measure, **where)) / at

    def distance(measure: str) -> Float[ndarray, " seed"]:
        """The same without sign; 1 for a seed that lacks either."""
        return np.nan_to_num(np.abs(lead(measure)), nan=1.0)

    def together(measure: str, early: str) -> Check:
        return Check(
            f"{NAMES[measure]} makes half of its rise at the transition (distance, over its step)",
            relation="<=",
            threshold=0.1,
            **measured(distance(measure)),
            **controlled(distance(early), NAMES[early]),
        )

    def before(measure: str) -> Check:
        return Check(
            f"{NAMES[measure]} rises before it (lead, over its step)",
            relation=">=",
            threshold=0.1,
            **measured(np.nan_to_num(lead(measure))),
            **controlled(np.nan_to_num(lead("tila2")), NAMES["tila2"]),
        )

    return [together("ila1", "tla2"), together("tila2", "cla"), before("cla"), before("tla2")]


def _check_fig4(table: Table) -> list[Check]:
    at = transitions(table)
    return [
        Check(
            "Every seed makes the transition (share of seeds)",
            relation=">=",
            threshold=1.0,
            **measured((~np.isnan(at)).astype(float)),
            **controlled((first_probe(table, "icl") >= 0.5).astype(float), "before training"),
        ),
        *check_alignment(table),
    ]


def draw_measures(table: Table, **where: Any) -> go.Figure:
    """Returns the progress measures aligned at the transition."""
    frame = aligned_curves(table, {name: NAMES[name] for name in (*PROGRESS, "icl")}, **where)
    return plots.curves({"": frame}, x="step", by="measure", label="steps from 50% IC accuracy", value="measure")


def _draw_fig4(table: Table) -> dict[str, go.Figure]:
    step = over_seeds(transitions(table))
    figure = draw_measures(table)
    return {f"measures, aligned at step {step.value:.0f} [{step.low:.0f}, {step.high:.0f}]": figure}


FIG4 = Experiment(
    name="abrupt/fig4",
    title="Four progress measures, aligned where accuracy in context crosses one half",
    source=f"{SOURCE}, Fig. 4",
    scales={"smoke": _fig3(SMOKE, 16).sweep, "cpu": _fig3(CPU, 64).sweep, "paper": _fig3(PAPER, 256).sweep},
    run=curves_only,
    draw=_draw_fig4,
    check=_check_fig4,
    makes_models=True,
    published="ILA1 and TILA2 rise at the transition, CLA and TLA2 before it, alike in all six seeds.",
)
