"""Claims of papers beside what was measured, and verdicts on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from align_circuits.papers.statistics import Measured, Statistic, Values, measured, named_levels
from align_circuits.tables.tables import Table

Verdict = Literal["holds", "fails", "undecided", "no evidence"]

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
        return SimpleNamespace(**named_levels(self.table, column))


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


def checks_of(claims: Claims, table: Table) -> list[Check]:
    """Returns claims beside what a table says."""
    stated = claims(table) if callable(claims) else claims
    return [claim.check(table) if isinstance(claim, Claim) else claim for claim in stated]
