"""The graph of a model: who writes to the residual stream, who reads it, and from whom to whom an edge leads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

Reading = Literal["q", "k", "v", "mlp", "logits"]
"""Through what the residual stream is read."""


@dataclass(frozen=True)
class Sender:
    """What adds to the residual stream: the embedding (layer -1), a head, or an MLP (head -1)."""

    layer: int = -1
    head: int = -1

    @property
    def name(self) -> str:
        """`input`, `L2H3` or `M2`."""
        if self.layer < 0:
            return "input"
        return f"M{self.layer}" if self.head < 0 else f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Receiver:
    """What reads the residual stream: a head through its query, a key head through key or value, an MLP, the logits."""

    site: Reading
    layer: int
    head: int = -1
    """For `"k"` and `"v"` the key head."""
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
    """All edges of a decoder: each goes from a sender to a receiver that runs after it, along the residual stream.

    Under grouped-query attention key and value are read once for all heads that share a key head, so they have one edge
    and not one for each head.
    """

    n_layers: int
    n_heads: int
    n_key_heads: int
    mlps: bool = True
    """Whether there are MLPs."""
    parallel: bool = False
    """Whether the MLP of a layer reads what its heads read, and not what they write (GPT-NeoX)."""

    @classmethod
    def of(cls, cfg: Any) -> "Graph":
        """Returns the graph of a model with this configuration."""
        return cls(
            cfg.n_layers,
            cfg.n_heads,
            getattr(cfg, "n_key_value_heads", None) or cfg.n_heads,
            mlps=not getattr(cfg, "attn_only", False),
            parallel=bool(getattr(cfg, "parallel_attn_mlp", False)),
        )

    @cached_property
    def senders(self) -> tuple[Sender, ...]:
        """All senders, in the order in which they write."""
        layers = (
            [Sender(layer, head) for head in range(self.n_heads)] + [Sender(layer)] * self.mlps
            for layer in range(self.n_layers)
        )
        return (Sender(), *(sender for layer in layers for sender in layer))

    @cached_property
    def receivers(self) -> tuple[Receiver, ...]:
        """All receivers, in the order in which they read."""
        shared = self.n_heads // self.n_key_heads
        return (
            *(
                receiver
                for layer in range(self.n_layers)
                for receiver in (
                    *(Receiver("q", layer, head) for head in range(self.n_heads)),
                    *(Receiver(site, layer, head, shared) for site in ("k", "v") for head in range(self.n_key_heads)),
                    *[Receiver("mlp", layer)] * self.mlps,
                )
            ),
            Receiver("logits", self.n_layers),
        )

    @cached_property
    def edges(self) -> Bool[Tensor, "receiver sender"]:
        """Which edges there are."""
        return torch.tensor(
            [[self._reaches(sender, receiver) for sender in self.senders] for receiver in self.receivers]
        )

    def sender(self, name: str) -> int:
        """Returns the place of a sender among `senders`.

        Raises:
            KeyError: No sender of that name.
        """
        return _place(name, [sender.name for sender in self.senders], "sender")

    def receiver(self, name: str) -> int:
        """Returns the place of a receiver among `receivers`.

        Raises:
            KeyError: No receiver of that name.
        """
        return _place(name, [receiver.name for receiver in self.receivers], "receiver")

    def select(self, edges: Iterable[tuple[str, str]]) -> Bool[Tensor, "receiver sender"]:
        """Returns some edges, pairs of the names of sender and receiver, as a mask.

        Raises:
            KeyError: No sender or receiver of that name.
            ValueError: No edges, or a receiver that runs before its sender.
        """
        mask = torch.zeros_like(self.edges)
        for sender, receiver in edges:
            place = self.receiver(receiver), self.sender(sender)
            if not self.edges[place]:
                raise ValueError(f"no edge from {sender} to {receiver}: {receiver} reads before {sender} has written")
            mask[place] = True
        if not mask.any():
            raise ValueError("no edges: name at least one, as a pair of sender and receiver")
        return mask

    def among(self, heads: Sequence[tuple[int, int]]) -> Bool[Tensor, "receiver sender"]:
        """Returns the edges among some heads, the embedding, all MLPs and the logits: the circuit of a set of heads.

        A key head that several heads share belongs to the circuit if one of them does.

        Raises:
            ValueError: A head that the graph does not have.
        """
        if wrong := [(layer, head) for layer, head in heads if Sender(layer, head) not in self.senders[1:] or head < 0]:
            raise ValueError(
                f"no head L{wrong[0][0]}H{wrong[0][1]}: there are layers 0 to {self.n_layers - 1} with heads 0 to "
                f"{self.n_heads - 1}"
            )
        chosen = set(heads)
        writes = torch.tensor([sender.head < 0 or (sender.layer, sender.head) in chosen for sender in self.senders])
        reads = torch.tensor(
            [
                receiver.head < 0
                or any((receiver.layer, receiver.head * receiver.shared + i) in chosen for i in range(receiver.shared))
                for receiver in self.receivers
            ]
        )
        return self.edges & writes & reads[:, None]

    def _reaches(self, sender: Sender, receiver: Receiver) -> bool:
        own = receiver.site == "mlp" and not self.parallel and sender.head >= 0
        return sender.layer < receiver.layer or (own and sender.layer == receiver.layer)


def _place(name: str, known: Sequence[str], what: str) -> int:
    if name not in known:
        raise KeyError(f"no {what} {name!r} in this model: it has {', '.join(known[:6])}, ..., {known[-1]}")
    return known.index(name)
