"""Seeds that join a kept table (`benchmarks/more_seeds.py`)."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from align_circuits.papers.lab import Inputs, Measurement, Study
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table


@pytest.fixture
def more_seeds(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    return importlib.import_module("more_seeds")


STUDY = Study(
    "test", {}, jobs=lambda seeds, _: [Measurement(max, {}, seed, {"arm": arm}) for arm in "ab" for seed in seeds]
)
NONE = Inputs({}, "")


def table(rows: list[tuple[str, int | None, float]], **model: str) -> Table:
    frame = pd.DataFrame(rows, columns=["arm", "seed", "value"]).astype({"seed": "Int64"})
    return Table(frame.assign(low=np.nan, high=np.nan, n=1), Provenance("measure", {"config": rows}, model))


KEPT = table([("a", 0, 0.1), ("a", 1, 0.2), ("b", 0, 0.3), ("b", None, 0.3)])


def jobs(more_seeds, seeds) -> set[Any]:
    return {more_seeds.keys_of(each) for each in STUDY.jobs(seeds, NONE)}


def test_only_what_is_lacking_is_measured(more_seeds):
    def wanted(seeds, *anew):
        found = more_seeds.lacking(jobs(more_seeds, seeds), KEPT.frame, anew)
        only = more_seeds.only(STUDY.jobs, found)
        return [(each.keys["arm"], each.seed) for each in only(seeds, NONE)]

    assert wanted((0,)) == []
    assert wanted((0, 1, 2)) == [("a", 2), ("b", 0), ("b", 1), ("b", 2)], "b has a row over its seeds"
    assert wanted((0,), "arm=a") == [("a", 0)]
    assert wanted((0, 1), "arm=a") == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_rows_of_jobs_that_are_no_longer_in_the_config_are_left_out(more_seeds):
    gone = table([("was renamed", 0, 0.1), ("was renamed", None, 0.1)])
    both = Table(pd.concat([KEPT.frame, gone.frame]), KEPT.provenance)
    left = more_seeds.without_others(both, jobs(more_seeds, (0,)))
    pd.testing.assert_frame_equal(left.frame, KEPT.frame)


def test_a_table_of_one_seed_has_no_rows_over_seeds(more_seeds):
    frame = KEPT.frame.drop(columns="seed")
    assert not more_seeds.are_over_seeds(frame, more_seeds.keys_of(STUDY.jobs((0,), NONE)[0])).any()


def test_seeds_are_named_as_they_are_printed(more_seeds):
    keys = (("arm", "larger steps"), ("seed", 12))
    assert more_seeds.has_one(keys, ["seed=12"]) and more_seeds.has_one(keys, ["seed=1", "arm=larger steps"])
    assert not more_seeds.has_one(keys, ["seed=1", "arm=larger"]) and not more_seeds.has_one(keys, [])
    assert more_seeds.has_one(keys, ["seed=12&arm=larger steps"])
    assert not more_seeds.has_one(keys, ["seed=1&arm=larger steps"])


def test_kept_rows_stay_and_what_was_measured_anew_takes_their_place(more_seeds):
    measured = {(("arm", "a"), ("seed", 1)), (("arm", "a"), ("seed", 2))}
    joined = more_seeds.joined(KEPT, table([("a", 1, 0.7), ("a", 2, 0.8)]), measured)
    rows = joined.frame[["arm", "seed", "value"]].astype(object).where(lambda cells: cells.notna(), None)
    expected = [("a", 0, 0.1), ("b", 0, 0.3), ("b", None, 0.3), ("a", 1, 0.7), ("a", 2, 0.8)]
    assert [*rows.itertuples(index=False, name=None)] == expected
    assert joined.provenance.data["joined to"]["settings"] == KEPT.provenance.settings


def test_rows_over_seeds_are_measured_anew_with_all_their_seeds_or_not_at_all(more_seeds):
    new = table([("b", 1, 0.7), ("b", None, 0.7)])
    refused("there are rows over its seed and others", more_seeds.joined, KEPT, new, {(("arm", "b"), ("seed", 1))})
    both = table([("b", 0, 0.3), ("b", 1, 0.7), ("b", None, 0.5)])
    joined = more_seeds.joined(KEPT, both, {(("arm", "b"), ("seed", seed)) for seed in (0, 1)})
    assert joined.where(arm="b").frame["value"].tolist() == [0.3, 0.7, 0.5]


def test_results_of_other_models_are_not_joined(more_seeds):
    new = table([("a", 2, 0.7)], name="another")
    refused("other models", more_seeds.joined, KEPT, new, {(("arm", "a"), ("seed", 2))})


def test_what_is_measured_after_a_training_is_measured_again_where_the_training_is(more_seeds):
    course, after = (("arm", "b"), ("seed", 0)), (("arm", "b"), ("part", "after"), ("seed", 0))
    kept = table([("b", 0, 0.3), ("b", None, 0.3), ("b", 0, 0.4)]).frame.assign(part=["course", "course", "after"])
    assert more_seeds.lacking({course, after}, kept) == set()
    assert more_seeds.lacking({course, after, (("arm", "b"), ("seed", 1))}, kept) >= {course, after}
