"""The first stage of `localize`: which heads attend as a role requires, and what the null of a role leaves open."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.redrawn_keys import fixed_offset, fixed_rank, in_one_place
from align_circuits.heads.renamed_tokens import redraws_tokens
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.head_names import Head
from align_circuits.prompts.prompts import Prompts
from align_circuits.tables.p_values import benjamini_hochberg, p_above_zero
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import Task

UNNAMEABLE = "No head can be named"
"""How a note begins that says that the prompts allow no name."""

NAMELESS = f"{UNNAMEABLE} for any role"
"""How it begins where that is so for all roles."""

ALIGNERS = ("align_query", "align_key")
"""The roles that follow an alignment."""

Candidate = tuple[Head, str]
"""A head and a role."""


def chance_of(prompts: Prompts, roles: Sequence[str]) -> dict[str, float]:
    """Returns the score of a head that attends to all candidates of a role alike: the mean share that are keys."""
    chance = {}
    for role in roles:
        relation, shares = prompts.relations[role], []
        for rows in torch.arange(len(relation)).split(4096):  # a row takes a place for each token of its prompt
            keys, candidates = relation.expand(rows)
            shares.append(keys.sum(1) / candidates.sum(1))
        chance[role] = float(torch.cat(shares).mean())
    return chance


def attending(
    scores: Table, roles: Sequence[str], needed: Thresholds, chance: Mapping[str, float] | None = None
) -> list[Candidate]:
    """Returns the heads that attend as a role requires, by role; `chance` is what `chance_of` returned."""
    attention = np.stack([scores.to_array(f"{role}_attention") for role in roles])
    best = attention.max(0)
    return [
        ((int(layer), int(head)), role)
        for role, on_keys in zip(roles, attention, strict=True)
        for layer, head in np.argwhere(
            needed.attends(scores.to_array(role), on_keys, best, (chance or {}).get(role, 0.0))
        )
    ]


def attending_diffusely(
    scores: Table, roles: Sequence[str], needed: Thresholds, chance: Mapping[str, float] | None = None
) -> list[Candidate]:
    """Returns the heads that attend most to the aligned symbol among the symbols, and to other tokens far more."""
    aligners = [role for role in roles if role in ALIGNERS]
    wide = attending(scores, aligners, replace(needed, attention=0.0), chance) if aligners else []
    enough = attending(scores, roles, needed, chance)
    return [candidate for candidate in wide if candidate not in enough]


def causal_p_values(effects: Sequence[Table], signs: Sequence[int] = (1, 1)) -> dict[Head, float]:
    """Returns the p-value of each head's effects on the targets' log-probability, each of which may be what matters.

    Of no effect above 0, times the sign: the smallest of the one-sided p-values of the tables, times their number
    (Bonferroni), at most 1.
    """
    smallest: dict[Head, float] = {}
    for table, sign in zip(effects, signs, strict=True):
        rows = table.where(kind="all", metric="log_prob") if len(table) else table
        if rows.values is None or rows.weights is None:  # of no head
            continue
        for head, p in zip(rows.head_indices, p_above_zero(sign * rows.values, rows.weights), strict=True):
            smallest[head] = min(smallest.get(head, 1.0), float(p))
    return {head: min(1.0, len(effects) * p) for head, p in smallest.items()}


def mattering(effects: Table, needed: Thresholds, sign: int = 1) -> set[Head]:
    """Returns the heads of which the effect on the targets' log-probability, times the sign, is large enough."""
    rows = effects.where(kind="all", metric="log_prob") if len(effects) else effects
    enough = sign * rows.frame["value"].to_numpy(dtype=float) >= needed.effect
    return {head for head, is_enough in zip(rows.head_indices, enough, strict=True) if is_enough}


def corrected(
    p: Mapping[str, Float[ndarray, "layer head"]],
    families: Sequence[Sequence[Candidate]],
    matters: Mapping[Candidate, float],
) -> dict[Candidate, float]:
    """Returns the p-value of each candidate, corrected over its family (Benjamini and Hochberg, 1995).

    A candidate must attend so beyond its positional bias and matter as well, so its p-value is the larger of the two
    (the intersection-union test of Berger, 1982).

    Args:
        p: Of the attention in each role.
        families: Candidates that are corrected together.
        matters: The p-value of each candidate's effect.
    """
    q: dict[Candidate, float] = {}
    for family in families:
        both = np.array([max(float(p[role][head]), matters[head, role]) for head, role in family])
        q |= zip(family, benjamini_hochberg(both), strict=True)
    return q


