"""Clean and corrupted prompts: one run is measured, and activations of the other are put into it."""

import html
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.hooks.graph import Graph
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.jobs.control_characters import printable
from align_circuits.jobs.sweeps import SweepParts
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.baseline_metrics import baselines_by_prompt, other_run
from align_circuits.run.batch_sizes import CPU_TOKENS, in_batches
from align_circuits.run.forward_pass import capture, widened
from align_circuits.run.options import RunOptions, progress_bar
from align_circuits.run.target_metrics import Metric, TargetMetrics, name_of_metric
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.tasks.partners import chains

Direction = Literal["noise", "denoise"]


@checked
@dataclass(frozen=True, eq=False)
class Pair:
    """Clean prompts and corrupted ones, token for token alike in shape, and what is measured of them.

    Targets, right and wrong answers are those of the clean prompts in both runs. Pairs are related, and intervals over
    groups of them, where their clean prompts are related or their corrupted ones (`Prompts.group`).

    Raises:
        ValueError: Prompts that differ in number, length or targets, or that are given the wrong way round; an unknown
            metric, kind of targets, or direction.
    """

    clean: Prompts
    corrupted: Prompts
    """What `task.corrupt(clean, ...)` returns."""
    metric: Metric | None = None
    """`"log_prob"` of the target's token in nats; its `"logit"` above the mean logit; its `"prob"`; `"logit_diff"`, its
    logit minus that of the wrong answer; `"kl"`, KL(clean ‖ edited) of the two predictions in nats (its gradient
    in the clean run is 0); `"accuracy"`, and `"choice_accuracy"` between right and wrong answer (where no gradient is
    needed); or a function `(logits, targets) -> numbers` (`run.target_metrics.OwnMetric`). None: the verb's own
    choice."""
    kind: str | None = None
    """Which targets count: `"all"`, `"first"` or `"later"`. None: the verb's own choice."""
    direction: Direction = "denoise"
    """`"denoise"` puts clean activations into corrupted runs: above zero, they bring some of the answer back.
    `"noise"` puts corrupted ones into clean runs: below zero, they are needed."""

    def __post_init__(self):
        if self.direction not in ("noise", "denoise"):
            raise ValueError(
                f"direction={self.direction!r}: choose 'noise' (corrupted into clean) or 'denoise' (the reverse)"
            )
        check_pair(self.clean, self.corrupted)
        if not len(self.clean):
            raise ValueError("a pair of no prompts: give at least one clean prompt and its corrupted partner")
        if (group := _related(self.clean, self.corrupted)) is not None:
            object.__setattr__(self, "clean", replace(self.clean, group=group))
        # What is right, and what it is compared with, a corrupted half of one's own may lack or have otherwise.
        measured = {name: getattr(self.clean, name) for name in ("targets", "answer_tokens", "correct", "group")}
        object.__setattr__(self, "corrupted", replace(self.corrupted, **measured))
        if self.metric is not None or self.kind is not None:
            # Only for its errors, which should come from here and not from the verb that reads the pair.
            TargetMetrics.of(self.base, (self.metric or "log_prob",), self.kind or "all")

    def __repr__(self) -> str:
        corrupted = self.corrupted.task.get("corrupted")
        chosen = {
            "metric": self.metric and name_of_metric(self.metric),
            "kind": self.kind,
            "direction": self.direction,
            "corrupted": corrupted.get("kind") if isinstance(corrupted, Mapping) else corrupted,
        }
        name = f"{len(self.clean)} x {self.clean.inputs.shape[1]} {self.clean.task.get('name', 'tokens')}"
        return f"Pair({name}, {', '.join(f'{key}={value!r}' for key, value in chosen.items() if value is not None)})"

    def _repr_html_(self) -> str:
        drawn = f"<div>{html.escape(repr(self))}</div>"
        if self.clean.inputs.is_floating_point():  # vectors have no text
            return drawn
        return drawn + self.to_html()

    def to_html(self, index: int = 0) -> str:
        """Returns a clean prompt, its corrupted partner and their target as HTML; tokens that differ are underlined."""
        # What the clean prompt's relations are need not hold in a corrupted text of one's own.
        corrupted = self.corrupted if self.corrupted.is_aligned else replace(self.corrupted, relations={})
        both = {"clean": (self.clean, self.corrupted), "corrupted": (corrupted, self.clean)}
        drawn = "".join(
            f"<div><b>{name}</b></div>{prompts.to_html(index, beside=other)}" for name, (prompts, other) in both.items()
        )
        answer = "".join(map(self.clean.string_of, self.clean[index].targets["token"]))
        # A corrupted prompt goes on with the answer of its partner, not with its own.
        target = f"target of both prompts: {printable(answer).strip()} (the right answer of the clean prompt)"
        return f"{drawn}<div>{html.escape(target)}</div>"

    @property
    def base_run(self) -> Literal["clean", "corrupted"]:
        """The name of the run that is measured."""
        return "clean" if self.direction == "noise" else "corrupted"

    @property
    def base(self) -> Prompts:
        """The prompts whose run is measured."""
        return self.clean if self.direction == "noise" else self.corrupted

    @property
    def source(self) -> Prompts:
        """The prompts whose activations are put into it."""
        return self.corrupted if self.direction == "noise" else self.clean

    @cached_property
    def target_metrics(self) -> TargetMetrics:
        """One metric of the base run: by default the log-probability of all targets."""
        return TargetMetrics.of(self.base, (self.metric or "log_prob",), self.kind or "all")

    def prepared(self, model: HookedModel, options: RunOptions) -> "Pair":
        """Returns the pair with all that its metric needs: `"kl"` is measured from the clean run."""
        pair = copy(self)
        # In place of what `cached_property` keeps, which `replace` would drop.
        vars(pair)["target_metrics"] = self.target_metrics.with_reference(model, self.clean, options=options)
        return pair

    def prompts_at_once(self, length: int, options: RunOptions) -> int:
        """Returns how many prompts of a length a batch holds where gradients are taken."""
        return min(options.prompts_at_once(max(1, CPU_TOKENS // length)), max(1, len(self.base)))

    def in_batches(
        self, measure: Callable[["Pair"], Float[Tensor, "... batch"]], parts: SweepParts, options: RunOptions
    ) -> Float[Tensor, "... prompt"]:
        """Returns what `measure` returns for all prompts, a batch at a time, smaller ones when memory runs out."""
        count, length = self.base.mask.shape
        size = self.prompts_at_once(length, options)
        step = size if parts.kept else max(1, count)  # one part if none is kept: a batch once halved then stays small
        measured: dict[str, Tensor] = {}
        with progress_bar(options, count, "prompt") as bar:

            def compute(prompts: Int[Tensor, " part"]) -> tuple[Float[ndarray, "... part"], str]:
                batches: list[Tensor] = []

                def run(batch: Int[Tensor, " batch"], _: int) -> None:
                    batches.append(measure(self._part(slice(int(batch[0]), int(batch[-1]) + 1))))
                    bar.update(len(batch))

                in_batches(run, prompts, length, size * length, halve_to=options.halve_to(length))
                return torch.cat(batches, -1).numpy(), ""

            computes = {
                f"prompts-{int(prompts[0]):05d}": partial(compute, prompts)
                for prompts in torch.arange(count).split(step)
            }
            for name, values, _ in parts.measure(computes):
                measured[name] = torch.from_numpy(values)
                bar.update(max(0, sum(of_part.shape[-1] for of_part in measured.values()) - bar.n))
        # Parts that other processes were at came last.
        return torch.cat([measured[name] for name in computes], -1)

    def sweep_parts(
        self, verb: str, model: HookedModel, settings: Mapping[str, Any], options: RunOptions
    ) -> SweepParts:
        """Returns the parts of a sweep over edges or prompts, in `options.cache_dir` if that is given."""
        if options.cache_dir is None:
            return SweepParts(options.cache_dir, verb, {})
        identity = {"verb": verb, "direction": self.direction, **settings}
        return SweepParts(options.cache_dir, verb, identity | self.target_metrics.identity(model, self.source, options))

    def _part(self, rows: slice) -> "Pair":
        """Some of the prompts, with their share of the targets, which may be none."""
        # `replace` would check them as a whole pair, and refuse one whose prompts have no targets.
        selected = copy(self)
        vars(selected).update(
            clean=self.clean[rows], corrupted=self.corrupted[rows], target_metrics=self.target_metrics.select(rows)
        )
        return selected

    def cache(
        self, model: HookedModel, names: Sequence[str], options: RunOptions, device: torch.device | None = None
    ) -> "CachedPair":
        """Returns the activations of both runs at the given hook points, and their metrics."""
        targets, (count, length) = self.target_metrics, self.base.mask.shape
        idle = torch.arange(count)[~torch.isin(torch.arange(count), targets.prompt)]  # a row for each, so that it runs
        order = torch.cat([targets.prompt, idle]).argsort(stable=True)
        rows: dict[str, Any] = {
            "prompt": torch.cat([targets.prompt, idle])[order],
            "query": torch.cat([targets.query, torch.full_like(idle, length - 1)])[order],
        }
        values = np.full((2, 1, len(targets.token)), np.nan)

        def keep(run: int, rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            is_target = order[rows] < len(targets.token)
            targets.assign(values[run], order[rows][is_target], logits[is_target.to(logits.device)])

        base, source = (
            capture(model, prompts, names, **rows, on_logits=partial(keep, run), options=options)
            for run, prompts in enumerate((self.base, self.source))
        )
        metrics = torch.from_numpy(targets.by_prompt(values[:, 0])[0])
        base, source = ({name: value.to(device) for name, value in run.items()} for run in (base, source))
        return CachedPair(base, source, metrics)

    def inputs(self, device: torch.device) -> tuple[Int[Tensor, "prompt pos"], Bool[Tensor, "prompt pos"]]:
        """Returns the tokens of the base run and their mask."""
        return self.base.tokens.to(device), self.base.mask.to(device)

    @property
    def queries(self) -> Int[Tensor, " query"]:
        """The positions at which targets are predicted, ascending."""
        return self.target_metrics.query.unique()

    def mean_metric(self, logits: Float[Tensor, "prompt query d_vocab"]) -> Float[Tensor, ""]:
        """Returns the sum over prompts of each one's mean over its targets, from the logits at `queries`.

        Attribution takes gradients of it.
        """
        targets = self.target_metrics
        prompt = targets.prompt.to(logits.device)
        at_targets = logits[prompt, torch.searchsorted(self.queries, targets.query).to(logits.device)]
        values = targets.numbers(widened(at_targets), torch.arange(len(prompt)))[0]
        # Not the mean over prompts: a prompt's gradient must not depend on how many share its batch.
        return (values / prompt.bincount(minlength=len(logits))[prompt]).sum()

    def provenance(self, verb: str, model: HookedModel, settings: Mapping[str, Any], engine: str) -> Provenance:
        """Returns where a measurement of the pair came from; settings of a verb that measures more come first."""
        settings = {
            "metric": name_of_metric(self.metric or "log_prob"),
            "kind": self.kind or "all",
            **settings,
            "direction": self.direction,
            "corrupted": dict(self.corrupted.task),
            "corrupted_digest": self.corrupted.digest,
        }
        return provenance_of(verb, model, self.clean, engine, settings)

    def edge_table(
        self,
        graph: Graph,
        edges: Bool[Tensor, "receiver sender"],
        values: Float[ndarray, "edge prompt"],
        provenance: Provenance,
        runs: Float[ndarray, "run prompt"] | None = None,
        *,
        changes: bool = False,
    ) -> Table:
        """Returns what was measured of edges as a table, keyed by sender, receiver, direction and metric.

        `runs` holds the metric of base and source run, if effects are measured; `changes` tells that they are exact
        changes of the metric, and not estimates.
        """
        receiver, sender = edges.nonzero().T.tolist()
        keys = pd.DataFrame(
            {
                "level": "edge",
                "sender": [graph.senders[index].name for index in sender],
                "receiver": [graph.receivers[index].name for index in receiver],
                "direction": self.direction,
                "metric": self.target_metrics.names[0],
            }
        )
        return self.effects_table(keys, values, provenance, runs, changes=changes)

    def effects_table(
        self,
        keys: pd.DataFrame,
        values: Float[ndarray, "row prompt"],
        provenance: Provenance,
        runs: Float[ndarray, "run prompt"] | None,
        *,
        changes: bool = False,
    ) -> Table:
        """Returns means over prompts as a table, beside the metric of base and source run where that is given."""
        table = self.target_metrics.table(keys, values, provenance, changes=changes)
        if runs is None:
            return table
        by_run = dict(zip((self.base_run, other_run(self.base_run)), runs, strict=True))
        d_vocab = provenance.model["d_vocab"]
        return replace(table, baselines=baselines_by_prompt(self.target_metrics, by_run, d_vocab, provenance))


@dataclass(frozen=True, eq=False)
class CachedPair:
    """Activations of both runs on the same prompts, by hook point, 0 at padding."""

    base: Mapping[str, Float[Tensor, "prompt pos ..."]]
    source: Mapping[str, Float[Tensor, "prompt pos ..."]]
    metrics: Float[Tensor, "run prompt"]
    """The mean metric of each prompt in both runs; NaN for a prompt without targets."""

    def change(self, name: str) -> Float[Tensor, "prompt pos ..."]:
        """Returns what patching would add at a hook point."""
        return self.source[name] - self.base[name]

    def between(self, name: str, share: float) -> Float[Tensor, "prompt pos ..."]:
        """Returns the activation that lies a share of the way from the source to the base."""
        return torch.lerp(self.source[name], self.base[name], share)


def _related(clean: Prompts, corrupted: Prompts) -> Int[Tensor, " prompt"] | None:
    """Which pairs are related: those in a chain, of which each shares a group with the next in one of the halves.

    None where both halves have the same groups, or none.
    """
    ours, theirs = clean.group, corrupted.group
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if torch.equal(ours, theirs):
        return None
    return chains(ours, theirs)


def check_pair(clean: Prompts, corrupted: Prompts) -> None:
    """Raises a ValueError unless two sets of prompts are halves of minimal pairs, given the right way round."""
    if "corrupted" in clean.task and "corrupted" not in corrupted.task:
        raise ValueError(
            "clean= is the corrupted half, as task.corrupt or Prompts.from_pairs returned it, and corrupted= the clean "
            "one: swap them; to put clean activations into corrupted runs, take direction='denoise'"
        )
    if clean.mask.shape != corrupted.mask.shape or not bool((clean.mask == corrupted.mask).all()):
        raise ValueError(
            f"clean prompts {tuple(clean.mask.shape)} and corrupted ones {tuple(corrupted.mask.shape)} do not match "
            "token by token: make both with Prompts.from_pairs, or the corrupted ones with task.corrupt(clean, ...)"
        )
    same = ["prompt", "query_pos", "target_pos", "token"]
    if not clean.targets[same].equals(corrupted.targets[same]):
        raise ValueError(
            "clean and corrupted prompts have different targets: patching measures those of the clean prompts in both. "
            "Make both with Prompts.from_pairs, or the corrupted ones with task.corrupt(clean, ...), which keeps them"
        )
    if corrupted.own_correct is not None and not torch.equal(clean.answer_tokens, corrupted.answer_tokens):
        raise ValueError(
            "clean and corrupted prompts have different answer_tokens, the columns of own_correct: give one"
        )
