"""Finds all heads of a role together: also redundant ones, of which no single ablation shows any."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.candidates import attending, causal_p_values, chance_of, corrected, mattering
from align_circuits.heads.effects import effects_table
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.renamed_tokens import redraws_tokens
from align_circuits.heads.score import score_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.where_heads_matter import ROLE
from align_circuits.hooks.edits import Ablate, Edit
from align_circuits.hooks.head_names import Head
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

ROUNDS = 3
"""How often more heads are looked for at most; each round ablates those found before."""

LEAST_SHARE = 0.05
"""Of the largest effect in the role. Decoys that write noise were seen to bring back .03 of it in planted circuits."""


@dataclass(frozen=True)
class RedundantHead:
    """A head of a role that was found beside others of its kind, with what speaks for it."""

    head: Head
    round: int
    """1: it attends so in the intact model. 2 or more: only with those of earlier rounds ablated, as a backup does."""
    effect: float
    """In nats of the targets' mean log-probability: what it alone brings back when all heads of the role are ablated,
    or what its ablation costs beside those of earlier rounds, whichever is more."""
    low: float
    """The lower end of the effect's 95% interval over prompts."""
    high: float
    """The upper end."""
    single: bool
    """Whether `localize` names it by tests of this head alone, too."""


@dataclass(frozen=True, eq=False)
class RedundantHeadSearch:
    """Looks for the heads of a role in rounds, on the prompts that `localize` uses.

    In each round heads are candidates that attend as the role requires and count, on the prompts that choose, while the
    heads found so far are ablated to their means (in the first round: in the intact model). A candidate joins if, on
    the prompts that test, it still attends so, more than its positional bias explains (`permutation_tests`), and
    counts: with all members and candidates ablated, it alone brings something back; or, with the members ablated, its
    own ablation costs something, at least `LEAST_SHARE` of what the strongest head of the role does. Both have one
    p-value, as for single heads, corrected over the round's candidates. The first finds heads that share a job, of
    which any one can be missed; later rounds find backups, which take a role only once its heads are gone. Roles that
    edits allow no test of (`redraws_tokens`) have a first round only. Previous-token heads are looked for where their
    output matters (`where_heads_matter`) in the first round alone.

    Source: the backups of Wang et al. (2022), "Interpretability in the Wild", §3.4, and the self-repair of McGrath et
    al. (2023), "The Hydra Effect"; restoring one head of an ablated set is the marginal contribution to the empty
    coalition, and removing it from the rest that to the full one, the two ends of Shapley's (1953) average.

    Misleads where heads of one role need each other: none brings anything back alone. The control is to ablate the
    role's heads together (`localize`).
    """

    model: HookedModel
    scores: Mapping[Prompts, Table]
    """For the prompts that choose, then for those that test: the standard score of each role in the intact model, and
    its attention."""
    p: Mapping[str, Float[ndarray, "layer head"]]
    """The p-values of each role, in the intact model."""
    elsewhere: Mapping[Prompts, Collection[Head]]
    """On the same prompts the heads that attend to the token before where their output matters (`where_heads_matter`);
    their p-value of `previous` is of that."""
    thresholds: Thresholds
    seed: int
    """Of the permutation tests."""
    options: RunOptions

    def heads(self, role: str, single: Sequence[Head]) -> tuple[RedundantHead, ...]:
        """Returns all heads of a role that are found, among them those that `localize` named one by one for it."""
        members: dict[Head, RedundantHead] = {}
        discovery, tested = self.scores
        rounds = 1 if redraws_tokens(tested, role, edited=True) else ROUNDS  # means of tokens do not fit renamed ones
        for number in range(1, rounds + 1):
            ablated = sorted(members)
            alone = single if number == 1 else ()
            candidates = sorted(({*self.attending(role, discovery, ablated)} - {*ablated}) | {*alone})
            if not candidates:
                break
            effects = {prompts: self.effects(candidates, ablated, prompts) for prompts in self.scores}
            mattered = set().union(*(mattering(table, self.thresholds) for table in effects[discovery]))
            matters = {head: p for head, p in causal_p_values(effects[tested]).items() if head in mattered}
            kept = self.significant(role, ablated, matters) & self.attending(role, tested, ablated)
            joining = {
                head: RedundantHead(head, number, effect, low, high, head in single)
                for head, (effect, low, high) in _larger(effects[tested]).items()
                if head in single or (head in kept and low > 0)
            }
            strongest = max((member.effect for member in (members | joining).values()), default=0.0)
            least = max(self.thresholds.effect, LEAST_SHARE * strongest)
            joined = {head: member for head, member in joining.items() if member.single or member.effect >= least}
            if not joined:
                break
            members |= joined
        return tuple(members.values())

    def attending(self, role: str, prompts: Prompts, ablated: Sequence[Head]) -> set[Head]:
        """Returns the heads that attend as the role requires while others are ablated."""
        scores, roles = self.scores[prompts], list(self.p)
        if ablated:
            metrics = [*roles, *(f"{name}_attention" for name in roles)]
            edits = self._ablating(ablated, prompts)
            scores = score_heads(self.model, prompts, metrics, edits=edits, options=self.options)
        found = attending(scores, roles, self.thresholds, chance_of(prompts, roles))
        heads = {head for head, of_role in found if of_role == role}
        return heads | {*self.elsewhere[prompts]} if role == ROLE and not ablated else heads

    def significant(self, role: str, ablated: Sequence[Head], matters: Mapping[Head, float]) -> set[Head]:
        """Returns the heads that attend so beyond their positional bias and matter, on the prompts that test.

        Args:
            role: The role.
            ablated: The members found so far.
            matters: The p-values of the effects of all that are tested.
        """
        p, (_, tested) = self.p, self.scores
        if ablated:
            edits = self._ablating(ablated, tested)
            p = p_values(self.model, tested, [role], seed=self.seed, edits=edits, options=self.options)
        of_role = {(head, role): value for head, value in matters.items()}
        q = corrected(p, [[*of_role]], of_role)
        return {head for (head, _), value in q.items() if value <= self.thresholds.fdr}

    def effects(self, candidates: Sequence[Head], ablated: Sequence[Head], prompts: Prompts) -> tuple[Table, Table]:
        """Returns what each candidate brings back alone with all ablated, and its cost beside those found before."""
        together, count = [*ablated, *candidates], len(candidates)
        without = [[other for other in together if other != head] for head in candidates]
        # All ablated; all but one candidate; those found before; those and one candidate: rows of `values`, in turn.
        sets = [together, *without, list(ablated), *([*ablated, head] for head in candidates)]
        targets = TargetMetrics.of(prompts, ("log_prob",))
        edit_sets = [self._ablating(heads, prompts) for heads in sets]
        values, _ = targets.measure_edited(self.model, edit_sets, options=self.options)
        brought_back = values[:, 1 : count + 1] - values[:, :1]
        cost = values[:, count + 1 : count + 2] - values[:, count + 2 :]
        keys = pd.DataFrame(candidates, columns=["layer", "head"])
        every = {"all": np.full(len(targets.token), True)}
        back, beside = (
            effects_table(keys, changes, targets, every, Provenance("redundant heads"))
            for changes in (brought_back, cost)
        )
        return back, beside

    def _ablating(self, heads: Sequence[Head], prompts: Prompts) -> list[Edit]:
        if not heads:
            return []
        means = ablation_baseline(self.model, prompts, "mean", options=self.options)
        return [Ablate(heads, how="mean", baseline=means)]


def _larger(effects: Sequence[Table]) -> dict[Head, tuple[float, float, float]]:
    """The largest of each head's effects, with its interval."""
    rows = (table.frame[["value", "low", "high"]].itertuples(index=False, name=None) for table in effects)
    return {head: max(pair) for head, pair in zip(effects[0].head_indices, zip(*rows, strict=True), strict=True)}
