"""What editing heads or layers changes, from TransformerLens's hooks and loops over targets; tables as dictionaries."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from align_circuits.hooks.graph import Graph
from align_circuits.hooks.names import name_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.tables.tables import Table


def measured(prompts: Prompts, logits: Tensor) -> dict[tuple[str, str], list[float]]:
    """Log-probability and accuracy of each target, by kind and metric, from logits [prompt pos d_vocab]."""
    found: dict[tuple[str, str], list[float]] = {}
    columns = prompts.targets[["prompt", "query_pos", "token", "kind"]]
    for row, (prompt, query, token, kind) in enumerate(columns.itertuples(index=False)):
        allowed = [token] if prompts.correct is None else prompts.answer_tokens[prompts.correct[row]].tolist()
        right = int(logits[prompt, query].argmax()) in allowed
        log_prob = float(logits[prompt, query].double().log_softmax(0)[token])
        for which in ("all", kind):
            found.setdefault((which, "log_prob"), []).append(log_prob)
            found.setdefault((which, "accuracy"), []).append(float(right))
    return found


def changes(
    model: Any, prompts: Prompts, site: Any, heads: Iterable[int | None], edit: Callable[[Tensor, int, Any], Tensor]
) -> dict[tuple, float]:
    """The mean change by layer, head, kind and metric, where `edit` takes an activation, its layer and the head."""
    found = {}
    with torch.no_grad():
        before = measured(prompts, model(prompts.tokens))
        for layer in range(model.cfg.n_layers):
            for head in heads:

                def hook(x: Tensor, layer: int = layer, head: Any = head, **_: Any) -> Tensor:
                    return edit(x.clone(), layer, head)

                logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[(name_of(site, layer), hook)])
                for key, after in measured(prompts, logits).items():
                    found[layer, head, *key] = float(np.mean(np.subtract(after, before[key])))
    return found


def z_of(model: Any, prompts: Prompts) -> list[Tensor]:
    """z [prompt pos head d_head] of each layer."""
    with torch.no_grad():
        _, cache = model.run_with_cache(prompts.tokens)
    return [cache["z", layer] for layer in range(2)]


def by_edge(table: Table) -> dict[tuple[str, str], float]:
    frame: Any = table.frame
    return frame.set_index(["sender", "receiver"])["value"].to_dict()


def edges_of(model: Any) -> list[tuple[str, str]]:
    graph = Graph.of(model.cfg)
    return [(graph.senders[j].name, graph.receivers[i].name) for i, j in graph.edges.nonzero().tolist()]


def values_of(table: Table, *keys: str, **where: Any) -> dict[Any, float]:
    """Values by keys, None where a row lacks one."""
    frame: Any = table.where(**where).frame
    rows = frame[[*keys]].astype(object)
    return dict(zip(rows.where(rows.notna(), None).itertuples(index=False, name=None), frame["value"], strict=True))
