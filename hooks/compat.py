"""All that relies on the insides of transformers, TransformerLens and PyTorch; no other module does.

Tested with the versions in `TESTED`. `tests/hooks/test_compat.py` fails when a name used here disappears, and
`pyproject.toml` excludes the next major versions until that test has run with them.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerFast
from transformers.activations import SiLUActivation
from transformers.masking_utils import AttentionMaskInterface

TESTED = {"transformers": "5.23.0", "transformer-lens": "4.3.0", "torch": "2.13.0"}
"""The versions that the whole suite ran with; `make test-tl3` also runs a `HookedTransformer` of TransformerLens 3."""


def wrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside a bridge, and any other model itself.

    A bridge keeps it in `original_model`, which is none of its submodules: `modules()` of a bridge does not reach it.
    """
    return getattr(model, "original_model", model)


def is_bridge(model: Any) -> bool:
    """Whether a model is a bridge over a Hugging Face model: those take its keywords, such as `logits_to_keep`."""
    return isinstance(getattr(model, "original_model", None), PreTrainedModel)


def has_changed_weights(bridge: Any) -> bool:
    """Whether a bridge computes with folded weights of its own (compatibility mode) and not with Hugging Face's."""
    return bool(bridge.compatibility_mode)


def component(part: Any) -> Any:
    """Returns the Hugging Face module inside a part of a bridge, and any other module itself.

    Called directly it runs without the hooks around it: replay and residual edges compute parts of a model on
    activations that no hook should receive.
    """
    return getattr(part, "original_component", part)


def without_bridge(module: nn.Module) -> nn.Module:
    """Returns the module that remains when all parts of a bridge around it are removed: one may wrap another."""
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

    while isinstance(module, GeneralizedComponent):
        module = module.original_component  # pyright: ignore[reportAssignmentType]
    return module


def strip_bridge(model: nn.Module) -> None:
    """Takes all parts of a bridge out of a Hugging Face model, in place: what remains runs as transformers made it.

    A bridge wraps the modules inside the model, adds biases of zeros, and gives Falcon's modules functions in place of
    methods, which run these modules even where they are called on copies.
    """
    for name, child in list(model.named_children()):
        inner = without_bridge(child)
        if isinstance(inner, nn.Linear) and "bias" in dict(inner.named_buffers(recurse=False)):
            del inner.bias
            inner.register_parameter("bias", None)
        if getattr(vars(inner).get("forward"), "__module__", "").startswith("transformer_lens"):
            del inner.forward
        setattr(model, name, inner)
        strip_bridge(inner)


def matrices_of(bridge: Any) -> list[dict[str, str]]:
    """Returns for each layer the names, in the Hugging Face model, of its matrices q, k, v, o, gate, up and down.

    A fused matrix stands for each part. Layers have those that TransformerLens maps: none of the MLP where it consists
    of experts, and no gate where the MLP has none.
    """
    found: list[dict[str, str]] = []
    for block in bridge.blocks:
        attention, mlp = block.attn, block.mlp
        within = {name: getattr(attention, name).name for name in ("q", "k", "v", "o")}
        if hasattr(attention, "split_qkv_matrix"):
            within |= dict.fromkeys(("q", "k", "v"), attention.qkv.name)
        matrices = {name: f"{block.name}.{attention.name}.{own}" for name, own in within.items()}
        if hasattr(mlp, "in") and hasattr(mlp, "out"):  # what experts have in their place: a router, called `gate`
            parts = {"gate": "gate", "up": "in", "down": "out"}
            within = {name: getattr(mlp, part).name for name, part in parts.items() if hasattr(mlp, part)}
            if hasattr(mlp, "split_gate_up_matrix"):
                within |= dict.fromkeys(("gate", "up"), mlp.fused_attr)
            stem = f"{block.name}.{mlp.name}" if mlp.name else block.name  # OPT has its parts in the layer itself
            matrices |= {name: f"{stem}.{own}" for name, own in within.items()}
        found.append(matrices)
    return found


