"""The fast path: Hugging Face's own attention on the same bridge, with exact rows of the pattern beside it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from align_circuits.hooks.compat import architectures, attention_functions, bridges, fused_projections, user_code
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import modules_in, once_a_call
from align_circuits.hooks.names import Site, name_of
from align_circuits.hooks.probes import Change, applied

ATTENTION = "align_circuits_probe"
"""The name under which our attention function is registered with transformers, on first use."""

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
)
"""The architectures on which the fast path is tested against the bridge and against Hugging Face."""


@dataclass(eq=False)
class PatternProbe:
    """Reads rows of the attention pattern of every layer in one forward pass.

    Passed to a model as the keyword `attention_probe`, it reaches the attention function of every layer.
    """

    prompt: Int[Tensor, " row"]
    """The prompt of each row, ascending."""
    query: Int[Tensor, " row"]
    """The query position of each row."""
    reduce: Callable[[int, Float[Tensor, "row head pos"]], None]
    """Called once a layer, with the layer and the rows in float32 or wider."""
    layers_read: int = 0

    def on(self, device: torch.device) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
        """Returns prompt and query of each row on a layer's device."""
        return self.prompt.to(device), self.query.to(device)

    def rows(
        self,
        query: Float[Tensor, "prompt head query d_head"],
        key: Float[Tensor, "prompt key_head pos d_head"],
        mask: Bool[Tensor, "#prompt #head query pos"] | None,
        scaling: float,
    ) -> Float[Tensor, "row head pos"]:
        """Returns softmax(q k^T scaling + mask) of the probed rows, from queries and keys after rotation.

        Prompts may have different numbers of rows. So row i of a prompt takes slot i of a `[prompt slot]` grid, where
        one matrix product serves all prompts; slots that no row takes compute the row of position 0, which is not read.
        Heads that share a key head are folded into the slots, so keys are never expanded. The softmax runs in float32
        at least, as in Hugging Face's eager attention. No mask means causal, with a query for each position.
        """
        (prompts, heads, _, width), (_, key_heads, length, _) = query.shape, key.shape
        prompt, queries = self.on(query.device)
        # rows ascend by prompt: a row's slot is its distance from the first row of its prompt
        slot = torch.arange(len(prompt), device=prompt.device) - torch.searchsorted(prompt, prompt)
        position = torch.zeros(prompts, int(slot.max()) + 1, dtype=torch.long, device=query.device)
        position[prompt, slot] = queries
        at_slots = query.gather(2, repeat(position, "prompt slot -> prompt head slot d", head=heads, d=width))
        folded = rearrange(at_slots, "prompt (key group) slot d -> (prompt key) (group slot) d", key=key_heads)
        keys = key.flatten(0, 1).mT
        # A score for each head, slot and position: passes over them are what rows cost, so there are few. The product
        # scales as it multiplies; rows are copied whole; a sum masks, since `masked_fill` takes ten times as long.
        no_bias = folded.new_empty(1, 1, 1)
        scores = torch.baddbmm(no_bias, folded, keys, beta=0, alpha=scaling).view(-1, length)
        head = torch.arange(heads, device=prompt.device)
        row_index = ((prompt[:, None] * heads + head) * position.shape[1] + slot[:, None]).flatten()
        scores = scores.index_select(0, row_index).view(-1, heads, length)
        if mask is None:
            visible = torch.arange(length, device=query.device) <= queries[:, None, None]
        else:
            visible = mask.expand(prompts, -1, -1, -1)[prompt, :, queries]
        hidden = torch.zeros_like(visible, dtype=scores.dtype).masked_fill_(~visible, -torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        return scores.add_(hidden).softmax(-1, dtype=wide)


AttentionFunction = Callable[[nn.Module, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(attention module, query `[prompt head pos d_head]`, key and value `[prompt key_head pos d_head]`, after rotation,
scaling, sliding window) -> z `[prompt pos head d_head]`."""


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """Reads or replaces queries, keys, values, pattern and z inside the attention function of every layer.

    Passed to a model as the keyword `attention_parts`. It works whatever hook points an architecture has.
    """

    changes: Mapping[str, Change]
    """By hook point of an `INSIDE_SITES` site."""

    def change(self, site: Site, module: nn.Module, activation: Tensor) -> Tensor:
        """Returns a part, or what replaces it."""
        return applied(self.changes, name_of(site, bridges.layer_of(module)), activation)

    def need(self, site: Site, module: nn.Module) -> bool:
        """Whether a part is read or replaced."""
        return name_of(site, bridges.layer_of(module)) in self.changes


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_probe: PatternProbe | None = None,
    attention_function: AttentionFunction | None = None,
    attention_parts: AttentionParts | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa" computes it, in place of the function that transformers would call.

    `attention_probe` gets its rows, and `attention_parts` its parts; `attention_function` computes all by itself. Where
    the pattern is read or replaced it is computed, and z follows from it; elsewhere it is never made.
    """
    if attention_function is not None:
        return attention_function(module, query, key, value, kwargs["scaling"], kwargs.get("sliding_window")), None
    pattern = None
    if attention_parts is not None:
        inputs: tuple[tuple[Site, Tensor], ...] = (("rot_q", query), ("rot_k", key), ("v", value))
        # hook points hold [prompt pos head d], attention functions take [prompt head pos d]
        query, key, value = (
            attention_parts.change(site, module, activation.transpose(1, 2)).transpose(1, 2)
            for site, activation in inputs
        )
        if attention_parts.need("pattern", module):
            pattern = pattern_of(query, key, attention_mask, kwargs["scaling"])
            pattern = attention_parts.change("pattern", module, pattern)
    if pattern is None:
        # The same call as without us, so logits are those of Hugging Face to the bit.
        z, _ = attention_functions.sdpa(module, query, key, value, attention_mask, **kwargs)
    else:
        # As transformers' own attention, which drops some of it while a model with attention dropout trains.
        z = attended_by(F.dropout(pattern, kwargs.get("dropout", 0.0)), value)
    if attention_probe is not None:
        attention_probe.layers_read += 1
        if pattern is None:
            rows = attention_probe.rows(query, key, attention_mask, kwargs["scaling"])
        else:
            prompt, queries = attention_probe.on(pattern.device)
            rows = pattern[prompt, :, queries]
        attention_probe.reduce(bridges.layer_of(module), rows)
    return z if attention_parts is None else attention_parts.change("z", module, z), None


def pattern_of(
    query: Float[Tensor, "prompt head query d_head"],
    key: Float[Tensor, "prompt key_head pos d_head"],
    mask: Bool[Tensor, "#prompt #head query pos"] | None,
    scaling: float,
) -> Float[Tensor, "prompt head query pos"]:
    """Returns softmax(q k^T scaling + mask), in float32 at least inside; no mask means causal, all positions ask."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scaling
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    wide = torch.promote_types(scores.dtype, torch.float32)
    least = torch.finfo(scores.dtype).min  # with -inf a row of padding, which sees nothing, would be NaN
    return scores.masked_fill(~mask, least).softmax(-1, dtype=wide).to(query.dtype)


def attended_by(
    pattern: Float[Tensor, "prompt head query pos"], value: Float[Tensor, "prompt key_head pos d_head"]
) -> Float[Tensor, "prompt query head d_head"]:
    """Returns z: the values of each head's key head, weighted by its pattern."""
    by_head = value.repeat_interleave(pattern.shape[1] // value.shape[1], 1)
    return (pattern.to(value.dtype) @ by_head).transpose(1, 2).contiguous()


def why_not_fast(model: HookedModel) -> str | None:
    """Returns why the fast path does not apply to a model, or None where it does."""
    architecture = getattr(model.cfg, "architecture", None)
    if bridges.is_bridge(model) and architecture not in ARCHITECTURES:
        if architectures.caps_scores(model):
            return f"{architecture} caps its attention scores, which fused attention does not honour"
        if any(name.endswith("sinks") for name, _ in bridges.wrapped(model).named_parameters()):
            return f"{architecture} has attention sinks, which fused attention does not honour"
        return f"{architecture} is not among {', '.join(ARCHITECTURES)}"
    return why_not_plain(model)


def why_not_plain(model: HookedModel) -> str | None:
    """Returns why a model computes otherwise than a Hugging Face model inside it, or None where it does not."""
    if not bridges.is_bridge(model):
        return f"a {type(model).__name__} is no TransformerBridge over a Hugging Face model"
    if bridges.has_changed_weights(model):
        return "the bridge is in compatibility mode, where its weights are no longer Hugging Face's"
    layer = once_a_call(model, "split weights", lambda: fused_projections.split_weights_differ(model))
    if layer is not None:
        return f"the bridge computes q, k and v of layer {layer} by other weights than Hugging Face's fused projection"
    if hooked := user_code.hooked_points(model):
        return f"hooks are attached ({hooked[0]}), which Hugging Face's own attention might not fire"
    return None


def take_parts(model: PreTrainedModel) -> None:
    """Makes a plain Hugging Face model take `attention_parts`, for good; with none it computes as by "sdpa"."""
    attention_functions.register_attention(ATTENTION, probe_attention)
    model.set_attn_implementation(ATTENTION)


@contextmanager
def raw_attention(bridge: Any) -> Iterator[None]:
    """Runs a bridge with Hugging Face's own attention for the length of a `with`: same weights, adapters included.

    Inside, `hook_pattern` does not fire: pass the model `attention_parts` instead. On leaving, also by an exception,
    the bridge is what it was: its logits are bit-identical.

    Raises:
        ValueError: The fast path does not apply to this model.
    """
    if reason := why_not_fast(bridge):
        raise ValueError(f"the fast engine cannot run this model: {reason}; use RunOptions(engine='reference')")
    with attention_functions.attention_function(bridge, modules_in(bridge), ATTENTION, probe_attention):
        yield
