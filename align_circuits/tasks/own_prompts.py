"""Prompts of one's own as a task: what `localize` and `tune` ask of a task, answered from a fixed set."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation
from align_circuits.tasks.rng import check_seed
from align_circuits.tasks.task import TOKEN_ROLES, Task

_ROW = "own_row"
"""The latent variable that says which of the own prompts each sampled one is."""


class OwnPrompts(Task):
    """A fixed set of prompts, with corrupted partners if there are any.

    Args:
        prompts: What is measured.
        corrupted: For each prompt its partner for activation patching, as `Prompts.from_pairs` returns it; by default
            another of the prompts, of the same length.
        roles: The relations that a head can be named for, as a list, or with what such a head does. By default those
            that were added to the prompts; where none was, induction, previous and duplicate.

    Raises:
        ValueError: Partners that do not match the prompts in number, or a role that is no relation of the prompts.
    """

    def __init__(
        self, prompts: Prompts, corrupted: Prompts | None = None, roles: Mapping[str, str] | Sequence[str] | None = None
    ) -> None:
        if corrupted is not None and len(corrupted) != len(prompts):
            raise ValueError(f"{len(corrupted)} corrupted prompts for {len(prompts)}: give a partner for each")
        self.prompts, self.corrupted = prompts, corrupted
        first = bool((prompts.targets["kind"] == "first").any())
        self.roles = _roles(prompts, roles)  # pyright: ignore[reportAttributeAccessIssue] - of this object, not its class
        self.target_name = "The first token of the answer" if first else "A token"  # pyright: ignore[reportAttributeAccessIssue]

    def sample(self, n: int, tokenizer: Any = None, seed: int = 0) -> Prompts:  # noqa: ARG002 - of the base class
        """Returns `n` of the prompts in random order, each as likely, related ones (`Prompts.group`) side by side.

        Raises:
            ValueError: There are fewer than `n`, or the seed is no integer from 0 to 2**63 - 1.
        """
        check_seed(seed)
        if n > len(self.prompts):
            raise ValueError(f"n={n}: there are {len(self.prompts)} prompts; ask for no more")
        generator = np.random.default_rng(seed)
        chosen = torch.from_numpy(generator.permutation(len(self.prompts))[:n])
        # `localize` and `split` cut prompts in two, which leaves only groups whole that stand side by side.
        order = chosen[_side_by_side(self.prompts, chosen, generator)]
        sampled = self.prompts[order]
        return replace(sampled, latent={**sampled.latent, _ROW: order})

    def split(self, seed: int, share: float = 0.2) -> "tuple[OwnPrompts, OwnPrompts]":
        """Returns the prompts in two parts, with about `share` of them in the second; related ones stay together.

        Where groups are of unequal sizes the second part has at most this share, but for a single smallest group.

        Raises:
            ValueError: Fewer than two groups of prompts.
        """
        order = self.sample(len(self.prompts), seed=seed).latent[_ROW]
        held = _held_out(self.prompts[order], len(order) - round((1 - share) * len(order)))
        halves = (order[~held], order[held])
        return tuple(  # pyright: ignore[reportReturnType]
            OwnPrompts(self.prompts[rows], None if self.corrupted is None else self.corrupted[rows], self.roles)
            for rows in halves
        )

    def pairs(self, prompts: Prompts, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Returns prompts that `sample` returned, with their partners."""
        if self.corrupted is None:
            return super().pairs(prompts, seed)
        return prompts, self.corrupted[prompts.latent[_ROW]]


def as_task(
    source: Task | Prompts, corrupted: Prompts | None = None, roles: Mapping[str, str] | Sequence[str] | None = None
) -> Task:
    """Returns prompts as a task, and a task as it is.

    Raises:
        TypeError: Corrupted prompts or roles beside a task.
    """
    if isinstance(source, Prompts):
        return OwnPrompts(source, corrupted, roles)
    if corrupted is not None or roles is not None:
        raise TypeError("corrupted= and roles= go with prompts; a task says both itself (Task.corrupt, Task.roles)")
    return source


