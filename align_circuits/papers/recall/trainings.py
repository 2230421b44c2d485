"""What the figures of contextual recall share: a size, the trainings that they reuse, and curves over seeds."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.jobs import Job, run_jobs
from align_circuits.papers.claims import over_seeds
from align_circuits.papers.recall.pretraining import FINETUNING, PRETRAINING, Stage, train_stage
from align_circuits.papers.recall.small_gpt2 import small_gpt2
from align_circuits.papers.recall.tasks import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.prompts.prompts import Prompts
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainConfig, TrainRun

SOURCE = "Vasudeva et al. (2026)"

Finetuned = Literal["icl", "icl+grm"]
"""What a model is finetuned on: demonstrations, or demonstrations with short grammar."""


@dataclass(frozen=True)
class Size:
    """How large the world, the sequences, the model and its trainings are."""

    world: RecallWorld
    """The base; a seed draws its own facts and chains."""
    n_facts: int = 5
    grammar_len: int = 80
    p_grammar: float = 0.2
    n_demos: int = 16
    grammar_lens: tuple[int, int] = (1, 5)
    """S_ft of ICL+Grm."""
    n_seen: int = 128
    """M_ft, the subjects that are finetuned on."""
    d_model: int = 256
    pretraining: TrainConfig = PRETRAINING
    finetuning: TrainConfig = FINETUNING
    batch_size: int = 64
    seeds: int = 2
    """Each draws a world, initial weights, batches and the split into seen and held-out subjects."""
    probe: int = 512
    """Prompts of each kind that are measured at every row of the log."""

    def of(self, seed: int) -> RecallWorld:
        """The world of a seed."""
        return replace(self.world, world_seed=seed)

    def facts(self, seed: int) -> FactsTask:
        """PT."""
        return FactsTask(self.of(seed), self.n_facts, self.grammar_len, self.p_grammar)

    def demonstrations(self, seed: int, kind: Finetuned, *, held_out: bool = False, **changes: Any) -> Any:
        """ICL or ICL+Grm about seen subjects, the last one held out or not."""
        world = self.of(seed)
        seen, others = world.split(self.n_seen, seed=seed)
        lens = self.grammar_lens if kind == "icl+grm" else (0, 0)
        task = DemonstrationsTask(world, self.n_demos, lens, seen, others if held_out else None)
        return replace(task, **changes)

    def probes(self, seed: int) -> dict[str, Prompts]:
        """What finetuning is measured by: `pt`; `icl` and `grm` (one grammar token), the query subject seen or not."""
        asked: dict[str, Any] = {"pt": self.facts(seed)}
        formats: dict[str, tuple[Finetuned, dict[str, Any]]] = {
            "icl": ("icl", {}),
            "grm": ("icl+grm", {"grammar_lens": (1, 1)}),
        }
        for name, (kind, changes) in formats.items():
            for held_out in (False, True):
                task = self.demonstrations(seed, kind, held_out=held_out, **changes)
                asked[f"{name}_{'held_out' if held_out else 'seen'}"] = task
        return {name: task.sample(self.probe, seed=seed) for name, task in asked.items()}

    def changed(self, **changes: Any) -> "Size":
        """Returns the size with other numbers, among them `div` and `n_subjects` of its world.

        With other subjects, half of them are seen, and types with a value for each subject go on having one.
        """
        world = {name: changes.pop(name) for name in ("div", "n_subjects") if name in changes}
        if "n_subjects" in world:
            before, now = self.world.n_subjects, world["n_subjects"]
            world["n_values"] = tuple(now if count == before else min(count, now) for count in self.world.n_values)
            changes = {"n_seen": now // 2} | changes
        return replace(self, world=replace(self.world, **world), **changes)

    @property
    def n_ctx(self) -> int:
        """The longest sequence of any stage."""
        return max(self.facts(0).length, self.demonstrations(0, "icl+grm").length)


PAPER = Size(RecallWorld.paper())
"""App. B; chains and G are not given there."""

SMOKE = Size(
    RecallWorld.small(),
    n_facts=2,
    grammar_len=4,
    n_demos=3,
    grammar_lens=(1, 2),
    n_seen=8,
    d_model=16,
    pretraining=TrainConfig(8, lr=3e-3, log_every=4),
    finetuning=TrainConfig(6, lr=1e-3, log_every=3),
    batch_size=8,
    seeds=2,
    probe=24,
)
"""Learns nothing: whether everything runs."""


CPU = Size(
    RecallWorld(n_subjects=96, n_values=(8,) * 4, n_grammar=10),
    n_facts=3,
    grammar_len=20,
    n_demos=8,
    grammar_lens=(1, 4),
    n_seen=48,
    d_model=64,
    pretraining=TrainConfig(
        1600, lr=0.02, optimizer="muon", rest_lr=5e-3, weight_decay=1e-3, warmup=100, log_every=50, checkpoint_every=50
    ),
    finetuning=TrainConfig(300, lr=1e-3, weight_decay=1e-3, warmup=20, log_every=25, checkpoint_every=25),
    batch_size=24,
    seeds=3,
    probe=256,
)
"""A few minutes a seed on one core. Facts are learned several times sooner with Muon, which the paper does not use;
finetuned with AdamW, as in the paper, the model recalls far more about held-out subjects."""


def pretrained(size: Size, seed: int, folder: Path) -> TrainRun:
    """Returns a model that has read PT; from `folder` where it is there, so that figures share it."""
    probes = {"pt": size.facts(seed), "icl": DemonstrationsTask(size.of(seed), size.n_demos)}
    return train_stage(
        small_gpt2(size.world.d_vocab, size.n_ctx, d_model=size.d_model, seed=seed),
        Stage(size.facts(seed), size.pretraining, size.batch_size),
        probes={name: task.sample(size.probe, seed=seed) for name, task in probes.items()},
        seed=seed,
        out=_pretraining_of(size, seed, folder),
        progress=False,
    )


def finetuned(size: Size, seed: int, kind: Finetuned, folder: Path) -> TrainRun:
    """Returns a pretrained model finetuned on seen subjects; from `folder` where it is there."""
    return train_stage(
        pretrained(size, seed, folder).model,
        Stage(size.demonstrations(seed, kind), size.finetuning, size.batch_size),
        probes=size.probes(seed),
        seed=seed,
        out=folder_of(folder, kind, size, seed),
        progress=False,
    )


def _pretraining_of(size: Size, seed: int, folder: Path) -> Path:
    """Where a pretraining is kept: finetuning does not tell it from another."""
    return folder_of(folder, "pt", replace(size, n_seen=1, finetuning=FINETUNING), seed)


def folder_of(folder: Path, stage: str, size: Size, seed: int) -> Path:
    """Returns where a training is kept, by all that it rests on."""
    told = [stage, asdict(replace(size, seeds=0)), seed]
    return folder / "training" / f"recall-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Study:
    """Which trainings a figure rests on."""

    size: Size
    stages: tuple[Literal["pt", "icl", "icl+grm"], ...]
    """Pretraining, and finetuning on one or the other."""
    cells: tuple[Mapping[str, Any], ...] = ({},)
    """What each cell changes of the size: `Size.changed`."""

    def __post_init__(self):
        told = [tuple(cell.get(name) for name in self.columns) for cell in self.cells]
        if len(set(told)) < len(told):
            raise ValueError(f"cells that only pairs tell apart: {self.cells}; a table tells them by single numbers")

    def chains(self, folder: Path) -> list[Job]:
        """Returns one cell for each pretraining, with all that is finetuned from it, as `train_chain` takes them.

        So no two processes ask for the same training.
        """
        chains: dict[tuple[Path, int], list[tuple[Any, str]]] = {}
        for cell in self.cells:
            size = self.size.changed(**cell)
            for seed in range(size.seeds):
                chain = chains.setdefault((_pretraining_of(size, seed, folder), seed), [])
                chain += [(asdict(size), stage) for stage in self.stages]
        return [
            Job(f"{__name__}:train_chain", {"trainings": trainings, "folder": str(folder)}, seed)
            for (_, seed), trainings in chains.items()
        ]

    @property
    def columns(self) -> list[str]:
        """The key columns that cells add to the table; pairs such as `grammar_lens` go with the other numbers."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell if not isinstance(cell[name], tuple)))


