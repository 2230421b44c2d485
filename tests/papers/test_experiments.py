"""Experiments run at their smallest scale, and their checks can fail."""

import json
import math
from collections import UserList
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint
from threading import Lock
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from legs import slow_but
from measured import table_of
from refusals import refused
from scipy.stats import binomtest

from align_circuits.cli import main
from align_circuits.cli.experiments_list import VALIDATION, durations, listing, part_of
from align_circuits.papers import lab
from align_circuits.papers.claims import Check, Claim, fewest_seeds, most_seeds, verdicts
from align_circuits.papers.experiments import EXPERIMENTS, GROUP, of_other_packages, of_the_checkout
from align_circuits.papers.icatune.figs_3_9_accuracy import _seed_of, accuracy, on_tasks
from align_circuits.papers.lab import SCALES, Experiment, Inputs, Measurement, Scale, Study, training_folder
from align_circuits.papers.statistics import (
    NOT_MEASURED,
    Measured,
    Statistic,
    difference_of,
    exact,
    extreme_of,
    mean_of,
    measured,
    of_each,
    over_seeds,
    rows,
    seed_rows,
    share_of,
    statistic,
    value_of,
)
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where jobs and trainings are kept, so that experiments share them."""
    return tmp_path_factory.mktemp("runs")


def ground_truth_holds(table: Table, checks: list[Check]) -> None:
    recall: Any = table.where(models="planted", metric="recall").frame
    assert set(recall["value"][recall["at"] == 1]) == {1}
    assert set(recall["value"][recall["at"] == 0]) == {0}
    assert all(check.control_fails for check in checks)
    assert {check.verdict for check in checks if check.claim.startswith("random")} == {"undecided"}, "of one model"


def power_holds(table: Table, checks: list[Check]) -> None:
    named = table.where(metric="named").frame.set_index("strength")["value"]
    assert named.loc[1.0] == 1 and named.loc[0.25] == 0
    assert all(check.met and check.control_fails for check in checks)


SURE = {"localize/ground-truth": ground_truth_holds, "localize/power": power_holds}
"""What is known of an experiment even at this scale."""

RISES = ("rises abruptly", "emerges before lookup", "steps before the plain run")
"""What claims on a rise say, which no test can judge where nothing rises, as in a random model."""

QUICK = ("icatune/fig7", "recall/fig14", "abrupt/depth")
"""One of each paper, of those that take least."""


@pytest.mark.parametrize("name", slow_but(QUICK, EXPERIMENTS))
def test_every_experiment_runs_at_smoke_scale(name, folder, runs, tmp_path, request):
    if name == "abrupt/onset":
        request.getfixturevalue("unchecked_shapes")
    experiment = EXPERIMENTS[name]
    assert set(SCALES) <= set(experiment.scales) <= set(get_args(Scale))
    experiment.run(experiment.scales["smoke"], models=[folder], jobs=1, folder=runs).save(tmp_path)
    table = Table.load(tmp_path)  # figures and checks need nothing but what is kept
    assert len(table)
    for figure in experiment.draw(table).values():
        assert figure.data
    checks = list(experiment.check(table))
    if name in SURE:
        SURE[name](table, checks)
    for check in checks:
        if check.verdict == "not testable":  # few models: no head has a name or a small p-value, none knows its facts
            # or two layers, of which none is in the middle or without an aligner
            known = ("icatune/unmask", "icatune/prosthesis", "icatune/stand-ins", "localize/null")
            flat = name.startswith("icatune/") and any(words in check.claim for words in RISES)
            assert name in known or name.startswith("recall/") or flat, check.claim
            continue
        assert np.isfinite(check.measured.value)
        value, low, high = check.measured.value, check.measured.low, check.measured.high
        assert low <= value <= high or np.isnan([low, high]).all(), "what rests on one seed has no interval"


def test_a_random_model_meets_no_criterion_that_needs_learning_and_an_oracle_does(folder, runs):
    """But for the gap, which the oracle's alignment breaks."""
    experiment = EXPERIMENTS["toy-llama/criteria"]
    table = experiment.run(experiment.scales["smoke"], models=[folder], jobs=1, folder=runs)
    learned = [check for check in experiment.check(table) if check.relation == ">="]
    assert len(learned) == 3
    assert not any(check.met for check in learned)
    frame = table.frame.copy()
    frame.loc[frame["predictor"] == "model", ["value", "low", "high"]] = 1.0
    frame.loc[frame["metric"] == "align_query", ["value", "low", "high"]] = 1.0
    checks = experiment.check(Table(frame, table.provenance))
    assert all(check.met for check in checks if check.relation == ">=")
    assert not any(check.met for check in checks if "no better than" in check.claim or "no head aligns" in check.claim)


