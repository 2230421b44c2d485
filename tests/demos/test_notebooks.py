"""Each tutorial stands beside its script as an executed notebook that GitHub shows."""

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

DEMOS = Path(__file__).parents[2] / "demos"
SCRIPTS = sorted(DEMOS.glob("*.py"))


def test_no_notebook_is_left_of_a_script_that_went():
    assert {path.stem for path in DEMOS.glob("*.ipynb")} == {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_executed(script):
    path = script.with_suffix(".ipynb")
    assert path.stat().st_size < 1_000_000
    notebook: Any = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [[(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, jupytext.read(script))]
    assert cells[0] == cells[1], "the script has changed: make notebooks"
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "{doc}" not in text, "Jupyter and GitHub show a role of Sphinx as it stands: write a link from demos/"
    links = re.findall(r"\]\((?!\w+:|#)([^)]+)\)", text)
    assert all((DEMOS / link).is_file() for link in links), links
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "GitHub shows pictures"
    for output in outputs:
        assert output.output_type != "error" and output.get("name") != "stderr"
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {}), "a progress bar"
        html = output.get("data", {}).get("text/html", "<table")
        assert "<table" in html and "<script" not in html, "GitHub runs no script and drops styles"
