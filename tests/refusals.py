"""What is refused, in a line of a test."""

from collections.abc import Callable
from typing import Any

import pytest


def raised(error: type[Exception], message: str, function: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """Fails unless a call raises this error, with a message that matches."""
    __tracebackhide__ = True
    with pytest.raises(error, match=message):
        function(*given, **options)


def refused(message: str, function: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """Fails unless a call raises a ValueError whose message matches."""
    __tracebackhide__ = True
    raised(ValueError, message, function, *given, **options)
