"""Statistics as expressions on a table, claims that name levels, and figures as data."""

from dataclasses import dataclass
from itertools import count, product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import refused

import align_circuits as ac
from align_circuits.models.parameters import model_provenance
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import (
    Measurement,
    Study,
    courses,
    drawn_by,
    grids,
    lines,
    rows_along,
    seed_courses,
    seed_dots,
)
from align_circuits.papers.statistics import (
    MIDDLE,
    at_end,
    at_start,
    best,
    crossing,
    half_rise,
    last_crossing,
    late_mean,
    levels,
    measured,
    over_seeds,
    per_seed,
    reached,
    rows,
    the_row,
)
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table


def value(measure: str, noise: float, seed: int, step: int) -> float:
    """A course that rises to 1 - noise over ten steps, `b` half as high; no two seeds the same."""
    return (1 - noise) * step / 10 * (1.0 if measure == "a" else 0.5) + seed / 100


@pytest.fixture
def table() -> Table:
    """Two measures over eleven steps, at three levels of noise and on four seeds, in no order."""
    keys = pd.DataFrame(
        product("ab", (0.5, 0.1, 0.3), range(4), range(11)), columns=["measure", "noise", "seed", "step"]
    )
    values = [value(*row) for row in keys.itertuples(index=False)]
    frame = keys.assign(value=values, low=np.nan, high=np.nan, n=1).sample(frac=1, random_state=0)
    return Table(frame, Provenance("test"))


SEEDS = np.arange(4) / 100


def test_each_statistic_is_that_of_its_rows_seed_by_seed(table):
    keys = {"noise": 0.3}
    np.testing.assert_allclose(at_start("a", **keys)(table), SEEDS)
    np.testing.assert_allclose(at_end("a", **keys)(table), 0.7 + SEEDS)
    np.testing.assert_allclose(late_mean("a", **keys)(table), 0.7 * 0.95 + SEEDS)
    np.testing.assert_allclose(best("b", **keys)(table), 0.35 + SEEDS)
    np.testing.assert_allclose(per_seed("b", step=4, **keys)(table), 0.14 + SEEDS)
    np.testing.assert_allclose(reached(0.35, measure="a", **keys)(table), [5, 5, 5, 5])
    assert np.isinf(reached(2.0, measure="a", **keys)(table)).all()


def test_crossings_lie_between_probes_and_are_for_good(table):
    np.testing.assert_allclose(crossing("a", 0.35, noise=0.3)(table), [5, 4 + 6 / 7, 4 + 5 / 7, 4 + 4 / 7])
    np.testing.assert_allclose(half_rise("a", noise=0.1)(table), np.full(4, 10 * 0.95 / 2))
    assert np.isnan(crossing("a", 2.0, noise=0.1)(table)).all()
    steps = np.array([0.0, 10, 20])
    assert last_crossing(steps, np.array([0.0, 0.25, 0.75])) == 15
    assert np.isnan([last_crossing(steps, np.array(values)) for values in ([0.0, 0.75, 0.25], [0.6, 0.75, 0.8])]).all()
    refused("give one value for each of ascending steps", last_crossing, steps[::-1].copy(), np.array([0.0, 0.5, 1.0]))


def test_keys_given_later_stand_in_for_earlier_ones_in_all_terms(table):
    difference = at_end("a", noise=0.1) - at_end("b", noise=0.5)
    np.testing.assert_allclose(difference(table), 0.9 - 0.25)
    np.testing.assert_allclose(difference.at(noise=0.3)(table), 0.35, atol=1e-12)


def test_levels_are_those_of_the_table(table):
    assert levels(table, "noise") == [0.1, 0.3, 0.5]
    np.testing.assert_allclose(at_end("a").fall("noise")(table), 0.4)
    np.testing.assert_allclose(at_end("a").rise("noise", last=MIDDLE)(table), -0.2)
    claim = Claim("from {noise.low:g} to {noise.high:g}").at_least(
        0.3, at_end("a").fall("noise"), at_start("a", noise=0.1), "b"
    )
    assert claim.check(table).claim == "from 0.1 to 0.5"


def test_arithmetic_and_comparisons_go_seed_by_seed(table):
    a, b = at_end("a", noise=0.1), at_end("b", noise=0.1)
    np.testing.assert_allclose((a / b * 2 + 1)(table), (0.9 + SEEDS) / (0.45 + SEEDS) * 2 + 1)
    assert ((a > b) & (b < 1) & (a >= 0.9))(table).all()
    assert measured((a > b)(table)).value == 1 and measured((a > b)(table)).low == pytest.approx(0.398, abs=1e-3)
    assert measured(a(table)) == over_seeds(0.9 + SEEDS)


def test_rows_are_compared_by_their_own_intervals():
    frame = pd.DataFrame({"style": ["x", "y"], "value": [0.9, 0.4], "low": [0.8, 0.3], "high": [1.0, 0.5], "n": 9})
    table = Table(frame, Provenance("test"))
    difference = measured((rows(style="x") - rows(style="y"))(table))
    assert difference.value == pytest.approx(0.5) and difference.low == pytest.approx(0.5 - 0.1 * 2**0.5)
    assert measured(rows(style="y")(table)).row == pytest.approx({"value": 0.4, "low": 0.3, "high": 0.5})


