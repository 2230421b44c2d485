"""Screens: which heads a gradient finds worth an exact edit, and estimates for all others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.hooks.edits import Edit
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.names import Site
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.first_order import first_order_effects
from align_circuits.run.options import RunOptions
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.intervals import weighted_mean

SCREENED_SITES = ("z", "q", "k", "v")
"""Sites at which edits can be screened."""


@dataclass(frozen=True, eq=False)
class Screen:
    """Which of many edits of heads are to be made, and estimates of them all."""

    exact: Bool[ndarray, " key"]
    """Which are to be made."""
    effects: Float[ndarray, "key metric kind prompt"]
    """The estimates, each prompt's mean over its targets of a kind; NaN for metrics without a gradient."""

    def only(
        self, edit_sets: Sequence[Sequence[Edit]], edit_set_of: Sequence[int]
    ) -> tuple[list[Sequence[Edit]], list[int]]:
        """Returns the edit sets that are to be made, the unedited first one among them, and which is each key's.

        Args:
            edit_sets: All of them.
            edit_set_of: For each key the index of its own.

        Returns:
            Fewer edit sets, and for each key the index of its own there; 0, the unedited one, where it is not made.
        """
        made = [0, *sorted({index for index, exact in zip(edit_set_of, self.exact, strict=True) if exact})]
        places = {index: place for place, index in enumerate(made)}
        return [edit_sets[index] for index in made], [places.get(index, 0) for index in edit_set_of]


def check_screen(share: float | None, sites: Sequence[str] = ("z",)) -> None:
    """Raises unless a screen can be made.

    Raises:
        ValueError: No share, or a site whose patches are not estimated.
    """
    if share is None:
        return
    if not 0 < share <= 1:
        raise ValueError(f"screen={share}: give the share of heads to measure exactly, above 0 and at most 1, or None")
    if other := [site for site in sites if site not in SCREENED_SITES]:
        raise ValueError(
            f"site={other[0]!r} cannot be screened: take {', '.join(map(repr, SCREENED_SITES))}, or leave screen out"
        )


def screen_of(
    share: float,
    model: HookedModel,
    targets: TargetMetrics,
    kinds: Mapping[str, Bool[ndarray, " target"]],
    keys: pd.DataFrame,
    edit_sets: Sequence[Sequence[Edit]],
    edit_set_of: Sequence[int],
    *,
    intact: bool,
    source: Prompts | None = None,
    options: RunOptions = RunOptions(),
) -> Screen:
    """Returns estimates of edits, and which of them change the answer most, in either direction.

    The first metric that has a gradient decides, over the first kind of targets. The share is taken of each site and
    each group of positions on its own.

    Args:
        share: How many of the edits are to be made, rounded up.
        model: The model that is edited.
        targets: What is measured.
        kinds: The kinds of targets to report, each a mask over targets.
        keys: The site, layer and head that each edit is of, and the name of its positions.
        edit_sets: The edits: `Ablate` or `Patch`, one in a set.
        edit_set_of: For each key the index of its own, which heads that share a key head have in common.
        intact: Whether the run that is edited is the one that `"kl"` is measured from.
        source: The other prompts of a patch.
        options: Engine and batch size.

    Raises:
        ValueError: No metric with a gradient, or an estimate that is no number.
    """
    # At its minimum a divergence is flat.
    sloped = [metric for metric in targets.metrics if metric != "accuracy" and not (metric == "kl" and intact)]
    if not sloped:
        raise ValueError(
            f"screen={share} ranks heads by the gradient of a metric, and {' and '.join(map(repr, targets.names))} "
            f"{'have' if len(targets.names) > 1 else 'has'} none in this run: measure 'log_prob', 'logit', 'prob' or "
            "'logit_diff', or leave screen out"
        )
    named = [*keys[["site", "layer", "positions"]].itertuples(index=False, name=None)]
    edits: dict[tuple[Site, int, str], Any] = {}
    for (site, layer, name), index in zip(named, edit_set_of, strict=True):
        whole: Any = edit_sets[index][0]
        edits[site, layer, name] = replace(whole, heads=[(layer, head) for head in range(model.cfg.n_heads)])
    part = replace(targets, metrics=tuple(sloped))
    found = first_order_effects(model, part, kinds, edits, source=source, options=options)
    effects = np.full((len(keys), len(targets.metrics), len(kinds), len(targets.prompts)), np.nan)
    places = {place: index for index, place in enumerate(edits)}
    found = found[[places[place] for place in named], keys["head"].to_numpy(dtype=int)]
    effects[:, [targets.metrics.index(metric) for metric in sloped]] = found
    weights = np.bincount(targets.prompt, next(iter(kinds.values())), len(targets.prompts))
    ranks_by = targets.metrics.index(sloped[0])
    size = np.abs(weighted_mean(effects[:, ranks_by, 0], np.tile(weights, (len(keys), 1))))
    if np.isnan(size).any():
        raise ValueError(
            f"the gradient of {targets.names[ranks_by]!r} is NaN, so that no head can be ranked by it: leave screen "
            "out, or take another metric"
        )
    ranked: Any = keys[["site", "positions"]].assign(edit_set=list(edit_set_of), size=size).drop_duplicates("edit_set")
    made: set[int] = set()
    for _, group in ranked.groupby(["site", "positions"], sort=False):
        count = ceil(round(share * len(group), 6))  # .07 * 100 is 7.000000000000001
        made |= {*group.sort_values("size", ascending=False, kind="stable")["edit_set"][:count]}
    return Screen(np.isin(edit_set_of, [*made]), effects)
