"""Finds the heads of a role as a group: also those that stand in for each other, which no single test shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.effects import effects_table
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.renamed_tokens import redraws_tokens
from align_circuits.heads.score import score_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.edits import Ablate, AblationBaseline, Edit
from align_circuits.hooks.heads import Head
from align_circuits.models.protocol import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.intervals import benjamini_hochberg
from align_circuits.tables.tables import Provenance, Table

ROUNDS = 3
"""How often more heads are looked for at most; each round ablates those found before."""


@dataclass(frozen=True)
class GroupMember:
    """A head of a group, with what speaks for it."""

    head: Head
    round: int
    """1: it attends so in the intact model. 2 or more: only with those of earlier rounds ablated, as a backup does."""
    effect: float
    """In nats of the targets' mean log-probability: what it alone brings back when the whole group is ablated, or what
    its ablation costs beside those of earlier rounds, whichever is more."""
    low: float
    """The lower end of the effect's 95% interval over prompts."""
    high: float
    """The upper end."""
    single: bool
    """Whether `localize` names it without its group too."""


class GroupSearch:
    """Looks for the heads of a role in rounds, on the prompts that `localize` uses.

    In each round heads are candidates that attend as the role requires, on the prompts that choose, while the members
    found so far are ablated to their means (in the first round: in the intact model). A candidate joins if, on the
    prompts that test, it still attends so, more than its positional bias explains (`permutation_tests`, corrected over
    the round's candidates), and counts: with all members and candidates ablated, it alone brings something back; or,
    with the members ablated, its own ablation costs something. The first finds heads that share a job, of which any one
    can be missed; later rounds find backups, which take a role only once its heads are gone. Roles that are tested by
    renaming tokens (`renamed_tokens`) have a first round only.

    Source: the backups of Wang et al. (2022), "Interpretability in the Wild", §3.4, and the self-repair of McGrath et
    al. (2023), "The Hydra Effect"; adding one head to an ablated group is the marginal contribution to the empty
    coalition, and removing it from the rest that to the full one, the two ends of Shapley's (1953) average.

    Misleads where heads of one role need each other: none brings anything back alone. The control is to ablate the
    group as a whole (`localize`).
    """

    def __init__(
        self,
        model: HookedModel,
        scores: Mapping[Prompts, Table],
        p: Mapping[str, Float[ndarray, "layer head"]],
        thresholds: Thresholds,
        seed: int,
        options: RunOptions,
    ):
        """Keeps what is known of the intact model.

        Args:
            model: What is searched.
            scores: For the prompts that choose, then for those that test: the standard score of each role in the intact
                model, and its attention.
            p: The p-values of each role, in the intact model.
            thresholds: What a head must reach.
            seed: Of the permutation tests.
            options: How the model is run.
        """
        self._model, self._scores, self._p, self._thresholds = model, scores, p, thresholds
        self._discovery, self._tested = scores
        self._roles, self._seed, self._options = list(p), seed, options
        self._baselines = {half: ablation_baseline(model, half, "mean", options=options) for half in scores}

    def group(self, role: str, single: Sequence[Head]) -> tuple[GroupMember, ...]:
        """Returns the members of a role's group, the heads that were named one by one among them.

        Args:
            role: One of the roles.
            single: The heads that `localize` named for it.
        """
        members: dict[Head, GroupMember] = {}
        rounds = 1 if redraws_tokens(self._tested, role) else ROUNDS  # means of tokens do not fit renamed ones
        for number in range(1, rounds + 1):
            ablated = sorted(members)
            candidates = self._candidates(role, ablated)
            if number == 1:
                candidates = sorted({*candidates, *single})
            if not candidates:
                break
            kept = self._attending(role, candidates, ablated)
            effects = self._effects(candidates, ablated)
            joined = {
                head: GroupMember(head, number, *effects[head], head in single)
                for head in candidates
                if head in single or (head in kept and self._counts(*effects[head]))
            }
            if not joined:
                break
            members |= joined
        return tuple(members.values())

    def _counts(self, effect: float, low: float, _: float) -> bool:
        return effect >= self._thresholds.effect and low > 0

    def _ablating(self, heads: Sequence[Head], baseline: AblationBaseline) -> list[Edit]:
        return [Ablate(heads, how="mean", reference=baseline)] if heads else []

    def _attends(self, role: str, prompts: Prompts, ablated: Sequence[Head]) -> set[Head]:
        """The heads that attend as the role requires while others are ablated."""
        scores = self._scores[prompts]
        if ablated:
            edits = self._ablating(ablated, self._baselines[prompts])
            metrics = [*self._roles, *(f"{each}_attention" for each in self._roles)]
            scores = score_heads(self._model, prompts, metrics, edits=edits, options=self._options)
        best = np.stack([scores.grid(f"{each}_attention") for each in self._roles]).max(0)
        attends = self._thresholds.attends(scores.grid(role), scores.grid(f"{role}_attention"), best)
        return {(int(layer), int(head)) for layer, head in np.argwhere(attends)}

    def _candidates(self, role: str, ablated: Sequence[Head]) -> list[Head]:
        return sorted(self._attends(role, self._discovery, ablated) - set(ablated))

    def _attending(self, role: str, candidates: Sequence[Head], ablated: Sequence[Head]) -> set[Head]:
        """The candidates that attend so on the other prompts, too, beyond their positional bias."""
        p = self._p[role]
        if ablated:
            edits = self._ablating(ablated, self._baselines[self._tested])
            p = p_values(self._model, self._tested, [role], seed=self._seed, edits=edits, options=self._options)[role]
        q = benjamini_hochberg(np.array([p[head] for head in candidates]))
        passing = {head for head, value in zip(candidates, q, strict=True) if value <= self._thresholds.fdr}
        return passing & self._attends(role, self._tested, ablated)

    def _effects(
        self, candidates: Sequence[Head], ablated: Sequence[Head]
    ) -> Mapping[Head, tuple[float, float, float]]:
        """What each candidate counts, with its interval: alone without the group, or beside the members."""
        group = [*ablated, *candidates]
        without = [[other for other in group if other != head] for head in candidates]
        sets = [group, *without, list(ablated), *([*ablated, head] for head in candidates)]
        baseline, targets = self._baselines[self._tested], TargetMetrics.of(self._tested, ("log_prob",))
        edit_sets = [self._ablating(heads, baseline) for heads in sets]
        values, _ = targets.measure_edited(self._model, edit_sets, options=self._options)
        count = len(candidates)
        brought_back = values[:, 1 : count + 1] - values[:, :1]
        cost = values[:, count + 1 : count + 2] - values[:, count + 2 :]
        keys = pd.DataFrame(candidates, columns=["layer", "head"])
        every = {"all": np.full(len(targets.token), True)}
        tables = [effects_table(keys, changes, targets, every, Provenance("group")) for changes in (brought_back, cost)]
        return {head: _larger(tables, place) for place, head in enumerate(candidates)}


def _larger(tables: Sequence[Table], place: int) -> tuple[float, float, float]:
    """The larger of two effects of a head, with its interval."""
    rows: list[Any] = [table.frame.iloc[place] for table in tables]
    best = max(rows, key=lambda row: row["value"])
    return float(best["value"]), float(best["low"]), float(best["high"])
