"""Control sets are measured only where and as far as they matter, which changes no verdict."""

from typing import Any

import numpy as np
import pytest

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
            def _accuracies(self, prompts, sets, beside=None) -> Any:  # noqa: ARG002
                right = np.array([accuracies[heads[0]] if heads else 1.0 for heads in sets])
                return right[:, None].repeat(len(prompts.targets), 1), "fast"

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
    assert rows["draw"].tolist() == [*range(measured)]
    assert rows["value"].tolist() == [accuracies[1, draw] for draw in range(measured)]


@pytest.mark.usefixtures("unchecked_shapes")
def test_p_values_are_valid_although_drawing_stops(drawn):
    """Where the tested set is like its controls, p is at most a in no more than a share a of cases, at every level."""
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
        p.append(max(sets._verdict("necessary", [(0, 0)], table).p.values()))
    for level in np.unique(p):
        share = np.mean(np.array(p) <= level)
        assert share <= level + 3 * np.sqrt(level * (1 - level) / cases), f"p <= {level:.2f} in {share:.2f} of cases"
    assert len(np.unique(p)) > 4


@pytest.fixture(scope="module")
def planted():
    model = ac.planted_circuit(TASK, seed=0, strength=0.6)
    return model, TASK.sample(6, model.tokenizer, seed=0)


@pytest.mark.parametrize("claim", ["necessary", "sufficient"])
def test_a_control_set_that_is_left_early_would_not_have_done_as_well(planted, claim, monkeypatch):
    """Beside the accuracy on all prompts, which decides the same."""
    model, prompts = planted
    scores = {"lookup": np.zeros((model.cfg.n_layers, model.cfg.n_heads))}
    sets = head_sets.HeadSets(model, prompts, prompts, scores, Thresholds(), ac.RunOptions())
    circuit = [[head] for head in model.roles][:4]
    others = [*circuit, *([(layer, 0)] for layer in range(model.cfg.n_layers))]
    whole, _ = sets._accuracies(prompts, others)
    of_kind = prompts.targets["kind"].to_numpy() == "first"
    accuracy = whole[:, of_kind].mean(1)
    monkeypatch.setattr(head_sets, "CPU_TOKENS", 1)  # asks after every prompt
    left_early = 0
    for own in (*np.unique(accuracy)[:3], 0.4):
        values, _ = sets._accuracies(prompts, others, (claim, own))
        known = ~np.isnan(values)
        np.testing.assert_array_equal(values[known], whole[known])
        complete = known.all(1)
        left_early += int((~complete).sum())
        as_well: Any = head_sets._as_extreme(claim, accuracy, float(own))
        assert np.asarray(complete)[as_well].all(), "who does as well is measured on all prompts"
        measured = np.nanmean(np.where(of_kind, values, np.nan), 1)
        np.testing.assert_array_equal(head_sets._as_extreme(claim, measured, own), as_well)
    assert left_early > 3


def test_a_table_counts_the_prompts_that_a_control_set_was_measured_on(planted, monkeypatch):
    model, prompts = planted
    scores = {"lookup": np.zeros((model.cfg.n_layers, model.cfg.n_heads))}
    sets = head_sets.HeadSets(model, prompts, prompts, scores, Thresholds(), ac.RunOptions())
    monkeypatch.setattr(head_sets, "CPU_TOKENS", 1)
    inert = next(head for head, kind in model.kinds.items() if kind == "inert")
    intact = sets._accuracy(sets._right_targets([()])[0])
    right = sets._right_targets([[inert]], beside=("necessary", intact / 2))
    table = sets._table([("random", 0, [inert])], right).where(kind="first")
    (row,) = table.frame.to_dict("records")
    targets = (prompts.targets["kind"] == "first").sum()
    assert 0 < row["n"] < targets and row["low"] <= row["value"] <= row["high"]
    assert table.values is not None and np.isnan(table.values).any()
    assert row["n"] == table.weights.sum()  # pyright: ignore[reportOptionalMemberAccess]
