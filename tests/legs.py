"""Which tests wait for `make test-slow`: marks of cases of which the fast leg has a representative."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but the given ones are slow."""
    cases = [*cases]
    assert all(case in cases for case in fast), "a representative is no case"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def product(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations, the longest list first; the fast leg has each choice, the first ones once."""
    lists = [[*first], *([*other] for other in others)]
    fast = set()
    for step in range(len(lists[0])):
        rounds = itertools.accumulate((len(other) for other in lists[1:-1]), lambda done, size: done * size, initial=1)
        later = [
            (step + (step // done if done > 1 else 0)) % len(one) for done, one in zip(rounds, lists[1:], strict=True)
        ]
        fast.add((step, *later))
    assert all({place[at] for place in fast} == {*range(len(one))} for at, one in enumerate(lists)), (
        "a choice is left out"
    )
    combinations = itertools.product(*map(enumerate, lists))
    places = ((tuple(at for at, _ in each), [choice for _, choice in each]) for each in combinations)
    return [pytest.param(*values, marks=[] if place in fast else pytest.mark.slow) for place, values in places]
