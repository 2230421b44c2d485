"""The last stage of `localize`, on tables alone: which sets of heads are necessary, which suffice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.head_names import Head, describe
from align_circuits.tables.intervals import proportion_change
from align_circuits.tables.tables import Table

Claim = Literal["necessary", "sufficient"]

CONTROLS = {
    "layers": "random heads of the same layers",
    "scores": "heads of similar scores",
    "unnamed": "heads that were not named, of the same layers or of similar scores",
}
"""The control sets, by what they share with the set that is tested."""

CONTROL_ROWS = {"layers": "random", "scores": "matched", "unnamed": "unnamed"}
"""What `Evidence.set_ablations` calls them."""

ROUNDING = 1e-9
"""Accuracies that differ by less are equal."""


@dataclass(frozen=True)
class Verdict:
    """Whether a set of heads is necessary, or sufficient: an accuracy beside those of control sets."""

    claim: Claim
    """Necessary: with the set ablated the answer is lost. Sufficient: with all other heads ablated it is kept."""
    heads: tuple[Head, ...]
    """The set."""
    total: int
    """How many heads the model has."""
    intact: float
    """The accuracy of the model."""
    value: float
    """The accuracy with the set ablated, or all other heads."""
    low: float
    """The lower end of its 95% interval over prompts."""
    high: float
    """The upper end."""
    lost: tuple[float, float]
    """The 95% interval over prompts of the accuracy that is lost: `intact` minus `value`, paired by prompt."""
    controls: Mapping[str, tuple[float, ...]]
    """The same for control sets of as many heads, a number for each draw, by what they share with the set
    (`CONTROLS`), each on as many prompts as show whether it does as well as the set. NaN where that was not found out,
    since another had done as well already; no draw at all where the set's own effect is too small."""
    least: float
    """The accuracy that a necessary set costs at least; the share of it that a sufficient one keeps at least."""
    alpha: float
    """The highest p-value."""
    smallest: bool = False
    """Whether this is the smallest set that was found, on other prompts, rather than all heads that were named."""
    role: str | None = None
    """The role whose heads the set holds; None for a set of all roles."""

    @property
    def p(self) -> dict[str, float]:
        """For each kind of control, the share of sets that do as well as this one, which counts as one of them.

        A permutation p-value (Phipson and Smyth, 2010), exact if all sets were alike; with d draws at least 1/(1 + d).
        Control sets are drawn from the other heads: too small for a set of more than about an eighth of the heads.
        A draw that is NaN counts as one that does as well: p is at most this.
        """
        return {
            name: float(1 + (as_extreme(self.claim, np.array(draws), self.value) | np.isnan(draws)).sum())
            / (1 + len(draws))
            for name, draws in self.controls.items()
        }

    @property
    def holds(self) -> bool:
        """Whether the effect is large enough, and larger than that of both kinds of control sets."""
        # The larger of two p-values needs no correction: both kinds must do worse (intersection-union, Berger, 1982).
        return self.large and bool(self.controls) and max(self.p.values()) <= self.alpha

    @property
    def too_few(self) -> bool:
        """Whether no control set does as well, but there are too few for the p-value to reach `alpha`."""
        best = {name: 1 / (1 + len(draws)) for name, draws in self.controls.items()}
        return self.large and bool(self.controls) and self.p == best and not self.holds

    @property
    def large(self) -> bool:
        """Whether the set itself costs or keeps enough accuracy, whatever other sets do."""
        return self._reaches and not self.unclear

    @property
    def unclear(self) -> bool:
        """Whether a set costs enough accuracy in these prompts, which are too few to tell the loss from none."""
        return self.claim == "necessary" and self._reaches and not self.lost[0] > 0

    @property
    def _reaches(self) -> bool:
        if self.claim == "necessary":
            return self.intact - self.value >= self.least - ROUNDING
        # Of an intact accuracy of 0 any set keeps the share that is asked for.
        return self.value >= self.least * self.intact - ROUNDING and self.value > 0

    @property
    def why_no_controls(self) -> str:
        """Why no control set was measured, if none was; else an empty text."""
        if self.controls:
            return ""
        if self.large:
            return "no control sets were drawn"
        if self.unclear:
            return f"{self.loss} may be none, so no control sets were measured: take more prompts"
        little = "loses less" if self.claim == "necessary" else "keeps less"
        return f"this {little} than is needed, so no control sets were measured"

    @property
    def loss(self) -> str:
        """The accuracy that is lost, with its interval."""
        return f"a loss of {self.intact - self.value:.2f} [{self.lost[0]:.2f}, {self.lost[1]:.2f}]"

    @property
    def beside(self) -> list[str]:
        """The accuracies of the control sets, a phrase for each kind; once the claim is lost, only what it lost to."""
        phrases = []
        for name, draws in self.controls.items():
            known = np.array([draw for draw in draws if not np.isnan(draw)])
            as_well = known[as_extreme(self.claim, known, self.value)]
            if len(known) == len(draws):
                spread = f"{known.mean():.2f} ({known.min():.2f} to {known.max():.2f}, p = {self.p[name]:.2g})"
                phrases.append(f"{spread} for {CONTROLS[name]}")
            elif len(as_well):
                phrases.append(f"{as_well[0]:.2f} for a set of {CONTROLS[name]}, which does as well")
        return phrases

    @property
    def sentence(self) -> str:
        """The verdict and its numbers."""
        count = f"{len(self.heads)} of {self.total} heads"
        subject = f"the named {count}" if self.role is None else f"the heads named for {self.role} ({count})"
        subject = f"the smallest set found, {describe(self.heads)} ({count})" if self.smallest else subject
        ablated = f"{subject} ablated" if self.claim == "necessary" else f"all but {subject} ablated"
        controls = f", beside {' and '.join(self.beside)}" if self.controls else f" ({self.why_no_controls})"
        if self.too_few:
            controls += f" (these are too few for p to reach {self.alpha:g})"
        outcome = self.claim if self.holds else f"not shown to be {self.claim}"
        return (
            f"{outcome[0].upper()}{outcome[1:]}: with {ablated}, accuracy is {self.value:.2f} "
            f"[{self.low:.2f}, {self.high:.2f}]{controls}."
        )


