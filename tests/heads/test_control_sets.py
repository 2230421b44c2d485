"""Control sets are like the tested set, and are measured only where and as far as they matter to the verdict."""

from typing import Any

import numpy as np
import pytest

from align_circuits.heads.control_sets import (
    controls_of,
    first_enough,
    half_of_each,
    layer_matched,
    measured_beside,
    next_to_measure,
    score_matched,
)
from align_circuits.heads.verdicts import Verdict, as_extreme


def test_controls_are_as_many_other_heads_of_the_same_layers_or_of_similar_scores():
    everywhere = [(layer, head) for layer in range(3) for head in range(4)]
    scores = {"a": np.zeros((3, 4)), "b": np.zeros((3, 4))}
    scores["a"][0, :2] = 0.9, 0.8
    scores["b"][2, 1:] = 0.7, 0.6, 0.5
    tested = [(0, 0), (2, 1)]
    others = [head for head in everywhere if head not in tested]
    for seed in range(20):
        by_layer = layer_matched(tested, others, np.random.default_rng(seed))
        assert sorted(layer for layer, _ in by_layer) == [0, 2] and not set(by_layer) & set(tested)
        by_score = score_matched(tested, others, scores, np.random.default_rng(seed))
        assert (0, 1) in by_score and len(set(by_score) & {(2, 2), (2, 3)}) == 1 and len(by_score) == 2
    alone = {"a": np.zeros((3, 4))}
    alone["a"][2, 0] = 1  # no other head scores like it
    for seed in range(5):
        [(layer, _)] = score_matched([(2, 0)], [(0, 0), (1, 0), (2, 3)], alone, np.random.default_rng(seed))
        assert layer == 2, "then one of the same layer"
    assert set(layer_matched([(0, 0), (0, 1)], everywhere[2:], np.random.default_rng(0))) == {(0, 2), (0, 3)}
    assert len(layer_matched(everywhere[:10], everywhere[10:], np.random.default_rng(0))) == 2


def test_control_sets_differ_from_each_other():
    """A set that is drawn twice would count twice in a p-value, which three sets cannot take below a quarter."""
    heads, scores = [(layer, head) for layer in range(4) for head in range(3)], {"a": np.arange(12).reshape(4, 3) / 11}
    for tested, most in (([(1, 0), (1, 1)], 20), ([(1, 0)], 11)):
        others = [head for head in heads if head not in tested]
        for kind, drawn in controls_of(tested, others, scores, 20, seed=0).items():
            distinct = {frozenset(heads) for heads in drawn}
            assert len(distinct) == len(drawn) == most, kind
            assert all(len(heads) == len(tested) and not heads & set(tested) for heads in distinct), kind
    nearest = controls_of([(1, 0)], [head for head in heads if head != (1, 0)], scores, 2, seed=0)["layers"]
    assert [layer for [(layer, _)] in nearest] == [1, 1]


def test_controls_of_other_layers_and_scores_come_where_there_are_too_few():
    """The nearest first."""
    others, scores = [(layer, head) for layer in range(4) for head in range(2)][1:], {"a": np.zeros((4, 2))}
    drawn = controls_of([(0, 0)], others, scores, 20, seed=0)["layers"]
    assert [layer for [(layer, _)] in drawn] == [0, 1, 1, 2, 2, 3, 3]
    for width, layers in ((0, {0}), (1, {0, 1}), (2, {0, 1, 2})):
        found = [layer_matched([(0, 0)], others, np.random.default_rng(seed), width) for seed in range(30)]
        assert {layer for [(layer, _)] in found} == layers
    assert controls_of([(0, 0), *others], [], scores, 20, seed=0) == {"layers": [], "scores": []}, "none is left"
    others, scores = [(1, 0), (2, 0), (3, 0)], {"a": np.array([[1.0], [0.9], [0.6], [0.4]])}
    for draws in (20, 2):
        assert controls_of([(0, 0)], others, scores, draws, 0)["scores"] == [[head] for head in others][:draws]
    scores = {"a": np.array([[0.5, 0.0], [0.75, 0.0]])}
    for seed in range(10):
        generator = np.random.default_rng(seed)
        assert score_matched([(0, 0)], [(0, 1), (1, 0)], scores, generator) == [(1, 0)], "as far as a score may lie"


def test_half_of_the_controls_of_a_role_are_of_each_kind():
    sets = {"layers": [[(0, 1)], [(0, 2)], [(0, 3)]], "scores": [[(1, 1)], [(0, 2)]]}
    assert half_of_each(sets, 3) == [[(0, 1)], [(1, 1)], [(0, 2)]]
    assert half_of_each(sets, 9) == [[(0, 1)], [(1, 1)], [(0, 2)], [(0, 3)]], "each set once"


def beside(accuracies: Any, tested: float, kinds: Any = None, alpha: float = 0.05) -> np.ndarray:
    """The accuracy of each control set beside a necessary one, all targets in one batch; NaN if not measured."""
    targets, kinds = np.full(2, True), ["random"] * len(accuracies) if kinds is None else kinds

    def measure(draw: int, _: int) -> np.ndarray:
        return np.full(2, float(accuracies[draw]))

    return measured_beside("necessary", np.full(2, tested), kinds, [targets], measure, targets, alpha).mean(1)


