"""Prompts of one's own texts beside their tokenization, and what cannot be tokenized so is refused."""

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer as bundled
from align_circuits.prompts.prompts import WRONG, Prompts, TokenKind
from align_circuits.prompts.relations import IGNORE
from align_circuits.prompts.texts import TokenizedText, check_aligned, tokenize
from align_circuits.run.pairs import check_pair
from align_circuits.run.target_metrics import wrong_tokens
from align_circuits.tasks.token_ids import token_of

TOKENIZER = bundled()
LETTERS = "abcdefgh"
words = st.text(LETTERS, min_size=1, max_size=4)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@pytest.mark.filterwarnings("ignore:text . repeats an earlier text in another group")
@settings(deadline=None)
@given(st.lists(st.tuples(words, words, st.integers(0, 3)), min_size=1, max_size=4))
def test_texts_with_answers_equal_a_loop(rows):
    texts, answers = [text + ":" for text, _, _ in rows], [answer for _, answer, _ in rows]
    other = {letter: LETTERS[place - 1] for place, letter in enumerate(LETTERS)}
    wrong = ["".join(other[letter] for letter in answer) for answer in answers]
    prompts = Prompts.from_texts(
        texts,
        TOKENIZER,
        answer=answers,
        wrong=wrong,
        positions={"colon": ":", "first": 1},
        groups=[group for _, _, group in rows],
    )
    place = 0
    length = max(len(ids_of(text + answer)) for text, answer, _ in rows) + 1
    assert prompts.inputs.shape == (len(rows), length)
    for index, (text, answer, group) in enumerate(zip(texts, answers, (row[2] for row in rows), strict=True)):
        left = length - len(ids_of(text + answer))
        assert prompts.tokens[index, left:].tolist() == ids_of(text + answer) and not prompts.mask[index, :left].any()
        for offset in range(len(answer)):
            target: Any = prompts.targets.iloc[place]
            position = left + len(ids_of(text)) + offset
            assert (target["prompt"], target["offset"], target["target_pos"]) == (index, offset, position)
            assert target["query_pos"] == position - 1
            assert target["token"] == ids_of(text + answer)[len(ids_of(text)) + offset]
            assert target[WRONG] == ids_of(text + wrong[index])[len(ids_of(text)) + offset]
            assert target["kind"] == ("first" if offset == 0 else "later")
            place += 1
        end = left + len(ids_of(text)) - 1
        assert prompts.positions["END"][index] == prompts.positions["colon"][index] == end
        assert prompts.positions["first"][index] == left + 1
        same = [row[2] == group for row in rows]
        assert prompts.group is not None and (prompts.group == prompts.group[index]).tolist() == same
    assert place == len(prompts.targets)


def test_texts_without_answers_have_every_token_as_a_target():
    prompts = Prompts.from_texts(["abc", "de"], TOKENIZER)
    other = Prompts.from_tokens([ids_of("abc"), ids_of("de")], tokenizer=TOKENIZER)
    assert prompts.targets.equals(other.targets) and prompts.positions == {} and prompts.group is None
    assert prompts.tokenizer_hash == other.tokenizer_hash is not None


def test_merges_across_the_end_of_a_text(byte_bpe_tokenizer):
    """With a space an answer is a token of its own; without one it runs into the text."""
    prompts = Prompts.from_texts(["the cat sat on"], byte_bpe_tokenizer, answer=[" the"], positions={"it": "cat"})
    assert prompts.token_text[0][-1] == " the" and prompts.targets["token"].tolist() == [int(prompts.tokens[0, -1])]
    assert prompts.token_text[0][int(prompts.positions["it"][0])] == " cat"
    with pytest.raises(ValueError, match="text 0: the answer 'e' is no token of its own behind 'the cat sat on th'"):
        Prompts.from_texts(["the cat sat on th"], byte_bpe_tokenizer, answer=["e"])
    with pytest.raises(
        ValueError, match=r"behind 'dog and the cat sat '; the space at the end of .* belongs to it: .* give ' on'"
    ):
        Prompts.from_texts(["the dog and the cat sat "], byte_bpe_tokenizer, answer=["on"])
    with pytest.raises(ValueError, match="text 0: the answer '' is no token of its own"):
        Prompts.from_texts(["the cat"], byte_bpe_tokenizer, answer=[""])


