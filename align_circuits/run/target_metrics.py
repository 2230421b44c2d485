"""What a model says at its targets, as one number a target, for many edited runs at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.metrics import gold_log_prob, gold_logit, gold_prob
from align_circuits.hooks.edits import Edit
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.edited_runs import sweep
from align_circuits.run.evaluation import by_kind
from align_circuits.run.forward_pass import forward
from align_circuits.tables.tables import Provenance, Table

Metric = Literal["log_prob", "logit", "prob"]

METRICS: dict[str, Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"]], Float[Tensor, " row"]]] = {
    "log_prob": gold_log_prob,
    "logit": gold_logit,
    "prob": gold_prob,
}
"""By name: the gold token's log-probability, in nats; its logit above the mean logit; its probability."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A differentiable number for each target of some prompts."""

    prompts: Prompts
    metric: Metric
    prompt: Int[Tensor, " target"]
    query: Int[Tensor, " target"]
    gold: Int[Tensor, " target"]

    @classmethod
    def of(cls, prompts: Prompts, metric: str = "log_prob", kind: str = "all") -> "Outcome":
        """Returns what is asked of the targets of one kind.

        Raises:
            ValueError: No targets of that kind, or an unknown metric.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: choose one of {', '.join(map(repr, METRICS))}")
        kinds = by_kind(prompts)
        if kind not in kinds or not kinds[kind].any():
            known = ", ".join(map(repr, kinds)) if len(prompts.targets) else "no targets at all"
            raise ValueError(f"no targets of kind {kind!r}: these prompts have {known}")
        chosen: Bool[ndarray, " target"] = kinds[kind]
        columns = {name: prompts.column(name)[torch.from_numpy(chosen)] for name in ("prompt", "query_pos", "token")}
        return cls(prompts, metric, columns["prompt"], columns["query_pos"], columns["token"])  # pyright: ignore[reportArgumentType]

    @property
    def weights(self) -> Float[ndarray, " prompt"]:
        """By how much each prompt counts: the number of its targets."""
        return np.bincount(self.prompt.numpy(), minlength=len(self.prompts)).astype(float)

    def says(self, logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """Returns the number of some targets from the logits where they are predicted."""
        return METRICS[self.metric](logits, self.gold[rows].to(logits.device))

    def measured(
        self,
        model: Any,
        edits: Sequence[Edit] = (),
        cells: int = 1,
        *,
        engine: Literal["auto", "fast", "reference"] = "auto",
        batch_size: int | Literal["auto"] = "auto",
    ) -> tuple[Float[ndarray, "cell target"], str]:
        """Runs a model and returns what it says, and the engine that ran.

        Args:
            model: A model with TransformerLens's hooks.
            edits: What is changed while it runs. With several cells, edits that tell them apart (`hooks.wires`).
            cells: How many times the prompts run, in as few batches as `batch_size` allows.
            engine: As for `evaluate`.
            batch_size: Prompts at a time, those of all cells together.
        """
        count, size = len(self.prompts), len(self.gold)
        found = torch.full((cells, size), torch.nan, dtype=torch.float64)

        def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            found.view(-1)[rows] = self.says(logits, rows % size).cpu().double()

        ran = forward(
            model,
            repeated(self.prompts, cells),
            prompt=(self.prompt + count * torch.arange(cells)[:, None]).flatten(),
            query=self.query.repeat(cells),
            on_logits=keep,
            edits=edits,
            engine=engine,
            batch_size=batch_size,
        )
        return found.numpy(), ran

    def swept(
        self, model: Any, cells: Sequence[Sequence[Edit]], **options: Any
    ) -> tuple[Float[ndarray, "cell target"], str]:
        """Runs a model once for each set of edits and returns what it says, and what ran: `sweep`, with its options."""
        found = np.full((len(cells), len(self.gold)), np.nan)

        def keep(cell: int, rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            found[cell, rows.numpy()] = self.says(logits, rows).cpu().double().numpy()

        ran = sweep(model, self.prompts, cells, prompt=self.prompt, query=self.query, on_logits=keep, **options)
        return found, ran

    def by_prompt(
        self, values: Float[ndarray, "row target"]
    ) -> tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
        """Returns each prompt's mean over its targets, and their number."""
        prompt, count = self.prompt.numpy(), len(self.prompts)
        weights = np.tile(self.weights, (len(values), 1))
        sums = np.stack([np.bincount(prompt, weights=row, minlength=count) for row in values])
        return np.divide(sums, weights, out=np.full_like(weights, np.nan), where=weights > 0), weights

    def table(self, keys: pd.DataFrame, values: Float[ndarray, "row prompt"], provenance: Provenance) -> Table:
        """Returns means over prompts as a table; a prompt counts by its number of targets."""
        weights = np.tile(self.weights, (len(values), 1))
        return Table.from_prompts(keys, values, weights, provenance, bounded=False)


def repeated(prompts: Prompts, times: int) -> Prompts:
    """Returns prompts several times over, without targets and relations: all of them, then all of them again."""
    if times == 1:
        return prompts
    parts = {name: getattr(prompts, name).repeat(times, 1) for name in ("inputs", "mask", "roles", "example")}
    return replace(prompts, **parts, targets=prompts.targets.iloc[:0], correct=None, relations={}, latent={})
