"""The statistics and figures of abrupt learning, on tables whose answer is planted."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.beyond.interventions_while_training import CLAMPED, CONFIRMED, WITHOUT, hypotheses
from align_circuits.papers.abrupt.figs_2_a3_data_dependence import FIG2, accuracy_grid
from align_circuits.papers.abrupt.figs_3_4_5_transition import (
    CHANGED,
    FIG4,
    FIG5,
    UNCHANGED,
    alignment_claims,
    from_transition,
    trained_networks,
)
from align_circuits.papers.abrupt.figs_6_a2_a5_reduced_model import FIGA5
from align_circuits.papers.abrupt.figs_7_a4_loss_landscape import width_of_fall
from align_circuits.papers.abrupt.figures import ABRUPT
from align_circuits.papers.abrupt.grid import SMOKE, Grid, network, trained_ensemble
from align_circuits.papers.abrupt.interventions import INTERVENTIONS
from align_circuits.papers.abrupt.progress_measures import FORMED, MEASURES, TRANSITION
from align_circuits.papers.abrupt.task import ExemplarTask
from align_circuits.papers.lab import SCALES
from align_circuits.papers.statistics import courses_of, half_rise, late_mean, measured, over_seeds, rows
from align_circuits.report import plots
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

STEPS = np.arange(0.0, 401, 10)
KEPT = Path(__file__).resolve().parents[3] / "docs" / "results"


def curves(middles: dict[str, float], **condition: Any) -> pd.DataFrame:
    """Three seeds; each measure rises from 0 to 1 around its step; one that is not named stays at 0."""
    values = [
        {
            **condition,
            "seed": seed,
            "step": step,
            "measure": name,
            "value": float(np.clip(0.5 + (step - middles.get(name, 1e9) - 10 * seed) / 100, 0, 1)),
        }
        for seed in range(3)
        for name in MEASURES
        for step in STEPS
    ]
    return pd.DataFrame(values).assign(low=np.nan, high=np.nan, n=100)


def table(*frames: pd.DataFrame) -> Table:
    return Table(pd.concat(frames, ignore_index=True), Provenance("test"))


def test_transitions_and_leads_are_read_off_planted_curves():
    """Seeds that make the transition at 200, 210 and 220, and one that never does."""
    born = curves({"icl": 200.0, "ila1": 200.0, "tila2": 205.0, "cla": 120.0, "tla2": 100.0})
    never = curves({})
    planted = table(born, never[never["seed"] == 0].assign(seed=3))
    np.testing.assert_allclose(TRANSITION(planted), [200, 210, 220, np.nan])
    np.testing.assert_allclose(half_rise("tla2")(planted)[:3], [100, 110, 120])
    np.testing.assert_array_equal(late_mean("icl")(planted), [1, 1, 1, 0])
    half = 4.302653 * 10 / 3**0.5  # Student's t of three seeds
    assert measured(TRANSITION(planted)).row == pytest.approx({"value": 210, "low": 210 - half, "high": 210 + half})
    aligned = from_transition(planted)
    for name, value in (("icl", 0.5), ("tila2", 0.45), ("cla", 1.0)):
        assert rows(name, step=0)(aligned).frame["value"].to_numpy() == pytest.approx([value] * 3)
    assert rows("icl")(aligned).frame["step"].agg(["min", "max"]).tolist() == [-200, 180]


def test_at_the_size_of_the_paper_attention_to_labels_makes_a_third_of_its_rise_before_the_transition():
    """What docs/results/causes.toml tells of a claim that fails: rises made at nine tenths of the way."""
    kept = Table.load(KEPT / "abrupt-transition" / "paper")
    transition = TRANSITION(kept)

    def made(measure: str) -> str:
        courses = courses_of(rows(measure)(kept))
        steps, start, end = courses.index.to_numpy(float), courses.iloc[0], courses.iloc[-2:].mean()
        there = [np.interp(0.9 * at, steps, courses[seed]) for seed, at in zip(courses, transition, strict=True)]
        return str(over_seeds(((there - start) / (end - start)).to_numpy()))

    told = {"tla2": "0.36 [0.31, 0.41]", "cla": "0.50 [0.49, 0.51]", "ila1": "0.11 [0.11, 0.12]"}
    assert {measure: made(measure) for measure in told} == told
    assert made("tila2").startswith("0.05 ")


def test_at_the_size_of_the_paper_transitions_come_where_the_page_of_details_says():
    def thousands(study: str, **where: Any) -> list[int]:
        steps = TRANSITION.at(**where)(Table.load(KEPT / study / "paper")) / 1000
        return [round(np.nanmin(steps)), round(np.nanmax(steps))]

    assert thousands("abrupt-transition") == [29, 31]
    assert thousands("abrupt-fig6", model="two", n_labels=8) == [41, 82], "but for the one that stalls"
    assert thousands("abrupt-fig6", model="two", n_labels=32) == [20, 22]


def test_networks_of_the_transition_are_named_by_their_seeds(tmp_path, monkeypatch):
    (ensemble,) = Grid(replace(SMOKE, first_seed=7), ({},)).ensembles()
    found: Any = pd.DataFrame(trained_networks(ensemble=ensemble, trained=str(tmp_path)))
    changed = found[found["measure"] == CHANGED]
    assert changed["seed"].value_counts().to_dict() == dict.fromkeys((7, 8), 1 + 4 * 2 * 2 + 2 * 2)
    assert set(changed["how"]) == {"nothing", "patched", "ablated", "clamped"}
    assert len(FIG5.check(table(found.assign(low=np.nan, high=np.nan)))) == 7 + 3
    assert set(found.loc[found["measure"] == "attention_1", "seed"]) == {7}
    # with nothing changed a member answers as it did in training, on sequences of its own world
    net, worlds, _ = trained_ensemble(ensemble, str(tmp_path))
    unchanged = changed[changed["operation"] == UNCHANGED].set_index("seed")["value"]
    for index, seed in enumerate(net.seeds):
        batch = worlds.member(index).batch(0, SMOKE.probe, "icl")
        right = net.member(index)(batch.inputs).argmax(-1) == batch.label
        assert unchanged[seed] == pytest.approx(float(right.float().mean()))
    # smoke networks make no transition, so that their attention is kept until the last step
    of_first = found[found["measure"] == "attention_1"]
    last: Any = of_first[of_first["step"] == SMOKE.steps]
    _, cache = net.member(0).run_with_cache(worlds.member(0).batch(0, 1, "icl").inputs)
    places = last[["query", "key"]].to_numpy(int)
    expected = cache["blocks.0.attn.hook_pattern"][0, 0].numpy()[places[:, 0], places[:, 1]]
    np.testing.assert_allclose(last["value"], expected, atol=1e-4)
    monkeypatch.setattr("align_circuits.jobs.code_versions.versions", lambda: {"torch": "another"})
    trained_ensemble(ensemble, str(tmp_path))
    assert len([*tmp_path.iterdir()]) == 2, "other code trains other networks, and leaves these"


def test_the_order_of_the_measures_is_seen_and_its_absence_too():
    born = {"icl": 200.0, "ila1": 202.0, "tila2": 205.0, "cla": 120.0, "tla2": 100.0}
    checks = FIG4.check(table(curves(born)))
    assert [check.met for check in checks] == [True] * 5
    assert all(check.control_fails for check in checks)
    changed = table(curves(born | {"tla2": 210.0, "ila1": 320.0}))
    late = [claim.check(changed) for claim in alignment_claims()]
    assert [check.met for check in late] == [False, True, True, False]
    assert not any(check.met for check in FIG4.check(table(curves({"cla": 100.0}))))


def test_stalled_seeds_are_counted():
    robust, stalls = curves({"icl": 100.0}, n_labels=8, n_pairs=4), curves({}, n_labels=4, n_pairs=4)
    assert [check.met for check in FIGA5.check(table(robust, stalls))] == [True, True]
    swapped = table(robust.assign(n_labels=4), stalls.assign(n_labels=8))
    assert [check.met for check in FIGA5.check(swapped)] == [False, False]


def overridden(**at: float) -> Table:
    """All interventions; the head forms at a step, 200 unless it is given, and not without an operation."""
    names = {each: each.replace(" ", "_").replace(",", "").replace("'s", "") for each in INTERVENTIONS}
    middles = {
        each: at.get(name, 1e9 if each.startswith("no ") and "elsewhere" not in each else 200.0)
        for each, name in names.items()
    }
    return table(
        *(
            curves({"icl": middle, "ila1": middle, "tila2": middle}, intervention=each)
            for each, middle in middles.items()
        )
    )


def test_an_override_is_credited_only_if_the_transition_comes_sooner():
    sooner = CLAMPED.check(overridden(previous=100.0, previous_labels=100.0))
    assert [check.met and check.control_fails for check in sooner] == [True] * 4
    assert sooner[0].measured.value == pytest.approx(np.mean([100 / 200, 100 / 210, 100 / 220]))
    assert [check.met for check in CLAMPED.check(overridden())[:2]] == [False, False]
    assert [check.met and check.control_fails for check in WITHOUT.check(overridden())] == [True] * 4
    assert not WITHOUT.check(overridden(no_write=200.0))[1].met


def test_a_hypothesis_is_excluded_only_where_its_cause_was_fixed():
    def excluded(results: Table) -> dict[str, set[str]]:
        return {str(name)[:2]: set(rows["excluded"]) for name, rows in hypotheses(results).groupby("hypothesis")}

    assert excluded(overridden()) == {"H1": {"yes"}, "H2": {"yes"}, "H3": {"yes"}}
    assert excluded(overridden(CLA_fixed=1e9)) == {"H1": {"yes", "no"}, "H2": {"yes"}, "H3": {"no"}}
    assert excluded(overridden(TLA2_fixed=1e9)) == {"H1": {"yes", "no"}, "H2": {"no"}, "H3": {"yes"}}


def test_a_head_counts_as_formed_only_with_transition_and_attention():
    whole = {"icl": 200.0, "ila1": 200.0, "tila2": 200.0, "tla2": 100.0}
    assert FORMED(table(curves(whole))).tolist() == [True] * 3
    for lacks in ("icl", "ila1", "tila2"):
        without = {name: step for name, step in whole.items() if name != lacks}
        assert not FORMED(table(curves(without))).any()


def test_what_is_to_be_confirmed_can_fail():
    confirmed = CONFIRMED.check(overridden(CLA_fixed=1e9))
    assert [check.met and check.control_fails for check in confirmed] == [True] * 3
    assert [check.met for check in CONFIRMED.check(overridden(TLA2_fixed=1e9))] == [True, False, False]
    assert not CONFIRMED.check(overridden(CLA_fixed=1e9, no_match=200.0))[0].control_fails


def test_fresh_seeds_are_seeds_of_no_other_intervention():
    for scale in SCALES:
        sizes = (each.scales[scale].size for each in (CONFIRMED, CLAMPED))
        fresh, others = (range(size.first_seed, size.first_seed + size.seeds) for size in sizes)
        assert not {*fresh} & {*others}


@pytest.mark.parametrize("scale", SCALES)
def test_the_tasks_of_every_grid_fit_at_every_scale(scale):
    grids = [grid for experiment in ABRUPT if isinstance(grid := experiment.scales[scale], Grid)]
    assert len(grids) == len(ABRUPT) - 2  # the two of the loss landscape have none
    for grid in grids:
        members = (len(ensemble["tasks"]) * ensemble["size"]["seeds"] for ensemble in grid.ensembles())
        assert sum(members) == sum(grid.seeds or [grid.size.seeds] * len(grid.conditions))


def dependence(in_context: Any, in_weights: Any) -> Table:
    """The conditions of the smoke scale, with accuracies that are functions of the condition."""
    courses = [
        {**condition, "seed": seed, "step": step, "measure": name, "value": value}
        for condition in FIG2.scales["smoke"].conditions
        for name, value in (
            ("icl", in_context(condition)),
            *((name, in_weights(condition)) for name in ("iwl", "iwl_common")),
            ("iwl_rare", 0.1),
        )
        for seed, step in itertools.product(range(2), (0, 10, 20))
    ]
    return table(pd.DataFrame(courses).assign(low=np.nan, high=np.nan, n=40))


def test_dependences_on_the_data_are_read_from_the_right_conditions():
    def in_context(at: Any) -> float:
        bursty = min(at["burst"], 1) * (0.2 + 0.4 * (at["n_classes"] > 8))
        return (
            bursty + 0.2 * (at["burst"] > 1) + 0.3 * (at["burst"] == 1) * (at["noise"] > 0.5) - 0.4 * (at["zipf"] > 1)
        )

    def in_weights(at: Any) -> float:
        return (1.0 - 0.6 * (at["burst"] > 0) * (at["n_classes"] > 8) - 0.2 * (at["burst"] > 1)) * (
            1 if at["zipf"] or at["noise"] > 0.5 or at["n_classes"] == 8 or at["burst"] != 1 else 0.7
        ) + 0.3 * (at["zipf"] == 1)

    measured = dependence(in_context, in_weights)
    grid = accuracy_grid(measured, "icl")
    assert grid.index.tolist() == [0, 1, 2]
    assert grid.columns.tolist() == [8, 16]
    assert grid.loc[1, 16] == pytest.approx(0.6)
    checks = FIG2.check(measured)
    values = [check.measured.value for check in checks]
    assert values[0] == pytest.approx(0.4)
    assert values[2] == pytest.approx(0.2)
    assert values[4] == pytest.approx(0.3)
    assert values[7] == pytest.approx(0.4)
    assert not any(
        check.met for check in FIG2.check(dependence(lambda _: 0.1, lambda _: 0.1)) if check.relation == ">="
    )


def test_a_cliff_is_narrow_and_a_decline_is_wide():
    times = np.linspace(0, 100, 1001)
    assert width_of_fall(times, np.where(times < 90, 1.0, 0.0), 1.0) == pytest.approx(0, abs=0.01)
    assert width_of_fall(times, 1 - times / 100, 1.0) == pytest.approx(0.75, abs=0.01)
    assert width_of_fall(times, np.full(1001, 0.5), 1.0) == 1


def test_a_course_of_attention_has_a_frame_a_step():
    first: Any = pd.DataFrame(
        [{"step": step, "query": q, "key": k, "value": 0.5} for step in (0, 7) for q in (0, 1) for k in range(q + 1)]
    )
    second = first[first["query"] == 1]
    figure: Any = plots.attention_course({"one": first, "two": second})
    assert [frame.name for frame in figure.frames] == ["0", "7"]
    assert [trace.z.shape for trace in figure.frames[0].data] == [(2, 2), (1, 2)]
    assert len(figure.layout.sliders[0].steps) == 2
    with pytest.raises(ValueError, match="maps measured at different steps"):
        plots.attention_course({"one": first, "two": second[second["step"] == 0]})
    still: Any = plots.attention_course({"one": first[first["step"] == first["step"].min()]})
    assert figure.layout.sliders and not still.layout.sliders, "one step needs no slider"


def test_conditions_of_one_shape_share_an_ensemble():
    conditions = (
        {"burst": 1},
        {"n_labels": 4, "n_classes": 16},
        {"burst": 2},
        {"burst": 1, "intervention": "previous"},
    )
    keys = [ensemble["keys"] for ensemble in Grid(SMOKE, conditions).ensembles()]
    bursts_and_labels = [[(key["burst"], key["n_labels"], key["intervention"]) for key in group] for group in keys]
    assert bursts_and_labels == [[(1, 8, "nothing"), (2, 8, "nothing")], [(1, 4, "nothing")], [(1, 8, "previous")]]
    parts = Grid(replace(SMOKE, first_seed=4, seeds=3), conditions[:1], seeds_together=2).ensembles()
    assert [(part["size"]["first_seed"], part["size"]["seeds"]) for part in parts] == [(4, 2), (6, 1)]
    (ensemble,) = Grid(SMOKE, ({"model": "two"},)).ensembles()
    (task,) = (ExemplarTask(**each) for each in ensemble["tasks"])
    assert task == ExemplarTask(n_classes=16, n_labels=8, n_pairs=2, d_content=8, n_positions=0)
    assert not network(SMOKE, task, "two", [0]).beta_2.requires_grad  # pyright: ignore[reportAttributeAccessIssue]
