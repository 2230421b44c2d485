"""Figures show the numbers of their tables, and change nothing global."""

import re
from dataclasses import replace
from typing import Any

import browser
import numpy as np
import pandas as pd
import plotly.io
import pytest
import torch
from refusals import raised, refused

import align_circuits as ac
from align_circuits.hooks.head_names import describe
from align_circuits.report import plots as typed_plots
from align_circuits.report.plots import pictures
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

MADE = Provenance("test")
plots: Any = typed_plots  # plotly's figures are built at run time: a type checker sees none of their fields


@pytest.fixture
def scores():
    keys = pd.DataFrame([(m, layer, head) for m in ("a", "b") for layer in range(3) for head in (None, 0, 1)])
    keys.columns = ["metric", "layer", "head"]
    values = np.random.default_rng(0).random((len(keys), 8))
    return Table.from_prompts(keys, values, np.ones_like(values), MADE)


def test_a_head_map_shows_every_head_at_its_place_and_changes_no_global_template(scores):
    before = plotly.io.templates.default
    (heat,) = plots.head_map(scores, "a").data
    assert plotly.io.templates.default == before
    np.testing.assert_array_equal(heat.z, scores.to_array("a"))
    assert list(heat.x) == [0, 1]
    assert list(heat.y) == [0, 1, 2]


def test_the_only_metric_of_a_table_needs_no_name(scores):
    only = scores.where(metric="a")
    assert plots.head_map(only) == plots.head_map(scores, "a")
    np.testing.assert_array_equal(only.to_array(), scores.to_array("a"))
    refused(r"has the metrics a, b: name one, head_map\(table, 'a'\)", plots.head_map, scores)
    refused(r"has the metrics a, b: name one, to_array\('a'\)", scores.to_array)
    refused("no metric in this table, which has 0 rows by metric", Table(scores.frame[:0], MADE).to_array)


def test_maps_side_by_side_share_one_scale_around_zero_for_a_difference(scores):
    figure = plots.head_maps(scores, ["a", "b"])
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    shifted = Table(scores.frame.assign(value=scores.frame["value"] * 0.5), scores.provenance)
    axis = plots.head_map(shifted - scores, "a").layout.coloraxis
    assert axis.cmin == -axis.cmax


@pytest.mark.parametrize("layers", [2, 30])
def test_the_gap_between_rows_of_maps_does_not_grow_with_the_maps(layers):
    heads = pd.DataFrame([(layer, 0, metric) for metric in "abcd" for layer in range(layers)])
    frame = heads.set_axis(["layer", "head", "metric"], axis=1).assign(level="head", value=0.5, low=0.4, high=0.6, n=9)
    layout = plots.head_maps(Table(frame, MADE)).layout
    inner = layout.height - layout.margin.t - layout.margin.b
    assert 40 < (layout.yaxis.domain[0] - layout.yaxis3.domain[1]) * inner < 70


def test_top_heads_are_the_best_with_their_intervals(scores):
    dots = plots.top_heads(scores, ["a"], n=2).data[0]
    best = scores.top("a", 2).frame
    assert dots.y[-1] == f"L{best['layer'][0]}H{best['head'][0]}", "the best head stands on top"
    np.testing.assert_allclose(np.add(dots.x, dots.error_x.array), best["high"][::-1])
    np.testing.assert_allclose(np.subtract(dots.x, dots.error_x.arrayminus), best["low"][::-1])


def test_curves_fit_lengths_steps_and_nats():
    def drawn(x: list[float], values: list[float], low: Any = None, **more: Any) -> Any:
        frame = pd.DataFrame({"x": x, "value": values, "low": low or values, "high": values, "by": "one"})
        return plots.curves({"panel": frame}, x="x", by="by", label="x", **more)

    lengths = drawn([1, 2, 3], [0.1, 0.5, 1]).layout
    assert (lengths.xaxis.dtick, lengths.yaxis.range, lengths.yaxis.title.text) == (1, (-0.04, 1.06), "accuracy")
    assert drawn([0, 0.5, 1], [0, 1, 1]).layout.xaxis.dtick is None
    assert drawn([1, 2], [0.1, 0.5], [-0.3, 0.2]).layout.yaxis.range is None, "the whole interval is seen"
    steps = drawn([0, 500, 1000], [0.0, -2.0, 3.5], value="effect (nats)").layout
    assert (steps.xaxis.dtick, steps.yaxis.range, steps.yaxis.title.text) == (None, None, "effect (nats)")


