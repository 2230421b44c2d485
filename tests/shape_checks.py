"""What checks the package's annotations in tests: jaxtyping where there are shapes, elsewhere beartype alone.

jaxtyping's own import hook would take up to 40% of the time of a test: for the shapes of functions that have none, and
for checks that it makes anew whenever a function inside another, such as a hook, is defined.
"""

import dataclasses
import functools
import inspect
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

_by_jaxtyping = jaxtyping.jaxtyped
_by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_MADE: dict[Any, Any] = {}


def check(stub: Any) -> Any:
    """Beartype's check of a function without a body, which jaxtyping makes of a signature; of a closure once."""
    if "<locals>" not in stub.__qualname__ or stub.__defaults__ or stub.__kwdefaults__:
        return beartype(stub)
    code = stub.__code__
    kinds = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_code)
    annotations = map(repr, stub.__annotations__.items())
    key = (stub.__module__, stub.__qualname__, *code.co_varnames, *kinds, *annotations)
    if key not in _MADE:
        _MADE[key] = beartype(stub)
    return _MADE[key]


def jaxtyped(*given: Any, **how: Any) -> Any:
    """What the import hook writes above each function and class."""
    return _by_jaxtyping(*given, **how) if given else functools.partial(_decorated, **how)  # the hook gives none


def _decorated(given: Any, typechecker: Any) -> Any:
    function = given
    if inspect.isclass(given):
        if not dataclasses.is_dataclass(given) or "__init__" not in vars(given):
            return given
        function = given.__init__
    annotations = function.__annotations__.values()
    if any(map(_may_have_shapes, annotations)):
        return _by_jaxtyping(given, typechecker=typechecker)
    if function is not given:
        given.__init__ = _without_shapes(function)
        return given
    return given if "<locals>" in given.__qualname__ or not annotations else _without_shapes(given)


def _may_have_shapes(annotation: Any) -> bool:
    if isinstance(annotation, str) or (inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)):
        return True
    return any(map(_may_have_shapes, get_args(annotation)))


def _without_shapes(function: Any) -> Any:
    checked = _by_beartype(function)

    @functools.wraps(function)
    def either(*args: Any, **keywords: Any) -> Any:
        return (function if jaxtyping.config.jaxtyping_disable else checked)(*args, **keywords)

    return either


def install() -> None:
    """To be called before the package is imported."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook("align_circuits", "shape_checks.check")
