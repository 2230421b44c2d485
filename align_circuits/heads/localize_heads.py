"""The main job: which heads align, which look up, and is it causal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from align_circuits.files import writable_folder
from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.permutation_tests import fixed_offset, in_one_place, p_values
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.heads import Head, describe, heads_of
from align_circuits.models.protocol import model_provenance
from align_circuits.papers.recall.task.next_token import SlotsTask
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.prompts.prompts import Prompts
from align_circuits.report.localize_report import localize_report
from align_circuits.run.evaluation import evaluation
from align_circuits.run.forward_pass import forward
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.intervals import benjamini_hochberg
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask

ROLES = ("align_query", "align_key", "lookup", "induction", "previous", "duplicate")
"""What a head can be named: relations of the prompts. Paper 1's three, and the three that they are built from."""

RECALL_ROLES = ("subject", "query_subject", "relation", "same_type", "grammar", "mark")
"""What a head can be named on contextual recall (`tasks.recall_tasks`, `tasks.recall_slots`)."""

ALIGNERS = ("align_query", "align_key")


Task = Seq2SeqTask | RepeatedTokensTask | FactsTask | DemonstrationsTask | SlotsTask
"""What heads can be found on."""


@dataclass(frozen=True)
class Thresholds:
    """What a head needs, on prompts that had no part in choosing it, to be named for a role."""

    score: float = 0.5
    """At least this standard score (`scoring.STANDARD`): a hit rate for aligners, a share of attention for others."""
    attention: float = 0.1
    """At least this much attention on keys, of all the attention there is: a share of nothing is nothing."""
    share: float = 0.9
    """At least this share of the attention that the head's best role explains: a head that looks things up attends to
    some induction keys too, and is no induction head for that."""
    fdr: float = 0.05
    """At most this false discovery rate (Benjamini and Hochberg) over all candidates, heads times roles."""
    effect: float = 0.01
    """At least this effect in nats of the gold tokens' mean log-probability, of mean ablation or of denoising, with a
    95% interval above 0."""


@dataclass(frozen=True, eq=False)
class Localization:
    """Which heads were found, and all that speaks for it."""

    table: Table
    """Keyed by layer, head, role and metric. For every head `"score"`, `"attention"` (on keys, absolute), `"p"` and
    `"control"` (the score under the control alignment); for candidates also `"q"` (p corrected), `"ablation"` (what
    mean ablation costs, in nats) and `"denoising"` (what patching restores, in nats)."""
    heads_by_role: Mapping[str, tuple[Head, ...]]
    """The heads named for each role, best score first."""
    patching_effects: Table
    """What patching each candidate into corrupted prompts restores: `patch_heads`."""
    ablation_effects: Table
    """What ablating each candidate changes: `ablate_heads`."""
    group_ablations: Table
    """Accuracy by `kind` of target with heads ablated to their means: `ablated` is `"nothing"`, a role, `"found"` (all
    named heads), `"random"` (as many others, `draw` by `draw`), `"rest"` (all but those named); `draw` is
    missing elsewhere."""
    prompts: Prompts
    """The prompts that the candidates were tested on."""
    examples: Mapping[Head, Float[Tensor, "row pos"]]
    """Attention of each named head on the first of them, from the tokens of its test example."""
    rows: list[int]
    """The positions of those tokens."""
    thresholds: Mapping[str, float]
    """What was asked of a head."""
    notes: tuple[str, ...] = ()
    """What this task cannot tell."""

    def heads(self, role: str) -> list[Head]:
        """Returns the heads named for a role, best first.

        Raises:
            KeyError: No such role.
        """
        if role not in self.heads_by_role:
            raise KeyError(f"no role {role!r}: choose one of {', '.join(self.heads_by_role)}")
        return list(self.heads_by_role[role])

    @property
    def found(self) -> list[Head]:
        """All heads with a name."""
        return sorted({head for heads in self.heads_by_role.values() for head in heads})

    @property
    def summary(self) -> str:
        """The verdict in a few sentences."""
        said = [f"{role}: {describe(heads)}" for role, heads in self.heads_by_role.items() if heads]
        if not said:
            return " ".join(["No head passes every test.", *self.notes])
        kind = "first" if "first" in set(self.group_ablations.frame["kind"]) else "all"
        right: Any = self.group_ablations.where(kind=kind).frame.set_index("ablated")
        draws = right.loc[["random"], "value"] if "random" in right.index else None
        intact, found = right.loc["nothing"], right.loc["found"]
        recall = set(self.heads_by_role) <= set(RECALL_ROLES)
        what = "The answer is" if recall else "The first token of a phrase is" if kind == "first" else "A token is"
        sentence = (
            f"{'; '.join(said)}. {what} right in {intact['value']:.2f} [{intact['low']:.2f}, {intact['high']:.2f}] of "
            f"cases; with these {len(self.found)} heads ablated in {found['value']:.2f} [{found['low']:.2f}, "
            f"{found['high']:.2f}]"
        )
        if draws is not None:
            sentence += (
                f", with as many random heads in {draws.mean():.2f} ({draws.min():.2f} to {draws.max():.2f} in "
                f"{len(draws)} draws)"
            )
        return " ".join([sentence + ".", *self.notes])

    def save(self, folder: str | Path) -> Path:
        """Writes `table.csv` with `provenance.json`, the other tables in folders of their own, and `report.html`.

        Returns:
            The report.
        """
        folder = writable_folder(folder)
        (folder / "provenance.json").unlink(missing_ok=True)  # a folder with one is whole
        for name in ("patching_effects", "ablation_effects", "group_ablations"):
            getattr(self, name).save(folder / name)
        report = localize_report(folder / "report.html", self)
        self.table.save(folder)
        return report


