"""Prompts of one's own tokens, and what indexing, saving and hashing keep."""

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import raised, refused
from safetensors import safe_open
from safetensors.torch import save_file

import align_circuits as ac
from align_circuits.checks import WrongArgument
from align_circuits.prompts.prompts import KINDS, TARGET_COLUMNS, Prompts, TokenKind, text_of, vocabulary_hash
from align_circuits.prompts.relations import IGNORE, Relation
from align_circuits.prompts.token_html import GROUP_COLOURS, Mark, draw_tokens

IDS = [[5, 7, 9, 5, 7], [3, 3, 8], [4, 6, 4, 6]]
ids = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=6), min_size=1, max_size=4)


def with_everything(tokens: list[list[int]]) -> Prompts:
    """Prompts that fill every field, so that an operation that forgets one is noticed."""
    prompts = Prompts.from_tokens(tokens)
    n = len(prompts.targets)
    generator, start = torch.Generator().manual_seed(0), prompts.mask.int().argmax(1)
    targets = prompts.targets.assign(
        kind=[KINDS[row % 2] for row in range(n)], chance=np.linspace(0, 1, n), phrase=range(n)
    )
    return replace(
        prompts,
        targets=targets,
        answer_tokens=torch.tensor([3, 4, 5]),
        correct=torch.rand(n, 3, generator=generator) < 0.5,
        own_correct=torch.rand(n, 3, generator=generator) < 0.5,
        positions={"END": torch.full_like(start, prompts.mask.shape[1] - 1), "start": start},
        group=torch.arange(len(prompts)) // 2,
        relations={
            name: replace(relation, exchangeable=name == "previous") for name, relation in prompts.relations.items()
        },
        token_strings={3: "a", 4: "\n"},
        tokenizer_hash="abc",
        task={"name": "made", "sizes": [1, 2]},
        latent={"drawn": torch.arange(2 * len(prompts)).view(-1, 2)},
    )


