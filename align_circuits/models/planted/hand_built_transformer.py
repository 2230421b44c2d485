"""A small transformer with TransformerLens's hooks whose weights are set by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

from align_circuits.hooks.attention import AttentionFunction
from align_circuits.hooks.compat import attention_functions, user_code
from align_circuits.hooks.decoders import Rotation
from align_circuits.hooks.hooked_model import token_positions
from align_circuits.hooks.names import Site
from align_circuits.hooks.probes import Change, applied
from align_circuits.models.folder_checks import memory_of_machine, readable_size


@dataclass(frozen=True)
class HandBuiltConfig:
    """The shape of a `HandBuilt` model, in the field names of TransformerLens."""

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    n_key_value_heads: int | None = None
    """Under grouped-query attention: how many heads have keys and values, each for `n_heads` over this of them."""
    model_name: str = "hand-built"
    act_fn: str = "relu"
    normalization_type: None = None
    """There is no LayerNorm, so a head reads exactly what earlier heads wrote."""
    positional_embedding_type: str = "standard"
    attn_only: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32


def check_fits(cfg: HandBuiltConfig) -> None:
    """Raises a ValueError if the weights of a model of this shape, but for its biases, exceed this machine's memory."""
    key_heads = cfg.n_key_value_heads or cfg.n_heads
    layer = 2 * cfg.d_model * (cfg.d_head * (cfg.n_heads + key_heads) + cfg.d_mlp)
    rows = 2 * cfg.d_vocab + cfg.n_ctx
    needed = (cfg.n_layers * layer + rows * cfg.d_model) * cfg.dtype.itemsize
    if needed > memory_of_machine():
        raise ValueError(
            f"a model of {cfg.n_layers:,} layers of {cfg.n_heads:,} heads, {cfg.d_model:,} wide, for prompts of "
            f"{cfg.n_ctx:,} tokens takes {readable_size(needed)} of memory, but this machine has "
            f"{readable_size(memory_of_machine())}: give fewer layers or heads, or a smaller width or n_ctx"
        )


def _of_all_layers(name: str) -> Any:
    """The weights of one name, `[layer head ...]`; of `W_K` and `W_V` those of key heads."""
    return property(lambda model: torch.stack([getattr(block.attn, name) for block in model.blocks]))


