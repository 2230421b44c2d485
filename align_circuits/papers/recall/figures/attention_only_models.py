"""The attention-only models of the figures: their worlds, sequences and trainings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from align_circuits.papers.recall.models.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.papers.recall.models.training import FINETUNING, PRETRAINING, Stage, train_stage
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.study import training_folder
from align_circuits.prompts.prompts import Prompts
from align_circuits.training.loop import TrainConfig, TrainRun

Positions = Literal["relative", "absolute"]


@dataclass(frozen=True)
class AttentionOnlySetup:
    """A world with relation tokens, its sequences, and an attention-only model with its two trainings."""

    n_subjects: int = 256
    n_values: int = 32
    n_types: int = 8
    n_grammar: int = 20
    n_slots: int = 10
    n_facts: int = 5
    n_demos: int = 5
    n_seen: int = 128
    d_head: int = 256
    pretraining: int = 2000
    """Steps."""
    finetuning: int = 1000
    batch_size: int = 64
    lr: float = 1e-3
    n: int = 256
    """Prompts of an evaluation."""

    def world(self, seed: int = 0) -> RecallWorld:
        """Returns the world of a seed."""
        values = (self.n_values,) * self.n_types
        return RecallWorld(self.n_subjects, values, self.n_grammar, div=None, relation_tokens=True, world_seed=seed)

    def facts(self, world: RecallWorld) -> FactsTask:
        """Returns the sequences of pretraining."""
        return FactsTask(world, self.n_facts, self.n_slots, p_grammar=0.0)

    def model(self, seed: int, positions: Positions) -> AttentionOnly:
        """Returns the model before training."""
        world = self.world()
        config = AttentionOnlyConfig(world.d_vocab, self.facts(world).length - 1, self.d_head, positions=positions)
        return AttentionOnly(config, seed=seed)

    def schedule(self, base: TrainConfig, steps: int, **changes: Any) -> TrainConfig:
        """Returns the schedule of a training."""
        return replace(base, steps=steps, lr=self.lr, **changes)


PAPER = AttentionOnlySetup()
"""App. B: 2,000 and 1,000 steps to validate the constructions; Figs. 13 and 14 have 5,000 and 2,000."""


def pretrained(setup: AttentionOnlySetup, seed: int, positions: Positions, trained: str | Path) -> TrainRun:
    """Returns a model trained on PT; from the folder `trained` where it is there."""
    task = setup.facts(setup.world(seed))
    schedule = setup.schedule(PRETRAINING, setup.pretraining, schedule="cosine", log_every=setup.pretraining)
    return train_stage(
        setup.model(seed, positions),
        Stage(task, schedule, setup.batch_size),
        probes={"pt": task.sample(setup.n, seed=seed)},
        seed=seed,
        out=training_folder(
            trained, "recall-attention-only-pt", asdict(replace(setup, n_seen=1, finetuning=1)), seed, positions
        ),
        progress=False,
    )


def finetuned(
    setup: AttentionOnlySetup, seed: int, positions: Positions, trained: str | Path, n_values: int | None = None
) -> TrainRun:
    """Returns a pretrained model finetuned on ICL about seen subjects; from the folder `trained` where it is there."""
    task, _ = _demonstrations(setup, seed, n_values)
    every = max(1, setup.finetuning // 20)
    return train_stage(
        pretrained(setup, seed, positions, trained).model,
        Stage(task, setup.schedule(FINETUNING, setup.finetuning, log_every=every), setup.batch_size, "last"),
        probes=in_context(setup, seed, n_values),
        seed=seed,
        out=training_folder(trained, "recall-attention-only-ft", asdict(setup), seed, positions, n_values),
        progress=False,
    )


def in_context(setup: AttentionOnlySetup, seed: int, n_values: int | None = None) -> Mapping[str, Prompts]:
    """Returns the prompts of the finetuning log, about `seen` and `held_out` subjects."""
    seen, held_out = _demonstrations(setup, seed, n_values)
    return {name: task.sample(setup.n, seed=seed) for name, task in (("seen", seen), ("held_out", held_out))}


def _demonstrations(
    setup: AttentionOnlySetup, seed: int, n_values: int | None
) -> tuple[DemonstrationsTask, DemonstrationsTask]:
    """Demonstrations about seen subjects, with seen and with held-out queries; `n_values` are seen, if given."""
    world = setup.world(seed)
    seen, held_out = world.split(setup.n_seen, n_values=n_values, seed=seed)
    task = DemonstrationsTask(world, setup.n_demos, subjects=seen)
    return task, replace(task, query_subjects=held_out)
