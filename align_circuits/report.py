"""One self-contained HTML page of what was found: no network, each script once."""

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from align_circuits.files import replacing
from align_circuits.tables import Provenance, Table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid rgba(128,128,128,.35); }
pre { overflow-x: auto; font-size: 12px; }
.verdict { font-size: 1.1rem; border-left: 4px solid #0072B2; padding: .2rem 1rem; }
"""


def write_report(
    path: str | Path,
    *,
    title: str,
    verdict: str,
    sections: Sequence[tuple[str, str, go.Figure | Table | str]],
    provenance: Provenance,
) -> Path:
    """Writes a report that opens anywhere, also without a network.

    Args:
        path: The HTML file.
        title: The page's heading.
        verdict: What was found, in a sentence or two.
        sections: Heading, a sentence about it, and a figure, a table, or HTML.
        provenance: Printed at the end.

    Returns:
        The path.
    """
    blocks = [
        f"<h2>{html.escape(heading)}</h2>\n<p>{html.escape(note)}</p>\n{_block(content)}"
        for heading, note, content in sections
    ]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><h1>{html.escape(title)}</h1>
<p class="verdict">{html.escape(verdict)}</p>
{"".join(blocks)}
<h2>Provenance</h2><pre>{html.escape(provenance.to_json())}</pre>
</body></html>
"""
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _block(content: go.Figure | Table | str) -> str:
    if isinstance(content, go.Figure):
        return content.to_html(
            full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
        )
    if isinstance(content, Table):
        return content.frame.to_html(index=False, float_format="{:.3f}".format, border=0)
    return content
