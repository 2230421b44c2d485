"""What a paper claims beside what was measured, and the statistics that most checks rest on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.tables.intervals import binomial_interval, t_interval, weighted_mean
from align_circuits.tables.tables import Provenance, Table

Scale = Literal["smoke", "cpu", "paper", "smollm2"]
"""`smoke` takes seconds, `cpu` at most 30 minutes on two cores, `paper` is the paper's own setting; `smollm2` is made
for the model of that name, a pretrained Llama, and takes hours on two cores."""

Verdict = Literal["holds", "fails", "undecided", "no evidence"]

SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""Those that every experiment has."""


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


@dataclass(frozen=True)
class Claim:
    """What a paper says, to be put beside what was measured.

        Claim("No head aligns (highest align_query)", "0.1").at_most(0.5, highest, of_planted, "a planted circuit")

    Where values of seeds are given, their mean is meant (`over_seeds`); where a yes or no of each seed is given, as
    booleans, the share of seeds (`share_of`).
    """

    text: str
    """In words, with the statistic."""
    published: str = ""
    """The paper's own number, where it gives one."""

    def at_least(self, threshold: float, measured: "Statistic", control: "Statistic", control_is: str) -> Check:
        """Returns the check that a statistic reaches the threshold, and that on a control it does not."""
        return self._check(">=", threshold, measured, control, control_is)

    def at_most(self, threshold: float, measured: "Statistic", control: "Statistic", control_is: str) -> Check:
        """Returns the check that a statistic stays at the threshold or below, and that on a control it does not."""
        return self._check("<=", threshold, measured, control, control_is)

    def _check(
        self, relation: Literal[">=", "<="], threshold: float, measured: "Statistic", control: "Statistic", is_: str
    ) -> Check:
        value, other = (_over_seeds(each) for each in (measured, control))
        return Check(self.text, value, relation, threshold, other, is_, self.published)


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


Statistic = Measured | Float[ndarray, " seed"] | Bool[ndarray, " seed"]
"""A number with its interval, or one number or one yes or no for each seed."""

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


def _over_seeds(statistic: Statistic) -> Measured:
    if isinstance(statistic, Measured):
        return statistic
    return share_of(statistic) if statistic.dtype == bool else over_seeds(statistic)


def _row(table: Table, place: int) -> Measured:
    row = table.frame.iloc[place]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))
