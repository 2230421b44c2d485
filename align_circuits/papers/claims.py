"""Claims of papers beside what was measured, and verdicts on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from align_circuits.papers.statistics import Measured, Statistic, Values, measured, named_levels
from align_circuits.tables.intervals import ROUNDING, TAILS
from align_circuits.tables.tables import Table

Relation: TypeAlias = Literal[">=", "<="]

Verdict = Literal["holds", "no exception", "fails", "undecided", "no evidence", "not testable"]

ALPHA = 0.05
"""How often at most a claim over seeds holds of which most seeds would say no."""


def most_seeds(yes: int, no: int) -> bool | None:
    """Returns whether more than half of all seeds would say yes, by an exact binomial test against one half.

    None where so many of one kind have a chance above `ALPHA` where both kinds are as frequent: among fewer than five
    seeds always. Five that agree decide, and seven of eight.

    Args:
        yes: How many seeds say it.
        no: How many do not.
    """
    n = yes + no
    chance = sum(math.comb(n, k) for k in range(max(yes, no), n + 1)) / 2**n
    return None if chance > ALPHA else yes > no


def fewest_seeds(relation: Relation, threshold: float) -> float:
    """Returns how many seeds, all of which agree, bring the interval of a share to the threshold; infinite for none."""
    reach = threshold if relation == ">=" else 1 - threshold
    if not 0 < reach < 1:
        return 1.0 if reach <= 0 else math.inf
    return float(math.ceil(math.log(TAILS[0]) / math.log(reach)))


@dataclass(frozen=True)
class Check:
    """One claim of a paper beside what was measured.

    The claim holds if the whole 95% interval is at least (`">="`) or at most (`"<="`) the threshold, fails if all of it
    misses the threshold, and is undecided if the threshold lies within, or if there is no interval, or one of length
    zero (all prompts agree, which is no certainty) around a number that is not `exact`.

    Few seeds seldom show that some end elsewhere, and their t interval knows nothing of that. So of a mean over seeds a
    claim holds only if `most_seeds` says, too, that a seed meets the threshold; a seed without a value does not. Seeds
    that all gave the same number have no interval: `most_seeds` alone decides, either way. Rows that are means over
    seeds already, whose values are not in the table, are judged by their interval.

    That something is so in every seed (threshold 1 for a share) no number of seeds shows. It fails by one exception;
    without any its verdict is `"no exception"`, with the number of seeds.

    The same statistic measured on a negative control must miss the threshold, with its whole interval: where the
    control reaches it or was not measured, a claim that would hold is no evidence.

    A claim without any measured value is not testable: nothing meets what it presupposes, as where it is about models
    that know their facts and none does.
    """

    claim: str
    """The paper's claim, in words."""
    measured: Measured
    relation: Relation
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
        """What the intervals of the measured value and of the control say, and the seeds."""
        if math.isnan(self.measured.value):
            return "not testable"
        meets = self._decided(self.measured)
        if meets is False:
            return "fails"
        if meets or self._without_exception:
            shown = self._decided(self.control, of_seeds=False) is False
            return "no evidence" if not shown else "holds" if meets else "no exception"
        return "undecided"

    @property
    def met(self) -> bool:
        """Whether the measured value by itself meets the threshold."""
        return self._meets(self.measured.value)

    @property
    def control_fails(self) -> bool:
        """Whether the control's value by itself misses the threshold, as it should; not where there is none."""
        return not (math.isnan(self.control.value) or self._meets(self.control.value))

    def _meets(self, value: float) -> bool:
        return bool(value >= self.threshold if self.relation == ">=" else value <= self.threshold)

    def _decided(self, of: Measured, *, of_seeds: bool = True) -> bool | None:
        """Whether a number is shown to meet the threshold, or to miss it; None where neither is shown."""
        numbers = [] if of.seeds and isinstance(of.seeds[0], bool) else [*of.seeds]
        known = [value for value in numbers if not math.isnan(value)]
        agree = len(known) > 1 and math.isnan(of.low) and np.std(known, ddof=1) <= ROUNDING * abs(np.mean(known))
        low, high = (of.value, of.value) if agree else (of.low, of.high)
        meets = self._meets(low)
        if math.isnan(low + high) or (low == high and not (agree or of.exact)) or meets != self._meets(high):
            return None
        if not agree and not (meets and known and of_seeds):
            return meets
        same_way = sum(self._meets(value) == meets for value in known)
        return meets if most_seeds(same_way, len(numbers) - same_way) else None

    @property
    def _without_exception(self) -> bool:
        """Whether something is claimed of every seed, and is so in all of several."""
        of_all = self.threshold == (1 if self.relation == ">=" else 0)
        seeds = self.measured.seeds
        return of_all and self.met and len(seeds) > 1 and isinstance(seeds[0], bool)

    def row(self) -> dict[str, str]:
        """Returns the check as a row for people."""
        seeds, verdict = len(self.measured.seeds), self.verdict
        if verdict == "no exception":
            verdict = f"no exception in {seeds}"
        elif verdict == "not testable":
            verdict += ": nothing meets what it presupposes"
        elif verdict == "undecided" and math.isnan(self.measured.low):
            verdict += ": too few seeds that agree" if seeds > 1 else ": no interval"
        misses = self._decided(self.control, of_seeds=False)
        return {
            "claim": self.claim,
            "measured": str(self.measured),
            "needed": f"{self.relation} {self.threshold:g}",
            "verdict": verdict,
            "control": f"{self.control_is}: {self.control}",
            "control misses the threshold": {False: "yes, as it should", True: "no", None: "not shown"}[misses],
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
    relation: Relation | None = None
    threshold: float = math.nan
    statistic: Statistic | Values | None = None
    control: Statistic | Values | None = None
    """The same statistic where the claim should not hold."""
    control_is: str = ""

    def at_least(
        self, threshold: float, statistic: Statistic | Values, control: Statistic | Values, control_is: str
    ) -> "Claim":
        """Returns the claim that a statistic reaches the threshold, and that on a control it does not.

        Raises:
            ValueError: It is a share of so few seeds that it cannot reach the threshold, whatever they say.
        """
        return self._stated(">=", threshold, statistic, control, control_is)

    def at_most(
        self, threshold: float, statistic: Statistic | Values, control: Statistic | Values, control_is: str
    ) -> "Claim":
        """Returns the claim that a statistic stays at the threshold or below; otherwise as `at_least`."""
        return self._stated("<=", threshold, statistic, control, control_is)

    def _stated(self, relation: Relation, threshold: float, statistic: Any, control: Any, control_is: str) -> "Claim":
        if isinstance(statistic, np.ndarray):
            self._refuse_out_of_reach(relation, threshold, statistic)
        return Claim(self.text, self.published, relation, threshold, statistic, control, control_is)

    def _refuse_out_of_reach(self, relation: Relation, threshold: float, seeds: Values) -> None:
        """Raises where no share of so many seeds, five or more, can show that it is so in more than half of all."""
        if not (isinstance(seeds, np.ndarray) and seeds.dtype == bool and len(seeds) >= 5):
            return
        reach, least = (threshold if relation == ">=" else 1 - threshold), fewest_seeds(relation, threshold)
        if 0.5 < reach < 1 and least > len(seeds):
            raise ValueError(
                f"the claim {self.text!r}: no share of {len(seeds)} seeds has an interval {relation} {threshold:g}; "
                f"it takes {least:g} seeds: give a threshold that they can reach, or that of all seeds, 1 or 0"
            )

    def check(self, table: Table) -> Check:
        """Returns the claim beside what a table says.

        Raises:
            ValueError: It has no threshold, or one that a share of the table's five seeds or more cannot reach.
        """
        if self.relation is None or self.statistic is None or self.control is None:
            raise ValueError(f"the claim {self.text!r} has no threshold: give one by at_least or at_most")
        values, of_control = (of(table) if isinstance(of, Statistic) else of for of in (self.statistic, self.control))
        self._refuse_out_of_reach(self.relation, self.threshold, values)
        value, control = measured(values), measured(of_control)
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


def kept_checks(file: Path) -> list[Check]:
    """Returns the checks that an archived experiment left in its `claims.csv`; their seeds are not known."""
    rows: Any = pd.read_csv(file, dtype={"published": str}).fillna({"published": ""})
    return [
        Check(
            row.claim,
            Measured(row.value, row.low, row.high),
            row.relation,
            row.threshold,
            Measured(row.control_value, row.control_low, row.control_high),
            row.control_is,
            row.published,
        )
        for row in rows.itertuples()
    ]


def verdicts(checks: Sequence[Check]) -> str:
    """Returns how many claims hold, fail and are undecided, as a sentence."""
    counts = {each: sum(check.verdict == each for check in checks) for each in get_args(Verdict)}
    held, universal, failed, undecided, void, untestable = counts.values()
    every = f", {universal} without exception" if universal else ""
    without = f", {void} without evidence (the control is not shown to miss the threshold)" if void else ""
    without += f", {untestable} not testable" if untestable else ""
    return f"{held} hold{every}, {failed} fail, {undecided} undecided{without} of {len(checks)} claims."


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
