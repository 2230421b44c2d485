"""Activations with their gradients: one pass forward and one back."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache

from align_circuits.hooks.attention import raw_attention
from align_circuits.hooks.compat import bridges, onednn
from align_circuits.hooks.hooked_model import HookedModel, token_positions
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import Change, Probes, applied, evaluating


@leaves_as_found
def gradients_at(
    model: HookedModel,
    tokens: Int[Tensor, "prompt pos"],
    mask: Bool[Tensor, "prompt pos"],
    names: Collection[str],
    queries: Int[Tensor, " query"],
    scalar: Callable[[Tensor], Tensor],
    changes: Mapping[str, Change] | None = None,
    *,
    fast: bool = False,
    first: int = 0,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns activations, after any change, and the gradient of a scalar with respect to them, by hook point.

    Both are on the device of the tokens. Of several scalars the gradients are stacked, in a first dimension.

    Parameters get no gradients. Prompts do not interact, so the gradient of a sum over prompts holds that of each.

    Args:
        model: A model with TransformerLens's hooks.
        tokens: What it reads.
        mask: True at real tokens.
        names: The hook points.
        queries: The columns whose logits the scalar reads; a wide vocabulary costs more than layers at all others.
        scalar: From logits `[prompt query d_vocab]` to a scalar, or to a vector of several, a pass back each.
        changes: What happens to activations, by hook point; gradients pass through.
        fast: Whether Hugging Face's own attention runs, under which `hook_pattern` does not fire.
        first: With `fast`, the first column whose activations are returned and changed; those before it run once,
            without a gradient, and leave their keys and values.

    Raises:
        ValueError: A hook never fires, or the weights can have no gradient behind them.
    """
    if next(bridges.wrapped(model).parameters()).is_inference():
        raise ValueError(
            f"the weights of this {type(model).__name__} were made in torch.inference_mode, where nothing has a "
            "gradient: make it outside of that mode"
        )
    # The first residual stream is always hooked: with frozen parameters the graph of gradients would begin nowhere.
    stream, changed = name_of("resid_pre", 0), dict(changes or {})
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Change:
        def change(activation: Tensor) -> Tensor:
            activation_now = applied(changed, name, activation)
            kept[name] = activation_now.clone()  # a node of its own, which is passed on
            # The graph may begin here: parameters may be frozen, and activations replaced.
            if not activation_now.requires_grad:
                kept[name].requires_grad_()
            return kept[name]

        return change

    probes = Probes(model, {name: keep(name) for name in dict.fromkeys((stream, *changed, *names))})
    inputs: dict[str, Any] = {} if bool(mask.all()) else {"attention_mask": mask.long()}
    if bridges.is_bridge(model):
        inputs |= {"use_cache": False, "logits_to_keep": queries.cpu() - first}
        if "attention_mask" in inputs:
            inputs["position_ids"] = token_positions(mask)[:, first:]
    with (
        torch.enable_grad(),
        evaluating(model),
        raw_attention(model) if fast else nullcontext(),
        onednn.linear_layers() if fast else nullcontext(),
    ):
        if first:
            inputs |= {"use_cache": True, "past_key_values": _past(model, tokens[:, :first], mask[:, :first])}
        logits = model.run_with_hooks(tokens[:, first:], fwd_hooks=probes.fwd_hooks, **inputs)
        logits = logits if bridges.is_bridge(model) else logits[:, queries.to(logits.device)]
        probes.check()
        if logits.isnan().any():
            padded = not bool(mask.all()) and logits.dtype == torch.float64
            broken = "its weights are broken, or its dtype is too narrow"
            remedy = "take prompts of one length in float64" if padded else broken
            raise ValueError(f"the model's logits are NaN: {remedy}")
        activations = [kept[name] for name in names]
        scalars = scalar(logits)
        passes = [
            # Zeros, not None, for an activation on which the scalar does not depend.
            torch.autograd.grad(one, activations, retain_graph=place < scalars.numel(), materialize_grads=True)
            for place, one in enumerate(scalars.flatten(), 1)
        ]
    gradients = [torch.stack(of_all) if scalars.ndim else of_all[0] for of_all in zip(*passes, strict=True)]
    return {
        name: (kept[name].detach().to(tokens.device), gradient.to(tokens.device))
        for name, gradient in zip(names, gradients, strict=True)
    }


def _past(model: Any, tokens: Int[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"]) -> DynamicCache:
    """The keys and values of the first tokens of prompts."""
    past, positions = DynamicCache(), token_positions(mask)
    with torch.no_grad():
        model(
            tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
    return past
