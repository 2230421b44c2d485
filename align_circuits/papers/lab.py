"""The laboratory of the papers: measure once, draw many figures, judge claims. A figure is data.

A study names what is measured, as calls of functions with a config and a seed, and at which scales; its rows become one
table. An experiment draws that table and states claims. A statistic is an expression on the table, evaluated when a
claim is judged or a figure drawn:

    iwl, icl = at_end("iwl", burst=1), at_end("icl", burst=1)      # a number for each seed

    NOISE = Experiment(
        "abrupt/noise", title, source, STUDY,
        {"": lines({"in weights": iwl, "in context": icl}, x="noise", label="noise")},
        [Claim("Noise lowers learning in weights (from {noise.low:g} to {noise.high:g})").at_least(
            0.3, iwl.fall("noise"), icl.fall("noise"), "accuracy in context")],
    )

What is finished is never measured again, not even for another study: `jobs` keeps one file a job. A function that
trains goes into `Study.train`: these jobs are finished before the others start, and leave their models under
`training_folder(inputs.trained, ...)`, where the others find them. The path is part of their config, so pass it on. Two
jobs that train the same network must be one, or two processes train it at the same time.

Rows go through JSON: numbers come back to the bit. Files, all below the folder given to `run` (`runs` by default):

    jobs/<function>-<hashes>.json   the rows of one job
    trained/<kind>-<hash>/          log, checkpoints and weights of one training
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.jobs.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.protocol import model_provenance
from align_circuits.report import plots
from align_circuits.tables.intervals import binomial_interval, t_interval, weighted_mean
from align_circuits.tables.tables import VALUES, Provenance, Table

Scale = Literal["smoke", "cpu", "paper", "smollm2"]
"""`smoke` takes seconds, `cpu` at most 30 minutes on two cores, `paper` is the paper's own setting; `smollm2` is made
for the model of that name, a pretrained Llama, and takes hours on two cores."""

SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""Those that every experiment has."""

Verdict = Literal["holds", "fails", "undecided", "no evidence"]

# What is measured


@dataclass(frozen=True)
class Measurement:
    """One job of a study."""

    function: Callable[..., Any]
    """Of an importable module; called as `function(**config, seed=seed)`, it returns rows: a DataFrame or mappings."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON; with function, seed and code it tells the job from others."""
    seed: int | None = 0
    """None for a function that draws nothing and takes none."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Columns that its rows have in the table, beside `seed` and those they come with, which stand in for them."""

    @property
    def job(self) -> Job:
        """The function by its name."""
        return Job(f"{self.function.__module__}:{self.function.__qualname__}", self.config, self.seed)


@dataclass(frozen=True)
class Inputs:
    """What a run of a study is given beside its config."""

    models: Mapping[str, Mapping[str, Any]]
    """The provenance of each model by what `load` takes."""
    trained: str
    """The folder of all trainings; see `training_folder`."""

    @property
    def model(self) -> dict[str, str]:
        """The only model, as jobs take it: `model`, and the hash of its `weights`, as a name can get other weights."""
        ((name, about),) = self.models.items()
        return {"model": name, "weights": about["weights"]}


Rows = Mapping[str, Any]
"""A data frame of the rows of all jobs, in their order, by the name of the function that returned them."""


def _nothing(_: Any, __: Inputs) -> list[Measurement]:
    return []


def _all_rows(_: Any, rows: Rows) -> pd.DataFrame:
    return pd.concat(rows.values(), ignore_index=True)


@lru_cache(maxsize=1)
def stored(model: str) -> Any:
    """Returns a model as it is stored, kept until another one is asked for."""
    return load(model)


