"""Patching by hand, from raw texts: TransformerLens's hooks, one text at a time, and nothing of this package."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Metric = Callable[[Tensor], float]


def tokens_of(model: Any, text: str) -> Tensor:
    return torch.tensor([model.tokenizer(text)["input_ids"]])


def next_token(model: Any, text: str, answer: str) -> int:
    """The first token of an answer behind a text."""
    return int(tokens_of(model, text + answer)[0, tokens_of(model, text).shape[1]])


def logit_diff(model: Any, text: str, right: str, wrong: str) -> Metric:
    """Of the logits behind the text."""
    one, other = next_token(model, text, right), next_token(model, text, wrong)
    return lambda logits: float(logits[one] - logits[other])


def patched(
    model: Any, base: Sequence[str], source: Sequence[str], metrics: Sequence[Metric], head: Any, *, only_end: bool
) -> float:
    """What a head's output from the source texts changes in the base texts: the mean over texts."""
    name, at = f"blocks.{head[0]}.attn.hook_z", slice(-1, None) if only_end else slice(None)
    changes = []
    for text, other, metric in zip(base, source, metrics, strict=True):
        kept: dict[str, Tensor] = {}

        def keep(z: Tensor, hook: Any, kept: Any = kept) -> None:
            kept[hook.name] = z.clone()

        def put(z: Tensor, hook: Any, kept: Any = kept) -> Tensor:
            z = z.clone()
            z[:, at, head[1]] = kept[hook.name][:, at, head[1]]
            return z

        with torch.no_grad():
            model.run_with_hooks(tokens_of(model, other), fwd_hooks=[(name, keep)])
            before, after = (
                model.run_with_hooks(tokens_of(model, text), fwd_hooks=hooks)[0, -1] for hooks in ([], [(name, put)])
            )
        changes.append(metric(after) - metric(before))
    return sum(changes) / len(changes)


def direct(model: Any, text: str, right: str, wrong: str, head: Any) -> float:
    """What a head of a Llama writes at the end of a text, on the difference of two logits."""
    kept: dict[str, Tensor] = {}
    names = [f"blocks.{head[0]}.attn.hook_z", f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    hooks = [(name, lambda x, name=name, **_: kept.update({name: x[0, -1]})) for name in names]
    with torch.no_grad():
        model.run_with_hooks(tokens_of(model, text), fwd_hooks=hooks)
        plain = model.original_model
        size = model.cfg.d_head
        columns = slice(head[1] * size, (head[1] + 1) * size)
        written = plain.model.layers[head[0]].self_attn.o_proj.weight[:, columns] @ kept[names[0]][head[1]]
        scale = (kept[names[1]].pow(2).mean() + plain.config.rms_norm_eps).sqrt()
        one, other = next_token(model, text, right), next_token(model, text, wrong)
        unembedding = plain.lm_head.weight[one] - plain.lm_head.weight[other]
        return float((written / scale * plain.model.norm.weight) @ unembedding)
