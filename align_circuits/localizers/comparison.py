"""How scores of heads agree with the heads that are known to matter, and how faithful the best heads are."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.metrics import average_precision_score, roc_auc_score

from align_circuits.hooks.edits import Patch
from align_circuits.hooks.head_names import heads_of
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import TargetMetrics

FRACTIONS = (0.05, 0.1, 0.2, 0.5)
"""The shares of heads that circuits keep, beside none and all."""


def agreement(
    grid: Float[ndarray, "layer head"] | Mapping[Any, float], positive: Collection[Any], negative: Collection[Any]
) -> dict[str, float]:
    """Returns how well a score tells heads that matter from heads that do not.

    - `auroc`: the chance that a head that matters scores higher than one that does not; ties count half. 0 to 1,
      chance .5.
    - `average_precision`: the mean precision at each head that matters, from the best score down; of ties none comes
      first. Chance is the share that matters.
    - `recall_at_size`: of as many heads with the best scores as there are heads that matter, the share that do; of
      ties at the border, their expected share.

    Args:
        grid: The scores, of heads, or of anything else by its name.
        positive: The heads that matter, at least one.
        negative: Those that do not; other heads are left out.

    Raises:
        ValueError: Either is empty.
    """
    if not positive or not negative:
        raise ValueError(f"{len(positive)} heads that matter and {len(negative)} that do not: give some of both")
    heads = [*positive, *negative]
    score = np.array([grid[head] for head in heads])
    matters = np.arange(len(heads)) < len(positive)
    border = np.sort(score)[-len(positive)]
    above, tied = score > border, score == border
    share = (len(positive) - above.sum()) / tied.sum()
    return {
        "auroc": float(roc_auc_score(matters, score)),
        "average_precision": float(average_precision_score(matters, score)),
        "recall_at_size": float((matters[above].sum() + share * matters[tied].sum()) / len(positive)),
    }


def names_agreement(named: Collection[Any], true: Collection[Any]) -> dict[str, float]:
    """Returns the recall of named heads, and the share of them that is false; NaN where nothing is true, or named."""
    both = len(set(named) & set(true))
    return {
        "recall": both / len(true) if true else float("nan"),
        "false_discoveries": 1 - both / len(named) if named else float("nan"),
    }


def head_faithfulness(
    model: HookedModel, pair: Pair, grids: Mapping[str, Float[ndarray, "layer head"]], fractions: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Returns how faithful the circuits of the best heads are, by the name of a score: their CPR and CMD.

    A circuit keeps the best share of heads; all other heads carry what they carry on the corrupted prompts, and MLPs
    compute from what arrives. With f(k) = (M(k) - M(none)) / (M(all) - M(none)), `circuit_performance_ratio` is the
    area under f over the share of heads, and `circuit_model_distance` the area under abs(1 - f). Of heads with equal
    scores those of later layers are kept first.

    Source: Mueller et al. (2025), "MIB: A Mechanistic Interpretability Benchmark", §3, with heads in place of edges.

    The metric is the log-probability of all targets.

    Raises:
        ValueError: A pair with another metric, or with targets of one kind; shares outside (0, 1]; or corrupted prompts
            that change no prediction.
    """
    if pair.metric not in (None, "log_prob") or pair.kind not in (None, "all"):
        raise ValueError(f"metric={pair.metric!r}, kind={pair.kind!r}: this measures log_prob of all targets")
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"fractions={tuple(fractions)}: give shares of heads above 0, at most 1")
    heads = heads_of(model.cfg)
    # One head at least, or the smallest circuits of a small model would be empty, as the first is.
    counts = [0, *sorted(max(1, round(fraction * len(heads))) for fraction in fractions), len(heads)]
    edit_sets: list[list[Patch]] = []
    for grid in grids.values():
        order = sorted(heads, key=lambda head, grid=grid: (-grid[head], -head[0], head[1]))
        for count in counts:
            # An edit of no heads is refused, so the whole model runs without one.
            edit_sets.append([Patch(order[count:], site="z")] if count < len(heads) else [])
    targets = TargetMetrics.of(pair.clean, ("log_prob",))
    values = targets.measure_edited(model, edit_sets, source=pair.corrupted)[0][0].mean(1).reshape(len(grids), -1)
    none, whole = values[:, :1], values[:, -1:]
    if not np.abs(whole - none).min() > 0:  # nor NaN, which `<= 0` would let pass
        raise ValueError("the corrupted prompts change no prediction of the model: take another corruption")
    kept, share = (values - none) / (whole - none), np.array(counts) / len(heads)
    return {
        name: {
            "circuit_performance_ratio": float(np.trapezoid(row, share)),
            "circuit_model_distance": float(np.trapezoid(np.abs(1 - row), share)),
        }
        for name, row in zip(grids, kept, strict=True)
    }
