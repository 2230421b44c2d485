"""Networks trained on a grid of conditions: conditions and seeds of one shape as one ensemble."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from align_circuits.jobs.code_versions import code_version
from align_circuits.models.loading import chosen_device
from align_circuits.papers.abrupt.interventions import INTERVENTIONS, Intervention
from align_circuits.papers.abrupt.models import (
    STRENGTHS,
    Ensemble,
    ExemplarNet,
    ExemplarNetConfig,
    InductionHead,
    InductionHeadConfig,
)
from align_circuits.papers.abrupt.progress_measures import MEASURES, Evaluation, measure
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.papers.lab import Inputs, Measurement, Study, on_one_thread, training_folder
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig, train

FIXED = {"three": (), "two": ("beta_2",), "none": STRENGTHS}
"""The reduced models by what is fixed at 0: with none of its parameters the head attends evenly whatever it is taught,
the control."""

NETWORK = {"model": "network", "intervention": "nothing", "hidden_layers": 3}
"""What a condition may change beside the task, with its default: the full network, under no intervention."""

DRAWN_BY_A_THREAD = 6
"""Members whose batches one thread draws about as fast as a GPU trains them."""

SOURCE = "Reddy (2024)"
LEARNED = 0.9
"""The accuracy from which on something counts as learned."""

PLATEAU = {"burst": 1, "noise": 0.0, "p_context": 0.8}
"""The task of Figs. 3 and 4: a plateau, then a transition."""


@dataclass(frozen=True)
class Size:
    """How large the networks and their training are."""

    task: ExemplarTask
    """The base, of which a figure varies some numbers."""
    steps: int
    seeds: int = 6
    """How many."""
    first_seed: int = 0
    """The others follow it."""
    batch_size: int = 128
    lr: float = 0.01
    weight_decay: float = 0.0
    """Times the learning rate a step; the paper's text has none."""
    d_head: int = 128
    d_hidden: int = 128
    log_every: int = 1000
    """Steps between probes: at least ten before a transition, for less than 5% of the time."""
    probe: int = 1000
    """Sequences of each kind in a probe."""

    @property
    def train(self) -> TrainConfig:
        """Plain SGD, as in the paper."""
        plain: Any = {"lr": self.lr, "weight_decay": self.weight_decay, "optimizer": "sgd", "clip": None}
        return TrainConfig(self.steps, log_every=self.log_every, **plain)

    def with_task(self, **changes: Any) -> "Size":
        """Returns a size whose base task differs."""
        return replace(self, task=replace(self.task, **changes))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Size":
        """Reads what `asdict` wrote."""
        return cls(**{**values, "task": ExemplarTask(**values["task"])})


PAPER = Size(ExemplarTask(), steps=150_000, first_seed=100)
"""Reddy (2024), §2. Trainings of seeds 0 to 5 were looked at before they were finished."""

CPU = Size(
    ExemplarTask(n_classes=64, n_labels=16, n_pairs=4, d_content=32, n_positions=16),
    steps=3000,
    first_seed=50,
    batch_size=64,
    lr=0.1,
    d_head=32,
    d_hidden=64,
    log_every=100,
    probe=300,
)
"""The smallest tried: the induction head is born abruptly after a plateau at 1/N, within a minute on one core. That was
tried on seeds 0 to 5."""

SMOKE = Size(
    ExemplarTask(n_classes=16, n_labels=8, n_pairs=2, d_content=8, n_positions=6),
    steps=8,
    seeds=2,
    batch_size=8,
    lr=0.1,
    d_head=8,
    d_hidden=8,
    log_every=2,
    probe=40,
)


