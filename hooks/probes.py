"""Probes: functions that read or replace activations while a model runs."""

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from align_circuits.hooks.compat import bridges, stored_weights
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found, modules_in

Change = Callable[[Tensor], Tensor | None]
"""Takes an activation; returns what replaces it, or None if it only reads."""


def applied(changes: Mapping[Any, Change], place: Any, activation: Tensor) -> Tensor:
    """Returns the activation at a place, a hook point or site, after the change there, if there is one."""
    new = changes[place](activation) if place in changes else None
    return activation if new is None else new


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
        check_hook_points(model, changes)
        self._model = model
        self._changes = dict(changes)
        self._silent = set(changes)
        self._replaced: set[str] = set()

    @property
    def fwd_hooks(self) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """The hooks, as `model.hooks(fwd_hooks=...)` and `model.run_with_hooks` take them."""
        return [(name, self._hook(name)) for name in self._changes]

    @property
    def silent(self) -> list[str]:
        """The hook points that have not fired since the probes were made."""
        return sorted(self._silent)

    def check(self) -> None:
        """Raises unless every hook fired since the probes were made, and what replaced activations was computed with.

        Raises:
            ValueError: A hook point never fired, or the model drops what is changed there.
        """
        # TransformerLens is silent about a hook point that a model names but never computes: a measurement or an edit
        # there would be of nothing.
        if self._silent:
            raise ValueError(
                f"the hook {self.silent[0]!r} never fired: this model does not compute it where TransformerLens names "
                f"it; silent are {len(self._silent)} of {len(self._changes)} hook points. Among those that fire are "
                f"{', '.join(_most_alike(self.silent[0], firing(self._model)))}"
            )
        check_lands(self._model, self._replaced)

    def _hook(self, name: str) -> Callable[..., Tensor | None]:
        def fire(activation: Tensor, **_: Any) -> Tensor | None:  # TransformerLens gives `hook=`
            self._silent.discard(name)
            new = self._changes[name](activation)
            if new is not None:
                self._replaced.add(name)
            return new

        return fire


def check_hook_points(model: HookedModel, names: Iterable[str]) -> None:
    """Raises unless a model has hook points of these names.

    Raises:
        ValueError: It lacks one, or one is that of another site.
    """
    known, names = model.hook_dict, list(names)
    for name in names:
        if name.endswith(".mlp.hook_post") and getattr(known.get(name), "name", "").endswith(".mlp.hook_out"):
            raise ValueError(
                f"{name!r} is another name of {known[name].name!r} in this {type(model).__name__}: the neurons of a "
                "mixture of experts have no hook point; take 'mlp_out'"
            )
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    if unknown[0].endswith(".hook_resid_mid"):
        raise ValueError(
            f"no hook point {unknown[0]!r} in this {type(model).__name__}: its attention and its MLP read the same "
            "stream, so there is none between them; take 'resid_pre', 'attn_out' or 'resid_post'"
        )
    raise ValueError(
        f"no hook point {unknown[0]!r} in this {type(model).__name__}: it has "
        f"{', '.join(_most_alike(unknown[0], known))}, ... (see model.hook_dict)"
    )


@leaves_as_found
def firing(model: Any) -> list[str]:
    """Returns the names of all hook points that fire, by a run of two tokens; those to be switched on are left out."""
    fired: set[str] = set()
    hook = [(lambda _: True, lambda _, hook: fired.add(hook.name))]
    with torch.no_grad(), evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns of those that it leaves out
        model.run_with_hooks(_two_tokens(model), fwd_hooks=hook)
    return [name for name, point in model.hook_dict.items() if point.name in fired]


