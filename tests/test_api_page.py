"""Every public name stands in the API reference, exactly once."""

import re
from pathlib import Path
from types import ModuleType

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
