"""How many hidden layers the classifier needs, to learn in weights and for the induction head to form."""

from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.abrupt.curves import at_end, conditions_of, has_formed
from align_circuits.papers.abrupt.grid import CPU, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.lab import Claim, Experiment, over_seeds, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

IN_WEIGHTS = {"burst": 0, "p_context": 0.0}
"""Sequences whose label only the weights know."""

IN_CONTEXT = {"burst": PLATEAU["burst"], "p_context": PLATEAU["p_context"]}

PERFECT = 0.95
"""The accuracy in weights that counts as perfect classification; items are noisy."""


def _depths(table: Table) -> list[int]:
    return sorted(int(each["hidden_layers"]) for each in conditions_of(table, ("hidden_layers",)))


def _draw(table: Table) -> dict[str, go.Figure]:
    rows: list[dict[str, Any]] = []
    for depth in _depths(table):
        weights, context = ({"hidden_layers": depth, **task} for task in (IN_WEIGHTS, IN_CONTEXT))
        curves = {
            "accuracy in weights, B = 0": over_seeds(at_end(table, "iwl", **weights)),
            "accuracy in context, p_C = 0.8": over_seeds(at_end(table, "icl", **context)),
            "share of seeds with an induction head, p_C = 0.8": share_of(has_formed(table, **context)),
        }
        rows += [{"depth": depth, "curve": name, **vars(measured)} for name, measured in curves.items()]
    panel = {"": pd.DataFrame(rows)}
    return {"": plots.curves(panel, x="depth", by="curve", label="hidden layers of the classifier", value="at the end")}


def _check(table: Table) -> list[Claim]:
    weights = {depth: at_end(table, "iwl", hidden_layers=depth, **IN_WEIGHTS) for depth in _depths(table)}
    formed = {depth: share_of(has_formed(table, hidden_layers=depth, **IN_CONTEXT)) for depth in _depths(table)}
    no_context = share_of(has_formed(table, hidden_layers=3, **IN_WEIGHTS)), "B = 0, three hidden layers"
    return [
        Claim("Three hidden layers learn the classes in weights (accuracy in weights at the end)", "perfect").at_least(
            PERFECT, weights[3], weights[0], "none"
        ),
        *(
            Claim(f"{name} (accuracy in weights at the end)", "at least three layers are needed").at_most(
                PERFECT, weights[depth], weights[3], "three"
            )
            for depth, name in ((0, "None does not"), (1, "One does not"), (2, "Two do not"))
        ),
        *(
            Claim(f"The induction head forms with {depth} hidden layers (share of seeds)").at_least(
                0.5, formed[depth], *no_context
            )
            for depth in formed
        ),
    ]


def _grid(size: Size) -> Grid:
    tasks = (IN_WEIGHTS, IN_CONTEXT)
    return Grid(size, [{"hidden_layers": depth, **task} for depth in range(5) for task in tasks])


_AS_MANY_CLASSES = replace(CPU, steps=9000, first_seed=30, log_every=300).with_task(n_classes=1024)
"""As many classes as in the paper: of 512 two hidden layers learn .99 in 3,000 steps, on seeds 20 to 25."""

DEPTH = Experiment(
    name="abrupt/depth",
    title="How many hidden layers the classifier needs",
    source=f"{SOURCE}, §2",
    study=grid_study("abrupt/depth", _grid(SMOKE), _grid(_AS_MANY_CLASSES), _grid(replace(PAPER, log_every=5000))),
    figures=_draw,
    claims=_check,
    published="At least three layers were necessary to achieve perfect classification accuracy, as K is far above L.",
)
