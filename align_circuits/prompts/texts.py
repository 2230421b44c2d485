"""Texts as token ids: where an answer begins, where a word stands, and whether two texts are aligned token by token."""

import inspect
import json
import re
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import ne
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tokenizers.models import BPE

END = "END"
"""The name of the position that predicts the first token of the answer: the last token of the text."""

FEW_TOKENS = 3
"""So many tokens may differ between a clean and a corrupted text, however short both are."""

Place = int | str | tuple[str, int]
"""Where a named position lies: an index of the text's tokens (negative from its end), or a part of the text, of which
it is the last token; with an index, from 0, if the part occurs several times."""


@dataclass(frozen=True)
class TokenizedText:
    """One text and its answer as token ids."""

    text: str
    ids: list[int]
    """The tokens of the text, then those of the answer."""
    n_text: int
    """How many of them belong to the text."""
    wrong: list[int]
    """The tokens of the wrong answer, one for each token of the answer, or the first alone if their numbers differ;
    empty if there is none."""
    places: Mapping[str, int]
    """Named positions, as indices of `ids`."""
    n_beginning: int
    """How many tokens at the start are those with which the tokenizer begins every text."""


def groups_of_equal(
    texts: Sequence[Sequence[int]], names: Sequence[str], partners: Sequence[Sequence[int]] = ()
) -> list[int] | None:
    """Returns a group for each text, of which it warns by name; None where all differ.

    Texts of equal tokens have the same, as have two of which each is the other's partner, its corrupted text.
    """
    first: dict[tuple[int, ...], int] = {}
    equal = [first.setdefault(tuple(text), index) for index, text in enumerate(texts)]
    row_of = {(tuple(texts[row]), tuple(partner)): row for row, partner in enumerate(partners)}
    mirrored = [(row, row_of[b, a]) for (a, b), row in row_of.items() if row_of.get((b, a), row) != row]
    again = [index for index, one in enumerate(equal) if one != index]
    if not again and not mirrored:
        return None
    if again:
        first_again = names[again[0]]
        told = f"{len(again)} texts repeat earlier ones, first {first_again}; equal texts"
        told = told if len(again) > 1 else f"{first_again} repeats an earlier text; equal texts"
    else:
        told = f"{len(mirrored)} of {len(texts)} pairs are the reverse of another one; a pair and its reverse"
    _warn(f"{told} count as one group, since they are no independent evidence")
    links = np.array([*enumerate(equal), *mirrored]).T
    linked = coo_array((np.ones(links.shape[1]), links), shape=(len(texts), len(texts)))
    return connected_components(linked, directed=False)[1].tolist()


def warn_of_equal(texts: Sequence[Sequence[int]], groups: Sequence[Hashable], names: Sequence[str]) -> None:
    """Warns of texts of equal tokens that were given several groups."""
    apart = pd.DataFrame({"text": [*map(tuple, texts)], "group": pd.factorize(pd.Series([*groups], dtype=object))[0]})
    again = apart["text"].duplicated() & ~apart.duplicated()
    if again.any():
        _warn(
            f"{names[int(again.to_numpy().argmax())]} repeats an earlier text in another group, as if it were "
            "independent evidence: give equal texts one group"
        )


def _warn(message: str) -> None:
    """Warns at the line that called the package."""
    outside = [not info.frame.f_globals["__name__"].startswith("align_circuits.") for info in inspect.stack(0)]
    warnings.warn(message, stacklevel=1 + outside.index(True))


