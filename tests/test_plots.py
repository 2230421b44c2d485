"""Figures show the numbers of their tables, and change nothing global."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.io
import pytest

from align_circuits import plots as typed_plots
from align_circuits.report import write_report
from align_circuits.tables import Provenance, Table

plots: Any = typed_plots  # plotly's figures are built at run time: a type checker sees none of their fields


@pytest.fixture
def scores():
    keys = pd.DataFrame([(m, layer, head) for m in ("a", "b") for layer in range(3) for head in (-1, 0, 1)])
    keys.columns = ["metric", "layer", "head"]
    values = np.random.default_rng(0).random((len(keys), 8))
    return Table.from_prompts(keys, values, np.ones_like(values), Provenance("test"))


def test_a_head_map_shows_every_head_at_its_place(scores):
    (heat,) = plots.head_map(scores, "a").data
    np.testing.assert_array_equal(heat.z, scores.grid("a"))
    assert list(heat.x) == [0, 1]
    assert list(heat.y) == [0, 1, 2]


def test_maps_side_by_side_share_one_scale(scores):
    figure = plots.head_maps(scores, ["a", "b"])
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)


def test_a_difference_is_drawn_around_zero(scores):
    shifted = Table(scores.frame.assign(value=scores.frame["value"] * 0.5), scores.provenance)
    axis = plots.head_map(shifted - scores, "a").layout.coloraxis
    assert axis.cmin == -axis.cmax


def test_top_heads_are_the_best_with_their_intervals(scores):
    dots = plots.top_heads(scores, ["a"], n=2).data[0]
    best = scores.top("a", 2).frame
    assert dots.y[-1] == f"L{best['layer'][0]}H{best['head'][0]}", "the best head stands on top"
    np.testing.assert_allclose(np.add(dots.x, dots.error_x.array), best["high"][::-1])
    np.testing.assert_allclose(np.subtract(dots.x, dots.error_x.arrayminus), best["low"][::-1])


def test_drawing_changes_no_global_template(scores):
    before = plotly.io.templates.default
    plots.head_map(scores, "a")
    assert plotly.io.templates.default == before


def test_a_failed_report_leaves_no_file(tmp_path, scores):
    unwritable = "a lone surrogate \ud800 has no bytes in UTF-8"
    with pytest.raises(UnicodeEncodeError):
        write_report(tmp_path / "report.html", title="t", verdict=unwritable, sections=[], provenance=scores.provenance)
    assert not list(tmp_path.iterdir())


def test_a_report_escapes_what_it_is_given(tmp_path, scores):
    path = write_report(
        tmp_path / "report.html",
        title="<t>",
        verdict="a & b",
        sections=[("h", "<n>", scores)],
        provenance=scores.provenance,
    )
    page = path.read_text(encoding="utf-8")
    assert "&lt;t&gt;" in page
    assert "a &amp; b" in page
    assert "&lt;n&gt;" in page
