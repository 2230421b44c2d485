"""Contextual recall: what pretraining teaches and what finetuning adds, Figs. 2 to 4 and 15."""

from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from align_circuits.heads.metrics import MATCHES
from align_circuits.papers.claims import Check, Experiment, controlled, measured
from align_circuits.papers.recall.trainings import (
    CPU,
    PAPER,
    SMOKE,
    SOURCE,
    Finetuned,
    Size,
    Study,
    at_end,
    at_start,
    mean_curves,
    reached,
    study,
)
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig

LEARNED = 0.8
"""A match is learned where it reaches this share of prompts."""

STAGEWISE = replace(
    CPU, pretraining=TrainConfig(12_000, lr=1e-3, weight_decay=1e-3, warmup=50, log_every=250, checkpoint_every=250)
)
"""With AdamW, as in the paper: Muon, with which the other figures pretrain at this scale, learns the facts several
times sooner, and the type not before them."""

_SAID = {"icl": "ICL", "icl+grm": "ICL+Grm"}


def _four(table: Table, **where: Any) -> Any:
    """The curves of the four matches on one probe."""
    return mean_curves(table, {match: {"match": match, **where} for match in MATCHES})


def _draw_pretraining(table: Table) -> dict[str, go.Figure]:
    panels = {said: _four(table, stage="pt", probe=probe) for probe, said in (("pt", "PT"), ("icl", "ICL"))}
    return {"": plots.curves(panels, x="step", by="curve", label="steps of pretraining", value="share of prompts")}


def _check_pretraining(table: Table) -> list[Check]:
    pt, icl = {"stage": "pt", "probe": "pt"}, {"stage": "pt", "probe": "icl"}
    exact = at_end(table, match="exact", **pt)
    first = at_start(table, match="exact", **pt)
    type_, exactly, subject = (reached(table, LEARNED, match=match, **pt) for match in ("type", "exact", "subject"))
    return [
        Check(
            "Pretraining teaches the facts (exact match on PT)",
            relation=">=",
            threshold=LEARNED,
            **measured(exact),
            **controlled(first, "before training"),
            published="about 1",
        ),
        Check(
            "The type is learned before the fact (share of seeds whose type match is learned at an earlier step)",
            relation=">=",
            threshold=0.9,
            **measured((type_ < exactly).astype(float)),
            **controlled((exactly < type_).astype(float), "the fact before the type"),
            published="type, then fact",
        ),
        Check(
            "The type is learned before the subject (share of seeds)",
            relation=">=",
            threshold=0.9,
            **measured((type_ < subject).astype(float)),
            **controlled((subject < type_).astype(float), "the subject before the type"),
            published="type first",
        ),
        Check(
            "Finding 1: pretraining does not suffice for ICL (exact match on ICL)",
            relation="<=",
            threshold=0.2,
            **measured(at_end(table, match="exact", **icl)),
            **controlled(exact, "the same on PT"),
            published="near 0",
        ),
    ]


def _draw_finetuning(kind: Finetuned) -> Any:
    def draw(table: Table) -> dict[str, go.Figure]:
        panels = {
            f"ICL, {said} query subjects": _four(table, stage=kind, probe=f"icl_{which}")
            for which, said in (("seen", "seen"), ("held_out", "held-out"))
        }
        label = f"steps of finetuning on {_SAID[kind]}"
        return {"": plots.curves(panels, x="step", by="curve", label=label, value="share of prompts")}

    return draw


def _check_finetuning(kind: Finetuned) -> Any:
    def check(table: Table) -> list[Check]:
        seen, held_out = ({"stage": kind, "probe": f"icl_{which}", "match": "exact"} for which in ("seen", "held_out"))
        before = at_start(table, **held_out)
        finding = 2 if kind == "icl" else 3
        return [
            Check(
                f"Finetuning on {_SAID[kind]} brings ICL about seen subjects (exact match)",
                relation=">=",
                threshold=LEARNED,
                **measured(at_end(table, **seen)),
                **controlled(at_start(table, **seen), "before finetuning"),
                published="about 1",
            ),
            Check(
                f"Finding {finding}: and about held-out subjects (exact match)",
                relation=">=",
                threshold=0.5,
                **measured(at_end(table, **held_out)),
                **controlled(before, "before finetuning"),
                published="about 1" if kind == "icl" else "about 0.9",
            ),
        ]

    return check


def _draw_formats(table: Table) -> dict[str, go.Figure]:
    curves = {
        f"{said}, {who}": {"stage": "icl+grm", "probe": f"{probe}_{which}", "match": "exact"}
        for probe, said in (("grm", "ICL+Grm, S_ft = 1"), ("icl", "ICL"))
        for which, who in (("seen", "seen"), ("held_out", "held-out"))
    }
    panel = {"": mean_curves(table, curves)}
    return {"": plots.curves(panel, x="step", by="curve", label="steps of finetuning on ICL+Grm", value="exact match")}


def _check_formats(table: Table) -> list[Check]:
    own, other = (
        reached(table, 0.5, stage="icl+grm", probe=f"{probe}_held_out", match="exact") for probe in ("grm", "icl")
    )
    held_out = {"stage": "icl+grm", "probe": "icl_held_out", "match": "exact"}
    return [
        Check(
            "ICL+Grm is learned before ICL (share of seeds in which both reach a half, held-out, ICL+Grm earlier)",
            relation=">=",
            threshold=0.9,
            **measured(((own < other) & np.isfinite(other)).astype(float)),
            **controlled(((other < own) & np.isfinite(own)).astype(float), "ICL before ICL+Grm"),
            published="ICL+Grm first",
        ),
        Check(
            "ICL about held-out subjects follows (exact match)",
            relation=">=",
            threshold=0.5,
            **measured(at_end(table, **held_out)),
            **controlled(at_start(table, **held_out), "before finetuning"),
        ),
    ]


def _experiment(
    name: str, title: str, stage: Any, draw: Any, check: Any, published: str, cpu: Size = CPU
) -> Experiment:
    return Experiment(
        name=f"recall/{name}",
        title=title,
        source=f"{SOURCE}, Fig. {name.removeprefix('fig')}",
        scales={"smoke": Study(SMOKE, (stage,)), "cpu": Study(cpu, (stage,)), "paper": Study(PAPER, (stage,))},
        run=study,
        draw=draw,
        check=check,
        makes_models=True,
        published=published,
    )


FIG2 = _experiment(
    "fig2",
    "What pretraining on facts teaches",
    "pt",
    _draw_pretraining,
    _check_pretraining,
    "On PT the type is learned first, then the fact; ICL stays near zero.",
    cpu=STAGEWISE,
)
FIG3 = _experiment(
    "fig3",
    "Finetuning on ICL",
    "icl",
    _draw_finetuning("icl"),
    _check_finetuning("icl"),
    "ICL about seen and held-out subjects comes to about 1.",
)
FIG4 = _experiment(
    "fig4",
    "Finetuning on ICL+Grm",
    "icl+grm",
    _draw_finetuning("icl+grm"),
    _check_finetuning("icl+grm"),
    "ICL, another format, comes too, about seen and held-out subjects.",
)
FIG15 = _experiment(
    "fig15",
    "Finetuning on ICL+Grm, measured in both formats",
    "icl+grm",
    _draw_formats,
    _check_formats,
    "Performance improves first on ICL+Grm, later on ICL.",
)
