"""The synthetic world of contextual recall: subjects, their attributes, and a grammar for each type of attribute."""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from align_circuits.tasks.rng import Rng

DIV_TOLERANCE = 0.02
"""The largest difference between the requested diversity of the chains and the attained one."""

ALPHAS = (1e-3, 1e4)
"""The Dirichlet parameters between which the one for a diversity is searched."""

MIN_CANDIDATES = 64
"""The least number of transition matrices among which those of the types are selected; eight a type if more."""


@dataclass(frozen=True)
class RecallWorld:
    """M subjects with one attribute of each of L types, and a Markov chain over G grammar tokens for each type.

    Token ids are in this order: the M subjects; the values of type 0, of type 1, ... (`n_values` each); the G grammar
    tokens; with `relation_tokens` one relation token a type; the separator last. `subject_ids`, `value_ids`,
    `grammar_ids`, `relation_ids` and `separator` name them, and `facts[l, j]` is the id of the type-l value of
    subject j. The values of a type are dealt to the subjects in random order, as evenly as the numbers allow.

    The diversity of the chains is Div = min over types l != l' of ||TM_l - TM_l'||_1 / (2G), the total variation of
    two rows averaged over rows, in [0, 1]. The paper prints the norm without 1 / (2G); its values, 0.1 to 0.5, fit
    this one. Rows come from a symmetric Dirichlet distribution; its parameter all but fixes the distance of two
    matrices, so it is searched first, and matrices are then selected greedily among candidates.

    With `relation_tokens` there are no chains: grammar tokens are uniform, and one of them is replaced by the token of
    the type.

    Source: Vasudeva et al. (2026), "Understanding Contextual Recall in Transformers", §2 and §4. Not given there and
    chosen here: G, the number of candidates, and the grammar-only chain's parameter, which is that of the types.

    Raises:
        ValueError: A number outside its range; more values than subjects; a diversity that cannot be reached (the
            nearest one is named).

    >>> world = RecallWorld.small()
    >>> world.d_vocab, world.separator, world.facts.shape
    (35, 34, (3, 16))
    """

    n_subjects: int = 256
    """M."""
    n_values: tuple[int, ...] = (256, 32, 32, 32, 32, 32, 32, 32)
    """M_l, the unique values of each type, at most M; L is their number, at least 2."""
    n_grammar: int = 20
    """G, at least 2."""
    div: float | None = 0.5
    """Div, in (0, 1]; None with relation tokens."""
    relation_tokens: bool = False
    """Whether a token states the type (§4), rather than the statistics of the grammar (§2)."""
    world_seed: int = 0
    """Of the facts and the chains."""

    def __post_init__(self):
        for name, least in (("n_subjects", 1), ("n_grammar", 2), ("world_seed", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}: give at least {least}")
        if len(self.n_values) < 2 or min(self.n_values) < 1:
            raise ValueError(f"n_values is {self.n_values}: give a number from 1 up for each of 2 types or more")
        if max(self.n_values) > self.n_subjects:
            raise ValueError(
                f"n_values is {self.n_values}, but there are {self.n_subjects} subjects, and every value is some "
                f"subject's: give at most {self.n_subjects} values of a type, or more subjects"
            )
        if self.relation_tokens != (self.div is None):
            raise ValueError(
                f"div is {self.div} with relation_tokens={self.relation_tokens}: chains have a diversity, and a world "
                "with relation tokens has no chains; give div=None there, and only there"
            )
        if self.div is not None:
            if not 0 < self.div <= 1:
                raise ValueError(f"div is {self.div}: give a mean total variation above 0 and up to 1")
            if abs(self.attained_div - self.div) > DIV_TOLERANCE:
                raise ValueError(
                    f"div is {self.div}, but the nearest found for {self.n_types} chains over {self.n_grammar} grammar "
                    f"tokens is {self.attained_div:.3f} (Dirichlet parameter {self.alpha:.3g}): give that, or more "
                    "grammar tokens"
                )

    @classmethod
    def paper(cls, relation_tokens: bool = False, **changes: Any) -> "RecallWorld":
        """Returns the paper's world of §2 and §3, or that of §4, in which every type has 32 values."""
        defaults = {"n_values": (32,) * 8, "div": None, "relation_tokens": True} if relation_tokens else {}
        return cls(**(defaults | changes))

    @classmethod
    def small(cls, relation_tokens: bool = False, **changes: Any) -> "RecallWorld":
        """Returns a world of 16 subjects, three types of four values and six grammar tokens, for tests."""
        defaults = {"n_subjects": 16, "n_values": (4, 4, 4), "n_grammar": 6}
        return cls(**(defaults | ({"div": None, "relation_tokens": True} if relation_tokens else {}) | changes))

    @property
    def n_types(self) -> int:
        """L."""
        return len(self.n_values)

    @property
    def d_vocab(self) -> int:
        """V, the number of tokens."""
        return self.separator + 1

    @property
    def subject_ids(self) -> range:
        """The ids of the subjects."""
        return range(self.n_subjects)

    @cached_property
    def value_ids(self) -> tuple[range, ...]:
        """The ids of the values of each type."""
        ends = self.n_subjects + np.cumsum([0, *self.n_values])
        return tuple(range(int(start), int(end)) for start, end in pairwise(ends))

    @property
    def grammar_ids(self) -> range:
        """The ids of the grammar tokens."""
        start = self.value_ids[-1].stop
        return range(start, start + self.n_grammar)

    @property
    def relation_ids(self) -> range:
        """The ids of the relation tokens, one a type; empty without them."""
        start = self.grammar_ids.stop
        return range(start, start + self.n_types * self.relation_tokens)

    @property
    def separator(self) -> int:
        """The id of the separator."""
        return self.relation_ids.stop

    @cached_property
    def facts(self) -> Int[ndarray, "type subject"]:
        """The id of the value that each subject has of each type."""
        order = self._rng.order("facts", self.n_types, self.n_subjects).numpy()
        rows = [self.value_ids[type_].start + order[type_] % count for type_, count in enumerate(self.n_values)]
        return np.stack(rows)

    @cached_property
    def type_of(self) -> Int[ndarray, " token"]:
        """The type of each id that is a value; -1 for other ids."""
        types = np.full(self.d_vocab, -1)
        for type_, ids in enumerate(self.value_ids):
            types[ids] = type_
        return types

    @cached_property
    def token_strings(self) -> dict[int, str]:
        """The text of every id: `s3`, `a1.2` (value 2 of type 1), `g5`, `r1` and `[sep]`, each with a space behind."""
        texts = [f"s{j}" for j in self.subject_ids]
        texts += [f"a{type_}.{place}" for type_, count in enumerate(self.n_values) for place in range(count)]
        texts += [f"g{place}" for place in range(self.n_grammar)] + [f"r{type_}" for type_ in self._types]
        return {token: f"{text} " for token, text in enumerate([*texts, "[sep]"])}

    @property
    def chains(self) -> Float[ndarray, "type from to"]:
        """The transition matrix of each type.

        Raises:
            ValueError: A world with relation tokens, which has none.
        """
        return self._alpha_and_chains[1][:-1]

    @property
    def grammar_only(self) -> Float[ndarray, "from to"]:
        """The transition matrix of text that states no fact. Raises as `chains` does."""
        return self._alpha_and_chains[1][-1]

    @property
    def alpha(self) -> float:
        """The Dirichlet parameter of the rows. Raises as `chains` does."""
        return self._alpha_and_chains[0]

    @property
    def attained_div(self) -> float:
        """The Div of `chains`, within `DIV_TOLERANCE` of `div`. Raises as `chains` does."""
        return float(distances(self.chains)[np.triu_indices(self.n_types, 1)].min())

    def split(self, n_seen: int, *, n_values: int | None = None, seed: int = 0) -> tuple[tuple[int, ...], ...]:
        """Divides the subjects into those used in finetuning and the held-out ones.

        Args:
            n_seen: M_ft, how many are seen, from 1 to M.
            n_values: How many unique values, over all types, the seen ones have together; not controlled by default.
            seed: Which split.

        Returns:
            The seen subjects and the held-out ones, each in order.

        Raises:
            ValueError: More subjects than there are, or a number of values that the search does not reach.
        """
        if not 1 <= n_seen <= self.n_subjects:
            raise ValueError(f"n_seen is {n_seen}: give 1 to {self.n_subjects}, the number of subjects")
        draws = Rng(seed, "recall split")
        order = draws.order("subjects", self.n_subjects).numpy()
        if n_values is not None:
            order = self._with_values(order, n_seen, n_values, draws)
        return tuple(sorted(order[:n_seen].tolist())), tuple(sorted(order[n_seen:].tolist()))

    def _with_values(
        self, order: Int[ndarray, " subject"], n_seen: int, n_values: int, draws: Rng
    ) -> Int[ndarray, " subject"]:
        """Swaps seen and held-out subjects at random while that brings the number of values nearer."""
        counts = np.bincount(self.facts[:, order[:n_seen]].ravel(), minlength=self.d_vocab)
        swaps = draws.uniform("swaps", 40 * self.n_subjects, 2).numpy()
        for first, second in swaps if n_seen < self.n_subjects else []:
            distance = abs(np.count_nonzero(counts) - n_values)
            if not distance:
                break
            inside, outside = int(first * n_seen), n_seen + int(second * (self.n_subjects - n_seen))
            swapped = counts.copy()
            swapped[self.facts[:, order[inside]]] -= 1
            swapped[self.facts[:, order[outside]]] += 1
            if abs(np.count_nonzero(swapped) - n_values) <= distance:
                counts = swapped
                order[[inside, outside]] = order[[outside, inside]]
        if (attained := np.count_nonzero(counts)) != n_values:
            raise ValueError(
                f"n_values is {n_values}, but the nearest found for {n_seen} subjects is {attained} (a world of "
                f"{sum(self.n_values)} values): give that, or another number of subjects"
            )
        return order

    @property
    def _types(self) -> range:
        """The types that have a relation token."""
        return range(len(self.relation_ids))

    @property
    def _rng(self) -> Rng:
        return Rng(self.world_seed, "recall world")

    @cached_property
    def _alpha_and_chains(self) -> tuple[float, Float[ndarray, "chain from to"]]:
        """The Dirichlet parameter, and the chains of the types followed by the grammar-only one."""
        if self.div is None:
            raise ValueError("a world with relation tokens has no Markov chains: its grammar tokens are uniform")
        alpha = _alpha_for(self.div, self.n_grammar)
        candidates = _rows(
            self._rng.generator("pool"), alpha, max(MIN_CANDIDATES, 8 * self.n_types) + 1, self.n_grammar
        )
        chosen = _select(distances(candidates[:-1]), self.n_types, self.div)
        return alpha, candidates[[*chosen, -1]]


def distances(chains: Float[ndarray, "chain from to"]) -> Float[ndarray, "chain chain"]:
    """Returns the distance of every two chains: the total variation of two rows, averaged over rows, in [0, 1]."""
    return np.stack([np.abs(chains - chain).sum((1, 2)) for chain in chains]) / (2 * chains.shape[1])


def _rows(rng: np.random.Generator, alpha: float, *shape: int) -> Float[ndarray, "*chain from to"]:
    """Matrices with rows from a symmetric Dirichlet distribution, `shape` being the chains and G."""
    size = (*shape, shape[-1])
    logs = np.log(rng.standard_gamma(alpha + 1, size)) + np.log(1 - rng.random(size)) / alpha  # no underflow
    rows = np.exp(logs - logs.max(-1, keepdims=True))
    return rows / rows.sum(-1, keepdims=True)


@cache
def _alpha_for(div: float, n_grammar: int) -> float:
    """The Dirichlet parameter whose matrices have the mean distance `div`, or the nearer end of `ALPHAS`."""
    low, high = np.log(ALPHAS)
    for _ in range(20):
        middle = (low + high) / 2
        two = _rows(np.random.default_rng(0), float(np.exp(middle)), 2, max(1, 500 // n_grammar), n_grammar)
        if np.abs(two[0] - two[1]).sum(-1).mean() / 2 > div:
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))


def _select(distance: Float[ndarray, "chain chain"], n_types: int, div: float) -> list[int]:
    """Chains chosen one by one so that the nearest of those before lies as nearly `div` away as possible.

    Each chain is tried as the first; the choice that ends nearest to `div` is taken.
    """
    selections = []
    for first in range(len(distance)):
        chosen, reached = [first], 1.0
        for _ in range(n_types - 1):
            nearest = distance[chosen].min(0)
            missed = np.abs(nearest - div)
            missed[chosen] = np.inf
            chosen.append(int(missed.argmin()))
            reached = min(reached, float(nearest[chosen[-1]]))
        selections.append((abs(reached - div), chosen))
    return min(selections)[1]
