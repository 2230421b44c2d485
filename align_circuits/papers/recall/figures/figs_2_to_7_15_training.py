"""What pretraining teaches, what finetuning adds, and what recall in context depends on: Figs. 2 to 7 and 15."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.lab import Claim, over_seeds
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.common import (
    at_end,
    best,
    draw_curves,
    figure,
    grid,
    key_values,
    learned,
    reached,
)
from align_circuits.papers.recall.figures.gpt2_models import Trainings, curves_study
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig

FROM_ZERO: gpt2.Finetuned = "icl+grm from 0"

READINGS: tuple[gpt2.Finetuned, ...] = ("icl+grm", FROM_ZERO)
"""S_ft from 1 on, as App. B prints; and from 0 on, which makes ICL one of its cases, as the text calls it."""

LEARNED = 0.8
"""A match is learned where it reaches this share of prompts."""

WITH_ADAMW = replace(
    gpt2.CPU,
    pretraining=TrainConfig(12_000, lr=1e-3, weight_decay=1e-3, warmup=50, log_every=250, checkpoint_every=250),
)
"""With AdamW, as in the paper: with Muon, the optimizer of the other figures at this scale, facts are learned several
times sooner, and the type not before them."""

_PT = {"stage": "pt", "probe": "pt"}
_HELD_OUT = {"probe": "icl_held_out", "match": "exact"}


def _four(**where: Any) -> dict[str, dict[str, Any]]:
    """The keys of the curves of the four matches on one probe."""
    return {match: {"match": match, **where} for match in MATCHES}


def _draw_pretraining(table: Table) -> dict[str, go.Figure]:
    panels = {caption: _four(stage="pt", probe=probe) for probe, caption in (("pt", "PT"), ("icl", "ICL"))}
    return {"": draw_curves(table, panels, label="steps of pretraining", value="share of prompts")}


def _check_pretraining(table: Table) -> list[Claim]:
    type_, fact, subject = (reached(table, LEARNED, match=match, **_PT) for match in ("type", "exact", "subject"))
    exact, icl = _PT | {"match": "exact"}, {"stage": "pt", "probe": "icl", "match": "exact"}
    return [
        learned(
            table, "Pretraining teaches the facts (exact match on PT)", LEARNED, "before training", "about 1", **exact
        ),
        Claim(
            "The type is learned before the fact (share of seeds whose type match is learned at an earlier step)",
            "type, then fact",
        ).at_least(0.9, type_ < fact, fact < type_, "the fact before the type"),
        Claim("The type is learned before the subject (share of seeds)", "type first").at_least(
            0.9, type_ < subject, subject < type_, "the subject before the type"
        ),
        Claim("Finding 1: pretraining does not suffice for ICL (exact match on ICL)", "near 0").at_most(
            0.2, at_end(table, **icl), at_end(table, **exact), "the same on PT"
        ),
    ]


def _draw_finetuning(table: Table, *kinds: gpt2.Finetuned) -> dict[str, go.Figure]:
    figures = {}
    for kind in kinds:
        panels = {
            f"ICL, {caption} query subjects": _four(stage=kind, probe=f"icl_{queries}")
            for queries, caption in (("seen", "seen"), ("held_out", "held-out"))
        }
        label = f"steps of finetuning on {gpt2.CAPTIONS[kind]}"
        title = gpt2.CAPTIONS[kind] if len(kinds) > 1 else ""
        figures[title] = draw_curves(table, panels, label=label, value="share of prompts")
    return figures


def _check_finetuning(table: Table, *kinds: gpt2.Finetuned) -> list[Claim]:
    checks = []
    for kind in kinds:
        seen, held_out = ({"stage": kind, "probe": f"icl_{who}", "match": "exact"} for who in ("seen", "held_out"))
        finding, published = (2, "about 1") if kind == "icl" else (3, "about 0.9")
        claim = f"Finetuning on {gpt2.CAPTIONS[kind]} brings ICL about seen subjects (exact match)"
        generalizes = f"Finding {finding}, {gpt2.CAPTIONS[kind]}: and about held-out subjects (exact match)"
        checks += [
            learned(table, claim, LEARNED, "before finetuning", "about 1", **seen),
            learned(table, generalizes, 0.5, "before finetuning", published, **held_out),
        ]
    return checks


def _draw_formats(table: Table) -> dict[str, go.Figure]:
    figures = {}
    for stage in READINGS:
        curves = {
            f"{caption}, {who}": {"stage": stage, "probe": f"{probe}_{queries}", "match": "exact"}
            for probe, caption in (("grm", "S_ft = 1"), ("icl", "ICL"))
            for queries, who in (("seen", "seen"), ("held_out", "held-out"))
        }
        label = f"steps of finetuning on {gpt2.CAPTIONS[stage]}"
        figures[gpt2.CAPTIONS[stage]] = draw_curves(table, {"": curves}, label=label, value="exact match")
    return figures


def _check_formats(table: Table) -> list[Claim]:
    checks = []
    for stage in READINGS:
        icl = _HELD_OUT | {"stage": stage}
        grm_step, icl_step = (reached(table, 0.5, **icl | {"probe": probe}) for probe in ("grm_held_out", icl["probe"]))
        grm_first = (grm_step < icl_step) & np.isfinite(icl_step)
        icl_first = (icl_step < grm_step) & np.isfinite(grm_step)
        checks += [
            Claim(
                f"{gpt2.CAPTIONS[stage]}: it is learned before ICL (share of seeds in which both reach a half, "
                "held-out, ICL+Grm earlier)",
                "ICL+Grm first",
            ).at_least(0.9, grm_first, icl_first, "ICL before ICL+Grm"),
            learned(
                table,
                f"{gpt2.CAPTIONS[stage]}: ICL about held-out subjects follows (exact match)",
                0.5,
                "before finetuning",
                **icl,
            ),
        ]
    return checks


# Figures 5 to 7


def _stages(table: Table) -> dict[gpt2.Finetuned, str]:
    """The captions of the kinds of sequences that the table's models were finetuned on."""
    return {stage: caption for stage, caption in gpt2.CAPTIONS.items() if stage in set(table.frame["stage"])}


