"""Tables: selecting, ranking, pairing, saving."""

import inspect
import json
import lzma
import re
import sys
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from refusals import raised, refused
from scipy import stats

from align_circuits.run.baseline_metrics import baseline_table
from align_circuits.tables import baselines, intervals
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table, in_common, with_level

DATA = {"task": {"name": "made"}, "digest": "d"}


def table(values=None, *, data=DATA, seed: int = 0) -> Table:
    """Two metrics of two layers with two heads and their mean, over five prompts."""
    keys = pd.DataFrame(
        [(layer, head, metric) for metric in ("a", "b") for layer in (0, 1) for head in (0, 1, None)],
        columns=["layer", "head", "metric"],
    )
    keys = with_level(keys)
    values = np.random.default_rng(seed).random((12, 5)) if values is None else values
    return Table.from_prompts(keys, values, np.ones((12, 5)), Provenance("made", {"x": 1}, {"name": "m"}, data, "fast"))


def frame_of(made: Table, **keys) -> Any:  # pandas' own annotations take every comparison for a Series
    return made.where(**keys).frame


def test_from_prompts():
    frame = frame_of(table())
    assert list(frame.columns) == ["level", "layer", "head", "metric", "value", "low", "high", "n"]
    assert (frame["n"] == 5).all()
    assert ((frame["low"] < frame["value"]) & (frame["value"] < frame["high"])).all()


def test_only_what_is_bounded_has_an_exact_bound():
    keys = pd.DataFrame({"metric": ["share", "nats"]})
    values, weights = np.ones((2, 4)), np.full((2, 4), 3.0)
    made = Table.from_prompts(keys, values, weights, Provenance("made"), bounded=np.array([True, False]))
    assert made.frame["n"].tolist() == [12, 12]
    assert made.frame["low"].tolist() == pytest.approx([0.025 ** (1 / 4), 1.0])


def test_where():
    some = table().where(layer=1, metric=["a"])
    places = some.frame[["level", "layer", "head"]].to_numpy().tolist()
    assert places == [["head", 1, 0], ["head", 1, 1], ["layer", 1, pd.NA]]
    assert some.values is not None and some.values.shape == (3, 5)
    np.testing.assert_allclose(some.values.mean(1), some.frame["value"])
    assert len(table().where()) == 12


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer": 99}, "no layer 99 in this table; it has 0, 1"),
        ({"layer": 0, "head": [0, 2]}, "no head 2 in this table"),
        ({"metric": ["a", "c"]}, "no metric 'c' in this table; it has a, b"),
        ({"value": 1}, "no key column 'value'; this table has level, layer, head, metric"),
    ],
)
def test_where_something_is_not(keys, message):
    raised(KeyError, message, table().where, **keys)


def test_missing_keys_are_selected_by_none():
    made = table()
    means = frame_of(made, head=None)
    assert means["layer"].tolist() == [0, 1, 0, 1] and means["head"].isna().all()
    assert len(made.where(head=[None, 1])) == 8 and len(made.where(head=pd.NA)) == 4
    assert str(made.frame["head"].dtype) == "Int64"
    assert str(made.heads().frame["head"].dtype) == "int64", "nothing is missing there"
    raised(KeyError, "no layer None in this table; it has 0, 1", made.where, layer=None)
    raised(KeyError, "no head 7 in this table; it has 0, 1, None", made.where, head=7)


@pytest.mark.parametrize(
    ("layer", "head", "level"), [(0, 3, "head"), (0, None, "layer"), (None, None, "model"), (0, 0, "head")]
)
def test_levels(layer, head, level):
    keys = with_level(pd.DataFrame({"site": ["z"], "layer": [layer], "head": [head], "metric": ["a"]}))
    assert keys.columns.tolist() == ["site", "level", "layer", "head", "metric"]
    assert keys["level"].tolist() == [level]


def test_heads_of_a_table_without_levels():
    made = table()
    bare = Table(made.frame.drop(columns="level"), made.provenance)
    assert frame_of(bare.heads())["head"].tolist() == frame_of(made.heads())["head"].tolist() == [0, 1] * 4


@pytest.mark.parametrize("values", [[0, None], [0.0, np.nan], pd.array([0, None], dtype="Int64"), [None, None]])
def test_keys_with_gaps_are_whole_numbers(values):
    frame = pd.DataFrame({"offset": values, "text": ["a", None], "value": 0.0, "low": 0.0, "high": 0.0, "n": 1})
    made = Table(frame, Provenance("made"))
    assert str(made.frame["offset"].dtype) == "Int64" and made.frame["text"].tolist()[0] == "a"
    assert len(made.where(offset=None)) == made.frame["offset"].isna().sum()


def test_top_ranks_single_heads():
    values = np.tile(np.array([0.1, 0.4, 0.9, 0.3, np.nan, 0.8, *[0.5] * 6])[:, None], 5)
    best = table(values).top("a", 9)
    assert best.frame[["layer", "head"]].to_numpy().tolist() == [[0, 1], [1, 0], [0, 0]]
    assert best.values is not None and best.values[0, 0] == 0.4
    one = table(values).where(metric="a")
    assert one.top(n=2).frame.equals(one.top("a", 2).frame)
    refused(r"this table has the metrics a, b.*: name one, top\('a'\)", table(values).top)


def effects(verb: str, level: str = "head", **keys: Any) -> Table:
    """One row a head, layer or edge, with the values -3, 1, 2."""
    place: dict[str, Any] = {
        "head": {"layer": [0, 0, 1], "head": [0, 1, 0]},
        "layer": {"layer": [0, 1, 2], "head": None},
        "edge": {"sender": ["input", "L0H0", "L0H1"], "receiver": "logits"},
    }[level]
    frame = pd.DataFrame({"level": level, **place, "metric": "log_prob", **keys})
    return Table(frame.assign(value=[-3.0, 1.0, 2.0], low=np.nan, high=np.nan, n=4), Provenance(verb))


