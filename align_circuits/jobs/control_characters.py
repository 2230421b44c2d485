"""Texts from outside, such that a terminal or a page shows them as they are."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Returns a text with its control characters escaped: those that move or colour a terminal, or turn the direction.

    Tabs and line breaks stay.

    >>> print(printable("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
