"""Abrupt learning (Reddy, 2024): the induction head with three and two parameters, Figs. 6 and A.2."""

from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.abrupt.curves import at_end, mean_curves, single_curves, stalled
from align_circuits.papers.abrupt.fig_a5_labels_and_pairs import stall_checks
from align_circuits.papers.abrupt.figs_3_4_5_transition import check_alignment, draw_measures
from align_circuits.papers.abrupt.grid import BOTH, CPU, LEARNED, PAPER, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.study import Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_UNTRAINED = "alpha, beta_1 and beta_2 all held at 0"


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


def _check_fig6(table: Table) -> list[Check]:
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
        *(replace(check, claim=f"Three parameters: {check.claim}") for check in order),
        *(replace(check, claim=f"beta_2 = 0: {check.claim}") for check in without),
        *stall_checks(*stalls, published="four of six"),
    ]


def _fig6(size: Size, n_classes: int, n_labels: int) -> Grid:
    models = (("three", n_labels), ("two", n_labels), ("none", n_labels), ("two", size.task.n_pairs))
    conditions = tuple({"model": model, "n_labels": labels} for model, labels in models)
    return Grid(size.with_task(n_classes=n_classes, burst=1, noise=0.0, p_context=0.8), conditions)


FIG6 = Experiment(
    name="abrupt/fig6",
    title="The reduced induction head: with beta_2, without it, and with as many labels as pairs",
    source=f"{SOURCE}, Fig. 6",
    study=grid_study(
        "abrupt/fig6", _fig6(SMOKE, 16, 8), _fig6(CPU, 64, 16), _fig6(PAPER.with_task(d_content=64), 256, 32)
    ),
    draw=_draw_fig6,
    check=_check_fig6,
    published="(a), (b): an abrupt transition with and without beta_2. (c): two of six seeds learn at L = N = 8.",
)


# Figure A.2


def _draw_a2(table: Table) -> dict[str, go.Figure]:
    models = {"three": "three parameters", "two": "two parameters"}
    accuracy: dict[str, pd.DataFrame] = {name: mean_curves(table, BOTH, model=model) for model, name in models.items()}
    loss = {name: mean_curves(table, {"loss_icl": "in context"}, model=model) for model, name in models.items()}
    return {
        "accuracy": plots.curves(accuracy, x="step", by="measure", label="step"),
        "loss": plots.curves(loss, x="step", by="measure", label="step", value="loss (nats)"),
    }


def _check_a2(table: Table) -> list[Check]:
    claim = Claim("The minimal model learns in context without context sequences (accuracy at the end)")
    three, none = (at_end(table, "icl", model=model) for model in ("three", "none"))
    return [claim.at_least(LEARNED, three, none, _UNTRAINED)]


def _figa2(size: Size, n_classes: int) -> Grid:
    return Grid(
        size.with_task(n_classes=n_classes, burst=2), tuple({"model": model} for model in ("three", "two", "none"))
    )


FIGA2 = Experiment(
    name="abrupt/figA2",
    title="Loss and accuracy of the minimal model",
    source=f"{SOURCE}, Fig. A.2",
    study=grid_study(
        "abrupt/figA2",
        _figa2(SMOKE, 16),
        _figa2(CPU.with_task(noise=0.1), 512),
        _figa2(PAPER.with_task(d_content=64), 512),
    ),
    draw=_draw_a2,
    check=_check_a2,
    published="K = 512, D = 64, B = 2: an abrupt rise of accuracy in context.",
)
