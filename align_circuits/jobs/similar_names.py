"""The name that someone who wrote another one may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns "did you mean ...? " for a name that is close to one of `names`, dashes before it aside."""
    lower = {known.lower().lstrip("-"): known for known in names}
    close = get_close_matches(name.lower().lstrip("-"), list(lower), n=1)
    return f"did you mean {lower[close[0]]!r}? " if close else ""
