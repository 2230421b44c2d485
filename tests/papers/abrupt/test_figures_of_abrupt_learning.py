"""The statistics and figures of abrupt learning, on tables whose answer is planted."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.papers.abrupt.ensemble_runs import CLAMPS, SMOKE, Sweep, network
from align_circuits.papers.abrupt.exemplar_task import ExemplarTask
from align_circuits.papers.abrupt.fig_5_operations import CLAMPED, CONFIRMED, FIG5, WITHOUT, formed, hypotheses
from align_circuits.papers.abrupt.figs_1_3_4_network import FIG4, check_alignment
from align_circuits.papers.abrupt.figs_2_a3_data_dependence import FIG2, grid_of
from align_circuits.papers.abrupt.figs_7_a4_loss_landscape import width_of_fall
from align_circuits.papers.abrupt.figs_a1_a5_mixtures import FIGA5
from align_circuits.papers.abrupt.figures import ABRUPT
from align_circuits.papers.abrupt.progress_measures import MEASURES
from align_circuits.papers.claims import SCALES
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table

STEPS = np.arange(0.0, 401, 10)


def curves(middles: dict[str, float], **cell: Any) -> pd.DataFrame:
    """Three seeds; each measure rises from 0 to 1 around its step; one that is not named stays at 0."""
    rows = [
        {
            **cell,
            "seed": seed,
            "step": step,
            "measure": name,
            "value": float(np.clip(0.5 + (step - middles.get(name, 1e9) - 10 * seed) / 100, 0, 1)),
        }
        for seed in range(3)
        for name in MEASURES
        for step in STEPS
    ]
    return pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=100)


def table(*frames: pd.DataFrame) -> Table:
    return Table(pd.concat(frames, ignore_index=True), Provenance("test"))


def test_the_order_of_the_measures_is_seen_and_its_absence_too():
    born = {"icl": 200.0, "ila1": 202.0, "tila2": 205.0, "cla": 120.0, "tla2": 100.0}
    checks = FIG4.check(table(curves(born)))
    assert [check.holds for check in checks] == [True] * 5
    assert all(check.control_fails for check in checks)
    late = check_alignment(table(curves(born | {"tla2": 210.0, "ila1": 320.0})))
    assert [check.holds for check in late] == [False, True, True, False]
    never = FIG4.check(table(curves({"cla": 100.0})))
    assert not any(check.holds for check in never)


def test_stalled_seeds_are_counted():
    robust, stalls = curves({"icl": 100.0}, n_labels=8, n_pairs=4), curves({}, n_labels=4, n_pairs=4)
    assert [check.holds for check in FIGA5.check(table(robust, stalls))] == [True, True]
    swapped = table(robust.assign(n_labels=4), stalls.assign(n_labels=8))
    assert [check.holds for check in FIGA5.check(swapped)] == [False, False]


def clamped(**at: float) -> Table:
    """All clamps of the experiment; the head forms at a step, 200 unless it is said, and not without an operation."""
    names = {clamp: clamp.replace(" ", "_").replace(",", "").replace("'s", "") for clamp in CLAMPS}
    middles = {
        clamp: at.get(name, 1e9 if clamp.startswith("no ") and "elsewhere" not in clamp else 200.0)
        for clamp, name in names.items()
    }
    rows = [curves({"icl": middle, "ila1": middle, "tila2": middle}, clamp=clamp) for clamp, middle in middles.items()]
    return table(*rows)


def test_clamping_is_credited_only_if_the_transition_comes_sooner():
    sooner = CLAMPED.check(clamped(previous=100.0, previous_labels=100.0))
    assert [check.holds and check.control_fails for check in sooner] == [True] * 4
    assert sooner[0].measured.value == pytest.approx(np.mean([100 / 200, 100 / 210, 100 / 220]))
    assert [check.holds for check in CLAMPED.check(clamped())[:2]] == [False, False]
    assert [check.holds and check.control_fails for check in WITHOUT.check(clamped())] == [True] * 4
    assert not WITHOUT.check(clamped(no_write=200.0))[1].holds


def test_a_hypothesis_is_excluded_only_where_its_cause_was_held():
    def excluded(found: Table) -> dict[str, set[str]]:
        return {str(name)[:2]: set(rows["excluded"]) for name, rows in hypotheses(found).groupby("hypothesis")}

    assert excluded(clamped()) == {"H1": {"yes"}, "H2": {"yes"}, "H3": {"yes"}}
    assert excluded(clamped(context=1e9)) == {"H1": {"yes", "no"}, "H2": {"yes"}, "H3": {"no"}}
    assert excluded(clamped(labels=1e9)) == {"H1": {"yes", "no"}, "H2": {"no"}, "H3": {"yes"}}


def test_a_head_counts_as_formed_only_with_transition_and_attention():
    whole = {"icl": 200.0, "ila1": 200.0, "tila2": 200.0, "tla2": 100.0}
    assert formed(table(curves(whole, clamp="nothing")), "nothing").tolist() == [True] * 3
    for lacks in ("icl", "ila1", "tila2"):
        without = {name: step for name, step in whole.items() if name != lacks}
        assert not formed(table(curves(without, clamp="nothing")), "nothing").any()


def test_what_is_to_be_confirmed_can_fail():
    confirmed = CONFIRMED.check(clamped(context=1e9))
    assert [check.holds and check.control_fails for check in confirmed] == [True] * 3
    assert [check.holds for check in CONFIRMED.check(clamped(labels=1e9))] == [True, False, False]
    assert not CONFIRMED.check(clamped(context=1e9, no_match=200.0))[0].control_fails


def test_fresh_seeds_are_seeds_that_no_other_clamping_had():
    for scale in SCALES:
        fresh, before = CONFIRMED.scales[scale].size, CLAMPED.scales[scale].size
        assert fresh.first_seed >= before.first_seed + before.seeds


@pytest.mark.parametrize("scale", SCALES)
def test_the_tasks_of_every_sweep_fit_at_every_scale(scale):
    configs = [one.scales[scale] for one in ABRUPT]
    sweeps = [sweep for config in configs if isinstance(sweep := getattr(config, "sweep", config), Sweep)]
    assert len(sweeps) == len(ABRUPT) - 3  # flows and tunings are no sweeps
    for sweep in sweeps:
        assert sum(map(len, sweep.ensembles())) == len(sweep.cells)


def test_each_operation_is_changed_where_it_is_and_elsewhere(tmp_path):
    found = FIG5.run(FIG5.scales["smoke"], models=(), jobs=1, folder=tmp_path)
    rows = found.where(seed=0).frame
    assert set(rows["how"]) == {"nothing", "patched", "ablated", "clamped"}
    assert len(rows) == 1 + 4 * 2 * 2 + 2 * 2
    assert len(FIG5.check(found)) == 7 + 3


def dependence(in_context: Any, in_weights: Any) -> Table:
    """The cells of the smoke scale, with accuracies that are functions of the cell."""
    frames = []
    for cell in FIG2.scales["smoke"].cells:
        values = dict.fromkeys(MEASURES, 0.0) | {"icl": in_context(cell), "iwl": in_weights(cell)}
        values["iwl_common"], values["iwl_rare"] = values["iwl"], 0.1
        rows = [
            {**cell, "seed": seed, "step": step, "measure": name, "value": value}
            for name, value in values.items()
            for seed, step in itertools.product(range(2), (0, 10, 20))
        ]
        frames.append(pd.DataFrame(rows))
    return Table(pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan, n=40), Provenance("test"))


def test_dependences_on_the_data_are_read_from_the_right_cells():
    def in_context(cell: Any) -> float:
        bursty = min(cell["burst"], 1) * (0.2 + 0.4 * (cell["n_classes"] > 8))
        return (
            bursty
            + 0.2 * (cell["burst"] > 1)
            + 0.3 * (cell["burst"] == 1) * (cell["noise"] > 0.5)
            - 0.4 * (cell["zipf"] > 1)
        )

    def in_weights(cell: Any) -> float:
        return (1.0 - 0.6 * (cell["burst"] > 0) * (cell["n_classes"] > 8) - 0.2 * (cell["burst"] > 1)) * (
            1 if cell["zipf"] or cell["noise"] > 0.5 or cell["n_classes"] == 8 or cell["burst"] != 1 else 0.7
        ) + 0.3 * (cell["zipf"] == 1)

    found = dependence(in_context, in_weights)
    grid = grid_of(found, "icl")
    assert grid.index.tolist() == [0, 1, 2]
    assert grid.columns.tolist() == [8, 16]
    assert grid.loc[1, 16] == pytest.approx(0.6)
    checks = FIG2.check(found)
    values = [check.measured.value for check in checks]
    assert values[0] == pytest.approx(0.4)
    assert values[2] == pytest.approx(0.2)
    assert values[4] == pytest.approx(0.3)
    assert values[7] == pytest.approx(0.4)
    assert not any(
        check.holds for check in FIG2.check(dependence(lambda _: 0.1, lambda _: 0.1)) if check.relation == ">="
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
    with pytest.raises(ValueError, match="maps read at different steps"):
        plots.attention_course({"one": first, "two": second[second["step"] == 0]})
    still: Any = plots.attention_course({"one": first[first["step"] == first["step"].min()]})
    assert figure.layout.sliders and not still.layout.sliders, "one step needs no slider"


def test_cells_of_one_shape_share_an_ensemble():
    cells = ({"burst": 1}, {"n_labels": 4, "n_classes": 16}, {"burst": 2}, {"burst": 1, "clamp": "previous"})
    groups = Sweep(SMOKE, cells).ensembles()
    assert groups == [[cells[0], cells[2]], [cells[1]], [cells[3]]]
    reduced = Sweep(SMOKE, ({"model": "two"},))
    assert reduced.task(reduced.cells[0]) == ExemplarTask(
        n_classes=16, n_labels=8, n_pairs=2, d_content=8, n_positions=0
    )
    assert not network(SMOKE, reduced.task(reduced.cells[0]), "two", [0]).beta_2.requires_grad  # pyright: ignore[reportAttributeAccessIssue]
