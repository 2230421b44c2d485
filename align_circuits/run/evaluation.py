"""Accuracy beside the references that tell what it takes."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.edits import Edit, edits_provenance
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import KINDS, REFERENCES, Prompts
from align_circuits.run.edited_runs import sweep
from align_circuits.run.forward_pass import forward
from align_circuits.tables.tables import Provenance, Table

ALL_OFFSETS = -1
"""The `offset` of rows that are not about one."""

_CELLS_AT_ONCE = 2**24


def evaluate(
    model: Any,
    prompts: Prompts,
    *,
    edits: Sequence[Edit] = (),
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns the model's accuracy and log-probability on the targets, beside the references of the task.

    Teacher forcing: each target is predicted from the true tokens before it. A prediction is the argmax over the whole
    vocabulary, and right where the target accepts it: any letter that the true automaton accepts after the true prefix,
    or the target's own token where the prompts list no accepted letters. Of tied logits the lowest id counts.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets.
        edits: What is changed while the model runs.
        engine: `"fast"`, `"reference"` (TransformerLens's own hooks), or the fast one where it fits.
        batch_size: Prompts at a time; it changes memory and time, never a result.

    Returns:
        A table keyed by

        - `predictor`: `"model"` or one of `REFERENCES`, as far as the targets hold it;
        - `metric`: `"accuracy"` in [0, 1], a reference's being its expected one; for the model also `"log_prob"`, the
          mean log-probability of the target's own token, in nats;
        - `kind`: `"all"`, `"first"` (tokens that need alignment) or `"later"`; only kinds that occur;
        - `offset`: the target's place in its phrase, with kind `"all"`; -1 for every place.

        Intervals are 95% bootstrap intervals over prompts.

        An accuracy shows alignment only where it is above `history`, not above `chance` (paper 1, §3; the two
        ceilings hold within the grammar, so compare on prompts of the same kind). On prompts with fixed automata the
        mapping may be known by weight, and neither ceiling speaks about context.

    Raises:
        ValueError: No prompts, no targets, or prompts that do not fit the model.
    """
    predictions, ran = predict(model, prompts, edits=edits, engine=engine, batch_size=batch_size)
    provenance = Provenance(
        "evaluate", settings=edits_provenance(edits), model=model_provenance(model), data=prompts.provenance, engine=ran
    )
    keys, means, weights = predictions.measured()
    return Table.from_prompts(keys, means, weights, provenance, bounded=(keys["metric"] == "accuracy").to_numpy())


