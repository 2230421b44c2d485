"""Redundancy in trained circuits: copies of a head, backups that work once the primary is gone, and decoys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.names import name_of
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, STAGES, PlantedModel, planted_circuit
from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import Seq2SeqTask, config_of
from align_circuits.training.loop import TrainConfig, train
from align_circuits.validation.trained_circuits import (
    BATCH,
    EXCHANGED,
    HINTED,
    SURE,
    TRAINING,
    answer_queries,
    normal,
    paired,
    prompt_length,
    randomize,
    run_exchanged,
)

LAYERS, HEADS, WIDTH = 4, 4, 64

DECOYS = 2
"""Decoys of a model, each of another role."""

NOISE = 0.1
"""In half of the models Gaussian noise is added to the trained weights: its standard deviation, as a share of the root
mean square of each matrix."""

DROPPED = 0.5
"""The share of the prompts in which heads of the redundant roles are dropped."""

ATTENTION = 0.3
"""The weight of the decoys' attention in the loss."""

KEPT, ZERO, MEAN = 0, 1, 2
"""What a head writes: its own output, nothing, or at each position the mean of its outputs on the other prompts."""


@dataclass(frozen=True)
class Assignment:
    """Which heads have which roles in one model."""

    copies: Mapping[str, tuple[Head, ...]]
    """The heads of each role. Of several, each alone does the work once the others are dropped."""
    backups: Mapping[str, Head]
    """By role the head that does the work once the head of the role is dropped, and changes nothing before."""
    decoys: Mapping[str, Head]
    """By role a head that attends as the role requires and changes nothing."""

    @property
    def kinds(self) -> Mapping[Head, str]:
        """What each of these heads is: a role, `"backup of <role>"` or `"decoy of <role>"`."""
        kinds = {head: role for role, heads in self.copies.items() for head in heads}
        for what, heads in (("backup", self.backups), ("decoy", self.decoys)):
            kinds |= {head: f"{what} of {role}" for role, head in heads.items()}
        return MappingProxyType(kinds)

    @classmethod
    def of(cls, seed: int) -> "Assignment":
        """Draws an assignment: two or three copies of one role, a backup of another one, and `DECOYS` decoys.

        Among 24 consecutive seeds each pair of roles occurs with two copies and with three. Lookup heads stand in the
        last two layers, heads of other roles in the first two, decoys of other roles anywhere.
        """
        draw = Rng(seed, "redundant circuit").generator("assignment")
        designs = list(product(permutations(CIRCUIT_ROLES, 2), (2, 3)))
        (copied, backed), count = designs[7 * seed % len(designs)]
        free = [(layer, head) for layer, head in product(range(LAYERS), range(HEADS))]

        def taken(role: str, layers: Mapping[bool, Sequence[int]]) -> Head:
            fitting = [head for head in free if head[0] in layers[role == "lookup"]]
            free.remove(chosen := fitting[int(draw.integers(len(fitting)))])
            return chosen

        early, late = range(LAYERS // 2), range(LAYERS // 2, LAYERS)
        by_role = {False: early, True: late}
        copies = {
            role: tuple(taken(role, by_role) for _ in range(count if role == copied else 1)) for role in CIRCUIT_ROLES
        }
        backups = {backed: taken(backed, by_role)}
        imitated = [CIRCUIT_ROLES[place] for place in draw.permutation(len(CIRCUIT_ROLES))[:DECOYS]]
        return cls(copies, backups, {role: taken(role, {False: range(LAYERS), True: late}) for role in imitated})


class RedundantCircuit(PlantedModel):
    """A model of random weights that was trained so that chosen heads do a planted circuit's work, some redundantly.

    `kinds` are those of its `assignment`, and `"other"`.
    """

    assignment: Assignment
    reached: Mapping[str, float]
    """What the training reached, on prompts of its own; see `what_was_reached`."""

    @property
    def roles(self) -> Mapping[Head, str | None]:
        """The role of each head, of backups too; None for decoys and others."""
        with_role = {**{head: role for role, head in self.assignment.backups.items()}}
        with_role |= {head: role for role, heads in self.assignment.copies.items() for head in heads}
        return {head: with_role.get(head) for head in heads_of(self.cfg)}


def train_redundant_circuit(
    task: Seq2SeqTask, seed: int = 0, *, steps: int = 800, out: str | Path | None = None
) -> RedundantCircuit:
    """Trains a transformer of four layers with four heads to do the work of a planted circuit redundantly.

    As `train_circuit`, with the heads of `Assignment.of(seed)`. All copies of a role are exchanged together. In half of
    the prompts (`DROPPED`) all copies of the copied role but one or more are dropped, or the head of the role that has
    a backup, or both: they write nothing or the mean (half each), and the answers must stay, or be those of the
    exchange where the role is exchanged. The backup is exchanged with its role where the primary is dropped, and at
    random, as heads without a role, where it is not. Decoys are exchanged at random too, and the cross-entropy of
    their attention with the keys of their role is added to the loss, in prompts where no role is exchanged and no head
    dropped. Then noise is added to the weights of half of the models (`NOISE`).

    Args:
        task: As of `train_circuit`.
        seed: Of the assignment, the weights, the prompts and the noise.
        steps: Updates; 0 leaves the weights random.
        out: The folder of the training, from which a killed one goes on and a finished one is read (`train`).
    """
    streams = Rng(seed, "redundant circuit")
    planted = planted_circuit(task, seed, decoys=(), n_layers=STAGES, n_ctx=prompt_length(task))
    shape = HandBuiltConfig(
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=WIDTH,
        d_head=WIDTH // HEADS,
        d_mlp=WIDTH,
        d_vocab=planted.cfg.d_vocab,
        n_ctx=planted.cfg.n_ctx,
        model_name=f"redundant-circuit-{seed}",
    )
    model = RedundantCircuit(shape, planted.tokenizer)
    randomize(model, streams)
    model.task, model.strength, model.assignment = task, 1.0, Assignment.of(seed)
    kinds = model.assignment.kinds
    model.kinds = MappingProxyType({head: kinds.get(head, "other") for head in heads_of(model.cfg)})
    if steps:
        student = _Student(model, planted, streams)
        config = TrainConfig(steps=steps, log_every=steps, **{**TRAINING, "warmup": min(TRAINING["warmup"], steps)})
        train(
            student,
            lambda step, batch_seed: student.batch(batch_seed, max(0.0, 1 - step / (HINTED * steps))),
            lambda network, batch: cast(_Student, network).loss(*batch),
            config,
            seed=seed,
            out=out,
            recipe={"task": config_of(task), "kinds": {str(head): kind for head, kind in kinds.items()}},
            progress=False,
        )
    if noise_of(seed):
        add_noise(model, noise_of(seed), streams)
    model.eval()
    model.reached = MappingProxyType(what_was_reached(model, planted, seed=seed))
    return model


def noise_of(seed: int) -> float:
    """Returns the noise of the weights of one model: `NOISE` or 0."""
    return NOISE if Rng(seed, "redundant circuit").generator("noisy").random() < 0.5 else 0.0


def add_noise(model: HandBuilt, noise: float, streams: Rng) -> None:
    """Adds Gaussian noise to all weights, with a standard deviation of `noise` times each one's root mean square."""
    draw = streams.generator("noise")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = noise * parameter.square().mean().sqrt()
            parameter.add_(normal(draw, *parameter.shape) * scale)


def dropped_outputs(
    source: Mapping[int, Float[Tensor, "prompt pos head d_head"]], dropped: Int[Tensor, "prompt layer head"]
) -> dict[int, Float[Tensor, "prompt pos head d_head"]]:
    """Returns what stands in for the heads' outputs: those of `source`, nothing (`ZERO`), or their `MEAN`."""
    stands_in = {}
    for layer, z in source.items():
        how = dropped[:, None, layer, :, None]
        stands_in[layer] = torch.where(how == ZERO, 0.0, torch.where(how == MEAN, z.mean(0), z))
    return stands_in


def what_was_reached(model: RedundantCircuit, planted: PlantedModel, n: int = 128, seed: int = 0) -> dict[str, float]:
    """Returns how well a model does what its planted circuit does, intact, with heads exchanged and heads dropped.

    Counted are answers as in `trained_circuits.what_was_reached`; a share of changed answers is of those that the
    exchange changes in the planted circuit.

    - `accuracy`: the share of answers that are the planted circuit's.
    - `invariance`: the share that stay with all heads without a role, decoys and backups exchanged together.
    - `interchange accuracy, <role>`: with all copies of the role exchanged, the share of changed answers.
    - `another head, <role>`: the same answers with one head of no role exchanged instead.
    - `role dropped, <role>`: the share of right answers with all copies of the role and its backup dropped.
    - `one copy, <role>` and `interchange of one copy, <role>`: with all copies but one dropped and all heads without a
      role exchanged, the share of right answers, and of changed ones with the copy exchanged.
    - `backup, <role>` and `interchange of the backup, <role>`: the same of the backup, with the primary dropped.
    - `attention of the decoy, <role>`: the attention that the decoy gives to the keys of the role.

    Dropped heads write nothing, or the mean over prompts; of both, and of all copies, the least is returned (for
    `role dropped` the largest).

    Args:
        model: The model.
        planted: A planted circuit of the same task, one head for each role.
        n: Pairs of prompts.
        seed: Of the prompts and of the other heads.
    """
    task, heads = planted.task, model.assignment
    prompts = task.sample(2 * n, planted.tokenizer, seed=seed)
    base, source = paired(task, prompts)
    letters = prompts.answer_tokens
    queries = answer_queries(task, base[0], letters)
    theirs = {kind: head for head, kind in planted.kinds.items() if kind in CIRCUIT_ROLES}
    idle = [head for head, role in model.roles.items() if role is None]
    order = Rng(seed, "other heads").order("others", 1, len(idle))[0].tolist()

    def chosen(of: HandBuilt, heads: Sequence[Head], how: int = 1) -> Int[Tensor, "prompt layer head"]:
        marks = torch.zeros(n, of.cfg.n_layers, of.cfg.n_heads, dtype=torch.long)
        for layer, head in heads:
            marks[:, layer, head] = how
        return marks

    def answers(exchanged: Sequence[Head] = (), dropped: Sequence[Head] = (), how: int = ZERO) -> Tensor:
        drops = chosen(model, dropped, how)
        which = (chosen(model, exchanged) + drops) > 0
        logits = run_exchanged(model, base, dropped_outputs(outputs, drops), which)[0]
        return logits[:, queries].argmax(-1)

    def right(exchanged: Sequence[Head]) -> tuple[Tensor, Tensor]:
        logits = run_exchanged(planted, base, planted_outputs, chosen(planted, exchanged) > 0)[0][:, queries]
        best = logits[..., letters].topk(2)
        return letters[best.indices[..., 0]], best.values[..., 0] - best.values[..., 1] >= SURE

    def share(of: Tensor, among: Tensor) -> float:
        return float(of[among].double().mean())

    reached: dict[str, float] = {}
    with torch.no_grad():
        outputs, planted_outputs = run_exchanged(model, source)[1], run_exchanged(planted, source)[1]
        intact, (truth, sure) = answers(), right([])
        reached["accuracy"] = share(intact == truth, sure)
        reached["invariance"] = share(answers([*idle, *heads.backups.values()]) == intact, sure)
        for place, (role, copies) in enumerate(heads.copies.items()):
            moved, still_sure = right([theirs[role]])
            changed = sure & still_sure & (moved != truth)
            backup = [heads.backups[role]] if role in heads.backups else []
            reached[f"interchange accuracy, {role}"] = share(answers(copies) == moved, changed)
            reached[f"another head, {role}"] = share(answers([idle[order[place]]]) == moved, changed)
            reached[f"role dropped, {role}"] = max(
                share(answers(dropped=[*copies, *backup], how=how) == truth, sure) for how in (ZERO, MEAN)
            )
            ways = {"one copy": copies if len(copies) > 1 else (), "backup": backup}
            for name, alone in ways.items():
                sides = [
                    (left, [head for head in copies if head != left], how) for left in alone for how in (ZERO, MEAN)
                ]
                if sides:
                    reached[f"{name}, {role}"] = min(
                        share(answers(idle, dropped, how) == truth, sure) for _, dropped, how in sides
                    )
                    reached[f"interchange of {'the ' * (name == 'backup')}{name}, {role}"] = min(
                        share(answers([*idle, left], dropped, how) == moved, changed) for left, dropped, how in sides
                    )
        keys = gold_keys(prompts[:n], list(heads.decoys))
        with attention_of(model, heads.decoys) as attention:
            run_exchanged(model, base)
        for role, gold in zip(heads.decoys, keys, strict=True):
            rows = gold.any(-1)
            reached[f"attention of the decoy, {role}"] = float((attention(role) * gold).sum(-1)[rows].mean())
    return reached


def gold_keys(prompts: Prompts, roles: Sequence[str]) -> Bool[Tensor, "role prompt query key"]:
    """Returns the keys of each role, at the positions where it has some."""
    length = prompts.inputs.shape[1]
    gold = torch.zeros(len(roles), len(prompts), length, length, dtype=torch.bool)
    for place, role in enumerate(roles):
        relation = prompts.relations[role]
        gold[place, relation.prompt, relation.query] = relation.expand()[0]
    return gold


@contextmanager
def attention_of(
    model: HandBuilt, heads: Mapping[str, Head]
) -> Iterator[Callable[[str], Float[Tensor, "prompt query key"]]]:
    """Yields what returns the attention of a role's head in the last run, from its queries and keys."""
    seen: dict[str, Tensor] = {}

    def see(activation: Tensor, hook: Any) -> None:
        seen[hook.name] = activation

    def attention(role: str) -> Float[Tensor, "prompt query key"]:
        layer, head = heads[role]
        q, k = (seen[name_of(site, layer)][:, :, head] for site in ("q", "k"))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    names = {name_of(site, layer) for layer, _ in heads.values() for site in ("q", "k")}
    with model.hooks(fwd_hooks=[(name, see) for name in sorted(names)]):
        yield attention


class _Student(nn.Module):
    """The model, the linear maps of its hints, and the planted circuit, which is not trained."""

    def __init__(self, model: RedundantCircuit, planted: PlantedModel, streams: Rng):
        super().__init__()
        self.model, self.heads = model, model.assignment
        self.theirs = {kind: head for head, kind in planted.kinds.items() if kind in CIRCUIT_ROLES}
        example = planted.task.sample(1, planted.tokenizer, references=False)
        self.letters = example.answer_tokens
        self.queries = answer_queries(planted.task, example.inputs[0], example.answer_tokens)
        self.hinted = {head: role for head, role in model.roles.items() if role not in (None, "lookup")}
        self.hints = nn.ModuleDict()
        weights = streams.generator("hints")
        for head in self.hinted:
            linear = cast(nn.Linear, nn.utils.skip_init(nn.Linear, model.cfg.d_head, planted.cfg.d_head))
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.copy_(normal(weights, *parameter.shape) * model.cfg.d_head**-0.5)
            self.hints[str(head)] = linear
        self._planted = [planted.requires_grad_(False)]  # in a list: no module of this one, so that it is not saved

    def batch(self, seed: int, hint: float) -> tuple[Tensor, ...]:
        """Draws prompts, what is exchanged and dropped in each, and the keys of the decoys; arguments of `loss`."""
        rng, cfg = Rng(seed, "interchange pairs"), self.model.cfg
        (planted,) = self._planted
        prompts = planted.task.sample(2 * BATCH, planted.tokenizer, seed=seed, references=False)
        base, source = paired(planted.task, prompts)
        with_roles = rng.uniform("roles", BATCH, len(CIRCUIT_ROLES)) < EXCHANGED
        exchanged = rng.uniform("others", BATCH, cfg.n_layers, cfg.n_heads) < rng.uniform("rate", BATCH, 1, 1)
        dropped = torch.zeros(BATCH, cfg.n_layers, cfg.n_heads, dtype=torch.long)
        drops = rng.uniform("dropped", BATCH, 2) < 1 - (1 - DROPPED) ** 0.5  # of the copies, and of the primary
        how = 1 + (rng.uniform("how", BATCH) < 0.5).long()
        for place, role in enumerate(CIRCUIT_ROLES):
            copies = self.heads.copies[role]
            for layer, head in copies:
                exchanged[:, layer, head] = with_roles[:, place]
            if len(copies) > 1:
                order = rng.order("copies", BATCH, len(copies))
                kept = 1 + rng.below("kept", torch.full((BATCH,), len(copies) - 1))
                for index, (layer, head) in enumerate(copies):
                    dropped[:, layer, head] = how * (drops[:, 0] & (order[:, index] >= kept))
            if role in self.heads.backups:
                (layer, head), (backup_layer, backup) = copies[0], self.heads.backups[role]
                dropped[:, layer, head] = how * drops[:, 1]
                at = exchanged[:, backup_layer, backup]
                exchanged[:, backup_layer, backup] = torch.where(drops[:, 1], with_roles[:, place], at)
        keys = gold_keys(prompts[:BATCH], list(self.heads.decoys))
        return base, source, with_roles, exchanged, dropped, keys, torch.tensor(hint)

    def loss(
        self,
        base: Int[Tensor, "prompt pos"],
        source: Int[Tensor, "prompt pos"],
        with_roles: Bool[Tensor, "prompt role"],
        exchanged: Bool[Tensor, "prompt layer head"],
        dropped: Int[Tensor, "prompt layer head"],
        keys: Bool[Tensor, "decoy prompt query key"],
        hint: Float[Tensor, ""],
    ) -> Float[Tensor, ""]:
        """The loss of one batch: which roles and heads are exchanged, what is dropped, and the weight of the hints."""
        (planted,) = self._planted
        of_planted = torch.zeros(len(base), planted.cfg.n_layers, planted.cfg.n_heads, dtype=torch.bool)
        for place, role in enumerate(CIRCUIT_ROLES):
            layer, head = self.theirs[role]
            of_planted[:, layer, head] = with_roles[:, place]
        with torch.no_grad():
            # The first half is asked for by the hints alone.
            planted_outputs = run_exchanged(planted, torch.cat([base, source]) if hint else source)[1]
            elsewhere = {layer: z[-len(base) :] for layer, z in planted_outputs.items()}
            target = run_exchanged(planted, base, elsewhere, of_planted)[0][:, self.queries][..., self.letters]
            outputs = run_exchanged(self.model, source)[1]
        with attention_of(self.model, self.heads.decoys) as attention:
            logits, changed = run_exchanged(
                self.model, base, dropped_outputs(outputs, dropped), exchanged | (dropped > 0)
            )
        log_probs = logits[:, self.queries].log_softmax(-1)[..., self.letters]
        loss = -(target.softmax(-1) * log_probs).sum(-1).mean()
        intact = ~with_roles.any(1) & (dropped == KEPT).flatten(1).all(1)
        for role, gold in zip(self.heads.decoys, keys, strict=True):
            rows = gold.any(-1) & intact[:, None]
            if rows.any():
                loss = loss - ATTENTION * (attention(role) * gold).sum(-1)[rows].clamp(min=1e-6).log().mean()
        if not hint:
            return loss
        for (layer, head), role in self.hinted.items():
            layer_there, head_there = self.theirs[role]
            wanted = planted_outputs[layer_there][: len(base), :, head_there]
            error = (self.hints[str((layer, head))](changed[layer][:, :, head]) - wanted).square().sum(-1).mean(1)
            own = ~exchanged[:, layer, head] & (dropped[:, layer, head] == KEPT)
            spread = (wanted - wanted.mean(0)).square().sum(-1).mean()
            loss = loss + hint * (error * own).mean() / spread
        return loss
