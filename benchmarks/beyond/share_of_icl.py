"""Beyond the paper: how often ICL must be among the sequences of finetuning, and which format is then learned first."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.jobs.code_versions import code_version
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import (
    About,
    Experiment,
    Inputs,
    Measurement,
    courses,
    drawn_by,
    lines,
    on_one_thread,
    training_folder,
)
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.studies import (
    SOURCE,
    drawn_if_facts_are_learned,
    measured_after_facts,
    only_if_facts_are_learned,
    study,
)
from align_circuits.papers.recall.models.training import Stage, train_stage
from align_circuits.papers.statistics import HIGH, LOW, at_end, levels, reached
from align_circuits.tables.tables import Table

_CPU = replace(gpt2.CPU, seeds=10, first_seed=30, finetuning=replace(gpt2.CPU.finetuning, steps=600))
"""Twice as many steps of finetuning, in which a model of seed 0 had learned both formats where 20% are ICL."""

FORMATS = {"grm_held_out": "ICL+Grm (S_ft = 1)", "icl_held_out": "ICL"}
"""The prompts about held-out subjects, each with a caption."""


@dataclass(frozen=True)
class Shares:
    """The finetunings that are compared: on ICL+Grm with S_ft from 1 on, a share of whose sequences is ICL instead."""

    setup: gpt2.GPT2Setup
    shares: tuple[float, ...]
    """From the rarest to the most frequent."""


def _jobs(config: Shares, inputs: Inputs) -> list[Measurement]:
    return [
        job
        for share in config.shares
        for job in gpt2.each_seed(
            finetune_on_both, config.setup, inputs, {"share": share, "n": config.setup.n_prompts}, icl_share=share
        )
    ]


def finetune_on_both(*, setup: Mapping[str, Any], icl_share: float, trained: str, seed: int) -> pd.DataFrame:
    """Finetunes a pretrained model and returns the log; the function of a job."""
    on_one_thread()
    made = gpt2.GPT2Setup.from_config(setup)
    identity = [asdict(made), icl_share, seed, code_version(f"{__name__}:finetune_on_both")]
    run = train_stage(
        gpt2.pretrained(made, seed, trained).model,
        Stage(made.demonstrations(seed, "icl+grm", icl_share=icl_share), made.finetuning, made.batch_size),
        probes=made.probes(seed),
        seed=seed,
        out=training_folder(trained, "recall-icl-share", *identity),
        progress=False,
    )
    return gpt2.log_rows(run)


_ICL, _GRM = ({"probe": probe, "match": "exact"} for probe in ("icl_held_out", "grm_held_out"))

# in which models each comes to a half sooner; one that never does so comes later
_GRM_FIRST = reached(0.5, **_GRM) < reached(0.5, **_ICL)
_ICL_FIRST = reached(0.5, **_ICL) < reached(0.5, **_GRM)

_HALF = "share of models in which it reaches a half, held-out, at an earlier step"


def _draw(table: Table) -> Mapping[str, go.Figure]:
    shares = levels(table, "share")
    panels = {
        f"{share:.0%} ICL": {
            caption: {"share": share, "probe": probe, "match": "exact"} for probe, caption in FORMATS.items()
        }
        for share in shares
    }
    first = dict(zip(FORMATS.values(), (_GRM_FIRST, _ICL_FIRST), strict=True))
    draw = {
        "": courses(panels, label="steps of finetuning", value="exact match, held-out"),
        "what comes to a half first": lines(first, "share", label="share of ICL", value="share of models"),
    }
    return drawn_by(draw, table)


SHARE = Experiment(
    "recall/share",
    "How often must ICL be among the sequences of finetuning, and which format is learned first?",
    f"beyond {SOURCE}, Fig. 15",
    study(
        "recall/share",
        Shares(gpt2.SMOKE, (0.05, 0.5)),
        Shares(_CPU, (0.05, 0.2, 0.5)),
        Shares(gpt2.PAPER, (0.05, 0.2, 0.5)),
        jobs=_jobs,
        summarize=measured_after_facts,
        train=gpt2.pretrainings,
    ),
    drawn_if_facts_are_learned(_draw),
    only_if_facts_are_learned(
        [
            Claim(
                f"Where {{share.low:.0%}} of sequences are ICL, ICL+Grm is learned first, as in Fig. 15 ({_HALF})"
            ).at_least(0.5, _GRM_FIRST.at(share=LOW), _GRM_FIRST.at(share=HIGH), "where {share.high:.0%} are"),
            Claim(f"Where {{share.high:.0%}} are, ICL is learned first ({_HALF})").at_least(
                0.5, _ICL_FIRST.at(share=HIGH), _ICL_FIRST.at(share=LOW), "where {share.low:.0%} are"
            ),
            Claim(
                "More ICL in finetuning raises ICL about held-out subjects "
                "({share.high:.0%} minus {share.low:.0%}, exact match)"
            ).at_least(0.2, at_end(**_ICL).rise("share"), at_end(**_GRM).rise("share"), "ICL+Grm"),
        ]
    ),
    "Fig. 15: performance improves first on ICL+Grm, later on ICL.",
    about=About.BEYOND,
)
