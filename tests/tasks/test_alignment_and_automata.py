"""Grammar, alignment and automata: ranges, distributions, what they may not do."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from align_circuits.tasks.alignment_priors import alignment_prior, sample_alignment
from align_circuits.tasks.automaton import NONE, Automata
from align_circuits.tasks.grammar import sample_orders, sample_uniform_orders, shapes
from align_circuits.tasks.rng import Rng


def uniform_p(counts: Counter, outcomes: int) -> float:
    """The p-value of a chi-square test that all outcomes are equally likely."""
    observed = [*counts.values(), *[0] * (outcomes - len(counts))]
    return float(stats.chisquare(observed).pvalue)


def language(m: int) -> set[tuple[int, ...]]:
    """All inputs of the grammar, written out."""
    half = (m + 1) // 2
    parts = [list(itertools.permutations(range(half))), list(itertools.permutations(range(half, m)))]
    return {a + b for a, b in itertools.product(*parts)} | {b + a for a, b in itertools.product(*parts)}


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_all_derivations_of_the_grammar_are_equally_likely(m):
    orders = sample_orders(Rng(0), 4000, 2, m)
    counts = Counter(map(tuple, orders.flatten(0, 1).tolist()))
    assert set(counts) == language(m)
    assert len(counts) == 1 or uniform_p(counts, len(language(m))) > 1e-3


def test_the_grammar_recognises_its_inputs():
    for m in (1, 2, 3, 5):
        every = list(itertools.permutations(range(m)))
        allowed = shapes(m, ood=False)[:, torch.arange(m), torch.tensor(every)].all(-1).any(0)
        assert {x for x, yes in zip(every, allowed.tolist(), strict=True) if yes} == language(m)


def test_inputs_out_of_distribution_are_uniform_permutations():
    assert uniform_p(Counter(map(tuple, sample_uniform_orders(Rng(0), 8000, 1, 4)[:, 0].tolist())), 24) > 1e-3
    assert shapes(4, ood=True).all() and shapes(4, ood=True).shape == (1, 4, 4)


@pytest.mark.parametrize("form", ["text", "code"])
def test_the_prior_equals_equation_2(form):
    m, decay = 4, 1.5
    prior = alignment_prior(m, decay, form)
    for p, q in itertools.product(range(m), repeat=2):
        weight = [math.exp(-decay * abs(s - p) / (m if form == "code" else 1)) for s in range(m)]
        assert math.isclose(prior[p, q], weight[q] / sum(weight))


@pytest.mark.parametrize(("form", "published"), [("code", (0.17, 0.33, 0.80)), ("text", (0.52, 0.97, 1.0))])
def test_the_prior_has_the_published_diagonal(form, published):
    for decay, value in zip((1.0, 4.0, 16.0), published, strict=True):
        assert abs(float(alignment_prior(8, decay, form).diagonal().mean()) - value) < 0.01


def test_the_prior_is_sampled_with_replacement_and_phrase_by_phrase():
    drawn = np.array([sample_alignment(Rng(seed), "prior", 3, 1.0) for seed in range(3000)])
    expected = alignment_prior(3, 1.0).numpy()
    for phrase in range(3):
        counts = np.bincount(drawn[:, phrase], minlength=3)
        assert stats.chisquare(counts, expected[phrase] * 3000).pvalue > 1e-3
    joint = np.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=9)
    assert stats.chisquare(joint, np.outer(expected[0], expected[1]).ravel() * 3000).pvalue > 1e-3


def test_permutations_are_uniform_but_never_the_identity():
    counts = Counter(sample_alignment(Rng(seed), "permutation", 3) for seed in range(2000))
    assert (0, 1, 2) not in counts and uniform_p(counts, 5) > 1e-3
    assert sample_alignment(Rng(0), "permutation", 1) == (0,)
    assert sample_alignment(Rng(0), "monotonic", 4) == (0, 1, 2, 3)


@settings(max_examples=30, deadline=None)
@given(
    alphabet=st.tuples(st.integers(3, 10), st.integers(0, 16)),
    states=st.tuples(st.integers(3, 8), st.integers(0, 8)),
    edges=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    seed=st.integers(0, 999),
)
def test_automata_keep_to_their_ranges_and_rules(alphabet, states, edges, seed):
    edges = (edges[0], min(edges[0] + edges[1], 3))
    ranges = [(low, low + more) for low, more in (alphabet, states)]
    automata = Automata.sample(Rng(seed), 2, 3, 26, ranges[0], ranges[1], edges)
    for prompt, symbol in itertools.product(range(2), range(3)):
        tables = automata.letter, automata.next, automata.n_edges
        letter, following, n_edges = (table[prompt, symbol] for table in tables)
        n_states = int((n_edges > 0).sum()) - 1
        assert ranges[1][0] <= n_states <= ranges[1][1]
        assert len(set(letter[letter != NONE].tolist())) <= ranges[0][1]
        assert bool((n_edges[: n_states + 1] >= edges[0]).all() and (n_edges <= edges[1]).all())
        for state in range(len(n_edges)):
            count = int(n_edges[state])
            out, to = letter[state].tolist(), following[state].tolist()
            assert out[count:] == to[count:] == [NONE] * (len(out) - count)
            assert len(set(out[:count])) == count == len(set(to[:count])), "two edges share a letter or a state"
            assert all(1 <= state <= n_states for state in to[:count]) and all(0 <= w < 26 for w in out[:count])


def test_sizes_and_edges_are_uniform_over_their_ranges():
    automata = Automata.sample(Rng(0), 1500, 2, 26, (4, 6), (4, 7), (1, 4))
    n_states = (automata.n_edges > 0).sum(-1) - 1
    assert uniform_p(Counter(n_states.flatten().tolist()), 4) > 1e-3
    assert uniform_p(Counter(automata.n_edges[:, :, 0].flatten().tolist()), 4) > 1e-3
    start, following = automata.letter[:, :, 0], automata.next[:, :, 0][n_states == 5]
    assert uniform_p(Counter(start[start != NONE].tolist()), 26) > 1e-3
    assert uniform_p(Counter(following[following != NONE].tolist()), 5) > 1e-3
    # from an alphabet of 4, any first letter and any second one are equally likely
    small = Automata.sample(Rng(1), 3000, 1, 4, (4, 4), (4, 4), (2, 2)).letter[:, 0, 0].tolist()
    assert uniform_p(Counter(map(tuple, small)), 12) > 1e-3


def test_each_edge_is_taken_equally_often():
    automata = Automata.sample(Rng(0), 1, 1, 26, (6, 6), (4, 4), (3, 3))
    uniform = Rng(1).uniform("letters", 1, 6000, 2)
    letters, states = automata.walk(torch.zeros(1, 6000, dtype=torch.long), uniform)
    assert uniform_p(Counter(letters[0, :, 0].tolist()), 3) > 1e-3
    assert uniform_p(Counter(letters[0, :, 1][states[0, :, 1] == automata.next[0, 0, 0, 1]].tolist()), 3) > 1e-3


def test_following_a_phrase_equals_a_slow_reader():
    automata = Automata.sample(Rng(3), 2, 3, 26, (4, 6), (4, 5), (1, 4))
    symbol = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    letters, _ = automata.walk(symbol, Rng(4).uniform("letters", 2, 4, 3))
    states, probability = automata.follow(letters)
    own = 0
    for prompt, phrase, s in itertools.product(range(2), range(4), range(3)):
        state, likely = 0, 1.0
        assert states[prompt, phrase, s, 0] == 0 and probability[prompt, phrase, s, 0] == 1
        for offset, letter in enumerate(letters[prompt, phrase].tolist()):
            table = automata.letter[prompt, s, state].tolist() if state != NONE else []
            if letter in table:
                likely /= int(automata.n_edges[prompt, s, state])
                state = int(automata.next[prompt, s, state, table.index(letter)])
            else:
                state, likely = NONE, 0.0
            assert states[prompt, phrase, s, offset + 1] == state
            assert math.isclose(probability[prompt, phrase, s, offset + 1], likely)
        own += bool(probability[prompt, phrase, s, -1] > 0) and s == symbol[prompt, phrase]
    assert own == 8, "an automaton does not accept its own phrase"
