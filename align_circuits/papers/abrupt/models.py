"""The networks that learn the task: two attention layers and a classifier, and an induction head of three numbers.

Many members at once (`Ensemble`), with TransformerLens's hooks.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

STRENGTHS = ("alpha", "beta_1", "beta_2")


@dataclass(frozen=True)
class NetworkConfig:
    """What the two networks have in common, in the field names of TransformerLens where it has them."""

    n_labels: int
    """L, the number of logits."""
    d_in: int
    """The dimensions of a token: P + D, or D for an `InductionHead`, whose tokens carry no position."""
    _: KW_ONLY
    d_hidden: int = 128
    """The width of each of the classifier's hidden layers."""
    hidden_layers: int = 3
    """How many; with 0 the classifier is linear."""
    n_layers: int = 2
    n_heads: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    @property
    def d_model(self) -> int:
        """What the classifier reads: the residual stream, as wide as a token."""
        return self.d_in


@dataclass(frozen=True, kw_only=True)
class ExemplarNetConfig(NetworkConfig):
    """The shape of an `ExemplarNet`."""

    d_head: int = 128
    """The dimensions of queries and keys."""
    init: float = 63**-0.5
    """The standard deviation of the attention weights at the start."""
    model_name: str = "exemplar-net"
    normalization_type: None = None
    attn_only: bool = True


@dataclass(frozen=True, kw_only=True)
class InductionHeadConfig(NetworkConfig):
    """The shape of an `InductionHead`."""

    model_name: str = "induction-head"

    @property
    def d_model(self) -> int:
        """Content and buffer."""
        return 2 * self.d_in


