"""What the pages of results say of the kept tables."""

import importlib.util
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import raised

from align_circuits.cli.experiments_list import kept_verdicts
from align_circuits.papers.claims import Check
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.statistics import Measured, exact, over_seeds, share_of
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

DOCS = Path(__file__).resolve().parent.parent / "docs"


def of_the_pages(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_the_docs(monkeypatch):
    monkeypatch.chdir(DOCS)


@pytest.fixture(scope="module")
def kept_results():
    return of_the_pages("kept_results")


@pytest.fixture(scope="module")
def scoreboard(kept_results):  # noqa: ARG001 - which it imports
    return of_the_pages("scoreboard")


PAPERS = ("icatune", "recall", "abrupt", "validation")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_that_fails_has_one_cause_and_the_list_of_experiments_tells_all_verdicts(kept_results, paper):
    """In one test, so that each kept table is checked once."""
    causes = kept_results.why(paper)
    assert causes["claims that fail"].sum() == kept_results.summary(paper)["fails"].sum() > 0
    assert set(causes["shown by"]) <= {*EXPERIMENTS, *kept_results.archived(), "not shown"}
    overview = kept_results.overview(paper)
    columns = ["experiment", "scale", *kept_results.VERDICTS]
    counted = {tuple(row) for row in overview[columns].to_numpy() if sum(row[2:])}
    told = kept_verdicts()
    names = [experiment.name for experiment, _ in kept_results.kept(paper)]
    of_paper: Any = told[told["experiment"].isin(names)]
    assert {tuple(row) for row in of_paper[columns].to_numpy()} == counted
    assert of_paper["claims"].to_list() == of_paper[kept_results.VERDICTS].sum(axis=1).to_list()


def test_the_list_of_experiments_tells_of_no_others(kept_results):
    known = {experiment.name for paper in PAPERS for experiment, _ in kept_results.kept(paper)}
    assert set(kept_verdicts()["experiment"]) <= known


def test_archived_experiments_keep_their_claims_causes_and_tables(kept_results):
    archived = kept_results.archived()
    assert not {*archived} & {*EXPERIMENTS}, "its code is still there"
    assert {path.name for path in kept_results.ARCHIVE.iterdir() if path.is_dir()} == {
        name.replace("/", "-") for name in archived
    }
    told = pd.read_csv(kept_results.ARCHIVE / "kept_results.csv")
    overview = kept_results.overview("archive")
    columns = ["experiment", "scale", *kept_results.VERDICTS]
    assert {tuple(row) for row in told[columns].to_numpy()} == {tuple(row) for row in overview[columns].to_numpy()}
    assert told["claims"].to_list() == told[kept_results.VERDICTS].sum(axis=1).to_list()
    assert kept_results.why("archive")["claims that fail"].sum() == overview["fails"].sum() > 0
    for name, _, folder in kept_results.results_of("archive"):
        assert Table.load(folder).provenance.settings["name"] == name
    page = (DOCS / "archive.md").read_text(encoding="utf-8")
    for name, about in archived.items():
        assert f"\n## {name}\n" in page and f'show_archived("{name}")' in page
        assert not (DOCS.parent / about["code"]).exists()


def test_archived_claims_are_read_to_the_bit_and_shown_with_their_cause(kept_results, monkeypatch):
    name = "recall/exchange"
    checks = kept_results.checked(name, kept_results.folder_of(name, "cpu"))
    assert checks[1].measured == Measured(0.60595703125, 0.4821497926519547, 0.7297642698480453)
    assert (checks[1].relation, checks[1].threshold, checks[1].control_is) == (">=", 0.5, "the layer 1")
    assert str(checks[2].measured) == "0.00 [no interval]" and checks[2].verdict == "undecided"
    assert checks[1].published == "" and checks[6].published == "W_KQ of both heads, and W_OV of this one"
    shown: list[Any] = []
    monkeypatch.setattr(kept_results, "display", lambda each: shown.append(each.data))
    kept_results.show_archived(name)
    claims, causes = (part for part in shown if part.startswith("<div"))
    assert all(check.claim.replace("'", "&#x27;") in claims or check.claim in claims for check in checks)
    assert causes.count("recall/exchange (cpu)") == 2 and "recall/heads" in causes
    assert "0 hold, 2 fail, 5 undecided of 7 claims. *Preregistered: no.*" in shown[1]
    assert "docs/results/archive/recall-exchange/cpu/table.csv.xz" in shown[-2]
    assert "commit 42a4e13" in shown[-1] and "reproduce recall/exchange" in shown[-1]


def test_causes_and_fresh_seeds_name_experiments_that_are_or_were(kept_results):
    known = {*EXPERIMENTS, *kept_results.archived()}
    causes, fresh = (tomllib.loads(path.read_text("utf-8")) for path in (kept_results.CAUSES, kept_results.FRESH))
    assert {claim[0] for cause in causes["cause"] for claim in cause["claims"]} <= known
    assert {claim["experiment"] for claim in fresh["claim"]} <= known


def test_claims_about_emergence_are_tested_on_seeds_that_nothing_was_developed_on(kept_results):
    registry = kept_results.fresh_seeds()
    assert {name.partition("/")[0] for name in registry["experiment"]} == set(kept_results.PAPERS)
    for row in registry.to_dict("records"):
        developed, tested = (set(row[part].split(", ")) for part in ("developed on", "tested on"))
        assert not developed & tested, row
        assert len(tested) >= 5, row


def test_seeds_of_a_table_of_means_are_those_of_its_arms(kept_results):
    frame = pd.DataFrame({"step": [1], "value": [0.5], "low": [0.4], "high": [0.6], "n": [2]})
    of_arms = Provenance("measure", {"config": {"arms": [{"seeds": [4, 2]}, {"seeds": [2, 7]}]}})
    assert kept_results.seeds_of(Table(frame, of_arms)) == [2, 4, 7]
    assert kept_results.seeds_of(Table(frame.assign(seed=3), of_arms)) == [3]


def test_numbers_of_a_page_are_those_that_were_measured(kept_results, monkeypatch):
    half = kept_results.measured_for("icatune/stand-ins", "smollm2", "query side: with its aligners blind")
    assert kept_results.printed(half) == ".56 [.47, .65]"
    with pytest.raises(ValueError, match="unpack"):  # several claims begin so
        kept_results.measured_for("icatune/stand-ins", "smollm2", "query side")
    texts = {-0.5: "-.50", 10.25: "10.25", "mean": "mean", Measured(1.0, float("nan"), float("nan")): "1.00"}
    assert {number: kept_results.printed(number) for number in texts} == texts
    glued: dict[str, str] = {}
    page = SimpleNamespace(glue=lambda name, text, **_: glued.update({name: text}))
    monkeypatch.setitem(sys.modules, "myst_nb", page)
    kept_results.put(lost=half, method="EAP")
    assert glued == {"lost": ".56 [.47, .65]", "method": "EAP"}


def test_fig_10_stands_beside_its_own_steps(kept_results):
    checks = kept_results.checked("icatune/fig10", kept_results.folder_of("icatune/fig10", "cpu"))
    assert [check.published for check in checks][-2:] == ["near steps 430 and 470", "in higher layers"]


def test_a_claim_without_a_cause_is_refused(kept_results, monkeypatch):
    monkeypatch.setattr(kept_results, "failing", lambda _: iter([("icatune/fig3", "cpu", "No such claim", "0")]))
    raised(LookupError, "0 causes for 'No such claim'", kept_results.why, "icatune")
    monkeypatch.setattr(kept_results, "failing", lambda _: iter([]))
    raised(LookupError, "claims that do not fail", kept_results.why, "icatune")


@pytest.mark.parametrize(
    ("verdicts", "refuted", "outcome"),
    [
        (["holds", "no exception"], False, "reproduced"),
        (["holds", "not testable"], False, "reproduced"),
        (["holds", "undecided"], False, "too small to say"),
        (["holds", "no evidence"], False, "too small to say"),
        (["undecided", "fails", "holds"], False, "not reproduced"),
        (["holds"], True, "the paper is wrong"),
        (["fails", "holds"], True, "the paper is wrong"),
        (["not testable", "not testable"], True, "not testable here"),
        ([], False, "not testable here"),
    ],
)
def test_a_row_of_the_scoreboard_is_judged_by_all_its_claims(scoreboard, verdicts, refuted, outcome):
    assert scoreboard.outcome(verdicts, refuted=refuted) == outcome


FIGURES = {
    "icatune": ["Table 1", *(f"Fig. {number}" for number in range(1, 12))],
    "recall": [f"Fig. {number}" for number in range(1, 27)],
    "abrupt": [*(f"Fig. {number}" for number in range(1, 8)), *(f"Fig. A.{number}" for number in range(1, 6))],
}
"""All that the papers have."""

BESIDES = ("Facts are learned, as this presupposes", "localize names a head", "In words", "In numbers")
"""Claims by which no row is judged."""


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_has_a_row_and_every_claim_of_a_paper_is_in_one(scoreboard, kept_results, paper):
    rows = scoreboard.rows(paper)
    assert {*FIGURES[paper]} <= {row.of for row in rows}
    results = [kept for row in rows for kept in scoreboard.kept(row)]
    judged = {(kept.row.experiment, kept.folder.name, claim) for kept in results for claim in kept.claims}
    own = [(experiment, folder) for experiment, folder in kept_results.kept(paper) if experiment.of_its_paper]
    claimed = {
        (experiment.name, folder.name, check.claim)
        for experiment, folder in own
        for check in kept_results.checked(experiment.name, folder)
    }
    assert claimed <= judged
    told = {check.claim for kept in results for check in kept.checks}
    besides = told - {check.claim for kept in results for check in kept.judged}
    assert all(any(part in claim for part in BESIDES) for claim in besides)
    for row in rows:
        largest = scoreboard.kept(row)[0]
        assert all(any(part in claim for claim in largest.claims) for part in row.besides)
        assert largest.judged
        assert not row.claims or all(any(part in text for _, _, text in claimed) for part in row.claims)
        if row.wrong:
            assert any(row.wrong["claim"] in check.claim for check in largest.checks)
            assert (DOCS / f"{row.wrong['page']}.md").exists()
    for name, known in scoreboard.written()["published"].items():
        texts = {text for experiment, _, text in claimed if experiment == name}
        assert name.partition("/")[0] != paper or all(any(part in text for text in texts) for part in known), name
        for text in texts:
            scoreboard.published_of(name, text)  # raises where two published numbers are of one claim


def test_the_size_of_a_result_is_its_smallest_ratio_to_the_papers(scoreboard):
    sizes = scoreboard._sizes({"size": {"d_head": 32, "steps": 9}, "cells": [{"n_classes": 64}, {"n_classes": 128}]})
    assert sizes == {"d_head": 32, "n_classes": 128}
    frame = pd.DataFrame({"value": [1.0], "low": 0.9, "high": 1.0, "n": 1})
    llama = Provenance("measure", {"config": None}, model={"n_layers": 32, "d_model": 4096})
    assert scoreboard.size_of("icatune/fig3", Table(frame, llama)) == (100, "of its weights")
    config = {"size": {"d_head": 64, "d_hidden": 32, "steps": 1}, "conditions": [{"n_classes": 512}]}
    grid = Provenance("measure", {"config": config})
    assert scoreboard.size_of("abrupt/fig1", Table(frame, grid)) == (25, "width")
    assert scoreboard.size_of("abrupt/fig7", Table(frame, Provenance("measure", {}))) == (100, "")


def test_what_would_decide_a_claim_is_decided_by_so_many_seeds_of_that_spread(scoreboard):
    def undecided(of: Measured) -> Check:
        check = Check("c", of, ">=", 0.5, exact(0.0), "nothing")
        assert check.verdict == "undecided"
        return check

    rng = np.random.default_rng(0)
    few = np.array([0.48, 0.52, 0.55, 0.6, 0.75, 0.8])
    check = undecided(over_seeds(few))
    n = int(scoreboard.would_decide(check).split()[0])
    assert 7 < n < 20
    spread = few.mean() + few.std(ddof=1) * (lambda drawn: (drawn - drawn.mean()) / drawn.std(ddof=1))(
        rng.normal(size=n)
    )
    assert replace(check, measured=over_seeds(spread)).verdict == "holds"
    assert scoreboard.would_decide(undecided(share_of(np.array([True] * 5 + [False])))) == "9 seeds"
    assert scoreboard.would_decide(undecided(over_seeds(np.full(3, 0.9)))) == "5 seeds"
    assert scoreboard.would_decide(undecided(over_seeds(np.array([0.4, 0.6])))).startswith("more than 200 seeds")
    assert scoreboard.would_decide(undecided(Measured(0.6, 0.4, 0.8))) == "4 times the seeds or prompts"
    assert scoreboard.would_decide(undecided(Measured(0.5, 0.4, 0.6))).startswith("more than 200 times")
    assert scoreboard.would_decide(undecided(over_seeds(np.array([0.9])))).startswith("more than one seed")


@pytest.mark.parametrize("paper", FIGURES)
def test_the_findings_of_a_paper_stand_in_few_words(paper):
    text = (DOCS / f"results-{paper}.md").read_text(encoding="utf-8")
    short = text.partition("## In short\n")[2].partition("\nNumbers of all figures")[0]
    bullets = [line for line in short.splitlines() if line.strip()]
    assert 0 < len(bullets) <= 5 and all(line.startswith("- ") for line in bullets)
    assert len(short.replace("- **", "**").split()) <= 150


def test_the_page_on_interventions_says_what_a_screen_misses():
    frame = Table.load(DOCS / "results/benchmarks/screening").frame.set_index(["measure", "contestant", "sweep"])
    page = (DOCS / "patch-and-attribute.md").read_text(encoding="utf-8")
    for sweep in ("patches, denoise", "mean ablations"):
        row = frame.loc["any of the best missed", "screened, 25%", f"40 planted circuits: {sweep}"]
        low, value, high = (f"{row[end]:.2f}".removeprefix("0") for end in ("low", "value", "high"))
        assert f"in {value} [{low}, {high}] of the sweeps of {sweep.split(',')[0].removeprefix('mean ')}" in page


def test_learning_in_context_is_still_rising_where_frequencies_are_skewed():
    """The numbers of `history-abrupt.md` and of the cause of what fails there."""
    frame: Any = Table.load(DOCS / "results/abrupt-fig2/cpu").where(n_classes=512, burst=1, noise=0.1).frame
    means = frame.pivot_table(index="step", columns=["measure", "zipf"], values="value")
    assert [f"{value:.2f}" for value in means["icl", 1.0].iloc[-3:]] == ["0.31", "0.38", "0.44"]
    assert f"{means['icl', 0.0].iloc[-1]:.2f}" == "0.94" and f"{means['iwl_common', 1.0].iloc[-1]:.2f}" == "0.74"
    last = frame[(frame["zipf"] == 1) & (frame["step"] == 3000)].pivot(index="seed", columns="measure", values="value")
    assert len(last) == 30 and f"{last['icl'].corr(last['iwl_common']):.2f}" == "-0.89"


def test_lookup_of_phrases_of_one_letter_rises_over_many_steps():
    """The numbers of the cause of a claim on abruptness that fails."""
    arm = "phrases of one letter"
    kept = Table.load(DOCS / "results/icatune-fig4/smollm2").where(arm=arm, part="course", condition="in distribution")
    heads: Any = kept.where(of="best head").frame
    best = heads.groupby(["metric", "step"])["value"].max().round(2)
    assert [best["align_query", step] for step in (40, 80)] == [0.58, 0.97]
    assert [best["lookup", step] for step in (40, 170)] == [0.54, 0.93]


def test_facts_with_absolute_positions_are_known_where_a_head_attends_to_the_relation():
    """The numbers of `history-recall.md` and of the cause of that claim."""
    frame: Any = (
        Table.load(DOCS / "results/recall-heads/paper-long").where(positions="absolute", stage="pretrained").frame
    )
    frame = frame[frame["sequences"] == "pretraining"]
    attention = frame[frame["metric"] == "attention"].pivot(index="seed", columns=["what", "head"], values="value")
    of_subject = attention["subject"].idxmax(axis=1)
    others = attention["relation"].apply(lambda row: row.drop(of_subject[row.name]).max(), axis=1)
    exact_match = frame[frame["metric"] == "exact"].set_index("seed")["value"]
    assert len(others) == 40 and attention["subject"].max(axis=1).min() > 0.995
    ranges = {}
    for name, seeds in {"none": others < 0.005, "some": others.between(0.1, 0.8), "most": others > 0.8}.items():
        ranges[name] = seeds.sum(), *(f"{end(of[seeds]):.2f}" for of in (others, exact_match) for end in (min, max))
    assert ranges["none"] == (17, "0.00", "0.00", "0.11", "0.18")
    assert ranges["some"] == (11, "0.14", "0.74", "0.27", "0.88")
    assert ranges["most"] == (12, "0.83", "1.00", "1.00", "1.00")
