"""The task: items and labels in alternation, a classification that can be learned in weights or in context."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import IGNORE, Relation

Kind = Literal["train", "iwl", "icl", "swap"]
"""Which sequences: `"train"`, as the task says; `"iwl"`, classes of items and target drawn independently, so that only
the weights know the label, unless the context has the target's class by chance (at α = 1, N = 4 and K = 512 in an
eighth of the sequences); `"icl"`, novel classes, so that only the context does; `"swap"`, known classes whose labels
are the next ones (label + 1 mod L) throughout, scored against the swapped label."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class ExemplarTask:
    """N items, each followed by its label, then a target item whose label is to be predicted.

    Items come from a mixture of Gaussians: class k has a mean μ_k, an item is (μ_k + ε η) / sqrt(1 + ε²) (Eq. 1), and
    μ, η and the labels' vectors have components from N(0, 1/D). A token is a one-hot position, in a window that lies
    anywhere among P positions, beside that content. Each label has K/L classes.

    In a bursty sequence N/B classes of different labels stand B times each, in random order, and the target is of one
    of them; else the classes of items and target are drawn independently. The first class drawn is the target's, so
    that targets follow the rank-frequency distribution f(k) ~ k^-α exactly; the others are drawn without replacement of
    labels. A context sequence is bursty with classes that exist nowhere else, of uniformly drawn labels.

    Source: Reddy (2024), "The mechanistic basis of data dependence and abrupt learning in an in-context classification
    task", §2; which class of a sequence is the target's is not given there.

    Raises:
        ValueError: A number outside its range, or two that do not fit.

    >>> prompts = ExemplarTask(n_classes=64, n_pairs=4).sample(2, seed=0)
    >>> prompts.inputs.shape, prompts.relations["item_of_label"].keys_of(0)
    (torch.Size([2, 9, 128]), [0])
    """

    n_classes: int = 1024
    """K, a multiple of L."""
    n_labels: int = 32
    """L."""
    n_pairs: int = 8
    """N, a multiple of B."""
    d_content: int = 63
    """D, the dimensions of items and labels."""
    n_positions: int = 65
    """P, the one-hot dimensions of positions, at least 2N + 1; 0: tokens carry no position."""
    burst: int = 1
    """B, how often each class stands in a bursty sequence; 0: no sequence is bursty."""
    p_burst: float = 1.0
    """p_B, the share of bursty sequences among those of known classes."""
    p_context: float = 0.0
    """p_C, the share of context sequences."""
    noise: float = 0.1
    """ε, from 0 up."""
    zipf: float = 0.0
    """α, the exponent of the rank-frequency distribution; 0: uniform."""

    def __post_init__(self):
        for name, least in (("n_labels", 2), ("n_pairs", 1), ("d_content", 1), ("burst", 0), ("noise", 0), ("zipf", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} is {value}: give at least {least}")
        for name in ("p_burst", "p_context"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value}: give a share from 0 to 1")
        sizes = f"n_classes is {self.n_classes}, n_labels {self.n_labels}, n_pairs {self.n_pairs}, burst {self.burst}"
        if self.n_classes < self.n_labels or self.n_classes % self.n_labels:
            raise ValueError(f"{sizes}: give a multiple, so that each label has as many classes")
        if self.n_pairs % self.copies or (self.burst and self.n_pairs // self.burst > self.n_labels):
            raise ValueError(
                f"{sizes}: a sequence holds n_pairs / burst classes of different labels; give a multiple of burst, and "
                "enough labels"
            )
        if self.n_positions and self.n_positions < self.length:
            raise ValueError(
                f"n_positions is {self.n_positions}, but a sequence of {self.n_pairs} pairs and a target takes "
                f"{self.length}: give at least that, or 0 for tokens without positions"
            )

    @property
    def copies(self) -> int:
        """How often the target's class stands in a context where it does: B, or 1 where B = 0."""
        return max(self.burst, 1)

    @property
    def length(self) -> int:
        """Tokens in a sequence, 2N + 1."""
        return 2 * self.n_pairs + 1

    @property
    def d_in(self) -> int:
        """The dimensions of a token, P + D."""
        return self.n_positions + self.d_content

    def sample(self, n: int, seed: int = 0, *, kind: Kind = "train", world: int = 0) -> Prompts:
        """Draws sequences of one world, with their relations.

        The relations, all of the one target: `item_of_label` (from each label to the item before it, among all
        earlier tokens), `correct_label` (from the target to the labels of its class, among all tokens; only where there
        are any), `labels` (from the target to all labels, among all tokens).

        Args:
            n: How many.
            seed: Which sequences.
            kind: Which kind of sequences.
            world: The seed of the class means, of the labels' vectors and of which class has which label and rank.
        """
        if n < 1:
            raise ValueError(f"{n} prompts: give at least 1")
        batch = Worlds([self], [world]).batch(seed, n, kind)
        right = batch.right[0]
        pos = torch.arange(self.length)
        is_label = pos % 2 == 1
        prompt, last = torch.arange(n), self.length - 1
        everywhere = torch.zeros(n, self.length, dtype=torch.long)

        def relation(name: str, queries: Tensor, key_value: Tensor, key_label: Tensor) -> Relation:
            """From the same positions of every prompt to keys with a label among all tokens."""
            row = prompt.repeat_interleave(len(queries))
            return Relation(
                name,
                target=row,
                prompt=row,
                query=queries.repeat(n),
                key_value=key_value.repeat(n),
                candidate_value=torch.zeros_like(row),
                key_label=key_label,
                candidate_label=everywhere,
            )

        target, zero = torch.tensor([last]), torch.tensor([0])
        labels = torch.where(is_label, 0, IGNORE).expand(n, -1)
        correct = labels.masked_scatter(is_label.expand(n, -1), torch.where(right, 0, IGNORE))
        relations = [
            relation("item_of_label", pos[is_label], pos[is_label] - 1, pos.expand(n, -1)),
            relation("correct_label", target, zero, correct).select(right.any(1)),
            relation("labels", target, zero, labels),
        ]
        at_end = {"prompt": prompt, "query_pos": last, "target_pos": last + 1}
        return Prompts(
            inputs=batch.inputs[0],
            mask=torch.ones_like(everywhere, dtype=torch.bool),
            token_kinds=torch.where(is_label, TokenKind.OUTPUT.value, TokenKind.INPUT.value).expand(n, -1),
            example=(pos // 2).expand(n, -1),
            targets=pd.DataFrame({**at_end, "token": batch.label[0], "phrase": 0, "offset": 0, "kind": "first"}),
            relations={relation.name: relation for relation in relations},
            task={"name": "exemplars", "config": asdict(self), "seed": seed, "kind": kind, "world": world},
            latent={"context": batch.context[0], "right": right, "rank": batch.rank[0]},
        )


@dataclass(frozen=True, eq=False)
class Exemplars:
    """Sequences of several worlds, one batch a member."""

    inputs: Float[Tensor, "member prompt pos d_in"]
    """The tokens."""
    label: Int[Tensor, "member prompt"]
    """The right answer."""
    context: Int[Tensor, "member prompt pair"]
    """The labels in the context."""
    right: Bool[Tensor, "member prompt pair"]
    """Which pairs are of the target's class."""
    rank: Int[Tensor, "member prompt"]
    """The rank of the target's class, from 0, the most frequent; -1 for a novel one."""


class Worlds:
    """Class means, labels and ranks of several members: of seeds, of conditions of a grid, or of both.

    Every member draws from its own generator, on the CPU, so its batches are the same alone and among others, and on
    every device. All other work is done for all members at once.
    """

    def __init__(
        self,
        tasks: Sequence[ExemplarTask],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """Draws the worlds.

        Args:
            tasks: One for each member; they share L, N, D and P.
            seeds: One for each member.
            device: Where the batches are made.
            dtype: Of the tokens.

        Raises:
            ValueError: Not one seed for each task, or tasks of different shapes.
        """
        if len(tasks) != len(seeds) or not len(tasks):
            raise ValueError(f"{len(tasks)} tasks, {len(seeds)} seeds: give one of each for every member")
        shapes = {(task.n_labels, task.n_pairs, task.d_content, task.n_positions) for task in tasks}
        if len(shapes) > 1:
            raise ValueError(f"members of different shapes {sorted(shapes)}: L, N, D and P must be one")
        self.tasks, self.seeds = tuple(tasks), tuple(seeds)
        self._device, self._dtype = torch.device(device), dtype
        means, labels, cdf, log_weight, ranks = [], [], [], [], []
        for task, seed in zip(tasks, seeds, strict=True):
            generator = _generator(seed, "world")
            scale = task.d_content**-0.5
            labels.append(scale * torch.randn(task.n_labels, task.d_content, generator=generator))
            means.append(scale * torch.randn(task.n_classes, task.d_content, generator=generator))
            ranks.append(torch.randperm(task.n_classes, generator=generator))
            weight = (ranks[-1] + 1.0).double() ** -task.zipf
            weight = weight / weight.sum()
            cdf.append(weight.cumsum(0))
            log_weight.append(weight.view(task.n_labels, -1).sum(1).log())
        # Members may differ in K: what has an entry a class is filled up, the distribution by what is never reached.
        self._means, self._labels = (pad_sequence(each, True).to(self._device, dtype) for each in (means, labels))
        self._ranks, self._log_weight = (pad_sequence(each, True).to(self._device) for each in (ranks, log_weight))
        self._cdf = pad_sequence(cdf, True, padding_value=2.0).to(self._device)
        self._member = torch.arange(len(tasks), device=self._device)[:, None, None]
        self._n_classes = torch.tensor([task.n_classes for task in tasks], device=self._device)[:, None, None]
        self._of_tasks: dict[tuple[str, str, torch.dtype], Tensor] = {}

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def shape(self) -> ExemplarTask:
        """A task with the shape that all members share."""
        return self.tasks[0]

    def member(self, index: int) -> "Worlds":
        """Returns one member alone."""
        return Worlds([self.tasks[index]], [self.seeds[index]], self._device, self._dtype)

    def to(self, device: torch.device) -> "Worlds":
        """Returns the same worlds with their batches on a device."""
        return self if device == self._device else Worlds(self.tasks, self.seeds, device, self._dtype)

    def batch(self, step: int, n: int, kind: str = "train") -> Exemplars:
        """Draws `n` sequences for each member.

        Args:
            step: Which batch; a function of it, the member's seed and the kind alone.
            n: How many sequences a member.
            kind: Which kind, a `Kind`.

        Raises:
            ValueError: An unknown kind.
        """
        return self.sequences(self.numbers(step, n, kind), kind)

    def numbers(self, step: int, n: int, kind: str = "train") -> dict[str, Tensor]:
        """Draws all that is random in a batch, on the CPU; `sequences` does the rest, on the worlds' device.

        Returns:
            `uniform`, `[member prompt number]` in float64, and where a member needs them `noise`, `[member prompt item
            d_content]`, and the means of novel classes, `novel`, `[member prompt pair d_content]`. Each member's come
            from its own generator.

        Raises:
            ValueError: An unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: choose one of {', '.join(KINDS)}")
        tasks = [_as_kind(task, kind) for task in self.tasks]
        shape, scale = self.shape, self.shape.d_content**-0.5
        size = (len(self), n, 3 + shape.n_labels + 2 * shape.n_pairs + 1)
        numbers = {"uniform": torch.empty(size, dtype=torch.float64)}
        if any(task.noise for task in tasks):
            numbers["noise"] = torch.zeros(len(self), n, shape.n_pairs + 1, shape.d_content)
        if any(task.p_context for task in tasks):
            numbers["novel"] = torch.zeros(len(self), n, shape.n_pairs, shape.d_content)
        for member, (task, seed) in enumerate(zip(tasks, self.seeds, strict=True)):
            generator = _generator(seed, "batch", kind, step)
            numbers["uniform"][member].uniform_(generator=generator)
            if task.noise:
                numbers["noise"][member].normal_(0, scale, generator=generator)
            if task.p_context:
                numbers["novel"][member].normal_(0, scale, generator=generator)
        return numbers

    def sequences(self, numbers: Mapping[str, Tensor], kind: str = "train") -> Exemplars:
        """Returns the sequences that the `numbers` of that kind stand for."""
        shape = self.shape
        pairs, n_labels = shape.n_pairs, shape.n_labels
        tasks = [_as_kind(task, kind) for task in self.tasks]
        uniform = numbers["uniform"].to(self._device)
        noise, novel = (
            numbers[name].to(self._device, self._dtype) if name in numbers else None for name in ("noise", "novel")
        )
        n = uniform.shape[1]
        parts = uniform.split([1, 1, 1, n_labels, pairs + 1, pairs], dim=-1)
        u_context, u_bursty, u_offset, u_label, u_class, u_order = parts

        def of_task(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            if (kind, name, dtype) not in self._of_tasks:  # a GPU waits for what is copied to it
                values = torch.tensor([getattr(task, name) for task in tasks], dtype=dtype, device=self._device)
                self._of_tasks[kind, name, dtype] = values[:, None, None]
            return self._of_tasks[kind, name, dtype]

        context = u_context < of_task("p_context")
        bursty = context | ((u_bursty < of_task("p_burst")) & (of_task("burst") > 0))
        # Pairs of one slot are of one class. The first slot of a bursty sequence is also the target's.
        pair = torch.arange(pairs, device=self._device)
        slot = torch.where(bursty, pair // of_task("copies", torch.long), pair)
        # Labels without replacement by their weight: those with the highest Gumbel-perturbed log weight, in order.
        log_weight = torch.where(context, 0.0, self._log_weight[:, None])
        order = (log_weight - (-u_label.log()).log()).argsort(-1, descending=True)[..., :pairs]
        if order.shape[-1] < pairs:  # fewer labels than pairs: the later ones are never used
            order = nn.functional.pad(order, (0, pairs - order.shape[-1]))
        # A class of a given label: the label's stretch of the cumulative distribution, which is sorted by label.
        per_label = self._n_classes // n_labels
        last_class = per_label * torch.arange(1, n_labels + 1, device=self._device) - 1
        edge = nn.functional.pad(self._cdf[self._member, last_class], (1, 0))[:, 0]
        below, upper = edge[self._member, order], edge[self._member, order + 1]
        within = (below + u_class[..., :pairs] * (upper - below)).gather(2, slot)
        # A class of any label, independent of the others: anywhere in the distribution.
        place = torch.where(bursty, torch.cat([within, within[..., :1]], -1), u_class)
        known = torch.searchsorted(self._cdf, place.flatten(1), right=True).view_as(place).minimum(self._n_classes - 1)
        of_slot = order.gather(2, slot)
        label = torch.where(context, torch.cat([of_slot, of_slot[..., :1]], -1), known // per_label)
        if kind == "swap":
            label = (label + 1) % n_labels
        same = torch.where(bursty, slot == 0, known[..., :-1] == known[..., -1:])

        # The pairs stand in random order, the target at the end.
        shuffled = u_order.argsort(-1)
        same, named = same.gather(2, shuffled), label[..., :-1].gather(2, shuffled)
        with_target = torch.cat([shuffled, torch.full_like(shuffled[..., :1], pairs)], -1)
        slots = torch.cat([slot.gather(2, shuffled), torch.zeros_like(slot[..., :1])], -1)
        content = self._means[self._member, known.gather(2, with_target)]
        if novel is not None:
            sequence = torch.arange(n, device=self._device)[:, None]
            content = torch.where(context[..., None], novel[self._member, sequence, slots], content)
        if noise is not None:
            epsilon = of_task("noise", self._dtype)[..., None]
            content = content.addcmul(noise, epsilon).mul_((1 + epsilon**2).rsqrt())
        tokens = content.new_zeros(len(self), n, shape.length, shape.d_in)
        tokens[:, :, ::2, shape.n_positions :] = content
        tokens[:, :, 1::2, shape.n_positions :] = self._labels[self._member, named]
        if shape.n_positions:
            offset = (u_offset * (shape.n_positions - shape.length + 1)).long()
            at = offset + torch.arange(shape.length, device=self._device)
            tokens.scatter_(-1, at[..., None], 1.0)
        rank = self._ranks[self._member[..., 0], known[..., -1]]
        return Exemplars(tokens, label[..., -1], named, same, torch.where(context[..., 0], -1, rank))


def _as_kind(task: ExemplarTask, kind: str) -> ExemplarTask:
    """The task whose training sequences are of this kind."""
    if kind == "train":
        return task
    if kind == "iwl":
        return replace(task, burst=0, p_context=0.0)
    return replace(task, burst=task.copies, p_burst=1.0, p_context=float(kind == "icl"))


def _generator(seed: int, *names: str | int) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, ("exemplars", seed, *names))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
