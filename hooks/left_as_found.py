"""The promise of every function that runs a model: whatever happens, the model and the process are as it found them."""

import signal
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, cast

from torch import nn

from align_circuits.hooks import compat

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")

_watched = threading.local()
"""`models`: those that a call further up in this thread already watches, each with what the call has computed once."""


def leaves_as_found(function: Function) -> Function:
    """Makes a function leave the model that is its first argument as it found it, also after an error or an interrupt.

    Hooks of TransformerLens and PyTorch, the attention function, training mode, `requires_grad`, `grad`, the mode of
    autograd and the filters of warnings are what they were; after an exception also the state of the global generator.
    All code that changes them restores them itself; but an interrupt can fall into the middle of that. So they are
    written down here, and while they are restored no handler of a signal runs: it runs right after.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        outer: tuple[tuple[Any, dict[Hashable, Any]], ...] = getattr(_watched, "models", ())
        if any(model is each for each, _ in outer):
            return function(*args, **kwargs)
        if (layer := compat.fused_left_behind(model)) is not None:
            raise ValueError(
                f"the fused projection of layer {layer} has changed, but TransformerLens computes with the q, k and v "
                "that it had split from it before: load the Hugging Face model anew"
            )
        modules = [*compat.modules_of(model, compat.wrapped(model))]
        compat.wire_hooks(modules)
        restore, signals, failed = compat.remembered(model), _Signals(), True
        try:
            _watched.models = (*outer, (model, {}))
            if not outer:
                signals.hold()
            try:
                for rotary in compat.rotating_by_length(modules):
                    compat.rotate_by_prompt(rotary)
                signals.open = True
                result = function(*args, **kwargs)
                failed = False
                return result
            finally:
                signals.open = False
        finally:
            _watched.models = outer
            restore(generator=failed)
            signals.release()

    return cast(Function, wrapper)


def once_a_call(model: Any, key: Hashable, compute: Callable[[], Value]) -> Value:
    """Returns what a function returns, which runs once in the outermost call that watches a model.

    Nothing keeps it longer: between two calls weights may change in ways that leave no trace, such as by `.data`.
    Outside of any call it is computed each time.
    """
    for watched, computed in getattr(_watched, "models", ()):
        if watched is model:
            if key not in computed:
                computed[key] = compute()
            return computed[key]
    return compute()


def modules_in(model: Any) -> Sequence[nn.Module]:
    """Returns the modules of a model and of what it wraps; within a call they are listed once."""
    return once_a_call(model, "modules", lambda: [*compat.modules_of(model, compat.wrapped(model))])


class _Signals:
    """Handlers of signals written in Python, which may raise: held back unless `open`, and no longer after one raised.

    Only the main thread runs such handlers; in others nothing is held.
    """

    def __init__(self) -> None:
        self.open = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: list[int] = []

    def hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in sorted(signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._received)

    def release(self) -> None:
        """Puts the handlers back, and runs those whose signal has come meanwhile."""
        # That of an interrupt last: once it can raise, nothing else is left to do.
        for number in sorted(self._handlers, key=lambda number: number == signal.SIGINT):
            signal.signal(number, self._handlers[number])
        for number in self._waiting:
            signal.raise_signal(number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self.open:
            self._waiting.append(number)
            return
        # Closed before the handler raises, so that no second signal disturbs the clean-up after the first.
        self.open = False
        self._handlers[number](number, frame)
        self.open = True
