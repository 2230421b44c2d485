"""The task of what alignment needs, its predictors, and what is read off its table."""

from collections import Counter
from dataclasses import asdict
from itertools import permutations, product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from align_circuits.beyond import alignment_probes, needs
from align_circuits.beyond.needs import Architecture, Learning, Needs, draw, tokens


def test_each_prompt_has_one_alignment_and_each_token_its_place():
    drawn = draw(5, 3, 4, seed=1)
    assert drawn["x"].shape == (5, 5, 3) and drawn["aligned"].shape == (5, 1, 3)
    for prompt, example, letter in product(range(5), range(5), range(3)):
        place = int(drawn["aligned"][prompt, 0, letter])
        assert drawn["y"][prompt, example, letter] == drawn["x"][prompt, example, place]
    ids, columns = tokens(drawn)
    assert ids.shape == (5, 5 * 8) and columns.tolist()[1] == [12, 13, 14]
    assert (ids[:, 3::8] == 2).all() and (ids[:, 7::8] == 3).all()
    by_place = [set(ids[:, place::8].flatten().tolist()) for place in range(8)]
    assert sum(map(len, by_place)) == len(set.union(*by_place)), "no token at two places"
    alphabet = needs.SYMBOLS * needs.LONGEST
    assert ids.max() < 4 + 2 * alphabet <= 64, "the vocabulary of the bundled tokenizer"


def test_shuffled_examples_have_alignments_of_their_own():
    aligned = draw(20, 3, 6, seed=0, shuffled=True)["aligned"]
    assert aligned.shape == (20, 7, 3)
    assert all(len(prompt.unique(dim=0)) > 1 for prompt in aligned)


def test_the_posterior_counts_the_permutations_that_fit():
    drawn = draw(6, 3, 3, seed=2)
    found = needs.posterior(drawn["x"], drawn["y"])
    assert found.shape == (6, 5, 3, 3)
    for prompt, i in product(range(6), range(5)):
        x, y = drawn["x"][prompt].tolist(), drawn["y"][prompt].tolist()
        fit = [a for a in permutations(range(3)) if all([x[e][p] for p in a] == y[e] for e in range(i))]
        for j, p in product(range(3), range(3)):
            assert found[prompt, i, j, p] == pytest.approx(sum(a[j] == p for a in fit) / len(fit))


def test_predictors_are_those_of_a_loop_over_prompts():
    measured: Any = needs.references(x_len=3, n_examples=3, prompts=40, seed=3).set_index("predictor")["value"]
    drawn = draw(40, 3, 3, needs.TESTED + 3)
    right: dict[str, list[float]] = {"retrieval": [], "blind": [], "bayes": []}
    for x, y in zip(drawn["x"].tolist(), drawn["y"].tolist(), strict=True):
        like = [sum(a == b for a, b in zip(given, x[-1], strict=True)) for given in x[:-1]]
        likest = [y[e] for e in range(3) if like[e] == max(like)]
        fit = [a for a in permutations(range(3)) if all([x[e][p] for p in a] == y[e] for e in range(3))]
        for j in range(3):
            right["retrieval"].append(sum(output[j] == y[-1][j] for output in likest) / len(likest))
            left = Counter(x[-1]) - Counter(y[-1][:j])
            right["blind"].append(_share(left, y[-1][j]))
            right["bayes"].append(_share(Counter(x[-1][a[j]] for a in fit), y[-1][j]))
    for name, values in right.items():
        assert measured[name] == pytest.approx(np.mean(values)), name


def _share(counts: Counter, answer: int) -> float:
    best = [symbol for symbol, count in counts.items() if count == max(counts.values())]
    return (answer in best) / len(best)


def test_loops_share_their_weights():
    def count(blocks: int, loops: int) -> int:
        return sum(each.numel() for each in needs.network(Architecture(blocks, loops, 16), Learning(), 0).parameters())

    assert count(1, 3) == count(1, 1) < count(3, 1)
    ids, columns = tokens(draw(2, 2, 2, seed=0))
    looped = needs.network(Architecture(1, 2, 16), Learning(), 0)
    twice = needs.network(Architecture(2, 1, 16), Learning(), 0)
    twice.load_state_dict(looped.state_dict())
    with torch.no_grad():
        assert torch.equal(needs.logits_of(looped, ids, columns), needs.logits_of(twice, ids, columns))


def test_the_largest_m_counts_lengths_from_the_first_without_a_gap():
    config = Needs(learning=Learning((2, 3, 4)))
    accuracies = {"em": (1.0, 1.0, 1.0), "gap": (0.95, 0.5, 0.95), "two": (0.95, 0.9, 0.89), "none": (0.5, 1.0, 1.0)}
    rows = [
        {"name": name, "x_len": m, "seed": 0, "value": value, "low": 0.0, "high": 1.0, "n": 9}
        for name, values in accuracies.items()
        for m, value in zip((2, 3, 4), values, strict=True)
    ]
    frame: Any = pd.DataFrame(rows)
    parts = {
        "references": frame[frame["name"] == "em"].rename(columns={"name": "predictor"}),
        "learned": frame[frame["name"] != "em"].rename(columns={"name": "model"}),
    }
    table = needs._summarize(config, parts)
    largest = table[table["metric"] == "largest m"].set_index("model")["value"].to_dict()
    assert largest == {"em": 4, "gap": 2, "two": 3, "none": 1}


def test_what_a_probe_reads_is_an_orthonormal_basis_that_tells_its_classes_apart():
    generator = np.random.default_rng(0)
    target = generator.integers(0, 3, 600)
    x = generator.normal(size=(600, 8))
    x[:, 1] += 3 * (target == 1)
    x[:, 5] += 3 * (target == 2)
    basis = alignment_probes._basis(alignment_probes._fitted(x, target))
    assert torch.allclose(basis @ basis.T, torch.eye(2), atol=1e-5)
    assert (basis[:, [1, 5]].square().sum(0) > 0.9).all()


def test_an_exchange_counts_answers_by_the_other_alignment():
    """The target of the pair is the base prompt's symbol where the source prompt's alignment points to."""
    base, source = draw(50, 3, 2, seed=1), draw(50, 3, 2, seed=2)
    swapped = base["x"][:, -1].gather(1, source["aligned"][:, 0])[:, 0]
    pair = alignment_probes._pair(base, source, swapped)
    column = int(tokens(base)[1][-1, 0])
    assert pair.corrupted.own_correct is not None
    assert pair.clean.inputs[0, column - 1] == 2, "the colon predicts the first letter"
    assert (pair.clean.answer_tokens[base["y"][:, -1, 0]] == pair.clean.inputs[:, column]).all()
    for prompt in range(50):
        place = int(source["aligned"][prompt, 0, 0])
        assert pair.corrupted.own_correct[prompt].nonzero().flatten().tolist() == [int(base["x"][prompt, -1, place])]


def test_configs_come_back_from_json():
    assert Architecture(**asdict(Architecture(2, 3, 16))).name == "2 layers x 3 loops, width 16"
    assert Architecture(1).name == "1 layer, width 64"
