"""What nbconvert makes of a notebook, at its defaults and without a network, shows every figure and the explorer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import nbformat
import plotly.io
import pytest
from nbclient import NotebookClient

from align_circuits.report.plots import notebook_figure

CELLS = [
    "import align_circuits as ac\n"
    "task = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=6)\n"
    "model = ac.planted_circuit(task, seed=0)\n"
    "prompts = task.sample(4, model.tokenizer, seed=0)",
    "ac.plots.head_map(ac.score_heads(model, prompts), 'align_query')",
    "ac.plots.head_map(ac.score_heads(model, prompts), 'lookup').show()",
    "ac.plots.attention(model, prompts[0], heads=['L3H2'])",
    "explorer = ac.explore(model, prompts)\nexplorer.ablated = ['L3H2']\nexplorer",
]

LOOK = browser.LOOK.replace("return {", "return {text: document.body.innerText, ", 1)


@pytest.mark.slow
def test_every_figure_and_the_explorer_are_on_the_page(tmp_path, monkeypatch):
    exporter = pytest.importorskip("nbconvert", reason="make .venv").HTMLExporter()
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=300).execute()
    page, _ = exporter.from_notebook_node(notebook)
    (tmp_path / "notebook.html").write_text(page, encoding="utf-8")
    assert page.count("plotly.js v") == 1, "one copy of the script"
    seen, _ = browser.ran(tmp_path / "notebook.html", tmp_path, LOOK)
    assert (seen["figures"], seen["drawn"]) == (2, 2)
    assert max(seen["canvases"]) > 0
    assert "without L3H2" in seen["text"] and "Alignment" in seen["text"]


def test_the_first_figure_has_the_script_and_so_has_its_cell_when_it_runs_again(monkeypatch):
    shown: list[str] = []
    shell = SimpleNamespace(execution_count=0, get_parent=lambda: {"metadata": {"cellId": shell.cell}})
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data["text/html"]))
    monkeypatch.setattr(notebook_figure, "_carrier", [])
    monkeypatch.setattr(plotly.io.renderers, "_default_name", "plotly_mimetype")
    for count, cell in enumerate(("one", "two", "one", "two"), 1):
        shell.execution_count, shell.cell = count, cell
        notebook_figure.Figure().show()
        notebook_figure.Figure()._ipython_display_()
    assert ["plotly.js v" in html for html in shown] == [True, False, False, False, True, False, False, False]


def test_a_renderer_that_somebody_chose_is_taken(monkeypatch):
    chosen: list[Any] = []
    monkeypatch.setattr(plotly.io.renderers, "_default_name", "png")
    monkeypatch.setattr(plotly.io, "show", lambda _, *args, **kwargs: chosen.append((args, kwargs)))
    figure = notebook_figure.Figure()
    figure.show()
    figure._ipython_display_()
    monkeypatch.setattr(plotly.io.renderers, "_default_name", "plotly_mimetype")
    figure.show(renderer="svg")
    monkeypatch.setattr(plotly.io.renderers, "_default_name", "")
    figure._ipython_display_()  # nothing is to be drawn: its repr is printed
    assert chosen == [((), {}), ((), {}), ((), {"renderer": "svg"})]