@dataclass(frozen=True)
class Grid:
    """Which conditions are trained, at which size."""

    size: Size
    conditions: Sequence[Mapping[str, Any]]
    """What each changes of the base task and of `NETWORK`. The key columns of the table are whatever any changes."""
    together: int | None = None
    """At most how many conditions are one ensemble, since one process draws all its batches; None: any number."""
    seeds_together: int | None = None
    """At most how many seeds of a condition are one ensemble; None: all."""
    seeds: Sequence[int] | None = None
    """How many of each condition, where they differ; None: `size.seeds` of all."""

    def ensembles(self) -> list[dict[str, Any]]:
        """Returns what `trained_ensemble` takes for each group of conditions of one shape, as JSON.

        `tasks` and `keys`, the values in the key columns, have an entry for each condition of the group. Tokens of the
        reduced models carry no position.
        """
        columns = list(dict.fromkeys(name for condition in self.conditions for name in condition))
        groups: dict[tuple, list[dict[str, Any]]] = {}
        counts = self.seeds or [self.size.seeds] * len(self.conditions)
        for condition, count in zip(self.conditions, counts, strict=True):
            values: dict[str, Any] = asdict(self.size.task) | NETWORK | dict(condition)
            keys = {name: values[name] for name in columns}
            kind = {name: values.pop(name) for name in NETWORK}
            if kind["model"] != "network":
                values["n_positions"] = 0
            task = ExemplarTask(**values)
            alike = groups.setdefault((count, task.n_labels, task.n_pairs, *kind.values()), [])
            if not alike or len(alike[-1]["tasks"]) == self.together:
                alike.append({"tasks": [], "keys": [], **kind})
            alike[-1]["tasks"].append(asdict(task))
            alike[-1]["keys"].append(keys)
        return [
            {**group, "size": asdict(size)}
            for (count, *_), alike in groups.items()
            for group in alike
            for size in self._sizes(count)
        ]

    def _sizes(self, count: int) -> list[Size]:
        """The size with each part of so many seeds."""
        most = self.seeds_together or count
        seeds = range(self.size.first_seed, self.size.first_seed + count)
        parts = [seeds[first : first + most] for first in range(0, len(seeds), most)]
        return [replace(self.size, first_seed=part[0], seeds=len(part)) for part in parts]


def grid_study(name: str, smoke: Grid, cpu: Grid, paper: Grid, **others: Grid) -> Study:
    """Returns the study that trains a grid and keeps its curves; `others` are more scales, `_` for `-` in names."""
    scales: Any = {name.replace("_", "-"): grid for name, grid in others.items()}
    return Study(name, {"smoke": smoke, "cpu": cpu, "paper": paper, **scales}, train=training_jobs)


def training_jobs(grid: Grid, inputs: Inputs) -> list[Measurement]:
    """Returns one job for each ensemble of a grid: the `train` stage of a study."""
    return [
        Measurement(
            training_curves,
            {"ensemble": ensemble, "trained": inputs.trained},
            seed=None,
            keys=ensemble["keys"][0] if len(ensemble["keys"]) == 1 else {},  # of several conditions the rows tell
        )
        for ensemble in grid.ensembles()
    ]


def training_curves(*, ensemble: Mapping[str, Any], trained: str) -> pd.DataFrame:
    """Returns the curves of an ensemble, trained if it is not yet: the job of a study.

    Keyed by the grid's columns, seed, step and measure, one row a seed: low and high are NaN.

    Args:
        ensemble: Of `Grid.ensembles`.
        trained: The folder of all trainings.
    """
    _, _, table = trained_ensemble(ensemble, trained)
    condition = table.frame.pop("member") // ensemble["size"]["seeds"]
    keys = pd.DataFrame(ensemble["keys"]).iloc[condition]
    return pd.concat([keys.reset_index(drop=True), table.frame], axis=1)


def trained_ensemble(ensemble: Mapping[str, Any], trained: str) -> tuple[Ensemble, Worlds, Table]:
    """Returns an ensemble, its worlds and its curves; conditions outside, seeds inside; goes on where it was killed."""
    on_one_thread()
    device = chosen_device(None)
    size = Size.from_json(ensemble["size"])
    tasks = [ExemplarTask(**task) for task in ensemble["tasks"] for _ in range(size.seeds)]
    seeds = [*range(size.first_seed, size.first_seed + size.seeds)] * len(ensemble["tasks"])
    worlds = Worlds(tasks, seeds, device)
    kind = {name: ensemble[name] for name in NETWORK}
    net = network(size, worlds.shape, ensemble["model"], seeds, ensemble["hidden_layers"]).to(device)
    code = code_version(f"{__name__}:trained_ensemble")
    identity = [asdict(replace(size, task=worlds.shape)), ensemble["tasks"], kind, code]
    table = train_on_exemplars(
        net,
        worlds,
        size.train,
        batch_size=size.batch_size,
        probe=size.probe,
        intervention=INTERVENTIONS[ensemble["intervention"]](net),
        out=training_folder(trained, "abrupt", *identity),
        recipe=kind,
    )
    return net, worlds, table


