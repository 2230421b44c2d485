"""The token ids of a task's symbols in a tokenizer, looked up one by one and never by tokenizing a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from align_circuits.prompts.prompts import TokenKind, text_of, vocabulary_hash
from align_circuits.prompts.texts import name_of, read_by
from align_circuits.tasks.layout import FIXED, Layout

ABSENT = -1
"""Stands for the id of a token that is not used."""


@dataclass(frozen=True)
class TokenIds:
    """The token ids of a task's symbols, letters and delimiters in one tokenizer."""

    symbols: tuple[int, ...]
    """The ids of the alphabet, in its order."""
    letters: tuple[int, ...]
    """The ids of the letters, in their order."""
    fixed: tuple[int, ...]
    """The ids of `FIXED`; `ABSENT` for a BOS token that the tokenizer lacks and for a marker that is not used."""
    token_strings: dict[int, str]
    """The text of each id."""
    tokenizer_hash: str
    """A hash of the tokenizer's vocabulary."""

    @property
    def bos(self) -> int | None:
        """The id of the BOS token, if the tokenizer has one."""
        return None if self.fixed[0] == ABSENT else self.fixed[0]

    def ids_of(self, kind: TokenKind) -> tuple[int, ...]:
        """Returns the ids that a token of this kind may have."""
        if kind in FIXED:
            return (self.fixed[FIXED.index(kind)],)
        return self.letters if kind == TokenKind.OUTPUT else self.symbols


_CACHE: WeakKeyDictionary[Any, dict[tuple, TokenIds]] = WeakKeyDictionary()
"""Earlier results: hashing a vocabulary of 128k tokens takes longer than sampling."""


def look_up(
    tokenizer: Any,
    alphabet: Sequence[str],
    letters: Sequence[str],
    colon: str,
    separator: str,
    marker: str,
    spaced: bool,
) -> TokenIds:
    """Returns the ids of a task's symbols in a Hugging Face tokenizer.

    Args:
        tokenizer: The tokenizer.
        alphabet: The input symbols, characters or words.
        letters: The output letters, characters or words.
        colon: Between input and output.
        separator: Between examples.
        marker: Before each symbol and letter in the marked style; empty in the others.
        spaced: Whether symbols, letters and marker are looked up with a space before them.

    Raises:
        ValueError: There is no tokenizer, a symbol is not one token of it, or two symbols are the same token.
    """
    check_tokenizer(tokenizer)
    # With what may be changed of a tokenizer later.
    special = tokenizer.bos_token_id, tokenizer.unk_token_id
    key = (len(tokenizer), *special, tuple(alphabet), tuple(letters), colon, separator, marker, spaced)
    cached = _CACHE.setdefault(tokenizer, {})
    if key in cached:
        return cached[key]
    space = " " if spaced else ""
    texts = [space + symbol for symbol in (*alphabet, *letters, *marker)] + [colon, separator]
    ids: dict[str, int] = {}
    for text in dict.fromkeys(texts):
        token = token_of(tokenizer, text)
        if token is None:
            tokens = read_by(tokenizer, text, add_special_tokens=False)["input_ids"]
            reads = tokenizer.convert_ids_to_tokens(tokens) if tokens else "no token"
            raise ValueError(
                f"{name_of(tokenizer)} reads {text!r} as {reads}, but a symbol must be one known token: "
                "leave it out of the task's alphabet, letters or delimiters"
            )
        ids[text] = token
    owners: dict[int, str] = {}
    for text in texts:
        if (owner := owners.setdefault(ids[text], text)) != text or texts.count(text) > 1:
            raise ValueError(
                f"{name_of(tokenizer)} gives {owner!r} and {text!r} the same token {ids[text]}, but all symbols, "
                "letters and delimiters must differ: choose others"
            )
    bos = tokenizer.bos_token_id
    fixed = (ABSENT if bos is None else int(bos), ids[colon], ids[separator], ids.get(space + marker, ABSENT))
    every = torch.tensor(sorted({*ids.values(), *fixed} - {ABSENT}))
    cached[key] = TokenIds(
        symbols=tuple(ids[space + symbol] for symbol in alphabet),
        letters=tuple(ids[space + letter] for letter in letters),
        fixed=fixed,
        token_strings=text_of(tokenizer, every),
        tokenizer_hash=vocabulary_hash(tokenizer),
    )
    return cached[key]


def check_tokenizer(tokenizer: Any) -> None:
    """Raises a ValueError if there is no tokenizer."""
    if tokenizer is None:
        raise ValueError("this task is written in the tokens of a tokenizer: give one, or load the model with one")


def token_of(tokenizer: Any, text: str) -> int | None:
    """Returns the id of a text that is one known token of a tokenizer; None of any other."""
    tokens = read_by(tokenizer, text, add_special_tokens=False)["input_ids"]
    # The unknown token is one for many texts.
    return tokens[0] if len(tokens) == 1 and tokens[0] != tokenizer.unk_token_id else None


_CHECKED: WeakKeyDictionary[Any, set[tuple]] = WeakKeyDictionary()
"""The checks that have passed."""


def check_text(tokenizer: Any, token_ids: TokenIds, layout: Layout) -> None:
    """Checks that a tokenizer reads the text of prompts as the tokens they were built from.

    It reads every pair of tokens that may stand side by side, then one whole prompt.

    Raises:
        ValueError: Text is read as other tokens, such as `"!I"` by the Llama 3 tokenizer in the marked style.
    """
    key, checked = (token_ids.symbols, token_ids.letters, token_ids.fixed), _CHECKED.setdefault(tokenizer, set())
    if (*key, layout) in checked:
        return
    kinds = [TokenKind(kind) for kind in layout.token_kinds.tolist() if kind != TokenKind.BOS]
    # Tokenizers merge neighbours: if every pair that may stand side by side survives, so does nearly every text. The
    # whole prompt catches what depends on more than two.
    neighbours = tuple(dict.fromkeys(pairwise(kinds)))
    new = () if (*key, neighbours) in checked else neighbours  # longer prompts have no more of them
    pairs = [(a, b) for left, right in new for a in token_ids.ids_of(left) for b in token_ids.ids_of(right)]
    prompt = tuple(token_ids.ids_of(kind)[pos % len(token_ids.ids_of(kind))] for pos, kind in enumerate(kinds))
    if broken := _misread(tokenizer, token_ids, pairs) or _misread(tokenizer, token_ids, [prompt]):
        text, tokens = broken[0]
        listed = ", ".join(repr(text) for text, _ in broken[:12])
        raise ValueError(
            f"{name_of(tokenizer)} does not read the text of these prompts as the tokens they are built from: "
            f"{text[:40]!r} becomes {tokens[:20]}. Texts that are misread ({len(broken)}): {listed[:200]}. Leave these "
            "symbols out of the task's alphabet, letters or delimiters"
        )
    checked.update({(*key, neighbours), (*key, layout)})


def _misread(tokenizer: Any, token_ids: TokenIds, sequences: Sequence[tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    """The texts of the token sequences that the tokenizer reads as other tokens, each with those tokens."""
    texts = ["".join(token_ids.token_strings[token] for token in sequence) for sequence in sequences]
    read = read_by(tokenizer, texts, add_special_tokens=False)["input_ids"] if texts else []
    return [
        (text, tokenizer.convert_ids_to_tokens(tokens))
        for text, tokens, sequence in zip(texts, read, sequences, strict=True)
        if tuple(tokens) != sequence
    ]
