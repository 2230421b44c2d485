"""Control sets are measured only where and as far as they matter, which changes no verdict."""

from typing import Any

import numpy as np
import pytest
from legs import slow_but

import align_circuits as ac
from align_circuits.heads import head_sets
from align_circuits.heads.thresholds import Thresholds
from align_circuits.tables.tables import Provenance

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=2)


@pytest.fixture
def drawn(monkeypatch):
    """Sets of one head of two layers, which leave a given accuracy when they are ablated; the tested one is L0H0."""
    monkeypatch.setattr(head_sets, "provenance_of", lambda *_: Provenance("localize"))

    def sets_of(accuracies: Any, **thresholds: Any) -> Any:
        class Sets(head_sets.HeadSets):
            def _accuracies(self, prompts, sets, rows=slice(None)) -> Any:
                right = np.array([accuracies[heads[0]] if heads else 1.0 for heads in sets])
                return right[:, None].repeat(len(prompts[rows].targets), 1), "fast"

        sets: Any = Sets.__new__(Sets)
        sets._tested, sets._kind, sets._thresholds = (
            ac.Prompts.from_tokens([[1, 2]] * 2),
            "all",
            Thresholds(**thresholds),
        )
        sets._model = sets._provenance = None
        sets._heads, sets._whole = [*accuracies], {}
        return sets

    return sets_of


@pytest.mark.parametrize(("as_bad", "own", "measured"), [(None, 0.5, 12), (6, 0.5, 7), (0, 0.5, 1), (None, 0.95, 0)])
def test_control_sets_are_drawn_until_the_claim_is_lost(as_bad, own, measured, drawn):
    """Until one costs as much as the named head; none if that costs little, since then no p-value can help."""
    accuracies = {(0, 0): own} | {(1, draw): own if draw == as_bad else 1.0 for draw in range(12)}
    controls = {"layers": [[(1, draw)] for draw in range(12)]}
    table = drawn(accuracies)._test([("nothing", None, ())], [(0, 0)], controls, ["necessary"])
    rows = table.frame[(table.frame["ablated"] == "random") & (table.frame["kind"] == "all")]
    assert rows["draw"].tolist() == [*range(12 if measured else 0)]
    known = rows["value"].to_numpy(dtype=float)
    assert known[:measured].tolist() == [accuracies[1, draw] for draw in range(measured)]
    assert np.isnan(known[measured:]).all() and (rows["n"][measured:] == 0).all()


def test_more_than_one_draw_may_do_as_well_where_alpha_allows_it(drawn):
    accuracies = {(0, 0): 0.5} | {(1, draw): 0.5 if draw < 3 else 1.0 for draw in range(12)}
    controls = {"layers": [[(1, draw)] for draw in range(12)]}
    for alpha, lost, p in ((0.2, 2, 12 / 13), (0.4, 0, 4 / 13)):
        sets = drawn(accuracies, alpha=alpha)
        table = sets._test([("nothing", None, ())], [(0, 0)], controls, ["necessary"])
        verdict = sets._verdict("necessary", [(0, 0)], table)
        assert verdict.p["layers"] == pytest.approx(p if not lost else 1.0) and verdict.holds == (not lost)


@pytest.mark.usefixtures("unchecked_shapes")
def test_p_values_are_valid_although_drawing_stops(drawn):
    """Where the tested set is like its controls, p is at most a in no more than a share a of cases, at every level.

    And it is never below the p-value of all draws.
    """
    generator, draws, cases = np.random.default_rng(0), 5, 200
    p = []
    for _ in range(cases):
        values = generator.permutation(2 * draws + 1) / (4 * draws)
        heads = [(0, 0), *((1, draw) for draw in range(2 * draws))]
        controls = {
            kind: [[(1, 2 * draw + place)] for draw in range(draws)] for place, kind in enumerate(("layers", "scores"))
        }
        sets = drawn(dict(zip(heads, values.tolist(), strict=True)), loss=0.01)
        table = sets._test([("nothing", None, ())], [(0, 0)], controls, ["necessary"])
        verdict = sets._verdict("necessary", [(0, 0)], table)
        for place, kind in enumerate(("layers", "scores")):
            of_all = (1 + (values[1 + place :: 2] <= values[0]).sum()) / (1 + draws)
            assert verdict.p[kind] >= of_all - 1e-9
        p.append(max(verdict.p.values()))
    for level in np.unique(p):
        share = np.mean(np.array(p) <= level)
        assert share <= level + 3 * np.sqrt(level * (1 - level) / cases), f"p <= {level:.2f} in {share:.2f} of cases"
    assert len(np.unique(p)) > 4


