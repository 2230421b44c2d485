"""Sets of heads ablated together, beside control sets: whether the model needs a set, and whether it suffices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.checks import checked
from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.control_sets import check_controls, controls_of, first_enough, half_of_each, measured_beside
from align_circuits.heads.score import score_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import CONTROL_ROWS, Claim, Verdict, verdict_of
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.head_names import Head, HeadLike, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import WRONG, Prompts
from align_circuits.run.batch_sizes import CPU_TOKENS
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import CHOICE_ACCURACY, TargetMetrics, by_kind, means_by_prompt
from align_circuits.run.unedited_runs import shared_runs
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table


@checked
@leaves_as_found
def ablate_together(
    model: HookedModel,
    prompts: Prompts,
    heads: Sequence[HeadLike],
    *,
    n_controls: int = 20,
    seed: int = 0,
    thresholds: Thresholds = Thresholds(),
    options: RunOptions = RunOptions(),
) -> tuple[Table, list[Verdict]]:
    """Tests a set of heads of your own: whether the model needs them on these prompts, and whether they suffice.

    The heads are ablated together to their means, and then all others, beside as many random heads of the same layers
    and as many of similar scores (those of the prompts' relations, and attention to the first token). The verdicts are
    those of `localize` on the heads that it names. They mislead if the heads were chosen on the same prompts.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets, at least two.
        heads: The set, as `(2, 3)` or `"L2H3"`.
        n_controls: How many control sets of each kind are drawn, as for `localize`.
        seed: Of the control sets.
        thresholds: What a set must cost or keep: `min_drop`, `min_retained` and `alpha`.
        options: Engine and batch size.

    Returns:
        The table of accuracies (`Evidence.set_ablations`), and a verdict for each claim, necessary and sufficient.
        Where each target that decides has a wrong answer, accuracy is between right and wrong one.

    Raises:
        ValueError: No heads, a head that the model does not have, all of its heads, a negative number of controls, or
            fewer than two prompts.
    """
    chosen = heads_of(model.cfg, heads)
    if not 0 < len(chosen) < len(heads_of(model.cfg)):
        raise ValueError(f"{len(chosen)} of {len(heads_of(model.cfg))} heads: give at least one, and not all")
    check_controls(n_controls)
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} of at least two prompts: give dozens, for an interval that tells much")
    deciding, metric = judged(prompts)
    with shared_runs(model):
        scores = score_heads(model, deciding, [*deciding.relations, "sink"], options=options)
        grids = {name: scores.to_array(name) for name in scores.frame["metric"].unique()}
        sets = HeadSets(model, deciding, grids, thresholds, n_controls, seed, options, metric)
        table, verdicts = sets.test(chosen, ("necessary", "sufficient"), sets.controls(chosen))
    settings = {"heads": [list(head) for head in chosen], "n_controls": n_controls, "seed": seed}
    provenance = provenance_of(
        "ablate_together", model, prompts, table.provenance.engine, settings | {"thresholds": asdict(thresholds)}
    )
    return Table(table.frame, provenance, table.values, table.weights), verdicts


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
