"""Numbers with their intervals, and statistics: expressions on a table, evaluated when called with one.

iwl, icl = at_end("iwl", burst=1), at_end("icl", burst=1)      # a number for each seed
iwl.fall("noise")                                              # of each seed, between two levels of a column
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.tables.intervals import binomial_interval, t_interval, weighted_mean
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table

# Numbers with their intervals


@dataclass(frozen=True)
class Measured:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float
    seeds: tuple[float, ...] | tuple[bool, ...] = field(default=(), repr=False, compare=False)
    """The values, or yes and no, of the seeds that it is the mean of, as far as they are known; NaN without a value."""

    exact: bool = field(default=False, repr=False, compare=False)
    """Whether there is no chance in it: no prompts or seeds were drawn. Then its interval is the number itself."""

    @property
    def row(self) -> dict[str, float]:
        """As the columns of a table."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        if math.isnan(self.value):
            return "none"
        value, low, high = (f"{each:{spec or '.2f'}}" for each in (self.value, self.low, self.high))
        return f"{value} [no interval]" if math.isnan(self.low) else f"{value} [{low}, {high}]"


def exact(value: float) -> Measured:
    """Returns a number without chance in it."""
    return Measured(value, value, value, exact=True)


NOT_MEASURED = Measured(math.nan, math.nan, math.nan)
"""What stands where there was nothing to measure."""


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
    combine as if independent; of other seeds, pairs stand for the seeds of the difference. Rows measured on the same
    prompts, such as a model and its ceiling, mostly rise and fall together: for them that interval is too wide, not too
    narrow.
    """
    by_seed = _by_seed(minuend), _by_seed(subtrahend)
    if len(by_seed[0]) > 1 and by_seed[0].index.equals(by_seed[1].index):
        return over_seeds((by_seed[0] - by_seed[1]).to_numpy(float))
    return _as_if_independent(mean_of(minuend), mean_of(subtrahend))


def _as_if_independent(left: Measured, right: Measured) -> Measured:
    below = math.hypot(left.value - left.low, right.high - right.value)
    above = math.hypot(left.high - left.value, right.value - right.low)
    value = left.value - right.value
    # Shares of seeds have binomial intervals, which are wide enough for few seeds by themselves.
    shares = any(isinstance(seed, bool) for seed in (*left.seeds, *right.seeds))
    pairs = () if shares else tuple(a - b for a, b in zip(left.seeds, right.seeds, strict=False))
    return Measured(value, value - below, value + above, pairs)


def _by_seed(table: Table) -> pd.Series:
    """The mean value of the rows of each seed; empty where the table does not tell seeds apart."""
    frame: Any = table.frame
    return frame.groupby("seed")["value"].mean() if "seed" in frame else pd.Series(dtype=float)


def extreme_of(table: Table, *, highest: bool) -> Measured:
    """Returns the row with the highest (else the lowest) value; a row without a value (NaN) does not count.

    One end of its interval is its own, the other the outermost of all rows, since another row may truly be the highest.
    Its own end takes no account of the choice: of many rows at a threshold the highest mostly exceeds it.
    """
    value = table.frame["value"].to_numpy(float)
    if np.isnan(value).all():
        return NOT_MEASURED
    row = _row(table, int(np.nanargmax(value) if highest else np.nanargmin(value)))
    low, high = (table.frame[end].to_numpy(float) for end in ("low", "high"))
    # NaN where no row has an interval.
    return replace(row, high=float(np.fmax.reduce(high))) if highest else replace(row, low=float(np.fmin.reduce(low)))


def value_of(table: Table, **where: Any) -> Measured:
    """Returns the first row where the key columns have the given values, with its own interval."""
    return _row(table.where(**where), 0)


def share_of(true: Bool[ndarray, " seed"]) -> Measured:
    """Returns the share of seeds in which something is true, with its exact binomial interval; none of no seeds.

    Of a masked seed it is not known. The interval's ends are those if it is true in none of them, and in all.
    """
    known: Bool[ndarray, " seed"] = np.ma.compressed(true)
    if not len(known):
        return NOT_MEASURED
    yes, unknown = int(known.sum()), len(true) - len(known)
    low, high = (binomial_interval(count, len(true))[end] for end, count in enumerate((yes, yes + unknown)))
    return Measured(float(known.mean()), low, high, () if unknown else tuple(known.tolist()))


def over_seeds(values: Float[ndarray, " seed"]) -> Measured:
    """Returns the mean over seeds with its 95% t interval; a seed without a value (NaN) is left out.

    One seed has no interval, nor have seeds that all gave the same value (`t_interval`).
    """
    if np.isnan(values).all():
        return NOT_MEASURED
    low, high = t_interval(values[None])
    return Measured(float(np.nanmean(values)), float(low[0]), float(high[0]), tuple(values.tolist()))


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


def _of_each(table: Table) -> Measured:
    place = int(table.frame["value"].to_numpy().argmin())
    row, n = _row(table, place), int(table.frame["n"].iloc[place])
    return replace(row, seeds=(bool(row.value),) * n) if row.value in (0, 1) else row


def _row(table: Table, place: int) -> Measured:
    row = table.frame.iloc[place]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))


def _mean_row(table: Table) -> Measured:
    row, n = _row(table, 0), int(table.frame["n"].iloc[0])
    return replace(row, seeds=(row.value,) * n) if math.isnan(row.low) else row


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


def named_levels(table: Table, column: str) -> dict[str, Any]:
    """Returns the lowest, the middle and the highest value of a key column, by the names of `Level`."""
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
        return self.map(lambda one, two: _known(one < two, one, two), other)

    def __gt__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: _known(one > two, one, two), other)

    def __ge__(self, other: Any) -> "Statistic":
        return self.map(lambda one, two: _known(one >= two, one, two), other)


def statistic(function: Callable[[Table], Values]) -> Statistic:
    """Returns the statistic of a function of the rows that `at` selects."""

    def of(table: Table, keys: Mapping[str, Any]) -> Values:
        chosen = {
            column: named_levels(table, column)[value.value] if isinstance(value, Level) else value
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

mean_row = _by_measure(lambda table: _mean_row(table))
"""The same of a row that is a mean over `n` seeds, whose values are not kept: without an interval they agreed."""

of_each = _by_measure(lambda table: _of_each(table))
"""The row with the lowest share of its `n` prompts or worlds: where all agree, each of them is a yes, or each a no.

What is claimed of every one of them then has no exception in `n`."""

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


def _known(true: Any, one: Any, two: Any) -> Any:
    """Masks the seeds of which a comparison says nothing, since a side has no value."""
    return np.ma.masked_where(np.isnan(one) | np.isnan(two), true)


def _difference(one: Any, other: Any) -> Any:
    if isinstance(one, Table):
        return difference_of(one, other)
    if not isinstance(one, Measured):
        return one - other
    # Those of one table mostly are of the same seeds; where they are not, any pairs of independent seeds serve.
    if len(one.seeds) == len(other.seeds) > 1:
        return over_seeds(np.array(one.seeds, float) - np.array(other.seeds, float))
    return _as_if_independent(one, other)


def measured(values: Values) -> Measured:
    """Returns a number with its interval: the mean over seeds, a share of seeds, or the mean of rows."""
    if isinstance(values, Measured):
        return values
    if isinstance(values, Table):
        return mean_of(values)
    return share_of(values) if values.dtype == bool else over_seeds(values)