def network(size: Size, task: ExemplarTask, model: str, seeds: Sequence[int], hidden_layers: int = 3) -> Ensemble:
    """Makes an ensemble for a task: `"network"`, or one of `FIXED`."""
    classifier: Any = {"d_hidden": size.d_hidden, "hidden_layers": hidden_layers}
    if model == "network":
        init = task.d_content**-0.5
        config = ExemplarNetConfig(task.n_labels, task.d_in, d_head=size.d_head, init=init, **classifier)
        return ExemplarNet(config, seeds)
    return InductionHead(InductionHeadConfig(task.n_labels, task.d_in, **classifier), seeds, FIXED[model])


def train_on_exemplars(
    net: Any,
    worlds: Worlds,
    config: TrainConfig,
    *,
    batch_size: int = 128,
    probe: int = 1000,
    intervention: Intervention | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    after: int = 0,
    progress: bool = True,
) -> Table:
    """Trains all members of an ensemble at once, each on the sequences of its world, as it would train alone.

    The loss is the sum of the members' mean cross-entropies, so that no member's gradient depends on another: a member
    alone and the same member among others differ by rounding only.

    Args:
        net: An `ExemplarNet` or `InductionHead`; trained in place.
        worlds: One for each member.
        config: How; clipping and Muon would tie the members together and are refused.
        batch_size: Sequences a step for each member.
        probe: Sequences of each kind on which every row of the log rests, the same at all steps (`Evaluation`).
        intervention: Under what the network trains and is measured.
        device: Where to move the ensemble and train it; by default it stays where it is. Batches are made there.
        out: The folder for checkpoints and log; a killed run goes on.
        recipe: Whatever else defines the run, such as the name of the intervention.
        after: How many steps the ensemble was trained for before: its next sequences are those of the step after them.
            Plain SGD at a constant rate then goes on as if it had never stopped.
        progress: Whether to draw a progress bar.

    Returns:
        The curves by member, seed, step and measure (`progress_measures.MEASURES`), n the sequences. Low and high
        are NaN: an interval is over seeds, and these are single ones.

    Raises:
        ValueError: Another number of worlds than of members, or a config that ties them together.
    """
    if len(net) != len(worlds):
        raise ValueError(f"{len(net)} members, {len(worlds)} worlds: give one for each")
    if config.clip is not None or config.has_muon:
        raise ValueError(
            f"clip={config.clip}, optimizer={config.optimizer!r}: a norm over all members and Muon's matrices would "
            "tie them together; give clip=None, and 'sgd' or 'adamw'"
        )
    net = net if device is None else net.to(chosen_device(device))
    worlds = worlds.to(next(net.parameters()).device)
    evaluation = Evaluation.of(worlds, probe)

    def loss(model: Any, numbers: dict[str, Tensor]) -> Float[Tensor, ""]:
        batch = worlds.sequences(numbers)
        with net.hooks(fwd_hooks=list(intervention(batch))) if intervention else nullcontext():
            logits = model.logits(batch.inputs)
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), batch.label.flatten(), reduction="sum")
        return summed / batch_size

    def metrics(model: Any, _: int) -> dict[str, float]:
        values = measure(model, evaluation, intervention)
        return {f"{name}/{member}": value for name in MEASURES for member, value in enumerate(values[name].tolist())}

    settings = {
        "tasks": [asdict(task) for task in worlds.tasks],
        "seeds": list(worlds.seeds),
        "batch_size": batch_size,
        "probe": probe,
        **({"after": after} if after else {}),
    }
    on_gpu = next(net.parameters()).device.type == "cuda"
    log = train(
        net,
        lambda step, _: worlds.numbers(after + step, batch_size),
        loss,
        config,
        out=out,
        metrics=metrics,
        recipe={"net_seeds": list(net.seeds)} | settings | dict(recipe or {}),
        progress=progress,
        # Interventions copy numbers from the CPU, which a graph cannot. A device that is called cuda in a PyTorch
        # without CUDA, as a test pretends one, captures none.
        graph=on_gpu and intervention is None and torch.backends.cuda.is_built(),
        ahead=on_gpu * math.ceil(len(net) / DRAWN_BY_A_THREAD),
    ).log
    curves = [
        pd.DataFrame(
            {"member": member, "seed": seed, "step": log["step"], "measure": name, "value": log[f"{name}/{member}"]}
        )
        for member, seed in enumerate(net.seeds)
        for name in MEASURES
    ]
    frame = pd.concat(curves, ignore_index=True).round({"value": 6}).assign(low=np.nan, high=np.nan, n=probe)
    return Table(frame, Provenance("train_on_exemplars", settings | {"train": asdict(config)}))
