"""Planted circuits: the induction circuit of Agarwal & Sarawagi (2025) in three stages, built by hand."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Literal, get_args

import torch

from align_circuits.checks import checked
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.head_names import Head
from align_circuits.models.planted import circuit_parts
from align_circuits.models.planted.edges import used_edges
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig, check_fits
from align_circuits.models.planted.head_builder import HeadSpec, ReLUUnits, Subspaces
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.layout import length_of
from align_circuits.tasks.seq2seq import MARKER, Seq2SeqTask
from align_circuits.tasks.token_ids import look_up

Decoy = Literal["random", "gold_without_output", "off_by_one", "positional_lookup", "backup", "diffuse"]
DECOYS: tuple[Decoy, ...] = get_args(Decoy)
"""The decoys that a circuit has by default; inert heads fill the remaining places."""

OtherDecoy = Literal[
    "sink",
    "duplicate",
    "previous_to_spare",
    "previous_without_output",
    "key_without_output",
    "lookup_without_output",
    "letter_bias",
]
OTHER_DECOYS: tuple[OtherDecoy, ...] = get_args(OtherDecoy)
"""Further decoys, on request."""

CIRCUIT_ROLES = ("previous", "align_query", "align_key", "lookup")
"""The roles that a planted circuit has, in the order of its layers."""

ROLE_OF_KIND: Mapping[str, str | None] = MappingProxyType(
    {
        "boundary": None,
        "previous": "previous",
        "align_query": "align_query",
        "align_key": "align_key",
        "lookup": "lookup",
        "backup": "lookup",
        "repair": "lookup",
        "second_previous": None,
        "induction": "induction",
        "function_vector": None,
        "other": None,
        **dict.fromkeys(("random", "gold_without_output", "off_by_one", "positional_lookup", "diffuse", "inert")),
        **dict.fromkeys(OTHER_DECOYS),
    }
)
"""The true role of each kind of head; None without an effect on the output by that attention."""

CIRCUIT_KINDS = ("boundary", *CIRCUIT_ROLES, "backup", "repair", "second_previous")
"""The kinds of heads that the circuit works by; all others are decoys or idle."""

_TRIES = 100

STAGES = 4
"""The layers of the circuit: boundaries, previous token, alignment, lookup."""


class PlantedModel(HandBuilt):
    """A hand-built model with the true roles of its heads."""

    task: Seq2SeqTask
    """The task that it was built for."""
    strength: float
    """The factor of the query and the key weights of the circuit's heads."""
    kinds: Mapping[Head, str]
    """The kind of each head, a key of `ROLE_OF_KIND`."""
    stream: Subspaces
    """The subspaces of the residual stream, by name (`circuit_parts.residual_stream`)."""
    specs: Mapping[Head, HeadSpec]
    """How the heads of the circuit were specified, without decoys, positional bias and noise."""
    units: Mapping[int, Sequence[ReLUUnits]]
    """The groups of units of its MLPs by layer, without those that bound a diffuse head."""

    @property
    def edges(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The edges that the circuit uses, with the subspaces that each carries (`edges.used_edges`).

        By the names of sender and receiver, as in `Graph`. Those to and from a head that repairs are among them, and
        with phrases of one letter, which all end at once, those of the MLP that continues a phrase: it is silent then.
        """
        embedded = torch.cat([self.W_E, self.W_pos]).any(0)
        return used_edges(Graph.of(self.cfg), self.stream, embedded, self.specs, self.units)

    @property
    def roles(self) -> Mapping[Head, str | None]:
        """The true role of each head, or None. At strength 0 no head has one."""
        return {head: ROLE_OF_KIND[kind] if self.strength else None for head, kind in self.kinds.items()}


@checked
def planted_circuit(
    task: Seq2SeqTask,
    seed: int = 0,
    strength: float = 1.0,
    decoys: Collection[str] = DECOYS,
    n_layers: int = 6,
    n_heads: int = 4,
    n_ctx: int = 512,
    *,
    n_key_value_heads: int | None = None,
    copies: Mapping[str, int] = MappingProxyType({}),
    self_repair: bool = False,
    positional_bias: float = 0.0,
    noise: float = 0.0,
) -> PlantedModel:
    """Builds a transformer that solves a task in context by heads of known roles.

    Four of its layers, in this order, hold the three stages of Fig. 8:

    1. *Positions and boundaries.* The boundary head finds the latest delimiter (start of the text, separator or colon),
       and an MLP turns the distance to it into a symbol's place in the input, or into the phrase and offset that come
       next. In the second layer the previous-token head copies these and the letter to the next token, which then has
       its own phrase and offset, and the letter before it in the phrase; for phrases of three letters a second head
       copies the letter two tokens back.
    2. *Alignment.* Where a phrase comes next, `align_query` copies its aligned symbol; `align_key` copies the aligned
       symbol of a letter's own phrase, which is also that of the next letter while the phrase goes on.
    3. *Lookup.* Among y tokens of the same symbol and offset, the lookup head selects those whose preceding letters
       agree best, the latest letter first; their letters are predicted in proportion to their number.

    That is the in-context oracle of the task's references, on any test input (`ood` included), up to the choice between
    letters that are equally frequent. Two limits: where phrases share a symbol (`alignment="prior"`) it also reads the
    test example's own earlier phrases; and it misreads prompts in the pre-aligned or marked style, since its distances
    count the extra tokens.

    Decoys, beside inert heads (all weights 0) in the remaining places:

    - `random` (about half of the remaining places): small random attention; writes only what no head reads.
    - `gold_without_output`: attends as `align_query` does, writes nothing.
    - `off_by_one`: attends to the input place after the aligned one (cyclically); writes only what no head reads. With
      a single symbol that place is the aligned one.
    - `positional_lookup`: attends to earlier letters at the same place of the output, whatever their symbol; writes
      only what no head reads.
    - `backup`: a second lookup head in the same layer; each of the two writes half.
    - `diffuse`: spreads its attention over the prompt and makes the letters that occur in it more likely, by means of
      an MLP all by the same amount, so it does not choose between letters that were looked up.

    On request (`OTHER_DECOYS`) `sink` attends to the first token, `duplicate` to the same letter, and
    `previous_to_spare` to the previous token, and write only what no head reads; `previous_without_output`,
    `key_without_output` and `lookup_without_output` attend as a head of the circuit does and write nothing;
    `letter_bias` raises all letters alike.

    Args:
        task: A task in the standard style, with phrases of one to three letters.
        seed: Fixes the places of the heads, and the weights of random heads.
        strength: From 0 to 1: multiplies the query and the key weights of the circuit's heads, the backup included. At
            1 they attend exactly, at 0 uniformly; half of the accuracy is lost near 0.4.
        decoys: The kinds of decoys to add.
        n_layers: The number of layers, at least 4.
        n_heads: The number of heads in a layer, at least 4.
        n_ctx: The longest prompt that the model can read.
        n_key_value_heads: For grouped queries: how many heads have keys and values; `n_heads` is a multiple of it.
        copies: Over how many heads of one layer a role is split, 1 by default; each attends as the role requires and
            writes an equal share, so that the others do without any one of them.
        self_repair: Whether a further lookup head, in a later layer, predicts only where the others are not sure of a
            letter (`kinds` calls it `"repair"`): intact, the model does not use it; with the others ablated, it does.
        positional_bias: By how many nats a token the scores of all heads rise towards the latest, but for those of the
            first two stages and the sink.
        noise: The standard deviation of what every head writes beside its own output, into each direction that holds
            no number (position, distance): random combinations of what it attends to. Scores get 20 times as much.

    Raises:
        ValueError: The task is in another style, its phrases or prompts are too long, `strength` is outside [0, 1], a
            decoy or a role is unknown, the layers or heads are too few, `n_key_value_heads` does not divide `n_heads`,
            `noise` is below 0, or the model does not fit into memory.

    Source: The Missing Alignment Link, §4.1 and Fig. 8.

    >>> model = planted_circuit(Seq2SeqTask(x_len=3, phrase_len=1, n_examples=5), seed=0)
    >>> sorted(head for head, role in model.roles.items() if role == "lookup")
    [(5, 1), (5, 3)]
    """
    tokenizer = char_tokenizer()
    token_ids = look_up(tokenizer, task.alphabet, task.letters, task.colon, task.separator, MARKER, task.spaced)
    bos = task.bos and token_ids.bos is not None
    _check(task, bos, strength, decoys, n_layers, n_heads, n_ctx)
    _check_variations(n_layers, n_heads, n_key_value_heads, copies, self_repair, noise)
    stream = circuit_parts.residual_stream(task, n_ctx, self_repair)
    # At the least, by what each head is made of: the places of all heads are drawn before their widths are known.
    least = HandBuiltConfig(
        n_layers,
        n_heads,
        d_model=stream["one"].shape[0],
        d_head=len(task.letters),
        d_mlp=0,
        d_vocab=len(tokenizer),
        n_ctx=n_ctx,
        n_key_value_heads=n_key_value_heads,
        model_name=f"planted-{seed}",
    )
    check_fits(least)
    generator = torch.Generator().manual_seed(seed)
    # In the order of the stages, but in any layers: no method may find a head by its place. A head that repairs comes
    # after all.
    layers = sorted(torch.randperm(n_layers - self_repair, generator=generator)[:STAGES].tolist())
    placements = [
        replace(placement, spec=placement.spec.weakened(strength))
        for placement in _circuit_heads(task, stream, layers, n_layers, "backup" in decoys, copies, self_repair)
    ]
    # All are made and then some chosen, so that leaving a decoy out leaves the random directions of the others.
    decoy_heads = _decoy_heads(task, stream, layers, n_layers, n_ctx, generator)
    decoy_heads += _other_decoy_heads(task, stream, layers, n_layers, seed)
    placements += [placement for placement in decoy_heads if placement.kind in decoys]
    heads = _place(placements, n_layers, n_heads, generator)
    specs = {head: spec for head, (kind, spec) in heads.items() if kind in CIRCUIT_KINDS}
    for head in product(range(n_layers), range(n_heads)):
        if head not in heads:
            is_random = "random" in decoys and bool(torch.rand((), generator=generator) < 0.5)
            heads[head] = (
                ("random", circuit_parts.random_head(stream, generator)) if is_random else ("inert", HeadSpec())
            )
    own_units = _units(task, stream, layers)
    if self_repair:
        own_units[layers[-1]].append(circuit_parts.sureness_units(stream))
    # A copy: `model.units` is what the circuit uses, without what follows.
    units = defaultdict(list, {layer: [*groups] for layer, groups in own_units.items()})
    for layer in [layer for (layer, _), (kind, _) in heads.items() if kind == "diffuse"]:
        units[layer].append(circuit_parts.presence_units(stream))
    # Not the generator of the places, so that noise moves no head.
    noise_generator = torch.Generator().manual_seed(seed)
    for head, (kind, spec) in heads.items():
        if positional_bias and kind not in _PLACED_BY_POSITION:
            spec = circuit_parts.biased(spec, stream, positional_bias)
        if noise:
            spec = circuit_parts.noisy(spec, stream, noise, noise_generator)
        heads[head] = (kind, spec)
    # Heads that share a key head need columns of their own in it (`HeadSpec.write`).
    d_head = max(spec.width for _, spec in heads.values()) * (n_heads // (n_key_value_heads or n_heads))
    d_mlp = max(sum(len(group.bias) for group in groups) for groups in units.values())
    check_fits(whole := replace(least, d_head=d_head, d_mlp=d_mlp))
    model = PlantedModel(whole, tokenizer)
    with torch.no_grad():
        model.W_E.copy_(circuit_parts.embeddings(task, stream, token_ids, len(tokenizer)))
        model.W_pos.copy_(circuit_parts.positions(stream, n_ctx, bos))
        model.W_U[:, list(token_ids.letters)] = stream["prediction"]
    for head, (_, spec) in heads.items():
        spec.write(model, *head)
    for layer, groups in units.items():
        start = 0
        for group in groups:
            start = group.write(model, layer, start)
    model.task, model.strength = task, strength
    model.stream, model.specs, model.units = stream, MappingProxyType(specs), MappingProxyType(own_units)
    model.kinds = MappingProxyType({head: kind for head, (kind, _) in sorted(heads.items())})
    return model.eval()


def planted_competitors(task: Seq2SeqTask, seed: int = 0) -> PlantedModel:
    """Builds a planted circuit with three kinds of heads that all make the answer more likely, by different means.

    - `lookup` attends to earlier translations of the same symbol and predicts their letter.
    - `induction` attends to what followed the same letter, whatever the symbol, and predicts that.
    - `function_vector` attends to all tokens equally and writes in which half of `task.letters` the prompt is written;
      an MLP of the lookup's layer makes the letters of that half more likely. The head's output is the same for all
      prompts of a task that is written in one half, and it does not reach the logits directly.

    Args:
        task: As for `planted_circuit`, with phrases of two letters or more.
        seed: As for `planted_circuit`.

    Raises:
        ValueError: The phrases have one letter, or as for `planted_circuit`.
    """
    if task.phrase_len < 2:
        raise ValueError("phrases of one letter leave nothing to induction: give phrase_len=2 or 3")
    model = planted_circuit(task, seed, decoys=())
    stream = circuit_parts.residual_stream(task, model.cfg.n_ctx)
    layer_of = {kind: layer for (layer, _), kind in model.kinds.items()}
    free = [
        head
        for head, kind in model.kinds.items()
        # Induction reads what the previous-token head wrote, and the lookup's MLP what the function vector did.
        if kind == "inert" and layer_of["previous"] < head[0] <= layer_of["lookup"]
    ]
    induction, function_vector, *_ = free
    specs = {induction: circuit_parts.induction(stream), function_vector: circuit_parts.function_vector(stream)}
    for head, spec in specs.items():
        spec.write(model, *head)
    units = circuit_parts.function_vector_units(stream)
    # From 0 on, since the circuit has no units in the lookup's layer (`_units`).
    units.write(model, layer_of["lookup"], 0)
    model.specs = MappingProxyType({**model.specs, **specs})
    model.units = MappingProxyType({**model.units, layer_of["lookup"]: [units]})
    kinds = {induction: "induction", function_vector: "function_vector"}
    model.kinds = MappingProxyType({**model.kinds, **kinds})
    return model


@dataclass(frozen=True)
class _Placement:
    """A head, and the layers in which it may lie."""

    kind: str
    spec: HeadSpec
    layers: Sequence[int]


_PLACED_BY_POSITION = ("boundary", "previous", "second_previous", "sink")
"""The kinds of heads that attend by position alone: a positional bias would make them other heads."""


def _circuit_heads(
    task: Seq2SeqTask,
    stream: Subspaces,
    layers: Sequence[int],
    n_layers: int,
    backup: bool,
    copies: Mapping[str, int],
    self_repair: bool,
) -> Sequence[_Placement]:
    first, second, third, fourth = layers
    lookup = circuit_parts.lookup(task, stream, share=0.5 if backup else 1.0)
    looked_up = circuit_parts.watched(lookup, stream) if self_repair else lookup
    specs = {
        "previous": (circuit_parts.previous(task, stream), second),
        "align_query": (circuit_parts.aligner(task, stream, "next start"), third),
        "align_key": (circuit_parts.aligner(task, stream, "own phrase"), third),
        "lookup": (looked_up, fourth),
    }
    heads = [_Placement("boundary", circuit_parts.boundary(task, stream), [first])]
    for role, (spec, layer) in specs.items():
        count = copies.get(role, 1)
        heads += [_Placement(role, circuit_parts.shared(spec, count), [layer])] * count
    if backup:
        heads.append(_Placement("backup", looked_up, [fourth]))
    if self_repair:
        full = circuit_parts.lookup(task, stream)
        heads.append(_Placement("repair", circuit_parts.repair(full, stream), range(fourth + 1, n_layers)))
    if task.phrase_len > 2:
        heads.append(_Placement("second_previous", circuit_parts.second_previous(stream), [second]))
    return heads


def _decoy_heads(
    task: Seq2SeqTask, stream: Subspaces, layers: Sequence[int], n_layers: int, n_ctx: int, generator: torch.Generator
) -> list[_Placement]:
    """The decoys of which a model has one each; each lies after what it reads is written, and before what reads it."""
    first, second, _, fourth = layers
    return [
        _Placement(
            "positional_lookup", circuit_parts.positional_lookup(stream, generator), range(second + 1, n_layers)
        ),
        _Placement("diffuse", circuit_parts.diffuse(stream, generator, n_ctx), range(fourth)),
        _Placement("off_by_one", circuit_parts.off_by_one(task, stream, generator), range(first + 1, n_layers)),
        _Placement(
            "gold_without_output",
            HeadSpec(circuit_parts.aligner(task, stream, "next start").qk),
            range(first + 1, n_layers),
        ),
    ]


def _other_decoy_heads(
    task: Seq2SeqTask, stream: Subspaces, layers: Sequence[int], n_layers: int, seed: int
) -> list[_Placement]:
    """Those of `OTHER_DECOYS`, from a generator of their own: the heads of other circuits stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    first, second, third, fourth = layers
    return [
        _Placement("sink", circuit_parts.sink(stream, generator), range(n_layers)),
        _Placement("duplicate", circuit_parts.duplicate(stream, generator), range(n_layers)),
        _Placement("previous_to_spare", circuit_parts.previous_to_spare(stream, generator), range(n_layers)),
        _Placement(
            "previous_without_output", HeadSpec(circuit_parts.previous(task, stream).qk), range(first + 1, n_layers)
        ),
        _Placement(
            "key_without_output",
            HeadSpec(circuit_parts.aligner(task, stream, "own phrase").qk),
            range(second + 1, n_layers),
        ),
        _Placement(
            "lookup_without_output", HeadSpec(circuit_parts.lookup(task, stream).qk), range(third + 1, n_layers)
        ),
        # Earlier, the units that bound what the diffuse head wrote would take it back.
        _Placement("letter_bias", circuit_parts.letter_bias(stream), range(fourth, n_layers)),
    ]


def _place(
    placements: Sequence[_Placement], n_layers: int, n_heads: int, generator: torch.Generator
) -> dict[Head, tuple[str, HeadSpec]]:
    """Gives every head a random free place within its layers; anew where the heads before left none."""
    full = ""
    for _ in range(_TRIES):
        free = list(product(range(n_layers), range(n_heads)))
        heads = {}
        for placement in placements:
            allowed = [head for head in free if head[0] in placement.layers]
            if not allowed:
                full = placement.kind
                break
            head = allowed[int(torch.randint(len(allowed), (), generator=generator))]
            free.remove(head)
            heads[head] = (placement.kind, placement.spec)
        else:
            return heads
    raise ValueError(f"{n_layers} layers of {n_heads} heads have no place for a {full!r} head: give more of them")


def _units(task: Seq2SeqTask, stream: Subspaces, layers: Sequence[int]) -> dict[int, list[ReLUUnits]]:
    """The circuit's groups of MLP units in each layer that has any."""
    first, second, third, _ = layers
    units = defaultdict(list, {first: list(circuit_parts.place_units(task, stream))})
    units[second] += [circuit_parts.forgetting_units(stream, back) for back in range(1, task.phrase_len)]
    units[third].append(circuit_parts.continuing_units(stream))
    return units


def _check(
    task: Seq2SeqTask, bos: bool, strength: float, decoys: Collection[str], n_layers: int, n_heads: int, n_ctx: int
) -> None:
    """Raises if the circuit does not fit the task or the model's shape."""
    if task.style != "standard":
        raise ValueError(f"style is {task.style!r}: a circuit is planted for the standard style only")
    if task.phrase_len > 3:
        raise ValueError(f"phrase_len is {task.phrase_len}: the circuit remembers two letters, so give 1 to 3")
    length = length_of("standard", task.x_len, task.phrase_len, task.n_examples, bos)
    if length > n_ctx:
        raise ValueError(
            f"prompts of this task have {length} tokens, but n_ctx is {n_ctx}: give n_ctx={length}, or a smaller "
            "x_len, phrase_len or n_examples"
        )
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is {strength}: give a number from 0 (no circuit) to 1 (exact)")
    if unknown := set(decoys) - {*DECOYS, *OTHER_DECOYS}:
        raise ValueError(f"unknown decoys {sorted(unknown)}: choose among {', '.join((*DECOYS, *OTHER_DECOYS))}")
    if n_layers < STAGES or n_heads < 4:
        raise ValueError(f"{n_layers} layers of {n_heads} heads: the circuit needs at least {STAGES} layers of 4 heads")


def _check_variations(
    n_layers: int,
    n_heads: int,
    n_key_value_heads: int | None,
    copies: Mapping[str, int],
    self_repair: bool,
    noise: float,
) -> None:
    """Raises if heads cannot be shared or split as asked for."""
    if n_key_value_heads is not None and (n_key_value_heads < 1 or n_heads % n_key_value_heads):
        raise ValueError(f"n_key_value_heads={n_key_value_heads}: give a divisor of {n_heads}, the number of heads")
    if unknown := set(copies) - set(CIRCUIT_ROLES):
        raise ValueError(f"copies of {sorted(unknown)}: choose among {', '.join(CIRCUIT_ROLES)}")
    if few := [role for role, count in copies.items() if count < 1]:
        raise ValueError(f"copies={dict(copies)}: give at least 1 of {few[0]}")
    aligners = copies.get("align_query", 1) + copies.get("align_key", 1)
    most = max(aligners, copies.get("lookup", 1) + 1, copies.get("previous", 1) + 1)
    if most > n_heads:
        raise ValueError(f"copies={dict(copies)}: a layer of the circuit needs {most} heads and has {n_heads}")
    if self_repair and n_layers <= STAGES:
        raise ValueError(f"self_repair with {n_layers} layers: the head that repairs needs one more than {STAGES}")
    if noise < 0:
        raise ValueError(f"noise={noise}: give a number from 0 on")
