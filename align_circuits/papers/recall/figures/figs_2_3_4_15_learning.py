"""What pretraining teaches and what finetuning adds: Figs. 2 to 4 and 15."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.recall.figures.gpt2_models import CPU, PAPER, SMOKE, SOURCE, Finetuned
from align_circuits.papers.recall.figures.training_curves import (
    Trainings,
    at_end,
    at_start,
    curves_study,
    mean_curves,
    reached,
)
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.papers.study import Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig

LEARNED = 0.8
"""A match is learned where it reaches this share of prompts."""

WITH_ADAMW = replace(
    CPU, pretraining=TrainConfig(12_000, lr=1e-3, weight_decay=1e-3, warmup=50, log_every=250, checkpoint_every=250)
)
"""With AdamW, as in the paper: with Muon, the optimizer of the other figures at this scale, facts are learned several
times sooner, and the type not before them."""

CAPTIONS = {"icl": "ICL", "icl+grm": "ICL+Grm"}


def _four(table: Table, **where: Any) -> pd.DataFrame:
    """The curves of the four matches on one probe."""
    return mean_curves(table, {match: {"match": match, **where} for match in MATCHES})


def _draw_pretraining(table: Table) -> dict[str, go.Figure]:
    panels = {caption: _four(table, stage="pt", probe=probe) for probe, caption in (("pt", "PT"), ("icl", "ICL"))}
    return {"": plots.curves(panels, x="step", by="curve", label="steps of pretraining", value="share of prompts")}


def _check_pretraining(table: Table) -> list[Check]:
    pt, icl = {"stage": "pt", "probe": "pt"}, {"stage": "pt", "probe": "icl"}
    exact, before = at_end(table, match="exact", **pt), at_start(table, match="exact", **pt)
    type_, fact, subject = (reached(table, LEARNED, match=match, **pt) for match in ("type", "exact", "subject"))
    return [
        Claim("Pretraining teaches the facts (exact match on PT)", "about 1").at_least(
            LEARNED, exact, before, "before training"
        ),
        Claim(
            "The type is learned before the fact (share of seeds whose type match is learned at an earlier step)",
            "type, then fact",
        ).at_least(0.9, (type_ < fact).astype(float), (fact < type_).astype(float), "the fact before the type"),
        Claim("The type is learned before the subject (share of seeds)", "type first").at_least(
            0.9, (type_ < subject).astype(float), (subject < type_).astype(float), "the subject before the type"
        ),
        Claim("Finding 1: pretraining does not suffice for ICL (exact match on ICL)", "near 0").at_most(
            0.2, at_end(table, match="exact", **icl), exact, "the same on PT"
        ),
    ]


def _draw_finetuning(table: Table, kind: Finetuned) -> dict[str, go.Figure]:
    panels = {
        f"ICL, {caption} query subjects": _four(table, stage=kind, probe=f"icl_{queries}")
        for queries, caption in (("seen", "seen"), ("held_out", "held-out"))
    }
    label = f"steps of finetuning on {CAPTIONS[kind]}"
    return {"": plots.curves(panels, x="step", by="curve", label=label, value="share of prompts")}


def _check_finetuning(table: Table, kind: Finetuned) -> list[Check]:
    seen, held_out = ({"stage": kind, "probe": f"icl_{who}", "match": "exact"} for who in ("seen", "held_out"))
    finding, published = (2, "about 1") if kind == "icl" else (3, "about 0.9")
    return [
        Claim(f"Finetuning on {CAPTIONS[kind]} brings ICL about seen subjects (exact match)", "about 1").at_least(
            LEARNED, at_end(table, **seen), at_start(table, **seen), "before finetuning"
        ),
        Claim(f"Finding {finding}: and about held-out subjects (exact match)", published).at_least(
            0.5, at_end(table, **held_out), at_start(table, **held_out), "before finetuning"
        ),
    ]


def _draw_formats(table: Table) -> dict[str, go.Figure]:
    curves = {
        f"{caption}, {who}": {"stage": "icl+grm", "probe": f"{probe}_{queries}", "match": "exact"}
        for probe, caption in (("grm", "ICL+Grm, S_ft = 1"), ("icl", "ICL"))
        for queries, who in (("seen", "seen"), ("held_out", "held-out"))
    }
    panel = {"": mean_curves(table, curves)}
    return {"": plots.curves(panel, x="step", by="curve", label="steps of finetuning on ICL+Grm", value="exact match")}


def _check_formats(table: Table) -> list[Check]:
    grm, icl = ({"stage": "icl+grm", "probe": f"{probe}_held_out", "match": "exact"} for probe in ("grm", "icl"))
    grm_step, icl_step = (reached(table, 0.5, **where) for where in (grm, icl))
    return [
        Claim(
            "ICL+Grm is learned before ICL (share of seeds in which both reach a half, held-out, ICL+Grm earlier)",
            "ICL+Grm first",
        ).at_least(
            0.9,
            ((grm_step < icl_step) & np.isfinite(icl_step)).astype(float),
            ((icl_step < grm_step) & np.isfinite(grm_step)).astype(float),
            "ICL before ICL+Grm",
        ),
        Claim("ICL about held-out subjects follows (exact match)").at_least(
            0.5, at_end(table, **icl), at_start(table, **icl), "before finetuning"
        ),
    ]


FINETUNING_STUDY = curves_study(
    "recall/finetuning", *(Trainings(setup, ("icl", "icl+grm")) for setup in (SMOKE, CPU, PAPER))
)

FIG2 = Experiment(
    "recall/fig2",
    "What pretraining on facts teaches",
    f"{SOURCE}, Fig. 2",
    curves_study("recall/fig2", *(Trainings(setup, ("pt",)) for setup in (SMOKE, WITH_ADAMW, PAPER))),
    _draw_pretraining,
    _check_pretraining,
    "On PT the type is learned first, then the fact; ICL stays near zero.",
)
FIG3 = Experiment(
    "recall/fig3",
    "Finetuning on ICL",
    f"{SOURCE}, Fig. 3",
    FINETUNING_STUDY,
    lambda table: _draw_finetuning(table, "icl"),
    lambda table: _check_finetuning(table, "icl"),
    "ICL about seen and held-out subjects comes to about 1.",
)
FIG4 = Experiment(
    "recall/fig4",
    "Finetuning on ICL+Grm",
    f"{SOURCE}, Fig. 4",
    FINETUNING_STUDY,
    lambda table: _draw_finetuning(table, "icl+grm"),
    lambda table: _check_finetuning(table, "icl+grm"),
    "ICL, another format, comes too, about seen and held-out subjects.",
)
FIG15 = Experiment(
    "recall/fig15",
    "Finetuning on ICL+Grm, measured in both formats",
    f"{SOURCE}, Fig. 15",
    FINETUNING_STUDY,
    _draw_formats,
    _check_formats,
    "Performance improves first on ICL+Grm, later on ICL.",
)
