"""The report shows the named heads with their evidence, needs no network, and is drawn completely in a browser."""

import os
import re
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads.evidence import Evidence
from align_circuits.heads.localization import TaskFacts
from align_circuits.hooks.head_names import describe
from align_circuits.papers.claims import Check, checks_html
from align_circuits.papers.statistics import Measured
from align_circuits.report import page as report
from align_circuits.report import save_localization
from align_circuits.report.localize_report import _sections, attention_of, figures, headline_of, named_heads
from align_circuits.report.page import legend_of, write_report
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

MADE = Provenance("test")
TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)


def empty(table: Table) -> Table:
    """A table of the same columns without rows."""
    frame: Any = table.frame[:0]
    return Table(frame, table.provenance)


@pytest.fixture(scope="module")
def localization() -> ac.Localization:
    found = ac.localize(ac.planted_circuit(TASK, seed=0), TASK, 16, n_controls=2)
    return replace(found, task=replace(found.task, notes=("Heads <align> & look up.",)))


def test_the_headline_says_what_was_found_in_the_words_of_the_task_and_if_the_model_needs_it(localization):
    said = headline_of(localization)
    (role, heads), *_ = localization.heads_by_role.items()
    named = len(localization.named_heads)
    total = localization.verdicts[0].total
    assert said.startswith(f"{named} of {total} heads are named: {describe(heads)} for {role} (attends to the input ")
    assert "at most 5% of such names should be false" in said
    needed, enough = (
        replace(next(each for each in localization.verdicts if each.claim == claim and not each.role), value=value)
        for claim, value in (("necessary", 0.0), ("sufficient", 1.0))
    )
    unclear = replace(localization, verdicts=tuple(replace(each, controls={}) for each in localization.verdicts))
    assert "Role by role, the model is not shown to need the heads of any." in headline_of(unclear)
    better = replace(needed, controls={"layers": (1.0,) * 19}, intact=1.0)
    for verdicts, words in (
        (
            (better, enough),
            f"test prompts). Without the named heads accuracy is 0.00 [{needed.low:.2f}, {needed.high:.2f}], lower "
            "than without as many others: the model needs them.",
        ),
        (
            (replace(better, controls={"layers": (0.0,) * 19}), enough),
            "but other sets of as many heads may do the same",
        ),
        ((replace(better, value=0.99, controls={}), enough), "too small a loss to show that the model needs them."),
        (
            (replace(better, value=0.85, lost=(-0.04, 0.36), controls={}), enough),
            ", a loss of 0.15 [-0.04, 0.36], which so few prompts do not tell from none: it is not shown that",
        ),
        ((replace(better, controls={}), enough), "but no control sets were drawn: it is not shown that"),
        (
            (replace(better, controls={"layers": (1.0,) * 18}), enough),
            "but so few other sets were ablated that p = 0.053: it is not shown that the model",
        ),
        ((needed, replace(enough, controls={"layers": (0.0,) * 19})), "], higher than with as many others: the named"),
        ((needed, replace(enough, value=0.01, controls={})), "], too little to show that the named ones suffice"),
    ):
        assert words in headline_of(replace(localization, verdicts=verdicts))
    effects = localization.evidence.patching_effects
    assert effects.baselines is not None
    baselines: Any = effects.baselines.frame
    guess = replace(effects, baselines=replace(effects.baselines, frame=baselines.assign(value=0.0, low=0.0, high=1.0)))
    guessing = replace(localization, evidence=replace(localization.evidence, patching_effects=guess))
    assert guessing.warnings and headline_of(guessing).startswith(guessing.caveat_sentences[0]), "before all else"
    assert len(guessing.warnings) == 2 and all("log_prob" in warning for warning in guessing.warnings)


