"""`compare` puts two runs side by side, with the differences that the tables themselves give."""

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from align_circuits.cli import main
from align_circuits.cli.command_base import command_line
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

HEADS: Any = pd.DataFrame({"level": "head", "layer": [0, 0, 1], "head": [0, 1, 0], "metric": "lookup"})


def run(values, folder, *, seed=0, digest: Any = "d", verb="score", heads=HEADS, settings=None, **data):
    made = Provenance(verb, {"seed": seed, "out": str(folder), **(settings or {})}, data={"digest": digest, **data})
    numbers = np.asarray(values, dtype=float)
    table = Table.from_prompts(heads, numbers, np.ones_like(numbers), made, bounded=False)
    table.save(folder)
    return table


def beside(folder, one="a", other="b"):
    """The command that compares two runs in a folder."""
    return ["compare", str(folder / one), str(folder / other), "--overwrite", "--out", str(folder / "both")]


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(0, 1, (2, 3, 9))


def test_differences_on_the_same_prompts_have_paired_intervals_and_the_largest_stands_first(values, tmp_path, ran):
    first, second = (run(part, tmp_path / name, seed=s) for part, name, s in zip(values, "ab", (0, 5), strict=True))
    printed = ran(beside(tmp_path))
    exact: Any = (second - first).frame.sort_values("value", key=abs, ascending=False)
    made: Any = Table.load(tmp_path / "both").frame
    np.testing.assert_allclose(made[["value", "low", "high"]], exact[["value", "low", "high"]], atol=1e-6)
    np.testing.assert_allclose(made["B"] - made["A"], exact["value"], atol=1e-6)
    assert "settings seed 0 5" in " ".join(printed.split()) and "out" not in printed.split("claims")[0].split("A B")[1]


def test_other_prompts_give_an_interval_of_independent_prompts_and_equal_rows_are_counted(values, tmp_path, ran):
    run(values[0], tmp_path / "a")
    run(values[0][:2], tmp_path / "b", digest="e", heads=HEADS[:2])
    printed = ran(beside(tmp_path))
    assert "2 of 2 numbers are equal in A and B. In A alone: 1 more." in printed
    assert "Differences whose interval leaves out 0: 0." in printed and "largest differences" not in printed
    assert "Numbers that differ" not in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    made: Any = Table.load(tmp_path / "both").frame
    assert (made["low"] < 0).all() and (made["high"] > 0).all()
    run(values[1], tmp_path / "c", digest=["e", "f"])  # of several sets of prompts, as of tuning
    assert "Differences are B minus A, with 95% intervals over independent prompts." in ran(beside(tmp_path, "a", "c"))
    run(values[1], tmp_path / "g", digest="f", groups=3)
    said = ran(beside(tmp_path, "a", "g"))
    assert "without intervals: one run alone has groups, so the prompts may be the same." in said
    changed = values[0] + np.array([[0.0], [np.nan], [0.25]])
    run(values[0] + np.array([[0.0], [np.nan], [0.0]]), tmp_path / "a")
    run(changed, tmp_path / "b")
    listed = ran(beside(tmp_path)).split("largest differences:\n")[1].split("\n\n")[0].splitlines()
    assert len(listed) == 2 and "0.25" in listed[1], "a heading, and the one row that differs"


@pytest.mark.parametrize(("given", "missing"), [([], "PATH_A: The first run"), (["a"], "PATH_B: The second run")])
def test_one_run_alone_is_refused_with_what_the_verb_takes(given, missing, capsys):
    with pytest.raises(SystemExit):
        main(["compare", *given])
    assert f"align-circuits: compare takes PATH_A PATH_B; missing {missing}, " in capsys.readouterr().err


def test_what_is_no_run_and_what_measured_something_else_are_refused(values, tmp_path, declined):
    run(values[0], tmp_path / "a")
    run(values[1], tmp_path / "b", verb="patch")
    (tmp_path / "c").mkdir()
    for other, message in (
        ("b", "a run of score beside one of patch: give two of one verb, or of ablate"),
        ("c", "is no run"),
    ):
        error = declined(beside(tmp_path, "a", other))
        assert message in error and error.count("\n") == 1