def confounded_roles(prompts: Prompts, roles: Sequence[str]) -> list[str]:
    """Returns the aligners' roles in which a head that attends at a fixed distance would do as well."""
    return [role for role in roles if role in ALIGNERS and fixed_offset(prompts.relations[role]) > 0.5]


def hopeless_notes(prompts: Prompts, smallest: Mapping[str, float], fdr: float) -> list[str]:
    """Returns for which roles the prompts allow no name, whatever a head does, and what to do; nothing without such.

    Args:
        prompts: Those that test.
        smallest: The smallest p-value that they allow, by role (`smallest_p_values`).
        fdr: The largest share of false names.
    """
    hopeless = {role: p for role, p in smallest.items() if p > fdr}
    if not hopeless:
        return []
    told = NAMELESS if hopeless == smallest else f"{UNNAMEABLE} for {quoted(hopeless)}"
    allowed = " and ".join(f"{p:.2g} ({role})" for role, p in hopeless.items())
    measured = " Scores and effects of heads are measured all the same." * (hopeless == smallest)
    return [
        f"{told}: the smallest p-value that these prompts allow is {allowed}, and a name needs {fdr:g}. "
        f"{remedies(prompts, [*hopeless])}{measured}"
    ]


def quoted(names: Iterable[str]) -> str:
    """Returns names for a sentence, those of several words in quotes."""
    return " and ".join(f'"{name}"' if " " in name else name for name in names)


def remedies(prompts: Prompts, roles: Sequence[str]) -> str:
    """Returns which prompts allow smaller p-values for these roles, by what the null of each redraws, in sentences."""
    relations = {role: prompts.relations[role] for role in roles}
    in_order = [role for role, relation in relations.items() if relation.exchangeable and fixed_rank(relation)]
    by_distance = [role for role in roles if role == "previous"]
    by_prompt = [role for role, relation in relations.items() if relation.exchangeable or redraws_tokens(prompts, role)]
    by_place = [
        role
        for role, relation in relations.items()
        if role in ALIGNERS or (role not in (*by_prompt, *by_distance) and in_one_place(relation, prompts))
    ]
    others = [role for role in roles if role not in (*in_order, *by_distance, *by_place)]
    advice = {
        "Vary the order of the candidates of {}.": in_order,
        "For {} take longer texts, or a relation of your own: its p-value is among distances back.": by_distance,
        "Take more candidates for {}: its p-value is among them, not among prompts.": by_place,
        "Take more prompts for {}, or more candidate positions.": others,
    }
    return " ".join(sentence.format(quoted(of)) for sentence, of in advice.items() if of)


def position_notes(prompts: Prompts, roles: Sequence[str], unranked: Sequence[str] = ()) -> list[str]:
    """Returns for which relations a head's score may come from positions alone, and what to do, in sentences.

    Args:
        prompts: The prompts that heads are scored on.
        roles: Names of their relations.
        unranked: Relations of which another note already says that the order of their candidates is fixed.
    """
    # Aligners are tested on the control, which has another order, and `previous` is a position by definition.
    by_content = [role for role in roles if role not in (*ALIGNERS, "previous")]
    by_position = [role for role in by_content if not redraws_tokens(prompts, role)]
    notes = []
    if fixed := [role for role in by_position if in_one_place(prompts.relations[role], prompts)]:
        notes.append(
            f"The keys of {quoted(fixed)} are at the same positions in every prompt, so a head with a high score "
            "may follow positions rather than tokens: score it on prompts of other lengths to find out."
        )
    exchangeable = [role for role in by_content if prompts.relations[role].exchangeable and role not in unranked]
    if same := [role for role in exchangeable if fixed_rank(prompts.relations[role])]:
        notes.append(
            f"The keys of {quoted(same)} are always the same of their candidates, counted from the first, so no "
            "head can be told from one that always attends there: vary their order, or take other candidates."
        )
    return notes


def limits(
    task: Task, prompts: Prompts, roles: Sequence[str], smallest: Mapping[str, float], fdr: float
) -> tuple[str, ...]:
    """Returns what cannot be established for these roles on the prompts that test, in sentences."""
    notes = [
        f"{UNNAMEABLE} for {quoted([role])}: the prompts have no relation of that name."
        for role in task.roles
        if role not in prompts.relations
    ]
    notes += hopeless_notes(prompts, smallest, fdr)
    notes += position_notes(prompts, roles, unranked=[role for role in roles if smallest[role] > fdr])
    notes += task.caveats
    if confounded_roles(prompts, roles):
        notes.append(
            "All keys of the alignment are at one distance, so an aligner is named only if it follows the control "
            "alignment too: use phrases of 2 letters or more."
        )
    return tuple(notes)
