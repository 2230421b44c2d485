"""Which tokens may come next at each position of pretraining sequences, in a world with relation tokens."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from align_circuits.papers.recall.task.sequences import HEAD_ROLES, FactsTask, from_last_token
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.task import Task

PLACES = ("subject", "before relation", "last before relation", "after relation", "separator", "attribute")
"""The kinds of the next token: the subject; a slot before the relation token; the last such slot, which must hold it; a
slot after the relation token; the separator; the attribute."""


def allowed_after(
    world: RecallWorld, tokens: Int[Tensor, "prompt pos"], n_slots: int
) -> tuple[Bool[Tensor, "prompt pos d_vocab"], Int[Tensor, "prompt pos"]]:
    """Returns the tokens allowed after each position of pretraining sequences, and the index of their kind in `PLACES`.

    Args:
        world: With relation tokens.
        tokens: Sequences of `FactsTask`, from their first token on.
        n_slots: S.
    """
    period = n_slots + 3
    pos = torch.arange(tokens.shape[1])
    start = (pos // period * period).expand_as(tokens)
    place = pos % period
    type_ = tokens - world.relation_ids.start
    known = (type_ >= 0) & (type_ < world.n_types)
    latest = torch.where(known, pos, -1).cummax(1).values
    stated_type = type_.gather(1, latest.clamp(min=0)).clamp(0, world.n_types - 1)
    kind = torch.where(latest >= start, 3, torch.where(place == n_slots - 1, 2, 1))
    kind = torch.where(place == n_slots, 4, torch.where(place == n_slots + 1, 5, torch.where(place < n_slots, kind, 0)))
    grammar, relation, separator = (
        torch.zeros(world.d_vocab, dtype=torch.bool).index_fill(0, torch.tensor(list(ids)), True)
        for ids in (world.grammar_ids, world.relation_ids, [world.separator])
    )
    none = torch.zeros_like(grammar)  # replaced below by the single token that is allowed
    fixed = torch.stack([none, grammar | relation, relation, grammar, separator, none])[kind]
    subject = tokens.gather(1, start)
    facts = torch.from_numpy(world.facts)
    only = torch.where(kind == 5, facts[stated_type, subject], subject)
    single = torch.nn.functional.one_hot(only, world.d_vocab).bool()
    return torch.where(((kind == 0) | (kind == 5))[..., None], single, fixed), kind


@dataclass(frozen=True)
class SlotsTask(Task):
    """Text about one subject that ends within the grammar of its last fact; every token that may come next is correct.

    The relation is `mark`: from the last token to the nearest subject or relation token, which determines whether a
    relation token may still come.

    Source: Vasudeva et al. (2026), Eq. 8.

    Raises:
        ValueError: A world without relation tokens, or a number outside its range.

    >>> task = SlotsTask(RecallWorld.small(relation_tokens=True), n_facts=1, grammar_len=4)
    >>> prompts = task.sample(1, seed=1)
    >>> prompts.text, prompts.relations["mark"].keys_of(0)
    (['s4 g0 r1 '], [2])
    """

    roles: ClassVar = {"mark": HEAD_ROLES["mark"]}
    target_name: ClassVar = "The answer"

    world: RecallWorld
    n_facts: int = 5
    """N_tr, the subsequences."""
    grammar_len: int = 10
    """S, at least 1."""

    def __post_init__(self):
        if not self.world.relation_tokens:
            raise ValueError("this world has no relation tokens, so no slots: RecallWorld.paper(relation_tokens=True)")
        _ = self._facts  # checks the numbers

    @property
    def _facts(self) -> FactsTask:
        return FactsTask(self.world, self.n_facts, self.grammar_len, p_grammar=0.0)

    def sample(self, n: int, tokenizer: Any = None, seed: int = 0) -> Prompts:  # noqa: ARG002 - a world has token ids
        """Draws prompts, padded on the left.

        Args:
            n: Their number.
            tokenizer: Unused, as a world has token ids of its own.
            seed: Of the prompts.
        """
        world, tokens = self.world, self._facts.batch(seed, n)[0]
        allowed, _ = allowed_after(world, tokens, self.grammar_len)
        period = self.grammar_len + 3
        cut = Rng(seed, "recall slots").below("cut", torch.full((n,), self.grammar_len)).long()
        length = (self.n_facts - 1) * period + cut + 1
        each, longest = torch.arange(n), int(length.max())
        pos = torch.arange(longest) - (longest - length)[:, None]
        mask = pos >= 0
        inputs = tokens.gather(1, pos.clamp(min=0)).where(mask, 0)
        ids_of = {
            TokenKind.INPUT: world.subject_ids,
            TokenKind.RELATION: world.relation_ids,
            TokenKind.SEPARATOR: [world.separator],
            TokenKind.OUTPUT: range(world.value_ids[0].start, world.value_ids[-1].stop),
        }
        kinds = torch.full_like(inputs, TokenKind.TEXT)
        for kind, ids in ids_of.items():
            kinds[torch.isin(inputs, torch.tensor(list(ids)))] = kind
        kinds[~mask] = TokenKind.PAD
        marks = (kinds == TokenKind.INPUT) | (kinds == TokenKind.RELATION)
        nearest = torch.where(marks, torch.arange(longest), -1).amax(1, keepdim=True)
        targets = pd.DataFrame(
            {
                "prompt": each,
                "query_pos": longest - 1,
                "target_pos": longest,
                "token": tokens[each, length],
                "phrase": self.n_facts - 1,
                "offset": 0,
                "kind": "later",
            }
        )
        return Prompts(
            inputs=inputs,
            mask=mask,
            token_kinds=kinds,
            example=torch.where(mask, pos // period, -1),
            targets=targets,
            relations={"mark": from_last_token("mark", torch.arange(longest) == nearest, mask)},
            answer_tokens=torch.arange(world.d_vocab),
            correct=allowed[each, length - 1],
            token_strings=world.token_strings,
            task={"name": "slots", "config": asdict(self), "seed": seed},
            latent={"cut": cut},
        )