def with_reach(values: list[float], reach: float = 0.1, **columns: Any) -> Table:
    rows = [{"x": x, "value": value, "low": value - reach, "high": value + reach} for x, value in enumerate(values)]
    return table_of(rows, **columns)


def test_means_and_differences_carry_intervals_of_independent_rows():
    assert str(mean_of(with_reach([0.2, 0.4]))) == "0.30 [0.23, 0.37]"  # 0.1 * sqrt(2) / 2
    assert str(difference_of(with_reach([0.9]), with_reach([0.2]))) == "0.70 [0.56, 0.84]"
    assert extreme_of(with_reach([0.5, 0.1, 0.3]), highest=False).value == 0.1
    assert str(extreme_of(with_reach([0.5, math.nan, 0.3]), highest=True)) == "0.50 [0.40, 0.60]"
    wider = Table(pd.concat([with_reach([0.5]).frame, with_reach([0.1, 0.45], 0.3).frame]), Provenance("test"))
    assert str(extreme_of(wider, highest=True)) == "0.50 [0.40, 0.75]", "another row may truly be the highest"
    assert str(extreme_of(wider, highest=False)) == "0.10 [-0.20, 0.40]"
    assert math.isnan(extreme_of(with_reach([math.nan]), highest=True).value)


def test_two_seeds_decide_nothing_beside_three():
    def verdict(one: list[float], other: list[float]) -> str:
        seeds = [("a", *seed) for seed in enumerate(one)] + [("b", *seed) for seed in enumerate(other)]
        table = table_of([dict(zip(("arm", "seed", "value"), seed, strict=True)) for seed in seeds])
        difference = rows(arm="a") - rows(arm="b")
        return Claim("a exceeds b").at_least(0.5, difference, rows(arm="b"), "b").check(table).verdict

    high, low = [0.9, 0.91, 0.92, 0.9, 0.93], [0.1, 0.11, 0.12, 0.1, 0.11, 0.12]
    assert verdict(high[:2], low[:3]) == verdict(high[:2], low[:2]) == verdict(high[:4], low) == "undecided"
    assert verdict(high, low) == verdict(high, low[:5]) == "holds"


def test_rows_of_several_seeds_have_the_interval_over_seeds():
    """Their own intervals, of prompts, do not tell how far another seed would fall; a seed may have several rows."""

    def of_seeds(values: list[float], seeds: list[int]) -> Table:
        return with_reach(values, 0.001, seed=seeds)

    high, low = of_seeds([0.9, 0.8, 1.0, 0.5], [0, 0, 1, 2]), of_seeds([0.3, 0.6, 0.2], [1, 0, 2])
    assert mean_of(high) == over_seeds(np.array([0.85, 1.0, 0.5]))
    assert difference_of(high, low) == over_seeds(np.array([0.85 - 0.6, 1.0 - 0.3, 0.5 - 0.2]))
    others = of_seeds([0.3, 0.5], [7, 8])
    means = mean_of(high), mean_of(others)
    assert difference_of(high, others).high == pytest.approx(
        means[0].value - means[1].value + np.hypot(means[0].high - means[0].value, means[1].value - means[1].low)
    )
    assert str(mean_of(of_seeds([0.5], [3]))) == "0.50 [0.50, 0.50]", "a single seed keeps its interval over prompts"
    assert str(mean_of(of_seeds([1.0, 1.0], [0, 1]))) == "1.00 [no interval]"


