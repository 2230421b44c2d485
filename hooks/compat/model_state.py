"""What a model's numbers rest on beside its parameters, and how it is put back as it was."""

import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from align_circuits.hooks.compat import rotary_embeddings
from align_circuits.hooks.compat.bridges import modules_of, wrapped
from align_circuits.hooks.compat.user_code import LIBRARIES, has_own_forward, is_of_library

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "fwd_hooks",
    "bwd_hooks",
)
"""Where PyTorch keeps the hooks of a module, in dictionaries to which handles refer; then TransformerLens, in lists."""


_LEFT_BEHIND = ("_attn_implementation_internal", "_block_alias_cache", "_fired_hook_out", "_pattern")
"""Other attributes of modules and configurations that running a model changes; `RunOptions.engine` says which attention
runs."""


_ABSENT = object()

_USUAL = {"training": False, "forward": _ABSENT, "context_level": 0, "_is_full_backward_hook": None}
"""Attributes of modules that running a model sets, with the values that they mostly have: the mode, the depth of hooks,
and what stands for a method while the attention function is replaced."""

_NO_SETTINGS = {"_buffers", *_HOOKS, *_USUAL, *_LEFT_BEHIND}


def settings_of(model: Any, *, persistent: bool = True) -> list[Any]:
    """Returns what a model's numbers rest on beside its parameters, module by module, for `identity_of`.

    Buffers (without `persistent` only those that checkpoints do not hold), configurations, plain attributes, functions,
    and the hooks that are not the libraries' own. What running leaves behind is left out.
    """
    configs: dict[int, Any] = {}
    settings: list[Any] = []
    for module in modules_of(model, wrapped(model)):
        buffers = module._buffers.keys() if persistent else sorted(module._non_persistent_buffers_set)
        state: dict[str, Any] = {name: module._buffers[name] for name in buffers}
        for name, value in vars(module).items():
            if name in _HOOKS:
                state[name] = [hook for hook in _functions_of(value) if not is_of_library(hook)]
            elif name == "forward" and has_own_forward(module):
                state[name] = value
            elif name in ("config", "cfg") and hasattr(value, "__dict__"):
                if id(value) not in configs:
                    configs[id(value)] = _settings(vars(value))
                state[name] = configs[id(value)]
        attributes = {}
        if not is_of_library(type(module), (*LIBRARIES, "align_circuits")):  # may compute with anything
            left_out = {"_parameters", "_modules", *_NO_SETTINGS}
            attributes = {name: value for name, value in vars(module).items() if name not in left_out}
        state |= attributes | _settings(vars(module))
        for name in rotary_embeddings.overwritten_in(module):  # they follow from what stays
            state.pop(name, None)
        settings.append((type(module), state))
    return settings


def _settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those attributes that are settings: neither modules and parameters nor what running leaves behind."""
    return {name: value for name, value in attributes.items() if name not in _NO_SETTINGS and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int | tuple) and _is_setting(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_setting, value))
    plain = bool | int | float | str | Tensor | torch.dtype | torch.device | FunctionType
    return value is None or (isinstance(value, plain) and not isinstance(value, nn.Parameter))


def _functions_of(hooks: Any) -> list[Any]:
    """The functions that a module calls: PyTorch keeps them by number, TransformerLens by their handles."""
    if isinstance(hooks, Mapping):
        return [*hooks.values()]
    return [getattr(handle, "user_hook", None) or handle.hook.hooks_dict_ref().get(handle.hook.id) for handle in hooks]


def remembered(model: Any) -> Callable[..., None]:
    """Returns a function that puts a model, autograd and the generator back to where they are now.

    It takes `generator`, whether to put PyTorch's global generator back too. Hooks that were added go; one that removed
    itself meanwhile does not come back.
    """
    # Few modules have hooks or unusual attributes: only these are written down, which takes a millisecond.
    modules = [vars(module) for module in modules_of(model, wrapped(model))]
    hooked = {(id(module), name): list(module[name]) for module in modules for name in _HOOKS if module.get(name)}
    unusual = {
        (id(module), name): module[name]
        for module in modules
        for name, usual in _USUAL.items()
        if module.get(name, usual) is not usual
    }
    configs = {id(config): vars(config) for module in modules if hasattr(config := module.get("config"), "__dict__")}
    attention = [(config, config.get("_attn_implementation_internal")) for config in configs.values()]
    adapters = [
        (merged, list(merged), weights := vars(module["_modules"]["base_layer"])["_parameters"], weights.get("weight"))
        for module in modules
        if isinstance(merged := module.get("merged_adapters"), list)
    ]
    unique = {id(tied): tied for module in modules for tied in module["_parameters"].values() if tied is not None}
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in unique.values()]
    grad_enabled, generator_state = torch.is_grad_enabled(), torch.get_rng_state()

    def restore(*, generator: bool) -> None:
        torch.set_grad_enabled(grad_enabled)
        for module in modules:
            for name in _HOOKS:
                if hooks := module.get(name):
                    before = hooked.get((id(module), name), [])
                    # In place: handles hold these very lists and dictionaries, and remove their hooks from them.
                    if isinstance(hooks, list):
                        hooks[:] = [handle for handle in hooks if any(handle is old for old in before)]
                    else:
                        for handle in [handle for handle in hooks if handle not in before]:
                            del hooks[handle]
            for name, usual in _USUAL.items():
                before = unusual.get((id(module), name), usual)
                if before is not module.get(name, usual):
                    module[name] = before
                    if before is _ABSENT:
                        del module[name]
        for merged, before, weights, weight in adapters:
            if merged != before or weights.get("weight") is not weight:
                merged[:], weights["weight"] = before, weight
        for config, implementation in attention:
            config["_attn_implementation_internal"] = implementation
        for parameter, requires_grad, grad in parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad
        if generator:
            torch.set_rng_state(generator_state)

    return restore


def remembered_filters() -> Callable[[], None]:
    """Returns a function that puts the filters of warnings back to what they are now."""
    filters: Any = warnings.filters  # a list, though annotated as a sequence
    before = list(filters)

    def restore() -> None:
        if warnings.filters is not filters or filters != before:
            warnings.filters = filters
            filters[:] = before
            with warnings.catch_warnings():  # its end tells the interpreter that the filters have changed
                pass

    return restore