def same(left: Prompts, right: Prompts) -> None:
    for name in ("inputs", "mask", "token_kinds", "example", "answer_tokens", "correct", "own_correct", "group"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    pd.testing.assert_frame_equal(left.targets, right.targets, check_dtype=False)
    assert left.relations.keys() == right.relations.keys()
    for name, relation in left.relations.items():
        for part, value in vars(relation).items():
            other = getattr(right.relations[name], part)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (name, part)
    for name in ("token_strings", "tokenizer_hash", "task"):
        assert getattr(left, name) == getattr(right, name), name
    for part in ("latent", "positions"):
        one, other = ({k: v.tolist() for k, v in getattr(prompts, part).items()} for prompts in (left, right))
        assert one == other, part


def content(prompts: Prompts, index: int) -> list[Any]:
    """All that is known about one prompt, in positions counted from its first token."""
    start = int(prompts.mask[index].int().argmax())
    rows: Any = prompts.targets[prompts.targets["prompt"] == index]
    assert prompts.correct is not None and prompts.own_correct is not None and prompts.group is not None
    known: list = [prompts.tokens[index][prompts.mask[index]].tolist(), prompts.latent["drawn"][index].tolist()]
    known += [int(prompts.group[index]), {name: int(at[index]) - start for name, at in prompts.positions.items()}]
    for row in rows.itertuples():
        known += [row.query_pos - start, row.target_pos - start, row.token, row.phrase, row.kind, row.chance]
        known += [correct[row.Index].tolist() for correct in (prompts.correct, prompts.own_correct)]
    for name, relation in sorted(prompts.relations.items()):
        for row in (relation.prompt == index).nonzero()[:, 0].tolist():
            target, query = int(relation.target[row]), int(relation.query[row])
            keys = [key - start for key in relation.keys_of(row)]
            known.append((name, prompts.targets["phrase"][target], query - start, keys))
    return known


@given(ids)
def test_every_token_but_the_first_is_a_target(tokens):
    prompts = Prompts.from_tokens(tokens)
    assert tuple(prompts.targets.columns[: len(TARGET_COLUMNS)]) == TARGET_COLUMNS
    assert prompts.inputs.shape == (len(tokens), max(map(len, tokens)))
    for index, row in enumerate(tokens):
        rows = prompts.targets[prompts.targets["prompt"] == index]
        assert rows["token"].tolist() == row[1:]
        assert prompts.tokens[index, rows["target_pos"].tolist()].tolist() == row[1:]
        assert prompts.tokens[index, rows["query_pos"].tolist()].tolist() == row[:-1]
        assert prompts.tokens[index][prompts.mask[index]].tolist() == row
        assert prompts.mask[index, -1], "padding stands on the left"
        assert set(prompts.token_kinds[index][prompts.mask[index]].tolist()) == {TokenKind.TEXT}
        assert set(prompts.token_kinds[index][~prompts.mask[index]].tolist()) <= {TokenKind.PAD}
        assert rows["offset"].tolist() == [*range(len(row) - 1)], "all of one phrase"
        assert set(prompts.example[index][prompts.mask[index]].tolist()) == {0}
        assert set(prompts.example[index][~prompts.mask[index]].tolist()) <= {IGNORE}
    assert set(prompts.targets["phrase"]) == {0} and set(prompts.targets["kind"]) == {"later"}
    assert prompts.task == {"name": "tokens"} and prompts.correct is prompts.group is None


@settings(deadline=None)
@given(ids, st.data())
def test_indexing_keeps_the_content_of_each_prompt(tokens, data):
    prompts = with_everything(tokens)
    order = data.draw(st.permutations(range(len(prompts))))[: data.draw(st.integers(0, len(prompts)))]
    chosen = prompts[list(order)]
    assert len(chosen) == len(order)
    assert chosen.targets["prompt"].is_monotonic_increasing
    for new, old in enumerate(order):
        assert content(chosen, new) == content(prompts, old)


def test_every_way_to_index():
    prompts = with_everything(IDS)
    same(prompts[1], prompts[[1]])
    same(prompts[-1], prompts[2:])
    same(prompts[-3], prompts[0])
    same(prompts[[-1, 0]], prompts[[2, 0]])
    same(prompts[::-1], prompts[[2, 1, 0]])
    same(prompts[torch.tensor([True, False, True])], prompts[[0, 2]])
    assert len(prompts[[]]) == len(prompts[3:]) == 0
    assert [len(part) for part in prompts.batches(2)] == [2, 1]
    same(list(prompts.batches(2))[1], prompts[2])
    assert [len(prompt) for prompt in prompts] == [1, 1, 1], "iteration ends"


MISSING = [(3, 3), (-4, -4), ([0, 3, 5], 3), (torch.tensor([-4, 7]), -4), ([2, 5, 1, -9], 5)]
SHAPES = [((2,), "2 entries"), ((4,), "4"), ((3, 1), "3 x 1"), ((3, 5), "3 x 5"), ((), "no")]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        *((index, f"^no prompt {first}: there are 3, counted from 0") for index, first in MISSING),
        *((torch.ones(shape, dtype=torch.bool), f"^a mask of {said}.* for 3 prompts") for shape, said in SHAPES),
    ],
)
def test_prompts_that_do_not_exist(index, message):
    with pytest.raises(IndexError, match=message):
        with_everything(IDS)[index]


def test_a_column_may_be_written_to():
    prompts = with_everything(IDS)
    prompts.column("token")[:] = 0
    assert prompts.targets["token"].tolist() == [7, 9, 5, 7, 3, 8, 6, 4, 6]


def test_the_same_prompt_twice():
    with pytest.raises(ValueError, match="the same prompt twice"):
        with_everything(IDS)[[0, -3]]


def test_roles_keep_the_numbers_that_files_hold():
    names = ["PAD", "BOS", "INPUT", "OUTPUT", "COLON", "SEPARATOR", "MARKER", "ALIGNED", "TEXT", "RELATION"]
    assert {name: kind.value for name, kind in TokenKind.__members__.items()} == {
        name: n for n, name in enumerate(names)
    }


