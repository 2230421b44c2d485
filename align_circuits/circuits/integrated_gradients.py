"""The runs whose gradients attribution to heads and edges takes: one, or those of integrated gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from align_circuits.hooks.graph import Graph
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.probes import Change
from align_circuits.hooks.residual_edges import EMBEDDED
from align_circuits.run.memory_checks import check_memory
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import CachedPair, Pair
from align_circuits.run.prompt_checks import check_fits
from align_circuits.run.target_metrics import STEPS

AT_BASE = ("atp", "atp_star", "eap")
"""The methods that take gradients in the base run alone; all others are integrated gradients."""


def prepared_pair(
    model: HookedModel,
    pair: Pair,
    method: str,
    steps: int,
    options: RunOptions,
    bytes_of: Callable[[HookedModel, int, int], float],
) -> Pair:
    """Returns the pair with all that its metric needs, once it is checked; `bytes_of` estimates a batch's memory."""
    if steps < 1:
        raise ValueError(f"steps={steps}: integrated gradients take at least 1")
    if pair.metric in STEPS:
        raise ValueError(f"metric={pair.metric!r} has no gradient: choose 'log_prob', 'logit', 'prob' or 'logit_diff'")
    if pair.metric == "kl" and pair.direction == "noise" and method in AT_BASE:
        raise ValueError(
            f"metric='kl' has its minimum in the clean run, where method={method!r} takes its gradient, so that all "
            "scores would be 0: take integrated gradients, direction='denoise', or another metric"
        )
    check_fits(model, pair.clean)
    whole = pair.base.mask.shape[1]

    def needed(length: int) -> float:
        tokens = length * pair.prompts_at_once(length, options)
        return bytes_of(model, tokens, tokens * len(pair.queries) // whole * model.cfg.d_vocab)

    check_memory("attribution", model, needed, whole, ", a smaller RunOptions(batch_size=...)")
    return pair.prepared(model, options)


def gradient_runs(
    method: str, cached: CachedPair, names: Sequence[str], steps: int
) -> Iterator[tuple[Sequence[str], Mapping[str, Change], float]]:
    """Yields the hook points scored in each run with gradients, what is changed in it, and the weight of its gradients.

    EAP takes one run, the base run. Integrated gradients average over `steps` runs on the way from source to base: with
    the embedding moved, or with one sender's output moved.
    """
    if method in AT_BASE:
        yield names, {}, 1.0
        return
    moved = [EMBEDDED] if method == "eap_ig_inputs" else names
    for name in moved:
        # As published, a run in which one sender is moved scores that sender; as released, it scores them all.
        scored = [name] if method == "eap_ig_activations" else names
        share = 1 / steps if method == "eap_ig_activations" else 1 / (steps * len(moved))
        for step in range(1, steps + 1):
            value = cached.between(name, step / steps)
            yield scored, {name: lambda now, value=value: value.to(now.device)}, share


def summed_by_head(product: Tensor, name: str, site: str, cfg: Any) -> Float[Tensor, "prompt column"]:
    """Returns sums over positions; a column for each head or key head that the site has, one for a site of layers."""
    if name.endswith("hook_pattern"):
        score = product.sum((2, 3))
        return score.unflatten(1, (Graph.of(cfg).n_key_heads, -1)).sum(2) if site == "k" else score
    return product.sum((1, 3)) if product.ndim == 4 else product.sum((1, 2))[:, None]
