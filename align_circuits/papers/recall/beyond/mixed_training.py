"""Beyond the paper: one stage of training on both kinds of sequences, in place of two stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.common import SOURCE, at_end, at_start, draw_curves, study
from align_circuits.papers.recall.models.training import MixedTask, Stage, train_stage
from align_circuits.papers.study import Experiment, Inputs, Measurement, on_one_thread, training_folder
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Mixing:
    """The trainings that are compared: two stages, and one stage on both kinds of sequences."""

    setup: gpt2.GPT2Setup
    kind: gpt2.Finetuned = "icl"
    """The sequences beside those of pretraining, mixed in or in the second stage."""


def _jobs(config: Mixing, inputs: Inputs) -> list[Measurement]:
    jobs = []
    for stage, function in (("mixed", train_on_both), ("staged", gpt2.finetune)):
        keys = {"stage": stage, "n": config.setup.n_prompts}
        jobs += gpt2.each_seed(function, config.setup, inputs, keys, kind=config.kind)
    return jobs


def train_on_both(*, setup: Mapping[str, Any], kind: gpt2.Finetuned, trained: str, seed: int) -> pd.DataFrame:
    """Trains one model in one stage and returns its log; the function of a job.

    It takes as many steps of each kind of sequences as two stages have. Initial weights and optimizer are those of
    pretraining; from the folder `trained` where it is there.
    """
    on_one_thread()
    made = gpt2.GPT2Setup.from_config(setup)
    steps = made.pretraining.steps + made.finetuning.steps
    task = MixedTask(made.facts(seed), made.demonstrations(seed, kind), share=made.finetuning.steps / steps)
    run = train_stage(
        gpt2.initial_gpt2(made, seed),
        Stage(task, replace(made.pretraining, steps=steps), made.batch_size),
        probes=made.probes(seed),
        seed=seed,
        out=training_folder(trained, f"recall-mixed-{kind}", setup, seed),
        progress=False,
    )
    return gpt2.log_rows(run)


def _check(table: Table) -> list[Check]:
    stages = ("mixed", "staged")
    held_out, facts = ({"probe": probe, "match": "exact"} for probe in ("icl_held_out", "pt"))
    one, two = (at_end(table, stage=stage, **held_out) for stage in stages)
    facts_one, facts_two = (at_end(table, stage=stage, **facts) for stage in stages)
    seen = at_end(table, probe="icl_seen", match="exact", stage="mixed")
    before, facts_before = (at_start(table, stage="mixed", **where) for where in (held_out, facts))
    control_is = "before training minus two stages"
    return [
        Claim(
            "One stage on both kinds of sequences suffices for ICL about held-out subjects (exact match)",
            "left open in the discussion",
        ).at_least(0.5, one, before, "before training"),
        Claim("It is as good there as two stages (exact match, one stage minus two)").at_least(
            -0.1, one - two, before - two, control_is
        ),
        Claim(
            "And keeps the facts better, which two stages may forget (exact match on PT, one stage minus two)"
        ).at_least(0.1, facts_one - facts_two, facts_before - facts_two, control_is),
        Claim(
            "One stage answers about held-out subjects as about seen ones (exact match, seen minus held-out)"
        ).at_most(0.2, seen - one, facts_one - before, "facts on PT minus ICL before training"),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    probes = {"PT": "pt", "ICL, seen": "icl_seen", "ICL, held-out": "icl_held_out"}
    panels = {
        caption: {name: {"stage": stage, "probe": probe, "match": "exact"} for name, probe in probes.items()}
        for stage, caption in (("mixed", "one stage"), ("staged", "the second of two stages"))
    }
    return {"": draw_curves(table, panels, label="steps", value="exact match")}


MIXING = Experiment(
    "recall/mixing",
    "Does mixing remove the need for a second stage?",
    f"Beyond {SOURCE}",
    study(
        "recall/mixing",
        *(Mixing(setup) for setup in (gpt2.SMOKE, gpt2.CPU, gpt2.PAPER)),
        jobs=_jobs,
        train=gpt2.pretrainings,
    ),
    _draw,
    _check,
    "The discussion leaves open what a mixture of pretraining and finetuning data does.",
)
