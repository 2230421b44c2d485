"""Abrupt learning (Reddy, 2024): the induction head with three and two parameters, Figs. 6 and A.2."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.ensemble_runs import (
    CPU,
    PAPER,
    SMOKE,
    Size,
    Sweep,
    at_end,
    by_seed,
    curves_only,
    mean_curves,
)
from align_circuits.papers.abrupt.figs_1_3_4_network import BOTH, LEARNED, SOURCE, check_alignment, draw_measures, on
from align_circuits.papers.abrupt.figs_a1_a5_mixtures import stalled
from align_circuits.papers.claims import Check, Experiment, controlled, measured
from align_circuits.report import plots
from align_circuits.tables.tables import Table


def _labels(table: Table) -> tuple[int, int]:
    """The larger and the smaller number of labels: L > N and L = N."""
    counts = table.frame["n_labels"].to_numpy(int)
    return int(counts.max()), int(counts.min())


def _draw_fig6(table: Table) -> dict[str, go.Figure]:
    more, equal = _labels(table)
    curves = by_seed(table, "loss_icl", model="two", n_labels=equal)
    long = curves.reset_index().melt("step", var_name="seed").assign(low=np.nan, high=np.nan)
    return {
        "a, three parameters": draw_measures(table, model="three", n_labels=more),
        "b, beta_2 = 0": draw_measures(table, model="two", n_labels=more),
        "c, L = N": plots.curves({"": long}, x="step", by="seed", label="step", value="loss in context (nats)"),
    }


def _check_fig6(table: Table) -> list[Check]:
    more, equal = _labels(table)

    def learned(model: str) -> Float[ndarray, " seed"]:
        return at_end(table, "icl", model=model, n_labels=more)

    several = {
        "L = N": stalled(table, model="two", n_labels=equal),
        "L > N": stalled(table, model="two", n_labels=more),
    }
    checks = [
        Check(
            f"{said} suffice for learning in context (accuracy at the end)",
            relation=">=",
            threshold=LEARNED,
            **measured(learned(model)),
            **controlled(learned("none"), "alpha, beta_1 and beta_2 all held at 0"),
        )
        for model, said in (("three", "Three parameters"), ("two", "Two parameters (beta_2 = 0)"))
    ]
    order = check_alignment(table, model="three", n_labels=more)
    without = check_alignment(table, model="two", n_labels=more)
    checks += [_named(check, "Three parameters") for check in order]
    checks += [_named(check, "beta_2 = 0") for check in without[:3]]  # TLA2 cannot rise by itself there
    checks += [
        Check(
            "L = N stalls some seeds (share of seeds)",
            relation=">=",
            threshold=1 / 6,
            published="four of six",
            **measured(several["L = N"]),
            **controlled(several["L > N"], "L > N"),
        ),
        Check(
            "L > N stalls none (share of seeds)",
            relation="<=",
            threshold=0.0,
            published="none of six",
            **measured(several["L > N"]),
            **controlled(several["L = N"], "L = N"),
        ),
    ]
    return checks


def _named(check: Check, model: str) -> Check:
    return replace(check, claim=f"{model}: {check.claim}")


def _fig6(size: Size, n_classes: int, n_labels: int) -> Sweep:
    def cell(model: str, labels: int) -> dict[str, Any]:
        return {"model": model, "n_labels": labels}

    cells = [cell(model, n_labels) for model in ("three", "two", "none")] + [cell("two", size.task.n_pairs)]
    return Sweep(on(size, n_classes=n_classes, burst=1, noise=0.0, p_context=0.8), tuple(cells))


FIG6 = Experiment(
    name="abrupt/fig6",
    title="The reduced induction head: with beta_2, without it, and with as many labels as pairs",
    source=f"{SOURCE}, Fig. 6",
    scales={"smoke": _fig6(SMOKE, 16, 8), "cpu": _fig6(CPU, 64, 16), "paper": _fig6(on(PAPER, d_content=64), 256, 32)},
    run=curves_only,
    draw=_draw_fig6,
    check=_check_fig6,
    makes_models=True,
    published="(a), (b): an abrupt transition with and without beta_2. (c): two of six seeds learn at L = N = 8.",
)


# Figure A.2


def _draw_a2(table: Table) -> dict[str, go.Figure]:
    models = {"three": "three parameters", "two": "two parameters"}
    accuracy: dict[str, pd.DataFrame] = {said: mean_curves(table, BOTH, model=model) for model, said in models.items()}
    loss = {said: mean_curves(table, {"loss_icl": "in context"}, model=model) for model, said in models.items()}
    return {
        "accuracy": plots.curves(accuracy, x="step", by="measure", label="step"),
        "loss": plots.curves(loss, x="step", by="measure", label="step", value="loss (nats)"),
    }


def _check_a2(table: Table) -> list[Check]:
    return [
        Check(
            "The minimal model learns in context without context sequences (accuracy at the end)",
            relation=">=",
            threshold=LEARNED,
            **measured(at_end(table, "icl", model="three")),
            **controlled(at_end(table, "icl", model="none"), "alpha, beta_1 and beta_2 all held at 0"),
        )
    ]


def _figa2(size: Size, n_classes: int) -> Sweep:
    return Sweep(on(size, n_classes=n_classes, burst=2), tuple({"model": model} for model in ("three", "two", "none")))


FIGA2 = Experiment(
    name="abrupt/figA2",
    title="Loss and accuracy of the minimal model",
    source=f"{SOURCE}, Fig. A.2",
    scales={
        "smoke": _figa2(SMOKE, 16),
        "cpu": _figa2(on(CPU, noise=0.1), 512),
        "paper": _figa2(on(PAPER, d_content=64), 512),
    },
    run=curves_only,
    draw=_draw_a2,
    check=_check_a2,
    makes_models=True,
    published="K = 512, D = 64, B = 2: an abrupt rise of accuracy in context.",
)
