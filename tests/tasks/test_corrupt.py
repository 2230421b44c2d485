"""Minimal pairs: what changes, what stays, and how it is drawn."""

import inspect
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused
from scipy import stats

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.tasks import seq2seq
from align_circuits.tasks.grammar import shapes
from align_circuits.tasks.seq2seq import Seq2SeqTask

TOKENIZER = char_tokenizer()


def changed_kinds(clean, corrupted, where) -> set[TokenKind]:
    """The roles of the tokens that differ, among the positions of a mask."""
    return {TokenKind(kind) for kind in clean.token_kinds[(clean.tokens != corrupted.tokens) & where].tolist()}


@st.composite
def tasks(draw):
    """Any task that is quick to sample and has something to corrupt."""
    alignment = draw(st.sampled_from(("monotonic", "prior", "permutation")))
    return Seq2SeqTask(
        x_len=draw(st.integers(2, 7)),
        phrase_len=draw(st.integers(1, 3)),
        n_examples=draw(st.integers(1, 4)),
        alignment=alignment,
        decay=0.7 if alignment == "prior" else None,
        style=draw(st.sampled_from(("standard", "pre-aligned", "marked"))),
        ood=draw(st.booleans()),
        automata=draw(st.sampled_from(("prompt", "task"))),
        bos=draw(st.booleans()),
        task_seed=draw(st.integers(0, 50)),
    )


SEEDS = st.integers(0, 99)


def same_gold(clean: Prompts, corrupted: Prompts) -> bool:
    """Whether everything but the tokens stayed, and what `latent` says of them."""
    relations = all(
        torch.equal(getattr(relation, part), getattr(corrupted.relations[name], part))
        for name, relation in clean.relations.items()
        for part in ("target", "prompt", "query", "key_value", "key_label", "candidate_label")
    )
    assert clean.correct is not None and corrupted.correct is not None
    return (
        relations
        and clean.targets.equals(corrupted.targets)
        and torch.equal(clean.correct, corrupted.correct)
        and torch.equal(clean.token_kinds, corrupted.token_kinds)
        and torch.equal(clean.example, corrupted.example)
    )


@settings(max_examples=30, deadline=None)
@given(tasks(), SEEDS, SEEDS)
def test_query_changes_the_symbol_of_every_phrase_and_nothing_before(task, seed, other_seed):
    clean = task.sample(4, TOKENIZER, seed=seed, references=False)
    corrupted = task.corrupt(clean, "query", seed=other_seed)
    test = clean.example == task.n_examples
    assert same_gold(clean, corrupted) and torch.equal(clean.tokens[~test], corrupted.tokens[~test])
    follows = {TokenKind.ALIGNED} if task.style == "pre-aligned" else set()
    assert changed_kinds(clean, corrupted, test) == {TokenKind.INPUT} | follows
    inputs = test & (clean.token_kinds == TokenKind.INPUT)
    before, after = (p.tokens[inputs].view(4, task.x_len) for p in (clean, corrupted))
    assert torch.equal(before.sort(1).values, after.sort(1).values)
    assert (before[:, task.aligned] != after[:, task.aligned]).all(), "the aligned symbol of a target stayed"
    if follows:
        copies = corrupted.tokens[test & (clean.token_kinds == TokenKind.ALIGNED)].view(4, task.x_len)
        assert torch.equal(copies, after[:, task.aligned])
    allowed = shapes(task.x_len, task.ood)[:, torch.arange(task.x_len), corrupted.latent["order"][:, -1]]
    assert allowed.all(-1).any(0).all(), "an input that the grammar cannot write"


@pytest.mark.parametrize("keep", [lambda t: t["phrase"] < 2, lambda t: t["offset"] == 1, lambda t: t["phrase"] == 1])
def test_targets_are_chosen_before_a_corruption_or_after_it(keep):
    task = Seq2SeqTask(x_len=4, phrase_len=2, n_examples=3)
    clean = task.sample(6, TOKENIZER, seed=0)
    before = task.corrupt(clean.select_targets(keep), "query", seed=1)
    after = task.corrupt(clean, "query", seed=1).select_targets(keep)
    assert torch.equal(before.inputs, after.inputs) and before.own_correct is not None
    assert torch.equal(before.own_correct, torch.as_tensor(after.own_correct))


def test_query_is_uniform_among_the_inputs_that_fit():
    task = Seq2SeqTask(x_len=4, phrase_len=1, n_examples=1, automata="task", alignment="prior", decay=0.0, task_seed=3)
    assert len(set(task.aligned)) < 4, "choose a task whose alignment leaves a position out"
    clean = task.sample(6000, TOKENIZER, references=False)
    before, after = (p.latent["order"][:, -1] for p in (clean, task.corrupt(clean, "query")))
    like_first = (before == before[0]).all(1)
    counts = Counter(map(tuple, after[like_first].tolist()))
    every = {tuple(row) for row in before.tolist()}
    fitting = {x for x in every if all(x[q] != int(before[0, q]) for q in task.aligned)}
    assert len(every) == 8 and set(counts) == fitting and len(fitting) > 2
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@settings(max_examples=15, deadline=None)
@given(tasks(), SEEDS, SEEDS)
def test_labels_changes_letters_of_the_examples_only(task, seed, other_seed):
    clean = task.sample(4, TOKENIZER, seed=seed, references=False)
    corrupted = task.corrupt(clean, "labels", seed=other_seed)
    test = clean.example == task.n_examples
    assert same_gold(clean, corrupted) and torch.equal(clean.tokens[test], corrupted.tokens[test])
    assert changed_kinds(clean, corrupted, ~test) <= {TokenKind.OUTPUT}
    assert not torch.equal(clean.tokens, corrupted.tokens)


