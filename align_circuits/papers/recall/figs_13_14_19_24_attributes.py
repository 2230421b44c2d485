"""Contextual recall: attention-only models on held-out subjects, Figs. 13, 14, 19 and 24."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.metrics import MATCHES
from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.papers.recall.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.papers.recall.figs_9_to_12_20_to_26_heads import Training, measure
from align_circuits.papers.recall.pretraining import FINETUNING, PRETRAINING, Stage, train_stage
from align_circuits.papers.recall.tasks import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.trainings import SOURCE, at_end, at_start, long, mean_curves
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainRun

Positions = Literal["relative", "absolute"]


@dataclass(frozen=True)
class Attributes:
    """Which models are finetuned on whom."""

    size: Training
    seeds: int
    cells: tuple[Mapping[str, int], ...] = ({},)
    """What each cell changes of the size; `values` in it is the number of unique values that are seen."""
    positions: Positions = "relative"
    columns: tuple[str, ...] = field(init=False)
    """The key columns that cells add."""

    def __post_init__(self):
        object.__setattr__(self, "columns", tuple(dict.fromkeys(name for cell in self.cells for name in cell)))


def pretrained(size: Training, seed: int, positions: Positions, folder: Path) -> TrainRun:
    """Returns an attention-only model that has read PT; from `folder` where it is there, so that figures share it."""
    world = _world(size, seed)
    task = FactsTask(world, size.n_facts, size.n_slots, p_grammar=0.0)
    net = AttentionOnly(
        AttentionOnlyConfig(world.d_vocab, task.length - 1, size.d_head, positions=positions), seed=seed
    )
    train = replace(PRETRAINING, steps=size.pretraining, lr=size.lr, schedule="cosine", log_every=size.pretraining)
    told = ["pt", asdict(replace(size, n_seen=1, finetuning=1)), seed, positions]
    probes = {"pt": task.sample(size.n, seed=seed)}
    return train_stage(
        net, Stage(task, train, size.batch_size), probes=probes, seed=seed, out=_folder(folder, told), progress=False
    )


def finetuned(
    size: Training, seed: int, positions: Positions, folder: Path, values: int | None = None
) -> tuple[TrainRun, dict[str, Prompts]]:
    """Returns it finetuned on ICL about seen subjects, and the prompts of the log: `seen` and `held_out`."""
    world = _world(size, seed)
    seen, held_out = world.split(size.n_seen, n_values=values, seed=seed)
    task = DemonstrationsTask(world, size.n_demos, subjects=seen)
    asked = {"seen": task, "held_out": replace(task, query_subjects=held_out)}
    probes = {name: some.sample(size.n, seed=seed) for name, some in asked.items()}
    every = max(1, size.finetuning // 20)
    train = replace(FINETUNING, steps=size.finetuning, lr=size.lr, log_every=every)
    run = train_stage(
        pretrained(size, seed, positions, folder).model,
        Stage(task, train, size.batch_size, "last"),
        probes=probes,
        seed=seed,
        out=_folder(folder, ["ft", asdict(size), seed, positions, values]),
        progress=False,
    )
    return run, probes


def run(config: Attributes, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Trains what is not trained yet.

    Returns:
        A table keyed by what cells change and seed: the curves of finetuning, by step, `probe` (`seen`, `held_out`) and
        `match`; and with `probe` `"cosine"` what heads of the pretrained model have with the constructions' outputs on
        PT, `match` being `f_subj` or `f_rel` and the value that of the head with the highest, at step 0.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    frames = []
    for cell in config.cells:
        size = replace(config.size, **{name: value for name, value in cell.items() if name != "values"})
        for seed in range(config.seeds):
            net: Any = pretrained(size, seed, config.positions, folder).model
            world = _world(size, seed)
            facts = FactsTask(world, size.n_facts, size.n_slots, p_grammar=0.0).sample(size.n, seed=seed + 1)
            found = [row for row in measure(net, world, facts, "pretraining") if row["metric"] == "cosine"]
            cosines: Any = pd.DataFrame(found).groupby("what")["value"].max()
            run, _ = finetuned(size, seed, config.positions, folder, cell.get("values"))
            rows = [{"step": 0, "probe": "cosine", "match": what, "value": value} for what, value in cosines.items()]
            frames += [frame.assign(**cell, seed=seed) for frame in (long(run.log), pd.DataFrame(rows))]
    frame = pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan, n=config.size.n)
    settings = asdict(config)
    return Table(frame, Provenance("recall_attributes", settings))


def _world(size: Training, seed: int) -> RecallWorld:
    return replace(size.world(), world_seed=seed)


def _folder(folder: Path, told: list[Any]) -> Path:
    return folder / "training" / f"recall-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


_HELD_OUT = {"probe": "held_out", "match": "exact"}


def _draw_curves(table: Table) -> dict[str, go.Figure]:
    panels = {
        said: mean_curves(table, {match: {"probe": probe, "match": match} for match in MATCHES})
        for probe, said in (("seen", "seen query subjects"), ("held_out", "held-out query subjects"))
    }
    return {"": plots.curves(panels, x="step", by="curve", label="steps of finetuning", value="share of prompts")}


def _check_curves(table: Table) -> list[Check]:
    seen = {"probe": "seen", "match": "exact"}
    return [
        Check(
            "Finetuning brings ICL about seen subjects (exact match)",
            relation=">=",
            threshold=0.8,
            **measured(at_end(table, **seen)),
            **controlled(at_start(table, **seen), "before finetuning"),
        ),
        Check(
            "And about held-out subjects (exact match)",
            relation=">=",
            threshold=0.5,
            **measured(at_end(table, **_HELD_OUT)),
            **controlled(at_start(table, **_HELD_OUT), "before finetuning"),
            published="about 1",
        ),
    ]


def _cells_of(table: Table, *names: str) -> list[dict[str, Any]]:
    cells: Any = table.frame[list(names)].drop_duplicates()
    rows = cells.sort_values(list(names))
    return [{name: int(value) for name, value in row.items()} for row in rows.to_dict("records")]


def _draw_values(table: Table) -> dict[str, go.Figure]:
    rows = [
        {
            **cell,
            "curve": f"M = {cell['n_subjects']}, M_ft = {cell['n_seen']}",
            **vars(over_seeds(at_end(table, **cell, **_HELD_OUT))),
        }
        for cell in _cells_of(table, "n_subjects", "n_seen", "values")
    ]
    figure = plots.curves(
        {"": pd.DataFrame(rows)}, x="values", by="curve", label="unique values seen", value="exact match, held-out"
    )
    return {"": figure}


def _check_values(table: Table) -> list[Check]:
    checks = []
    for group in _cells_of(table, "n_subjects", "n_seen"):
        values = [
            cell["values"]
            for cell in _cells_of(table, "n_subjects", "n_seen", "values")
            if group.items() <= cell.items()
        ]
        few, many = values[0], values[-1]

        def gain(
            probe: str, group: dict[str, Any] = group, few: int = few, many: int = many
        ) -> Float[ndarray, " seed"]:
            ends = [at_end(table, **group, values=count, probe=probe, match="exact") for count in (many, few)]
            return ends[0] - ends[1]

        checks.append(
            Check(
                f"More values seen raise ICL about held-out subjects ({many} minus {few}, M = {group['n_subjects']}, "
                f"M_ft = {group['n_seen']})",
                relation=">=",
                threshold=0.1,
                **measured(gain("held_out")),
                **controlled(gain("seen"), "about seen ones"),
            )
        )
    return checks


def _draw_subjects(table: Table) -> dict[str, go.Figure]:
    cells = _cells_of(table, "n_subjects")
    panels = {
        f"M = {cell['n_subjects']}": mean_curves(
            table, {match: {"probe": "held_out", "match": match, **cell} for match in MATCHES}
        )
        for cell in cells
    }
    cosines = pd.DataFrame(
        [
            {"M": cell["n_subjects"], "curve": what, **vars(found)}
            for cell in cells
            for what in ("f_subj", "f_rel", "f_subj of another", "f_rel of another")
            for found in [over_seeds(at_end(table, probe="cosine", match=what, **cell))]
        ]
    )
    return {
        "cosines": plots.curves({"": cosines}, x="M", by="curve", label="subjects M", value="cosine of the best head"),
        "matches": plots.curves(panels, x="step", by="curve", label="steps of finetuning", value="share of prompts"),
    }


def _check_subjects(table: Table) -> list[Check]:
    few, many = (cell["n_subjects"] for cell in _cells_of(table, "n_subjects"))

    def drop(**where: Any) -> Float[ndarray, " seed"]:
        return at_end(table, n_subjects=few, **where) - at_end(table, n_subjects=many, **where)

    before = at_start(table, n_subjects=few, probe="held_out", match="subject") - at_start(
        table, n_subjects=many, probe="held_out", match="subject"
    )
    return [
        *(
            Check(
                f"With few subjects a head is nearer to the construction's {what} (cosine, M = {few} minus {many})",
                relation=">=",
                threshold=0.1,
                **measured(drop(probe="cosine", match=what)),
                **controlled(drop(probe="cosine", match=f"{what} of another"), "with another's"),
            )
            for what in ("f_subj", "f_rel")
        ),
        Check(
            f"And after finetuning the subject is matched more often (held-out, M = {few} minus {many})",
            relation=">=",
            threshold=0.1,
            **measured(drop(probe="held_out", match="subject")),
            **controlled(before, "before finetuning"),
        ),
    ]


SMOKE = Training(
    n_subjects=8,
    n_values=2,
    n_types=2,
    n_grammar=4,
    n_slots=3,
    n_facts=2,
    n_demos=2,
    n_seen=4,
    d_head=8,
    pretraining=4,
    finetuning=4,
    batch_size=4,
    lr=1e-2,
    n=8,
)
CPU = Training(
    n_subjects=64,
    n_values=8,
    n_types=4,
    n_grammar=10,
    n_slots=6,
    n_facts=4,
    n_demos=5,
    n_seen=32,
    d_head=64,
    pretraining=2000,
    finetuning=500,
    batch_size=32,
    lr=3e-3,
)
PAPER = Training()
"""App. B: 2,000 and 1,000 steps to validate the constructions; Figs. 13 and 14 have 5,000 and 2,000."""


def _values(subjects: Mapping[int, int], seen: Sequence[int], values: Sequence[int]) -> Any:
    """Cells of Fig. 13; `subjects` gives each M its d_head."""
    return tuple(
        {"n_subjects": m, "d_head": d_head, "n_seen": n_seen, "values": count}
        for m, d_head in subjects.items()
        for n_seen in seen
        for count in values
    )


_LATER = {"pretraining": 5000, "finetuning": 2000}

FIG13 = Experiment(
    name="recall/fig13",
    title="Unique values seen in finetuning",
    source=f"{SOURCE}, Fig. 13",
    scales={
        "smoke": Attributes(SMOKE, 2, _values({8: 8}, (4,), (3, 4))),
        "cpu": Attributes(CPU, 3, _values({64: 64}, (8,), (18, 22, 26))),
        "paper": Attributes(
            replace(PAPER, **_LATER), 2, _values({256: 256, 2048: 2048}, (32, 64), (160, 180, 200, 220))
        ),
    },
    run=run,
    draw=_draw_values,
    check=_check_values,
    makes_models=True,
    published="More unique values raise accuracy about held-out subjects, whatever M and M_ft.",
)

FIG14 = Experiment(
    name="recall/fig14",
    title="Few and many subjects in pretraining",
    source=f"{SOURCE}, Fig. 14",
    scales={
        "smoke": Attributes(SMOKE, 2, ({"n_subjects": 8, "d_head": 8}, {"n_subjects": 12, "d_head": 8})),
        "cpu": Attributes(
            replace(CPU, n_seen=8), 3, ({"n_subjects": 64, "d_head": 64}, {"n_subjects": 256, "d_head": 256})
        ),
        "paper": Attributes(
            replace(PAPER, n_seen=32, **_LATER),
            2,
            ({"n_subjects": 256, "d_head": 256}, {"n_subjects": 2048, "d_head": 2048}),
        ),
    },
    run=run,
    draw=_draw_subjects,
    check=_check_subjects,
    makes_models=True,
    published="With 2048 subjects cosines are low after pretraining, and subject match after finetuning.",
)


def _learning(name: str, positions: Positions) -> Experiment:
    return Experiment(
        name=f"recall/{name}",
        title=f"Finetuning an attention-only model, {positions} positions",
        source=f"{SOURCE}, Fig. {name.removeprefix('fig')}",
        scales={
            "smoke": Attributes(SMOKE, 2, positions=positions),
            "cpu": Attributes(CPU, 3, positions=positions),
            "paper": Attributes(PAPER, 2, positions=positions),
        },
        run=run,
        draw=_draw_curves,
        check=_check_curves,
        makes_models=True,
        published="ICL comes to about 1 about seen and held-out subjects.",
    )


FIG19 = _learning("fig19", "relative")
FIG24 = _learning("fig24", "absolute")
