"""Interventions on an induction head, while it trains or after: its operations given, removed, or replaced.

Each function takes the network to intervene on, and returns an `Intervention` on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.hooks.edits import Patch
from align_circuits.hooks.names import HeadSite, name_of
from align_circuits.hooks.probes import Probes
from align_circuits.papers.abrupt.models import Ensemble, previous_token
from align_circuits.papers.abrupt.task import Exemplars

Hook = tuple[str, Callable[..., Any]]

Intervention = Callable[[Exemplars], Sequence[Hook]]
"""From the sequences that a network is about to run on to the hooks under which it runs on them."""


@dataclass(frozen=True)
class OperationSite:
    """Where one of the four operations takes place, and where the same change should not matter."""

    description: str
    site: HeadSite
    """The activation that carries it."""
    layer: int
    tokens: str
    """At which tokens: labels, items, or the target."""
    control_tokens: str


OPERATION_SITES = {
    "look back": OperationSite("(i) labels attend to the item before", "pattern", 0, "labels", "items"),
    "write": OperationSite("(ii) the item's content is written to its label", "v", 0, "items", "labels"),
    "match": OperationSite("(iii) the target matches what was written", "q", 1, "target", "items"),
    "read": OperationSite("(iv) the label's content is written to the target", "v", 1, "labels", "items"),
}
"""The four operations of an induction head (Reddy, 2024, Fig. 5), and the only names of operations."""


def attend_to_previous(net: Ensemble, tokens: str = "all") -> Intervention:
    """Gives the first operation: the first layer attends to the previous token.

    At `tokens`: `"all"`, `"labels"` (the items keep their own attention) or `"items"`, the control.

    Raises:
        ValueError: Another value of `tokens`.
    """
    if tokens not in ("all", "labels", "items"):
        raise ValueError(f"tokens={tokens!r}: choose 'all', 'labels' or 'items'")

    def override(pattern: Tensor, _: Exemplars) -> Tensor:
        previous = previous_token(pattern.shape[-1], pattern)
        previous[0, 0] = 1
        rows = _every_other(pattern, tokens == "labels") | (tokens == "all")
        return torch.where(rows[:, None], previous, pattern)

    return _intervention(net, name_of("pattern", 0), override)


def attend_to_label(net: Ensemble, right: bool = True) -> Intervention:
    """Gives the third operation: in the second layer the target attends to the labels of its class, evenly, alone.

    Not `right`, the control: to all other labels. Sequences without such a label keep their own attention.
    """

    def override(pattern: Tensor, batch: Exemplars) -> Tensor:
        chosen = (batch.right == right).flatten(0, 1)[:, None].to(pattern.dtype)  # beside [prompt head], of one head
        overridden = pattern.clone()
        target = overridden[..., -1, :]
        even = torch.zeros_like(target)
        even[..., 1::2] = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
        overridden[..., -1, :] = torch.where(chosen.any(-1, keepdim=True), even, target)
        return overridden

    return _intervention(net, name_of("pattern", 1), override)


def fix_attention_to_labels(net: Ensemble) -> Intervention:
    """Spreads the target's attention over labels and items as if it could not tell the two apart: TLA2 cannot rise.

    N + 1 of the T = 2N + 1 tokens are items: under the intervention the target pays N/T to labels in all, whatever it
    has learned, while its preference among labels stays.
    """

    def override(pattern: Tensor, _: Exemplars) -> Tensor:
        share = pattern.clone()
        length = pattern.shape[-1]
        for start, count in ((0, length // 2 + 1), (1, length // 2)):
            part = pattern[..., -1, start::2]
            share[..., -1, start::2] = part / part.sum(-1, keepdim=True) * (count / length)
        return share

    return _intervention(net, name_of("pattern", 1), override)


def restrict_to_context(net: Ensemble) -> Intervention:
    """Rules out the labels that are not in the context: CLA is 1 throughout, and nothing can be learned from it.

    The gradient is the same at any fixed CLA, also at chance: with the share of the context's labels given, the loss
    is a constant and the cross-entropy among them. For sequences whose label is in the context; any other has an
    infinite loss, which `train` refuses.
    """

    def override(logits: Tensor, batch: Exemplars) -> Tensor:
        present = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, batch.context.flatten(0, 1), True)
        return logits.masked_fill(~present, -torch.inf)

    return _intervention(net, "classifier.hook_out", override)


def remove_operation(net: Ensemble, operation: str, control: bool = False) -> Intervention:
    """Removes one of the four operations, by the attention alone.

    - `"look back"`: labels attend evenly to all tokens up to themselves. Control: items do.
    - `"write"`: labels read nothing from items in the first layer. Control: items read nothing from labels.
    - `"match"`: the target's attention to labels is spread evenly over them. Control: that to items.
    - `"read"`: the target reads nothing from labels in the second layer. Control: nothing from items.

    To read nothing is a weight of zero after the softmax, the others staying as they are: the same as zero values.

    Raises:
        ValueError: No such operation.
    """
    if operation not in OPERATION_SITES:
        raise ValueError(f"operation={operation!r}: choose one of {', '.join(OPERATION_SITES)}")

    def override(pattern: Tensor, _: Exemplars) -> Tensor:
        chosen, others = _every_other(pattern, not control), _every_other(pattern, control)
        if operation == "look back":
            return torch.where(chosen[:, None], even_attention(pattern), pattern)
        if operation == "write":
            return pattern.masked_fill(chosen[:, None] & others, 0)
        if operation == "read":
            return pattern.masked_fill(chosen, 0)
        return torch.where(chosen, (pattern * chosen).sum(-1, keepdim=True) / chosen.sum(), pattern)

    return _intervention(net, name_of("pattern", OPERATION_SITES[operation].layer), override)


INTERVENTIONS: dict[str, Callable[[Any], Intervention | None]] = {
    "nothing": lambda _: None,
    "previous": attend_to_previous,
    "previous, labels": partial(attend_to_previous, tokens="labels"),
    "previous, items": partial(attend_to_previous, tokens="items"),
    "target's label": attend_to_label,
    "TLA2 fixed": fix_attention_to_labels,
    "CLA fixed": restrict_to_context,
    **{f"no {operation}": partial(remove_operation, operation=operation) for operation in OPERATION_SITES},
    **{
        f"no {operation}, elsewhere": partial(remove_operation, operation=operation, control=True)
        for operation in OPERATION_SITES
    },
}
"""Under what a network trains and is measured: nothing; the first layer attending to the previous token, at all tokens
or at one kind; the target attending to its label; a suspected cause fixed; an operation removed, or its control."""


def replace_activation(net: Any, inputs: Float[Tensor, "..."], at: OperationSite, tokens: str, how: str) -> Patch:
    """Returns the patch that replaces the activation of an operation.

    Args:
        net: One member.
        inputs: The sequences that it will run on.
        at: The activation.
        tokens: At which tokens, such as `at.tokens`.
        how: `"patched"`: that of another sequence, the next one. `"ablated"`: the mean over sequences; of attention,
            which sequences share but for their content, even attention.
    """
    name = name_of(at.site, at.layer)
    with torch.no_grad():
        _, cache = net.run_with_cache(inputs)
    values: Tensor = cache[name]
    if how == "patched":
        values = values.roll(1, 0)
    elif at.site == "pattern":
        values = even_attention(values)
    else:
        values = values.mean(0, keepdim=True).expand_as(values)
    pos = torch.arange(inputs.shape[-2], device=inputs.device)
    is_label, is_target = pos % 2 == 1, pos == len(pos) - 1
    positions = {"labels": is_label, "items": ~is_label & ~is_target, "target": is_target}[tokens]
    positions = positions.expand(len(values), -1)
    return Patch(heads=[(at.layer, 0)], site=at.site, positions=positions, values={name: values})


def even_attention(pattern: Float[Tensor, "... query key"]) -> Float[Tensor, "... query key"]:
    """Returns the pattern of the same shape that attends evenly to all tokens up to the query."""
    even = torch.ones_like(pattern).tril()
    return even / even.sum(-1, keepdim=True)


def _every_other(pattern: Float[Tensor, "... key"], start: int) -> Bool[Tensor, " key"]:
    """Where the items are (0), or the labels (1)."""
    return torch.arange(pattern.shape[-1], device=pattern.device) % 2 == start


def _intervention(net: Ensemble, point: str, override: Callable[[Tensor, Exemplars], Tensor]) -> Intervention:
    Probes(net, {point: lambda _: None})  # raises where there is no such point

    def intervene(batch: Exemplars) -> list[Hook]:
        return [(point, lambda activation, hook=None: override(activation, batch))]  # noqa: ARG005 - TransformerLens's signature

    return intervene