def test_the_headline_goes_from_the_answer_to_the_largest_effect_to_one_caveat(localization):
    nothing = replace(localization, heads_by_role=dict.fromkeys(localization.heads_by_role, ()))
    answer = (
        f"No head passes all tests of a role.\n{localization.accuracy}\nThe largest effect of a single head is that of "
    )
    assert headline_of(nothing).startswith(answer)
    effects = localization.evidence.patching_effects.where(kind="all", metric="log_prob")
    row = effects.top("log_prob", 1, by="absolute").frame.iloc[0]
    share = effects.normalized().where(layer=row["layer"], head=row["head"]).frame["value"].item()
    said = (
        f"{{}}), which brings back {row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}] nats of the log-"
        f"probability on clean prompts, {share:.0%} of the difference to the corrupted prompts."
    )
    head = describe([(row["layer"], row["head"])])
    (role,) = (role for role, heads in localization.heads_by_role.items() if (row["layer"], row["head"]) in heads)
    assert f"{head} (not named{said}".format("") in headline_of(nothing)
    assert f"{head} (named for {role}{said}".format("") in headline_of(localization)
    note = "No head can be named for lookup: the prompts have no relation of that name."
    partly = replace(nothing, task=replace(nothing.task, notes=("Some note.", note)))
    assert headline_of(partly).startswith(answer) and headline_of(partly).endswith(note)
    note = "No head can be named for any role: the smallest p-value that these prompts allow is 0.5 (lookup)."
    never = headline_of(replace(nothing, task=replace(nothing.task, notes=("Some note.", note))))
    assert never.startswith(f"{note}\n{localization.accuracy}\nThe largest effect") and never.count(note) == 1
    assert never.endswith("Some note.")
    large = tuple(replace(each, large=True) for each in localization.unnamed)
    assert f" {len(large)} heads have a large effect and no role." in headline_of(replace(nothing, unnamed=large))
    patched: Any = effects.frame
    first = patched["value"].abs() == patched["value"].abs().max()
    wide = replace(effects, frame=patched.assign(low=patched["low"].where(~first, -1.0)))
    unclear = headline_of(replace(nothing, evidence=replace(nothing.evidence, patching_effects=wide)))
    assert "The largest effect of a single head whose interval leaves out 0 is that of " in unclear
    clear, larger = unclear.split(" Larger, but with an interval that holds 0: ")
    assert f"{head} (" not in clear and f"{head} {row['value']:.2f} [-1.00, {row['high']:.2f}]" in larger
    none = replace(effects, frame=patched.assign(low=-1.0, high=1.0))
    quiet = replace(nothing, evidence=replace(nothing.evidence, patching_effects=none))
    assert "No single head is shown to change the log-probability of the right answer" in headline_of(quiet)


@pytest.mark.parametrize(("smallest", "tested", "said"), [(0.01, 8, True), (0.001, 8, False), (0.06, 8, False)])
def test_a_role_whose_p_values_are_hardly_small_enough_is_named_if_it_has_no_head(localization, smallest, tested, said):
    """Above the limit itself a note has said that no head can be named."""
    frame = localization.table.frame
    others: Any = frame[frame["metric"] != "q"]
    q: Any = frame[frame["metric"] == "q"].iloc[[0] * tested]
    table = replace(localization.table, frame=pd.concat([others, q]), values=None, weights=None)
    task = replace(localization.task, smallest_p={"lookup": smallest, "align_query": smallest})
    found = replace(localization, table=table, task=task, heads_by_role={**localization.heads_by_role, "lookup": ()})
    note = next(note for heading, note, _ in _sections(found) if heading == "The heads")
    assert (f"no p-value below {smallest:.2g} for lookup: corrected for 8 tested heads" in note) == said
    assert ("Take more prompts for lookup, or more candidate positions." in note) == said