def _draw_seen(table: Table) -> dict[str, go.Figure]:
    rows = [
        {"n_seen": n, "curve": curve, **vars(over_seeds(best(table, n_seen=n, **_HELD_OUT | {"stage": stage})))}
        for stage, curve in _stages(table).items()
        for n in key_values(table, "n_seen")
    ]
    label = "subjects finetuned on"
    return {"": plots.curves({"": pd.DataFrame(rows)}, x="n_seen", by="curve", label=label, value="exact match on ICL")}


def _check_seen(table: Table) -> list[Claim]:
    few, *_, many = key_values(table, "n_seen")
    checks = []
    for stage, name in _stages(table).items():
        held_out, control = _HELD_OUT | {"stage": stage}, {"stage": stage, "probe": "pt", "match": "attribute"}
        claim = f"More subjects in finetuning on {name} raise ICL about held-out ones ({many} minus {few}, best step)"
        checks.append(
            Claim(claim).at_least(
                0.15,
                best(table, n_seen=many, **held_out) - best(table, n_seen=few, **held_out),
                at_end(table, n_seen=many, **control) - at_end(table, n_seen=few, **control),
                "attribute match on PT, which does not need them",
            )
        )
    return checks


def _grid(table: Table, columns: str, where: dict[str, Any]) -> pd.DataFrame:
    """Means over seeds at the end, with diversities as rows."""
    values = {
        (str(div), str(column)): at_end(table, div=div, **{columns: column}, **where).mean()
        for div in key_values(table, "div")
        for column in key_values(table, columns)
    }
    return pd.Series(values).unstack(sort=False)


def _draw_grid(table: Table, columns: str, label: str) -> dict[str, go.Figure]:
    panels = {"PT, after pretraining": _grid(table, columns, _PT | {"match": "exact"})} | {
        f"ICL, held-out, after {caption}": _grid(table, columns, _HELD_OUT | {"stage": stage})
        for stage, caption in _stages(table).items()
    }
    return {"": plots.accuracy_grids(panels, x=label, y="Div", value="exact match")}


def _check_grid(table: Table, columns: str, label: str) -> list[Claim]:
    (low, *_, high), (small, *_, large) = key_values(table, "div"), key_values(table, columns)

    def end(where: dict[str, Any], div: float, column: int) -> Float[ndarray, " seed"]:
        return at_end(table, div=div, **{columns: column}, **where)

    control = _PT | {"match": "attribute"}
    probes = {
        f"ICL about held-out subjects after {caption}": _HELD_OUT | {"stage": stage}
        for stage, caption in _stages(table).items()
    }
    if columns == "grammar_len":
        probes = {"PT": _PT | {"match": "exact"}} | probes
    checks = []
    for name, where in probes.items():
        for claim, more, less in (
            (f"A larger {label} raises {name} ({large} minus {small}, Div {high})", (high, large), (high, small)),
            (f"A larger Div raises {name} ({high} minus {low}, {label} {small})", (high, small), (low, small)),
        ):
            values, controls = (end(keys, *more) - end(keys, *less) for keys in (where, control))
            checks.append(Claim(claim).at_least(0.1, values, controls, "attribute match on PT, which needs neither"))
    return checks