@dataclass(frozen=True)
class Study:
    """What is measured together, and gives one table."""

    name: str
    """Such as `"icatune/accuracy"`; of its only experiment, where it has one."""
    scales: Mapping[Scale, Any]
    """A frozen config, a dataclass, for each scale."""
    jobs: Callable[[Any, Inputs], Sequence[Measurement]] = _nothing
    """What to measure."""
    summarize: Callable[[Any, Rows], pd.DataFrame] = _all_rows
    """From config and rows to the table; all rows as they are by default."""
    train: Callable[[Any, Inputs], Sequence[Measurement]] = _nothing
    """What must be finished before the jobs start; its rows are given to `summarize` too."""
    models: Literal["none", "one", "several"] = "none"
    """How many models it is given; those it makes itself are none."""
    load: Callable[[str], Any] = stored
    """How they are loaded, for their provenance."""

    def run(
        self,
        config: Any,
        *,
        models: Sequence[str] = (),
        jobs: int = 1,
        folder: str | Path,
        executor: Executor | None = None,
    ) -> Table:
        """Measures what has not been measured yet.

        Args:
            config: One of `scales`, or another of its kind.
            models: What `load` takes.
            jobs: Local processes.
            folder: Of all studies; see above.
            executor: Runs the jobs in place of local processes, as in `run_jobs`.

        Raises:
            ValueError: A model cannot be loaded, or a job failed; what is finished stays, and the next call goes on
                from there.
        """
        folder = Path(folder)
        inputs = Inputs({model: model_provenance(self.load(model)) for model in models}, str(folder / "trained"))
        rows: dict[str, list[dict[str, Any]]] = {}
        for stage in (self.train, self.jobs):
            measurements = stage(config, inputs)
            results = run_jobs([each.job for each in measurements], folder / "jobs", executor=executor, processes=jobs)
            results.all_rows()  # raises where one failed
            for each, returned in zip(measurements, results.rows, strict=True):
                plain = [{**each.keys, **each.job.seeded, **row} for row in returned]
                rows.setdefault(each.function.__name__, []).extend(plain)
        frame = self.summarize(config, {name: pd.DataFrame(parts) for name, parts in rows.items()})
        settings = {"study": self.name, "config": json.loads(json.dumps(asdict(config), default=str))}
        about = next(iter(inputs.models.values())) if len(inputs.models) == 1 else inputs.models
        return Table(frame.reset_index(drop=True), Provenance("measure", settings, model=about))


def training_folder(trained: str | Path, kind: str, *identity: Any) -> Path:
    """Returns where one training is kept.

    Args:
        trained: `Inputs.trained`.
        kind: What is trained, in a word.
        *identity: All that the training rests on, as JSON.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Path(trained) / f"{kind}-{digest}"


def on_one_thread() -> None:
    """Keeps PyTorch to one thread of this process where there is no GPU.

    Waiting for each other, threads make a small model slower.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


# Numbers with their intervals


@dataclass(frozen=True)
class Measured:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        if math.isnan(self.value):
            return "none"
        value, low, high = (f"{each:{spec or '.2f'}}" for each in (self.value, self.low, self.high))
        return f"{value} [no interval]" if math.isnan(self.low) else f"{value} [{low}, {high}]"


Part = TypeVar("Part")


def mean_of(table: Table) -> Measured:
    """Returns the mean of a table's independent rows, with its interval.

    Rows of several seeds, in equal parts: that over seeds (`over_seeds`). Others: that which the rows' own intervals
    imply.
    """
    by_seed = _by_seed(table)
    if len(by_seed) > 1:
        return over_seeds(by_seed.to_numpy(float))
    value, low, high = (table.frame[column].to_numpy(dtype=float) for column in ("value", "low", "high"))
    below, above = (float(np.linalg.norm(reach)) / len(table) for reach in (value - low, high - value))
    return Measured(float(value.mean()), float(value.mean()) - below, float(value.mean()) + above)


def difference_of(minuend: Table, subtrahend: Table) -> Measured:
    """Returns the difference of two means of independent rows, with its interval.

    Where both have rows of the same several seeds: that over seeds of the difference in each. Else the two intervals
    combine as if independent. Rows measured on the same prompts, such as a model and its ceiling, mostly rise and fall
    together: for them that interval is too wide, not too narrow.
    """
    by_seed = _by_seed(minuend), _by_seed(subtrahend)
    if len(by_seed[0]) > 1 and by_seed[0].index.equals(by_seed[1].index):
        return over_seeds((by_seed[0] - by_seed[1]).to_numpy(float))
    left, right = mean_of(minuend), mean_of(subtrahend)
    below = math.hypot(left.value - left.low, right.high - right.value)
    above = math.hypot(left.high - left.value, right.value - right.low)
    value = left.value - right.value
    return Measured(value, value - below, value + above)


