"""LoRA on a copy of a model that shares its weights, and the adapter's folder in PEFT's format."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from align_circuits.hooks.attention import why_not_plain
from align_circuits.hooks.compat import (
    attention_functions,
    bridges,
    fused_projections,
    rotary_embeddings,
    stored_weights,
    user_code,
)
from align_circuits.hooks.left_as_found import one_thread_at_a_time
from align_circuits.jobs.folders import replacing_in
from align_circuits.models.loading import BUNDLED, is_gguf
from align_circuits.models.quantization import keep_exact

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The matrices of a layer: of attention, and of an MLP with or without a gate."""

_MATRICES = (nn.Linear, Conv1D)


def unwrapped(bridge: Any) -> PreTrainedModel:
    """Returns the plain Hugging Face model inside a bridge, as a copy that shares its weights, frozen."""
    if reason := why_not_plain(bridge):
        raise ValueError(f"this model cannot be tuned: {reason}")
    original = bridges.wrapped(bridge)
    if any(hasattr(module, "is_tuned") for module in original.modules()):
        raise ValueError(
            "the model was tuned in this process, and a second adapter could not name it as its base: load the folder "
            "`adapter` that tune wrote to out, and tune that"
        )
    if any(hasattr(module, "base_layer") for module in original.modules()):
        raise ValueError(
            "the model has an adapter already: merge it first (merge_and_unload), save the merged model "
            "(save_pretrained), and load that folder"
        )
    if changed := next((m for m in original.modules() if "forward" in vars(m) and user_code.has_own_forward(m)), None):
        raise ValueError(
            f"the model has a forward pass of your own on a {type(changed).__name__}, which a copy to tune would "
            "share: give the module a class of your own, or remove it"
        )
    if (kind := stored_weights.quantization_of(original)) is not None:
        raise ValueError(
            f"tune takes a model whose weights are whole, not {kind}: load it without quantization; "
            "TuneConfig(four_bit=True) computes with 4 bits while it trains"
        )
    if stored_weights.is_spread(original):
        raise ValueError("tune takes a model on one device: load it without device_map (four_bit=True saves memory)")
    frozen = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=False) if type(weight) is nn.Parameter else weight
        for weight in original.parameters()
    }
    model = sharing(original, frozen)
    # Trained plain: a bridge runs every hook point, and PEFT would write its names into the adapter.
    bridges.strip_bridge(model)
    if attention_functions.has_fused_attention(bridge):
        model.set_attn_implementation("sdpa")
    for rotary in rotary_embeddings.rotating_by_length([*model.modules()]):
        rotary_embeddings.rotate_by_prompt(rotary)
    model.name_or_path = _name_of(bridge)
    return model


def sharing(model: PreTrainedModel, weights: dict[int, nn.Parameter]) -> PreTrainedModel:
    """Returns a copy whose parameters are the given ones, by the id of the original; no weight is copied."""
    # deepcopy looks every object up by its id in this memo, and takes what it finds there as the copy.
    return copy.deepcopy(model, dict(weights))


def _name_of(bridge: Any) -> str:
    """Returns the name by which an adapter refers to its base: of the package, on the hub, or an absolute path."""
    name = str(bridge.cfg.model_name)
    is_local = name not in BUNDLED and (Path(name).is_dir() or is_gguf(Path(name)))
    return str(Path(name).resolve()) if is_local else name