def test_a_letter_of_several_tokens_lies_at_the_last(byte_bpe_tokenizer):
    prompts = Prompts.from_texts(["the 猫 sat"], byte_bpe_tokenizer, positions={"cat": "猫"})
    at, texts = int(prompts.positions["cat"][0]), prompts.token_text[0]
    assert "".join(texts[at + 1 :]).startswith(" s"), "the first token behind it"


@pytest.mark.parametrize(
    ("place", "expected"),
    [("b", 2), (("a", 0), 1), (("a", 1), 3), (("a", -1), 3), (2, 2), (-1, 4), ("ab", 2), (["b"], 2)],
)
def test_places(place, expected):
    prompts = Prompts.from_texts(["aba:"], TOKENIZER, positions={"there": place})
    assert prompts.positions["there"].tolist() == [expected]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("a", r"'a' occurs 2 times; say which one, as \('a', 0\)"),
        ("x", "the text has 'x' 0 times"),
        ("", "the text has '' 0 times"),
        (("a", 2), "the text has 'a' 2 times"),
        (5, "no token 5; the text has 5"),
        (-6, "no token -6; the text has 5"),
        (["b", "b"], "give one place for all texts, or a list of 1"),
        ([("b",)], "give one place for all texts"),
        (("a", "b"), "give one place for all texts"),
        (1.5, "give one place for all texts"),
        ([None], "give one place for all texts"),
    ],
)
def test_places_that_are_not_there(place, message):
    text = "text 0: " if isinstance(place, str | int) or place == ("a", 2) else ""
    refused(
        rf"^{text}positions\['there'\].*{message}", Prompts.from_texts, ["aba:"], TOKENIZER, positions={"there": place}
    )


class Other:
    """A tokenizer that tells less, or something else, of where its tokens lie."""

    def __init__(self, **changed: Any):
        self.changed = changed

    def __getattr__(self, name: str) -> Any:
        if self.changed.get(name) is AttributeError:
            raise AttributeError(name)
        return self.changed.get(name, getattr(TOKENIZER, name))

    def __call__(self, text: str, **more: Any) -> Any:
        return self.changed.get("encoding") or TOKENIZER(text, **more)


def test_a_tokenizer_that_does_not_say_where_its_tokens_lie():
    for is_fast in (False, AttributeError):
        with pytest.raises(ValueError, match="this tokenizer does not say where its tokens lie; give token indices"):
            Prompts.from_texts(["ab"], Other(is_fast=is_fast), positions={"b": "b"})
    trimmed = {"input_ids": [1, 2], "offset_mapping": [(0, 1), (2, 3)]}
    with pytest.raises(ValueError, match=r"positions\['gap'\]: no token holds the end of ' '"):
        Prompts.from_texts(["a b"], Other(encoding=trimmed), positions={"gap": " "})
    refused("text 0: the text is empty", Prompts.from_texts, [""], Other(encoding={"input_ids": []}))
    only_bos = Prompts.from_texts([""], TOKENIZER, answer=["a"])
    assert only_bos.tokens.tolist() == [TOKENIZER("a")["input_ids"]] and only_bos.targets["query_pos"].tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"texts": "ab:"}, TypeError, r"texts is the text 'ab:', not a list \(a text\); give a list, \['ab:'\]"),
        ({"texts": [1, 2]}, TypeError, r"texts\[0\] is 1, not a text"),
        ({"texts": 5}, TypeError, "texts is 5, not a list"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer is the text 'gpt2', not Tokenizer; give model.tokenizer"),
        ({"texts": []}, ValueError, "no texts: give at least one"),
        ({"answer": None}, ValueError, "wrong answers without answers"),
        ({"answer": ["a"]}, ValueError, "answer: 1 for 2 texts"),
        ({"wrong": "cd"}, TypeError, "wrong is the text 'cd', not a list"),
        ({"positions": {"END": 0}}, ValueError, "'END' is the text's last token by itself"),
        ({"wrong": ["ab", "d"]}, ValueError, "text 0: the answer 'a' cannot be compared .*same token"),
        ({"wrong": ["ab", "d"], "answer": ["acd", "c"]}, ValueError, "text 0: the answer 'acd' cannot .*same token"),
        ({"wrong": ["ab", "cd"]}, ValueError, "text 0: .* differ in the first; so it is with text 1"),
        ({"groups": "ab"}, TypeError, "groups is the text 'ab', not a list"),
        ({"groups": [1]}, ValueError, "groups: 1 for 2 texts"),
        ({"groups": [1, None]}, ValueError, "groups: a text has none"),
    ],
)
def test_texts_that_are_refused(changes, error, message):
    given: dict[str, Any] = {"texts": ["ab:", "cd:"], "answer": ["a", "c"], "wrong": ["b", "d"]} | changes
    with pytest.raises(error, match=message):
        Prompts.from_texts(given.pop("texts"), given.pop("tokenizer", TOKENIZER), **given)


