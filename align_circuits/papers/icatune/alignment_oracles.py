"""Two oracles that infer the alignment from the examples alone: EM (App. F) and sequential maximum likelihood (§5)."""

from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.rng import Rng


def examples_of(prompts: Prompts, prompt: int) -> tuple[Int[Tensor, "example pos"], Int[Tensor, "example token"]]:
    """Returns the inputs and outputs of one prompt's examples, the test example left out.

    Inputs are symbols of the prompt, counted from 0; outputs are the letters of all phrases, counted from 0.

    Raises:
        ValueError: The prompts are not those of a sequence-to-sequence task.
    """
    if prompts.task.get("name") != "seq2seq":
        raise ValueError(
            f"prompts of task {prompts.task.get('name')!r} have no examples to align: give those of a Seq2SeqTask"
        )
    order, phrases = prompts.latent["order"][prompt], prompts.latent["phrases"][prompt]
    return order[:-1], phrases[:-1].flatten(1)


@dataclass(frozen=True, eq=False)
class EMResult:
    """The best restart of EM."""

    alignment: tuple[int, ...]
    """The most probable input position, from 0, of each output token."""
    probability: Float[Tensor, "token pos"]
    """a: the probability that each output token is aligned with each input position."""
    symbols: Int[Tensor, " symbol"]
    """The input symbols that `dictionary` has a row for."""
    letters: Int[Tensor, " letter"]
    """The letters that `dictionary` has a column for."""
    dictionary: Float[Tensor, "symbol letter"]
    """β: the probability of each letter, given the symbol."""
    log_likelihood: Float[Tensor, " iteration"]
    """Eq. 6 before each update, in nats."""


def align_by_em(
    x: Int[Tensor, "input pos"],
    y: Int[Tensor, "output token"],
    *,
    update: Literal["true", "printed"] = "true",
    restarts: int = 32,
    iterations: int = 50,
    seed: int = 0,
) -> EMResult:
    r"""Estimates alignment and dictionary by expectation maximisation.

    Maximises Eq. 6, sum_ij log sum_p a_jp β(y_j^i | x_p^i). Each update weighs every (i, j, p) by its responsibility

        r_ijp = a_jp β(y_j^i | x_p^i) / Z_ij,    Z_ij = sum_p a_jp β(y_j^i | x_p^i),

    and then normalises: a_jp ~ sum_i r_ijp, β(u | v) ~ the sum of r_ijp over y_j^i = u, x_p^i = v. The likelihood never
    falls. Eqs. 7 and 8 as printed lack the division by Z_ij (`update="printed"`); with them it falls in many updates.

    The dictionary starts at random, since a uniform start is a fixed point if every input has every symbol. The restart
    with the highest likelihood wins. Alignments that fit equally well (swap the symbols of a part at length 2 or 4, and
    their letters) cannot be distinguished: see `Seq2SeqTask`.

    Args:
        x: The inputs, any integers.
        y: The outputs, any integers.
        update: The true update or the printed one.
        restarts: How many random starts, run in parallel.
        iterations: How many updates.
        seed: Of the starts.

    Raises:
        ValueError: `x` and `y` have different numbers of examples, or none; no restart or no iteration.

    Source: Missing Alignment Link, App. F, after Dyer et al. (2013); corrected as above.
    """
    _check_examples(x, y)
    if restarts < 1 or iterations < 1:
        raise ValueError(f"{restarts} restarts of {iterations} iterations: give at least 1 of each")
    if update not in ("true", "printed"):
        raise ValueError(f"update {update!r}: choose 'true' or 'printed'")
    m, n = x.shape[1], y.shape[1]
    symbols, x = x.unique(return_inverse=True)
    letters, y = y.unique(return_inverse=True)
    entry = x[:, None, :] * len(letters) + y[:, :, None]  # the index of β(y_j | x_p): [example token pos]
    noise = Rng(seed, "em").uniform("dictionary", restarts, len(symbols), len(letters)).double()
    # Away from 0, where a probability would stay for good: every update multiplies it.
    dictionary = _normalised(noise + 0.1)
    probability = torch.full((restarts, n, m), 1 / m, dtype=torch.float64)
    likelihoods = []
    for _ in range(iterations):
        joint = probability[:, None] * dictionary.flatten(1)[:, entry]
        total = joint.sum(-1, keepdim=True)
        likelihoods.append(total.log().sum((1, 2, 3)))
        weight = joint / total if update == "true" else joint
        probability = _normalised(weight.sum(1))
        counts = torch.zeros(restarts, len(symbols) * len(letters), dtype=torch.float64)
        counts.index_add_(1, entry.flatten(), weight.flatten(1))
        dictionary = _normalised(counts.view_as(dictionary))
    best = int(likelihoods[-1].argmax())
    return EMResult(
        tuple(probability[best].argmax(-1).tolist()),
        probability[best],
        symbols,
        letters,
        dictionary[best],
        torch.stack(likelihoods, dim=1)[best],
    )


