"""What a model predicts at its targets, as numbers: shared by evaluation, patching, attribution and edges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import pairwise
from math import ceil
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.edits import Edit
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.jobs.sweeps import SweepParts
from align_circuits.models.parameters import model_identity
from align_circuits.prompts.prompts import KINDS, WRONG, Prompts
from align_circuits.run.edited_runs import run_edited
from align_circuits.run.forward_pass import forward
from align_circuits.run.options import RunOptions, progress_bar
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.ranking import P_VALUES
from align_circuits.tables.tables import SHARES, Table

MetricName = Literal["accuracy", "choice_accuracy", "log_prob", "logit", "prob", "logit_diff", "kl"]

OwnMetric = Callable[[Float[Tensor, "target d_vocab"], pd.DataFrame], Float[Tensor, " target"]]
"""A metric of your own: takes the logits of some targets and their rows of `Prompts.targets`, with their index, and
returns a number for each. Attribution needs one made of differentiable tensor operations. `Table.top` and
`faithfulness` take it to fall with damage unless it is called `loss` or `rank`. Where parts of a sweep are kept
(`RunOptions.cache_dir`), it counts with its code and all that it refers to; if that cannot be told, it needs an
attribute `identity`, a text that you change with it."""

Metric = MetricName | OwnMetric

BOTH: tuple[Metric, ...] = ("log_prob", "accuracy")
"""What the verbs of heads report if no metric is named."""

EDIT_SETS_A_PART = 32
"""Edited runs in one part of a sweep that is kept."""

PROMPTS_A_PART = 32
"""Prompts in such a part, rounded up to whole batches where the caller chose their size."""

_LOGITS_AT_ONCE = 2**24  # 64 MiB in float32


def checked_names(metrics: Sequence[Any], takes: str = "(logits, targets)") -> list[str]:
    """Returns the metrics by name, as a table has them.

    Args:
        metrics: Names, and functions of the user's own.
        takes: The two arguments of such a function.

    Raises:
        ValueError: A function that does not take two arguments, or is called as a metric of the package, whose bounds
            and ranking its numbers would be given; or two metrics of one name.
    """
    taken = {*get_args(MetricName), *SHARES, *P_VALUES}
    for metric in metrics:
        if callable(metric) and (name := name_of_metric(metric)) in taken:
            raise ValueError(f"a function called {name!r}, which is a metric of the package: rename the function")
        try:
            if callable(metric):
                signature(metric).bind(None, None)
        except TypeError as error:
            raise ValueError(f"metric {name_of_metric(metric)!r}: {error}; a metric takes {takes}") from None
        except ValueError:
            pass  # a builtin, which tells nothing of its arguments
    names = [name_of_metric(metric) for metric in metrics]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two metrics are called {twice[0]!r}, which a table cannot tell apart: rename a function")
    return names


def check_returned(metric: Any, number: Any, shape: tuple[int, ...], what: str) -> None:
    """Raises a ValueError unless a function of the user's own returned a tensor of this shape."""
    if not isinstance(number, Tensor) or number.shape != shape:
        given = tuple(number.shape) if isinstance(number, Tensor) else type(number).__name__
        raise ValueError(
            f"metric {name_of_metric(metric)!r} returned {given}: it must return a tensor with a number for each of "
            f"the {what}"
        )


