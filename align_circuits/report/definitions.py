"""The glossary of the documentation: the words that reports define where they first stand, and at their end."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from markupsafe import Markup, escape

from align_circuits.prompts.token_html import Html

_ENTRY = re.compile(r"^(?![#:])(?P<terms>.+)\n: (?P<meaning>.+)$", re.MULTILINE)

_ORDINARY = {"group", "chance"}
"""Terms that reports mostly use in their everyday sense: they are not linked."""

_NEVER = ("The tool", "Engine")
"""Sections of the glossary that no report needs."""

_TRANSLATION = "Tasks of translation"
"""The section whose words only reports on such tasks need: elsewhere they have their everyday sense."""


@dataclass(frozen=True)
class Definition:
    """One entry of the glossary."""

    terms: tuple[str, ...]
    """The words that it defines."""
    meaning: str
    """What they mean, as plain text."""
    section: str
    """The heading above it in the glossary."""
    anchor: str
    """The id of the entry on a page."""


@cache
def glossary() -> tuple[Definition, ...]:
    """Returns all entries of `glossary.md`, in its order."""
    text = files("align_circuits.report").joinpath("glossary.md").read_text(encoding="utf-8")
    return tuple(
        _entry_of(tuple(entry["terms"].split(", ")), entry["meaning"], heading)
        for heading, section in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
        for entry in _ENTRY.finditer(section)
    )


def _entry_of(terms: tuple[str, ...], meaning: str, section: str) -> Definition:
    anchor = "term-" + re.sub("[^a-z_]+", "-", terms[0].lower())
    return Definition(terms, re.sub(r"[*`]", "", meaning), section, anchor)


class Definitions:
    """The definitions that one page needs: collected while its texts are written, listed at its end.

    Args:
        roles: Relations with what a head does that follows one: they take the place of what the glossary says of them.
        translation: Whether the page is about a task of translation, so that phrases and symbols are what those have.
    """

    def __init__(self, roles: Mapping[str, str] | None = None, translation: bool = True):
        left_out = _NEVER if translation else (*_NEVER, _TRANSLATION)
        of_roles = [
            Definition((role,), f"A head that {meaning}.", "", f"role-{number}")
            for number, (role, meaning) in enumerate((roles or {}).items())
        ]
        self._entries = (*(entry for entry in glossary() if entry.section not in left_out), *of_roles)
        self._by_term = {
            str(escape(term)).lower(): entry for entry in self._entries for term in entry.terms if term not in _ORDINARY
        }
        # The longest first, so that no part of a term is taken for another; its plural too, as a whole word.
        terms = "|".join(map(re.escape, sorted(self._by_term, key=len, reverse=True)))
        self._pattern = re.compile(rf"(?<![\w-])(?P<term>{terms})s?(?![\w-])", re.IGNORECASE)
        self._used: set[Definition] = set()

    @property
    def used(self) -> list[Definition]:
        """The definitions that were linked to, in the order of the glossary, then those of roles."""
        return [entry for entry in self._entries if entry in self._used]

    def linked(self, text: str) -> Html:
        """Returns a text as HTML; a term that stands on the page for the first time links to its definition."""

        def link(match: re.Match[str]) -> str:
            entry = self._by_term.get(match["term"].lower())  # which may lengthen a word, and then finds none: "İ"
            if entry is None or entry in self._used:
                return match[0]
            self._used.add(entry)
            return Markup('<a class="term" href="#{}" data-meaning="{}">{}</a>').format(
                entry.anchor, entry.meaning, Markup(match[0])
            )

        return Html(self._pattern.sub(link, escape(text)))
