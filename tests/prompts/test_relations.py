"""Relations beside loops over positions."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raised, refused

from align_circuits.checks import WrongArgument
from align_circuits.prompts import relations as rel
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import IGNORE, Relation

ids = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), min_size=1, max_size=3)
"""Prompts of few different tokens and different lengths, so that there are repeats and padding. Token 0 is also the
value of padding, which must never be mistaken for it."""


def rows_of(relation: Relation) -> list[tuple[int, int, list[int], list[int]]]:
    """Prompt, query, keys and candidates of each row."""
    masks = [[row.nonzero()[:, 0].tolist() for row in mask] for mask in relation.expand()]
    return [*zip(relation.prompt.tolist(), relation.query.tolist(), *masks, strict=True)]


def by_query(relation: Relation) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Keys and candidates by prompt and query."""
    return {(prompt, query): (keys, candidates) for prompt, query, keys, candidates in rows_of(relation)}


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


@pytest.mark.parametrize("unit", [2**20, 2**27])
def test_tokens_of_large_ids_repeat_where_they_are_equal(unit):
    """At 2^27 the largest id and its position do not fit into 32 bits together."""
    tokens = [[unit, 0, 2 * unit, 1, unit, 1, 0], [0, 8 * unit, 0]]
    prompts = Prompts.from_tokens(tokens)
    for name in ("duplicate", "induction"):
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


@pytest.mark.usefixtures("unchecked_shapes")
def test_columns_and_labels_must_agree():
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


@settings(deadline=None)
@given(data=st.data())
def test_relations_of_pairs_equal_a_loop_or_are_refused(data):
    """Whatever is made has exactly the keys and candidates that were given; what is refused overlaps."""
    prompts = Prompts.from_tokens(data.draw(ids))
    pairs, candidates = [], []
    for prompt in data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=4)):
        columns = prompts.mask[prompt].nonzero()[:, 0].tolist()
        query = data.draw(st.sampled_from(columns))
        seen = st.sampled_from([column for column in columns if column <= query])
        keys = data.draw(st.lists(seen, min_size=1, max_size=3))
        pairs.append((prompt, query, keys))
        candidates.append([*keys, *data.draw(st.lists(st.sampled_from(columns), max_size=3))])
    named = data.draw(st.booleans())
    expected = sorted(
        (
            prompt,
            query,
            sorted({*keys}),
            [at for at in range(query + 1) if (at in among if named else bool(prompts.mask[prompt, at]))],
        )
        for (prompt, query, keys), among in zip(pairs, candidates, strict=True)
    )
    try:
        relation = Relation.from_pairs(pairs, prompts=prompts, candidates=candidates if named else None)
    except ValueError as error:
        assert "make two relations of them" in str(error)
        assert not alone(expected)
        return
    assert relation.exchangeable == named
    assert sorted(rows_of(relation)) == expected
    for row, target in enumerate(relation.target.tolist()):
        chosen: Any = prompts.targets.loc[target]
        of_prompt: Any = prompts.targets[prompts.targets["prompt"] == int(relation.prompt[row])]
        assert chosen["prompt"] == int(relation.prompt[row])
        at_query = (of_prompt["query_pos"] == int(relation.query[row])).any()
        assert target == of_prompt.index[0] if not at_query else chosen["query_pos"] == int(relation.query[row])


def alone(rows: list[tuple]) -> bool:
    """Whether no two rows of one prompt share a key or a candidate without being alike."""
    for place, (prompt, query, *sets) in enumerate(rows):
        for other_prompt, other_query, *others in rows[:place]:
            if prompt != other_prompt:
                continue
            for one, other in zip(sets, others, strict=True):
                visible = min(query, other_query)
                seen = [{at for at in part if at <= visible} for part in (one, other)]
                if {*one} & {*other} and seen[0] != seen[1]:
                    return False
    return True