def test_a_claim_without_a_threshold_is_refused(table):
    refused("has no threshold: give one by at_least or at_most", Claim("nothing").check, table)


def test_figures_draw_what_the_statistics_say(table):
    figure: Any = lines({"a": at_end("a"), "b": at_end("b")}, "noise", label="noise")(table)
    drawn = {line.name: line for line in figure.data}
    np.testing.assert_allclose(drawn["a"].x, [0.1, 0.3, 0.5])
    np.testing.assert_allclose(drawn["b"].y, [0.45 + 0.015, 0.35 + 0.015, 0.25 + 0.015])
    over_steps: Any = courses({"": {"a": {"measure": "a", "noise": 0.1}}}, label="step", value="a")(table)
    np.testing.assert_allclose(over_steps.data[0].y, 0.09 * np.arange(11) + 0.015)
    of_seeds: Any = seed_courses({"": {"measure": "a", "noise": MIDDLE}}, value="a")(table)
    np.testing.assert_allclose(of_seeds.data[3].y, 0.07 * np.arange(11) + 0.03)


@dataclass(frozen=True)
class Size:
    n: int = 1


def measure(*, model: str, weights: str, n: int, seed: int) -> list[dict[str, Any]]:
    return [{"value": n, "low": 0, "high": 9, "n": 1, "model": model, "weights": weights, "seed": seed}]


def another(**given: Any) -> list[dict[str, Any]]:
    return measure(**given)


@pytest.mark.slow
def test_what_a_study_keeps_is_named_by_all_that_it_rests_on(random_hf_model, char_tokenizer, tmp_path):
    """Of a model also its settings and single weights, which its name and its provenance do not tell."""

    def changed(change: Any = None) -> Any:
        def load(_: str) -> Any:
            model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
            if change is not None:
                change(model.original_model.model)
            return model

        return load

    def turn(model: Any) -> None:
        model.rotary_emb.inv_freq.mul_(3.0)

    def swap(model: Any) -> None:
        weight = model.embed_tokens.weight.data.view(-1)
        weight[[101, 103]] = weight[[103, 101]]

    def kept(config: Any = Size(), load: Any = None, function: Any = measure, seed: int = 0) -> str:
        def jobs(config: Any, inputs: Any) -> list[Measurement]:
            return [Measurement(function, {**inputs.model, "n": config.n}, seed)]

        folder = tmp_path / str(next(number))
        table = Study("own", {}, jobs, models="one", load=load or changed()).run(config, models=["own"], folder=folder)
        assert table.provenance.model["weights"] == weights
        (path,) = (folder / "jobs").glob("[!.]*.json")
        return path.name

    number, weights = count(), model_provenance(changed()(""))["weights"]
    names = [kept(), kept(Size(2)), kept(load=changed(turn)), kept(load=changed(swap)), kept(function=another)]
    assert len({*names, kept(seed=1)}) == 6
    assert kept() == names[0]


def test_figures_are_drawn_by_panel_or_by_one_function(table):
    draw = courses({"": {"a": {"measure": "a", "noise": 0.1}}}, label="step", value="a")
    assert drawn_by({"left": draw}, table) == drawn_by(lambda found: {"left": draw(found)}, table)


def test_the_ends_and_a_row_keep_their_own_intervals_and_a_control_is_taken_beside():
    frame = pd.DataFrame(
        {"style": ["x", "y", "z"], "value": [0.9, 0.4, 0.6], "low": 0.3, "high": [0.95, 0.5, 0.7], "n": 9}
    )
    table = Table(frame, Provenance("test"))
    found = [each(table) for each in (rows().highest(), rows().lowest(), *the_row().beside("style", "z", "x"))]
    assert [(one.value, one.high) for one in found] == [(0.9, 0.95), (0.4, 0.5), (0.6, 0.7), (0.9, 0.95)]


def test_rows_are_drawn_along_a_column_as_grids_and_by_seed(table):
    ends = Table(table.where(step=10).frame, table.provenance)
    along: Any = rows_along("noise", "measure", {"seed 0": {"seed": 0}, "seed 1": {"seed": 1}}, label="noise")(ends)
    for line in along.data:
        for noise, drawn in zip(line.x, line.y, strict=True):
            assert drawn == value(line.name, noise, 0 if line.xaxis == "x" else 1, 10)
    heat: Any = grids("noise", "seed", {"": {"measure": "a"}})(ends).data[0]
    np.testing.assert_allclose(
        heat.z, [[value("a", noise, seed, 10) for noise in (0.1, 0.3, 0.5)] for seed in range(4)]
    )
    dots: Any = seed_dots(ends.where(measure="a", noise=0.1).frame, "measure", "a")
    assert {line.name: line.x[0] for line in dots.data} == {
        f"seed {seed}": value("a", 0.1, seed, 10) for seed in range(4)
    }
