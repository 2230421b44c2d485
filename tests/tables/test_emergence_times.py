"""When something emerged, beside a slow search."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from align_circuits.tables.emergence_times import (
    ROUNDING,
    SUSTAINED,
    crossing_step,
    emergence_step,
    middle_of_rise,
    steepest_share,
    sustained_step,
)
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

COURSES = st.lists(st.integers(0, 8).map(lambda n: math.nan if n == 8 else n / 7), min_size=5, max_size=12)
"""Values of a metric, some of them missing."""


def looped(steps, values, min_rise, sustained):
    """Tries every probe."""
    best = -math.inf
    for at in range(len(values) - sustained + 1):
        window = values[at : at + sustained]
        if not any(math.isnan(value) for value in window):
            best = max(best, min(window))
    if best - values[0] < min_rise - ROUNDING:
        return math.nan
    for at in range(len(values) - sustained + 1):
        if all(value >= values[0] + (best - values[0]) / 2 - ROUNDING for value in values[at : at + sustained]):
            return steps[at]
    raise AssertionError("a level that is reached is half reached")


@settings(deadline=None)
@given(values=COURSES, sustained=st.integers(1, 4), min_rise=st.sampled_from([0.1, 0.3, 0.6]))
def test_it_equals_a_slow_search(values, sustained, min_rise):
    values[0] = 0.0 if math.isnan(values[0]) else values[0]
    steps = [10.0 * at for at in range(len(values))]
    found = sustained_step(np.array(steps), np.array(values), min_rise=min_rise, sustained=sustained)
    np.testing.assert_equal(found, looped(steps, values, min_rise, sustained))


@settings(deadline=None)
@given(values=COURSES, within=st.sampled_from([10.0, 25.0, 40.0]))
def test_the_steepest_share_equals_a_slow_search(values, within):
    sustained = SUSTAINED
    values[0] = 0.0 if math.isnan(values[0]) else values[0]
    steps = [10.0 * at for at in range(len(values))]
    levels = []
    for at in range(len(values) - sustained + 1):
        window = values[at : at + sustained]
        levels.append(values[0] if any(math.isnan(value) for value in window) else max(values[0], min(window)))
    rise = max(levels) - values[0]
    pairs = [(i, j) for i in range(len(levels)) for j in range(i, len(levels)) if steps[j] - steps[i] <= within]
    expected = max(levels[j] - levels[i] for i, j in pairs) / rise if rise >= 0.3 - ROUNDING else math.nan
    found = steepest_share(np.array(steps), np.array(values), within)
    np.testing.assert_allclose(found, expected)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=12), st.integers(1, 3), st.floats(0, 1))
def test_the_crossing_of_a_level_equals_a_slow_search(values, sustained, level):
    steps = [3.0 * at for at in range(len(values))]
    windows = range(len(values) - sustained + 1)
    slow = [steps[at] for at in windows if all(value >= level - ROUNDING for value in values[at : at + sustained])]
    found = crossing_step(np.array(steps), np.array(values), level, sustained=sustained)
    assert found == slow[0] if slow else math.isnan(found)
    middle = middle_of_rise(np.array(steps), np.array(values), sustained=sustained)
    highest = max(min(values[at : at + sustained]) for at in windows)
    if highest - values[0] >= 0.3 - ROUNDING:
        assert middle == pytest.approx((values[0] + highest) / 2)
    else:
        assert math.isnan(middle)


def test_an_even_pace_and_a_jump_are_told_apart():
    steps = np.arange(0.0, 201, 5)
    assert steepest_share(steps, steps / 200, 20.0) == pytest.approx(0.1, abs=0.01)
    assert steepest_share(steps, (steps > 90).astype(float), 20.0) == 1.0


@pytest.mark.parametrize("tenths", [[0, 4, 4, 4, 8, 8, 8], [1, 3, 3, 3, 5, 5, 5], [2, 6, 6, 6, 10, 10, 10]])
def test_a_plateau_in_the_middle_counts_whatever_its_rounding(tenths):
    steps = 10.0 * np.arange(len(tenths))
    assert sustained_step(steps, np.array(tenths) / 10) == 10
    assert sustained_step(steps[:4], np.array([4, 7, 7, 7]) / 10) == 10  # .7 - .4 is less than .3 by rounding
    assert steepest_share(steps[:4], np.array([4, 7, 7, 7]) / 10, 10.0) == 1


def test_a_lucky_probe_and_a_small_rise_are_no_emergence():
    steps = np.arange(0.0, 60, 10)
    assert math.isnan(sustained_step(steps, np.array([0.2, 0.2, 1.0, 0.2, 0.2, 0.2])))
    assert math.isnan(sustained_step(steps, np.array([0.2, 0.3, 0.45, 0.45, 0.45, 0.45])))
    assert sustained_step(steps, np.array([0.2, 0.3, 0.5, 0.5, 0.5, 0.5])) == 20
    assert math.isnan(sustained_step(steps, np.array([0.9, 0.5, 0.1, 0.1, 0.1, 0.1]))), "a fall is no rise"


def table(courses: dict[tuple[int | None, int | None], list[float]], metric="align_query") -> Table:
    rows = [
        (10 * at, "model" if layer is None else "layer" if head is None else "head", layer, head, *[value] * 3)
        for (layer, head), values in courses.items()
        for at, value in enumerate(values)
    ]
    frame = pd.DataFrame(rows, columns=["step", "level", "layer", "head", "value", "low", "high"])
    return Table(frame.assign(ood=False, metric=metric, kind="all", offset=None, n=9), Provenance("tune"))


EARLY, LATE, NEVER = [0.0, 0.8, 0.8, 0.8, 0.8, 0.8], [0.0, 0.0, 0.0, 0.9, 0.9, 0.9], [0.1] * 6


def test_the_best_head_of_each_run_is_followed():
    courses = {(0, 0): EARLY, (0, 1): [*NEVER[:4], math.nan, 1.0], (1, 1): LATE, (1, None): EARLY}
    one, other = table(courses), table({(0, 0): NEVER, (1, 1): NEVER})
    found = emergence_step(one, "align_query").frame.set_index("measure")
    assert found.loc["step", "value"] == 30 and found.loc["emerged", "value"] == 1
    assert bool(found[["low", "high"]].isna().to_numpy().all()), "one run has no interval"
    assert emergence_step(one, "align_query", layer=0).where(measure="step").frame["value"].item() == 10
    both = emergence_step([one, other, replace(one)], "align_query", ood=False).frame.set_index("measure")
    assert both.loc["step", "value"] == 30 and both.loc["step", "n"] == 2
    assert both.loc["emerged", "value"] == pytest.approx(2 / 3) and both.loc["emerged", "n"] == 3
    assert both.loc["emerged", "low"] < 2 / 3 < both.loc["emerged", "high"]
    never = emergence_step(other, "align_query").frame.set_index("measure")
    assert math.isnan(never.loc["step", "value"]) and never.loc["step", "n"] == never.loc["emerged", "value"] == 0


def test_every_head_apart():
    runs = [table({(0, 0): EARLY, (1, 1): LATE}), table({(0, 0): LATE, (1, 1): NEVER})]
    steps = emergence_step(runs, "align_query", best=False).where(measure="step").frame.set_index(["layer", "head"])
    assert steps.loc[(0, 0), "value"] == 20 and steps.loc[(0, 0), "n"] == 2
    assert steps.loc[(0, 0), "high"] == pytest.approx(20 + 12.7062 * 10, rel=1e-5)  # Student's t of two runs
    assert steps.loc[(1, 1), "value"] == 30 and steps.loc[(1, 1), "n"] == 1
    found = emergence_step(table({(0, 0): NEVER, (0, None): EARLY}), "align_query", best=False)
    mean = found.where(head=None, measure="step")
    assert mean.frame[["level", "layer", "value"]].to_numpy().tolist() == [["layer", 0, 10.0]]


def test_metrics_of_the_whole_model():
    found = emergence_step(table({(None, None): LATE}, "accuracy"), "accuracy", kind="all")
    assert found.where(measure="step").frame["value"].item() == 30


def test_a_rise_to_chance_is_none():
    run = table({(None, None): [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.9, 0.9, 0.9]}, "choice_accuracy")
    steps = emergence_step(run, "choice_accuracy").where(measure="step").frame["value"].tolist()
    assert steps == [10], "half of the rise from 0 is half-way up to chance"
    found = emergence_step(run, "choice_accuracy", floor=0.5)
    assert found.where(measure="step").frame["value"].tolist() == [70]
    assert found.provenance.settings["floor"] == 0.5
    never = emergence_step(
        table({(None, None): [0.0, 0.5, 0.5, 0.5, 0.5]}, "choice_accuracy"), "choice_accuracy", floor=0.5
    )
    assert never.where(measure="emerged").frame["value"].tolist() == [0]


def test_what_makes_no_sense_is_refused():
    refused("ascending", sustained_step, np.array([0.0, 0.0]), np.array([0.1, 0.2]))
    refused("ascending", sustained_step, np.array([0.0]), np.array([math.nan]))
    refused("3 probes show no rise", sustained_step, np.arange(3.0), np.array([0.0, 1.0, 1.0]))
    refused("sustained=0: give how many probes", sustained_step, np.arange(3.0), np.array([0.0, 1.0, 1.0]), sustained=0)
    refused("sustained=-1", emergence_step, table({(0, 0): EARLY}), "align_query", sustained=-1)
    refused("no runs", emergence_step, [], "accuracy")
    with pytest.raises(KeyError, match="no metric 'accuracy'"):
        emergence_step(table({(0, 0): EARLY}), "accuracy")
    refused("same rows", emergence_step, [table({(0, 0): EARLY}), table({(0, 1): EARLY})], "align_query", best=False)


def test_one_run_does_not_count_as_several():
    seeds = [Provenance("made", {"seed": seed}) for seed in (0, 0, 1)]
    first, again, other = (replace(table({(0, 0): [0, 0, 1, 1, 1]}), provenance=made) for made in seeds)
    for runs in ([first, first], [first, other, again]):
        refused("a run is given twice", emergence_step, runs, "align_query")
    assert emergence_step([first, other], "align_query").frame["n"].tolist() == [2, 2]


def test_groups_of_rows_may_end_at_different_steps():
    made = table({(0, 0): EARLY, (0, 1): LATE})
    frame = made.frame
    short = frame[frame["step"] < frame["step"].max()].assign(ood=True)
    both = Table(pd.concat([frame.assign(ood=False), short], ignore_index=True), made.provenance)
    whole, cut = (emergence_step(both, "align_query", ood=ood).frame for ood in (False, True))
    expected = emergence_step(Table(short, made.provenance), "align_query").frame
    assert cut["value"].tolist() == expected["value"].tolist() and len(whole) == len(cut)
    assert len(emergence_step(both, "align_query").frame) == 2 * len(cut)


def test_a_metric_that_is_nowhere_defined_emerges_nowhere():
    rows = [
        {"step": step, "level": "head", "layer": 0, "head": head, "metric": "m", "value": math.nan}
        for step in (0, 10, 20)
        for head in (0, 1)
    ]
    table = Table(pd.DataFrame(rows).assign(low=math.nan, high=math.nan, n=1), Provenance("test"))
    frame = emergence_step([table, replace(table)], "m", best=True).frame
    assert frame.set_index("measure")["value"].tolist()[1] == 0 and math.isnan(float(frame["value"].iloc[0]))
