"""Planted circuits: paper 1's three-layer induction circuit built by hand, with heads whose true roles are known."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Literal, get_args

import torch

from align_circuits.models.planted import circuit
from align_circuits.models.planted.head_builder import Head, Units
from align_circuits.models.planted.transformer import HandBuilt, HandBuiltConfig
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.layout import layout_of
from align_circuits.tasks.seq2seq import MARKER, Seq2SeqTask
from align_circuits.tasks.token_ids import look_up

Decoy = Literal["random", "gold_without_output", "off_by_one", "positional_lookup", "backup", "diffuse"]
DECOYS: tuple[Decoy, ...] = get_args(Decoy)
"""All decoys, beside the inert heads that fill what is left."""

ROLES: Mapping[str, str | None] = MappingProxyType(
    {
        "boundary": None,
        "previous": "previous",
        "align_query": "align_query",
        "align_key": "align_key",
        "lookup": "lookup",
        "backup": "lookup",
        "second_previous": None,
        "induction": "induction",
        "dialect": None,
        **dict.fromkeys(("random", "gold_without_output", "off_by_one", "positional_lookup", "diffuse", "inert")),
    }
)
"""The true role of each kind of head. Attention without an effect is none, and so is an effect by other attention."""

STAGES = 4
"""Layers of the circuit: boundaries, previous token, alignment, lookup."""


class PlantedModel(HandBuilt):
    """A hand-built model that knows what each of its heads is."""

    task: Seq2SeqTask
    """The task that it was built for."""
    strength: float
    """By what the query and the key weights of the circuit's heads are multiplied."""
    kinds: Mapping[tuple[int, int], str]
    """What each head (layer, head) was built as: a key of `ROLES`."""
    roles: Mapping[tuple[int, int], str | None]
    """The true role of each head, or None. At strength 0 no head has one."""