def test_a_wrong_answer_of_another_length_is_compared_at_the_first_token():
    given: Any = {"tokenizer": TOKENIZER, "answer": ["ab", "c", "ab"], "wrong": ["c", "ab", "ba"]}
    told = "1 of 3 texts, such as text 1: the answer 'c' is 1 token and the wrong one 'ab' is 2: .* with 'a' alone"
    with pytest.warns(UserWarning, match=told):
        prompts = Prompts.from_texts(["x:", "y:", "z:"], **given)
    a, b, c = (ids_of(letter)[-1] for letter in "abc")
    np.testing.assert_array_equal(prompts.targets[WRONG], [c, np.nan, a, b, a])
    first = prompts.select_targets("first")
    np.testing.assert_array_equal(wrong_tokens(first.targets, 64), [c, a, b])
    with pytest.raises(ValueError, match=r"holds nan in prompt 0 .* prompts.select_targets\('first'\)"):
        wrong_tokens(prompts.targets, 64)
    model = ac.load("toy-llama")
    assert "logit_diff" in set(ac.evaluate(model, first).frame["metric"])
    with pytest.warns(UserWarning, match="choice_accuracy and logit_diff are left out: 1 of 5 targets have no wrong"):
        assert "logit_diff" not in set(ac.evaluate(model, prompts).frame["metric"])


def test_a_later_token_that_both_answers_share_is_not_compared():
    prompts = Prompts.from_texts(["x:", "y:"], TOKENIZER, answer=["ac", "bd"], wrong=["bc", "ca"])
    a, b, c = (ids_of(letter)[-1] for letter in "abc")
    np.testing.assert_array_equal(prompts.targets[WRONG], [b, np.nan, c, a])
    with pytest.raises(
        ValueError, match="where the two answers differ in length or share that token: compare first tokens"
    ):
        ac.evaluate(ac.load("toy-llama"), prompts, metrics="choice_accuracy")


def test_characters_that_the_vocabulary_lacks_are_told_and_texts_of_equal_tokens_are_one_group():
    with pytest.warns(UserWarning) as told:
        prompts = Prompts.from_texts(["a1:", "a2:", "b:"], TOKENIZER, answer=["a", "b", "c"])
    texts = [str(warning.message) for warning in told]
    assert texts[0].startswith("2 of 3 texts, such as text 0: the vocabulary lacks characters of 'a1:'")
    assert texts[1].startswith("text 1 repeats an earlier text") and prompts.n_groups == 2
    refused(
        "text 0: the vocabulary lacks characters of the answer '3'", Prompts.from_texts, ["a:"], TOKENIZER, answer=["3"]
    )
    Prompts.from_texts([f"a{TOKENIZER.unk_token}:"], TOKENIZER)  # as it is written


def test_characters_that_a_vocabulary_without_an_unknown_token_leaves_out_are_told():
    letters = {letter: index for index, letter in enumerate("abc :")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [])))
    with pytest.warns(UserWarning, match="text 1: the vocabulary lacks characters of 'aéb:'"):
        prompts = Prompts.from_texts(["a:", "aéb:"], tokenizer, answer=["c", "c"])
    assert prompts.tokens[1].tolist() == [0, 1, 4, 2]
    for answer in ("cé", "éc"):
        refused("lacks characters of the answer", Prompts.from_texts, ["aé b:"], tokenizer, answer=[answer])


