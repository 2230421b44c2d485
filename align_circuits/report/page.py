"""A report as one self-contained HTML page, which loads nothing from the network."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from align_circuits.files import replacing
from align_circuits.report.attention_view import AttentionView, circuitsvis_script
from align_circuits.tables.tables import Provenance, Table

Content = go.Figure | Table | AttentionView | str
"""The content of a section; a string is HTML."""

Section = tuple[str, str, Content | Sequence[Content]]
"""A heading, a sentence about the content, and the content."""

MAX_BYTES = 10_000_000
"""The largest size of a page."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser loads nothing but what the page contains."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid rgba(128,128,128,.35); }
pre { overflow-x: auto; font-size: 12px; }
.wide { overflow-x: auto; } .wide td { white-space: nowrap; } .wide table { font-size: .85rem; }
.wide.wrapped td { white-space: normal; min-width: 4.5rem; }
.summary { font-size: 1.1rem; border-left: 4px solid #0072B2; padding: .2rem 1rem; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid #0072B2; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
details { margin-top: 2.2rem; } summary { font-weight: 600; cursor: pointer; }
@media (max-width: 40rem) { body { margin: 1rem auto; } th, td { padding: .2rem .4rem; } }
@media print { body { max-width: none; margin: 0; } h2 { break-after: avoid; }
  tr, .plotly-graph-div { break-inside: avoid; } }
"""


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


def write_report(
    path: str | Path, *, title: str, summary: str, sections: Sequence[Section], provenance: Provenance
) -> Path:
    """Writes a report as an HTML page that opens anywhere, also offline.

    Args:
        path: The HTML file.
        title: The heading of the page.
        summary: The result in a sentence or two.
        sections: The sections, each with one content or several.
        provenance: Folded at the end.

    Returns:
        The path.

    Raises:
        ValueError: The page would be larger than `MAX_BYTES`.
    """
    # Each library is embedded once, and only if a section needs it: plotly alone has megabytes.
    contents = [[content] if isinstance(content, Content) else list(content) for _, _, content in sections]
    scripts = list(_scripts({type(content) for part in contents for content in part}))
    blocks = [
        f"<h2>{html.escape(heading)}</h2>\n<p>{html.escape(note)}</p>\n{''.join(map(_block, part))}"
        for (heading, note, _), part in zip(sections, contents, strict=True)
    ]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title><style>{_STYLE}</style>
{"".join(f"<script>{script}</script>" for script in scripts)}</head>
<body><main><h1>{html.escape(title)}</h1>
<p class="summary">{html.escape(summary)}</p>
{"".join(blocks)}
<details><summary>Provenance: settings, model, versions</summary>
<pre tabindex="0">{html.escape(provenance.to_json())}</pre></details></main>
<script>{_SORTING}</script></body></html>
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


def _scripts(kinds: set[type]) -> Iterator[str]:
    """The scripts that contents of these types need, each once."""
    if go.Figure in kinds:
        yield get_plotlyjs()
    if AttentionView in kinds:
        yield circuitsvis_script()


def _block(content: Content) -> str:
    if isinstance(content, go.Figure):
        download = {"modeBarButtons": [["toImage"]], "toImageButtonOptions": {"format": "svg"}, "displaylogo": False}
        return content.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, **download})
    if isinstance(content, Table):
        return content.frame.to_html(index=False, float_format="{:.3f}".format, border=0)
    return content.html(script=False) if isinstance(content, AttentionView) else content
