"""Many networks of one shape, each with its own seed, trained as one."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedRootModule

from align_circuits.training.loop import TrainConfig, train


class Ensemble(HookedRootModule):
    """Networks of one shape with weights of their own, each made from its own seed, that run as one.

    Every parameter has the dimension `member` in front. Hook points see members and prompts as one first dimension,
    members outside.
    """

    def __init__(self, cfg: Any, seeds: Sequence[int], purpose: str):
        """Prepares the members' generators.

        Args:
            cfg: A dataclass with `device` and `dtype`.
            seeds: One for each member.
            purpose: Tells these random numbers from others with the same seed.

        Raises:
            ValueError: No seeds.
        """
        super().__init__()
        if not len(seeds):
            raise ValueError("no seeds: give one for each member")
        self.cfg, self.seeds = cfg, tuple(seeds)
        digests = [hashlib.sha256(f"{purpose}/{seed}".encode()).digest() for seed in seeds]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(each[:8], "big") >> 1) for each in digests]

    def drawn(self, *shape: int, std: float) -> nn.Parameter:
        """Returns a new parameter; each member's entries come from its own generator."""
        values = [std * torch.randn(*shape, generator=generator) for generator in self._generators]
        return nn.Parameter(torch.stack(values))

    def filled(self, *shape: int, value: float = 0.0) -> nn.Parameter:
        """Returns a new parameter that is the same for all members."""
        return nn.Parameter(torch.full((len(self.seeds), *shape), value))

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the biases: with the dimension of members they look like matrices to `train`."""
        return {name for name, _ in self.named_parameters() if "biases" in name.split(".")}

    def __len__(self) -> int:
        return len(self.seeds)

    def member(self, index: int) -> "Ensemble":
        """Returns one member, with weights of its own, as an ensemble of one."""
        make: Any = type(self)
        alone = make(self.cfg, [self.seeds[index]]).to(next(self.parameters()))
        alone.load_state_dict({name: tensor[index : index + 1] for name, tensor in self.state_dict().items()})
        return alone

    def _apply(self, fn: Any, recurse: bool = True) -> "Ensemble":
        super()._apply(fn, recurse)
        first = next(self.parameters())
        self.cfg = replace(self.cfg, device=first.device, dtype=first.dtype)
        return self


def train_ensemble(
    net: Ensemble,
    sample: Callable[[int], Any],
    loss: Callable[[Any, Any], Float[Tensor, ""]],
    measure: Callable[[Any], Mapping[str, Float[Tensor, " member"]]],
    config: TrainConfig,
    *,
    out: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Trains all members in place at once, each as it would train alone; with `out`, a killed run goes on.

    A member alone and the same member among others differ by rounding only.

    Args:
        net: The members.
        sample: `step -> batch`, with each member's own sequences.
        loss: `(net, batch) -> scalar`: the sum of the members' losses, so that no member's gradient depends on another.
        measure: `net -> {measure: one number for each member}`, called for each row of the log.
        config: How; clipping and Muon would tie the members together and are refused.
        out: The folder for checkpoints and log.
        recipe: Whatever else defines the run, as JSON.
        progress: Whether to draw a progress bar.

    Returns:
        One row for each member, measure and step, in this order, with the member's index and its seed.

    Raises:
        ValueError: A config that ties the members together.
    """
    if config.clip is not None or config.optimizer == "muon":
        raise ValueError(
            f"clip={config.clip}, optimizer={config.optimizer!r}: a norm over all members and Muon's matrices would "
            "tie them together; give clip=None, and 'sgd' or 'adamw'"
        )

    def metrics(model: Any, _: int) -> dict[str, float]:
        values = {name: row.double().tolist() for name, row in measure(model).items()}
        return {f"{name}/{member}": value for name, row in values.items() for member, value in enumerate(row)}

    recipe = {"net_seeds": list(net.seeds)} | dict(recipe or {})
    log = train(
        net, lambda step, _: sample(step), loss, config, out=out, metrics=metrics, recipe=recipe, progress=progress
    ).log
    columns = [column for column in log if str(column).endswith("/0")]
    measures = [str(column).removesuffix("/0") for column in columns]
    rows = pd.MultiIndex.from_product([range(len(net)), measures, log["step"]], names=["member", "measure", "step"])
    values = log[[f"{name}/{member}" for member in range(len(net)) for name in measures]].to_numpy(float)
    frame = rows.to_frame(index=False)
    frame.insert(1, "seed", np.array(net.seeds)[frame["member"]])
    return frame[["member", "seed", "step", "measure"]].assign(value=values.T.ravel().round(6))
