"""The second stage of `localize`: effects of single heads, interchange, and accuracy with sets of heads ablated."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.candidates import Candidate, causal_p_values, corrected
from align_circuits.heads.control_sets import controls_of, first_enough, half_of_each, measured_beside
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import CONTROL_ROWS, Claim, Verdict, verdict_of
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import WRONG, Prompts
from align_circuits.run.batch_sizes import CPU_TOKENS
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import CHOICE_ACCURACY, TargetMetrics, by_kind, means_by_prompt
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

_ROWS = re.compile(rf"nothing|head|named|rest|(rest of )?({'|'.join(CONTROL_ROWS.values())})|random \d+|.*, redundant")
"""How tables of sets of heads name their own rows, among which a role's has the name of the role."""


def check_names(roles: Sequence[str]) -> None:
    """Raises a ValueError for a role whose row would pass for another."""
    if taken := [role for role in roles if _ROWS.fullmatch(role)]:
        raise ValueError(
            f"a role called {taken[0]!r}: the results have rows of that name for other heads; give the relation another"
        )


@dataclass(frozen=True, eq=False)
class Example:
    """The first of the prompts that test, and the attention of each named head on it."""

    attention: Mapping[Head, Float[Tensor, "row pos"]] = field(default_factory=dict)
    """From each of the positions."""
    positions: list[int] = field(default_factory=list)
    """The positions of the prompt's test example, and the one before."""
    pair: Pair | None = None
    """The prompt and its corrupted partner."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The tables behind the names and verdicts of `localize`."""

    patching_effects: Table
    """The effect of patching each head into corrupted prompts: `patch_heads`, with a column `estimated`."""
    ablation_effects: Table
    """The effect of ablating each candidate: `ablate_heads`."""
    set_ablations: Table
    """Accuracy by `kind` of target with sets of heads ablated to their means: `metric` is `"accuracy"`, or
    `CHOICE_ACCURACY` where each target that decides has a wrong answer (`judged`). `ablated` is `"nothing"`, a role, a
    role with its redundant heads (`"lookup, redundant"`), `"named"` (all named heads), `"random"` (as many others of
    the same layers, one `draw` each), `"matched"` (as many others of similar scores), `"rest"` (all heads but those
    named), or all heads but the random ones (`"rest of random"`) or the matched ones (`"rest of matched"`). Control
    sets are measured on as many prompts as show whether they do as well as the named heads: `n` counts the targets."""
    interchanges: Table | None = None
    """Where both prompts of the pairs have answers that are known and differ: `interchange_accuracy` of each
    candidate, of the heads of each role, of all named heads, and of as many random ones (`"random 0"`, ...). Else
    None."""
    example: Example = Example()
    """The attention of each named head on one prompt."""