@pytest.mark.parametrize("chosen", [slice(None), slice(1, 2), slice(0, 0)])
def test_save_and_load(tmp_path, chosen):
    prompts = with_everything(IDS)[chosen]
    prompts.save(tmp_path / "deep" / "prompts.safetensors")
    loaded = Prompts.load(tmp_path / "deep" / "prompts.safetensors")
    same(prompts, loaded)
    assert loaded.digest == prompts.digest
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["prompts.safetensors"]


def test_load_what_is_not_there_or_no_prompts(tmp_path):
    refused(r"no file .*missing", Prompts.load, tmp_path / "missing")
    (tmp_path / "noise").write_bytes(b"not safetensors")
    refused("noise' holds no prompts", Prompts.load, tmp_path / "noise")
    for header in (None, {"prompts": "{}"}, {"prompts": "null"}, {"prompts": "{"}):
        save_file({"a": torch.zeros(1)}, tmp_path / "weights", header)
        refused("weights' holds no prompts", Prompts.load, tmp_path / "weights")


def test_a_target_without_a_kind_gets_no_other_one_from_a_file(tmp_path):
    prompts = with_everything(IDS)
    unnamed = replace(prompts, targets=prompts.targets.assign(kind=[None, *prompts.targets["kind"][1:]]))
    refused("kind'] is missing in some rows", unnamed.save, tmp_path / "prompts")
    prompts.save(tmp_path / "prompts")
    with safe_open(tmp_path / "prompts", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        header = file.metadata()
    for code in (-1, 99):
        save_file(
            {**tensors, "targets.kind": torch.full_like(tensors["targets.kind"], code)}, tmp_path / "edited", header
        )
        refused(r"edited' holds no prompts \(targets of no kind\)", Prompts.load, tmp_path / "edited")


def test_digest_tells_prompts_apart():
    prompts = with_everything(IDS)
    assert prompts.digest == with_everything(IDS).digest
    other = [list(row) for row in IDS]
    other[1][0] = 2
    digests = [prompts.digest, with_everything(other).digest, prompts[[1, 0, 2]].digest, prompts[:2].digest]
    assert len({*digests, replace(prompts, targets=prompts.targets.assign(query_pos=0)).digest}) == 5
    assert {len(digest) for digest in digests} == {16}


def test_text_and_fingerprint_come_from_the_tokenizer(char_tokenizer, byte_bpe_tokenizer):
    tokens = char_tokenizer("A B = c d", add_special_tokens=False)["input_ids"]
    prompts = Prompts.from_tokens([tokens, tokens[:2]], tokenizer=char_tokenizer)
    assert prompts.text[1] == "".join(prompts.token_text[0][:2])
    assert "".join(prompts.token_text[0]).replace(" ", "") == "AB=cd"
    assert prompts.tokenizer_hash == vocabulary_hash(char_tokenizer) != vocabulary_hash(byte_bpe_tokenizer)
    spaces = SimpleNamespace(
        decode=lambda _, *, clean_up_tokenization_spaces=True: " ."[clean_up_tokenization_spaces:],
        convert_ids_to_tokens=lambda _: " .",
    )
    assert text_of(spaces, torch.tensor([5])) == {5: " ."}, "with its space"
    by_id = vocabulary_hash(SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 0}))
    assert by_id == hashlib.sha256(b"0\tb\n1\ta\n").hexdigest()[:16], "which files hold"
    assert Prompts.from_tokens(IDS).text[1] == "<3><3><8>"


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least two tokens"),
        ([[1, 2], [3]], "at least two tokens"),
        ([[1, -1]], "a token id is negative"),
        ([1, 2, 3], r"ids\[0\] is 1, not a list \(an int\)"),
        ([[1.7, 2.2]], r"ids\[0\] is a list of 2 \(1.7, ...\), not a list \(an int\)"),
        ([torch.tensor([1.7, 2.2])], r"give a list of token ids for each prompt, \[\[5, 7, 9\]\]"),
        (["12", "34"], r"ids\[0\] is the text '12', not a list \(an int\)"),
    ],
)
def test_bad_tokens(tokens, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Prompts.from_tokens(tokens)


def test_a_relation_of_ones_own_has_keys_in_every_row():
    """A row without keys would count as a miss."""

    def the_three(ids, mask, **rows):
        pos = torch.arange(ids.shape[1]).expand_as(ids)
        among = torch.zeros_like(rows["query"])
        keys = torch.where(ids == 3, 0, IGNORE)
        labels: Any = {"key_label": keys, "candidate_label": pos * 0}
        mask[:], ids[:] = False, 0  # which must not reach the prompts
        return Relation("three", **rows, key_value=among, candidate_value=among, **labels)

    with pytest.raises(ValueError, match=r"relation 'three': \d+ of \d+ rows have no key, .* relation\.select"):
        Prompts.from_tokens([[5, 3, 6, 7]], relations={"three": the_three})
    kept = Prompts.from_tokens([[3, 5, 6, 7]], relations={"three": the_three})
    assert len(kept.relations["three"]) == 3
    assert kept.tokens.tolist() == [[3, 5, 6, 7]] and kept.mask.all()


@pytest.mark.usefixtures("unchecked_shapes")
def test_fields_must_agree():
    prompts = with_everything(IDS)
    refused(
        r"token_kinds has shape \(3, 4\), but the inputs are \(3, 5\)",
        replace,
        prompts,
        token_kinds=prompts.token_kinds[:, 1:],
    )
    for name, part in {"group": [0], "mask": None, "positions": {"END": [1]}}.items():
        raised(TypeError, rf"{name}.* is a (list|NoneType): give a tensor", replace, prompts, **{name: part})
    refused("'note'.* holds no numbers", replace(prompts, targets=prompts.targets.assign(note="a text")).save, "never")
    refused("the targets lack offset, kind", replace, prompts, targets=prompts.targets.drop(columns=["offset", "kind"]))
    refused("the targets lack prompt", replace, prompts, targets=dict(prompts.targets))
    with pytest.raises(ValueError, match=r"correct has shape \(9, 2\); it needs a row for each of the 9 targets"):
        replace(prompts, answer_tokens=prompts.answer_tokens, correct=torch.ones(9, 2, dtype=torch.bool))

    with pytest.raises(ValueError, match=r"positions\['END'\] has 2 entries for 3 prompts"):
        replace(prompts, positions={"END": torch.tensor([0, 1])})
    padded = Prompts.from_tokens([[5, 3, 6], [7, 4]])
    for column in (0, -1, 3):  # padding of the second prompt, and none of its columns
        message = rf"positions\['END'\] of prompt 1 is {column}, which holds no token: .* begin with padding"
        refused(message, replace, padded, positions={"END": torch.tensor([1, column])})
    refused("group has 4 entries for 3 prompts", replace, prompts, group=torch.arange(4))
    refused(r"own_correct has shape \(2, 3\)", replace, prompts, own_correct=torch.ones(2, 3, dtype=torch.bool))


def test_files_of_earlier_versions_have_no_exchangeable_relations(tmp_path):

    with_everything(IDS).save(tmp_path / "new")
    with safe_open(tmp_path / "new", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        header = json.loads(file.metadata()["prompts"])
    header["relations"] = {name: flags[:2] for name, flags in header["relations"].items()}
    save_file(tensors, tmp_path / "old", {"prompts": json.dumps(header)})
    assert not any(relation.exchangeable for relation in Prompts.load(tmp_path / "old").relations.values())


@settings(deadline=None)
@given(ids, st.data())
def test_select_targets_equals_a_loop(tokens, data):
    """Every row of a relation keeps its target, and leaves with it."""
    prompts = with_everything(tokens)
    n = len(prompts.targets)
    keep = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    chosen = prompts.select_targets(keep)
    rows = [row for row in range(n) if keep[row]]
    assert chosen.targets["phrase"].tolist() == rows, "phrase numbers the targets of with_everything"
    assert chosen.targets.index.tolist() == list(range(len(rows)))
    for name in ("correct", "own_correct"):
        assert torch.equal(getattr(chosen, name), getattr(prompts, name)[rows])
    for name, relation in prompts.relations.items():
        kept = [row for row in range(len(relation)) if keep[int(relation.target[row])]]
        other = chosen.relations[name]
        assert [other.keys_of(row) for row in range(len(other))] == [relation.keys_of(row) for row in kept]
        assert [rows[target] for target in other.target.tolist()] == relation.target[kept].tolist()
        assert other.query.tolist() == relation.query[kept].tolist()
    assert len(chosen) == len(prompts) and torch.equal(chosen.inputs, prompts.inputs)


def test_every_way_to_select_targets():
    prompts = with_everything(IDS)
    kinds = prompts.targets["kind"]
    same(prompts.select_targets("first"), prompts.select_targets((kinds == "first").tolist()))
    same(prompts.select_targets("later"), prompts.select_targets(torch.tensor((kinds == "later").tolist())))
    sevens = prompts.select_targets(lambda targets: targets.pop("token") == 7)  # its own copy of the table
    assert sevens.targets["token"].tolist() == [7, 7]
    at_start = prompts.select_targets("start").targets
    assert at_start["query_pos"].tolist() == prompts.positions["start"].tolist()
    shadowed = replace(prompts, positions={"first": prompts.positions["start"]})
    assert shadowed.select_targets("first").targets["token"].tolist() == at_start["token"].tolist()


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        ([True], ValueError, r"keep has shape \(1,\) and type bool: give a boolean for each of the 9 targets"),
        ([True] * 10, ValueError, r"keep has shape \(10,\) and type bool: give a boolean for each of the 9 targets"),
        (lambda targets: targets["token"], ValueError, r"keep has shape \(9,\) and type int64: give a boolean"),
        ([1] * 9, TypeError, r"keep\[0\] is 1, not True or False"),
        ([False] * 9, ValueError, "no target is left"),
        ("END", ValueError, "no target is left"),
        ("middle", KeyError, "no position 'middle' in these prompts: they have 'END', 'start'"),
    ],
)
def test_targets_that_cannot_be_selected(keep, error, message):
    with pytest.raises(error, match=message):
        with_everything(IDS).select_targets(keep)


