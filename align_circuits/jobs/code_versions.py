"""The version of a function: a hash of the code on which it depends, and of what else its results rest on."""

import ast
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from align_circuits.jobs.identity import PACKAGE, identity_of, release, settings_of_the_process, told, versions


def code_version(function: str) -> str:
    """Returns a hash of the code on which a function depends, and of what else its results rest on.

    It covers the function's module and the modules of this package and of the function's own that it imports, directly
    or not, as syntax trees without docstrings: comments and layout do not change the version. Then the versions of
    Python and of the packages that compute, and the settings of PyTorch. A function of another package counts with its
    closure, its defaults and all that it refers to, as they are now (`identity_of`), and with all of this package.

    Raises:
        ValueError: There is no such function, or it refers to what cannot be told from others, such as an open file.
    """
    module, _, _ = function.partition(":")
    called = function_of(function)
    roots, hashes, waiting = frozenset({PACKAGE, module.partition(".")[0]}), {}, [module]
    while waiting:
        name = waiting.pop()
        if name in hashes:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        # Relative imports count from the package: that is the module itself if it is an `__init__`.
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        hashes[name], imported = _read_module(spec.origin, Path(spec.origin).stat().st_mtime_ns, package, roots)
        waiting += imported
    rests_on = [hashes, versions(), settings_of_the_process()]
    # The modules of this package import each other by name; others take what they need of it when they need it.
    if module.partition(".")[0] != PACKAGE:
        rests_on += [release(), told(f"results of {function!r}", called)]
    return identity_of(rests_on)


def function_of(function: str) -> Callable[..., Any]:
    """Returns a function by its name, `"module:name"`.

    Raises:
        ValueError: It cannot be imported.
    """
    module, _, name = function.partition(":")
    try:
        value = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"function={function!r} cannot be imported ({error}): give 'module:name'") from error
    return value  # pyright: ignore[reportReturnType]


@cache
def _read_module(path: str, _mtime_ns: int, package: str, roots: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    """A hash of a module without its docstrings, and the modules that it imports.

    The time of the last change is an argument so that an edited file is read again: every study asks for the version of
    several functions, and parsing the whole package takes a second.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    imported = tuple(_imports(tree, package, roots))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported


def _imports(tree: ast.Module, package: str, roots: frozenset[str]) -> Iterator[str]:
    """The modules under `roots` that a module of `package` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in roots)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.partition(".")[0] in roots:
                # `from a import b` may mean the module a.b or a name within a: only a look tells.
                names = [f"{base}.{alias.name}" for alias in node.names]
                submodules = [name for name in names if _is_module(name)]
                yield from submodules
                if len(submodules) < len(names):
                    yield base


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