@pytest.mark.parametrize(
    ("verb", "keys", "best"),
    [
        ("score_heads", {}, 2),
        ("ablate_heads", {}, -3),
        ("ablate_heads", {"metric": "accuracy"}, -3),
        ("ablate_heads", {"metric": "kl"}, 2),
        ("ablate_heads", {"metric": "loss"}, 2),
        ("patch_heads", {"direction": "noise", "metric": "loss"}, 2),
        ("patch_heads", {"direction": "denoise", "metric": "loss"}, -3),
        ("minimality", {}, -3),
        ("patch_heads", {"direction": "denoise"}, 2),
        ("patch_heads", {"direction": "denoise", "metric": "kl"}, -3),
        ("patch_heads", {"direction": "noise"}, -3),
        ("patch_heads", {"direction": "noise", "metric": "kl"}, 2),
        ("attribute_heads", {"direction": "noise"}, -3),
        ("interchange", {"direction": "denoise", "metric": "interchange"}, 2),
        ("interchange", {"direction": "noise", "metric": "interchange"}, 2),
        ("interchange", {"direction": "noise", "metric": "corrupted_correct"}, -3),
        ("localize", {"metric": "q"}, -3),
        ("localize", {"metric": "ablation"}, 2),
        ("steer", {"metric": "rank"}, -3),
        ("emergence", {"measure": "step"}, -3),
        ("emergence", {"measure": "emerged"}, 2),
    ],
)
def test_what_matters_most_comes_first(verb, keys, best):
    made = effects(verb, **keys)
    metric = keys.get("metric", "log_prob")
    assert made.top(metric).frame["value"].tolist() == sorted(made.frame["value"], reverse=best > 0)
    assert (made - made).top(metric).frame["layer"].tolist() == [0, 0, 1], "a tie keeps the order"
    assert made.top(metric, 1, by="highest").frame["value"].item() == 2
    assert made.top(metric, 1, by="lowest").frame["value"].item() == -3
    assert made.top(metric, by="absolute").frame["value"].tolist() == [-3, 2, 1]
    half = Table(made.frame.assign(value=made.frame["value"] / 2), made.provenance)
    assert (made - half).top(metric, 1).frame["value"].item() == best / 2, "a difference is ranked as its left side"
    both = Table.concat({"before": made, "after": half}, key="when")
    assert both.where(when="after").top(metric, 1).frame["value"].item() == best / 2


@pytest.mark.parametrize(
    ("metric", "settings", "best"),
    [
        ("log_prob", {"grad_drop": True}, 2),
        ("log_prob", {}, -3),
        ("function_vector", {"direction": None, "tasks": [{"metric": "kl"}]}, -3),
    ],
)
def test_settings_decide_too(metric, settings, best):
    """Attribution without a sign is highest in both directions; older tables have the direction as a setting."""
    kept = Table(effects("any", metric=metric).frame, Provenance("any", {"direction": "noise"} | settings))
    assert kept.top(metric, 1).frame["value"].item() == best


@pytest.mark.parametrize("level", ["layer", "edge"])
def test_top_of_layers_and_of_edges(level):
    made = effects("patch_edges", level, direction="noise")
    assert made.top("log_prob").frame["value"].tolist() == [-3, 1, 2]
    assert Table(made.frame.drop(columns="level"), made.provenance).top("log_prob", 1).frame["value"].item() == -3
    both = Table.concat([effects("score_heads"), effects("score_heads", level)])
    assert both.top("log_prob").frame["level"].tolist() == ["head"] * 3, "heads, where there are any"


def test_top_refuses_several_rows_a_head():
    """Three kinds of targets would list the same head three times."""
    made = effects("ablate_heads", positions="all")
    kinds = Table(pd.concat([made.frame.assign(kind=kind) for kind in ("all", "first", "later")]), made.provenance)
    some = kinds.where(kind=["first", "later"])
    refused(r"several rows a head: choose one value of kind with \.where\(\.\.\.\) first", some.top, "log_prob")
    assert set(kinds.top("log_prob").frame["kind"]) == {"all"}, "unless a kind is chosen"
    assert set(kinds.where(kind="first").top("log_prob").frame["kind"]) == {"first"}
    np.testing.assert_array_equal(kinds.to_array("log_prob"), kinds.where(kind="all").to_array("log_prob"))
    placed = Table(pd.concat([made.frame.assign(kind="all", offset=place) for place in (None, 0, 1)]), made.provenance)
    assert placed.top("log_prob").frame["offset"].isna().to_numpy().all()
    edges = effects("patch_edges", "edge", direction="noise")
    mixed = Table.concat([edges, effects("patch_edges", "edge", direction="denoise")])
    refused("several rows an edge: choose one value of direction with", mixed.top, "log_prob")
    doubled = Table(pd.concat([made.frame, made.frame]), made.provenance)
    refused("several rows a head with equal keys", doubled.top, "log_prob")


def test_top_refuses_what_has_no_order():
    unchecked: Any = inspect.unwrap(Table.top)
    with pytest.raises(ValueError, match="by='best': choose 'highest', 'lowest' or 'absolute'"):
        unchecked(effects("score_heads"), "log_prob", by="best")
    model = Table(effects("evaluate", "layer").frame.assign(level="model", layer=None), Provenance("evaluate"))
    refused(r"no heads, layers or edges to rank: .* rows of the level model", model.top, "log_prob")
    refused("n=-1: give how many rows, 0 or more", effects("score_heads").top, "log_prob", -1)
    both = Table.concat([effects("ablate_heads"), effects("patch_heads", "layer", direction="denoise")])
    refused("opposite ends matter most: select one", both.top, "log_prob")
    assert both.top("log_prob", 1, by="lowest").frame["value"].item() == -3
    parts = {"taken": effects("ablate_heads"), "brought": effects("patch_heads", direction="denoise")}
    joined = Table.concat({"a": Table.concat(parts, key="effect")}, key="model")
    assert [joined.where(effect=name).top(n=1).frame["value"].item() for name in parts] == [-3, 2]


