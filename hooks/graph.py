"""The graph of a model: the parts that write to the residual stream, those that read it, and the edges between them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.hooks.head_names import HeadLike, describe, head_of, heads_of, shared_at

Reading = Literal["q", "k", "v", "mlp", "logits"]
"""The inputs through which the residual stream is read."""


@dataclass(frozen=True)
class Sender:
    """A part that adds to the residual stream: a head, an MLP (no head), or the embedding (neither layer nor head)."""

    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """`input`, `L2H3` or `M2`."""
        if self.layer is None:
            return "input"
        return f"M{self.layer}" if self.head is None else f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Receiver:
    """A part that reads the residual stream: a head's query, a key head's key or value, an MLP, or the logits."""

    site: Reading
    layer: int
    """The logits come after the last layer, as layer `n_layers`."""
    head: int | None = None
    """For `"k"` and `"v"` the key head; None for an MLP and the logits."""
    shared: int = 1
    """How many heads share the key head."""

    @property
    def name(self) -> str:
        """`L2H3.q`; `L2H3.k`, or `L2KV1.k` where heads share keys; `M2`; `logits`."""
        if self.site == "logits":
            return "logits"
        if self.site == "mlp":
            return f"M{self.layer}"
        return f"L{self.layer}{'KV' if self.shared > 1 else 'H'}{self.head}.{self.site}"


@dataclass(frozen=True)
class Graph:
    """All edges of a decoder: each leads from a sender to a receiver that runs after it, along the residual stream.

    Under grouped-query attention the heads that share a key head read one key and one value, so a sender has one edge
    to each and not one for every head.
    """

    n_layers: int
    n_heads: int
    n_key_heads: int
    mlps: bool = True
    """Whether there are MLPs."""
    parallel: bool = False
    """Whether the MLP of a layer reads the same stream as its heads, without their output (GPT-NeoX)."""

    @classmethod
    def of(cls, cfg: Any) -> "Graph":
        """Returns the graph of a model with this configuration."""
        n_key_heads = cfg.n_heads // shared_at(cfg, "k")
        mlps, parallel = not getattr(cfg, "attn_only", False), bool(getattr(cfg, "parallel_attn_mlp", False))
        return cls(cfg.n_layers, cfg.n_heads, n_key_heads, mlps=mlps, parallel=parallel)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """All heads, as pairs of layer and head."""
        return heads_of(self)

    @cached_property
    def senders(self) -> tuple[Sender, ...]:
        """All senders, in the order in which they write."""
        senders = [Sender()]
        for layer in range(self.n_layers):
            senders += [Sender(layer, head) for head in range(self.n_heads)] + [Sender(layer)] * self.mlps
        return tuple(senders)

    @cached_property
    def receivers(self) -> tuple[Receiver, ...]:
        """All receivers, in the order in which they read."""
        shared, key_heads = self.n_heads // self.n_key_heads, range(self.n_key_heads)
        receivers: list[Receiver] = []
        for layer in range(self.n_layers):
            receivers += [Receiver("q", layer, head) for head in range(self.n_heads)]
            receivers += [Receiver(site, layer, head, shared) for site in ("k", "v") for head in key_heads]
            receivers += [Receiver("mlp", layer)] * self.mlps
        return (*receivers, Receiver("logits", self.n_layers))

    @cached_property
    def edges(self) -> Bool[Tensor, "receiver sender"]:
        """The edges, as a mask."""
        rows = [[self._reaches(sender, receiver) for sender in self.senders] for receiver in self.receivers]
        return torch.tensor(rows)

    def sender(self, name: HeadLike) -> int:
        """Returns the index of a sender in `senders`, by its name, or by layer and head.

        Raises:
            KeyError: No sender of that name.
            ValueError: Neither a name nor a head.
        """
        if not isinstance(name, str | tuple):
            raise ValueError(f"{name!r} is no sender: give names or heads, such as ['L1H2', (1, 2), 'M1', 'input']")
        name = name if isinstance(name, str) else describe([head_of(name)])
        receives = name in {receiver.name for receiver in self.receivers}
        hint = f"; {name} reads the residual stream: it is a receiver" if receives else ""
        return _index(name, [sender.name for sender in self.senders], "sender", hint)

    def receiver(self, name: str) -> int:
        """Returns the index of a receiver in `receivers`.

        Raises:
            KeyError: No receiver of that name.
        """
        hint = ""
        # Where heads share keys L2H3.k is no receiver, but L2KV1.k: the hint tells which belong to the head.
        if match := re.match(r"L(\d+)H(\d+)", name):
            layer, head = int(match[1]), int(match[2])
            of_head = (each for each in self.receivers if (each.layer, each.head) == (layer, head // each.shared))
            inputs = ", ".join(receiver.name for receiver in of_head)
            hint = f"; {match[0]} reads through {inputs}" if inputs else ""
        return _index(name, [receiver.name for receiver in self.receivers], "receiver", hint)

    def select(self, edges: Iterable[tuple[HeadLike, str]]) -> Bool[Tensor, "receiver sender"]:
        """Returns a mask of the given edges, pairs of sender and receiver.

        Both by name; a head that sends may also be a pair of layer and head.

        Raises:
            KeyError: No sender or receiver of that name.
            ValueError: No edges, or a receiver that runs before its sender.
        """
        mask = torch.zeros_like(self.edges)
        for edge in edges:
            if not isinstance(edge, tuple | list) or len(edge) != 2 or not isinstance(edge[1], str):
                raise ValueError(f'{edge!r} is no edge: give a pair of sender and receiver, ("L0H1", "L1H0.q")')
            sender, receiver = edge
            index = self.receiver(receiver), self.sender(sender)
            if not self.edges[index]:
                raise ValueError(f"no edge from {sender} to {receiver}: {receiver} reads before {sender} has written")
            mask[index] = True
        # Only now: the edges may come from an iterator, which has no length.
        if not mask.any():
            raise ValueError("no edges: name at least one, as a pair of sender and receiver")
        return mask

    def among(self, heads: Sequence[HeadLike]) -> Bool[Tensor, "receiver sender"]:
        """Returns the edges among the given heads, the embedding, all MLPs and the logits: the circuit of these heads.

        A key head that several heads share belongs to the circuit if one of them does.

        Raises:
            ValueError: A head that the graph does not have.
        """
        chosen = set(heads_of(self, heads))
        writes = [sender.head is None or (sender.layer, sender.head) in chosen for sender in self.senders]
        reads = [
            receiver.head is None
            or any((receiver.layer, receiver.head * receiver.shared + i) in chosen for i in range(receiver.shared))
            for receiver in self.receivers
        ]
        return self.edges & torch.tensor(writes) & torch.tensor(reads)[:, None]

    def _reaches(self, sender: Sender, receiver: Receiver) -> bool:
        if sender.layer is None or sender.layer < receiver.layer:
            return True
        # in a layer of its own a head reaches only the MLP, if that runs after the heads
        is_head = sender.head is not None
        return sender.layer == receiver.layer and is_head and receiver.site == "mlp" and not self.parallel


def _index(name: str, known: Sequence[str], what: str, hint: str) -> int:
    if name not in known:
        raise KeyError(f"no {what} {name!r} in this model: it has {', '.join(known[:6])}, ..., {known[-1]}{hint}")
    return known.index(name)
