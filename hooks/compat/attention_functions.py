"""The functions that compute attention in transformers, and one's own in their place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from align_circuits.hooks.compat.architectures import caps_scores
from align_circuits.hooks.compat.bridges import component, wrapped


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Returns z `[prompt pos head d_head]` as transformers computes it by default.

    Queries and keys come after rotation, `[prompt head pos d_head]`. The function is looked up by name, so that the
    numbers are those of the installed version to the bit.
    """
    return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns attention and the logarithm of its softmax's denominator, on CPUs.

    The public function computes both and returns the first.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, attn_mask=mask, scale=scaling)


def has_fused_attention(bridge: Any) -> bool:
    """Whether transformers computes the attention of a bridge's model by PyTorch's kernel as it does without it.

    Its "sdpa" leaves the caps of scores out (Gemma 2), and classes say whether they know it (GPT-OSS has sinks).
    """
    return bool(wrapped(bridge)._supports_sdpa) and not caps_scores(bridge)


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
    forwards = {module: vars(module).get("forward") for module in replaced}
    try:
        for config in configs.values():
            config._attn_implementation = name
        for module, forward in replaced.items():
            # An instance's attribute comes before the method of its class: calls go to the wrapped layer until it is
            # removed, and the bridge's own attention is back.
            vars(module)["forward"] = partial(forward, module)
        yield
    finally:
        for module, forward in forwards.items():
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward
        for key, config in configs.items():
            config._attn_implementation = implementations[key]


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
