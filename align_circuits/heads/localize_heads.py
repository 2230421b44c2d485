"""Finds the attention heads that have a role in a task, and tests whether the model needs them."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.heads.ablate import ablate_heads
from align_circuits.heads.attention import attention_from
from align_circuits.heads.head_groups import GroupMember, GroupSearch
from align_circuits.heads.head_sets import HeadSets, Verdict
from align_circuits.heads.interchange_interventions import answers_differ, interchange
from align_circuits.heads.one_pass import score_and_test
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.permutation_tests import fixed_offset, fixed_rank, in_one_place
from align_circuits.heads.renaming_test import redraws_tokens
from align_circuits.heads.score import score_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.heads import Head, describe
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.protocol import HookedModel, provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.edited_runs import shared_runs
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.intervals import benjamini_hochberg
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.own_prompts import OwnPrompts, as_task, first_half
from align_circuits.tasks.task import Task

ALIGNERS = ("align_query", "align_key")
"""The roles that follow an alignment."""

LARGE_SHARE = 1 / 3
"""From this share of the model's heads on, `localize` says that the named heads are many."""

Candidate = tuple[Head, str]
"""A head and a role."""


@dataclass(frozen=True, eq=False)
class Localization:
    """The heads that `localize` named, with all its evidence."""

    table: Table
    """Keyed by level, layer, head, role and metric. For every head `"score"`, `"attention"` (to keys, of all),
    `"p"` and, if the task has a control, `"control"` (the score on it); for candidates also `"q"` (p corrected),
    `"ablation"` (the loss by mean ablation, in nats) and `"denoising"` (the gain by patching, in nats)."""
    heads_by_role: Mapping[str, tuple[Head, ...]]
    """The heads named for each role, best score first."""
    patching_effects: Table
    """The effect of patching each candidate into corrupted prompts: `patch_heads`."""
    ablation_effects: Table
    """The effect of ablating each candidate: `ablate_heads`."""
    group_ablations: Table
    """Accuracy by `kind` of target with heads ablated to their means: `ablated` is `"nothing"`, a role, a role's group
    (`"lookup, group"`), `"named"` (all named heads), `"random"` (as many others of the same layers, one `draw` each),
    `"matched"` (as many others of similar scores), `"rest"` (all heads but those named), or all heads but the random
    ones (`"rest of random"`) or the matched ones (`"rest of matched"`). Control sets are measured on as many prompts as
    show whether they do as well as the named heads: `n` counts the targets."""
    prompts: Prompts
    """The prompts that the candidates were tested on."""
    example_attention: Mapping[Head, Float[Tensor, "row pos"]]
    """The attention of each named head on the first of these prompts, from `example_positions`."""
    example_positions: list[int]
    """The positions of its test example, and the one before."""
    thresholds: Thresholds
    """What a head had to reach."""
    roles: Mapping[str, str]
    """What a head of each role does."""
    target_name: str = "A token"
    """What the first target of a phrase is called, as in `Task`."""
    notes: tuple[str, ...] = ()
    """What cannot be established on this task."""
    verdicts: tuple[Verdict, ...] = ()
    """Whether the named heads are necessary and whether they suffice, for the first targets of phrases where there are
    such; whether the heads of each role are necessary; and both for the smallest sets that were found on the prompts
    that chose the candidates, if asked for. Each is tested at `thresholds.alpha`, without correction for their number.
    """
    diffuse_aligners: Mapping[str, tuple[Head, ...]] = field(default_factory=dict)
    """Heads of `align_query` and `align_key` that pass every test but one: they keep less than `thresholds.attention`
    of their attention on the aligned symbol. They are not in `heads_by_role`, and are not ablated with the others."""
    interchanges: Table | None = None
    """Where both prompts of the pairs have answers that are known and differ: `interchange` of each candidate, of the
    heads of each role, of all named heads, and of as many random ones (`"random 0"`, ...). Else None."""
    groups: Mapping[str, tuple[GroupMember, ...]] = field(default_factory=dict)
    """If asked for, the members of each role's group: also heads that stand in for each other (`head_groups`)."""

    def __repr__(self) -> str:
        named = [f"{role}: {describe(heads)}" for role, heads in self.heads_by_role.items() if heads]
        name = self.prompts.task.get("name", "tokens")
        return f"Localization({'; '.join(named) or 'no head named'}; tested on {len(self.prompts)} x {name})"

    def _repr_html_(self) -> str:
        shown = ("score", "attention", "q", "ablation", "denoising", "control")
        keyed: Any = self.table.frame.set_index(["layer", "head", "role", "metric"])["value"]
        measured = dict(zip(keyed.index, keyed, strict=True))
        rows = [
            {"role": role, "head": describe([head])} | {name: measured.get((*head, role, name)) for name in shown}
            for role, heads in self.heads_by_role.items()
            for head in heads
        ]
        table = pd.DataFrame(rows).to_html(index=False, float_format="{:.2g}".format, na_rep="") if rows else ""
        return f"<p>{html.escape(self.summary)}</p>{table}"

    def heads(self, role: str) -> list[Head]:
        """Returns the heads named for a role, best first.

        Raises:
            KeyError: No such role.
        """
        if role not in self.heads_by_role:
            raise KeyError(f"no role {role!r}: choose one of {', '.join(self.heads_by_role)}")
        return list(self.heads_by_role[role])

    def group(self, role: str) -> list[Head]:
        """Returns the members of a role's group, those named one by one among them, as far as groups were asked for.

        Raises:
            KeyError: No such role.
        """
        return [member.head for member in self.groups.get(role, ())] or self.heads(role)

    @property
    def named_heads(self) -> list[Head]:
        """All heads that were named for a role."""
        return sorted({head for heads in self.heads_by_role.values() for head in heads})

    @property
    def summary(self) -> str:
        """The result in a few sentences."""
        if not self.named_heads:
            return " ".join(filter(None, ("No head passes every test.", self.caveats)))
        kind = "first" if "first" in set(self.group_ablations.frame["kind"]) else "all"
        intact: Any = self.group_ablations.where(kind=kind, ablated="nothing").frame.iloc[0]
        names = "; ".join(f"{role}: {describe(heads)}" for role, heads in self.heads_by_role.items() if heads)
        accuracy = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**intact)
        verdicts = [verdict.sentence for verdict in self.verdicts if verdict.role is None] + self._role_sentences()
        answer = f"{names}. {self.target_name} is correct in {accuracy} of cases."
        return " ".join(filter(None, (answer, *verdicts, self.caveats)))

    @property
    def caveats(self) -> str:
        """What to bear in mind: heads of groups, heads that are many or almost pass, what the task cannot tell."""
        return " ".join([*self._group_sentences(), *self._share_sentences(), *self._diffuse_sentences(), *self.notes])

    def _group_sentences(self) -> list[str]:
        """The heads that only their group shows."""
        sentences = []
        for role, members in self.groups.items():
            sharing = [member.head for member in members if not member.single and member.round == 1]
            backups = [member.head for member in members if not member.single and member.round > 1]
            if sharing:
                sentences.append(f"Also {role}, one for another: {describe(sharing)}.")
            if backups:
                sentences.append(f"Backups of {role}, once the others are ablated: {describe(backups)}.")
        return sentences

    def _share_sentences(self) -> list[str]:
        """Whether the named heads are a large share of the model."""
        named = [verdict for verdict in self.verdicts if verdict.role is None and not verdict.smallest]
        return [
            f"The named heads are {len(each.heads) / each.total:.0%} of the model's: so many heads are needed almost "
            "whichever they are, so look at the heads of each role and at the smallest sets."
            for each in named[:1]
            if len(each.heads) >= LARGE_SHARE * each.total
        ]

    def _role_sentences(self) -> list[str]:
        """The verdicts on the heads of each role."""
        of_roles = [verdict for verdict in self.verdicts if verdict.role is not None]
        sentences = []
        for holds, claim in ((True, "Necessary"), (False, "Not shown to be necessary")):
            parts = [
                f"{verdict.role} (accuracy {verdict.value:.2f} without {describe(verdict.heads)}; "
                + (f"{_range(controls)} without as many others" if controls else verdict.why_no_controls)
                + ")"
                for verdict in of_roles
                if verdict.holds == holds
                for controls in [[value for draws in verdict.controls.values() for value in draws]]
            ]
            sentences += [f"{claim}, role by role: {', '.join(parts)}."] if parts else []
        return sentences

    def _diffuse_sentences(self) -> list[str]:
        return [
            f"Aligned but diffuse ({role}): {describe(heads)} pass every other test with less than "
            f"{self.thresholds.attention:g} of their attention on the aligned symbol."
            for role, heads in self.diffuse_aligners.items()
            if heads
        ]


