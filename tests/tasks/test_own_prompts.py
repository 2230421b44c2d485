"""Prompts of one's own as a task: what is drawn, how it is split, and what is refused."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation
from align_circuits.tasks.own_prompts import OwnPrompts, as_task, first_half
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.task import TOKEN_ROLES, Task, sampled


def numbered(n: int, group: list[int] | None = None) -> Prompts:
    prompts = Prompts.from_tokens([[5 + row, 1, 2] for row in range(n)])
    return replace(prompts, group=None if group is None else torch.tensor(group))


groups = st.lists(st.integers(0, 3), min_size=2, max_size=9)


@settings(deadline=None)
@given(groups, st.integers(0, 99), st.data())
def test_samples_keep_groups_side_by_side(group, seed, data):
    prompts = numbered(len(group), group)
    n = data.draw(st.integers(1, len(group)))
    sampled = OwnPrompts(prompts).sample(n, seed=seed)
    drawn = [int(tokens[0]) - 5 for tokens in sampled.tokens]
    assert len(set(drawn)) == n
    blocks = [group[row] for place, row in enumerate(drawn) if place == 0 or group[row] != group[drawn[place - 1]]]
    assert len(blocks) == len(set(blocks)), "a group stands in two places"
    assert drawn == [int(tokens[0]) - 5 for tokens in OwnPrompts(prompts).sample(n, seed=seed).tokens]


@settings(deadline=None, max_examples=30)
@given(groups, st.integers(0, 99))
def test_no_group_is_on_both_sides_of_a_split(group, seed):
    task = OwnPrompts(numbered(len(group), group), numbered(len(group)))
    if len(set(group)) == 1:
        refused("1 group, which cannot be split: give at least two groups", task.split, seed)
        return
    parts = task.split(seed)
    rows = [[int(tokens[0]) - 5 for tokens in part.prompts.tokens] for part in parts]
    assert sorted(rows[0] + rows[1]) == list(range(len(group))) and all(rows)
    assert not {group[row] for row in rows[0]} & {group[row] for row in rows[1]}
    for part in parts:
        assert part.corrupted is not None and torch.equal(part.corrupted.tokens, part.prompts.tokens)
    sizes = sorted(group.count(each) for each in {*group})
    most = len(group) - round(0.8 * len(group))
    assert len(rows[1]) <= max(most, sizes[0]), "of unequal groups most would be held out, or little"
    left = [group.count(each) for each in {*group} if each not in {group[row] for row in rows[1]}]
    assert len(rows[1]) + min(left) > most
    sampled = task.sample(len(group), seed=seed)
    half, drawn = first_half(sampled), [int(tokens[0]) - 5 for tokens in sampled.tokens]
    assert not {group[row] for row in drawn[:half]} & {group[row] for row in drawn[half:]}


def test_groups_that_are_interleaved_are_not_cut():
    """As a task of one's own may return them: then its groups are put side by side."""
    for group in ([*range(39), 0], [3] * 10 + [*range(30)]):
        task = type("Own", (Task,), {"sample": lambda *_, group=group, **__: numbered(40, group)})()
        halved = [sampled(task, 40, None, seed) for seed in range(9)]
        assert all(15 <= first_half(prompts) <= 25 for prompts in halved)
        assert len({str(prompts.group) for prompts in halved}) == 9, "their order is drawn"
    assert (first_half(numbered(6, [0, 1, 0, 1, 2, 3])), first_half(numbered(6))) == (4, 3)
    refused("a task's with related ones side by side", first_half, numbered(4, [0, 1, 1, 0]))
    refused("1 prompt, which cannot be split", first_half, numbered(1))


def test_every_prompt_is_drawn_as_often():
    """Whether it has a large group or none."""
    task = OwnPrompts(numbered(10, [0] * 9 + [1]))
    counts = Counter(int(task.sample(1, seed=seed).tokens[0, 0]) - 5 for seed in range(600))
    assert max(counts.values()) < 100 and len(counts) == 10, counts
    refused("n=11: there are 10 prompts; ask for no more", task.sample, 11)


def test_partners_stay_with_their_prompts():
    clean, corrupted = numbered(6), replace(numbered(6), inputs=numbered(6).inputs + 20)
    task = OwnPrompts(clean, corrupted)
    one, other = task.pairs(task.sample(5, seed=3)[1:4])
    assert torch.equal(one.tokens + 20, other.tokens) and len(one) == 3
    exchanged, partner = OwnPrompts(clean).pairs(OwnPrompts(clean).sample(4))
    assert not torch.equal(exchanged.tokens, partner.tokens) and partner.targets is exchanged.targets
    refused("5 corrupted prompts for 6: give a partner for each", OwnPrompts, clean, corrupted[:5])


def test_two_prompts_of_one_length_are_each_others_partners():
    uneven = OwnPrompts(Prompts.from_tokens([[1, 2], [1, 2, 3]]))
    refused("no two prompts have the same length", uneven.pairs, uneven.sample(2))
    prompts = OwnPrompts(Prompts.from_tokens([[1, 2, 3], [4, 5, 6], [7, 8]])).sample(3)
    clean, corrupted = OwnPrompts(prompts).pairs(prompts)
    assert clean.inputs.tolist() == corrupted.inputs.tolist()[::-1] == [[1, 2, 3], [4, 5, 6]]


def test_roles():
    prompts = replace(numbered(3), positions={"END": torch.tensor([1, 1, 1]), "start": torch.tensor([0, 0, 0])})
    assert OwnPrompts(prompts).roles == TOKEN_ROLES
    prompts = prompts.with_relations(mine=Relation.from_positions("END", "start", prompts=prompts))
    assert OwnPrompts(prompts).roles == {"mine": 'attends from the last token to "start"'}
    unnamed = replace(prompts, positions={"END": prompts.positions["END"]})
    assert OwnPrompts(unnamed).roles == {"mine": "attends from the queries of mine to its keys"}
    assert list(OwnPrompts(prompts, roles=["previous", "mine"]).roles) == ["previous", "mine"]
    assert OwnPrompts(prompts, roles={"mine": "looks"}).split(0)[1].roles == {"mine": "looks"}
    refused("no relation 'other' in these prompts; they have induction", OwnPrompts, prompts, roles=["other"])


def test_a_task_says_its_pairs_and_roles_itself():
    task = RepeatedTokensTask(length=4)
    assert as_task(task) is task
    besides: Any = ({"corrupted": numbered(3)}, {"roles": ["induction"]})
    for beside in besides:
        with pytest.raises(TypeError, match="corrupted= and roles= go with prompts"):
            as_task(task, **beside)
    with pytest.raises(TypeError, match=r"roles='induction': give a list of relations, \['induction'\]"):
        as_task(numbered(3), roles="induction")
