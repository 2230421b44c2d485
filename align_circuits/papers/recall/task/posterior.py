"""The exact posterior of the type given grammar tokens, and the best accuracy that it allows."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from align_circuits.papers.recall.task.sequences import FactsTask
from align_circuits.papers.recall.task.world import RecallWorld


def type_posterior(world: RecallWorld, grammar: Int[ndarray, "prompt step"]) -> Float[ndarray, "prompt type"]:
    """Returns the probability of each type given grammar tokens of one subsequence, p(l | g) ∝ Π_t TM_l[g_t, g_t+1].

    The prior is uniform, and so is the first token, which alone is uninformative.

    Raises:
        ValueError: Tokens that are not grammar, or a world with relation tokens.
    """
    place = grammar - world.grammar_ids.start
    if place.size and not 0 <= place.min() <= place.max() < world.n_grammar:
        raise ValueError(
            f"not all tokens are grammar: give ids from {world.grammar_ids.start} to {world.separator - 1}"
        )
    with np.errstate(divide="ignore"):
        logs = np.log(world.chains)[:, place[:, :-1], place[:, 1:]].sum(-1).T
    weight = np.exp(logs - logs.max(1, keepdims=True))
    return weight / weight.sum(1, keepdims=True)


def type_ceiling(world: RecallWorld, grammar_len: int, n: int, seed: int = 0) -> Float[ndarray, " prompt"]:
    """Returns, for `n` drawn subsequences, the probability that the best guess of their type from grammar is right.

    Its mean is the highest accuracy that S = `grammar_len` tokens allow; 1 / L where they are uninformative.
    """
    prompts = FactsTask(world, 1, grammar_len, p_grammar=0.0).sample(n, seed=seed)
    return type_posterior(world, prompts.tokens[:, 1:].numpy()).max(1)
