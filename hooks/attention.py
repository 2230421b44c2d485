"""The fast path: Hugging Face's own attention on the same bridge, with exact rows of the pattern on the side."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from align_circuits.hooks.names import Site, name_of
from align_circuits.hooks.probes import Change

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


@dataclass
class Probe:
    """The rows of the attention pattern that one forward pass is asked for.

    Passed to a model as the keyword `attention_probe`, it reaches the attention function of every layer.
    """

    prompt: Int[Tensor, " row"]
    """The prompt of each row, ascending."""
    query: Int[Tensor, " row"]
    """The query position of each row."""
    reduce: Callable[[int, Float[Tensor, "row head pos"]], None]
    """Called once a layer, with the layer and the rows in float32 or wider."""
    seen: int = 0
    """How many layers have called."""

    def __post_init__(self):
        # Rows become slots [prompt slot], so that one matrix product a layer serves all prompts.
        place = torch.arange(len(self.prompt), device=self.prompt.device)
        self._slot = place - torch.searchsorted(self.prompt, self.prompt)

    def rows(
        self,
        query: Float[Tensor, "prompt head pos d_head"],
        key: Float[Tensor, "prompt key_head pos d_head"],
        mask: Bool[Tensor, "#prompt #head pos pos"] | None,
        scaling: float,
    ) -> Float[Tensor, "row head pos"]:
        """Returns softmax(q k^T scaling + mask) of the probed rows, from queries and keys after rotation.

        The softmax runs in float32 at least, as in Hugging Face's eager attention; heads that share a key head are
        folded into the queries, so keys are never expanded. No mask means causal.
        """
        prompts, heads, length, width = query.shape
        key_heads, slots = key.shape[1], int(self._slot.max()) + 1
        at = torch.zeros(prompts, slots, dtype=torch.long, device=query.device)
        at[self.prompt, self._slot] = self.query
        asked = query.gather(2, at[:, None, :, None].expand(prompts, heads, slots, width))
        scores = asked.reshape(prompts, key_heads, -1, width) @ key.transpose(2, 3) * scaling
        scores = scores.view(prompts, heads, slots, length).transpose(1, 2)[self.prompt, self._slot]
        if mask is None:
            visible = torch.arange(length, device=query.device) <= self.query[:, None, None]
        else:
            visible = mask.expand(prompts, -1, -1, -1)[self.prompt, :, self.query]
        wide = torch.promote_types(scores.dtype, torch.float32)
        return scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=wide)


Inside = Callable[[nn.Module, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(attention module, query `[prompt head pos d_head]`, key and value `[prompt key_head pos d_head]`, after rotation,
scaling, sliding window) -> z `[prompt pos head d_head]`."""


@dataclass(frozen=True)
class Within:
    """Functions that attention hands its parts to, which read them or replace them; `attention_within` of a model.

    It reaches the attention function of every layer, whatever hook points the architecture has.
    """

    changes: Mapping[str, Change]
    """By hook point of an `INSIDE_SITES` site."""

    def met(self, site: Site, module: nn.Module, part: Tensor) -> Tensor:
        """Returns what becomes of a part."""
        change = self.changes.get(name_of(site, int(module.layer_idx)))  # pyright: ignore[reportArgumentType]
        new = None if change is None else change(part)
        return part if new is None else new

    def asks(self, site: Site, module: nn.Module) -> bool:
        """Whether a part is asked for."""
        return name_of(site, int(module.layer_idx)) in self.changes  # pyright: ignore[reportArgumentType]


def probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_probe: Probe | None = None,
    attention_inside: Inside | None = None,
    attention_within: Within | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa" computes it; the rows that `attention_probe` asks for go to its reducer.

    `attention_within` meets its parts on the way; with `attention_inside` it is computed there.
    """
    if attention_inside is not None:
        return attention_inside(module, query, key, value, kwargs["scaling"], kwargs.get("sliding_window")), None
    if attention_within is not None:
        parts: tuple[tuple[Site, Tensor], ...] = (("rot_q", query), ("rot_k", key), ("v", value))
        query, key, value = (
            attention_within.met(site, module, part.transpose(1, 2)).transpose(1, 2) for site, part in parts
        )
    pattern = None
    if attention_within is not None and attention_within.asks("pattern", module):
        pattern = attention_within.met("pattern", module, pattern_of(query, key, attention_mask, kwargs["scaling"]))
        shared = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        output = (pattern.to(value.dtype) @ shared).transpose(1, 2).contiguous()
    else:
        output, _ = AttentionInterface._global_mapping["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if attention_probe is not None:
        attention_probe.seen += 1
        if pattern is None:
            rows = attention_probe.rows(query, key, attention_mask, kwargs["scaling"])
        else:
            rows = pattern[attention_probe.prompt, :, attention_probe.query]
        attention_probe.reduce(int(module.layer_idx), rows)  # pyright: ignore[reportArgumentType]
    return output if attention_within is None else attention_within.met("z", module, output), None


def pattern_of(
    query: Float[Tensor, "prompt head pos d_head"],
    key: Float[Tensor, "prompt key_head pos d_head"],
    mask: Bool[Tensor, "#prompt #head pos pos"] | None,
    scaling: float,
) -> Float[Tensor, "prompt head pos pos"]:
    """Returns softmax(q k^T scaling + mask), in float32 at least inside; no mask means causal."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scaling
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    wide = torch.promote_types(scores.dtype, torch.float32)
    least = torch.finfo(scores.dtype).min  # not -inf: a row of padding sees nothing, and would be NaN
    return scores.masked_fill(~mask, least).softmax(-1, dtype=wide).to(query.dtype)


def why_not_fast(model: Any) -> str | None:
    """Returns why the fast path does not apply to a model, or None where it does."""
    architecture = getattr(model.cfg, "architecture", None)
    if not isinstance(getattr(model, "original_model", None), PreTrainedModel):
        return f"a {type(model).__name__} is no TransformerBridge over a Hugging Face model"
    if architecture not in ARCHITECTURES:
        if (getattr(model.cfg, "attn_scores_soft_cap", None) or 0) > 0:
            return f"{architecture} caps its attention scores, which fused attention does not honour"
        if any(name.endswith("sinks") for name, _ in model.original_model.named_parameters()):
            return f"{architecture} has attention sinks, which fused attention does not honour"
        return f"{architecture} is not among {', '.join(ARCHITECTURES)}"
    if model.compatibility_mode:
        return "the bridge is in compatibility mode, where its weights are no longer Hugging Face's"
    if hooked := sorted({name for name, point in model.hook_dict.items() if point.fwd_hooks or point.bwd_hooks}):
        return f"hooks are attached ({hooked[0]}), which Hugging Face's own attention might not fire"
    return None


@contextmanager
def raw_attention(bridge: Any) -> Iterator[None]:
    """Runs a bridge with Hugging Face's own attention for the length of a `with`: same weights, adapters included.

    Inside, `hook_pattern` does not fire: hand what should meet it to the model as `attention_within`. On leaving, also
    by an exception, the bridge is what it was: its logits are bit-identical.

    Raises:
        ValueError: The fast path does not apply to this model.
    """
    if reason := why_not_fast(bridge):
        raise ValueError(f"the fast engine cannot run this model: {reason}; use engine='reference'")
    AttentionInterface.register(ATTENTION, probe_attention)
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface._global_mapping["sdpa"])
    layers = [block.attn for block in bridge.blocks]
    models = [module for module in bridge.original_model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(owner.config): owner.config for owner in (*models, *(layer.original_component for layer in layers))}
    before = {key: config._attn_implementation for key, config in configs.items()}
    forwards = [vars(layer).get("forward") for layer in layers]  # set where one `with` stands in another
    try:
        for config in configs.values():
            config._attn_implementation = ATTENTION
        for layer in layers:
            vars(layer)["forward"] = layer.original_component.forward
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward
        for key, config in configs.items():
            config._attn_implementation = before[key]
