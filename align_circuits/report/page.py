"""A report as one self-contained HTML page, which loads nothing from the network."""

import base64
import gzip
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from align_circuits.jobs.files import replacing
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import Html, rendered, several
from align_circuits.report.attention_view import AttentionView, circuitsvis_script
from align_circuits.report.definitions import Definitions
from align_circuits.run.pairs import Pair
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import TOKEN_ROLES

Content = go.Figure | Table | AttentionView | str
"""The content of a section; a string is HTML."""

Section = tuple[str, str, Content | Sequence[Content]]
"""A heading, a sentence about the content, and the content."""

MAX_BYTES = 3_000_000
"""The largest size of a page; plotly takes 2.0 of it, and CircuitsVis .5, where they are needed."""

MAX_ROWS = 2_000
"""The rows of a table that a page shows at most."""

_SCROLLS = Markup('<div tabindex="0" role="region" aria-label="table: {}" class="wide')
"""What lets a keyboard scroll a table that is wider than the window."""


class TooLarge(ValueError):
    """A report of more than `MAX_BYTES`."""


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: str,
    sections: Sequence[Section],
    provenance: Provenance,
    facts: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Path:
    """Writes a report as an HTML page that opens anywhere, also offline.

    Args:
        path: The HTML file.
        title: The heading of the page.
        summary: The result in a sentence or two; each of its lines is a paragraph; what follows an empty line
            stands below it in smaller letters.
        sections: The sections, each with one content or several. Of a table at most `MAX_ROWS` rows are shown.
        provenance: Model, task and seed stand at the top; all of it is folded at the end.
        facts: What else stands at the top, by name, such as `{"prompts": "64"}`.
        roles: The relations that the report speaks of, with what a head does that follows one: they are defined so.

    Returns:
        The path.

    Raises:
        TooLarge: The page would be larger than `MAX_BYTES`.
    """
    names = [re.sub(r"\W+", "-", heading.lower()).strip("-") for heading, *_ in sections]
    # Headings may differ in signs alone, such as "S1+1" and "S1-1".
    anchors = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]
    blocks = [_block(anchor, *section) for anchor, section in zip(anchors, sections, strict=True)]
    kinds = {kind for block in blocks for kind in block["kinds"]}
    libraries = {go.Figure: get_plotlyjs, AttentionView: circuitsvis_script}  # each is embedded once, where needed
    answer, *details = summary.strip().split("\n\n")
    page = rendered(
        "report/templates/page.html",
        title=title,
        answer=answer,
        details=details,
        facts={name: fact for name, fact in (_known(provenance) | dict(facts or {})).items() if fact},
        scripts=[
            packed(script())
            for kind, script in libraries.items()
            if any(issubclass(figure_type, kind) for figure_type in kinds)
        ],
        sections=blocks,
        words=Definitions(roles, _is_translation(provenance)),
        provenance=provenance.to_json(),
    ).encode()
    if len(page) > MAX_BYTES:
        sizes = {block["heading"]: sum(len(content.encode()) for content in block["contents"]) for block in blocks}
        largest = max(sizes, key=sizes.__getitem__)
        raise TooLarge(
            f"the report has {len(page) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}: "
            f"show less in {largest!r} ({sizes[largest] / 1e6:.1f} MB)"
        )
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(page)
    return Path(path)


def _known(provenance: Provenance) -> dict[str, str]:
    """What the card at the top says of the model and the prompts, as far as the provenance tells."""
    model, task = provenance.model, provenance.data.get("task") or {}
    task = task if isinstance(task, Mapping) else {"name": task}
    known = {"n_layers", "n_heads", "dtype", "device"} <= model.keys()
    counts = [several(model[f"n_{part}s"], part) for part in ("layer", "head") if known]
    sizes = " ({} of {}, {dtype}, {device})".format(*counts, **model) if known else ""
    seed = provenance.settings.get("seed", task.get("seed"))
    return {
        "model": str(model.get("name", "")) + sizes,
        "revision": str(model.get("revision", "")),
        "task": "" if task.get("name") == "tokens" else str(task.get("name", "")),
        "seed": "" if seed is None else str(seed),
    }


