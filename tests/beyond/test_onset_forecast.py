"""The theory of onset: its derivatives, known parameters recovered, forecasts where one is possible and where not."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from align_circuits.beyond.onset_forecast import MEASURES, AlignedLogits, Onset, clock, fit, forecast, tuning_curves
from align_circuits.beyond.onset_of_alignment import ONSET, as_table, errors, simulated, uninformative
from align_circuits.papers.abrupt.theory import NestedLogits
from align_circuits.tables.emergence_times import sustained_step
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig

LOSS = AlignedLogits(n_labels=26, n_pairs=5)
SCHEDULE = TrainConfig(400, schedule="linear")
STEPS = np.arange(0.0, 401, 20)


def test_without_alignment_to_learn_it_is_equation_10():
    three = np.random.default_rng(0).normal(0, 2, (7, 3))
    four = np.concatenate([three, np.full((7, 1), 60.0)], 1)
    loss = NestedLogits(26, 5)
    np.testing.assert_allclose(LOSS(four), loss(three), rtol=1e-9)
    np.testing.assert_allclose(LOSS.gradient(four)[:, :3], loss.gradient(three), rtol=1e-9)
    np.testing.assert_allclose(LOSS.gradient(four)[:, 3], 0, atol=1e-12)


def test_the_derivatives_are_those_of_the_loss():
    at = np.random.default_rng(1).normal(0, 2, (5, 4))
    for place in range(4):
        up, down = at.copy(), at.copy()
        up[:, place] += 1e-5
        down[:, place] -= 1e-5
        np.testing.assert_allclose(LOSS.gradient(at)[:, place], (LOSS(up) - LOSS(down)) / 2e-5, atol=1e-7)


def test_what_probes_see_is_chance_where_nothing_is_learned_and_one_at_the_end():
    none, all_of_it = LOSS.measures(np.zeros(4), floor=0.1), LOSS.measures(np.full(4, 30.0), floor=0.1)
    for measure, chance in (("align_query", 0.2), ("align_key", 0.2), ("lookup", 0.2), ("accuracy", 0.1)):
        assert none[measure] == pytest.approx(chance)
        assert all_of_it[measure] == pytest.approx(1, abs=1e-6)


def test_the_clock_sums_the_learning_rates():
    assert clock(np.array([0.0, 1, 2, 4]), TrainConfig(4, schedule="linear")).tolist() == [0, 1, 1.75, 2.5]


@pytest.mark.slow  # a run of the theory is fitted, and forecast, below
@pytest.mark.usefixtures("unchecked_shapes")
def test_known_parameters_are_recovered():
    known = [Onset(LOSS, 0.4, (1.0, 1.5, beta, kappa)) for beta, kappa in ((0.4, 0.8), (0.0, 0.5))]
    courses = [one.curves(STEPS, SCHEDULE) for one in known]
    generator = np.random.default_rng(0)
    noisy: list[Any] = [one + generator.normal(0, 0.01, one.shape) for one in courses]
    fitted = fit(noisy, LOSS, SCHEDULE)
    for one, other in zip(fitted, known, strict=True):
        assert one.shared == fitted[0].shared
        assert one.rate == pytest.approx(0.4, rel=0.1)
        assert one.start == pytest.approx(other.start, abs=0.3)
        assert one.error == pytest.approx(0.01, abs=0.002)
    begun = fit([noisy[1][noisy[1].index <= 60]], LOSS, SCHEDULE, known[1].shared)[0]
    assert begun.shared == known[1].shared
    predicted, true = (one.curves(STEPS, SCHEDULE)["align_query"].to_numpy() for one in (begun, known[1]))
    assert sustained_step(STEPS, predicted) == pytest.approx(sustained_step(STEPS, true), abs=20)
    assert 60 < sustained_step(STEPS, true) < 400


def error_saved(forecasts: Any) -> float:
    others, theory = ((forecasts[name] - forecasts["observed"]).abs().mean() for name in ("others", "theory"))
    return (others - theory) / forecasts["observed"].mean()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_run_of_the_theory_is_forecast_and_one_that_tells_nothing_is_not():
    possible: Any = forecast([simulated(LOSS, SCHEDULE, 20, seed) for seed in range(3)], LOSS, SCHEDULE)
    assert (possible["until"] < possible["observed"]).all()
    assert possible["emerged"].tolist() == (possible["observed"] < SCHEDULE.steps).tolist() == [True, True, False]
    assert error_saved(possible) > 0.1
    impossible = forecast([uninformative(LOSS, SCHEDULE, 20, seed) for seed in range(3)], LOSS, SCHEDULE)
    assert error_saved(impossible) < 0.1


def test_a_beginning_follows_the_head_that_is_best_there():
    curves = pd.DataFrame(
        dict.fromkeys(MEASURES, np.linspace(0.2, 0.4, 5)), index=pd.Index(range(0, 50, 10), name="step")
    )
    table = as_table(curves)
    late = table.frame[table.frame["metric"] == "align_query"].assign(head=1)
    late["value"] = np.where(late["step"] < 30, 0.1, 0.9)
    frame = pd.concat([table.frame, late], ignore_index=True)
    both = Table(frame, table.provenance)
    assert tuning_curves(both)["align_query"].iloc[-1] == pytest.approx(0.9)
    assert tuning_curves(both, until=20.0)["align_query"].iloc[-1] == pytest.approx(0.3)


def test_what_cannot_be_forecast_is_refused():
    table = simulated(LOSS, SCHEDULE, 20, 0)
    refused(r"2 runs, share=0\.5: give at least 3", forecast, [table, table], LOSS, SCHEDULE)
    refused("1 probes up to step 5: give 3 at the least", tuning_curves, table, 5.0)
    refused("first probes at", fit, [tuning_curves(table).iloc[1:]], LOSS, SCHEDULE)


def steps_table(**changes: float) -> Table:
    """Three seeds of each source, with what `forecast` said; the theory is off by 5 steps, where it can know."""
    rows = [
        {"source": source, "seed": seed, "of": of, "value": value, "metric": "align_query"}
        for source, error in (("tuned", 5.0), ("simulated", 5.0), ("uninformative", 60.0))
        for seed, observed in enumerate((100.0, 200.0, 300.0))
        for of, value in (
            {"observed": observed, "emerged": 1.0, "theory": observed + error, "others": 200.0, "until": 50.0} | changes
        ).items()
    ]
    return Table(pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1), Provenance("forecast"))


def test_the_check_tells_a_forecast_from_chance():
    table = steps_table()
    assert errors(table, "tuned", "theory").tolist() == [5.0] * 3
    assert errors(table, "tuned", "others").tolist() == [100.0, 0.0, 100.0]
    assert [check.met and check.control_fails for check in ONSET.check(table)] == [True] * 3
    assert not ONSET.check(steps_table(until=150.0))[0].met
    assert not ONSET.check(steps_table(emerged=0.0))[0].met


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.slow
def test_a_beginning_is_three_probes_long_and_a_run_may_not_emerge():
    steps = pd.Index(range(0, 60, 10), name="step")
    early, never = (
        as_table(pd.DataFrame({measure: [0.2, *[level] * 5] for measure in MEASURES}, index=steps))
        for level in (0.9, 0.2)
    )
    forecasts = forecast([early, early, never], LOSS, TrainConfig(50))
    assert forecasts["emerged"].tolist() == [True, True, False]
    assert forecasts["observed"].tolist() == [10.0, 10.0, 50.0]
    assert forecasts["until"].tolist() == [20.0] * 3