def planted_circuit(
    task: Seq2SeqTask,
    seed: int = 0,
    strength: float = 1.0,
    decoys: Collection[str] = DECOYS,
    n_layers: int = 6,
    n_heads: int = 4,
    n_ctx: int = 512,
) -> PlantedModel:
    """Builds a transformer that solves a task in context, by heads that are known.

    Four of its layers, in this order, hold the three stages of Fig. 8:

    1. *Positions and boundaries.* The boundary head finds the latest delimiter (start of the text, separator or colon),
       and an MLP turns the distance to it into a symbol's place in the input, or into the phrase and offset that come
       next. In the second layer the previous-token head hands these and the letter on to the next token, which so knows
       its own phrase and offset, and the letter before it in the phrase; for phrases of three letters a second head
       fetches the letter two tokens back.
    2. *Alignment.* Where a phrase comes next, `align_query` fetches its aligned symbol; `align_key` fetches the aligned
       symbol of a letter's own phrase, which is also what the next letter asks for while the phrase goes on.
    3. *Lookup.* Among y tokens of the same symbol and offset, those whose letters before them agree best, the latest
       letter first; their letters are predicted in proportion to their number.

    That is the in-context oracle of the task's references, on any test input (`ood` included), up to the choice between
    letters that are equally frequent. Two limits: where phrases share a symbol (`alignment="prior"`) it also reads the
    test example's own earlier phrases, and prompts in the pre-aligned or marked style it misreads, since its distances
    count the extra tokens.

    Decoys, beside inert heads (all weights 0) in the places that are left:

    - `random` (about half of these places): small random attention; writes where nobody reads.
    - `gold_without_output`: attends as `align_query` does, writes nothing.
    - `off_by_one`: attends to the input place after the aligned one (the first, after the last); writes where nobody
      reads. With a single symbol that place is the aligned one.
    - `positional_lookup`: attends to earlier letters at the same place of the output, whatever their symbol; writes
      where nobody reads.
    - `backup`: a second lookup head in the same layer; each of the two writes half.
    - `diffuse`: spreads its attention over the whole prompt and makes the letters that occur there more likely, all by
      the same amount (an MLP sees to that), so it never chooses between letters that were looked up.

    Args:
        task: A task in the standard style, with phrases of one to three letters.
        seed: Draws the places of the heads, and the weights of random ones.
        strength: From 0 to 1: multiplies the query and the key weights of the circuit's heads, the backup included. At
            1 they attend where they should, at 0 to all positions alike; accuracy is half lost near 0.4.
        decoys: Which decoys there are.
        n_layers: Layers, at least 4.
        n_heads: Heads a layer, at least 4.
        n_ctx: The longest prompt that it can read.

    Raises:
        ValueError: The task is in another style, its phrases or prompts are too long, `strength` is outside [0, 1], a
            decoy is unknown, or the layers or heads are too few.

    Source: The Missing Alignment Link, §4.1 and Fig. 8.

    >>> model = planted_circuit(Seq2SeqTask(x_len=3, phrase_len=1, n_examples=5), seed=0)
    >>> sorted(head for head, role in model.roles.items() if role == "lookup")
    [(5, 1), (5, 3)]
    """
    tokenizer = char_tokenizer()
    words = look_up(tokenizer, task.alphabet, task.letters, task.colon, task.separator, MARKER, task.spaced)
    bos = task.bos and words.bos is not None
    _check(task, bos, strength, decoys, n_layers, n_heads, n_ctx)
    generator = torch.Generator().manual_seed(seed)
    layers = sorted(torch.randperm(n_layers, generator=generator)[:STAGES].tolist())
    parts = circuit.parts_of(task, n_ctx)
    circuit_heads = _circuit_heads(task, parts, layers, backup="backup" in decoys)
    wanted = [(kind, head.weakened(strength), within) for kind, head, within in circuit_heads]
    wanted += [decoy for decoy in _decoy_heads(task, parts, layers, n_layers, n_ctx, generator) if decoy[0] in decoys]
    heads = _placed(wanted, n_layers, n_heads, generator)
    for place in product(range(n_layers), range(n_heads)):
        if place not in heads:
            is_random = "random" in decoys and bool(torch.rand((), generator=generator) < 0.5)
            heads[place] = ("random", circuit.random_head(parts, generator)) if is_random else ("inert", Head())
    units = _units(task, parts, layers, [layer for (layer, _), (kind, _) in heads.items() if kind == "diffuse"])
    model = PlantedModel(
        HandBuiltConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            n_ctx=n_ctx,
            d_vocab=len(tokenizer),
            d_model=parts["one"].shape[0],
            d_head=max(head.width for _, head in heads.values()),
            d_mlp=max(sum(len(some.bias) for some in inside) for inside in units.values()),
            model_name=f"planted-{seed}",
        ),
        tokenizer,
    )
    with torch.no_grad():
        model.W_E.copy_(circuit.embeddings(task, parts, words, len(tokenizer)))
        model.W_pos.copy_(circuit.positions(parts, n_ctx, bos))
        model.W_U[:, list(words.letters)] = parts["prediction"]
    for (layer, head), (_, built) in heads.items():
        built.write(model, layer, head)
    for layer, inside in units.items():
        start = 0
        for some in inside:
            start = some.write(model, layer, start)
    model.task, model.strength = task, strength
    model.kinds = MappingProxyType({place: kind for place, (kind, _) in sorted(heads.items())})
    model.roles = MappingProxyType({place: ROLES[kind] if strength else None for place, kind in model.kinds.items()})
    return model.eval()


def planted_competitors(task: Seq2SeqTask, seed: int = 0) -> PlantedModel:
    """Builds a planted circuit with two more heads, to tell three kinds apart that all make the answer more likely.

    - `lookup` finds an earlier translation of the same symbol and writes its letter.
    - `induction` finds what followed the same letter, whatever the symbol, and writes that.
    - `dialect` is a function-vector head: it attends to all tokens alike and notes in which half of `task.letters` the
      prompt is written; an MLP of the lookup's layer makes the letters of that half more likely. What it says is the
      same for all prompts of a task that is written in one half, and it writes to no logit itself.

    Args:
        task: As for `planted`, with phrases of two letters or more.
        seed: As for `planted`.

    Raises:
        ValueError: The phrases have one letter, or as for `planted`.
    """
    if task.phrase_len < 2:
        raise ValueError("phrases of one letter leave nothing to induction: give phrase_len=2 or 3")
    model = planted_circuit(task, seed, decoys=())
    parts = circuit.parts_of(task, model.cfg.n_ctx)
    layer_of = {kind: layer for (layer, _), kind in model.kinds.items()}
    free = [
        place
        for place, kind in model.kinds.items()
        if kind == "inert" and layer_of["previous"] < place[0] <= layer_of["lookup"]
    ]
    rivals = dict(zip(("induction", "dialect"), free, strict=False))
    circuit.induction(parts).write(model, *rivals["induction"])
    circuit.dialect(parts).write(model, *rivals["dialect"])
    circuit.dialect_units(parts).write(model, layer_of["lookup"], 0)
    model.kinds = MappingProxyType({**model.kinds, **{place: kind for kind, place in rivals.items()}})
    model.roles = MappingProxyType({place: ROLES[kind] for place, kind in model.kinds.items()})
    return model


