"""Takes heads away, one at a time, and measures what the model then gets wrong."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.edits import Ablate, AblationBaseline, Edit, Patch, groups_of
from align_circuits.hooks.heads import Head, heads_of
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, Site, name_of
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.run.evaluation import Predictions, by_kind, predict_with_edits, prompt_means
from align_circuits.run.forward_pass import capture, forward
from align_circuits.tables.tables import Provenance, Table, with_level

How = Literal["zero", "mean", "resample"]


def ablate_heads(
    model: Any,
    prompts: Prompts,
    how: How = "mean",
    *,
    heads: Sequence[Head] | None = None,
    reference: Prompts | None = None,
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> Table:
    """Returns what ablating each head alone does to the model: the change of log-probability and of accuracy.

    Below zero the head was of use. See `Ablate` for the kinds of ablation, and for what misleads.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        prompts: Prompts with targets.
        how: `"mean"` over tokens of the same role, `"resample"` from another prompt, or `"zero"`.
        heads: Which heads; all by default.
        reference: The prompts whose activations stand in; by default those that are measured.
        engine: As for `evaluate`.
        batch_size: As for `evaluate`.

    Returns:
        A table keyed by level, layer, head, `kind` (`"all"`, `"first"`, `"later"` targets) and `metric`: `"log_prob"`,
        the change of the mean log-probability of the target's token in nats, and `"accuracy"`, the change of accuracy.
        The 95% bootstrap intervals are over prompts, paired.

    Raises:
        ValueError: A head that the model does not have, prompts without targets, or a reference that does not fit.
    """
    chosen = heads_of(model.cfg, heads)
    layers = sorted({layer for layer, _ in chosen})
    options: dict[str, Any] = {"engine": engine, "batch_size": batch_size}
    cells: list[Sequence[Edit]] = [[]]  # the first is the intact run
    others = None
    if how == "resample":
        others = _resampled(reference or prompts)
        cells += [[Patch([head])] for head in chosen]
    else:
        held = ablation_baseline(model, reference or prompts, how, layers=layers, **options)
        cells += [[Ablate([head], how=how, reference=held)] for head in chosen]
    (intact, *ablated), ran = predict_with_edits(model, prompts, cells, source=others, **options)
    changes = {head: change(intact, after) for head, after in zip(chosen, ablated, strict=True)}
    provenance = Provenance(
        "ablate_heads",
        settings={"how": how, "reference": (reference or prompts).digest},
        model=model_provenance(model),
        data=prompts.provenance,
        engine=ran,
    )
    return effects_table(prompts, changes, ("layer", "head"), provenance)


def ablation_baseline(
    model: Any,
    prompts: Prompts,
    how: How = "mean",
    *,
    site: Site = "z",
    layers: Sequence[int] | None = None,
    engine: Literal["auto", "fast", "reference"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
) -> AblationBaseline:
    """Returns what stands in for activations that `Ablate` takes away, measured on reference prompts.

    Args:
        model: The model that will be ablated.
        prompts: The reference prompts.
        how: `"mean"` keeps one mean for each group of tokens, `"resample"` every activation; `"zero"` needs nothing.
        site: Which activations.
        layers: In which layers; all by default.
        engine: As for `evaluate`.
        batch_size: As for `evaluate`.

    Raises:
        ValueError: An unknown kind or site, or prompts that cannot be resampled: a single one, or some of them padded.
    """
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"how={how!r}: choose 'mean', 'resample' or 'zero'")
    if site not in HEAD_SITES + LAYER_SITES:
        raise ValueError(f"site={site!r}: choose one of {', '.join(HEAD_SITES + LAYER_SITES)}")
    names = [name_of(site, layer) for layer in (range(model.cfg.n_layers) if layers is None else layers)]
    if how == "zero":
        return AblationBaseline()
    if how == "resample":
        _check_resampled(prompts)
        return AblationBaseline(values=capture(model, prompts, names, engine=engine, batch_size=batch_size))
    if site == "pattern":
        raise ValueError("a pattern has no mean over tokens of a role: resample it, set it to zero, or clamp it")
    return AblationBaseline(means=_means(model, prompts, names, engine=engine, batch_size=batch_size))


def _check_resampled(prompts: Prompts) -> None:
    if len(prompts) < 2 or not bool(prompts.mask.all()):
        raise ValueError(
            f"{len(prompts)} prompts of {int(prompts.mask.sum(1).min())} to {prompts.mask.shape[1]} tokens: "
            "resampling takes at least two, of one length"
        )


def _resampled(prompts: Prompts) -> Prompts:
    """The prompt after each, whose activations stand in for its own."""
    _check_resampled(prompts)
    return prompts[[*range(1, len(prompts)), 0]]


def _means(model: Any, prompts: Prompts, names: Sequence[str], **options: Any) -> dict[str, Tensor]:
    """The mean activation of each group of tokens."""
    group, count = groups_of(prompts), 2 * len(Role)
    sums: dict[str, Tensor] = {}
    seen = {name: torch.zeros(len(prompts), dtype=torch.bool) for name in names}

    def add(name: str, rows: Int[Tensor, " batch"], activation: Float[Tensor, "batch pos ..."]) -> None:
        new = ~seen[name][rows]  # the others come again, after a batch that failed
        rows, activation = rows[new], activation[new.to(activation.device)]
        length = activation.shape[1]
        real = prompts.mask[rows, -length:].to(activation.device)
        place = group[rows, -length:].to(activation.device)[real]
        if name not in sums:
            sums[name] = torch.zeros(count, *activation.shape[2:], dtype=torch.float64, device=activation.device)
        sums[name].index_add_(0, place, activation[real].double())
        seen[name][rows] = True

    forward(
        model,
        prompts,
        prompt=torch.arange(len(prompts)),
        query=torch.full((len(prompts),), prompts.mask.shape[1] - 1),
        on_activation={name: lambda rows, x, name=name: add(name, rows, x) for name in names},
        **options,
    )
    tokens = torch.bincount(group[prompts.mask], minlength=count)
    return {name: (total.cpu() / tokens.view(-1, *[1] * (total.ndim - 1))).float() for name, total in sums.items()}


def change(before: Predictions, after: Predictions) -> tuple[Float[ndarray, " target"], Float[ndarray, " target"]]:
    """Returns by how much the log-probability and the accuracy of each target changed."""
    (right, log_prob), (other_right, other_log_prob) = before.by_target(), after.by_target()
    return other_log_prob - log_prob, other_right - right


def effects_table(
    prompts: Prompts,
    changes: dict[Any, tuple[Float[ndarray, " target"], Float[ndarray, " target"]]],
    columns: Sequence[str],
    provenance: Provenance,
) -> Table:
    """Returns changes of log-probability and accuracy as a table.

    Args:
        prompts: Whose targets changed.
        changes: What `change` returned, by the values of `columns`.
        columns: The key columns beside `kind` and `metric`, layer and head among them.
        provenance: Where the changes came from.
    """
    groups = by_kind(prompts)
    keys = with_level(
        pd.DataFrame(
            [(*key, kind, metric) for key in changes for metric in ("log_prob", "accuracy") for kind in groups],
            columns=[*columns, "kind", "metric"],
        )
    )
    values = [value for both in changes.values() for value in both]
    if not values:
        return Table(keys.assign(value=[], low=[], high=[], n=[]), provenance)
    means, weights = prompt_means(prompts, values, list(groups.values()))
    return Table.from_prompts(keys, means, weights, provenance, bounded=np.zeros(len(keys), dtype=bool))
