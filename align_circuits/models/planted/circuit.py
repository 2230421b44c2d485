"""The induction circuit for sequence-to-sequence prompts, in words: its residual stream, its heads and its decoys."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.models.planted.head_builder import Directions, Head, Match, Move, Units, indicators, subspaces
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.token_ids import TokenIds

MARGIN = 10.0
"""By how many nats the right position beats a wrong one, at full strength."""

BOUNDARY_MARGIN = 3 * MARGIN
"""The same for the boundary head, whose attention is read as a number: it is the last to fail in a weak circuit."""

EVIDENCE = 4.0
"""The logit of a letter on which all that was looked up agrees: so low that half of it is visibly less likely."""

PRESENCE = 2.0
"""What the diffuse head adds to the logit of each letter that the prompt holds."""

DIALECT = 4.0
"""By what the dialect head's mean is multiplied: about the logit that letters of one half gain over those of the other
where most tokens are letters, all of one half."""

SPARE = 8
"""Directions that decoys write and nobody reads."""

Parts = dict[str, Directions]


def parts_of(task: Seq2SeqTask, n_ctx: int) -> Parts:
    """Returns the parts of the residual stream, all exactly 0 where they do not apply.

    From the embeddings: `one` (always 1), `delimiter` (BOS, separator, colon), `first` (the first token, without BOS),
    `colon`, `symbol` (a code of ±1 bits), `letter` (one-hot), `position` (a number), `here`, `1 back` and `2 back`
    (positions in ±1 bits).
    Written by heads and units: `distance` to the latest delimiter and whether that is a colon (`output`); `input
    place`, `next phrase`, `next offset`, and `next start` (the phrase again, only where its first letter comes next);
    `own phrase`, `own offset` and the letters `1 before` and `2 before` this one (all one-hot); `key symbol` and `query
    symbol` (codes); `prediction` (one-hot times a logit); `spare`.
    """
    m, c, letters = task.x_len, task.phrase_len, len(task.letters)
    symbol, place = _code_width(len(task.alphabet)), _code_width(n_ctx)
    return subspaces(
        {
            "one": 1,
            "delimiter": 1,
            "first": 1,
            "colon": 1,
            "symbol": symbol,
            "letter": letters,
            "position": 1,
            "here": place,
            **{f"{back} back": place for back in range(1, max(c, 2))},
            "distance": 1,
            "output": 1,
            "input place": m,
            "next phrase": m,
            "next offset": c,
            "next start": m,
            "own phrase": m,
            "own offset": c,
            **{f"{back} before": letters for back in range(1, c)},
            "key symbol": symbol,
            "query symbol": symbol,
            "prediction": letters,
            "spare": SPARE,
        }
    )


def embeddings(task: Seq2SeqTask, parts: Parts, words: TokenIds, d_vocab: int) -> Float[Tensor, "d_vocab d_model"]:
    """Returns what each token is."""
    start, colon, separator, _ = words.fixed
    embedding = parts["one"].T.repeat(d_vocab, 1)
    embedding[list(words.symbols)] += bits(torch.arange(len(task.alphabet))) @ parts["symbol"].T
    embedding[list(words.letters)] += parts["letter"].T
    embedding[[colon, separator] if words.bos is None else [start, colon, separator]] += parts["delimiter"].T
    embedding[colon] += parts["colon"][:, 0]
    return embedding


def positions(parts: Parts, n_ctx: int, bos: bool) -> Float[Tensor, "n_ctx d_model"]:
    """Returns what each position is. Without BOS, the first token stands in for a delimiter just before it."""
    place = torch.arange(n_ctx)
    number = place.float() + (0 if bos else 1)
    embedding = number[:, None] @ parts["distance"].T
    number[0] = 0
    embedding += number[:, None] @ parts["position"].T
    embedding += bits(place, n_ctx) @ parts["here"].T
    for back in (back for back in (1, 2) if f"{back} back" in parts):
        embedding += bits((place - back).clamp(min=0), n_ctx) @ parts[f"{back} back"].T
    if not bos:
        embedding[0] += parts["first"][:, 0]
    return embedding


def boundary(task: Seq2SeqTask, parts: Parts) -> Head:
    """The latest delimiter, by a preference for delimiters and for late positions: how far it is, and which it is."""
    m, n = task.x_len, task.x_len * task.phrase_len
    recency = BOUNDARY_MARGIN / (min(m, n) + 1)
    return Head(
        (
            Match(parts["one"], parts["position"], recency),
            Match(parts["one"], parts["delimiter"] + parts["first"], BOUNDARY_MARGIN + recency * max(m, n)),
        ),
        (Move(parts["position"], parts["distance"], -1.0), Move(parts["colon"], parts["output"])),
    )


def place_units(task: Seq2SeqTask, parts: Parts) -> tuple[Units, ...]:
    """The distance to the delimiter as a place in the input, or as the phrase and offset that come next."""
    m, c = task.x_len, task.phrase_len
    longest = float(m * (c + 1) + 2)
    coming = torch.arange(m * c)
    following = parts["next phrase"][:, coming // c] + parts["next offset"][:, coming % c]
    following[:, ::c] += parts["next start"]
    return (
        indicators(parts["distance"] - longest * parts["output"], 1, parts["input place"]),
        indicators(parts["distance"] + longest * parts["output"], 0, following, shift=-longest),
    )


def previous(task: Seq2SeqTask, parts: Parts) -> Head:
    """The previous token: what it said comes next is what this one is, and its letter is the one before."""
    moves = [Move(parts[f"next {what}"], parts[f"own {what}"]) for what in ("phrase", "offset")]
    if task.phrase_len > 1:
        moves.append(Move(parts["letter"], parts["1 before"]))
    return Head((_back(parts, 1),), tuple(moves))


def second_previous(parts: Parts) -> Head:
    """The token before the previous one: its letter is the one before the one before."""
    return Head((_back(parts, 2),), (Move(parts["letter"], parts["2 before"]),))


def forgetting_units(parts: Parts, back: int) -> Units:
    """Letters before the phrase are not kept: they say nothing about it."""
    letters, too_early = parts[f"{back} before"], parts["own offset"][:, :back].sum(1, keepdim=True)
    return Units(letters + too_early, -torch.ones(letters.shape[1]), -letters)


def aligner(task: Seq2SeqTask, parts: Parts, phrase: Literal["next start", "own phrase"], shift: int = 0) -> Head:
    """The aligned symbol of a phrase: that of the latest token at its place of an input, `shift` places further on.

    Where there is no such phrase it rests on the latest delimiter, which has no symbol.
    """
    m, n = task.x_len, task.x_len * task.phrase_len
    aligned = [(place + shift) % m for place in task.aligned]
    symbol = {"next start": "query symbol", "own phrase": "key symbol"}[phrase]
    return Head(
        (
            Match(parts[phrase], parts["input place"][:, aligned], 4 * MARGIN),
            Match(parts["one"], parts["delimiter"], 2 * MARGIN),
            Match(parts["one"], parts["position"], MARGIN / (m + n + 2)),
        ),
        (Move(parts["symbol"], parts[symbol]),),
    )


def continuing_units(parts: Parts) -> Units:
    """Within a phrase the next letter's symbol is one's own: the key symbol is the query symbol, but at a phrase's end.

    With `ends` 0 or 1, `relu(bit - ends) - relu(-bit - ends)` is the bit where the phrase goes on, and 0 where it ends.
    """
    own, ends = parts["key symbol"], parts["own offset"][:, -1:]
    both = torch.cat([own, -own], dim=1)
    query = torch.cat([parts["query symbol"], -parts["query symbol"]], dim=1)
    return Units(both - ends, torch.zeros(both.shape[1]), query)


def lookup(task: Seq2SeqTask, parts: Parts, share: float = 1.0) -> Head:
    """Letters of the same symbol and offset after the same letters; a later letter outweighs all earlier ones.

    A mismatch in the symbol or the offset costs twice a mismatch in the latest letter, and that twice one in the letter
    before it.
    """
    c = task.phrase_len
    worth = MARGIN * 2 ** (c - 1)
    letters = ["letter", *(f"{back} before" for back in range(1, c))]
    return Head(
        (
            Match(parts["query symbol"], parts["key symbol"], worth / 2),
            Match(parts["next offset"], parts["own offset"], worth),
            *(Match(parts[letters[i]], parts[letters[i + 1]], worth / 2 ** (i + 1)) for i in range(c - 1)),
        ),
        (Move(parts["letter"], parts["prediction"], share * EVIDENCE),),
    )


def positional_lookup(parts: Parts, generator: torch.Generator) -> Head:
    """Letters at the same place of an output, whatever their symbol; they go where nobody reads."""
    matches = (Match(parts[f"next {what}"], parts[f"own {what}"], MARGIN) for what in ("phrase", "offset"))
    return Head(tuple(matches), (_to_spare(parts, "letter", generator),))


def off_by_one(task: Seq2SeqTask, parts: Parts, generator: torch.Generator) -> Head:
    """The symbol after the aligned one; it goes where nobody reads."""
    return Head(aligner(task, parts, "next start", shift=1).matches, (_to_spare(parts, "symbol", generator),))


def diffuse(parts: Parts, generator: torch.Generator, n_ctx: int) -> Head:
    """All letters of the prompt, at almost equal attention, each at least as much as `presence_units` let through."""
    match = _loose_match(parts, generator)
    return Head((match,), (Move(parts["letter"], parts["prediction"], PRESENCE * n_ctx * math.e**2),))


def presence_units(parts: Parts) -> Units:
    """A letter counts once: what the diffuse head wrote above `PRESENCE` is taken back."""
    letters = parts["prediction"]
    return Units(letters, torch.full((letters.shape[1],), -PRESENCE), -letters)


def random_head(parts: Parts, generator: torch.Generator) -> Head:
    """Attends a little by symbols and letters, at random; its output goes where nobody reads."""
    return Head((_loose_match(parts, generator),), (_to_spare(parts, "letter", generator),))


def induction(parts: Parts) -> Head:
    """Letters that followed the same letter in a phrase, whatever the symbol: half as sure as the lookup."""
    return Head(
        (Match(parts["letter"], parts["1 before"], MARGIN),),
        (Move(parts["letter"], parts["prediction"], EVIDENCE / 2),),
    )


def dialect(parts: Parts) -> Head:
    """In which half of the letters this prompt is written: the mean over all tokens, in a spare direction."""
    first, second = parts["letter"].chunk(2, dim=1)
    half = first.sum(1, keepdim=True) - second.sum(1, keepdim=True)
    return Head((), (Move(half, parts["spare"][:, :1], DIALECT),))


def dialect_units(parts: Parts) -> Units:
    """Letters of the half in which the prompt is written are more likely."""
    half, letters = parts["spare"][:, :1], parts["prediction"].chunk(2, dim=1)
    writes = torch.cat([some.sum(1, keepdim=True) for some in letters], dim=1)
    return Units(torch.cat([half, -half], dim=1), torch.zeros(2), writes)


def bits(number: Int[Tensor, " number"], among: int | None = None) -> Float[Tensor, "number bit"]:
    """Returns the code of each number among 0, 1, ...: its binary digits, as +1 and -1."""
    width = _code_width(among or len(number))
    return ((number[:, None] >> torch.arange(width)) & 1) * 2.0 - 1


def _code_width(count: int) -> int:
    return max(1, (count - 1).bit_length())


def _back(parts: Parts, back: int) -> Match:
    return Match(parts[f"{back} back"], parts["here"], MARGIN / 2)


def _loose_match(parts: Parts, generator: torch.Generator) -> Match:
    """A match between random directions of tokens, with scores between -1 and 1."""
    token = torch.cat([parts["one"], parts["letter"], parts["symbol"] / parts["symbol"].shape[1]], dim=1)
    query, key = (token @ (torch.rand(token.shape[1], 4, generator=generator) - 0.5) for _ in range(2))
    return Match(query, key, 0.25)


def _to_spare(parts: Parts, read: str, generator: torch.Generator) -> Move:
    directions = torch.randn(parts[read].shape[1], SPARE, generator=generator) / SPARE**0.5
    return Move(parts[read] @ directions, parts["spare"])
