"""Progress measures: how far an induction head has come, read by hooks while a network trains; statistics of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from plotly.graph_objects import Figure
from torch import Tensor

from align_circuits.hooks.names import name_of
from align_circuits.hooks.probes import Probes
from align_circuits.papers.abrupt.interventions import Intervention
from align_circuits.papers.abrupt.task import Exemplars, Worlds
from align_circuits.papers.lab import courses
from align_circuits.papers.statistics import crossing, late_mean
from align_circuits.tables.tables import Table

ACCURACIES = ("icl", "iwl", "swap")
"""Accuracy on three kinds of evaluation sequences (`task.Kind`)."""

PROGRESS = ("ila1", "tila2", "cla", "tla2")
"""The four progress measures, by `progress`."""

MEASURES = (*ACCURACIES, "iwl_common", "iwl_rare", "loss_icl", *PROGRESS)
"""The keys that `measure` returns."""

BOTH = {"icl": "in context", "iwl": "in weights"}
NAMES = {"ila1": "ILA1", "tila2": "TILA2", "cla": "CLA", "tla2": "TLA2", "icl": "IC accuracy"}
"""What figures call the measures."""

TRANSITION = crossing("icl")
"""The step at which each seed's accuracy in context crosses one half for good; NaN where it never does."""

FORMED = TRANSITION.map(np.isfinite) & (late_mean("ila1") > 0.5) & (late_mean("tila2") > late_mean("tla2") / 2)
"""In which seeds the induction head forms: they make the transition, and end with ILA1 above one half and TILA2 above
one half of TLA2, which bounds it."""


def training_courses(
    names: Mapping[str, str], panels: Mapping[str, Mapping[str, Any]] | None = None, value: str = "accuracy"
) -> Callable[[Table], Figure]:
    """Returns what draws measures over training: what to call each, and the condition of each panel by its caption."""
    curves = {
        caption: {name: {"measure": measure, **condition} for measure, name in names.items()}
        for caption, condition in (panels or {"": {}}).items()
    }
    return courses(curves, label="step", value=value)


def progress(
    pattern_1: Float[Tensor, "member prompt query key"],
    pattern_2: Float[Tensor, "member prompt key"],
    logits: Float[Tensor, "member prompt label"],
    batch: Exemplars,
) -> dict[str, Float[Tensor, " member"]]:
    """Returns the four progress measures, each a mean over sequences, in [0, 1].

    With p1 and p2 the attention of the layers, T = 2N + 1 tokens counted from 1, and π the predicted probabilities:

    - `ila1`, item-label association: 1/(T-1) Σ_{i=2..T} p1_{i,i-1}, a token's attention to the one before. At uniform
      attention it is (1/(T-1)) Σ_{i=2..T} 1/i.
    - `tila2`, target-item-label association: Σ p2_{T,j} over the labels j that follow an item of the target's class.
    - `tla2`, target-labels association: Σ_{k=1..N} p2_{T,2k}, the target's attention to all labels.
    - `cla`, context-label accuracy: Σ_l π_l over the labels l that stand in the context.

    They say where attention goes and what is predicted, not that the one causes the other: the control is an
    intervention on the attention while the network trains (`interventions.attend_to_previous`).

    Source: Reddy (2024), §3, in words; these formulas are ours.
    """
    labels = pattern_2[..., 1::2]
    present = torch.zeros_like(logits).scatter(-1, batch.context, 1.0)
    return {
        "ila1": pattern_1.diagonal(-1, -2, -1).mean((1, 2)),
        "tila2": (labels * batch.right).sum(-1).mean(-1),
        "cla": (logits.softmax(-1) * present).sum(-1).mean(-1),
        "tla2": labels.sum(-1).mean(-1),
    }


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The sequences on which members are measured at every probe.

    Drawn once: a probe then costs a forward pass and no sampling, and two probes of a training differ by the network
    alone. A member's sequences are a function of its world alone.
    """

    batches: Mapping[str, Exemplars]
    """By kind (`ACCURACIES`); the progress measures rest on `"icl"`, sequences of novel classes."""
    common: Bool[Tensor, "member prompt"]
    """Which in-weights targets are of the most frequent eighth of the classes."""
    rare: Bool[Tensor, "member prompt"]
    """Which are of the less frequent half."""

    @classmethod
    def of(cls, worlds: Worlds, n: int) -> "Evaluation":
        """Draws `n` sequences of each kind for each member."""
        batches = {kind: worlds.batch(0, n, kind) for kind in ACCURACIES}
        rank = batches["iwl"].rank
        size = torch.tensor([task.n_classes for task in worlds.tasks], device=rank.device)[:, None]
        return cls(batches, 8 * rank < size, 2 * rank >= size)


def measure(
    net: Any, evaluation: Evaluation, intervention: Intervention | None = None
) -> dict[str, Float[Tensor, " member"]]:
    """Measures every member: accuracies, the loss in context, and the progress measures.

    `iwl_common` and `iwl_rare` are the in-weights accuracy on targets of the most frequent eighth of the classes and of
    the less frequent half. NaN where there was no such target. Where frequencies are skewed they say too much of the
    weights: the context often has the target's class (`task.Kind`).

    Args:
        net: An `ExemplarNet` or `InductionHead`.
        evaluation: The sequences, of the worlds of its members.
        intervention: Under what it runs.
    """
    patterns: dict[str, Tensor] = {}
    names = [name_of("pattern", layer) for layer in range(2)]
    probes = Probes(net, {name: partial(patterns.__setitem__, name) for name in names})
    logits, right = {}, {}
    for kind, batch in evaluation.batches.items():
        hooks = [*(intervention(batch) if intervention else ()), *(probes.fwd_hooks if kind == "icl" else ())]
        with torch.no_grad(), net.hooks(fwd_hooks=hooks):
            logits[kind] = net.logits(batch.inputs)
        right[kind] = (logits[kind].argmax(-1) == batch.label).float()
    probes.check()
    icl = evaluation.batches["icl"]
    first, second = (patterns[name].unflatten(0, icl.label.shape)[:, :, 0] for name in names)
    groups = {"iwl_common": evaluation.common, "iwl_rare": evaluation.rare}
    values = {
        **{kind: each.mean(-1) for kind, each in right.items()},
        **{name: (right["iwl"] * group).sum(-1) / group.sum(-1) for name, group in groups.items()},
        "loss_icl": -logits["icl"].log_softmax(-1).gather(-1, icl.label[..., None]).mean((-1, -2)),
        **progress(first, second[:, :, -1], logits["icl"], icl),
    }
    return {name: values[name] for name in MEASURES}
