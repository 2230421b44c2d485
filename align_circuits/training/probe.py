"""What is measured while a model is tuned: accuracy and heads, from a single pass, kept for each step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from align_circuits.heads.one_pass import OnePass
from align_circuits.hooks.edits import Edit
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.jobs.files import replacing
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.alike_prompts import forward_alike
from align_circuits.run.evaluation import ALL_OFFSETS, summarize_targets
from align_circuits.run.options import RunOptions
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

PROBED = ("align_query", "align_key", "lookup")
"""The head metrics that every probe measures."""

LEAST_DEFINED = 0.5
"""Of the prompts in which some head has a score, the least share in which a head's must be defined: by two of a hundred
it would be the best one."""

COLUMNS = ("value", "weight")


class Probe:
    """Measures a model on fixed prompts at several steps, and keeps the results in memory or in a file for each step.

    Args:
        model: The model, which changes between the steps.
        prompts: What it is measured on, by whether the test inputs are out of distribution.
        folder: Where the files go; None keeps the results in memory.
        scored: The relations that heads are scored on, as far as the prompts have them.
        edits: What is changed while the model runs.
        options: The engine.
    """

    def __init__(
        self,
        model: HookedModel,
        prompts: Mapping[bool, Prompts],
        folder: Path | None,
        scored: Sequence[str],
        edits: Sequence[Edit],
        options: RunOptions,
    ):
        self.model, self.prompts, self.folder, self.scored, self.edits = model, prompts, folder, scored, edits
        self.options = options
        self._results: dict[int, tuple[pd.DataFrame, dict[str, ndarray]]] = {}

    def measure(self, step: int) -> dict[str, float]:
        """Measures the model, keeps the results, and returns their summary for the log."""
        passes = {ood: OnePass(self.model, prompts, self._metrics(prompts)) for ood, prompts in self.prompts.items()}
        # In and out of distribution most of a prompt is the same: the examples, of which only the last differs.
        rows = [both.rows for both in passes.values()]
        forward_alike(self.model, rows, edits=self.edits, options=self.options)
        measured = [(ood, *_measured(self.prompts[ood], both)) for ood, both in passes.items()]
        keys = pd.concat([keys.assign(ood=ood) for ood, keys, _ in measured], ignore_index=True)
        numbers = {name: np.concatenate([columns[name] for *_, columns in measured]) for name in COLUMNS}
        if self.folder is None:
            self._results[step] = keys, numbers
        else:
            with replacing(self._path(step)) as path:
                save_file(numbers, path, {"keys": json.dumps(keys.to_dict("list"))})
        return _summary(keys, numbers["value"], numbers["weight"], self.scored)

    def table(self, steps: list[int], provenance: Provenance) -> Table:
        """Returns the results of several steps, with intervals over prompts."""
        results = [self._results[step] if self.folder is None else self._read(step) for step in steps]
        keys = pd.concat([keys.assign(step=step) for step, (keys, _) in zip(steps, results, strict=True)])
        value, weight = (np.concatenate([numbers[name] for _, numbers in results]) for name in COLUMNS)
        order = ["step", "ood", "metric", "kind", "offset", "level", "layer", "head"]
        bounded = (keys["metric"] != "log_prob").to_numpy()
        # Only a user's own prompts, which are probed alone, have groups.
        group = next(iter(self.prompts.values())).group
        table = Table.from_prompts(
            keys.loc[:, order], value, weight, provenance, bounded=bounded, levels=True, group=group
        )
        # Prompt by prompt it would be as large as all the files of the probes.
        return replace(table, values=None, weights=None)

    def _metrics(self, prompts: Prompts) -> list[str]:
        """The relations that are scored on some prompts; without any the attention to the first token."""
        return [name for name in self.scored if len(prompts.relations.get(name, ()))] or ["sink"]

    def _path(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step-{step:06d}.safetensors"

    def _read(self, step: int) -> tuple[pd.DataFrame, dict[str, ndarray]]:
        try:
            with safe_open(self._path(step), "np") as file:
                keys = pd.DataFrame(json.loads(file.metadata()["keys"]))
                return keys, {name: file.get_tensor(name) for name in COLUMNS}
        except (SafetensorError, FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(self._path(step))!r} is broken or missing ({error}): remove it and the folder training beside "
                "its own, so that the run begins anew"
            ) from error


def _measured(prompts: Prompts, both: OnePass) -> tuple[pd.DataFrame, dict[str, ndarray]]:
    """The keys of a probe's rows on some prompts, and for each row and prompt value and weight."""
    heads, value, weight = both.scores.measured()
    defined = pd.DataFrame(weight > 0)
    n_asked = defined.groupby(heads["metric"].to_numpy()).transform("any").sum(axis=1)  # not all have each relation
    weight = np.where((defined.sum(axis=1) < LEAST_DEFINED * n_asked).to_numpy()[:, None], 0, weight)
    heads = heads.assign(kind="all", offset=ALL_OFFSETS)
    model_keys, means, counts = summarize_targets(prompts, both.values, both.targets.names)
    metric = model_keys["predictor"].where(model_keys["predictor"] != "model", model_keys["metric"])
    model_keys = model_keys.assign(metric=metric, level="model", layer=None, head=None).drop(columns="predictor")
    numbers = {"value": (value, means), "weight": (weight, counts)}
    joined = {name: np.concatenate(pair) for name, pair in numbers.items()}
    return pd.concat([heads, model_keys], ignore_index=True), joined


def _summary(
    keys: pd.DataFrame, value: Float[ndarray, "row prompt"], weight: Float[ndarray, "row prompt"], scored: Sequence[str]
) -> dict[str, float]:
    """Accuracy and the best head of each metric, in distribution and (`ood_`) out of it."""
    total = weight.sum(1)
    sums = (np.where(weight > 0, value, 0) * weight).sum(1)
    mean = np.divide(sums, total, out=np.full(len(total), math.nan), where=total > 0)
    summary = {}
    for ood, prefix in ((False, ""), (True, "ood_")):
        selected = keys["ood"] == ood
        for kind in ("first", "later"):
            rows = (selected & (keys["metric"] == "accuracy") & (keys["kind"] == kind)).to_numpy()
            summary |= {prefix + kind: float(mean[rows][0])} if rows.any() else {}
        for metric in scored:
            rows = (selected & (keys["metric"] == metric) & (keys["level"] == "head")).to_numpy()
            # `fmax`: scores that are undefined in all prompts do not hide the best of the others.
            summary |= {prefix + metric: float(np.fmax.reduce(mean[rows]))} if rows.any() else {}
    return summary
