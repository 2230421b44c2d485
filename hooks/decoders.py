"""What replay runs: the parts of a decoder-only transformer one by one, without the hooks around them.

A bridge over a Hugging Face model gives its parts through `compat/unhooked.py`; any other model may offer its own
(`HasDecoder`).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from align_circuits.hooks.attention import AttentionFunction, raw_attention, why_not_fast
from align_circuits.hooks.compat import (
    architectures,
    attention_functions,
    bridges,
    onednn,
    rotary_embeddings,
    stored_weights,
    unhooked,
    user_code,
)
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import modules_in
from align_circuits.hooks.names import Site, name_of
from align_circuits.hooks.probes import Change

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary embeddings."""


@runtime_checkable
class Decoder(Protocol):
    """A pre-norm decoder-only transformer, part by part. Rows are prompts, once for each edit set that runs."""

    @property
    def cfg(self) -> Any:
        """`n_layers`, `d_model` and `d_vocab`."""
        ...

    def device_of(self, layer: int) -> torch.device:
        """Returns the device on which a layer runs."""
        ...

    def is_parallel(self, layer: int) -> bool:
        """Whether the MLP of a layer reads what its attention reads."""
        ...

    def embed(
        self, tokens: Int[Tensor, "prompt pos"], positions: Int[Tensor, "#prompt pos"]
    ) -> Float[Tensor, "prompt pos d_model"]:
        """Returns the residual stream before the first layer."""
        ...

    def rotation(
        self, residual: Float[Tensor, "prompt pos d_model"], positions: Int[Tensor, "#prompt pos"]
    ) -> Rotation | None:
        """Returns the angles of rotary embeddings, which all layers share; None where there are none."""
        ...

    def attend(
        self,
        layer: int,
        residual: Float[Tensor, "row pos d_model"],
        attention: AttentionFunction,
        rotation: Rotation | None,
        edits: Mapping[Site, Change],
    ) -> Float[Tensor, "row pos d_model"]:
        """Returns what attention adds to the residual stream.

        Args:
            layer: Which layer.
            residual: The stream before the layer.
            attention: What makes z of queries, keys and values.
            rotation: The angles at the columns that run.
            edits: Of `q` and `k`, before rotation.
        """
        ...

    def sdpa(
        self,
        layer: int,
        query: Float[Tensor, "row head query d_head"],
        key: Float[Tensor, "row key_head pos d_head"],
        value: Float[Tensor, "row key_head pos d_head"],
        mask: Bool[Tensor, "#row 1 query pos"] | None,
        scaling: float,
        *,
        edited: bool,
    ) -> Float[Tensor, "row query head d_head"]:
        """Returns z, by the fused kernel.

        Args:
            layer: Which layer.
            query: After rotation, as keys.
            key: At all positions.
            value: At all positions.
            mask: What each query sees; None means causal, all positions ask.
            scaling: The factor of scores.
            edited: Whether queries, keys or values may be others than the layer's weights make.
        """
        ...

    def output(self, layer: int, z: Float[Tensor, "row pos head*d_head"]) -> Float[Tensor, "row pos d_model"]:
        """Returns what attention adds to the residual stream, from its heads' z side by side."""
        ...

    def mlp(
        self, layer: int, residual: Float[Tensor, "row pos d_model"], edits: Mapping[Site, Change]
    ) -> Float[Tensor, "row pos d_model"]:
        """Returns what the MLP makes of the stream that it reads; `edits` are of `mlp_post`."""
        ...

    def unembed(self, residual: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_vocab"]:
        """Returns logits from the stream after the last layer, on the device of the first."""
        ...


@runtime_checkable
class HasDecoder(Protocol):
    """A model that is no bridge and offers replay its parts."""

    def decoder(self) -> Decoder:
        """Returns the model's parts, which must compute what its `forward` computes."""
        ...

    def why_no_decoder(self) -> str | None:
        """Returns why they would not, as where a hook is attached; None where they do."""
        ...


def rotates_by_length(model: HookedModel) -> bool:
    """Returns whether angles depend on the length of a prompt, so that neither its end nor its beginning runs alone."""
    return bool(rotary_embeddings.rotating_by_length(modules_in(model)))


def why_no_decoder(model: HookedModel) -> str | None:
    """Returns why a model's parts cannot be run without its hooks, or None where they can."""
    if isinstance(model, HasDecoder):
        # First, since `why_not_fast` refuses all that is no bridge.
        return model.why_no_decoder()
    if reason := why_not_fast(model):
        return reason
    if rotates_by_length(model):
        return "its rotary embeddings depend on the length of the prompt, of which replay drops the end"
    if changed_module := user_code.type_with_own_forward(model):
        return f"the forward pass of a {changed_module} is not that of transformers, which replay would pass by"
    hooked = user_code.hooked_modules(modules_in(model))
    return f"PyTorch hooks are attached to its modules ({hooked[0]}), which replay might not fire" if hooked else None


@contextmanager
def decoder_of(model: HookedModel) -> Iterator[Decoder]:
    """Gives the parts of a model for the length of a `with`.

    Raises:
        ValueError: A bridge that the fast path does not apply to (`why_not_fast`).
    """
    if isinstance(model, HasDecoder):
        yield model.decoder()
    else:
        with raw_attention(model), onednn.linear_layers():
            yield _BridgeDecoder(model)


@dataclass(frozen=True)
class _BridgeDecoder:
    """The Hugging Face model in a bridge, inside `raw_attention`; `Decoder` says what the methods do."""

    bridge: Any

    @property
    def cfg(self) -> Any:
        return self.bridge.cfg

    def device_of(self, layer: int) -> torch.device:
        return stored_weights.device_of(self.bridge.blocks[layer])

    def is_parallel(self, layer: int) -> bool:
        return architectures.is_parallel(self.bridge.blocks[layer])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return unhooked.embed(self.bridge, tokens, positions)

    def rotation(self, residual: Tensor, positions: Tensor) -> Rotation | None:
        return rotary_embeddings.rotation(self.bridge, residual, positions)

    def attend(
        self,
        layer: int,
        residual: Tensor,
        attention: AttentionFunction,
        rotation: Rotation | None,
        edits: Mapping[Site, Change],
    ) -> Tensor:
        block = self.bridge.blocks[layer]
        # Not as None: GPT-2's attention, which has learned positions, would hand the argument on to the attention
        # function.
        options: dict[str, Any] = {} if rotation is None else {"position_embeddings": rotation}
        options |= {"attention_mask": None, "attention_function": attention}
        with self._edited(layer, edits):
            return bridges.component(block.attn).forward(unhooked.norm(block.ln1, residual), **options)[0]

    def sdpa(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        *,
        edited: bool,  # noqa: ARG002 - the kernel is the same
    ) -> Tensor:
        module = bridges.component(self.bridge.blocks[layer].attn)
        return attention_functions.sdpa(module, query, key, value, mask, scaling=scaling)[0]

    def output(self, layer: int, z: Tensor) -> Tensor:
        return bridges.component(self.bridge.blocks[layer].attn.o)(z)

    def mlp(self, layer: int, residual: Tensor, edits: Mapping[Site, Change]) -> Tensor:
        block = self.bridge.blocks[layer]
        with self._edited(layer, edits):
            return unhooked.mlp(block.mlp, unhooked.norm(block.ln2, residual))

    def unembed(self, residual: Tensor) -> Tensor:
        return unhooked.unembed(self.bridge, residual)

    def _edited(self, layer: int, edits: Mapping[Site, Change]) -> AbstractContextManager[Any]:
        """Edits what exists only inside a layer of Hugging Face's, where nothing but a hook reaches it."""
        hooks = [(name_of(site, layer), partial(_fired, change)) for site, change in edits.items()]
        # A bridge lists all its hook points even where no hook is to be attached, and this runs in every layer.
        return self.bridge.hooks(fwd_hooks=hooks) if hooks else nullcontext()


def _fired(change: Change, activation: Tensor, hook: Any) -> Tensor | None:  # noqa: ARG001 - TransformerLens's keyword
    return change(activation)
