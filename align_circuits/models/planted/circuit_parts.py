"""The induction circuit of Fig. 8 for sequence-to-sequence prompts: its residual stream, heads, units and decoys."""

import math
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.models.planted.head_builder import (
    Directions,
    HeadSpec,
    OVTerm,
    QKTerm,
    ReLUUnits,
    Subspaces,
    indicators,
    subspaces,
)
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.token_ids import TokenIds

MARGIN = 10.0
"""By how many nats the score of the right position exceeds those of others, at full strength."""

BOUNDARY_MARGIN = 3 * MARGIN
"""The same for the boundary head. Its output is read as a number, so it must be the last to fail in a weak circuit."""

EVIDENCE = 4.0
"""The logit of a letter on which all looked-up letters agree: so low that half of it is visibly less likely."""

PRESENCE = 2.0
"""What the diffuse head adds to the logit of each letter that the prompt holds."""

FUNCTION_VECTOR_GAIN = 4.0
"""The output weight of the function-vector head: about the logit by which letters of one half exceed those of the other
in prompts where most tokens are letters of that half."""

LETTER_BIAS = 2.0
"""What the letter-bias head adds to the logit of every letter."""

SURE = 0.2
"""The share of the looked-up letters that one must have for the lookup to be sure: automata go on by four at most."""

SUPPRESSION = 600.0
"""By how many nats the backup of a self-repairing circuit prefers delimiters, per logit above `SURE * EVIDENCE`."""

_NOISE_RANK, _TOKEN_NORM, _SCORE_NOISE = 4, 5.0, 20.0

SPARE = 8
"""The number of directions that decoys write and no head or unit reads."""

CONTENT = (
    *("symbol", "letter", "1 before", "2 before", "key symbol", "query symbol"),
    *("prediction", "spare", "looked up", "sure"),
)
"""The subspaces that hold what differs between prompts of one layout; the others hold places, the same in all."""


def residual_stream(task: Seq2SeqTask, n_ctx: int, self_repair: bool = False) -> Subspaces:
    """Returns the subspaces of the residual stream; coordinates are exactly 0 where they do not apply.

    From the embeddings: `one` (always 1), `delimiter` (BOS, separator, colon), `first` (the first token, without BOS),
    `colon`, `symbol` (a code of ±1 bits), `letter` (one-hot), `position` (a number), `0 back`, `1 back` and `2 back`
    (positions in ±1 bits).

    Written by heads and units: `distance` to the latest delimiter and whether that is a colon (`output`); `input
    place`, `next phrase`, `next offset`, and `next start` (the phrase again, only where its first letter comes next);
    `own phrase`, `own offset` and the letters `1 before` and `2 before` this one (all one-hot); `key symbol` and `query
    symbol` (codes); `prediction` (one-hot times a logit); `spare`. With self-repair also `looked up`, what the lookup
    heads alone predict, and whether they are `sure`.
    """
    m, c, letters = task.x_len, task.phrase_len, len(task.letters)
    symbol, position = _code_width(len(task.alphabet)), _code_width(n_ctx)
    return subspaces(
        {
            "one": 1,
            "delimiter": 1,
            "first": 1,
            "colon": 1,
            "symbol": symbol,
            "letter": letters,
            "position": 1,
            **{f"{back} back": position for back in range(max(c, 2))},
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
            **({"looked up": letters, "sure": 1} if self_repair else {}),
        }
    )


def embeddings(
    task: Seq2SeqTask, stream: Subspaces, token_ids: TokenIds, d_vocab: int
) -> Float[Tensor, "d_vocab d_model"]:
    """Returns the token embeddings."""
    start, colon, separator, _ = token_ids.fixed
    embedding = stream["one"].T.repeat(d_vocab, 1)
    embedding[list(token_ids.symbols)] += bits(torch.arange(len(task.alphabet))) @ stream["symbol"].T
    embedding[list(token_ids.letters)] += stream["letter"].T
    embedding[[colon, separator] if token_ids.bos is None else [start, colon, separator]] += stream["delimiter"].T
    embedding[colon] += stream["colon"][:, 0]
    return embedding


def positions(stream: Subspaces, n_ctx: int, bos: bool) -> Float[Tensor, "n_ctx d_model"]:
    """Returns the position embeddings. Without BOS, the first token stands in for a delimiter just before it."""
    index = torch.arange(n_ctx)
    number = index.float() + (0 if bos else 1)
    embedding = number[:, None] @ stream["distance"].T
    # The delimiter for which the first token stands lies at position 0.
    number[0] = 0
    embedding += number[:, None] @ stream["position"].T
    for back in (back for back in range(3) if f"{back} back" in stream):
        embedding += bits((index - back).clamp(min=0), n_ctx) @ stream[f"{back} back"].T
    if not bos:
        embedding[0] += stream["first"][:, 0]
    return embedding


