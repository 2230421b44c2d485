"""Whether the model needs a set of heads, and whether the set suffices, beside as many other heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.heads import Head, describe, heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models.protocol import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.batching import CPU_TOKENS
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics, by_kind, means_by_prompt
from align_circuits.tables.tables import Provenance, Table

Claim = Literal["necessary", "sufficient"]

CONTROLS = {
    "layers": "random heads of the same layers",
    "scores": "heads of similar scores",
    "unnamed": "heads that were not named, of the same layers or of similar scores",
}
"""The control sets, by what they share with the set that is tested."""

_ROWS = {"layers": "random", "scores": "matched", "unnamed": "unnamed"}
"""What `Localization.group_ablations` calls them."""

_ROUNDING = 1e-9
"""Accuracies that differ by less are equal."""

_TRIES = 3
"""How many sets are drawn for each that is wanted, before heads that are less alike are drawn too."""

_Set = tuple[str, int | None, Sequence[Head]]
"""What `Localization.group_ablations` calls a set, its draw, and the heads that are ablated."""

CALIPER = 0.25
"""How far a score may lie from that of the head for which a control is taken."""


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
        A draw that is NaN counts as one that does as well: p is at most this.
        """
        p = {}
        for name, draws in self.controls.items():
            as_extreme = _as_extreme(self.claim, np.array(draws), self.value) | np.isnan(draws)
            p[name] = float(1 + as_extreme.sum()) / (1 + len(draws))
        return p

    @property
    def holds(self) -> bool:
        """Whether the effect is large enough, and larger than that of both kinds of control sets."""
        return self._large and bool(self.controls) and max(self.p.values()) <= self.alpha

    @property
    def _large(self) -> bool:
        return _large(self.claim, self.intact, self.value, self.least)

    @property
    def why_no_controls(self) -> str:
        """Why no control set was measured, if none was; else an empty text."""
        if self.controls:
            return ""
        if self._large:
            return "no control sets were drawn"
        little = "loses less" if self.claim == "necessary" else "keeps less"
        return f"this {little} than is needed, so no control sets were measured"

    @property
    def beside(self) -> list[str]:
        """The accuracies of the control sets, a phrase for each kind; once the claim is lost, only what it lost to."""
        phrases = []
        for name, draws in self.controls.items():
            known = np.array([draw for draw in draws if not np.isnan(draw)])
            as_extreme = known[_as_extreme(self.claim, known, self.value)]
            if len(known) == len(draws):
                spread = f"{known.mean():.2f} ({known.min():.2f} to {known.max():.2f}, p = {self.p[name]:.2g})"
                phrases.append(f"{spread} for {CONTROLS[name]}")
            elif len(as_extreme):
                phrases.append(f"{as_extreme[0]:.2f} for a set of {CONTROLS[name]}, which does as well")
        return phrases

    @property
    def sentence(self) -> str:
        """The verdict and its numbers."""
        count = f"{len(self.heads)} of {self.total} heads"
        which = f"the named {count}" if self.role is None else f"the heads named for {self.role} ({count})"
        which = f"the smallest set found, {describe(self.heads)} ({count})" if self.smallest else which
        ablated = f"{which} ablated" if self.claim == "necessary" else f"all but {which} ablated"
        controls = f", beside {' and '.join(self.beside)}" if self.controls else f" ({self.why_no_controls})"
        best = {name: 1 / (1 + len(draws)) for name, draws in self.controls.items()}
        if self.controls and self._large and self.p == best and not self.holds:
            controls += f" (these are too few for p to reach {self.alpha:g})"
        outcome = self.claim if self.holds else f"not shown to be {self.claim}"
        return (
            f"{outcome[0].upper()}{outcome[1:]}: with {ablated}, accuracy is {self.value:.2f} "
            f"[{self.low:.2f}, {self.high:.2f}]{controls}."
        )


def _large(claim: Claim, intact: float, value: float, least: float) -> bool:
    """Whether a necessary set costs enough accuracy, or a sufficient one keeps enough."""
    if claim == "necessary":
        return bool(intact - value >= least - _ROUNDING)
    return bool(value >= least * intact - _ROUNDING and value > 0)


def _as_extreme(claim: Claim, controls: Float[ndarray, " draw"], value: Any) -> Bool[ndarray, " draw"]:
    """Which control sets cost as much accuracy as the tested set, or keep as much."""
    return (1 if claim == "necessary" else -1) * (controls - value) <= _ROUNDING


