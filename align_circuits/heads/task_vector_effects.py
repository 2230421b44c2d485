"""Task vectors: mean activations at the last token, by task, and what the model answers if they are exchanged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import name_of
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import capture, forward
from align_circuits.run.options import RunOptions
from align_circuits.tables.tables import Table

UNSTEERED = -1.0
"""The `beta` of rows about the model as it is."""


@leaves_as_found
def representations(
    model: HookedModel, prompts: Prompts, names: Sequence[str], *, options: RunOptions = RunOptions()
) -> dict[str, Float[Tensor, "prompt d"]]:
    """Returns the activations at some hook points at the last token of each prompt, further axes flattened.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: What it reads.
        names: Hook points `[prompt pos ...]`, such as `"blocks.1.hook_attn_out"`.
        options: Engine and batch size.
    """
    captured = capture(model, prompts, names, options=options)
    # Prompts are padded on the left, so that the last column is the last token of each.
    return {name: values[:, -1].flatten(1) for name, values in captured.items()}


@leaves_as_found
def task_vectors(
    model: HookedModel, groups: Sequence[Prompts], layer: int, *, options: RunOptions = RunOptions()
) -> Float[Tensor, "group head d_head"]:
    """Returns, for each group of prompts, the mean of `z` of all heads of a layer at the last token.

    The output of the layer's attention is an affine map of it, so mixing these vectors with weights that sum to 1 is
    the same as mixing the mean outputs.

    Source: Hendel et al. (2023), "In-Context Learning Creates Task Vectors"; of attention outputs, Vasudeva et al.
    (2026), §3.4, whose printed 1/N is 1/K, the number of prompts.

    Args:
        model: A model with TransformerLens's hooks.
        groups: Prompts of each task.
        layer: The layer of the heads.
        options: Engine and batch size.

    Raises:
        ValueError: No group, or one without prompts.
    """
    if not len(groups) or not all(map(len, groups)):
        raise ValueError(f"{len(groups)} groups of {[*map(len, groups)]} prompts: give at least one, with prompts each")
    name = name_of("z", layer)
    return torch.stack([capture(model, prompts, [name], options=options)[name][:, -1].mean(0) for prompts in groups])


def replaced(
    prompts: Prompts, layer: int, vector: Float[Tensor, "head d_head"] | Float[Tensor, "prompt head d_head"]
) -> Patch:
    """Returns the edit that replaces `z` of all heads of a layer at the last token by a vector.

    Args:
        prompts: What the model will run on.
        layer: The layer of the heads.
        vector: The same for all prompts, or one for each.
    """
    n, length = prompts.mask.shape
    values = torch.zeros(n, length, *vector.shape[-2:], dtype=vector.dtype)
    values[:, -1] = vector
    # Without positions the patch would also write the zeros of the other columns.
    positions = torch.zeros(n, length, dtype=torch.bool)
    positions[:, -1] = True
    heads = [(layer, head) for head in range(vector.shape[-2])]
    return Patch(heads, "z", positions=positions, values={name_of("z", layer): values})


@leaves_as_found
def steer(
    model: HookedModel,
    prompts: Prompts,
    layer: int,
    source: Float[Tensor, "prompt head d_head"],
    target: Float[Tensor, "prompt head d_head"],
    answers: dict[str, Int[Tensor, " prompt"]],
    betas: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    *,
    options: RunOptions = RunOptions(),
) -> Table:
    """Replaces `z` of a layer's heads at the last token by (1 - β) v + β v', and ranks some answers.

    With β = 0 the context's own activation is replaced by its task's mean, which is not the identity: the rows with
    `beta` = `UNSTEERED` are the model as it is.

    Source: Vasudeva et al. (2026), §3.4, Fig. 8.

    Args:
        model: A model with TransformerLens's hooks.
        prompts: What it reads.
        layer: The layer of the vectors.
        source: v for each prompt, the vector of its own task (`task_vectors`).
        target: v' for each prompt, the vector of another task.
        answers: By name, a token for each prompt, such as the original task's answer and the target's.
        betas: Which mixtures.
        options: Engine and batch size.

    Returns:
        A table keyed by `beta`, `answer` and `metric`: `"rank"`, the number of tokens with a higher logit, from 0, ties
        counting one half; `"log_prob"`, in nats. 95% intervals over prompts.

    Raises:
        ValueError: No prompts, no answers, vectors or answers of another number or shape, a token that the model does
            not have, or `UNSTEERED` among the betas.
    """
    if not len(prompts) or not answers:
        raise ValueError(f"{len(prompts)} prompts, {len(answers)} answers: give at least one of each")
    if UNSTEERED in betas:
        raise ValueError(f"a beta of {UNSTEERED:g}, which in the table marks the model as it is: take another")
    of_heads = (len(prompts), model.cfg.n_heads, model.cfg.d_head)
    for name, vectors in (("source", source), ("target", target)):
        if tuple(vectors.shape) != of_heads:
            raise ValueError(
                f"{name} has shape {tuple(vectors.shape)}: give {of_heads}, a vector for each prompt and head"
            )
    for name, tokens in answers.items():
        if len(tokens) != len(prompts) or not 0 <= int(tokens.min()) <= int(tokens.max()) < model.cfg.d_vocab:
            raise ValueError(
                f"answers[{name!r}]: give one token for each of {len(prompts)} prompts, below {model.cfg.d_vocab}"
            )
    keys, values, engine = [], [], ""
    for beta in (UNSTEERED, *betas):
        edits: list[Edit] = []
        if beta != UNSTEERED:
            edits = [replaced(prompts, layer, (1 - beta) * source + beta * target)]
        logits, engine = _last_logits(model, prompts, edits, options)
        for name, tokens in answers.items():
            of_answer = logits.gather(1, tokens[:, None])
            # The answer's own logit is among the ties.
            rank = (logits > of_answer).sum(1) + 0.5 * ((logits == of_answer).sum(1) - 1)
            measured = {"rank": rank.double(), "log_prob": (of_answer[:, 0] - logits.logsumexp(1)).double()}
            keys += [{"beta": beta, "answer": name, "metric": metric} for metric in measured]
            values += [value.numpy() for value in measured.values()]
    settings = {"layer": layer, "betas": list(betas)}
    provenance = provenance_of("steer", model, prompts, engine, settings)
    stacked = np.stack(values)
    bounds: Any = {"bounded": False, "levels": True}
    return Table.from_prompts(
        pd.DataFrame(keys), stacked, np.ones_like(stacked), provenance, **bounds, group=prompts.group
    )


def _last_logits(
    model: HookedModel, prompts: Prompts, edits: Sequence[Edit], options: RunOptions
) -> tuple[Float[Tensor, "prompt d_vocab"], str]:
    """The logits at the last token of each prompt, and the engine that ran."""
    logits_of: dict[int, Tensor] = {}

    def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        # By row: where memory runs out, `forward` gives the same rows again in smaller batches.
        logits_of.update(zip(rows.tolist(), logits.cpu(), strict=True))

    n, length = prompts.mask.shape
    engine = forward(
        model,
        prompts,
        prompt=torch.arange(n),
        query=torch.full((n,), length - 1),
        on_logits=keep,
        edits=edits,
        options=options,
    )
    return torch.stack([logits_of[row] for row in range(n)]), engine