def tokenize(
    texts: Sequence[str],
    tokenizer: Any,
    answer: Sequence[str] | None,
    wrong: Sequence[str] | None,
    positions: Mapping[str, Place | Sequence[Place]] | None,
    names: Sequence[str],
) -> list[TokenizedText]:
    """Returns texts as token ids, with the special tokens that the tokenizer adds by itself.

    Messages call the texts by `names`, such as `"line 3"` of a file.

    Raises:
        ValueError: Lists of different lengths, an answer that does not begin at a token of its own, a wrong answer that
            begins with the same token, or a named position that is not there.

    Warns of what is hardly meant: an answer that goes on with the text's last word, a space at the end of the text, a
    wrong answer of several tokens beside an answer of one, a named position inside a word, and characters that the
    vocabulary lacks.
    """
    if not texts:
        raise ValueError("no texts: give at least one")
    if wrong is not None and answer is None:
        raise ValueError("wrong answers without answers: give answer= too")
    columns = {"answer": answer, "wrong": wrong}
    for name, column in columns.items():
        if column is not None and len(column) != len(texts):
            raise ValueError(f"{name}: {len(column)} for {len(texts)} texts; give a list with one for each")
    named = {name: _of_each(name, given, len(texts)) for name, given in (positions or {}).items()}
    if answer is not None and END in named:
        raise ValueError(f"positions: {END!r} is the text's last token by itself; take another name")
    tokenized, doubts, refused = [], {}, {}
    for index, (text, text_name) in enumerate(zip(texts, names, strict=True)):
        ids, n_beginning = _read(tokenizer, text)
        if not ids:
            raise ValueError(f"{text_name}: the text is empty; give one of at least one token")
        if _lacks_characters(tokenizer, ids[n_beginning:], text):
            doubts[text_name] = f"the vocabulary lacks characters of {text!r}, which the model does not read as such"
        columns_of = {
            name: _place(tokenizer, text_name, text, ids, name, given[index]) for name, given in named.items()
        }
        answered, wrong_ids = ids, []
        if answer is not None:
            answered = ids + _continuation(tokenizer, text_name, "answer", text, ids, answer[index])
            columns_of[END] = len(ids) - 1
        if answer is not None and wrong is not None:
            wrong_ids = _continuation(tokenizer, text_name, "wrong answer", text, ids, wrong[index])
            right_ids = answered[len(ids) :]
            if right_ids[0] == wrong_ids[0]:
                refused[text_name] = (
                    f"the answer {tokenizer.decode(right_ids)!r} cannot be compared with the wrong one "
                    f"{tokenizer.decode(wrong_ids)!r}: they begin with the same token"
                )
            elif len(right_ids) != len(wrong_ids):  # behind the first token there is nothing to compare
                if len(right_ids) == 1:  # longer answers have later targets, for which logit_diff is refused
                    doubts[text_name] = (
                        f"the answer {tokenizer.decode(right_ids)!r} is 1 token and the wrong one "
                        f"{tokenizer.decode(wrong_ids)!r} is {len(wrong_ids)}: logit_diff compares with "
                        f"{tokenizer.decode(wrong_ids[:1])!r} alone; give a wrong answer of 1 token, "
                        "unless that is meant"
                    )
                wrong_ids = wrong_ids[:1]
        tokenized.append(TokenizedText(text, answered, len(ids), wrong_ids, columns_of, n_beginning))
        places_of = {name: given[index] for name, given in named.items()}
        if doubt := _doubt(tokenizer, text, "" if answer is None else answer[index], places_of):
            doubts[text_name] = doubt
    if refused:
        (first, apart), *more = refused.items()
        also = f"; so it is with {', '.join(other for other, _ in more)}" if more else ""
        raise ValueError(f"{first}: {apart}; give answers that differ in the first{also}")
    if doubts:
        first, doubt = next(iter(doubts.items()))
        _warn(f"{len(doubts)} of {len(texts)} texts, such as {first}: {doubt}")
    return tokenized