def _by_seed(table: Table) -> pd.Series:
    """The mean value of the rows of each seed; empty where the table does not tell seeds apart."""
    frame: Any = table.frame
    return frame.groupby("seed")["value"].mean() if "seed" in frame else pd.Series(dtype=float)


def extreme_of(table: Table, *, highest: bool) -> Measured:
    """Returns the row with the highest (else the lowest) value, with its own interval."""
    value = table.frame["value"].to_numpy()
    return _row(table, int(value.argmax() if highest else value.argmin()))


def value_of(table: Table, **where: Any) -> Measured:
    """Returns the first row where the key columns have the given values, with its own interval."""
    return _row(table.where(**where), 0)


def share_of(true: Bool[ndarray, " seed"]) -> Measured:
    """Returns the share of seeds in which something is true, with its exact binomial interval."""
    return Measured(float(true.mean()), *binomial_interval(int(true.sum()), len(true)))


def over_seeds(values: Float[ndarray, " seed"]) -> Measured:
    """Returns the mean over seeds with its 95% t interval; a seed without a value (NaN) is left out.

    One seed has no interval, nor have seeds that all gave the same value (`t_interval`).
    """
    if np.isnan(values).all():
        return Measured(float("nan"), float("nan"), float("nan"))
    low, high = t_interval(values[None])
    return Measured(float(np.nanmean(values)), float(low[0]), float(high[0]))


def seed_rows(keys: pd.DataFrame, values: Float[ndarray, "row seed"]) -> pd.DataFrame:
    """Returns the mean of each row over seeds as `over_seeds` does, with `keys` and `VALUES`."""
    low, high = t_interval(values)
    known = ~np.isnan(values)
    mean = weighted_mean(values, known.astype(float))
    return keys.reset_index(drop=True).assign(value=mean, low=low, high=high, n=known.sum(1))


def grouped_over_seeds(frame: Any, by: Sequence[str]) -> pd.DataFrame:
    """Returns the mean over seeds of rows that are alike in the columns `by`, with 95% t intervals over seeds.

    A single seed keeps its interval over prompts; seeds that all gave the same value have none.
    """
    if frame["seed"].nunique() == 1:
        return frame[[*by, *VALUES]].reset_index(drop=True)
    wide = frame.pivot(index=list(by), columns="seed", values="value")
    return seed_rows(wide.index.to_frame(index=False), wide.to_numpy(dtype=float))


def as_rows(frames: Iterable[pd.DataFrame], keys: Sequence[str]) -> pd.DataFrame:
    """Returns frames as one with the columns `keys` and `VALUES`; missing where a frame has no such column."""
    return pd.concat([frame.reindex(columns=[*keys, *VALUES]) for frame in frames])


def mean_rows(
    keys: pd.DataFrame, values: Float[ndarray, "row seed"], *, bounded: Bool[ndarray, " row"] | bool = True
) -> pd.DataFrame:
    """Returns the mean of each row over prompts or other draws, with `keys` and `VALUES`; missing values do not count.

    Args:
        keys: The key columns, one row for each row of `values`.
        values: Independent ones.
        bounded: Which rows lie in [0, 1]; see `Table.from_prompts`.
    """
    weights = (~np.isnan(values)).astype(float)
    return Table.from_prompts(keys, values, weights, Provenance("mean"), bounded=bounded).frame


def both(statistic: Callable[[Part], Measured], part: Part, control: Part) -> tuple[Measured, Measured]:
    """Returns a statistic of one part of a table, and the same of the control."""
    return statistic(part), statistic(control)