def log_prob(logits: Float[Tensor, "row d_vocab"], token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """Returns the log-probability of each row's token, in nats, at most 0.

    Misleads attribution where the model is sure: its gradient then vanishes (Kramár et al., 2024, §3).
    """
    return logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(1)


def logit(logits: Float[Tensor, "row d_vocab"], token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """Returns the logit of each row's token minus the mean logit: linear in the logits.

    The mean is subtracted since a constant added to all logits changes no prediction.
    """
    return logits.gather(1, token[:, None])[:, 0] - logits.mean(1)


def prob(logits: Float[Tensor, "row d_vocab"], token: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    """Returns the probability of each row's token, in [0, 1]."""
    return log_prob(logits, token).exp()


def kl(logits: Float[Tensor, "row d_vocab"], reference: Float[Tensor, "row d_vocab"]) -> Float[Tensor, " row"]:
    """Returns the divergence of the prediction from a reference of log-probabilities, in nats, at least 0.

    D(reference || prediction).
    """
    return (reference.exp() * (reference - logits.log_softmax(1))).sum(1).clamp_min(0)  # but for rounding


def name_of_metric(metric: Any) -> str:
    """Returns the name under which a metric stands in a table: a function's own name."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


LOGIT_METRICS: dict[str, Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"]], Float[Tensor, " row"]]] = {
    "log_prob": log_prob,
    "logit": logit,
    "prob": prob,
}
"""The metrics of the logits and the target's token alone, by name."""

CHOICE_ACCURACY = "choice_accuracy"
"""Whether a right answer is more likely than the wrong one that the prompts give."""

STEPS = ("accuracy", CHOICE_ACCURACY)
"""The metrics that are 0 or 1, and have no gradient."""

_METRICS = (*STEPS, *LOGIT_METRICS, "logit_diff", "kl")


@dataclass(frozen=True, eq=False)
class TargetMetrics:
    """Numbers for each target of some prompts, under one run of a model or under many edited runs."""

    prompts: Prompts
    metrics: tuple[Metric, ...]
    prompt: Int[Tensor, " target"]
    """The prompt of each target, ascending."""
    query: Int[Tensor, " target"]
    """The position where it is predicted."""
    token: Int[Tensor, " target"]
    """The token to predict."""
    targets: pd.DataFrame
    """Their rows of `prompts.targets`."""
    correct: Bool[Tensor, "target answer"] | None = None
    """Which of the prompts' `answer_tokens` are right; None where only the target's own token is."""
    reference: Float[Tensor, "target d_vocab"] | None = None
    """The log-probabilities that `"kl"` is measured from (`with_reference`)."""

    @classmethod
    def of(
        cls, prompts: Prompts, metrics: Sequence[Metric | str] = ("log_prob",), kind: str = "all"
    ) -> "TargetMetrics":
        """Returns the metrics of the targets of one kind.

        Raises:
            ValueError: No targets of that kind, or an unknown metric.
        """
        if isinstance(metrics, str) or not len(metrics):
            raise ValueError(f"metrics={metrics!r}: give a list of at least one, ['log_prob'] for a single one")
        for metric in metrics:
            if not callable(metric) and metric not in _METRICS:
                known = ", ".join(map(repr, _METRICS))
                raise ValueError(f"metric={metric!r}: choose one of {known}, or a function of logits and targets")
        checked_names(metrics)
        compared = [metric for metric in ("logit_diff", CHOICE_ACCURACY) if metric in metrics]
        if compared and WRONG not in prompts.targets:
            raise ValueError(
                f"metric={compared[0]!r} compares with a wrong answer, and these prompts have none: make them with "
                "Prompts.from_texts(..., answer=, wrong=), or give their targets a column 'wrong' of token ids"
            )
        kinds = by_kind(prompts)
        if kind not in kinds or not kinds[kind].any():
            known = ", ".join(map(repr, kinds)) if len(prompts.targets) else "no targets at all"
            raise ValueError(f"no targets of kind {kind!r}: these prompts have {known}")
        rows = torch.from_numpy(kinds[kind])
        prompt, query, token = (prompts.column(name)[rows] for name in ("prompt", "query_pos", "token"))
        correct = None if prompts.correct is None else prompts.correct[rows]
        frame = prompts.targets[kinds[kind]]
        return cls(prompts, tuple(metrics), prompt, query, token, frame, correct)  # pyright: ignore[reportArgumentType]

    @property
    def names(self) -> list[str]:
        """The metrics by name, as a table has them."""
        return [name_of_metric(metric) for metric in self.metrics]

    def with_reference(
        self, model: HookedModel, prompts: Prompts, *, options: RunOptions = RunOptions()
    ) -> "TargetMetrics":
        """Returns the metrics with what `"kl"` is measured from: a model on prompts with the same targets."""
        if "kl" not in self.metrics or self.reference is not None:
            return self
        reference: list[Tensor] = [torch.empty(0)] * len(self.token)

        def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            for row, values in zip(rows.tolist(), logits.log_softmax(1).cpu(), strict=True):
                reference[row] = values

        forward(model, prompts, prompt=self.prompt, query=self.query, on_logits=keep, options=options)
        return replace(self, reference=torch.stack(reference))

    def select(self, rows: slice) -> "TargetMetrics":
        """Returns the metrics of a slice of the prompts."""
        selected = (self.prompt >= rows.start) & (self.prompt < rows.stop)
        return replace(
            self,
            prompts=self.prompts[rows],
            prompt=self.prompt[selected] - rows.start,
            query=self.query[selected],
            token=self.token[selected],
            targets=self.targets[selected.numpy()],
            reference=None if self.reference is None else self.reference[selected],
            correct=None if self.correct is None else self.correct[selected],
        )

    @property
    def weights(self) -> Float[ndarray, " prompt"]:
        """By how much each prompt counts: the number of its targets."""
        return np.bincount(self.prompt.numpy(), minlength=len(self.prompts)).astype(float)

    def numbers(self, logits: Float[Tensor, "row d_vocab"], rows: Int[Tensor, " row"]) -> Float[Tensor, "metric row"]:
        """Returns the metrics of the targets at `rows` from the logits where they are predicted."""
        return torch.stack([self._number(metric, logits, rows) for metric in self.metrics])

    def _number(self, metric: Metric, logits: Tensor, rows: Tensor) -> Tensor:
        token = self.token[rows].to(logits.device)
        if not isinstance(metric, str):
            return self._own_number(metric, logits, rows)
        if metric == "log_prob" and "accuracy" in self.metrics:
            # the same number by another formula: they differ in the last bits, and kept tables of evaluation have these
            return logits.log_softmax(1).gather(1, token[:, None])[:, 0]
        if metric == "logit_diff":
            wrong = wrong_tokens(self.targets, logits.shape[1])[rows].to(logits.device)
            return (logits.gather(1, token[:, None]) - logits.gather(1, wrong[:, None]))[:, 0]
        if metric == "kl":
            if self.reference is None:
                raise ValueError("metric='kl' needs what it is measured from: call with_reference first")
            return kl(logits, self.reference[rows].to(logits))
        if metric == CHOICE_ACCURACY:
            right = logits.gather(1, token[:, None])
            if self.correct is not None:
                answers = logits[:, self.prompts.answer_tokens.to(logits.device)]
                # Any right answer may beat the wrong one, so the most likely of them competes.
                right = answers.where(self.correct[rows].to(logits.device), -torch.inf).amax(1, keepdim=True)
            wrong = wrong_tokens(self.targets, logits.shape[1])[rows].to(logits.device)
            return (right > logits.gather(1, wrong[:, None]))[:, 0].to(logits.dtype)
        if metric != "accuracy":
            return LOGIT_METRICS[metric](logits, token)
        predicted = logits.argmax(1)
        if self.correct is None:
            return (predicted == token).to(logits.dtype)
        answered = predicted[:, None] == self.prompts.answer_tokens.to(logits.device)
        return (answered & self.correct[rows].to(logits.device)).any(1).to(logits.dtype)

    def _own_number(self, metric: OwnMetric, logits: Tensor, rows: Tensor) -> Tensor:
        """A metric of the user's own, checked."""
        if not len(rows):  # as in a batch of prompts without targets of the kind, of which it may make no tensor
            return logits.sum(1)
        number = metric(logits.clone(), self.targets.iloc[rows.numpy()])  # it may change them, as others must not see
        check_returned(metric, number, (len(rows),), f"{len(rows)} targets")
        if logits.requires_grad and not number.requires_grad:
            raise ValueError(
                f"metric {name_of_metric(metric)!r} has no gradient: make it of differentiable operations of torch, or "
                "measure it by patching"
            )
        return number.to(logits.dtype)

    def measure(
        self, model: HookedModel, edits: Sequence[Edit] = (), copies: int = 1, *, options: RunOptions = RunOptions()
    ) -> tuple[Float[ndarray, "metric copy target"], str]:
        """Runs a model and returns the metrics, and the engine that ran.

        The prompts run in several copies where edits tell them apart (`hooks.residual_edges`), in as few batches as the
        options allow: their batch size is in prompts of all copies together.
        """
        count, size = len(self.prompts), len(self.token)
        values = np.full((len(self.metrics), copies * size), np.nan)

        def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            self.assign(values, rows % size, logits, columns=rows)

        engine = forward(
            model,
            repeat(self.prompts, copies),
            prompt=(self.prompt + count * torch.arange(copies)[:, None]).flatten(),
            query=self.query.repeat(copies),
            on_logits=keep,
            edits=edits,
            options=options,
        )
        return values.reshape(len(self.metrics), copies, size), engine

    def measure_edited(
        self,
        model: HookedModel,
        edit_sets: Sequence[Sequence[Edit]],
        *,
        source: Prompts | None = None,
        with_source: bool = False,
        options: RunOptions = RunOptions(),
    ) -> tuple[Float[ndarray, "metric run target"], str]:
        """Runs a model once for each set of edits and returns the metrics, and what ran, as `run_edited` does.

        With `with_source` those of the unedited run of the source prompts come last; it is made for its activations. In
        a sweep that is kept, a part holds some edit sets on some prompts.
        """
        values = np.full((len(edit_sets) + with_source, len(self.metrics), len(self.token)), np.nan)
        engine, done, identity = "", 0, {}
        edits_a_part, prompts_a_part = max(1, len(edit_sets)), max(1, len(self.prompts))
        if options.cache_dir is not None:
            edits_a_part, prompts_a_part = EDIT_SETS_A_PART, PROMPTS_A_PART
            if options.batch_size != "auto":  # whole batches, so that they are those of a sweep that is not kept
                prompts_a_part = ceil(prompts_a_part / options.batch_size) * options.batch_size
            identity = self.identity(model, source, options) | {"edits": edit_sets, "with_source": with_source}
        slices = {
            f"edit-sets-{first:05d}-prompts-{prompt:05d}": (slice(first, last), rows)
            for first in range(0, len(edit_sets), edits_a_part)
            for last in [min(first + edits_a_part, len(edit_sets))]
            for prompt, rows in self._rows_of_parts(prompts_a_part)
        }
        with progress_bar(options, len(edit_sets) * len(self.token), "target") as bar:
            run = partial(self._measure_edit_sets, model, source=source, with_source=with_source, options=options)
            computes = {name: partial(run, edit_sets[sets], rows, bar=bar) for name, (sets, rows) in slices.items()}
            for name, measured, ran in SweepParts(options.cache_dir, "edited runs", identity).measure(computes):
                engine, (sets, rows) = ran, slices[name]
                count = sets.stop - sets.start
                values[sets, :, rows] = measured[:count]
                if with_source:
                    values[-1, :, rows] = measured[-1]
                done += count * measured.shape[-1]
                # What was computed here has moved the bar already, what was read from a file has not.
                bar.update(max(0, done - bar.n))
        return values.swapaxes(0, 1), engine

    def _rows_of_parts(self, prompts: int) -> list[tuple[int, slice]]:
        """The targets of so many prompts at a time, with the first of these prompts; those without targets left out."""
        selected = self.prompt.unique()
        starts = selected[::prompts].contiguous()
        rows = [*torch.searchsorted(self.prompt, starts).tolist(), len(self.token)]
        return [(int(start), slice(*ends)) for start, ends in zip(starts, pairwise(rows), strict=True)]

    def _measure_edit_sets(
        self,
        model: HookedModel,
        edit_sets: Sequence[Sequence[Edit]],
        targets: slice,
        *,
        source: Prompts | None,
        with_source: bool,
        options: RunOptions,
        bar: Any,
    ) -> tuple[Float[ndarray, "run metric target"], str]:
        """One part of a sweep: some edit sets, then the source run if it is asked for, and some of the targets."""
        prompt, query = self.prompt[targets], self.query[targets]
        values = np.full((len(edit_sets) + with_source, len(self.metrics), len(prompt)), np.nan)

        def keep(index: int, rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
            self.assign(values[index], rows + targets.start, logits, columns=rows)
            if index < len(edit_sets):
                bar.update(len(rows))

        engine = run_edited(
            model,
            self.prompts,
            edit_sets,
            prompt=prompt,
            query=query,
            on_logits=keep,
            source=source,
            on_source=partial(keep, len(edit_sets)) if with_source else None,
            options=options,
        )
        return values, engine

    def identity(self, model: HookedModel, source: Prompts | None, options: RunOptions) -> dict[str, Any]:
        """Returns what tells a sweep of these metrics from all others, for `SweepParts`."""
        return {"model": model_identity(model), "targets": self, "source": source, "options": options.identity}

    def assign(
        self,
        values: Float[ndarray, "metric column"],
        rows: Int[Tensor, " row"],
        logits: Float[Tensor, "row d_vocab"],
        *,
        columns: Int[Tensor, " row"] | None = None,
    ) -> None:
        """Writes the metrics of some targets into their columns, in parts, since a softmax doubles the logits."""
        step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
        columns = rows if columns is None else columns
        for column, row, some in zip(columns.split(step), rows.split(step), logits.split(step), strict=True):
            # To the CPU first: Apple's GPUs have no float64.
            values[:, column.numpy()] = self.numbers(some, row).cpu().double().numpy()

    def by_prompt(
        self, values: Float[ndarray, "row target"]
    ) -> tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
        """Returns each prompt's mean over its targets, and their number."""
        return means_by_prompt(self.prompts, self.prompt.numpy(), values, [np.full(len(self.token), True)])

    def table(
        self,
        keys: pd.DataFrame,
        values: Float[ndarray, "row prompt"],
        provenance: Provenance,
        *,
        measured: Bool[ndarray, " row"] | bool = False,
        changes: Bool[ndarray, " row"] | bool = False,
    ) -> Table:
        """Returns means over prompts of the single metric as a table; a prompt counts by its number of targets.

        Rows that are the metric itself, as `measured`, or `changes` of it, have the bounds of a metric that is a share.
        Estimates are neither.
        """
        weights, is_share = np.tile(self.weights, (len(values), 1)), self.names[0] in SHARES
        bounds: Any = {"bounded": is_share & measured, "changes": is_share & changes, "levels": measured}
        return Table.from_prompts(keys, values, weights, provenance, **bounds, group=self.prompts.group)


def wrong_tokens(targets: pd.DataFrame, d_vocab: int) -> Int[Tensor, " target"]:
    """Returns the token that `"logit_diff"` and `CHOICE_ACCURACY` compare each target with.

    Raises:
        ValueError: The column holds what is no token of the vocabulary, or nothing, for some target.
    """
    column: Any = targets[WRONG]
    numbers: Any = pd.to_numeric(column, errors="coerce")
    wrong = numbers.to_numpy(dtype=float, na_value=np.nan)
    if not (known := (wrong >= 0) & (wrong < d_vocab) & (wrong % 1 == 0)).all():
        raise ValueError(
            f"the column {WRONG!r} of the targets holds {column.to_numpy()[~known][0]} in prompt "
            f"{targets['prompt'].to_numpy()[~known][0]} (counted from 0): give a token id from 0 to {d_vocab - 1} for "
            "each target. Later tokens have no wrong token to compare with where the two answers differ in length or "
            "share that token: compare first tokens, prompts.select_targets('first')"
        )
    return torch.from_numpy(wrong.astype(np.int64))


def by_kind(prompts: Prompts) -> dict[str, Bool[ndarray, " target"]]:
    """Returns the targets of each kind that occurs, those of all kinds first."""
    kind = prompts.targets["kind"].to_numpy()
    return {"all": np.full(len(kind), True)} | {name: kind == name for name in KINDS if (kind == name).any()}


def means_by_prompt(
    prompts: Prompts,
    prompt: Int[ndarray, " target"],
    values: Sequence[Float[ndarray, " target"]] | Float[ndarray, "value target"],
    groups: Sequence[Bool[ndarray, " target"]],
) -> tuple[Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
    """Returns each prompt's mean over each group of targets, and their number; a row for each value and group."""
    # Means by prompt first: prompts are the unit that intervals resample, and targets of one prompt are no independent
    # draws.
    counts = np.stack([np.bincount(prompt[rows], minlength=len(prompts)) for rows in groups])
    sums = [
        np.bincount(prompt[rows], weights=value[rows], minlength=len(prompts)) for value in values for rows in groups
    ]
    weights = np.tile(counts, (len(values), 1)).astype(float)
    return np.divide(np.stack(sums), weights, out=np.full_like(weights, np.nan), where=weights > 0), weights


def repeat(prompts: Prompts, times: int) -> Prompts:
    """Returns prompts several times over, without targets and labels: all of them, then all of them again."""
    if times == 1:
        return prompts
    repeated = {name: getattr(prompts, name).repeat(times, 1) for name in ("inputs", "mask", "token_kinds", "example")}
    return replace(
        prompts,
        **repeated,
        targets=prompts.targets.iloc[:0],
        correct=None,
        own_correct=None,
        relations={},
        latent={},
        positions={},
        group=None,
    )