def test_masks_of_named_positions():
    prompts = with_everything(IDS)
    assert prompts.mask_of("END").nonzero().tolist() == [[0, 4], [1, 4], [2, 4]]
    assert prompts.mask_of(["END", "start"]).sum(1).tolist() == [2, 2, 2]
    named = prompts.with_token_kinds(start=TokenKind.INPUT)
    assert torch.equal(named.token_kinds == TokenKind.INPUT, prompts.mask_of("start"))
    assert prompts.mask_of("start").nonzero().tolist() == [[0, 0], [1, 2], [2, 1]], "behind the padding"
    assert torch.equal(prompts[[2, 1]].columns_of("start"), torch.tensor([1, 2]))
    raised(KeyError, "no position 'S2' in these prompts: they have none", Prompts.from_tokens(IDS).mask_of, "S2")


def test_relations_are_added_by_name():
    prompts = with_everything(IDS)
    own = Relation.from_positions("END", "start", prompts=prompts)
    more = prompts.with_relations(mine=own)
    assert more.relations["mine"].name == "mine" and "induction" in more.relations and "mine" not in prompts.relations
    assert len(more.with_relations(mine=own.select(own.prompt == 1)).relations["mine"]) == 1, "replaced"
    assert own.target.max() == 6
    for others in (prompts[:2], *(prompts.select_targets([True] * kept + [False] * (9 - kept)) for kept in (1, 6))):
        refused(r"relation 'mine' is for \(3, 5\) tokens and these prompts have", others.with_relations, mine=own)
    message = r"relation 'mine' was made for other prompts: \d of its 3 rows have a query or keys in the padding"
    refused(message, prompts[[2, 1, 0]].with_relations, mine=own)
    with pytest.raises(ValueError, match="relation 'mine': 3 of 3 rows have no key"):
        prompts.with_relations(mine=replace(own, key_value=own.key_value + 5))


