"""Whatever tokens, names and captions say is shown letter for letter: no markup, script, formula or field."""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import browser
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import align_circuits as ac
from align_circuits.heads.localization import TaskFacts
from align_circuits.prompts.token_html import Html, readable, rendered
from align_circuits.report import plots as typed_plots
from align_circuits.report.localize_report import _sections
from align_circuits.report.page import Section, write_report
from align_circuits.report.plots.figure_parts import plain
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

plots: Any = typed_plots

SPITEFUL = (
    "<script>window.hacked=1</script>",
    '"><img/src=x/onerror=window.hacked=1>',
    "</script><b>bold</b>",
    "\"'\\n",
    "a\u2028b",
    "{{x}}",
    "&lt;&#60;",
    "${x}",
    "%{y}",
    "<a/href='javascript:window.hacked=1'>a</a>",
    "$\\alpha$",
    "<br><extra>",
)
HARMLESS = tuple(f"word{place}" for place in range(len(SPITEFUL)))

LOOK = """async () => {
  const texts = (part, wanted) => [...part.querySelectorAll(wanted)].map(each => each.textContent);
  const figures = [];
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const hovered = [];
    for (const [curve, trace] of figure._fullData.entries()) {
      if (trace.hoverinfo === "skip") continue;
      for (let point = 0; point < Math.min(12, (trace.z || trace.x).length); point++) {
        const where = trace.z ? {xval: point, yval: point} : {pointNumber: point};
        Plotly.Fx.hover(figure, [{curveNumber: curve, ...where}], trace.xaxis + trace.yaxis);
        await new Promise(done => setTimeout(done, 60));
        hovered.push(...texts(figure, ".hoverlayer text"));
      }
    }
    Plotly.Fx.unhover(figure);
    figures.push({hovered, drawn: texts(figure, "text")});
  }
  return {
    hacked: typeof window.hacked,
    figures,
    tokens: [...document.querySelectorAll('span[style*="padding:1px 3px"]')].map(each => each.firstChild.data ?? ""),
    widget: texts(document, ".attention *"),
    cells: texts(document, "td, th, h1, h2, h3, .summary, title, p b"),
    tags: Object.fromEntries(["script", "img", "b", "iframe", "object", "embed", "base", "form", "link"]
      .map(tag => [tag, document.querySelectorAll(tag).length])),
    links: document.querySelectorAll("a:not([href^='#'], .modebar-btn)").length,
  };
}"""


class _Tags(HTMLParser):
    """The tags of a page with the names of their attributes, in order."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))


def texts_in(part: Any) -> Iterator[str]:
    """Every text in a figure, or in a part of one."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        yield from (text for value in part.values() for text in texts_in(value))
    elif isinstance(part, list | tuple) or (isinstance(part, np.ndarray) and part.dtype == object):
        yield from (text for value in part for text in texts_in(value))


def measured(columns: dict[str, Any]) -> Table:
    """A table with these key columns."""
    frame = pd.DataFrame(columns)
    values = np.linspace(0.1, 0.9, len(frame))
    return Table(frame.assign(value=values, low=values - 0.1, high=values + 0.1, n=1), Provenance("t"))


def drawn_figures(names: tuple[str, ...], view: Any) -> dict[str, go.Figure]:
    """Every figure of the package, with each of the names in all its texts."""
    first, size = names[0], len(names)
    panels = {"value": 0.5, "low": 0.4, "high": 0.6}
    heads = pd.DataFrame(product(names[:3], range(2), range(2)), columns=["metric", "layer", "head"]).to_dict("list")
    curves = {name: pd.DataFrame({"x": [1.0, 2.0], "by": name, **panels}) for name in names}
    grid = pd.DataFrame(np.full((size, size), 0.5), index=list(names), columns=list(names))
    course = pd.DataFrame({"step": 0, "query": names, "key": names, "value": 0.5})
    edges = {"sender": names, "receiver": names, "metric": "prob"}
    sets = {"circuit": ["edges", *names], "fraction": 0.5, "metric": "faithfulness"}
    sites = pd.DataFrame(product(names, [0, 1], range(size)), columns=["site", "layer", "position"])
    at_sites = measured({**sites.to_dict("list"), "metric": first})
    tokens = replace(ac.Prompts.from_tokens([[*range(size)]]), token_strings=dict(enumerate(names)))
    return {
        "head_map": plots.head_map(measured(heads), first, unit=names[1]),
        "head_maps": plots.head_maps(measured(heads), list(names[:3]), names[3], unit=names[4]),
        "top_heads": plots.top_heads(measured(edges), ["prob"], n=size, title=first),
        "accuracy": plots.accuracy(
            measured({"kind": names, "metric": "accuracy", "offset": None, "predictor": "model"}), first
        ),
        "ablation": plots.ablation(
            measured({"ablated": names, "draw": None, "kind": names, "metric": "accuracy"}), first
        ),
        "accuracy_grids": plots.accuracy_grids({first: grid, names[1]: grid}, names[2], names[3], value=names[4]),
        "curves": plots.curves({first: pd.concat(curves.values())}, "x", "by", names[1], names[2], value=names[3]),
        "dots": plots.dots(pd.DataFrame({"row": names, "by": names[::-1], **panels}), "row", "by", first, names[1]),
        "beside": plots.beside(
            dict.fromkeys(names, pd.DataFrame({first: [0.1, 0.2], names[1]: 0.5, "label": names[:2]})),
            *(first, names[1], "label", names[2]),
        ),
        "edge_map": plots.edge_map(measured(edges), first, names[1]),
        "faithfulness": plots.faithfulness({name: measured(sets) for name in names}, first),
        "attention_maps": plots.attention_maps(view, "align_query", first),
        "attention_course": plots.attention_course(dict.fromkeys(names[:2], course), first),
        "position_map": plots.position_map(at_sites, title=names[1], prompts=tokens),
    }


