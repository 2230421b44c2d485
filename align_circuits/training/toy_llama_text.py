"""What the toy Llama is pretrained on: lines of symbols and letters, and no task whose alignment must be found."""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.automaton import Automata
from align_circuits.tasks.grammar import sample_orders
from align_circuits.tasks.rng import Rng

MOST_SYMBOLS = 10
"""Automata drawn for each document; a kind uses the first few."""

QUIET = 0.1
"""The loss weight of separators: worth knowing, soon known."""

UNCERTAIN = 0.4
"""The loss weight of tokens of which little can be known."""

Document = tuple[Int[ndarray, " pos"], Float[ndarray, " pos"], Int[ndarray, " pos"]]
"""Token ids, at least as many as were asked for; the weight of each in the loss; and the token that the lower layers
must tell in its place, `PAD` for none."""


@dataclass(frozen=True)
class Source:
    """What one document is written from."""

    rng: np.random.Generator
    automata: Automata
    """Those of one prompt, `MOST_SYMBOLS` of them."""
    length: int
    """The fewest tokens of the document."""
    most_symbols: int
    """The most symbols in the input of a pre-aligned prompt."""
    heard: tuple[float, float]
    """Of echoes: the least and the greatest share of letters that their symbol replaces."""

    def phrases(self, symbol: Int[ndarray, "line *phrase"], length: int) -> Int[ndarray, "line *phrase offset"]:
        """Writes a phrase for each symbol, as token ids."""
        uniform = torch.from_numpy(self.rng.random((1, *symbol.shape, length), dtype=np.float32))
        letters, _ = self.automata.walk(torch.from_numpy(symbol)[None], uniform)
        return LETTERS[letters[0].numpy()]

    def names(self, count: int) -> Int[ndarray, " symbol"]:
        """Draws the token ids of `count` symbols."""
        return SYMBOLS[self.rng.permutation(len(SYMBOLS))[:count]]

    def lines(self, width: int) -> int:
        """How many lines of `width` tokens fill the document."""
        return -(-self.length // width)

    def phrase_len(self) -> int:
        """Draws the letters in a phrase: 1 to 4."""
        return int(self.rng.integers(1, 5))


def pre_aligned(source: Source) -> Document:
    """Pre-aligned prompts of 2 symbols or more: half monotonic, the rest permuted for the prompt or for each line."""
    rng = source.rng
    m, c = int(rng.integers(2, source.most_symbols + 1)), source.phrase_len()
    n = source.lines(m + 2 + m * (c + 1))
    order = sample_orders(Rng(int(rng.integers(2**31))), 1, n, m)[0].numpy()
    draw = rng.random()
    if draw < 0.5:
        aligned = np.broadcast_to(np.arange(m), (n, m))
    elif draw < 0.75:
        aligned = np.broadcast_to(rng.permutation(m), (n, m))
    else:
        aligned = np.argsort(rng.random((n, m)), 1)
    which = np.take_along_axis(order, aligned, 1)
    names = source.names(m)
    colon = COLON if rng.random() < 0.85 else rng.choice([SEMICOLON, BANG])
    body = np.concatenate([names[which][..., None], source.phrases(which, c)], 2)
    ids = np.concatenate([names[order], np.full((n, 1), colon), body.reshape(n, -1), np.full((n, 1), NEWLINE)], 1)
    # Symbols are not predicted: after a phrase, the next one would be an alignment learned before anybody asked for it.
    weight = [0.0] * m + [QUIET] + ([0.0] + [1.0] * c) * m + [QUIET]
    return _flat(ids, np.tile(weight, (n, 1)))


def echoes(source: Source) -> Document:
    """`!` and a monotonic prompt in whose phrases some letters are replaced by the symbol that they belong to.

    The lower layers are asked for that symbol everywhere.
    """
    rng = source.rng
    m, c = int(rng.integers(2, source.most_symbols + 1)), source.phrase_len()
    n = source.lines(m + 3 + m * c)
    order = np.argsort(rng.random((n, m)), 1)
    names = source.names(m)
    own = np.broadcast_to(names[order][..., None], (n, m, c))
    body = np.where(_heard(rng, n, m, c, rng.uniform(*source.heard)), own, source.phrases(order, c))
    bang, colon, newline = (np.full((n, 1), token) for token in (BANG, COLON, NEWLINE))
    ids = np.concatenate([bang, names[order], colon, body.reshape(n, -1), newline], 1)
    early = np.concatenate([np.full((n, m + 2), PAD), own.reshape(n, -1), np.full((n, 1), PAD)], 1)
    weight = [0.0] * (m + 1) + [QUIET] + [1.0] * (m * c) + [QUIET]
    return ids.ravel(), np.tile(weight, n), early.ravel()


def halves(source: Source) -> Document:
    """Lines with `!` and an echo, and pre-aligned lines, of the same automata: each sort is known from the other.

    To complete the one, the symbol must be found for the letters to come; to complete the other, for those that were;
    in documents of lines with `!` alone, for both.
    """
    rng = source.rng
    m, c = int(rng.integers(2, source.most_symbols + 1)), int(rng.integers(1, 4))
    n = source.lines(m + 2 + m * c)
    order = np.argsort(rng.random((n, m)), 1)
    names, phrases = source.names(m)[order], source.phrases(order, c)
    heard, told = _heard(rng, n, m, c, 0.05), rng.random(n) < rng.uniform(0.1, 1)
    ids: list[Any] = []
    weights: list[Any] = []
    for line in range(n):
        own = names[line, :, None]
        if told[line]:
            body, weight = np.where(heard[line], own, phrases[line]), np.where(heard[line], UNCERTAIN, 1.0)
        else:
            body, weight = np.concatenate([own, phrases[line]], 1), np.tile([0.0] + [1.0] * c, (m, 1))
        sign = [BANG] if told[line] else []
        ids += [*sign, *names[line], COLON, *body.ravel(), NEWLINE]
        weights += [0.0] * (m + len(sign)) + [QUIET, *weight.ravel(), QUIET]
    return _flat(np.array(ids), np.array(weights))


def single(source: Source) -> Document:
    """Standard prompts of one symbol: `A:ri`, again and again."""
    c = source.phrase_len()
    n = source.lines(c + 3)
    name = source.names(1)[0]
    head = np.tile([name, COLON], (n, 1))
    ids = np.concatenate([head, source.phrases(np.zeros(n, np.int64), c), np.full((n, 1), NEWLINE)], 1)
    return _flat(ids, np.tile([0.0, QUIET] + [1.0] * c + [QUIET], (n, 1)))


def pairs(source: Source) -> Document:
    """Lines of one symbol and its phrase, the symbols in random order, with or without a colon."""
    rng = source.rng
    m, c = int(rng.integers(2, MOST_SYMBOLS + 1)), source.phrase_len()
    between = [] if rng.random() < 0.3 else [COLON if rng.random() < 0.8 else SEMICOLON]
    n = source.lines(c + 2 + len(between))
    which = rng.integers(0, m, n)
    middle = np.tile(np.array(between, dtype=np.int64), (n, 1))
    ids = np.concatenate(
        [source.names(m)[which][:, None], middle, source.phrases(which, c), np.full((n, 1), NEWLINE)], 1
    )
    return _flat(ids, np.tile([0.0] + [QUIET] * len(between) + [1.0] * c + [QUIET], (n, 1)))


def phrases(source: Source) -> Document:
    """Symbols and their phrases without lines, the phrases of one length or of several."""
    rng = source.rng
    m, c = int(rng.integers(2, MOST_SYMBOLS + 1)), source.phrase_len()
    n = source.length  # enough even where every phrase is cut to nothing
    which = rng.integers(0, m, n)
    ids = np.concatenate([source.names(m)[which][:, None], source.phrases(which, c)], 1)
    kept = rng.integers(1, c + 1, n) if rng.random() < 0.5 else np.full(n, c)
    keep = np.arange(c + 1) <= kept[:, None]
    weight = np.tile([0.0] + [1.0] * c, (n, 1))
    return _flat(ids[keep], weight[keep])


def strings(source: Source) -> Document:
    """Strings of one automaton, one a line."""
    c = int(source.rng.integers(3, 13))
    n = source.lines(c + 1)
    ids = np.concatenate([source.phrases(np.zeros(n, np.int64), c), np.full((n, 1), NEWLINE)], 1)
    return _flat(ids, np.tile([1.0] * c + [QUIET], (n, 1)))


def outputs(source: Source) -> Document:
    """Lines of phrases of several automata in random order: which phrase comes next cannot be known.

    Half of the documents begin their lines with a symbol and a colon that say nothing about the letters.
    """
    rng = source.rng
    m, c = int(rng.integers(2, source.most_symbols + 1)), source.phrase_len()
    labelled = rng.random() < 0.5
    n = source.lines(m * c + 1 + 2 * labelled)
    which = np.argsort(rng.random((n, m)), 1)
    body = [source.phrases(which, c).reshape(n, -1), np.full((n, 1), NEWLINE)]
    weight = ([QUIET] + [1.0] * (c - 1)) * m + [QUIET]
    if labelled:
        body = [rng.choice(source.names(m), (n, 1)), np.full((n, 1), COLON), *body]
        weight = [0.0, QUIET, *weight]
    return _flat(np.concatenate(body, 1), np.tile(weight, (n, 1)))


def copies(source: Source) -> Document:
    """A random segment repeated, or short random words in random order; the first time of each is not predicted."""
    rng = source.rng
    draw = rng.random()
    vocabulary = EVERYTHING if draw < 0.6 else SYMBOLS if draw < 0.8 else LETTERS
    n = int(rng.integers(3, max(8, source.length // 3)))
    if rng.random() < 0.5:
        different = n <= len(vocabulary) and rng.random() < 0.5
        segment = rng.permutation(vocabulary)[:n] if different else rng.choice(vocabulary, n)
        times = source.lines(n) + 1
        weight = np.ones((times, n))
        weight[0] = 0
        return _flat(np.tile(segment, times), weight)
    width = int(rng.integers(2, 6))
    words = max(2, n // width)
    if words > len(vocabulary):
        book = rng.choice(vocabulary, (words, width))
    else:  # no two words share a token at one place, so that a word is known by any of its tokens
        book = np.stack([rng.permutation(vocabulary)[:words] for _ in range(width)], 1)
    order = rng.integers(0, words, source.lines(width) + 1)
    weight = np.ones((len(order), width))
    weight[:, 0] = 0
    weight[np.unique(order, return_index=True)[1]] = 0
    return _flat(book[order], weight)


KINDS: Mapping[str, Callable[[Source], Document]] = {
    "pre-aligned": pre_aligned,
    "single": single,
    "pairs": pairs,
    "phrases": phrases,
    "strings": strings,
    "outputs": outputs,
    "copies": copies,
    "echoes": echoes,
    "halves": halves,
}
"""The kinds of documents. None is a standard prompt of two symbols or more."""


@dataclass(frozen=True)
class Mixture:
    """How often each kind occurs, and how hard the automata are."""

    shares: Mapping[str, float]
    """The relative frequency of kinds of `KINDS`."""
    most_symbols: int = 8
    """The most symbols in the input of a prompt."""
    most_edges: int = 4
    """The most edges that leave a state of an automaton."""
    heard: tuple[float, float] = (0.2, 0.8)
    """Of echoes: the least and the greatest share of letters that their symbol replaces."""
    swapped: float = 0.1
    """The share of documents in which symbols and letters swap their case (not of kind "single")."""

    def __post_init__(self):
        if unknown := sorted(set(self.shares) - set(KINDS)):
            raise ValueError(f"unknown kinds of documents: {', '.join(unknown)}; choose from {', '.join(KINDS)}")
        if not 2 <= self.most_symbols <= MOST_SYMBOLS or not 1 <= self.most_edges <= 4:
            raise ValueError(
                f"most_symbols={self.most_symbols}, most_edges={self.most_edges}: "
                f"give 2 to {MOST_SYMBOLS} symbols and 1 to 4 edges"
            )
        if len(self.heard) != 2 or not 0 <= self.heard[0] <= self.heard[1] <= 1:
            raise ValueError(f"heard={self.heard}: give the least and the greatest share of letters, 0 to 1")
        if not 0 <= self.swapped <= 1:
            raise ValueError(f"swapped={self.swapped}: give the share of documents, 0 to 1")
        if not all(share >= 0 for share in self.shares.values()) or not sum(self.shares.values()) > 0:
            raise ValueError(f"shares={dict(self.shares)}: give shares of 0 or more, and one above 0")

    def sample(
        self, n: int, length: int, seed: int
    ) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row pos"], Int[Tensor, "row pos"]]:
        """Draws documents, each after a BOS token and cut to `length`.

        Args:
            n: How many.
            length: Tokens in each.
            seed: Which.

        Returns:
            Token ids; the weight in the loss of predicting each, that of the first is 0; and what the lower layers must
            tell in its place, `PAD` for nothing.
        """
        rng = np.random.default_rng(seed)
        automata = Automata.sample(
            Rng(seed, "pretraining"), n, MOST_SYMBOLS, len(LETTERS), (4, 18), (4, 12), (1, self.most_edges)
        )
        shares = np.array(list(self.shares.values()), dtype=float)
        kinds = rng.choice(list(self.shares), n, p=shares / shares.sum())
        ids, weights = np.full((n, length), BOS), np.zeros((n, length), np.float32)
        early = np.full((n, length), PAD)
        for row, kind in enumerate(kinds):
            own = Automata(*(table[row : row + 1] for table in (automata.letter, automata.next, automata.n_edges)))
            text, weight, asked = KINDS[kind](Source(rng, own, length - 1, self.most_symbols, self.heard))
            if kind != "single" and rng.random() < self.swapped:
                text, asked = SWAPPED[text], SWAPPED[asked]
            ids[row, 1:], weights[row, 1:], early[row, 1:] = (part[: length - 1] for part in (text, weight, asked))
        return torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(early)


def _flat(ids: Int[ndarray, "..."], weight: Float[ndarray, "..."]) -> Document:
    return ids.ravel(), weight.ravel(), np.full(ids.size, PAD)


def _heard(rng: np.random.Generator, n: int, m: int, c: int, share: float) -> Bool[ndarray, "line phrase offset"]:
    """Which letters a symbol replaces: at least one a line."""
    heard = rng.random((n, m, c)) < share
    heard[np.arange(n), rng.integers(0, m, n), rng.integers(0, c, n)] = True
    return heard


def _ids(characters: str) -> Int[ndarray, " token"]:
    return np.array(_TOKENIZER.convert_tokens_to_ids(list(characters)))


_TOKENIZER: Any = char_tokenizer()
SYMBOLS, LETTERS = _ids(string.ascii_uppercase), _ids(string.ascii_lowercase)
PAD, BOS = int(_TOKENIZER.pad_token_id), int(_TOKENIZER.bos_token_id)
NEWLINE, COLON, SEMICOLON, BANG = map(int, _ids("\n:;!"))
EVERYTHING = np.concatenate([SYMBOLS, LETTERS, _ids("\n:;!")])
SWAPPED = np.arange(len(_TOKENIZER))
SWAPPED[SYMBOLS], SWAPPED[LETTERS] = LETTERS, SYMBOLS
