"""Words as symbols and letters, and `LexiconTask`: read back from the text alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from align_circuits.prompts.prompts import REFERENCES, Prompts
from align_circuits.tasks.lexicon import LexiconTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.word_pairs import LEXICONS

ANIMALS = ["dog", "cat", "horse", "bird", "mouse", "fish"]
COLOURS = ["red", "green", "blue", "black", "white", "orange"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE that knows the words, as a folder in the hub's format."""
    bpe = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    words = [f" {word}" for word in ANIMALS + COLOURS]
    words += [text for name in ("antonyms", "digits") for pair in LEXICONS[name].items() for text in pair]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings: dict[str, Any] = {"vocab_size": 3000, "special_tokens": ["<s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    bpe.train_from_iterator([word for word in words for _ in range(3)], trainer)
    folder = tmp_path_factory.mktemp("words")
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", clean_up_tokenization_spaces=False)
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def words_task(**changes):
    config: dict[str, Any] = {"x_len": 3, "phrase_len": 2, "n_examples": 4, "alphabet_range": (4, 6)}
    config |= {"alphabet": ANIMALS, "letters": COLOURS} | changes
    return Seq2SeqTask(**config)


def read(prompts: Prompts, index: int) -> list[tuple[list[str], list[str]]]:
    """The words on both sides of each line of a prompt's text."""
    lines = prompts.text[index].removeprefix("<s>").split("\n")
    sides = [[side.split() if " " in side else [*side] for side in line.split(":")] for line in lines]
    return [(x, y) for x, y in sides]


def test_words_of_several_characters_are_symbols_and_letters(tokenizer):
    task = words_task()
    prompts = task.sample(5, tokenizer, seed=3)
    assert hash(task) == hash(words_task()) and task.corrupt(prompts).inputs.shape == prompts.inputs.shape
    assert tokenizer(prompts.text, add_special_tokens=False)["input_ids"] == prompts.tokens.tolist()
    for index in range(5):
        lines = read(prompts, index)
        assert len(lines) == 5 and all((len(x), len(y)) == (3, 6) for x, y in lines)
        symbols = [ANIMALS[i] for i in prompts.latent["symbols"][index].tolist()]
        assert all(sorted(x) == sorted(symbols) and set(y) <= set(COLOURS) for x, y in lines)
        letter = prompts.latent["letter"][index]
        for x, y in lines:  # the first word of each phrase is one that its symbol's automaton starts with
            for place, animal in enumerate(x):
                assert COLOURS.index(y[2 * place]) in letter[symbols.index(animal), 0].tolist()


def test_a_word_of_several_tokens_is_refused_by_name(tokenizer):
    refused(r"reads ' giraffe' as \['Ġ", words_task(alphabet=[*ANIMALS, "giraffe"]).sample, 1, tokenizer)
    refused("the same token", words_task(letters=[*COLOURS, "dog"]).sample, 1, tokenizer)


@pytest.mark.parametrize("alignment", ["monotonic", "reversed", "permutation"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lexicon", ["antonyms", "digits"])
def test_a_reader_of_the_text_finds_lexicon_order_and_gold(tokenizer, lexicon, shared, alignment):
    task = LexiconTask(lexicon, x_len=4, n_examples=3, alignment=alignment, shared=shared, task_seed=2)
    prompts = task.sample(6, tokenizer, seed=1)
    known = {word.strip(): other.strip() for word, other in LEXICONS[lexicon].items()}
    expected = {"monotonic": (0, 1, 2, 3), "reversed": (3, 2, 1, 0)}.get(alignment, task.aligned)
    assert sorted(expected) == [0, 1, 2, 3] and (expected != (0, 1, 2, 3)) == (alignment != "monotonic")
    assert prompts.correct is not None
    align, lookup = prompts.relations["align_query"], prompts.relations.get("lookup")
    assert (lookup is not None) == shared
    for index in range(6):
        *examples, (x, y) = read(prompts, index)
        for source, output in [*examples, (x, y)]:
            assert len(set(source)) == 4 and output == [known[source[position]] for position in expected]
            assert not shared or set(source) == set(x)
        assert shared or not {word for source, _ in examples for word in source} & set(x)
        strings = [text.strip() for text in prompts.token_text[index]]
        for phrase in range(4):
            row = 4 * index + phrase
            assert [strings[key] for key in align.keys_of(row)] == [x[expected[phrase]]]
            assert strings[int(align.query[row]) + 1] == y[phrase]
            assert not lookup or [strings[key] for key in lookup.keys_of(row)] == [y[phrase]] * 3
            right = prompts.answer_tokens[prompts.correct[row]].tolist()
            assert [tokenizer.decode(right).strip()] == [y[phrase]]
    references = prompts.targets[list(REFERENCES)].mean()
    assert references.tolist() == pytest.approx([1 / len(known), 1 / 4, (1 / 4 + 1 / 3 + 1 / 2 + 1) / 4, 1.0])
    more = task.sample(9, tokenizer, seed=1)
    assert torch.equal(more.inputs[:6], prompts.inputs) and not torch.equal(more.inputs[6:], prompts.inputs[:3])


def test_corruption_changes_one_thing(tokenizer):
    task = LexiconTask(x_len=4, n_examples=5, alignment="reversed", shared=True)
    prompts, known = task.sample(8, tokenizer), {a.strip(): b.strip() for a, b in LEXICONS["antonyms"].items()}
    changed = {kind: task.corrupt(prompts, kind) for kind in ("query", "labels", "alignment")}
    for index in range(8):
        clean = read(prompts, index)
        query, labels, alignment = (read(changed[kind], index) for kind in ("query", "labels", "alignment"))
        assert query[:-1] == clean[:-1] and query[-1][1] == clean[-1][1]
        assert sorted(query[-1][0]) == sorted(clean[-1][0])
        assert all(a != b for a, b in zip(query[-1][0], clean[-1][0], strict=True))
        assert labels[-1] == clean[-1] and [x for x, _ in labels] == [x for x, _ in clean]
        false = {word: other for x, y in labels[:-1] for word, other in zip(reversed(x), y, strict=True)}
        assert len(false) == 4 and all(known[word] != other for word, other in false.items())
        assert all(y == [false[word] for word in reversed(x)] for x, y in labels[:-1])
        for (x, y), (clean_x, clean_y) in zip(alignment[:-1], clean[:-1], strict=True):
            assert x == clean_x and y != clean_y and sorted(y) == sorted(clean_y)
    own = changed["query"].own_correct
    assert own is not None and prompts.correct is not None
    assert own.sum(1).eq(1).all() and not (own & prompts.correct).any()


def test_the_pre_aligned_style_copies_the_word(tokenizer):
    prompts = LexiconTask(x_len=3, n_examples=1, alignment="permutation", style="pre-aligned").sample(4, tokenizer)
    for index in range(4):
        for x, y in read(prompts, index):
            assert sorted(y[::2]) == sorted(x)
            assert {f" {a}": f" {b}" for a, b in list(pairwise(y))[::2]}.items() <= LEXICONS["antonyms"].items()


def test_control_and_caveats():
    assert LexiconTask(alignment="reversed").control() == LexiconTask()
    assert LexiconTask().control() == LexiconTask(alignment="permutation") and not LexiconTask().caveats
    assert LexiconTask(x_len=3).caveats[0].startswith("3 input symbols have 6 orders")
    assert Seq2SeqTask(alignment="reversed").aligned == (4, 3, 2, 1, 0)
    assert Seq2SeqTask(alignment="reversed").control() == Seq2SeqTask()


def test_words_that_are_not_single_tokens_are_named_or_left_out(tokenizer):
    own = {" dog": " red", " cat": " green", " horse": " blue", " giraffe": " black", " fish": " zebra"}
    task = LexiconTask(own, x_len=3, n_examples=2, shared=True)
    refused(r"2 words of the lexicon .* ' giraffe' is read as \['Ġ.*unknown='leave out'", task.sample, 1, tokenizer)
    kept = LexiconTask(own, x_len=3, n_examples=2, shared=True, unknown="leave out")
    assert list(kept.pairs_of(tokenizer)) == [" dog", " cat", " horse"]
    assert all(sorted(x) == ["cat", "dog", "horse"] for x, _ in read(kept.sample(1, tokenizer), 0))
    with pytest.raises(ValueError, match=r"need 6: .* shared=True\. 2 words .* are not one token .* is read as \['Ġ"):
        LexiconTask(own, x_len=3, n_examples=2, unknown="leave out").sample(1, tokenizer)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lexicon": "colours"}, "lexicon is 'colours': choose one of 'upper case', 'capital letters'"),
        ({"x_len": 0}, "x_len is 0: give at least 1"),
        ({"n_examples": -1}, "n_examples is -1"),
    ],
)
def test_a_lexicon_task_that_cannot_be_sampled_is_refused(config, message):
    refused(message, LexiconTask, **config)


def test_prompts_of_another_task_are_not_corrupted(tokenizer):
    refused("not sampled by this task", LexiconTask(x_len=4).corrupt, LexiconTask(x_len=5).sample(1, tokenizer))


def test_every_lexicon_says_each_word_once():
    for name, lexicon in LEXICONS.items():
        assert len({*lexicon, *lexicon.values()}) == 2 * len(lexicon) >= 20, name
