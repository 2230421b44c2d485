"""Weights of 4 or 8 bits, by bitsandbytes: for inference on models that do not fit otherwise."""

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from align_circuits.hooks.compat.stored_weights import dequantised

Quantization = Literal["4bit", "8bit"]


def quantization_config(kind: Quantization, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns how transformers quantises the matrices inside the layers while it reads them.

    - `"4bit"`: NF4 (Dettmers et al., 2023, "QLoRA"), dequantised to `dtype` in every product.
    - `"8bit"`: LLM.int8 (Dettmers et al., 2022), which rounds activations as well. Differences in the last bit, between
      engines or batch sizes, become steps of that rounding: numbers repeat to some hundredths of a nat only.

    Raises:
        ImportError: Without bitsandbytes.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"quantization={kind!r} needs bitsandbytes: pip install 'align-circuits[four-bit]', or leave it out"
        )
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def keep_exact(model: PreTrainedModel) -> None:
    """Lets 4-bit layers on a CPU compute with the weights that they store, on every CPU, in place.

    On some, bitsandbytes would pack the weights anew at the first run and round their scales to bf16.

    Raises:
        ValueError: bitsandbytes dequantises a layer wrongly on this CPU, as some of its kernels do where a row of
            weights is no multiple of a block of 64.
    """
    layers: Any = model.named_modules()
    for name, module in layers:
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or module.weight.device.type != "cpu":
            continue
        module.support_avx512bf16_for_cpu = False
        if not torch.allclose(_plainly(module.weight, state), dequantised(module).flatten().float(), rtol=1e-2):
            raise ValueError(
                f"bitsandbytes dequantises {name} ({'x'.join(map(str, state.shape))}) wrongly on this CPU: take a GPU, "
                "or compute with whole weights"
            )


def _plainly(packed: Tensor, state: Any) -> Tensor:
    """The weights by the definition of the format: two codes a byte, high one first, and a scale for each block."""
    bytes_ = packed.detach().view(torch.uint8).flatten()
    codes = torch.stack([bytes_ >> 4, bytes_ & 0xF], 1).flatten()[: state.shape.numel()].long()
    scales = state.absmax
    if state.nested:  # the scales are numbers of 8 bits themselves
        import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

        scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset
    return state.code[codes] * scales.repeat_interleave(state.blocksize)[: len(codes)]
