"""What `localize` returns."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from align_circuits.heads.candidates import ALIGNERS, NAMELESS, UNNAMEABLE
from align_circuits.heads.evidence import Evidence
from align_circuits.heads.heads_without_role import UnnamedHead
from align_circuits.heads.interchange_interventions import interchange_verdicts
from align_circuits.heads.localization_rows import named_head_rows, verdict_rows
from align_circuits.heads.redundant_heads import RedundantHead
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import Verdict
from align_circuits.hooks.head_names import Head, describe
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import rendered
from align_circuits.run.target_metrics import CHOICE_ACCURACY
from align_circuits.tables.baselines import CHANCE, unsolved, warnings_of
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import Task

LARGE_SHARE = 1 / 3
"""From this share of the model's heads on, `localize` says that the named heads are many."""

SHOWN = 5
"""Of heads without a role the summary names so many at most."""


@dataclass(frozen=True)
class TaskFacts:
    """What the task says of its roles and targets."""

    roles: Mapping[str, str] = field(default_factory=dict)
    """What a head of each role does."""
    target_name: str = "A token"
    """What the first target of a phrase is called, as in `Task`."""
    notes: tuple[str, ...] = ()
    """What cannot be established on this task."""
    smallest_p: Mapping[str, float] = field(default_factory=dict)
    """The smallest p-value of attention that the prompts allow, by role."""
    control: str = Task.control_lesson
    """The end of a sentence on heads that fail the control, as in `Task`."""


