"""Sequences of exemplars: what is drawn, how often, and that a member draws the same alone and among others."""

from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from refusals import refused

from align_circuits.papers.abrupt.task import KINDS, ExemplarTask, Worlds
from align_circuits.prompts.prompts import Prompts

SMALL = ExemplarTask(n_classes=24, n_labels=6, n_pairs=4, d_content=8, n_positions=12, noise=0.0)


def contents(batch, task):
    return batch.inputs[0, ..., task.n_positions :]


def nearest(vectors, table):
    return torch.cdist(vectors, table).argmin(-1)


@pytest.mark.parametrize("kind", ["train", "icl", "swap"])
@pytest.mark.parametrize("burst", [1, 2, 4])
def test_bursty_sequences_hold_each_class_b_times_and_the_target_among_them(burst, kind):
    task = replace(SMALL, burst=burst)
    batch = Worlds([task], [3]).batch(1, 200, kind)
    items = contents(batch, task)[:, :-1:2]
    for row in range(200):
        labels, counts = batch.context[0, row].unique(return_counts=True)
        assert len(labels) == 4 // burst
        assert (counts == burst).all()
        same = [bool((items[row, pair] == contents(batch, task)[row, -1]).all()) for pair in range(4)]
        assert same == batch.right[0, row].tolist()
        assert sum(same) == burst
        assert (batch.context[0, row][batch.right[0, row]] == batch.label[0, row]).all()


def test_labels_are_written_as_the_world_says_and_swapped_ones_are_the_next():
    worlds = Worlds([SMALL], [0])
    plain, swapped = worlds.batch(5, 300, "train"), worlds.batch(5, 300, "swap")
    known = {}
    for batch, shift in ((plain, 0), (swapped, 1)):
        assert torch.equal(nearest(contents(batch, SMALL)[:, 1::2], worlds._labels[0]), batch.context[0])
        place = nearest(contents(batch, SMALL)[:, -1], worlds._means[0])
        for one, label in zip(place.tolist(), batch.label[0].tolist(), strict=True):
            assert known.setdefault(one, (label - shift) % 6) == (label - shift) % 6
    assert len(known) == 24
    assert sorted(known.values()) == sorted(list(range(6)) * 4)  # each label has as many classes


def test_novel_classes_are_none_of_the_world():
    worlds = Worlds([SMALL], [0])
    batch = worlds.batch(0, 50, "icl")
    assert torch.cdist(contents(batch, SMALL)[:, -1], worlds._means[0]).min() > 0.1
    assert (batch.rank == -1).all()
    assert batch.label[0].bincount(minlength=6).min() > 0


@pytest.mark.parametrize(("zipf", "in_context"), [(0.0, 0.008), (1.0, 0.121)])  # `Kind` names the second
def test_sequences_for_weights_have_independent_classes(zipf, in_context):
    frequency = torch.arange(1, 517.0) ** -zipf
    frequency /= frequency.sum()
    assert (frequency * (1 - (1 - frequency) ** 4)).sum().item() == pytest.approx(in_context, abs=0.001)
    batch = Worlds([replace(SMALL, n_classes=516, zipf=zipf)], [0]).batch(0, 8000, "iwl")
    assert batch.right[0].any(1).float().mean().item() == pytest.approx(in_context, abs=4 * (in_context / 8000) ** 0.5)


def test_the_zipf_exponent_acts_on_targets_of_bursty_sequences():
    task = replace(SMALL, zipf=1.0)
    rank = Worlds([task], [1]).batch(0, 20000).rank[0]
    expected = 1 / np.arange(1, 25)
    np.testing.assert_allclose(rank.bincount(minlength=24).numpy() / 20000, expected / expected.sum(), atol=0.012)


def test_shares_of_bursty_and_context_sequences():
    task = replace(SMALL, p_burst=0.25, p_context=0.6, n_classes=600)
    batch = Worlds([task], [1]).batch(0, 8000)
    novel = batch.rank[0] < 0
    assert novel.float().mean() == pytest.approx(0.6, abs=0.03)
    assert batch.right[0][~novel].any(-1).float().mean() == pytest.approx(0.25, abs=0.04)
    assert batch.right[0][novel].sum(-1).unique().tolist() == [1]