def accepted(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those options that the forward pass of a Hugging Face model names: BLOOM takes no `position_ids`."""
    named = signature(type(getattr(model, "func", model)).forward).parameters
    return {name: value for name, value in options.items() if name in named}


def is_hooked(module: nn.Module) -> bool:
    """Whether anything is registered that would see or change what the module takes or gives."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in hooks)


def is_compiled(module: Any) -> bool:
    """Whether torch.compile replaced a module, what calls it, or its forward pass."""
    inside = vars(module) if isinstance(module, nn.Module) else {}
    compiled = hasattr(inside.get("forward"), "_torchdynamo_orig_callable") or "_orig_mod" in inside.get("_modules", {})
    return compiled or inside.get("_compiled_call_impl") is not None


def parameter_name(name: str) -> str:
    """Returns a parameter's name as Hugging Face spells it: a bridge inserts the module that holds a component."""
    return name.replace("._original_component", "")


@contextmanager
def brought(*modules: Any) -> Iterator[None]:
    """Brings parameters that accelerate keeps in memory or on disk until their layer runs; parts may be None."""
    with ExitStack() as stack:
        for module in modules:
            if module is not None and any(parameter.is_meta for parameter in module.parameters()):
                from accelerate.utils import align_module_device

                for part in module.modules():
                    if "_hf_hook" in vars(part):  # the parts of a bridge pass on the attributes of what they wrap
                        stack.enter_context(align_module_device(part))
        yield


def stored(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Returns the value of a parameter, which may be that of an offloaded layer."""
    if not value.is_meta:
        return value
    owner, _, attribute = name.rpartition(".")
    with brought(module := model.get_submodule(owner)):
        return getattr(module, attribute)


def norm_weights(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the scale and the shift of a norm, inside `brought` where they may be offloaded."""
    scale, shift = getattr(norm, "w", None), getattr(norm, "b", None)
    if scale is not None and scale.is_meta:  # a bridge does not see what is brought
        scale, shift = component(norm).weight, getattr(component(norm), "bias", None)
    if scale is not None and type(component(norm)).__name__ in ("GemmaRMSNorm", "NemotronLayerNorm1P"):
        scale = scale + 1  # these store by how much it differs from 1
    return scale, shift


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate moves what the modules of a model read to their devices, or their weights."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def leave_indices(model: PreTrainedModel) -> None:
    """Keeps accelerate from moving `logits_to_keep`, indices for the last layer, to the device of the first."""
    hook: Any = getattr(model, "_hf_hook", None)
    if hook is not None:
        hook.skip_keys = [
            *([hook.skip_keys] if isinstance(hook.skip_keys, str) else hook.skip_keys or ()),
            "logits_to_keep",
        ]


def device_of(module: nn.Module) -> torch.device:
    """Returns the device on which a module runs: of offloaded weights, where they are brought to."""
    first = next(module.parameters())
    if not first.is_meta:
        return first.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
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


def head_weight(attention: Any, name: str) -> Tensor | None:
    """Returns `W_Q`, ..., `b_O` of an attention layer, with a row for each key head; None where it has no such bias.

    A grouped `HookedTransformer` repeats `W_K` and `W_V` for every head, and has the smaller ones as `_W_K`, `_W_V`.
    """
    part, letter = getattr(attention, name[-1].lower(), None), name[-1]
    if name.startswith("W_") and part is not None and is_quantised(component(part)):
        return _dequantised_heads(component(part), letter, int(component(attention).head_dim))
    with brought(component(attention)):
        weight = getattr(attention, f"_{name}", getattr(attention, name, None))
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


def _dequantised_heads(linear: Any, letter: str, d_head: int) -> Tensor:
    """`W_Q`, `W_K`, `W_V` `[head d_model d_head]` or `W_O` `[head d_head d_model]` of a 4-bit layer."""
    if getattr(linear.weight, "quant_state", None) is None:
        raise ValueError(
            "edges and direct effects need the weights of the heads, but this model computes with 8-bit codes of its "
            "activations, which no weights stand for: load it with quantization='4bit', or without"
        )
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    weight = dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    if letter == "O":
        return weight.unflatten(1, (-1, d_head)).permute(1, 2, 0)
    return weight.unflatten(0, (-1, d_head)).transpose(1, 2)


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Returns z `[prompt pos head d_head]` as transformers computes it by default.

    Queries and keys come after rotation, `[prompt head pos d_head]`. The function is looked up by name, so that the
    numbers are those of the installed version to the bit.
    """
    return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)


def layer_of(attention: nn.Module) -> int:
    """Returns the layer of a Hugging Face attention module, which transformers sets for its key-value cache."""
    return int(attention.layer_idx)  # pyright: ignore[reportArgumentType]


def is_copy_for_mlp(model: Any, name: str) -> bool:
    """Whether the hook point of the stream between attention and MLP holds what the MLP reads, and no more.

    A bridge lets `hook_resid_mid` stand for the input of the MLP's norm: what is changed there reaches the MLP, but not
    the stream that passes it by. A `HookedTransformer` changes both.
    """
    point = model.hook_dict.get(name)
    return point is not None and name.endswith(".hook_resid_mid") and point.name != name


def has_fused_attention(bridge: Any) -> bool:
    """Whether transformers computes the attention of a bridge's model by PyTorch's kernel as it does without it.

    Its "sdpa" leaves the caps of scores out (Gemma 2), and classes say whether they know it (GPT-OSS has sinks).
    """
    return bool(wrapped(bridge)._supports_sdpa) and not caps_scores(bridge)


def caps_scores(bridge: Any) -> bool:
    """Whether a model caps its attention scores; TransformerLens's number for no cap is below 0."""
    return (getattr(bridge.cfg, "attn_scores_soft_cap", None) or 0) > 0


def register_attention(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Makes an attention function known to transformers, with the masks of "sdpa", which fused attention takes."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])


@contextmanager
def attention_function(
    bridge: Any, modules: Sequence[nn.Module], name: str, function: Callable[..., tuple[Tensor, None]]
) -> Iterator[None]:
    """Runs Hugging Face's own attention layers in a bridge of some modules, with one function for their attention.

    Its norms, too, run as they are in Hugging Face where no hook looks into them. One `with` may stand in another.
    """
    register_attention(name, function)
    layers = [block.attn for block in bridge.blocks]
    norms = [getattr(owner, norm, None) for owner in (bridge, *bridge.blocks) for norm in ("ln1", "ln2", "ln_final")]
    replaced = dict.fromkeys(layers, _attended) | {
        norm: _normed for norm in norms if getattr(norm, "use_native_layernorm_autograd", False)
    }
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    # Selected on the configurations themselves: there is no public way to read the selection that must be restored.
    configs = {id(owner.config): owner.config for owner in (*models, *(component(layer) for layer in layers))}
    implementations = {key: config._attn_implementation for key, config in configs.items()}
    forwards = {part: vars(part).get("forward") for part in replaced}
    try:
        for config in configs.values():
            config._attn_implementation = name
        for part, forward in replaced.items():
            # An instance's attribute comes before the method of its class: calls go to the wrapped layer until it is
            # removed, and the bridge's own attention is back.
            vars(part)["forward"] = partial(forward, part)
        yield
    finally:
        for part, forward in forwards.items():
            vars(part).pop("forward", None)
            if forward is not None:
                vars(part)["forward"] = forward
        for key, config in configs.items():
            config._attn_implementation = implementations[key]


@contextmanager
def merged_adapters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Adds LoRA among some modules to the weights that it adapts, for the length of a `with`.

    It saves two products for each matrix and token.

    A copy of each weight takes its place, since models may share the weight itself; then the weight returns, untouched.
    Adapters stay apart where the sum would be rounded or is none: on weights narrower than float32, with other variants
    than plain LoRA, and where they are switched off.
    """
    replaced: list[tuple[Any, nn.Module, nn.Parameter]] = []
    try:
        for layer in [module for module in modules if "merged_adapters" in vars(module)]:
            from peft.tuners.lora import Linear  # imported already by whoever made the adapter

            base: Any = layer.base_layer
            plain = type(layer) is Linear and not (layer.merged or layer.disable_adapters or layer.lora_variant)
            wide = base.weight.dtype in (torch.float32, torch.float64) and not base.weight.is_meta
            hooked = any(map(is_hooked, (layer, *layer.lora_A.values(), *layer.lora_B.values())))
            if plain and wide and not hooked and not any(layer.lora_bias.values()):
                replaced.append((layer, base, base.weight))
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
    (a, b, plain), rows = _lora_of(layer, names), tokens.numel() // tokens.shape[-1]
    pays = rows * (base.in_features + base.out_features) > base.in_features * base.out_features
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        tokens, weight, a, b = ctx.saved_tensors
        # The sum of weights is made again: kept for all layers, they would take as much memory as the weights.
        of_tokens = gradient @ torch.addmm(weight, b, a, alpha=ctx.scaling) if ctx.needs_input_grad[0] else None
        rows, given = gradient.flatten(0, -2), tokens.flatten(0, -2)
        of_a = (rows @ b).mul_(ctx.scaling).T @ given
        of_b = rows.T @ (given @ a.T).mul_(ctx.scaling)
        return of_tokens, None, None, of_a, of_b, None


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


def hooked_points(bridge: Any) -> list[str]:
    """Returns the hook points with a hook; what a bridge attaches for its other points (OPT's MLP) does not count."""

    def is_own(handle: Any) -> bool:
        return getattr(handle.user_hook, "__module__", "").startswith("transformer_lens.model_bridge.")

    points = bridge.hook_dict.items()
    return sorted(name for name, point in points if not all(map(is_own, (*point.fwd_hooks, *point.bwd_hooks))))


_LIBRARIES = ("transformer_lens", "transformers", "accelerate", "peft", "torch")
"""Whose own hooks on modules change nothing of what a model computes."""


def hooked_modules(modules: Sequence[nn.Module]) -> list[str]:
    """Returns the types of modules with a PyTorch hook of the user's, which may change what they compute."""
    return sorted({type(module).__name__ for module in modules if _has_own_hook(module)})


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward pass is the user's: of the class, or put in its place on the module itself."""
    forward = vars(module).get("forward", type(module).forward)
    return not _is_of_library(forward, (*_LIBRARIES, "align_circuits"))


def of_own_forward(bridge: Any) -> str | None:
    """Returns the type of a module whose forward pass is the user's, among those that replay runs part by part."""
    model = wrapped(bridge)
    layers = [part for block in bridge.blocks for part in (block, component(block), block.attn, component(block.attn))]
    return next((type(part).__name__ for part in (model, model.base_model, *layers) if has_own_forward(part)), None)


def unheard(bridge: Any) -> str | None:
    """Returns what the user has changed and the bridge does not call: a module's hook or forward pass, by its type.

    A bridge computes attention and most norms itself, from the weights of Hugging Face's modules. Where the user has
    changed one of these, a run of two tokens tells. Attention functions of the user's are never called.
    """
    if not is_bridge(bridge):
        return None
    name = wrapped(bridge).config._attn_implementation
    if not _is_of_library(AttentionInterface().get(name), (*_LIBRARIES, "builtins", "align_circuits")):
        return f"model whose attention is {name!r}"
    names = ("attn", "ln1", "ln1_post", "ln2", "ln2_post", "ln_final")
    parts = modules_of(*(getattr(owner, name, None) for owner in (bridge, *bridge.blocks) for name in names))
    own = {part for part in parts if _has_own_hook(part) or ("forward" in vars(part) and has_own_forward(part))}
    if not own:
        return None
    called: set[nn.Module] = set()
    handles = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in own]
    training = [module for module in modules_of(bridge, wrapped(bridge)) if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            bridge(torch.zeros(1, 2, dtype=torch.long, device=device_of(wrapped(bridge))))
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return min((type(module).__name__ for module in own - called), default=None)


def _has_own_hook(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(map(_is_of_library, hooks))


def _is_of_library(function: Any, libraries: Collection[str] = _LIBRARIES) -> bool:
    while isinstance(function, partial):
        function = function.func
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0] in libraries


def settings_of(model: Any, *, persistent: bool = True) -> list[Any]:
    """Returns what a model's numbers rest on beside its parameters, module by module, for `identity_of`.

    Buffers (without `persistent` only those that checkpoints do not hold), configurations, plain attributes, functions,
    and the hooks that are not the libraries' own. What running leaves behind is left out.
    """
    configs: dict[int, Any] = {}
    settings: list[Any] = []
    for module in modules_of(model, wrapped(model)):
        buffers = module._buffers.keys() if persistent else module._non_persistent_buffers_set
        state: dict[str, Any] = {name: module._buffers[name] for name in buffers}
        for name, value in vars(module).items():
            if name in _HOOKS:
                state[name] = [hook for hook in _functions_of(value) if not _is_of_library(hook)]
            elif name == "forward" and has_own_forward(module):
                state[name] = value
            elif name in ("config", "cfg") and hasattr(value, "__dict__"):
                if id(value) not in configs:
                    configs[id(value)] = _settings(vars(value))
                state[name] = configs[id(value)]
        own = {}
        if not _is_of_library(type(module), (*_LIBRARIES, "align_circuits")):  # may compute with anything
            left_out = {"_parameters", "_modules", "_buffers", *_HOOKS, *_USUAL, *_LEFT_BEHIND}
            own = {name: value for name, value in vars(module).items() if name not in left_out}
        settings.append((type(module), state | own | _settings(vars(module))))
    return settings


def _settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those attributes that are settings: neither parts nor what running leaves behind."""
    left_behind = {"_buffers", *_HOOKS, *_USUAL, *_LEFT_BEHIND}
    return {name: value for name, value in attributes.items() if name not in left_behind and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str | int | tuple) and _is_setting(part) for name, part in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_setting, value))
    plain = bool | int | float | str | Tensor | torch.dtype | torch.device | FunctionType
    return value is None or (isinstance(value, plain) and not isinstance(value, nn.Parameter))


def _functions_of(hooks: Any) -> list[Any]:
    """The functions that a module calls: PyTorch keeps them by number, TransformerLens by their handles."""
    if isinstance(hooks, Mapping):
        return [*hooks.values()]
    return [getattr(handle, "user_hook", None) or handle.hook.hooks_dict_ref().get(handle.hook.id) for handle in hooks]


_LEFT_BEHIND = ("_attn_implementation_internal", "_block_alias_cache", "_fired_hook_out", "_pattern")
"""Other attributes of modules and configurations that running a model changes; `RunOptions.engine` says which attention
runs."""


def remembered(model: Any) -> Callable[..., None]:
    """Returns a function that puts a model, autograd and the generator back to where they are now.

    It takes `generator`, whether to put PyTorch's global generator back too. Hooks that were added go; one that removed
    itself meanwhile does not come back.
    """
    # Few modules have hooks or any other of these: what none has takes no place, and this a millisecond.
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
    unique = {id(each): each for module in modules for each in module["_parameters"].values() if each is not None}
    parameters = [(each, each.requires_grad, each.grad) for each in unique.values()]
    grad_enabled, generator_state = torch.is_grad_enabled(), torch.get_rng_state()

    def restore(*, generator: bool) -> None:
        torch.set_grad_enabled(grad_enabled)
        for module in modules:
            for name in _HOOKS:
                if now := module.get(name):
                    before = hooked.get((id(module), name), [])
                    if isinstance(now, list):
                        now[:] = [handle for handle in now if any(handle is each for each in before)]
                    else:
                        for handle in [handle for handle in now if handle not in before]:
                            del now[handle]
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
    filters, then = warnings.filters, list(warnings.filters)

    def restore() -> None:
        if warnings.filters is not filters or filters != then:
            warnings.filters = filters
            filters[:] = then
            with warnings.catch_warnings():  # its end tells the interpreter that the filters have changed
                pass

    return restore


def parts_of(model: Any) -> Iterator[object]:
    """Yields the modules of a model and of what it wraps, their parameters and configurations: what two may share."""
    for module in modules_of(model, wrapped(model)):
        yield module
        yield from (part for part in vars(module)["_parameters"].values() if part is not None)
        if hasattr(config := vars(module).get("config"), "__dict__"):
            yield config


def modules_of(*roots: Any) -> Iterator[nn.Module]:
    """Yields all modules below some, each once; `modules()` of a bridge takes many times as long."""
    waiting, seen = [root for root in roots if isinstance(root, nn.Module)], set()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            waiting += [child for child in vars(module)["_modules"].values() if child is not None]
            yield module


_ABSENT = object()

_USUAL = {"training": False, "forward": _ABSENT, "context_level": 0, "_is_full_backward_hook": None}
"""Attributes of modules that running a model sets, with the values that they mostly have: the mode, the depth of hooks,
and what stands for a method while the attention function is replaced."""


def _attended(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What Hugging Face's attention layer returns, with the hook of its output, which the bridge's forward fires."""
    output, *rest = component(layer).forward(*args, **kwargs)
    return layer.hook_out(output), *rest


def _normed(norm: Any, residual: Tensor, **options: Any) -> Tensor:
    """What a bridge's norm returns where it runs Hugging Face's: the same to the bit.

    For the two hook points inside it, the bridge computes the norm a second time, also where nobody looks.
    """
    if norm.hook_scale.has_hooks(dir="both") or norm.hook_normalized.has_hooks(dir="both"):
        return type(norm).forward(norm, residual, **options)
    return norm.hook_out(component(norm)(norm.hook_in(residual)))


def skip_unread(model: Any) -> bool:
    """Makes the last layer's MLP compute only the positions that the keyword `read` names, if it is given, for good.

    The others reach no logits that are read. For Llama, Qwen2, Qwen3 and Mistral, whose layers are alike; others stay
    as they are. Returns whether the model takes the keyword.
    """
    alike = type(model).__name__ in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
    if alike:
        layer = model.model.layers[-1]
        vars(layer)["forward"] = partial(_last_layer, layer)
    return alike


def _last_layer(layer: Any, residual: Tensor, *, read: Tensor | None = None, **options: Any) -> Tensor:
    """A layer of Llama, whose residual stream after the MLP is right at the read positions alone."""
    if read is None:
        return type(layer).forward(layer, residual, **options)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(residual), **options)
    middle = residual + attended
    added = layer.mlp(layer.post_attention_layernorm(middle[:, read]))
    wide = torch.promote_types(middle.dtype, added.dtype)  # under autocast they differ
    return middle.to(wide).index_add(1, read, added.to(wide))


def wire_hooks(modules: Iterable[nn.Module]) -> None:
    """Attaches the hooks with which a bridge's blocks serve some of their hook points, before anything is written down.

    A bridge attaches them in its first run and then believes that they are there: taken away with what a verb added,
    `hook_mlp_in`, `hook_q_input` and, where a model scales what its layers add, `hook_attn_out` would be dead.
    """
    for module in modules:
        if _wires_hooks(type(module)):
            type(module)._maybe_wire_capture_hooks(module)


@cache
def _wires_hooks(kind: Any) -> bool:
    """Whether the forward pass of a block attaches them: BLOOM's does not."""
    name = "_maybe_wire_capture_hooks"
    for owner in kind.__mro__ if hasattr(kind, name) else ():
        if "forward" in vars(owner):
            names = owner.forward.__code__.co_names
            if name in names or "super" not in names:
                return name in names
    return False


def rotating_by_length(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns the rotary embeddings whose angles depend on the longest prompt of a batch ("longrope").

    "dynamic" ones do so beyond a model's context alone, which no prompt may exceed.
    """

    def by_length(module: nn.Module) -> bool:
        kinds = vars(module).get("rope_type")
        return "longrope" in (kinds.values() if isinstance(kinds, dict) else [kinds])

    return [module for module in modules if by_length(module)]


def rotate_by_prompt(rotary: Any) -> None:
    """Makes such an embedding rotate every prompt as alone, until its `forward` is put back.

    Left to itself transformers rotates all prompts of a batch by the factors of the longest.
    """
    vars(rotary)["forward"] = partial(_rotated_by_prompt, rotary.forward)  # which may be accelerate's


def _rotated_by_prompt(
    rotated: Callable[..., Any], residual: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> Any:
    """Cosines and sines `[prompt pos d]` of prompts with different lengths."""
    lengths = position_ids.amax(-1)
    angles: list[Tensor] = []
    for length in lengths.unique():
        alike = lengths == length
        of_length = rotated(residual, position_ids[alike], *args, **options)
        angles = angles or [part.new_empty(len(lengths), *part.shape[1:]) for part in of_length]
        for whole, part in zip(angles, of_length, strict=True):
            whole[alike] = part
    return tuple(angles)


def norms_heads_together(bridge: Any, layer: int, site: str) -> bool:
    """Whether queries or keys of all heads of a layer are normed as one vector: OLMo 2 and 3, OLMoE.

    A norm of each head by itself has the width of one head (Qwen 3), or a row of weights for each (Cohere).
    """
    if site not in ("q", "k") or not is_bridge(bridge):
        return False
    attention: Any = component(bridge.blocks[layer].attn)
    norm, width = getattr(attention, f"{site}_norm", None), getattr(attention, "head_dim", 0)
    weight = getattr(component(norm), "weight", None) if norm is not None else None
    return weight is not None and weight.ndim == 1 and len(weight) > width > 0


@dataclass(frozen=True, eq=False)
class _Fused:
    """A linear layer whose parts a bridge has split off: queries, keys and values, or both inputs of a gated MLP."""

    linear: Any
    owner: Any
    """The module of Hugging Face that holds it."""
    parts: Sequence[Any]
    """The layers with which the bridge computes."""
    split: Callable[[Any], Sequence[Any]]
    """Returns such parts of an owner anew."""

    @classmethod
    def of(cls, block: Any) -> "Iterator[_Fused]":
        """Yields those of a layer."""
        attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
        kinds = ((attention, "split_qkv_matrix", ("q", "k", "v")), (mlp, "split_gate_up_matrix", ("gate", "in")))
        for part, name, names in kinds:
            if (split := getattr(part, name, None)) is not None:
                inside = component(part)
                linear = getattr(part, "qkv", None) if part is attention else getattr(inside, part.fused_attr, None)
                yield cls(component(linear), inside, [component(getattr(part, each)) for each in names], split)

    @contextmanager
    def anew(self) -> "Iterator[list[tuple[Any, Any]]]":
        """Gives the parts, each beside what it would be if it were split now, for the length of a `with`."""
        with brought(self.owner), torch.no_grad(), _Undrawn():
            yield list(zip(self.parts, self.split(self.owner), strict=True))

    def differs(self) -> bool:
        """Whether the bridge computes with other weights than the layer has."""
        with self.anew() as parts:
            for own, now in parts:
                for name in ("weight", "bias"):
                    one, other = getattr(own, name, None), getattr(now, name, None)
                    if (one is None) != (other is None) or (one is not None and not torch.equal(one, other.to(one))):
                        return True
        return False

    def state(self) -> tuple[list[tuple[int, int]], list[Tensor]]:
        """What changes with the weights: how often they were written to and where, and a few of the numbers.

        PyTorch does not count what is written to `.data`: of a matrix each row and column has a number here.
        """
        counts: list[tuple[int, int]] = []
        numbers: list[Tensor] = []
        for weight in (getattr(self.linear, "weight", None), getattr(self.linear, "bias", None)):
            if weight is not None and not weight.is_meta and weight.ndim <= 2:
                counts.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
                place = torch.arange(max(weight.shape), device=weight.device)
                at = tuple(place % size for size in weight.shape)
                numbers.append(weight.detach()[at].clone())
        return counts, numbers


_STATES: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Of each bridge the states of its fused layers when their parts were last equal to them."""


def split_weights_differ(bridge: Any) -> int | None:
    """Returns the first layer that a bridge computes by other weights than the fused ones of Hugging Face.

    A bridge splits a fused projection once and computes with the parts: trained, they leave the fused one behind. None
    where none differs, or no projection is fused.
    """
    return next((n for n, block in enumerate(bridge.blocks) if any(each.differs() for each in _Fused.of(block))), None)


def remember_fused(bridge: Any) -> None:
    """Notes what the fused layers of a bridge are, whose parts it has just split."""
    _STATES[bridge] = [[each.state() for each in _Fused.of(block)] for block in bridge.blocks]


def split_anew(bridge: Any) -> None:
    """Gives a bridge the parts of its fused layers as these are now, in place."""
    for block in bridge.blocks:
        for fused in _Fused.of(block):
            with fused.anew() as parts:
                for own, now in parts:
                    own.weight.copy_(now.weight)
    remember_fused(bridge)


def fused_left_behind(bridge: Any) -> int | None:
    """Returns the first layer with a fused projection that was changed or adapted, but not the parts that compute."""
    for layer, states in enumerate(_STATES.get(bridge, ()) if isinstance(bridge, nn.Module) else ()):
        for place, (fused, (counts, numbers)) in enumerate(zip(_Fused.of(bridge.blocks[layer]), states, strict=True)):
            if hasattr(fused.linear, "base_layer"):
                return layer
            new = fused.state()
            if counts != new[0] or not all(map(_are_equal, numbers, new[1])):
                if fused.differs():
                    return layer
                states[place] = new
    return None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other), other)


class _Undrawn(TorchFunctionMode):
    """Makes layers without drawing their first weights, where TransformerLens makes new ones only to fill them.

    The generator belongs to all threads: to draw and put it back would move what another draws meanwhile.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.uniform_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def embed(bridge: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns the residual stream before the first layer, without hooks; GPT-2 adds an embedding of positions."""
    residual = component(bridge.embed)(tokens)
    if (of_positions := getattr(bridge, "pos_embed", None)) is not None:
        residual = residual + component(of_positions)(positions)
    return residual


def rotation(bridge: Any, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns cosines and sines of rotary embeddings, which a bridge's layers share; None where a model has none."""
    rotary = getattr(bridge, "rotary_emb", None)
    return None if rotary is None else component(rotary)(residual, positions)


def unembed(bridge: Any, residual: Tensor) -> Tensor:
    """Returns logits from the last residual stream, without hooks, on the device of the first layer."""
    norm = component(bridge.ln_final)
    return component(bridge.unembed)(norm(residual.to(device_of(norm)))).to(device_of(component(bridge.embed)))


def attend(block: Any, residual: Tensor, **options: Any) -> Tensor:
    """Returns what the attention layer of a block makes of a normed residual stream `[prompt pos d_model]`.

    Hooks fire inside only if they are attached. `options` reach the attention function.
    """
    return component(block.attn).forward(residual, attention_mask=None, **options)[0]


def is_parallel(block: Any) -> bool:
    """Whether the MLP of a block reads what its attention reads: GPT-NeoX decides it in the configuration."""
    return bool(getattr(component(block), "use_parallel_residual", False))


def norm(part: Any, residual: Tensor) -> Tensor:
    """Returns what a norm makes of the residual stream, without hooks.

    transformers' RMSNorm (the one with `variance_epsilon`) is written out with fewer passes over memory. In float32
    alone: for narrower types transformers rounds in between. An offloaded weight comes when the module is called.
    """
    module = component(part)
    written_out = hasattr(module, "variance_epsilon") and "weight" in module._parameters and not has_own_forward(module)
    if residual.dtype != torch.float32 or not written_out or module.weight.is_meta:
        return module(residual)
    mean_square = torch.linalg.vector_norm(residual, dim=-1, keepdim=True).square_().div_(residual.shape[-1])
    return torch.mul(residual, mean_square.add_(module.variance_epsilon).rsqrt_()).mul_(module.weight)


def mlp(part: Any, residual: Tensor) -> Tensor:
    """Returns the output of an MLP, without hooks.

    A SwiGLU runs transformers' own operations in its order, but writes over tensors that are not needed again.
    """
    module = component(part)
    gated = hasattr(module, "gate_proj") and isinstance(module.act_fn, nn.SiLU | SiLUActivation)
    if not gated or has_own_forward(module):
        return module(residual)
    gate = nn.functional.silu(module.gate_proj(residual), inplace=True)
    return module.down_proj(gate.mul_(module.up_proj(residual)))


def logit_scale(model: Any) -> float:
    """Returns the factor of all logits (Cohere, Granite); 1 in most models."""
    inside = wrapped(model)
    return float(getattr(inside, "logit_scale", 1.0)) / getattr(getattr(inside, "config", None), "logits_scaling", 1.0)


def contribution_scale(block: Any) -> float:
    """Returns the factor of what attention and MLP add to the residual stream (Granite); 1 in most models."""
    return float(getattr(block, "residual_contribution_scale", 1.0))


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


def norms_contributions(block: Any) -> bool:
    """Whether a block norms what its attention or MLP adds to the residual stream (Gemma 2 and 3, OLMo 2 and 3)."""
    return any(getattr(block, name, None) is not None for name in ("ln1_post", "ln2_post"))


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns attention and the logarithm of its softmax's denominator, on CPUs.

    The public function computes both and returns the first.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, attn_mask=mask, scale=scaling)


def gguf_header(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the metadata of a GGUF file and the names of its tensors, without the arrays: each is its length.

    The public reader takes seconds for the vocabulary of one file.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    return read_gguf_metadata(str(path))


def gguf_pre_tokenizers() -> frozenset[str]:
    """Returns the ways to split text, as GGUF calls them, that transformers does not take for GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def gguf_tokenizer(path: Path, *, digits_apart: bool) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in a GGUF file, as `AutoTokenizer` does from a folder that holds nothing but the file.

    Args:
        path: The file.
        digits_apart: Whether every digit is split off before the text is split further.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, parts, settings = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    if digits_apart:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def forget_quantization(model: PreTrainedModel) -> None:
    """Makes a model that was dequantized a plain one, which can be saved."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
