"""Oracles over alignments: EM and sequential maximum likelihood."""

import itertools
import math

import pytest
import torch
from legs import slow_but
from refusals import refused

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.icatune.alignment_oracles import align_by_em, align_by_likelihood, examples_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.seq2seq import Seq2SeqTask

TOKENIZER = char_tokenizer()
SWAP = {2: (1, 0), 4: (1, 0, 3, 2)}
"""Which positions can be swapped without a trace: the two of each part."""


def problem(m: int, seed: int, k: int = 15):
    """Examples under a random permutation, and that permutation."""
    task = Seq2SeqTask(x_len=m, phrase_len=1, n_examples=k, alignment="permutation", task_seed=seed)
    return *examples_of(task.sample(1, TOKENIZER, seed=seed, references=False), 0), task.aligned


@pytest.mark.parametrize("size", slow_but([(3, 40)], [(2, 40), (3, 40), (4, 40), (5, 100), (6, 40), (8, 40)]))
def test_em_recovers_the_alignment(size):
    m, trials = size
    hits = 0
    for seed in range(trials):
        x, y, gold = problem(m, seed)
        twins = {gold, tuple(SWAP[m][q] for q in gold)} if m in SWAP else {gold}
        hits += align_by_em(x, y, seed=seed).alignment in twins
    assert hits >= 0.95 * trials


def test_lengths_two_and_four_leave_both_alignments_equally_likely():
    for m, seed in itertools.product((2, 4), range(5)):
        x, y, gold = problem(m, seed)
        result = align_by_likelihood(x, y)
        assert result.ties == 2 and result.alignment in {gold, tuple(SWAP[m][q] for q in gold)}


def test_the_true_update_never_lowers_the_likelihood_and_the_printed_one_does():
    fell = 0
    for seed in range(20):
        x, y, _ = problem(5, seed)
        true, printed = (align_by_em(x, y, update=update, seed=seed).log_likelihood for update in ("true", "printed"))
        assert (true.diff() >= -1e-9).all()
        fell += float((printed.diff() < -1e-9).double().mean())
        assert printed[-1] < true[-1]
    assert fell / 20 > 0.5, "the printed update lowers the likelihood in most iterations"


@pytest.mark.parametrize("update", ["true", "printed"])
def test_an_update_equals_a_slow_loop(update):
    x, y, _ = problem(3, 1, k=4)
    before, after = (align_by_em(x, y, update=update, restarts=1, iterations=n, seed=5) for n in (3, 4))
    m, k = x.shape[1], len(x)
    row = {int(s): i for i, s in enumerate(before.symbols)}
    column = {int(u): i for i, u in enumerate(before.letters)}
    a, beta = before.probability, before.dictionary
    new_a, new_beta, likelihood = torch.zeros_like(a), torch.zeros_like(beta), 0.0
    for i, j in itertools.product(range(k), range(m)):
        joint = [float(a[j, p] * beta[row[int(x[i, p])], column[int(y[i, j])]]) for p in range(m)]
        likelihood += math.log(sum(joint))
        for p in range(m):
            weight = joint[p] / (sum(joint) if update == "true" else 1)
            new_a[j, p] += weight
            new_beta[row[int(x[i, p])], column[int(y[i, j])]] += weight
    assert torch.allclose(after.probability, new_a / new_a.sum(1, keepdim=True))
    assert torch.allclose(after.dictionary, new_beta / new_beta.sum(1, keepdim=True))
    assert math.isclose(float(after.log_likelihood[-1]), likelihood)


def test_em_reads_tokens_of_any_name_and_phrases_of_any_length():
    x, y, _ = problem(5, 2)
    named = align_by_em(x * 7 + 3, y * 11 + 1000, seed=1)
    assert named.alignment == align_by_em(x, y, seed=1).alignment and int(named.letters.min()) >= 1000
    task = Seq2SeqTask(x_len=3, phrase_len=2, alignment="permutation", task_seed=4)
    x, y = examples_of(task.sample(1, TOKENIZER, references=False), 0)
    assert align_by_em(x, y).alignment == tuple(q for q in task.aligned for _ in range(2))


@pytest.mark.parametrize("among", ["permutations", "mappings"])
def test_the_sequential_likelihood_equals_a_slow_loop(among):
    x, y, _ = problem(3, 0, k=5)
    result = align_by_likelihood(x, y, among=among, smoothing=0.3)

    def score(alignment):
        total = 0.0
        for i, j in itertools.product(range(1, 5), range(3)):
            earlier = [(int(x[r, alignment[s]]), int(y[r, s])) for r in range(i) for s in range(3)]
            symbol, letter = int(x[i, alignment[j]]), int(y[i, j])
            seen = sum(s == symbol for s, _ in earlier)
            total += math.log((earlier.count((symbol, letter)) + 0.3) / (seen + 0.3 * len(y.unique())))
        return total

    every = itertools.permutations(range(3)) if among == "permutations" else itertools.product(range(3), repeat=3)
    scores = {alignment: score(alignment) for alignment in every}
    assert math.isclose(result.log_likelihood, max(scores.values()))
    assert math.isclose(scores[result.alignment], max(scores.values()))


@pytest.mark.parametrize("m", [3, 5, 6])
def test_the_sequential_likelihood_finds_the_alignment(m):
    hits = [align_by_likelihood(x, y).alignment == gold for x, y, gold in (problem(m, seed) for seed in range(20))]
    assert sum(hits) >= 19


def test_as_printed_the_likelihood_is_zero_for_every_alignment():
    x, y, _ = problem(5, 0)
    result = align_by_likelihood(x, y, smoothing=0.0)
    assert result.log_likelihood == -math.inf and result.ties == math.factorial(5)


def test_a_contradicted_alignment_is_not_found():
    task = Seq2SeqTask(x_len=5, phrase_len=1, alignment="permutation")
    clean = task.sample(10, TOKENIZER, references=False)
    for prompts, wanted in ((clean, True), (task.corrupt(clean, "alignment"), False)):
        hits = [align_by_em(*examples_of(prompts, i)).alignment == task.aligned for i in range(10)]
        assert (sum(hits) >= 9) == wanted and (sum(hits) <= 2) == (not wanted)


def test_examples_that_cannot_be_aligned_are_refused():
    x, y, _ = problem(3, 0)
    refused("15 inputs and 14 outputs", align_by_em, x, y[1:])
    refused("at least 1 of each", align_by_em, x, y, restarts=0)
    refused("one letter a symbol", align_by_likelihood, x, y[:, :2])
    refused("at least two examples", align_by_likelihood, x[:1], y[:1])
    refused("smoothing is -1", align_by_likelihood, x, y, smoothing=-1.0)
    wide = torch.arange(9).repeat(2, 1)
    refused("9 positions have too many permutations", align_by_likelihood, wide, wide)
    refused("9 positions have too many mappings", align_by_likelihood, wide, wide, among="mappings")
    refused("task 'tokens' have no examples to align", examples_of, Prompts.from_tokens([[1, 2, 3]]), 0)
