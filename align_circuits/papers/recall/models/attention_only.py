"""One attention layer over one-hot tokens, whose heads write the logits, with TransformerLens's hooks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint


@dataclass(frozen=True)
class AttentionOnlyConfig:
    """The shape of an `AttentionOnly`, in the field names of TransformerLens."""

    d_vocab: int
    """V, the number of tokens."""
    n_ctx: int
    """The longest prompt, which is also the number of positions that have an embedding."""
    d_head: int = 256
    n_heads: int = 3
    positions: Literal["relative", "absolute"] = "relative"
    """Whether a key's position is its distance from the query (Eq. 1) or from the first token (App. C.3.2)."""
    init: float = 0.02
    """The initial standard deviation of the weights."""
    n_layers: int = 1
    model_name: str = "attention-only"
    normalization_type: None = None
    attn_only: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        if self.positions not in ("relative", "absolute"):
            raise ValueError(f"positions={self.positions!r}: choose 'relative' or 'absolute'")
        for name in ("d_vocab", "n_ctx", "d_head", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")

    @property
    def d_model(self) -> int:
        """D = V + T: a direction for each token, then one for each position."""
        return self.d_vocab + self.n_ctx


class AttentionOnly(HookedRootModule):
    """The sum of softmax heads over one-hot tokens, with positions in the keys only (Eq. 1).

        f^t = Σ_h W_OV^h Σ_{i<=t} p_ti x_i,   p_t = softmax_i((x_i + pos_ti)^T W_KQ^h x_t),   logits = f^t on tokens,

    W_KQ = W_K^T W_Q and W_OV = W_O^T W_V. No residual stream, no scaling of the scores, no biases; embedding and
    unembedding are fixed. `pos_ti` is the direction of the distance t - i, or of i itself with absolute positions.
    A product with a one-hot vector is a row of the matrix, so rows are gathered. Weights without effect (queries and
    values of positions, outputs to them) are left out.

    Hook points and `cfg` have TransformerLens's names. `hook_k` is the keys of the tokens; relative positions are added
    to the scores. `blocks.0.hook_attn_out` is the logits. Padding on the left changes nothing.

    Source: Vasudeva et al. (2026), §4. Initial values are not given there: N(0, init²). Nor is where absolute positions
    are added: here to the keys, as the relative ones.
    """

    blocks: Any
    """The hook points of the one layer."""
    W_Q: nn.Parameter
    """`[head d_vocab d_head]`."""
    W_K: nn.Parameter
    """`[head d_model d_head]`: the keys of tokens, then of positions."""
    W_V: nn.Parameter
    """`[head d_vocab d_head]`."""
    W_O: nn.Parameter
    """`[head d_head d_vocab]`."""

    def __init__(self, cfg: AttentionOnlyConfig, seed: int = 0, tokenizer: Any = None):
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> nn.Parameter:
            values = cfg.init * torch.randn(cfg.n_heads, *shape, generator=generator)
            return nn.Parameter(values.to(cfg.device, cfg.dtype))

        self.W_Q, self.W_K = weights(cfg.d_vocab, cfg.d_head), weights(cfg.d_model, cfg.d_head)
        self.W_V, self.W_O = weights(cfg.d_vocab, cfg.d_head), weights(cfg.d_head, cfg.d_vocab)
        self.blocks = nn.ModuleList([_Block()])
        self.setup()

    @classmethod
    def of_products(
        cls,
        kq: Float[Tensor, "head d_model d_vocab"],
        ov: Float[Tensor, "head d_vocab d_vocab"],
        positions: Literal["relative", "absolute"] = "relative",
    ) -> "AttentionOnly":
        """Makes a model whose W_KQ and W_OV are given, on tokens; `z` is then the paper's g, the tokens attended to.

        Keys and values are the one-hot vectors themselves (so d_head = d_model), queries and outputs hold the products:
        the gradients of `W_Q` and `W_O` are those of W_KQ and W_OV, transposed.
        """
        n_heads, d_model, d_vocab = kq.shape
        shape = AttentionOnlyConfig(d_vocab, d_model - d_vocab, d_model, n_heads, positions, dtype=kq.dtype)
        model = cls(replace(shape, device=kq.device))
        one_hot = torch.eye(d_model, dtype=kq.dtype, device=kq.device)
        with torch.no_grad():
            model.W_K.copy_(one_hot)
            model.W_Q.copy_(kq.mT)
            model.W_V.copy_(one_hot[:d_vocab])
            model.W_O.zero_()
            model.W_O[:, :d_vocab] = ov.mT
        return model

    @property
    def kq(self) -> Float[Tensor, "head d_model d_vocab"]:
        """W_KQ of each head: entry (k, q) is what the key of k adds to the score of query q."""
        return self.W_K @ self.W_Q.mT

    @property
    def ov(self) -> Float[Tensor, "head d_vocab d_vocab"]:
        """W_OV of each head: entry (u, v) is what attending to v adds to the logit of u."""
        return (self.W_V @ self.W_O).mT

    def forward(
        self,
        tokens: Int[Tensor, "prompt pos"],
        attention_mask: Bool[Tensor, "prompt pos"] | Int[Tensor, "prompt pos"] | None = None,
    ) -> Float[Tensor, "prompt pos d_vocab"]:
        """Returns the logits at every position.

        Args:
            tokens: Token ids.
            attention_mask: Non-zero at real tokens, where prompts are padded.

        Raises:
            ValueError: The prompts are longer than the context.
        """
        return self._logits(tokens, attention_mask, 0)

    def last(self, tokens: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt d_vocab"]:
        """Returns the logits at the last position alone, computed for one query; activations have one query too."""
        return self._logits(tokens, None, tokens.shape[1] - 1)[:, 0]

    def logits(self, tokens: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt pos d_vocab"]:
        """Returns the logits of `forward` by products in another order; no hook point fires.

        What a token or a position adds to the score of a query, W_KQ, and a token to the logits, W_OV, are products of
        weights. They are computed once and looked up, so that one product with activations is left,

            f^t = Σ_{h,i} p^h_ti (W_OV^h x_i),

        which takes about half as long where a batch has ten times as many tokens as the vocabulary, and longer where it
        has twice as many (with d_head 64 and 35 tokens, on a CPU: `benchmarks/recall_seeds.py`). Under autocast what is
        looked up stays in the type of the weights, in which their gradients are summed.

        Raises:
            ValueError: The prompts are longer than the context.
        """
        self._refuse_longer(tokens)
        (n, length), heads, d_vocab = tokens.shape, self.cfg.n_heads, self.cfg.d_vocab
        pos = torch.arange(length, device=tokens.device)
        distance = pos[:, None] - pos
        place = distance.clamp(min=0) if self.cfg.positions == "relative" else pos
        kq, ov = (product.mT.to(self.W_Q.dtype) for product in (self.kq, self.ov))
        kq = kq.flatten(1)
        of_query = self.cfg.d_model * tokens[:, :, None]
        scores = kq.index_select(1, (of_query + tokens[:, None]).flatten())
        scores = (scores + kq.index_select(1, (of_query + d_vocab + place).flatten())).view(heads, n, length, length)
        pattern = scores.masked_fill_(distance < 0, -torch.inf).softmax(-1)
        of_head = d_vocab * torch.arange(heads, device=tokens.device)[:, None]
        written = nn.functional.embedding(tokens[:, None] + of_head, ov.flatten(0, 1))
        return pattern.permute(1, 2, 0, 3).flatten(2) @ written.flatten(1, 2)

    def _refuse_longer(self, tokens: Tensor) -> None:
        """Raises if the prompts are longer than the context."""
        if tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(
                f"a prompt of {tokens.shape[1]} tokens, but the model's context is {self.cfg.n_ctx}: take fewer or "
                "shorter examples"
            )

    def _logits(self, tokens: Tensor, attention_mask: Tensor | None, first: int) -> Tensor:
        """The logits from position `first` on."""
        self._refuse_longer(tokens)
        length = tokens.shape[1]
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        hooks = self.blocks[0].attn
        q = hooks.hook_q(_rows(self.W_Q, tokens[:, first:]))
        k, v = hooks.hook_k(_rows(self.W_K, tokens)), hooks.hook_v(_rows(self.W_V, tokens))
        pos = torch.arange(length, device=tokens.device)
        distance = pos[first:, None] - pos
        scores = torch.einsum("nqhe,nkhe->nhqk", q, k)
        of_positions = torch.einsum("nqhe,hpe->nhqp", q, self.W_K[:, self.cfg.d_vocab :][:, :length])
        place = distance.clamp(min=0).expand(len(tokens), -1, -1)
        if self.cfg.positions == "absolute":
            place = (real.cumsum(1) - 1).clamp(min=0)[:, None].expand_as(place)
        scores = scores + of_positions.gather(-1, place[:, None].expand_as(scores))
        hidden = ((distance < 0) | ~real[:, None]) & (distance != 0)  # padding attends to itself: no empty rows
        pattern = hooks.hook_pattern(
            hooks.hook_attn_scores(scores.masked_fill(hidden[:, None], -torch.inf)).softmax(-1)
        )
        z = hooks.hook_z(torch.einsum("nhqk,nkhe->nqhe", pattern, v))
        return self.blocks[0].hook_attn_out(torch.einsum("nqhe,hev->nqv", z, self.W_O))

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Returns the logits and the activations, as an `ActivationCache` or, unless `return_cache_object`, a dict."""
        logits, cache = super().run_with_cache(*model_args, remove_batch_dim=remove_batch_dim, **kwargs)
        return logits, ActivationCache(cache, self, not remove_batch_dim) if return_cache_object else cache

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AttentionOnly":
        super()._apply(fn, recurse)
        self.cfg = replace(self.cfg, device=self.W_Q.device, dtype=self.W_Q.dtype)
        return self


def _rows(weight: Float[Tensor, "head row d_head"], tokens: Int[Tensor, "prompt pos"]) -> Tensor:
    """The product of one-hot tokens with each head's matrix, `[prompt pos head d_head]`."""
    return nn.functional.embedding(tokens, weight.transpose(0, 1).flatten(1)).unflatten(-1, (len(weight), -1))


class _Block(nn.Module):
    """The hook points of the layer."""

    def __init__(self):
        super().__init__()
        self.attn = _Attention()
        self.hook_attn_out = HookPoint()


class _Attention(nn.Module):
    """The hook points of its heads."""

    def __init__(self):
        super().__init__()
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (HookPoint() for _ in range(4))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
