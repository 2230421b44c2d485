"""Probes: functions that read or replace activations while a model runs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from align_circuits.hooks import compat
from align_circuits.hooks.hooked_model import HookedModel

Change = Callable[[Tensor], Tensor | None]
"""Takes an activation; returns what replaces it, or None if it only reads."""


class Probes:
    """Hooks that pass each activation to its function and record that they fired: call `check` after the run."""

    def __init__(self, model: HookedModel, changes: Mapping[str, Change]):
        """Prepares the hooks.

        Args:
            model: A model with TransformerLens's hooks.
            changes: The function of each activation, by the name of its hook point.

        Raises:
            ValueError: The model has no hook point of that name.
        """
        known = model.hook_dict
        if unknown := [name for name in changes if name not in known]:
            raise ValueError(
                f"no hook point {unknown[0]!r} in this {type(model).__name__}: it has {', '.join(list(known)[:8])}, "
                "... (see model.hook_dict)"
            )
        self._changes = dict(changes)
        self._silent = set(changes)

    @property
    def fwd_hooks(self) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """The hooks, as `model.hooks(fwd_hooks=...)` and `model.run_with_hooks` take them."""
        return [(name, self._hook(name)) for name in self._changes]

    @property
    def silent(self) -> list[str]:
        """The hook points that have not fired since the probes were made."""
        return sorted(self._silent)

    def check(self) -> None:
        """Raises unless every hook fired since the probes were made.

        Raises:
            ValueError: A hook point never fired.
        """
        # TransformerLens is silent about a hook point that a model names but never computes: a measurement or an edit
        # there would be of nothing.
        if self._silent:
            raise ValueError(
                f"the hook {self.silent[0]!r} never fired: this model does not compute it where TransformerLens names "
                f"it; silent are {len(self._silent)} of {len(self._changes)} hook points"
            )

    def _hook(self, name: str) -> Callable[..., Tensor | None]:
        def fire(activation: Tensor, **_: Any) -> Tensor | None:  # TransformerLens gives `hook=`
            self._silent.discard(name)
            return self._changes[name](activation)

        return fire


def dry_run(model: Any, names: Collection[str]) -> Probes:
    """Returns probes after one run of two tokens, so that `silent` lists the hook points that do not fire.

    A model that reads vectors in place of tokens gives their length as `cfg.d_in`.
    """
    probes = Probes(model, dict.fromkeys(names, lambda _: None))
    first, d_in = next(model.parameters()), getattr(model.cfg, "d_in", None)
    tokens = first.new_zeros(1, 2, dtype=torch.long) if d_in is None else first.new_zeros(1, 2, d_in)
    with torch.no_grad(), evaluating(model):
        model.run_with_hooks(tokens, fwd_hooks=probes.fwd_hooks)
    return probes


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switches dropout off, and afterwards restores the mode of every module."""
    training = {module for module in (*model.modules(), *compat.wrapped(model).modules()) if module.training}
    try:
        if training:  # switching is slow on a bridge
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True
