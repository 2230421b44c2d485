"""Wraps a Hugging Face decoder in memory as a TransformerLens bridge, and checks that both compute the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align_circuits.hooks.attention import ARCHITECTURES
from align_circuits.hooks.compat import bridges, fused_projections, stored_weights, user_code
from align_circuits.hooks.head_names import shared_at
from align_circuits.hooks.hooked_model import token_positions
from align_circuits.hooks.names import HEAD_SITES, Site, name_of
from align_circuits.hooks.probes import evaluating
from align_circuits.models.folder_checks import one_line
from align_circuits.models.parameters import parameters_of

FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "gate_up_proj")
"""Modules that compute queries, keys and values, or both inputs of a gated MLP, in one projection."""


def bridge_around(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> Any:
    """Wraps a Hugging Face model, in place, and returns the bridge.

    Raises:
        ValueError: TransformerLens cannot wrap it, or would compute something else than it does; its weights are on the
            device "meta", have NaN, or would lose an adapter.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module, detect_tokenizer_bos_eos

    check_architecture(type(model).__name__)
    if stored_weights.device_of(model).type == "meta":
        raise ValueError(
            f"the weights of this {type(model).__name__} are on the device 'meta', shapes without numbers: load them"
        )
    modules = dict(model.named_modules())
    if any(bridges.without_bridge(module) is not module for module in modules.values()):
        raise ValueError("this Hugging Face model is already wrapped: give the TransformerLens model that wraps it")
    if compiled := [name for name, module in modules.items() if user_code.is_compiled(module)]:
        raise ValueError(
            f"{compiled[0]} is compiled (torch.compile), and compiled code may pass hooks by: load the model as it is "
            "before torch.compile"
        )
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing and not stored_weights.is_spread(model):
        raise ValueError(
            f"{len(missing)} tensors are on the meta device, without numbers, the first is {missing[0]}: load the "
            "weights first, by from_pretrained or to_empty and load_state_dict"
        )
    for kind, setting in (("", "scale_attn_weights"), ("GPTNeoX", "attention_bias")):
        if type(model).__name__.startswith(kind) and getattr(model.config, setting, True) is False:
            raise ValueError(f"{setting}=False: TransformerLens computes a {type(model).__name__} as if it were True")
    if adapted := [name for name in modules if name.endswith(FUSED) and hasattr(modules[name], "base_layer")]:
        raise ValueError(
            f"an adapter on {adapted[0]} would be lost: TransformerLens splits this fused projection into copies of "
            "its base weights; merge the adapter first (merge_and_unload) and load the merged model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"a {type(model).__name__} is no decoder: an encoder reads its input, and its "
            "decoder answers; load a decoder, such as a GPT-2 or a Llama"
        )
    _leave_inference_mode(model)
    # Codes of 8 bits depend on all tokens of a batch, those to come too.
    tokens_and_logits = _logits_of(model) if stored_weights.quantization_of(model) is None else None
    model.set_attn_implementation("eager")  # with any other, hook_pattern would not fire
    try:
        bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, model_name=name)
    except (RuntimeError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise ValueError(f"TransformerLens cannot wrap this {type(model).__name__}: {one_line(error)}") from error
    patterns = [name_of("pattern", layer) in bridge.hook_dict for layer in range(bridge.cfg.n_layers)]
    if not all(patterns):
        raise ValueError(
            f"layer {patterns.index(False)} of this {type(model).__name__} has no attention pattern: only "
            "transformers whose layers all attend can be analysed"
        )
    if tokens_and_logits is not None:
        _check_same_logits(bridge, *tokens_and_logits)
    fused_projections.remember_fused(bridge)
    if tokenizer is not None:
        # TransformerLens's own set-up loads the tokenizer again by name and may add tokens; ids must not change.
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
        bridge.tokenizer = tokenizer
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.default_prepend_bos = tokenizer.bos_token is not None
    if broken := [name for name, value in parameters_of(bridge, offloaded=False) if value.isnan().any()]:
        raise ValueError(
            f"{len(broken)} of the weights' tensors hold NaN, the first is {broken[0]}: the checkpoint is broken"
        )
    return bridge


def _leave_inference_mode(model: PreTrainedModel) -> None:
    """Makes weights and buffers that were made in inference mode plain ones, in place: others have no gradients."""
    for value in (*model.parameters(), *model.buffers()):
        if value.is_inference() and type(value) in (nn.Parameter, Tensor):
            plain = value.detach().clone()
            is_weight = isinstance(value, nn.Parameter)
            torch.utils.swap_tensors(value, nn.Parameter(plain, value.requires_grad) if is_weight else plain)


def check_architecture(name: str | None) -> None:
    """Raises a ValueError unless TransformerLens can wrap the Hugging Face class of this name."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    if name not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"unknown architecture {name!r}: it is no decoder that TransformerLens can wrap; "
            f"tested are {', '.join(ARCHITECTURES)}"
        )


def _logits_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Returns a few tokens and a Hugging Face model's logits for them.

    Raises:
        ValueError: It does not run, as experts in float64; or it reads tokens to come, so it is no decoder.
    """
    last = model.config.get_text_config().vocab_size - 1
    # Spread over the vocabulary, so that a part of the embedding that was mapped wrongly shows.
    tokens = torch.linspace(0, last, 8, device=stored_weights.device_of(model)).long()
    # The same but for the last token, which a decoder does not see before.
    changed = torch.cat([tokens[:-1], tokens[:1]])
    with _running(model, f"Hugging Face cannot run this {type(model).__name__} itself"), evaluating(model):
        logits = [model(prompt[None]).logits[0] for prompt in (tokens, changed)]
    # Both are computed alike, so that less than between two ways to compute them is allowed.
    allowed = _allowed(logits[0]) * (1.0 if _is_narrow(logits[0]) else 0.01)
    if _apart(*(some_tokens[:-1] for some_tokens in logits)) > allowed:
        raise ValueError(
            f"a {type(model).__name__} is no decoder: its logits depend on tokens to come (a configuration with "
            "is_decoder=True may help)"
        )
    return tokens, logits[0]


def _check_same_logits(bridge: Any, tokens: Tensor, expected: Tensor) -> None:
    """Raises unless a bridge computes what Hugging Face does, behind padding too, and shows the heads that there are.

    Raises:
        ValueError: It does not: TransformerLens computes this architecture otherwise, or cuts its heads at other places
            (those of DeepSeek, whose queries and values have different widths).
    """
    shapes: dict[tuple[Site, int], torch.Size] = {}

    def note(activation: Tensor, hook: Any, point: tuple[Site, int]) -> None:  # noqa: ARG001 - its keyword
        shapes[point] = activation.shape

    points: list[tuple[Site, int]] = [
        (site, layer) for layer in range(bridge.cfg.n_layers) for site in HEAD_SITES if site != "pattern"
    ]
    hooks = [(name_of(*point), partial(note, point=point)) for point in points if name_of(*point) in bridge.hook_dict]
    refusal = f"TransformerLens cannot run this {bridge.cfg.architecture}"
    with _running(bridges.wrapped(bridge), refusal), evaluating(bridge):
        runs = [bridge.run_with_hooks(tokens[None], fwd_hooks=hooks)[0]]
        if expected.dtype != torch.float64:  # where prompts run one by one, without padding
            padded, mask = (nn.functional.pad(each, (2, 0))[None] for each in (tokens, tokens >= 0))
            runs.append(bridge(padded, attention_mask=mask.long(), position_ids=token_positions(mask))[0, 2:])
    distance = max(_apart(logits, expected) for logits in runs)
    if distance > _allowed(expected):
        raise ValueError(
            f"TransformerLens computes other logits of this {bridge.cfg.architecture} than Hugging Face (up to "
            f"{distance:.2g} apart), so that no number of it could be trusted"
        )
    for (site, layer), shape in shapes.items():
        heads = bridge.cfg.n_heads // shared_at(bridge.cfg, site)
        if shape[1:-1] != (len(tokens), heads):
            raise ValueError(
                f"TransformerLens shows {site!r} of layer {layer} in the shape {tuple(shape)} for {len(tokens)} tokens "
                f"of this {bridge.cfg.architecture}, which has {heads} heads there, so that no number of a head could "
                "be trusted"
            )


@contextmanager
def _running(model: PreTrainedModel, refusal: str) -> Iterator[None]:
    """Runs a model without gradients; where it cannot run, raises a ValueError that begins with `refusal`."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each architecture fails in its own way
        # Where weights are of several types, that is the cause.
        types = sorted({str(value.dtype) for value in model.parameters() if value.is_floating_point()})
        mixed = f"; its weights are of types {' and '.join(types)}: choose one by dtype=" if len(types) > 1 else ""
        raise ValueError(f"{refusal}: {one_line(error)}{mixed}") from error


def _apart(one: Tensor, other: Tensor) -> float:
    """How far apart logits `[pos d_vocab]` are; in narrow types at half of the positions, as experts may change."""
    by_position = (one.float() - other.float()).abs().amax(-1)
    return float(by_position.median() if _is_narrow(one) else by_position.max())


def _is_narrow(logits: Tensor) -> bool:
    return torch.finfo(logits.dtype).eps > 1e-5


def _allowed(logits: Tensor) -> float:
    """How far apart the logits of two ways to compute them may be: many times the rounding, little beside an error."""
    return (0.1 if _is_narrow(logits) else 1e-3) * max(1.0, float(logits.abs().max()))
