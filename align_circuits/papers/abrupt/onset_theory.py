"""A theory of onset: fitted to the beginning of a tuning, it predicts the step at which alignment emerges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import least_squares
from scipy.special import logit

from align_circuits.papers.abrupt.nested_logits import AlignedLogits, descent
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.emergence import SUSTAINED, best_head, emergence_step
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig, learning_rate

MEASURES = ("align_query", "align_key", "lookup", "accuracy")
"""What of a tuning the theory is fitted to."""

FLOOR = 0.096
"""The accuracy of a uniformly guessed letter."""

_LEAST, _FIRST, _MOST = (0.1, 0.0, -5.0), (30.0, 1.0, 1.0), (300.0, 40.0, 40.0)  # of a tuning's time in all, ξ, α
_LOGITS = (-4.0, 9.0)  # of β_1 and κ
_MOST_TRIES = 20


def course(table: Table, until: float = np.inf) -> pd.DataFrame:
    """Returns how a tuning went, in distribution: steps down, `MEASURES` across.

    Of each measure of heads, the one head that is best at the last probes of the part that is asked for: a beginning
    does not know which head will be best in the end.

    Args:
        table: Of a `TuneRun`.
        until: The last step.

    Raises:
        KeyError: A measure that the table does not have.
        ValueError: Fewer probes than `emergence.SUSTAINED`.
    """
    kinds = dict.fromkeys(MEASURES, "all") | {"accuracy": "first"}
    columns = {}
    for measure, kind in kinds.items():
        frame: Any = table.where(metric=measure, kind=kind, ood=False, offset=ALL_OFFSETS).frame
        frame = frame[frame["step"] <= until]
        if frame["step"].nunique() < SUSTAINED:
            raise ValueError(
                f"{frame['step'].nunique()} probes up to step {until:g}: give {SUSTAINED} at the least, and probe "
                "more often"
            )
        followed = frame if measure == "accuracy" else best_head(frame[frame["level"] == "head"], SUSTAINED)
        columns[measure] = followed.set_index("step")["value"]
    return pd.DataFrame(columns).sort_index()


def clock(steps: Float[ndarray, " probe"], schedule: TrainConfig) -> Float[ndarray, " probe"]:
    """Returns the sum of the learning rates up to each step, in units of the highest: steps at full rate."""
    rates = [learning_rate(schedule, step) / schedule.lr for step in range(1, schedule.steps + 1)]
    return np.concatenate([[0.0], np.cumsum(rates)])[np.asarray(steps, dtype=int)]


@dataclass(frozen=True)
class Onset:
    """The theory, fitted to a tuning or to its beginning."""

    loss: AlignedLogits
    rate: float
    """Time of the gradient flow for a step at the full learning rate."""
    start: tuple[float, float, float, float]
    """(ξ, α, β_1, κ) before the first step."""
    error: float = 0.0
    """The root mean square of what the fit leaves."""

    @property
    def shared(self) -> tuple[float, float, float]:
        """What all tunings of one model have in common: rate, ξ and α."""
        return self.rate, *self.start[:2]

    def course(self, steps: Float[ndarray, " probe"], schedule: TrainConfig) -> pd.DataFrame:
        """Returns what the theory says that probes see, in the form of `course`."""
        seen = _seen(self.loss, clock(steps, schedule) * self.rate, np.array(self.start))
        return pd.DataFrame(dict(zip(MEASURES, seen.T, strict=True)), index=pd.Index(steps, name="step"))


def fit(
    courses: Sequence[pd.DataFrame],
    loss: AlignedLogits,
    schedule: TrainConfig,
    shared: tuple[float, float, float] | None = None,
) -> list[Onset]:
    """Fits the theory to tunings of one model by least squares over all their probes and measures.

    Rate, ξ and α are the same for all, since all begin with the same weights; β_1 and κ are each tuning's own, since
    each asks for an alignment of its own.

    Args:
        courses: What `course` returned.
        loss: The theory, with its L and N.
        schedule: How the learning rate went.
        shared: Rate, ξ and α, known from other tunings; None fits them too.

    Returns:
        The theory for each course.

    Raises:
        ValueError: No courses, or one whose first probe is not at step 0.
    """
    if not courses or any(found.index[0] != 0 for found in courses):
        raise ValueError(f"first probes at {[float(found.index[0]) for found in courses]}: give courses from step 0 on")
    values = [found[list(MEASURES)].to_numpy(float) for found in courses]
    times = [clock(found.index.to_numpy(float), schedule) for found in courses]
    free = 0 if shared is not None else len(_FIRST)

    def parts(at: Float[ndarray, " n"], place: int) -> tuple[float, Float[ndarray, " 4"]]:
        rate, xi, alpha = shared if shared is not None else (at[0] / times[0][-1], at[1], at[2])
        return float(rate), np.array([xi, alpha, *at[free + 2 * place : free + 2 * place + 2]])

    def left(at: Float[ndarray, " n"]) -> Float[ndarray, " number"]:
        found = []
        for place, (time, value) in enumerate(zip(times, values, strict=True)):
            rate, start = parts(at, place)
            found.append((_seen(loss, time * rate, start) - value)[~np.isnan(value)])
        return np.concatenate(found)

    own = [_aligned(value[:2], loss) for value in values]
    common = [] if shared is not None else _FIRST
    bounds = [[*ends[:free], *[end] * 2 * len(courses)] for ends, end in zip((_LEAST, _MOST), _LOGITS, strict=True)]
    scale = [*((10.0, 1.0, 1.0) if free else ()), *[1.0] * 2 * len(courses)]
    touches = np.zeros((sum(int((~np.isnan(value)).sum()) for value in values), free + 2 * len(courses)), dtype=int)
    touches[:, :free] = 1
    row = 0
    for place, value in enumerate(values):
        count = int((~np.isnan(value)).sum())
        touches[row : row + count, free + 2 * place : free + 2 * place + 2] = 1
        row += count
    best = least_squares(
        left,
        np.concatenate([common, *own]),
        bounds=bounds,
        x_scale=scale,
        jac_sparsity=touches,
        diff_step=1e-3,
        xtol=1e-5,
        max_nfev=_MOST_TRIES,
    )
    fitted = (parts(best.x, place) for place in range(len(courses)))
    error = float(np.sqrt((best.fun**2).mean()))
    return [Onset(loss, rate, tuple(start.tolist()), error) for rate, start in fitted]


def forecast(
    runs: Sequence[Table],
    loss: AlignedLogits,
    schedule: TrainConfig,
    *,
    metric: str = "align_query",
    share: float = 0.5,
) -> pd.DataFrame:
    """Predicts, for each tuning of a model, when a metric emerges, from its own beginning and what the others were.

    Rate, ξ and α are fitted to the others' whole courses, β_1 and κ to the run's beginning, which ends at a share of
    the first of the others' steps of emergence, or at the third probe if that is later: nothing of the run itself is
    known but its probes up to there. It is a forecast only where `until` lies before `observed`.

    Args:
        runs: The tables of at least three runs of `tune` that differ in their seed.
        loss: The theory.
        schedule: How the learning rate went.
        metric: Which of `MEASURES` emerges.
        share: Of the way to the first of the others' steps.

    Returns:
        One row a run: `observed`, by `emergence_step`; `emerged`, whether it did; `until`, where the beginning ended;
        `theory`; and `others`, the mean step of the other runs, the control. A run, or a prediction, that does not
        emerge counts at its last step.

    Raises:
        ValueError: Fewer than three runs, or a share that is not in (0, 1).
    """
    if len(runs) < 3 or not 0 < share < 1:
        raise ValueError(f"{len(runs)} runs, share={share}: give at least 3, and a share between 0 and 1")
    whole: list[Any] = [course(run) for run in runs]
    emerged = [not np.isnan(_step(found[metric])) for found in whole]
    observed = np.array([_step_or_last(found[metric]) for found in whole])
    rows = []
    for place, (run, found) in enumerate(zip(runs, whole, strict=True)):
        others = np.arange(len(runs)) != place
        until = max(float(share * observed[others].min()), float(found.index[SUSTAINED - 1]))
        shared = fit([whole[other] for other in np.flatnonzero(others)], loss, schedule)[0].shared
        fitted = fit([course(run, until)], loss, schedule, shared)[0]
        said: Any = fitted.course(found.index.to_numpy(float), schedule)[metric]
        rows.append(
            {
                "observed": observed[place],
                "emerged": emerged[place],
                "until": until,
                "theory": _step_or_last(said),
                "others": observed[others].mean(),
            }
        )
    return pd.DataFrame(rows)


def _step(curve: pd.Series) -> float:
    return emergence_step(curve.index.to_numpy(float), curve.to_numpy(float))


def _step_or_last(curve: pd.Series) -> float:
    return float(curve.index[-1]) if np.isnan(step := _step(curve)) else step


def _seen(
    loss: AlignedLogits, times: Float[ndarray, " probe"], start: Float[ndarray, " 4"]
) -> Float[ndarray, "probe measure"]:
    """What probes see along the flow."""
    moving = np.append(0.0, np.diff(times)) > 0  # at the end of a decay the clock stands still
    moving[0] = True
    path = descent(loss.gradient, times[moving], start, precision=1e-5)[np.cumsum(moving) - 1]
    seen = loss.measures(path, FLOOR)
    return np.stack([seen[measure] for measure in MEASURES], -1)


def _aligned(values: Float[ndarray, "probe measure"], loss: AlignedLogits) -> Float[ndarray, " 2"]:
    """A first guess of β_1 and κ, by turning the first probes' measures around."""
    query, key = np.clip(np.nanmean(values[:, :2], 0), 0.02, 0.98)
    return logit(np.array([key, query])) + np.log(loss.n_pairs - 1)