def test_too_few_control_sets_for_any_verdict_are_told_beside_the_verdicts(localization):
    def told(count: int) -> str:
        needed = next(each for each in localization.verdicts if each.claim == "necessary")
        verdicts = [replace(needed, value=0.0, intact=1.0, controls={"layers": (1.0,) * count})]
        sections = _sections(replace(localization, verdicts=tuple(verdicts)))
        return next(note for heading, note, _ in sections if heading.startswith("Are they necessary"))

    few = "With 18 control sets no p-value is below 0.053, so none reaches 0.05 and nothing is shown: draw at least 19"
    assert few in told(18) and "nothing is shown" not in told(19)


@pytest.fixture
def written(tmp_path):
    """Writes a report of these sections."""

    def write(*sections: Any, **changes: Any) -> Path:
        report = {"title": "t", "summary": "s", "provenance": MADE, "sections": sections, **changes}
        return write_report(tmp_path / "r.html", **report)

    return write


@pytest.fixture(scope="module")
def page(localization, tmp_path_factory):
    return save_localization(localization, tmp_path_factory.mktemp("report"))


def test_a_localization_shows_itself(localization):
    heads = {role: describe(heads) for role, heads in localization.heads_by_role.items() if heads}
    shown = "; ".join(f"{role}: {names}" for role, names in heads.items())
    assert repr(localization) == f"Localization({shown}; tested on 8 prompts)" and len(heads) > 2
    notes = TaskFacts(notes=("Heads <align> & look up.",))
    page = replace(localization, task=notes, unnamed=(), verdicts=())._repr_html_()
    assert "<align>" not in localization._repr_html_() and "<align>" not in page
    rows = page.split("<tr")[2:]
    assert len(rows) == sum(len(named) for named in localization.heads_by_role.values())
    role, (head, *_) = next((role, named) for role, named in localization.heads_by_role.items() if named)
    measured = localization.table.where(role=role, layer=head[0], head=head[1]).frame.set_index("metric")["value"]
    score, q = measured["score"], measured["q"]
    cells = re.findall("<td[^>]*>(.*?)</td>", rows[0])
    assert cells[:2] == [describe([head]), role] and cells[2].startswith(f"{score:.2f} [") and f"{q:.1g}" in cells
    nothing = replace(localization, heads_by_role=dict.fromkeys(localization.heads_by_role, ()), task=TaskFacts())
    assert repr(nothing) == "Localization(no head named; tested on 8 prompts)"
    assert "<div>No head passes every test. Nearest: L1H3 (align_query: causal p = " in nothing._repr_html_()


def test_the_summary_stands_on_top_and_every_part_follows(page, localization):
    text = page.read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    assert body.index("Heads &lt;align&gt; &amp; look up.") < body.index("<h2 ")
    headings = re.findall('<h2 id="(.*?)"', body)
    assert headings[:2] == ["the-heads", "heads-that-were-not-named"]
    assert headings[2:4] == ["accuracy-without-them", "are-they-necessary-and-do-they-suffice"]
    assert headings[4:7] == ["scores-of-all-heads", "effects-of-single-heads", "interchange-interventions"]
    assert headings[7:] == ["attention-on-the-test-example", "a-pair-of-prompts", "methods"]
    pair, drawn = localization.evidence.example.pair, body[body.index('id="a-pair-of-prompts"') :]
    assert pair is not None and pair.to_html() in drawn and pair.clean[:1].texts_at(0) != pair.corrupted[:1].texts_at(0)
    paragraphs = re.findall("<p>", body[: body.index("</div>")])
    assert len(paragraphs) == len(headline_of(localization).split("\n")) == 5, "names, verdicts, effect, caveat"
    first = next(each for each in localization.caveat_sentences if "score below 0.5 on prompts" in each)
    assert "follow a fixed alignment" in first and body.index("follow a fixed") < body.index("</div>"), (
        "in the headline"
    )
    roles = sum(map(bool, localization.heads_by_role.values()))
    assert body.count("underlined token") >= roles, "a drawing for each role"


