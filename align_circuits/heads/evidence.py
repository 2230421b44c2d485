"""The second stage of `localize`: the tables of single heads and of sets of heads that names and verdicts rest on."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.candidates import Candidate, causal_p_values, corrected
from align_circuits.heads.verdicts import CONTROL_ROWS
from align_circuits.hooks.head_names import Head
from align_circuits.run.pairs import Pair
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