def test_curves_tell_names_apart_across_panels():
    def frame(*names: str) -> pd.DataFrame:
        return pd.DataFrame({"x": 1, "value": 0.5, "low": 0.4, "high": 0.6, "by": list(names)})

    drawn = plots.curves({"one": frame("a", "b"), "two": frame("c", "b")}, x="x", by="by", label="x").data
    assert [(line.name, line.showlegend) for line in drawn] == [("a", True), ("b", True), ("c", True), ("b", False)]
    colours = [line.marker.color for line in drawn]
    assert colours[1] == colours[3] and len({*colours}) == 3


def test_captions_and_titles_are_broken_to_the_width_of_their_panel():
    caption = "a caption of so many words that it would run into that of the next panel"
    frame = pd.DataFrame({"x": [1], "value": 0.5, "low": 0.4, "high": 0.6, "by": "a"})
    drawn = plots.curves({f"{caption} {n}": frame for n in range(4)}, x="x", by="by", label=f"title: {caption}")
    shown = [each.text.split("<br>") for each in drawn.layout.annotations]
    assert [" ".join(lines) for lines in shown] == [f"{caption} {n}" for n in range(4)], "no word is lost"
    assert max(len(line) for lines in shown for line in lines) <= 84 // 2, "four panels are two of two"
    titles = [drawn.layout[f"xaxis{n}"].title.text for n in ("", 2, 3, 4)]
    assert titles[:2] == [None, None] and all(title.startswith("title: ") for title in titles[2:]), "the lowest alone"


def test_dots_stand_in_rows_from_the_top():
    frame = pd.DataFrame({"done": ["a", "b"] * 2, "seed": [0, 0, 1, 1], "value": [0.1, 0.2, 0.3, 0.4]})
    drawn: Any = plots.dots(frame.assign(low=frame["value"] - 0.05, high=frame["value"]), "done", "seed", "nats")
    assert [(dot.name, list(dot.y), list(dot.x)) for dot in drawn.data] == [
        ("0", ["a", "b"], [0.1, 0.2]),
        ("1", ["a", "b"], [0.3, 0.4]),
    ]
    np.testing.assert_allclose(drawn.data[0].error_x.arrayminus, 0.05)
    assert (drawn.layout.yaxis.categoryarray, drawn.layout.xaxis.title.text) == (("b", "a"), "nats")


@pytest.mark.parametrize("opposite", [False, True])
def test_two_measurements_are_points_beside_the_line_on_which_they_agree(opposite):
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [-3.0, 0.5], "head": ["L0H0", "L0H1"]})
    line, points = plots.beside({"kl": frame}, "a", "b", "head", opposite=opposite).data
    assert (list(points.x), list(points.y), list(points.text)) == ([1, 2], [-3, 0.5], ["L0H0", "L0H1"])
    sign = -1 if opposite else 1
    np.testing.assert_array_equal(np.array(line.y), sign * np.array(line.x))
    assert min(line.x) <= min(1, *(sign * points.y)) and max(line.x) >= max(2, *(sign * points.y))


@pytest.fixture
def effects():
    """Effects in nats, 3 at L1H0 on first tokens and nothing elsewhere."""
    names = ["kind", "layer", "head"]
    keys = pd.MultiIndex.from_product([["first", "later"], range(2), range(2)], names=names).to_frame(index=False)
    values = np.zeros((len(keys), 4))
    values[2] = 3
    return Table.from_prompts(
        keys.assign(metric="log_prob"), values, np.ones_like(values), Provenance("t"), bounded=False
    )