def test_the_named_heads_come_with_their_evidence(localization):
    ((layer, head),) = localization.heads_by_role["align_query"]
    frame = localization.table.where(layer=layer, head=head, role="align_query").frame.set_index("metric")
    intervals = ["{value:.2f} [{low:.2f}, {high:.2f}]".format(**frame.loc[m]) for m in ("score", "attention")]
    effects = ["{value:.2f} [{low:.2f}, {high:.2f}]".format(**frame.loc[m]) for m in ("ablation", "denoising")]
    cells = re.findall("<td>(.*?)</td>", named_heads(localization))
    start = cells.index("align_query") - 1
    q = f"{frame.loc['q', 'value']:.1g}"
    assert cells[start : start + 7] == [f"L{layer}H{head}", "align_query", *intervals, q, *effects]
    assert cells[start + 8] == "ablation and patching"


def test_a_report_without_any_named_head_says_so(tmp_path, localization):
    found = localization.evidence
    none = replace(
        localization,
        heads_by_role=dict.fromkeys(localization.task.roles, ()),
        evidence=Evidence(
            patching_effects=found.patching_effects,
            ablation_effects=empty(found.ablation_effects),
            set_ablations=found.set_ablations.where(ablated="nothing"),
        ),
    )
    assert attention_of(none) is None
    text = save_localization(none, tmp_path).read_text(encoding="utf-8")
    assert "No head passes all tests of a" in text and "Accuracy without them" not in text
    assert "smallest sets" not in text, "they were not asked for"
    assert report.packed(report.circuitsvis_script()) not in text


def test_each_script_stands_on_the_page_once_and_only_if_it_is_needed(page, written):
    text = page.read_text(encoding="utf-8")
    assert text.count(report.packed(report.get_plotlyjs())) == 1
    assert text.count(report.packed(report.circuitsvis_script())) == 1
    assert page.stat().st_size <= report.MAX_BYTES
    assert written(("h", "", "x")).stat().st_size < 10_000


def test_the_same_results_give_the_same_page(page, tmp_path, localization, monkeypatch):
    assert save_localization(localization, tmp_path / "again").read_bytes() == page.read_bytes()
    for heads in (2, 0):  # of a prompt of many tokens
        size = len(localization.evidence.example.positions)
        monkeypatch.setattr("align_circuits.report.localize_report.MAX_CELLS", heads * size**2)
        assert len(getattr(attention_of(localization), "rows", ())) == heads


def test_a_page_that_cannot_be_written_leaves_nothing_and_says_why(written, tmp_path):
    with pytest.raises(ValueError, match="show less in 'huge'"):
        written(("small", "", "x"), ("huge", "", "x" * report.MAX_BYTES))
    with pytest.raises(UnicodeEncodeError):
        written(summary="a lone surrogate \ud800 has no bytes in UTF-8")
    assert not list(tmp_path.iterdir())


def test_a_browser_draws_all_of_it_without_error_or_network(page, tmp_path, localization):
    seen = browser.opened(page, tmp_path)
    assert not seen.console
    assert seen.figures == seen.drawn == len(figures(localization))
    heads = attention_of(localization)
    assert heads is not None
    assert len(seen.canvases) == len(heads.rows) + 1, "a small map for each head and a large one"
    assert min(seen.canvases) > 0.01
    assert not seen.overflows
    assert not browser.opened(page, tmp_path, width=500).overflows


@pytest.mark.parametrize(("width", "columns"), [(500, 1), (1200, 3)])
def test_on_a_phone_figures_are_seen_whole_with_their_panels_below_each_other(
    written, tmp_path, localization, width, columns
):
    """Panels side by side and a scale or legend beside them would be cut, or scroll."""
    drawn = figures(localization)
    page = written(*((name, "", drawn[name]) for name in ("scores", "ablation")))
    look = """() => [...document.querySelectorAll('[role=figure]')].map(it => [
      it.scrollWidth > it.clientWidth || it.scrollHeight > it.clientHeight,
      new Set([...it.querySelectorAll('.heatmaplayer')].map(map => Math.round(map.getBoundingClientRect().left))).size,
      [...it.querySelectorAll('.annotation-text')].map(text => text.textContent),
      [...it.querySelectorAll('.annotation-text')].map(text => text.getBoundingClientRect().top),
    ])"""
    (scores, ablation), _ = browser.ran(page, tmp_path, look, width=width)
    assert not scores[0] and not ablation[0]
    assert scores[1] == columns
    assert scores[2] == [*localization.task.roles], "each above its panel"
    assert columns > 1 or scores[3] == sorted(set(scores[3]))