@pytest.fixture(scope="module")
def planted():
    model = ac.planted_circuit(TASK, seed=0, strength=0.6)
    return model, TASK.sample(6, model.tokenizer, seed=0)


@pytest.fixture(scope="module")
def sets(planted):
    model, prompts = planted
    scores = {"lookup": np.zeros((model.cfg.n_layers, model.cfg.n_heads))}
    return head_sets.HeadSets(model, prompts, prompts, scores, Thresholds(), ac.RunOptions())


@pytest.mark.parametrize("claim", ["necessary", "sufficient"])
@pytest.mark.parametrize("alpha", slow_but([0.05], [0.05, 1.0]))
def test_a_control_set_that_is_left_early_would_not_have_done_as_well(planted, sets, claim, alpha, monkeypatch):
    """Beside the accuracy on all prompts, which decides the same."""
    model, prompts = planted
    others = [[head] for head in model.roles][:4] + [[(layer, 0)] for layer in range(model.cfg.n_layers)]
    whole, _ = sets._accuracies(prompts, others)
    of_kind = prompts.targets["kind"].to_numpy() == "first"
    accuracy = whole[:, of_kind].mean(1)
    monkeypatch.setattr(head_sets, "CPU_TOKENS", 1)  # asks after every prompt
    monkeypatch.setattr(sets, "_thresholds", Thresholds(alpha=alpha))
    drawn: Any = [("random", draw, heads) for draw, heads in enumerate(others)]
    left_early = 0
    for index in np.argsort(accuracy)[[1, -1]]:
        values = np.stack(sets._right_beside(claim, whole[index], drawn))
        known = ~np.isnan(values)
        np.testing.assert_array_equal(values[known], whole[known])
        of_all = np.asarray(head_sets._as_extreme(claim, accuracy, float(accuracy[index])))
        measured = np.array([row[of_kind & seen].mean() for row, seen in zip(values, known, strict=True) if seen.any()])
        as_well: Any = head_sets._as_extreme(claim, measured, float(accuracy[index]))
        np.testing.assert_array_equal(as_well, of_all[known.any(1)])
        complete = known[:, of_kind].all(1) | ~of_all | ~known.any(1)
        assert np.all(complete), "who does as well is measured on all prompts"
        assert known.any(1).all() if alpha == 1 else of_all[known.any(1)].any(), "all are, or one settles the claim"
        left_early += int((~known.all(1)).sum())
    assert left_early


def test_the_likeliest_control_set_is_measured_first():
    own, unknown = np.array([1.0, 0.0, 0.0, 0.0]), [np.nan] * 4
    begun = [[1.0, 1.0, np.nan, np.nan], [1.0, 0.0, np.nan, np.nan]]
    assert head_sets._next("necessary", own, np.array([*begun, unknown])) == 1, "does as well so far"
    assert head_sets._next("necessary", own, np.array([begun[0], unknown, unknown])) == 1, "is not begun"
    short = [[1.0, 1.0, np.nan, np.nan], [1.0, 0.5, np.nan, np.nan]]
    assert head_sets._next("necessary", own + 0.3, np.array(short)) == 1, "falls short by the least"
    assert head_sets._next("necessary", own, np.array([[1.0, 1.0, np.nan, np.nan]])) is None, "cannot do as well"
    assert head_sets._next("sufficient", own, np.array([[0.0, 0.0, 0.0, np.nan]])) == 0
    assert head_sets._next("sufficient", 1 - own, np.array([[0.0, 0.0, np.nan, np.nan]])) is None


def test_a_table_counts_the_prompts_that_a_control_set_was_measured_on(planted, sets, monkeypatch):
    model, prompts = planted
    monkeypatch.setattr(head_sets, "CPU_TOKENS", 1)
    inert = next(head for head, kind in model.kinds.items() if kind == "inert")
    sets._right_targets([()])
    drawn: Any = ("random", 0, [inert])
    table = sets._table(
        [drawn], sets._right_beside("necessary", np.arange(len(prompts.targets)) % 4 / 3, [drawn])
    ).where(kind="first")
    (row,) = table.frame.to_dict("records")
    targets = (prompts.targets["kind"] == "first").sum()
    assert 0 < row["n"] < targets and row["low"] <= row["value"] <= row["high"]
    assert table.values is not None and np.isnan(table.values).any()
    assert row["n"] == table.weights.sum()  # pyright: ignore[reportOptionalMemberAccess]
