"""Rotary embeddings of transformers: their angles, and those that depend on the longest prompt of a batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from align_circuits.hooks.compat.bridges import component


def rotation(bridge: Any, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns cosines and sines of rotary embeddings, which a bridge's layers share; None where a model has none."""
    rotary = getattr(bridge, "rotary_emb", None)
    return None if rotary is None else component(rotary)(residual, positions)


def rotating_by_length(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns the rotary embeddings whose angles depend on the longest prompt of a batch ("longrope").

    "dynamic" ones do so beyond a model's context alone, which no prompt may exceed.
    """
    return [module for module in modules if overwritten_in(module)]


def overwritten_in(module: nn.Module) -> list[str]:
    """Returns the attributes of a module that a run overwrites by the length of its longest prompt ("longrope")."""
    kinds = vars(module).get("rope_type")
    prefixes = {f"{of_layers}_": kind for of_layers, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
    long = [prefix for prefix, kind in prefixes.items() if kind == "longrope"]
    return [f"{prefix}{name}" for prefix in long for name in ("inv_freq", "long_inv_freq")]


def rotate_by_prompt(rotary: Any) -> None:
    """Makes such an embedding rotate every prompt as alone, until its `forward` is put back.

    Left to itself transformers rotates all prompts of a batch by the factors of the longest.
    """
    vars(rotary)["forward"] = partial(_rotated_by_prompt, rotary.forward)  # which may be accelerate's


def _rotated_by_prompt(
    rotated: Callable[..., Any], residual: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> Any:
    """Cosines and sines `[prompt pos d]` of prompts with different lengths."""
    lengths = position_ids.amax(-1)
    angles: list[Tensor] = []
    for length in lengths.unique():
        of_length = lengths == length
        some_angles = rotated(residual, position_ids[of_length], *args, **options)
        angles = angles or [some.new_empty(len(lengths), *some.shape[1:]) for some in some_angles]
        for every, some in zip(angles, some_angles, strict=True):
            every[of_length] = some
    return tuple(angles)
