"""The metrics of clean and corrupted prompts without any edit, which tell how large an effect is."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.run.target_metrics import CHOICE_ACCURACY, TargetMetrics, means_by_prompt
from align_circuits.tables.baselines import CHANCE, CLEAN, CORRUPTED, GAP
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import SHARES, Table


def baselines_of(
    targets: TargetMetrics,
    kinds: Mapping[str, Bool[ndarray, " target"]],
    runs: Mapping[str, Float[ndarray, "metric target"]],
    d_vocab: int,
    provenance: Provenance,
) -> Table:
    """Returns `Table.baselines` from the metrics of each target in the runs `"clean"` and `"corrupted"`, or in one."""
    keys = pd.DataFrame([(kind, metric) for metric in targets.names for kind in kinds], columns=["kind", "metric"])
    means, weights = {}, np.empty(0)
    for run, values in {**runs, CHANCE: chance(targets, d_vocab)}.items():
        # Weights count targets, so they are the same in every run.
        means[run], weights = means_by_prompt(targets.prompts, targets.prompt.numpy(), values, list(kinds.values()))
    return baseline_table(keys, means, weights, provenance, targets.prompts.group)


def baselines_by_prompt(
    targets: TargetMetrics, runs: Mapping[Any, Float[ndarray, " prompt"]], d_vocab: int, provenance: Provenance
) -> Table:
    """Returns the same of a single metric from each prompt's mean over its targets."""
    by_chance = targets.by_prompt(chance(targets, d_vocab))[0]
    means = {**{run: values[None] for run, values in runs.items()}, CHANCE: by_chance}
    keys = pd.DataFrame({"metric": targets.names})
    return baseline_table(keys, means, targets.weights[None], provenance, targets.prompts.group)


def other_run(run: Literal["clean", "corrupted"]) -> Literal["clean", "corrupted"]:
    """Returns the other of the two runs of a pair."""
    return "corrupted" if run == "clean" else "clean"


def chance(targets: TargetMetrics, d_vocab: int) -> Float[ndarray, "metric target"]:
    """Returns what a guess would get at each target; NaN for a metric of which that is unknown.

    The accuracy is that among the answers of a task that lists them (its reference `chance`); else, as the other
    metrics, that among all tokens.
    """
    count = len(targets.token)
    correct = np.ones(count) if targets.correct is None else targets.correct.sum(1).numpy()
    accuracy = targets.targets["chance"].to_numpy(dtype=float) if "chance" in targets.targets else correct / d_vocab
    # A guess has equal logits. `kl` is missing: what a guess gets depends on its reference.
    by_name = {"accuracy": accuracy, CHOICE_ACCURACY: 0.5, "logit": 0.0, "logit_diff": 0.0}
    by_name |= {"log_prob": -np.log(d_vocab), "prob": 1 / d_vocab}
    return np.stack([np.broadcast_to(by_name.get(name, np.nan), count) for name in targets.names])


def baseline_table(
    keys: pd.DataFrame,
    means: Mapping[str, Float[ndarray, "row prompt"]],
    weights: Float[ndarray, "row prompt"],
    provenance: Provenance,
    group: Int[Tensor, " prompt"] | None = None,
) -> Table:
    """Returns `Table.baselines` from each prompt's means in each run, with the difference of clean and corrupted."""
    if CORRUPTED in means:
        means = {**means, GAP: means[CLEAN] - means[CORRUPTED]}
    means = {run: means[run] for run in (CLEAN, CORRUPTED, GAP, CHANCE) if run in means}
    values = np.concatenate([*means.values()])
    known = ~np.isnan(values).all(1)
    frame = pd.concat([keys.assign(run=run) for run in means], ignore_index=True).loc[known, ["run", *keys]]
    shares = np.isin(frame["metric"], SHARES)
    bounded, changes = (shares & np.isin(frame["run"], runs) for runs in ([CLEAN, CORRUPTED], [GAP]))
    weights, levels = np.tile(weights, (len(means), 1))[known], (frame["run"] != GAP).to_numpy()
    kinds: Any = {"bounded": bounded, "changes": changes, "levels": levels}
    return Table.from_prompts(frame, values[known], weights, provenance, **kinds, group=group)