def test_a_figure_is_drawn_anew_where_its_column_gets_narrower(written, tmp_path, localization):
    """Plotly answers to the window alone. Without a screen a frame comes with real time, which timers do not take."""
    page = written(("scores", "", figures(localization)["scores"]))
    look = """async () => {
      document.querySelector("main").style.width = "340px";
      const widths = () => [...document.querySelectorAll(".main-svg")].map(it => it.getBoundingClientRect().width);
      const busy = () => { for (let i = 0; i < 2e7; i++) Math.random(); };
      for (let tries = 0; tries < 60 && Math.max(...widths()) > 340; tries++)
        await new Promise(done => setTimeout(done, 50)).then(busy);
      return widths();
    }"""
    widths, _ = browser.ran(page, tmp_path, look, width=500)
    assert widths and max(widths) <= 340


def test_headings_that_differ_in_signs_alone_have_figures_of_their_own(written):
    keys = {"layer": [0, 1], "head": 0, "metric": "prob", "value": 0.5, "low": 0.2, "high": 0.9, "n": 8}
    figure = ac.plots.top_heads(Table(pd.DataFrame(keys), MADE))
    sections = [(f"At S1{sign}1", "", figure) for sign in "+-"]
    page = written(*sections).read_text(encoding="utf-8")
    assert len({*re.findall('id="figure-([^"]+)"', page)}) == len({*re.findall('<h2 id="([^"]+)"', page)}) == 2


def test_a_table_says_once_what_is_the_same_in_all_rows(written):
    numbers = {"value": 0.5, "low": 0.5, "high": 0.5, "n": 4}
    frame = pd.DataFrame({"level": "head", "head": [0, None], "site": "<z>", **numbers})
    page = written(("a", "", Table(frame, MADE))).read_text(encoding="utf-8")
    assert re.findall("<tr>\\s*<td>(.*?)</td>", page) == ["0", "–"], "what is missing has one sign, which sorts last"
    assert "<p>In all rows: level head, site &lt;z&gt;.</p>" in page
    assert re.findall("<th>(.*?)</th>", page) == ["head", "value", "low", "high", "n"], "numbers stay"
    alone = written(("a", "", Table(frame.head(1), MADE))).read_text(encoding="utf-8")
    assert "In all rows" not in alone and "<th>level</th>" in alone


def test_a_table_of_claims_scrolls_by_itself_and_has_no_empty_columns(written, tmp_path):
    checks = [Check("a" * 30 + " " + "b" * 90, Measured(0.7, 0.6, 0.8), ">=", 0.5, Measured(0.1, 0.0, 0.2), "c" * 60)]
    drawn = checks_html(checks)
    assert "<th>claim</th>" in drawn and "<th>published</th>" not in drawn
    page = written(("a", "", drawn))
    assert not browser.opened(page, tmp_path, width=500).overflows
    page.write_text(page.read_text(encoding="utf-8").replace("overflow-x", "x"), encoding="utf-8")
    assert browser.opened(page, tmp_path, width=500).overflows