def test_a_number_says_where_it_has_no_interval_or_is_none():
    assert str(Measured(0.5, 0.4, 0.6)) == "0.50 [0.40, 0.60]" and f"{Measured(5.0, 4.0, 6.0):.0f}" == "5 [4, 6]"
    assert str(Measured(1.0, np.nan, np.nan)) == "1.00 [no interval]" and f"{NOT_MEASURED:.0f}" == "none"
    # Of a share of seeds the interval is exact, of a row its own.
    assert str(share_of(np.array([True, True, False, True, True]))) == "0.80 [0.28, 0.99]"
    assert share_of(np.array([], dtype=bool)) == NOT_MEASURED
    assert str(value_of(with_reach([0.9, 0.2]), x=1)) == "0.20 [0.10, 0.30]"


def test_the_interval_of_a_difference_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(500):
        left, right = rng.normal(0.6, 0.05, 1), rng.normal(0.4, 0.05, 1)
        found = difference_of(with_reach(list(left), 1.96 * 0.05), with_reach(list(right), 1.96 * 0.05))
        covered.append(found.low <= 0.2 <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize(
    ("relation", "low", "high", "control", "verdict"),
    [
        (">=", 0.5, 0.7, (0.0, 0.2), "holds"),
        (">=", 0.49, 0.7, (0.0, 0.2), "undecided"),
        (">=", 0.3, 0.49, (0.0, 0.2), "fails"),
        ("<=", 0.3, 0.5, (0.8, 1.0), "holds"),
        ("<=", 0.3, 0.51, (0.8, 1.0), "undecided"),
        ("<=", 0.51, 0.7, (0.8, 1.0), "fails"),
        (">=", np.nan, np.nan, (0.0, 0.2), "undecided"),
        (">=", 0.6, 0.6, (0.0, 0.2), "undecided"),
        (">=", 0.5, 0.7, (0.5, 0.7), "no evidence"),
        (">=", 0.5, 0.7, (0.0, 0.5), "no evidence"),
        (">=", 0.5, 0.7, (np.nan, np.nan), "no evidence"),
        ("<=", 0.3, 0.5, (0.5, 1.0), "no evidence"),
        ("<=", 0.3, 0.5, (0.0, 0.0), "no evidence"),
        (">=", 0.49, 0.7, (0.8, 1.0), "undecided"),
        (">=", 0.3, 0.49, (0.8, 1.0), "fails"),
    ],
)
def test_a_check_is_judged_by_its_interval_and_that_of_its_control(relation: Any, low, high, control, verdict):
    measured, beside = Measured(0.5, low, high), Measured(sum(control) / 2, *control)
    check = Check("c", measured, relation, 0.5, control=beside, control_is="nothing")
    assert check.verdict == verdict
    assert check.row()["verdict"] == verdict + (": no interval" if np.isnan(low) else "")
    assert check.met, "by its value alone"
    assert check.control_fails is (beside.value < 0.5 if relation == ">=" else beside.value > 0.5)
    meets = {end >= 0.5 if relation == ">=" else end <= 0.5 for end in control}
    known = len(meets) == 1 and len({*control}) == 2 and not np.isnan(control[0])
    shown = {True: "no", False: "yes, as it should"}[meets.pop()] if known else "not shown"
    assert check.row()["control misses the threshold"] == shown


def over(*values: Any) -> Measured:
    return measured(np.array(values))


NO_ROWS = Table(pd.DataFrame(columns=["value", "low", "high", "n"], dtype=float), Provenance("test"))
"""The table of claims about numbers."""


@pytest.mark.parametrize(
    ("of", "threshold", "verdict", "told"),
    [
        (over(*[1.0] * 6), 0.9, "holds", "holds"),
        (over(*[1.0] * 4, 1 - 6e-8), 0.9, "holds", "holds"),
        (over(*[1.0] * 5, 0.999), 0.9, "holds", "holds"),
        (over(*[1.0] * 4), 0.9, "undecided", "undecided: too few seeds that agree"),
        (over(0.97, 0.98, 0.99), 0.9, "undecided", "undecided"),  # its t interval is .96 to 1.00
        (over(*[0.99] * 4, 0.98, np.nan), 0.9, "undecided", "undecided"),  # one without a value of six
        (over(*[0.99] * 7, 0.98, np.nan), 0.9, "holds", "holds"),  # of nine
        (over(0.1, 0.11, 0.12), 0.9, "fails", "fails"),
        (over(*[0.1] * 5), 0.9, "fails", "fails"),
        (over(*[0.1] * 3, 0.1 + 6e-9), 0.9, "undecided", "undecided: too few seeds that agree"),
        (over(*[True] * 6), 0.5, "holds", "holds"),
        (over(*[True] * 6), 1.0, "no exception", "no exception in 6"),
        (over(True), 1.0, "undecided", "undecided"),
        (share_of((Statistic(lambda *_: np.array([0.9, np.nan])) > 0.5)(NO_ROWS)), 1.0, "undecided", "undecided"),
        (over(np.nan, np.nan), 0.5, "not testable", "not testable: nothing meets what it presupposes"),
    ],
)
def test_a_claim_over_seeds_counts_them_beside_the_interval_of_their_mean(of, threshold, verdict, told):
    check = Check("c", of, ">=", threshold, exact(0.0), "nothing")
    assert (check.verdict, check.row()["verdict"]) == (verdict, told)
    without = replace(check, control=NOT_MEASURED)
    assert without.verdict == ("no evidence" if verdict in ("holds", "no exception") else verdict)
    assert not without.control_fails and without.row()["control misses the threshold"] == "not shown"


@pytest.mark.parametrize(
    ("shares", "n", "verdict"),
    [([1.0, 1.0], [5, 7], "no exception in 5"), ([1.0, 0.9], [5, 20], "fails"), ([0.0], [60], "fails")],
)
def test_what_is_claimed_of_every_prompt_has_no_exception_in_so_many(shares, n, verdict):
    low, high = zip(
        *(binomial_interval(round(share * of), of) for share, of in zip(shares, n, strict=True)), strict=True
    )
    rows = pd.DataFrame({"measure": "right", "value": shares, "low": low, "high": high, "n": n})
    check = Claim("c").at_least(1.0, of_each("right"), exact(0.0), "nothing").check(Table(rows, Provenance("measure")))
    assert check.row()["verdict"] == verdict


def test_seeds_decide_where_half_of_all_would_seldom_agree_so_far():
    for n in range(1, 13):
        for yes in range(n + 1):
            chance = binomtest(max(yes, n - yes), n, 0.5, "greater").pvalue
            assert most_seeds(yes, n - yes) is (None if chance > 0.05 else yes > n / 2)


@pytest.mark.parametrize(("relation", "threshold", "least"), [(">=", 0.8, 17), (">=", 0.9, 36), ("<=", 0.1, 36)])
def test_a_share_that_so_few_seeds_cannot_reach_is_refused(relation: Any, threshold, least):
    def stated(seeds: int, of: Any = None) -> Claim:
        state = Claim("c").at_least if relation == ">=" else Claim("c").at_most
        return state(threshold, np.full(seeds, relation == ">=") if of is None else of, exact(0.5), "nothing")

    assert fewest_seeds(relation, threshold) == least
    assert stated(least).check(NO_ROWS).verdict == "holds"
    assert stated(4).check(NO_ROWS).verdict == "undecided", "of so few, as at scale smoke, nothing is decided"
    message = f"no share of {least - 1} seeds has an interval {relation} {threshold:g}; it takes {least} seeds"
    refused(message, stated, least - 1)
    refused(message, stated(0, statistic(lambda _: np.ones(least - 1, bool))).check, NO_ROWS)


def test_verdicts_are_counted():
    control = Measured(0.1, 0.0, 0.2)
    ends = [(0.6, 0.8), (0.4, 0.8), (0.6, 0.7), (0.1, 0.2)]
    checks = [Check("c", Measured(high, low, high), ">=", 0.5, control, "nothing") for low, high in ends]
    assert verdicts(checks) == "2 hold, 1 fail, 1 undecided of 4 claims."
    void = Check("c", Measured(0.7, 0.6, 0.8), ">=", 0.5, Measured(0.5, 0.4, 0.6), "nothing")
    every = Check("c", over(True, True), ">=", 1.0, control, "nothing")
    without = "1 without evidence (the control is not shown to miss the threshold)"
    told = f"2 hold, 1 without exception, 1 fail, 1 undecided, {without} of 6 claims."
    assert verdicts([*checks, void, every]) == told


def test_a_claim_takes_numbers_or_the_mean_over_seeds_or_their_share():
    """Two perfect accuracies are no proof; a yes of each seed is binomial."""
    claim, control = Claim("c", "about 1"), Measured(0.1, 0.0, 0.2)
    check = claim.at_least(0.5, np.array([0.4, 0.8]), control, "nothing").check(NO_ROWS)
    assert check == Check("c", over_seeds(np.array([0.4, 0.8])), ">=", 0.5, control, "nothing", "about 1")
    assert check.met and check.control_fails
    assert not claim.at_most(0.5, check.measured, control, "nothing").check(NO_ROWS).met
    agreeing, share = (
        claim.at_least(0.5, np.array(values), control, "nothing").check(NO_ROWS).measured
        for values in ([1.0, 1.0], [True, True])
    )
    assert str(agreeing) == "1.00 [no interval]" and str(share) == "1.00 [0.16, 1.00]"
    assert str(over_seeds(np.array([0.4, 0.8, np.nan]))) == "0.60 [-1.94, 3.14]"  # 12.7 * 0.4 / 2
    rows = seed_rows(pd.DataFrame({"x": [0, 1]}), np.array([[1.0, 1.0], [0.4, 0.8]]))
    assert rows["n"].tolist() == [2, 2] and rows["low"].isna().tolist() == [True, False]


OF_ANOTHER_PACKAGE = Experiment("mine/fig1", "A title", "somebody", Study("mine/fig1", {}))


@dataclass(frozen=True)
class Numbers:
    """The config of a study."""

    ns: tuple[int, ...] = (1, 2)
    power: int = 2


def power(*, n: int, to: int, seed: int) -> list[dict[str, Any]]:
    """A job that calls are counted of."""
    CALLS.append((n, seed))
    return [{"part": "number", "value": n**to / 3}, {"part": "seed", "layer": seed, "value": float("nan")}]


def learn(*, out: str) -> list[dict[str, Any]]:
    """A training: nothing is drawn."""
    CALLS.append(("learn", out))
    return [{"loss": 0.5}]


def missing(*, n: int) -> pd.DataFrame:
    """A job whose rows have a key that only some bear."""
    return pd.DataFrame({"layer": pd.array([n, None], dtype="Int64"), "value": [0.1, 0.2]})


class Calls(UserList[Any]):
    """What was called. No result rests on it: with a lock, which nothing tells, it has the identity that it says."""

    identity = "calls"

    def __init__(self, called: Iterable[Any] = ()):
        super().__init__(called)
        self.lock = Lock()


CALLS = Calls()


def powers(config: Numbers, _: Inputs) -> list[Measurement]:
    jobs = [(n, seed) for n in config.ns for seed in (0, 1)]
    return [Measurement(power, {"n": n, "to": config.power}, seed, {"n of": f"{n}"}) for n, seed in jobs]


def summary(_: Numbers, rows: Any) -> pd.DataFrame:
    assert rows["learn"].to_dict("records") == [{"loss": 0.5}], "no seed where none is drawn"
    return rows["power"].assign(low=0.0, high=1.0, n=1)


STUDY = Study(
    "test/powers",
    {"smoke": Numbers(), "cpu": Numbers(), "paper": Numbers()},
    powers,
    summary,
    lambda _, inputs: [Measurement(learn, {"out": str(training_folder(inputs.trained, "net", [1, 2]))}, None)],
)


def test_a_study_trains_first_labels_rows_and_measures_nothing_twice(tmp_path):
    CALLS.clear()
    table = STUDY.run(Numbers(), folder=tmp_path)
    (_, out), *measured = CALLS
    assert out.startswith(str(tmp_path / "trained" / "net-")) and measured == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert table.frame["n of"].tolist() == ["1"] * 4 + ["2"] * 4 and table.frame["seed"].tolist() == [0, 0, 1, 1] * 2
    assert table.frame["value"].tolist()[::2] == [1 / 3, 1 / 3, 4 / 3, 4 / 3]
    config = {"ns": [1, 2], "power": 2}
    assert table.provenance.settings == {"study": "test/powers", "config": config}
    again = STUDY.run(Numbers((2, 3)), folder=tmp_path)
    assert CALLS[5:] == [(3, 0), (3, 1)], "what another run measured is not measured again"
    pd.testing.assert_frame_equal(again.frame.iloc[:4], table.frame.iloc[4:].reset_index(drop=True))
    assert {path.name for path in tmp_path.iterdir()} == {"jobs"}


def test_missing_keys_stay_missing_and_whole(tmp_path):
    study = Study("test/missing", {}, lambda *_: [Measurement(missing, {"n": n}, None) for n in (1, 2)])
    refused("columns value, low, high, n", study.run, Numbers(), folder=tmp_path)
    one = Study("test/missing", {}, study.jobs, lambda _, rows: rows["missing"].assign(low=0.0, high=1.0, n=1))
    layers: Any = one.run(Numbers(), folder=tmp_path).frame["layer"]
    assert layers.dtype == "Int64" and layers.dropna().tolist() == [1, 2] and layers.isna().sum() == 2


def accuracy_study(*tasks: dict[str, Any], n: int) -> Study:
    return Study("test/accuracy", {}, lambda _, inputs: on_tasks(accuracy, inputs, tasks, n=n), models="several")


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match="no folder '/no/such/model'"):
        accuracy_study({"x_len": 2}, n=2).run(Numbers(), models=["/no/such/model"], folder=tmp_path)