def _row(table: Table, place: int) -> Measured:
    row = table.frame.iloc[place]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))


# Statistics: expressions on a table

Values: TypeAlias = Measured | Float[ndarray, " _"] | Bool[ndarray, " _"] | Table
"""What a statistic is evaluated to: a number or a yes or no for each seed, a number with its interval, or rows, whose
mean is meant."""


class Level(Enum):
    """A value of a key column by its place among those that the table has."""

    LOW = "low"
    MIDDLE = "middle"
    HIGH = "high"


LOW, MIDDLE, HIGH = Level


def levels(table: Table, column: str, **where: Any) -> list[Any]:
    """Returns the values of a key column in ascending order, without missing ones."""
    return sorted(table.where(**where).frame[column].dropna().unique().tolist())


def _named_levels(table: Table, column: str) -> dict[str, Any]:
    values = levels(table, column)
    return {"low": values[0], "middle": values[len(values) // 2], "high": values[-1]}


@dataclass(frozen=True, eq=False)
class Statistic:
    """An expression on a table, evaluated when it is called with one.

    Arithmetic and comparisons of statistics, and with numbers, are taken seed by seed; the difference of two parts of a
    table is that of their means (`difference_of`).
    """

    of: Callable[[Table, Mapping[str, Any]], Values]
    """From a table and keys to the values of the rows with these keys."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Which rows; a value may be a `Level`."""

    def __call__(self, table: Table) -> Any:
        """Returns its values on a table."""
        return self.of(table, self.keys)

    def at(self, **keys: Any) -> "Statistic":
        """Returns the same of the rows with these keys, in all of its terms."""
        return replace(self, keys={**self.keys, **keys})

    def rise(self, column: str, first: Any = LOW, last: Any = HIGH) -> "Statistic":
        """Returns how much higher it is at one level of a column than at another."""
        return self.at(**{column: last}) - self.at(**{column: first})

    def fall(self, column: str, first: Any = LOW, last: Any = HIGH) -> "Statistic":
        """Returns how much lower it is at one level of a column than at another."""
        return self.at(**{column: first}) - self.at(**{column: last})

    def beside(self, column: str, key: Any, control: Any) -> tuple["Statistic", "Statistic"]:
        """Returns the same at one key of a column and, as a control, at another."""
        return self.at(**{column: key}), self.at(**{column: control})

    def highest(self) -> "Statistic":
        """Returns the row with the highest value, with its own interval."""
        return self.map(lambda table: extreme_of(table, highest=True))

    def lowest(self) -> "Statistic":
        """Returns the row with the lowest value, with its own interval."""
        return self.map(lambda table: extreme_of(table, highest=False))

    def map(self, function: Callable[..., Any], *others: Any) -> "Statistic":
        """Returns a function of its values and of those of other statistics."""

        def of(table: Table, keys: Mapping[str, Any]) -> Any:
            return function(*(term.at(**keys)(table) if isinstance(term, Statistic) else term for term in terms))

        terms = (self, *others)
        return Statistic(of)

    def __sub__(self, other: Any) -> "Statistic":
        return self.map(_difference, other)

    def __add__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one + two, other)

    def __mul__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one * two, other)

    def __truediv__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one / two, other)

    def __and__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one & two, other)

    def __lt__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one < two, other)

    def __gt__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one > two, other)

    def __ge__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: one >= two, other)


def statistic(function: Callable[[Table], Values]) -> Statistic:
    """Returns the statistic of a function of the rows that `at` selects."""

    def of(table: Table, keys: Mapping[str, Any]) -> Values:
        chosen = {
            column: _named_levels(table, column)[value.value] if isinstance(value, Level) else value
            for column, value in keys.items()
        }
        return function(table.where(**chosen))

    return Statistic(of)


def _by_measure(function: Callable[[Table], Values]) -> Callable[..., Statistic]:
    def of(measure: str | None = None, **where: Any) -> Statistic:
        return statistic(function).at(**({} if measure is None else {"measure": measure}), **where)

    of.__doc__ = function.__doc__
    return of


