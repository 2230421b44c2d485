"""Hooks and forward passes that a user has put on a model, which may change what it computes."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from align_circuits.hooks.compat.bridges import component, evaluation_of, is_bridge, modules_of, wrapped
from align_circuits.hooks.compat.stored_weights import device_of


def is_hooked(module: nn.Module) -> bool:
    """Whether anything is registered that would see or change what the module takes or gives."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in hooks)


def is_compiled(module: Any) -> bool:
    """Whether torch.compile replaced a module, what calls it, or its forward pass."""
    inside = vars(module) if isinstance(module, nn.Module) else {}
    compiled = hasattr(inside.get("forward"), "_torchdynamo_orig_callable") or "_orig_mod" in inside.get("_modules", {})
    return compiled or inside.get("_compiled_call_impl") is not None


def hooked_points(bridge: Any) -> list[str]:
    """Returns the hook points with a hook; what a bridge attaches for its other points (OPT's MLP) does not count."""

    def is_own(handle: Any) -> bool:
        return getattr(handle.user_hook, "__module__", "").startswith("transformer_lens.model_bridge.")

    points = bridge.hook_dict.items()
    return sorted(name for name, point in points if not all(map(is_own, (*point.fwd_hooks, *point.bwd_hooks))))


LIBRARIES = ("transformer_lens", "transformers", "accelerate", "peft", "torch")
"""Whose own hooks on modules change nothing of what a model computes."""


def hooked_modules(modules: Sequence[nn.Module]) -> list[str]:
    """Returns the types of modules with a PyTorch hook of the user's, which may change what they compute."""
    return sorted({type(module).__name__ for module in modules if _has_own_hook(module)})


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward pass is the user's: of the class, or put in its place on the module itself."""
    forward = vars(module).get("forward", type(module).forward)
    return not is_of_library(forward, (*LIBRARIES, "align_circuits"))


def type_with_own_forward(bridge: Any) -> str | None:
    """Returns the type of a module whose forward pass is the user's, among those that replay runs part by part."""
    model = wrapped(bridge)
    modules = [model, model.base_model]
    for block in bridge.blocks:
        modules += [block, component(block), block.attn, component(block.attn)]
    return next((type(module).__name__ for module in modules if has_own_forward(module)), None)


def uncalled_user_code(bridge: Any) -> str | None:
    """Returns what the user has changed and the bridge does not call: a module's hook or forward pass, by its type.

    A bridge computes attention, most norms and MLPs with a fused projection itself, from the weights of Hugging Face's
    modules. Where the user has changed one of these, a run of two tokens tells; it need not reach every expert, so that
    other MLPs are left out. Attention functions of the user's are never called.
    """
    if not is_bridge(bridge):
        return None
    name = wrapped(bridge).config._attn_implementation
    if not is_of_library(AttentionInterface().get(name), (*LIBRARIES, "builtins", "align_circuits")):
        return f"model whose attention is {name!r}"
    names = ("embed_ln", "attn", "ln1", "ln1_post", "ln2", "ln2_post", "ln_final")
    parts = [getattr(owner, name, None) for owner in (bridge, *bridge.blocks) for name in names]
    parts += [mlp for block in bridge.blocks if hasattr(mlp := getattr(block, "mlp", None), "split_gate_up_matrix")]
    changed = {m for m in modules_of(*parts) if _has_own_hook(m) or ("forward" in vars(m) and has_own_forward(m))}
    if not changed:
        return None
    called: set[nn.Module] = set()
    handles = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in changed]
    try:
        with evaluation_of(modules_of(bridge, wrapped(bridge))), torch.no_grad():
            bridge(torch.zeros(1, 2, dtype=torch.long, device=device_of(wrapped(bridge))))
    finally:
        for handle in handles:
            handle.remove()
    return min((type(module).__name__ for module in changed - called), default=None)


def _has_own_hook(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(map(is_of_library, hooks))


def is_of_library(function: Any, libraries: Collection[str] = LIBRARIES) -> bool:
    """Whether a function, an object's class or what a `partial` calls is defined in one of these packages."""
    while isinstance(function, partial):
        function = function.func
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0] in libraries