def test_grid():
    made = table()
    grid = made.to_array("b")
    assert grid.shape == (2, 2)
    for row in frame_of(made.heads(), metric="b").itertuples():
        assert grid[row.layer, row.head] == row.value
    one, expected = made.where(layer=1, head=1), np.full((6, 3), np.nan)
    expected[1, 1] = frame_of(one, metric="b")["value"].iloc[0]
    for model, shape in (({}, (2, 2)), ({"n_layers": 6, "n_heads": 3}, (6, 3))):  # of the rows, or of the model
        grid = replace(one, provenance=Provenance("made", model=model)).to_array("b")
        np.testing.assert_array_equal(grid, expected[: shape[0], : shape[1]])
    doubled = Table(pd.concat([made.frame.assign(step=step) for step in (0, 1)]), made.provenance)
    refused(r"several rows a head: choose one value of step", doubled.to_array, "b")


def test_tables_without_prompts_are_not_paired():
    """As of steps of emergence, whose values are those of runs."""
    made = table()
    other = replace(made, provenance=Provenance("emergence"))
    assert np.isnan((other - other).frame["low"].to_numpy()).all()
    named = replace(made, frame=made.frame.assign(name="1"))
    refused("keys of different types", named.__sub__, replace(made, frame=made.frame.assign(name=1)))


def test_a_difference_is_paired_by_keys_and_prompts():
    left, right = table(seed=0), table(seed=1, data={**DATA, "ablated to": "a mean"})
    order = np.random.default_rng(0).permutation(12)
    assert right.values is not None and left.values is not None
    difference = left - right._rows(order)
    np.testing.assert_allclose(difference.frame["value"], (left.values - right.values).mean(1))
    assert frame_of(difference)["low"].le(frame_of(difference)["value"]).all()
    assert difference.provenance.verb == "difference"
    assert frame_of(left - left)[["value", "low", "high"]].eq(0).all(axis=None)


def test_a_difference_of_shares_stays_within_its_bounds():
    """Student's interval of eight prompts, of which seven lose the answer, reaches below -1."""
    keys = pd.DataFrame({"metric": ["accuracy", "log_prob"]})
    right = np.array([[1.0] * 8, [0.0] * 8])
    left = right - np.array([0] + [1] * 7)
    expected = np.stack(intervals.proportion_change((left - right)[:1], np.ones((1, 8)), yes_or_no=True))[:, 0]

    def difference(verb: str, weights: Any = 1.0, **columns: Any) -> Any:
        made = [
            Table.from_prompts(
                keys.assign(**columns), values, weight * np.ones((2, 8)), Provenance(verb, data=DATA), bounded=False
            )
            for values, weight in ((left, weights), (right, 1.0))
        ]
        named = [Table.concat({"here": table}, key="name") for table in made]
        twice = [Table.concat({"there": table}, key="place") for table in named]
        for of in (named, twice):
            pd.testing.assert_frame_equal(frame_of(of[0] - of[1])[[*VALUES]], frame_of(made[0] - made[1])[[*VALUES]])
        return frame_of(made[0] - made[1])[["low", "high"]].to_numpy()

    of_levels, of_changes, estimated = map(difference, ("evaluate", "patch_heads", "attribute_heads"))
    assert of_levels[0] == pytest.approx(expected) and of_levels[0].min() >= -1
    assert -2 < of_changes[0, 0] < of_levels[0, 0] and of_changes[0, 1] > of_levels[0, 1], "changes reach from -2 to 2"
    assert of_levels[1] == pytest.approx(estimated[0]) and of_levels[1, 0] < -1, "nats and estimates have no bounds"
    assert difference("patch_heads", estimated=True)[0] == pytest.approx(estimated[0])
    unlike = difference("evaluate", np.arange(1.0, 9))
    assert np.isnan(unlike[0]).all() and np.isfinite(unlike[1]).all(), "prompts weigh differently on both sides"


def with_baselines(direction: str, clean: Any, corrupted: Any, verb: str = "patch_heads", **settings: Any) -> Table:
    """Effects of two heads on one metric in six prompts of different weight, with baselines."""
    keys = pd.DataFrame({"level": "head", "layer": 0, "head": [0, 1], "direction": direction, "metric": "log_prob"})
    weights, made = np.array([[1.0, 2, 2, 2, 1, 2]]), Provenance(verb, settings)
    means = {"clean": np.array([clean]), "corrupted": np.array([corrupted]), "chance": np.full((1, 6), -4.0)}
    changes = np.random.default_rng(0).normal(1, 0.2, (2, 6))
    table = Table.from_prompts(keys, changes, np.tile(weights, (2, 1)), made, bounded=False)
    return replace(table, baselines=baseline_table(pd.DataFrame({"metric": ["log_prob"]}), means, weights, made))


APART = [-0.1, -0.2, -0.3, -0.1, -0.2, -0.4], [-2.1, -2.6, -3.0, -2.0, -2.2, -2.9]


