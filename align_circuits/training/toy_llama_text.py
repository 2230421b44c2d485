"""The text on which the toy Llama is pretrained: lines of symbols and letters, without any task of alignment."""

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
"""Automata drawn for each document; each kind of document uses the first few."""

SEPARATOR_WEIGHT = 0.1
"""The loss weight of separators, which are easy to predict."""

UNCERTAIN_WEIGHT = 0.4
"""The loss weight of tokens that can hardly be predicted."""

Document = tuple[Int[ndarray, " pos"], Float[ndarray, " pos"], Int[ndarray, " pos"]]
"""Token ids, at least as many as the document's length; the weight of each in the loss; and its early label: the token
that the lower layers must predict there, `PAD` for none."""


@dataclass(frozen=True)
class DocumentSampler:
    """The random generator, the automata and the settings of one document."""

    rng: np.random.Generator
    automata: Automata
    """`MOST_SYMBOLS` automata, as those of one prompt."""
    length: int
    """The fewest tokens of the document."""
    most_symbols: int
    """The most symbols in the input of a pre-aligned prompt."""
    echoed: tuple[float, float]
    """In echoes, the least and the greatest share of letters that are replaced by their symbol."""

    def phrases(self, symbol: Int[ndarray, " line *phrase"], length: int) -> Int[ndarray, "line *phrase offset"]:
        """Writes a phrase for each symbol, as token ids."""
        uniform = torch.from_numpy(self.rng.random((1, *symbol.shape, length), dtype=np.float32))
        letters, _ = self.automata.walk(torch.from_numpy(symbol)[None], uniform)
        return LETTERS[letters[0].numpy()]

    def names(self, count: int) -> Int[ndarray, " symbol"]:
        """Draws `count` different symbols, as token ids."""
        return SYMBOLS[self.rng.permutation(len(SYMBOLS))[:count]]

    def lines(self, width: int) -> int:
        """Returns how many lines of `width` tokens fill the document."""
        return -(-self.length // width)

    def phrase_len(self) -> int:
        """Draws the number of letters in a phrase, 1 to 4."""
        return int(self.rng.integers(1, 5))


def pre_aligned(sampler: DocumentSampler) -> Document:
    """Pre-aligned prompts of 2 symbols or more: half monotonic, the rest permuted for the prompt or for each line."""
    rng = sampler.rng
    m, c = int(rng.integers(2, sampler.most_symbols + 1)), sampler.phrase_len()
    n = sampler.lines(m + 2 + m * (c + 1))
    # `Rng` has streams by name, the same for every document of one seed: each document draws a seed of its own.
    order = sample_orders(Rng(int(rng.integers(2**31))), 1, n, m)[0].numpy()
    draw = rng.random()
    if draw < 0.5:
        aligned = np.broadcast_to(np.arange(m), (n, m))
    elif draw < 0.75:
        aligned = np.broadcast_to(rng.permutation(m), (n, m))
    else:
        aligned = np.argsort(rng.random((n, m)), 1)
    symbols = np.take_along_axis(order, aligned, 1)
    names = sampler.names(m)
    colon = COLON if rng.random() < 0.85 else rng.choice([SEMICOLON, BANG])
    body = np.concatenate([names[symbols][..., None], sampler.phrases(symbols, c)], 2)
    # Symbols have no weight: to predict the next one after a phrase is to align, which pretraining must not teach.
    return _lines(n, (names[order], 0), (colon, SEPARATOR_WEIGHT), (body, ([0] + [1] * c) * m))


def echoes(sampler: DocumentSampler) -> Document:
    """`!` and a monotonic prompt in whose phrases some letters are replaced by the symbol to which they belong.

    That symbol is the early label at every letter.
    """
    rng = sampler.rng
    m, c = int(rng.integers(2, sampler.most_symbols + 1)), sampler.phrase_len()
    n = sampler.lines(m + 3 + m * c)
    order = np.argsort(rng.random((n, m)), 1)
    names = sampler.names(m)
    symbols = np.broadcast_to(names[order][..., None], (n, m, c))
    body = np.where(_echoed(rng, n, m, c, rng.uniform(*sampler.echoed)), symbols, sampler.phrases(order, c))
    ids, weight, _ = _lines(n, (BANG, 0), (names[order], 0), (COLON, SEPARATOR_WEIGHT), (body, 1))
    # Before the letters stand the sign, the symbols and the colon; behind them the newline.
    early = np.pad(symbols.reshape(n, -1), [(0, 0), (m + 2, 1)], constant_values=PAD)
    return ids, weight, early.ravel()


def halves(sampler: DocumentSampler) -> Document:
    """Lines with `!` and an echo, and pre-aligned lines, of the same automata: each kind completes the other.

    To continue an echo from pre-aligned lines, the symbol of the coming letters must be found; to continue a
    pre-aligned line from echoes, the symbol of earlier letters; in documents of echoes alone, both.
    """
    rng = sampler.rng
    m, c = int(rng.integers(2, sampler.most_symbols + 1)), int(rng.integers(1, 4))
    n = sampler.lines(m + 2 + m * c)
    order = np.argsort(rng.random((n, m)), 1)
    names, phrases = sampler.names(m)[order], sampler.phrases(order, c)
    echoed, signed = _echoed(rng, n, m, c, 0.05), rng.random(n) < rng.uniform(0.1, 1)
    ids: list[Any] = []
    weights: list[Any] = []
    # One by one, since lines with a sign and pre-aligned lines differ in length.
    for line in range(n):
        symbols = names[line, :, None]
        if signed[line]:
            body = np.where(echoed[line], symbols, phrases[line])
            weight = np.where(echoed[line], UNCERTAIN_WEIGHT, 1.0)
        else:
            body, weight = np.concatenate([symbols, phrases[line]], 1), np.tile([0.0] + [1.0] * c, (m, 1))
        sign = [BANG] if signed[line] else []
        ids += [*sign, *names[line], COLON, *body.ravel(), NEWLINE]
        weights += [0.0] * (m + len(sign)) + [SEPARATOR_WEIGHT, *weight.ravel(), SEPARATOR_WEIGHT]
    return _flat(np.array(ids), np.array(weights))


def single(sampler: DocumentSampler) -> Document:
    """Standard prompts of one symbol, such as `A:ri`, repeated."""
    c = sampler.phrase_len()
    n = sampler.lines(c + 3)
    name = sampler.names(1)[0]
    return _lines(n, (name, 0), (COLON, SEPARATOR_WEIGHT), (sampler.phrases(np.zeros(n, np.int64), c), 1))


def pairs(sampler: DocumentSampler) -> Document:
    """Lines of one symbol and its phrase, the symbols in random order, with or without a colon."""
    rng = sampler.rng
    m, c = int(rng.integers(2, MOST_SYMBOLS + 1)), sampler.phrase_len()
    between = [] if rng.random() < 0.3 else [COLON if rng.random() < 0.8 else SEMICOLON]
    n = sampler.lines(c + 2 + len(between))
    symbols = rng.integers(0, m, n)
    names = sampler.names(m)[symbols]
    return _lines(n, (names, 0), *((token, SEPARATOR_WEIGHT) for token in between), (sampler.phrases(symbols, c), 1))


def phrases(sampler: DocumentSampler) -> Document:
    """Symbols and their phrases without lines, the phrases of one length or of several."""
    rng = sampler.rng
    m, c = int(rng.integers(2, MOST_SYMBOLS + 1)), sampler.phrase_len()
    n = sampler.length  # enough even where every phrase is cut to nothing
    symbols = rng.integers(0, m, n)
    ids = np.concatenate([sampler.names(m)[symbols][:, None], sampler.phrases(symbols, c)], 1)
    kept = rng.integers(1, c + 1, n) if rng.random() < 0.5 else np.full(n, c)
    keep = np.arange(c + 1) <= kept[:, None]
    weight = np.tile([0.0] + [1.0] * c, (n, 1))
    return _flat(ids[keep], weight[keep])


def strings(sampler: DocumentSampler) -> Document:
    """Strings of one automaton, one a line."""
    c = int(sampler.rng.integers(3, 13))
    n = sampler.lines(c + 1)
    return _lines(n, (sampler.phrases(np.zeros(n, np.int64), c), 1))


def outputs(sampler: DocumentSampler) -> Document:
    """Lines of phrases of several automata in random order, so that the next phrase cannot be predicted.

    In half of the documents each line begins with a symbol and a colon that are unrelated to the letters.
    """
    rng = sampler.rng
    m, c = int(rng.integers(2, sampler.most_symbols + 1)), sampler.phrase_len()
    labelled = rng.random() < 0.5
    n = sampler.lines(m * c + 1 + 2 * labelled)
    symbols = np.argsort(rng.random((n, m)), 1)
    body = (sampler.phrases(symbols, c), ([SEPARATOR_WEIGHT] + [1] * (c - 1)) * m)
    label = [(rng.choice(sampler.names(m), n), 0), (COLON, SEPARATOR_WEIGHT)] if labelled else []
    return _lines(n, *label, body)


def copies(sampler: DocumentSampler) -> Document:
    """A random segment repeated, or short random words in random order; first occurrences have no weight."""
    rng = sampler.rng
    draw = rng.random()
    vocabulary = EVERYTHING if draw < 0.6 else SYMBOLS if draw < 0.8 else LETTERS
    n = int(rng.integers(3, max(8, sampler.length // 3)))
    if rng.random() < 0.5:
        different = n <= len(vocabulary) and rng.random() < 0.5
        segment = rng.permutation(vocabulary)[:n] if different else rng.choice(vocabulary, n)
        times = sampler.lines(n) + 1
        weight = np.ones((times, n))
        weight[0] = 0
        return _flat(np.tile(segment, times), weight)
    width = int(rng.integers(2, 6))
    words = max(2, n // width)
    if words > len(vocabulary):
        dictionary = rng.choice(vocabulary, (words, width))
    else:  # no two words share a token at one place, so any token identifies its word
        dictionary = np.stack([rng.permutation(vocabulary)[:words] for _ in range(width)], 1)
    order = rng.integers(0, words, sampler.lines(width) + 1)
    weight = np.ones((len(order), width))
    weight[:, 0] = 0
    weight[np.unique(order, return_index=True)[1]] = 0
    return _flat(dictionary[order], weight)


KINDS: Mapping[str, Callable[[DocumentSampler], Document]] = {
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
    """The frequencies of the kinds of documents, and how hard the automata are."""

    shares: Mapping[str, float]
    """The relative frequencies of kinds, by their names in `KINDS`."""
    most_symbols: int = 8
    """The most symbols in the input of a prompt."""
    most_edges: int = 4
    """The most edges that leave a state of an automaton."""
    echoed: tuple[float, float] = (0.2, 0.8)
    """In echoes, the least and the greatest share of letters that are replaced by their symbol."""
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
        if len(self.echoed) != 2 or not 0 <= self.echoed[0] <= self.echoed[1] <= 1:
            raise ValueError(f"echoed={self.echoed}: give the least and the greatest share of letters, 0 to 1")
        if not 0 <= self.swapped <= 1:
            raise ValueError(f"swapped={self.swapped}: give the share of documents, 0 to 1")
        if not all(share >= 0 for share in self.shares.values()) or not sum(self.shares.values()) > 0:
            raise ValueError(f"shares={dict(self.shares)}: give shares of 0 or more, and one above 0")

    def sample(
        self, n: int, length: int, seed: int
    ) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row pos"], Int[Tensor, "row pos"]]:
        """Draws documents, each after a BOS token and cut to `length`.

        Args:
            n: The number of documents.
            length: The number of tokens in each.
            seed: Fixes the documents.

        Returns:
            Token ids; the weight of each in the loss, 0 for the first; and the early label of each, `PAD` for none.
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
            of_row = Automata(*(table[row : row + 1] for table in (automata.letter, automata.next, automata.n_edges)))
            text, weight, label = KINDS[kind](DocumentSampler(rng, of_row, length - 1, self.most_symbols, self.echoed))
            if kind != "single" and rng.random() < self.swapped:
                text, label = SWAPPED[text], SWAPPED[label]
            ids[row, 1:], weights[row, 1:], early[row, 1:] = (column[: length - 1] for column in (text, weight, label))
        return torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(early)


def _lines(n: int, *columns: tuple[Any, Any]) -> Document:
    """Lines that end in a newline; of each group of columns its tokens, and their weights, as lines have them all."""
    tokens, weights = zip(*columns, (NEWLINE, SEPARATOR_WEIGHT), strict=True)
    ids = [np.broadcast_to(of_lines, (n,)) if np.ndim(of_lines) == 0 else of_lines for of_lines in tokens]
    ids = [of_lines.reshape(n, -1) for of_lines in ids]
    weight = [np.broadcast_to(weight, of_lines.shape) for weight, of_lines in zip(weights, ids, strict=True)]
    return _flat(np.concatenate(ids, 1), np.concatenate(weight, 1).astype(float))


def _flat(ids: Int[ndarray, "..."], weight: Float[ndarray, "..."]) -> Document:
    return ids.ravel(), weight.ravel(), np.full(ids.size, PAD)


def _echoed(rng: np.random.Generator, n: int, m: int, c: int, share: float) -> Bool[ndarray, "line phrase offset"]:
    """Which letters are replaced by their symbol: at least one in each line."""
    echoed = rng.random((n, m, c)) < share
    echoed[np.arange(n), rng.integers(0, m, n), rng.integers(0, c, n)] = True
    return echoed


def _ids(characters: str) -> Int[ndarray, " token"]:
    return np.array(_TOKENIZER.convert_tokens_to_ids(list(characters)))


_TOKENIZER: Any = char_tokenizer()
SYMBOLS, LETTERS = _ids(string.ascii_uppercase), _ids(string.ascii_lowercase)
PAD, BOS = int(_TOKENIZER.pad_token_id), int(_TOKENIZER.bos_token_id)
NEWLINE, COLON, SEMICOLON, BANG = map(int, _ids("\n:;!"))
EVERYTHING = np.concatenate([SYMBOLS, LETTERS, _ids("\n:;!")])
SWAPPED = np.arange(len(_TOKENIZER))
SWAPPED[SYMBOLS], SWAPPED[LETTERS] = LETTERS, SYMBOLS
