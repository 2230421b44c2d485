"""Many networks of one shape, trained as one: seeds, cells of a sweep, or both."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from align_circuits.papers.abrupt.exemplar_task import Exemplars, Worlds
from align_circuits.papers.abrupt.overrides import Hold
from align_circuits.papers.abrupt.progress_measures import MEASURES, Evaluation, measure
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainConfig, train


@dataclass(frozen=True, eq=False)
class EnsembleRun:
    """A finished training of several members."""

    net: Any
    """The ensemble that was given, trained."""
    table: Table
    """Keyed by member, seed, step and measure (`progress.MEASURES`), n the sequences. Low and high are NaN: an interval
    is over seeds, and these are single ones."""


def train_ensemble(
    net: Any,
    worlds: Worlds,
    config: TrainConfig,
    *,
    batch_size: int = 128,
    probe: int = 1000,
    hold: Hold | None = None,
    out: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> EnsembleRun:
    """Trains all members at once, each as it would train alone with its own seed; with `out`, a killed run goes on.

    The loss is the sum of the members' mean cross-entropies, so that no member's gradient knows of another. A member
    alone and the same member among others see the same sequences and differ by rounding only.

    Args:
        net: An `ExemplarNet` or `InductionHead`; trained in place.
        worlds: One for each member.
        config: How; clipping and Muon would tie the members together and are refused.
        batch_size: Sequences a step for each member.
        probe: Sequences of each sort on which every row of the log rests, the same at all steps (`Evaluation`).
        hold: What is held fixed while the network trains and is measured (`clamps`).
        out: The folder for checkpoints and log.
        recipe: Whatever else defines the run, such as what `hold` holds.
        progress: Whether to draw a progress bar.

    Raises:
        ValueError: Another number of worlds than of members, or a config that ties them together.
    """
    if len(net) != len(worlds):
        raise ValueError(f"{len(net)} members, {len(worlds)} worlds: give one for each")
    if config.clip is not None or config.optimizer == "muon":
        raise ValueError(
            f"clip={config.clip}, optimizer={config.optimizer!r}: a norm over all members and Muon's matrices would "
            "tie them together; give clip=None, and 'sgd' or 'adamw'"
        )

    def sample(step: int, _: int) -> dict[str, Tensor]:
        return vars(worlds.batch(step, batch_size))

    def loss(model: Any, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        with net.hooks(fwd_hooks=list(hold(Exemplars(**batch)))) if hold else nullcontext():
            logits = model.logits(batch["inputs"])
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), batch["label"].flatten(), reduction="sum")
        return summed / batch_size

    evaluation = Evaluation.of(worlds, probe)

    def metrics(model: Any, _: int) -> dict[str, float]:
        found = measure(model, evaluation, hold)
        stacked = torch.stack(list(found.values())).double().tolist()
        return {
            f"{name}/{member}": value
            for name, row in zip(found, stacked, strict=True)
            for member, value in enumerate(row)
        }

    about = {
        "tasks": [asdict(task) for task in worlds.tasks],
        "seeds": list(worlds.seeds),
        "net_seeds": list(net.seeds),
        "batch_size": batch_size,
        "probe": probe,
    }
    run = train(
        net, sample, loss, config, out=out, metrics=metrics, recipe=about | dict(recipe or {}), progress=progress
    )
    return EnsembleRun(net, _table(run.log, worlds, about | {"train": asdict(config)}))


def _table(log: pd.DataFrame, worlds: Worlds, settings: dict[str, Any]) -> Table:
    members = range(len(worlds))
    each = pd.MultiIndex.from_product([members, MEASURES, log["step"]], names=["member", "measure", "step"])
    keys = each.to_frame(index=False)
    keys.insert(1, "seed", np.array(worlds.seeds)[keys["member"]])
    values = log[[f"{name}/{member}" for member in members for name in MEASURES]].to_numpy(float)
    frame = keys[["member", "seed", "step", "measure"]].assign(value=values.T.ravel().round(6))
    frame = frame.assign(low=np.nan, high=np.nan, n=settings["probe"])
    return Table(frame, Provenance("train_ensemble", settings))
