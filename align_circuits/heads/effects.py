"""What edits of heads or sites change, one at a time; with a screen, only those that a gradient finds worth a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.hooks.edits import Ablate, Patch
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.names import Site
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.baseline_metrics import baselines_of, other_run
from align_circuits.run.first_order import first_order_effects
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import STEPS, TargetMetrics, means_by_prompt
from align_circuits.tables.intervals import weighted_mean
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import SHARES, Table, with_level

SCREENED_SITES = ("z", "q", "k", "v")
"""Sites at which edits can be screened."""

Kinds = Mapping[str, Bool[ndarray, " target"]]
"""The kinds of targets to report, each a mask over targets."""


def edit_effects(
    model: HookedModel,
    targets: TargetMetrics,
    kinds: Kinds,
    keys: pd.DataFrame,
    edits: Sequence[Ablate | Patch],
    edit_of: Sequence[int],
    provenance: Callable[[str], Provenance],
    *,
    base: Literal["clean", "corrupted"] = "clean",
    source: Prompts | None = None,
    paired: bool = False,
    screen: float | None = None,
    options: RunOptions,
) -> Table:
    """Returns what edits change, each alone, beside the unedited run.

    `keys` has a row, with its layer, for each of `edit_of`, the index of its edit: heads that share a key head have one
    in common. `base` names the unedited run, and `"kl"` is measured from the clean one. If `source`, the other prompts
    of a patch, is the other half of minimal pairs (`paired`), its own metrics are a baseline, too. With `screen` that
    share of the edits is made, all of heads, and the effects of the others are estimated.
    """
    exact, estimates = np.full(len(keys), True), None
    if screen is not None:
        intact = base == "clean"
        exact, estimates = _screened(screen, model, targets, kinds, keys, edits, edit_of, intact, source, options)
    exact_edits = sorted({index for index, is_made in zip(edit_of, exact, strict=True) if is_made})
    column_of = {index: column for column, index in enumerate(exact_edits, 1)}  # 0 is the unedited run
    edit_sets = [[], *([edits[index]] for index in exact_edits)]
    values, engine = targets.measure_edited(model, edit_sets, source=source, with_source=paired, options=options)
    changes = values[:, [column_of.get(index, 0) for index in edit_of]] - values[:, :1]
    keys = keys if estimates is None else keys.assign(estimated=~exact)
    table = effects_table(keys, changes, targets, kinds, provenance(engine), estimates)
    runs = {base: values[:, 0]} | ({other_run(base): values[:, -1]} if paired else {})
    return replace(table, baselines=baselines_of(targets, kinds, runs, model.cfg.d_vocab, table.provenance))


def effects_table(
    keys: pd.DataFrame,
    changes: Float[ndarray, "metric key target"],
    targets: TargetMetrics,
    kinds: Kinds,
    provenance: Provenance,
    estimates: Float[ndarray, "key metric kind prompt"] | None = None,
) -> Table:
    """Returns by how much metrics changed under each of many edits, as a table.

    `level`, `kind` and `metric` join the keys. Estimates, each prompt's mean over its targets of a kind, take the place
    of the changes where the keys have `estimated`.
    """
    measured = pd.DataFrame([(kind, metric) for metric in targets.names for kind in kinds], columns=["kind", "metric"])
    keys = with_level(keys).merge(measured, how="cross")
    if keys.empty:
        return Table(keys.assign(value=[], low=[], high=[], n=[]), provenance)
    rows = changes.swapaxes(0, 1).reshape(-1, changes.shape[2])  # by key, then by metric, as `keys` is
    means, weights = means_by_prompt(targets.prompts, targets.prompt.numpy(), rows, list(kinds.values()))
    if estimates is not None:
        estimated, estimate = keys["estimated"].to_numpy(), estimates.reshape(means.shape)
        means[estimated] = estimate[estimated]
        weights[estimated & np.isnan(estimate).all(1)] = 0  # a metric without a gradient rests on no target
    shares = keys["metric"].isin(SHARES).to_numpy()
    if estimates is not None:
        shares = shares & ~keys["estimated"].to_numpy()  # an estimate has no bounds
    group = targets.prompts.group
    return Table.from_prompts(keys, means, weights, provenance, bounded=False, changes=shares, group=group)


def check_screen(share: float | None, sites: Sequence[str] = ("z",)) -> None:
    """Raises unless a screen can be made.

    Raises:
        ValueError: No share, or a site whose patches are not estimated.
    """
    if share is None:
        return
    if not 0 < share <= 1:
        raise ValueError(
            f"screen={share}: give the share of heads to measure exactly, above 0 and at most 1, or leave it out"
        )
    if refused := [site for site in sites if site not in SCREENED_SITES]:
        raise ValueError(
            f"site={refused[0]!r} cannot be screened: take {', '.join(map(repr, SCREENED_SITES))}, or leave screen out"
        )


def _screened(
    share: float,
    model: HookedModel,
    targets: TargetMetrics,
    kinds: Kinds,
    keys: pd.DataFrame,
    edits: Sequence[Ablate | Patch],
    edit_of: Sequence[int],
    intact: bool,
    source: Prompts | None,
    options: RunOptions,
) -> tuple[Bool[ndarray, " key"], Float[ndarray, "key metric kind prompt"]]:
    """Which edits change the answer most, in either direction, and estimates of all; NaN for a metric without gradient.

    The first metric that has a gradient decides, over the first kind of targets. The share is taken of each site and
    each group of positions on its own, rounded up.
    """
    # At its minimum a divergence is flat.
    sloped = [metric for metric in targets.metrics if metric not in STEPS and not (metric == "kl" and intact)]
    if not sloped:
        raise ValueError(
            f"screen={share} ranks heads by the gradient of a metric, and {' and '.join(map(repr, targets.names))} "
            f"{'have' if len(targets.names) > 1 else 'has'} none in this run: measure 'log_prob', 'logit', 'prob' or "
            "'logit_diff', or leave screen out"
        )
    located = keys.assign(**{name: value for name, value in (("site", "z"), ("positions", "")) if name not in keys})
    named = [*located[["site", "layer", "positions"]].itertuples(index=False, name=None)]
    of_layer: dict[tuple[Site, int, str], Any] = {
        layer_key: replace(edits[index], heads=[(layer_key[1], head) for head in range(model.cfg.n_heads)])
        for layer_key, index in zip(named, edit_of, strict=True)
    }
    first_order = first_order_effects(
        model, replace(targets, metrics=tuple(sloped)), kinds, of_layer, source=source, options=options
    )
    row_of = {layer_key: row for row, layer_key in enumerate(of_layer)}
    effects = np.full((len(keys), len(targets.metrics), len(kinds), len(targets.prompts)), np.nan)
    effects[:, [targets.metrics.index(metric) for metric in sloped]] = first_order[
        [row_of[layer_key] for layer_key in named], keys["head"].to_numpy(dtype=int)
    ]
    weights = np.bincount(targets.prompt, next(iter(kinds.values())), len(targets.prompts))
    ranks_by = targets.metrics.index(sloped[0])
    size = np.abs(weighted_mean(effects[:, ranks_by, 0], np.tile(weights, (len(keys), 1))))
    if np.isnan(size).any():
        raise ValueError(
            f"the gradient of {targets.names[ranks_by]!r} is NaN, so that no head can be ranked by it: leave screen "
            "out, or take another metric"
        )
    ranked: Any = located[["site", "positions"]].assign(edit=list(edit_of), size=size).drop_duplicates("edit")
    groups = ranked.groupby(["site", "positions"])["size"]
    most = np.ceil((share * groups.transform("size")).round(6))  # .07 * 100 is 7.000000000000001
    exact = ranked["edit"][groups.rank(ascending=False, method="first") <= most]
    return np.isin(edit_of, exact), effects
