"""Methods by name: those of this package, and those that other packages register.

A package registers a function `(model, pair) -> scores` (`benchmarked_head_methods.Localizer`) under the entry-point
group `align_circuits.localizers`, in its `pyproject.toml`:

    [project.entry-points."align_circuits.localizers"]
    my-method = "my_package.module:function"

One that finds edges (`benchmarked_edge_methods.EdgeLocalizer`) goes into the group `align_circuits.edge_localizers`.

For heads `path/file.py:function` or `package.module:function`, whose code is then run, may stand in place of a name.
"""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any

import numpy as np

from align_circuits.checks import described
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.jobs.own_code import load_own, names_in
from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.localizers.benchmarked_edge_methods import EDGE_METHODS, EdgeLocalizer
from align_circuits.localizers.benchmarked_head_methods import METHODS, Localizer
from align_circuits.run.pairs import Pair

GROUP, EDGE_GROUP = "align_circuits.localizers", "align_circuits.edge_localizers"
"""The entry-point groups of methods that find heads, and edges."""


def method_names() -> list[str]:
    """Returns the names of all methods that find heads, those of this package first."""
    return _names(METHODS, GROUP)


def edge_method_names() -> list[str]:
    """Returns the names of all methods that find edges, those of this package first."""
    return _names(EDGE_METHODS, EDGE_GROUP)


def localizer(name: str) -> Localizer:
    """Returns a method that finds heads by its name, or as `file.py:function` (`load_own`).

    Raises:
        ValueError: No such method, or one whose package or file cannot be imported.
    """
    if is_own(name):
        return _of_a_file(name)
    return _method(name, METHODS, GROUP)


def is_own(name: str) -> bool:
    """Returns whether a method is named by the module or file of its function, or by a file alone."""
    return ":" in name or name.endswith(".py")


def edge_localizer(name: str) -> EdgeLocalizer:
    """Returns a method that finds edges by its name.

    Raises:
        ValueError: No such method, or one whose package cannot be imported.
    """
    return _method(name, EDGE_METHODS, EDGE_GROUP)


def _names(own: Mapping[str, Any], group: str) -> list[str]:
    return [*own, *sorted({entry.name for entry in entry_points(group=group)} - set(own))]


def _method(name: str, own: Mapping[str, Any], group: str) -> Any:
    if name in own:
        # A package cannot replace a method of ours, whose numbers are published under its name.
        return own[name]
    entries = list(entry_points(group=group, name=name))
    if not entries:
        known = _names(own, group)
        raise ValueError(f"no method {name!r}: {did_you_mean(name, known)}choose among {', '.join(map(repr, known))}")
    try:
        return entries[0].load()
    except Exception as error:  # whatever an import raises
        raise ValueError(f"the method {name!r} ({entries[0].value}) cannot be loaded: {error}") from error


def _of_a_file(name: str) -> Any:
    """The function that a name leads to, which takes a model and a pair."""
    module, found = load_own("--methods", name)
    # A class can be called too, but makes an object and no scores.
    if callable(found) and not isinstance(found, type):
        try:
            inspect.signature(found).bind("model", "pair")
        except TypeError as error:
            given = inspect.signature(found)
            raise ValueError(
                f"--methods {name} takes {given}: write it to be called as method(model, pair), with a model and a pair"
            ) from error
        return found
    functions = names_in(module, lambda value: isinstance(value, FunctionType))
    *_, function = name.rpartition(":")
    what = f"has no {function}" if found is None else f"has {function}, which is no function"
    what = what if ":" in name else f"is a file: name one of its functions, as {name}:name"
    known = f"it has {functions}" if functions else "write one that takes a model and a pair and returns scores"
    raise ValueError(f"--methods {name}: {module.__name__} {what}; {known}")


def scores_of(name: str, model: HookedModel, pair: Pair, roles: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns what a method scores, by role (`scores_by_role`).

    Raises:
        ValueError: No such method, one of the user's own that raises an error, or scores that are no grid of the
            model's heads, or not for every role.
    """
    method = localizer(name)
    try:
        scores = method(model, pair)
    except Exception as error:  # whatever the user's code raises
        if name in METHODS:
            raise
        calls, code = traceback.extract_tb(error.__traceback__), getattr(method, "__code__", None)
        own = [call for call in calls if code is not None and call.filename == code.co_filename]
        raised_in = (own or calls)[-1]  # where the user's code was, not the library that it called
        where = f"{raised_in.filename}, line {raised_in.lineno}"
        raise ValueError(f"the method {name!r} raised {type(error).__name__}: {error} ({where})") from error
    return scores_by_role(name, scores, model, roles)


def scores_by_role(name: str, scores: Any, model: HookedModel, roles: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns by role what a method returned, once checked: the same for all where it does not tell roles apart.

    Raises:
        ValueError: Scores that are no grid of the model's heads, hold NaN (infinite ones have a rank), or lack a role.
    """
    by_role = scores if isinstance(scores, dict) else dict.fromkeys(roles, scores)
    if lacking := [role for role in roles if role not in by_role]:
        known = ", ".join(by_role) or "no role"
        raise ValueError(f"the method {name!r} returned no scores for {lacking[0]!r}, but for {known}")
    grids, shape = {}, (model.cfg.n_layers, model.cfg.n_heads)
    wanted = f"give a number for each of {shape[0]} layers of {shape[1]} heads, such as table.to_array(metric)"
    for role in roles:
        of_role = f" for {role!r}" if isinstance(scores, dict) else ""
        try:
            grid = np.asarray(by_role[role], dtype=float)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the method {name!r} returned {described(by_role[role])}{of_role}: {wanted}") from error
        if grid.shape != shape:
            raise ValueError(f"the method {name!r} returned an array of shape {grid.shape}{of_role}: {wanted}")
        for layer, head in np.argwhere(np.isnan(grid)):
            raise ValueError(
                f"the method {name!r} returned NaN{of_role} at L{layer}H{head}, which has no rank among the heads: "
                "give each head a number, such as by np.nan_to_num(scores), which turns NaN into 0"
            )
        grids[role] = grid
    return grids
