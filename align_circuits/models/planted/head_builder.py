"""Weights from specifications: named subspaces of the residual stream, and heads and ReLU units between them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.models.planted.hand_built_transformer import HandBuilt

Directions = Float[Tensor, "d_model direction"]
"""Directions of the residual stream, as columns."""

Subspaces = dict[str, Directions]
"""The basis of each subspace of the residual stream, by name."""


def subspaces(widths: Mapping[str, int]) -> Subspaces:
    """Returns orthogonal subspaces of the given widths that together fill the residual stream.

    >>> stream = subspaces({"symbol": 2, "position": 1})
    >>> stream["position"].T.tolist()
    [[0.0, 0.0, 1.0]]
    """
    bases = torch.eye(sum(widths.values())).split(list(widths.values()), dim=1)
    return dict(zip(widths, bases, strict=True))


@dataclass(frozen=True)
class QKTerm:
    """Adds `weight * <query coordinates, key coordinates>` to a head's attention scores."""

    query: Directions
    key: Directions
    weight: float


@dataclass(frozen=True)
class OVTerm:
    """Adds `weight` times the coordinates of the attended position along `read` to those along `write`."""

    read: Directions
    write: Directions
    weight: float = 1.0


@dataclass(frozen=True)
class HeadSpec:
    """An attention head, as the sum of its QK terms and the sum of its OV terms."""

    qk: tuple[QKTerm, ...] = ()
    ov: tuple[OVTerm, ...] = ()

    @property
    def width(self) -> int:
        """The `d_head` that it needs."""
        return max(sum(term.query.shape[1] for term in self.qk), sum(term.read.shape[1] for term in self.ov))

    def weakened(self, strength: float) -> "HeadSpec":
        """Returns the head with its query and key weights multiplied by `strength`, its scores thus by its square."""
        weak = (replace(term, query=term.query * strength, key=term.key * strength) for term in self.qk)
        return replace(self, qk=tuple(weak))

    def write(self, model: HandBuilt, layer: int, head: int) -> None:
        """Sets the weights of a head that are still zero.

        Heads that share a key head have a part of its columns each, so that none reads what another has there.
        """
        attention = model.blocks[layer].attn
        shared, share = divmod(head, attention.num_key_value_groups)
        first = share * (model.cfg.d_head // attention.num_key_value_groups)
        with torch.no_grad():
            start = first
            for term in self.qk:
                columns = slice(start, start := start + term.query.shape[1])
                # Attention divides scores by the root of d_head, which depends on the widest head of the model.
                attention.W_Q[head, :, columns] = term.query * term.weight * model.cfg.d_head**0.5
                attention.W_K[shared, :, columns] = term.key
            start = first
            for term in self.ov:
                columns = slice(start, start := start + term.read.shape[1])
                attention.W_V[shared, :, columns] = term.read
                attention.W_O[head, columns] = term.write.T * term.weight


@dataclass(frozen=True)
class ReLUUnits:
    """ReLU units of an MLP: unit i writes `writes[:, i] * relu(<reads[:, i], residual> + bias[i])`."""

    reads: Directions
    bias: Float[Tensor, " direction"]
    writes: Directions

    def write(self, model: HandBuilt, layer: int, start: int) -> int:
        """Sets the weights of an MLP's units from unit `start` on, and returns the first unit after them."""
        mlp, end = model.blocks[layer].mlp, start + len(self.bias)
        with torch.no_grad():
            mlp.W_in[:, start:end] = self.reads
            mlp.b_in[start:end] = self.bias
            mlp.W_out[start:end] = self.writes.T
        return end


def indicators(number: Float[Tensor, "d_model 1"], first: int, writes: Directions, shift: float = 0.0) -> ReLUUnits:
    """Returns units that write column i of `writes` where `number + shift`, an integer, is `first + i`, else nothing.

    Each indicator is a hat, `relu(x + 1) - 2 relu(x) + relu(x - 1)`; neighbours share units.
    """
    n = writes.shape[1]
    hats = torch.zeros(n + 2, n)
    for i in range(n):
        hats[i : i + 3, i] = torch.tensor([1.0, -2.0, 1.0])
    thresholds = torch.arange(first - 1, first + n + 1)
    return ReLUUnits(number.expand(-1, n + 2), shift - thresholds, writes @ hats.T)
