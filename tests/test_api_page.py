"""Every public name stands in the API reference, exactly once, and every docstring can be read."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from docutils import nodes
from docutils.core import publish_doctree
from sphinx.errors import PycodeError
from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import align_circuits as ac

DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>\w+):: (?P<path>[\w.]+)(?P<options>(?:\n   .*)*)", re.MULTILINE)


def documented(page: str, name: str, module: str) -> int:
    """How many directives of the page document a name, which a module defines."""
    found = 0
    for directive in DIRECTIVE.finditer(page):
        if directive["kind"] != "module":
            found += directive["path"].rpartition(".")[2] == name
        elif (members := re.search(r":members:(.*)", directive["options"])) is not None:
            listed = re.split(r",\s*", members[1].strip()) if members[1].strip() else None
            found += directive["path"] == module if listed is None else name in listed
    return found


def test_every_public_name_is_documented_once():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    public = {name: getattr(ac, name) for name in ac.__all__ if not name.startswith("_")}
    counts = {
        name: documented(page, name, getattr(value, "__module__", ""))
        for name, value in public.items()
        if not isinstance(value, ModuleType)
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert len(counts) > 20
    assert documented(page.replace("align_circuits.tune\n", "align_circuits.other\n"), "tune", "") == 0


def docstrings(owner: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """The docstring of a public thing, and those of its own public parts."""
    yield name, inspect.getdoc(owner) or "", owner
    if inspect.isclass(owner):
        for part, value in vars(owner).items():
            if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod)):
                value = getattr(value, "__func__", value)
                yield f"{name}.{part}", inspect.getdoc(value) or "", value
        try:
            attributes = ModuleAnalyzer.for_module(owner.__module__).find_attr_docs()
        except PycodeError:
            return
        for (of, attribute), lines in attributes.items():
            if of == owner.__name__:
                yield f"{name}.{attribute}", "\n".join(lines), None


def parsed(docstring: str) -> list[str]:
    """What docutils complains of in a docstring, read as Sphinx does."""
    text = str(GoogleDocstring(docstring, cast(Any, Config(napoleon_use_ivar=True))))
    document = publish_doctree(text, settings_overrides={"report_level": 5})
    kinds = document.findall(nodes.system_message)
    return [
        message.astext() for message in kinds if message["level"] >= 2 and "Unknown interpreted" not in str(message)
    ]


def test_every_docstring_parses_and_names_arguments_that_are_there():
    things = [
        each
        for name in ac.__all__
        if not name.startswith("_") and not isinstance(getattr(ac, name), ModuleType | str)
        for each in docstrings(getattr(ac, name), name)
    ]
    assert len(things) > 200 and sum(thing is None for _, _, thing in things) > 40, "attributes too"
    assert [name for name, text, _ in things if not text.strip()] == []
    assert {name: wrong for name, text, _ in things if (wrong := parsed(text))} == {}
    for name, text, thing in things:
        listed = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
        if listed is not None and inspect.isfunction(thing):
            named = re.findall(r"^    \*{0,2}(\w+)(?: \(.*?\))?:", listed[1], re.MULTILINE)
            assert {*named} <= {*inspect.signature(thing).parameters}, name


def test_a_docstring_that_does_not_parse_is_seen():
    assert parsed("Takes *one.\n\nArgs:\n    x: `a.\n")
    assert not parsed("Takes one.\n\nArgs:\n    x: `a`, of :class:`Table`.\n")
