"""Probes: activations handed to a reducer while the model runs, and never kept."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Probes:
    """Hooks that hand each activation to its reducer and remember that they fired.

    A hook point that a model names but never reaches is silent in TransformerLens: a measurement would rest on
    nothing. So ask `check` after the run.

    >>> probes = Probes({"hook_embed": print})
    >>> [name for name, _ in probes.fwd_hooks]
    ['hook_embed']
    """

    def __init__(self, reducers: Mapping[str, Callable[[Tensor], None]]):
        self._reducers = dict(reducers)
        self._silent = set(reducers)

    @property
    def fwd_hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """The hooks, as `model.hooks(fwd_hooks=...)` and `model.run_with_hooks` take them."""
        return [(name, self._hook(name)) for name in self._reducers]

    def check(self) -> None:
        """Raises unless every hook fired since the probes were made.

        Raises:
            ValueError: A hook point never fired.
        """
        if self._silent:
            name = min(self._silent)
            raise ValueError(
                f"the hook {name!r} never fired: this model does not compute it where TransformerLens names it; "
                f"silent are {len(self._silent)} of {len(self._reducers)} hook points"
            )

    def _hook(self, name: str) -> Callable[..., None]:
        def hand_over(activation: Tensor, hook: Any = None) -> None:  # noqa: ARG001 - TransformerLens passes the hook point
            self._silent.discard(name)
            self._reducers[name](activation)

        return hand_over
