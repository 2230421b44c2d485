"""What is measured while a model is tuned: accuracy and heads, in a single pass, kept for each step."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from align_circuits.files import replacing
from align_circuits.heads.score import ScoreAccumulator, resolve
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.evaluation import ALL_OFFSETS, evaluation
from align_circuits.run.forward_pass import forward
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Provenance, Table

WATCHED = ("align_query", "align_key", "lookup")
"""The metrics of heads that every probe takes."""


class Watch:
    """What the probes found, in memory or in a file for each step."""

    def __init__(self, model: Any, prompts: Mapping[bool, Prompts], folder: Path | None):
        self.model, self.prompts, self.folder = model, prompts, folder
        self.taken: dict[int, tuple[Any, dict[str, ndarray]]] = {}

    def take(self, step: int) -> dict[str, float]:
        """Measures, keeps, and returns the columns of the log."""
        parts = [(ood, *_measure(self.model, prompts)) for ood, prompts in self.prompts.items()]
        keys: Any = pd.concat([keys.assign(ood=ood) for ood, keys, _ in parts], ignore_index=True)
        numbers = {name: np.concatenate([found[name] for *_, found in parts]) for name in ("value", "weight", "count")}
        if self.folder is None:
            self.taken[step] = keys, numbers
        else:
            with replacing(self._path(step)) as path:
                save_file(numbers, path, {"keys": json.dumps(keys.to_dict("list"))})
        total = numbers["weight"].sum(1)
        sums = np.where(numbers["weight"] > 0, numbers["value"], 0) * numbers["weight"]
        mean = np.divide(sums.sum(1), total, out=np.full(len(total), math.nan), where=total > 0)
        row = {}
        for ood, prefix in ((False, ""), (True, "ood_")):
            here = (keys["ood"] == ood).to_numpy()
            for kind in ("first", "later"):
                at = here & ((keys["metric"] == "accuracy") & (keys["kind"] == kind)).to_numpy()
                row |= {prefix + kind: float(mean[at][0])} if at.any() else {}
            for metric in WATCHED:
                at = here & ((keys["metric"] == metric) & (keys["level"] == "head")).to_numpy()
                row |= {prefix + metric: float(np.nanmax(mean[at], initial=0))} if at.any() else {}
        return row

    def table(self, steps: list[int], provenance: Provenance) -> Table:
        """All probes, with intervals over prompts."""
        taken = [self.taken[step] if self.folder is None else self._read(step) for step in steps]
        keys: Any = pd.concat([keys.assign(step=step) for step, (keys, _) in zip(steps, taken, strict=True)])
        value, weight, count = (np.concatenate([found[name] for _, found in taken]) for name in taken[0][1])
        order = ["step", "ood", "metric", "kind", "offset", "level", "layer", "head"]
        bounded = (keys["metric"] != "log_prob").to_numpy()
        table = Table.from_prompts(keys[order], value, weight, provenance, counts=count, bounded=bounded)
        return replace(table, values=None, weights=None)

    def _path(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step-{step:06d}.safetensors"

    def _read(self, step: int) -> tuple[pd.DataFrame, dict[str, ndarray]]:
        with safe_open(self._path(step), "np") as file:
            return pd.DataFrame(json.loads(file.metadata()["keys"])), {
                name: file.get_tensor(name) for name in ("value", "weight", "count")
            }


def _measure(model: Any, prompts: Prompts) -> tuple[pd.DataFrame, dict[str, ndarray]]:
    """Accuracy and heads from a single pass: the keys, and for each row and prompt value, weight and count."""
    metrics = [name for name in WATCHED if len(prompts.relations[name])]
    tally = ScoreAccumulator(resolve(prompts, metrics), model.cfg.n_layers, model.cfg.n_heads, len(prompts))
    scored = TargetMetrics.of(prompts, ("accuracy", "log_prob"))
    predicted = np.full((2, len(scored.prompt)), np.nan)
    asked = torch.cat([torch.stack([part.prompt, part.query], 1) for part in (tally, scored)])
    rows, place = asked.unique(dim=0, return_inverse=True)
    there = torch.full((2, len(rows)), -1)  # where each row is among those of the tally, of the predictions
    there[0, place[: len(tally.prompt)]] = torch.arange(len(tally.prompt))
    there[1, place[len(tally.prompt) :]] = torch.arange(len(scored.prompt))

    def own(which: int, at: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        mine = there[which, at]
        return mine[mine >= 0], found[(mine >= 0).to(found.device)]

    def add_pattern(at: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        mine, pattern = own(0, at, pattern)
        tally.add(mine, layer, pattern)

    def add_logits(at: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        mine, logits = own(1, at, logits)
        predicted[:, mine.numpy()] = scored.numbers(logits, mine).cpu().double().numpy()

    prompt, query = rows.T.contiguous()
    forward(
        model,
        prompts,
        prompt=prompt,
        query=query,
        on_pattern=add_pattern,
        on_logits=add_logits,
        options=RunOptions(engine="fast"),
    )
    heads, value, weight, count = tally.measured()
    heads = heads.assign(kind="all", offset=ALL_OFFSETS)
    whole: Any
    whole, means, counts = evaluation(prompts, predicted)
    named = whole["predictor"].where(whole["predictor"] != "model", whole["metric"])
    whole = whole.assign(metric=named, level="model", layer=None, head=None).drop(columns="predictor")
    pairs = {"value": (value, means), "weight": (weight, counts), "count": (count, counts)}
    return pd.concat([heads, whole], ignore_index=True), {name: np.concatenate(both) for name, both in pairs.items()}