class Ensemble(HookedRootModule):
    """Networks of one shape with weights of their own, each made from its own seed, that run as one.

    Every parameter has the dimension `member` in front. Hook points see members and prompts as one first dimension,
    members outside.
    """

    def __init__(self, cfg: Any, seeds: Sequence[int]):
        """Prepares the members' generators, one for each seed.

        Raises:
            ValueError: No seeds.
        """
        super().__init__()
        if not len(seeds):
            raise ValueError("no seeds: give one for each member")
        self.cfg, self.seeds = cfg, tuple(seeds)
        digests = [hashlib.sha256(f"exemplar net/{seed}".encode()).digest() for seed in seeds]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(each[:8], "big") >> 1) for each in digests]

    def drawn(self, *shape: int, std: float) -> nn.Parameter:
        """Returns a new parameter; each member's entries come from its own generator."""
        return nn.Parameter(torch.stack([std * torch.randn(*shape, generator=each) for each in self._generators]))

    def zeros(self, *shape: int) -> nn.Parameter:
        """Returns a new parameter that is zero for all members."""
        return nn.Parameter(torch.zeros(len(self.seeds), *shape))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the biases: with the dimension of members they look like matrices to `train`."""
        return {name for name, _ in self.named_parameters() if "biases" in name.split(".")}

    def __len__(self) -> int:
        return len(self.seeds)

    def member(self, index: int) -> "Ensemble":
        """Returns one member, with weights of its own, as an ensemble of one."""
        make: Any = type(self)
        alone = make(self.cfg, [self.seeds[index]]).to(next(self.parameters()))
        alone.load_state_dict({name: tensor[index : index + 1] for name, tensor in self.state_dict().items()})
        return alone

    def by_member(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "member prompt pos d_in"]:
        """Returns the inputs with the dimension of members, which an ensemble of one may be given without.

        Raises:
            ValueError: Inputs for another number of members, or tokens of another size.
        """
        inputs = inputs if inputs.ndim == 4 else inputs[None]
        if len(inputs) != len(self) or inputs.shape[-1] != self.cfg.d_in:
            raise ValueError(
                f"inputs of shape {tuple(inputs.shape)} for {len(self)} members that read {self.cfg.d_in} dimensions: "
                "give [member prompt pos d_in], or [prompt pos d_in] to one member"
            )
        return inputs

    def _apply(self, fn: Any, recurse: bool = True) -> "Ensemble":
        super()._apply(fn, recurse)
        first = next(self.parameters())
        self.cfg = replace(self.cfg, device=first.device, dtype=first.dtype)
        return self


class ExemplarNet(Ensemble):
    """Two attention layers of one head each (Eqs. 2 and 3) and a classifier that reads the last token.

        v_i = u_i + V_1 Σ_{j<=i} p1_ij u_j,   w_i = v_i + V_2 Σ_{j<=i} p2_ij v_j,   p_ij ∝ exp((K u_j)^T (Q u_i)),

    the second layer's keys and queries reading v. No scaling of the scores, no output matrix, no LayerNorm, no biases;
    the classifier is three ReLU layers (`hidden_layers`) and L logits. `forward` computes all of it and fires
    TransformerLens's hook points; `logits`, what training runs, computes only what the last token needs (see there).

    Source: Reddy (2024), §2. Initial values are not given there: N(0, init²) for Q, K, V, and for the classifier
    N(0, 2/fan_in) (He et al., 2015) with zero biases.
    """

    blocks: Any
    """A `Block` for each layer."""
    classifier: "Classifier"

    def __init__(self, cfg: ExemplarNetConfig, seeds: Sequence[int]):
        super().__init__(cfg, seeds)
        self.blocks = nn.ModuleList(Block(self) for _ in range(2))
        self.classifier = Classifier(self)
        self.setup()

    def forward(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """Returns the logits of the last token, with every hook point fired."""
        tokens = self.by_member(inputs)
        residual = tokens.flatten(0, 1)
        for block in self.blocks:
            residual = block(residual)
        last = residual[:, -1].view(*tokens.shape[:2], -1)
        return self.classifier(last).view(*inputs.shape[:-2], -1)

    def logits(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """Returns the same logits several times faster, by products in another order.

        Nothing but the last token's second layer reaches the classifier, so of that layer one query suffices, and every
        other weight matrix meets a single vector a sequence instead of 2N + 1:

            (K_2 v_j)^T (Q_2 v_n) = g^T u_j + Σ_k p1_jk (V_1^T g)^T u_k,   g = K_2^T Q_2 v_n,

        and the first layer's scores are u_j^T (K_1^T Q_1) u_i. Of the hook points those of the classifier fire, and
        the two `hook_pattern`: the first whole, the second for the last query alone, `[prompt head 1 key]`.
        """
        tokens = self.by_member(inputs)
        members, n, length, width = tokens.shape
        flat = tokens.reshape(members * n, length, width)
        first, second = (block.attn for block in self.blocks)
        w_q, w_k, w_v = ([getattr(layer, name)[:, 0] for layer in (first, second)] for name in ("W_Q", "W_K", "W_V"))
        # The first layer's attention at all tokens, for the second layer's keys rest on it; its output v at the last.
        query = torch.bmm(tokens.reshape(members, n * length, width), w_q[0] @ w_k[0].mT)
        scores = torch.bmm(query.view_as(flat), flat.mT)
        pattern = first.hook_pattern(causal(scores)[:, None])[:, 0]
        mixed = torch.bmm(pattern[:, -1:], flat).view(members, n, width)
        v_last = tokens[:, :, -1] + mixed @ w_v[0]
        # The target's scores on all keys v_j: g meets u_j, and V_1^T g meets what the first layer mixed into v_j.
        g = v_last @ w_q[1] @ w_k[1].mT
        both = torch.stack([g, g @ w_v[0].mT], 2).view(members * n, 2, width)
        direct, through = torch.bmm(both, flat.mT).split(1, dim=1)
        scores = direct + torch.bmm(through, pattern.mT)
        target = second.hook_pattern(scores.softmax(-1)[:, None])[:, 0]
        # Σ_j p2_nj v_j in the same way: the tokens that the target attends to, and those that they attended to.
        read = torch.bmm(torch.cat([target, torch.bmm(target, pattern)], 1), flat).view(members, n, 2, width)
        w_last = v_last + (read[:, :, 0] + read[:, :, 1] @ w_v[0]) @ w_v[1]
        return self.classifier(w_last).view(*inputs.shape[:-2], -1)


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
        """Makes the members, whose classifiers come from the seeds; what is `fixed` of the three strengths stays 0.

        Raises:
            ValueError: An unknown name in `fixed`.
        """
        super().__init__(cfg, seeds)
        if unknown := set(fixed) - set(STRENGTHS):
            raise ValueError(f"fixed={sorted(fixed)}: no {sorted(unknown)[0]!r}; choose among {', '.join(STRENGTHS)}")
        for name in STRENGTHS:
            setattr(self, name, self.zeros().requires_grad_(name not in fixed))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": nn.ModuleDict({"hook_pattern": HookPoint()})}) for _ in range(2)
        )
        self.classifier = Classifier(self)
        self.setup()

    def forward(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """Returns the logits of the last token."""
        tokens = self.by_member(inputs)
        alpha, beta_1, beta_2 = (getattr(self, name)[:, None, None] for name in STRENGTHS)
        members, n, length, width = tokens.shape
        flat, last = tokens.reshape(members * n, length, width), tokens[:, :, -1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = beta_1 * previous_token(length, tokens)
        pattern = scores.masked_fill(later, -torch.inf).softmax(-1)
        pattern = pattern[:, None].expand(-1, n, -1, -1).reshape(members * n, 1, length, length)
        pattern = self.blocks[0].attn.hook_pattern(pattern)[:, 0]
        match = torch.bmm(pattern, torch.bmm(flat, last.reshape(-1, width, 1))).view(members, n, length)
        odd = torch.arange(length, device=tokens.device) % 2 == (length % 2)
        scores = alpha * match + beta_2 * odd
        target = self.blocks[1].attn.hook_pattern(scores.softmax(-1).view(members * n, 1, 1, length))[:, 0]
        read = torch.bmm(target, flat).view(members, n, width)
        return self.classifier(torch.cat([last, read], -1)).view(*inputs.shape[:-2], -1)

    def logits(self, inputs: Float[Tensor, "... prompt pos d_in"]) -> Float[Tensor, "... prompt label"]:
        """The same as calling the model: there is nothing to leave out."""
        return self(inputs)


def previous_token(length: int, like: Tensor) -> Float[Tensor, "query key"]:
    """Returns the attention pattern that is 1 at the token before; the first row is empty."""
    return torch.eye(length, device=like.device, dtype=like.dtype).roll(-1, 1).tril()


def causal(scores: Float[Tensor, "prompt query key"]) -> Float[Tensor, "prompt query key"]:
    """Returns the softmax over the keys that are not later than the query."""
    length = scores.shape[-1]
    later = scores.new_full((length, length), -torch.inf).triu(1)
    return (scores + later).mT.softmax(-2).mT  # over a short last dimension PyTorch's kernel is several times slower


class Block(nn.Module):
    """One layer: attention, added to the residual stream."""

    def __init__(self, net: ExemplarNet):
        super().__init__()
        self.attn = Attention(net)
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()

    def forward(self, residual: Float[Tensor, "prompt pos d_model"]) -> Float[Tensor, "prompt pos d_model"]:
        """Returns the residual stream after the layer."""
        residual = self.hook_resid_pre(residual)
        return self.hook_resid_post(residual + self.hook_attn_out(self.attn(residual)))


class Attention(nn.Module):
    """One head without scaling, whose values have the width of the residual stream."""

    def __init__(self, net: ExemplarNet):
        super().__init__()
        cfg = net.cfg
        self.W_Q, self.W_K = (net.drawn(1, cfg.d_in, cfg.d_head, std=cfg.init) for _ in range(2))
        self.W_V = net.drawn(1, cfg.d_in, cfg.d_in, std=cfg.init)
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (HookPoint() for _ in range(4))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()

    def forward(self, residual: Float[Tensor, "prompt pos d_model"]) -> Float[Tensor, "prompt pos d_model"]:
        """Returns what the head reads."""
        members = residual.view(len(self.W_Q), -1, *residual.shape[1:])
        q, k, v = (
            hook(torch.einsum("mnpd,mhde->mnphe", members, weight).flatten(0, 1))
            for hook, weight in ((self.hook_q, self.W_Q), (self.hook_k, self.W_K), (self.hook_v, self.W_V))
        )
        scores = self.hook_attn_scores(torch.einsum("nqhe,nkhe->nhqk", q, k))
        pattern = self.hook_pattern(causal(scores[:, 0])[:, None])
        return self.hook_z(torch.einsum("nhqk,nkhe->nqhe", pattern, v))[:, :, 0]


class Classifier(nn.Module):
    """Hidden ReLU layers and the logits of the labels."""

    def __init__(self, net: Ensemble):
        super().__init__()
        widths = [net.cfg.d_model, *[net.cfg.d_hidden] * net.cfg.hidden_layers, net.cfg.n_labels]
        self.weights = nn.ParameterList(net.drawn(i, o, std=(2 / i) ** 0.5) for i, o in pairwise(widths))
        self.biases = nn.ParameterList(net.zeros(1, width) for width in widths[1:])
        self.hook_in, self.hook_out = HookPoint(), HookPoint()

    def forward(self, read: Float[Tensor, "member prompt d_in"]) -> Float[Tensor, "member prompt label"]:
        """Returns the logits."""
        hidden = self.hook_in(read.flatten(0, 1)).view_as(read)
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            hidden = hidden.relu() if place + 1 < len(self.weights) else hidden
        return self.hook_out(hidden.flatten(0, 1)).view_as(hidden)