def test_a_space_behind_a_named_position_does_not_move_it(byte_bpe_tokenizer):
    places: Any = {"plain": "cat", "spaced": "cat ", "with occurrence": ("cat ", 0)}
    at = Prompts.from_texts(["the cat sat on"], byte_bpe_tokenizer, positions=places).positions
    assert at["plain"].equal(at["spaced"]) and at["plain"].equal(at["with occurrence"])
    with pytest.raises((TypeError, ValueError), match="positions"):
        Prompts.from_texts(["the cat"], byte_bpe_tokenizer, positions={"first": True})


def test_prompts_are_printed_with_the_first_of_them():
    prompts = Prompts.from_texts(["ab:", "cd:"], TOKENIZER, answer=["a", "c"])
    assert str(prompts) == f"{prompts!r}, the first of which is:\n{prompts.text[0]}"
    assert str(prompts[1]) == f"{prompts[1]!r}:\n{prompts.text[1]}" and str(prompts[:0]) == repr(prompts[:0])


def test_pairs_are_halves_with_the_clean_targets():
    clean, corrupted = Prompts.from_pairs(
        ["ab:", "xxxxxcd:"],  # the first is padded by more than its length
        ["ba:", "xxxxxdc:"],
        TOKENIZER,
        answer=["a", "c"],
        wrong=["b", "d"],
        corrupted_answer=["b", "d"],
        positions={"second": [2, 3]},
        groups=["one", "two"],
    )
    check_pair(clean, corrupted)
    endings = zip(corrupted.text, ("ba:a", "xxxxxdc:c"), strict=True)
    assert all(text.endswith(ending) for text, ending in endings), "the clean answer goes on"
    assert corrupted.targets.equals(clean.targets) and corrupted.targets[WRONG].tolist() == [39, 41]
    assert clean.own_correct is None and corrupted.own_correct is not None and clean.correct is not None
    for prompts, correct, right in ((clean, clean.correct, "ac"), (corrupted, corrupted.own_correct, "bd")):
        assert correct is not None
        tokens = [prompts.answer_tokens[row].tolist() for row in correct]
        assert tokens == [[ids_of(letter)[-1]] for letter in right]
    assert torch.equal(clean.positions["second"], corrupted.positions["second"])
    assert corrupted.string_of(ids_of("d")[-1]) == "d" and corrupted.task["corrupted"] == {"kind": "own"}
    plain, other = Prompts.from_pairs(["ab:"], ["ba:"], TOKENIZER, answer=["a"])
    assert other.own_correct is None is plain.correct
    assert torch.equal(plain.inputs[:, 1:3].flip(1), other.inputs[:, 1:3])


def test_equal_texts_are_one_group_unless_groups_are_given():
    texts, answers = ["ab:", "cd:", "ab:"], ["a", "c", "a"]
    with pytest.warns(UserWarning, match="^text 2 repeats an earlier text; equal texts count as one group") as one:
        prompts = Prompts.from_texts(texts, TOKENIZER, answer=answers)
    assert prompts.group is not None and prompts.group.tolist() == [0, 1, 0]
    with pytest.warns(UserWarning, match="^2 texts repeat earlier ones, first pair 1; equal texts") as two:
        clean, corrupted = Prompts.from_pairs(["ab:"] * 3, ["ba:", "cb:", "bc:"], TOKENIZER, answer=["a", "a", "b"])
    assert clean.n_groups == corrupted.n_groups == 1
    with pytest.warns(UserWarning, match="^text 2 repeats an earlier text in another group") as three:
        own = Prompts.from_texts(texts, TOKENIZER, answer=answers, groups=["x", "y", "z"])
    assert own.n_groups == 3, "what the user says of them stands"
    assert {told[0].filename for told in (one, two, three)} == {__file__}
    assert Prompts.from_texts(texts[:2], TOKENIZER, answer=answers[:2]).group is None


