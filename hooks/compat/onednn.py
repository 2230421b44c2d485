"""Products with weights by oneDNN, which uses AVX-512 on every processor that has it.

PyTorch multiplies float32 matrices by MKL, which on AMD's processors stays with AVX2, at half the speed.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def linear_layers() -> AbstractContextManager[Any]:
    """Runs linear layers in float32 by oneDNN for the length of a `with`, on processors with AVX-512.

    Their outputs differ from those of PyTorch by rounding. Gradients reach activations, never weights.
    """
    return _LinearLayers() if _applies() else nullcontext()


def _applies() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not torch.is_autocast_enabled("cpu")
    )


class _LinearLayers(TorchFunctionMode):
    """Takes over the calls of `nn.Linear`, and of GPT-2's `Conv1D`, which holds the transpose of its weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func is nn.functional.linear and _served(*args[:2]):
                return _Linear.apply(*args)
            if func is torch.addmm and _served(*args[1:]):
                bias, activation, weight = args
                return _Linear.apply(activation, weight.mT, bias)
        return func(*args, **(kwargs or {}))


def _served(activation: Tensor, weight: Tensor) -> bool:
    """Whether these are an activation and a weight in float32 on the CPU, neither quantised nor of a user's type."""
    return (
        type(activation) is Tensor
        and type(weight) is nn.Parameter
        and activation.dtype == weight.dtype == torch.float32
        and activation.device.type == weight.device.type == "cpu"
    )


class _Linear(torch.autograd.Function):
    """A linear layer of an activation, with its gradient."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.ops.mkldnn._linear_pointwise(activation, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return torch.ops.mkldnn._linear_pointwise(gradient, weight.mT, None, "none", [], ""), None, None
