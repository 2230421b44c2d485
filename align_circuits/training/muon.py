"""Muon in float32, with matrices of one shape in one product; PyTorch's, from 2.9 on, takes bfloat16."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

# As published, and as `torch.optim.Muon` has them.
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(Optimizer):
    """Momentum whose update of a matrix is made nearly orthogonal: the algorithm of `torch.optim.Muon` in float32.

    With gradient g, momentum m = .95 and buffer B:

        B <- m B + (1 - m) g,   W <- (1 - lr λ) W - lr sqrt(max(1, rows / columns)) orthogonalized(m B + (1 - m) g).

    Matrices of one shape are made orthogonal together. PyTorch's updates differ by the rounding of bfloat16: by 2 or 3%
    for gradients of full rank, by .17 to .30 where the rank is a quarter of the width, since the iterations enlarge
    what rounding leaves in empty directions (`benchmarks/muon.py`, widths of 256 to 64).

    Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks".
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0):
        """Prepares the optimizer.

        Args:
            matrices: The parameters, each with two dimensions.
            lr: The learning rate.
            weight_decay: λ, the decay of the weights, times the learning rate.

        Raises:
            ValueError: A parameter that is not a matrix.
        """
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay})
        shapes = [tuple(matrix.shape) for group in self.param_groups for matrix in group["params"]]
        if wrong := [shape for shape in shapes if len(shape) != 2]:
            raise ValueError(f"a parameter of shape {wrong[0]}: Muon takes matrices; give others to AdamW")

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Takes one step with the gradients that the parameters have."""
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - MOMENTUM)
                kind = (matrix.shape, matrix.dtype, matrix.device)
                alike[kind].append((matrix, matrix.grad.lerp(buffer, MOMENTUM)))
            # One batch of products for all matrices of a shape; tall ones take longer steps (Jordan et al., 2024).
            for ((n_rows, n_columns), *_), same_shape in alike.items():
                updates = orthogonalized(torch.stack([update for _, update in same_shape]))
                for (matrix, _), update in zip(same_shape, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-group["lr"] * max(1, n_rows / n_columns) ** 0.5)


def orthogonalized(matrices: Float[Tensor, "matrix row column"]) -> Float[Tensor, "matrix row column"]:
    """Returns matrices with the same singular vectors, whose singular values are near 1 (.7 to 1.2 but for tiny ones).

    From X of norm 1 on, five iterations X <- a X + b (X X^T) X + c (X X^T)² X (Jordan et al., 2024).
    """
    n_rows, n_columns = matrices.shape[-2:]
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    # Wide, so that the products below are of the smaller side.
    x = x.mT if n_rows > n_columns else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if n_rows > n_columns else x).to(matrices.dtype)
