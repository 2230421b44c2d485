"""The measurement that most experiments repeat: one model, one task, accuracy beside its references."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.heads.score import score_heads
from align_circuits.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.protocol import model_provenance
from align_circuits.papers.claims import Measured
from align_circuits.run.evaluation import evaluate
from align_circuits.tables.intervals import binomial_interval, bootstrap
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask


def accuracy(*, model: str, weights: str, task: Mapping[str, Any], n: int, seed: int) -> pd.DataFrame:  # noqa: ARG001
    """Evaluates a model on fresh prompts of a task; the function of a cell.

    Args:
        model: What `load` takes.
        weights: The hash of the model's weights: other weights under the same name are another cell.
        task: The task's arguments.
        n: Prompts.
        seed: Of the prompts.
    """
    loaded = _load(model)
    prompts = Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed)
    return evaluate(loaded, prompts).frame


def scores(*, model: str, weights: str, task: Mapping[str, Any], n: int, seed: int) -> pd.DataFrame:  # noqa: ARG001
    """Scores every head of a model on fresh prompts of a task; the function of a cell. Arguments as for `accuracy`."""
    loaded = _load(model)
    return score_heads(loaded, Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed)).frame


def measure(
    function: str,
    models: Sequence[str],
    tasks: Iterable[Mapping[str, Any]],
    *,
    n: int,
    jobs: int,
    folder: Path,
    seed: int = 0,
) -> Table:
    """Runs `accuracy` or `scores` on every model and task, and returns one table with the tasks' arguments as keys.

    Each task has prompts of its own, so that its rows are independent of another task's.

    Raises:
        ValueError: A model cannot be loaded, or a cell failed; what is finished stays, and the next call goes on from
            there.
    """
    tasks = list(tasks)
    loaded = {model: model_provenance(_load(model)) for model in models}
    cells = [
        Job(
            f"{__name__}:{function}",
            {"model": model, "weights": about["weights"], "task": dict(task), "n": n},
            _seed_of(task, seed),
        )
        for model, about in loaded.items()
        for task in tasks
    ]
    found = run_jobs(cells, folder / "cells", processes=jobs).all_rows()
    arguments = pd.DataFrame(list(found["task"]))
    frame = pd.concat([arguments, found.drop(columns=["task", "seed", "weights"])], axis=1)
    settings = {"function": function, "models": list(models), "prompts": n, "seed": seed}
    return Table(frame, Provenance("measure", settings, model=loaded))


def mean_of(table: Table) -> Measured:
    """Returns the mean of a table's independent rows, with the interval that their own intervals imply."""
    value, low, high = (table.frame[column].to_numpy(dtype=float) for column in ("value", "low", "high"))
    below, above = (float(np.linalg.norm(reach)) / len(table) for reach in (value - low, high - value))
    return Measured(float(value.mean()), float(value.mean()) - below, float(value.mean()) + above)


def difference_of(minuend: Table, subtrahend: Table) -> Measured:
    """Returns the difference of two means of independent rows.

    Rows measured on the same prompts, such as a model and its ceiling, mostly rise and fall together: for them the
    interval is too wide, not too narrow.
    """
    left, right = mean_of(minuend), mean_of(subtrahend)
    below = math.hypot(left.value - left.low, right.high - right.value)
    above = math.hypot(left.high - left.value, right.value - right.low)
    value = left.value - right.value
    return Measured(value, value - below, value + above)


def extreme_of(table: Table, *, highest: bool) -> Measured:
    """Returns the row with the highest (else the lowest) value, with its own interval."""
    value = table.frame["value"].to_numpy()
    return _row(table, int(value.argmax() if highest else value.argmin()))


def value_of(table: Table, **where: Any) -> Measured:
    """Returns the first row where the key columns have the given values, with its own interval."""
    return _row(table.where(**where), 0)


def share_of(there: Bool[ndarray, " seed"]) -> Measured:
    """Returns the share of seeds in which something is there, with its exact binomial interval."""
    return Measured(float(there.mean()), *binomial_interval(int(there.sum()), len(there)))


def over_seeds(values: Float[ndarray, " seed"]) -> Measured:
    """Returns the mean over seeds with a 95% bootstrap interval; a seed without a value (NaN) is left out."""
    weights = (~np.isnan(values)).astype(float)[None]
    if not weights.any():
        return Measured(float("nan"), float("nan"), float("nan"))
    low, high = bootstrap(values[None], weights)
    return Measured(float(np.nanmean(values)), float(low[0]), float(high[0]))


def measured(values: Float[ndarray, " seed"]) -> dict[str, Measured]:
    """Returns the measured value of a check."""
    return {"measured": over_seeds(values)}


def controlled(values: Float[ndarray, " seed"], what: str) -> dict[str, Any]:
    """Returns the control of a check."""
    return {"control": over_seeds(values), "control_is": what}


def _row(table: Table, place: int) -> Measured:
    row = table.frame.iloc[place]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))


def _seed_of(task: Mapping[str, Any], seed: int) -> int:
    digest = hashlib.sha256(json.dumps([dict(task), seed], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big")


@lru_cache(maxsize=1)
def _load(model: str) -> Any:
    return load(model)