def test_later_queries_may_see_more_of_the_same_keys():
    prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
    relation = Relation.from_pairs([(0, 4, [0, 3]), (0, 2, [0])], prompts=prompts)
    assert by_query(relation) == {(0, 2): ([0], [0, 1, 2]), (0, 4): ([0, 3], [0, 1, 2, 3, 4])}
    with pytest.raises(ValueError, match=r"prompt 0: the keys or candidates of query 2 overlap with those of another"):
        Relation.from_pairs([(0, 2, [0]), (0, 3, [0, 1])], prompts=prompts)


def test_relations_of_named_positions(char_tokenizer):
    positions: Any = {"one": [0, 1], "two": [1, 2]}
    prompts = Prompts.from_texts(["ab:", "xcd:"], char_tokenizer, answer=["a", "c"], positions=positions)
    relation = Relation.from_positions("END", "one", prompts=prompts, name="mine", candidates=["one", "two"])
    keys, among = relation.expand()
    for row in range(2):
        assert keys[row].nonzero()[:, 0].tolist() == [int(prompts.positions["one"][row])]
        assert among[row].nonzero()[:, 0].tolist() == [int(prompts.positions[name][row]) for name in ("one", "two")]
    assert relation.exchangeable and relation.name == "mine" and relation.target.tolist() == [0, 1]
    everywhere = Relation.from_positions("END", "one", "two", prompts=prompts)
    assert not everywhere.exchangeable and [len(everywhere.keys_of(row)) for row in range(2)] == [2, 2]
    by_name = Relation.from_pairs([(1, "END", ["two"])], prompts=prompts)
    assert by_name.prompt.tolist() == [1] and by_name.keys_of(0) == [int(prompts.positions["two"][1])]
    raised(KeyError, "no position 'three'", Relation.from_positions, "END", "three", prompts=prompts)


@pytest.mark.parametrize(
    ("pairs", "candidates", "message"),
    [
        ([], None, "no pairs; give"),
        ([(2, 3, [1])], None, "prompt 2: there are 2 prompts, counted from 0"),
        ([(-1, 3, [1])], None, "prompt -1: there are 2 prompts"),
        ([(0, 3, [])], None, r"keys=\[\]; give a list of positions, at least one"),
        ([(0, 3, 1)], None, "keys=1; give a list of positions"),
        ([(0, 3, "END")], None, "keys='END'; give a list of positions"),
        ([(0, 2, [3])], None, "key 3 lies behind its query 2"),
        ([(1, 3, [0])], None, "prompt 1: no token at column 0"),
        ([(0, 4, [0])], None, "no token at column 4"),
        ([(0, 3, [3, 0])], [1, 2], "key 0 is not among the candidates"),
        ([(0, 3, [0])], [], "0 sets of candidates for 1 rows"),
        ([(0, 3, [0])], [[0], [1]], "2 sets of candidates for 1 rows"),
        ([(0, 3, [0]), (1, 3, [1])], [[0], None], "candidates for some rows only"),
    ],
)
def test_relations_that_cannot_be_made(pairs, candidates, message):
    prompts = Prompts.from_tokens([[5, 7, 9, 5], [5, 7, 9]])
    refused(f"^relation 'own'.*{message}", Relation.from_pairs, pairs, prompts=prompts, candidates=candidates)


def test_a_row_has_a_target():
    prompts = Prompts.from_tokens([[5, 7, 9, 5], [5, 7, 9]])
    first = prompts.select_targets(lambda targets: targets["prompt"] == 0)
    with pytest.raises(ValueError, match=r"prompt 1: the prompt has no target; leave it out with prompts\[\.\.\.\]"):
        Relation.from_pairs([(1, 2, [1])], prompts=first)


def test_positions_of_pairs_are_whole_numbers():
    prompts = Prompts.from_tokens([[5, 7, 9, 5, 7]])
    with pytest.raises(WrongArgument, match=r"relation 'own', prompt 0: column is 3\.0: give a whole number"):
        Relation.from_pairs([(0, 3.0, [0])], prompts=prompts)  # pyright: ignore[reportArgumentType]
    zero, three = (cast(Any, np.int64(number)) for number in (0, 3))  # as from an array or a table
    assert Relation.from_pairs([(zero, three, [0])], prompts=prompts, candidates=[zero, 1]).keys_of(0) == [0]
