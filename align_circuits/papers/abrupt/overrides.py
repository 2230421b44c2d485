"""What is held fixed while a network for exemplars trains: operations of an induction head, given or taken away."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import Probes
from align_circuits.papers.abrupt.exemplar_network import Ensemble
from align_circuits.papers.abrupt.exemplar_task import Exemplars

Hook = tuple[str, Callable[..., Any]]

Hold = Callable[[Exemplars], Sequence[Hook]]
"""From the sequences that a network is about to run on to the hooks under which it runs on them."""

Operation = Literal["look back", "write", "match", "read"]
"""The four of an induction head (Reddy, 2024, Fig. 5): labels attend to the item before; its content is written to
them; the target matches what was written; the label's content is written to the target."""

OPERATIONS: tuple[Operation, ...] = get_args(Operation)


def clamped_to_previous(net: Ensemble, tokens: str = "all") -> Hold:
    """Gives the first operation: the first layer attends to the previous token.

    Args:
        net: Whose hook points.
        tokens: `"all"`, `"labels"` (the items keep their own attention) or `"items"`, the control.

    Raises:
        ValueError: Another word for `tokens`.
    """
    if tokens not in ("all", "labels", "items"):
        raise ValueError(f"tokens={tokens!r}: choose 'all', 'labels' or 'items'")

    def clamp(pattern: Tensor, _: Exemplars) -> Tensor:
        pos = torch.arange(pattern.shape[-1], device=pattern.device)
        before = torch.eye(len(pos), device=pattern.device, dtype=pattern.dtype).roll(-1, 1).tril()
        before[0, 0] = 1
        chosen = {"all": pos >= 0, "labels": pos % 2 == 1, "items": pos % 2 == 0}[tokens]
        return torch.where(chosen[:, None], before, pattern)

    return _held(net, name_of("pattern", 0), clamp)


def clamped_to_label(net: Ensemble, right: bool = True) -> Hold:
    """Gives the third operation: in the second layer the target attends to the labels of its class, evenly, alone.

    Sequences without such a label keep their own attention.

    Args:
        net: Whose hook points.
        right: Whether to the right labels; else to all others, the control.
    """

    def clamp(pattern: Tensor, batch: Exemplars) -> Tensor:
        wanted = (batch.right == right).flatten(0, 1).to(pattern.dtype)
        gold = torch.zeros(len(wanted), pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
        gold[:, 1::2] = wanted / wanted.sum(-1, keepdim=True).clamp(min=1)
        clamped = pattern.clone()
        own = clamped[..., -1, :].view(len(wanted), -1)  # one head
        clamped[..., -1, :] = torch.where(wanted.any(-1, keepdim=True), gold, own).view_as(clamped[..., -1, :])
        return clamped

    return _held(net, name_of("pattern", 1), clamp)


def without_labels(net: Ensemble) -> Hold:
    """Spreads what the target pays to labels and to items as if it could not tell the two apart: TLA2 cannot rise.

    N + 1 of the T = 2N + 1 tokens are items: after the clamp the target pays N/T to labels in all, whatever it has
    learned, while its preference among labels stays.
    """

    def clamp(pattern: Tensor, _: Exemplars) -> Tensor:
        share = pattern.clone()
        length = pattern.shape[-1]
        for start, count in ((0, length // 2 + 1), (1, length // 2)):
            part = pattern[..., -1, start::2]
            share[..., -1, start::2] = part / part.sum(-1, keepdim=True) * (count / length)
        return share

    return _held(net, name_of("pattern", 1), clamp)


def within_context(net: Ensemble) -> Hold:
    """Rules out the labels that are not in the context: CLA is 1 throughout, and nothing can be learned from it.

    The gradient is the same at any fixed CLA, also at chance: with the share of the context's labels given, the loss
    is a constant and the cross-entropy among them. For sequences whose label is in the context; any other has an
    infinite loss, which `train` refuses.
    """

    def clamp(logits: Tensor, batch: Exemplars) -> Tensor:
        present = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, batch.context.flatten(0, 1), True)
        return logits.masked_fill(~present, -torch.inf)

    return _held(net, "classifier.hook_out", clamp)


def without(net: Ensemble, operation: str, elsewhere: bool = False) -> Hold:
    """Takes one of the four operations away, by the attention alone.

    - `"look back"`: labels attend evenly to all tokens up to themselves. Elsewhere: items do.
    - `"write"`: labels read nothing from items in the first layer. Elsewhere: items read nothing from labels.
    - `"match"`: what the target pays to labels is spread evenly over them. Elsewhere: what it pays to items.
    - `"read"`: the target reads nothing from labels in the second layer. Elsewhere: nothing from items.

    To read nothing is a weight of zero after the softmax, the others staying as they are: the same as zero values.

    Args:
        net: Whose hook points.
        operation: Which, an `Operation`.
        elsewhere: Whether to do the same where the operation is not: the control.

    Raises:
        ValueError: No such operation.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r}: choose one of {', '.join(OPERATIONS)}")

    def clamp(pattern: Tensor, _: Exemplars) -> Tensor:
        first, others = (_every_other(pattern, 0), _every_other(pattern, 1))[:: 1 if elsewhere else -1]
        if operation == "look back":
            even = torch.ones_like(pattern).tril()
            return torch.where(first[:, None], even / even.sum(-1, keepdim=True), pattern)
        if operation == "write":
            return pattern.masked_fill(first[:, None] & others, 0)
        if operation == "read":
            return pattern.masked_fill(first, 0)
        return torch.where(first, (pattern * first).sum(-1, keepdim=True) / first.sum(), pattern)

    return _held(net, name_of("pattern", 0 if operation in ("look back", "write") else 1), clamp)


def _every_other(pattern: Float[Tensor, "... key"], start: int) -> Bool[Tensor, " key"]:
    """Where the items are (0), or the labels (1)."""
    return torch.arange(pattern.shape[-1], device=pattern.device) % 2 == start


def _held(net: Ensemble, point: str, clamp: Callable[[Tensor, Exemplars], Tensor]) -> Hold:
    Probes(net, {point: lambda _: None})  # raises where there is no such point

    def hold(batch: Exemplars) -> list[Hook]:
        def change(activation: Tensor, hook: Any = None) -> Tensor:  # noqa: ARG001 - TransformerLens passes the hook point
            return clamp(activation, batch)

        return [(point, change)]

    return hold