@checked
@leaves_as_found
def localize(
    model: HookedModel,
    task: Task | Prompts,
    n: int | None = None,
    seed: int = 0,
    *,
    corrupted: Prompts | None = None,
    roles: Mapping[str, str] | Sequence[str] | None = None,
    thresholds: Thresholds = Thresholds(),
    draws: int = 20,
    smallest: bool = False,
    groups: bool = False,
    options: RunOptions = RunOptions(),
) -> Localization:
    """Finds the heads that have a role in a task, and tests whether the model needs them.

    The roles are those of `task.roles` that the task's prompts have as relations. Candidates are chosen on one half of
    fresh prompts; every number that is returned comes from the other half. A head is named for a role if

    - it attends as the role requires (score, attention),
    - more than its positional bias explains (`permutation_tests`, corrected over all candidates),
    - and the model needs it (mean ablation), or it carries the answer (patching from clean prompts into corrupted
      ones: `task.pairs`).

    Then all named heads are ablated together, those of each role, and all heads but those named, beside as many other
    heads of the same layers and of similar scores.

    If the task has a control (`task.control`), as `Seq2SeqTask` has, heads are scored on it too. A head that keeps its
    score there reads the alignment from the prompt; one that loses it knows this alignment only. Where all keys lie at
    one distance (monotonic, phrases of one letter) an aligner must keep its score on the control, since a head that
    attends at a fixed distance would score as high.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        task: Prompts, or a task that they are sampled from. All must have their targets at the same positions from
            the end; related prompts (`Prompts.group`) stay in one half.
        n: How many prompts, half to choose candidates and half to test them; by default 64 of a task, or all prompts.
        seed: Of the prompts, the permutation tests and the random heads.
        corrupted: With prompts: a partner for each, for activation patching; by default another of the prompts.
        roles: With prompts: the relations that a head can be named for, as a list, or with what such a head does; by
            default those that were added to the prompts (`OwnPrompts`).
        thresholds: What a head must reach.
        draws: How many control sets of each kind are drawn; none where the effect of the named heads is too small. They
            are measured until enough do as well for the claim to be lost. With d of them no p-value is below 1/(1 + d),
            so at `thresholds.alpha` = .05 a verdict needs at least 19.
        smallest: Whether the smallest necessary and the smallest sufficient set are looked for on the first half and
            tested on the second; takes several times as long.
        groups: Whether heads are looked for that stand in for each other, so that the model misses none of them alone:
            those that share a role, and backups (`head_groups`). Takes up to three times as long. Aligners have no
            groups where all keys lie at one distance.
        options: How the model is run.

    Raises:
        TypeError: Neither prompts nor a task, or `corrupted` or `roles` beside a task.
        ValueError: Fewer than 8 prompts, prompts without any of the roles, related prompts that cannot be halved,
            targets at different positions, a negative number of draws, or a model without the tokenizer that the task
            needs.
    """
    task = as_task(task, corrupted, roles)
    if n is None:
        n = len(task.prompts) if isinstance(task, OwnPrompts) else 64
    if n < 8:
        raise ValueError(f"n={n}: give at least 8 prompts, half to choose candidates and half to test them")
    if draws < 0:
        raise ValueError(f"draws={draws}: give the number of sets of random heads to ablate, 0 for none")
    with shared_runs(model):
        return _localized(model, task, n, seed, thresholds, draws, options, smallest=smallest, groups=groups)