def test_a_relation_of_your_own_has_no_name_that_stands_for_other_keys():
    """Tests of these go by their name: under `previous` the p-value would be that of the token before."""
    prompts = Prompts.from_tokens([[3, 4, 3, 5, 3, 4], [6, 7, 6, 8, 6, 7]])
    for name, key, copies in [("previous", 4, [4]), ("induction", 1, [1, 3]), ("duplicate", 2, [2, 0])]:
        query = {"previous": 5, "induction": 4, "duplicate": 4}[name]
        right = Relation.from_pairs([(prompt, query, [key]) for prompt in (0, 1)], prompts=prompts)
        assert set(prompts.with_relations(**{name: right}).relations[name].keys_of(0)) <= {*copies}, "some are enough"
        pairs = [(0, query, [key]), (1, query, [query])]
        wrong = Relation.from_pairs(pairs, prompts=prompts)
        message = f"relation {name!r}: 1 of 2 rows have keys that are not those of {name!r} in all other prompts"
        refused(message, prompts.with_relations, **{name: wrong})
        ids = prompts.inputs.tolist()
        made = partial(Relation.from_pairs, pairs, prompts=prompts)
        refused(message, Prompts.from_tokens, ids, relations={name: lambda *_, made=made, **__: made()})


def test_relations_of_targets_that_are_not_there_are_refused():
    prompts = Prompts.from_tokens(IDS)
    last = prompts.select_targets([False] * (len(prompts.targets) - 1) + [True])
    message = f"has rows of targets up to {len(prompts.targets) - 1}, but there are 1: take targets and relations of"
    refused(message, replace, prompts, targets=last.targets)
    for size in (0, -1):
        refused(f"batches of {size} prompts: give at least 1", lambda size=size: next(prompts.batches(size)))