def first_half(prompts: Prompts) -> int:
    """Returns how many prompts make the first half: half of them, or as near as allowed by groups, which stay whole.

    Raises:
        ValueError: Every cut would part related prompts.
    """
    near = len(prompts) // 2
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompt, which cannot be split: give at least two")
    if prompts.group is None:
        return min(max(near, 1), len(prompts) - 1)
    _, group = prompts.group.unique(return_inverse=True)
    last = torch.zeros_like(group).scatter_reduce(0, group, torch.arange(len(group)), "amax")[group]  # of its group
    # A cut parts no group where each one that began before it has ended before it.
    ends = (last.cummax(0).values[:-1] < torch.arange(1, len(last))).nonzero()[:, 0] + 1
    if not len(ends):
        raise ValueError(
            "no cut leaves all groups whole: give prompts of at least two groups, and a task's with related ones side "
            "by side"
        )
    return int(ends[(ends - near).abs().argmin()])


def _held_out(prompts: Prompts, most: int) -> Bool[Tensor, " prompt"]:
    """Which prompts make whole groups of at most so many: the last groups that fit, or one of the smallest."""
    _, group = (torch.arange(len(prompts)) if prompts.group is None else prompts.group).unique(return_inverse=True)
    sizes = group.bincount()
    if len(sizes) < 2:
        raise ValueError(
            f"{len(prompts)} prompts of {len(sizes)} group, which cannot be split: give at least two groups"
        )
    from_last = [*dict.fromkeys(reversed(group.tolist()))]
    held, left = torch.zeros(len(sizes), dtype=torch.bool), max(most, min(sizes.tolist()))
    for each in from_last:
        if sizes[each] <= left:
            held[each], left = True, left - int(sizes[each])
    return held[group]


def _side_by_side(
    prompts: Prompts, chosen: Int[Tensor, " prompt"], generator: np.random.Generator
) -> Int[Tensor, " prompt"]:
    """An order of the chosen prompts in which those of one group stand side by side, the groups in random order."""
    if prompts.group is None:
        return torch.arange(len(chosen))
    _, group = prompts.group[chosen].unique(return_inverse=True)
    rank = torch.from_numpy(generator.permutation(len(group)))  # of each group; some are left over
    return torch.argsort(rank[group], stable=True)


def _roles(prompts: Prompts, roles: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """The roles with what a head of each does."""
    if isinstance(roles, str):
        raise TypeError(f"roles={roles!r}: give a list of relations, [{roles!r}]")
    if roles is None:
        roles = [name for name in prompts.relations if name not in TOKEN_ROLES] or list(TOKEN_ROLES)
    if unknown := [name for name in roles if name not in prompts.relations]:
        raise ValueError(f"no relation {unknown[0]!r} in these prompts; they have {', '.join(prompts.relations)}")
    if isinstance(roles, Mapping):
        return dict(roles)
    return {name: TOKEN_ROLES.get(name) or _in_words(prompts.relations[name], prompts.positions) for name in roles}


def _in_words(relation: Relation, positions: Mapping[str, Int[Tensor, " prompt"]]) -> str:
    """What a head of a relation does, in the names of positions where they tell it."""
    column_of = {place: column[relation.prompt] for place, column in positions.items()}
    row, (key, _) = torch.arange(len(relation)), relation.expand()
    queries = [place for place, column in column_of.items() if torch.equal(column, relation.query)]
    keys = [place for place, column in column_of.items() if (column >= 0).all() and key[row, column].all()]
    if not (queries and keys) or int(key.sum()) != len(keys) * len(relation):
        return f"attends from the queries of {relation.name} to its keys"
    query = "the last token" if "END" in queries else f'"{queries[0]}"'
    return f"attends from {query} to " + " and ".join(f'"{name}"' for name in keys)