_Wanted = tuple[str, Head, Sequence[int]]
"""A kind of head, the head, and the layers in which it may lie."""


def _circuit_heads(task: Seq2SeqTask, parts: circuit.Parts, layers: Sequence[int], backup: bool) -> Sequence[_Wanted]:
    first, second, third, fourth = layers
    lookup = circuit.lookup(task, parts, share=0.5 if backup else 1.0)
    heads = [
        ("boundary", circuit.boundary(task, parts), [first]),
        ("previous", circuit.previous(task, parts), [second]),
        ("align_query", circuit.aligner(task, parts, "next start"), [third]),
        ("align_key", circuit.aligner(task, parts, "own phrase"), [third]),
        ("lookup", lookup, [fourth]),
    ]
    if backup:
        heads.append(("backup", lookup, [fourth]))
    if task.phrase_len > 2:
        heads.append(("second_previous", circuit.second_previous(parts), [second]))
    return heads


def _decoy_heads(
    task: Seq2SeqTask,
    parts: circuit.Parts,
    layers: Sequence[int],
    n_layers: int,
    n_ctx: int,
    generator: torch.Generator,
) -> list[_Wanted]:
    """The decoys that lie once in a model; each lies where what it reads is known, and before what reads it."""
    first, second, _, fourth = layers
    gold = circuit.aligner(task, parts, "next start")
    return [
        ("positional_lookup", circuit.positional_lookup(parts, generator), range(second + 1, n_layers)),
        ("diffuse", circuit.diffuse(parts, generator, n_ctx), range(fourth)),
        ("off_by_one", circuit.off_by_one(task, parts, generator), range(first + 1, n_layers)),
        ("gold_without_output", Head(gold.matches), range(first + 1, n_layers)),
    ]


def _placed(
    wanted: Sequence[_Wanted], n_layers: int, n_heads: int, generator: torch.Generator
) -> dict[tuple[int, int], tuple[str, Head]]:
    """Gives every head a random free place within its layers."""
    free = list(product(range(n_layers), range(n_heads)))
    placed = {}
    for kind, head, within in wanted:
        possible = [place for place in free if place[0] in within]
        place = possible[int(torch.randint(len(possible), (), generator=generator))]
        free.remove(place)
        placed[place] = (kind, head)
    return placed


def _units(
    task: Seq2SeqTask, parts: circuit.Parts, layers: Sequence[int], diffuse: Sequence[int]
) -> dict[int, list[Units]]:
    """The MLP units of each layer that has any."""
    first, second, third, _ = layers
    units = defaultdict(list, {first: list(circuit.place_units(task, parts))})
    units[second] += [circuit.forgetting_units(parts, back) for back in range(1, task.phrase_len)]
    units[third].append(circuit.continuing_units(parts))
    for layer in diffuse:
        units[layer].append(circuit.presence_units(parts))
    return units


def _check(
    task: Seq2SeqTask, bos: bool, strength: float, decoys: Collection[str], n_layers: int, n_heads: int, n_ctx: int
) -> None:
    """Refuses what the circuit is not made for."""
    if task.style != "standard":
        raise ValueError(f"style is {task.style!r}: a circuit is planted for the standard style only")
    if task.phrase_len > 3:
        raise ValueError(f"phrase_len is {task.phrase_len}: the circuit remembers two letters, so give 1 to 3")
    length = len(layout_of("standard", task.x_len, task.phrase_len, task.n_examples, bos).roles)
    if length > n_ctx:
        raise ValueError(
            f"prompts of this task have {length} tokens, but n_ctx is {n_ctx}: give n_ctx={length}, or a smaller "
            "x_len, phrase_len or n_examples"
        )
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is {strength}: give a number from 0 (no circuit) to 1 (exact)")
    if unknown := set(decoys) - set(DECOYS):
        raise ValueError(f"unknown decoys {sorted(unknown)}: choose among {', '.join(DECOYS)}")
    if n_layers < STAGES or n_heads < 4:
        raise ValueError(f"{n_layers} layers of {n_heads} heads: the circuit needs at least {STAGES} layers of 4 heads")
