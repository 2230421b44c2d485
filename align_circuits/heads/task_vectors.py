"""Task vectors: what a model holds where it is about to answer, by task, and what it answers if that is replaced."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.names import name_of
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture, forward
from align_circuits.tables.tables import Provenance, Table

UNSTEERED = -1.0
"""The `beta` of rows about the model as it is."""


def representations(
    model: Any, prompts: Prompts, names: Sequence[str], **options: Any
) -> dict[str, Float[Tensor, "prompt d"]]:
    """Returns the activations at some hook points at the last token of each prompt, whatever they have flattened.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: What it reads.
        names: Hook points `[prompt pos ...]`, such as `"blocks.1.hook_attn_out"`.
        **options: `engine` and `batch_size`, as for `engine.capture`.
    """
    return {name: values[:, -1].flatten(1) for name, values in capture(model, prompts, names, **options).items()}


def task_vectors(
    model: Any, groups: Sequence[Prompts], layer: int, **options: Any
) -> Float[Tensor, "group head d_head"]:
    """Returns, for each group of prompts, the mean of what all heads of a layer read at the last token (`z`).

    The output of the layer's attention is an affine map of it, so mixing these vectors with weights that sum to 1 is
    the same as mixing the mean outputs.

    Source: Hendel et al. (2023), "In-Context Learning Creates Task Vectors"; of attention outputs, Vasudeva et al.
    (2026), §3.4, whose printed 1/N is 1/K, the number of prompts.

    Args:
        model: A model with TransformerLens's hooks.
        groups: Prompts of each task.
        layer: Where.
        **options: As for `engine.capture`.
    """
    name = name_of("z", layer)
    return torch.stack([capture(model, prompts, [name], **options)[name][:, -1].mean(0) for prompts in groups])


def replaced(
    prompts: Prompts, layer: int, vector: Float[Tensor, "head d_head"] | Float[Tensor, "prompt head d_head"]
) -> Patch:
    """Returns the edit that puts a vector in the place of what all heads of a layer read at the last token.

    Args:
        prompts: What the model will run on.
        layer: Where.
        vector: The same for all prompts, or one for each.
    """
    n, length = prompts.mask.shape
    values = torch.zeros(n, length, *vector.shape[-2:], dtype=vector.dtype)
    values[:, -1] = vector
    positions = torch.zeros(n, length, dtype=torch.bool)
    positions[:, -1] = True
    heads = [(layer, head) for head in range(vector.shape[-2])]
    return Patch(heads, "z", positions=positions, values={name_of("z", layer): values})


def steer(
    model: Any,
    prompts: Prompts,
    layer: int,
    source: Float[Tensor, "prompt head d_head"],
    target: Float[Tensor, "prompt head d_head"],
    answers: dict[str, Int[Tensor, " prompt"]],
    betas: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    **options: Any,
) -> Table:
    """Replaces what a layer's attention reads at the last token by (1 - β) v + β v', and ranks some answers.

    With β = 0 the context's own activation is replaced by its task's mean, which is not the identity: the rows with
    `beta` = `UNSTEERED` are the model as it is.

    Source: Vasudeva et al. (2026), §3.4, Fig. 8.

    Args:
        model: A model with TransformerLens's hooks.
        prompts: What it reads.
        layer: Where the vectors come from and go to.
        source: v for each prompt, the vector of its own task (`task_vectors`).
        target: v' for each prompt.
        answers: By name, a token for each prompt, such as the original task's answer and the target's.
        betas: Which mixtures.
        **options: `engine` and `batch_size`, as for `engine.forward`.

    Returns:
        A table keyed by `beta`, `answer` and `metric`: `"rank"`, the number of tokens with a higher logit, from 0, ties
        counting one half; `"log_prob"`, in nats. 95% bootstrap intervals over prompts.

    Raises:
        ValueError: No prompts, no answers, or `UNSTEERED` among the betas.
    """
    if not len(prompts) or not answers:
        raise ValueError(f"{len(prompts)} prompts, {len(answers)} answers: give at least one of each")
    if UNSTEERED in betas:
        raise ValueError(f"a beta of {UNSTEERED:g}, which in the table says that nothing is steered: take another")
    keys, values, ran = [], [], ""
    for beta in (UNSTEERED, *betas):
        edits: list[Edit] = []
        if beta != UNSTEERED:
            edits = [replaced(prompts, layer, (1 - beta) * source + beta * target)]
        logits, ran = _last_logits(model, prompts, edits, **options)
        for name, tokens in answers.items():
            own = logits.gather(1, tokens[:, None])
            others = (logits > own).sum(1) + 0.5 * ((logits == own).sum(1) - 1)
            measured = {"rank": others.double(), "log_prob": (own[:, 0] - logits.logsumexp(1)).double()}
            keys += [{"beta": beta, "answer": name, "metric": metric} for metric in measured]
            values += [value.numpy() for value in measured.values()]
    settings = {"layer": layer, "betas": list(betas)}
    provenance = Provenance("steer", settings, model_provenance(model), prompts.provenance, ran)
    stacked = np.stack(values)
    return Table.from_prompts(pd.DataFrame(keys), stacked, np.ones_like(stacked), provenance, bounded=False)


def _last_logits(
    model: Any, prompts: Prompts, edits: Sequence[Edit], **options: Any
) -> tuple[Float[Tensor, "prompt d_vocab"], str]:
    """The logits of the last token of each prompt, and what ran."""
    kept: dict[int, Tensor] = {}

    def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        kept.update(zip(rows.tolist(), logits.cpu(), strict=True))

    n, length = prompts.mask.shape
    ran = forward(
        model,
        prompts,
        prompt=torch.arange(n),
        query=torch.full((n,), length - 1),
        on_logits=keep,
        edits=edits,
        **options,
    )
    return torch.stack([kept[row] for row in range(n)]), ran
