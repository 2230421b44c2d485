"""Products in bfloat16 at the speed of float32, on a processor without instructions for bfloat16."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from align_circuits.hooks.compat.stored_weights import has_fast_bfloat16

PRODUCTS: Mapping[str, int] = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,  # the second output, log sum exp, is float32 in any case
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}
"""What takes long without instructions, by its name in PyTorch, with how many of its outputs are in bfloat16."""


class WidenedProducts(TorchDispatchMode):
    """Computes matrix products and attention of bfloat16 tensors in float32, and rounds what they return to bfloat16.

    That is what instructions for bfloat16 do: products of two bfloat16 numbers are exact in float32, in which they are
    added up. Results differ by the order of additions, and in attention by weights that are not rounded.
    """

    outputs: Mapping[Any, int] = {getattr(torch.ops.aten, name).default: n for name, n in PRODUCTS.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        if func not in self.outputs or not any(map(_is_narrow, args)):
            return func(*args, **kwargs)
        wide = func(*map(_widened, args), **{name: _widened(each) for name, each in kwargs.items()})
        if isinstance(wide, Tensor):
            return wide.bfloat16()
        n = self.outputs[func]
        return *(each.bfloat16() for each in wide[:n]), *wide[n:]


def fast_bfloat16(narrow: bool, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context for computations on a device: `WidenedProducts`, if they are `narrow` and it needs that."""
    return WidenedProducts() if narrow and not has_fast_bfloat16(device) else nullcontext()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value