def predict(
    model: Any,
    prompts: Prompts,
    *,
    edits: Sequence[Edit] = (),
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> tuple["Predictions", str]:
    """Returns what a model predicts at each target, and the engine that ran. Arguments as for `evaluate`."""
    if not len(prompts) or prompts.targets.empty:
        raise ValueError(f"nothing to evaluate in {prompts!r}: give prompts with at least one target")
    predictions = Predictions(prompts)
    ran = forward(
        model,
        prompts,
        prompt=predictions.prompt,
        query=predictions.query,
        on_logits=predictions.add,
        edits=edits,
        engine=engine,
        batch_size=batch_size,
    )
    return predictions, ran


def predict_with_edits(
    model: Any,
    prompts: Prompts,
    cells: Sequence[Sequence[Edit]],
    *,
    source: Prompts | None = None,
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> tuple[list["Predictions"], str]:
    """Returns what a model predicts under each of many sets of edits, and what ran. Arguments as for `sweep.sweep`."""
    if not len(prompts) or prompts.targets.empty:
        raise ValueError(f"nothing to evaluate in {prompts!r}: give prompts with at least one target")
    blank = Predictions(prompts)
    found = [blank.again() for _ in cells]
    ran = sweep(
        model,
        prompts,
        cells,
        prompt=blank.prompt,
        query=blank.query,
        on_logits=lambda cell, rows, logits: found[cell].add(rows, logits),
        source=source,
        engine=engine,
        batch_size=batch_size,
    )
    return found, ran


class Predictions:
    """What was predicted at each row, filled in as logits arrive; a row that comes again is written again."""

    def __init__(self, prompts: Prompts):
        self.prompts = prompts
        asked = torch.stack([prompts.column(name) for name in ("prompt", "query_pos", "token")], 1)
        rows, self.row_of = asked.unique(dim=0, return_inverse=True)  # sorted by prompt, then by query, then by token
        self.prompt, self.query, self.gold = rows.T.contiguous()
        self.argmax = torch.full((len(rows),), -1)
        self.log_prob = torch.full((len(rows),), torch.nan, dtype=torch.float64)

    def again(self) -> "Predictions":
        """Returns an empty one for the same rows."""
        other = copy(self)
        other.argmax, other.log_prob = torch.full_like(self.argmax, -1), torch.full_like(self.log_prob, torch.nan)
        return other

    def add(self, rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        """Keeps the most likely token at `rows`, and the log-probability of the true one."""
        step = max(1, _CELLS_AT_ONCE // logits.shape[1])
        for some, part in zip(rows.split(step), logits.split(step), strict=True):
            gold = self.gold[some].to(part.device)[:, None]
            self.argmax[some] = part.argmax(1).cpu()
            self.log_prob[some] = part.log_softmax(1).gather(1, gold)[:, 0].cpu().double()

    def by_target(self) -> tuple[ndarray, ndarray]:
        """Whether each target was predicted, as 0 or 1, and its log-probability."""
        predicted, prompts = self.argmax[self.row_of, None], self.prompts
        if prompts.correct is None:
            right = (predicted == prompts.column("token")[:, None]).any(1)
        else:
            right = ((predicted == prompts.answer_tokens) & prompts.correct).any(1)
        return right.double().numpy(), self.log_prob[self.row_of].numpy()

    def measured(self) -> tuple[pd.DataFrame, Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
        """The keys of `evaluate`'s rows, each row's mean in each prompt, and the number of its targets there."""
        right, log_prob = self.by_target()
        targets = self.prompts.targets
        by = {("model", "accuracy"): right, ("model", "log_prob"): log_prob}
        by |= {(name, "accuracy"): targets[name].to_numpy(dtype=float) for name in REFERENCES if name in targets}
        groups = {(kind, ALL_OFFSETS): rows for kind, rows in by_kind(self.prompts).items()}
        offset = targets["offset"].to_numpy()
        groups |= {("all", int(place)): offset == place for place in np.unique(offset)}
        keys = pd.DataFrame(
            [(*who, *group) for who in by for group in groups], columns=["predictor", "metric", "kind", "offset"]
        )
        return keys, *prompt_means(self.prompts, list(by.values()), list(groups.values()))


def by_kind(prompts: Prompts) -> dict[str, Bool[ndarray, " target"]]:
    """Returns the targets of each kind that occurs, those of all kinds first."""
    kind = prompts.targets["kind"].to_numpy()
    return {"all": np.full(len(kind), True)} | {name: kind == name for name in KINDS if (kind == name).any()}


def prompt_means(
    prompts: Prompts, values: Sequence[Float[ndarray, " target"]], groups: Sequence[Bool[ndarray, " target"]]
) -> tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
    """Returns each prompt's mean over each group of targets, and their number; a row for each value and group."""
    prompt = prompts.targets["prompt"].to_numpy()
    counts = np.stack([np.bincount(prompt[rows], minlength=len(prompts)) for rows in groups])
    sums = [
        np.bincount(prompt[rows], weights=value[rows], minlength=len(prompts)) for value in values for rows in groups
    ]
    weights = np.tile(counts, (len(values), 1)).astype(float)
    return np.divide(np.stack(sums), weights, out=np.full_like(weights, np.nan), where=weights > 0), weights