def evidence_table(
    scores: Table,
    control: Table | None,
    p: Mapping[str, Float[ndarray, "layer head"]],
    families: Sequence[Sequence[Candidate]],
    elsewhere: Sequence[Candidate],
    mattered: Collection[Candidate],
    ablation_effects: Table,
    patching_effects: Table,
    resampling_effects: Table,
    provenance: Provenance,
) -> Table:
    """Returns `Localization.table`: all evidence for each head in each role, p-values corrected in each family.

    Those are tested that mattered on the prompts that chose; for the other candidates `"q"` is 1. Candidates
    `elsewhere`, a family of their own, have three chances to matter where there are effects of resampling, the others
    two. They have no score on the control, which would be of other positions.
    """
    of_two = causal_p_values((ablation_effects, patching_effects), signs=(-1, 1))
    matters = {candidate: of_two[candidate[0]] for candidate in chain(*families, elsewhere)}
    if len(resampling_effects):
        of_three = causal_p_values((ablation_effects, patching_effects, resampling_effects), signs=(-1, 1, -1))
        matters |= {candidate: of_three[candidate[0]] for candidate in elsewhere}
    families = [*families, elsewhere]
    tests = [[candidate for candidate in family if candidate in mattered] for family in families]
    q = dict.fromkeys(chain(*families), 1.0) | corrected(p, tests, matters)
    no_interval = {"low": np.nan, "high": np.nan}
    frames = []
    for role in p:
        attention = scores.where(metric=f"{role}_attention").heads().frame
        candidates = [head for head, of_role in q if of_role == role]
        tested = attention.set_index(["layer", "head"]).loc[candidates].reset_index()
        p_of_head = p[role][attention["layer"].to_numpy(int), attention["head"].to_numpy(int)]
        rows = {"score": scores.where(metric=role).heads().frame}
        others = [head for head, of_role in elsewhere if of_role == role]
        if control is not None:
            scored: Any = control.where(metric=role).heads().frame
            rows["control"] = scored[~_are_among(others, scored)]
        rows |= {"attention": attention, "p": attention.assign(value=p_of_head, **no_interval)}
        rows["causal_p"] = tested.assign(value=[matters[head, role] for head in candidates], **no_interval)
        rows["q"] = tested.assign(value=[q[head, role] for head in candidates], **no_interval)
        for metric, effects, sign in (
            ("ablation", ablation_effects, -1),
            ("denoising", patching_effects, 1),
            ("resampling", resampling_effects, -1),
        ):
            effect = effects.where(kind="all", metric="log_prob").frame if len(effects) else effects.frame
            effect = effect[_are_among(others if metric == "resampling" else candidates, effect)]
            # A loss is minus a change, which swaps the ends of its interval.
            low, high = np.sort(np.stack([sign * effect["low"], sign * effect["high"]]).astype(float), axis=0)
            rows[metric] = effect.assign(value=sign * effect["value"], low=low, high=high)
        frames += [frame.assign(metric=metric, role=role) for metric, frame in rows.items() if len(frame)]
    columns = ["level", "layer", "head", "role", "metric", "value", "low", "high", "n"]
    return Table(pd.concat([frame.loc[:, columns] for frame in frames], ignore_index=True), provenance)


def _are_among(heads: Collection[Head], frame: Any) -> Bool[ndarray, " row"]:
    """Which rows are about one of the heads."""
    return np.array([head in heads for head in zip(frame["layer"], frame["head"], strict=True)], dtype=bool)


def judged(prompts: Prompts) -> tuple[Prompts, str]:
    """Returns the prompts with the targets that verdicts are about, and the metric of these.

    Where each target that decides, the first of its phrase if there are such, has a wrong answer, the question is which
    of the two the model prefers: these targets and `CHOICE_ACCURACY`. Else all targets and `"accuracy"`.
    """
    decides, targets = by_kind(prompts)[_deciding_kind(prompts)], prompts.targets
    if WRONG not in targets or (targets[WRONG].isna().to_numpy() & decides).any():
        return prompts, "accuracy"
    return prompts.select_targets(torch.from_numpy(decides)), CHOICE_ACCURACY


def _deciding_kind(prompts: Prompts) -> str:
    """The targets that verdicts are about: the first token of a phrase shows best what alignment and lookup do."""
    return "first" if "first" in by_kind(prompts) else "all"