def test_runs_that_cannot_be_compared_row_by_row_are_refused_by_name(values, tmp_path, ran, declined):
    for name in "ab":
        run(values[0], tmp_path / name)
    ran(beside(tmp_path))
    assert "both' holds a comparison: give two" in declined(
        [*beside(tmp_path, "both", "both")[:-1], str(tmp_path / "c")]
    )
    run(values[1], tmp_path / "b", heads=HEADS.iloc[[0, 1, 1]])
    assert "b' has several rows of the same keys" in declined(beside(tmp_path))
    run(values[1][:0], tmp_path / "b", heads=HEADS[:0])
    assert "b' has no rows: give a run" in declined(beside(tmp_path))


def test_estimates_stand_beside_what_they_estimate(values, tmp_path, ran, declined):
    """A patch tells kinds of targets apart and names its positions; an attribution does neither."""
    kinds: Any = pd.concat([HEADS.assign(kind=kind, positions="all") for kind in ("all", "first", "later")])
    first = run(np.concatenate([values[0], values[0] + 1, values[0] + 2]), tmp_path / "a", verb="patch", heads=kinds)
    second = run(values[1], tmp_path / "b", verb="attribute")
    command = beside(tmp_path)
    ran(command)
    made: Any = Table.load(tmp_path / "both").frame.sort_values(["layer", "head"])
    np.testing.assert_allclose(made["A"], first.where(kind="all").frame["value"])
    np.testing.assert_allclose(made["B"], second.frame["value"])
    assert made["low"].notna().all()
    more = pd.concat([kinds, HEADS.assign(kind="all", positions="all", metric="accuracy")])
    numbers = np.concatenate([values[0], values[0] + 1, values[0] + 2, values[1]])
    run(numbers, tmp_path / "a", verb="patch", heads=more)
    said = ran(command)
    rho, _ = spearmanr(values[0].mean(1), values[1].mean(1))
    assert said.split("\n\n")[1].startswith(
        f"lookup: rank correlation of the effects {rho:.2f} (Spearman, over 3 heads). "
        "Rows of A alone: metric 'accuracy', kind 'first', kind 'later'. Differences"
    )
    assert said.index("largest differences") < said.index("report:") and "numbers are equal" not in said
    assert "with 95% intervals over the same prompts" in said, "though A has another metric too"
    again: Any = Table.load(tmp_path / "both").frame.sort_values(["layer", "head"])
    pd.testing.assert_frame_equal(again, made)
    of_one_token = kinds[kinds["kind"] != "later"]  # whose first token is all
    run(np.concatenate([values[0], values[0]]), tmp_path / "a", verb="patch", heads=of_one_token)
    assert "alone" not in ran(command)
    run(values[0], tmp_path / "a", verb="patch", heads=kinds.iloc[:3].assign(positions=["all", "END", "S"]))
    assert "has rows by positions, the other has not" in declined(command)
    run(values[0], tmp_path / "a", verb="attribute", heads=HEADS.assign(metric="kl"))
    assert "these differ in metric (kl, lookup)" in declined(command)