def _may_do_as_well(claim: Claim, value: float, right: Float[ndarray, "draw target"]) -> Bool[ndarray, " draw"]:
    """Which control sets may still cost as much accuracy as the tested set, or keep as much, whatever is not yet known.

    Args:
        claim: The claim.
        value: The accuracy of the tested set.
        right: Which targets are right; NaN where it is not known.
    """
    return _as_extreme(claim, np.nan_to_num(right, nan=float(claim == "sufficient")).mean(1), value)


def _next(claim: Claim, own: Float[ndarray, " target"], right: Float[ndarray, "draw target"]) -> int | None:
    """The control set to go on with: that most likely to do as well as the tested set, which settles the claim.

    A set that does as well so far, on the targets that it was measured on; else one that was not begun; else that which
    falls short by the least. None if all are measured or cannot do as well.

    Args:
        claim: The claim.
        own: Which targets are right with the tested set.
        right: Which are with the control sets; NaN where it is not known.
    """
    known = ~np.isnan(right)
    count = np.maximum(known.sum(1), 1)
    behind = (1 if claim == "necessary" else -1) * (np.nan_to_num(right).sum(1) - (known * own).sum(1)) / count
    turn = np.where(behind <= _ROUNDING, 0, 2)
    turn[~known.any(1)] = 1
    left = np.flatnonzero(~known.all(1) & _may_do_as_well(claim, float(own.mean()), right))
    return int(min(left, key=lambda draw: (turn[draw], behind[draw]))) if len(left) else None