def boundary(task: Seq2SeqTask, stream: Subspaces) -> HeadSpec:
    """Attends to the latest delimiter, as a delimiter and as late; writes its distance and whether it is a colon."""
    m, n = task.x_len, task.x_len * task.phrase_len
    # Of two delimiters, at least min(m, n) + 1 tokens apart, the later wins by BOUNDARY_MARGIN; a delimiter wins by as
    # much over the tokens after it, of which there are at most max(m, n).
    recency = BOUNDARY_MARGIN / (min(m, n) + 1)
    return HeadSpec(
        (
            QKTerm(stream["one"], stream["position"], recency),
            QKTerm(stream["one"], stream["delimiter"] + stream["first"], BOUNDARY_MARGIN + recency * max(m, n)),
        ),
        (OVTerm(stream["position"], stream["distance"], -1.0), OVTerm(stream["colon"], stream["output"])),
    )


def place_units(task: Seq2SeqTask, stream: Subspaces) -> tuple[ReLUUnits, ...]:
    """Turn the distance to the delimiter into a place in the input, or into the phrase and offset that come next."""
    m, c = task.x_len, task.phrase_len
    # Longer than any distance: it moves the distances of outputs out of the range of the units for inputs, and back.
    longest = float(m * (c + 1) + 2)
    coming = torch.arange(m * c)
    following = stream["next phrase"][:, coming // c] + stream["next offset"][:, coming % c]
    # Every c-th coming place is the first of a phrase.
    following[:, ::c] += stream["next start"]
    return (
        indicators(stream["distance"] - longest * stream["output"], 1, stream["input place"]),
        indicators(stream["distance"] + longest * stream["output"], 0, following, shift=-longest),
    )


def previous(task: Seq2SeqTask, stream: Subspaces) -> HeadSpec:
    """Attends to the previous token; writes its next phrase and offset as a token's own, and its letter."""
    ov = [OVTerm(stream[f"next {half}"], stream[f"own {half}"]) for half in ("phrase", "offset")]
    if task.phrase_len > 1:
        ov.append(OVTerm(stream["letter"], stream["1 before"]))
    return HeadSpec((_steps_back(stream, 1),), tuple(ov))


def second_previous(stream: Subspaces) -> HeadSpec:
    """Attends two tokens back; writes that letter."""
    return HeadSpec((_steps_back(stream, 2),), (OVTerm(stream["letter"], stream["2 before"]),))


def forgetting_units(stream: Subspaces, back: int) -> ReLUUnits:
    """Erase letters from before the phrase, which do not belong to it."""
    letters, too_early = stream[f"{back} before"], stream["own offset"][:, :back].sum(1, keepdim=True)
    return ReLUUnits(letters + too_early, -torch.ones(letters.shape[1]), -letters)


def aligner(
    task: Seq2SeqTask, stream: Subspaces, phrase: Literal["next start", "own phrase"], shift: int = 0
) -> HeadSpec:
    """Attends to a phrase's aligned symbol, or that of `shift` places after it, in the latest input; writes the symbol.

    Where there is no such phrase the head attends to the latest delimiter, which has no symbol.
    """
    m, n = task.x_len, task.x_len * task.phrase_len
    aligned = [(index + shift) % m for index in task.aligned]
    symbol = {"next start": "query symbol", "own phrase": "key symbol"}[phrase]
    return HeadSpec(
        (
            # An aligned symbol (4) beats a delimiter (2), and that the rest (0): positions within an example, of m + n
            # + 2 tokens, add less than one MARGIN. Between examples they add one, so the latest example wins.
            QKTerm(stream[phrase], stream["input place"][:, aligned], 4 * MARGIN),
            QKTerm(stream["one"], stream["delimiter"], 2 * MARGIN),
            QKTerm(stream["one"], stream["position"], MARGIN / (m + n + 2)),
        ),
        (OVTerm(stream["symbol"], stream[symbol]),),
    )


def continuing_units(stream: Subspaces) -> ReLUUnits:
    """Copy the key symbol to the query symbol, except at a phrase's end: within a phrase the next letter shares it.

    With `ends` 0 or 1, `relu(bit - ends) - relu(-bit - ends)` is the bit where the phrase goes on, and 0 where it ends.
    """
    symbol, ends = stream["key symbol"], stream["own offset"][:, -1:]
    signed = torch.cat([symbol, -symbol], dim=1)
    # Two units a bit, since a ReLU passes one sign only.
    query = torch.cat([stream["query symbol"], -stream["query symbol"]], dim=1)
    return ReLUUnits(signed - ends, torch.zeros(signed.shape[1]), query)


def lookup(task: Seq2SeqTask, stream: Subspaces, share: float = 1.0) -> HeadSpec:
    """Attends to letters of the same symbol and offset that follow the same letters; predicts them.

    A mismatch in the symbol or the offset costs twice as much as one in the latest letter, and that twice as much as
    one in the letter before it. So a later letter outweighs all earlier ones.
    """
    c = task.phrase_len
    # Weights halve from the latest letter back, so the earliest of them still decides by MARGIN.
    weight = MARGIN * 2 ** (c - 1)
    letters = ["letter", *(f"{back} before" for back in range(1, c))]
    return HeadSpec(
        (
            QKTerm(stream["query symbol"], stream["key symbol"], weight / 2),
            QKTerm(stream["next offset"], stream["own offset"], weight),
            *(QKTerm(stream[letters[i]], stream[letters[i + 1]], weight / 2 ** (i + 1)) for i in range(c - 1)),
        ),
        (OVTerm(stream["letter"], stream["prediction"], share * EVIDENCE),),
    )


def watched(lookup_head: HeadSpec, stream: Subspaces) -> HeadSpec:
    """Returns a lookup head that also writes what it predicts where `sureness_units` read it."""
    (prediction,) = lookup_head.ov
    return replace(lookup_head, ov=(prediction, replace(prediction, write=stream["looked up"])))


def sureness_units(stream: Subspaces) -> ReLUUnits:
    """Give the evidence for the best letter that was looked up, minus `SURE * EVIDENCE`."""
    letters = stream["looked up"]
    count = letters.shape[1]
    return ReLUUnits(letters, torch.full((count,), -SURE * EVIDENCE), stream["sure"].expand(-1, count))


def repair(lookup_head: HeadSpec, stream: Subspaces) -> HeadSpec:
    """Returns a lookup head that rests on delimiters, which have no letter, while earlier lookup heads are sure."""
    return replace(lookup_head, qk=(*lookup_head.qk, QKTerm(stream["sure"], stream["delimiter"], SUPPRESSION)))


def shared(spec: HeadSpec, heads: int) -> HeadSpec:
    """Returns one of several heads that attend alike and write an equal share each."""
    return replace(spec, ov=tuple(replace(term, weight=term.weight / heads) for term in spec.ov))


def biased(spec: HeadSpec, stream: Subspaces, nats: float) -> HeadSpec:
    """Returns a head whose scores rise by so many nats a token, towards the latest."""
    return replace(spec, qk=(*spec.qk, QKTerm(stream["one"], stream["position"], nats)))


def noisy(spec: HeadSpec, stream: Subspaces, scale: float, generator: torch.Generator) -> HeadSpec:
    """Returns a head with random terms: `scale` is about the standard deviation of what it writes more, everywhere."""
    numbers = torch.cat([stream[name] for name in ("position", "distance", "output")], 1).sum(1).bool()

    def random() -> Directions:
        directions = torch.randn(len(numbers), _NOISE_RANK, generator=generator)
        return directions.masked_fill(numbers[:, None], 0)

    # Tokens have a norm of about 5, so that each coordinate along these directions is about 1.
    qk = QKTerm(random() / _TOKEN_NORM, random() / _TOKEN_NORM, _SCORE_NOISE * scale * _NOISE_RANK**-0.5)
    ov = OVTerm(random() / _TOKEN_NORM, random(), scale * _NOISE_RANK**-0.5)
    return HeadSpec((*spec.qk, qk), (*spec.ov, ov))


def sink(stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends to the first token; writes spare directions only."""
    return HeadSpec((QKTerm(stream["one"], stream["position"], -MARGIN),), (_to_spare(stream, "letter", generator),))


def duplicate(stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends to the same letter, here and earlier; writes spare directions only."""
    return HeadSpec((QKTerm(stream["letter"], stream["letter"], MARGIN),), (_to_spare(stream, "letter", generator),))


def previous_to_spare(stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends to the previous token; writes spare directions only."""
    return HeadSpec((_steps_back(stream, 1),), (_to_spare(stream, "letter", generator),))


def letter_bias(stream: Subspaces) -> HeadSpec:
    """Attends to all tokens equally; raises all letters alike, by `LETTER_BIAS`."""
    return HeadSpec((), (OVTerm(stream["one"], stream["prediction"].sum(1, keepdim=True), LETTER_BIAS),))


def positional_lookup(stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends to letters at the same place of an output, whatever their symbol; writes spare directions only."""
    qk = (QKTerm(stream[f"next {half}"], stream[f"own {half}"], MARGIN) for half in ("phrase", "offset"))
    return HeadSpec(tuple(qk), (_to_spare(stream, "letter", generator),))


def off_by_one(task: Seq2SeqTask, stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends to the symbol after the aligned one; writes spare directions only."""
    return HeadSpec(aligner(task, stream, "next start", shift=1).qk, (_to_spare(stream, "symbol", generator),))


def diffuse(stream: Subspaces, generator: torch.Generator, n_ctx: int) -> HeadSpec:
    """Attends almost equally to all tokens; raises the letters of the prompt, each by `PRESENCE` or more."""
    return HeadSpec(
        (_random_qk(stream, generator),),
        # Scores lie in [-1, 1], so a token gets at least 1 / (n_ctx e²) of the attention: a letter that occurs is
        # raised by PRESENCE or more, and `presence_units` cut off what is above.
        (OVTerm(stream["letter"], stream["prediction"], PRESENCE * n_ctx * math.e**2),),
    )


def presence_units(stream: Subspaces) -> ReLUUnits:
    """Reduce what the diffuse head wrote to `PRESENCE`, however often a letter occurs."""
    letters = stream["prediction"]
    return ReLUUnits(letters, torch.full((letters.shape[1],), -PRESENCE), -letters)


def random_head(stream: Subspaces, generator: torch.Generator) -> HeadSpec:
    """Attends by small random scores of symbols and letters; writes spare directions only."""
    return HeadSpec((_random_qk(stream, generator),), (_to_spare(stream, "letter", generator),))


def induction(stream: Subspaces) -> HeadSpec:
    """Attends to letters that followed the same letter in a phrase, whatever the symbol; predicts half as strongly."""
    return HeadSpec(
        (QKTerm(stream["letter"], stream["1 before"], MARGIN),),
        (OVTerm(stream["letter"], stream["prediction"], EVIDENCE / 2),),
    )


def function_vector(stream: Subspaces) -> HeadSpec:
    """Attends equally to all tokens; writes to a spare direction in which half of the letters they are."""
    first, second = stream["letter"].chunk(2, dim=1)
    half = first.sum(1, keepdim=True) - second.sum(1, keepdim=True)
    return HeadSpec((), (OVTerm(half, stream["spare"][:, :1], FUNCTION_VECTOR_GAIN),))


def function_vector_units(stream: Subspaces) -> ReLUUnits:
    """Raise the letters of the half in which the prompt is written."""
    half, letters = stream["spare"][:, :1], stream["prediction"].chunk(2, dim=1)
    writes = torch.cat([half_of_letters.sum(1, keepdim=True) for half_of_letters in letters], dim=1)
    return ReLUUnits(torch.cat([half, -half], dim=1), torch.zeros(2), writes)


def bits(number: Int[Tensor, " number"], count: int | None = None) -> Float[Tensor, "number bit"]:
    """Returns the code of each number below `count`: its binary digits, as +1 and -1."""
    width = _code_width(count or len(number))
    return ((number[:, None] >> torch.arange(width)) & 1) * 2.0 - 1


def _code_width(count: int) -> int:
    return max(1, (count - 1).bit_length())


def _steps_back(stream: Subspaces, back: int) -> QKTerm:
    return QKTerm(stream[f"{back} back"], stream["0 back"], MARGIN / 2)


def _random_qk(stream: Subspaces, generator: torch.Generator) -> QKTerm:
    """A QK term between random directions of tokens, with scores between -1 and 1."""
    token = torch.cat([stream["one"], stream["letter"], stream["symbol"] / stream["symbol"].shape[1]], dim=1)
    query, key = (token @ (torch.rand(token.shape[1], 4, generator=generator) - 0.5) for _ in range(2))
    return QKTerm(query, key, 0.25)


def _to_spare(stream: Subspaces, read: str, generator: torch.Generator) -> OVTerm:
    # About as long, after the projection, as what is read.
    directions = torch.randn(stream[read].shape[1], SPARE, generator=generator) / SPARE**0.5
    return OVTerm(stream[read] @ directions, stream["spare"])