def test_effects_with_opposite_signs_are_ranked_from_the_end_that_matters(values, tmp_path, ran):
    run(values[0], tmp_path / "a", verb="patch", settings={"sites": ["z"], "heads": None})
    run(-values[0][:2], tmp_path / "b", verb="ablate", heads=HEADS[:2], settings={"site": "z", "how": "mean"})
    command = beside(tmp_path)
    said = ran(command)
    assert "effects 1.00 (Spearman, over 2 heads, the highest effects of A beside the lowest of B)" in said
    assert "Rows of A alone: other heads (1)." in said and "of B alone" not in said
    assert "counts as a loss the other counts as a gain" in said and "B minus A" not in said
    in_all, *rows = said.split("largest of A:\n")[1].split("\n\n")[0].splitlines()
    assert in_all.startswith("In all rows: level head, ") and "metric lookup" in in_all
    listed = [line.split() for line in rows]
    assert listed[0][-2:] == ["A", "B"] and abs(float(listed[1][-2])) >= abs(float(listed[2][-2]))
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    shown = page[page.index("Numbers of both runs") : page.index("Settings that differ")]
    assert re.findall("<th>(.*?)</th>", shown) == ["head", "A", "B"], "what is the same stands once, above"
    assert f"<p>The largest of A first. {in_all}</p>" in shown
    assert all(len(cell.strip("-0.")) <= 3 for cell in re.findall(r"<td>(-?\d\.\d*)</td>", shown))
    assert "A point for each head; dashed: A = -B." in page
    settings = said.split("settings that differ:\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split() for line in settings] == [["settings", "how", "–", "mean"]], "sites ['z'] is site z"
    run(np.ones((3, 9)), tmp_path / "b", verb="ablate")
    assert "lookup: no rank correlation, since all effects of a run are equal." in ran(command)


def test_kinds_of_targets_that_are_not_compared_are_no_other_heads(values, tmp_path, ran):
    """Both runs have them, but by other keys the two verbs are compared over all targets."""
    kinds: Any = pd.concat([HEADS.assign(kind=kind) for kind in ("all", "first")])
    both = np.concatenate([values[0], values[1]])
    run(both, tmp_path / "a", verb="patch", heads=kinds.assign(site="z"))
    run(both, tmp_path / "b", verb="ablate", heads=kinds)
    said = ran(beside(tmp_path))
    assert "over 3 heads" in said and "alone" not in said


def test_kinds_of_an_experiment_are_compared_each(values, tmp_path, ran):
    """Answers of one token have the first token and all of them in equal rows; an experiment's kinds differ."""
    kinds: Any = pd.concat([HEADS.assign(kind=kind) for kind in ("all", "first")])
    for verb, rows in (("benchmark", 6), ("patch", 3)):
        for name, part in (("a", values[0]), ("b", values[1])):
            run(np.concatenate([part, part]), tmp_path / name, verb=verb, heads=kinds)
        assert f"0 of {rows} numbers are equal" in ran(beside(tmp_path))


def test_of_two_benchmarks_costs_come_last(values, tmp_path, ran):
    """A clock measures them, so they differ most and say least."""
    metrics: Any = pd.DataFrame({"method": ["a", "a", "b"], "metric": ["cost", "auroc", "auroc"]})
    for name, scale in (("a", 1.0), ("b", 2.0)):
        run(values[0] * scale * np.array([[100.0], [1.0], [1.0]]), tmp_path / name, verb="benchmark", heads=metrics)
    listed = ran(beside(tmp_path)).split("largest differences:\n")[1].split("\n\n")[0].splitlines()[1:]
    assert ["cost" in line for line in listed] == [False, False, True]
    assert Table.load(tmp_path / "both").frame["metric"].tolist() == ["auroc", "auroc", "cost"]
    columns = re.findall("<th>(.*?)</th>", (tmp_path / "both" / "report.html").read_text(encoding="utf-8"))
    assert columns[:4] == ["method", "metric", "A", "B"]
    for name in "ab":
        many = metrics.assign(**{key: [1, 2, 3] for key in ("trait", "at", "role")})
        run(values[1] * (name == "a"), tmp_path / name, verb="benchmark", heads=many)
    ran(beside(tmp_path))
    columns = re.findall("<th>(.*?)</th>", (tmp_path / "both" / "report.html").read_text(encoding="utf-8"))
    assert columns[:4] == ["A", "B", "method", "metric"], "in sight on a phone too"


def test_of_a_screened_run_what_was_measured_is_compared(values, tmp_path, ran):
    run(values[0], tmp_path / "a", verb="ablate", heads=HEADS.assign(estimated=[False, True, False]))
    run(values[0], tmp_path / "b", verb="ablate")
    printed = ran(beside(tmp_path))
    assert "2 of 2 numbers are equal in A and B. In B alone: 1 more." in printed
    assert "1 of 3 numbers of A are estimates of a screen, and left out" in printed


def test_the_command_has_only_what_was_set():
    from align_circuits.cli.score_command import Score
    from align_circuits.tasks.seq2seq import Seq2SeqTask

    verb = Score(model="a b", n=8, task=Seq2SeqTask(x_len=3, edge_range=(1, 2), bos=False))
    assert command_line("score", verb, Score()) == (
        "align-circuits score --model 'a b' --x-len 3 --no-bos --edge-range 1 2 --n 8"
    )