class HeadSets:
    """Sets of heads of one model, ablated on one half of the prompts; smaller sets are looked for on the other.

    Args:
        model: A model with TransformerLens's hooks.
        discovery: The prompts on which smaller sets are looked for.
        tested: The prompts on which all sets are tested.
        scores: For each role the scores of all heads.
        thresholds: What a set must reach.
        options: How the model is run.
    """

    def __init__(
        self,
        model: HookedModel,
        discovery: Prompts,
        tested: Prompts,
        scores: Mapping[str, Float[ndarray, "layer head"]],
        thresholds: Thresholds,
        options: RunOptions,
    ):
        self._model, self._discovery, self._tested = model, discovery, tested
        self._scores, self._thresholds, self._options = scores, thresholds, options
        self._heads = heads_of(model.cfg)
        self._whole: dict[tuple[Head, ...], Float[ndarray, " target"]] = {}  # sets measured on all prompts that test
        self._provenance: Provenance | None = None
        # The first token of a phrase shows best what alignment and lookup do.
        self._kind = "first" if "first" in by_kind(tested) else "all"

    def controls(
        self, heads: Sequence[Head], draws: int, seed: int, others: Sequence[Head] | None = None
    ) -> dict[str, list[list[Head]]]:
        """Returns sets of as many other heads, several of each kind; none if there are no other heads.

        All sets of a kind differ. Where heads of the same layers, or of similar scores, make too few, heads of the
        next layers are drawn too, or of scores that are less similar.

        Args:
            heads: The set that is tested.
            draws: How many sets of each kind.
            seed: Of the draws.
            others: The heads to draw from, by default all that are not tested.
        """
        others = self._without(heads) if others is None else others
        if not others:
            return {"layers": [], "scores": []}
        by_layer, by_score = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        return {
            "layers": _distinct(lambda width: layer_matched(heads, others, by_layer, width), draws, self._heads[-1][0]),
            "scores": _distinct(
                lambda width: score_matched(heads, others, self._scores, by_score, CALIPER * 2**width), draws, 2
            ),
        }

    def ablate(
        self,
        named: Sequence[Head],
        controls: Mapping[str, Sequence[Sequence[Head]]],
        heads_by_role: Mapping[str, Sequence[Head]],
    ) -> Table:
        """Returns `Localization.group_ablations`: accuracy with sets of heads ablated, on the prompts that test."""
        sets: list[_Set] = [("nothing", None, ())]
        sets += [(role, None, heads) for role, heads in heads_by_role.items() if heads]
        return self._test(sets, named, controls, ("necessary", "sufficient") if named else ())

    def _test(
        self,
        sets: Sequence[_Set],
        tested: Sequence[Head],
        controls: Mapping[str, Sequence[Sequence[Head]]],
        claims: Sequence[Claim],
    ) -> Table:
        """Returns accuracy with some sets ablated, with one set and its controls, or with all heads but these.

        Control sets are measured only where the effect of the tested set is large enough (`_right_beside`).
        """
        rest, measured = self._without(tested), [*sets]
        measured += [("named", None, tested)] if "necessary" in claims else []
        measured += [("rest", None, rest)] if "sufficient" in claims and rest else []
        right = self._right_targets([heads for _, _, heads in measured])
        of_set = dict(zip([name for name, _, _ in measured], right, strict=True))
        for claim in claims:
            own = of_set.get("named" if claim == "necessary" else "rest")
            nothing = self._accuracy(of_set["nothing"])
            if own is None or not _large(claim, nothing, self._accuracy(own), self._least(claim)):
                continue
            drawn: list[_Set] = [
                (name, draw, heads) if claim == "necessary" else (f"rest of {name}", draw, self._without(heads))
                for draw in range(max(map(len, controls.values())))
                for kind, name in _ROWS.items()
                for heads in controls.get(kind, ())[draw : draw + 1]
            ]
            measured, right = [*measured, *drawn], [*right, *self._right_beside(claim, own, drawn)]
        return self._table(measured, right)

    def _right_beside(
        self, claim: Claim, own: Float[ndarray, " target"], drawn: Sequence[_Set]
    ) -> list[Float[ndarray, " target"]]:
        """Which targets are right with each control set ablated, as far as the verdict depends on it.

        A set is measured batch of prompts by batch of prompts, until it cannot do as well as the tested set, whatever
        the other prompts show. Once so many of a kind do as well that its p-value will be above `Thresholds.alpha`, the
        claim is lost: no other is measured. So the verdict is that of all draws, whichever comes first, and a p-value
        which counts those that are not known as doing as well is never below that of all draws.

        Args:
            claim: The claim.
            own: Which targets are right with the tested set.
            drawn: The control sets.

        Returns:
            NaN for targets that were not measured; for all of them if it is open whether the set does as well.
        """
        of_kind, batches, value = by_kind(self._tested)[self._kind], self._batches(), self._accuracy(own)
        right = np.full((len(drawn), len(own)), np.nan)
        measured, kinds = np.zeros(len(drawn), int), np.array([name for name, _, _ in drawn])
        while (draw := _next(claim, own[of_kind], right[:, of_kind])) is not None:
            rows = batches[measured[draw]]
            values, _ = self._accuracies(self._tested, [drawn[draw][2]], rows)
            right[draw, self._in(rows)] = values[0]
            measured[draw] += 1
            known = ~np.isnan(right[:, of_kind]).any(1)
            as_extreme = known & _as_extreme(claim, right[:, of_kind].mean(1), value)
            alike = kinds == kinds[draw]
            if as_extreme[draw] and (1 + as_extreme[alike].sum()) / (1 + alike.sum()) > self._thresholds.alpha:
                right[~known & _may_do_as_well(claim, value, right[:, of_kind])] = np.nan
                break
        return [*right]

    def _batches(self) -> list[slice]:
        """The prompts that test, a batch at a time; those without targets of the kind that decides are left out."""
        size = max(1, CPU_TOKENS // self._tested.mask.shape[1])
        batches = [slice(start, start + size) for start in range(0, len(self._tested), size)]
        of_kind = by_kind(self._tested)[self._kind]
        return [rows for rows in batches if (of_kind & self._in(rows)).any()]

    def _in(self, rows: slice) -> Bool[ndarray, " target"]:
        """Which targets are those of some of the prompts that test."""
        prompt = self._tested.column("prompt").numpy()
        return (prompt >= rows.start) & (prompt < rows.stop)

    def _least(self, claim: Claim) -> float:
        return self._thresholds.loss if claim == "necessary" else self._thresholds.kept

    def _accuracy(self, right: Float[ndarray, " target"]) -> float:
        """The share of the targets that are right."""
        return float(right[by_kind(self._tested)[self._kind]].mean())

    def _right_targets(self, sets: Sequence[Sequence[Head]]) -> list[Float[ndarray, " target"]]:
        """Which targets are right with each set ablated; sets of the same heads are measured once."""
        if asked := [heads for heads in dict.fromkeys(map(tuple, sets)) if heads not in self._whole]:
            values, engine = self._accuracies(self._tested, asked)
            self._provenance = self._provenance or provenance_of("localize", self._model, self._tested, engine)
            self._whole |= dict(zip(asked, values, strict=True))
        return [self._whole[tuple(heads)] for heads in sets]

    def _table(self, sets: Sequence[_Set], right: Sequence[Float[ndarray, " target"]]) -> Table:
        """Accuracy with each set ablated, from which targets are right."""
        kinds, targets = by_kind(self._tested), self._tested.column("prompt").numpy()
        means, weights = means_by_prompt(self._tested, targets, right, list(kinds.values()))
        weights[np.isnan(means)] = 0  # prompts on which a control set was not measured
        measured = pd.DataFrame({"kind": list(kinds), "metric": "accuracy"})
        keys = pd.DataFrame([(name, draw) for name, draw, _ in sets], columns=["ablated", "draw"])
        keys = keys.astype({"draw": "Int64"}).merge(measured, how="cross")
        assert self._provenance is not None
        return Table.from_prompts(keys, means, weights, self._provenance)

    def verdicts(self, named: Sequence[Head], group_ablations: Table) -> tuple[Verdict, ...]:
        """Returns whether the named heads are necessary and whether they suffice, from what `ablate` returned."""
        claims: tuple[Claim, ...] = ("necessary", "sufficient") if named else ()
        return tuple(self._verdict(claim, named, group_ablations) for claim in claims)

    def verdicts_of_roles(
        self, heads_by_role: Mapping[str, Sequence[Head]], draws: int, seed: int
    ) -> tuple[Verdict, ...]:
        """Returns for each role whether its heads are necessary; none where all named heads have one role.

        Control sets are drawn from the heads that were named for no role: those of other roles may be necessary too.
        Half of them are of the same layers, half of similar scores, as far as they differ.
        """
        of_roles = {role: heads for role, heads in heads_by_role.items() if heads}
        if len({frozenset(heads) for heads in of_roles.values()}) < 2:
            return ()
        unnamed = self._without([head for heads in of_roles.values() for head in heads])
        tests = []
        for heads in of_roles.values():
            kinds = self.controls(heads, draws, seed, unnamed)
            pairs = zip_longest(kinds["layers"], kinds["scores"])
            distinct = {tuple(sorted(drawn)): None for pair in pairs for drawn in pair if drawn is not None}
            controls = {"unnamed": [list(drawn) for drawn in distinct][:draws]}
            tests.append(self._test([("nothing", None, ())], heads, controls, ("necessary",)))
        return tuple(
            self._verdict("necessary", heads, accuracies, role=role)
            for (role, heads), accuracies in zip(of_roles.items(), tests, strict=True)
        )

    def verdicts_of_smallest(self, named: Sequence[Head], draws: int, seed: int) -> tuple[Verdict, ...]:
        """Returns whether the smallest sets that are found on the other prompts are necessary, or suffice, on these."""
        found = self._smallest(named) if named else {}
        sets: list[tuple[Claim, list[Head]]] = [
            (claim, heads) for claim, heads in found.items() if set(heads) not in (set(named), set(self._heads))
        ]
        nothing: list[_Set] = [("nothing", None, ())]
        return tuple(
            self._verdict(
                claim, heads, self._test(nothing, heads, self.controls(heads, draws, seed), (claim,)), smallest=True
            )
            for claim, heads in sets
        )

    def _smallest(self, named: Sequence[Head]) -> dict[Claim, list[Head]]:
        """The smallest sets found on the prompts that do not test, each a beginning of one order of the heads.

        Named heads come first, then all others, each by the loss of log-probability when it is ablated alone. The
        necessary set costs nearly as much accuracy as all named heads; the sufficient one keeps nearly all.
        """
        losses = ablate_heads(self._model, self._discovery, metrics=("log_prob",), options=self._options)
        loss = dict(zip(self._heads, losses.where(kind=self._kind).frame["value"], strict=True))
        order = sorted(named, key=lambda head: loss[head]) + sorted(self._without(named), key=lambda head: loss[head])
        intact, all_named = self._right(((), named))
        lost, needed = intact - all_named, self._thresholds
        sufficient = _first(len(order), lambda size: self._right([order[size:]])[0] >= needed.kept * intact)
        found: dict[Claim, list[Head]] = {"sufficient": order[:sufficient]}
        if lost < needed.loss:
            return found
        least = intact - max(needed.loss, needed.kept * lost)
        necessary = _first(len(named), lambda size: self._right([order[:size]])[0] <= least)
        return {"necessary": order[:necessary], **found}

    def _right(self, sets: Sequence[Sequence[Head]]) -> list[float]:
        """The accuracy with each set ablated, on the prompts that do not test."""
        right, _ = self._accuracies(self._discovery, sets)
        return right[:, by_kind(self._discovery)[self._kind]].mean(1).tolist()

    def _verdict(
        self, claim: Claim, heads: Sequence[Head], accuracies: Table, *, smallest: bool = False, role: str | None = None
    ) -> Verdict:
        """Reads a verdict from what `ablate` returned for a set."""
        frame: Any = accuracies.where(kind=self._kind).frame
        by_name: dict[str, Any] = dict(iter(frame.groupby("ablated")))
        prefix, name = ("", "named") if claim == "necessary" else ("rest of ", "rest")
        tested = by_name.get(name, by_name["nothing"]).iloc[0]  # all heads were named: there is no rest
        kinds = {kind: by_name.get(f"{prefix}{row}") for kind, row in _ROWS.items()}
        return Verdict(
            claim,
            tuple(heads),
            len(self._heads),
            float(by_name["nothing"]["value"].iloc[0]),
            float(tested["value"]),
            float(tested["low"]),
            float(tested["high"]),
            {kind: tuple(map(float, rows["value"])) for kind, rows in kinds.items() if rows is not None},
            self._least(claim),
            self._thresholds.alpha,
            smallest,
            role,
        )

    def _accuracies(
        self, prompts: Prompts, sets: Sequence[Sequence[Head]], rows: slice = slice(None)
    ) -> tuple[Float[ndarray, "set target"], str]:
        """Whether each target of some prompts is right with each set ablated to its mean, and the engine that ran."""
        # Means of the intact model for all sets, also where earlier heads are ablated: a set then differs from another
        # by its heads alone. They are those of all prompts, also where some are measured.
        baseline = ablation_baseline(self._model, prompts, "mean", options=self._options)
        edit_sets = [[Ablate(heads, how="mean", reference=baseline)] if heads else [] for heads in sets]
        targets = TargetMetrics.of(prompts, ("accuracy",))
        some = targets if rows == slice(None) else targets.select(rows)
        values, engine = some.measure_edited(self._model, edit_sets, options=self._options)
        return values[0], engine

    def _without(self, heads: Sequence[Head]) -> list[Head]:
        return [head for head in self._heads if head not in heads]


def layer_matched(
    heads: Sequence[Head], others: Sequence[Head], generator: np.random.Generator, width: int = 0
) -> list[Head]:
    """Returns as many of `others` as there are heads, each of the layer of one of them; where a layer lacks them, any.

    Args:
        heads: The set that is tested.
        others: The heads to draw from.
        generator: Which heads of a layer are taken, and whose turn is first.
        width: How many layers away a head may be.
    """
    return _matched(
        heads, others, generator, lambda head, left: [other for other in left if abs(other[0] - head[0]) <= width]
    )


def score_matched(
    heads: Sequence[Head],
    others: Sequence[Head],
    scores: Mapping[str, Float[ndarray, "layer head"]],
    generator: np.random.Generator,
    caliper: float = CALIPER,
) -> list[Head]:
    """Returns as many of `others` as there are heads, each like one of them in the role in which that scores best.

    Where no other head scores within the caliper, one of the same layer is taken, or any.

    Args:
        heads: The set that is tested.
        others: The heads to draw from.
        scores: For each role the scores of all heads.
        generator: Which of the heads that are alike is taken, and whose turn is first.
        caliper: How far a score may lie from that of the head for which a control is taken.
    """

    def alike(head: Head, left: Sequence[Head]) -> list[Head]:
        of_role = max(scores.values(), key=lambda grid: np.nan_to_num(grid[head], nan=-np.inf))
        close = [other for other in left if abs(of_role[other] - of_role[head]) <= caliper]
        return close or [other for other in left if other[0] == head[0]]

    return _matched(heads, others, generator, alike)


def _matched(
    heads: Sequence[Head],
    others: Sequence[Head],
    generator: np.random.Generator,
    alike: Callable[[Head, Sequence[Head]], Sequence[Head]],
) -> list[Head]:
    """As many of `others` as there are heads, each drawn from those that are like one of them, or from all."""
    drawn: list[Head] = []
    for place in generator.permutation(len(heads)):
        left = [other for other in others if other not in drawn]
        if not left:
            break
        candidates = alike(heads[place], left) or left
        drawn.append(candidates[int(generator.integers(len(candidates)))])
    return drawn


def _distinct(draw: Callable[[int], Sequence[Head]], draws: int, wider: int) -> list[list[Head]]:
    """Sets that all differ, since a set that is drawn again adds nothing to a p-value; fewer where there are no more.

    Args:
        draw: Draws a set, of heads that are the less like the tested ones, the higher its argument.
        draws: How many sets.
        wider: The highest argument.
    """
    found: dict[tuple[Head, ...], None] = {}
    for width in range(wider + 1):
        for _ in range(_TRIES * draws):
            if len(found) == draws:
                break
            found[tuple(sorted(draw(width)))] = None
    return [list(heads) for heads in found]


def _first(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest size from 1 to `most` that is enough, by bisection: as if every larger one were, and `most` is."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