def _localized(
    model: HookedModel,
    task: Task,
    n: int,
    seed: int,
    thresholds: Thresholds,
    draws: int,
    options: RunOptions,
    *,
    smallest: bool,
    groups: bool,
) -> Localization:
    """What `localize` returns."""
    tokenizer = getattr(model, "tokenizer", None)
    prompts = task.sample(n, tokenizer, seed=seed)
    half = first_half(prompts)
    discovery, tested = prompts[:half], prompts[half:]
    names = [role for role in task.roles if len(prompts.relations.get(role, ()))]
    if not names:
        raise ValueError(f"no role to name heads for: the prompts have no row of {', '.join(task.roles)}")
    metrics = [*names, *(f"{role}_attention" for role in names)]
    pair = Pair(*task.pairs(tested, seed))
    discovered = score_heads(model, discovery, metrics, options=options)
    candidates = _candidates(discovered, names, thresholds)
    diffuse = _diffuse_candidates(discovered, names, thresholds, candidates)

    scores, p = score_and_test(model, tested, metrics, names, seed=seed, options=options)
    other = task.control()
    control = other and score_heads(model, other.sample(len(tested), tokenizer, seed=seed), names, options=options)
    heads = sorted({head for head, _ in [*candidates, *diffuse]})
    ablation_effects = ablate_heads(model, tested, "mean", heads=heads, options=options)
    patching_effects = patch_heads(model, pair, heads=heads, options=options)
    settings = {"n": n, "seed": seed, "draws": draws, "smallest": smallest, "thresholds": asdict(thresholds)}
    settings |= {"groups": True} if groups else {}
    provenance = provenance_of("localize", model, tested, scores.provenance.engine, settings)
    table = _evidence(scores, control, p, [candidates, diffuse], ablation_effects, patching_effects, names, provenance)
    heads_by_role = _named(table, candidates, names, thresholds, tested)
    diffuse_aligners = _diffuse_aligners(table, [*candidates, *diffuse], heads_by_role, thresholds, tested)
    named = sorted({head for heads in heads_by_role.values() for head in heads})
    members: dict[str, tuple[GroupMember, ...]] = {}
    if groups:
        search = GroupSearch(model, {discovery: discovered, tested: scores}, p, thresholds, seed, options)
        # Where a fixed distance does as well as the alignment, only the control tells them apart: it is not run here.
        searched = [role for role in names if not _confounded(tested, role)]
        members = {role: search.group(role, heads_by_role[role]) for role in searched}
    of_groups = {f"{role}, group": [member.head for member in found] for role, found in members.items()}
    sets = HeadSets(model, discovery, tested, {role: scores.grid(role) for role in names}, thresholds, options)
    controls = sets.controls(named, draws, seed)
    group_ablations = sets.ablate(named, controls, {**heads_by_role, **of_groups})
    verdicts = sets.verdicts(named, group_ablations) + sets.verdicts_of_roles(heads_by_role, draws, seed)
    if smallest:
        verdicts += sets.verdicts_of_smallest(named, draws, seed)
    first = tested[:1]
    positions = _example_positions(first)
    return Localization(
        table,
        heads_by_role,
        patching_effects,
        ablation_effects,
        group_ablations,
        tested,
        attention_from(model, first, named, positions, options),
        positions.tolist(),
        thresholds,
        {role: task.roles[role] for role in names},
        task.target_name,
        _notes(task, tested, names),
        verdicts,
        diffuse_aligners,
        _interchanges(model, pair, heads, heads_by_role, named, controls, options),
        members,
    )


