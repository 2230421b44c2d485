"""Training for recall: pretraining on facts, finetuning on demonstrations, and the accuracy during training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from align_circuits.models.loading import chosen_device
from align_circuits.papers.recall.metrics import recall_matches
from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.task.sequences import IGNORED, DemonstrationsTask, FactsTask, Predicted
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.prompts.prompts import Prompts
from align_circuits.training.loop import TrainConfig, TrainRun, train

PRETRAINING = TrainConfig(steps=20_000, lr=1e-4, weight_decay=1e-3, clip=None, log_every=500, checkpoint_every=100)
"""AdamW as in App. B of Vasudeva et al. (2026); clipping is not mentioned there."""

FINETUNING = TrainConfig(steps=2000, lr=1e-4, weight_decay=1e-3, clip=None, log_every=50, checkpoint_every=100)
"""The same for 2,000 iterations."""


@dataclass(frozen=True)
class Stage:
    """One training: its data, schedule and loss."""

    task: FactsTask | DemonstrationsTask
    """The source of sequences, new ones in every step."""
    train: TrainConfig = field(default_factory=lambda: PRETRAINING)
    batch_size: int = 64
    """Sequences a step."""
    predict: Predicted = "all"
    """`"all"`: next-token prediction (§3); `"last"`: the last attribute alone (§4)."""


def train_stage(
    model: nn.Module,
    stage: Stage,
    *,
    probes: Mapping[str, Prompts] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> TrainRun:
    """Trains a model in place, resumable in `out`, and logs the matches on each of `probes`.

    Args:
        model: A Hugging Face decoder such as `small_gpt2`, or any module from tokens to logits.
        stage: The task and the schedule.
        probes: Prompts of tasks of the same world; the log gets `"<name>.<match>"` for each of `MATCHES`.
        seed: Of the batches.
        device: Where to move the model and train it; by default it stays where it is.
        out: The folder for the log and the checkpoints.
        recipe: What else identifies this training, such as the model's provenance.
        progress: Whether to draw a progress bar.
    """
    world = stage.task.world

    def metrics(net: nn.Module, _step: int) -> dict[str, float]:
        return {
            f"{name}.{match}": float(correct.mean())
            for name, prompts in (probes or {}).items()
            for match, correct in probe(net, prompts, world).items()
        }

    return train(
        model if device is None else model.to(chosen_device(device)),
        lambda _, batch_seed: stage.task.batch(batch_seed, stage.batch_size, stage.predict),
        next_token_loss,
        stage.train,
        seed=seed,
        out=out,
        metrics=metrics,
        recipe={"stage": asdict(stage), **(recipe or {})},
        progress=progress,
    )


def next_token_loss(
    model: nn.Module, batch: tuple[Int[Tensor, "prompt pos"], Int[Tensor, "prompt pos"]]
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy in nats over the labels that are not `IGNORED`; other logits are not computed."""
    tokens, labels = batch
    labelled = labels != IGNORED
    if labelled.all():
        return nn.functional.cross_entropy(logits_at(model, tokens).flatten(0, 1), labels.flatten())
    return nn.functional.cross_entropy(logits_at(model, tokens, labelled), labels[labelled])


def logits_at(
    model: nn.Module, tokens: Int[Tensor, "prompt pos"], positions: Tensor | None = None
) -> Float[Tensor, "... d_vocab"]:
    """Returns the logits `[prompt pos d_vocab]`, or those `[row d_vocab]` where `positions` is true."""
    if isinstance(model, AttentionOnly) and not _hooked(model):
        if positions is not None and _last_alone(positions):
            return model.last(tokens)
        # Products of weights are the cheaper ones once a batch has about four times as many tokens as the vocabulary.
        logits = model.logits(tokens) if tokens.numel() >= 4 * model.cfg.d_vocab else model(tokens)
        return logits if positions is None else logits[positions]
    body, head = getattr(model, "transformer", None), getattr(model, "lm_head", None)
    if body is None or head is None:  # not Hugging Face's GPT-2
        logits = model(tokens)
        return logits if positions is None else logits[positions]
    hidden = body(tokens, use_cache=False).last_hidden_state
    return head(hidden if positions is None else hidden[positions])


def _hooked(model: AttentionOnly) -> bool:
    """Whether a hook waits, which would not fire in every form of the forward pass."""
    return any(point.fwd_hooks or point.bwd_hooks for point in model.hook_dict.values())


def _last_alone(positions: Bool[Tensor, "prompt pos"]) -> bool:
    """Whether the last position of every prompt is true and no other."""
    return bool((positions.sum(1) == 1).all() & positions[:, -1].all())


@torch.no_grad()
def probe(model: nn.Module, prompts: Prompts, world: RecallWorld) -> dict[str, Float[Tensor, " prompt"]]:
    """Returns in what respects the argmax at each prompt's last position is correct: `metrics.recall_matches`.

    This is the fast form for use during training; `align_circuits.evaluate` has intervals, edits and padding.

    Raises:
        ValueError: Padded prompts.
    """
    if not prompts.mask.all():
        raise ValueError("these prompts are padded: sample with one grammar length, or use align_circuits.evaluate")
    tokens = prompts.tokens.to(next(model.parameters()).device)
    last = torch.zeros_like(tokens, dtype=torch.bool)
    last[:, -1] = True
    predicted = logits_at(model, tokens, last).argmax(-1).cpu()
    return recall_matches(
        predicted, prompts.latent["subject"][:, -1], prompts.latent["type"][:, -1], torch.from_numpy(world.facts)
    )