def test_labels_come_from_automata_and_not_those_of_the_prompt():
    task = Seq2SeqTask(x_len=2, phrase_len=1, n_examples=15, edge_range=(1, 1))
    clean = task.sample(200, TOKENIZER, references=False)
    corrupted = task.corrupt(clean, "labels")
    by_symbol = corrupted.latent["order"].argsort(2)[..., None]
    letters = corrupted.latent["phrases"].gather(2, by_symbol)[:, :-1, :, 0]  # prompt example symbol
    assert (letters == letters[:, :1]).all(), "with one edge a symbol writes the same letter in every example"
    assert (letters[:, 0] == clean.latent["letter"][:, :, 0, 0]).float().mean() < 0.1


@settings(max_examples=30, deadline=None)
@given(tasks(), SEEDS, SEEDS)
def test_alignment_moves_phrases_inside_each_example(task, seed, other_seed):
    assume(len(set(task.aligned)) > 1)
    clean = task.sample(4, TOKENIZER, seed=seed, references=False)
    corrupted = task.corrupt(clean, "alignment", seed=other_seed)
    k = task.n_examples
    test = clean.example == k
    assert same_gold(clean, corrupted) and torch.equal(clean.tokens[test], corrupted.tokens[test])
    assert changed_kinds(clean, corrupted, ~test) <= {TokenKind.OUTPUT, TokenKind.ALIGNED}
    for prompt in range(len(clean)):
        for example in range(k):

            def tagged(prompts, prompt=prompt, example=example):
                letters = prompts.latent["phrases"][prompt, example]
                return [tuple(row) for row in letters.tolist()]

            assert Counter(tagged(clean)) == Counter(tagged(corrupted))
            if task.style == "pre-aligned":
                aligned = (clean.example[prompt] == example) & (clean.token_kinds[prompt] == TokenKind.ALIGNED)
                copies = [p.tokens[prompt, aligned].tolist() for p in (clean, corrupted)]
                assert copies[0] != copies[1], "the copies still follow the alignment"
                assert Counter(zip(copies[0], tagged(clean), strict=True)) == Counter(
                    zip(copies[1], tagged(corrupted), strict=True)
                ), "a phrase lost its symbol"


def test_alignment_draws_each_example_on_its_own():
    task = Seq2SeqTask(x_len=3, phrase_len=4, n_examples=12, alphabet_range=(18, 18), edge_range=(4, 4))
    clean = task.sample(100, TOKENIZER, references=False)
    before, after = (p.latent["phrases"][:, :-1] for p in (clean, task.corrupt(clean, "alignment")))
    moved = (before[:, :, :, None] == after[:, :, None]).all(-1).int().argmax(2)  # where each phrase came from
    counts = Counter(map(tuple, moved.flatten(0, 1).tolist()))
    full = {order: n for order, n in counts.items() if sorted(order) == [0, 1, 2]}
    assert (0, 1, 2) not in full and len(full) == 5
    assert stats.chisquare(list(full.values())).pvalue > 1e-3


def test_corruption_is_fixed_by_its_seed_and_says_what_it_is():
    task = Seq2SeqTask(x_len=5, n_examples=2)
    clean = task.sample(8, TOKENIZER)
    for kind in ("query", "labels", "alignment"):
        once, again, other = (task.corrupt(clean, kind, seed=seed) for seed in (1, 1, 2))
        assert once.digest == again.digest != other.digest
        assert once.task["corrupted"] == {"kind": kind, "seed": 1}
        assert len(task.corrupt(clean[2:4], kind, seed=1)) == 2


def test_corruptions_that_cannot_be_made_are_refused():
    single = Seq2SeqTask(x_len=1, n_examples=2)
    prompts = single.sample(2, TOKENIZER)
    refused("x_len is 1", single.corrupt, prompts, "query")
    refused("no order of phrases contradicts", single.corrupt, prompts, "alignment")
    refused("not sampled by this task", Seq2SeqTask(x_len=2, n_examples=2).corrupt, prompts, "labels")
    refused("not sampled by this task", single.corrupt, Prompts.from_tokens([[1, 2, 3]]), "labels")
    refused("already corrupted", single.corrupt, single.corrupt(prompts, "labels"), "labels")
    bare = Seq2SeqTask(x_len=2, n_examples=0)
    for kind in ("labels", "alignment"):
        refused("n_examples is 0", bare.corrupt, bare.sample(2, TOKENIZER), kind)


def test_an_unknown_corruption_is_refused():
    unchecked = inspect.unwrap(seq2seq.corrupt_seq2seq)  # without the type checks of the tests
    prompts = Seq2SeqTask(x_len=2, n_examples=1).sample(1, TOKENIZER)
    with pytest.raises(ValueError, match="corruption 'letters': choose one of 'query', 'labels', 'alignment'"):
        unchecked(prompts, "letters", 0, layout=None, ood=False, sample_automata=None)
