"""Abrupt learning (Reddy, 2024): the reduced induction head, and as many labels as pairs, Figs. 6, A.2 and A.5."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from align_circuits.papers.abrupt.curves import at_end, conditions_of, draw_means, single_curves, stalled
from align_circuits.papers.abrupt.figs_3_4_5_transition import check_alignment, draw_measures
from align_circuits.papers.abrupt.grid import BOTH, CPU, LEARNED, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.lab import Claim, Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_UNTRAINED = "alpha, beta_1 and beta_2 all held at 0"


def _stall_checks(equal: np.ndarray, more: np.ndarray, published: str) -> list[Claim]:
    """The claims about which seeds stall, at L = N and at L > N."""
    return [
        Claim("L = N stalls some seeds (share of seeds)", published).at_least(1 / 6, equal, more, "L > N"),
        Claim("L > N stalls none (share of seeds)", "none of six").at_most(0.0, more, equal, "L = N"),
    ]


# Figure 6


def _labels(table: Table) -> tuple[int, int]:
    """The larger and the smaller number of labels: L > N and L = N."""
    counts = table.frame["n_labels"].to_numpy(int)
    return int(counts.max()), int(counts.min())


def _draw_fig6(table: Table) -> dict[str, go.Figure]:
    more, equal = _labels(table)
    curves = single_curves(table, "loss_icl", model="two", n_labels=equal)
    return {
        "a, three parameters": draw_measures(table, model="three", n_labels=more),
        "b, beta_2 = 0": draw_measures(table, model="two", n_labels=more),
        "c, L = N": plots.curves({"": curves}, x="step", by="seed", label="step", value="loss in context (nats)"),
    }


def _check_fig6(table: Table) -> list[Claim]:
    more, equal = _labels(table)
    ends = {model: at_end(table, "icl", model=model, n_labels=more) for model in ("three", "two", "none")}
    learned = [
        Claim(f"{name} suffice for learning in context (accuracy at the end)").at_least(
            LEARNED, ends[model], ends["none"], _UNTRAINED
        )
        for model, name in (("three", "Three parameters"), ("two", "Two parameters (beta_2 = 0)"))
    ]
    order = check_alignment(table, model="three", n_labels=more)
    without = check_alignment(table, model="two", n_labels=more)[:3]  # TLA2 cannot rise by itself there
    stalls = [stalled(table, model="two", n_labels=count) for count in (equal, more)]
    return [
        *learned,
        *(replace(claim, text=f"Three parameters: {claim.text}") for claim in order),
        *(replace(claim, text=f"beta_2 = 0: {claim.text}") for claim in without),
        *_stall_checks(*stalls, published="four of six"),
    ]


def _fig6(size: Size) -> Grid:
    n_labels, n_pairs = size.task.n_labels, size.task.n_pairs
    models = (("three", n_labels), ("two", n_labels), ("none", n_labels), ("two", n_pairs))
    return Grid(size.with_task(**PLATEAU), [{"model": model, "n_labels": labels} for model, labels in models])


FIG6 = Experiment(
    name="abrupt/fig6",
    title="The reduced induction head: with beta_2, without it, and with as many labels as pairs",
    source=f"{SOURCE}, Fig. 6",
    study=grid_study("abrupt/fig6", *map(_fig6, (SMOKE, CPU, PAPER.with_task(d_content=64, n_classes=256)))),
    figures=_draw_fig6,
    claims=_check_fig6,
    published="(a), (b): an abrupt transition with and without beta_2. (c): two of six seeds learn at L = N = 8.",
)


# Figure A.2


def _draw_a2(table: Table) -> dict[str, go.Figure]:
    panels = {"three parameters": {"model": "three"}, "two parameters": {"model": "two"}}
    return {
        "accuracy": draw_means(table, BOTH, panels),
        "loss": draw_means(table, {"loss_icl": "in context"}, panels, "loss (nats)"),
    }


def _check_a2(table: Table) -> list[Claim]:
    claim = Claim("The minimal model learns in context without context sequences (accuracy at the end)")
    three, none = (at_end(table, "icl", model=model) for model in ("three", "none"))
    return [claim.at_least(LEARNED, three, none, _UNTRAINED)]


def _figa2(size: Size) -> Grid:
    return Grid(size.with_task(burst=2), [{"model": model} for model in ("three", "two", "none")])


FIGA2 = Experiment(
    name="abrupt/figA2",
    title="Loss and accuracy of the minimal model",
    source=f"{SOURCE}, Fig. A.2",
    study=grid_study(
        "abrupt/figA2",
        _figa2(SMOKE),
        _figa2(CPU.with_task(n_classes=512)),
        _figa2(PAPER.with_task(n_classes=512, d_content=64)),
    ),
    figures=_draw_a2,
    claims=_check_a2,
    published="K = 512, D = 64, B = 2: an abrupt rise of accuracy in context.",
)


# Figure A.5


def _draw_a5(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"L {condition['n_labels']}, N {condition['n_pairs']}": single_curves(table, "icl", **condition)
        for condition in conditions_of(table, ("n_labels", "n_pairs"))
    }
    return {"figA5": plots.curves(panels, x="step", by="seed", label="step", value="IC accuracy")}


def _check_a5(table: Table) -> list[Claim]:
    shares = {True: [], False: []}
    for condition in conditions_of(table, ("n_labels", "n_pairs")):
        shares[condition["n_labels"] > condition["n_pairs"]].append(stalled(table, **condition))
    more, equal = (np.concatenate(shares[key]) for key in (True, False))
    return _stall_checks(equal, more, published="some of six")


def _figa5(size: Size, pairs: Sequence[int], labels: Sequence[int]) -> Grid:
    conditions = [{"n_pairs": n, "n_labels": count} for n in pairs for count in labels if count >= n]
    return Grid(size.with_task(**PLATEAU), conditions)


FIGA5 = Experiment(
    name="abrupt/figA5",
    title="As many labels as pairs: the transition may fail to come",
    source=f"{SOURCE}, Fig. A.5",
    study=grid_study(
        "abrupt/figA5",
        _figa5(SMOKE, (2,), (2, 8)),
        _figa5(CPU, (4,), (4, 8, 16)),
        _figa5(PAPER.with_task(n_classes=256), (4, 8, 16), (4, 8, 16, 32)),
    ),
    figures=_draw_a5,
    claims=_check_a5,
    published="Six seeds for each pair of L and N: robust if L > N, not if L = N.",
)