def test_a_pair_in_both_directions_is_one_group():
    clean, corrupted, answers = ["ab:", "cd:", "ba:", "xy:", "cd:"], ["ba:", "dc:", "ab:", "yx:", "zz:"], [*"acbxc"]
    with pytest.warns(UserWarning, match="^2 of 4 pairs are the reverse of another one; a pair and its reverse count"):
        made = Prompts.from_pairs(clean[:4], corrupted[:4], TOKENIZER, answer=answers[:4])
    for half in made:
        assert half.group is not None and half.group.tolist() == [0, 1, 0, 2]
    with pytest.warns(UserWarning, match="^pair 4 repeats an earlier text"):
        made = Prompts.from_pairs(clean, corrupted, TOKENIZER, answer=answers)
    assert made[0].group is not None and made[0].group.tolist() == [0, 1, 0, 2, 1]


def test_corrupted_texts_that_are_the_next_clean_ones_leave_pairs_apart():
    """Or all pairs were one group, and nothing had an interval."""
    clean = ["ab:", "cd:", "xy:", "zw:"]
    assert Prompts.from_pairs(clean, [*clean[1:], clean[0]], TOKENIZER, answer=[*"acxz"])[0].group is None


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_what_is_right_behind_the_clean_answer_is_known_while_both_agree(rows):
    clean, corrupted = Prompts.from_pairs(
        ["ab:"] * len(rows),
        ["ba:"] * len(rows),
        TOKENIZER,
        answer=[answer for answer, _ in rows],
        corrupted_answer=[own for _, own in rows],
        groups=[0] * len(rows),  # none is to be warned of
    )
    expected = []
    for answer, own in rows:
        for place in range(len(answer)):
            known = place < len(own) and answer[:place] == own[:place]
            expected.append([ids_of(own[place])[-1]] if known else [])
    assert corrupted.own_correct is not None
    assert [clean.answer_tokens[row].tolist() for row in corrupted.own_correct] == expected
    assert IGNORE not in clean.answer_tokens.tolist()


@pytest.mark.parametrize(
    ("text", "answer", "positions", "message"),
    [
        ("the cat", "the", {}, r"the answer 'the' has no space before it and goes on with the word 'cat': give ' the'"),
        ("the cat", "the ", {}, r"the answer 'the ' has no space before it .*: give ' the', unless that is meant"),
        ("the cat", " the", {}, None),
        ("the cat:", "the", {}, None),
        ("the cat ", " the", {}, "the text ends with a space and the answer begins with another: end the text without"),
        ("the cat", " the", {"part": "ca"}, r"positions\['part'\]: 'ca' lies inside a word: give the whole word"),
        ("the hat", " the", {"part": ("at", 0)}, r"positions\['part'\]: 'at' lies inside a word"),
        ("the cat", " the", {"part": "cat", "index": 1}, None),
    ],
)
def test_what_is_hardly_meant_is_named(byte_bpe_tokenizer, text, answer, positions, message):
    texts, answers = [f"the dog and {text}", "the mat"], [answer, " on"]
    named = {
        name: [place, "the" if isinstance(place, str) else ("the", 0) if isinstance(place, tuple) else 0]
        for name, place in positions.items()
    }
    with (
        nullcontext()
        if message is None
        else pytest.warns(UserWarning, match=f"1 of 2 texts, such as text 0: {message}")
    ):
        Prompts.from_texts(texts, byte_bpe_tokenizer, answer=answers, positions=named)


