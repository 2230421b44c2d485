"""Relations beside loops over positions."""

from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align_circuits.prompts import relations as rel
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import IGNORE, Relation

ids = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=3)
"""Prompts of few different tokens and different lengths, so that there are repeats and padding. Token 0 is also the
value of padding, which must never be mistaken for it."""


def by_query(relation: Relation) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Keys and candidates by prompt and query."""
    keys, candidates = relation.expand()
    return {
        (int(relation.prompt[row]), int(relation.query[row])): (
            keys[row].nonzero()[:, 0].tolist(),
            candidates[row].nonzero()[:, 0].tolist(),
        )
        for row in range(len(relation))
    }


def looped(prompts: list[list[int]], is_key) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """The same from the definition; every token but the last of a prompt asks; rows without a key are left out."""
    length = max(map(len, prompts))
    rows = {}
    for number, tokens in enumerate(prompts):
        left = length - len(tokens)
        for query in range(len(tokens) - 1):
            keys = [left + key for key in range(query + 1) if is_key(tokens, query, key)]
            if keys:
                rows[number, left + query] = keys, [left + key for key in range(query + 1)]
    return rows


DEFINITIONS = {
    "previous": lambda _, query, key: key == query - 1,
    "duplicate": lambda tokens, query, key: key < query and tokens[key] == tokens[query],
    "induction": lambda tokens, query, key: key > 0 and tokens[key - 1] == tokens[query] and key - 1 < query,
    "first_token": lambda _, query, key: key == 0 and query > 0,
}


@pytest.mark.parametrize("name", DEFINITIONS)
@given(tokens=ids)
def test_each_relation_is_its_definition(name, tokens):
    prompts = Prompts.from_tokens(tokens, relations={"first_token": rel.first_token})
    assert by_query(prompts.relations[name]) == looped(tokens, DEFINITIONS[name])


@given(tokens=ids, data=st.data())
def test_rows_can_be_expanded_in_any_choice(tokens, data):
    relation = Prompts.from_tokens(tokens).relations["induction"]
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, len(relation) - 1), max_size=5)) if len(relation) else [], dtype=torch.long
    )
    for part, complete in zip(relation.expand(rows), relation.expand(), strict=True):
        assert torch.equal(part, complete[rows])
    for row in rows.tolist():
        assert relation.keys_of(row) == relation.expand()[0][row].nonzero()[:, 0].tolist()


@given(tokens=ids)
def test_keys_are_candidates_and_every_row_has_one(tokens):
    for relation in Prompts.from_tokens(tokens).relations.values():
        keys, candidates = relation.expand()
        assert not (keys & ~candidates).any()
        assert keys.any(1).all()


@given(tokens=ids)
def test_select_keeps_the_rows_asked_for(tokens):
    relation = Prompts.from_tokens(tokens).relations["previous"]
    keep = torch.arange(len(relation)) % 2 == 0
    kept = relation.select(keep)
    assert len(kept) == int(keep.sum())
    assert torch.equal(kept.expand()[0], relation.expand()[0][keep])
    assert torch.equal(kept.target, relation.target[keep])


def labelled(candidate_value: list[int], key_value: list[int]) -> Relation:
    """Two rows of one prompt at positions 4 and 5, with labels 0 and 1 for keys and two sets of candidates."""
    rows = torch.zeros(2, dtype=torch.long)
    return Relation(
        "own",
        target=rows,
        prompt=rows,
        query=torch.tensor([4, 5]),
        key_value=torch.tensor(key_value),
        candidate_value=torch.tensor(candidate_value),
        key_label=torch.tensor([[0, 1, 0, 1, IGNORE, 1]]),
        candidate_label=torch.tensor([[0, 0, 1, 1, IGNORE, 0]]),
    )


def test_labels_by_hand():
    relation = labelled(candidate_value=[0, 1], key_value=[1, 0])
    keys, candidates = relation.expand()
    assert keys.int().tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert candidates.int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]


def test_more_candidates():
    relation = labelled(candidate_value=[0, 0], key_value=[1, 1])
    wide = rel.with_candidates(relation, torch.tensor([[False, False, False, True, True, True]]))
    keys, candidates = wide.expand()
    assert candidates.int().tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 1, 1]]
    assert keys.int().tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1]]
    with pytest.raises(ValueError, match="have 2 sets of candidates"):
        rel.with_candidates(labelled(candidate_value=[0, 1], key_value=[1, 0]), torch.ones(1, 6, dtype=torch.bool))


def test_columns_and_labels_must_agree(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users, who run without shape checks
    row, labels = torch.zeros(2, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    columns: dict[str, Any] = {"target": row, "prompt": row, "query": row, "key_value": row}
    with pytest.raises(ValueError, match=r"relation 'own': its columns have different lengths \[1, 2\]"):
        Relation("own", **columns, candidate_value=row[:1], key_label=labels, candidate_label=labels)
    with pytest.raises(ValueError, match=r"key labels \(1, 3\) and candidate labels \(1, 2\) differ"):
        Relation("own", **columns, candidate_value=row, key_label=labels, candidate_label=labels[:, :2])


def test_to_moves_every_tensor():
    moved = labelled(candidate_value=[0, 0], key_value=[1, 1]).to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert repr(moved) == "Relation('own', rows=2, prompts=1)"
