"""LoRA on a copy of a model that shares its weights, and the adapter's folder in PEFT's format."""

import copy
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from align_circuits.hooks import compat
from align_circuits.hooks.attention import why_not_fast
from align_circuits.hooks.left_as_found import one_thread_at_a_time
from align_circuits.jobs.folders import replacing_in
from align_circuits.models.loading import BUNDLED, is_gguf
from align_circuits.models.quantization import keep_exact

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""Llama's matrices, without the suffix `_proj`."""


def unwrapped(bridge: Any) -> PreTrainedModel:
    """Returns the plain Hugging Face model inside a bridge, as a copy that shares its weights, frozen."""
    if reason := why_not_fast(bridge):
        raise ValueError(f"this model cannot be tuned: {reason}")
    original = compat.wrapped(bridge)
    if any(hasattr(module, "base_layer") for module in original.modules()):
        raise ValueError(
            "the model has an adapter already: merge it first (merge_and_unload) and load the merged model"
        )
    if (kind := compat.quantization_of(original)) is not None:
        raise ValueError(
            f"tune takes a model whose weights are whole, not {kind}: load it without quantization; "
            "TuneConfig(four_bit=True) computes with 4 bits while it trains"
        )
    if compat.is_spread(original):
        raise ValueError("tune takes a model on one device: load it without device_map (four_bit=True saves memory)")
    frozen = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=False) if type(weight) is nn.Parameter else weight
        for weight in original.parameters()
    }
    model = sharing(original, frozen)

    # A bridge wraps its components in place, inside the Hugging Face model: PEFT must see plain layers.
    def strip(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            inner = compat.without_bridge(child)
            buffers = dict(inner.named_buffers(recurse=False))
            if isinstance(inner, nn.Linear) and "bias" in buffers:  # zeros that the bridge added
                del inner.bias
                inner.register_parameter("bias", None)
            setattr(module, name, inner)
            strip(inner)

    strip(model)
    model.set_attn_implementation("sdpa")
    model.name_or_path = _name_of(bridge)
    return model


def sharing(model: PreTrainedModel, weights: dict[int, nn.Parameter]) -> PreTrainedModel:
    """Returns a copy whose parameters are the given ones, by the id of the original; no weight is copied."""
    # deepcopy looks every object up by its id in this memo, and takes what it finds there as the copy.
    return copy.deepcopy(model, dict(weights))


def _name_of(bridge: Any) -> str:
    """Returns the name by which an adapter refers to its base: of the package, on the hub, or an absolute path."""
    name, source = str(bridge.cfg.model_name), str(compat.wrapped(bridge).name_or_path)
    place = next((Path(place) for place in (name, source) if _is_local(place)), None)
    return name if name in BUNDLED or place is None or not _is_local(name) else str(place.resolve())


def _is_local(name: str) -> bool:
    return Path(name).is_dir() or is_gguf(Path(name))


def with_adapter(
    model: PreTrainedModel,
    *,
    names: Sequence[str],
    layers: Sequence[int] | None,
    r: int,
    alpha: float,
    dropout: float,
    seed: int,
) -> Any:
    """Adds LoRA to a model, in place, and returns its `PeftModel`.

    Args:
        model: A Hugging Face model; all its weights become frozen.
        names: The matrices to adapt, of `PROJECTIONS`.
        layers: The layers to adapt, from 0; None for all.
        r: The rank.
        alpha: The scale is alpha / r.
        dropout: The dropout of LoRA's input.
        seed: Fixes LoRA's first matrices; the second ones start at 0.

    Raises:
        ValueError: No such layer or matrix, or a rank above the size of the matrices.
    """
    from peft import LoraConfig, get_peft_model  # importing it takes seconds, and few calls need it

    n_layers = int(model.config.num_hidden_layers)
    if layers is not None and (not layers or not all(0 <= layer < n_layers for layer in layers)):
        raise ValueError(f"layers={tuple(layers)}: the model has layers 0 to {n_layers - 1}")
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if missing := [name for name in names if f"{name}_proj" not in modules]:
        raise ValueError(
            f"a {type(model).__name__} has no {missing[0]}_proj: only decoders with separate projections can be tuned, "
            "such as Llama, Qwen2, Qwen3 and Mistral"
        )
    projections = tuple(f"{name}_proj" for name in names)
    adapted: list[Any] = [module for name, module in model.named_modules() if name.endswith(projections)]
    largest = max(max(module.in_features, module.out_features) for module in adapted)
    if r > largest:
        raise ValueError(
            f"r={r:,}: the matrices to adapt have at most {largest:,} rows or columns; give a smaller rank"
        )
    lora = LoraConfig(
        r=r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=dropout,
        task_type="CAUSAL_LM",  # pyright: ignore[reportArgumentType]
        target_modules=[f"{name}_proj" for name in names],
        layers_to_transform=None if layers is None else list(layers),
    )
    devices = [model.device] if model.device.type == "cuda" else []
    alone = one_thread_at_a_time(lambda: [torch.default_generator])
    with alone, torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def quantise(model: PreTrainedModel) -> None:
    """Replaces the frozen matrices inside the layers by NF4 (Dettmers et al., 2023), in place.

    Raises:
        ImportError: Without bitsandbytes.
        ValueError: As `keep_exact`.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("four_bit needs bitsandbytes: pip install 'align-circuits[four-bit]', or leave it out")
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head and not child.weight.requires_grad:
                narrow = bnb.nn.Linear4bit(  # on "meta": elsewhere its initial weights would be drawn at random
                    child.in_features,
                    child.out_features,
                    child.bias is not None,
                    torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                narrow.weight = bnb.nn.Params4bit(child.weight.detach().clone(), requires_grad=False, quant_type="nf4")
                narrow.bias = child.bias
                setattr(module, name, narrow.to(child.weight.device))
    keep_exact(model)


def recompute(model: PreTrainedModel) -> None:
    """Makes the backward pass recompute activations instead of storing them."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # the older name warns from transformers 5.20 on
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.disable_input_require_grads()  # only reentrant checkpoints need them; gradients would reach all lower layers


def save_adapter(adapted: Any, folder: Path) -> None:
    """Writes an adapter; it is moved to the folder only once it is complete."""
    with replacing_in(folder) as new:
        adapted.save_pretrained(new, save_embedding_layers=False)  # otherwise PEFT queries the hub
        (new / "README.md").unlink()  # an empty template with the base's local path
