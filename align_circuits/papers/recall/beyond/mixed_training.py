"""Beyond the paper: one stage of training on both kinds of sequences, in place of two stages."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.gpt2_models import SOURCE, Finetuned, GPT2Setup, each_seed
from align_circuits.papers.recall.figures.training_curves import at_end, at_start, mean_curves
from align_circuits.papers.recall.models.training import MixedTask, Stage, train_stage
from align_circuits.papers.study import Experiment, Inputs, Measurement, Rows, Study, on_one_thread, training_folder
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainRun


@dataclass(frozen=True)
class Mixing:
    """The trainings that are compared: two stages, and one stage on both kinds of sequences."""

    setup: GPT2Setup
    kind: Finetuned = "icl"
    """The sequences beside those of pretraining, mixed in or in the second stage."""


def _jobs(config: Mixing, inputs: Inputs) -> list[Measurement]:
    functions = {"mixed": train_on_both, "staged": gpt2.finetune}
    return [
        job
        for stage, function in functions.items()
        for job in each_seed(
            function, config.setup, inputs, {"stage": stage, "n": config.setup.n_prompts}, kind=config.kind
        )
    ]


def train_on_both(*, setup: Mapping[str, Any], kind: Finetuned, trained: str, seed: int) -> pd.DataFrame:
    """Trains one model in one stage and returns its log; the function of a job."""
    on_one_thread()
    return gpt2.log_rows(mixed(GPT2Setup.from_config(setup), seed, kind, trained))


def mixed(setup: GPT2Setup, seed: int, kind: Finetuned, trained: str | Path) -> TrainRun:
    """Returns a model trained in one stage, with as many steps of each kind of sequences as two stages have.

    Initial weights and optimizer are those of pretraining; from the folder `trained` where it is there.
    """
    steps = setup.pretraining.steps + setup.finetuning.steps
    share = setup.finetuning.steps / steps
    task = MixedTask(setup.facts(seed), setup.demonstrations(seed, kind), share)
    return train_stage(
        gpt2.initial_gpt2(setup, seed),
        Stage(task, replace(setup.pretraining, steps=steps), setup.batch_size),
        probes=setup.probes(seed),
        seed=seed,
        out=training_folder(trained, f"recall-mixed-{kind}", asdict(replace(setup, seeds=1)), seed),
        progress=False,
    )


def _table(_: Mixing, rows: Rows) -> pd.DataFrame:
    """The curves, keyed as those of `training_curves`; stage is `"mixed"`, or `"staged"` for the second of two."""
    return pd.concat([rows["train_on_both"], rows["finetune"]], ignore_index=True).assign(low=np.nan, high=np.nan)


def _check(table: Table) -> list[Check]:
    held_out, facts = ({"probe": probe, "match": "exact"} for probe in ("icl_held_out", "pt"))
    one, two = at_end(table, stage="mixed", **held_out), at_end(table, stage="staged", **held_out)
    facts_one, facts_two = at_end(table, stage="mixed", **facts), at_end(table, stage="staged", **facts)
    seen = at_end(table, stage="mixed", probe="icl_seen", match="exact")
    before, facts_before = (at_start(table, stage="mixed", **where) for where in (held_out, facts))
    return [
        Claim(
            "One stage on both kinds of sequences suffices for ICL about held-out subjects (exact match)",
            "left open in the discussion",
        ).at_least(0.5, one, before, "before training"),
        Claim("It is as good there as two stages (exact match, one stage minus two)").at_least(
            -0.1, one - two, before - two, "before training minus two stages"
        ),
        Claim(
            "And keeps the facts better, which two stages may forget (exact match on PT, one stage minus two)"
        ).at_least(0.1, facts_one - facts_two, facts_before - facts_two, "before training minus two stages"),
        Claim(
            "One stage answers about held-out subjects as about seen ones (exact match, seen minus held-out)"
        ).at_most(0.2, seen - one, facts_one - before, "facts on PT minus ICL before training"),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    probes = {"PT": "pt", "ICL, seen": "icl_seen", "ICL, held-out": "icl_held_out"}
    panels = {}
    for stage, caption in (("mixed", "one stage"), ("staged", "the second of two stages")):
        curves = {name: {"stage": stage, "probe": probe, "match": "exact"} for name, probe in probes.items()}
        panels[caption] = mean_curves(table, curves)
    return {"": plots.curves(panels, x="step", by="curve", label="steps", value="exact match")}


MIXING = Experiment(
    "recall/mixing",
    "Does mixing remove the need for a second stage?",
    f"Beyond {SOURCE}",
    Study(
        "recall/mixing",
        {"smoke": Mixing(gpt2.SMOKE), "cpu": Mixing(gpt2.CPU), "paper": Mixing(gpt2.PAPER)},
        _jobs,
        _table,
        gpt2.pretrainings,
    ),
    _draw,
    _check,
    "The discussion leaves open what a mixture of pretraining and finetuning data does.",
)
