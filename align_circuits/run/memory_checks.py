"""Refuses what does not fit into memory: what verbs take beside the model, estimated before anything runs.

The factors were measured on Llamas of several depths and widths (`tests/run/test_memory_checks.py`), where they are
right within 30%. They count what PyTorch holds at once; of what it gives back a process may keep some.
"""

from collections.abc import Callable
from typing import Any

import torch

from align_circuits.hooks.compat.attention_functions import has_fused_attention
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models.folder_checks import memory_of_machine, readable_size
from align_circuits.models.parameters import parameters_of
from align_circuits.run.batch_sizes import NUMBERS_CACHED, key_width, mlp_width

COPIES_OF_LOGITS = 5
"""Logits, their softmax, and their gradients, in float32."""


def of_gradients(model: HookedModel, tokens: int, logits: int) -> float:
    """Returns the bytes of a pass forward and back, beside two runs whose activations are kept.

    Args:
        model: The model.
        tokens: In a batch.
        logits: The numbers of all logits of a batch, at the positions that are read.
    """
    config, size = model.cfg, _bytes_of(model)
    layer = 14 * config.d_model + 4 * mlp_width(config)
    return size * tokens * (config.n_layers * layer + 4.5 * config.d_model) + 4 * COPIES_OF_LOGITS * logits


def of_edges(model: HookedModel, tokens: int, logits: int) -> float:
    """Returns the bytes of gradients at all edges, whose senders' outputs are kept apart; arguments as above."""
    senders = 1 + model.cfg.n_layers * (model.cfg.n_heads + 1)
    written = 1.35 * senders * model.cfg.d_model
    return of_gradients(model, tokens, logits) + _bytes_of(model) * tokens * written


def of_sweeps(model: HookedModel, prompts: int, length: int, tokens: int, logits: int) -> float:
    """Returns the bytes of edited runs on prompts whose unedited runs are kept, and of their first-order effects.

    Args:
        model: The model.
        prompts: Whose keys and values of all layers are kept.
        length: Of a prompt.
        tokens: In a batch.
        logits: As of `of_gradients`.
    """
    config = model.cfg
    kept = min(NUMBERS_CACHED, 2 * config.n_layers * key_width(config) * prompts * length)
    return _bytes_of(model) * kept + 0.3 * of_gradients(model, tokens, logits)


def of_attention(model: HookedModel, rows: int, length: int, layers: float) -> float:
    """Returns the bytes of rows of the attention of some layers that are kept, beside those of the one that runs."""
    return 4 * model.cfg.n_heads * rows * length * (layers + 1.4)


def of_training(
    model: HookedModel, prompts: int, length: int, logits: int, layers: int, dropped: int, *, recomputed: bool
) -> float:
    """Returns the bytes of a step of training with LoRA.

    Args:
        model: The model.
        prompts: In a batch.
        length: Of a prompt.
        logits: As of `of_gradients`.
        layers: From the lowest one that is tuned to the last one.
        dropped: How many matrices of a layer have dropout at their input.
        recomputed: Whether activations are computed anew in the pass back.
    """
    config = model.cfg
    layer = (5.7 + 1.5 * dropped) * config.d_model + 2.25 * mlp_width(config)
    if not has_fused_attention(model):
        layer += 1.45 * config.n_heads * length
    kept = layers * config.d_model + 1.4 * layer if recomputed else (layers + 0.5) * layer
    return _bytes_of(model) * prompts * length * kept + 4 * COPIES_OF_LOGITS * logits


def check_memory(what: str, model: HookedModel, needed: Callable[[int], float], length: int, remedy: str = "") -> None:
    """Raises a ValueError unless what a verb takes fits into the memory of the machine, or of its GPU.

    Args:
        what: The verb, for people.
        model: The model.
        needed: The bytes by the length of the prompts.
        length: Of these prompts.
        remedy: What else helps than shorter prompts.
    """
    device = next(parameters_of(model))[1].device
    on_gpu = device.type == "cuda"
    # All of it and not what is free, of which PyTorch's own cache, ready for use, is no part.
    limit = torch.cuda.mem_get_info(device)[1] if on_gpu else memory_of_machine()
    if needed(length) <= limit:
        return
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
    fitting = f" (of {low:,} tokens they would fit)" if low else ""
    raise ValueError(
        f"{what} on prompts of {length:,} tokens takes some {readable_size(int(needed(length)))} of memory beside the "
        f"model, but {'this GPU' if on_gpu else 'this machine'} has {readable_size(limit)}: give shorter prompts"
        f"{fitting}{remedy}, or take a larger machine"
    )


def _bytes_of(model: Any) -> int:
    """The bytes of a number of an activation: that of a weight, or of half precision where weights are quantised."""
    return max(next(parameters_of(model))[1].element_size(), 2)
