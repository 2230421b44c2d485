"""PEFT's LoRA layers computed in fewer products."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from align_circuits.hooks.compat.user_code import is_hooked


@contextmanager
def merged_adapters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Adds LoRA among some modules to the weights that it adapts, for the length of a `with`.

    It saves two products for each matrix and token.

    A copy of each weight takes its place, since models may share the weight itself; then the weight returns, untouched.
    Adapters stay apart where the sum would be rounded or is none: on weights narrower than float32, with other variants
    than plain LoRA, and where they are switched off.
    """
    replaced: list[tuple[Any, Any, nn.Parameter]] = []
    try:
        layers: list[Any] = [module for module in modules if "merged_adapters" in vars(module)]
        for layer in layers:
            from peft.tuners.lora import Linear  # imported already by whoever made the adapter

            # Not `isinstance`: subclasses may compute something else than W + s B A.
            if type(layer) is not Linear or layer.merged or layer.disable_adapters or layer.lora_variant:
                continue
            base: Any = layer.base_layer
            unrounded = base.weight.dtype in (torch.float32, torch.float64) and not base.weight.is_meta
            hooked = any(map(is_hooked, (layer, *layer.lora_A.values(), *layer.lora_B.values())))
            if unrounded and not hooked and not any(layer.lora_bias.values()):
                replaced.append((layer, base, base.weight))  # first, so that an interruption finds it below
                base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
                with torch.no_grad():
                    layer.merge()
        yield
    finally:
        for layer, base, weight in replaced:
            base.weight = weight
            layer.merged_adapters.clear()


def fuse_adapters(model: nn.Module) -> None:
    """Makes plain LoRA in a model train as one matrix with the weight that it adapts, for good.

    Forward and back it then takes one product for each token in place of three, and two sums of weights. No weight is
    kept or changed. Numbers differ by rounding.
    """
    from peft.tuners.lora import Linear  # imported already by whoever made the adapter

    for layer in model.modules():
        if type(layer) is Linear and type(layer.base_layer) is nn.Linear:
            vars(layer)["forward"] = partial(_adapted, layer)


def _adapted(layer: Any, tokens: Tensor, *args: Any, **options: Any) -> Tensor:
    """What a LoRA layer returns, in one product where that pays and the layer's dropout is 0."""
    if args or options:  # such as `adapter_names`, an adapter for each prompt
        return type(layer).forward(layer, tokens, *args, **options)
    base, names = layer.base_layer, layer.active_adapters
    (a, b, plain), n_tokens = _lora_of(layer, names), tokens.numel() // tokens.shape[-1]
    # The sum W + s B A costs rank x in x out, whatever the batch; the two products that it saves rank x (in + out) for
    # each token.
    pays = n_tokens * (base.in_features + base.out_features) > base.in_features * base.out_features
    if not (plain and pays and tokens.dtype == torch.float32) or torch.is_autocast_enabled(tokens.device.type):
        return type(layer).forward(layer, tokens)
    return _AdaptedLinear.apply(tokens, base.weight, base.bias, a, b, layer.scaling[names[0]])  # pyright: ignore[reportReturnType]


def _lora_of(layer: Any, names: Sequence[str]) -> tuple[Tensor | None, Tensor | None, bool]:
    """The two matrices of an adapter, and whether they and the weight in float32 are all that the layer computes."""
    if len(names) != 1 or layer.merged or layer.disable_adapters or layer.lora_variant or any(layer.lora_bias.values()):
        return None, None, False
    a, b = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight
    types = {a.dtype, b.dtype, layer.base_layer.weight.dtype}
    return a, b, types == {torch.float32} and isinstance(layer.lora_dropout[names[0]], nn.Identity)


class _AdaptedLinear(torch.autograd.Function):
    """y = x (W + s B A)^T + c, with W and c frozen.

    Of a gradient g of y those of x, A and B are g (W + s B A), s (g B)^T x and s g^T (x A^T).
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(tokens, weight, a, b)
        ctx.scaling = scaling
        return nn.functional.linear(tokens, torch.addmm(weight, b, a, alpha=scaling), bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - of one output
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        tokens, weight, a, b = ctx.saved_tensors
        # The sum of weights is made again: kept for all layers, they would take as much memory as the weights.
        of_tokens = gradient @ torch.addmm(weight, b, a, alpha=ctx.scaling) if ctx.needs_input_grad[0] else None
        output_rows, input_rows = gradient.flatten(0, -2), tokens.flatten(0, -2)
        of_a = (output_rows @ b).mul_(ctx.scaling).T @ input_rows
        of_b = output_rows.T @ (input_rows @ a.T).mul_(ctx.scaling)
        return of_tokens, None, None, of_a, of_b, None
