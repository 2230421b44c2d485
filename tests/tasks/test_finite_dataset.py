"""Prompts from a finite set of examples, beside prompts put together by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from align_circuits.checks import WrongArgument
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import REFERENCES, TokenKind
from align_circuits.tasks.finite_dataset import in_context, sample_finite_dataset
from align_circuits.tasks.seq2seq import Seq2SeqTask

TOKENIZER = char_tokenizer()
TASK = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4, automata="task", alignment="permutation", task_seed=2)


@pytest.mark.parametrize("style", ["standard", "pre-aligned", "marked"])
def test_prompts_are_examples_of_the_dataset_one_after_another(style):
    task = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4, automata="task", style=style)
    dataset = sample_finite_dataset(task, 6, TOKENIZER, seed=1)
    known = [text.removeprefix("<bos>") for text in dataset.text]
    prompts = in_context(task, dataset, n=5, seed=3)
    tests = []
    for text in prompts.text:
        examples = text.removeprefix("<bos>").split("\n")
        assert len(examples) == 5 and len(set(examples)) == 5 and set(examples) <= set(known)
        tests.append(examples[-1])
    assert len(set(tests)) == 5
    again, other = (in_context(task, dataset, n=5, seed=seed) for seed in (3, 4))
    assert again.digest == prompts.digest != other.digest


def test_fresh_test_examples_keep_their_gold():
    dataset, test = sample_finite_dataset(TASK, 8, TOKENIZER, seed=1), sample_finite_dataset(TASK, 5, TOKENIZER, seed=2)
    prompts = in_context(TASK, dataset, test, seed=0)
    whole = TASK.sample(5, TOKENIZER, seed=9)
    assert prompts.inputs.shape == whole.inputs.shape and torch.equal(prompts.token_kinds, whole.token_kinds)
    assert list(prompts.targets.columns) == list(whole.targets.columns)
    assert prompts.relations.keys() == whole.relations.keys()
    assert torch.equal(prompts.column("token"), test.column("token"))
    assert prompts.correct is test.correct and prompts.correct is not None
    rows = torch.arange(len(prompts.targets))
    at = prompts.column("token")[:, None] == prompts.answer_tokens
    assert bool(prompts.correct[rows, at.int().argmax(1)].all()), "a letter of the test example is not accepted"
    for row in range(len(prompts.relations["lookup"])):
        relation = prompts.relations["lookup"]
        keys, prompt = relation.keys_of(row), int(relation.prompt[row])
        assert keys and bool((prompts.token_kinds[prompt, keys] == TokenKind.OUTPUT).all())
        assert bool((prompts.example[prompt, keys] < 4).all())
    for name in REFERENCES[:3]:
        assert torch.equal(prompts.column(name), test.column(name))
    assert float(prompts.column("oracle").mean()) > float(test.column("oracle").mean()), "examples help the oracle"


def test_examples_differ_from_each_other_and_from_those_that_are_left_out():
    tiny = replace(TASK, x_len=2, n_examples=2)
    drawn = sample_finite_dataset(tiny, 20, TOKENIZER)
    repeated = replace(tiny, n_examples=0).sample(20, TOKENIZER).text
    assert len({*drawn.text}) == 20 > len({*repeated}), "the task repeats itself"
    assert drawn.text[: len({*repeated})] == [*dict.fromkeys(repeated)], "in the order in which they are drawn"
    assert len({*drawn.text, *sample_finite_dataset(tiny, 12, TOKENIZER, without=drawn).text}) == 32
    message = r"4 different examples among 128,000 that were drawn, and 500 are needed"
    refused(message, sample_finite_dataset, replace(tiny, phrase_len=1), 500, TOKENIZER)
    message = r"0 different examples among 256 that were drawn beside the 4 that are left out, and 1 are needed"
    least = replace(tiny, phrase_len=1)
    refused(message, sample_finite_dataset, least, 1, TOKENIZER, without=sample_finite_dataset(least, 4, TOKENIZER))
    few = sample_finite_dataset(TASK, 20, TOKENIZER, seed=4)
    assert few.digest == replace(TASK, n_examples=0).sample(20, TOKENIZER, seed=4).digest


def test_a_test_example_is_not_among_the_examples_of_its_own_prompt():
    dataset = sample_finite_dataset(TASK, 5, TOKENIZER, seed=1)
    for text in in_context(TASK, dataset, dataset, seed=0).text:
        examples = text.removeprefix("<bos>").split("\n")
        assert len({*examples}) == 5 and "<bos>" + examples[-1] in dataset.text
    refused("4 examples, but 5 different ones are needed", in_context, TASK, dataset[:4], dataset[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alignment": "reversed"}, "alignment is 'permutation' there and 'reversed' in the task"),
        ({"task_seed": 3}, "task_seed is 2 there and 3 in the task"),
        ({"style": "marked"}, "style is 'standard' there and 'marked'"),
        ({"x_len": 4}, "x_len is 3 there and 4 in the task"),
    ],
)
def test_examples_of_another_task_are_refused(change, message):
    """Else the gold would be that of the one, and the text that of the other."""
    dataset, other = sample_finite_dataset(TASK, 6, TOKENIZER, seed=1), replace(TASK, **change)
    refused(f"dataset: {message}", in_context, other, dataset)
    refused(f"test: {message}", in_context, other, sample_finite_dataset(other, 6, TOKENIZER, seed=1), dataset)
    refused(f"without: {message}", sample_finite_dataset, other, 2, TOKENIZER, without=dataset)


def test_what_cannot_be_drawn_is_refused():
    whole = TASK.sample(6, TOKENIZER)
    refused(
        "without: n_examples is 4 there and 0 in the task", sample_finite_dataset, TASK, 2, TOKENIZER, without=whole
    )
    some = sample_finite_dataset(TASK, 6, TOKENIZER)
    refused("test: some targets were left out", in_context, TASK, some, some.select_targets("first"))
    refused("n=0: give how many prompts", in_context, TASK, some, n=0)
    dataset = sample_finite_dataset(TASK, 4, TOKENIZER)
    refused("5 different ones are needed", in_context, TASK, dataset)
    with pytest.raises(ValueError, match="3 examples, but 4 different"):
        in_context(TASK, dataset[:3], sample_finite_dataset(TASK, 1, TOKENIZER, seed=1))
    wrong: Any = "three"
    with pytest.raises(WrongArgument, match="sample_finite_dataset: n is the text 'three', not an int"):
        sample_finite_dataset(TASK, wrong, TOKENIZER)
    refused("automata='task'", sample_finite_dataset, Seq2SeqTask(), 4, TOKENIZER)