def test_effects_are_drawn_to_their_own_scale_with_their_unit(effects):
    figure = plots.head_maps(effects, ["first", "later"], by="kind", unit="nats")
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax, axis.colorbar.title.text) == (-3, 3, "nats"), "zero is white"
    first, later = figure.data
    np.testing.assert_array_equal(first.z, [[0, 0], [3, 0]])
    assert not np.any(later.z)
    for settings, unit in (({}, "nats"), ({"normalized": True}, "share")):  # as the table says, without `unit`
        first = Table(effects.where(kind="first").frame, Provenance("patch_heads", settings))
        assert plots.head_map(first).layout.coloraxis.colorbar.title.text == unit
        assert plots.top_heads(first).layout.annotations[0].text == f"log-probability ({unit})"
    shrunk = Table(effects.frame.assign(value=effects.frame["value"] * -0.01), effects.provenance)
    axis = plots.head_maps(shrunk, ["first"], by="kind", unit="nats").layout.coloraxis
    assert (axis.cmin, axis.cmax) == pytest.approx((-0.03, 0.03)), "small effects are not washed out"


def test_heads_that_were_not_measured_keep_their_place(effects):
    one = Table(effects.frame[effects.frame["layer"] == 1], effects.provenance)
    (heat,) = plots.head_maps(one, ["first"], by="kind", shape=(3, 2)).data
    assert (list(heat.y), list(heat.x)) == ([0, 1, 2], [0, 1])
    assert np.isnan(heat.z[[0, 2]]).all()
    np.testing.assert_array_equal(heat.z[1], [3, 0])


def test_maps_without_panels_draw_all_metrics_of_one_unit():
    grid = pd.DataFrame([(layer, head) for layer in range(2) for head in range(2)], columns=["layer", "head"])
    for metrics, drawn in [
        ({"lookup": 0.5, "entropy": 0.5, "distance": 1.5, "sink": 0.5}, ["lookup", "sink"]),
        ({"log_prob": 0.5, "accuracy": 0.5, "kl": 1.5}, ["log-probability", "KL divergence"]),
        ({"distance": -1.5, "lookup": 0.5}, ["distance"]),
    ]:
        frame = pd.concat(
            [grid.assign(metric=name, value=value, low=0.4, high=0.6, n=1) for name, value in metrics.items()]
        )
        figure: Any = plots.head_maps(Table(frame, Provenance("t")))
        best: Any = plots.top_heads(Table(frame, Provenance("t")))
        for made in (figure, best):
            assert [each.text.split(" (")[0] for each in made.layout.annotations] == drawn
    with pytest.raises(ValueError, match="no panels: name at least one value of 'role'"):
        plots.head_maps(Table(frame, Provenance("t")), by="role")
    with pytest.raises(ValueError, match="no metrics: name at least one value of 'metric'"):
        plots.top_heads(Table(frame.drop(columns="metric"), Provenance("t")))


def test_named_heads_are_circled_at_their_place(effects):
    framed: Any = {"marked": {"first": [(1, 0)]}, "noted": {"first": [(0, 1)]}}
    _, ring, diamond, later = plots.head_maps(effects, ["first", "later"], by="kind", **framed).data
    assert (list(ring.x), list(ring.y), list(diamond.x), list(diamond.y)) == ([0, 0], [1, 1], [1, 1], [0, 0])
    assert ring.marker.color == ("#fff", "#D55E00") and ring.marker.line.width == (6, 3), "seen on brown as well"
    assert ring.marker.color != diamond.marker.color and ring.marker.symbol != diamond.marker.symbol
    assert later.type == "heatmap", "nothing is circled where no head is named"