def _doubt(tokenizer: Any, text: str, answer: str, places: Mapping[str, Place]) -> str | None:
    """What of a text is hardly meant, where a space belongs to the token of the word behind it."""
    if text.endswith(" ") and answer.startswith(" "):
        return "the text ends with a space and the answer begins with another: end the text without"
    if answer[:1].isalnum() and text[-1:].isalnum() and _joins_spaces(tokenizer, answer):
        return (
            f"the answer {answer!r} has no space before it and goes on with the word {text.split()[-1]!r}: give "
            f"{' ' + answer.strip()!r}, unless that is meant"
        )
    for name, place in places.items():
        part, occurrence = (place, 0) if isinstance(place, str) else place if isinstance(place, tuple) else ("", 0)
        starts = _occurrences(text, part)
        if not starts:
            continue
        start, end = starts[occurrence], starts[occurrence] + len(part)
        words = re.finditer(r"\w+", text)
        cut = [word[0] for word in words for edge in (start, end) if word.start() < edge < word.end()]
        if cut and _joins_spaces(tokenizer, cut[0]):
            return f"positions[{name!r}]: {part!r} lies inside a word: give the whole word, whose last token counts"
    return None


def _occurrences(text: str, part: str) -> list[int]:
    """Where a part of a text begins, each time that it occurs."""
    return [start for start in range(len(text)) if part and text.startswith(part, start)]


def _joins_spaces(tokenizer: Any, word: str) -> bool:
    """Whether a tokenizer reads a word and the space before it as other tokens than the word, and no more of them."""
    alone, behind_space = ids_of(tokenizer, word), ids_of(tokenizer, f" {word}")
    return alone != behind_space and len(behind_space) <= len(alone)