def test_a_table_wider_than_the_page_has_a_shadow_and_the_page_a_background(written, tmp_path):
    frame = pd.DataFrame({"level": "head", "head": [0], "value": 0.5, "low": 0.5, "high": 0.5, "n": 4})
    page = written(("a", "", Table(frame, MADE)), ("b", "", "<details><summary>1 more</summary><p>L1H0</p></details>"))
    look = """() => [getComputedStyle(document.documentElement).backgroundColor,
      getComputedStyle(document.querySelector('.wide')).backgroundAttachment,
      ...[...document.styleSheets[0].cssRules].filter(rule => rule.media).map(rule => rule.media.mediaText = "all"),
      ...[...document.querySelectorAll("details > :last-child")].map(folded => folded.checkVisibility())]"""
    (background, attached, *_, heads, provenance), _ = browser.ran(page, tmp_path, look)
    assert heads and not provenance, "in print all is shown but the provenance"
    assert background == "rgb(255, 255, 255)"
    assert attached == "local, local, scroll, scroll", "the covers scroll with the table, the shadows stay"


def test_the_browser_would_see_a_request_an_error_and_an_empty_figure(written, tmp_path, localization):
    figure = figures(localization)["scores"]
    figure.data = []
    spoilt = '<img src="https://example.com/x.png"><script>nothing()</script>'
    seen = browser.opened(written(("a", "", figure), ("b", "", spoilt)), tmp_path)
    assert any("example.com" in line for line in seen.console)
    assert any("nothing is not defined" in line for line in seen.console)
    assert (seen.figures, seen.drawn) == (1, 0)


def test_a_press_on_a_heading_sorts_a_table_with_missing_values_last(written, tmp_path):
    rows = {"head": ["L10H1", "L2H3", "L2H11", "L1H0"], "value": ["-0.20 [-1, 0]", "–", "1e-05", "0.5"]}
    page = written(("a", "", pd.DataFrame(rows).to_html(index=False)))
    press = """() => [0, 0, 1, 1].map(column => {
        document.querySelectorAll("th button")[column].click();
        return [...document.querySelectorAll("tbody tr")].map(row => row.cells[0].textContent).join(" ");
    })"""
    orders, console = browser.ran(page, tmp_path, press)
    assert not console
    assert orders == [
        "L1H0 L2H3 L2H11 L10H1",
        "L10H1 L2H11 L2H3 L1H0",
        "L10H1 L2H11 L1H0 L2H3",
        "L1H0 L2H11 L10H1 L2H3",
    ]


@pytest.mark.slow
def test_a_report_passes_axe(page, tmp_path):
    if find_spec("axe_core_python") is None:
        assert not os.environ.get("CI"), "CI needs axe-core: pip install axe-core-python"
        pytest.skip("no axe-core: pip install axe-core-python")
    axe = files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    checked, spoilt = tmp_path / "checked.html", tmp_path / "spoilt.html"
    text = page.read_text(encoding="utf-8").replace("<body>", f"<body><script>{axe}</script>")
    checked.write_text(text, encoding="utf-8")
    spoilt.write_text(text.replace("</main>", '<img src="data:,"></main>'), encoding="utf-8")
    violations = "async () => (await axe.run()).violations.map(each => [each.id, each.nodes[0].html])"
    assert browser.ran(checked, tmp_path, violations)[0] == []
    assert [name for name, _ in browser.ran(spoilt, tmp_path, violations)[0]] == ["image-alt"]


def test_a_term_is_defined_once_where_it_first_stands_and_at_the_end(written):
    page = written(("Ablation", "An ablation & a lookup; a second lookup, but no prelookup.", "x"))
    text = page.read_text(encoding="utf-8")
    assert re.findall('class="term" href="#(.*?)"', text) == re.findall('<dt id="(.*?)"', text)[::-1]
    assert text.count(">lookup</a>") == 1 and "a second lookup, but no prelookup." in text
    meaning = "A position that predicts a letter attends to earlier translations of the same symbol."
    assert text.count(meaning) == 2