def localize(
    model: Any,
    task: Task,
    n: int = 64,
    seed: int = 0,
    *,
    thresholds: Thresholds | None = None,
    draws: int = 20,
    options: RunOptions = RunOptions(),
) -> Localization:
    """Finds the heads that do what the prompts' relations say, and tests that they matter.

    Which roles there are is the task's to say: those of `ROLES` and `RECALL_ROLES` that its prompts have as relations.

    Candidates are found on one half of fresh prompts; every number that is returned comes from the other half. A head
    is named for a role if it looks where the role says (score, attention), more than its habits explain (`nulls`,
    corrected over candidates), and if the model needs it (mean ablation) or it carries the answer (patching from clean
    prompts into ones with another test input). Then the named heads are ablated together, beside as many random heads
    of the same layers, and alone left standing.

    Beside a `Seq2SeqTask` runs a control: the same task with a permuted alignment, or a monotonic one if its own is
    permuted.
    A head that keeps its score there follows the alignment from the prompt; one that loses it knows this alignment.
    Where the gold lies at one distance (monotonic, one letter a phrase) an aligner must keep its score on the control,
    since a head that knows a distance would score as well. Other tasks have no control, and no corruption of their own:
    there the corrupted half of a pair is another prompt of the same length.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        task: Its prompts are sampled afresh. All must ask at one position, as those of recall do, or share a layout.
        n: How many prompts, half for each part.
        seed: Of the prompts, the nulls and the random heads.
        thresholds: What a head needs; `Thresholds()` by default.
        draws: Sets of random heads.
        options: Engine and batch size.

    Raises:
        ValueError: Fewer than 8 prompts, a negative number of draws, or a model without a tokenizer.
    """
    if n < 8:
        raise ValueError(f"n={n}: give at least 8 prompts, half to find candidates and half to test them")
    if draws < 0:
        raise ValueError(f"draws={draws}: give how many sets of random heads are ablated, 0 for none")
    needed = thresholds or Thresholds()
    prompts = _sampled(model, task, n, seed)
    discovery, tested = prompts[: n // 2], prompts[n // 2 :]
    roles = [role for role in (*ROLES, *RECALL_ROLES) if len(prompts.relations.get(role, ()))]
    metrics = [*roles, *(f"{role}_attention" for role in roles)]
    candidates = _candidates(score_heads(model, discovery, metrics, options=options), roles, needed)

    scores = score_heads(model, tested, metrics, options=options)
    other = _control(task)
    control = (
        None if other is None else score_heads(model, _sampled(model, other, len(tested), seed), roles, options=options)
    )
    p = p_values(model, tested, roles, seed=seed, options=options)
    heads = sorted({head for head, _ in candidates})
    damage, effects = _effects(model, task, tested, heads, seed, options)
    settings = {"n": n, "seed": seed, "draws": draws, "thresholds": asdict(needed)}
    provenance = Provenance(
        "localize",
        settings=settings,
        model=model_provenance(model),
        data=tested.provenance,
        engine=scores.provenance.engine,
    )
    table = _evidence(scores, control, p, candidates, damage, effects, roles, provenance)
    named = _named(table, candidates, roles, needed, tested)
    found = sorted({head for some in named.values() for head in some})
    examples, rows = _attention(model, tested, found, options)
    return Localization(
        table,
        named,
        effects,
        damage,
        _verdict(model, tested, named, found, draws, seed, options),
        tested,
        examples,
        rows,
        asdict(needed),
        _notes(task, tested, roles),
    )


def _sampled(model: Any, task: Task, n: int, seed: int) -> Prompts:
    if isinstance(task, FactsTask | DemonstrationsTask | SlotsTask):
        return task.sample(n, seed=seed)
    if getattr(model, "tokenizer", None) is None:
        raise ValueError("the model has no tokenizer, and the task is written in words: load it with one")
    return task.sample(n, model.tokenizer, seed=seed)


def _control(task: Task) -> Task | None:
    """The same task with another alignment."""
    if not isinstance(task, Seq2SeqTask):
        return None
    alignment = "monotonic" if task.alignment == "permutation" else "permutation"
    return replace(task, alignment=alignment, decay=None, prior_form="text")


def _pairs(task: Task, prompts: Prompts, seed: int) -> tuple[Prompts, Prompts]:
    """Clean prompts and corrupted ones with the clean ones' targets."""
    if isinstance(task, Seq2SeqTask):
        return prompts, task.corrupt(prompts, "query", seed=seed) if task.x_len > 1 else prompts
    length = prompts.mask.sum(1)
    clean, other = [], []
    for some in (torch.nonzero(length == value)[:, 0] for value in length.unique()):
        clean += some.tolist() if len(some) > 1 else []  # one alone of its length has no partner
        other += some.roll(1).tolist() if len(some) > 1 else []
    kept = prompts[clean]
    return kept, replace(prompts[other], targets=kept.targets, correct=kept.correct, relations=kept.relations)


Candidate = tuple[Head, str]
"""A head and a role."""


def _candidates(scores: Table, roles: Sequence[str], needed: Thresholds) -> list[Candidate]:
    """The heads that look where a role says, on the prompts of the search."""
    grid = {metric: scores.grid(metric) for metric in scores.frame["metric"].unique()}
    attention = np.stack([grid[f"{role}_attention"] for role in roles])
    best = attention.max(0)
    return [
        ((int(layer), int(head)), role)
        for place, role in enumerate(roles)
        for layer, head in np.argwhere(_looks(grid[role], attention[place], best, needed))
    ]


def _effects(
    model: Any, task: Task, prompts: Prompts, heads: Sequence[Head], seed: int, options: RunOptions
) -> tuple[Table, Table]:
    """What ablating and what patching each candidate does."""
    clean, corrupted = _pairs(task, prompts, seed)
    return (
        ablate_heads(model, prompts, "mean", heads=heads, options=options),
        patch_heads(model, Pair(clean, corrupted), heads=heads, options=options),
    )


def _looks(score: Any, attention: Any, best: Any, needed: Thresholds) -> Any:
    """Whether heads look where a role says; numbers or arrays of them."""
    return (score >= needed.score) & (attention >= needed.attention) & (attention >= needed.share * best)


def _evidence(
    scores: Table,
    control: Table | None,
    p: Mapping[str, Float[ndarray, "layer head"]],
    candidates: Sequence[Candidate],
    ablation_effects: Table,
    patching_effects: Table,
    roles: Sequence[str],
    provenance: Provenance,
) -> Table:
    """One table of all that speaks for a head in a role."""
    q = dict(zip(candidates, benjamini_hochberg(np.array([p[role][head] for head, role in candidates])), strict=True))
    frames = []
    for role in roles:
        attention = scores.where(metric=f"{role}_attention").heads().frame
        for metric, table in (("score", scores), *([("control", control)] if control is not None else ())):
            frames.append(table.where(metric=role).heads().frame.assign(role=role, metric=metric))
        frames.append(attention.assign(role=role, metric="attention"))
        p_of = p[role][attention["layer"], attention["head"]]
        frames.append(attention.assign(role=role, metric="p", value=p_of, low=np.nan, high=np.nan))
        mine = [head for head, of in candidates if of == role]
        corrected: Any = attention.set_index(["layer", "head"]).loc[mine].reset_index()
        frames.append(
            corrected.assign(role=role, metric="q", value=[q[head, role] for head in mine], low=np.nan, high=np.nan)
        )
        for metric, table, sign in (("ablation", ablation_effects, -1), ("denoising", patching_effects, 1)):
            rows: Any = table.where(kind="all", metric="log_prob").frame if len(table) else table.frame
            mine_here = [(layer, head) in mine for layer, head in zip(rows["layer"], rows["head"], strict=True)]
            rows = rows[np.array(mine_here, dtype=bool)]
            ends = np.sort(np.stack([sign * rows["low"], sign * rows["high"]]).astype(float), axis=0)
            frames.append(rows.assign(role=role, metric=metric, value=sign * rows["value"], low=ends[0], high=ends[1]))
    columns = ["layer", "head", "role", "metric", "value", "low", "high", "n"]
    return Table(pd.concat([frame.loc[:, columns] for frame in frames if len(frame)], ignore_index=True), provenance)


def _named(
    table: Table, candidates: Sequence[Candidate], roles: Sequence[str], needed: Thresholds, prompts: Prompts
) -> dict[str, tuple[Head, ...]]:
    """The candidates that pass every test on prompts that had no part in choosing them."""
    rows: Any = table.frame.set_index(["layer", "head", "role", "metric"]).sort_index()
    best: Any = table.frame[table.frame["metric"] == "attention"].groupby(["layer", "head"])["value"].max()
    named: dict[str, list[tuple[float, Head]]] = {role: [] for role in roles}
    for head, role in candidates:
        mine = rows.loc[(*head, role)]
        score, attention = mine.loc["score", "value"], mine.loc["attention", "value"]
        causes = mine.loc[["ablation", "denoising"]]
        if (
            _looks(score, attention, best.loc[head], needed)
            and mine.loc["q", "value"] <= needed.fdr
            and ((causes["value"] >= needed.effect) & (causes["low"] > 0)).any()
            and not (_confounded(prompts, role) and not mine.loc["control", "value"] >= needed.score)
        ):
            named[role].append((score, head))
    return {role: tuple(head for _, head in sorted(some, reverse=True)) for role, some in named.items()}


def _confounded(prompts: Prompts, role: str) -> bool:
    """Whether a distance alone would do as well as the alignment."""
    return role in ALIGNERS and fixed_offset(prompts.relations[role]) > 0.5


def _notes(task: Task, prompts: Prompts, roles: Sequence[str]) -> tuple[str, ...]:
    notes = []
    own = [role for role in roles if role not in (*ALIGNERS, "previous")]
    if habits := [role for role in own if in_one_place(prompts.relations[role], prompts)]:
        notes.append(
            f"Every prompt has what {' and '.join(habits)} should look at in the same places, so a head of that name "
            "may know the places and not the tokens: score it on prompts of other lengths to tell."
        )
    if isinstance(task, Seq2SeqTask) and factorial(task.x_len) < 1 / 0.05:
        notes.append(
            f"{task.x_len} input symbols have {factorial(task.x_len)} orders, too few to establish an aligner: "
            "use 5 or more."
        )
    if any(_confounded(prompts, role) for role in roles):
        notes.append(
            "Every key lies at one distance here, so an aligner is named only if it follows the control alignment too: "
            "use phrases of 2 letters or more."
        )
    return tuple(notes)


def _verdict(
    model: Any,
    prompts: Prompts,
    heads_by_role: Mapping[str, Sequence[Head]],
    found: Sequence[Head],
    draws: int,
    seed: int,
    options: RunOptions,
) -> Table:
    """Accuracy with the named heads ablated, with as many others, and with all but them."""
    sets: list[tuple[str, int | None, Sequence[Head]]] = [("nothing", None, ())]
    if found:
        others = [head for head in heads_of(model.cfg) if head not in found]
        sets += [(role, None, heads) for role, heads in heads_by_role.items() if heads]
        sets.append(("found", None, found))
        generator = np.random.default_rng(seed)
        sets += [("random", draw, _as_many(found, others, generator)) for draw in range(draws) if others]
        sets += [("rest", None, others)] if others else []
    reference = ablation_baseline(model, prompts, "mean", options=options)
    cells = [[Ablate(heads, how="mean", reference=reference)] if heads else [] for _, _, heads in sets]
    values, ran = TargetMetrics.of(prompts, ("accuracy", "log_prob")).measure_edited(model, cells, options=options)
    parts = []
    for index, (name, draw, _) in enumerate(sets):
        keys, means, weights = evaluation(prompts, values[:, index])
        wanted = (keys["predictor"] == "model") & (keys["metric"] == "accuracy") & keys["offset"].isna()
        keys = keys.loc[wanted, ["kind", "metric"]]
        keys.insert(0, "ablated", name)
        keys.insert(1, "draw", draw)
        parts.append((keys, means[wanted], weights[wanted]))
    keys, means, weights = zip(*parts, strict=True)
    provenance = Provenance("localize", model=model_provenance(model), data=prompts.provenance, engine=ran)
    return Table.from_prompts(pd.concat(keys), np.concatenate(means), np.concatenate(weights), provenance)


def _as_many(found: Sequence[Head], others: Sequence[Head], generator: np.random.Generator) -> list[Head]:
    """As many heads of each layer as were found there; where a layer has too few others, from anywhere."""
    drawn: list[Head] = []
    for layer in sorted({layer for layer, _ in found}):
        there = [head for head in others if head[0] == layer]
        wanted = sum(head[0] == layer for head in found)
        drawn += [there[i] for i in generator.permutation(len(there))[:wanted]]
    left = [head for head in others if head not in drawn]
    drawn += [left[i] for i in generator.permutation(len(left))[: len(found) - len(drawn)]]
    return drawn


def _attention(
    model: Any, prompts: Prompts, heads: Sequence[Head], options: RunOptions
) -> tuple[dict[Head, Float[Tensor, "row pos"]], list[int]]:
    """The attention of some heads on the first prompt, from the tokens of its test example."""
    first = prompts[:1]
    rows = (first.mask & (first.example == first.example.max()))[0].nonzero()[:, 0]
    rows = torch.cat([rows[:1] - 1, rows]) if int(rows[0]) > 0 else rows  # the token that predicts its first one
    found: dict[Head, Tensor] = {}

    def keep(some: Tensor, layer: int, pattern: Float[Tensor, "row head pos"]) -> None:  # noqa: ARG001 - all at once
        found.update({head: pattern[:, head[1]].cpu() for head in heads if head[0] == layer})

    forward(model, first, prompt=torch.zeros_like(rows), query=rows, on_pattern=keep, options=options)
    return {head: found[head] for head in heads}, rows.tolist()