class HandBuilt(HookedRootModule):
    """A causal decoder with absolute positions, softmax attention, ReLU MLPs and no normalisation; weights start at 0.

    Its hook points, weights and `cfg` have TransformerLens's names and shapes, so `run_with_cache`, `run_with_hooks`,
    `transformer_lens.patching` and `head_detector` work on it. Positions count from the first real token, so padding
    on the left changes nothing.
    """

    blocks: Any
    """A `HandBuiltBlock` for each layer."""
    W_E: nn.Parameter
    """`[d_vocab d_model]`."""
    W_pos: nn.Parameter
    """`[n_ctx d_model]`."""
    W_U: nn.Parameter
    """`[d_model d_vocab]`."""

    def __init__(self, cfg: HandBuiltConfig, tokenizer: Any = None):
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.W_E = _zeros(cfg, cfg.d_vocab, cfg.d_model)
        self.W_pos = _zeros(cfg, cfg.n_ctx, cfg.d_model)
        self.blocks = nn.ModuleList(HandBuiltBlock(cfg) for _ in range(cfg.n_layers))
        self.W_U = _zeros(cfg, cfg.d_model, cfg.d_vocab)
        self.hook_embed = HookPoint()
        self.hook_pos_embed = HookPoint()
        # TransformerLens's: names the hook points, so all must be there by now.
        self.setup()

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
        if tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(
                f"a prompt of {tokens.shape[1]} tokens, but the model's context is {self.cfg.n_ctx}: "
                "take fewer or shorter examples"
            )
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        position = token_positions(real)
        pos = torch.arange(tokens.shape[1], device=tokens.device)
        # Every position may attend to itself, padding included: a row without any key would be NaN.
        hidden = ((pos > pos[:, None]) | ~real[:, None, :]) & (pos != pos[:, None])
        residual = self.hook_embed(self.W_E[tokens]) + self.hook_pos_embed(self.W_pos[position])
        for block in self.blocks:
            residual = block(residual, hidden[:, None])
        return residual @ self.W_U

    def decoder(self) -> "HandBuiltDecoder":
        """Returns the model's parts, one by one and without hooks (`hooks.decoders.HasDecoder`)."""
        return HandBuiltDecoder(self)

    def why_no_decoder(self) -> str | None:
        """Returns why these parts would not compute what the model does, or None where they would."""
        for name, module in self.named_modules():
            name_shown = name or type(self).__name__
            if getattr(module.forward, "__func__", None) not in _REPLAYED:
                return f"{name_shown} has a forward of its own, which its parts do not compute"
            if user_code.is_hooked(module):
                return f"hooks are attached ({name_shown}), which its parts would not fire"
        return None

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Returns the logits and the activations, as an `ActivationCache` or, unless `return_cache_object`, a dict."""
        logits, cache = super().run_with_cache(*model_args, remove_batch_dim=remove_batch_dim, **kwargs)
        return logits, ActivationCache(cache, self, not remove_batch_dim) if return_cache_object else cache

    def to_tokens(self, text: str | Sequence[str]) -> Int[Tensor, "prompt pos"]:
        """Returns the token ids of one text, or of texts of equal length, with the tokenizer's BOS token."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids")
        texts = [text] if isinstance(text, str) else list(text)
        return torch.tensor(self.tokenizer(texts)["input_ids"], device=self.cfg.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "HandBuilt":
        super()._apply(fn, recurse)
        # TransformerLens reads the device from `cfg`, which `.to()` of a plain module would leave behind.
        self.cfg = replace(self.cfg, device=self.W_E.device, dtype=self.W_E.dtype)
        return self

    W_Q, W_K, W_V, W_O = map(_of_all_layers, ("W_Q", "W_K", "W_V", "W_O"))


class HandBuiltBlock(nn.Module):
    """One layer: attention, then an MLP, each added to the residual stream."""

    def __init__(self, cfg: HandBuiltConfig):
        super().__init__()
        self.attn = HandBuiltAttention(cfg)
        self.mlp = HandBuiltMLP(cfg)
        self.hook_resid_pre = HookPoint()
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(
        self, residual: Float[Tensor, "prompt pos d_model"], hidden: Bool[Tensor, "prompt 1 pos pos"]
    ) -> Float[Tensor, "prompt pos d_model"]:
        """Returns the residual stream after the layer."""
        residual = self.hook_resid_pre(residual)
        residual = self.hook_resid_mid(residual + self.hook_attn_out(self.attn(residual, hidden)))
        return self.hook_resid_post(residual + self.hook_mlp_out(self.mlp(residual)))


class HandBuiltAttention(nn.Module):
    """Softmax attention without biases, with grouped queries where `n_key_value_heads` says so."""

    def __init__(self, cfg: HandBuiltConfig):
        super().__init__()
        key_heads = cfg.n_key_value_heads or cfg.n_heads
        # How many heads share a key head, by the name under which transformers' attention functions look for it.
        self.num_key_value_groups = cfg.n_heads // key_heads
        self.W_Q = _zeros(cfg, cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_K, self.W_V = (_zeros(cfg, key_heads, cfg.d_model, cfg.d_head) for _ in range(2))
        self.W_O = _zeros(cfg, cfg.n_heads, cfg.d_head, cfg.d_model)
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (HookPoint() for _ in range(4))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()

    def forward(
        self, residual: Float[Tensor, "prompt pos d_model"], hidden: Bool[Tensor, "prompt 1 pos pos"]
    ) -> Float[Tensor, "prompt pos d_model"]:
        """Returns the sum of the heads' outputs."""
        q, k, v = (
            hook(torch.einsum("npd,hde->nphe", residual, weight))
            for hook, weight in ((self.hook_q, self.W_Q), (self.hook_k, self.W_K), (self.hook_v, self.W_V))
        )
        k, v = (by_key_head.repeat_interleave(self.num_key_value_groups, 2) for by_key_head in (k, v))
        q, k, v = (by_head.transpose(1, 2) for by_head in (q, k, v))
        if user_code.is_hooked(self.hook_attn_scores) or user_code.is_hooked(self.hook_pattern):
            scores = (q / q.shape[-1] ** 0.5) @ k.mT
            scores = self.hook_attn_scores(scores.masked_fill_(hidden, -torch.inf))
            z = self.hook_pattern(scores.softmax(-1)) @ v
        else:  # a whole pass in .54 to .65 of the time (`benchmarks/hand_built.py`)
            z = functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
        z = self.hook_z(z.transpose(1, 2))
        return torch.einsum("nqhe,hed->nqd", z, self.W_O)


class HandBuiltMLP(nn.Module):
    """One hidden layer of ReLU units."""

    def __init__(self, cfg: HandBuiltConfig):
        super().__init__()
        self.W_in, self.b_in = _zeros(cfg, cfg.d_model, cfg.d_mlp), _zeros(cfg, cfg.d_mlp)
        self.W_out, self.b_out = _zeros(cfg, cfg.d_mlp, cfg.d_model), _zeros(cfg, cfg.d_model)
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, residual: Float[Tensor, "prompt pos d_model"]) -> Float[Tensor, "prompt pos d_model"]:
        """Returns the sum of the units' outputs."""
        return self.hook_post(self.hook_pre(residual @ self.W_in + self.b_in).relu()) @ self.W_out + self.b_out


_REPLAYED = tuple(
    module.forward for module in (HandBuilt, HandBuiltBlock, HandBuiltAttention, HandBuiltMLP, HookPoint, nn.ModuleList)
)
"""What a `HandBuiltDecoder` computes, part by part, or has nothing to do with."""


class HandBuiltDecoder:
    """The parts of a `HandBuilt` model; `hooks.decoders.Decoder` says what the methods do.

    Weights by hand are mostly zeros: heads with nothing to do, and columns of `d_head` that only the widest head needs.
    They are left out, which changes rounding at most, unless an edit may bring something else into them.
    """

    def __init__(self, model: HandBuilt):
        self.cfg = model.cfg
        self._model = model
        self._attention = [_AttentionWeights.of(block.attn) for block in model.blocks]
        # By the output alone: a unit that writes nothing may as well read anything.
        used = [(block.mlp, (block.mlp.W_out != 0).any(1)) for block in model.blocks]
        self._mlps = [(mlp.W_in[:, units], mlp.b_in[units], mlp.W_out[units], mlp.b_out) for mlp, units in used]

    def device_of(self, layer: int) -> torch.device:  # noqa: ARG002 - all layers are on one
        """The device of the weights."""
        return self.cfg.device

    def is_parallel(self, layer: int) -> bool:  # noqa: ARG002 - no layer is
        """False: the MLP reads the stream after attention."""
        return False

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and absolute positions."""
        return self._model.W_E[tokens] + self._model.W_pos[positions]

    def rotation(self, residual: Tensor, positions: Tensor) -> None:  # noqa: ARG002 - there is none
        """None: positions are embedded."""
        return

    def attend(
        self,
        layer: int,
        residual: Tensor,
        attention: AttentionFunction,
        rotation: Rotation | None,  # noqa: ARG002 - there is none
        edits: Mapping[Site, Change],
    ) -> Tensor:
        """The sum of the heads' outputs."""
        weights, module = self._attention[layer], self._model.blocks[layer].attn
        q, k, v = (project(residual) for project in weights.projections)
        q, k, v = (by_head.transpose(1, 2) for by_head in (applied(edits, "q", q), applied(edits, "k", k), v))
        return self.output(layer, attention(module, q, k, v, self.cfg.d_head**-0.5, None).flatten(2))

    def sdpa(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        *,
        edited: bool,
    ) -> Tensor:
        """Attention, head by head at the width that each one's weights have; on a GPU all at once.

        CUDA's kernels take columns only where they are aligned, which PyTorch does not check ("misaligned address").
        """
        weights, module = self._attention[layer], self._model.blocks[layer].attn
        if edited or weights.columns is None or query.is_cuda:
            return attention_functions.sdpa(module, query, key, value, mask, scaling=scaling)[0]
        z = value.new_zeros(len(query), query.shape[2], query.shape[1], query.shape[3])
        for head, (of_scores, of_values) in weights.columns.items():
            shared = head // module.num_key_value_groups
            columns = query[:, head, :, of_scores], key[:, shared, :, of_scores], value[:, shared, :, of_values]
            q, k, v = (by_head[:, None] for by_head in columns)
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
            z[:, :, head, of_values] = attended[:, 0]
        return z

    def output(self, layer: int, z: Tensor) -> Tensor:
        """The sum of the heads' outputs."""
        used, weight = self._attention[layer].output
        return z.index_select(2, used) @ weight

    def mlp(self, layer: int, residual: Tensor, edits: Mapping[Site, Change]) -> Tensor:
        """The sum of the units' outputs."""
        w_in, b_in, w_out, b_out = self._mlps[layer]
        # An edit may bring a number into units that are left out otherwise.
        if edits:
            module = self._model.blocks[layer].mlp
            w_in, b_in, w_out, b_out = module.W_in, module.b_in, module.W_out, module.b_out
        post = applied(edits, "mlp_post", functional.linear(residual, w_in.T, b_in).relu_())
        return functional.linear(post, w_out.T, b_out)

    def unembed(self, residual: Tensor) -> Tensor:
        """Logits."""
        return residual @ self._model.W_U


@dataclass(frozen=True, eq=False)
class _Projection:
    """What the matrices of some heads make of the stream, by one product, without columns of zeros."""

    weight: Float[Tensor, "d_model used"]
    used: Int[Tensor, " used"]
    """The places of its columns among those of all heads."""
    heads: int
    d_head: int

    @classmethod
    def of(cls, weight: Float[Tensor, "head d_model d_head"]) -> "_Projection":
        """Takes the matrices."""
        used = (weight != 0).any(1).flatten().nonzero()[:, 0]
        return cls(weight.transpose(0, 1).flatten(1)[:, used], used, len(weight), weight.shape[2])

    def __call__(self, residual: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos head d_head"]:
        projected, width = residual @ self.weight, self.heads * self.d_head
        if len(self.used) < width:
            projected = residual.new_zeros(*residual.shape[:2], width).index_copy_(2, self.used, projected)
        return projected.unflatten(2, (self.heads, self.d_head))


@dataclass(frozen=True, eq=False)
class _AttentionWeights:
    """The weights of an attention layer without zeros."""

    projections: tuple[_Projection, _Projection, _Projection]
    """To queries, keys and values."""
    output: tuple[Int[Tensor, " used"], Float[Tensor, "used d_model"]]
    """The rows of the output matrix, by their places among those of all heads."""
    columns: Mapping[int, tuple[slice, slice]] | None
    """Of each head that writes anything, the columns of its scores and of its values; None where all have all."""

    @classmethod
    def of(cls, module: HandBuiltAttention) -> "_AttentionWeights":
        """Takes the weights of a layer."""
        used = [(weight != 0).any(1) for weight in (module.W_Q, module.W_K, module.W_V)]
        columns: dict[int, tuple[slice, slice]] = {}
        for head in range(len(module.W_Q)):
            shared = head // module.num_key_value_groups
            if used[2][shared].any():
                scores, values = _alike(used[0][head] & used[1][shared], used[2][shared])
                columns[head] = scores, values
        width = module.W_Q.shape[2]
        dense = len(columns) == len(module.W_Q) and all(slices[0] == slice(0, width) for slices in columns.values())
        w_q, w_k, w_v = (_Projection.of(weight) for weight in (module.W_Q, module.W_K, module.W_V))
        w_o = module.W_O.flatten(0, 1)
        rows = (w_o != 0).any(1).nonzero()[:, 0]
        return cls((w_q, w_k, w_v), (rows, w_o[rows]), None if dense else columns)


def _alike(*used: Bool[Tensor, " d_head"]) -> tuple[slice, ...]:
    """The columns from the first that is used to the last, equally many of each, as the fused kernel asks for."""
    ends = [(int(columns[0]), int(columns[-1]) + 1) if len(columns := mask.nonzero()) else (0, 0) for mask in used]
    most = len(used[0])
    # The kernel takes longer for 9 columns than for 16.
    width = min(most, -(-max(end - first for first, end in ends) // _KERNEL_WIDTH) * _KERNEL_WIDTH)
    starts = [min(first, most - width) for first, _ in ends]
    return tuple(slice(start, start + width) for start in starts)


_KERNEL_WIDTH = 16


def _zeros(cfg: HandBuiltConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, device=cfg.device, dtype=cfg.dtype))