def test_a_head_map_has_a_place_for_every_head_of_the_model(effects):
    """One head was measured; the provenance knows of 4 layers with 3 heads."""
    first: Any = effects.frame[(effects.frame["kind"] == "first") & (effects.frame["layer"] == 1)]
    made = Table(first[first["head"] == 0], Provenance("patch_heads", model={"n_layers": 4, "n_heads": 3}))
    for drawn in (plots.head_map(made, "log_prob"), plots.head_maps(made, ["first"], by="kind")):
        (heat,) = drawn.data
        assert (list(heat.x), list(heat.y)) == ([0, 1, 2], [0, 1, 2, 3])
        expected = np.full((4, 3), np.nan)
        expected[1, 0] = 3
        np.testing.assert_array_equal(heat.z, expected)
        assert drawn.layout.plot_bgcolor == "rgba(128,128,128,.3)", "the others are grey"
    assert plots.head_map(effects.where(kind="first"), "log_prob").layout.plot_bgcolor != "rgba(128,128,128,.3)"


def test_a_head_map_refuses_what_it_cannot_draw(effects, scores):
    layers = scores.frame[scores.frame["head"].isna()].assign(level="layer")
    edge = pd.DataFrame({"level": ["edge"], "sender": "input", "receiver": "logits", "metric": "a"})
    small = Provenance("t", model={"n_layers": 3, "n_heads": 1})
    both = effects.frame.assign(metric="a", direction="noise", site="z")
    both = both[both["kind"] != "all"]
    for frame, made, message in (
        (layers, MADE, "no rows of single heads, but of the level layer: .* edge_map draws edges"),
        (edge.assign(value=1.0, low=0.0, high=2.0, n=1), MADE, "no rows of single heads, but of the level edge"),
        (scores.frame.assign(value=np.nan), MADE, "no head has a value of a: there is nothing to draw"),
        (scores.frame, small, "the table has L2 and H1, but the map is of 3 layers with 1 heads"),
        (both, MADE, r"several rows per head: choose one value of kind with \.where"),
    ):
        refused(message, plots.head_map, Table(frame, made), "a")
    refused("no panels: name at least one value of 'metric'", plots.head_maps, scores, [])


def test_top_heads_of_effects_are_those_that_matter_most(effects):
    """In nats, beyond the scale of shares; by damage where something is ablated."""
    first = effects.where(kind="first")
    ablated = Table(first.frame.assign(value=-first.frame["value"]), Provenance("ablate_heads"))
    dots = plots.top_heads(ablated, ["log_prob"], n=2).data[0]
    assert (dots.y[-1], dots.x[-1]) == ("L1H0", -3)
    assert plots.top_heads(ablated, ["log_prob"]).layout.xaxis.range is None
    assert plots.top_heads(first.where(layer=0), ["log_prob"]).layout.xaxis.range is None
    keys = {
        "layer": [0, 1],
        "head": 0,
        "metric": "prob",
        "value": [0.25, 0.18],
        "low": [-0.5, 0.1],
        "high": 0.9,
        "n": 8,
    }
    unsure = Table(pd.DataFrame(keys), Provenance("patch_heads"))
    assert plots.top_heads(unsure).layout.xaxis.range is None, "the whole interval is seen"
    assert plots.top_heads(unsure.where(layer=1)).layout.xaxis.range is not None
    model, task = ac.planted_circuit(ac.Seq2SeqTask(x_len=3, n_examples=2)), ac.Seq2SeqTask(x_len=3, n_examples=2)
    patched = ac.patch_heads(model, ac.Pair(*task.pairs(task.sample(4, model.tokenizer)), metric="prob"))
    best = patched.top("prob", 1, by="absolute")
    name, share = describe(best.head_indices), best.normalized().frame["value"].iloc[0]
    drawn = plots.top_heads(patched, ["prob"], 3, by="absolute", normalized=True).data[0]
    assert drawn.y[-1] == f"{name} ({share:.0%})"
    edges = pd.DataFrame({"level": "edge", "sender": ["L0H1", "input"], "receiver": "logits", "metric": "a"})
    table = Table(edges.assign(value=[1.0, 2.0], low=0.0, high=2.0, n=1), Provenance("patch_edges"))
    assert plots.top_heads(table, ["a"]).data[0].y == ("L0H1 to logits", "input to logits")