@pytest.mark.parametrize(
    ("direction", "verb"), [("denoise", "patch_heads"), ("noise", "patch_heads"), ("denoise", "interchange")]
)
def test_normalized_effects_are_ratios_of_means_over_prompts(direction, verb, tmp_path):
    table = with_baselines(direction, *APART, verb)
    assert table.values is not None and table.weights is not None and not table.warnings
    clean, corrupted = map(np.array, APART)
    values, weight = table.values, table.weights[0]
    # An effect is a change of the run that is patched; interchange has the metric of the patched run itself.
    base = {"patch_heads": corrupted if direction == "denoise" else clean, "interchange": np.zeros(6)}[verb]

    low, high = (sum(weight * side) / sum(weight) for side in (corrupted, clean))
    shares = [(sum(weight * (base + row)) / sum(weight) - low) / (high - low) for row in values]
    frame: Any = table.normalized().frame
    assert frame["value"].to_list() == pytest.approx(shares)
    above = values + (clean - corrupted if direction == "noise" else 0) - (corrupted if verb == "interchange" else 0)
    _, low, high = intervals.ratio(above, clean - corrupted, weight)
    assert frame["low"].to_list() == pytest.approx(low) and frame["high"].to_list() == pytest.approx(high)
    table.save(tmp_path)
    loaded = Table.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.normalized().frame, frame)
    assert str(loaded).splitlines()[-1] == (
        "log_prob without an edit: clean -0.23 [-0.418, -0.101], corrupted -2.53 [-3.03, -1.93], clean - corrupted "
        "2.3 [1.85, 2.69]"
    )
    assert table.where(head=1).normalized().frame["value"][0] == frame["value"][1]
    both = Table.concat([table.where(head=0).normalized(), table.where(head=1)])
    for other in (table, both, table - table):
        refused(r"some effects are normalized\(\) and others not", lambda other=other: table.normalized() - other)
    none = table.normalized() - table.normalized()
    assert (frame_of(none - none)["value"] == 0).all() and len(none - table.normalized()) == 2
    table.save(tmp_path, per_prompt=False)
    refused("the per-prompt values were left out", Table.load(tmp_path).normalized)
    (table - table).save(tmp_path)
    assert Table.load(tmp_path).baselines is None, "those of an earlier table go"


def test_an_interval_that_holds_a_guess_says_that_prompts_are_too_few_and_not_that_the_model_guesses():
    """The number that would be needed is that at which the interval of the same values leaves the guess out."""
    for value, low, high, n, said in (
        (1.0, 0.48, 1.0, 5, "but 5 groups are too few .* better than a guess \\(0.5\\): .* about 6 would be needed"),
        (0.6, 0.4, 0.8, 10, "but 10 groups are too few .* about 41 would be needed"),
        (0.5, 0.3, 0.7, 10, "not above a guess \\(0.5\\); with only 10 groups it may still be above$"),
        (0.2, 0.1, 0.3, 10, "no better than a guess \\(0.5\\): the model does not solve these prompts"),
    ):
        row = {"value": value, "low": low, "high": high}
        said_of_row = baselines.unsolved(row, 0.5, n, "groups")
        assert re.match(said, said_of_row) and (("does not solve" in said_of_row) == (high <= 0.5))
    assert not baselines.unsolved({"value": 0.9, "low": 0.6, "high": 1.0}, 0.5, 9, "prompts")
    exact = [intervals.proportion(np.ones((1, n)), np.ones((1, n)))[0].item() for n in (5, 6)]
    assert exact[0] < 0.5 < exact[1]
    above = with_baselines("denoise", [-3.9, -3.5, -4.1, -4.2, -3.8, -4.0], [-4.6, -4.4, -4.5, -4.7, -4.4, -4.5])
    (warning,) = above.warnings
    assert re.search(r"log_prob is -3\S* \[.*\], but 6 prompts are too few", warning) and "solve" not in warning


def test_effects_without_a_meaning_are_noted():
    guessing = with_baselines("denoise", [-4.0, -3.9, -4.1, -4.2, -3.8, -4.0], [-4.1, -3.8, -4.0, -4.3, -3.9, -4.0])
    assert len(guessing.warnings) == 2
    assert re.match(r"on .* log_prob is -4\S* \[.*\], not above a guess \(-4\); with only 6 ", guessing.warnings[0])
    assert re.match(
        r"between clean and corrupted prompts log_prob differs by .*, which may be 0:", guessing.warnings[1]
    )
    swapped: Any = with_baselines("denoise", [-1.1, -0.9, -1.1, -1.2, -0.8, -1.0], [-0.1, -0.2, -0.1, -0.3, -0.2, -0.1])
    (warning,) = swapped.warnings
    rows = swapped.baselines.frame  # without what a guess gets too, as of a choice between two answers
    assert [*baselines.warnings_of(rows[rows["run"] != "chance"])] == [warning]
    assert re.match(r"clean - corrupted is -0\S* \[.*\] in log_prob: .* normalised effect of 100% is a loss;", warning)
    assert [len(re.findall("Note: (on|between) ", said)) for said in (str(guessing), guessing._repr_html_())] == [2, 2]
    normalized: Any = guessing.normalized().frame
    assert normalized[["value", "low", "high"]].isna().all(axis=None)
    (note,) = guessing.normalized().top("log_prob").remarks
    assert note.startswith("Note: no row has a value: effects are not normalised where the interval of clean - corr")


def test_rows_of_some_targets_that_are_all_targets_are_not_shown():
    keys = {"metric": "a", "kind": ["all", "first", "all", "all"], "offset": [None, None, 0, 1]}
    for n, shown in [([6, 6, 6, 6], 1), ([6, 3, 3, 3], 4), ([6, 6, 3, 3], 3)]:
        table = Table(pd.DataFrame(keys).assign(value=0.5, low=0.4, high=0.6, n=n), Provenance("made"))
        note = f"[made, {shown} of 4 rows: the others are about part of the targets, and equal these, about all]"
        assert len(pd.read_html(StringIO(table._repr_html_()))[0]) == shown
        assert (note in str(table)) == (note in table._repr_html_()) == (shown < 4) and len(table.frame) == 4
        assert ("[made, 4 rows]" in str(table)) == (shown == 4) and "Note" not in str(table)
        assert "[made, 1 rows]" in str(table.where(kind="first")), "rows of all are no longer beside them"


def test_what_cannot_be_normalized_is_refused():
    refused("a table of 'made' without the metric on clean and corrupted prompts", table().normalized)
    refused("scores without a sign", with_baselines("denoise", *APART, grad_drop=True).normalized)
    kept = with_baselines("denoise", *APART)
    refused("without the metric on clean", (kept - kept).normalized)


