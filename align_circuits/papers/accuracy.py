"""The measurement that most experiments repeat: one model, one task, accuracy beside its references."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from align_circuits.heads.score import score_heads
from align_circuits.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.protocol import model_provenance
from align_circuits.run.evaluation import evaluate
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
    found = run_jobs(cells, folder / "cells", jobs=jobs).whole()
    arguments = pd.DataFrame(list(found["task"]))
    frame = pd.concat([arguments, found.drop(columns=["task", "seed", "weights"])], axis=1)
    settings = {"function": function, "models": list(models), "prompts": n, "seed": seed}
    return Table(frame, Provenance("measure", settings, model=loaded))


def _seed_of(task: Mapping[str, Any], seed: int) -> int:
    digest = hashlib.sha256(json.dumps([dict(task), seed], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big")


@lru_cache(maxsize=1)
def _load(model: str) -> Any:
    return load(model)
