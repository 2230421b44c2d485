"""What the pages of results say of the kept tables."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from align_circuits.cli.experiments_list import kept_verdicts
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.statistics import Measured
from align_circuits.tables.tables import Provenance, Table

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def kept_results():
    spec = importlib.util.spec_from_file_location("kept_results", DOCS / "kept_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kept_results"] = module
    spec.loader.exec_module(module)
    return module


PAPERS = ("icatune", "recall", "abrupt", "validation")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_that_fails_has_one_cause_and_the_list_of_experiments_tells_all_verdicts(
    kept_results, monkeypatch, paper
):
    """In one test, so that each kept table is checked once."""
    monkeypatch.chdir(DOCS)
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


def test_the_list_of_experiments_tells_of_no_others(kept_results, monkeypatch):
    monkeypatch.chdir(DOCS)
    known = {experiment.name for paper in PAPERS for experiment, _ in kept_results.kept(paper)}
    assert set(kept_verdicts()["experiment"]) <= known


def test_archived_experiments_keep_their_claims_causes_and_tables(kept_results, monkeypatch):
    monkeypatch.chdir(DOCS)
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
    monkeypatch.chdir(DOCS)
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


def test_causes_and_fresh_seeds_name_experiments_that_are_or_were(kept_results, monkeypatch):
    monkeypatch.chdir(DOCS)
    known = {*EXPERIMENTS, *kept_results.archived()}
    causes, fresh = (tomllib.loads(path.read_text("utf-8")) for path in (kept_results.CAUSES, kept_results.FRESH))
    assert {claim[0] for cause in causes["cause"] for claim in cause["claims"]} <= known
    assert {claim["experiment"] for claim in fresh["claim"]} <= known


def test_claims_about_emergence_are_tested_on_seeds_that_nothing_was_developed_on(kept_results, monkeypatch):
    monkeypatch.chdir(DOCS)
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


def test_a_claim_without_a_cause_is_refused(kept_results, monkeypatch):
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr(kept_results, "failing", lambda _: iter([("icatune/fig3", "cpu", "No such claim", "0")]))
    with pytest.raises(LookupError, match="0 causes for 'No such claim'"):
        kept_results.why("icatune")
    monkeypatch.setattr(kept_results, "failing", lambda _: iter([]))
    with pytest.raises(LookupError, match="claims that do not fail"):
        kept_results.why("icatune")