def _is_translation(provenance: Provenance) -> bool:
    """Whether the prompts are of a task of translation, or of an unknown one."""
    task = provenance.data.get("task")
    return not isinstance(task, Mapping) or task.get("name") in ("seq2seq", "lexicon")


def legend_of(prompts: Prompts | Pair) -> str:
    """Returns what numbers, frames and lines mean in a drawing of a prompt or of a pair (`to_html`)."""
    if isinstance(prompts, Pair):
        differ = "Underlined: the tokens in which the clean and the corrupted prompt differ."
        return f"{legend_of(prompts.clean)} {differ}".strip()
    if prompts.is_aligned:
        return "A phrase (framed), its symbol (framed) and its earlier translations share one number."
    name = prompts.drawn_relation
    others = [other for other in prompts.relations if other not in (name, *TOKEN_ROLES)]
    more = f" Not drawn: {', '.join(others)}." if others else ""
    return f"The relation {name}: a query (framed) and its keys share one number.{more}" if name else ""


@cache
def packed(script: str) -> Html:
    """Returns a script compressed, for the page to unpack and run."""
    code = base64.b64encode(gzip.compress(script.encode(), 4, mtime=0)).decode()  # the time would make each page differ
    return Html(f'<script type="text/gzip">{code}</script>')


def _decimals(number: float) -> str:
    """A number of a table, without the sign of a zero; one that three decimals do not show by its first digits."""
    if 1e-6 <= abs(number) < 5e-4:  # below may be rounding
        return f"{number:.2g}"
    return f"{round(number, 3) + 0.0:.3f}"


def _block(anchor: str, heading: str, note: str, content: Content | Sequence[Content]) -> dict[str, Any]:
    """A section for the template, and the types of its contents."""
    contents = [content] if isinstance(content, Content) else list(content)
    drawn = [_drawn(content, f"{anchor}-{index}", heading, note) for index, content in enumerate(contents)]
    return {"heading": heading, "note": note, "anchor": anchor, "contents": drawn, "kinds": {*map(type, contents)}}


def _drawn(content: Content, name: str, heading: str, note: str) -> Html:
    """A content as HTML; a figure's own ids are made of `name`, so that the same results give the same page."""
    if isinstance(content, Table):
        frame = content.frame.dropna(axis=1, how="all")
        same = [key for key in content.keys if key in frame and len(frame) > 1 and len(frame[key].unique()) == 1]
        in_all = ", ".join(f"{key} {frame[key].iloc[0]}" for key in same)
        frame = frame.drop(columns=same)
        keys = frame.select_dtypes(exclude="float")  # of whose missing values `na_rep` reaches NaN alone
        frame = frame.assign(**keys.astype(object).where(keys.notna(), float("nan")))
        rows = frame.head(MAX_ROWS).to_html(index=False, float_format=_decimals, na_rep="–", border=0)
        lines = re.sub(r"\n *", "\n", rows)
        said = Markup("<p>In all rows: {}.</p>").format(in_all) if same else ""
        content = f'{said}<div class="wide">{lines}</div>' + (
            f"<p>{MAX_ROWS:,} of {len(content):,} rows: table.csv has all.</p>" if len(content) > MAX_ROWS else ""
        )
    if isinstance(content, str):
        return Html(content.replace('<div class="wide', _SCROLLS.format(heading)))
    if isinstance(content, go.Figure):
        download = {"modeBarButtons": [["toImage"]], "toImageButtonOptions": {"format": "svg"}, "displaylogo": False}
        config = {"responsive": True, **download}
        text = content.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=f"figure-{name}")
    else:
        text = content.html(script=False, name=f"attention-{name}")
    text = re.sub(r"<script[^>]*>(.*?)</script>", lambda script: packed(script[1]), text, flags=re.DOTALL)
    figure = Markup('<div role="figure" tabindex="0" aria-label="{}. {}">{}</div>')
    return Html(figure.format(heading, note, Html(text)))
