"""Studies of training curves: models of several setups, and statistics of their logs over seeds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import over_seeds
from align_circuits.papers.recall.figures.gpt2_models import GPT2Setup, each_seed, finetune, pretrain
from align_circuits.papers.study import Inputs, Measurement, Rows, Study
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Trainings:
    """The trainings of a study, whose table is keyed by stage, `columns`, seed, step, `probe` and `match`.

    Probes are those of `GPT2Setup.probes`, matches `exact`, `type`, `subject` and `attribute`; the value is a share of
    prompts, and low and high are NaN.
    """

    setup: GPT2Setup
    stages: tuple[Literal["pt", "icl", "icl+grm"], ...]
    """Pretraining, and finetuning on one or the other."""
    changes: tuple[Mapping[str, Any], ...] = ({},)
    """The changes of the setup in each cell of the grid: arguments of `GPT2Setup.changed`."""

    def __post_init__(self):
        keys = [tuple(change.get(name) for name in self.columns) for change in self.changes]
        if len(set(keys)) < len(keys):
            raise ValueError(f"changes that differ in pairs alone: {self.changes}; the table has a column per number")

    @property
    def columns(self) -> list[str]:
        """The key columns of the changes; pairs such as `grammar_lens` have none."""
        return list(dict.fromkeys(name for keys in self.changes for name in keys if not isinstance(keys[name], tuple)))

    def cells(self) -> Iterator[tuple[GPT2Setup, dict[str, Any]]]:
        """Yields the setup of each cell of the grid and its keys."""
        for change in self.changes:
            setup = self.setup.changed(**change)
            keys = {name: value for name, value in change.items() if name in self.columns}
            yield setup, {**keys, "n": setup.n_prompts}


def _pretrainings(config: Trainings, inputs: Inputs) -> list[Measurement]:
    return [
        job for setup, keys in config.cells() for job in each_seed(pretrain, setup, inputs, {"stage": "pt", **keys})
    ]


def _finetunings(config: Trainings, inputs: Inputs) -> list[Measurement]:
    return [
        job
        for stage in config.stages
        if stage != "pt"
        for setup, keys in config.cells()
        for job in each_seed(finetune, setup, inputs, {"stage": stage, **keys}, kind=stage)
    ]


def _curves(config: Trainings, rows: Rows) -> pd.DataFrame:
    frame = pd.concat(rows.values(), ignore_index=True)
    return frame[frame["stage"].isin(config.stages)].assign(low=np.nan, high=np.nan)


def curves_study(name: str, smoke: Trainings, cpu: Trainings, paper: Trainings) -> Study:
    """Returns the study that pretrains and finetunes the models of all cells."""
    return Study(name, {"smoke": smoke, "cpu": cpu, "paper": paper}, _finetunings, _curves, _pretrainings)


def grid(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Returns every combination of values, by name."""
    return tuple(dict(zip(values, combination, strict=True)) for combination in product(*values.values()))


def by_seed(table: Table, **where: Any) -> pd.DataFrame:
    """Returns the curves of one measure, with steps as rows and seeds as columns."""
    return table.where(**where).frame.pivot(index="step", columns="seed", values="value").sort_index()


def at_end(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's last value."""
    return by_seed(table, **where).iloc[-1].to_numpy(float)


def at_start(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's value at step 0."""
    return by_seed(table, **where).iloc[0].to_numpy(float)


def best(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's highest value, as in Fig. 5."""
    return by_seed(table, **where).max().to_numpy(float)


def reached(table: Table, level: float, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the first logged step at which each seed is at `level` or above; infinite where there is none."""
    curves = by_seed(table, **where)
    steps, above = curves.index.to_numpy(float), curves.to_numpy(float) >= level
    return np.where(above.any(0), steps[above.argmax(0)], np.inf)


def mean_curves(table: Table, curves: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Returns means over seeds by step with intervals, as `plots.curves` draws them.

    Args:
        table: Of a study of curves.
        curves: The keys of each curve's rows, by its caption.
    """
    frames = []
    for name, where in curves.items():
        values = by_seed(table, **where)
        rows = [vars(over_seeds(row)) for row in values.to_numpy(float)]
        frames.append(pd.DataFrame(rows).assign(step=values.index.to_numpy(), curve=name))
    return pd.concat(frames, ignore_index=True)