def _lengths(divs: tuple[float, ...], lens: tuple[int, ...], shorter: dict[int, tuple[int, int]]) -> Any:
    """S x Div; short sequences have another S_ft, as in App. B."""
    return tuple(
        keys | ({"grammar_lens": shorter[keys["grammar_len"]]} if keys["grammar_len"] in shorter else {})
        for keys in grid(div=divs, grammar_len=lens)
    )


FINETUNING_STUDY = curves_study(
    "recall/finetuning", *(Trainings(setup, ("icl", *READINGS)) for setup in (gpt2.SMOKE, gpt2.CPU, gpt2.PAPER))
)

FIG2 = figure(
    2,
    "What pretraining on facts teaches",
    curves_study("recall/fig2", *(Trainings(setup, ("pt",)) for setup in (gpt2.SMOKE, WITH_ADAMW, gpt2.PAPER))),
    _draw_pretraining,
    _check_pretraining,
    "On PT the type is learned first, then the fact; ICL stays near zero.",
)
FIG3 = figure(
    3,
    "Finetuning on ICL",
    FINETUNING_STUDY,
    lambda table: _draw_finetuning(table, "icl"),
    lambda table: _check_finetuning(table, "icl"),
    "ICL about seen and held-out subjects comes to about 1.",
)
FIG4 = figure(
    4,
    "Finetuning on ICL+Grm",
    FINETUNING_STUDY,
    lambda table: _draw_finetuning(table, *READINGS),
    lambda table: _check_finetuning(table, *READINGS),
    "ICL, another format, comes too, about seen and held-out subjects.",
)
FIG15 = figure(
    15,
    "Finetuning on ICL+Grm, measured in both formats",
    FINETUNING_STUDY,
    _draw_formats,
    _check_formats,
    "Performance improves first on ICL+Grm, later on ICL.",
)

FIG5 = figure(
    5,
    "Held-out accuracy against the number of subjects in finetuning",
    curves_study(
        "recall/fig5",
        Trainings(gpt2.SMOKE, ("icl", *READINGS), grid(n_seen=(4, 12))),
        Trainings(gpt2.CPU, ("icl", *READINGS), grid(n_seen=(12, 48, 72))),
        Trainings(gpt2.PAPER, ("icl", *READINGS), grid(n_seen=(16, 32, 64, 128, 192))),
    ),
    _draw_seen,
    _check_seen,
    "Accuracy rises with the number of subjects, comparably for ICL and ICL+Grm.",
)

FIG6 = figure(
    6,
    "Grammar length and diversity of the chains",
    curves_study(
        "recall/fig6",
        Trainings(gpt2.SMOKE, ("pt", *READINGS), _lengths((0.2, 0.5), (3, 5), {})),
        Trainings(gpt2.CPU, ("pt", FROM_ZERO), _lengths((0.2, 0.5), (6, 20), {})),
        Trainings(gpt2.PAPER, ("pt", *READINGS), _lengths((0.1, 0.3, 0.5), (20, 40, 80), {20: (1, 4)})),
    ),
    lambda table: _draw_grid(table, "grammar_len", "S"),
    lambda table: _check_grid(table, "grammar_len", "S"),
    "Both raise PT and ICL about held-out subjects.",
)

FIG7 = figure(
    7,
    "Subjects in pretraining",
    curves_study(
        "recall/fig7",
        Trainings(gpt2.SMOKE, ("pt", *READINGS), grid(div=(0.2, 0.5), n_subjects=(8, 16))),
        Trainings(gpt2.CPU, ("pt", FROM_ZERO), grid(div=(0.2, 0.5), n_subjects=(24, 96))),
        Trainings(gpt2.PAPER, ("pt", *READINGS), grid(div=(0.1, 0.3, 0.5), n_subjects=(64, 128, 256))),
    ),
    lambda table: _draw_grid(table, "n_subjects", "M"),
    lambda table: _check_grid(table, "n_subjects", "M"),
    "More subjects raise ICL about held-out ones.",
)