@dataclass(frozen=True)
class LikelihoodResult:
    """The alignment of the highest sequential likelihood."""

    alignment: tuple[int, ...]
    """The input position, from 0, of each output token; the first of the alignments that tie."""
    ties: int
    """How many alignments have the same likelihood, this one included."""
    log_likelihood: float
    """In nats."""


def align_by_likelihood(
    x: Int[Tensor, "input pos"],
    y: Int[Tensor, "output letter"],
    *,
    among: Literal["permutations", "mappings"] = "permutations",
    smoothing: float = 0.1,
) -> LikelihoodResult:
    r"""Finds the alignment under which each example is best predicted from those before it, by trying all.

    The likelihood of A is the product over i = 2..k and j of

        (α + #{r < i, s: (x_A(s)^r, y_s^r) = (x_A(j)^i, y_j^i)}) / (α V + #{r < i, s: x_A(s)^r = x_A(j)^i}),

    with V letters. As printed (α = 0) it is zero, even for the gold alignment, as soon as a symbol has a new letter
    after the first example; on nearly all prompts every A then ties at zero.

    Args:
        x: The inputs, any integers.
        y: The outputs, one letter for each input symbol (c = 1), any integers.
        among: All permutations of the m positions (m up to 8), or all m^m mappings (m up to 6).
        smoothing: α, from 0 up.

    Raises:
        ValueError: Outputs and inputs differ in shape, fewer than two examples, too many alignments to try, or α < 0.

    Source: Missing Alignment Link, §5.
    """
    _check_examples(x, y)
    if x.shape != y.shape or len(x) < 2:
        raise ValueError(
            f"inputs {tuple(x.shape)} and outputs {tuple(y.shape)}: give at least two examples, one letter a symbol"
        )
    if smoothing < 0:
        raise ValueError(f"smoothing is {smoothing}: give a number from 0 up")
    m = x.shape[1]
    limit = 8 if among == "permutations" else 6
    if m > limit:
        raise ValueError(
            f"{m} positions have too many {among} to try them all: give at most {limit}, or use align_by_em"
        )
    listed = permutations(range(m)) if among == "permutations" else product(range(m), repeat=m)
    candidates = torch.tensor(list(listed))
    _, x = x.unique(return_inverse=True)
    letters, y = y.unique(return_inverse=True)
    rows = torch.arange(len(candidates))
    pairs = torch.zeros(len(candidates), int(x.max()) + 1, len(letters), dtype=torch.float64)
    score = torch.zeros(len(candidates), dtype=torch.float64)
    for i in range(len(x)):
        symbol = x[i][candidates]
        if i:
            seen = pairs[rows[:, None], symbol, y[i]] + smoothing
            score += (seen / (pairs.sum(2).gather(1, symbol) + smoothing * len(letters))).log().sum(1)
        # After the score: an example is predicted from those before it. `accumulate`, since a mapping may send several
        # letters of an example to one symbol.
        pairs.index_put_(
            (rows[:, None], symbol, y[i].expand_as(symbol)), torch.ones(1, dtype=torch.float64), accumulate=True
        )
    best = score.max()
    tied = score >= best - 1e-9
    return LikelihoodResult(tuple(candidates[tied.int().argmax()].tolist()), int(tied.sum()), float(best))


def _normalised(weights: Float[Tensor, "*batch outcome"]) -> Float[Tensor, "*batch outcome"]:
    """Weights as probabilities; a row of zeros stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _check_examples(x: Int[Tensor, "..."], y: Int[Tensor, "..."]) -> None:
    """Refuses inputs and outputs that are not pairs."""
    if len(x) != len(y) or not len(x):
        raise ValueError(f"{len(x)} inputs and {len(y)} outputs: give one output for each input, and at least one")
