"""What the decoders of transformers do differently: scales, norms, keywords."""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from align_circuits.hooks.compat.bridges import component, is_bridge, wrapped


def accepted(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those options that the forward pass of a Hugging Face model names: BLOOM takes no `position_ids`."""
    named = signature(type(getattr(model, "func", model)).forward).parameters
    return {name: value for name, value in options.items() if name in named}


def is_parallel(block: Any) -> bool:
    """Whether the MLP of a block reads what its attention reads: GPT-NeoX decides it in the configuration."""
    return bool(getattr(component(block), "use_parallel_residual", False))


def caps_scores(bridge: Any) -> bool:
    """Whether a model caps its attention scores; TransformerLens's number for no cap is below 0."""
    return (getattr(bridge.cfg, "attn_scores_soft_cap", None) or 0) > 0


def logit_scale(model: Any) -> float:
    """Returns the factor of all logits (Cohere, Granite); 1 in most models."""
    inside = wrapped(model)
    return float(getattr(inside, "logit_scale", 1.0)) / getattr(getattr(inside, "config", None), "logits_scaling", 1.0)


def contribution_scale(block: Any) -> float:
    """Returns the factor of what attention and MLP add to the residual stream (Granite); 1 in most models."""
    return float(getattr(block, "residual_contribution_scale", 1.0))


def scales_stream(bridge: Any) -> bool:
    """Whether layers scale the stream after their MLP, and may add to it (Gemma 4), or norm it (BERT, OPT-350m)."""
    layer = component(bridge.blocks[0])
    norms = type(layer).__name__ == "BertLayer" or not getattr(layer, "do_layer_norm_before", True)
    return norms or hasattr(layer, "layer_scalar")


def norms_contributions(block: Any) -> bool:
    """Whether a block norms what its attention or MLP adds to the residual stream (Gemma 2 and 3, OLMo 2 and 3)."""
    return any(getattr(block, name, None) is not None for name in ("ln1_post", "ln2_post"))


def norms_heads_together(bridge: Any, layer: int, site: str) -> bool:
    """Whether queries or keys of all heads of a layer are normed as one vector: OLMo 2 and 3, OLMoE.

    A norm of each head by itself has the width of one head (Qwen 3), or a row of weights for each (Cohere).
    """
    if site not in ("q", "k") or not is_bridge(bridge):
        return False
    attention = component(bridge.blocks[layer].attn)
    norm, width = getattr(attention, f"{site}_norm", None), getattr(attention, "head_dim", 0)
    weight = getattr(component(norm), "weight", None) if norm is not None else None
    return weight is not None and weight.ndim == 1 and len(weight) > width > 0


def skip_unread(model: Any) -> bool:
    """Makes the last layer's MLP compute only the positions that the keyword `read` names, if it is given, for good.

    The others reach no logits that are read. For Llama, Qwen2, Qwen3 and Mistral, whose layers are alike; others stay
    as they are. Returns whether the model takes the keyword.
    """
    known = type(model).__name__ in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
    if known:
        vars(model.model.layers[-1])["forward"] = partial(_last_layer, model.model.layers[-1])
    return known


def _last_layer(layer: Any, residual: Tensor, *, read: Tensor | None = None, **options: Any) -> Tensor:
    """A layer of Llama, whose residual stream after the MLP is right at the read positions alone."""
    if read is None:
        return type(layer).forward(layer, residual, **options)
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(residual), **options)
    resid_mid = residual + attended
    mlp_out = layer.mlp(layer.post_attention_layernorm(resid_mid[:, read]))
    dtype = torch.promote_types(resid_mid.dtype, mlp_out.dtype)  # under autocast they differ
    return resid_mid.to(dtype).index_add(1, read, mlp_out.to(dtype))