def train_chain(trainings: Sequence[tuple[Mapping[str, Any], str]], folder: str, seed: int) -> list[dict[str, int]]:
    """Trains what is not trained yet of a chain of `Study.chains`, and leaves it in `folder`."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    for told, stage in trainings:
        _trained(_told(told), stage, seed, Path(folder))
    return [{"trainings": len(trainings)}]


def _told(size: Mapping[str, Any]) -> Size:
    """The size that `asdict` told."""
    schedules = {name: TrainConfig(**size[name]) for name in ("pretraining", "finetuning")}
    return Size(**{**size, "world": RecallWorld(**size["world"]), **schedules})


def _trained(size: Size, stage: str, seed: int, folder: Path) -> TrainRun:
    if stage == "pt":
        return pretrained(size, seed, folder)
    return finetuned(size, seed, cast(Finetuned, stage), folder)


def study(config: Study, *, models: Sequence[str] = (), jobs: int = 1, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Trains what is not trained yet, in `jobs` processes.

    Returns:
        The curves, keyed by stage, what cells change, seed, step, `probe` (`pt`, `icl`, ...) and `match` (`exact`,
        `type`, `subject`, `attribute`): a row a seed, the share of prompts; low and high are NaN.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # waiting for each other, threads make a small model slower
    if jobs > 1:
        run_jobs(config.chains(folder), folder / "cells", jobs=jobs).whole()
    frames = []
    for cell in config.cells:
        size = config.size.changed(**cell)
        for stage in config.stages:
            for seed in range(size.seeds):
                run = _trained(size, stage, seed, folder)
                keys = {name: value for name, value in cell.items() if name in config.columns}
                frames.append(long(run.log).assign(stage=stage, **keys, seed=seed, n=size.probe))
    settings = {"size": asdict(config.size), "cells": [dict(cell) for cell in config.cells]}
    return Table(pd.concat(frames, ignore_index=True), Provenance("recall_study", settings))


def long(log: pd.DataFrame) -> pd.DataFrame:
    """The log of a stage, a row for each probe and match."""
    measured = [name for name in log.columns if "." in name]
    long = log.melt("step", measured, var_name="measure", value_name="value")
    long[["probe", "match"]] = long.pop("measure").str.split(".", expand=True)
    return long.assign(low=np.nan, high=np.nan)


def by_seed(table: Table, **where: Any) -> pd.DataFrame:
    """Returns one measure's curves, steps down and seeds across."""
    return table.where(**where).frame.pivot(index="step", columns="seed", values="value").sort_index()


def at_end(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's last value."""
    return by_seed(table, **where).iloc[-1].to_numpy(float)


def at_start(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's value at step 0."""
    return by_seed(table, **where).iloc[0].to_numpy(float)


def best(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's highest value, as Fig. 5 counts it."""
    return by_seed(table, **where).max().to_numpy(float)


def reached(table: Table, level: float, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the first step of the log at which each seed is at `level` or above; infinite where it never is."""
    curves = by_seed(table, **where)
    steps, above = curves.index.to_numpy(float), curves.to_numpy(float) >= level
    return np.where(above.any(0), steps[above.argmax(0)], np.inf)


def mean_curves(table: Table, names: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Returns curves over steps, means over seeds with intervals, as `plots.curves` draws them.

    Args:
        table: Of `study`.
        names: What each curve is called, and the keys of its rows.
    """
    frames = []
    for name, where in names.items():
        curves = by_seed(table, **where)
        rows = [vars(over_seeds(row)) for row in curves.to_numpy(float)]
        frames.append(pd.DataFrame(rows).assign(step=curves.index.to_numpy(), curve=name))
    return pd.concat(frames, ignore_index=True)
