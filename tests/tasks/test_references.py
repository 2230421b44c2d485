"""AblationBaseline accuracies beside slow twins and the published values."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import REFERENCES
from align_circuits.tasks.grammar import shapes
from align_circuits.tasks.posterior import symbol_posterior
from align_circuits.tasks.references import oracle_accuracy
from align_circuits.tasks.seq2seq import Seq2SeqTask

TOKENIZER = char_tokenizer()


def orders(m: int, ood: bool) -> list[tuple[int, ...]]:
    """Every possible test input, each as often as it has derivations."""
    if ood or m == 1:
        return list(itertools.permutations(range(m)))
    half = (m + 1) // 2
    parts = list(itertools.product(itertools.permutations(range(half)), itertools.permutations(range(half, m))))
    return [a + b for a, b in parts] + [b + a for a, b in parts]


class SlowReader:
    """One prompt, read letter by letter."""

    def __init__(self, prompts, index):
        self.aligned = prompts.task["aligned"]
        latent = {name: value[index].tolist() for name, value in prompts.latent.items()}
        self.letter, self.next, self.order, self.phrases = (latent[n] for n in ("letter", "next", "order", "phrases"))
        self.n_letters = len(prompts.answer_tokens)

    def state(self, symbol, prefix):
        """The state after a prefix and its probability."""
        state, likely = 0, 1.0
        for letter in prefix:
            edges = [e for e in self.letter[symbol][state] if e >= 0]
            if letter not in edges:
                return None, 0.0
            state, likely = self.next[symbol][state][edges.index(letter)], likely / len(edges)
        return state, likely

    def accepted(self, symbol, prefix):
        state, _ = self.state(symbol, prefix)
        return set() if state is None else {e for e in self.letter[symbol][state] if e >= 0}

    def best(self, belief, prefix, truth):
        """The accuracy of the letter most probably accepted, ties averaged."""
        hope = [
            sum(b for s, b in enumerate(belief) if letter in self.accepted(s, prefix))
            for letter in range(self.n_letters)
        ]
        chosen = [letter for letter, h in enumerate(hope) if h >= max(hope) - 1e-9]
        return sum(letter in truth for letter in chosen) / len(chosen)

    def references(self, phrase, offset, ood):
        m, test = len(self.aligned), self.phrases[-1]
        prefix = test[phrase][:offset]
        truth = self.accepted(self.order[-1][self.aligned[phrase]], prefix)
        memoryless = [self.state(s, prefix)[1] for s in range(m)]
        history = [0.0] * m
        for x in orders(m, ood):
            weight = math.prod(self.state(x[self.aligned[r]], test[r])[1] for r in range(phrase))
            symbol = x[self.aligned[phrase]]
            history[symbol] += weight * self.state(symbol, prefix)[1]
        return {
            "chance": len(truth) / self.n_letters,
            "memoryless": self.best([b / sum(memoryless) for b in memoryless], prefix, truth),
            "history": self.best([b / sum(history) for b in history], prefix, truth),
            "oracle": self.oracle(phrase, offset, truth),
        }

    def oracle(self, phrase, offset, truth):
        symbol, prefix = self.order[-1][self.aligned[phrase]], self.phrases[-1][phrase][:offset]
        scored = []
        for x, y in zip(self.order[:-1], self.phrases[:-1], strict=True):
            for p, written in enumerate(y):
                if x[self.aligned[p]] == symbol:
                    agrees = tuple(a == b for a, b in zip(reversed(prefix), reversed(written[:offset]), strict=True))
                    scored.append((agrees, written[offset]))  # compared from the latest letter back
        if not scored:
            return len(truth) / self.n_letters
        kept = [letter for agrees, letter in scored if agrees == max(a for a, _ in scored)]
        most = max(map(kept.count, kept))
        modes = {letter for letter in kept if kept.count(letter) == most}
        return len(modes & truth) / len(modes)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 5),
    c=st.integers(1, 3),
    k=st.integers(1, 4),
    alignment=st.sampled_from(("monotonic", "prior", "permutation")),
    ood=st.booleans(),
    n_letters=st.sampled_from((5, 26)),
    seed=st.integers(0, 999),
)
def test_references_equal_a_slow_reader(m, c, k, alignment, ood, n_letters, seed):
    task = Seq2SeqTask(
        x_len=m,
        phrase_len=c,
        n_examples=k,
        alignment=alignment,
        decay=0.5 if alignment == "prior" else None,
        ood=ood,
        letters="abcdefghijklmnopqrstuvwxyz"[:n_letters],
        alphabet_range=(4, min(n_letters, 18)),
        state_range=(4, 6),
        task_seed=seed,
    )
    prompts = task.sample(2, TOKENIZER, seed=seed)
    readers = [SlowReader(prompts, index) for index in range(2)]
    for row in prompts.targets.to_dict("records"):
        expected = readers[row["prompt"]].references(row["phrase"], row["offset"], ood)
        for name in REFERENCES:
            assert math.isclose(row[name], expected[name], abs_tol=1e-9), name


@pytest.mark.parametrize(
    ("m", "c", "memoryless", "history"), [(4, 2, 0.45, 0.79), (6, 2, 0.39, 0.69), (8, 1, 0.35, 0.63)]
)
def test_the_ceilings_of_the_first_letter_are_the_published_ones(m, c, memoryless, history):
    prompts = Seq2SeqTask(x_len=m, phrase_len=c, n_examples=1).sample(1000, TOKENIZER, seed=7)
    by_prompt = {name: prompts.column(name).view(1000, m, c)[:, :, 0].mean(1).numpy() for name in REFERENCES}
    # 6,000 prompts give .462 / .764, .388 / .687, .342 / .624 (standard errors of .001 to .002). The published history
    # ceiling at m = 4 is beyond reach: phrase 1 is memoryless, 3 one of two, 2 and 4 known at best: (.46+.61+1+1)/4.
    for name, published in (("memoryless", memoryless), ("history", history)):
        mean, error = np.mean(by_prompt[name]), np.std(by_prompt[name]) / math.sqrt(1000)
        assert abs(mean - published) < (0.03 if m == 4 else 0.01) + 2 * error, (name, mean)


def test_references_are_ordered_as_what_they_know():
    def means(ood):
        prompts = Seq2SeqTask(x_len=5, phrase_len=2, ood=ood).sample(300, TOKENIZER)
        return {name: prompts.column(name).view(300, 5, 2).mean((0, 1)).tolist() for name in REFERENCES}

    inside, outside = means(ood=False), means(ood=True)
    for offset in (0, 1):
        chance, memoryless, history, oracle = (inside[name][offset] for name in REFERENCES)
        assert chance < memoryless < history < oracle
    assert outside["history"][0] < inside["history"][0], "history should help less out of distribution"


def test_one_symbol_leaves_nothing_to_align():
    targets = Seq2SeqTask(x_len=1, phrase_len=3).sample(50, TOKENIZER).targets
    assert (targets[["memoryless", "history"]].to_numpy() == 1).all()


def test_the_oracle_prefers_the_latest_letters():
    symbol = torch.zeros(1, 3, 1, dtype=torch.long)
    phrases = torch.tensor([[[[0, 1, 2, 3]], [[5, 6, 7, 4]], [[0, 1, 7, 9]]]])
    accepted = torch.zeros(1, 1, 4, 10, dtype=torch.bool)
    accepted[..., 4] = True
    # before the last letter, example 2 agrees in the latest letter, example 1 in the two before it
    assert oracle_accuracy(symbol, phrases, accepted)[0, 0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("ood", [False, True])
def test_the_posterior_over_subsets_equals_the_sum_over_orders_at_length_six(ood):
    m = 6
    likelihood = torch.from_numpy(np.random.default_rng(0).random((2, m, m)))
    aligned = (2, 2, 0, 5, 1, 2)
    result = symbol_posterior(likelihood, aligned, shapes(m, ood))
    for prompt, phrase in itertools.product(range(2), range(m)):
        weight = np.zeros(m)
        for x in orders(m, ood):
            weight[x[aligned[phrase]]] += math.prod(float(likelihood[prompt, r, x[aligned[r]]]) for r in range(phrase))
        assert np.allclose(result[prompt, phrase], weight / weight.sum())


def test_the_posterior_survives_very_long_phrases():
    result = symbol_posterior(torch.full((1, 8, 8), 1e-300, dtype=torch.float64), tuple(range(8)), shapes(8, True))
    assert torch.allclose(result, torch.full_like(result, 1 / 8))
