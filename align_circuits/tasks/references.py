"""Reference accuracies: chance, two predictors that do not see the input, and exact lookup in the examples.

Each is the accuracy of a reference predictor on a target: 1 if its letter is correct, 0 if not, and the mean over its
letters if several tie. It is computed for the sampled letters, so that its mean over prompts is unbiased.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from align_circuits.tasks.automaton import Automata
from align_circuits.tasks.grammar import shapes
from align_circuits.tasks.posterior import symbol_posterior


def reference_accuracies(
    automata: Automata,
    order: Int[Tensor, "prompt example pos"],
    phrases: Int[Tensor, "prompt example phrase offset"],
    correct: Bool[Tensor, "prompt phrase offset letter"],
    aligned: tuple[int, ...],
    ood: bool,
) -> dict[str, Float[Tensor, "prompt phrase offset"]]:
    """Returns the accuracy of each of `prompts.REFERENCES` at each target, in [0, 1].

    - `chance` guesses among all letters.
    - `memoryless` knows the automata of the prompt's symbols and the letters of the phrase so far, not which symbol is
      translated: all are equally likely before the phrase begins.
    - `history` also knows the grammar, the alignment and all letters of the test example so far, so it rules symbols
      out. Only an accuracy above it is evidence of alignment.
    - `oracle` knows the alignment, sees the input and looks phrases up in the examples (`oracle_accuracy`).

    `memoryless` and `history` choose the letter that is most probably correct.

    Args:
        automata: The automata of each prompt.
        order: The symbol at each input position.
        phrases: The letters of each phrase.
        correct: The correct letters of each target.
        aligned: The input position of each phrase.
        ood: Whether the test input is out of the grammar: then all orders of the symbols are equally likely.
    """
    n, m, c, n_letters = correct.shape
    states, probability = automata.follow(phrases[:, -1])
    symbol = torch.arange(m).expand(n, m, m)[:, :, None].expand(-1, -1, c, -1)
    by_symbol = automata.accepted(symbol, states[..., :-1].transpose(2, 3), n_letters)
    prefix = probability[..., :-1].transpose(2, 3)
    known = symbol_posterior(probability[..., -1], aligned, shapes(m, ood))
    return {
        "chance": correct.double().mean(-1),
        "memoryless": _blind(prefix, by_symbol, correct),
        "history": _blind(prefix * known[:, :, None], by_symbol, correct),
        "oracle": oracle_accuracy(order[:, :, list(aligned)], phrases, correct),
    }


def _blind(
    belief: Float[Tensor, "prompt phrase offset symbol"],
    by_symbol: Bool[Tensor, "prompt phrase offset symbol letter"],
    correct: Bool[Tensor, "prompt phrase offset letter"],
) -> Float[Tensor, "prompt phrase offset"]:
    """The accuracy of the letter that is correct with the highest probability under a belief over symbols."""
    belief = belief / belief.sum(-1, keepdim=True)
    expected = torch.einsum("npos,nposl->npol", belief, by_symbol.double())
    # Letters of equal probability tie, whatever rounding made of their sums.
    best = expected >= expected.amax(-1, keepdim=True) - 1e-9
    return _share(best, correct)


def oracle_accuracy(
    symbol: Int[Tensor, "prompt example phrase"],
    phrases: Int[Tensor, "prompt example phrase offset"],
    correct: Bool[Tensor, "prompt phrase offset letter"],
) -> Float[Tensor, "prompt phrase offset"]:
    """Returns the accuracy of exact lookup in the examples.

    For each target it collects the letters at the same offset of the earlier phrases that translate the same symbol,
    keeps those whose prefix agrees best with the target's, and predicts the most frequent of them. Prefixes are
    compared from the latest letter back: agreement in the latest outweighs agreement in all before it. If no earlier
    phrase translates the symbol, it guesses among all letters.

    Args:
        symbol: The symbol that each phrase translates; the test example is the last.
        phrases: The letters of each phrase.
        correct: The correct letters of each target.
    """
    n, m, c, n_letters = correct.shape
    if phrases.shape[1] == 1:
        return correct.double().mean(-1)
    earlier, test = phrases[:, :-1].flatten(1, 2), phrases[:, -1]
    same = symbol[:, :-1].flatten(1)[:, None] == symbol[:, -1, :, None]
    agreement = torch.zeros_like(same, dtype=torch.long)
    accuracy = torch.empty(n, m, c, dtype=torch.float64)
    for offset in range(c):
        score = torch.where(same, agreement, -1)
        best = same & (score == score.amax(-1, keepdim=True))
        letters = earlier[:, None, :, offset].expand_as(same)
        votes = torch.zeros(n, m, n_letters).scatter_add_(2, letters, best.float())
        accuracy[:, :, offset] = _share(votes == votes.amax(-1, keepdim=True), correct[:, :, offset])
        # A binary number with the latest letter in its highest bit: it outweighs all before it, as the order demands.
        agreement += (earlier[:, None, :, offset] == test[:, :, None, offset]).long() << offset
    return accuracy


def _share(chosen: Bool[Tensor, "*batch letter"], correct: Bool[Tensor, "*batch letter"]) -> Float[Tensor, "*batch"]:
    """The share of the chosen letters that are correct."""
    return (chosen & correct).sum(-1).double() / chosen.sum(-1)