@dataclass(eq=False)
class HeadSets:
    """Sets of heads of one model, ablated to their means on the prompts that test, beside control sets."""

    model: HookedModel
    prompts: Prompts
    scores: Mapping[str, Float[ndarray, "layer head"]]
    thresholds: Thresholds
    draws: int
    seed: int
    options: RunOptions
    metric: str = "accuracy"
    """What `judged` returned with the prompts."""

    def __post_init__(self):
        self.heads, self.kind = heads_of(self.model.cfg), _deciding_kind(self.prompts)
        self._decides = by_kind(self.prompts)[self.kind]
        self._right: dict[tuple[Head, ...], Float[ndarray, " target"]] = {}  # sets measured on all prompts
        self._provenance: Provenance | None = None

    def controls(self, heads: Sequence[Head], others: Sequence[Head] | None = None) -> dict[str, list[list[Head]]]:
        """Returns the control sets of a set (`controls_of`), by default of all other heads."""
        others = self._without(heads) if others is None else others
        return controls_of(heads, others, self.scores, self.draws, self.seed)

    def test_roles(self, heads_by_role: Mapping[str, Sequence[Head]]) -> list[Verdict]:
        """Returns for each role whether its heads are necessary; none where all named heads have one role.

        Control sets are drawn from the heads that were named for no role: those of other roles may be necessary too.
        Half of them are of the same layers, half of similar scores, as far as they differ.
        """
        of_roles = {role: heads for role, heads in heads_by_role.items() if heads}
        if len({frozenset(heads) for heads in of_roles.values()}) < 2:
            return []
        unnamed = self._without([head for heads in of_roles.values() for head in heads])
        verdicts = []
        for role, heads in of_roles.items():
            controls = {"unnamed": half_of_each(self.controls(heads, unnamed), self.draws)}
            verdicts += self.test(heads, ("necessary",), controls, role=role)[1]
        return verdicts

    def test(
        self,
        heads: Sequence[Head],
        claims: Sequence[Claim],
        controls: Mapping[str, Sequence[Sequence[Head]]],
        also: Mapping[str, Sequence[Head]] = MappingProxyType({}),
        **about: Any,
    ) -> tuple[Table, list[Verdict]]:
        """Returns `Evidence.set_ablations` and a verdict for each claim about a set of heads.

        Control sets are measured only where the effect of the set is large enough, and as far as the verdict depends
        on them (`measured_beside`).

        Args:
            heads: The set.
            claims: What is asked.
            controls: Sets of as many other heads, by kind.
            also: Other sets by name, whose accuracy is measured too.
            **about: `smallest` or `role`, as `Verdict` has them.
        """
        rest, prefix = self._without(heads), {"necessary": "", "sufficient": "rest of "}
        sets: dict[str, Sequence[Head]] = {"nothing": ()} | {name: of_name for name, of_name in also.items() if of_name}
        sets |= {"named": heads} if "necessary" in claims else {}
        sets |= {"rest": rest} if "sufficient" in claims and rest else {}
        right = dict(zip(sets, self._right_targets([*sets.values()]), strict=True))
        rows: list[tuple[str, int | None]] = [(name, None) for name in sets]
        values = [*right.values()]
        alone = self._verdicts(claims, heads, self._table(rows, values), about)
        for claim, verdict in zip(claims, alone, strict=True):
            tested = right.get("named" if claim == "necessary" else "rest")
            if tested is None or not verdict.large:
                continue
            drawn = [
                (prefix[claim] + name, draw, control if claim == "necessary" else self._without(control))
                for draw in range(max(map(len, controls.values())))
                for kind, name in CONTROL_ROWS.items()
                for control in controls.get(kind, ())[draw : draw + 1]
            ]
            rows += [(name, draw) for name, draw, _ in drawn]
            values += [*self._right_beside(claim, tested, drawn)]
        table = self._table(rows, values)
        return table, self._verdicts(claims, heads, table, about)

    def _verdicts(
        self, claims: Sequence[Claim], heads: Sequence[Head], table: Table, about: Mapping[str, Any]
    ) -> list[Verdict]:
        decisive = table.where(kind=self.kind)
        return [verdict_of(claim, heads, decisive, len(self.heads), self.thresholds, **about) for claim in claims]

    def _right_beside(
        self, claim: Claim, tested: Float[ndarray, " target"], drawn: Sequence[tuple[str, int, Sequence[Head]]]
    ) -> Float[ndarray, "draw target"]:
        """Which targets are right with each control set ablated, as far as the verdict depends on it."""
        size, prompt = max(1, CPU_TOKENS // self.prompts.mask.shape[1]), self.prompts.column("prompt").numpy()
        deciding = prompt[self._decides]
        # No control set is left on fewer targets than these, and one that falls short on all of them is left then: a
        # batch ends there.
        needed = round(tested[self._decides].sum() if claim == "necessary" else (1 - tested[self._decides]).sum())
        settled = {int(deciding[needed]) + 1} if needed < len(deciding) else set()
        edges = sorted({*range(0, len(self.prompts), size), *settled, len(self.prompts)})
        in_batch = {(first, end): (prompt >= first) & (prompt < end) for first, end in pairwise(edges)}
        rows = [ends for ends, targets in in_batch.items() if (targets & self._decides).any()]

        def measure(draw: int, batch: int) -> Float[ndarray, " target"]:
            return self._accuracies([drawn[draw][2]], slice(*rows[batch]))[0]

        kinds, batches = [name for name, *_ in drawn], [in_batch[ends] for ends in rows]
        return measured_beside(claim, tested, kinds, batches, measure, self._decides, self.thresholds.alpha)

    def _without(self, heads: Sequence[Head]) -> list[Head]:
        return [head for head in self.heads if head not in heads]

    def _right_targets(self, sets: Sequence[Sequence[Head]]) -> list[Float[ndarray, " target"]]:
        """Which targets are right with each set ablated; sets of the same heads are measured once."""
        if asked := [heads for heads in dict.fromkeys(map(tuple, sets)) if heads not in self._right]:
            self._right |= zip(asked, self._accuracies(asked), strict=True)
        return [self._right[tuple(heads)] for heads in sets]

    def _accuracies(self, sets: Sequence[Sequence[Head]], rows: slice = slice(None)) -> Float[ndarray, "set target"]:
        right, engine = right_ablated(self.model, self.prompts, sets, rows, metric=self.metric, options=self.options)
        self._provenance = self._provenance or provenance_of("localize", self.model, self.prompts, engine)
        return right

    def _table(self, rows: Sequence[tuple[str, int | None]], right: Sequence[Float[ndarray, " target"]]) -> Table:
        """Accuracy with each set ablated, from which targets are right."""
        kinds, targets = by_kind(self.prompts), self.prompts.column("prompt").numpy()
        means, weights = means_by_prompt(self.prompts, targets, right, list(kinds.values()))
        weights[np.isnan(means)] = 0  # prompts on which a control set was not measured
        measured = pd.DataFrame({"kind": list(kinds), "metric": self.metric})
        keys = pd.DataFrame(rows, columns=["ablated", "draw"]).astype({"draw": "Int64"}).merge(measured, how="cross")
        assert self._provenance is not None
        return Table.from_prompts(keys, means, weights, self._provenance, group=self.prompts.group)


def smallest_sets(
    model: HookedModel,
    discovery: Prompts,
    named: Sequence[Head],
    kind: str,
    needed: Thresholds,
    options: RunOptions,
    metric: str = "accuracy",
) -> dict[Claim, list[Head]]:
    """Returns the smallest sets found on the prompts that do not test, each a beginning of one order of the heads.

    Named heads come first, then all others, each by the loss of log-probability when it is ablated alone. The
    necessary set costs nearly as much accuracy as all named heads; the sufficient one keeps nearly all. A set of
    all named heads, or of all heads of the model, is left out.
    """
    losses = ablate_heads(model, discovery, metrics=("log_prob",), options=options).where(kind=kind).frame["value"]
    heads, decides = heads_of(model.cfg), by_kind(discovery)[kind]
    loss = dict(zip(heads, losses, strict=True))
    order = sorted(heads, key=lambda head: (head not in named, loss[head]))

    def accuracies(*sets: Sequence[Head]) -> list[float]:
        right, _ = right_ablated(model, discovery, sets, metric=metric, options=options)
        return right[:, decides].mean(1).tolist()

    intact, all_named = accuracies((), named)
    size = first_enough(len(order), lambda size: accuracies(order[size:])[0] >= needed.min_retained * intact)
    found: dict[Claim, list[Head]] = {"sufficient": order[:size]}
    if (lost := intact - all_named) >= needed.min_drop:
        most = intact - max(needed.min_drop, needed.min_retained * lost)
        size = first_enough(len(named), lambda size: accuracies(order[:size])[0] <= most)
        found = {"necessary": order[:size], **found}
    return {claim: smallest for claim, smallest in found.items() if set(smallest) not in (set(named), set(heads))}


def right_ablated(
    model: HookedModel,
    prompts: Prompts,
    sets: Sequence[Sequence[Head]],
    measured: slice = slice(None),
    *,
    metric: str,
    options: RunOptions,
) -> tuple[Float[ndarray, "set target"], str]:
    """Returns whether each target of the measured prompts is right with each set ablated, by a metric of `judged`.

    Beside it the engine that ran.
    """
    # Means of the intact model for all sets, also where earlier heads are ablated: a set then differs from another
    # by its heads alone. They are those of all prompts, also where some are measured.
    baseline = ablation_baseline(model, prompts, "mean", options=options)
    edit_sets = [[Ablate(heads, how="mean", baseline=baseline)] if heads else [] for heads in sets]
    targets = TargetMetrics.of(prompts, (metric,))
    targets = targets if measured == slice(None) else targets.select(measured)
    values, engine = targets.measure_edited(model, edit_sets, options=options)
    return values[0], engine
