"""The promise of every function that runs a model: whatever happens, the model and the process are as it found them."""

import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from align_circuits.hooks.compat import bridges, fused_projections, model_state, rotary_embeddings, user_code
from align_circuits.tables.calls import Call
from align_circuits.tables.tables import Table

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

    It runs in the dtype of the model and with gradients where it needs them, also if the caller is in
    `torch.inference_mode` or `torch.autocast`.

    A call waits while another thread runs such a function on the same model, or on one that shares a module with it.
    A table that it returns knows the call (`Table.call`).
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        outer: tuple[tuple[Any, dict[Hashable, Any]], ...] = getattr(_watched, "models", ())
        if any(model is watched for watched, _ in outer):
            return function(*args, **kwargs)
        signals, failed = _Signals(), True
        try:
            # An outer call holds the signals and keeps the filters already.
            if not outer:
                signals.hold()
            with (
                nullcontext() if outer else _filters_kept(),
                nullcontext() if outer else own_modes(),
                one_thread_at_a_time(lambda: bridges.parts_of(model), signals),
            ):
                if (layer := fused_projections.fused_left_behind(model)) is not None:
                    raise ValueError(
                        f"the fused projection of layer {layer} has changed, but TransformerLens computes with the "
                        "parts that it had split from it before: load the Hugging Face model anew"
                    )
                modules = [*bridges.modules_of(model, bridges.wrapped(model))]
                bridges.wire_hooks(modules)
                restore = model_state.remembered(model)
                try:
                    try:
                        _watched.models = (*outer, (model, {}))
                        if (uncalled := user_code.uncalled_user_code(model)) is not None:
                            raise ValueError(
                                f"a hook, a forward pass or attention of your own on a {uncalled} has no effect, since "
                                "TransformerLens computes what it does by itself: give model.add_hook a function for "
                                "a hook point instead"
                            )
                        for rotary in rotary_embeddings.rotating_by_length(modules):
                            rotary_embeddings.rotate_by_prompt(rotary)
                        signals.open = True
                        result = function(*args, **kwargs)
                        failed = False
                        if isinstance(result, Table) and not outer:
                            given = signature(function).bind(*args, **kwargs).arguments
                            arguments = {name: value for name, value in given.items() if name != "model"}
                            result = replace(result, call=Call(function.__name__, arguments))
                        return result
                    finally:
                        signals.open = False
                finally:
                    _watched.models = outer
                    restore(generator=failed)
        finally:
            signals.release()

    wrapper.runs_a_model = True  # pyright: ignore[reportAttributeAccessIssue]
    return cast(Function, wrapper)


@contextmanager
def own_modes() -> Iterator[None]:
    """Leaves the caller's inference mode, where nothing has a gradient, and autocast, which rounds some products."""
    with ExitStack() as stack:
        # Only then, or it would let backward passes run in threads that the caller forbade.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


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
    return once_a_call(model, "modules", lambda: [*bridges.modules_of(model, bridges.wrapped(model))])


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


_turns = threading.Condition()
_taken: dict[int, tuple[int, object]] = {}
"""What threads work with now, by its address: the thread, and the thing itself, so that no other gets its address."""


@contextmanager
def one_thread_at_a_time(things: Callable[[], Iterable[object]], signals: _Signals | None = None) -> Iterator[None]:
    """Waits until no other thread is in such a context with one of the same things, such as a module.

    They are taken all at once, so two calls that share several cannot wait for each other. What one thread enters
    within another such context it never waits for itself.
    """
    me = threading.get_ident()
    with _turns:
        before = {address for address, (thread, _) in _taken.items() if thread == me}
        wanted = [*things()]
        while any(_taken.get(id(thing), (me,))[0] != me for thing in wanted):
            if signals is not None:
                signals.open = True  # what waits can be interrupted
            _turns.wait()
            if signals is not None:
                signals.open = False
            wanted = [*things()]  # the other may have changed the model
        _taken.update({id(thing): (me, thing) for thing in wanted})
    try:
        yield
    finally:
        with _turns:
            for address in [key for key, (thread, _) in _taken.items() if thread == me and key not in before]:
                del _taken[address]
            _turns.notify_all()


_filters_then: list[Callable[[], None]] = []
"""Of each call that runs: what puts the filters of warnings back to where the first of them found them."""


@contextmanager
def _filters_kept() -> Iterator[None]:
    """Puts the filters of warnings back once no call runs in any thread.

    They belong to the process: of two calls side by side, one may find what the other has set for a moment.
    """
    with _turns:
        restore = _filters_then[0] if _filters_then else model_state.remembered_filters()
        _filters_then.append(restore)
    try:
        yield
    finally:
        with _turns:
            # A slice: in a process that was forked meanwhile the list is empty.
            del _filters_then[-1:]
            if not _filters_then:
                restore()


def _forget_other_threads() -> None:
    """In a child process none of them runs."""
    global _turns
    _turns = threading.Condition()
    _taken.clear()
    _filters_then.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
