"""The base class of all tasks: what `localize` and `tune` know of a task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar, get_args

import torch

from align_circuits.checks import WrongArgument
from align_circuits.prompts.prompts import Prompts
from align_circuits.tasks.partners import next_unrelated
from align_circuits.tasks.rng import Rng

TOKEN_ROLES: Mapping[str, str] = {
    "induction": "attends to the tokens that followed earlier copies of its token",
    "previous": "attends to the token before",
    "duplicate": "attends to earlier copies of its own token",
}
"""The roles that need nothing but token ids, which every task of text has."""


class Task(ABC):
    """A source of prompts whose relations are known. Subclass it to use `localize` on a task of your own.

    Only `sample` must be defined. The relations of its prompts that a head can be named for stand in `roles`.

    >>> class Echo(Task):
    ...     def sample(self, n, tokenizer=None, seed=0):
    ...         generator = torch.Generator().manual_seed(seed)
    ...         return Prompts.from_tokens(torch.randint(50, (n, 8), generator=generator).repeat(1, 2))
    >>> clean, corrupted = Echo().pairs(Echo().sample(3))
    >>> bool((corrupted.tokens == clean.tokens.roll(1, 0)).all())
    True
    """

    roles: ClassVar[Mapping[str, str]] = TOKEN_ROLES
    """The relations that a head can be named for, in the order of reports, each with what such a head does."""
    references: ClassVar[tuple[str, ...]] = ()
    """The reference accuracies that targets carry, of `prompts.REFERENCES`."""
    target_name: ClassVar[str] = "A token"
    """What the first target of a phrase is called in a report, at the start of a sentence."""
    control_lesson: ClassVar[str] = "on the control: they follow something that it changes"
    """What a report says of heads that score low on `control`, at the end of a sentence."""

    @abstractmethod
    def sample(self, n: int, tokenizer: Any = None, seed: int = 0) -> Prompts:
        """Draws `n` prompts with their targets and relations.

        Args:
            n: How many prompts.
            tokenizer: The tokenizer of the model that will read them; None for tasks that make token ids themselves.
            seed: Which prompts, from 0 to 2**63 - 1.
        """

    def corrupt(self, prompts: Prompts, *, seed: int = 0) -> Prompts:
        """Returns prompts that differ from the given ones in what the answer depends on, with the same targets.

        Raises:
            NotImplementedError: The task has no such prompts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define corrupt; Task.pairs needs none")

    def pairs(self, prompts: Prompts, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Returns clean prompts and their corrupted partners for activation patching.

        The partners come from `corrupt`, if the task defines it, and from `exchanged` otherwise.
        """
        # Not by catching NotImplementedError, which would also hide one that a user's `corrupt` raises by mistake.
        if type(self).corrupt is Task.corrupt:
            return exchanged(prompts)
        corrupted = self.corrupt(prompts, seed=seed)
        _check_made(self, "corrupt", corrupted)
        if torch.equal(corrupted.inputs, prompts.inputs):
            raise ValueError(
                f"{type(self).__name__}.corrupt returned the prompts as they were, so that a patch changes nothing: "
                "change, in a copy (dataclasses.replace), the tokens that the answer depends on"
            )
        return prompts, corrupted

    def control(self) -> "Task | None":
        """Returns the same task with another alignment, or None if it has no alignment to change.

        A head that reads the alignment from the prompt keeps its score on the control.
        """
        return None

    @property
    def caveats(self) -> tuple[str, ...]:
        """What cannot be established on this task, in sentences."""
        return ()


def sampled(task: Task, n: int, tokenizer: Any, seed: int) -> Prompts:
    """Returns what a task samples, related prompts side by side.

    Raises:
        WrongArgument: `sample` lacks parameters or returns no prompts.
        ValueError: It returns fewer prompts than it was asked for, or more.
    """
    takes, name = signature(task.sample), type(task).__name__
    try:
        takes.bind(n, tokenizer, seed=seed)
    except TypeError:
        given = ", ".join(takes.parameters) or "nothing"
        raise WrongArgument(f"{name}.sample takes {given}: write sample(self, n, tokenizer=None, seed=0)") from None
    prompts = task.sample(n, tokenizer, seed=seed)
    _check_made(task, "sample", prompts)
    if len(prompts) != n:
        raise ValueError(f"{name}.sample returned {len(prompts)} prompts and was asked for n={n}: return n of them")
    if prompts.group is None or len(prompts.group.unique_consecutive()) == prompts.n_groups:
        return prompts
    # `localize` cuts prompts in two, which leaves only groups whole that stand side by side. Their order is drawn: by
    # their first prompts large ones would all be in the first half.
    rank, (_, group) = Rng(seed, "sampled").order("groups", prompts.n_groups), prompts.group.unique(return_inverse=True)
    return prompts[rank[group].argsort(stable=True)]


def _check_made(task: Task, method: str, prompts: Any) -> None:
    if not isinstance(prompts, Prompts):
        raise WrongArgument(
            f"{type(task).__name__}.{method} returned a {type(prompts).__name__}: return Prompts, such as those of "
            "Prompts.from_texts, from_pairs or from_tokens"
        )


def check_least(config: Any, **least: int) -> None:
    """Raises a ValueError if a number of a configuration is smaller than it may be."""
    for name, allowed in least.items():
        if (value := getattr(config, name)) < allowed:
            raise ValueError(f"{name} is {value}: give at least {allowed}")


def check_choices(config: Any, **choices: Any) -> None:
    """Raises a ValueError if a setting of a configuration is none of its choices, a `Literal` or names."""
    for name, allowed in choices.items():
        if (value := getattr(config, name)) not in (known := get_args(allowed) or [*allowed]):
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(repr, known))}")


def exchanged(prompts: Prompts) -> tuple[Prompts, Prompts]:
    """Returns the prompts and, for each, another one of the same length, with the targets of the first.

    A partner is related to its prompt only where most prompts of a length are (`next_unrelated`). They are ordered by
    length; one that is alone in its length has no partner and is left out.

    Raises:
        ValueError: No two prompts have the same length.
    """
    length = prompts.mask.sum(1)
    clean, partner = [], []
    for rows in (torch.nonzero(length == value)[:, 0] for value in length.unique()):
        if len(rows) > 1:
            clean += rows.tolist()
            partner += rows[next_unrelated(prompts[rows], step=-1)].tolist()
    if len(prompts) == 1:
        raise ValueError("one prompt alone has no partner: give more prompts, of more groups, or corrupted prompts")
    if not clean:
        raise ValueError(
            "no two prompts have the same length, so none can be the other's partner: give corrupted prompts, as "
            "Prompts.from_pairs makes them"
        )
    kept = prompts[clean]
    same = {name: getattr(kept, name) for name in ("targets", "correct", "relations", "positions", "group")}
    # A row of `own_correct` would belong to a target of the partner, which has the targets of the first now.
    return kept, replace(prompts[partner], own_correct=None, **same)