def test_any_relation_is_drawn():
    prompts = with_everything(IDS)
    prompts = prompts.with_relations(mine=Relation.from_positions("END", "start", prompts=prompts))
    drawn = {name: prompts.to_html(0, relation=name) for name in (None, "mine", "previous")}
    assert prompts.to_html() == drawn[None] != prompts.to_html(1)
    assert drawn[None] == drawn["mine"] != drawn["previous"], "by default the relation that was added"
    assert with_everything(IDS).to_html(0) not in drawn.values()
    both = prompts.with_relations(last=replace(prompts.relations["previous"], name="last"))
    assert both.to_html(0) == drawn["previous"], "the one that was added last"
    with pytest.raises(KeyError, match="no relation 'other' in these prompts; they have induction, previous"):
        prompts.to_html(0, relation="other")


def test_tokens_that_differ_from_other_prompts_are_underlined():
    prompts, other = Prompts.from_tokens([[3, 4, 5]] * 2), Prompts.from_tokens([[3, 4, 5], [3, 9, 5]])
    prompts = prompts.with_relations(mine=Relation.from_pairs([(1, 2, [1])], prompts=prompts))
    for drawn, expected in [(prompts, ["&lt;4&gt;"]), (other, ["&lt;9&gt;"])]:
        page = drawn.to_html(1, beside=other if drawn is prompts else prompts)
        assert re.findall(r"text-decoration:underline[^>]*>(?:<span[^>]*>)?([^<]*)", page) == expected
    assert "underline" not in prompts.to_html(0, beside=other) + prompts.to_html(1)
    refused(
        "prompts of shape 2 x 2 beside 2 x 3: give partners of equally many tokens",
        partial(prompts.to_html, beside=Prompts.from_tokens([[3, 4]] * 2)),
    )


