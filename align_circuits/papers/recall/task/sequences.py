"""Sequences about a `RecallWorld`: facts of one subject (pretraining), and facts of one type (demonstrations)."""

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import IGNORE, Relation
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.task import Task, exchanged

HEAD_ROLES = {
    "subject": "attends to the subject, wherever it stands",
    "query_subject": "attends to the last mention of the subject",
    "relation": "attends to the token that announces the requested type",
    "same_type": "attends to attributes of the requested type",
    "grammar": "attends to the grammar tokens of the requested fact",
    "mark": "attends to the nearest subject or relation token",
}
"""The relations that a head can be named for on these tasks, each with what such a head does."""

IGNORED = -100
"""The label of a token without loss; PyTorch's cross-entropy leaves it out."""

Corruption = Literal["subject", "type"]
"""What differs in a corrupted prompt."""

LATENT = ("subject", "type", "has_fact", "grammar_len")
"""The random draws that prompts keep."""

Predicted = Literal["all", "last", "attributes", "no first grammar"]
"""Which tokens have a label in a batch: every next one; the last attribute alone; all attributes; or every next one but
the first grammar token of a fact, which follows its subject."""


class _FactSequences(Task):
    """What both tasks share: prompts of the drawn sequences, and training batches."""

    roles: ClassVar = HEAD_ROLES
    references: ClassVar = ("chance",)
    target_name: ClassVar = "The answer"
    name: ClassVar[str]
    one_subject: ClassVar[bool]
    """Whether all subsequences are about one subject, of any types, rather than of one type, about any subjects."""
    world: RecallWorld

    def sample(self, n: int, tokenizer: Any = None, seed: int = 0) -> Prompts:  # noqa: ARG002 - a world has token ids
        """Draws prompts that end where the last attribute comes next; see `RELATIONS`.

        Args:
            n: Their number; more prompts of a seed begin with the same ones.
            tokenizer: Unused, as a world has token ids of its own.
            seed: Of the prompts.
        """
        drawn = self._draw(n, Rng(_seed(n, seed), self.name))
        return _prompts(self.world, drawn, {"name": self.name, "config": asdict(cast(Any, self)), "seed": seed})

    def batch(
        self, seed: int, n: int, predict: Predicted = "all"
    ) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, "prompt pos"]]:
        """Draws a training batch; returns its tokens and its labels: the next tokens, or `IGNORED`."""
        world, drawn = self.world, self._draw(n, Rng(_seed(n, seed), "training"), ends=predict == "last")
        tokens = torch.from_numpy(_write(world, drawn))
        grammar_len = torch.from_numpy(drawn.grammar_len)[:, None]
        last = torch.from_numpy(_lengths(world, drawn.grammar_len, drawn.subject.shape[1]))[:, None] - 1
        pos = torch.arange(1, tokens.shape[1])
        part, place = pos // (grammar_len + 3), pos % (grammar_len + 3)
        states_fact = torch.from_numpy(drawn.has_fact).gather(1, part.clamp(max=drawn.subject.shape[1] - 1))
        labelled = {
            "all": pos <= last,
            "last": pos == last,
            "attributes": (pos <= last) & states_fact & (place == grammar_len + 1 + bool(world.relation_tokens)),
            "no first grammar": (pos <= last) & ~(states_fact & (place == 1) & (grammar_len > 0)),
        }[predict]
        return tokens[:, :-1], tokens[:, 1:].where(labelled, IGNORED)

    def corrupt(self, prompts: Prompts, kind: Corruption = "subject", *, seed: int = 0) -> Prompts:
        """Makes the corrupted prompts of minimal pairs; targets, roles and relations stay those of the clean prompts.

        - `"subject"`: the subject becomes another with another answer. In facts it does so at every occurrence, and its
          attributes with it; of demonstrations only the query changes.
        - `"type"`: the type becomes another. Of facts only the last changes: other grammar, or another relation token;
          in demonstrations all do: other attributes of the same subjects, other grammar.

        Args:
            prompts: Of `sample` of this task.
            kind: What differs.
            seed: Of the replacements.

        Raises:
            ValueError: An unknown kind, or no other answer.
        """
        if kind not in get_args(Corruption):
            raise ValueError(f"kind is {kind!r}: choose one of {', '.join(map(repr, get_args(Corruption)))}")
        subject, type_, has_fact, grammar_len = (prompts.latent[name].numpy().copy() for name in LATENT)
        world, rng, n = self.world, Rng(seed, f"corrupt {kind}"), len(prompts)
        where = slice(None) if self.one_subject == (kind == "subject") else slice(-1, None)
        if kind == "subject":
            value = world.facts[type_[:, -1]]
            other = value != np.take_along_axis(value, subject[:, -1:], 1)
            if not other.any(1).all():
                raise ValueError("all subjects have the same value of a type: there is no other answer to corrupt to")
            subject[:, where] = np.where(other, rng.uniform("subject", *other.shape).numpy(), -1).argmax(1)[:, None]
        else:
            shift = 1 + _below(rng, "type", (n, 1), world.n_types - 1)
            type_[:, where] = (type_[:, -1:] + shift) % world.n_types
        steps = int(grammar_len.max()) + 2
        text = np.full((n, has_fact.shape[1], steps), world.separator)  # with relation tokens, grammar stays
        if not world.relation_tokens:
            text = _grammar(world, rng, np.where(has_fact, type_, world.n_types), steps, grammar_len)
        written, pos = _read(world, _Drawn(subject, type_, has_fact, grammar_len, text))
        part = (pos // (grammar_len[:, None] + 3)).clip(0)
        restated = np.take_along_axis((type_ != prompts.latent["type"].numpy()) & has_fact, part, 1)
        kinds, inputs = prompts.token_kinds.numpy(), prompts.tokens.numpy().copy()
        facts = (kinds == TokenKind.INPUT) | (kinds == TokenKind.OUTPUT)
        replaced = facts if world.relation_tokens else facts | (restated & (kinds == TokenKind.TEXT))
        inputs[replaced] = written[replaced]
        relation = kinds == TokenKind.RELATION
        inputs[relation] = world.relation_ids.start + np.take_along_axis(type_, part, 1)[relation]
        latent = {"subject": torch.from_numpy(subject), "type": torch.from_numpy(type_)}
        return replace(
            prompts,
            inputs=torch.from_numpy(inputs),
            latent={**prompts.latent, **latent},
            task={**prompts.task, "corrupted": {"kind": kind, "seed": seed}},
        )

    def pairs(self, prompts: Prompts, seed: int = 0) -> tuple[Prompts, Prompts]:  # noqa: ARG002 - nothing is drawn
        """Returns prompts and others of the same length: the whole prompt is exchanged, not its subject alone."""
        return exchanged(prompts)

    @abstractmethod
    def _draw(self, n: int, rng: Rng, ends: bool = True) -> "_Drawn":
        """Draws sequences; with `ends`, the last subsequence states a fact."""


@dataclass(frozen=True)
class FactsTask(_FactSequences):
    """PT: subsequences about one subject, each of a type of its own: subject, S grammar tokens, attribute.

    `s g ... g a [sep] s g ... g a ...`, N_tr subsequences and no separator at the end; in a world with relation tokens
    `s g . r . g [sep] a s g ...`. Types are uniform and may repeat. With probability p_G a subsequence is grammar-only
    text of S + 2 tokens; the last subsequence of a prompt, which has the target, never is, unlike that of a training
    sequence.

    Source: Vasudeva et al. (2026), §2 and Eq. 2.

    Raises:
        ValueError: A number outside its range; relation tokens with grammar-only text, which §4 does not have.

    >>> task = FactsTask(RecallWorld.small(), n_facts=2, grammar_len=3, p_grammar=0.0)
    >>> task.sample(1, seed=0).text
    ['s2 g1 g3 g5 a0.0 [sep] s2 g2 g0 g2 ']
    """

    name: ClassVar = "facts"
    one_subject: ClassVar = True
    world: RecallWorld
    n_facts: int = 5
    """N_tr, the subsequences."""
    grammar_len: int = 80
    """S, at least 1."""
    p_grammar: float = 0.2
    """p_G."""

    def __post_init__(self):
        for name in ("n_facts", "grammar_len"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
        if not 0 <= self.p_grammar <= 1:
            raise ValueError(f"p_grammar is {self.p_grammar}: give a share from 0 to 1")
        if self.p_grammar and self.world.relation_tokens:
            raise ValueError(f"p_grammar is {self.p_grammar}, but a world with relation tokens has none: give 0")

    @property
    def length(self) -> int:
        """The tokens of a sequence, the last attribute included."""
        return _lengths(self.world, np.array([self.grammar_len]), self.n_facts).item()

    def _draw(self, n: int, rng: Rng, ends: bool = True) -> "_Drawn":
        world, shape = self.world, (n, self.n_facts)
        subject = np.repeat(_below(rng, "subject", (n, 1), world.n_subjects), self.n_facts, 1)
        type_ = _below(rng, "type", shape, world.n_types)
        has_fact = rng.uniform("grammar only", *shape).numpy() >= self.p_grammar
        if ends:
            has_fact[:, -1] = True
        chain = np.where(has_fact, type_, world.n_types)
        text = _grammar(world, rng, chain, self.grammar_len + 2 * bool(self.p_grammar), self.grammar_len)
        return _Drawn(subject, type_, has_fact, np.full(n, self.grammar_len), text)


@dataclass(frozen=True)
class DemonstrationsTask(_FactSequences):
    """ICL and ICL+Grm: facts of one type about several subjects; the attribute of the last is the target.

    `s a [sep] s a [sep] ... s` (in a world with relation tokens `s [sep] a s [sep] a ... s [sep]`); with grammar,
    S_ft tokens are between a subject and its attribute, with S_ft drawn for each sequence. Subjects are uniform and
    may repeat; the last may come from a set of its own, such as those held out.

    Source: Vasudeva et al. (2026), §2 and Eq. 3.

    Raises:
        ValueError: A number outside its range, an empty set of subjects, or an unknown one.

    >>> world = RecallWorld.small()
    >>> seen, held_out = world.split(8)
    >>> prompts = DemonstrationsTask(world, 2, subjects=seen, query_subjects=held_out).sample(1, seed=1)
    >>> prompts.text, prompts.relations["same_type"].keys_of(0)
    (['s7 a1.2 [sep] s10 a1.1 [sep] s0 '], [1, 4])
    """

    name: ClassVar = "demonstrations"
    one_subject: ClassVar = False
    world: RecallWorld
    n_demos: int = 16
    """N, the demonstrations before the query, from 0 up."""
    grammar_lens: tuple[int, int] = (0, 0)
    """The least and the greatest S_ft; (0, 0) is ICL, the paper's ICL+Grm is (1, 5)."""
    subjects: tuple[int, ...] | None = None
    """The subjects of demonstrations; all by default."""
    query_subjects: tuple[int, ...] | None = None
    """The subjects of the last subsequence; `subjects` by default."""
    icl_share: float = 0.0
    """The probability that a sequence is ICL, whatever `grammar_lens`."""

    def __post_init__(self):
        if self.n_demos < 0:
            raise ValueError(f"n_demos is {self.n_demos}: give at least 0")
        if not 0 <= self.icl_share <= 1:
            raise ValueError(f"icl_share is {self.icl_share}: give a share from 0 to 1")
        least, most = self.grammar_lens
        if not 0 <= least <= most:
            raise ValueError(f"grammar_lens is {self.grammar_lens}: give (least, most) with 0 <= least <= most")
        for name in ("subjects", "query_subjects"):
            chosen = getattr(self, name)
            if chosen is not None and not (len(chosen) and set(chosen) <= set(self.world.subject_ids)):
                raise ValueError(f"{name} is {chosen}: give subjects from 0 to {self.world.n_subjects - 1}, at least 1")

    @property
    def length(self) -> int:
        """The most tokens of a sequence, the last attribute included."""
        return _lengths(self.world, np.array([self.grammar_lens[1]]), self.n_demos + 1).item()

    def _draw(self, n: int, rng: Rng, ends: bool = True) -> "_Drawn":  # noqa: ARG002 - all subsequences state facts
        world, parts = self.world, self.n_demos + 1
        shown = np.array(world.subject_ids if self.subjects is None else self.subjects)
        queries = shown if self.query_subjects is None else np.array(self.query_subjects)
        subject = shown[_below(rng, "subject", (n, parts), len(shown))]
        subject[:, -1] = queries[_below(rng, "query", (n,), len(queries))]
        type_ = np.repeat(_below(rng, "type", (n, 1), world.n_types), parts, 1)
        least, most = self.grammar_lens
        lens = least + _below(rng, "length", (n,), most - least + 1)
        if self.icl_share:
            lens = np.where(rng.uniform("icl", n).numpy() < self.icl_share, 0, lens)
        text = _grammar(world, rng, type_, most, lens)
        return _Drawn(subject, type_, np.full((n, parts), True), lens, text)


RELATIONS = ("subject", "query_subject", "type", "same_type", "grammar", "relation")
"""The relations of a prompt, from its last position, where the attribute comes next, among all tokens; prompts without
keys and relations without prompts are left out.

- `subject`: all occurrences of the query subject; `query_subject`: the last one;
- `type`: what determines the target's type: its attributes, and the grammar and relation tokens of facts of it;
- `same_type`: earlier attributes of that type; of one subject (`FactsTask`) these are the answer itself;
- `grammar`, `relation`: the grammar tokens and the relation token of the last subsequence."""


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Sequences before they are written."""

    subject: Int[ndarray, "prompt part"]
    type: Int[ndarray, "prompt part"]
    has_fact: Bool[ndarray, "prompt part"]
    """False where a subsequence is grammar-only text."""
    grammar_len: Int[ndarray, " prompt"]
    text: Int[ndarray, "prompt part step"]
    """Grammar and relation tokens, as many as the longest subsequence needs."""


def _grammar(
    world: RecallWorld, rng: Rng, chain: Int[ndarray, "prompt part"], steps: int, lens: Int[ndarray, " prompt"] | int
) -> Int[ndarray, "prompt part step"]:
    """The grammar of each subsequence: a walk of its chain; or uniform, with its relation token among the first."""
    uniform = rng.uniform("grammar", *chain.shape, steps).numpy()
    if world.relation_tokens:
        text = (uniform * world.n_grammar).astype(np.int64) + world.grammar_ids.start
        place = (rng.uniform("place", *chain.shape).numpy() * np.reshape(lens, (-1, 1))).astype(np.int64)
        if steps:
            np.put_along_axis(text, place[..., None], world.relation_ids.start + chain[..., None], 2)
        return text
    flat = uniform.reshape(chain.size, steps).T
    walked = np.empty(flat.shape, np.int64)
    cumulative = np.cumsum(np.concatenate([world.chains, world.grammar_only[None]]), 2)[:, :, :-1].astype(np.float32)
    state = None
    for step, draws in enumerate(flat):
        if state is None:
            state = (draws * world.n_grammar).astype(np.int64)
        else:
            state = (cumulative[chain.ravel(), state] <= draws[:, None]).sum(1)
        walked[step] = state
    return walked.T.reshape(uniform.shape) + world.grammar_ids.start


def _lengths(world: RecallWorld, grammar_len: Int[ndarray, " prompt"], parts: int) -> Int[ndarray, " prompt"]:
    """The tokens of each sequence: nothing follows the last attribute."""
    return (grammar_len + 3) * parts - (not world.relation_tokens)


def _write(world: RecallWorld, drawn: _Drawn) -> Int[ndarray, "prompt pos"]:
    """The tokens, the last attribute included; shorter sequences end in separators."""
    n, parts = drawn.subject.shape
    value = world.facts[drawn.type, drawn.subject]
    lengths = _lengths(world, drawn.grammar_len, parts)
    tokens = np.full((n, lengths.max()), world.separator)
    for inner in np.unique(drawn.grammar_len):
        rows = np.flatnonzero(drawn.grammar_len == inner)
        block = np.full((len(rows), parts, inner + 3), world.separator)
        block[:, :, 0] = drawn.subject[rows]
        block[:, :, 1 : inner + 1] = drawn.text[rows, :, :inner]
        block[:, :, inner + 1 + world.relation_tokens] = value[rows]
        if not (stated := drawn.has_fact[rows]).all():
            block[~stated, : inner + 2] = drawn.text[rows][~stated][:, : inner + 2]
        length = int(_lengths(world, np.array([inner]), parts)[0])
        tokens[rows, :length] = block.reshape(len(rows), -1)[:, :length]
    return tokens


def _read(world: RecallWorld, drawn: _Drawn) -> tuple[Int[ndarray, "prompt pos"], Int[ndarray, "prompt pos"]]:
    """The tokens before the last attribute, padded on the left, and their places; those of padding are negative."""
    tokens = _write(world, drawn)
    lengths = _lengths(world, drawn.grammar_len, drawn.subject.shape[1])[:, None] - 1
    pos = np.arange(lengths.max()) - (lengths.max() - lengths)
    return np.where(pos >= 0, np.take_along_axis(tokens, pos.clip(0), 1), 0), pos


def _prompts(world: RecallWorld, drawn: _Drawn, task: dict[str, Any]) -> Prompts:
    n, parts = drawn.subject.shape
    inputs, pos = _read(world, drawn)
    mask, width = pos >= 0, drawn.grammar_len[:, None] + 3
    part, place = pos.clip(0) // width, pos.clip(0) % width
    at_value = width - 2 + world.relation_tokens
    factless = ~np.take_along_axis(drawn.has_fact, part, 1)
    kinds = np.select(
        [~mask, (place >= width - 2) & (place != at_value), factless, place == at_value, place == 0],
        [TokenKind.PAD, TokenKind.SEPARATOR, TokenKind.TEXT, TokenKind.OUTPUT, TokenKind.INPUT],
        TokenKind.TEXT,
    )
    kinds[mask & np.isin(inputs, world.relation_ids)] = TokenKind.RELATION
    type_ = np.where(factless, -1, np.take_along_axis(drawn.type, part, 1))
    target_type, subject = drawn.type[:, -1:], drawn.subject[:, -1:]
    last, subjects, values = part == parts - 1, kinds == TokenKind.INPUT, kinds == TokenKind.OUTPUT
    grammar, relation = (kinds == TokenKind.TEXT) & mask, kinds == TokenKind.RELATION
    keys = {
        "subject": subjects & (inputs == subject),
        "query_subject": subjects & last,
        "type": (values | grammar | relation) & (type_ == target_type),
        "same_type": values & (type_ == target_type),
        "grammar": grammar & last,
        "relation": relation & last,
    }
    each, query = torch.arange(n), inputs.shape[1] - 1
    targets = pd.DataFrame(
        {
            "prompt": each,
            "query_pos": query,
            "target_pos": query + 1,
            "token": world.facts[drawn.type[:, -1], drawn.subject[:, -1]],
            "phrase": parts - 1,
            "offset": 0,
            "kind": "first",
            "chance": 1 / sum(world.n_values),
        }
    )
    relations = [from_last_token(name, torch.from_numpy(at), torch.from_numpy(mask)) for name, at in keys.items()]
    return Prompts(
        inputs=torch.from_numpy(inputs),
        mask=torch.from_numpy(mask),
        token_kinds=torch.from_numpy(kinds),
        example=torch.from_numpy(np.where(mask, part, -1)),
        targets=targets,
        relations={relation.name: relation for relation in relations if len(relation)},
        token_strings=world.token_strings,
        task=task,
        latent={name: torch.from_numpy(getattr(drawn, name)) for name in LATENT},
    )


def followed_by_grammar(prompts: Prompts, world: RecallWorld, length: int, seed: int = 0) -> Prompts:
    """Returns ICL prompts whose query subject alone is followed by grammar tokens of the requested type.

    The one relation left is `query_subject`.

    Args:
        prompts: Of `DemonstrationsTask`, without padding.
        world: Of the task.
        length: How many grammar tokens; 0 leaves the prompt as it is.
        seed: Of the grammar.
    """
    n, end = prompts.tokens.shape
    lens = np.full(n, length)
    type_ = prompts.latent["type"][:, -1:].numpy()
    text = torch.from_numpy(_grammar(world, Rng(seed, "after the query"), type_, length, lens)[:, 0])

    def grown(values: Tensor, new: Tensor | int) -> Tensor:
        return torch.cat([values, torch.as_tensor(new).to(values).expand(n, length)], 1)

    mask = grown(prompts.mask, True)
    last = grown((torch.arange(end) == end - 1).expand(n, end), False)
    return replace(
        prompts,
        inputs=grown(prompts.tokens, text),
        mask=mask,
        token_kinds=grown(prompts.token_kinds, TokenKind.TEXT),
        example=grown(prompts.example, int(prompts.example.max())),
        targets=prompts.targets.assign(
            **{name: prompts.targets[name] + length for name in ("query_pos", "target_pos")}
        ),
        relations={"query_subject": from_last_token("query_subject", last, mask)},
        task={**prompts.task, "followed_by_grammar": length},
    )


def from_last_token(name: str, keys: Bool[Tensor, "prompt pos"], mask: Bool[Tensor, "prompt pos"]) -> Relation:
    """Returns the relation from the last position of each prompt that has keys to them, among all tokens in `mask`."""
    n, length = keys.shape
    zero, each = torch.zeros(n, dtype=torch.long), torch.arange(n)
    relation = Relation(
        name,
        target=each,
        prompt=each,
        query=zero + length - 1,
        key_value=zero,
        candidate_value=zero,
        key_label=torch.where(keys, 0, IGNORE),
        candidate_label=torch.where(mask, 0, IGNORE),
    )
    return relation.select(keys.any(1))


def _below(rng: Rng, name: str, shape: tuple[int, ...], limit: int) -> Int[ndarray, "*shape"]:
    """Integers from 0 up to but without `limit`, uniform."""
    return rng.below(name, torch.full(shape, limit)).numpy()


def _seed(n: int, seed: int) -> int:
    if n < 1:
        raise ValueError(f"n is {n}: give at least 1 prompt")
    return seed
