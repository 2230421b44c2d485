"""Probabilistic finite automata that write the phrases of the symbols (Agarwal & Sarawagi, 2025, App. B.2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from align_circuits.tasks.rng import Rng

NONE = -1
"""The letter and next state of an edge that does not exist, and the state after a letter that is not accepted."""


@dataclass(frozen=True, eq=False)
class Automata:
    """One automaton for each symbol of each prompt, as tables.

    State 0 is the start, to which no edge leads. The edges of a state have different letters and different next
    states, and each is taken with probability 1 / n_edges: given its letters, an automaton is deterministic.
    """

    letter: Int[Tensor, "prompt symbol state edge"]
    """The letter of each edge, from 0; `NONE` beyond the edges of a state."""
    next: Int[Tensor, "prompt symbol state edge"]
    """The state that each edge leads to; `NONE` beyond the edges of a state."""
    n_edges: Int[Tensor, "prompt symbol state"]
    """How many edges leave each state; 0 for states that do not exist."""

    @classmethod
    def sample(
        cls,
        rng: Rng,
        n: int,
        x_len: int,
        n_letters: int,
        alphabet_range: tuple[int, int],
        state_range: tuple[int, int],
        edge_range: tuple[int, int],
    ) -> "Automata":
        """Draws automata: an alphabet, a number of states, and for each state its edges.

        Sizes are uniform over their ranges (both ends included). Letters are drawn without replacement from the
        automaton's alphabet, next states without replacement from its states other than the start.

        Args:
            rng: The random generator.
            n: The number of prompts.
            x_len: The number of automata for each prompt.
            n_letters: The number of letters that alphabets are drawn from.
            alphabet_range: The fewest and the most letters of an automaton.
            state_range: The fewest and the most states, the start left out.
            edge_range: The fewest and the most edges that leave a state.

        Source: Missing Alignment Link, App. B.2.
        """

        def size(name: str, limits: tuple[int, int], *shape: int) -> Int[Tensor, "..."]:
            low, high = limits
            return low + rng.below(f"automata.{name}", torch.full(shape, high - low + 1, dtype=torch.int16))

        states, edges = state_range[1] + 1, edge_range[1]
        alphabet = rng.order("automata.alphabet", n, x_len, n_letters)
        n_symbols = size("alphabet_size", alphabet_range, n, x_len, 1)
        n_states = size("states", state_range, n, x_len, 1)
        n_edges = size("edges", edge_range, n, x_len, states)
        n_edges = torch.where(torch.arange(states) <= n_states, n_edges, 0)
        missing = torch.arange(edges) >= n_edges[..., None]

        rank = rng.distinct("automata.letters", edges, n_symbols.expand(n, x_len, states))
        letter = alphabet.gather(2, rank.flatten(2).long()).view(rank.shape)
        following = 1 + rng.distinct("automata.next", edges, n_states.expand(n, x_len, states))
        return cls(
            # A byte an entry is enough: `seq2seq` allows at most 100 letters and states.
            letter.masked_fill(missing, NONE).to(torch.int8),
            following.masked_fill(missing, NONE).to(torch.int8),
            n_edges.to(torch.int8),
        )

    def walk(
        self, symbol: Int[Tensor, " prompt *phrase"], uniform: Float[Tensor, "prompt *phrase offset"]
    ) -> tuple[Int[Tensor, "prompt *phrase offset"], Int[Tensor, "prompt *phrase offset"]]:
        """Writes one phrase for each entry of `symbol`.

        Args:
            symbol: The automaton that writes each phrase.
            uniform: Numbers in [0, 1), one per letter.

        Returns:
            The letters, and the state before each.
        """
        row = self._first_row(symbol)
        state = torch.zeros_like(symbol)
        letters, states = [], []
        flat_edges, flat_letter, flat_next = self.n_edges.flatten(), self.letter.flatten(), self.next.flatten()
        for step in uniform.unbind(-1):
            edge = (step * flat_edges.take(row + state)).long()
            taken = (row + state) * self.letter.shape[-1] + edge
            states.append(state)
            letters.append(flat_letter.take(taken))
            state = flat_next.take(taken).long()
        return torch.stack(letters, -1).long(), torch.stack(states, -1)

    def follow(
        self, letters: Int[Tensor, "prompt phrase offset"]
    ) -> tuple[Int[Tensor, "prompt phrase symbol state"], Float[Tensor, "prompt phrase symbol state"]]:
        """Reads each phrase with the automaton of every symbol.

        Returns:
            The state before each letter and after the last (`NONE` once a letter was not accepted), and the
            probability of the letters up to there, in [0, 1].
        """
        n, phrases, length = letters.shape
        symbol = torch.arange(self.letter.shape[1]).expand(n, phrases, -1)
        states, probabilities = [torch.zeros_like(symbol)], [torch.ones(symbol.shape, dtype=torch.float64)]
        for offset in range(length):
            match = self._edges(self.letter, symbol, states[-1]) == letters[:, :, offset, None, None]
            following = self._edges(self.next, symbol, states[-1]).long()
            n_edges = self.n_edges.flatten().take(self._first_row(symbol) + states[-1].clamp(min=0))
            states.append(torch.where(match, following, NONE).amax(-1))
            probabilities.append(probabilities[-1] * match.any(-1) / n_edges)
        return torch.stack(states, -1), torch.stack(probabilities, -1)

    def accepted(
        self, symbol: Int[Tensor, " prompt *which"], state: Int[Tensor, " prompt *which"], n_letters: int
    ) -> Bool[Tensor, " prompt *which letter"]:
        """Returns which letters an edge out of each state has; none if the state is `NONE`."""
        letters = self._edges(self.letter, symbol, state).long()
        mask = torch.zeros(*symbol.shape, n_letters + 1, dtype=torch.bool)  # the last column is that of missing edges
        return mask.scatter_(-1, torch.where(letters == NONE, n_letters, letters), True)[..., :-1]

    def _first_row(self, symbol: Int[Tensor, " prompt *which"]) -> Int[Tensor, " prompt *which"]:
        """The row of each automaton's start state when prompts, symbols and states are flattened."""
        prompts, symbols, states = self.n_edges.shape
        prompt = torch.arange(prompts).view(-1, *[1] * (symbol.ndim - 1))
        return (prompt * symbols + symbol) * states

    def _edges(
        self,
        table: Int[Tensor, "prompt symbol state edge"],
        symbol: Int[Tensor, "*which"],
        state: Int[Tensor, "*which"],
    ) -> Int[Tensor, "*which edge"]:
        """The entries of a table at each state; `NONE` where the state is `NONE`."""
        row = self._first_row(symbol) + state.clamp(min=0)
        entries = table.flatten(0, 2).index_select(0, row.flatten()).view(*row.shape, -1)
        return entries.masked_fill((state == NONE)[..., None], NONE)
