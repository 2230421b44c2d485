"""The token ids of a task's symbols in a tokenizer, looked up one by one and never by tokenizing a prompt."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from align_circuits.prompts.prompts import Role, text_of, vocabulary_hash
from align_circuits.tasks.layout import FIXED, Layout

ABSENT = -1
"""In place of the id of a token that is not used."""


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
    """The tokenizer's vocabulary, hashed."""

    @property
    def bos(self) -> int | None:
        """The id of the BOS token, if the tokenizer has one."""
        return None if self.fixed[0] == ABSENT else self.fixed[0]

    def ids_of(self, role: Role) -> tuple[int, ...]:
        """Returns the ids that a token of this role may have."""
        if role in FIXED:
            return (self.fixed[FIXED.index(role)],)
        return self.letters if role == Role.OUTPUT else self.symbols


_LEXICONS: WeakKeyDictionary[Any, dict[tuple, TokenIds]] = WeakKeyDictionary()
"""What was looked up before: hashing a vocabulary of 128k tokens takes longer than sampling."""


def lexicon(
    tokenizer: Any, alphabet: str, letters: str, colon: str, separator: str, marker: str, spaced: bool
) -> TokenIds:
    """Returns the ids of a task's symbols in a Hugging Face tokenizer.

    Args:
        tokenizer: The tokenizer.
        alphabet: The input symbols, one character each.
        letters: The output letters, one character each.
        colon: Between input and output.
        separator: Between examples.
        marker: Before each symbol and letter in the marked style; empty in the others.
        spaced: Whether symbols, letters and marker are looked up with a space before them.

    Raises:
        ValueError: A symbol is not one token of this tokenizer, or two symbols are the same token.
    """
    key = (len(tokenizer), alphabet, letters, colon, separator, marker, spaced)
    known = _LEXICONS.setdefault(tokenizer, {})
    if key not in known:
        known[key] = _look_up(tokenizer, alphabet, letters, colon, separator, marker, spaced)
    return known[key]


def _look_up(
    tokenizer: Any, alphabet: str, letters: str, colon: str, separator: str, marker: str, spaced: bool
) -> TokenIds:
    space = " " if spaced else ""
    texts = [space + symbol for symbol in (*alphabet, *letters, *marker)] + [colon, separator]
    ids: dict[str, int] = {}
    for text in dict.fromkeys(texts):
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            reads = "no token" if not found else f"{tokenizer.convert_ids_to_tokens(found)}"
            raise ValueError(
                f"{_name(tokenizer)} reads {text!r} as {reads}, but a symbol must be one known token: "
                f"leave it out of the task's alphabet, letters or delimiters, or try spaced={not spaced}"
            )
        ids[text] = found[0]
    owners: dict[int, str] = {}
    for text in texts:
        if (other := owners.setdefault(ids[text], text)) != text or texts.count(text) > 1:
            raise ValueError(
                f"{_name(tokenizer)} gives {other!r} and {text!r} the same token {ids[text]}, but all symbols, letters "
                "and delimiters must differ: choose others"
            )
    bos = tokenizer.bos_token_id
    fixed = (ABSENT if bos is None else int(bos), ids[colon], ids[separator], ids.get(space + marker, ABSENT))
    every = torch.tensor(sorted({*ids.values(), *fixed} - {ABSENT}))
    return TokenIds(
        symbols=tuple(ids[space + symbol] for symbol in alphabet),
        letters=tuple(ids[space + letter] for letter in letters),
        fixed=fixed,
        token_strings=text_of(tokenizer, every),
        tokenizer_hash=vocabulary_hash(tokenizer),
    )


_CHECKED: WeakKeyDictionary[Any, set[tuple]] = WeakKeyDictionary()
"""The checks that passed before."""


def check_text(tokenizer: Any, words: TokenIds, places: Layout) -> None:
    """Checks that a tokenizer reads the text of prompts as the tokens they were built from.

    Every pair of tokens that may stand side by side is read, then one whole prompt.

    Raises:
        ValueError: Some text is read as other tokens, as `"!I"` by the Llama 3 tokenizer in the marked style.
    """
    key = (words.symbols, words.letters, words.fixed, places)
    if key in _CHECKED.setdefault(tokenizer, set()):
        return
    roles = [Role(role) for role in places.roles.tolist() if role != Role.BOS]
    kinds = dict.fromkeys(pairwise(roles))
    pairs = [(a, b) for first, second in kinds for a in words.ids_of(first) for b in words.ids_of(second)]
    whole = tuple(words.ids_of(role)[place % len(words.ids_of(role))] for place, role in enumerate(roles))
    broken = _misread(tokenizer, words, pairs) or _misread(tokenizer, words, [whole])
    if broken:
        text, tokens = broken[0]
        listed = ", ".join(repr(text) for text, _ in broken[:12])
        raise ValueError(
            f"{_name(tokenizer)} does not read the text of these prompts as the tokens they are built from: "
            f"{text[:40]!r} becomes {tokens[:20]}. Texts that break ({len(broken)}): {listed[:200]}. Leave these "
            "symbols out of the task's alphabet, letters or delimiters, or set spaced=False, which promises no text"
        )
    _CHECKED[tokenizer].add(key)


def _misread(tokenizer: Any, words: TokenIds, sequences: Iterable[tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    """The texts of token sequences that are not read as these tokens, and what they are read as."""
    sequences = list(sequences)
    texts = ["".join(words.token_strings[token] for token in sequence) for sequence in sequences]
    read = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        (text, tokenizer.convert_ids_to_tokens(found))
        for text, found, wanted in zip(texts, read, sequences, strict=True)
        if tuple(found) != wanted
    ]


def _name(tokenizer: Any) -> str:
    """How an error names a tokenizer."""
    path = getattr(tokenizer, "name_or_path", "")
    return f"the tokenizer {path!r} ({len(tokenizer)} tokens)" if path else f"this tokenizer ({len(tokenizer)} tokens)"
