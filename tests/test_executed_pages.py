"""Outputs of pages are kept for one state of the package, of its data and of the environment, and for no other."""

import importlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from refusals import refused

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pages(monkeypatch, tmp_path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return importlib.import_module("executed_pages")


@pytest.fixture
def checkout(pages, tmp_path) -> Path:
    root = tmp_path / "checkout"
    for name in (*pages.FILES, "align_circuits/heads/score.py", "hooks/edits.py", "docs/results/a/cpu/table.csv.xz"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.mark.parametrize(
    "changed",
    [
        "align_circuits/heads/score.py",
        "align_circuits/models/weights/new.safetensors",
        "hooks/edits.py",
        "docs/results/a/cpu/table.csv.xz",
        "docs/results/causes.toml",
        "docs/kept_results.py",
        "docs/conf.py",
        "constraints.txt",
        "pyproject.toml",
    ],
)
def test_what_pages_use_changes_the_folder(pages, checkout, changed):
    before = pages.cache_folder(checkout)
    (checkout / changed).parent.mkdir(parents=True, exist_ok=True)
    (checkout / changed).write_text("changed")
    assert pages.cache_folder(checkout) != before


def test_a_file_that_moves_changes_the_folder(pages, checkout):
    before = pages.cache_folder(checkout)
    (checkout / "hooks/edits.py").rename(checkout / "hooks/other.py")
    assert pages.cache_folder(checkout) != before


def test_another_version_of_a_package_changes_the_folder(pages, checkout, monkeypatch):
    before = pages.cache_folder(checkout)
    installed = [*pages.distributions(), SimpleNamespace(name="some-package", version="1.0")]
    monkeypatch.setattr(pages, "distributions", lambda: installed)
    one = pages.cache_folder(checkout)
    installed[-1].version = "1.1"
    assert len({before, one, pages.cache_folder(checkout)}) == 3


def test_all_else_leaves_the_folder(pages, checkout):
    before = pages.cache_folder(checkout)
    for name in ("README.md", "docs/start.md", "align_circuits/__pycache__/score.pyc", "runs/patch/0001/table.csv"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("changed")
    elsewhere = checkout.with_name("elsewhere")
    shutil.copytree(checkout, elsewhere)
    assert pages.cache_folder(checkout) == pages.cache_folder(elsewhere) == before


def test_the_folders_used_last_stay(pages, checkout):
    folders = []
    for age in range(5, 0, -1):
        (checkout / "hooks/edits.py").write_text(f"{age}")
        folders.append(pages.cache_folder(checkout))
        os.utime(folders[-1], (10**9 - age, 10**9 - age))
    (checkout / "hooks/edits.py").write_text("3")
    assert pages.cache_folder(checkout) == folders[2], "used again, though no longer the newest"
    (checkout / "hooks/edits.py").write_text("new")
    new = pages.cache_folder(checkout)
    assert {*folders[0].parent.iterdir()} == {folders[2], folders[4], new}


def test_a_notebook_whose_printed_words_have_changed_is_told(pages, tmp_path):
    path, cell = tmp_path / "some_heads.ipynb", nbformat.v4.new_code_cell("heads()")
    for printed in ("L2H3 solves 0.96 of them", "L1H0 solves 0.95 of them"):
        cell.outputs = [nbformat.v4.new_output("stream", text=printed)]
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        if "L2" in printed:
            pages.get_cache(tmp_path / "cache").cache_notebook_file(path, check_validity=False)
    pages.check_notebooks(tmp_path / "cache", tmp_path)  # numbers differ between machines
    path.write_text(path.read_text().replace("solves", "does not solve"))
    message = r"some_heads.ipynb is out of date: it lacks \['solves'\] and still has .* --again some_heads"
    refused(message, pages.check_notebooks, tmp_path / "cache", tmp_path)