def test_ablation_shows_every_random_draw_beside_the_intervals_of_the_others():
    groups: Any = [(name, None) for name in ("nothing", "lookup", "named", "rest")]
    groups += [("random", draw) for draw in range(20)]
    frame = pd.DataFrame([(*group, "accuracy", kind) for group in groups for kind in ("first", "later")])
    frame = frame.set_axis(["ablated", "draw", "metric", "kind"], axis=1).astype({"draw": "Int64"})
    values = np.random.default_rng(0).random((len(frame), 6))
    table = Table.from_prompts(frame, values, np.ones_like(values), Provenance("t"))
    traces = {trace.name: trace for trace in plots.ablation(table).data}
    random = traces["as many random heads of the same layers ablated"]
    np.testing.assert_allclose(random.y, table.where(ablated="random").frame["value"])
    assert random.error_y.array is None
    assert len(set(random.x)) == 40, "no two dots of a kind cover each other"
    told_apart = {(trace.marker.symbol, trace.marker.color) for trace in traces.values()}
    assert len(told_apart) == len(traces) == 5
    assert "only lookup heads ablated" in traces
    named = table.where(ablated="named").frame
    np.testing.assert_allclose(np.add(named["value"], traces["named heads ablated"].error_y.array), named["high"])


@pytest.fixture(scope="module")
def circuit():
    task = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4)
    model: Any = ac.planted_circuit(task, seed=0)
    (aligner,) = (head for head, role in model.roles.items() if role == "align_query")
    return model, task.sample(2, model.tokenizer, seed=0)[0], aligner


def test_attention_is_the_model_s_own_with_the_rest_in_one_column(circuit):
    model, prompt, aligner = circuit
    shown = plots.attention(model, prompt, [aligner, (0, 0)])
    _, cache = model.run_with_cache(prompt.tokens)
    whole = cache[f"blocks.{aligner[0]}.attn.hook_pattern"][0, aligner[1]].detach()
    start = shown.start
    np.testing.assert_allclose(shown.pattern[0, 1:, 1:], whole[start:, start:], atol=1e-6)
    np.testing.assert_allclose(shown.pattern[:, 1:].sum(-1), 1, atol=1e-6)
    assert shown.tokens[0] == plots.EARLIER
    assert "".join(shown.tokens[1:]) in prompt.text[0].replace("\n", "↵")
    keys = shown.key_mask("align_query")
    assert keys.any()
    assert shown.pattern[0][keys].min() > 0.9, "the planted aligner attends to the keys"


def test_attention_shows_as_much_of_the_prompt_as_requested(circuit):
    model, prompt, aligner = circuit
    sizes = [len(plots.attention(model, prompt, [aligner], examples=n).tokens) for n in (1, 2, 9)]
    assert sizes[0] < sizes[1] < sizes[2] == int(prompt.mask.sum()), "no column for the rest where nothing is left out"
    few = plots.attention(model, prompt, [aligner], last=3)
    assert len(few.positions) == 3
    assert few.pattern.isnan().any(-1).sum() == len(few.tokens) - 3, "rows that were not measured are empty"


@pytest.mark.parametrize(
    ("heads", "changes", "message"),
    [
        ([], {}, "no heads to draw"),
        ([(99, 0)], {}, "no head L99H0: this model has layers 0 to"),
        ([(0, -1)], {}, "no head L0H-1"),
        ([(0, 0)], {"examples": 0}, "examples=0: show at least"),
        ([(0, 0)], {"last": 0}, "last=0: show at least one token"),
    ],
)
def test_attention_of_nothing_is_refused(circuit, heads, changes, message):
    model, prompt, _ = circuit
    refused(message, plots.attention, model, prompt, heads, **changes)