@dataclass(frozen=True, eq=False)
class Localization:
    """The heads that `localize` named, with all its evidence."""

    table: Table
    """Keyed by level, layer, head, role and metric. For every head `"score"`, `"attention"` (to keys, of all),
    `"p"` (of the attention) and, if the task has a control, `"control"` (the score on it); for candidates also
    `"ablation"` (the loss by mean ablation, in nats), `"denoising"` (the gain by patching, in nats), for those of
    `elsewhere` `"resampling"` (the loss by resample ablation, in nats), `"causal_p"` (of no such loss or gain: the
    smallest one-sided p-value times their number) and `"q"` (the larger of both p-values, corrected; 1 without an
    effect on the prompts that chose the candidates)."""
    heads_by_role: Mapping[str, tuple[Head, ...]]
    """The heads named for each role, best score first."""
    evidence: Evidence
    """Effects of patching and of ablating heads, alone and together."""
    prompts: Prompts
    """The prompts that the candidates were tested on."""
    thresholds: Thresholds
    """What a head had to reach."""
    task: TaskFacts = TaskFacts()
    """What the task says of its roles and targets."""
    verdicts: tuple[Verdict, ...] = ()
    """Whether the named heads are necessary and whether they suffice, for the first targets of phrases where there are
    such; whether the heads of each role are necessary; and both for the smallest sets that were found on the prompts
    that chose the candidates, if asked for. Each is tested at `thresholds.alpha`, without correction for their number.
    """
    diffuse_aligners: Mapping[str, tuple[Head, ...]] = field(default_factory=dict)
    """Heads of `align_query` and `align_key` that pass every test but one: they keep less than `thresholds.attention`
    of their attention on the aligned symbol. They are not in `heads_by_role`, and are not ablated with the others."""
    redundant: Mapping[str, tuple[RedundantHead, ...]] = field(default_factory=dict)
    """If asked for, all heads of each role, also redundant ones, which single ablations miss (`redundant_heads`)."""
    unnamed: tuple[UnnamedHead, ...] = ()
    """The heads that stand out by their effect or their score and were not named, with the tests that they failed,
    those of large effect first. For a role without named heads, also the head of highest score. Scores count in the
    roles alone that these prompts allow a head to be named for.
    `pd.DataFrame(found.unnamed)` is a table of them."""
    elsewhere: tuple[Head, ...] = ()
    """Candidates for `previous` whose score, attention and p-value are averages over all positions, weighted by what
    the output of the head changes there: at the positions that predict they do not attend so (`where_heads_matter`)."""

    def __repr__(self) -> str:
        return f"Localization({self._named or 'no head named'}; tested on {len(self.prompts)} prompts)"

    def _repr_html_(self) -> str:
        shown = ("set", "verdict", "ablated", "accuracy", "intact", "heads")
        verdicts = [{column: row[column] for column in shown} for row in verdict_rows(self.verdicts)]
        heads = named_head_rows(self.table, self.heads_by_role, self.thresholds)
        answer = self.accuracy if heads else self.answer
        return rendered(
            "heads/localization_in_notebooks.html",
            answer=answer,
            tables=[heads, verdicts],
            caveats=self.caveat_sentences,
        )

    def heads(self, role: str) -> list[Head]:
        """Returns the heads named for a role, best first.

        Raises:
            KeyError: No such role.
        """
        if role not in self.heads_by_role:
            raise KeyError(f"no role {role!r}: choose one of {', '.join(self.heads_by_role)}")
        return list(self.heads_by_role[role])

    def redundant_heads(self, role: str) -> list[Head]:
        """Returns all heads of a role, redundant ones among them if they were asked for, else those named one by one.

        Raises:
            KeyError: No such role.
        """
        return [member.head for member in self.redundant.get(role, ())] or self.heads(role)

    @property
    def named_heads(self) -> list[Head]:
        """All heads that were named for a role."""
        return sorted({head for heads in self.heads_by_role.values() for head in heads})

    @property
    def _named(self) -> str:
        return "; ".join(f"{role}: {describe(heads)}" for role, heads in self.heads_by_role.items() if heads)

    @property
    def summary(self) -> str:
        """The result in words: the answer, then lines for the verdicts (those of roles together) and the caveats."""
        together = [verdict.sentence for verdict in self.verdicts if verdict.role is None]
        return "\n".join([self.answer, *together, *role_sentences(self.verdicts), *self.caveat_sentences])

    @property
    def answer(self) -> str:
        """The named heads, or why there are none, and in a second line how often the model is right."""
        if self.nameless:
            return f"{self.nameless}\n{self.accuracy}"
        nearest = []
        for role in self.heads_by_role:
            of_role = [unnamed for unnamed in self.unnamed if unnamed.role == role]
            best = sorted(of_role, key=lambda unnamed: (-unnamed.high, len(unnamed.failed), -unnamed.score))[:1]
            nearest += [f"{describe([unnamed.head])} ({unnamed.why})" for unnamed in best]
        no_head = "No head passes every test" + (f". Nearest: {', '.join(nearest)}" if nearest else "")
        return f"{self._named or no_head}.\n{self.accuracy}"

    @property
    def nameless(self) -> str:
        """The note that the prompts allow no name for any role; empty where they allow one."""
        return next((note for note in self.task.notes if note.startswith(NAMELESS)), "")

    @property
    def accuracy(self) -> str:
        """How often the intact model is right, in a sentence: by what verdicts go by."""
        accuracy = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**self.intact)
        tested = f"({len(self.prompts)} test prompts)"  # the other half chose the candidates
        if self.chooses:
            return (
                f"The right answer is more likely than the wrong one in {accuracy} of cases {tested}, a guess in "
                "0.50; accuracy means this share."
            )
        return f"{self.task.target_name} is correct in {accuracy} of cases {tested}."

    @property
    def chooses(self) -> bool:
        """Whether accuracy is that between the right and the wrong answer of each prompt (`CHOICE_ACCURACY`)."""
        return CHOICE_ACCURACY in set(self.evidence.set_ablations.frame["metric"])

    @property
    def intact(self) -> Mapping[str, Any]:
        """The row of `Evidence.set_ablations` without ablated heads, of the targets that verdicts are about."""
        ablations = self.evidence.set_ablations
        kind = "first" if "first" in set(ablations.frame["kind"]) else "all"
        return ablations.where(kind=kind, ablated="nothing").frame.iloc[0].to_dict()

    @property
    def warnings(self) -> list[str]:
        """What leaves the effects of heads without a meaning: of the log-probability, else of the accuracy.

        A model that is no better than a guess, prompts too few to show that it is better, and clean and corrupted
        prompts that do not differ (`Table.warnings`).
        """
        baselines = self.evidence.patching_effects.baselines
        if baselines is None:
            return []
        told = {metric: baselines.where(kind="all", metric=metric).frame for metric in ("log_prob", "accuracy")}
        counted = self.prompts.n_groups, f"test {self.table.unit}"  # the other half chose the candidates
        if not self.chooses:
            return next(filter(None, ([*warnings_of(rows, *counted)] for rows in told.values())), [])
        # Between two answers it does not matter what all tokens get.
        rows = told["log_prob"]
        guesses = unsolved(self.intact, 0.5, *counted)
        between = [f"between the two answers accuracy is {self.intact['value']:.2f}, {guesses}"] * bool(guesses)
        return [*between, *warnings_of(rows[rows["run"] != CHANCE])]

    @property
    def interchange_verdicts(self) -> pd.DataFrame | None:
        """Which heads and sets carry the clean prompt's answer (`interchange_verdicts` of `heads`); None: not asked."""
        interchanges = self.evidence.interchanges
        return None if interchanges is None else interchange_verdicts(interchanges, self.thresholds.alpha)

    @property
    def caveat_sentences(self) -> list[str]:
        """What to bear in mind, a sentence for each, the gravest first.

        Roles that the prompts allow no name for, effects that mean nothing, heads that fail the control, heads that are
        many, large effects without a role, heads that almost pass, heads that are scored where their output matters,
        redundant heads, what the task cannot tell.
        """
        diffuse = [
            f"Aligned but diffuse ({role}): {describe(heads)}, with less than {self.thresholds.attention:g} of all "
            "attention on the aligned symbol; every other test is passed."
            for role, heads in self.diffuse_aligners.items()
            if heads
        ]
        unnameable = [note for note in self.task.notes if note.startswith(UNNAMEABLE)]
        return [
            *(note for note in unnameable if note != self.nameless),  # which the answer says
            *(
                f"{warning[0].upper()}{warning[1:]}.".replace("log_prob", "log-probability")
                for warning in self.warnings
            ),
            *control_sentences(self),
            *share_sentences(self.verdicts),
            *unnamed_sentences(self.unnamed, self.named_heads),
            *diffuse,
            *elsewhere_sentences(self),
            *redundant_sentences(self.redundant),
            *(note for note in self.task.notes if note not in unnameable),
        ]


