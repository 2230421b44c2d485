"""Tables: selecting, ranking, pairing, saving."""

import json
import lzma
from typing import Any

import numpy as np
import pandas as pd
import pytest

from align_circuits.tables.tables import Provenance, Table, with_level

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


def test_counts_and_bounds_apart_from_weights():
    keys = pd.DataFrame({"metric": ["share", "nats"]})
    values, weights = np.ones((2, 4)), np.full((2, 4), 0.25)
    made = Table.from_prompts(
        keys, values, weights, Provenance("made"), counts=np.full((2, 4), 3.0), bounded=np.array([True, False])
    )
    assert made.frame["n"].tolist() == [12, 12]
    assert made.frame["low"].tolist() == pytest.approx([0.025 ** (1 / 4), 1.0])


def test_where():
    some = table().where(layer=1, metric=["a"])
    assert some.frame[["level", "layer", "head"]].to_numpy().tolist() == [
        ["head", 1, 0],
        ["head", 1, 1],
        ["layer", 1, pd.NA],
    ]
    assert some.values is not None and some.values.shape == (3, 5)
    np.testing.assert_allclose(some.values.mean(1), some.frame["value"])
    assert len(table().where()) == 12


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer": 99}, "no layer 99 in this table; it has 0, 1"),
        ({"metric": ["a", "c"]}, "no metric 'c' in this table; it has a, b"),
        ({"value": 1}, "no key column 'value'; this table has level, layer, head, metric"),
    ],
)
def test_where_something_is_not(keys, message):
    with pytest.raises(KeyError, match=message):
        table().where(**keys)


def test_missing_keys_are_selected_by_none():
    made = table()
    means = frame_of(made, head=None)
    assert means["layer"].tolist() == [0, 1, 0, 1] and means["head"].isna().all()
    assert len(made.where(head=[None, 1])) == 8 and len(made.where(head=pd.NA)) == 4
    assert str(made.frame["head"].dtype) == "Int64"
    assert str(made.heads().frame["head"].dtype) == "int64", "nothing is missing there"
    with pytest.raises(KeyError, match="no layer None in this table; it has 0, 1"):
        made.where(layer=None)
    with pytest.raises(KeyError, match="no head 7 in this table; it has 0, 1, None"):
        made.where(head=7)


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


def test_grid():
    made = table()
    grid = made.grid("b")
    assert grid.shape == (2, 2)
    for row in frame_of(made.heads(), metric="b").itertuples():
        assert grid[row.layer, row.head] == row.value
    doubled = Table(pd.concat([made.frame.assign(step=step) for step in (0, 1)]), made.provenance)
    with pytest.raises(ValueError, match=r"several rows a head: choose one value of step"):
        doubled.grid("b")


def test_a_difference_is_paired_by_keys_and_prompts():
    left, right = table(seed=0), table(seed=1)
    order = np.random.default_rng(0).permutation(12)
    assert right.values is not None and right.weights is not None and left.values is not None
    shuffled = Table(
        right.frame.iloc[order].reset_index(drop=True), right.provenance, right.values[order], right.weights[order]
    )
    difference = left - shuffled
    np.testing.assert_allclose(difference.frame["value"], (left.values - right.values).mean(1))
    assert frame_of(difference)["low"].le(frame_of(difference)["value"]).all()
    assert difference.provenance.verb == "difference"
    assert frame_of(left - left)[["value", "low", "high"]].eq(0).all(axis=None)


def test_a_difference_of_other_prompts_has_no_interval():
    difference = table() - table(data={"task": {"name": "made"}, "digest": "other"})
    assert frame_of(difference)["value"].notna().all()
    assert frame_of(difference)[["low", "high"]].isna().all(axis=None)


def test_tables_that_do_not_pair():
    made = table()
    with pytest.raises(ValueError, match="do not hold the same rows"):
        _ = made - made.where(layer=0)
    with pytest.raises(ValueError, match="do not hold the same rows"):
        _ = made.where(layer=0) - made
    renamed = Table(made.frame.rename(columns={"metric": "measure"}), made.provenance)
    with pytest.raises(ValueError, match="different key columns"):
        _ = made - renamed


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


def test_save_and_load(tmp_path):
    made = table()
    made.save(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["provenance.json", "table.csv"]
    rows = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert rows[0].startswith("level,layer,head,metric,value") and rows[3].startswith("layer,0,,a,")
    loaded = Table.load(tmp_path / "out")
    pd.testing.assert_frame_equal(loaded.frame, made.frame, check_exact=True)
    assert loaded.provenance == made.provenance
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["versions"]["torch"]
    difference = loaded - made
    assert frame_of(difference)["value"].abs().max() < 1e-12
    assert frame_of(difference)["low"].isna().all(), "without per-prompt values there is no honest interval"


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
        ('{"verb": "score"}', "", r"table\.csv' is no table"),
    ],
)
def test_load_from_files_of_others(tmp_path, provenance, frame, message):
    (tmp_path / "provenance.json").write_text(provenance)
    (tmp_path / "table.csv").write_text(frame)
    with pytest.raises(ValueError, match=message):
        Table.load(tmp_path)


def test_load_from_a_folder_without_a_table(tmp_path):
    with pytest.raises(ValueError, match=r"no table in .*: table.csv and provenance.json missing"):
        Table.load(tmp_path)


def test_a_table_needs_its_values():
    with pytest.raises(ValueError, match="low, high, n is missing"):
        Table(pd.DataFrame({"layer": [0], "value": [1.0]}), Provenance("made"))


def test_shown_in_consoles_and_notebooks():
    made = table()
    assert "[made, 12 rows]" in repr(made)
    assert "<table" in made._repr_html_()