def test_attention_is_of_one_prompt_and_its_own_positions(circuit):
    model, prompt, head = circuit
    two = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4).sample(2, model.tokenizer, seed=0)
    refused("2 prompts, but attention is drawn on one", plots.attention, model, two, [head])
    rows = plots.attention(model, prompt, [head]).rows
    refused("2 prompts, but", plots.AttentionView, two, [5], rows)
    refused("has attention of shape", plots.AttentionView, prompt, [5], rows)
    padded = replace(prompt, mask=prompt.mask & (torch.arange(prompt.mask.shape[1]) > 2))
    refused("not all real tokens", plots.AttentionView, padded, [1], {head: rows[head][:1]})


CELLS = """() => {
  const n = SIZE;
  const darkness = canvas => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return [...Array(n * n).keys()].map(cell => {
      const [x, y] = [cell % n, Math.floor(cell / n)];
      const at = Math.floor((y + 0.5) * canvas.height / n) * canvas.width + Math.floor((x + 0.5) * canvas.width / n);
      return (1 - data[4 * at] / 255) * data[4 * at + 3] / 255;
    });
  };
  const widget = document.querySelector(".attention");
  return {text: widget.innerText, cells: [...widget.querySelectorAll("canvas")].map(darkness)};
}"""


def test_a_browser_draws_each_weight_of_a_widget_without_a_network(circuit, tmp_path):
    """All that we use of CircuitsVis: another release, or none for a new browser, is seen here."""
    model, prompt, head = circuit
    page, view = tmp_path / "page.html", plots.attention(model, prompt, [head])
    page.write_text(f"<!doctype html><meta charset='utf-8'><body>{view._repr_html_()}</body>", encoding="utf-8")
    size = len(view.tokens)
    seen, console = browser.ran(page, tmp_path, CELLS.replace("SIZE", str(size)))
    assert not console
    assert "L{}H{}".format(*head) in seen["text"]
    assert len(seen["cells"]) == 2 and max(seen["cells"][1]) > 0.5, "the head's thumbnail, and its map"
    drawn, weights = np.reshape(seen["cells"][0], (size, size)), view.pattern[0].nan_to_num().numpy()
    seen_keys = np.tri(size, dtype=bool)
    # CircuitsVis draws .97 as .91: its scale of colours is not quite linear.
    np.testing.assert_allclose(drawn[seen_keys], weights[seen_keys], atol=0.1)
    assert np.ptp(drawn[~seen_keys]) == 0, "keys to come are grey"


def test_a_prompt_is_shaded_by_the_attention_of_one_row_and_maps_circle_the_keys(circuit):
    model, prompt, aligner = circuit
    shown = plots.attention(model, prompt, [aligner])
    drawn = shown.to_html(aligner, "align_query", row=0)
    assert drawn._repr_html_() == drawn
    relation = prompt.relations["align_query"]
    weights = shown.rows[aligner][shown.positions.index(int(relation.query[0]))]
    (key,) = relation.keys_of(0)
    assert re.search(
        rf"outline[^>]*>{shown.tokens[key - shown.start + 1]}<sub[^>]*>{weights[key]:.2f}".replace("0.", "0?."), drawn
    )
    assert drawn.count("3px double") == 1, "one query"
    assert "Left out: 4 examples without keys and attention." in drawn
    heat, ring = plots.attention_maps(shown, "align_query").data
    assert np.isnan(heat.z[0, 1]), "the future is blank"
    assert all(heat.z[query, key] > 0.9 for query, key in zip(ring.y, ring.x, strict=True))
    raised(KeyError, "no attention of L9H9", shown.to_html, (9, 9), "align_query")
    raised(KeyError, "no relation 'love' in this prompt; it has", shown.to_html, aligner, "love")
    refused("row 999 was not measured", shown.to_html, aligner, "align_query", row=999)


def test_figures_are_saved_as_pictures(scores, circuit, tmp_path):
    browser.chromium()
    model, prompt, aligner = circuit
    picture = plots.save(plots.attention(model, prompt, [aligner]), tmp_path / "attention.png", width=400, scale=1)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20]) == 400, "the requested width"
    drawing = plots.save(plots.head_map(scores, "a"), tmp_path / "map.svg").read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert "heatmaplayer" in drawing
    assert {path.name for path in tmp_path.iterdir()} == {"attention.png", "map.svg"}


