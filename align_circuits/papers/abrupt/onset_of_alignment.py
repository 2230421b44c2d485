"""Beyond abrupt learning: does the theory of onset predict when a tuned model begins to align?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.figs_1_3_4_network import SOURCE
from align_circuits.papers.abrupt.nested_logits import AlignedLogits
from align_circuits.papers.abrupt.onset_theory import MEASURES, Onset, course, forecast
from align_circuits.papers.accuracy import controlled, measured, over_seeds
from align_circuits.papers.claims import Check, Experiment
from align_circuits.papers.icatune.tuned_models import PAPER, SMOKE, SMOKE_TASK, TASK, Arm, measure_tuned
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.tables import Provenance, Table
from align_circuits.training.loop import TrainConfig
from align_circuits.training.tuning import TuneConfig

TUNED, SIMULATED, UNTOLD = "tuned", "simulated", "untold"

_LETTERS = 26
_NOISE = 0.03  # about the error of a probe of ten prompts


@dataclass(frozen=True)
class Forecast:
    """What is tuned, and how many runs are simulated beside it."""

    arm: Arm
    simulated: int = 5
    """Runs of the theory itself, and as many whose beginning tells nothing."""
    steps: int = 600
    """Their length."""
    every: int = 20
    """Their steps between probes."""


def simulated(loss: AlignedLogits, schedule: TrainConfig, every: int, seed: int) -> Table:
    """Returns the table of a tuning that goes as the theory says, noise added.

    Seeds differ in how well query and key are aligned at the start, and so in when the rest follows.
    """
    generator = np.random.default_rng(seed)
    kappa, beta = generator.uniform(0.0, 1.0, 2)
    steps = np.arange(0.0, schedule.steps + 1, every)
    went = Onset(loss, 0.25, (1.0, 1.0, beta, kappa)).course(steps, schedule)
    return as_table(went + generator.normal(0, _NOISE, went.shape))


def untold(loss: AlignedLogits, schedule: TrainConfig, every: int, seed: int) -> Table:
    """Returns the table of a tuning whose measures stay where they are until all rise at once, at a random step."""
    generator = np.random.default_rng(seed)
    steps = np.arange(0.0, schedule.steps + 1, every)
    onset = generator.uniform(0.3, 0.9) * schedule.steps
    risen = np.where(steps >= onset, 0.95, 1 / loss.n_pairs)
    went = pd.DataFrame(dict.fromkeys(MEASURES, risen), index=pd.Index(steps, name="step"))
    return as_table(went + generator.normal(0, _NOISE, went.shape))


def as_table(went: pd.DataFrame) -> Table:
    """Returns a course in the form of the tables that `tune` writes, as of a model of one head."""
    long: Any = went.reset_index().melt("step", var_name="metric")
    whole = long["metric"] == "accuracy"
    where = np.where(whole, None, 0)
    frame = long.assign(
        ood=False,
        kind=np.where(whole, "first", "all"),
        offset=ALL_OFFSETS,
        level=np.where(whole, "model", "head"),
        layer=where,
        head=where,
        low=np.nan,
        high=np.nan,
        n=1,
    )
    return Table(frame, Provenance("simulated"))


def _run(config: Forecast, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    frame, about = measure_tuned("course", models[0], [config.arm], jobs=jobs, folder=folder)
    tuned = [Table(rows.drop(columns=["arm", "seed"]), Provenance("tune")) for _, rows in frame.groupby("seed")]
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.arm.config.items()
    }
    loss = AlignedLogits(_LETTERS, config.arm.task.get("x_len", 5))
    schedules = {TUNED: TuneConfig(**plain).train_config()}
    schedules |= dict.fromkeys((SIMULATED, UNTOLD), TrainConfig(config.steps, schedule="linear"))
    runs = {TUNED: tuned} | {
        source: [make(loss, schedules[source], config.every, seed) for seed in range(config.simulated)]
        for source, make in ((SIMULATED, simulated), (UNTOLD, untold))
    }
    found = []
    for source, tables in runs.items():
        said = forecast(tables, loss, schedules[source])
        steps = said.astype(float).reset_index(names="seed").melt("seed", var_name="of").assign(source=source, step=-1)
        curves = [
            course(table)[["align_query"]]
            .set_axis(["value"], axis=1)
            .reset_index()
            .assign(source=source, seed=seed, of="course")
            for seed, table in enumerate(tables)
        ]
        found += [steps, *curves]
    about_runs = {"task": dict(config.arm.task), "config": dict(config.arm.config)}
    rows = pd.concat(found, ignore_index=True).assign(metric="align_query", low=np.nan, high=np.nan, n=1)
    return Table(rows, Provenance("forecast", about_runs, model=about))


def steps_of(table: Table, source: str) -> pd.DataFrame:
    """Returns the forecasts of one source, seeds down; the columns of `onset.forecast` across."""
    frame = table.where(source=source, step=-1).frame
    return frame.pivot(index="seed", columns="of", values="value")


def errors(table: Table, source: str, of: str) -> Float[ndarray, " seed"]:
    """Returns by how many steps each seed was missed, by the `"theory"` or by the mean of the `"others"`."""
    steps = steps_of(table, source)
    return (steps[of] - steps["observed"]).abs().to_numpy()


def saved(table: Table, source: str) -> Float[ndarray, " seed"]:
    """Returns the error that the theory saves each seed beside the mean of the others, over the mean step."""
    less = errors(table, source, "others") - errors(table, source, "theory")
    return less / steps_of(table, source)["observed"].mean()


def _check(table: Table) -> list[Check]:
    by_chance = controlled(saved(table, UNTOLD), "runs whose beginning tells nothing")
    tuned = steps_of(table, TUNED)

    def before(end: str) -> Float[ndarray, " seed"]:
        return ((tuned["emerged"] > 0) & (tuned[end] < tuned["observed"])).to_numpy(float)

    foretold = Check(
        "It is a forecast: alignment emerges, and only after the beginning that the theory has seen (share of tunings)",
        relation=">=",
        threshold=1.0,
        **measured(before("until")),
        **controlled(before("others"), "had the beginning ended at the others' mean step"),
    )
    return [
        foretold,
        *(
            Check(
                f"From the beginning of {said} the theory predicts the step at which alignment emerges better than the "
                "mean of the other seeds does (error saved, over the mean step)",
                relation=">=",
                threshold=0.1,
                **measured(saved(table, source)),
                **by_chance,
            )
            for source, said in ((TUNED, "a tuning"), (SIMULATED, "a run of the theory itself"))
        ),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    names = {"theory": "theory, from the beginning", "others": "mean of the other seeds"}
    panels = {}
    for source in (TUNED, SIMULATED, UNTOLD):
        steps = steps_of(table, source)
        rows = [
            pd.DataFrame({"observed": steps["observed"], "value": steps[of], "by": said}) for of, said in names.items()
        ]
        exact = pd.DataFrame({"observed": steps["observed"], "value": steps["observed"], "by": "exact"})
        missed = {of: f"{over_seeds(errors(table, source, of)):.0f}" for of in names}
        title = f"{source}: off by {missed['theory']} steps,<br>the others' mean by {missed['others']}"
        panels[title] = pd.concat([*rows, exact]).sort_values("observed").assign(low=np.nan, high=np.nan)
    figure = plots.curves(panels, "observed", "by", "observed step of emergence", value="predicted step")
    figure.update_traces(mode="markers").update_traces(mode="lines", selector={"name": "exact"})
    figure.update_layout(margin={"t": 75}, height=420)  # captions of two lines
    curves: Any = table.where(of="course", source=TUNED).frame
    return {
        "predicted steps": figure,
        "the best aligner's course in each tuning": plots.curves(
            {"": curves.assign(seed=curves["seed"].astype(str))}, "step", "seed", "step", value="align_query"
        ),
    }


ONSET = Experiment(
    name="abrupt/onset",
    title="When does alignment emerge? A theory fitted to the beginning",
    source=f"beyond {SOURCE}: Eq. 10 with an alignment logit",
    scales={
        "smoke": Forecast(
            Arm("in context", SMOKE_TASK, {**SMOKE, "steps": 8}, seeds=(0, 1, 2)), simulated=3, steps=300
        ),
        "cpu": Forecast(Arm("in context")),
        "paper": Forecast(Arm("in context", TASK, PAPER)),
    },
    run=_run,
    draw=_draw,
    check=_check,
    published="Not in the papers.",
)