def test_tables_that_do_not_pair():
    made = table()
    with pytest.raises(ValueError, match=r"do not hold the same rows: .*; they differ in layer \(0, 1 and 0\)"):
        _ = made - made.where(layer=0)
    with pytest.raises(ValueError, match="do not hold the same rows"):
        _ = made.where(layer=0) - made
    renamed = Table(made.frame.rename(columns={"metric": "measure"}), made.provenance)
    with pytest.raises(ValueError, match=r"table of 'made' has rows by metric, .* choose a value with \.where\(metr"):
        _ = made - renamed
    with pytest.raises(ValueError, match="tables without a common key: level, layer, head, metric and seed"):
        _ = made - Table(pd.DataFrame({"seed": [0], "value": 1.0, "low": 1.0, "high": 1.0, "n": 1}), made.provenance)


def test_a_difference_leaves_out_keys_that_one_table_lacks():
    """As effects by patching, by site and kind of targets, and their estimates by attribution."""
    estimates, patched = table(), table(seed=1)
    further = patched.frame.assign(positions="all", kind="all", estimated=False)
    kinds = pd.concat([further.assign(kind="first", value=9.0), further], ignore_index=True)
    assert patched.values is not None and patched.weights is not None
    values, weights = (np.tile(numbers, (2, 1)) for numbers in (patched.values, patched.weights))
    of_kinds = Table(kinds, patched.provenance, values, weights)
    pd.testing.assert_frame_equal((estimates - of_kinds).frame, (estimates - patched).frame)
    pd.testing.assert_frame_equal((of_kinds - estimates).frame, (patched - estimates).frame)


@pytest.mark.parametrize("how", ["column", "setting"])
def test_a_difference_of_two_directions_is_refused(how):
    made = table()

    def of(direction: str) -> Table:
        if how == "column":
            return Table(made.frame.assign(direction=direction), made.provenance)
        return Table(made.frame, Provenance("patch_edges", {"direction": direction}))

    message = r"tables of direction 'noise' and of 'denoise': .* select it with \.where\(direction=\.\.\.\)"
    with pytest.raises(ValueError, match=message):
        _ = of("noise") - of("denoise")
    assert frame_of(of("noise") - of("noise"))["value"].eq(0).all()
    if how == "column":
        both = Table(pd.concat([of("noise").frame, of("denoise").frame]), made.provenance)
        with pytest.raises(ValueError, match=r"of direction 'denoise' and 'noise' and of 'noise': "):
            _ = both - of("noise")
        assert len(both.where(direction="noise") - of("noise")) == len(made)


@pytest.mark.parametrize("key", ["kind", "positions"])
def test_a_difference_of_two_questions_is_refused(key):
    """Patches have these as columns, attribution as a setting alone."""
    made = table()

    def estimates(asked: str | None) -> Table:
        return Table(made.frame, Provenance("attribute_heads", {key: asked}))

    def patches(asked: str) -> Table:
        return Table(made.frame.assign(**{key: asked}), made.provenance)

    for other in ("all", None):
        assert len(patches("all") - estimates(other)) == len(estimates(other) - patches("all")) == len(made)
    assert len(patches("END") - estimates("END")) == len(made)
    joined = Table.concat({"a": estimates("END")}, key="name")
    named = Table(joined.frame.assign(**{key: "all"}), joined.provenance)
    for left, right in ((patches("END"), estimates(None)), (patches("all"), estimates("END")), (named, joined)):
        for one, other in ((left, right), (right, left)):
            with pytest.raises(ValueError, match=f"one table is of {key} (END|all), the other of {key} (END|all)"):
                _ = one - other


def of_seeds(values: dict[tuple[str, int], Any]) -> Table:
    """One row for each metric and seed."""
    rows = [{"metric": metric, "seed": seed, "value": value} for (metric, seed), value in values.items()]
    return Table(pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1), Provenance("each"))


def test_over_seeds_numbers_have_t_intervals_of_the_seeds_that_have_one():
    values = {("b", 0): 4.0, ("a", 0): 1.0, ("a", 1): 2.0, ("a", 2): 6.0, ("b", 1): np.nan, ("b", 2): 4.5}
    made = of_seeds(values | {("alone", 1): 3.0, ("none", 1): np.nan})
    means = made.over_seeds()
    assert means.keys == ["metric"] and means.provenance == made.provenance
    found = means.frame.set_index("metric")
    assert found["value"].to_dict() == pytest.approx({"b": 4.25, "a": 3.0, "alone": 3.0, "none": np.nan}, nan_ok=True)
    assert found["n"].to_dict() == {"b": 2, "a": 3, "alone": 1, "none": 0}
    half = stats.t.ppf(0.975, 2) * np.std([1, 2, 6], ddof=1) / 3**0.5
    assert found.loc["a", ["low", "high"]].tolist() == pytest.approx([3 - half, 3 + half])
    assert found.loc[["alone", "none"], ["low", "high"]].isna().all(axis=None)


def test_over_seeds_yes_and_no_have_exact_intervals():
    made = of_seeds({("yes", 0): True, ("yes", 1): False, ("yes", 2): True, ("yes", 3): None, ("alone", 0): True})
    numbers = of_seeds({("all", 0): 1.0, ("all", 1): 1.0})
    found = Table.concat([made, numbers]).over_seeds().frame.set_index("metric")
    exact = stats.binomtest(2, 3).proportion_ci(0.95, "exact")
    assert found.loc["yes"].tolist() == pytest.approx([2 / 3, exact.low, exact.high, 3])
    assert found["value"].tolist() == pytest.approx([2 / 3, 1, 1]) and found["n"].tolist() == [3, 1, 2]
    assert found.loc[["alone", "all"], ["low", "high"]].isna().all(axis=None)


def test_over_seeds_without_other_keys():
    frame = pd.DataFrame({"seed": [3, 4], "value": [1.0, 2.0], "low": np.nan, "high": np.nan, "n": 1})
    assert Table(frame, Provenance("each")).over_seeds().frame[["value", "n"]].to_numpy().tolist() == [[1.5, 2]]