def test_a_picture_that_cannot_be_made_says_why(scores, tmp_path, monkeypatch):
    figure = plots.head_map(scores, "a")
    refused(r"'map.gif': give a name that ends in .png, .svg or .pdf", plots.save, figure, tmp_path / "map.gif")
    with monkeypatch.context() as without:
        without.setattr(pictures, "find_spec", lambda _: None)
        refused(r"pip install 'align-circuits\[pictures\]'", plots.save, figure, tmp_path / "map.png")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    refused("apt-get install chromium", plots.save, figure, tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


def test_edge_maps_show_each_pair_at_its_place():
    keys = pd.DataFrame({"sender": ["L0H0", "L0H1", "L0H0"], "receiver": ["L1H0.q", "L1H0.q", "logits"]})
    table = Table(keys.assign(metric="log_prob", value=[-1.0, 0.5, 2.0], low=0.0, high=0.0, n=1), MADE)
    figure = plots.edge_map(table)
    (heat,) = figure.data
    assert (list(heat.x), list(heat.y)) == (["L0H0", "L0H1"], ["L1H0.q", "logits"])
    np.testing.assert_array_equal(heat.z, [[-1, 0.5], [2, np.nan]])
    assert figure.layout.coloraxis.cmin == -2
    with pytest.raises(ValueError, match="several rows for a sender and a receiver"):
        plots.edge_map(Table(pd.concat([table.frame, table.frame]), table.provenance))
    for metric, unit in (("log_prob", "nats"), ("logit", "logits"), ("accuracy", "change")):
        drawn = plots.edge_map(Table(table.frame.assign(metric=metric), MADE))
        assert drawn.layout.coloraxis.colorbar.title.text == unit
    normalised = replace(MADE, settings={"normalized": True})
    assert plots.edge_map(Table(table.frame, normalised)).layout.coloraxis.colorbar.title.text == "share"
    refused("no edge with a number to draw", plots.edge_map, Table(table.frame.assign(value=np.nan), MADE))


def test_faithfulness_curves_place_sets_of_heads():
    keys = pd.DataFrame({"circuit": ["edges", "edges", "edges", "localize"], "fraction": [0.0, 0.1, 1.0, 0.2]})
    frame = keys.assign(edges=[0, 1, 10, 2], metric="faithfulness", value=[0, 0.5, 1, 0.7], low=0.0, high=1.0, n=1)
    line, points = plots.faithfulness({"eap": Table(frame, MADE)}).data
    assert (list(line.x), list(line.y)) == ([0.1, 1.0], [0.5, 1.0]), "none of the edges has no place on a log axis"
    assert (list(points.x), list(points.text)) == ([0.2], ["localize"])
    other = frame.assign(fraction=[0.0, 0.1, 1.0, 0.3])
    *_, points = plots.faithfulness({"a": Table(frame, MADE), "b": Table(frame, MADE), "c": Table(other, MADE)}).data
    assert (list(points.x), list(points.text)) == ([0.2, 0.3], ["localize (a)", "localize (c)"]), "sets of one name"


def test_grids_of_the_same_rows_name_them_once_and_space_them_evenly():
    grid = pd.DataFrame([[0.1, 0.2], [0.3, 0.4]], index=["0.2", "0.5"], columns=["6", "20"])
    figure = plots.accuracy_grids({"a": grid, "b": grid}, x="S", y="Div")
    assert [figure.layout[axis].type for axis in ("xaxis", "xaxis2", "yaxis", "yaxis2")] == ["category"] * 4
    assert [figure.layout[axis].showticklabels for axis in ("yaxis", "yaxis2")] == [None, False]
    other = plots.accuracy_grids({"a": grid, "b": grid.rename(index={"0.5": "0.7"})}, x="S", y="Div")
    assert [other.layout[axis].showticklabels for axis in ("yaxis", "yaxis2")] == [None, None]


def effects_at_sites(
    sites: dict[str, list[int | None]], positions: list[Any], metrics: tuple[str, ...] = ("log_prob",)
) -> Table:
    """A table as `patch_sites` makes it, without a row for the last position of the first place."""
    keys = [
        (site, "model" if layer is None else "layer", layer, position, "all", metric)
        for site, layers in sites.items()
        for layer in layers
        for position in positions
        for metric in metrics
    ]
    del keys[(len(positions) - 1) * len(metrics)]
    frame = pd.DataFrame(keys, columns=["site", "level", "layer", "position", "kind", "metric"])
    values = np.random.default_rng(0).normal(size=(len(frame), 8))
    return Table.from_prompts(frame, values, np.ones_like(values), Provenance("patch_sites"), bounded=False)


def test_a_position_map_shows_every_row_at_its_place():
    prompts = ac.Prompts.from_tokens([[5, 6], [7, 8, 6]])
    prompts = replace(prompts, token_strings={6: "six"}, positions={"END": torch.tensor([2, 2])})
    table = effects_at_sites({"resid_pre": [0, 1], "hook_embed": [None], "mlp_out": [1]}, [0, 1, 2])
    figure = plots.position_map(table, "log_prob", "title", prompts=prompts)
    assert [list(heat.y) for heat in figure.data] == [["0", "1"], ["-"], ["0", "1"]]
    frame: Any = table.frame
    drawn = 0
    for heat, site in zip(figure.data, ("resid_pre", "hook_embed", "mlp_out"), strict=True):
        for (row, column), value in np.ndenumerate(heat.z):
            here = frame[(frame["site"] == site) & (frame["position"] == column)]
            here = here[here["layer"].isna() if site == "hook_embed" else here["layer"] == row]
            assert (np.isnan(value) and here.empty) or value == here["value"].item()
            drawn += not np.isnan(value)
    assert drawn == len(frame) == 11
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax == -frame["value"].abs().max()
    assert axis.colorbar.title.text == "change of<br>log_prob<br>(nats)"
    shares = replace(table, provenance=Provenance("patch_sites", {"normalized": True}))
    assert plots.position_map(shares).layout.coloraxis.colorbar.title.text == "log_prob,<br>normalised"
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "END: six"], "padding, and tokens that differ"
    named = effects_at_sites({"resid_pre": [0, 1]}, ["END", "all"], ("own",))
    assert list(plots.position_map(named).layout.xaxis.ticktext) == ["END", "all"]
    assert list(plots.position_map(named, prompts=prompts).layout.xaxis.ticktext) == ["END: six", "all"]
    prompts = replace(prompts, positions={"END": torch.tensor([2, 1])})
    assert list(plots.position_map(named, prompts=prompts).layout.xaxis.ticktext) == ["END", "all"]
    assert list(plots.position_map(table, prompts=prompts).layout.xaxis.ticktext) == ["0", "1", "six"]
    assert plots.position_map(named).layout.coloraxis.colorbar.title.text == "change of<br>own"


def test_a_position_map_refuses_what_it_cannot_draw(scores):
    table = effects_at_sites({"resid_pre": [0, 1]}, [0, 1, 7], ("log_prob", "accuracy"))
    one = table.where(metric="log_prob")
    both = Table.concat([Table(one.frame.assign(kind=kind), one.provenance) for kind in ("first", "later")])
    refused(r"choose one kind \(first, later\) with \.where", plots.position_map, both)
    np.testing.assert_array_equal(plots.position_map(table).data[0].z, plots.position_map(one).data[0].z)
    drawn = plots.position_map(table, "accuracy").layout.coloraxis.colorbar.title.text
    assert drawn.startswith("change of<br>accuracy")
    refused("no key column 'site' in this table of 'test': give one of patch_sites", plots.position_map, scores)
    with pytest.raises(ValueError, match="position 7 is not in these prompts of 3 tokens"):
        plots.position_map(one, prompts=ac.Prompts.from_tokens([[1, 2, 3]]))
    refused("a table without rows has no map", plots.position_map, Table(one.frame.iloc[:0], one.provenance))
