"""Parameters and provenance of a model, and whether prompts fit it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from align_circuits.hooks.compat import bridges, model_state, stored_weights
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import once_a_call
from align_circuits.jobs.identity import identity_of
from align_circuits.prompts.prompts import Prompts, vocabulary_hash
from align_circuits.tables.provenance import Provenance


def parameters_of(model: HookedModel, *, offloaded: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's parameters with Hugging Face's names, without the bridge's insertions.

    Those that are offloaded to memory or disk are read from there one at a time, or left out.
    """
    module = bridges.wrapped(model)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"a {type(model).__name__} has no parameters to read: give a torch.nn.Module with TransformerLens hooks"
        )
    for name, value in module.named_parameters():
        if offloaded or not value.is_meta:
            yield bridges.parameter_name(name), stored_weights.parameter_value(module, name, value).detach()


def device_of(model: HookedModel) -> torch.device:
    """Returns the device that reads tokens: of an offloaded embedding, where it is brought to be used."""
    return next(parameters_of(model))[1].device


def model_provenance(model: HookedModel) -> dict[str, Any]:
    """Returns what identifies a model: name, shape, dtype, device and a hash of the weights; from the hub, the commit.

    `stored_dtype` is that of the files it was read from, where the model has another one. Within a call of the package
    the weights are read once.
    """
    return dict(once_a_call(model, "provenance", partial(_provenance, model)))


def model_identity(model: HookedModel) -> dict[str, Any]:
    """Returns all of a model that its numbers rest on, for `identity_of`.

    Its provenance, every weight and buffer, the configurations, the plain attributes of its modules (an adapter's
    scale, a norm's epsilon), the classes of those, the hooks on them, and the tokenizer's vocabulary. Within a call of
    the package it is read once.

    Raises:
        Unidentified: A hook or a module of the user's whose identity cannot be told.
    """
    return once_a_call(model, "identity", partial(_identity, model))


def _identity(model: HookedModel) -> dict[str, Any]:
    tokenizer = getattr(model, "tokenizer", None)
    return {
        "provenance": model_provenance(model),
        "tokenizer": None if tokenizer is None else vocabulary_hash(tokenizer),
        "modules": identity_of(model_state.settings_of(model)),
        **{name: f"{value.dtype} {tuple(value.shape)} {_weighed(value)}" for name, value in parameters_of(model)},
    }


def _weighed(value: Tensor) -> int:
    """The sum of a tensor's bits as integers, each times an odd number of its own: no two entries can be swapped.

    It is exact on any device, which the values need not leave.
    """
    total, bits = 0, value.contiguous().flatten().view(_INTEGERS[value.element_size()])
    for start in range(0, len(bits), _AT_ONCE):
        chunk = bits[start : start + _AT_ONCE].long()
        # 2**64 / golden ratio, which spreads neighbours over all 64 bits (Knuth's multiplicative hashing)
        index = torch.arange(start, start + len(chunk), device=chunk.device) * -7046029254386353131
        total += int((chunk * ((index ^ (index >> 29)) | 1)).sum())
    return total % 2**64


def _provenance(model: HookedModel) -> dict[str, Any]:
    first, config = next(parameters_of(model))[1], model.cfg
    stored = getattr(bridges.wrapped(model), "stored_dtype", first.dtype)
    return {
        "class": type(model).__name__,
        "name": str(getattr(config, "model_name", "")),
        **({"revision": of} if (of := getattr(bridges.wrapped(model), "revision", None)) else {}),
        "architecture": str(getattr(config, "architecture", None) or type(model).__name__),
        **{name: int(getattr(config, name)) for name in SIZES},
        "dtype": _name(first.dtype),
        **({} if stored == first.dtype else {"stored_dtype": _name(stored)}),
        **({} if (kind := stored_weights.quantization_of(model)) is None else {"quantization": kind}),
        "device": str(first.device),
        "weights": _hash(parameters_of(model)),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def provenance_of(
    verb: str, model: HookedModel, prompts: Prompts, engine: str, settings: Mapping[str, Any] | None = None
) -> Provenance:
    """Returns where a measurement of a model on prompts came from."""
    return Provenance(verb, settings or {}, model_provenance(model), prompts.provenance, engine)


def _hash(parameters: Iterable[tuple[str, Tensor]]) -> str:
    lines = []
    for name, value in parameters:
        # Every weight is read once. The sum of bits as integers is exact on any device and in any order, but blind to
        # swapped heads: the bits of 1,024 evenly spaced entries show those.
        bits = value.contiguous().flatten().view(_INTEGERS[value.element_size()])
        sampled = bits[:: max(1, len(bits) // 1024)][:1024].tolist()
        total = torch.stack([some.sum(dtype=torch.int64) for some in bits.split(_AT_ONCE)]).sum()  # sum() widens a copy
        lines.append((name, f"{name} {tuple(value.shape)} {value.dtype} {int(total)} {sampled}\n"))
    return hashlib.sha256("".join(line for _, line in sorted(lines)).encode()).hexdigest()[:16]


SIZES = ("n_layers", "n_heads", "d_model", "d_head", "d_vocab", "n_ctx")
_AT_ONCE = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
