"""The attention of chosen heads on one prompt."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.hooks.head_names import Head
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.forward_pass import forward
from align_circuits.run.memory_checks import check_memory, of_attention
from align_circuits.run.options import RunOptions


def attention_from(
    model: HookedModel,
    prompt: Prompts,
    heads: Sequence[Head],
    positions: Int[Tensor, " row"],
    options: RunOptions = RunOptions(),
) -> dict[Head, Float[Tensor, "row pos"]]:
    """Returns the attention of each head from each of the positions of a single prompt, on the CPU.

    Raises:
        ValueError: Prompts that do not fit the model, or attention that does not fit into memory.
    """
    rows, length = len(positions), prompt.mask.shape[1]
    kept = len(heads) / model.cfg.n_heads  # layers' worth of heads

    def needed(length: int) -> float:
        return of_attention(model, min(rows, length), length, kept)

    check_memory("the attention of heads", model, needed, length, ", fewer heads or positions")
    patterns: dict[Head, Tensor] = {}

    def keep(_: Tensor, layer: int, pattern: Float[Tensor, "row head pos"]) -> None:  # one batch has all rows
        patterns.update({head: pattern[:, head[1]].cpu() for head in heads if head[0] == layer})

    forward(model, prompt, prompt=torch.zeros_like(positions), query=positions, on_pattern=keep, options=options)
    return {head: patterns[head] for head in heads}