def _range(values: Sequence[float]) -> str:
    """The least and the most of the numbers that are known."""
    least, most = f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _example_positions(prompt: Prompts) -> Int[Tensor, " row"]:
    """The positions of a prompt's test example, and the one before."""
    positions = (prompt.mask & (prompt.example == prompt.example.max()))[0].nonzero()[:, 0]
    # The token before it predicts its first one; before a text there may be padding.
    if int(positions[0]) > 0 and prompt.mask[0, positions[0] - 1]:
        positions = torch.cat([positions[:1] - 1, positions])
    return positions


def _candidates(scores: Table, roles: Sequence[str], needed: Thresholds) -> list[Candidate]:
    """The heads that attend as a role requires, on the prompts that choose candidates."""
    attention = np.stack([scores.grid(f"{role}_attention") for role in roles])
    best = attention.max(0)
    return [
        ((int(layer), int(head)), role)
        for role, on_keys in zip(roles, attention, strict=True)
        for layer, head in np.argwhere(needed.attends(scores.grid(role), on_keys, best))
    ]


def _diffuse_candidates(
    scores: Table, roles: Sequence[str], needed: Thresholds, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """The heads that attend most to the aligned symbol among the symbols, and to other tokens far more."""
    aligners = [role for role in roles if role in ALIGNERS]
    if not aligners:
        return []
    wide = _candidates(scores, aligners, replace(needed, attention=0.0))
    return [candidate for candidate in wide if candidate not in candidates]


def _evidence(
    scores: Table,
    control: Table | None,
    p: Mapping[str, Float[ndarray, "layer head"]],
    families: Sequence[Sequence[Candidate]],
    ablation_effects: Table,
    patching_effects: Table,
    roles: Sequence[str],
    provenance: Provenance,
) -> Table:
    """All evidence for each head in each role, as one table; p-values are corrected in each family of candidates."""
    q = {
        candidate: value
        for family in families
        for candidate, value in zip(
            family, benjamini_hochberg(np.array([p[role][head] for head, role in family])), strict=True
        )
    }
    candidates = [candidate for family in families for candidate in family]
    no_interval = {"low": np.nan, "high": np.nan}
    frames = []
    for role in roles:
        attention = scores.where(metric=f"{role}_attention").heads().frame
        frames.append(scores.where(metric=role).heads().frame.assign(metric="score", role=role))
        if control is not None:
            frames.append(control.where(metric=role).heads().frame.assign(metric="control", role=role))
        frames.append(attention.assign(metric="attention", role=role))
        p_of_head = p[role][attention["layer"].to_numpy(int), attention["head"].to_numpy(int)]
        frames.append(attention.assign(metric="p", role=role, value=p_of_head, **no_interval))
        own = [head for head, other in candidates if other == role]
        corrected: Any = attention.set_index(["layer", "head"]).loc[own].reset_index()
        frames.append(corrected.assign(metric="q", role=role, value=[q[head, role] for head in own], **no_interval))
        for metric, table, sign in (("ablation", ablation_effects, -1), ("denoising", patching_effects, 1)):
            rows: Any = table.where(kind="all", metric="log_prob").frame if len(table) else table.frame
            kept = [head in own for head in zip(rows["layer"], rows["head"], strict=True)]
            rows = rows[np.array(kept, dtype=bool)]
            # A loss is minus a change, which swaps the ends of its interval.
            low, high = np.sort(np.stack([sign * rows["low"], sign * rows["high"]]).astype(float), axis=0)
            frames.append(rows.assign(metric=metric, role=role, value=sign * rows["value"], low=low, high=high))
    columns = ["level", "layer", "head", "role", "metric", "value", "low", "high", "n"]
    return Table(pd.concat([frame.loc[:, columns] for frame in frames if len(frame)], ignore_index=True), provenance)


def _named(
    table: Table, candidates: Sequence[Candidate], roles: Sequence[str], needed: Thresholds, prompts: Prompts
) -> dict[str, tuple[Head, ...]]:
    """The candidates that pass every test on prompts that had no part in choosing them."""
    evidence: Any = table.frame.set_index(["layer", "head", "role", "metric"]).sort_index()
    of_roles = (table.frame["metric"] == "attention") & table.frame["role"].isin(roles)
    best: Any = table.frame[of_roles].groupby(["layer", "head"])["value"].max()
    named: dict[str, list[tuple[float, Head]]] = {role: [] for role in roles}
    for head, role in (candidate for candidate in candidates if candidate[1] in roles):
        rows = evidence.loc[(*head, role)]
        value, causes = rows["value"], rows.loc[["ablation", "denoising"]]
        if (
            needed.attends(value["score"], value["attention"], best.loc[head])
            and value["q"] <= needed.fdr
            and ((causes["value"] >= needed.effect) & (causes["low"] > 0)).any()
            # A task without a control, such as people's own prompts, has no score on it: then nothing is named.
            and not (_confounded(prompts, role) and not value.get("control", np.nan) >= needed.score)
        ):
            named[role].append((value["score"], head))
    return {role: tuple(head for _, head in sorted(scored, reverse=True)) for role, scored in named.items()}


def _diffuse_aligners(
    table: Table,
    candidates: Sequence[Candidate],
    heads_by_role: Mapping[str, Sequence[Head]],
    needed: Thresholds,
    prompts: Prompts,
) -> dict[str, tuple[Head, ...]]:
    """The aligners that lack nothing but attention to keys; other roles, with their many keys, are not compared."""
    roles = [role for role in heads_by_role if role in ALIGNERS]
    found = _named(table, candidates, roles, replace(needed, attention=0.0), prompts)
    return {role: tuple(head for head in found[role] if head not in heads_by_role[role]) for role in roles}


def _confounded(prompts: Prompts, role: str) -> bool:
    """Whether a fixed distance would do as well as the alignment."""
    return role in ALIGNERS and fixed_offset(prompts.relations[role]) > 0.5


def _notes(task: Task, prompts: Prompts, roles: Sequence[str]) -> tuple[str, ...]:
    """What cannot be established on this task, in sentences."""
    notes = []
    others = [role for role in roles if role not in (*ALIGNERS, "previous")]
    by_position = [role for role in others if not redraws_tokens(prompts, role)]
    if fixed := [role for role in by_position if in_one_place(prompts.relations[role], prompts)]:
        notes.append(
            f"The keys of {' and '.join(fixed)} are at the same positions in every prompt, so a head named for one of "
            "these roles may follow positions rather than tokens: score it on prompts of other lengths to find out."
        )
    ranked = [role for role in others if prompts.relations[role].exchangeable]
    if same := [role for role in ranked if fixed_rank(prompts.relations[role])]:
        notes.append(
            f"The keys of {' and '.join(same)} are always the same of their candidates, counted from the first, so no "
            "head can be told from one that always attends there: vary their order."
        )
    notes += task.caveats
    if any(_confounded(prompts, role) for role in roles):
        notes.append(
            "All keys of the alignment are at one distance, so an aligner is named only if it follows the control "
            "alignment too: use phrases of 2 letters or more."
        )
    return tuple(notes)


def _interchanges(
    model: HookedModel,
    pair: Pair,
    candidates: Sequence[Head],
    heads_by_role: Mapping[str, Sequence[Head]],
    named: Sequence[Head],
    controls: Mapping[str, Sequence[Sequence[Head]]],
    options: RunOptions,
) -> Table | None:
    """How often candidates, named heads and random ones bring the other prompt's answer along."""
    if not answers_differ(pair).any():
        return None
    groups: dict[str, Sequence[Head]] = {role: heads for role, heads in heads_by_role.items() if heads}
    if named:
        groups |= {"named": named} | {f"random {draw}": heads for draw, heads in enumerate(controls["layers"])}
    return interchange(model, pair, heads=candidates, groups=groups, options=options)
