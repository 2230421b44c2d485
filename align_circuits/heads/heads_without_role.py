"""The heads that stand out without a role: by their effect on the answer, or by a score that did not name them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from align_circuits.heads.patch import patch_heads
from align_circuits.heads.role_tests import RoleTests
from align_circuits.hooks.head_names import Head, describe, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table

LARGE_EFFECT = 0.1
"""From this share of the difference between clean and corrupted prompts on, the effect of a single head is large."""

SCREENED = 0.1
"""The share of the heads that is patched where all would take too long: those of largest effect by their gradient."""

GRADIENT_COSTS = 4
"""In passes of the model, about what the estimates of all heads take: no more exact patches than that are estimated."""


@dataclass(frozen=True, repr=False)
class UnnamedHead:
    """A head that stands out by its effect or its score but was not named for a role, and why."""

    head: Head
    role: str
    """The role that it comes closest to."""
    score: float
    """Its score there."""
    failed: tuple[str, ...]
    """The tests that it failed, in words."""
    effect: float
    """What patching it from clean into corrupted prompts brings back, in nats of the targets' log-probability."""
    interval: tuple[float, float]
    """The effect's 95% interval over prompts."""
    estimated: bool
    """Whether the effect is the estimate of a gradient, since those of other heads are larger by theirs."""
    share: float
    """The normalised effect: of the difference between clean and corrupted prompts. NaN where that may be 0."""
    high: bool
    """Whether the score is high enough for the role."""
    large: bool
    """Whether the head has no name and its measured effect is at least `LARGE_EFFECT`, its interval leaving out 0."""

    def __repr__(self) -> str:
        return f"{describe([self.head])}: {'large effect, ' if self.large else ''}{self.size}; {self.why}"

    @property
    def size(self) -> str:
        """The effect in words."""
        estimate = ", estimated" if self.estimated else ""
        share = (
            "" if np.isnan(self.share) else f", {self.share:.0%} of the difference between clean and corrupted prompts"
        )
        return f"{self.effect:+.2f} nats{share}{estimate}"

    @property
    def why(self) -> str:
        """The role and the tests that the head failed."""
        return f"{self.role}: {'; '.join(self.failed)}"


def effects_of_others(model: HookedModel, pair: Pair, patched: Table, options: RunOptions) -> Table:
    """Returns what patching each head alone brings back: of those in `patched`, and of all others, by `estimated`.

    The others are patched too if that takes no longer than estimates: where prompts differ near their ends only what
    follows is run anew. Otherwise `SCREENED` of them are, those of largest effect by the estimate of `patch_heads`.
    """
    known = {*patched.head_indices} if len(patched) else set()
    rest = [head for head in heads_of(model.cfg) if head not in known]
    differ = (pair.clean.tokens != pair.corrupted.tokens).any(0)
    rerun = float((differ.cumsum(0) > 0).float().mean())  # the share of the positions
    screen = SCREENED if len(rest) * rerun / 2 > GRADIENT_COSTS else None  # half of the layers are above a head
    tables = [patched, *([patch_heads(model, pair, heads=rest, screen=screen, options=options)] if rest else [])]
    marked = [
        replace(table, frame=table.frame if "estimated" in table.frame else table.frame.assign(estimated=False))
        for table in tables
        if len(table)
    ]
    return replace(Table.concat(marked), provenance=patched.provenance, baselines=patched.baselines)


def unnamed_heads(
    tests: RoleTests, heads_by_role: Mapping[str, Sequence[Head]], effects: Table, hopeless: Collection[str] = ()
) -> tuple[UnnamedHead, ...]:
    """Returns the heads without a role that stand out, those of large effect first, then by their scores.

    A head stands out if its effect is large, or if its score is high enough for a role. For a role without any named
    head the one of highest score joins, whatever else it is named for.

    Args:
        tests: What was asked of a head.
        heads_by_role: The named heads.
        effects: `effects_of_others`.
        hopeless: Roles that no head can be named for on these prompts: heads do not stand out by their score there.
    """
    of_all = effects.where(kind="all", metric="log_prob")
    shares = of_all.normalized().frame
    rows = [*zip(of_all.head_indices, of_all.frame.to_dict("records"), shares.to_dict("records"), strict=True)]
    by_head = {head: (row, share) for head, row, share in rows}
    named = {head for heads in heads_by_role.values() for head in heads}

    def excess(head: Head, role: str) -> float:
        return float(np.nan_to_num(tests.value(head, role, "score"), nan=0.0)) - tests.least_score(head, role)

    def nearness(head: Head, role: str) -> tuple[bool, int, float]:
        high = excess(head, role) >= 0
        return high, -len(tests.failed(head, role)) if high else 0, excess(head, role)

    def of(head: Head, role: str) -> UnnamedHead:
        effect, share = by_head[head]
        shown = abs(share["value"]) >= LARGE_EFFECT and not effect["low"] <= 0 <= effect["high"]
        return UnnamedHead(
            head,
            role,
            tests.value(head, role, "score"),
            tests.failed(head, role),
            effect["value"],
            (effect["low"], effect["high"]),
            effect["estimated"],
            share["value"],
            high=excess(head, role) >= 0,
            large=bool(shown and not effect["estimated"] and head not in named),
        )

    roles = [role for role in tests.roles if role not in hopeless]
    closest = (
        of(head, max(roles or tests.roles, key=lambda role: nearness(head, role))) for head in by_head.keys() - named
    )
    kept = [unnamed for unnamed in closest if unnamed.large or (unnamed.high and unnamed.role in roles)]
    kept.sort(key=lambda unnamed: (-unnamed.large, -abs(unnamed.effect) * unnamed.large, -unnamed.score, unnamed.head))
    shown = {unnamed.role for unnamed in kept if unnamed.high}
    empty = [role for role in roles if not heads_by_role[role] and role not in shown]
    best = [of(max(by_head, key=lambda head: excess(head, role)), role) for role in empty]
    known = {(unnamed.head, unnamed.role) for unnamed in kept}
    return (*kept, *(unnamed for unnamed in best if (unnamed.head, unnamed.role) not in known))
