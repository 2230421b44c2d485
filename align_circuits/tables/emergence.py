"""When something emerged, as a number: from the course of a metric over the steps of a training."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from align_circuits.tables.tables import Provenance, Table

LEAST = 0.3
"""The smallest rise that counts as emergence."""

SUSTAINED = 3
"""The number of probes in a row that a level must hold."""


def emergence_step(
    steps: Float[ndarray, " probe"],
    values: Float[ndarray, " probe"],
    *,
    least: float = LEAST,
    sustained: int = SUSTAINED,
) -> float:
    """Returns the step at which a metric first crosses half of its rise and stays there; NaN if it did not emerge.

    The rise goes from the first probe to the highest level that `sustained` probes in a row reach or exceed, so that
    one lucky probe is no rise. The step is the first of `sustained` probes in a row that all reach the middle.

    Args:
        steps: The step of each probe, ascending.
        values: The metric there; a probe without a value (NaN) sustains nothing.
        least: A smaller rise is no emergence.
        sustained: The number of probes in a row.

    Raises:
        ValueError: Too few probes, steps that do not ascend, or a first probe without a value.

    >>> emergence_step(np.arange(0.0, 70, 10), np.array([0.2, 0.2, 0.9, 0.3, 0.7, 0.8, 0.8]))
    40.0
    """
    if not len(steps) or len(steps) != len(values) or (np.diff(steps) <= 0).any() or np.isnan(values[0]):
        raise ValueError(
            f"{len(values)} values at steps {np.asarray(steps).tolist()[:5]}...: give one value for each of ascending "
            "steps, the first of them a number"
        )
    if len(values) <= sustained:
        raise ValueError(
            f"{len(values)} probes show no rise that {sustained} in a row sustain: probe more often, at least "
            f"{sustained + 1} times"
        )
    runs = np.lib.stride_tricks.sliding_window_view(np.where(np.isnan(values), -np.inf, values), sustained).min(1)
    rise = runs.max() - values[0]
    there = runs >= values[0] + rise / 2
    return float(steps[there.argmax()]) if rise >= least else float("nan")


def emergence(
    runs: Table | Sequence[Table],
    metric: str,
    *,
    best: bool = True,
    least: float = LEAST,
    sustained: int = SUSTAINED,
    **keys: Any,
) -> Table:
    """Returns when a metric emerged, and in how many of several runs, as numbers.

    Args:
        runs: The table of a `TuneRun`, or of several that differ in their seed.
        metric: Such as `"accuracy"` or `"align_query"`.
        best: Whether to follow, in each run, the one head that is best at its last `sustained` probes; else every head
            and layer mean apart. Metrics of the whole model have no heads to choose from.
        least: The smallest rise that counts.
        sustained: The number of probes in a row that a level must hold.
        **keys: Which rows, such as `kind="first"`, `ood=False`.

    Returns:
        A table keyed by the remaining keys and `measure`: `"step"`, the mean over the runs in which the metric emerged
        (`emergence_step`), NaN if it did so in none, with n the number of those runs; and `"emerged"`, the share of
        runs, n all of them. Intervals are 95% bootstrap intervals over runs; NaN for a single run.

    Raises:
        KeyError: A metric or key that the tables do not have.
        ValueError: No runs, or runs whose rows differ.
    """
    tables = [runs] if isinstance(runs, Table) else list(runs)
    if not tables:
        raise ValueError("no runs: give the table of at least one")
    found = []
    for table in tables:
        frame: Any = table.where(metric=metric, **keys).frame
        if best and (frame["head"] >= 0).any():
            frame = best_head(frame[frame["head"] >= 0], sustained)
        by = [key for key in table.keys if key != "step" and not (best and key in ("layer", "head"))]
        steps = {
            where: emergence_step(
                rows["step"].to_numpy(float), rows["value"].to_numpy(float), least=least, sustained=sustained
            )
            for where, rows in frame.sort_values("step").groupby(by, sort=False)
        }
        found.append(pd.Series(steps, index=pd.MultiIndex.from_tuples(steps, names=by)))
    if any(set(one.index) != set(found[0].index) for one in found):
        raise ValueError("the runs do not hold the same rows: give runs of one task and model, probed alike")
    values = np.stack([one.loc[found[0].index].to_numpy() for one in found], 1)
    emerged = ~np.isnan(values)
    rows: Any = found[0].index.to_frame(index=False)
    measures = pd.concat([rows.assign(measure="step"), rows.assign(measure="emerged")], ignore_index=True)
    value, weight = np.concatenate([values, emerged]), np.concatenate([emerged, np.ones_like(emerged)]).astype(float)
    settings = {"metric": metric, "best": best, "least": least, "sustained": sustained, "runs": len(tables)}
    table = Table.from_prompts(
        measures,
        value,
        weight,
        Provenance("emergence", settings=settings | keys),
        bounded=np.repeat([False, True], len(rows)),
    )
    if len(tables) == 1:
        table.frame[["low", "high"]] = np.nan
    return table


def best_head(frame: Any, last: int) -> Any:
    """Returns, of each group of rows, those of the head that is best on average over the last probes."""
    late = frame[frame["step"].isin(sorted(frame["step"].unique())[-last:])]
    kept = []
    others = [key for key in frame.columns if key not in ("step", "layer", "head", "value", "low", "high", "n")]
    for where, rows in late.groupby(others, sort=False):
        layer, head = rows.groupby(["layer", "head"])["value"].mean().idxmax()
        here = (frame[others] == list(where)).all(axis=1)
        kept.append(frame[here & (frame["layer"] == layer) & (frame["head"] == head)])
    return pd.concat(kept)
