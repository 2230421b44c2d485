"""What pretraining teaches, what finetuning adds, and what recall in context depends on: Figs. 2 to 7 and 15."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import courses, lines
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.gpt2_models import Trainings, curves_study
from align_circuits.papers.recall.figures.studies import figure, grid, learned
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.papers.statistics import HIGH, LOW, at_end, best, levels, reached
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
_EXACT_ON_PT = {**_PT, "match": "exact"}
_NEEDS_NEITHER = at_end(**_PT, match="attribute")


def _exact(stage: str, probe: str) -> dict[str, Any]:
    return {"stage": stage, "probe": probe, "match": "exact"}


def _four(**where: Any) -> dict[str, dict[str, Any]]:
    """The keys of the curves of the four matches on one probe."""
    return {match: {"match": match, **where} for match in MATCHES}


# Figures 2 to 4 and 15

_TYPE, _FACT, _SUBJECT = (reached(LEARNED, match=match, **_PT) for match in ("type", "exact", "subject"))


def _label(kind: gpt2.Finetuned) -> str:
    return f"steps of finetuning on {gpt2.CAPTIONS[kind]}"


def _finetuning(*kinds: gpt2.Finetuned) -> dict[str, Any]:
    queries = {"seen": "icl_seen", "held-out": "icl_held_out"}
    return {
        gpt2.CAPTIONS[kind] if len(kinds) > 1 else "": courses(
            {f"ICL, {who} query subjects": _four(stage=kind, probe=probe) for who, probe in queries.items()},
            label=_label(kind),
            value="share of prompts",
        )
        for kind in kinds
    }


def _finetuning_claims(*kinds: gpt2.Finetuned) -> list[Claim]:
    claims = []
    for kind in kinds:
        caption, (finding, published) = gpt2.CAPTIONS[kind], (2, "about 1") if kind == "icl" else (3, "about 0.9")
        seen = f"Finetuning on {caption} brings ICL about seen subjects (exact match)"
        held_out = f"Finding {finding}, {caption}: and about held-out subjects (exact match)"
        claims += [
            learned(seen, LEARNED, "before finetuning", "about 1", **_exact(kind, "icl_seen")),
            learned(held_out, 0.5, "before finetuning", published, **_exact(kind, "icl_held_out")),
        ]
    return claims


def _both_formats(kind: gpt2.Finetuned) -> Any:
    curves = {
        f"{caption}, {who}": _exact(kind, f"{probe}_{queries}")
        for probe, caption in (("grm", "S_ft = 1"), ("icl", "ICL"))
        for queries, who in (("seen", "seen"), ("held_out", "held-out"))
    }
    return courses({"": curves}, label=_label(kind), value="exact match")


def _format_claims(kind: gpt2.Finetuned) -> list[Claim]:
    grm, icl = (reached(0.5, **_exact(kind, f"{probe}_held_out")) for probe in ("grm", "icl"))
    caption = gpt2.CAPTIONS[kind]
    follows = f"{caption}: ICL about held-out subjects follows (exact match)"
    return [
        Claim(
            f"{caption}: it is learned before ICL (share of seeds in which both reach a half, held-out, ICL+Grm "
            "earlier)",
            "ICL+Grm first",
        ).at_least(0.5, (grm < icl) & (icl < np.inf), (icl < grm) & (grm < np.inf), "ICL before ICL+Grm"),
        learned(follows, 0.5, "before finetuning", **_exact(kind, "icl_held_out")),
    ]


FIG2 = figure(
    2,
    "What pretraining on facts teaches",
    curves_study(
        "recall/fig2",
        *(Trainings(setup, ("pt",)) for setup in (gpt2.SMOKE, WITH_ADAMW, gpt2.PAPER)),
        cpu_untied=Trainings(replace(WITH_ADAMW, tied=False), ("pt",)),
        paper_s20=Trainings(gpt2.PAPER_S20, ("pt",)),
        paper_s20_untied=Trainings(gpt2.PAPER_S20_UNTIED, ("pt",)),
    ),
    {
        "": courses(
            {probe.upper(): _four(stage="pt", probe=probe) for probe in ("pt", "icl")},
            label="steps of pretraining",
            value="share of prompts",
        )
    },
    [
        learned(
            "Pretraining teaches the facts (exact match on PT)", LEARNED, "before training", "about 1", **_EXACT_ON_PT
        ),
        Claim(
            "The type is learned before the fact (share of seeds whose type match is learned at an earlier step)",
            "type, then fact",
        ).at_least(0.5, _TYPE < _FACT, _FACT < _TYPE, "the fact before the type"),
        Claim("The type is learned before the subject (share of seeds)", "type first").at_least(
            0.5, _TYPE < _SUBJECT, _SUBJECT < _TYPE, "the subject before the type"
        ),
        Claim("Finding 1: pretraining does not suffice for ICL (exact match on ICL)", "near 0").at_most(
            0.2, at_end(**_exact("pt", "icl")), at_end(**_EXACT_ON_PT), "the same on PT"
        ),
    ],
    "On PT the type is learned first, then the fact; ICL stays near zero.",
)

FINETUNING_STUDY = curves_study(
    "recall/finetuning",
    *(Trainings(setup, ("icl", *READINGS)) for setup in (gpt2.SMOKE, gpt2.CPU, gpt2.PAPER)),
    cpu_untied=Trainings(gpt2.CPU_UNTIED_TWELVE, ("icl", *READINGS)),
    paper_s20=Trainings(gpt2.PAPER_S20, ("icl", *READINGS)),
    paper_s20_untied=Trainings(gpt2.PAPER_S20_UNTIED, ("icl", *READINGS)),
)
FIG3 = figure(
    3,
    "Finetuning on ICL",
    FINETUNING_STUDY,
    _finetuning("icl"),
    _finetuning_claims("icl"),
    "ICL about seen and held-out subjects comes to about 1.",
)
FIG4 = figure(
    4,
    "Finetuning on ICL+Grm",
    FINETUNING_STUDY,
    _finetuning(*READINGS),
    _finetuning_claims(*READINGS),
    "ICL, another format, comes too, about seen and held-out subjects.",
)
FIG15 = figure(
    15,
    "Finetuning on ICL+Grm, measured in both formats",
    FINETUNING_STUDY,
    {gpt2.CAPTIONS[kind]: _both_formats(kind) for kind in READINGS},
    [claim for kind in READINGS for claim in _format_claims(kind)],
    "Performance improves first on ICL+Grm, later on ICL.",
)


# Figures 5 to 7

FIG5 = figure(
    5,
    "Held-out accuracy against the number of subjects in finetuning",
    curves_study(
        "recall/fig5",
        Trainings(gpt2.SMOKE, ("icl", *READINGS), grid(n_seen=(4, 12))),
        Trainings(gpt2.CPU, ("icl", *READINGS), grid(n_seen=(12, 48, 72))),
        Trainings(gpt2.PAPER, ("icl", *READINGS), grid(n_seen=(16, 32, 64, 128, 192))),
        cpu_untied=Trainings(gpt2.CPU_UNTIED, ("icl", *READINGS), grid(n_seen=(12, 48, 72))),
    ),
    {
        "": lines(
            {caption: best(**_exact(kind, "icl_held_out")) for kind, caption in gpt2.CAPTIONS.items()},
            "n_seen",
            label="subjects finetuned on",
            value="exact match on ICL",
        )
    },
    [
        Claim(
            f"More subjects in finetuning on {caption} raise ICL about held-out ones "
            "({n_seen.high} minus {n_seen.low}, best step)"
        ).at_least(
            0.15,
            best(**_exact(kind, "icl_held_out")).rise("n_seen"),
            at_end(stage=kind, probe="pt", match="attribute").rise("n_seen"),
            "attribute match on PT, which does not need them",
        )
        for kind, caption in gpt2.CAPTIONS.items()
    ],
    "Accuracy rises with the number of subjects, comparably for ICL and ICL+Grm.",
)


def _finetuned_in(table: Table) -> dict[str, dict[str, Any]]:
    """The keys of ICL about held-out subjects by the caption of each kind of finetuning that the table has."""
    kinds = {kind: caption for kind, caption in gpt2.CAPTIONS.items() if kind in set(table.frame["stage"])}
    return {caption: _exact(kind, "icl_held_out") for kind, caption in kinds.items()}


def _draw_grid(table: Table, columns: str, label: str) -> dict[str, go.Figure]:
    probes = {"PT, after pretraining": _EXACT_ON_PT}
    probes |= {f"ICL, held-out, after {caption}": keys for caption, keys in _finetuned_in(table).items()}
    panels = {}
    for caption, keys in probes.items():
        ends = {
            (str(div), str(column)): at_end(div=div, **{columns: column}, **keys)(table).mean()
            for div in levels(table, "div")
            for column in levels(table, columns)
        }
        panels[caption] = pd.Series(ends).unstack(sort=False)
    return {"": plots.accuracy_grids(panels, x=label, y="Div", value="exact match")}


def _grid_claims(table: Table, columns: str, label: str) -> list[Claim]:
    """Returns the claims of Figs. 6 and 7.

    That a larger Div helps is a claim of Fig. 6 alone: in Fig. 7, where S is 80, the paper calls all levels comparable.
    """
    probes = {f"ICL about held-out subjects after {caption}": keys for caption, keys in _finetuned_in(table).items()}
    if columns == "grammar_len":
        probes = {"PT": _EXACT_ON_PT} | probes
    column = {name: f"{{{columns}.{name}}}" for name in ("low", "high")}
    claims = []
    for name, keys in probes.items():
        more = f"A larger {label} raises {name} ({column['high']} minus {column['low']}, Div {{div.high}})"
        diverse = f"A larger Div raises {name} ({{div.high}} minus {{div.low}}, {label} {column['low']})"
        varied = [(more, columns, {"div": HIGH}), (diverse, "div", {columns: LOW})]
        for claim, raised, fixed in varied if columns == "grammar_len" else varied[:1]:
            values, control = (end.at(**fixed).rise(raised) for end in (at_end(**keys), _NEEDS_NEITHER))
            claims.append(Claim(claim).at_least(0.1, values, control, "attribute match on PT, which needs neither"))
    return claims


def _lengths(divs: tuple[float, ...], lens: tuple[int, ...], shorter: dict[int, tuple[int, int]]) -> Any:
    """S x Div; short sequences have another S_ft, as in App. B."""
    return tuple(
        keys | ({"grammar_lens": shorter[keys["grammar_len"]]} if keys["grammar_len"] in shorter else {})
        for keys in grid(div=divs, grammar_len=lens)
    )


FIG6 = figure(
    6,
    "Grammar length and diversity of the chains",
    curves_study(
        "recall/fig6",
        Trainings(gpt2.SMOKE, ("pt", *READINGS), _lengths((0.2, 0.5), (3, 5), {})),
        # Six seeds were seen before the other six were registered: two claims would be told from eight.
        Trainings(gpt2.CPU_TWELVE, ("pt", FROM_ZERO), _lengths((0.2, 0.5), (6, 20), {})),
        Trainings(gpt2.PAPER, ("pt", *READINGS), _lengths((0.1, 0.3, 0.5), (20, 40, 80), {20: (1, 4)})),
        cpu_untied=Trainings(gpt2.CPU_UNTIED, ("pt", FROM_ZERO), _lengths((0.2, 0.5), (6, 20), {})),
    ),
    lambda table: _draw_grid(table, "grammar_len", "S"),
    lambda table: _grid_claims(table, "grammar_len", "S"),
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
        cpu_untied=Trainings(gpt2.CPU_UNTIED, ("pt", FROM_ZERO), grid(div=(0.2, 0.5), n_subjects=(24, 96))),
    ),
    lambda table: _draw_grid(table, "n_subjects", "M"),
    lambda table: _grid_claims(table, "n_subjects", "M"),
    "More subjects raise ICL about held-out ones.",
)