def control_sentences(found: Localization) -> Iterator[str]:
    """Yields which named heads lose their score on the control."""
    table = found.table.frame
    scores = table.loc[table["metric"] == "control"].set_index(["layer", "head", "role"])
    low = set(scores.index[scores["value"] < found.thresholds.score])
    # Lookups fail where aligners do, whatever they follow themselves.
    roles = [role for role in found.heads_by_role if role in ALIGNERS] or [*found.heads_by_role]
    lost = {role: [head for head in found.heads_by_role[role] if (*head, role) in low] for role in roles}
    if failed := [f"{role} ({describe(heads)})" for role, heads in lost.items() if heads]:
        every = all(lost[role] == list(found.heads_by_role[role]) for role in lost if lost[role])
        yield (
            f"{'All heads' if every else 'Heads'} named for {' and '.join(failed)} score below "
            f"{found.thresholds.score:g} {found.task.control}."
        )


def unnamed_sentences(unnamed: Sequence[UnnamedHead], named: Collection[Head]) -> Iterator[str]:
    """Yields the heads of large effect without a role, and those of high score."""
    large = [f"{describe([head.head])} ({head.size}; {head.role}: {head.failed[0]})" for head in unnamed if head.large]
    if large:
        more = f", and {len(large) - SHOWN} more" if len(large) > SHOWN else ""
        yield f"Large effect, but not named: {', '.join(large[:SHOWN])}{more}."
    # A head that is named for one role scores high in others too: a lookup head attends to induction keys.
    scoring = [head for head in unnamed if head.high and not head.large and head.head not in named]
    high = [f"{describe([head.head])} for {head.role}" for head in scoring]
    if high and named:
        more = f" and {len(high) - SHOWN} more" if len(high) > SHOWN else ""
        yield f"High score, but not named: {', '.join(high[:SHOWN])}{more}."


def elsewhere_sentences(found: Localization) -> Iterator[str]:
    """Yields which heads are scored by what they attend to elsewhere than where the model predicts."""
    if heads := [head for head in found.elsewhere if head in found.heads_by_role["previous"]]:
        more = f" and {len(heads) - SHOWN} more" if len(heads) > SHOWN else ""
        yield (
            f"Scored for previous by where the output matters, not by where the model predicts: "
            f"{describe(heads[:SHOWN])}{more}. The score is the attention at all positions, weighted by what the head "
            "changes there."
        )


def redundant_sentences(redundant: Mapping[str, Sequence[RedundantHead]]) -> Iterator[str]:
    """Yields the heads of which no ablation of a single head shows any."""
    for role, members in redundant.items():
        sharing = [member.head for member in members if not member.single and member.round == 1]
        backups = [member.head for member in members if not member.single and member.round > 1]
        if sharing:
            yield f"Also {role}, one for another: {describe(sharing)}."
        if backups:
            yield f"Backups of {role}, once the others are ablated: {describe(backups)}."


def share_sentences(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields that the named heads are a large share of the model, if they are."""
    named = next((verdict for verdict in verdicts if verdict.role is None and not verdict.smallest), None)
    asked = any(verdict.smallest for verdict in verdicts)
    if named is not None and len(named.heads) >= LARGE_SHARE * named.total:
        yield (
            f"The named heads are {len(named.heads) / named.total:.0%} of the model's: so many heads are needed almost "
            f"whichever they are, so look at the heads of each role{' and at the smallest sets' if asked else ''}."
        )


def role_sentences(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields the verdicts on the heads of each role, those that hold first."""
    for holds, claim in ((True, "Necessary"), (False, "Not shown to be necessary")):
        phrases = []
        for verdict in verdicts:
            if verdict.role is not None and verdict.holds == holds:
                controls = [value for draws in verdict.controls.values() for value in draws]
                beside = f"{_range(controls)} without as many others" if controls else verdict.why_no_controls
                without = f"accuracy {verdict.value:.2f} without {describe(verdict.heads)}"
                phrases.append(f"{verdict.role} ({without}; {beside})")
        if phrases:
            yield f"{claim}, role by role: {', '.join(phrases)}."


def _range(values: Sequence[float]) -> str:
    """The least and the most of the numbers that are known."""
    least, most = f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}"
    return least if least == most else f"{least} to {most}"
