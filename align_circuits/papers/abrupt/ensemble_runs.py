"""What most figures of abrupt learning share: sweeps trained as ensembles, and statistics over seeds."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.ensembles import train_ensemble
from align_circuits.papers.abrupt.exemplar_network import Ensemble, ExemplarNet, ExemplarNetConfig
from align_circuits.papers.abrupt.exemplar_task import ExemplarTask, Worlds
from align_circuits.papers.abrupt.overrides import (
    OPERATIONS,
    Hold,
    clamped_to_label,
    clamped_to_previous,
    within_context,
    without,
    without_labels,
)
from align_circuits.papers.abrupt.progress_measures import crossing_step
from align_circuits.papers.abrupt.reduced_model import InductionHead, InductionHeadConfig
from align_circuits.tables.intervals import bootstrap
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainConfig

Model = Literal["network", "three", "two", "none"]
"""The full network; the induction head with three parameters, with two (β_2 = 0), and with none of them, which attends
evenly whatever it is taught: the control."""

CLAMPS: dict[str, Callable[[Any], Hold | None]] = {
    "nothing": lambda _: None,
    "previous": clamped_to_previous,
    "previous, labels": partial(clamped_to_previous, tokens="labels"),
    "previous, items": partial(clamped_to_previous, tokens="items"),
    "target's label": clamped_to_label,
    "labels": without_labels,
    "context": within_context,
    **{f"no {operation}": partial(without, operation=operation) for operation in OPERATIONS},
    **{f"no {operation}, elsewhere": partial(without, operation=operation, elsewhere=True) for operation in OPERATIONS},
}
"""What is held fixed while a network trains and is measured: nothing; the first layer's attention, at the previous
token, of all tokens or of some; the target's attention, at its label; the share of it that goes to labels; the share of
the guess that goes to labels of the context; each operation, taken away, or the same done where it is not."""

FIXED = {"three": (), "two": ("beta_2",), "none": ("alpha", "beta_1", "beta_2")}


DEFAULTS = {"model": "network", "clamp": "nothing"}
"""What a cell may say beside the task."""


@dataclass(frozen=True)
class Size:
    """How large the networks and their training are."""

    task: ExemplarTask
    """The base, of which a figure varies some numbers."""
    steps: int
    seeds: int = 6
    """How many."""
    first_seed: int = 0
    """The others follow it."""
    batch_size: int = 128
    lr: float = 0.01
    weight_decay: float = 0.0
    """Times the learning rate a step; the paper's text has none."""
    d_head: int = 128
    d_hidden: int = 128
    log_every: int = 1000
    """Steps between probes: at least ten before a transition, for less than 5% of the time."""
    probe: int = 1000
    """Sequences of each sort in a probe."""

    @property
    def train(self) -> TrainConfig:
        """Plain SGD, as in the paper."""
        return TrainConfig(
            self.steps,
            lr=self.lr,
            weight_decay=self.weight_decay,
            optimizer="sgd",
            clip=None,
            log_every=self.log_every,
            checkpoint_every=max(1, self.log_every // 2),
        )


PAPER = Size(ExemplarTask(), steps=150_000)
"""Reddy (2024), §2."""

CPU = Size(
    ExemplarTask(n_classes=64, n_labels=16, n_pairs=4, d_content=32, n_positions=16),
    steps=3000,
    batch_size=64,
    lr=0.1,
    d_head=32,
    d_hidden=64,
    log_every=100,
    probe=300,
)
"""The smallest tried: the induction head is born abruptly after a plateau at 1/N, within a minute on one core."""

SMOKE = Size(
    ExemplarTask(n_classes=16, n_labels=8, n_pairs=2, d_content=8, n_positions=6),
    steps=8,
    seeds=2,
    batch_size=8,
    lr=0.1,
    d_head=8,
    d_hidden=8,
    log_every=2,
    probe=40,
)


@dataclass(frozen=True)
class Sweep:
    """Which cells are trained, at which size."""

    size: Size
    cells: tuple[Mapping[str, Any], ...]
    """What each cell changes of the base task; `model` in it chooses the model, `clamp` what is held (`CLAMPS`)."""
    columns: tuple[str, ...] = field(init=False)
    """The key columns of the table: whatever any cell changes."""

    def __post_init__(self):
        object.__setattr__(self, "columns", tuple(dict.fromkeys(name for cell in self.cells for name in cell)))

    def task(self, cell: Mapping[str, Any]) -> ExemplarTask:
        """The task of a cell; without positions for the reduced models."""
        changes = {name: value for name, value in cell.items() if name not in DEFAULTS}
        if cell.get("model", "network") != "network":
            changes["n_positions"] = 0
        return ExemplarTask(**(asdict(self.size.task) | changes))

    def ensembles(self) -> list[list[Mapping[str, Any]]]:
        """The cells in groups of one shape."""
        groups: dict[tuple, list[Mapping[str, Any]]] = {}
        for cell in self.cells:
            task = self.task(cell)
            kind = [cell.get(name, value) for name, value in DEFAULTS.items()]
            groups.setdefault((task.n_labels, task.n_pairs, *kind), []).append(cell)
        return list(groups.values())


def network(size: Size, task: ExemplarTask, model: str, seeds: Sequence[int]) -> Ensemble:
    """Makes an ensemble for a task."""
    if model == "network":
        config = ExemplarNetConfig(task.n_labels, task.d_in, size.d_head, size.d_hidden, init=task.d_content**-0.5)
        return ExemplarNet(config, seeds)
    return InductionHead(InductionHeadConfig(task.n_labels, task.d_in, size.d_hidden), seeds, FIXED[model])


@dataclass(frozen=True, eq=False)
class Trained:
    """One group of a sweep, trained."""

    cells: list[Mapping[str, Any]]
    """The cell of each member."""
    net: Any
    worlds: Worlds


def train_sweep(sweep: Sweep, folder: Path) -> tuple[Table, list[Trained]]:
    """Trains every cell with every seed, cells and seeds of one shape as one ensemble; goes on where it was killed.

    Returns:
        The curves, keyed by the sweep's columns, seed, step and measure (a row a seed: low and high are NaN), and the
        trained ensembles.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # waiting for each other, threads make a small model slower
    frames, trained = [], []
    for cells in sweep.ensembles():
        first = sweep.size.first_seed
        members = [(cell, seed) for cell in cells for seed in range(first, first + sweep.size.seeds)]
        seeds = [seed for _, seed in members]
        worlds = Worlds([sweep.task(cell) for cell, _ in members], seeds, device)
        kind = {name: cells[0].get(name, value) for name, value in DEFAULTS.items()}
        net = network(sweep.size, worlds.shape, kind["model"], seeds).to(device)
        out = folder / "training" / f"abrupt-{_hash(sweep.size, worlds, kind)}"
        run = train_ensemble(
            net,
            worlds,
            sweep.size.train,
            batch_size=sweep.size.batch_size,
            probe=sweep.size.probe,
            hold=CLAMPS[kind["clamp"]](net),
            out=out,
            recipe=kind,
        )
        keys = pd.DataFrame([{column: _value(sweep, cell, column) for column in sweep.columns} for cell, _ in members])
        frame = run.table.frame
        frames.append(
            pd.concat([keys.iloc[frame["member"]].reset_index(drop=True), frame.drop(columns="member")], axis=1)
        )
        trained.append(Trained([cell for cell, _ in members], net, worlds))
    settings = {"size": asdict(sweep.size), "cells": [dict(cell) for cell in sweep.cells]}
    return Table(pd.concat(frames, ignore_index=True), Provenance("train_sweep", settings)), trained


def _hash(size: Size, worlds: Worlds, kind: Mapping[str, str]) -> str:
    """Tells trainings apart, so that figures that train the same ensemble share it."""
    told = [asdict(size), [asdict(task) for task in worlds.tasks], list(worlds.seeds), dict(kind)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def curves_only(config: Sweep, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """The `run` of figures that need nothing but the curves."""
    return train_sweep(config, folder)[0]


def _value(sweep: Sweep, cell: Mapping[str, Any], column: str) -> Any:
    return cell.get(column, DEFAULTS[column] if column in DEFAULTS else getattr(sweep.size.task, column))


def cells_of(table: Table, columns: Sequence[str]) -> pd.DataFrame:
    """Returns the cells of a table, one row each: the values of some of its columns."""
    return pd.DataFrame(table.frame[list(columns)]).drop_duplicates(ignore_index=True)


def by_seed(table: Table, measure: str, **where: Any) -> pd.DataFrame:
    """Returns one measure's curves, steps down and seeds across."""
    frame = table.where(measure=measure, **where).frame
    return frame.pivot(index="step", columns="seed", values="value").sort_index()


def at_end(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the mean of each seed's last tenth of probes, two at least."""
    curves = by_seed(table, measure, **where)
    return curves.iloc[-max(2, len(curves) // 10) :].mean().to_numpy()


def transitions(table: Table, measure: str = "icl", level: float = 0.5, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the step at which each seed's curve crosses `level`; NaN where it never does."""
    curves = by_seed(table, measure, **where)
    return np.array([crossing_step(curves.index.to_numpy(float), curves[seed].to_numpy(), level) for seed in curves])


def half_rises(table: Table, measure: str, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the step at which each seed's curve crosses the middle between its first value and its end."""
    curves, end = by_seed(table, measure, **where), at_end(table, measure, **where)
    middle = (curves.iloc[0].to_numpy() + end) / 2
    steps = curves.index.to_numpy(float)
    return np.array(
        [crossing_step(steps, curves[seed].to_numpy(), level) for seed, level in zip(curves, middle, strict=True)]
    )


def mean_curves(table: Table, measures: Mapping[str, str], **where: Any) -> pd.DataFrame:
    """Returns curves over steps, means over seeds with 95% intervals, as `plots.curves` draws them.

    Args:
        table: Of a sweep.
        measures: The name to draw for each measure.
        **where: Which cell.
    """
    curves = {name: by_seed(table, measure, **where) for measure, name in measures.items()}
    return pd.concat([_means(name, frame) for name, frame in curves.items()], ignore_index=True)


def aligned_curves(table: Table, measures: Mapping[str, str], **where: Any) -> pd.DataFrame:
    """Returns the same, each seed's steps counted from where its accuracy in context crosses one half.

    Seeds that never cross it are left out; values between probes lie on straight lines, and steps that not all seeds
    reach are left out.
    """
    zero = transitions(table, **where)
    curves = {name: by_seed(table, measure, **where) for measure, name in measures.items()}
    steps = next(iter(curves.values())).index.to_numpy(float)
    kept = np.flatnonzero(~np.isnan(zero))
    if not len(kept):
        return mean_curves(table, measures, **where)
    gap = steps[1] - steps[0]
    first, last = (steps[0] - zero[kept]).max(), (steps[-1] - zero[kept]).min()
    grid = np.arange(np.ceil(first / gap), np.floor(last / gap) + 1) * gap
    frames = []
    for name, frame in curves.items():
        shifted = [np.interp(grid + zero[seed], steps, frame.iloc[:, seed].to_numpy()) for seed in kept]
        frames.append(_means(name, pd.DataFrame(np.stack(shifted, 1), index=pd.Index(grid, name="step"))))
    return pd.concat(frames, ignore_index=True)


def _means(name: str, curves: pd.DataFrame) -> pd.DataFrame:
    values = curves.to_numpy(float)
    low, high = bootstrap(values, (~np.isnan(values)).astype(float))
    frame = pd.DataFrame({"step": curves.index, "measure": name, "low": low, "high": high})
    return frame.assign(value=np.nanmean(values, 1))