def courses_of(table: Table) -> pd.DataFrame:
    """Returns the values of one measure over training, steps down and seeds across."""
    return table.frame.pivot(index="step", columns="seed", values="value").sort_index()


rows = _by_measure(lambda table: table)
"""The rows with some keys, each with its own interval: `rows(style="standard", x_len=1)`."""

the_row = _by_measure(lambda table: _row(table, 0))
"""The only row with some keys, or the first, as it stands in the table."""

per_seed = _by_measure(lambda table: table.frame.sort_values("seed")["value"].to_numpy(float))
"""Each seed's value of a measure that has one row a seed."""

at_start = _by_measure(lambda table: courses_of(table).iloc[0].to_numpy(float))
"""Each seed's value before training: `at_start("icl", burst=1)`."""

at_end = _by_measure(lambda table: courses_of(table).iloc[-1].to_numpy(float))
"""Each seed's last value."""

late_mean = _by_measure(lambda table: _late(courses_of(table)).mean().to_numpy())
"""Each seed's mean over its last tenth of probes, two at least."""

best = _by_measure(lambda table: courses_of(table).max().to_numpy(float))
"""Each seed's highest value."""


def _late(courses: pd.DataFrame) -> pd.DataFrame:
    return courses.iloc[-max(2, len(courses) // 10) :]


def reached(level: float, **where: Any) -> Statistic:
    """Returns the first probed step at which each seed is at `level` or above; infinite where there is none."""

    def first(table: Table) -> Float[ndarray, " seed"]:
        courses = courses_of(table)
        steps, above = courses.index.to_numpy(float), courses.to_numpy(float) >= level
        return np.where(above.any(0), steps[above.argmax(0)], np.inf)

    return statistic(first).at(**where)


def last_crossing(steps: Float[ndarray, " probe"], values: Float[ndarray, " probe"], level: float = 0.5) -> float:
    """Returns the step at which a course crosses `level` for good, between probes by a straight line; NaN if never.

    For good: at all later probes it stays at or above the level. A course that is above it from the first probe on has
    no crossing.

    Raises:
        ValueError: Not one value for each of ascending steps.

    >>> last_crossing(np.array([0.0, 10, 20, 30]), np.array([0.1, 0.6, 0.4, 0.8]))
    22.5
    """
    if len(steps) != len(values) or not len(steps) or (np.diff(steps) <= 0).any():
        raise ValueError(f"{len(values)} values at {len(steps)} steps: give one value for each of ascending steps")
    below = np.flatnonzero(~(values >= level))
    if not len(below) or below[-1] == len(values) - 1:
        return math.nan
    last = int(below[-1])
    share = (level - values[last]) / (values[last + 1] - values[last])
    return float(steps[last] + share * (steps[last + 1] - steps[last]))


def crossing(measure: str, level: "float | Statistic" = 0.5, **where: Any) -> Statistic:
    """Returns the step at which each seed crosses a level, which may be one a seed, by `last_crossing`."""

    def step(table: Table, level: Any) -> Float[ndarray, " seed"]:
        courses = courses_of(table)
        of_seeds = zip(courses.to_numpy(float).T, np.broadcast_to(level, courses.shape[1]), strict=True)
        return np.array([last_crossing(courses.index.to_numpy(float), values, at) for values, at in of_seeds])

    return rows(measure).map(step, level).at(**where)


def half_rise(measure: str, **where: Any) -> Statistic:
    """Returns the step at which each seed crosses the middle between its first value and its `late_mean`."""
    return crossing(measure, (at_start(measure) + late_mean(measure)) / 2, **where)


def _difference(one: Any, other: Any) -> Any:
    return difference_of(one, other) if isinstance(one, Table) else one - other


def measured(values: Values) -> Measured:
    """Returns a number with its interval: the mean over seeds, a share of seeds, or the mean of rows."""
    if isinstance(values, Measured):
        return values
    if isinstance(values, Table):
        return mean_of(values)
    return share_of(values) if values.dtype == bool else over_seeds(values)


# Claims


@dataclass(frozen=True)
class Check:
    """One claim of a paper beside what was measured.

    The claim holds if the whole 95% interval is at least (`">="`) or at most (`"<="`) the threshold, fails if all of it
    misses the threshold, and is undecided if the threshold lies within, or if there is no interval: one seed, or seeds
    that all gave the same number, do not tell what another one would give. A claim that something is so in every case
    (threshold 1 for a share) can fail, but no number of cases shows it: at best it is undecided, with a low end that
    tells how many exceptions there may be.

    The same statistic measured on a negative control must miss the threshold: where the control meets it, too, a claim
    that would hold is no evidence.
    """

    claim: str
    """The paper's claim, in words."""
    measured: Measured
    relation: Literal[">=", "<="]
    threshold: float
    """Fixed before the run."""
    control: Measured
    """The same statistic where the claim should not hold."""
    control_is: str
    """What the control is."""
    published: str = ""
    """The paper's own number, where it gives one."""

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds, by the interval of the measured value and the value of the control."""
        low, high = self.measured.low, self.measured.high
        if np.isnan([low, high]).any() or self._meets(low) != self._meets(high):
            return "undecided"
        if not self._meets(low):
            return "fails"
        return "holds" if self.control_fails else "no evidence"

    @property
    def met(self) -> bool:
        """Whether the measured value by itself meets the threshold."""
        return self._meets(self.measured.value)

    @property
    def control_fails(self) -> bool:
        """Whether the control's value misses the threshold, as it should."""
        return not self._meets(self.control.value)

    def _meets(self, value: float) -> bool:
        return bool(value >= self.threshold if self.relation == ">=" else value <= self.threshold)

    def row(self) -> dict[str, str]:
        """Returns the check as a row for people."""
        known = not np.isnan([self.measured.low, self.measured.high]).any()
        return {
            "claim": self.claim,
            "measured": str(self.measured),
            "needed": f"{self.relation} {self.threshold:g}",
            "verdict": self.verdict + ("" if known else ": no interval (one seed, or the same number in all)"),
            "control": f"{self.control_is}: {self.control}",
            "control misses the threshold": "yes, as it should" if self.control_fails else "no",
            "published": self.published,
        }


@dataclass(frozen=True, eq=False)
class Claim:
    """What a paper says, to be put beside what is measured.

        Claim("No head aligns (highest align_query)", "0.1").at_most(0.5, highest, of_planted, "a planted circuit")

    The text may name levels of key columns: `"K = {n_classes.low} to {n_classes.high}"`.
    """

    text: str
    """In words, with the statistic."""
    published: str = ""
    """The paper's own number, where it gives one."""
    relation: Literal[">=", "<="] | None = None
    threshold: float = math.nan
    statistic: Statistic | Values | None = None
    control: Statistic | Values | None = None
    """The same statistic where the claim should not hold."""
    control_is: str = ""

    def at_least(
        self, threshold: float, statistic: Statistic | Values, control: Statistic | Values, control_is: str
    ) -> "Claim":
        """Returns the claim that a statistic reaches the threshold, and that on a control it does not."""
        return Claim(self.text, self.published, ">=", threshold, statistic, control, control_is)

    def at_most(
        self, threshold: float, statistic: Statistic | Values, control: Statistic | Values, control_is: str
    ) -> "Claim":
        """Returns the claim that a statistic stays at the threshold or below, and that on a control it does not."""
        return Claim(self.text, self.published, "<=", threshold, statistic, control, control_is)

    def check(self, table: Table) -> Check:
        """Returns the claim beside what a table says.

        Raises:
            ValueError: It has no threshold.
        """
        if self.relation is None or self.statistic is None or self.control is None:
            raise ValueError(f"the claim {self.text!r} has no threshold: give one by at_least or at_most")
        value, control = (
            measured(of(table) if isinstance(of, Statistic) else of) for of in (self.statistic, self.control)
        )
        claim, control_is = (_with_levels(text, table) for text in (self.text, self.control_is))
        return Check(claim, value, self.relation, self.threshold, control, control_is, self.published)


class _Levels(dict[str, Any]):
    """The levels of a table's columns, as texts name them."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __missing__(self, column: str) -> SimpleNamespace:
        return SimpleNamespace(**_named_levels(self.table, column))


def _with_levels(text: str, table: Table) -> str:
    return text.format_map(_Levels(table)) if "{" in text else text


def verdicts(checks: Sequence[Check]) -> str:
    """Returns how many claims hold, fail and are undecided, as a sentence."""
    held, failed, undecided, void = (sum(check.verdict == each for check in checks) for each in get_args(Verdict))
    without = f", {void} without evidence (the control meets the threshold, too)" if void else ""
    return f"{held} hold, {failed} fail, {undecided} undecided{without} of {len(checks)} claims."


def checks_html(checks: Sequence[Check]) -> str:
    """Returns the checks as an HTML table, which scrolls by itself, without columns that are empty."""
    rows = pd.DataFrame([check.row() for check in checks])
    table = rows.loc[:, (rows != "").any()].to_html(index=False, border=0)
    return f'<div class="wide wrapped claims" style="overflow-x:auto">{table}</div>'


Claims: TypeAlias = Sequence["Claim | Check"] | Callable[[Table], Sequence["Claim | Check"]]
"""Claims, or a function that returns those about a table."""

Figures: TypeAlias = Mapping[str, Callable[[Table], go.Figure]] | Callable[[Table], Mapping[str, go.Figure]]
"""Functions that draw a table, by panel, or a function that returns all figures."""


def checks_of(claims: Claims, table: Table) -> list[Check]:
    """Returns claims beside what a table says."""
    stated = claims(table) if callable(claims) else claims
    return [claim.check(table) if isinstance(claim, Claim) else claim for claim in stated]


# Figures


def drawn_by(figures: Figures, table: Table) -> Mapping[str, go.Figure]:
    """Returns the figures of a table by panel."""
    return figures(table) if callable(figures) else {name: draw(table) for name, draw in figures.items()}


def lines(
    curves: Mapping[str, Statistic],
    x: str,
    panels: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    label: str,
    value: str = "accuracy",
) -> Callable[[Table], go.Figure]:
    """Returns what draws statistics along a key column, means over seeds with their intervals.

    Args:
        curves: The statistic of each curve by its name.
        x: The key column.
        panels: The keys of each panel by its caption; one panel of all rows by default.
        label: The title of the x axis.
        value: The title of the y axis.
    """

    def draw(table: Table) -> go.Figure:
        frames = {
            caption: pd.DataFrame(
                {x: at, "curve": name, **vars(measured(curve.at(**keys, **{x: at})(table)))}
                for at in levels(table, x)
                for name, curve in curves.items()
            )
            for caption, keys in (panels or {"": {}}).items()
        }
        return plots.curves(frames, x=x, by="curve", label=label, value=value)

    return draw


def seed_courses(
    panels: Mapping[str, Mapping[str, Any]], *, label: str = "step", value: str
) -> Callable[[Table], go.Figure]:
    """Returns what draws the course of each seed by itself: the keys of each panel's rows."""

    def draw(table: Table) -> go.Figure:
        frames = {caption: rows(**keys)(table).frame.sort_values(["seed", "step"]) for caption, keys in panels.items()}
        return plots.curves(frames, x="step", by="seed", label=label, value=value)

    return draw


def mean_courses(table: Table, curves: Mapping[str, Mapping[str, Any]], x: str = "step") -> pd.DataFrame:
    """Returns means over seeds along a key column with intervals, as `plots.curves` draws them.

    Args:
        table: With one row a seed for each value of `x` on a curve.
        curves: The keys of each curve's rows, by its caption.
        x: The column; rows without a value of it are left out.
    """
    return pd.DataFrame(
        {x: at, "curve": name, **vars(over_seeds(of_seeds.sort_values("seed")["value"].to_numpy(float)))}
        for name, where in curves.items()
        for at, of_seeds in rows(**where)(table).frame.groupby(x)
    )


def courses(
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]], x: str = "step", *, label: str, value: str
) -> Callable[[Table], go.Figure]:
    """Returns what draws measures over training, or along another column: the keys of each curve, by panel."""

    def draw(table: Table) -> go.Figure:
        frames = {caption: mean_courses(table, curves, x) for caption, curves in panels.items()}
        return plots.curves(frames, x=x, by="curve", label=label, value=value)

    return draw


