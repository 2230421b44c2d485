"""What a caller may find changed after a verb, and every verb on small inputs, for the tests of both."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import align_circuits as ac
from align_circuits.circuits.faithful import completeness, minimality
from align_circuits.circuits.pruning import prune_edges
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.task_vector_effects import task_vectors
from align_circuits.hooks.compat import bridges
from align_circuits.run.forward_pass import forward

TASK = ac.Seq2SeqTask(x_len=2, n_examples=2, phrase_len=1)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")


def found(model: Any) -> dict[str, Any]:
    """Everything that a verb must leave as it is: of each module, of each parameter, of the process."""
    modules = {f"{root}{name}": module for root, part in roots(model) for name, module in part.named_modules()}
    bridges.wire_hooks(modules.values())  # a bridge attaches its own in its first run
    state: dict[str, Any] = {}
    for name, module in modules.items():
        state |= {f"{name} {kind}": list(getattr(module, kind).items()) for kind in HOOKS}
        state |= {f"{name} {kind}": list(map(id, getattr(module, kind, ()))) for kind in ("fwd_hooks", "bwd_hooks")}
        state |= {f"{name} training": module.training, f"{name} forward": vars(module).get("forward")}
        for kind, parameter in module.named_parameters(recurse=False):
            state[f"{name}.{kind}"] = (
                parameter.requires_grad,
                id(parameter.grad),
                parameter.dtype,
                parameter.is_inference(),
                parameter._version,
            )
    configs = (getattr(module, "config", None) for module in modules.values())
    return state | {
        "attention": [getattr(config, "_attn_implementation", None) for config in configs],
        "depth of hooks": getattr(model, "context_level", 0),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "filters": (id(warnings.filters), list(warnings.filters)),
        "random": torch.get_rng_state().tolist(),
    }


def roots(model: Any) -> list[tuple[str, nn.Module]]:
    return [("", model), *([("hf.", bridges.wrapped(model))] if bridges.wrapped(model) is not model else [])]


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


Verb = Callable[[Any, ac.Pair, ac.RunOptions], Any]


def _edges(model: Any, pair: ac.Pair, options: ac.RunOptions) -> ac.Table:
    return ac.attribute_edges(model, pair, method="eap", options=options)


def _forward(model: Any, pair: ac.Pair, options: ac.RunOptions) -> str:
    each = torch.arange(len(pair.clean))
    return forward(model, pair.clean, prompt=each, query=each + 3, on_logits=lambda *_: None, options=options)


VERBS: dict[str, Verb] = {
    "score_heads": lambda m, p, o: ac.score_heads(m, p.clean, options=o),
    "evaluate": lambda m, p, o: ac.evaluate(m, p.clean, edits=[ac.Ablate(["L0H1"], how="zero")], options=o),
    "forward": _forward,
    "p_values": lambda m, p, o: p_values(m, p.clean, ["align_query"], options=o),
    "ablate_heads": lambda m, p, o: ac.ablate_heads(m, p.clean, options=o),
    "ablation_baseline": lambda m, p, o: ac.ablation_baseline(m, p.clean, options=o),
    "patch_heads": lambda m, p, o: ac.patch_heads(m, p, sites=("z", "q"), options=o),
    "patch_pattern": lambda m, p, o: ac.patch_heads(m, p, sites=("pattern",), options=o),
    "patch_screened": lambda m, p, o: ac.patch_heads(m, p, sites=("z", "q"), screen=0.3, options=o),
    "ablate_screened": lambda m, p, o: ac.ablate_heads(m, p.clean, screen=0.3, options=o),
    "patch_sites": lambda m, p, o: ac.patch_sites(m, p, options=o),
    "attribute_heads": lambda m, p, o: ac.attribute_heads(m, p, method="atp_star", sites=("q",), options=o),
    "attribute_edges": _edges,
    "patch_edges": lambda m, p, o: ac.patch_edges(m, p, edges=[("L0H1", "logits")], options=o),
    "patch_paths": lambda m, p, o: ac.patch_paths(m, p, options=o),
    "faithfulness": lambda m, p, o: ac.faithfulness(m, p, _edges(m, p, o), fractions=(0.5,), options=o),
    "completeness": lambda m, p, o: completeness(m, [(0, 1)], p, draws=1, options=o),
    "minimality": lambda m, p, o: minimality(m, [(0, 1)], p, options=o),
    "prune_edges": lambda m, p, o: prune_edges(m, p, cut=0.01, options=o),
    "direct_logit_attribution": lambda m, p, o: ac.direct_logit_attribution(m, p.clean, options=o),
    "function_vectors": lambda m, p, o: ac.function_vectors(m, [ac.Pair(p.clean, p.corrupted)], options=o),
    "head_profile": lambda m, p, o: ac.head_profile(m, p.clean, [ac.Pair(p.clean, p.corrupted)], options=o),
    "interchange": lambda m, p, o: ac.interchange_accuracy(m, p, heads=[(0, 1)], options=o),
    "task_vectors": lambda m, p, o: task_vectors(m, [p.clean, p.corrupted], 0, options=o),
    "fwd_hooks": lambda m, _, __: ac.Ablate(["L0H1"], how="zero").fwd_hooks(m),
    "localize": lambda m, _, o: ac.localize(m, TASK, 8, n_controls=1, options=o),
}

WITHOUT_BLOCKS = ("score_heads", "evaluate", "forward", "p_values", "ablate_heads", "patch_heads", "interchange")
"""The verbs that need no more than hooks: they take a module of one's own."""


def pair_of(tokenizer: Any) -> ac.Pair:
    """Two small prompts and their partners."""
    return ac.Pair(*TASK.pairs(TASK.sample(2, tokenizer, seed=0), 0), direction="noise")


def with_a_callers_things(model: Any, *, hooks: bool) -> list[str]:
    """Attaches what a caller may have attached: hooks of all kinds, gradients, frozen weights, a module in training.

    Args:
        model: Of which.
        hooks: Whether TransformerLens's hooks are among them; the fast engine does not run then.

    Returns:
        The calls of the hooks, as they come.
    """
    calls: list[str] = []
    layer = next(module for name, module in bridges.wrapped(model).named_modules() if name.endswith(("mlp", "attn")))
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    if hooks:
        model.add_hook("blocks.0.attn.hook_pattern", lambda _, hook: calls.append(hook.name))
        model.add_hook("blocks.0.attn.hook_z", lambda _, hook: calls.append(hook.name), is_permanent=True)
        model.add_hook("blocks.0.attn.hook_z", lambda *_, **__: None, dir="bwd")
    first, second, *_ = bridges.wrapped(model).parameters()
    first.grad, second.requires_grad = torch.ones_like(first), False
    layer.train()
    return calls