def _interval_of_loss(accuracies: Table, name: str) -> tuple[float, float]:
    """The interval over prompts of the accuracy that is lost when these heads are ablated, in the rows of one kind."""
    assert accuracies.values is not None and accuracies.weights is not None
    intact, with_set = (int((accuracies.frame["ablated"] == each).to_numpy().argmax()) for each in ("nothing", name))
    change = accuracies.values[[intact]] - accuracies.values[[with_set]]
    low, high = proportion_change(change, accuracies.weights[[intact]], yes_or_no=True)
    return float(low[0]), float(high[0])


def as_extreme(claim: Claim, controls: Float[ndarray, " draw"], value: Any) -> Bool[ndarray, " draw"]:
    """Returns which control sets cost as much accuracy as the tested set, or keep as much."""
    # Ties count as extreme, as a permutation p-value needs.
    return (1 if claim == "necessary" else -1) * (controls - value) <= ROUNDING


def verdict_of(
    claim: Claim, heads: Sequence[Head], accuracies: Table, total: int, thresholds: Thresholds, **about: Any
) -> Verdict:
    """Returns the verdict on a set of heads, from the rows of `Evidence.set_ablations` of the targets that decide."""
    # Through `iter`: `dict` takes whatever has `keys` for a mapping, and those of a pandas group are no method.
    by_name = dict(iter(accuracies.frame.groupby("ablated")))
    prefix, name = ("", "named") if claim == "necessary" else ("rest of ", "rest")
    name = name if name in by_name else "nothing"  # all heads were named: there is no rest
    tested = by_name[name].iloc[0]
    draws = {kind: by_name.get(f"{prefix}{row}") for kind, row in CONTROL_ROWS.items()}
    return Verdict(
        claim,
        tuple(heads),
        total,
        float(by_name["nothing"]["value"].iloc[0]),
        float(tested["value"]),
        float(tested["low"]),
        float(tested["high"]),
        _interval_of_loss(accuracies, name),
        {kind: tuple(map(float, rows["value"])) for kind, rows in draws.items() if rows is not None},
        thresholds.least(claim),
        thresholds.alpha,
        **about,
    )
