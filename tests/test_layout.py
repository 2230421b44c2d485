"""The architecture, enforced: data and imports flow one way."""

import ast
import sys
from pathlib import Path

import pytest

import align_circuits

ROOT = Path(align_circuits.__file__).parent

# A module may import what stands on an earlier line, and its own line only where the line is a package.
ORDER = [
    "files",
    "relations",
    "drawing",
    "prompts",
    "stats",
    "tables",
    "emergence",
    "graph",
    "hooks",
    "tasks",
    "models",
    "engine",
    "sweep",
    "metrics",
    "scoring",
    "nulls",
    "evaluate",
    "ablation",
    "patching",
    "outcomes",
    "pairs",
    "decomposition",
    "attribution",
    "paths",
    "faithfulness",
    "contributions",
    "task_vectors",
    "checkpoints",
    "training",
    "clamps",
    "progress",
    "ensembles",
    "pretraining",
    "cells",
    "widgets",
    "plots",
    "watching",
    "tuning",
    "report",
    "findings",
    "localize",
    "experiments",
    "cli",
    "__init__",
]


def room_of(path: Path) -> str:
    """The first part of a module's path below the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[str]:
    """The rooms of the package that a file imports, wherever in the file."""
    rooms = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "align_circuits"
                else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms += [name.split(".")[1] for name in names if name.startswith("align_circuits.")]
    return rooms


MODULES = sorted([*ROOT.rglob("*.py"), *(ROOT / "hooks").glob("*.py")])  # rglob does not follow the symlink


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_stands_before_it(path):
    room = room_of(path)
    assert room in ORDER, f"{room} has no place in the order of rooms: give it one"
    for imported in imports_of(path):
        allowed = ORDER.index(imported) < ORDER.index(room) or imported == room
        assert allowed, f"{path.relative_to(ROOT)} imports {imported}, which stands after {room}"


def test_the_check_sees_imports():
    assert "relations" in imports_of(ROOT / "prompts.py")
    assert "files" in imports_of(ROOT / "tables.py")


def test_every_room_exists():
    assert set(ORDER) - {room_of(path) for path in MODULES} == set()


def test_hooks_has_one_identity():
    assert "hooks" not in sys.modules, "hooks/ was imported beside align_circuits.hooks: two copies of every class"
    assert (ROOT / "hooks").is_symlink() or not (ROOT.parent / "hooks").exists()


def test_every_module_says_what_it_is_for():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), (
            f"{path.relative_to(ROOT)} has no docstring"
        )
