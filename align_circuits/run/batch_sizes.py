"""Batches of prompts: how many fit, and smaller ones when memory runs out."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.hooks.compat import bridges
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts

CPU_TOKENS = 2048
"""Tokens a batch on the CPU: from about a thousand on, more were not faster (8 layers, width 512), only larger."""

NUMBERS_CACHED = 2**28
"""How many numbers of another run are cached at a time, and how many of unedited runs are kept."""


def in_batches(
    run: Callable[[Int[Tensor, " prompt"], int], None],
    prompts: Int[Tensor, " prompt"],
    length: int,
    tokens: int,
    *,
    halve_to: int | None,
) -> None:
    """Runs prompts batch by batch; when memory runs out, the same prompts come again in smaller batches.

    Args:
        run: Called with the prompts of a batch and with how many tokens a batch may hold; what it did before it ran
            out of memory must do no harm.
        prompts: All prompts.
        length: Tokens in a prompt.
        tokens: In a batch, which holds at least one prompt.
        halve_to: Down to how many the tokens of a batch are halved on out-of-memory; None: never.
    """
    while len(prompts):
        batch = prompts[: max(1, tokens // length)]
        try:
            run(batch, tokens)
        except RuntimeError as error:
            no_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # CUDA, CPU
            if halve_to is None or tokens // 2 < halve_to or not no_memory:
                raise
            # For all later batches too, which would run out as well.
            tokens //= 2
        else:
            prompts = prompts[len(batch) :]


def fitting_prompts(model: HookedModel, prompts: Prompts, device: torch.device, engine: str) -> int:
    """Returns how many prompts keep the device busy in one forward pass without filling its memory."""
    length, config = prompts.mask.shape[1], model.cfg
    if device.type != "cuda":
        return max(1, CPU_TOKENS // length)
    # Rough bounds of what a forward pass holds at once: a layer, the logits with their softmax, and the patterns, which
    # fused attention never makes. Half of the memory is left to all that is not counted.
    numbers = length * (12 * config.d_model + 4 * mlp_width(config)) + 2 * length * config.d_vocab
    numbers += 4 * config.n_heads * length * (length if engine == "reference" else 64)
    return max(1, int(torch.cuda.mem_get_info(device)[0] / 2 / (4 * numbers)))


def fitting_tokens(model: HookedModel, prompts: Prompts, device: torch.device) -> int:
    """Returns how many tokens of edited runs side by side keep the device busy without filling its memory."""
    if device.type != "cuda":
        return CPU_TOKENS
    length, config = prompts.mask.shape[1], model.cfg
    # The unedited run stays in memory for all layers: streams, keys, values and z.
    kept = 4 * config.n_layers * config.d_model
    numbers = kept + 16 * config.d_model + 4 * mlp_width(config) + 4 * config.n_heads * length + 2 * config.d_vocab
    return max(length, int(torch.cuda.mem_get_info(device)[0] / 2 / (4 * numbers)))


def is_padded_float64(model: Any, prompts: Prompts) -> bool:
    """Whether prompts run one by one: a bridge's masks hold the least float64, which some layers make -inf of.

    Rows of padding, which see nothing, then become NaN and spread.
    """
    first = next(model.parameters()) if bridges.is_bridge(model) else None
    return first is not None and first.dtype == torch.float64 and not bool(prompts.mask.all())


def mlp_width(config: Any) -> int:
    """Returns how wide the hidden layer of an MLP is."""
    # Configurations without a width mostly mean GPT-2's ratio. Only estimates of memory rest on it.
    return getattr(config, "d_mlp", None) or 4 * config.d_model


def key_width(config: Any) -> int:
    """Returns how wide a layer's keys are, those of all heads together; its values are as wide."""
    return (getattr(config, "n_key_value_heads", None) or config.n_heads) * config.d_head
