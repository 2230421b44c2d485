"""Linear layers that a bridge splits into parts: whether both still hold the same weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from align_circuits.hooks.compat.bridges import component, is_bridge
from align_circuits.hooks.compat.stored_weights import onloaded


@dataclass(frozen=True, eq=False)
class _Fused:
    """A linear layer whose parts a bridge has split off: queries, keys and values, or both inputs of a gated MLP."""

    linear: Any
    owner: Any
    """The module of Hugging Face that holds it."""
    parts: Sequence[Any]
    """The layers with which the bridge computes."""
    split: Callable[[Any], Sequence[Any]]
    """Returns such parts of an owner anew."""

    @classmethod
    def of(cls, block: Any) -> "Iterator[_Fused]":
        """Yields those of a layer."""
        attention: Any = getattr(block, "attn", None)
        mlp: Any = getattr(block, "mlp", None)
        if (split := getattr(attention, "split_qkv_matrix", None)) is not None:
            parts = [component(getattr(attention, name)) for name in ("q", "k", "v")]
            yield cls(component(getattr(attention, "qkv", None)), component(attention), parts, split)
        if (split := getattr(mlp, "split_gate_up_matrix", None)) is not None:
            parts = [component(getattr(mlp, name)) for name in ("gate", "in")]
            yield cls(component(getattr(component(mlp), mlp.fused_attr, None)), component(mlp), parts, split)

    @contextmanager
    def anew(self) -> "Iterator[list[tuple[Any, Any]]]":
        """Gives the parts, each beside what it would be if it were split now, for the length of a `with`."""
        with onloaded(self.owner), torch.no_grad(), _Undrawn():
            yield list(zip(self.parts, self.split(self.owner), strict=True))

    def differs(self) -> bool:
        """Whether the bridge computes with other weights than the layer has."""
        with self.anew() as pairs:
            for part, part_now in pairs:
                for name in ("weight", "bias"):
                    old, new = getattr(part, name, None), getattr(part_now, name, None)
                    if not (old is new if old is None or new is None else torch.equal(old, new.to(old))):
                        return True
        return False

    def state(self) -> tuple[list[tuple[int, int]], list[Tensor]]:
        """What changes with the weights: how often they were written to and where, and what they make of one vector.

        PyTorch does not count what is written to `.data`: what moves no product by more than rounding is not seen. That
        takes 0.7 ms for 3072 x 1024 numbers, an eighth of their product with 16 tokens, or of comparing them all.
        """
        counts: list[tuple[int, int]] = []
        numbers: list[Tensor] = []
        for weight in (getattr(self.linear, "weight", None), getattr(self.linear, "bias", None)):
            if weight is not None and not weight.is_meta and weight.ndim <= 2:
                # Tensors made in inference mode have no count, and raise when asked.
                counts.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
                weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
                numbers.append(weight @ torch.arange(weight.shape[-1], device=weight.device).to(weight).cos())
        return counts, numbers


_STATES: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Of each bridge the states of its fused layers when their parts were last equal to them."""


def split_weights_differ(bridge: Any) -> int | None:
    """Returns the first layer that a bridge computes by other weights than the fused ones of Hugging Face.

    A bridge splits a fused projection once and computes with the parts: trained, they leave the fused one behind. None
    where none differs, or no projection is fused.
    """
    layers = enumerate(bridge.blocks)
    return next((layer for layer, block in layers if any(fused.differs() for fused in _Fused.of(block))), None)


def remember_fused(bridge: Any) -> None:
    """Notes what the fused layers of a bridge are, whose parts it has just split."""
    _STATES[bridge] = [[fused.state() for fused in _Fused.of(block)] for block in bridge.blocks]


def split_anew(bridge: Any) -> None:
    """Gives a bridge the parts of its fused layers as these are now, in place."""
    for block in bridge.blocks:
        for fused in _Fused.of(block):
            with fused.anew() as pairs:
                for part, part_now in pairs:
                    part.weight.copy_(part_now.weight)
    remember_fused(bridge)


def fused_left_behind(bridge: Any) -> int | None:
    """Returns the first layer with a fused projection that was changed or adapted, but not the parts that compute."""
    for layer, states in enumerate(_STATES.get(bridge, ()) if is_bridge(bridge) else ()):
        for n, (fused, (counts, numbers)) in enumerate(zip(_Fused.of(bridge.blocks[layer]), states, strict=True)):
            if hasattr(fused.linear, "base_layer"):  # PEFT wrapped it: the adapter is not in the parts
                return layer
            counts_now, numbers_now = fused.state()
            pairs = zip(numbers, numbers_now, strict=False)  # as many, if the counts are the same
            if counts != counts_now or not all(torch.equal(old.to(new), new) for old, new in pairs):
                if fused.differs():
                    return layer
                states[n] = counts_now, numbers_now  # written to, but with the same numbers: not compared again
    return None


class _Undrawn(TorchFunctionMode):
    """Makes layers without drawing their first weights, where TransformerLens makes new ones only to fill them.

    The generator belongs to all threads: to draw and put it back would move what another draws meanwhile.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.uniform_, Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
