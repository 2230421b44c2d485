"""The glossary of the documentation: the words that reports define where they first stand, and at their end."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from markupsafe import Markup, escape

from align_circuits.prompts.token_html import Html

_ENTRY = re.compile(r"^(?![#:])(?P<terms>.+)\n: (?P<meaning>.+)$", re.MULTILINE)

_ORDINARY = {"fast", "reference", "group"}
"""Terms that reports mostly use in their everyday sense: these are not linked."""


@dataclass(frozen=True)
class Definition:
    """One entry of the glossary."""

    terms: tuple[str, ...]
    """The words that it defines."""
    meaning: str
    """What they mean, as plain text."""

    @property
    def anchor(self) -> str:
        """The id of the entry on a page."""
        return f"term-{re.sub('[^a-z_]+', '-', self.terms[0].lower())}"


@cache
def glossary() -> tuple[Definition, ...]:
    """Returns all entries of `glossary.md`, in its order."""
    text = files("align_circuits.report").joinpath("glossary.md").read_text(encoding="utf-8")
    return tuple(
        Definition(tuple(entry["terms"].split(", ")), re.sub(r"[*`]", "", entry["meaning"]))
        for entry in _ENTRY.finditer(text)
    )


class Definitions:
    """The definitions that one page needs: collected while its texts are written, listed at its end."""

    def __init__(self):
        self._used: set[Definition] = set()

    @property
    def used(self) -> list[Definition]:
        """The definitions that were linked to, in the order of the glossary."""
        return [entry for entry in glossary() if entry in self._used]

    def linked(self, text: str) -> Html:
        """Returns a text as HTML; a term that stands on the page for the first time links to its definition."""

        def link(match: re.Match[str]) -> str:
            entry = _by_term()[match["term"].lower()]
            if entry in self._used:
                return match[0]
            self._used.add(entry)
            return Markup('<a class="term" href="#{}" data-meaning="{}">{}</a>').format(
                entry.anchor, entry.meaning, Markup(match[0])
            )

        return Html(_pattern().sub(link, escape(text)))


@cache
def _by_term() -> dict[str, Definition]:
    return {term.lower(): entry for entry in glossary() for term in entry.terms if term not in _ORDINARY}


@cache
def _pattern() -> re.Pattern[str]:
    """Finds a term or its plural as a whole word; the longest first, so that no part of a term is taken for another."""
    terms = sorted(_by_term(), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?P<term>{'|'.join(map(re.escape, terms))})s?(?![\w-])", re.IGNORECASE)
