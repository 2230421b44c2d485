"""Which heads are named for a role, and which tests the others failed: the third stage of `localize`, on its table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from align_circuits.heads.candidates import ALIGNERS, Candidate
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.where_heads_matter import ROLE, Elsewhere
from align_circuits.hooks.head_names import Head
from align_circuits.tables.tables import Table

CAUSAL = {"ablation": "ablation", "denoising": "patching", "resampling": "resampling"}
"""The effects by which a head may matter, by metric, and what they are called; of resampling some heads have none."""


@dataclass(frozen=True, eq=False)
class RoleTests:
    """What a head must pass to be named for a role, on the prompts that test."""

    table: Table
    """`evidence_table`."""
    roles: Sequence[str]
    """Those among which a head has a best one, by its attention to keys."""
    needed: Thresholds
    confounded: Sequence[str] = ()
    """The roles in which a head that attends at a fixed distance would do as well: it must pass the control too."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """The score of a head that attends to all candidates alike, by role."""
    smallest_p: Mapping[str, float] = field(default_factory=dict)
    """The smallest p-value of attention that the prompts allow, by role."""
    elsewhere: Mapping[Head, Elsewhere] = field(default_factory=dict)
    """The heads whose rows of `previous` are about where their output matters."""

    def value(self, head: Head, role: str, metric: str) -> float:
        """Returns a number of the table; NaN where it has none."""
        return self._rows.get((*head, role, metric), (np.nan, np.nan))[0]

    def least_score(self, head: Head, role: str) -> float:
        """Returns the score that a head needs for this role."""
        elsewhere = self._elsewhere(head, role)
        return self.needed.least_score(elsewhere.chance if elsewhere else self.chance.get(role, 0.0))

    def _elsewhere(self, head: Head, role: str) -> Elsewhere | None:
        return self.elsewhere.get(head) if role == ROLE else None

    def failed(self, head: Head, role: str) -> tuple[str, ...]:
        """Returns the tests that a head failed in a role, in words; none if it is named, provided it is a candidate.

        Where it does not attend as the role requires, nothing else counts.
        """
        return tuple(self._attention(head, role)) or tuple(self._others(head, role))

    def _attention(self, head: Head, role: str) -> Iterator[str]:
        score, attention = (self.value(head, role, metric) for metric in ("score", "attention"))
        by_role = {name: self.value(head, name, "attention") for name in self.roles}
        if role != ROLE and head in self.elsewhere:  # the other roles are about where the model predicts
            by_role[ROLE] = self.elsewhere[head].attention
        best, least = (
            max(by_role, key=lambda name: np.nan_to_num(by_role[name], nan=-1.0)),
            self.least_score(head, role),
        )
        if not score >= least:
            yield f"score {_unlike(score, least)}, below {least:.2f}"
        if not attention >= self.needed.attention:
            told = _unlike(attention, self.needed.attention)
            yield f"diffuse: {told} of its attention on the keys, below {self.needed.attention:g}"
        if not attention >= self.needed.share * by_role[best]:
            yield f"more attention to the keys of {best} ({by_role[best]:.2f}) than of {role} ({attention:.2f})"

    def _others(self, head: Head, role: str) -> Iterator[str]:
        p, causal_p, q = (self.value(head, role, metric) for metric in ("p", "causal_p", "q"))
        fdr, elsewhere = self.needed.fdr, self._elsewhere(head, role)
        if np.isnan(q):
            yield "attends so on the prompts that test, but not on those that chose the candidates"
        elif not q <= fdr:
            if p > fdr:
                # A p-value of redraws lies around the smallest one, which is that of all of them.
                smallest = elsewhere.smallest_p if elsewhere else self.smallest_p.get(role, 0.0)
                at_floor = p <= 1.1 * smallest
                why = "no p-value on these prompts is smaller" if at_floor else "its positional bias may explain it"
                yield f"attention p = {p:.2g}, above {fdr:g}: {why}"
            if causal_p > fdr:
                loss = "ablation or resampling" if elsewhere else "ablation"
                yield f"causal p = {causal_p:.2g}, above {fdr:g}: no loss by {loss} or gain by patching is shown"
            if not (p > fdr or causal_p > fdr):
                small = f"effect below {self.needed.effect:g} nats on the prompts that choose"
                yield f"corrected p = {q:.2g}, above {fdr:g}" if q < 1 else small
        # Where no effect is shown to be above 0, the p-value above has told that.
        told = not q <= fdr and causal_p > fdr
        if not (np.isnan(q) or told or any(self._has_effect(head, role, metric) for metric in CAUSAL)):
            yield f"no effect of {self.needed.effect:g} nats with an interval above 0"
        # A task without a control, such as people's own prompts, has no score on it: then nothing is named.
        if role in self.confounded and not (control := self.value(head, role, "control")) >= self.needed.score:
            reached = "no score" if np.isnan(control) else f"score {control:.2f}"
            yield f"{reached} on the control, below {self.needed.score:g}: it may attend at a fixed distance"

    def _has_effect(self, head: Head, role: str, metric: str) -> bool:
        value, low = self._rows.get((*head, role, metric), (np.nan, np.nan))
        return bool(value >= self.needed.effect and low > 0)

    @cached_property
    def _rows(self) -> dict[tuple[int, int, str, str], tuple[float, float]]:
        columns = (self.table.frame[name].tolist() for name in ("layer", "head", "role", "metric", "value", "low"))
        return {(*key, metric): (value, low) for *key, metric, value, low in zip(*columns, strict=True)}


def _unlike(value: float, least: float) -> str:
    """A number with as many digits, two at least, as tell it from the threshold that it misses."""
    rounded = [f"{value:.{digits}f}" for digits in range(2, 9)]
    return next((text for text in rounded if float(text) != round(least, 2)), rounded[-1])


def named_heads(tests: RoleTests, candidates: Sequence[Candidate]) -> dict[str, tuple[Head, ...]]:
    """Returns the candidates that pass every test, by role, best score first."""
    named: dict[str, list[tuple[float, Head]]] = {role: [] for role in tests.roles}
    for head, role in candidates:
        if role in tests.roles and not tests.failed(head, role):
            named[role].append((tests.value(head, role, "score"), head))
    return {role: tuple(head for _, head in sorted(scored, reverse=True)) for role, scored in named.items()}


def diffuse_aligners(
    tests: RoleTests, candidates: Sequence[Candidate], heads_by_role: Mapping[str, Sequence[Head]]
) -> dict[str, tuple[Head, ...]]:
    """Returns aligners that lack nothing but attention to keys; other roles, with their many keys, are not compared."""
    roles = [role for role in tests.roles if role in ALIGNERS]
    diffuse = named_heads(replace(tests, roles=roles, needed=replace(tests.needed, attention=0.0)), candidates)
    return {role: tuple(head for head in diffuse[role] if head not in heads_by_role[role]) for role in roles}
