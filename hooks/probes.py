"""Probes: activations handed to a reducer while the model runs, and never kept."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Probes:
    """Hooks that hand each activation to its reducer and remember that they fired.

    A hook point that a model names but never reaches is silent in TransformerLens: a measurement would rest on
    nothing. So ask `check` after the run.
    """

    def __init__(self, model: Any, reducers: Mapping[str, Callable[[Tensor], None]]):
        """Prepares the hooks.

        Args:
            model: A model with TransformerLens's hooks.
            reducers: What each activation is handed to, by the name of its hook point.

        Raises:
            ValueError: The model has no hook point of that name.
        """
        known = model.hook_dict
        if absent := [name for name in reducers if name not in known]:
            raise ValueError(
                f"no hook point {absent[0]!r} in this {type(model).__name__}: it has {', '.join(list(known)[:8])}, ... "
                "(see model.hook_dict)"
            )
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
