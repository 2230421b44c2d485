"""A report as one self-contained HTML page, which loads nothing from the network."""

import base64
import gzip
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from align_circuits.jobs.files import replacing
from align_circuits.report.attention_view import AttentionView, circuitsvis_script
from align_circuits.report.definitions import Definitions
from align_circuits.tables.tables import Provenance, Table

Content = go.Figure | Table | AttentionView | str
"""The content of a section; a string is HTML."""

Section = tuple[str, str, Content | Sequence[Content]]
"""A heading, a sentence about the content, and the content."""

MAX_BYTES = 3_000_000
"""The largest size of a page; plotly takes 2.0 of it, and CircuitsVis .5, where they are needed."""

MAX_ROWS = 2_000
"""The rows of a table that a page shows at most."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser loads nothing but what the page contains."""

_STYLE = """
:root { color-scheme: light dark; --line: rgba(128,128,128,.35); --accent: light-dark(#0072B2, #56B4E9); }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
a { color: var(--accent); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
pre { overflow-x: auto; font-size: 12px; }
.wide { overflow-x: auto; } .wide td { white-space: nowrap; } .wide table { font-size: .82rem; }
.wide :is(th, td) { padding: .2rem .45rem; }
.wide.wrapped td { white-space: normal; min-width: 4.5rem; }
.wrapped :is(th, td) { text-align: left; vertical-align: top; } .claims td:first-child { min-width: 14rem; }
.summary { font-size: 1.1rem; border-left: 4px solid var(--accent); padding: .2rem 1rem; }
.card { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; padding: .7rem 1rem; margin: 1rem 0;
  border: 1px solid var(--line); border-radius: 6px; }
.card dt { font-weight: 600; } .card dd { margin: 0; overflow-wrap: anywhere; }
.term { color: inherit; text-decoration: underline dotted; position: relative; }
.term:is(:hover, :focus)::after { content: attr(data-meaning); position: absolute; left: 0; top: 1.6em; z-index: 9;
  width: max-content; max-width: min(22rem, 70vw); padding: .4rem .7rem; border: 1px solid var(--line);
  border-radius: 6px; background: Canvas; color: CanvasText; font-size: .85rem; }
dt { font-weight: 600; } :target { outline: 2px solid var(--accent); outline-offset: 3px; }
[role=figure] { overflow-x: auto; } .plotly-graph-div { min-width: 44rem; }
.attention h4 { background: #fff !important; color: #000 !important; }
.plotly-graph-div .main-svg :is(.infolayer, .cartesianlayer) text { fill: CanvasText !important; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
details { margin-top: 2.2rem; } summary { font-weight: 600; cursor: pointer; }
@media (max-width: 40rem) { body { margin: 1rem auto; } .modebar { display: none; } th, td { padding: .2rem .4rem; }
  .card { grid-template-columns: 1fr; } .term { position: static; } .term::after { left: 1rem !important; top: auto; } }
@media print { :root { color-scheme: light; } body { max-width: none; margin: 0; font-size: 11pt; }
  h2, h3 { break-after: avoid; } tr, [role=figure] { break-inside: avoid; } details, .modebar { display: none; }
  .wide { overflow: visible; } .wide td { white-space: normal; } .term::after { content: none !important; } }
"""

_DRAWING = """
const run = code => {
  const script = document.createElement("script");
  script.textContent = code;
  document.body.append(script);
  script.remove();
};
const unpacked = async text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
new MutationObserver(() => {
  for (const canvas of document.querySelectorAll("canvas:not([aria-label])"))
    canvas.setAttribute("aria-label", canvas.closest("[aria-label]")?.getAttribute("aria-label") ?? "");
}).observe(document.querySelector("main"), {childList: true, subtree: true});
(async () => {
  for (const packed of document.querySelectorAll("script[type='text/gzip']")) run(await unpacked(packed.textContent));
})().catch(error => {
  const note = document.createElement("p");
  note.setAttribute("role", "alert");
  note.textContent = `No figures: this browser cannot unpack them (${error}). Take one of 2023 or later.`;
  document.querySelector("main").prepend(note);
});
"""
"""Unpacks the libraries and then the drawings, in the order of the page: as they are, plotly alone has 4.8 MB."""


_SORTING = """
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    const body = head.closest("table").tBodies[0];
    const text = row => row.cells[head.cellIndex].textContent.trim();
    const missing = row => ["", "–", "NaN", "<NA>"].includes(text(row));
    const compare = (a, b) => {
      const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
      return isNaN(x) || isNaN(y) ? text(a).localeCompare(text(b), "en", {numeric: true}) : x - y;
    };
    const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || sign * compare(a, b));
    for (const other of head.parentNode.cells) other.ariaSort = null;
    head.ariaSort = sign > 0 ? "ascending" : "descending";
    body.append(...rows);
  });
}
"""
"""Sorts a table by the column whose heading is pressed, by mouse or keyboard; missing values stay last."""

