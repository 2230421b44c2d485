"""An induction head reduced to three numbers, or two, in front of a classifier."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from align_circuits.papers.abrupt.exemplar_network import Classifier, Ensemble

STRENGTHS = ("alpha", "beta_1", "beta_2")


@dataclass(frozen=True)
class InductionHeadConfig:
    """The shape of an `InductionHead`."""

    n_labels: int
    """L, the number of logits."""
    d_in: int = 64
    """D, the dimensions of a token, which carries no position."""
    d_hidden: int = 128
    """The width of each of the classifier's three hidden layers."""
    n_layers: int = 2
    n_heads: int = 1
    model_name: str = "induction-head"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    @property
    def d_model(self) -> int:
        """Content and buffer."""
        return 2 * self.d_in


class InductionHead(Ensemble):
    """Two attention layers whose only weights are α, β_1 and β_2 (Eqs. 4 to 6), and the classifier of `ExemplarNet`.

        q1_ij ∝ exp(β_1 δ_{i-1,j}),   b_i = Σ_{j<=i} q1_ij c_j,
        q2_nj ∝ exp(α b_j·c_n + β_2 Δ_nj),   out = c_n ⊕ Σ_j q2_nj c_j,

    where c is a token's content and Δ_nj is 1 where n - j is odd, at the labels. All three start at 0. With
    `fixed=("beta_2",)` it is the two-parameter model. Both layers' `hook_pattern` fire, the second for the last query
    alone, `[prompt head 1 key]`.

    Source: Reddy (2024), §3; initial values are not given there.
    """

    alpha: nn.Parameter
    """`[member]`: how much the target's content attends to what matches it in a buffer."""
    beta_1: nn.Parameter
    """`[member]`: how much a token attends to the one before it."""
    beta_2: nn.Parameter
    """`[member]`: how much the target attends to labels."""
    blocks: Any

    def __init__(self, cfg: InductionHeadConfig, seeds: Sequence[int], fixed: Collection[str] = ()):
        """Makes the members.

        Args:
            cfg: The shape.
            seeds: Of the classifiers.
            fixed: Which of alpha, beta_1, beta_2 stay 0.

        Raises:
            ValueError: An unknown name in `fixed`.
        """
        super().__init__(cfg, seeds)
        if unknown := set(fixed) - set(STRENGTHS):
            raise ValueError(f"fixed={sorted(fixed)}: no {sorted(unknown)[0]!r}; choose among {', '.join(STRENGTHS)}")
        for name in STRENGTHS:
            setattr(self, name, self.filled().requires_grad_(name not in fixed))
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.classifier = Classifier(self, 2 * cfg.d_in, cfg.d_hidden, cfg.n_labels)
        self.setup()

    def forward(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """Returns the logits of the last token."""
        tokens = self.by_member(inputs)
        members, n, length, width = tokens.shape
        flat, last = tokens.reshape(members * n, length, width), tokens[:, :, -1]
        before = torch.eye(length, device=tokens.device, dtype=tokens.dtype).roll(-1, 1).tril()
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        pattern = (self.beta_1[:, None, None] * before).masked_fill(later, -torch.inf).softmax(-1)
        pattern = pattern[:, None].expand(-1, n, -1, -1).reshape(members * n, 1, length, length)
        pattern = self.blocks[0].attn.hook_pattern(pattern)[:, 0]
        match = torch.bmm(pattern, torch.bmm(flat, last.reshape(-1, width, 1))).view(members, n, length)
        odd = torch.arange(length, device=tokens.device) % 2 == (length % 2)
        scores = self.alpha[:, None, None] * match + self.beta_2[:, None, None] * odd
        looked = self.blocks[1].attn.hook_pattern(scores.softmax(-1).view(members * n, 1, 1, length))[:, 0]
        read = torch.bmm(looked, flat).view(members, n, width)
        return self.classifier(torch.cat([last, read], -1)).view(*inputs.shape[:-2], -1)

    def logits(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """The same as calling the model: there is nothing to leave out."""
        return self(inputs)


class Layer(nn.Module):
    """A place for the hook point of a pattern."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.hook_pattern = HookPoint()