def check_aligned(
    name: str, clean: TokenizedText, corrupted: Sequence[int], tokenizer: Any, others: Sequence[str] = ()
) -> None:
    """Raises unless a corrupted text has as many tokens as its clean one; says where not, and names `others`."""
    ids = clean.ids[: clean.n_text]
    if len(ids) == len(corrupted):
        return
    # Left to itself, it ignores tokens that are frequent in a long text.
    for _, start, end, other_start, other_end in SequenceMatcher(None, ids, corrupted, autojunk=False).get_opcodes():
        if end - start != other_end - other_start:
            words, other_words = (tokenizer.decode(ids[start:end]), tokenizer.decode(corrupted[other_start:other_end]))
            shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            raise ValueError(
                f"{name}: at token {start} the clean text has {words!r} ({_tokens(end - start)}) and the corrupted "
                f"one {other_words!r} ({_tokens(other_end - other_start)}): take words of equally many tokens"
                + (f"; so it is with {shown}" if others else "")
            )


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def warn_of_far_pairs(names: Sequence[str], pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Warns of clean and corrupted texts of equal length, called by `names`, that differ in most of their tokens."""
    differing = [sum(map(ne, *both)) for both in pairs]
    lengths = [len(clean) for clean, _ in pairs]
    far = [index for index, count in enumerate(differing) if count > max(FEW_TOKENS, lengths[index] / 2)]
    if far:
        first = f"{names[far[0]]} in {differing[far[0]]} of {lengths[far[0]]}"
        _warn(
            f"{len(far)} of {len(pairs)} pairs differ in most of their tokens, such as {first}: patching then mixes "
            "two texts; a corrupted text best differs in a word or two"
        )


def _of_each(name: str, place: Any, count: int) -> list[Place]:
    """The place of a named position in each text; one place serves all."""
    if is_place(place):
        return [place] * count
    if not isinstance(place, Sequence) or len(place) != count or not all(map(is_place, place)):
        raise ValueError(
            f"positions[{name!r}]={place!r}: give one place for all texts, or a list of {count}; a place is a part of "
            "the text, (part, occurrence), or the index of a token"
        )
    return list(place)


def is_place(place: Any) -> bool:
    """Whether something is a `Place`."""
    if isinstance(place, tuple) and len(place) == 2:
        return isinstance(place[0], str) and isinstance(place[1], int) and not isinstance(place[1], bool)
    return isinstance(place, int | str) and not isinstance(place, bool)


def read_by(tokenizer: Any, text: str | list[str], **how: Any) -> Any:
    """Returns what a tokenizer makes of a text or of several; one whose patterns try too often to match gives up."""
    try:
        return tokenizer(text, **how)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which no `except Exception` sees
            raise
        raise ValueError(
            f"{name_of(tokenizer)} gives up on the text {str(text)[:60]!r} ({error}): correct the patterns in its "
            "tokenizer.json, or give another as tokenizer="
        ) from error


def name_of(tokenizer: Any) -> str:
    """Returns how an error names a tokenizer."""
    path = getattr(tokenizer, "name_or_path", "")
    return f"the tokenizer {path!r} ({len(tokenizer)} tokens)" if path else f"this tokenizer ({len(tokenizer)} tokens)"


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text that goes on: without an end that the tokenizer adds, or a second beginning."""
    return _read(tokenizer, text)[0]


def _read(tokenizer: Any, text: str) -> tuple[list[int], int]:
    """The same, and with how many of them the tokenizer begins every text; half a character is refused."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(
            f"the text {text[:60]!r} has half a character (a lone surrogate): decode it from its file anew"
        )
    ids, own = (list(read_by(tokenizer, text, add_special_tokens=add)["input_ids"]) for add in (True, False))
    places = [place for place in range(len(ids) - len(own) + 1) if ids[place : place + len(own)] == own]
    if not places:  # it reads a text otherwise where it adds tokens
        return ids, 0
    # Several where the text begins or ends with what is added: "<s>" becomes "<s><s>", of which the first is added.
    last = places[-1] if own else 1
    n_beginning = last if ids[:1] == [tokenizer.bos_token_id] else places[0]
    beginning = ids[:n_beginning]
    return (own if own[:n_beginning] == beginning else beginning + own), n_beginning


def _continuation(tokenizer: Any, text_name: str, what: str, text: str, ids: list[int], answer: str) -> list[int]:
    """The tokens of an answer behind a text, if it starts a token of its own."""
    # Read together, as the model reads them: alone an answer may become other tokens.
    both = ids_of(tokenizer, text + answer)
    if both[: len(ids)] != ids or len(both) == len(ids):
        remedy = "with most tokenizers it begins with a space, and the text ends without one"
        if text.endswith(" "):
            spaced = " " + answer.strip()
            remedy = f"the space at the end of the text belongs to it: end the text without, and give {spaced!r}"
        raise ValueError(f"{text_name}: the {what} {answer!r} is no token of its own behind {text[-20:]!r}; {remedy}")
    if _lacks_characters(tokenizer, both[len(ids) :], answer, before=text):
        raise ValueError(f"{text_name}: the vocabulary lacks characters of the {what} {answer!r}; give one that it has")
    return both[len(ids) :]


def _lacks_characters(tokenizer: Any, ids: list[int], text: str, before: str = "") -> bool:
    """Whether tokens of a text, with another `before` it, are unknown, or leave out some of its characters."""
    if tokenizer.unk_token_id in ids and tokenizer.unk_token not in text:
        return True
    # Counted, since behind a character that is left out a tokenizer may place all tokens too early.
    return _n_left_out(tokenizer, before + text) > _n_left_out(tokenizer, before)


def _n_left_out(tokenizer: Any, text: str) -> int:
    """How many characters of a text but spaces belong to no token: some where BPE lacks bytes and an unknown token."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if not isinstance(model, BPE) or model.unk_token is not None or model.byte_fallback:
        return 0
    if all(backend.token_to_id(_LETTER_OF[byte]) is not None for byte in {*text.encode()}):
        return 0
    read = {place for start, end in _offsets(tokenizer, text) for place in range(start, end)}
    return sum(place not in read and not letter.isspace() for place, letter in enumerate(text))


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Where each token of a text lies in it, without those that the tokenizer adds."""
    return read_by(tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]


def _place(tokenizer: Any, text_name: str, text: str, ids: list[int], name: str, place: Place) -> int:
    """The index of the token where a named position lies."""
    if isinstance(place, int):
        if not -len(ids) <= place < len(ids):
            raise ValueError(f"{text_name}: positions[{name!r}]: no token {place}; the text has {len(ids)}")
        return place % len(ids)
    word, occurrence = (place, None) if isinstance(place, str) else place
    starts = _occurrences(text, word)
    if not starts or (occurrence is not None and not -len(starts) <= occurrence < len(starts)):
        raise ValueError(f"{text_name}: positions[{name!r}]: the text has {word!r} {len(starts)} times: {text!r}")
    if occurrence is None and len(starts) > 1:
        first = json.dumps([word, 0], ensure_ascii=False) if text_name.startswith("line") else f"({word!r}, 0)"
        raise ValueError(
            f"{text_name}: positions[{name!r}]: {word!r} occurs {len(starts)} times; say which one, as {first}"
        )
    # Only at its last token has a causal model read the whole part.
    # A space behind it would belong to the token of the next word, a newline not.
    last = starts[occurrence or 0] + len(word.rstrip(" ") or word) - 1
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"positions[{name!r}]: this tokenizer does not say where its tokens lie; give token indices")
    offsets = _offsets(tokenizer, text)
    added = len(ids) - len(offsets)
    if not (tokens := [added + token for token, (start, end) in enumerate(offsets) if start <= last < end]):
        raise ValueError(f"{text_name}: positions[{name!r}]: no token holds the end of {word!r}; take another part")
    return tokens[-1]  # a letter of several bytes may be several tokens


_BYTE = re.compile("<0x([89A-F][0-9A-F])>")
"""A byte that is no character by itself, as vocabularies with byte fallback write it."""
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(0x100 + n): byte for n, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)}
"""The letters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def text_of_token(tokenizer: Any, token: int) -> str:
    """Returns the text of a token; bytes that are only a part of a character as `<0xE4>`, not as "\ufffd"."""
    # The clean-up would take the space before a comma or a full stop away.
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    spelled = tokenizer.convert_ids_to_tokens(token) or ""
    if "▁" in spelled and "▁" not in text:  # SentencePiece's decoder leaves out the space before a first word
        return spelled.replace("▁", " ")
    if "\ufffd" in text:
        if _BYTE.fullmatch(spelled):
            return spelled
        if all(letter in _BYTE_OF for letter in spelled):
            return _with_bytes(bytes(map(_BYTE_OF.__getitem__, spelled)))
    return text


def joined(texts: Sequence[str]) -> str:
    """Returns texts of successive tokens as one text, in which bytes are the characters that they make."""
    text = "".join(texts)
    return _with_bytes(_bytes_of(text)) if _BYTE.search(text) else text


def in_characters(texts: Sequence[str]) -> list[str]:
    """Returns texts of successive tokens in which each part of a character is that character, with its number.

    >>> in_characters(["a", " <0xC3>", "<0xA9>", "<0xFF>"])
    ['a', ' é⟨1/2⟩', 'é⟨2/2⟩', '<0xFF>']
    """
    if not any(map(_BYTE.search, texts)):
        return list(texts)
    token_of = [index for index, text in enumerate(texts) for _ in _bytes_of(text)]
    shown, start = [""] * len(texts), 0
    for letter in _bytes_of("".join(texts)).decode("utf-8", "surrogateescape"):
        spelled = letter.encode("utf-8", "surrogateescape")
        spelling = dict.fromkeys(token_of[start : (start := start + len(spelled))])
        for index_in_word, index in enumerate(spelling, 1):
            shown[index] += _with_bytes(spelled) + (f"⟨{index_in_word}/{len(spelling)}⟩" if len(spelling) > 1 else "")
    return shown


def _bytes_of(text: str) -> bytes:
    return _BYTE.sub(lambda byte: chr(0xDC00 + int(byte[1], 16)), text).encode("utf-8", "surrogateescape")


def _with_bytes(spelled: bytes) -> str:
    text = spelled.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)