def with_adapter(
    model: PreTrainedModel,
    matrices: Sequence[Mapping[str, str]],
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
        matrices: For each layer where it has its matrices (`bridges.matrices_of`).
        names: The matrices to adapt, of `PROJECTIONS`.
        layers: The layers to adapt, from 0; None for all.
        r: The rank.
        alpha: The scale is alpha / r.
        dropout: The dropout of LoRA's input.
        seed: Fixes LoRA's first matrices; the second ones start at 0.

    Raises:
        ValueError: No such layer or matrix, a part of a fused matrix, or a rank above the size of the matrices.
    """
    from peft import LoraConfig, get_peft_model  # importing it takes seconds, and few calls need it

    n_layers = len(matrices)
    if layers is not None and (not layers or not all(0 <= layer < n_layers for layer in layers)):
        raise ValueError(f"layers={tuple(layers)}: the model has layers 0 to {n_layers - 1}")
    chosen: set[str] = set()
    modules = dict(model.named_modules())
    for layer in range(n_layers) if layers is None else layers:
        of_layer = {name: path for name, path in matrices[layer].items() if isinstance(modules.get(path), _MATRICES)}
        if missing := [name for name in names if name not in of_layer]:
            raise ValueError(
                f"layer {layer} of this {type(model).__name__} has no matrix {missing[0]!r} to adapt (a mixture of "
                f"experts has none in its MLPs): give projections among {', '.join(of_layer)}"
            )
        in_layer = {of_layer[name] for name in names}
        if left_out := [name for name, path in of_layer.items() if path in in_layer and name not in names]:
            fused = of_layer[left_out[0]]
            together = [name for name, path in of_layer.items() if path == fused]
            raise ValueError(
                f"a {type(model).__name__} computes {', '.join(together)} by one matrix ({fused}): give all of them as "
                f"projections, or none, not {', '.join(names)}"
            )
        chosen |= in_layer
    adapted: list[Any] = [modules[name] for name in chosen]
    # PEFT takes names or their ends; ends are shorter in the adapter's file, where no other module has the same.
    short = {name.rpartition(".")[2] for name in chosen}
    are_all = chosen == {name for name in modules if name.rpartition(".")[2] in short}
    largest = max(max(module.weight.shape) for module in adapted)
    if r > largest:
        raise ValueError(
            f"r={r:,}: the matrices to adapt have at most {largest:,} rows or columns; give a smaller rank"
        )
    lora = LoraConfig(
        r=r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=dropout,
        task_type="CAUSAL_LM",  # pyright: ignore[reportArgumentType]
        revision=getattr(model, "revision", None),
        target_modules=sorted(short if are_all else chosen),
        # GPT-2's Conv1D has its weight transposed.
        fan_in_fan_out=isinstance(adapted[0], Conv1D),
    )
    # Forked, since LoRA draws its first matrices from the global generator of their device.
    devices = [model.device] if model.device.type == "cuda" else []
    alone = one_thread_at_a_time(lambda: [torch.default_generator])
    with alone, torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # inside peft 0.21
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def is_fused(matrices: Sequence[Mapping[str, str]]) -> bool:
    """Whether a layer computes several projections by one matrix, of which a bridge splits copies."""
    return any(len({*of_layer.values()}) < len(of_layer) for of_layer in matrices)


def follow(model: PreTrainedModel, trained: PreTrainedModel) -> Callable[[Any], None]:
    """Gives a plain model, which shares the weights of one with adapters, the sums of both, in memory of their own.

    Returns:
        A function that computes them again, from the adapters as they are then. It takes the bridge around the model.
    """
    layers: dict[str, Any] = {name: layer for name, layer in trained.named_modules() if hasattr(layer, "lora_A")}
    sums: list[tuple[nn.Parameter, nn.Parameter, Any]] = []
    for name, layer in layers.items():
        weight = layer.base_layer.weight
        summed = nn.Parameter(weight.detach().clone(), requires_grad=False)
        plain: Any = model.get_submodule(name)
        plain.weight, plain.is_tuned = summed, True  # to be tuned again, its base would need a name
        sums.append((summed, weight, layer))

    def renew(bridge: Any) -> None:
        with torch.no_grad():
            for summed, weight, layer in sums:
                summed.copy_(weight + layer.get_delta_weight(layer.active_adapters[0]))
        fused_projections.split_anew(bridge)

    return renew


def quantise(model: PreTrainedModel) -> None:
    """Replaces the frozen matrices inside the layers by NF4 (Dettmers et al., 2023), in place.

    Raises:
        ImportError: Without bitsandbytes.
        ValueError: As `keep_exact`, or no matrix is a linear layer of PyTorch's own, as in GPT-2 and Falcon.
    """
    head = model.get_output_embeddings()
    matrices: list[tuple[nn.Module, str, nn.Linear]] = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child is not head and not child.weight.requires_grad
    ]
    if not matrices:
        raise ValueError(f"four_bit: a {type(model).__name__} has no linear layers of PyTorch's own; leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("four_bit needs bitsandbytes: pip install 'align-circuits[four-bit]', or leave it out")
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    for module, name, child in matrices:
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
