"""Weights from words: named parts of the residual stream, and heads and ReLU units that read some and write others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.models.planted.transformer import HandBuilt

Directions = Float[Tensor, "d_model direction"]
"""Directions of the residual stream, one a column."""


def subspaces(widths: Mapping[str, int]) -> dict[str, Directions]:
    """Returns the basis of each named part of a residual stream, which is just wide enough for all of them.

    >>> parts = subspaces({"symbol": 2, "position": 1})
    >>> parts["position"].T.tolist()
    [[0.0, 0.0, 1.0]]
    """
    bases = torch.eye(sum(widths.values())).split(list(widths.values()), dim=1)
    return dict(zip(widths, bases, strict=True))


@dataclass(frozen=True)
class Match:
    """Adds `weight * <query part, key part>` to a head's attention scores."""

    query: Directions
    key: Directions
    weight: float


@dataclass(frozen=True)
class Move:
    """Writes `weight *` what the attended position holds in `read` into `write`."""

    read: Directions
    write: Directions
    weight: float = 1.0


@dataclass(frozen=True)
class Head:
    """An attention head in words."""

    matches: tuple[Match, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def width(self) -> int:
        """The `d_head` that it needs."""
        return max(sum(match.query.shape[1] for match in self.matches), sum(move.read.shape[1] for move in self.moves))

    def weakened(self, strength: float) -> "Head":
        """Returns the head with its query and key weights multiplied by `strength`, so its scores by its square."""
        weak = (replace(match, query=match.query * strength, key=match.key * strength) for match in self.matches)
        return replace(self, matches=tuple(weak))

    def write(self, model: HandBuilt, layer: int, head: int) -> None:
        """Puts the head into a model whose weights are still zero there."""
        attention = model.blocks[layer].attn
        with torch.no_grad():
            start = 0
            for match in self.matches:
                columns = slice(start, start := start + match.query.shape[1])
                attention.W_Q[head, :, columns] = match.query * match.weight * model.cfg.d_head**0.5
                attention.W_K[head, :, columns] = match.key
            start = 0
            for move in self.moves:
                columns = slice(start, start := start + move.read.shape[1])
                attention.W_V[head, :, columns] = move.read
                attention.W_O[head, columns] = move.write.T * move.weight


@dataclass(frozen=True)
class Units:
    """ReLU units of an MLP: unit i writes `writes[:, i] * relu(<reads[:, i], residual> + bias[i])`."""

    reads: Directions
    bias: Float[Tensor, " direction"]
    writes: Directions

    def write(self, model: HandBuilt, layer: int, start: int) -> int:
        """Puts the units into a model from unit `start` on, and returns the first unit after them."""
        mlp, end = model.blocks[layer].mlp, start + len(self.bias)
        with torch.no_grad():
            mlp.W_in[:, start:end] = self.reads
            mlp.b_in[start:end] = self.bias
            mlp.W_out[start:end] = self.writes.T
        return end


def indicators(number: Float[Tensor, "d_model 1"], first: int, writes: Directions, shift: float = 0.0) -> Units:
    """Returns units that write column i of `writes` where `number + shift` is `first + i`, else nothing (at integers).

    Each indicator is a hat, `relu(x + 1) - 2 relu(x) + relu(x - 1)`; neighbours share units.
    """
    n = writes.shape[1]
    hats = torch.zeros(n + 2, n)
    for i in range(n):
        hats[i : i + 3, i] = torch.tensor([1.0, -2.0, 1.0])
    thresholds = torch.arange(first - 1, first + n + 1)
    return Units(number.expand(-1, n + 2), shift - thresholds, writes @ hats.T)
