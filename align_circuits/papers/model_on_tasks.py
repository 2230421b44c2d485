"""Jobs of several studies: a model on fresh prompts of a task, its accuracy beside references, or scores of its heads.

Both take what `load` takes, the arguments of a task, the number of prompts and their seed; and the hash of the model's
weights, as a name can get other weights.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from align_circuits.heads.score import score_heads
from align_circuits.papers.study import Inputs, Measurement, stored
from align_circuits.run.evaluation import evaluate
from align_circuits.tasks.seq2seq import Seq2SeqTask


def accuracy(*, model: str, task: Mapping[str, Any], n: int, seed: int, **_: str) -> pd.DataFrame:
    """Returns what `evaluate` does."""
    loaded = stored(model)
    return evaluate(loaded, Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed)).frame


def head_scores(*, model: str, task: Mapping[str, Any], n: int, seed: int, **_: str) -> pd.DataFrame:
    """Returns all scores of single heads."""
    loaded = stored(model)
    return score_heads(loaded, Seq2SeqTask(**task).sample(n, loaded.tokenizer, seed)).heads().frame


def on_tasks(
    function: Callable[..., pd.DataFrame], inputs: Inputs, tasks: Iterable[Mapping[str, Any]], *, n: int
) -> list[Measurement]:
    """Returns `accuracy` or `head_scores` of every model on every task; keys are `model` and the tasks' arguments.

    Each task has prompts of its own, so that its rows are independent of another task's.
    """
    return [
        Measurement(
            function,
            {"model": model, "weights": about["weights"], "task": task, "n": n},
            _seed_of(task),
            {"model": model, **task},
        )
        for model, about in inputs.models.items()
        for task in map(dict, tasks)
    ]


def _seed_of(task: Mapping[str, Any]) -> int:
    digest = hashlib.sha256(json.dumps([dict(task), 0], sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big")
