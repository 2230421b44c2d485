"""What is refused, in a line of a test."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(message: str, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """Fails unless a call raises a ValueError whose message matches."""
    __tracebackhide__ = True
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)