@pytest.mark.parametrize(("as_bad", "measured"), [(None, 12), (6, 7), (0, 1)])
def test_control_sets_are_measured_until_the_claim_is_lost(as_bad, measured):
    accuracies = np.array([0.5 if draw == as_bad else 1.0 for draw in range(12)])
    found = beside(accuracies, 0.5)
    np.testing.assert_array_equal(found[:measured], accuracies[:measured])
    assert np.isnan(found[measured:]).all()


def verdict(tested: float, controls: Any, alpha: float = 0.05) -> Verdict:
    return Verdict("necessary", ((0, 0),), 8, 1.0, tested, 0.0, 1.0, (0.01, 1.0), controls, 0.01, alpha)


def test_more_than_one_draw_may_do_as_well_where_alpha_allows_it():
    accuracies = [0.5 if draw < 3 else 1.0 for draw in range(12)]
    for alpha, holds, p in ((0.2, False, 1.0), (0.4, True, 4 / 13)):
        found = verdict(0.5, {"layers": tuple(beside(accuracies, 0.5, alpha=alpha))}, alpha)
        assert found.p["layers"] == pytest.approx(p) and found.holds == holds


def test_p_values_are_valid_although_measuring_stops():
    """Where the tested set is like its controls, p is at most a in no more than a share a of cases, at every level.

    And it is never below the p-value of all draws.
    """
    generator, draws, cases = np.random.default_rng(0), 5, 200
    p = []
    for _ in range(cases):
        tested, *values = generator.permutation(2 * draws + 1) / (4 * draws)
        found = beside(values, tested, ["random", "matched"] * draws)
        by_kind = verdict(tested, {"layers": found[::2], "scores": found[1::2]}).p
        for kind, of_kind in (("layers", values[::2]), ("scores", values[1::2])):
            assert by_kind[kind] >= (1 + (np.array(of_kind) <= tested).sum()) / (1 + draws) - 1e-9
        p.append(max(by_kind.values()))
    for level in np.unique(p):
        share = np.mean(np.array(p) <= level)
        assert share <= level + 3 * np.sqrt(level * (1 - level) / cases), f"p <= {level:.2f} in {share:.2f} of cases"
    assert len(np.unique(p)) > 4


@pytest.mark.parametrize("claim", ["necessary", "sufficient"])
@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_a_control_set_that_is_left_early_would_not_have_done_as_well(claim, alpha):
    """Beside the accuracy on all targets, which decides the same; of every third target the claim says nothing."""
    generator, left_early = np.random.default_rng(0), 0
    for _ in range(20):
        whole = (generator.random((10, 24)) < generator.random((10, 1))).astype(float)
        decides = np.arange(24) % 3 > 0
        batches = [np.arange(24) // 2 == batch for batch in range(12)]
        accuracy = whole[:, decides].mean(1)
        index = int(np.argsort(accuracy)[generator.choice([1, -2])])
        values = measured_beside(
            *(claim, whole[index], ["random"] * 10, batches),
            lambda draw, batch, whole=whole, batches=batches: whole[draw, batches[batch]],
            *(decides, alpha),
        )
        known = ~np.isnan(values)
        np.testing.assert_array_equal(values[known], whole[known])
        of_all = as_extreme(claim, accuracy, float(accuracy[index]))
        some = known.any(1)
        measured = np.array([row[decides & seen].mean() for row, seen in zip(values[some], known[some], strict=True)])
        np.testing.assert_array_equal(as_extreme(claim, measured, float(accuracy[index])), of_all[some])
        assert np.all(known[:, decides].all(1) | ~of_all | ~some), "who does as well is measured on all targets"
        assert some.all() if alpha == 1 else of_all[some].any(), "all are, or one settles the claim"
        left_early += int((~known.all(1)).sum())
    assert left_early


def test_the_likeliest_control_set_is_measured_first():
    own, unknown = np.array([1.0, 0.0, 0.0, 0.0]), [np.nan] * 4
    begun = [[1.0, 1.0, np.nan, np.nan], [1.0, 0.0, np.nan, np.nan]]
    assert next_to_measure("necessary", own, np.array([*begun, unknown])) == 1, "does as well so far"
    assert next_to_measure("necessary", own, np.array([begun[0], unknown, unknown])) == 1, "is not begun"
    short = [[1.0, 1.0, np.nan, np.nan], [1.0, 0.5, np.nan, np.nan]]
    assert next_to_measure("necessary", own + 0.3, np.array(short)) == 1, "falls short by the least"
    assert next_to_measure("necessary", own, np.array([[1.0, 1.0, np.nan, np.nan]])) is None, "cannot do as well"
    assert next_to_measure("sufficient", own, np.array([[0.0, 0.0, 0.0, np.nan]])) == 0
    assert next_to_measure("sufficient", 1 - own, np.array([[0.0, 0.0, np.nan, np.nan]])) is None


def test_the_least_size_is_found_by_bisection():
    for most in (1, 2, 7):
        for least in range(1, most + 1):
            assert first_enough(most, lambda size, least=least: size >= least) == least
