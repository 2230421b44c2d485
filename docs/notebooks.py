"""Makes `demos/*.ipynb` of the scripts beside them: executed, with outputs that GitHub shows.

    python docs/notebooks.py                      # make notebooks: those whose script has changed
    python docs/notebooks.py --again indirect_object

GitHub runs no script in a notebook and drops the styles of HTML: so figures, attention and prompts are pictures, drawn
with Chromium, and only tables are HTML. Progress bars are left out.
"""

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from choreographer import Browser
from nbclient import NotebookClient

DEMOS = Path(__file__).parents[1] / "demos"

PICTURES = """
from pathlib import Path
from tempfile import TemporaryDirectory
from IPython.display import Image, display
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.plots.notebook_figure import Figure
from align_circuits.report.plots.pictures import save

def show(figure):
    with TemporaryDirectory() as folder:
        display(Image(save(figure, Path(folder) / "figure.png", width=900).read_bytes(), width=900))

Figure._ipython_display_ = AttentionView._ipython_display_ = show
"""
"""Run before the first cell."""


WIDGET = "application/vnd.jupyter.widget-view+json"
"""What progress bars are in a notebook."""

PAGE = '<!doctype html><meta charset="utf-8"><body style="margin:0;display:inline-block;max-width:900px">{}</body>'


async def drawn(html: str) -> str:
    """Returns a picture of HTML on white ground, as base64."""
    size = {"expression": "[document.body.offsetWidth, document.body.offsetHeight]", "returnByValue": True}
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(html), encoding="utf-8")
        async with Browser(headless=True) as browser:
            tab = await browser.create_tab(page.as_uri())
            await asyncio.sleep(2)  # until it is laid out
            width, height = (await tab.send_command("Runtime.evaluate", size))["result"]["result"]["value"]
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            picture = await tab.send_command("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    return picture["result"]["data"]


def sources(notebook: Any) -> list[tuple[str, str]]:
    """Returns what a notebook and its script have in common: type and text of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def is_made(script: Path) -> bool:
    """Whether the notebook of a script is there and has its cells, each code cell executed."""
    path = script.with_suffix(".ipynb")
    if not path.exists():
        return False
    notebook = nbformat.read(path, as_version=4)
    executed = all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    return executed and sources(notebook) == sources(jupytext.read(script))


def make(script: Path) -> None:
    """Executes a script as a notebook and writes it beside the script."""
    notebook: Any = jupytext.read(script)
    pictures = nbformat.v4.new_code_cell(PICTURES)
    notebook.cells.insert(0, pictures)
    NotebookClient(notebook, timeout=None, record_timing=False, resources={"metadata": {"path": DEMOS}}).execute()
    notebook.cells.remove(pictures)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
        cell.outputs = [
            each for each in cell.outputs if each.get("name") != "stderr" and WIDGET not in each.get("data", {})
        ]
        for output in cell.outputs:
            output.pop("execution_count", None)
            if output.output_type == "execute_result":
                output.execution_count = count
            data = output.get("data", {})
            if "image/png" in data:
                del data["text/plain"]  # the name of its type
            elif "<table" not in data.get("text/html", "<table"):
                data["image/png"] = asyncio.run(drawn(data.pop("text/html")))
    notebook.metadata.pop("widgets", None)
    nbformat.validate(notebook)
    script.with_suffix(".ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    """Makes the notebooks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="demos; all by default")
    parser.add_argument("--again", action="store_true", help="those too whose script has not changed")
    arguments = parser.parse_args()
    for script in sorted(DEMOS.glob("*.py")):
        if (arguments.names and script.stem not in arguments.names) or (is_made(script) and not arguments.again):
            continue
        start = time.time()
        make(script)
        print(f"{script.stem}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