def rows_along(
    x: str, by: str, panels: Mapping[str, Mapping[str, Any]], *, label: str, value: str = "accuracy"
) -> Callable[[Table], go.Figure]:
    """Returns what draws rows with their own intervals along a key column.

    Args:
        x: The key column.
        by: The key column that tells curves apart.
        panels: The keys of each panel's rows by its caption.
        label: The title of the x axis.
        value: The title of the y axis.
    """

    def draw(table: Table) -> go.Figure:
        ordered = Table(table.frame.sort_values(x, kind="stable"), table.provenance)
        frames = {caption: ordered.where(**keys).frame for caption, keys in panels.items()}
        return plots.curves(frames, x=x, by=by, label=label, value=value)

    return draw


def grids(
    columns: str,
    index: str,
    panels: Mapping[str, Mapping[str, Any]],
    *,
    x: str | None = None,
    y: str | None = None,
    value: str = "accuracy",
) -> Callable[[Table], go.Figure]:
    """Returns what draws rows as grids of shares.

    Args:
        columns: The key column along x.
        index: The key column along y.
        panels: The keys of each panel's rows by its caption.
        x: The title of the columns, if not their name.
        y: The title of the rows, if not their name.
        value: The title of the scale.
    """

    def draw(table: Table) -> go.Figure:
        frames = {
            caption: table.where(**keys).frame.pivot(index=index, columns=columns, values="value").astype(float)
            for caption, keys in panels.items()
        }
        return plots.accuracy_grids(frames, x=x or columns, y=y or index, value=value)

    return draw


