"""The theory with a fourth logit, fitted to the beginning of a tuning: it predicts when alignment emerges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import least_squares
from scipy.special import expit, logit

from align_circuits.papers.abrupt.theory import NestedLogits, Numbers
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.emergence_times import SUSTAINED, best_head, sustained_step
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig, learning_rate

MEASURES = ("align_query", "align_key", "lookup", "accuracy")
"""The curves of a tuning that the theory is fitted to."""

FLOOR = 0.096
"""The accuracy of a uniformly guessed letter."""

# Of the time of a whole tuning, ξ and α: the least, the first guess and the most. Of β_1 and κ: the least and the most.
_LEAST, _FIRST, _MOST = (0.1, 0.0, -5.0), (30.0, 1.0, 1.0), (300.0, 40.0, 40.0)
_LOGITS = (-4.0, 9.0)
_MOST_EVALUATIONS = 20


@dataclass(frozen=True)
class AlignedLogits(NestedLogits):
    """The same loss where the query must find its key by an alignment: a fourth nested logit, κ.

    What the target brings to the match is no longer given: it is fetched from the input by an aligner, whose attention
    to the right one of N symbols is e^κ / (e^κ + N), in the form of Eq. 10's attention to the item before:

        y = α · e^β_1 / (e^β_1 + N) · e^κ / (e^κ + N),   the loss as in `NestedLogits`.

    For κ → ∞ it is Eq. 10. Beside what that leaves out, it takes a tuning for plain gradient flow with one rate for all
    four. Where it would mislead: with another optimiser, or heads that share the work. The control is a forecast from
    the other seeds alone (`forecast`).

    Source: ours, after Reddy (2024), Eq. 10.
    """

    parameters = ("xi", "alpha", "beta_1", "kappa")

    n_labels: int = 26
    """L, the letters that a phrase may hold."""
    n_pairs: int = 5
    """N, the symbols of an input; each has its phrase."""

    def measures(self, at: Float[ndarray, "... 4"], floor: float = 0.0) -> dict[str, Numbers]:
        """Returns what probes of a tuning measure there, each from 0 to 1.

        `align_query`, `align_key` and `lookup`: the share of the attention on N candidates that is on the right one,
        e^s / (e^s + N - 1) with s = κ, β_1, y. `accuracy`: the probability p of the right label, from 1/L to 1,
        stretched so that 1/L stands at `floor`, the accuracy of a uniform guess.
        """
        score, others = self.score(at), np.log(self.n_pairs - 1)
        guess = 1 / self.n_labels
        known = (np.exp(-self.of_score(at[..., 0], score)) - guess) / (1 - guess)
        return {
            "align_query": expit(at[..., 3] - others),
            "align_key": expit(at[..., 2] - others),
            "lookup": expit(score - others),
            "accuracy": floor + (1 - floor) * known,
        }


def tuning_curves(table: Table, until: float = np.inf) -> pd.DataFrame:
    """Returns the curves of a tuning, in distribution: steps down, `MEASURES` across.

    Of each measure of heads, the one head that is best at the last probes up to `until`: a beginning does not tell
    which head will be best in the end.

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
        rows = frame if measure == "accuracy" else best_head(frame[frame["level"] == "head"], SUSTAINED)
        columns[measure] = rows.set_index("step")["value"]
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
    """The root mean square of the residuals."""

    @property
    def shared(self) -> tuple[float, float, float]:
        """What all tunings of one model have in common: rate, ξ and α."""
        return self.rate, *self.start[:2]

    def curves(self, steps: Float[ndarray, " probe"], schedule: TrainConfig) -> pd.DataFrame:
        """Returns the curves that the theory predicts, in the form of `tuning_curves`."""
        values = self.at(clock(steps, schedule))
        return pd.DataFrame(values, columns=pd.Index(MEASURES), index=pd.Index(steps, name="step"))

    def at(self, clock: Float[ndarray, " probe"]) -> Float[ndarray, "probe measure"]:
        """Returns the `MEASURES` along the gradient flow, at some readings of the clock."""
        times = clock * self.rate
        moving = np.append(0.0, np.diff(times)) > 0  # at the end of a decay the clock stands still
        moving[0] = True
        path = self.loss.gradient_flow(times[moving], np.array(self.start), precision=1e-5)[np.cumsum(moving) - 1]
        values = self.loss.measures(path, FLOOR)
        return np.stack([values[measure] for measure in MEASURES], -1)


