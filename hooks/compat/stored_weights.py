"""Where weights are and how they are stored: offloaded by accelerate, quantised, shared by heads, on which device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from align_circuits.hooks.compat.bridges import component, wrapped


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Lets transformers draw no progress bars, and draw them as before afterwards."""
    before = transformers_logging._tqdm_active
    transformers_logging._tqdm_active = False
    try:
        yield
    finally:
        transformers_logging._tqdm_active = before


@contextmanager
def onloaded(*modules: Any) -> Iterator[None]:
    """Brings parameters that accelerate keeps in memory or on disk until their layer runs; a module may be None."""
    with ExitStack() as stack:
        for module in modules:
            if module is not None and any(parameter.is_meta for parameter in module.parameters()):
                from accelerate.utils import align_module_device

                for submodule in module.modules():
                    # Not by hasattr: the modules of a bridge pass on the attributes of what they wrap.
                    if "_hf_hook" in vars(submodule):
                        stack.enter_context(align_module_device(submodule))
        yield


def parameter_value(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Returns the value of a parameter, which may be that of an offloaded layer."""
    if not value.is_meta:
        return value
    owner, _, attribute = name.rpartition(".")
    with onloaded(module := model.get_submodule(owner)):
        return getattr(module, attribute)


def norm_weights(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the scale and the shift of a norm, inside `onloaded` where they may be offloaded."""
    scale, shift = getattr(norm, "w", None), getattr(norm, "b", None)
    if scale is not None and scale.is_meta:  # a bridge does not see what accelerate brings
        scale, shift = component(norm).weight, getattr(component(norm), "bias", None)
    if scale is not None and type(component(norm)).__name__.endswith(("GemmaRMSNorm", "NemotronLayerNorm1P")):
        scale = scale + 1  # these, VaultGemma's too, store by how much it differs from 1
    return scale, shift


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate moves what the modules of a model read to their devices, or their weights."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def leave_indices(model: PreTrainedModel) -> None:
    """Keeps accelerate from moving `logits_to_keep`, indices for the last layer, to the device of the first."""
    hook = getattr(model, "_hf_hook", None)
    if hook is not None:
        skipped = [hook.skip_keys] if isinstance(hook.skip_keys, str) else hook.skip_keys or ()
        hook.skip_keys = [*skipped, "logits_to_keep"]


def device_of(module: nn.Module) -> torch.device:
    """Returns the device on which a module runs: of offloaded weights, where they are onloaded to."""
    first = next(module.parameters())
    if not first.is_meta:
        return first.device
    hooks = (getattr(submodule, "_hf_hook", None) for submodule in module.modules())
    return torch.device(next((hook.execution_device for hook in hooks if hook is not None and hook.offload), "meta"))


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 by instructions of its own; elsewhere it takes several times float32's time.

    PyTorch's own question whether bfloat16 is supported on a CPU counts emulation. Devices other than CPUs and CUDA's
    are not asked, and taken to have it.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return True
    if not hasattr(torch.cpu, "get_capabilities"):  # before PyTorch 2.11
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def head_weight(attention: Any, name: str, d_head: int) -> Tensor | None:
    """Returns `W_Q`, ..., `b_O` of an attention layer, with a row for each key head; None where it has no such bias.

    A grouped `HookedTransformer` repeats `W_K` and `W_V` for every head, and has the smaller ones as `_W_K`, `_W_V`;
    one that was ungrouped computes with the repeated ones. An adapter counts as far as it is merged.
    """
    letter = name[-1]
    projection = component(getattr(attention, letter.lower(), None))
    if name.startswith("W_"):
        linear = getattr(projection, "base_layer", projection)  # a bridge reads the weight of an adapter transposed
        if is_quantised(linear):
            return _heads_of(dequantised(linear), letter, d_head)
        if linear is not projection:
            weight = linear.weight.detach() if isinstance(linear, nn.Linear) else linear.weight.detach().T
            return _heads_of(weight, letter, d_head)
    with onloaded(component(attention)):
        repeated = getattr(getattr(attention, "cfg", None), "ungroup_grouped_query_attention", False)
        weight = getattr(attention, name if repeated else f"_{name}", getattr(attention, name, None))
    return None if weight is None else weight.detach()


def quantization_of(model: Any) -> str | None:
    """Returns how the weights of a Hugging Face model, or of that in a bridge, are quantised; None if they are not."""
    config = getattr(getattr(wrapped(model), "hf_quantizer", None), "quantization_config", None)
    if config is None:
        return None
    bits = [name for name in ("4bit", "8bit") if getattr(config, f"load_in_{name}", False)]
    return bits[0] if bits else str(getattr(config, "quant_method", type(config).__name__))


def is_quantised(module: Any) -> bool:
    """Whether a linear layer stores codes, and not its weights."""
    return isinstance(module, nn.Linear) and not module.weight.is_floating_point()


def dequantised(linear: Any) -> Tensor:
    """Returns the weight with which a 4-bit layer computes, `[out in]`, as every `nn.Linear` has it."""
    if getattr(linear.weight, "quant_state", None) is None:
        raise ValueError(
            "edges and direct effects need the weights of the heads, but this model computes with 8-bit codes of its "
            "activations, which no weights stand for: load it with quantization='4bit', or without"
        )
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state)


def _heads_of(weight: Tensor, letter: str, d_head: int) -> Tensor:
    """`W_Q`, `W_K`, `W_V` `[head d_model d_head]` or `W_O` `[head d_head d_model]` of a weight `[out in]`."""
    if letter == "O":
        return weight.unflatten(1, (-1, d_head)).permute(1, 2, 0)
    return weight.unflatten(0, (-1, d_head)).transpose(1, 2)


def forget_quantization(model: PreTrainedModel) -> None:
    """Makes a model that was dequantized a plain one, which can be saved."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