def test_over_seeds_needs_one_row_a_seed():
    made = of_seeds({("a", 0): 1.0, ("b", 0): 2.0})
    for frame, message in (
        (made.frame.drop(columns="seed"), "rows without a seed: give each row one"),
        (made.frame.assign(seed=[0, None]), "rows without a seed: give each row one"),
        (made.frame.assign(metric="a"), "several rows of one seed with equal keys"),
    ):
        refused(message, Table(frame, made.provenance).over_seeds)


def test_save_and_load(tmp_path):
    made = table()
    made.save(tmp_path / "out")
    names = ["provenance.json", "table.csv", "values.safetensors"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    rows = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert rows[0].startswith("level,layer,head,metric,value") and rows[3].startswith("layer,0,,a,")
    loaded = Table.load(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.frame, made.frame, check_exact=True)
    assert loaded.provenance == made.provenance
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["versions"]["torch"]


@pytest.mark.parametrize(
    "names",
    [["None", "NA"], ["1", "2"], ["1.10", "1.1"], ["01", "1"], ["True", "nan"], ["a", None], ["a\rb", "a\r\nb"]],
)
def test_names_stay_texts(tmp_path, names):
    frame = pd.DataFrame({"name": names, "step": [1, 2], "value": [0.1, 0.2], "low": np.nan, "high": np.nan, "n": 1})
    Table(frame, Provenance("made")).save(tmp_path)
    loaded = Table.load(tmp_path)
    assert [None if pd.isna(name) else name for name in loaded.frame["name"]] == names
    assert loaded.frame["step"].tolist() == [1, 2] and loaded.provenance == Provenance("made")


@pytest.mark.parametrize("exact", [True, False])
def test_a_difference_of_loaded_tables_has_the_same_interval(tmp_path, exact):
    """Weights that differ, values that are undefined, and numbers with and without an exact single."""
    generator = np.random.default_rng(0)
    keys: Any = table().frame[["level", "layer", "head", "metric"]]
    made, data = {}, {"task": {"name": "made", "phrase_lens": (1, 2)}, "digest": "d"}
    for name in ("left", "right"):
        values = generator.integers(0, 2, (12, 9)).astype(float) if exact else generator.random((12, 9))
        weights = np.tile(generator.integers(0, 3, 9), (12, 1)) if exact else generator.random((12, 9))
        values[0, weights[0] == weights[0].min()] = np.nan
        weights = np.where(np.isnan(values), 0.0, weights)
        made[name] = Table.from_prompts(keys, values, weights, Provenance("made", data=data))  # pyright: ignore[reportArgumentType]
        made[name].save(tmp_path / name)
    loaded = {name: Table.load(tmp_path / name) for name in made}
    for name, before in made.items():
        assert before.values is not None and loaded[name].values is not None
        np.testing.assert_array_equal(loaded[name].values, before.values)
        np.testing.assert_array_equal(loaded[name].weights, before.weights)
    expected = made["left"] - made["right"]
    pd.testing.assert_frame_equal((loaded["left"] - loaded["right"]).frame, expected.frame, check_exact=True)
    assert frame_of(expected)[["low", "high"]].notna().all(axis=None)
    pd.testing.assert_frame_equal((loaded["left"] - made["right"]).frame, expected.frame, check_exact=True)
    size = (tmp_path / "left" / "values.safetensors").stat().st_size
    numbers = 12 * 9 * (4 + 4 if exact else 8 + 8)
    assert size < numbers + 200, "singles where these are exact"


def test_equal_weights_are_kept_once(tmp_path):
    made = table(np.random.default_rng(0).integers(0, 2, (12, 5)).astype(float))
    made.save(tmp_path)
    assert (tmp_path / "values.safetensors").stat().st_size < (12 + 1) * 5 * 4 + 200
    weights = Table.load(tmp_path).weights
    assert weights is not None and weights.shape == (12, 5) and weights.flags.writeable


def test_per_prompt_values_may_be_left_out(tmp_path):
    made = table()
    made.save(tmp_path)
    made.save(tmp_path, per_prompt=False)
    assert not (tmp_path / "values.safetensors").exists(), "nor are those of an earlier table kept"
    difference = Table.load(tmp_path) - made
    assert frame_of(difference)["value"].abs().max() < 1e-12
    assert frame_of(difference)["low"].isna().all(), "without per-prompt values there is no honest interval"


def test_a_difference_between_other_prompts_has_the_interval_of_independent_ones(tmp_path):
    one, other = (table(data={"digest": digest}, seed=seed) for seed, digest in enumerate("ab"))
    other.save(tmp_path, per_prompt=False)
    sides = [frame_of(made)[["value", "low", "high"]].to_numpy() for made in (one, other)]
    for right in (other, Table.load(tmp_path)):
        difference = frame_of(one - right)
        np.testing.assert_allclose(difference[["low", "high"]].to_numpy().T, intervals.unpaired_difference(*sides))
    for data in ({}, {"task": "b"}, {"digest": "a", "task": "b"}):
        assert frame_of(one - table(data=data))["low"].isna().all(), "they may be the same prompts"
    clean, other_targets, corrupted = (
        table(data={"digest": digest, "task": task})
        for digest, task in (("12345678a", {}), ("12345678b", {}), ("abcdefgh0", {"corrupted": {"kind": "own"}}))
    )
    for related in (other_targets, corrupted):
        assert frame_of(clean - related)["low"].isna().all() and in_common(clean, related)


def test_per_prompt_values_of_other_rows_are_refused(tmp_path):
    made = table()
    made.save(tmp_path)
    made.frame[1:].to_csv(tmp_path / "table.csv", index=False)
    refused(r"the rows differ: 11 in table\.csv, 12 in values\.safetensors; .* delete", Table.load, tmp_path)


def test_a_compressed_table_replaces_one_that_is_not(tmp_path):
    made, plain, compressed = table(), tmp_path / "table.csv", tmp_path / "table.csv.xz"
    made.save(tmp_path)
    text = plain.read_text()
    made.save(tmp_path, compress=True)
    assert not plain.exists() and lzma.decompress(compressed.read_bytes()).decode() == text
    pd.testing.assert_frame_equal(Table.load(tmp_path).frame, made.frame, check_exact=True)
    made.where(layer=0).save(tmp_path)
    assert not compressed.exists() and len(Table.load(tmp_path)) == 6


@pytest.mark.parametrize(
    ("provenance", "frame", "message"),
    [
        ('{"a": 1}', "value,low,high,n\n", "no provenance of a table"),
        ("{", "value,low,high,n\n", "no provenance of a table"),
        ("[" * 10**5, "value,low,high,n\n", "no provenance of a table"),
        ('{"verb": 3}', "value,low,high,n\n", r"provenance\.json': no provenance of a table \(verb is 3\)"),
        ('{"verb": "score", "settings": []}', "value,low,high,n\n", r"provenance\.json': .*settings is \[\]"),
        ('{"verb": "score"}', "", r"table\.csv' is no table"),
        ('{"verb": "score"}', "value,low,high,n\nx,0,1,1\n", r"table\.csv' is no table"),
    ],
)
def test_load_from_files_of_others(tmp_path, provenance, frame, message):
    (tmp_path / "provenance.json").write_text(provenance)
    (tmp_path / "table.csv").write_text(frame)
    refused(message, Table.load, tmp_path)


def test_load_from_a_folder_without_a_table(tmp_path):
    refused(r"no table in .*: table.csv and provenance.json missing", Table.load, tmp_path)


def test_a_table_needs_its_values():
    refused("low, high, n is missing", Table, pd.DataFrame({"layer": [0], "value": [1.0]}), Provenance("made"))


def test_concat_by_name():
    before, after = table(seed=0), table(seed=1)
    both = Table.concat({"before": before, "after": after}, key="model")
    assert both.keys == ["model", "level", "layer", "head", "metric"] and len(both) == 24
    assert both.frame.dtypes.drop("model").equals(before.frame.dtypes)
    for name, part in (("before", before), ("after", after)):
        rows = both.where(model=name)
        pd.testing.assert_frame_equal(rows.frame.drop(columns="model"), part.frame, check_exact=True)
        np.testing.assert_array_equal(rows.values, part.values)
        np.testing.assert_array_equal(rows.weights, part.weights)
    provenance = both.provenance
    made = (provenance.verb, provenance.model, provenance.data, provenance.engine)
    assert made == ("concat", {"name": "m"}, DATA, "fast")
    assert provenance.settings["names"] == ["before", "after"]
    assert [part["settings"] for part in provenance.settings["tables"]] == [{"x": 1}] * 2


def test_concat_of_tables_with_other_keys():
    heads, model = table(), table().where(layer=0, head=0)
    renamed = Table(model.frame.drop(columns=["layer", "head"]).assign(level="model", kind="all"), model.provenance)
    both = Table.concat([heads, renamed])
    assert both.keys == ["level", "layer", "head", "metric", "kind"]
    assert both.frame["kind"].isna().tolist() == [True] * 12 + [False] * 2
    assert str(both.frame["layer"].dtype) == str(both.frame["head"].dtype) == "Int64"
    assert both.frame["layer"].isna().tolist() == [False] * 12 + [True] * 2
    assert str(both.frame["value"].dtype) == "float64"
    assert both.values is None, "one of the two kept none"
    elsewhere = table(data={"digest": "other"}).where(layer=1)
    assert Table.concat([heads.where(layer=0), elsewhere]).values is None, "other prompts"
    assert Table.concat([heads.where(layer=0), elsewhere]).provenance.data == {}


@pytest.mark.parametrize(
    ("tables", "key", "message"),
    [
        ([], None, "no tables to join"),
        ([table(), table()], None, r"two rows of level head, layer 0, head 0, metric a: give the tables by name"),
        ({"a": table()}, None, "tables by name need key="),
        ([table()], "model", "key= needs tables by name"),
        ({"a": table()}, "layer", "key='layer' is a column already"),
    ],
)
def test_concat_refuses(tables, key, message):
    refused(message, Table.concat, tables, key)


def test_to_parquet(tmp_path):
    made = table()
    made.to_parquet(tmp_path / "deep" / "table.parquet")
    again = pd.read_parquet(tmp_path / "deep" / "table.parquet")
    assert again.attrs["provenance"] == json.loads(made.provenance.to_json())
    pd.testing.assert_frame_equal(again, made.frame, check_exact=True)
    assert made.frame.attrs == {}


def test_to_dataset():
    made = table()
    dataset = made.to_dataset()
    assert dataset.column_names == list(made.frame.columns) and len(dataset) == 12
    assert dataset[2]["head"] is None and dataset[2]["level"] == "layer"
    assert dataset["value"][:] == made.frame["value"].tolist()
    assert Provenance.from_json(dataset.info.description) == made.provenance


@pytest.mark.parametrize(("method", "package"), [("to_parquet", "pyarrow"), ("to_dataset", "datasets")])
def test_exports_say_what_to_install(tmp_path, monkeypatch, method, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{method} needs {package}: pip install 'align-circuits\[tables\]'"
    raised(ImportError, message, getattr(table(), method), *[tmp_path / "a"] * (method == "to_parquet"))


def test_shown_in_consoles_and_notebooks():
    made = table()
    with pd.option_context("display.max_columns", 4, "display.width", 40):
        assert "value" not in repr(made.frame), "pandas leaves it out"
        heading, first, *_, last = repr(made).splitlines()
    assert heading.split() == ["level", "layer", "head", "metric", "value", "low", "high", "n"]
    numbers = (f"{made.frame[column][0]:.3f}" for column in ("value", "low", "high"))
    assert first.split()[-4:-1] == list(numbers) and last == "[made, 12 rows]"
    assert str(made) == repr(made)
    odd = Table(made.frame.assign(metric="<b>"), Provenance("<i>"))._repr_html_()
    assert "<table" in odd and "&lt;b&gt;" in odd and "&lt;i&gt;" in odd and "<b>" not in odd and "<i>" not in odd


def test_intervals_of_metrics_end_where_these_do():
    """Those of levels: a log-probability is at most 0 and a divergence at least 0; changes of them have no bounds."""
    keys = pd.DataFrame({"metric": ["log_prob", "kl", "logit"]})
    values, weights = np.array([[-0.1, -0.2, -4], [0.1, 0.2, 4], [-0.1, -0.2, -4]]), np.ones((3, 3))

    def ends(**kinds: Any) -> Any:
        table = Table.from_prompts(keys, values, weights, Provenance("made"), bounded=False, **kinds)
        return table.frame[["low", "high"]].to_numpy()

    free, limited = ends(), ends(levels=True)
    assert free[0, 1] > 0 > free[1, 0]
    np.testing.assert_array_equal(limited, [[free[0, 0], 0], [0, free[1, 1]], free[2]])


def test_a_text_without_letters_and_truth_values_beside_numbers_are_read_as_they_were(tmp_path):
    frame = pd.DataFrame(
        {"variant": ["", "b", "1"], "value": [True, 0.25, False], "low": np.nan, "high": np.nan, "n": 1}
    )
    Table(frame, Provenance("each")).save(tmp_path / "table")
    again = Table.load(tmp_path / "table")
    assert again.frame["variant"].tolist() == ["", "b", "1"] and again.frame["value"].tolist() == [1, 0.25, 0]
    assert again.where(variant="").frame["value"].item() == 1
    both = Table(frame.assign(variant=["", None, "b"], value=0.0), Provenance("each"))
    refused("variant is an empty text in some rows and missing in others", both.save, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_per_prompt_values_come_with_their_weights():
    made = table()
    refused("and weights of shape None: give both, in one shape", Table, made.frame, made.provenance, made.values)


def test_keys_of_a_long_table_keep_their_type_when_loaded(tmp_path):
    """pandas reads a long file in parts, and would take the "1" of some parts for numbers."""
    rows = pd.DataFrame({"run": ["1"] * 150_000 + ["all"] * 10, "row": range(150_010), "value": 0.5})
    Table(rows.assign(low=0.4, high=0.6, n=1), Provenance("made")).save(tmp_path / "long")
    assert len(Table.load(tmp_path / "long").where(run="1")) == 150_000


def test_large_whole_numbers_stay_what_they_are(tmp_path):
    frame: Any = table().frame.assign(seed=pd.array([2**60 + 1, None] * 6, dtype="Int64"))
    Table(frame, Provenance("made")).save(tmp_path)
    pd.testing.assert_frame_equal(Table.load(tmp_path).frame, frame)
    for layer in (1e30, 2**63):
        with pytest.raises(ValueError, match=r"layer up to .*: give whole numbers below 2\*\*63"):
            Table(frame.assign(layer=layer), Provenance("made"))


def test_a_difference_of_truth_values_is_a_number():
    frame: Any = table().frame.assign(value=[True, False] * 6)
    made = Table(frame, Provenance("made"))
    assert (made - made).frame["value"].tolist() == [0.0] * 12


def test_truth_values_beside_numbers_keep_their_interval_when_loaded(tmp_path):
    rows = [{"measure": "emerged", "seed": seed, "value": True} for seed in range(6)]
    rows += [{"measure": "step", "seed": seed, "value": 100.0 + seed} for seed in range(6)]
    made = Table(pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1), Provenance("made"))
    made.save(tmp_path / "mixed")
    loaded = Table.load(tmp_path / "mixed").over_seeds().frame
    pd.testing.assert_frame_equal(loaded, made.over_seeds().frame)
    assert loaded["low"].to_numpy()[0] == pytest.approx(0.025 ** (1 / 6)), "the exact binomial one"


def test_differences_that_share_prompts_have_no_interval():
    """Their errors are not independent: x - y and y - z share those of y."""
    x, y, z, w = (table(seed=seed, data={**DATA, "digest": name * 16}) for seed, name in enumerate("xyzw"))
    assert in_common(x - y, y - z) == "both rest on the same prompts"
    for shared in ((x - y) - (y - z), y - (x - y), ((x - y) - (z - w)) - x):
        assert np.isnan(shared.frame[["low", "high"]].to_numpy()).all()
    assert not np.isnan(((x - y) - (z - w)).frame["low"].to_numpy()).any()


@pytest.mark.parametrize("name", ["table.csv.xz", "table.csv"])
def test_a_damaged_table_is_named(tmp_path, name):
    table().save(tmp_path, compress=name.endswith("xz"))
    whole = (tmp_path / name).read_bytes()
    more = whole.replace(b"\n", b",9\n").replace(b",n,9", b",n")
    cut = [whole[:-20], b"junk"] if name.endswith("xz") else [whole[:-1], whole.rpartition(b",")[0] + b"\n", more]
    damaged = cut if name.endswith("xz") else [b"metric,low\na,1\n", *cut]
    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}' is no table .*give what Table.save wrote"):
            Table.load(tmp_path)


def test_a_saved_table_can_be_read_by_others_as_new_files_can(tmp_path):
    table().save(tmp_path / "kept")
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in [*(tmp_path / "kept").iterdir(), tmp_path / "new"] if path.is_file()}
    assert len(modes) == 1 and (tmp_path / "kept/values.safetensors").exists()


def test_only_a_table_of_heads_has_rows_of_heads():
    made = Table(pd.DataFrame({"metric": ["a"], "value": 0.5, "low": 0.4, "high": 0.6, "n": 1}), Provenance("made"))
    for asked in (made.heads, lambda: made.to_array("a")):
        with pytest.raises(ValueError, match="no heads: this table has the keys metric"):
            asked()
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = made - 3  # pyright: ignore[reportOperatorIssue]
