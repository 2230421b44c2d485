"""When something emerged, as a number: from the course of a metric over the steps of a training."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from align_circuits.checks import checked
from align_circuits.tables.intervals import over_seeds
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table

MIN_RISE = 0.3
"""The smallest rise that counts as emergence."""

SUSTAINED = 3
"""The number of probes in a row that must reach a level."""

ROUNDING = 1e-9
"""By how much less than a level reaches it: .1 + .2 is none of .3, but for rounding."""


def sustained_step(
    steps: Float[ndarray, " probe"],
    values: Float[ndarray, " probe"],
    *,
    min_rise: float = MIN_RISE,
    sustained: int = SUSTAINED,
) -> float:
    """Returns the step at which a metric first crosses half of its rise and stays there; NaN if it did not emerge.

    The rise goes from the first probe to the highest level that `sustained` probes in a row reach or exceed, so that
    one lucky probe is no rise. The step is the first of `sustained` probes in a row that all reach the middle. A metric
    whose probes vary by more than .1 about their mean, as hit rates of under 25 prompts do, may rise so by chance.

    Args:
        steps: The step of each probe, ascending.
        values: The metric at each probe; a probe without a value (NaN) interrupts a row of probes.
        min_rise: A smaller rise is no emergence.
        sustained: The number of probes in a row.

    Raises:
        ValueError: Too few probes, steps that do not ascend, or a first probe without a value.

    >>> sustained_step(np.arange(0.0, 70, 10), np.array([0.2, 0.2, 0.9, 0.3, 0.7, 0.8, 0.8]))
    40.0
    """
    middle = middle_of_rise(steps, values, min_rise=min_rise, sustained=sustained)
    return crossing_step(steps, values, middle, sustained=sustained)


def middle_of_rise(
    steps: Float[ndarray, " probe"],
    values: Float[ndarray, " probe"],
    *,
    min_rise: float = MIN_RISE,
    sustained: int = SUSTAINED,
) -> float:
    """Returns the level in the middle of a metric's rise, as in `sustained_step`; NaN if it did not emerge.

    Arguments and errors as there.

    >>> round(middle_of_rise(np.arange(0.0, 70, 10), np.array([0.2, 0.2, 0.9, 0.3, 0.7, 0.8, 0.8])), 2)
    0.45
    """
    rise = _sustained(steps, values, sustained).max() - values[0]
    return float(values[0] + rise / 2) if rise >= min_rise - ROUNDING else float("nan")


def crossing_step(
    steps: Float[ndarray, " probe"], values: Float[ndarray, " probe"], level: float, *, sustained: int = SUSTAINED
) -> float:
    """Returns the first step of `sustained` probes in a row that all reach a level; NaN if none do.

    Of two runs it tells which came there first, whatever the rise of each. A `level` of NaN is never reached. Other
    arguments and errors as for `sustained_step`.

    >>> crossing_step(np.arange(0.0, 70, 10), np.array([0.2, 0.2, 0.9, 0.3, 0.7, 0.8, 0.8]), 0.45)
    40.0
    """
    crossed = _sustained(steps, values, sustained) >= level - ROUNDING
    return float(steps[crossed.argmax()]) if crossed.any() else float("nan")


def steepest_share(steps: Float[ndarray, " probe"], values: Float[ndarray, " probe"], within: float) -> float:
    """Returns how much of a metric's rise comes within the few steps in which it is steepest; NaN if it did not emerge.

    The rise is that of `sustained_step`, as is its level at each probe: what `sustained` probes from there on reach. 1:
    all of it; a rise at an even pace gives about `within` (a number of steps) over all steps. Errors as there.

    >>> steepest_share(np.arange(0.0, 70, 10), np.array([0.0, 0.0, 0.25, 0.75, 1.0, 1.0, 1.0]), 10.0)
    0.5
    """
    reached = _sustained(steps, values, SUSTAINED)
    rise = reached.max() - values[0]
    if not rise >= MIN_RISE - ROUNDING:
        return float("nan")
    # A dip below the start is not part of the rise.
    level = np.maximum(reached, values[0])
    starts = steps[: len(level)]
    steepest = max(
        (level[(starts >= step) & (starts <= step + within)] - level[probe]).max() for probe, step in enumerate(starts)
    )
    return float(steepest / rise)


def _sustained(
    steps: Float[ndarray, " probe"], values: Float[ndarray, " probe"], sustained: int
) -> Float[ndarray, " window"]:
    """The level that each probe and those after it, `sustained` in all, reach or exceed."""
    if sustained < 1:
        raise ValueError(f"sustained={sustained}: give how many probes in a row, at least 1")
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
    # A probe without a value must reach no level, or a gap would sustain a rise.
    return np.lib.stride_tricks.sliding_window_view(np.where(np.isnan(values), -np.inf, values), sustained).min(1)


@checked
def emergence_step(
    runs: Table | Sequence[Table],
    metric: str,
    *,
    best: bool = True,
    min_rise: float = MIN_RISE,
    sustained: int = SUSTAINED,
    floor: float = -np.inf,
    **keys: Any,
) -> Table:
    """Returns when a metric emerged, and in how many of several runs, as numbers.

    Args:
        runs: The table of a `TuneRun`, or of several that differ in their seed.
        metric: Such as `"accuracy"` or `"align_query"`.
        best: Whether to follow, in each run, the one head that is best at its last `sustained` probes; else every head
            and layer mean apart. Metrics of the whole model have no heads to choose from.
        min_rise: The smallest rise that counts.
        sustained: The number of probes in a row that must reach a level.
        floor: The level of chance, if the metric starts below it: to come up to it is no rise.
        **keys: Which rows, such as `kind="first"`, `ood=False`.

    Returns:
        A table keyed by the remaining keys and `measure`: `"step"`, the mean over the runs in which the metric emerged
        (`sustained_step`), NaN if it did so in none, with n the number of those runs; and `"emerged"`, the share of
        runs, n all of them. Intervals are over runs, by Student's t for the step
        (none where all runs have the same) and exact binomial for the share; NaN for a single run.

    Raises:
        KeyError: A metric or key that the tables do not have.
        ValueError: No runs, a run twice, tables without steps, or runs whose rows differ.
    """
    tables = [runs] if isinstance(runs, Table) else list(runs)
    if not tables:
        raise ValueError("no runs: give the table of at least one")
    for one, other in combinations(tables, 2):
        seed, again = (table.provenance.settings.get("seed") for table in (one, other))
        if one is other or (seed == again is not None and one.frame.equals(other.frame)):
            raise ValueError(f"a run is given twice (seed {seed}): give each once, or n and intervals count it twice")
    if any("step" not in table.frame for table in tables):
        raise ValueError("a table of runs has no column 'step': give what a training measured, such as tune(...).table")
    followed = ("step", "level", "layer", "head") if best else ("step",)
    by = [key for key in tables[0].keys if key not in followed]
    steps_by_run: list[dict[tuple, float]] = []
    for table in tables:
        selected = table.where(metric=metric, **keys)
        heads = selected.heads().frame
        frame: Any = best_head(heads, sustained) if best and len(heads) else selected.frame
        steps_by_run.append(
            {
                tuple(None if pd.isna(value) else value for value in group): sustained_step(
                    course["step"].to_numpy(float),
                    np.maximum(course["value"].to_numpy(float), floor),
                    min_rise=min_rise,
                    sustained=sustained,
                )
                if course["value"].notna().any()
                else np.nan
                # Rows of the whole model have missing keys, which pandas would drop.
                for group, course in frame.sort_values("step").groupby(by, sort=False, dropna=False)
            }
        )
    groups = list(steps_by_run[0])
    if any(set(steps) != set(groups) for steps in steps_by_run):
        raise ValueError("the runs do not hold the same rows: give runs of one task and model, probed alike")
    values = np.array([[steps[group] for steps in steps_by_run] for group in groups])
    emerged = ~np.isnan(values)
    rows = pd.DataFrame(groups, columns=by)
    measures = pd.concat([rows.assign(measure="step"), rows.assign(measure="emerged")], ignore_index=True)
    by_run, is_share = np.concatenate([values, emerged]), np.repeat([False, True], len(rows))
    settings = {"metric": metric, "best": best, "min_rise": min_rise, "sustained": sustained, "runs": len(tables)}
    settings |= {"floor": floor} if np.isfinite(floor) else {}
    return Table(
        measures.assign(**over_seeds(by_run, is_share)),
        Provenance("emergence", settings=settings | keys),
        by_run,
        (~np.isnan(by_run)).astype(float),
    )


def best_head(frame: Any, last: int) -> Any:
    """Returns, of each group of rows, those of the head that is best on average over the last probes.

    Args:
        frame: Rows of single heads, keyed by step, layer, head and the keys of the groups.
        last: The number of probes, of each group its own.
    """
    by = [key for key in frame.columns if key not in ("step", "layer", "head", *VALUES)]
    best = []
    for _, rows in frame.groupby(by, sort=False, dropna=False):
        late = sorted(rows["step"].unique())[-max(last, 1) :]
        values = rows[rows["step"].isin(late)].groupby(["layer", "head"])["value"]
        mean = values.mean().where(values.count() == values.count().max())  # none that lacks some
        layer, head = (mean if mean.notna().any() else mean.fillna(0.0)).idxmax()  # any head, where all are undefined
        best.append(rows[(rows["layer"] == layer) & (rows["head"] == head)])
    return pd.concat(best)