def reports(names: tuple[str, ...], model: Any, found: ac.Localization) -> tuple[list[Section], dict[str, go.Figure]]:
    """Every report, widget, table and drawing, and every figure, with the names wherever a text can stand."""
    ids = sorted(set(found.prompts.tokens.flatten().tolist()))
    strings = {token: names[place % len(names)] for place, token in enumerate(ids)}
    prompts = replace(found.prompts, token_strings=strings, task={**found.prompts.task, "name": names[0]})
    called = dict(zip(found.task.roles, names, strict=False))
    relations = {called.get(name, name): relation for name, relation in prompts.relations.items()}
    found = replace(
        found,
        table=replace(found.table, frame=found.table.frame.replace({"role": called})),
        task=TaskFacts({called[role]: names[-1 - place] for place, role in enumerate(found.task.roles)}, notes=names),
        unnamed=tuple(replace(each, role=called[each.role], failed=names) for each in found.unnamed),
        heads_by_role={called[role]: heads for role, heads in found.heads_by_role.items()},
        prompts=replace(prompts, relations=relations),
    )
    shown = found.evidence.example.pair
    assert shown is not None
    clean, corrupted = (replace(side, token_strings=strings) for side in (shown.clean, shown.corrupted))
    pair = ac.Pair(clean, corrupted)
    evidence = replace(found.evidence, example=replace(found.evidence.example, pair=pair))
    found = replace(found, evidence=evidence)
    view = plots.attention(model, prompts[0], [heads[0] for heads in found.heads_by_role.values() if heads][:2])
    table = measured({"metric": names, names[0]: names})
    parts = [found, table, found.prompts, ac.Pair(prompts, prompts)]
    explored = ac.explore(model, found.prompts, heads=[(0, 0)]).shown
    drawing = view.to_html((*view.rows,)[0], "align_query")
    drawings = [*(part._repr_html_() for part in parts), table, view, drawing, explored]
    figures = drawn_figures(names, view)
    return [*_sections(found), *((name, name, part) for name, part in zip(names, drawings, strict=False))], figures


def written(names: tuple[str, ...], model: Any, found: ac.Localization, path: Path) -> dict[str, go.Figure]:
    """Writes all of it into one page and returns the figures at its end."""
    sections, figures = reports(names, model, found)
    provenance = Provenance(names[0], model={"name": names[1]}, settings={"folder": names[2], names[3]: names[4]})
    shown: list[Section] = [*sections, *((name, "", figure) for name, figure in figures.items())]
    roles = dict(zip(names, names[::-1], strict=True))
    write_report(path, title=names[0], summary=" ".join(names), sections=shown, provenance=provenance, roles=roles)
    return figures


def test_control_characters_are_escaped_in_pages_and_figures():
    for text, escaped in (("a\x1b[2Jb", r"a\x1b[2Jb"), ("a\u202eb\x9b", r"a\u202eb\x9b"), ("é\u2028☺", "é\u2028☺")):
        assert Html(text) == plain(text) == readable(text) == escaped
        assert escaped in rendered("prompts/tokens.html", lines=[[]], caption=text)


@pytest.mark.slow
def test_no_text_becomes_more_than_text(tmp_path):
    task = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4)
    model = ac.planted_circuit(task, seed=0)
    found = ac.localize(model, task, 16, n_controls=2)
    page, same = tmp_path / "page.html", tmp_path / "same.html"
    figures = written(SPITEFUL, model, found, page)
    written(HARMLESS, model, found, same)
    public = [name for name in plots.__all__ if inspect.isfunction(getattr(plots, name)) and name != "styled"]
    assert {name for name in public if get_type_hints(getattr(plots, name))["return"] is go.Figure} == {*figures}
    tags, expected = (_Tags(each.read_text(encoding="utf-8")).found for each in (page, same))
    assert tags == expected, "the page has the elements that it has with harmless names"

    seen, console = browser.ran(page, tmp_path, LOOK, budget_ms=600_000)
    assert not console
    assert seen["hacked"] == "undefined"
    counts = Counter(tag for tag, *_ in tags)
    counts["script"] += 1  # the one that looks
    assert seen["tags"] == {tag: counts[tag] for tag in seen["tags"]}
    assert seen["links"] == 0
    assert {*seen["tokens"]} == {*SPITEFUL} <= {*seen["cells"]}
    for (name, figure), drawn in zip(figures.items(), seen["figures"][-len(figures) :], strict=True):
        parts = figure.to_plotly_json()
        for of, where in ((parts, drawn["drawn"] + drawn["hovered"]), (parts["data"], drawn["hovered"])):
            needed = {text for text in SPITEFUL if any(plain(text) in part for part in texts_in(of))}
            shown = {text for text in SPITEFUL if any(text in part for part in where)}
            assert needed and needed == shown, name