def test_pairs_that_are_refused(byte_bpe_tokenizer):
    message = (
        "1 of 2 pairs, such as pair 1, have a corrupted text equal to the clean one, token for token, where no patch"
    )
    for other in ("cd", f"{TOKENIZER.bos_token}cd"):  # which the tokenizer begins alike
        refused(message, Prompts.from_pairs, ["ab", "cd"], ["ba", other], TOKENIZER, answer=["c", "c"])
    with pytest.raises(TypeError, match="corrupted is the text 'ab', not a list"):
        Prompts.from_pairs(["ab"], "ab", TOKENIZER, answer=["c"])
    refused("corrupted: 2 for 1 clean texts", Prompts.from_pairs, ["ab"], ["ab", "ba"], TOKENIZER, answer=["c"])
    refused("corrupted: 1 for 2 clean texts", Prompts.from_pairs, ["ab", "ba"], ["ab"], TOKENIZER, answer=["c", "c"])
    message = (
        r"pair 1: at token 1 the clean text has ' cat' \(1 token\) and the corrupted one ' ferret' \(\d tokens\): "
        "take words of equally many tokens"
    )
    texts = ["the cat sat"] * 2, ["the dog sat", "the ferret sat"]
    refused(message, Prompts.from_pairs, *texts, byte_bpe_tokenizer, answer=[" on", " on"])
    drawn = torch.randint(20, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    long = TokenizedText("", drawn, 240, [], {}, 0)
    message = r"pair 3: at token 100 the clean text has '' \(0 tokens\) and .* \(1 token\)"
    refused(message, check_aligned, "pair 3", long, [*drawn[:100], 30, *drawn[100:]], byte_bpe_tokenizer)
    (text,) = tokenize(["the cat"], byte_bpe_tokenizer, None, None, None, ["text 0"])
    check_aligned("pair 0", text, text.ids, byte_bpe_tokenizer)


def test_what_a_tokenizer_adds_behind_a_text_or_twice_before_it_is_left_out():
    """As Llama's with `add_eos_token`, and as a text from a chat template, which begins with its own token."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=template)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    plain = Prompts.from_texts(["a c"], tokenizer, answer=[" b"], positions={"first": "a"})
    assert plain.tokens.tolist() == [[0, 2, 4, 3]]
    templated = Prompts.from_texts(["<s> a c"], tokenizer, answer=[" b"], positions={"first": "a"})
    assert templated.tokens.tolist() == [[0, 2, 4, 3]]
    assert plain.positions["first"].tolist() == templated.positions["first"].tolist() == [1]
    ended = Prompts.from_texts(["a </s>"], tokenizer)
    assert ended.tokens.tolist() == [[0, 2, 1]], "an end that stands in the text stays, and no other comes"
    answered = Prompts.from_texts(["a c"], tokenizer, answer=[" </s>"], wrong=[" b"])
    assert answered.tokens.tolist() == [[0, 2, 4, 1]] and answered.targets["target_pos"].tolist() == [3]


def test_a_beginning_of_several_tokens_is_read_once_and_is_of_one_kind():
    """As GLM's, which is no `bos_token`; a text from its chat template has it already."""
    backend = Tokenizer(models.WordLevel({"[g]": 0, "<sop>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = [("[g]", 0), ("<sop>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="[g] <sop> $A", special_tokens=template)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<sop>")
    for text in ("a b", "[g] <sop> a b"):
        prompts = Prompts.from_texts([text], tokenizer, answer=[" a"], positions={"B": "b"})
        assert prompts.tokens.tolist() == [[0, 1, 2, 3, 2]] and prompts.positions["B"].tolist() == [3]
        assert (prompts.token_kinds == TokenKind.BOS).tolist() == [[True, True, False, False, False]]


def test_an_end_in_the_text_stays_whatever_follows(byte_bpe_tokenizer):
    """A token of the end that takes the newline behind it."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=AddedToken("<end>", rstrip=True))
    prompts = Prompts.from_texts(["a <end>\n"], tokenizer, answer=["b"])
    assert prompts.tokens.tolist() == [[0, 3, 1]] and prompts.positions["END"].tolist() == [1]
    newline = byte_bpe_tokenizer("the\n", add_special_tokens=False)["input_ids"]
    named = Prompts.from_texts(["the\nthe cat"], byte_bpe_tokenizer, positions={"line": "the\n"})
    assert named.token_text[0][int(named.positions["line"][0])] == "\n" and len(newline) == 2


def test_a_tokenizer_whose_patterns_give_up_is_named():
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("(([a-z]+)+)+!"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, name_or_path="some/folder")
    for read in (lambda: Prompts.from_texts(["a" * 60], tokenizer), lambda: token_of(tokenizer, "a" * 60)):
        refused(r"the tokenizer 'some/folder' \(2 tokens\) gives up on the text 'aaa.*' \(Onig: Regex .*\): corr", read)


@given(st.text(max_size=12))
def test_characters_of_several_tokens_are_read_as_characters(byte_bpe_tokenizer, text):
    """Each part is the character, numbered; without the numbers and repetitions the text is what it was."""
    ids = byte_bpe_tokenizer("AB" + text, add_special_tokens=False)["input_ids"]
    prompts = Prompts.from_tokens([ids], tokenizer=byte_bpe_tokenizer)
    assert prompts.text == ["AB" + text]
    parts = prompts.token_text[0]
    assert len(parts) == len(ids)
    if "⟨" not in text:
        assert re.sub(r"⟨1/[2-4]⟩", "", re.sub(r"(?s).⟨[2-4]/[2-4]⟩", "", "".join(parts))) == "AB" + text


def test_emoji_and_chinese_are_drawn_as_they_are(byte_bpe_tokenizer):
    ids = byte_bpe_tokenizer("é 你🙂", add_special_tokens=False)["input_ids"]
    prompts = Prompts.from_tokens([ids, ids[:-1] + ids[:1]], tokenizer=byte_bpe_tokenizer)
    assert prompts.token_text[0] == [
        *("é⟨1/2⟩", "é⟨2/2⟩", " ", "你⟨1/3⟩", "你⟨2/3⟩", "你⟨3/3⟩"),
        *("🙂⟨1/4⟩", "🙂⟨2/4⟩", "🙂⟨3/4⟩", "🙂⟨4/4⟩"),
    ]
    assert prompts.text[1] == "é 你<0xF0><0x9F><0x99><0xC3>", "what makes no character stays bytes"
    assert "你⟨2/3⟩" in prompts.to_html(0) and "\ufffd" not in prompts.to_html(1)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory):
    """A SentencePiece model of Llama 2's kind, trained here: what it does not know it spells in bytes."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    folder = tmp_path_factory.mktemp("sentencepiece")
    texts = ["the cat sat on the mat", " ".join("abcdefghijklmnopqrstuvwxyz"), "# $ %"] * 20
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "minloglevel": 2}
    with (folder / "tokenizer.model").open("wb") as file:
        trainer.train(sentence_iterator=iter(texts), model_writer=file, hard_vocab_limit=False, **settings)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}')
    return AutoTokenizer.from_pretrained(folder)


def test_bytes_of_sentencepiece_are_drawn_as_characters(sentencepiece_tokenizer):
    texts = ["the é 你🙂 cat", "the 👩‍👧"]
    prompts = Prompts.from_texts(
        texts[:1], sentencepiece_tokenizer, answer=[" 你"], positions={"é": "é", "🙂": ("🙂", 0)}
    )
    parts = prompts.token_text[0]
    assert parts[:4] == [" the", " ", "é⟨1/2⟩", "é⟨2/2⟩"]
    assert parts[5:12] == ["你⟨1/3⟩", "你⟨2/3⟩", "你⟨3/3⟩", "🙂⟨1/4⟩", "🙂⟨2/4⟩", "🙂⟨3/4⟩", "🙂⟨4/4⟩"]
    assert prompts.text == [" the é 你🙂 cat 你"]
    assert [parts[prompts.positions[name]] for name in ("é", "🙂")] == ["é⟨2/2⟩", "🙂⟨4/4⟩"]
    assert Prompts.from_texts(texts[1:], sentencepiece_tokenizer).text == [" the 👩‍👧"], "joiners stay"


def test_the_token_that_begins_a_text_is_of_its_own_kind():
    prompts = Prompts.from_texts(["abc", "ab"], TOKENIZER, answer=["d", "e"])
    first = prompts.mask.int().argmax(1)
    assert prompts.tokens[[0, 1], first].tolist() == [TOKENIZER.bos_token_id] * 2
    assert (prompts.token_kinds == TokenKind.BOS).nonzero().tolist() == [[0, int(first[0])], [1, int(first[1])]]
