"""Accuracy beside that of reference predictors without alignment."""

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.checks import checked, listed
from align_circuits.hooks.edits import Edit, edits_provenance
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import REFERENCES, WRONG, Prompts, text_of
from align_circuits.run.forward_pass import forward
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import CHOICE_ACCURACY, Metric, TargetMetrics, by_kind, means_by_prompt
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import SHARES, Table

ALL_OFFSETS = None
"""The `offset` of rows that are about all places in a phrase: missing in the table."""


@checked
@leaves_as_found
def evaluate(
    model: HookedModel,
    prompts: Prompts,
    *,
    metrics: Metric | Sequence[Metric] | None = None,
    edits: Sequence[Edit] = (),
    options: RunOptions = RunOptions(),
) -> Table:
    """Returns the model's metrics on the targets, beside references.

    Teacher forcing: each target is predicted from the true tokens before it. A prediction is the argmax over the whole
    vocabulary, and right where the target accepts it: any letter that the true automaton accepts after the true prefix,
    or the target's own token where the prompts list no `correct` answers. Of tied logits the lowest id counts.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets.
        metrics: What is measured, one or several, by name or as functions of your own, as `Pair.metric`; `"kl"` is the
            divergence from the model without the edits. By default accuracy, log-probability and, where all targets
            have a wrong answer, the accuracy between the two answers and the logit difference.
        edits: What is changed while the model runs.
        options: Engine and batch size.

    Returns:
        A table keyed by

        - `predictor`: `"model"` or one of `REFERENCES`, as far as the targets hold it;
        - `metric`: `"accuracy"` in [0, 1], a reference's being its expected one; for the model also the others, such
          as `"log_prob"`, the mean log-probability of the target's own token, in nats;
        - `kind`: `"all"`, `"first"` (tokens that need alignment) or `"later"`; only kinds that occur;
        - `offset`: the target's place in its phrase, from 0, in rows of kind `"all"`; missing in rows of all places
          together (`table.where(offset=None)`).

        Intervals are 95% intervals over prompts.

        An accuracy shows alignment only where it is above `history`, not above `chance` (Agarwal & Sarawagi, 2025, §3;
        the two ceilings hold within the grammar, so compare on prompts of the same kind). On prompts with fixed
        automata the mapping may be stored in the weights, and neither ceiling is about context.

    Raises:
        ValueError: No prompts, no targets, prompts that do not fit the model, or an unknown metric.
    """
    if not len(prompts) or prompts.targets.empty:
        raise ValueError(f"nothing to evaluate in {prompts!r}: give prompts with at least one target")
    if metrics is None:
        known = prompts.targets[WRONG].notna().to_numpy() if WRONG in prompts.targets else np.zeros(0, dtype=bool)
        compared = bool(known.any() and known.all())
        if known.any() and not compared:
            warnings.warn(
                f"{CHOICE_ACCURACY} and logit_diff are left out: {(~known).sum()} of {len(known)} targets have no "
                "wrong token of their own; evaluate prompts.select_targets('first'), on the command line --targets "
                "first, to compare first tokens",
                stacklevel=4,
            )
        metrics = ("accuracy", "log_prob", *([CHOICE_ACCURACY, "logit_diff"] if compared else []))
    targets = TargetMetrics.of(prompts, listed(metrics)).with_reference(model, prompts, options=options)
    values, engine = targets.measure(model, edits, options=options)
    settings = {"metrics": targets.names, **edits_provenance(edits)}
    return evaluation_table(targets, values[:, 0], provenance_of("evaluate", model, prompts, engine, settings))


@checked
@leaves_as_found
def answers(
    model: HookedModel, prompts: Prompts, *, edits: Sequence[Edit] = (), options: RunOptions = RunOptions()
) -> pd.DataFrame:
    """Returns what the model answers at each target: its most likely token, beside the right one.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets.
        edits: What is changed while the model runs.
        options: Engine and batch size.

    Returns:
        A row for each target, with `prompt`, `target` (the right token) and `p`, its probability; `answer`, the most
        likely token, and `p_answer`; and `right`, whether accuracy counts it as right.

    Raises:
        ValueError: No targets, or prompts that do not fit the model.
    """
    targets = TargetMetrics.of(prompts, ("prob", "accuracy"))
    token, numbers = torch.zeros_like(targets.token), torch.zeros(3, len(targets.token))

    def keep(rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        best = logits.softmax(1).max(1)
        token[rows] = best.indices.cpu()
        numbers[:, rows] = torch.stack([*targets.numbers(logits, rows), best.values]).float().cpu()

    forward(model, prompts, prompt=targets.prompt, query=targets.query, on_logits=keep, edits=edits, options=options)
    p, right, p_answer = numbers.tolist()
    tokenizer = getattr(model, "tokenizer", None)  # which knows tokens that the prompts do not hold
    texts = text_of(tokenizer, token.unique()) if tokenizer is not None else {}
    answer = [texts.get(token_id, prompts.string_of(token_id)) for token_id in token.tolist()]
    target = [prompts.string_of(token_id) for token_id in targets.token.tolist()]
    columns = {"prompt": targets.prompt, "target": target, "p": p, "answer": answer, "p_answer": p_answer}
    return pd.DataFrame({**columns, "right": np.array(right, dtype=bool)})


def evaluation_table(targets: TargetMetrics, values: Float[ndarray, "metric target"], provenance: Provenance) -> Table:
    """Returns what `evaluate` does, from the metrics of each target."""
    keys, means, weights = summarize_targets(targets.prompts, values, targets.names)
    bounded = keys["metric"].isin(SHARES).to_numpy()
    group = targets.prompts.group
    return Table.from_prompts(keys, means, weights, provenance, bounded=bounded, levels=True, group=group)


def summarize_targets(
    prompts: Prompts, values: Float[ndarray, "metric target"], metrics: Sequence[str]
) -> tuple[pd.DataFrame, Float[ndarray, "row prompt"], Float[ndarray, "row prompt"]]:
    """Returns the keys of `evaluate`'s rows, each row's mean in each prompt, and the number of its targets there."""
    targets = prompts.targets
    by = {("model", metric): of_metric for metric, of_metric in zip(metrics, values, strict=True)}
    if "accuracy" in metrics:
        by |= {(name, "accuracy"): targets[name].to_numpy(dtype=float) for name in REFERENCES if name in targets}
    groups = {(kind, ALL_OFFSETS): rows for kind, rows in by_kind(prompts).items()}
    offset = targets["offset"].to_numpy()
    groups |= {("all", int(number)): offset == number for number in np.unique(offset)}
    keys = pd.DataFrame(
        [(*predictor, *group) for predictor in by for group in groups],
        columns=["predictor", "metric", "kind", "offset"],
    ).astype({"offset": "Int64"})  # nullable: rows over all offsets have none
    return keys, *means_by_prompt(prompts, targets["prompt"].to_numpy(), list(by.values()), list(groups.values()))