_SCROLLS = 'tabindex="0" role="region" aria-label="table"'
"""What lets a keyboard scroll a table that is wider than the window."""


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: str,
    sections: Sequence[Section],
    provenance: Provenance,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Writes a report as an HTML page that opens anywhere, also offline.

    Args:
        path: The HTML file.
        title: The heading of the page.
        summary: The result in a sentence or two; what follows an empty line stands below it in smaller letters.
        sections: The sections, each with one content or several. Of a table at most `MAX_ROWS` rows are shown.
        provenance: Model, task and seed stand at the top; all of it is folded at the end.
        facts: What else stands at the top, by name, such as `{"prompts": "64"}`.

    Returns:
        The path.

    Raises:
        ValueError: The page would be larger than `MAX_BYTES`.
    """
    # Each library is embedded once, and only if a section needs it.
    contents = [[content] if isinstance(content, Content) else list(content) for _, _, content in sections]
    scripts = list(_scripts({type(content) for part in contents for content in part}))
    words = Definitions()
    answer, *details = (f"<p>{words.linked(text)}</p>\n" for text in summary.strip().split("\n\n"))
    blocks = [
        f'<h2 id="{_anchor(heading)}">{html.escape(heading)}</h2>\n<p>{words.linked(note)}</p>\n'
        + "".join(
            _block(content, f"{_anchor(heading)}-{place}", f"{heading}. {note}") for place, content in enumerate(part)
        )
        for (heading, note, _), part in zip(sections, contents, strict=True)
    ]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><main><h1>{html.escape(title)}</h1>
<div class="summary">{answer}</div>
{_card(_known(provenance) | dict(facts or {}))}{"".join(details)}
{"".join(scripts)}{"".join(blocks)}
{words.listed()}<details><summary>Provenance: settings, model, versions</summary>
<pre tabindex="0">{html.escape(provenance.to_json())}</pre></details></main>
<script>{_SORTING}{_DRAWING if scripts else ""}</script></body></html>
"""
    written = page.encode()
    if len(written) > MAX_BYTES:
        sizes = {heading: len(block.encode()) for (heading, _, _), block in zip(sections, blocks, strict=True)}
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"the report has {len(written) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}: "
            f"show less in {largest!r} ({sizes[largest] / 1e6:.1f} MB)"
        )
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_bytes(written)
    return path


def _known(provenance: Provenance) -> dict[str, str]:
    """What the card at the top says of the model and the prompts, as far as the provenance tells."""
    model, data = provenance.model, provenance.data
    task: Any = data.get("task") or {}
    known = {"model": str(model.get("name", ""))}
    if {"n_layers", "n_heads", "dtype", "device"} <= model.keys():
        known["model"] += " ({n_layers} layers of {n_heads} heads, {dtype}, {device})".format(**model)
    known["task"] = str(task.get("name", "")) if isinstance(task, Mapping) else str(task)
    seed = provenance.settings.get("seed", task.get("seed") if isinstance(task, Mapping) else None)
    known["seed"] = "" if seed is None else str(seed)
    return known


def _card(facts: Mapping[str, str]) -> str:
    rows = "".join(
        f"<dt>{html.escape(name.capitalize())}</dt><dd>{f'<code>{value}</code>' if name == 'command' else value}</dd>"
        for name, value in ((name, html.escape(value)) for name, value in facts.items() if value)
    )
    return f'<dl class="card">{rows}</dl>\n' if rows else ""


def _anchor(heading: str) -> str:
    """The id of a section, by its heading."""
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


@cache
def packed(script: str) -> str:
    """Returns a script compressed, for the page to unpack and run."""
    code = base64.b64encode(gzip.compress(script.encode(), 4, mtime=0)).decode()
    return f'<script type="text/gzip">{code}</script>\n'


def _scripts(kinds: set[type]) -> Iterator[str]:
    """The scripts that contents of these types need, each once."""
    if go.Figure in kinds:
        yield packed(get_plotlyjs())
    if AttentionView in kinds:
        yield packed(circuitsvis_script())


def _block(content: Content, name: str, description: str) -> str:
    """A content as HTML; a figure's own ids are made of `name`, so that the same results give the same page."""
    if isinstance(content, Table):
        return _rows(content)
    if isinstance(content, str):
        return content.replace('<div class="wide', f'<div {_SCROLLS} class="wide')
    if isinstance(content, go.Figure):
        download = {"modeBarButtons": [["toImage"]], "toImageButtonOptions": {"format": "svg"}, "displaylogo": False}
        config = {"responsive": True, **download}
        text = content.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=f"figure-{name}")
    else:
        text = content.html(script=False, name=f"attention-{name}")
    text = re.sub(r"<script[^>]*>(.*?)</script>", lambda script: packed(script[1]), text, flags=re.DOTALL)
    return f'<div role="figure" tabindex="0" aria-label="{html.escape(description)}">{text}</div>\n'


def _rows(table: Table) -> str:
    """A table as HTML, its first rows if there are many."""
    text = table.frame.head(MAX_ROWS).to_html(index=False, float_format="{:.3f}".format, na_rep="–", border=0)
    more = f"<p>{MAX_ROWS:,} of {len(table):,} rows: table.csv has all.</p>\n" if len(table) > MAX_ROWS else ""
    lines = re.sub(r"\n *", "\n", text)
    return f'<div {_SCROLLS} class="wide">{lines}</div>\n{more}'