def fit(
    curves: Sequence[pd.DataFrame],
    loss: AlignedLogits,
    schedule: TrainConfig,
    shared: tuple[float, float, float] | None = None,
) -> list[Onset]:
    """Fits the theory to tunings of one model by least squares over all their probes and measures.

    Rate, ξ and α are the same for all, since all begin with the same weights; β_1 and κ are each tuning's own, since
    each task has an alignment of its own.

    Args:
        curves: Of each tuning, by `tuning_curves`.
        loss: The theory, with its L and N.
        schedule: How the learning rate went.
        shared: Rate, ξ and α, known from other tunings; None fits them too.

    Returns:
        The theory for each tuning.

    Raises:
        ValueError: No tunings, or one whose first probe is not at step 0.
    """
    if not curves or any(each.index[0] != 0 for each in curves):
        raise ValueError(f"first probes at {[float(each.index[0]) for each in curves]}: give curves from step 0 on")
    values = [each[list(MEASURES)].to_numpy(float) for each in curves]
    times = [clock(each.index.to_numpy(float), schedule) for each in curves]
    free = 0 if shared is not None else len(_FIRST)  # the common parameters come first, then two of each tuning
    own = [slice(free + 2 * index, free + 2 * index + 2) for index in range(len(curves))]

    def onset(parameters: Float[ndarray, " n"], index: int, error: float = 0.0) -> Onset:
        rate, xi, alpha = (parameters[0] / times[0][-1], *parameters[1:3]) if shared is None else shared
        beta, kappa = parameters[own[index]]
        return Onset(loss, float(rate), (float(xi), float(alpha), float(beta), float(kappa)), error)

    def residuals(parameters: Float[ndarray, " n"]) -> Float[ndarray, " number"]:
        predicted = [onset(parameters, index).at(time) for index, time in enumerate(times)]
        return np.concatenate([(one - value)[~np.isnan(value)] for one, value in zip(predicted, values, strict=True)])

    # A tuning's residuals depend on the common parameters and on its own two: that saves most of the Jacobian.
    tuning = np.repeat(np.arange(len(curves)), [int((~np.isnan(value)).sum()) for value in values])
    sparsity = np.ones((len(tuning), free + 2 * len(curves)), dtype=int)
    for index, columns in enumerate(own):
        sparsity[tuning != index, columns] = 0
    best = least_squares(
        residuals,
        np.concatenate([_FIRST[:free], *(_first_logits(value[:2], loss) for value in values)]),
        bounds=[[*ends[:free], *[end] * 2 * len(curves)] for ends, end in zip((_LEAST, _MOST), _LOGITS, strict=True)],
        x_scale=[*(10.0, 1.0, 1.0)[:free], *[1.0] * 2 * len(curves)],
        jac_sparsity=sparsity,
        diff_step=1e-3,
        xtol=1e-5,
        max_nfev=_MOST_EVALUATIONS,
    )
    return [onset(best.x, index, float(np.sqrt((best.fun**2).mean()))) for index in range(len(curves))]


def forecast(
    runs: Sequence[Table],
    loss: AlignedLogits,
    schedule: TrainConfig,
    *,
    metric: str = "align_query",
    share: float = 0.5,
) -> pd.DataFrame:
    """Predicts, for each tuning of a model, when a metric emerges, from its own beginning and from the other tunings.

    Rate, ξ and α are fitted to the others' whole curves, β_1 and κ to the run's beginning, which ends at a share of
    the first of the others' steps of emergence, or at the third probe if that is later: nothing of the run itself is
    known but its probes up to there. It is a forecast only where `until` lies before `observed`.

    Args:
        runs: The tables of at least three runs of `tune` that differ in their seed.
        loss: The theory.
        schedule: How the learning rate went.
        metric: Which of `MEASURES` emerges.
        share: Of the way to the first of the others' steps.

    Returns:
        One row a run: `observed`, by `sustained_step`; `emerged`, whether it did; `until`, where the beginning ended;
        `theory`; and `others`, the mean step of the other runs, the control. A run, or a prediction, that does not
        emerge counts at its last step.

    Raises:
        ValueError: Fewer than three runs, or a share that is not in (0, 1).
    """
    if len(runs) < 3 or not 0 < share < 1:
        raise ValueError(f"{len(runs)} runs, share={share}: give at least 3, and a share between 0 and 1")
    curves: list[Any] = [tuning_curves(run) for run in runs]
    steps = np.array([_step(curve[metric]) for curve in curves])
    last = np.array([curve.index[-1] for curve in curves], dtype=float)
    observed = np.where(np.isnan(steps), last, steps)
    rows = []
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        others = np.arange(len(runs)) != index
        until = max(float(share * observed[others].min()), float(curve.index[SUSTAINED - 1]))
        shared = fit([curves[other] for other in np.flatnonzero(others)], loss, schedule)[0].shared
        fitted = fit([tuning_curves(run, until)], loss, schedule, shared)[0]
        predicted: Any = fitted.curves(curve.index.to_numpy(float), schedule)[metric]
        rows.append({"until": until, "theory": _step(predicted), "others": observed[others].mean()})
    frame = pd.DataFrame({"observed": observed, "emerged": ~np.isnan(steps)}).join(pd.DataFrame(rows))
    return frame.assign(theory=frame["theory"].fillna(pd.Series(last)))


def _step(curve: pd.Series) -> float:
    return sustained_step(curve.index.to_numpy(float), curve.to_numpy(float))


def _first_logits(values: Float[ndarray, "probe measure"], loss: AlignedLogits) -> Float[ndarray, " 2"]:
    """A first guess of β_1 and κ: the logits of the first probes' measures."""
    query, key = np.clip(np.nanmean(values[:, :2], 0), 0.02, 0.98)
    return logit(np.array([key, query])) + np.log(loss.n_pairs - 1)
