"""The attention-only constructions of Propositions 1 to 4 (Vasudeva et al., 2026), printed and corrected."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.task.world import RecallWorld

HEADS = ("relation", "subject", "grammar")
"""The heads of the constructions, in order."""

Correction = Literal["values", "owner", "slots"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
"""What is corrected in the printed weights.

- `values`: W_OV^subj sums over unique values. As printed it sums over the other subjects, so that it subtracts a value
  as often as it has other owners, the right one included; f_subj in the proof is the sum over unique values.
- `owner`: after an attribute comes its subject. As printed the grammar head maps a shared value to all its owners.
  Corrected, the subject head attends to the subject from attributes too, and adds a quarter of it to the logits.
- `slots`: which slot of a subsequence comes next. As printed it depends on the last separator's distance, which the
  first subsequence lacks, and the window of the current relation also holds late ones of the subsequence before.
  Corrected, grammar and relation tokens attend to the nearest subject or relation token, and the subject head writes
  the separator when a subject is S tokens back; the relation head writes after separators only; and before the
  relation token, relation tokens have higher logits than grammar tokens, so that the last slot gets one.
"""


@dataclass(frozen=True)
class RecallWeights:
    """W_KQ and W_OV of the heads, in the order of `HEADS`."""

    kq: Float[Tensor, "head d_model d_vocab"]
    """Entry (k, q): what the key of token or position k adds to the score of query token q, times β."""
    ov: Float[Tensor, "head d_vocab d_vocab"]
    """Entry (u, v): what attending to v adds to the logit of u."""

    def model(self, heads: Sequence[str] = HEADS) -> AttentionOnly:
        """Returns a model of these heads."""
        chosen = [HEADS.index(head) for head in heads]
        return AttentionOnly.of_products(self.kq[chosen], self.ov[chosen])


class Directions:
    """Sums of one-hot vectors of a world with relation tokens: of tokens, `[d_vocab]`, and of keys, `[d_model]`.

    Raises:
        ValueError: A world without relation tokens.
    """

    def __init__(self, world: RecallWorld, n_ctx: int):
        if not world.relation_tokens:
            raise ValueError("this world has no relation tokens, which the constructions read: RecallWorld.paper(True)")
        self.world, self.n_ctx = world, n_ctx
        self.subjects, self.relations = self.tokens(world.subject_ids), self.tokens(world.relation_ids)
        self.grammar, self.separator = self.tokens(world.grammar_ids), self.tokens([world.separator])
        self.values = [self.tokens(ids) for ids in world.value_ids]
        self.value = torch.stack(self.values).sum(0)
        facts = torch.from_numpy(world.facts)
        # [subject d_vocab]: the attributes of each subject, A_j
        self.facts = torch.zeros(world.n_subjects, world.d_vocab).scatter(1, facts.T, 1.0)

    @cached_property
    def same_type(self) -> Float[Tensor, "d_vocab d_vocab"]:
        """1 from each value to every value of its type."""
        return torch.stack([torch.outer(values, values) for values in self.values]).sum(0)

    def tokens(self, ids: Collection[int]) -> Float[Tensor, " d_vocab"]:
        """The sum of the one-hot vectors of tokens."""
        return torch.zeros(self.world.d_vocab).index_fill(0, torch.tensor(list(ids), dtype=torch.long), 1.0)

    def key(self, tokens: Float[Tensor, " d_vocab"]) -> Float[Tensor, " d_model"]:
        """Tokens as keys, without positions."""
        return torch.cat([tokens, torch.zeros(self.n_ctx)])

    def back(self, *distances: int) -> Float[Tensor, " d_model"]:
        """The keys at some distances back from the query, Σ h(p_-d); distances beyond the context are left out."""
        places = [self.world.d_vocab + distance for distance in distances if distance < self.n_ctx]
        return torch.zeros(self.world.d_vocab + self.n_ctx).index_fill(0, torch.tensor(places, dtype=torch.long), 1.0)


def pretrained(
    world: RecallWorld, n_ctx: int, n_slots: int, beta: float = 100.0, corrections: Collection[Correction] = CORRECTIONS
) -> RecallWeights:
    """Returns the construction for pretraining sequences: Propositions 1 and 3.

    A subsequence is a subject, S slots of grammar with a relation token in one of them, the separator, the attribute.

    - The *relation* head: a separator attends to the latest relation token, which raises all values of its type.
    - The *subject* head: a separator attends to subjects, which lower all values that are not theirs.
    - The *grammar* head: all other positions.

    Args:
        world: With relation tokens.
        n_ctx: T, the number of positions.
        n_slots: S.
        beta: The factor of all W_KQ; attention is exact as it grows.
        corrections: Which of `CORRECTIONS` are made; none for the weights as printed.

    Raises:
        ValueError: A world without relation tokens, an unknown correction.

    Source: Vasudeva et al. (2026), Propositions 1 and 3.
    """
    if unknown := sorted(set(corrections) - set(CORRECTIONS)):
        raise ValueError(f"unknown corrections {unknown}: choose among {', '.join(CORRECTIONS)}")
    of = Directions(world, n_ctx)
    window = of.back(*range(n_slots + 2))
    kq, ov = torch.zeros(3, len(window), world.d_vocab), torch.zeros(3, world.d_vocab, world.d_vocab)
    rel, subj, grm = range(3)
    kq[rel] += torch.outer(of.key(of.relations) + window, of.separator)
    kq[subj] += torch.outer(of.key(of.subjects), of.separator)
    for type_, relation in enumerate(world.relation_ids):
        ov[rel, :, relation] = of.values[type_]
    # a subject lowers all values but its own; as printed, the values of all other subjects, each as often as it occurs
    lowered = of.value if "values" in corrections else of.facts.sum(0)
    ov[subj, :, : world.n_subjects] = -(lowered - of.facts).T
    kq[grm].diagonal().copy_(of.value + of.subjects)
    ov[grm, : world.n_subjects] += of.facts
    if "owner" in corrections:
        kq[subj] += torch.outer(of.key(of.subjects), of.value)
        ov[subj].diagonal().add_(0.25 * of.subjects)
    (_corrected_slots if "slots" in corrections else _printed_slots)(of, kq, ov, n_slots)
    return RecallWeights(beta * kq, ov)


def finetuned(
    world: RecallWorld,
    n_ctx: int,
    n_slots: int,
    beta: float = 100.0,
    corrections: Collection[Correction] = CORRECTIONS,
    seen: Collection[int] | None = None,
) -> RecallWeights:
    """Returns the construction for in-context sequences, `s [sep] a s [sep] a ...`: Propositions 2 and 4.

    That of pretraining, where the subject head prefers the token before the separator, and the relation head attends
    to the attributes in the context and raises all values of their types.

    Arguments and errors are those of `pretrained`; `seen` are the subjects of finetuning, all by default: the relation
    head has their values only.

    Source: Vasudeva et al. (2026), Eqs. 4 and 5, Propositions 2 and 4 (whose condition "U'_l = U" should read U_l).
    """
    before = pretrained(world, n_ctx, n_slots, beta, corrections)
    of, kq, ov = Directions(world, n_ctx), before.kq.clone(), before.ov.clone()
    rel, subj, _ = range(3)
    known = of.value if seen is None else of.facts[list(seen)].amax(0)
    kq[rel, :, world.separator] = beta * of.key(of.relations + known)
    kq[subj, :, world.separator] += beta * of.back(1)
    ov[rel] += of.same_type * torch.outer(known, known)
    return RecallWeights(kq, ov)


def _printed_slots(of: Directions, kq: Tensor, ov: Tensor, n_slots: int) -> None:
    """The grammar head between subject and separator, as Proposition 3 prints it."""
    grm, window = HEADS.index("grammar"), of.back(*range(n_slots + 2))
    for relation in of.world.relation_ids:
        own = of.tokens([relation])
        kq[grm] += torch.outer(of.key(own + of.separator) + window, own)
    kq[grm] += torch.outer(of.key(of.relations + of.separator) + window, of.grammar)
    ov[grm] += torch.outer(of.grammar + of.relations, of.subjects + of.separator)
    ov[grm] += torch.outer(0.5 * of.grammar + of.separator, of.relations)


def _corrected_slots(of: Directions, kq: Tensor, ov: Tensor, n_slots: int) -> None:
    """The same by the nearest subject or relation token, and by whether a subject is S tokens back."""
    rel, subj, grm = range(3)
    slots = of.grammar + of.relations
    recency = torch.zeros(len(kq[grm]))
    recency[of.world.d_vocab :] = -torch.arange(of.n_ctx) / (2 * n_slots)
    kq[grm] += torch.outer(of.key(of.subjects + of.relations) + recency, slots)
    ov[grm] += torch.outer(of.relations + 0.95 * of.grammar, of.subjects)
    ov[grm] += torch.outer(0.9 * of.grammar, of.relations)
    kq[subj] += torch.outer(of.key(of.subjects) + of.back(n_slots) + 1.5 * of.back(0), slots)
    ov[subj] += torch.outer(0.95 * of.separator, of.subjects)
    kq[rel] += torch.outer(of.key(of.subjects), 1 - of.separator)