def test_without_burst_no_sequence_is_bursty():
    assert Worlds([replace(SMALL, burst=0, n_classes=600)], [1]).batch(0, 2000).right.float().mean() < 0.01


def test_noise_keeps_the_length_and_lowers_the_likeness():
    likeness = {}
    for noise in (0.5, 2.0):
        task = ExemplarTask(n_classes=64, n_labels=32, d_content=63, noise=noise)
        batch = Worlds([task], [0]).batch(0, 400)
        items, target = contents(batch, task)[:, :-1:2], contents(batch, task)[:, -1:]
        assert target.norm(dim=-1).mean() == pytest.approx(1, abs=0.03)
        likeness[noise] = (items * target).sum(-1)[batch.right[0]].mean().item()
    assert likeness[0.5] == pytest.approx(1 / 1.25, abs=0.05)
    assert likeness[2.0] == pytest.approx(1 / 5, abs=0.05)


def test_the_window_lies_anywhere_and_positions_ascend():
    tokens = Worlds([SMALL], [0]).batch(0, 500).inputs[0, ..., :12]
    at = tokens.argmax(-1)
    assert torch.equal(tokens.sum(-1), torch.ones(500, 9))
    assert (at.diff(dim=1) == 1).all()
    assert at[:, 0].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_draws_the_same_alone_and_among_others(kind):
    tasks = [
        replace(SMALL, **change)
        for change in ({"burst": 2, "zipf": 1.0}, {"n_classes": 48, "p_context": 0.5, "noise": 0.3}, {"p_burst": 0.5})
    ]
    worlds = Worlds(tasks, [4, 4, 9])
    together = worlds.batch(7, 20, kind)
    for member in range(3):
        alone = worlds.member(member).batch(7, 20, kind)
        for name in ("inputs", "label", "context", "right", "rank"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[member]), name
    assert not torch.equal(worlds.batch(8, 20, kind).inputs, together.inputs)


def test_prompts_know_their_gold(tmp_path):
    prompts = replace(SMALL, burst=2).sample(10, seed=2)
    relations = prompts.relations
    for row in range(10):
        correct = relations["correct_label"].keys_of(row)
        assert [position % 2 for position in correct] == [1, 1]
        target = prompts.inputs[row, -1, 12:]
        assert all(torch.equal(prompts.inputs[row, position - 1, 12:], target) for position in correct)
        assert relations["labels"].keys_of(row) == [1, 3, 5, 7]
    assert [relations["item_of_label"].keys_of(row) for row in range(4)] == [[0], [2], [4], [6]]
    prompts.save(tmp_path / "prompts")
    again = Prompts.load(tmp_path / "prompts")
    assert torch.equal(again.inputs, prompts.inputs)
    assert again[3:5].relations["correct_label"].keys_of(0) == relations["correct_label"].keys_of(3)
    assert unescape(prompts._repr_html_()) == repr(prompts)
    with pytest.raises(ValueError, match="these prompts are vectors"):
        _ = prompts.tokens


def test_targets_absent_from_the_context_have_no_correct_position():
    prompts = SMALL.sample(200, kind="iwl")
    assert len(prompts.relations["correct_label"]) == int(prompts.latent["right"].any(1).sum()) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_labels": 1}, "n_labels is 1: give at least 2"),
        ({"p_burst": 1.5}, "p_burst is 1.5: give a share"),
        ({"n_classes": 25}, "give a multiple, so that each label"),
        ({"burst": 3}, "give a multiple of burst"),
        ({"n_pairs": 8}, "and enough labels"),
        ({"n_positions": 8}, "give at least that, or 0"),
    ],
)
def test_bad_tasks_are_refused(change, message):
    refused(message, replace, SMALL, **change)


def test_bad_worlds_and_kinds_are_refused():
    refused("2 tasks, 1 seeds", Worlds, [SMALL, SMALL], [0])
    refused("members of different shapes", Worlds, [SMALL, ExemplarTask()], [0, 1])
    refused("kind='novel': choose one of train, iwl, icl, swap", Worlds([SMALL], [0]).batch, 0, 1, "novel")
    refused("0 prompts", SMALL.sample, 0)
