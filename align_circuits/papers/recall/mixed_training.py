"""Contextual recall, beyond the paper: does mixing both kinds of sequences remove the need for two stages?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.papers.claims import Check, Experiment, controlled, measured
from align_circuits.papers.recall.pretraining import MixedTask, Stage, train_stage
from align_circuits.papers.recall.small_gpt2 import small_gpt2
from align_circuits.papers.recall.trainings import (
    CPU,
    PAPER,
    SMOKE,
    SOURCE,
    Finetuned,
    Size,
    at_end,
    at_start,
    finetuned,
    folder_of,
    long,
    mean_curves,
)
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainRun


@dataclass(frozen=True)
class Mixing:
    """Which trainings are compared: two stages, and one stage on both kinds of sequences from the start."""

    size: Size
    kind: Finetuned = "icl"
    """What is mixed in, or comes second."""


def mixed(size: Size, seed: int, kind: Finetuned, folder: Path) -> TrainRun:
    """Returns a model trained in one stage, for as many steps of each kind of sequences as the two stages take.

    It begins and is optimised as in pretraining; from `folder` where it is there.
    """
    steps = size.pretraining.steps + size.finetuning.steps
    share = size.finetuning.steps / steps
    task = MixedTask(size.facts(seed), size.demonstrations(seed, kind), share)
    return train_stage(
        small_gpt2(size.world.d_vocab, size.n_ctx, d_model=size.d_model, seed=seed),
        Stage(task, replace(size.pretraining, steps=steps), size.batch_size),
        probes=size.probes(seed),
        seed=seed,
        out=folder_of(folder, f"mixed {kind}", size, seed),
        progress=False,
    )


def run(config: Mixing, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Trains what is not trained yet.

    Returns:
        The curves as `trainings.study` gives them; stage is `"mixed"`, or `"staged"` for the second of two stages.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    frames = []
    for stage, trained in (("mixed", mixed), ("staged", finetuned)):
        for seed in range(config.size.seeds):
            log = trained(config.size, seed, config.kind, folder).log
            frames.append(long(log).assign(stage=stage, seed=seed, n=config.size.probe))
    return Table(pd.concat(frames, ignore_index=True), Provenance("recall_mixing", asdict(config)))


def _check(table: Table) -> list[Check]:
    held_out, facts = ({"probe": probe, "match": "exact"} for probe in ("icl_held_out", "pt"))
    one, two = at_end(table, stage="mixed", **held_out), at_end(table, stage="staged", **held_out)
    kept, left = at_end(table, stage="mixed", **facts), at_end(table, stage="staged", **facts)
    seen = at_end(table, stage="mixed", probe="icl_seen", match="exact")
    start, at_first = (at_start(table, stage="mixed", **where) for where in (held_out, facts))
    return [
        Check(
            "One stage on both kinds of sequences suffices for ICL about held-out subjects (exact match)",
            relation=">=",
            threshold=0.5,
            **measured(one),
            **controlled(start, "before training"),
            published="left open in the discussion",
        ),
        Check(
            "It is as good there as two stages (exact match, one stage minus two)",
            relation=">=",
            threshold=-0.1,
            **measured(one - two),
            **controlled(start - two, "before training minus two stages"),
        ),
        Check(
            "And keeps the facts better, which two stages may forget (exact match on PT, one stage minus two)",
            relation=">=",
            threshold=0.1,
            **measured(kept - left),
            **controlled(at_first - left, "before training minus two stages"),
        ),
        Check(
            "One stage answers about held-out subjects as about seen ones (exact match, seen minus held-out)",
            relation="<=",
            threshold=0.2,
            **measured(seen - one),
            **controlled(kept - start, "facts on PT minus ICL before training"),
        ),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    curves = {"PT": "pt", "ICL, seen": "icl_seen", "ICL, held-out": "icl_held_out"}
    panels = {
        said: mean_curves(
            table, {name: {"stage": stage, "probe": probe, "match": "exact"} for name, probe in curves.items()}
        )
        for stage, said in (("mixed", "one stage"), ("staged", "the second of two stages"))
    }
    return {"": plots.curves(panels, x="step", by="curve", label="steps", value="exact match")}


MIXING = Experiment(
    name="recall/mixing",
    title="Does mixing remove the need for a second stage?",
    source=f"Beyond {SOURCE}",
    scales={"smoke": Mixing(SMOKE), "cpu": Mixing(CPU), "paper": Mixing(PAPER)},
    run=run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="The discussion leaves open what a mixture of pretraining and finetuning data does.",
)