def seed_dots(frame: Any, row: str, label: str, mean: pd.DataFrame | None = None) -> go.Figure:
    """Draws each seed's values in labelled rows, and `mean` with its own intervals (`plots.dots`)."""
    seeds = frame.assign(seed="seed " + frame["seed"].astype(str))
    return plots.dots(seeds if mean is None else pd.concat([seeds, mean]), row, "seed", label)


# Experiments


class About(Enum):
    """Whose statement an experiment is about."""

    PAPER = "paper"
    """A figure, a table or a statement of its source."""
    BEYOND = "beyond"
    """Beyond its source, or after its manner."""


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper, reproducible by name."""

    name: str
    """Such as `"icatune/fig3"`."""
    title: str
    source: str
    """Author, year, figure."""
    study: Study
    figures: Figures = field(default_factory=dict)
    """From the table alone to figures by panel."""
    claims: Claims = ()
    """The paper's, judged by the table alone."""
    published: str = ""
    """What the paper reports, in a sentence, beside which ours is read."""
    about: About = About.PAPER

    def draw(self, table: Table) -> Mapping[str, go.Figure]:
        """Returns its figures by panel."""
        return drawn_by(self.figures, table)

    def check(self, table: Table) -> list[Check]:
        """Returns its claims beside what a table says."""
        return checks_of(self.claims, table)

    @property
    def scales(self) -> Mapping[Scale, Any]:
        """Those of its study."""
        return self.study.scales

    @property
    def run(self) -> Callable[..., Table]:
        """That of its study."""
        return self.study.run

    @property
    def of_its_paper(self) -> bool:
        """Whether it is about a figure, a table or a statement of its source."""
        return self.about is About.PAPER

    @property
    def compares_models(self) -> bool:
        """Whether it takes several models."""
        return self.study.models == "several"

    @property
    def makes_models(self) -> bool:
        """Whether it makes the models that it measures, or measures none: it takes no model."""
        return self.study.models == "none"