def test_the_alignment_is_drawn_beside_a_loop(char_tokenizer, monkeypatch):
    """Each phrase to predict, its earlier translations and its input symbol share a number; the first and last are
    framed."""
    drawn: list[list[list[Mark]]] = []
    monkeypatch.setattr("align_circuits.prompts.prompts.draw_tokens", lambda lines: str(drawn.append(lines)))
    task = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=3)
    prompts = task.sample(2, char_tokenizer, seed=0)
    group, framed, phrase = {}, set(), prompts.targets["phrase"].tolist()
    for name in ("lookup", "align_query"):
        relation = prompts.relations[name]
        for row in (relation.prompt == 1).nonzero()[:, 0].tolist():
            group |= dict.fromkeys(relation.keys_of(row), phrase[int(relation.target[row])])
            framed |= set(relation.keys_of(row)) if name == "align_query" else set()
    own = prompts.targets[prompts.targets["prompt"] == 1]
    group |= dict(zip(own["target_pos"].tolist(), own["phrase"].tolist(), strict=True))
    framed |= set(own["target_pos"])
    marks = [Mark(text, group.get(pos), pos in framed) for pos, text in enumerate(prompts.token_text[1])]
    last = [mark for mark, example in zip(marks, prompts.example[1].tolist(), strict=True) if example == 3]
    for examples in (None, 1, 2):
        prompts.to_html(1, examples=examples)
    Prompts.from_tokens(IDS).to_html(1)
    assert [*chain(*drawn[0])] == marks and len(drawn[0]) == 4, "the token before all examples joins the first"
    assert drawn[1] == [last] and drawn[2] == drawn[0][2:]
    assert drawn[3] == [[Mark("<3>"), Mark("<3>"), Mark("<8>")]], "neither padding nor frames"


def test_tokens_are_drawn_with_numbers_shades_and_frames():
    first, fifth = Mark("a", group=0, framed=True), Mark("b", group=4)
    attended = [Mark("d", weight=0.75, query=True), Mark("e", weight=0.5), Mark("f", weight=0.004, framed=True)]
    drawn = draw_tokens([[first, fifth, Mark("c")], attended], "a < b")
    assert re.sub("<[^>]+>", "", drawn) == "a1b5cd.75e.50fa &lt; b"
    assert drawn.count("<div>") == 2 and drawn.count("outline:2px solid;") == drawn.count("solid #E69F00;") == 1
    assert drawn.count("background:rgb(") == 2 and "rgb(64,149,197);color:#000;" in drawn and drawn.count("double") == 1
    assert f"color:#000;background:{GROUP_COLOURS[0]}" in drawn and "color:#fff;background:#0072B2" in drawn
    shades = [
        re.findall(r"color:(#\w+)|<sub[^>]*>(.*?)<", draw_tokens([[Mark("a", weight=weight)]]))
        for weight in (0.04, 0.94, 0.95)
    ]
    assert shades == [[("#000", ""), ("", ".04")], [("#000", ""), ("", ".94")], [("#fff", ""), ("", ".95")]]
    assert f"background:{GROUP_COLOURS[1]}" in draw_tokens([[Mark("a", group=9)]]), "colours come round again"
    assert "font-size:12px" not in draw_tokens([[first]]), "there is no caption"


def test_a_notebook_shows_three_prompts():
    prompts = Prompts.from_tokens([[1, 2]] * 4)
    assert prompts._repr_html_().endswith("<div>… and 1 more prompt</div>")
    assert prompts._repr_html_().count("<hr>") == prompts[:3]._repr_html_().count("<hr>") == 2
    assert "more prompts" not in prompts[:3]._repr_html_()


def test_vectors_have_no_tokens():
    prompts = replace(with_everything(IDS), inputs=torch.zeros(3, 5, 2))
    with pytest.raises(ValueError, match="these prompts are vectors, not tokens"):
        _ = prompts.tokens
    assert len(prompts[:2]) == 2


def test_prompts_are_chosen_by_numbers():
    prompts = Prompts.from_tokens([[5, 7, 9], [5, 7, 8]])
    for wrong in ("END", 1.7, [0.9], {"a": 1}):
        with pytest.raises(TypeError, match="give a number, a slice, a mask, or several numbers"):
            prompts[wrong]  # pyright: ignore[reportArgumentType]
    with pytest.raises(WrongArgument, match="with_relations: x is the text 'induction', not Relation"):
        prompts.with_relations(x="induction")  # pyright: ignore[reportArgumentType]
    with pytest.raises(WrongArgument, match="with_token_kinds: END is the text 'x', not TokenKind"):
        prompts.with_token_kinds(END="x")  # pyright: ignore[reportArgumentType]