_LANDING: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The hook points of each model at which a change is known to reach what comes after."""


@leaves_as_found
def check_lands(model: Any, names: Collection[str]) -> None:
    """Raises unless a model computes on with what its hooks return at these points; each is tried once a model.

    Where an architecture leaves its attention to Hugging Face, `hook_pattern` shows what was computed elsewhere, and
    what a hook returns is dropped: an edit there would be of nothing, and a table of such edits full of zeros.

    Raises:
        ValueError: A change at one of them changes nothing.
    """
    known = _LANDING.setdefault(model, set())
    if new := [name for name in names if name not in known]:
        landing, dropped = _landing(model, new)
        if dropped:
            raise ValueError(
                f"a change at {dropped[0]!r} changes nothing in this model: "
                f"{getattr(model.cfg, 'architecture', None) or type(model).__name__} only shows there what it computes "
                "elsewhere. Take another hook point" + ", such as that of 'z'" * dropped[0].endswith("pattern")
            )
        known.update(landing)


def _landing(model: Any, names: Collection[str]) -> tuple[list[str], list[str]]:
    """At which hook points a change reaches what comes after, and at which the model drops it.

    It is dropped if it is in no graph of gradients, and noise there moves no logits. A hook point that does not fire
    here is in neither list: the fast engine serves it otherwise, or no token came to its expert.
    """
    tokens = _few_tokens(model)
    generator = torch.Generator().manual_seed(0)
    graph: dict[str, Tensor] = {}
    fired: set[str] = set()

    def noise(activation: Tensor) -> Tensor:
        return torch.randn(activation.shape, generator=generator).to(activation)

    def watched(name: str, activation: Tensor, **_: Any) -> Tensor | None:
        fired.add(name)
        if not activation.is_floating_point():
            return None
        step = graph.setdefault(name, torch.zeros((), device=activation.device, requires_grad=True))
        return activation + step.to(activation) * noise(activation)

    def disturbed(activation: Tensor, **_: Any) -> Tensor:
        if not activation.is_floating_point():
            return torch.zeros_like(activation)
        return noise(activation) * (1 + activation.abs().amax())

    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns of hook points whose changes it drops
        with torch.set_grad_enabled(not next(model.parameters()).is_inference()):
            logits = model.run_with_hooks(tokens, fwd_hooks=[(name, partial(watched, name)) for name in names])
            steps = list(graph.values())
            try:
                gradients = (
                    torch.autograd.grad(logits.float().square().sum(), steps, allow_unused=True) if steps else ()
                )
            except RuntimeError:  # weights in codes or of inference mode, parts without gradients: noise tells
                gradients = (None,) * len(steps)
        reached = {name for name, gradient in zip(graph, gradients, strict=True) if gradient is not None}
        with torch.no_grad():
            doubtful = [name for name in names if name in fired - reached]
            logits = model(tokens) if doubtful else logits
            dropped = [
                name
                for name in doubtful
                if torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(name, disturbed)]), logits)
            ]
    return [name for name in names if name in fired and name not in dropped], dropped


def _few_tokens(model: Any) -> Tensor:
    """Eight different tokens, as far as the model has and reads so many; vectors of a model that reads vectors."""
    first, d_in = next(model.parameters()), getattr(model.cfg, "d_in", None)
    length = min(8, getattr(model.cfg, "n_ctx", None) or 8)
    if d_in is not None:
        return torch.randn(1, length, d_in, generator=torch.Generator().manual_seed(0)).to(first)
    words = torch.linspace(0, model.cfg.d_vocab - 1, length).long()[None]
    return words.to(stored_weights.device_of(bridges.wrapped(model)))


def _most_alike(name: str, known: Iterable[str]) -> list[str]:
    """The eight names most like a given one, best first."""
    return difflib.get_close_matches(name, list(known), 8, 0)


def _two_tokens(model: Any) -> Tensor:
    """The shortest input; of a model that reads vectors, whose length is `cfg.d_in`, vectors."""
    first, d_in = next(model.parameters()), getattr(model.cfg, "d_in", None)
    return first.new_zeros(1, 2, dtype=torch.long) if d_in is None else first.new_zeros(1, 2, d_in)


@leaves_as_found
def dry_run(model: Any, names: Collection[str]) -> Probes:
    """Returns probes after one run of two tokens, so that `silent` lists the hook points that do not fire."""
    probes = Probes(model, dict.fromkeys(names, lambda _: None))
    with torch.no_grad(), evaluating(model):
        model.run_with_hooks(_two_tokens(model), fwd_hooks=probes.fwd_hooks)
    return probes


def evaluating(model: Any) -> AbstractContextManager[None]:
    """Switches dropout off, and afterwards restores the mode of every module."""
    return bridges.evaluation_of(modules_in(model))