def test_a_long_table_shows_its_first_rows_and_says_so(written):
    rows = report.MAX_ROWS + 1
    table = Table(pd.DataFrame({"metric": "m", "value": np.arange(rows) / 1, "low": 0.0, "high": 1.0, "n": 1}), MADE)
    text = written(("a", "", table)).read_text(encoding="utf-8")
    assert text.count("<tr>") == report.MAX_ROWS and f"{report.MAX_ROWS:,} of {rows:,} rows: table.csv has all." in text


def test_the_card_names_model_task_seed_and_command(written):
    model = {"name": "m<1>", "n_layers": 1, "n_heads": 3, "dtype": "float32", "device": "cpu", "revision": "b0b"}
    made = replace(MADE, model=model, data={"task": {"name": "seq2seq", "seed": 5}}, settings={"seed": 7})
    page = written(provenance=made, facts={"command": "a --b c"})
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page.read_text(encoding="utf-8")) == [
        ("Model", "m&lt;1&gt; (1 layer of 3 heads, float32, cpu)"),
        ("Revision", "b0b"),
        ("Task", "seq2seq"),
        ("Seed", "7"),
        ("Command", "<code>a --b c</code>"),
    ]


def test_a_report_on_own_prompts_speaks_of_their_relations_alone(tmp_path, char_tokenizer, random_hf_model):
    """No word of other tasks, no column or panel without a number of its own."""
    texts = [f"{k}{x}mn{y}op{z}q" for k in "kstu" for x, y, z in ("ABB", "CDC", "EFE", "GHH")]
    answers, others = ["A", "D", "F", "G"] * 4, ["B", "C", "E", "H"] * 4
    other = [answer.lower() for answer in answers]
    positions = {name: [(letter, 0) for letter in letters] for name, letters in (("IO", answers), ("S1", others))}
    clean, corrupted = ac.Prompts.from_pairs(
        *(texts, [text.replace("q", "r") for text in texts], char_tokenizer),
        **{"answer": answers, "corrupted_answer": other, "positions": positions},
    )
    clean = clean.with_relations(mover=ac.Relation.from_positions("END", "IO", prompts=clean, candidates=["IO", "S1"]))
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    found = ac.localize(model, clean, corrupted=corrupted, roles={"mover": "attends to the name"}, n_controls=0)
    assert found.answer.startswith("No head passes every test. Nearest: L") and "(mover: " in found.answer
    assert "The first token of the answer is correct in" in found.answer
    assert "Nearest" not in headline_of(found), "the table of heads that were not named tells it"
    assert any("no better than a guess" in caveat for caveat in found.caveat_sentences[:2]), "it was never trained"
    drawn: Any = figures(found)
    assert all(len(figure.layout.annotations) <= 1 for figure in drawn.values()), "one panel each"
    page = save_localization(found, tmp_path).read_text(encoding="utf-8")
    shown = re.sub(r"<script.*?</script>|<style.*?</style>|<pre.*?</pre>|<!--.*?-->", "", page, flags=re.DOTALL)
    assert re.search(r"<h1>Heads of .* for mover</h1>", shown) and "A head that attends to the name." in shown
    assert not re.findall(r"symbol|phrase|automaton|letter|aligner|<NA>|smallest set|score on control", shown, re.I)
    table = shown[shown.index('id="interchange-interventions"') : shown.index('id="a-pair-of-prompts"')]
    assert "<th>carries the answer</th>" in table and "No head" not in table
    interchanges = found.evidence.interchanges
    assert interchanges is not None
    alone = replace(found.evidence, interchanges=interchanges.where(patched="nothing"))
    page = save_localization(replace(found, evidence=alone), tmp_path).read_text(encoding="utf-8")
    assert 'id="interchange-interventions"' not in page, "of no candidate"
    two = clean.with_relations(other=ac.Relation.from_positions("END", "S1", prompts=clean, name="other"))
    drawn_one = two.drawn_relation
    assert legend_of(two).endswith(f" Not drawn: {({'mover', 'other'} - {drawn_one}).pop()}.")
