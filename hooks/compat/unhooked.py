"""Parts of a model as functions, without the hooks around them."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from align_circuits.hooks.compat.bridges import component
from align_circuits.hooks.compat.stored_weights import device_of
from align_circuits.hooks.compat.user_code import has_own_forward


def embed(bridge: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns the residual stream before the first layer, without hooks; GPT-2 adds an embedding of positions."""
    residual = component(bridge.embed)(tokens)
    if (of_positions := getattr(bridge, "pos_embed", None)) is not None:
        residual = residual + component(of_positions)(positions)
    return residual


def unembed(bridge: Any, residual: Tensor) -> Tensor:
    """Returns logits from the last residual stream, without hooks, on the device of the first layer."""
    norm = component(bridge.ln_final)
    return component(bridge.unembed)(norm(residual.to(device_of(norm)))).to(device_of(component(bridge.embed)))


def norm(module: Any, residual: Tensor) -> Tensor:
    """Returns what a norm makes of the residual stream, without hooks.

    transformers' RMSNorm (the one with `variance_epsilon`) is written out with fewer passes over memory. In float32
    alone: for narrower types transformers rounds in between. An offloaded weight comes when the module is called.
    """
    module = component(module)
    written_out = hasattr(module, "variance_epsilon") and "weight" in module._parameters and not has_own_forward(module)
    if residual.dtype != torch.float32 or not written_out or module.weight.is_meta:
        return module(residual)
    mean_square = torch.linalg.vector_norm(residual, dim=-1, keepdim=True).square_().div_(residual.shape[-1])
    return torch.mul(residual, mean_square.add_(module.variance_epsilon).rsqrt_()).mul_(module.weight)


def mlp(module: Any, residual: Tensor) -> Tensor:
    """Returns the output of an MLP, without hooks.

    A SwiGLU runs transformers' own operations in its order, but writes over tensors that are not needed again.
    """
    module = component(module)
    gated = hasattr(module, "gate_proj") and type(module.act_fn) in (nn.SiLU, SiLUActivation)
    if not gated or any(map(has_own_forward, (module, module.act_fn))):
        return module(residual)
    gate = nn.functional.silu(module.gate_proj(residual), inplace=True)
    return module.down_proj(gate.mul_(module.up_proj(residual)))


def mlp_contribution(block: Any, residual: Tensor) -> Tensor:
    """Returns what the MLP or the experts of a block make of a normed residual stream, without hooks, unscaled.

    OPT has the parts of its MLP in the layer itself; BLOOM's and MPT's add the stream by themselves; GPT-OSS's returns
    its router's scores too.
    """
    module = component(block.mlp)
    if module is component(block):
        return component(module.fc2)(module.activation_fn(component(module.fc1)(residual)))
    if [*signature(module.forward).parameters][1:2] == ["residual"]:
        return module(residual, torch.zeros_like(residual))
    output = module(residual)
    return output[0] if isinstance(output, tuple) else output
