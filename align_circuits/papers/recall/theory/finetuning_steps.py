"""Contextual recall: the first steps of finetuning (Theorems 1 and 2), measured and in closed form.

Directions are columns of W_KQ for the query [sep], `[d_model]`, or matrices W_OV, `[d_vocab d_vocab]`. Signs are those
of an update, minus the gradient. Eq. 11 carries a factor β, which belongs to the step size and is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import Correction, Directions, RecallWeights, pretrained

Update = Literal["subject KQ", "relation OV", "relation KQ"]
"""The updated matrix: the first two in the first step, the last in the second, as its gradient is zero before."""

Form = Literal["printed", "corrected"]

HEADS = ("relation", "subject")
"""The heads of Theorem 2."""


@dataclass(frozen=True)
class Finetuning:
    """Finetuning on in-context sequences of M_ft seen subjects, from the pretraining construction with two heads.

    The closed forms hold where all types have U values and M_ft is large, the printed ones where every value is equally
    frequent among the seen subjects, too; the measured updates assume neither.

    Raises:
        ValueError: Types of different numbers of values, or no demonstration.
    """

    world: RecallWorld
    seen: tuple[int, ...]
    """The subjects finetuned on, M_ft of them."""
    n_demos: int = 5
    """N_ft; m is one more, T = 3m - 1."""
    n_slots: int = 10
    """S. The relation head of the construction attends to the last S + 2 tokens; Theorem 2 assumes that these are all
    T, which the paper's S = 10 and N_ft = 5 do not meet."""
    beta: float = 100.0
    corrections: tuple[Correction, ...] = ("values",)
    """Of the construction; () for W_OV^subj as printed."""

    def __post_init__(self):
        if len(set(self.world.n_values)) > 1:
            raise ValueError(f"n_values is {self.world.n_values}: Theorem 2 has one number U for all types")
        if self.n_demos < 1:
            raise ValueError(f"n_demos is {self.n_demos}: give at least 1")

    @property
    def length(self) -> int:
        """T."""
        return 3 * self.n_demos + 2

    @property
    def window(self) -> int:
        """The number of tokens that the relation head attends to before it is finetuned."""
        return min(self.length, self.n_slots + 2)

    @cached_property
    def start(self) -> RecallWeights:
        """The construction; two heads of it are finetuned."""
        return pretrained(self.world, self.length, self.n_slots, self.beta, self.corrections)

    def model(self) -> AttentionOnly:
        """Returns the model before finetuning; its keys and values are one-hot and fixed."""
        return self.start.model(HEADS)

    @cached_property
    def terms(self) -> Mapping[Update, Mapping[str, Tensor]]:
        """The directions of which each update consists, by name."""
        of, world = Directions(self.world, self.length), self.world
        seen = of.tokens(self.seen)
        own = torch.zeros(world.d_vocab, world.d_vocab)
        own[:, list(self.seen)] = of.facts[list(self.seen)].T
        read = self._frequencies.mean(0) * self._within("attribute")
        read += seen * (1 + self._within("context subject")) / len(self.seen)
        frequency, even = self.n_values * self._frequencies, of.same_type
        places = {f"{name} positions": of.back(*range(first, self.window, 3)) for name, first in _FIRST.items()}
        beyond = {
            f"{name} positions, beyond the window": of.back(*range(first + 3 * self._within(name), self.length, 3))
            for name, first in _FIRST.items()
        }
        terms: dict[Update, dict[str, Tensor]] = {
            "subject KQ": {
                "query position": of.back(1),
                "context subject positions": of.back(*range(4, self.length, 3)),
                "seen subjects": of.key(seen),
            },
            "relation OV": {
                "attributes to values of their type": even,
                "attributes to values of their type, by frequency": frequency.T @ frequency - even,
                "subjects to their attributes": own,
                "subjects to all values": torch.outer(of.value, seen),
                "subjects to all values, by frequency": torch.outer(frequency.sum(0) - of.value, seen),
                "all tokens to what is predicted": -torch.outer(self._predicted(of), read),
            },
            "relation KQ": {
                "attributes": of.key(of.value),
                "attributes, by frequency": of.key(frequency.sum(0) - of.value),
                "seen subjects": of.key(seen),
                "held-out subjects": of.key(of.subjects - seen),
                "separator": of.key(of.separator),
                "query position": of.back(1),
                **places,
                **beyond,
            },
        }
        return {
            update: {name: term for name, term in directions.items() if term.abs().max() > 1e-5}
            for update, directions in terms.items()
        }

    def coefficients(self, form: Form) -> Mapping[Update, Mapping[str, float]]:
        """Returns the closed form of each update: the coefficient of each of `terms`.

        That of the relation head's KQ is for an OV that was updated by `1 / (L w U²)` times the terms of its own closed
        form (α_2 = 1); it is proportional to that step.

        `"printed"`: as in Theorem 2. `"corrected"`: C_y counts the query itself, E[C_y] = 1 + (m-1)/U; positions start
        at the true ones; the window w = min(T, S+2) stands for T; nothing of order U²/M_ft or U/M_ft is dropped, nor
        the separator, nor the softmax's own term in W_OV (whose entries sum to 1); means over seen subjects are taken
        over M_ft, not M; values count by their frequency among the seen subjects; and the last update keeps its factor
        1/w.
        """
        return self._printed() if form == "printed" else self._corrected()

    def closed(self, form: Form) -> Mapping[Update, Tensor]:
        """Returns the closed form of each update as a direction."""
        closed: dict[Update, Tensor] = {}
        for update, coefficients in self.coefficients(form).items():
            parts = [coefficients.get(name, 0.0) * term for name, term in self.terms[update].items()]
            closed[update] = torch.stack(parts).sum(0)
        return closed

    def _printed(self) -> dict[Update, dict[str, float]]:
        n_types, n_values, m, length = self.world.n_types, self.n_values, self.n_demos + 1, self.length
        scale = 1 / (n_types * length * n_values**2)
        last = (m - 1) ** 2
        subjects, elsewhere = -last / (3 * self.world.n_subjects), -last / length
        at = {name: elsewhere + (name == "attribute") * (m - 1) for name in _FIRST}
        tokens = {"attributes": last * 2 / (3 * n_types * n_values), "query position": elsewhere}
        tokens |= {"seen subjects": subjects, "held-out subjects": subjects}
        return {
            "subject KQ": {"query position": (1 - 1 / n_values) / m},
            "relation OV": {
                "attributes to values of their type": scale * (m - 1),
                "subjects to their attributes": scale * n_values**2 / len(self.seen),
            },
            "relation KQ": tokens
            | {
                name: at[name.partition(" positions")[0]]
                for name in self.terms["relation KQ"]
                if name not in tokens and "positions" in name
            },
        }

    def _corrected(self) -> dict[Update, dict[str, float]]:
        n_types, n_values, m, seen, w = self.world.n_types, self.n_values, self.n_demos + 1, len(self.seen), self.window
        scale = 1 / (n_types * w * n_values**2)
        attributes, context, separators = (self._within(name) for name in _FIRST)
        # the probability that two seen subjects share their value, by type; 1/U if all values are equally frequent
        alike = self._frequencies.square().sum(1)
        gained = attributes * n_values**2 * alike.square().mean().item()
        alike = alike.mean().item()
        own, any_ = n_values**2 / seen, context * n_values**2 * alike / seen
        # each token's effect on the answer's logit: an attribute (above), the query subject, another one, the mean
        on_query, on_context = own + any_, own * alike + any_
        base = (attributes * gained + on_query + context * on_context) / w
        at = {"attribute": gained - base, "context subject": on_context - base, "separator": -base}
        return {
            "subject KQ": {
                "query position": (1 - alike) * (1 - 1 / m) / m,
                "context subject positions": -(1 - alike) / m**2,
            },
            "relation OV": {
                "attributes to values of their type": scale * attributes,
                "attributes to values of their type, by frequency": scale * attributes,
                "subjects to their attributes": scale * own,
                "subjects to all values": scale * context * n_values / seen,
                "subjects to all values, by frequency": scale * context * n_values / seen,
                "all tokens to what is predicted": 1 / w,
            },
            "relation KQ": {
                "attributes": at["attribute"] * attributes / (n_types * n_values * w),
                "attributes, by frequency": at["attribute"] * attributes / (n_types * n_values * w),
                "seen subjects": (on_query - base + context * at["context subject"]) / (seen * w),
                "separator": at["separator"] * separators / w,
                "query position": (on_query - base) / w,
                **{f"{name} positions": at[name] / w for name in _FIRST if self._within(name)},
            },
        }

    @property
    def n_values(self) -> int:
        """U, the values of each type."""
        return self.world.n_values[0]

    @cached_property
    def _frequencies(self) -> Float[Tensor, "type d_vocab"]:
        """The share of the seen subjects that have each value."""
        of = Directions(self.world, self.length)
        share = of.facts[list(self.seen)].mean(0)
        return torch.stack([share * values for values in of.values])

    def _within(self, name: str) -> int:
        """How many attributes, context subjects or separators lie in the window."""
        return len(range(_FIRST[name], self.window, 3))

    def _predicted(self, of: Directions) -> Float[Tensor, " d_vocab"]:
        """The prediction before finetuning, with mean logits: that of a value is -(1 - its share), a counted owner."""
        owners = 1 if "values" in self.corrections else self.world.n_subjects / self.n_values
        return torch.softmax(-owners * (of.value - self._frequencies.sum(0)), 0)

    def decomposed(self, update: Update, directions: Float[Tensor, "group ..."]) -> dict[str, Float[Tensor, " group"]]:
        """Returns the coefficients of `terms` that come nearest to each direction, by least squares."""
        basis = torch.stack([term.flatten() for term in self.terms[update].values()])
        found = torch.linalg.solve((basis @ basis.T).double(), (basis @ directions.flatten(1).T).double())
        return dict(zip(self.terms[update], found, strict=True))

    # Measured

    def everything(self) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, " prompt"]]:
        """Returns all L M_ft^m sequences, which are equally likely, and their answers."""
        rows = []
        facts, separator = self.world.facts.tolist(), self.world.separator
        for own, subjects in product(facts, product(self.seen, repeat=self.n_demos + 1)):
            rows.append([token for subject in subjects for token in (subject, separator, own[subject])])
        tokens = torch.tensor(rows)
        return tokens[:, :-1], tokens[:, -1]

    def drawn(self, seed: int, n: int, queries: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Returns `n` random sequences and their answers; the last subject is one of `queries`, the seen by default."""
        task = DemonstrationsTask(self.world, self.n_demos, subjects=self.seen, query_subjects=queries)
        tokens, labels = task.batch(seed, n, "last")
        return tokens, labels[:, -1]

    def updates(
        self, model: AttentionOnly, tokens: Int[Tensor, "prompt pos"], answers: Int[Tensor, " prompt"]
    ) -> dict[Update, Tensor]:
        """Returns minus the gradient of the mean loss of the last token, projected (Theorem 2).

        With e the softmax minus the answer and r_i = e^T W_OV x_i: the mean of -e g^T for W_OV, and for W_KQ that of
        -Σ_i α_i (r_i - Σ_j α_j r_j) (x_i + p_i), which is Eq. 11 without β. Autograd gives the same, many times slower.
        """
        with torch.no_grad():
            d_vocab, separator = self.world.d_vocab, self.world.separator
            n, length = tokens.shape
            places = (d_vocab + length - 1 - torch.arange(length)).expand_as(tokens)
            query, ov = model.W_Q[:, separator], model.W_O[:, :d_vocab].mT
            attention = (query[:, tokens] + query[:, places]).softmax(-1)  # [head prompt pos]
            read = [torch.zeros(n, d_vocab).scatter_add_(1, tokens, part) for part in attention]
            error = torch.stack([g @ out.T for g, out in zip(read, ov, strict=True)]).sum(0).softmax(-1)
            error[torch.arange(n), answers] -= 1
            kq_updates = []
            for part, out in zip(attention, ov, strict=True):
                r = (error @ out).gather(1, tokens)
                part = part * ((part * r).sum(1, keepdim=True) - r)
                both = torch.zeros(model.cfg.d_model).scatter_add_(0, tokens.flatten(), part.flatten())
                kq_updates.append(both.scatter_add_(0, places.flatten(), part.flatten()) / n)
            rel, subj = (HEADS.index(head) for head in HEADS)
            values = -error.T @ read[rel] / n
            values[:, separator] = 0
        return {"subject KQ": kq_updates[subj], "relation OV": values, "relation KQ": kq_updates[rel]}

    def steps(self, batches: "Batches") -> Iterator[tuple[AttentionOnly, dict[Update, Float[Tensor, "group ..."]]]]:
        """Yields the model before each step, with the updates measured on `batches`, and finally the model after both.

        The step sizes are those that the proof needs: the query's position reaches β in the subject head; α_2 is
        1/N_ft, so that an attribute raises the values of its type by 1; attributes gain β on separators. The
        same model is changed in place: use it before the next iteration.
        """
        model = self.model()
        first = batches.updates(self, model)
        yield model, first
        alpha = self.world.n_types * self.window * self.n_values**2 / self._within("attribute")
        to_beta = self.beta / self.coefficients("corrected")["subject KQ"]["query position"]
        self._step(model, "subject KQ", to_beta * first["subject KQ"].mean(0))
        self._step(model, "relation OV", alpha * first["relation OV"].mean(0))
        second = batches.updates(self, model)
        yield model, second
        self._step(model, "relation KQ", self.beta * self.window * second["relation KQ"].mean(0))
        yield model, {}

    def by_formula(self, form: Form) -> AttentionOnly:
        """Returns the model after both steps with the step sizes of `steps` and the closed forms as updates."""
        model, closed, coefficients = self.model(), self.closed(form), self.coefficients(form)
        to_beta = self.beta / coefficients["subject KQ"]["query position"]
        self._step(model, "subject KQ", to_beta * closed["subject KQ"])
        values = coefficients["relation OV"]["attributes to values of their type"]
        self._step(model, "relation OV", closed["relation OV"] / values)
        positions = coefficients["relation KQ"]
        difference = positions["attribute positions"] - positions["separator positions"]
        self._step(model, "relation KQ", self.beta / difference * closed["relation KQ"])
        return model

    def _step(self, model: AttentionOnly, update: Update, change: Tensor) -> None:
        """Adds a change to the matrix of an update, in place."""
        head = HEADS.index("subject" if update == "subject KQ" else "relation")
        with torch.no_grad():
            if update == "relation OV":
                model.W_O[head, : self.world.d_vocab] += change.T
            else:
                model.W_Q[head, self.world.separator] += change


@dataclass(frozen=True)
class Batches:
    """The sequences of an expectation: all of them, or random ones, in groups."""

    n: int | None = None
    """Their number; all sequences by default."""
    groups: int = 1
    """The number of parts, for an interval of the expectation."""
    size: int = 1024
    """Sequences per forward pass."""
    seed: int = 0

    def updates(self, setting: Finetuning, model: AttentionOnly) -> dict[Update, Float[Tensor, "group ..."]]:
        """Returns the mean updates of each group."""
        groups: list[dict[Update, Tensor]] = []
        for group in range(self.groups):
            if self.n is None:
                tokens, answers = (part[group :: self.groups] for part in setting.everything())
            else:
                tokens, answers = setting.drawn(self.seed + group, self.n // self.groups)
            total: dict[Update, Tensor] = {}
            for batch, labels in zip(tokens.split(self.size), answers.split(self.size), strict=True):
                for name, update in setting.updates(model, batch, labels).items():
                    total[name] = total.get(name, 0) + update * len(batch) / len(tokens)
            groups.append(total)
        return {name: torch.stack([group[name] for group in groups]) for name in groups[0]}


_FIRST = {"attribute": 2, "context subject": 4, "separator": 0}
"""The least distance of each from the query, which is the last separator; they repeat every three tokens."""