def test_a_failing_job_is_reported_with_its_config(folder, tmp_path):
    with pytest.raises(ValueError, match=r"1 of 1 jobs failed.*'x_len': 0"):
        accuracy_study({"x_len": 0}, n=2).run(Numbers(), models=[folder], folder=tmp_path)


def test_other_weights_under_the_same_name_are_measured_again(tmp_path, char_tokenizer, random_hf_model):
    folder, study = tmp_path / "model", accuracy_study({"x_len": 2, "n_examples": 2}, n=4)
    char_tokenizer.save_pretrained(folder)
    tables = []
    for seed in (0, 1):
        random_hf_model("llama", seed=seed).save_pretrained(folder)
        lab.stored.cache_clear()
        table = study.run(Numbers(), models=[str(folder)], folder=tmp_path)
        tables.append(table.where(metric="log_prob", kind="all").frame["value"].iloc[0])
    assert tables[0] != tables[1]


def test_every_task_has_prompts_of_its_own():
    assert len({_seed_of(task) for task in [{"x_len": 2, "phrase_len": c} for c in (1, 2, 3)]}) == 3


def test_reproduce_writes_table_report_and_provenance(folder, tmp_path, capsys):
    arguments = ["reproduce", "icatune/fig3", "--scale", "smoke", "--model", folder, "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert {"table.csv", "report.html", "provenance.json", "jobs"} == {path.name for path in tmp_path.iterdir()}
    assert "Accuracy drops with input length" in capsys.readouterr().out
    config = EXPERIMENTS["icatune/fig3"].scales["smoke"]
    assert Table.load(tmp_path).provenance.settings == {
        "name": "icatune/fig3",
        "scale": "smoke",
        "models": [folder],
        "study": "icatune/fig3",
        "config": json.loads(json.dumps(asdict(config))),
    }


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_config_can_be_written_into_a_provenance(name):
    for config in EXPERIMENTS[name].scales.values():
        assert json.dumps(asdict(config), default=lambda value: pytest.fail(f"{value!r} is no JSON"))


def test_the_list_groups_by_paper_and_tells_durations_and_what_was_done(tmp_path, monkeypatch):
    taken = {("icatune/prior", "smoke"): 0.2, ("icatune/prior", "cpu"): 150.0}
    monkeypatch.setattr("align_circuits.cli.experiments_list.durations", lambda: taken)
    experiment = EXPERIMENTS["icatune/prior"]
    experiment.run(experiment.scales["smoke"], folder=tmp_path).save(tmp_path / experiment.name / "smoke")
    of_two_papers = [EXPERIMENTS["localize/power"], EXPERIMENTS["abrupt/fig7"], experiment]
    parts = listing([OF_ANOTHER_PACKAGE, *of_two_papers], tmp_path, "smoke").split("\n\n")
    assert [part.partition(":")[0] for part in parts[1:]] == [
        "The missing alignment link (Agarwal and Sarawagi, 2025)",
        "Abrupt learning (Reddy, 2024)",
        "Validation of this package",
        "Experiments of other packages",
    ]
    assert "takes: smoke 1 s, cpu 2 min" in parts[1] and "done at scale smoke: " in parts[1]
    assert all("takes: smoke not measured, cpu not measured" in part for part in parts[2:])
    assert "done at" not in parts[2] + parts[3] + parts[4]


def test_what_other_packages_register_is_found_and_what_is_broken_stops_nothing(monkeypatch):
    places = {"mine/fig1": "OF_ANOTHER_PACKAGE", "mine/fig2": "OF_ANOTHER_PACKAGE", "mine/fig3": "NOWHERE"}
    entries = [EntryPoint(name, f"{__name__}:{place}", GROUP) for name, place in places.items()]
    monkeypatch.setattr(
        "align_circuits.papers.experiments.entry_points", lambda group: entries if group == GROUP else []
    )
    with pytest.warns(UserWarning) as warned:
        assert [*of_other_packages()] == [OF_ANOTHER_PACKAGE]
    assert [str(each.message).partition(" ")[0] for each in warned] == ["'mine/fig2'", "'mine/fig3'"]
    assert "no attribute 'NOWHERE'" in str(warned[1].message)


def test_what_validates_the_package_is_run_from_a_checkout(monkeypatch, capsys):
    """An installed wheel has no such room, but the zoo on which methods of others are measured."""
    validation, beyond = of_the_checkout("validation"), of_the_checkout("beyond")
    assert {part_of(each.name) for each in validation} == {VALIDATION}
    assert [name for name in EXPERIMENTS if part_of(name) == VALIDATION] == [each.name for each in validation]
    monkeypatch.setattr("align_circuits.papers.experiments.find_spec", lambda _: None)
    assert of_the_checkout("validation") == of_the_checkout("beyond") == ()
    installed = {name: each for name, each in EXPERIMENTS.items() if each not in (*validation, *beyond)}
    monkeypatch.setattr("align_circuits.papers.experiments.EXPERIMENTS", installed)
    for name in ("localize/null", "icatune/needs"):
        assert main(["reproduce", name]) == 2
        assert f"no experiment {name!r} in this installation: what validates" in capsys.readouterr().err
    assert main(["reproduce", "icatune/fig99"]) == 2
    assert "this installation" not in capsys.readouterr().err


def test_the_list_counts_the_claims_of_kept_results_by_paper_and_scale(tmp_path, monkeypatch):
    kept = pd.DataFrame(
        {
            "experiment": ["recall/fig1", "recall/fig2", "recall/fig2", "recall/bridge"],
            "scale": ["cpu", "cpu", "paper", "cpu"],
            "holds": [1, 2, 0, 3],
            "no exception": [0, 0, 0, 1],
            "fails": [0, 1, 0, 0],
            "undecided": [0, 0, 5, 0],
            "no evidence": [0, 0, 0, 1],
            "not testable": [0, 1, 0, 0],
        }
    )
    monkeypatch.setattr("align_circuits.cli.experiments_list.kept_verdicts", lambda: kept)
    text = listing([EXPERIMENTS[name] for name in ("recall/fig1", "recall/fig2", "recall/bridge")], tmp_path, "smoke")
    assert "\n  claims of the paper, cpu: 3 hold, 1 fail, 1 not testable\n" in text
    assert "\n  claims of the paper, paper: 5 undecided\n" in text
    assert "\n  claims beyond it, cpu: 3 hold, 1 without exception, 1 without evidence\n" in text
    of_fig2 = text.partition("recall/fig2")[2].partition("recall/bridge")[0]
    assert "claims, cpu: 2 hold, 1 fail, 1 not testable\n" in of_fig2 and "claims, paper: 5 undecided" in of_fig2


def test_durations_are_those_of_studies_and_scales_that_are_there():
    studies = {each.study.name: each.study for each in EXPERIMENTS.values()}
    kept = durations()
    assert all(name in studies and scale in studies[name].scales for name, scale in kept)
    assert all(seconds > 0 for seconds in kept.values())


def test_reproduce_lists_what_there_is(capsys):
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS)
    assert main(["reproduce", "icatune/fig99"]) == 2
