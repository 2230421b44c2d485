"""Control sets: heads drawn to be like a set that is tested, and the order in which the sets are measured."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.heads.verdicts import ROUNDING, Claim, as_extreme
from align_circuits.hooks.head_names import Head

CALIPER = 0.25
"""How far a score may lie from that of the head for which a control is taken."""

MOST_CONTROLS = 10_000
"""More control sets would be drawn, and run, for days."""

_TRIES = 3
"""How many sets are drawn for each that is wanted, before heads that are less alike are drawn too."""


def check_controls(count: int) -> None:
    """Raises a ValueError if there cannot be so many control sets."""
    if not 0 <= count <= MOST_CONTROLS:
        raise ValueError(
            f"n_controls={count}: give the number of sets of random heads to ablate, 0 for none, at most "
            f"{MOST_CONTROLS:,}"
        )


def controls_of(
    heads: Sequence[Head],
    others: Sequence[Head],
    scores: Mapping[str, Float[ndarray, "layer head"]],
    draws: int,
    seed: int,
) -> dict[str, list[list[Head]]]:
    """Returns sets of as many of `others` as there are heads, `draws` of each kind (`CONTROLS`); none without others.

    All sets of a kind differ. Where heads of the same layers, or of similar scores (of any role), make too few, heads
    of the next layers are drawn too, or of scores that are less similar.
    """
    if not others:
        return {"layers": [], "scores": []}
    # A generator for each kind, so that the sets of one stay the same however many tries the other needs.
    by_layer, by_score = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    last_layer = len(next(iter(scores.values()))) - 1
    return {
        "layers": _distinct(lambda width: layer_matched(heads, others, by_layer, width), draws, last_layer),
        # Up to four calipers, which is 1: scores lie in [0, 1], so any head with a score is alike then.
        "scores": _distinct(lambda width: score_matched(heads, others, scores, by_score, CALIPER * 2**width), draws, 2),
    }


def half_of_each(sets: Mapping[str, Sequence[Sequence[Head]]], draws: int) -> list[list[Head]]:
    """Returns sets of both kinds by turns, as far as they differ."""
    by_turns = [drawn for pair in zip_longest(*sets.values()) for drawn in pair if drawn is not None]
    return [list(heads) for heads in dict.fromkeys(tuple(sorted(drawn)) for drawn in by_turns)][:draws]


def next_to_measure(
    claim: Claim, tested: Float[ndarray, " target"], right: Float[ndarray, "draw target"]
) -> int | None:
    """Returns the control set to go on with: that most likely to do as well as the tested set, which settles the claim.

    From which targets are right with the tested set and with the control sets (NaN where it is not known): a set that
    does as well so far, on the targets that it was measured on; else one that was not begun; else that which falls
    short by the least. None if all are measured or cannot do as well.
    """
    known = ~np.isnan(right)
    count = np.maximum(known.sum(1), 1)
    behind = (1 if claim == "necessary" else -1) * (np.nan_to_num(right).sum(1) - (known * tested).sum(1)) / count
    turn = np.where(behind <= ROUNDING, 0, 2)
    turn[~known.any(1)] = 1
    left = np.flatnonzero(~known.all(1) & _may_do_as_well(claim, float(tested.mean()), right))
    return int(min(left, key=lambda draw: (turn[draw], behind[draw]))) if len(left) else None


def measured_beside(
    claim: Claim,
    tested: Float[ndarray, " target"],
    kinds: Sequence[str],
    batches: Sequence[Bool[ndarray, " target"]],
    measure: Callable[[int, int], Float[ndarray, " target"]],
    decides: Bool[ndarray, " target"],
    alpha: float,
) -> Float[ndarray, "draw target"]:
    """Returns which targets are right with each control set ablated, as far as the verdict depends on it.

    A set is measured batch by batch, until it cannot do as well as the tested set, whatever the other targets show.
    Once so many of a kind do as well that its p-value will be above `alpha`, the claim is lost: no other is measured.
    So the verdict is that of all draws, whichever comes first, and a p-value which counts those that are not known as
    doing as well is never below that of all draws.

    `measure` takes a control set and a batch, and returns which of its targets are right. What was not measured is NaN,
    and all of it if it is open whether the set does as well.
    """
    right, begun, kind_of = np.full((len(kinds), len(tested)), np.nan), [0] * len(kinds), np.array(kinds)
    value = float(tested[decides].mean())
    while (draw := next_to_measure(claim, tested[decides], right[:, decides])) is not None:
        right[draw, batches[begun[draw]]] = measure(draw, begun[draw])
        begun[draw] += 1
        complete = ~np.isnan(right[:, decides]).any(1)
        as_well = complete & as_extreme(claim, right[:, decides].mean(1), value)
        alike = kind_of == kind_of[draw]
        if as_well[draw] and (1 + as_well[alike].sum()) / (1 + alike.sum()) > alpha:
            # What has not fallen short yet might still do as well, so it counts as unknown, not by its first batches.
            right[~complete & _may_do_as_well(claim, value, right[:, decides])] = np.nan
            break
    return right


def _may_do_as_well(claim: Claim, value: float, right: Float[ndarray, "draw target"]) -> Bool[ndarray, " draw"]:
    """Which control sets may still cost as much accuracy as the tested set, or keep as much, whatever is not known."""
    return as_extreme(claim, np.nan_to_num(right, nan=float(claim == "sufficient")).mean(1), value)


def layer_matched(
    heads: Sequence[Head], others: Sequence[Head], generator: np.random.Generator, width: int = 0
) -> list[Head]:
    """Returns as many of `others` as there are heads, each within `width` layers of one; where these lack them, any."""
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
    """

    def alike(head: Head, left: Sequence[Head]) -> list[Head]:
        # A NaN that comes first would win any comparison of `max`, since nothing is greater than it.
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
    # In random order, since the first heads leave fewer that are alike to the others.
    for turn in generator.permutation(len(heads)):
        left = [other for other in others if other not in drawn]
        if not left:
            break
        candidates = alike(heads[turn], left) or left
        drawn.append(candidates[int(generator.integers(len(candidates)))])
    return drawn


def _distinct(draw: Callable[[int], Sequence[Head]], draws: int, widest: int) -> list[list[Head]]:
    """Sets that all differ, since a set that is drawn again adds nothing to a p-value; fewer where there are no more.

    `draw` takes a width from 0 to `widest`: the higher, the less alike are the heads.
    """
    sets: dict[tuple[Head, ...], None] = {}
    for width in range(widest + 1):
        for _ in range(_TRIES * draws):
            if len(sets) == draws:
                break
            sets[tuple(sorted(draw(width)))] = None
    return [list(heads) for heads in sets]


def first_enough(most: int, enough: Callable[[int], bool]) -> int:
    """Returns the least size from 1 to `most` that is enough, by bisection: as if `most` and every larger one were."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
