"""Beyond abrupt learning: does the theory of onset predict when a tuned model begins to align?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.beyond.onset_forecast import MEASURES, AlignedLogits, Onset, forecast, tuning_curves
from align_circuits.papers.abrupt.grid import SOURCE
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import PAPER, SMOKE, SMOKE_TASK, TASK, Arm, tuned_study
from align_circuits.papers.lab import About, Experiment, Rows, seed_courses
from align_circuits.papers.statistics import over_seeds
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table
from align_circuits.training.loop import TrainConfig
from align_circuits.training.tuning import TuneConfig

TUNED, SIMULATED, UNINFORMATIVE = "tuned", "simulated", "uninformative"

_LETTERS = 26
_NOISE = 0.03  # about the error of a probe of ten prompts


@dataclass(frozen=True)
class Forecast:
    """What is tuned, and how many runs are simulated beside it."""

    arms: tuple[Arm] = (Arm("in context"),)
    simulated: int = 5
    """Runs of the theory itself, and as many whose beginning is uninformative."""
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
    curves = Onset(loss, 0.25, (1.0, 1.0, beta, kappa)).curves(steps, schedule)
    return as_table(curves + generator.normal(0, _NOISE, curves.shape))


def uninformative(loss: AlignedLogits, schedule: TrainConfig, every: int, seed: int) -> Table:
    """Returns the table of a tuning whose measures stay where they are until all rise at once, at a random step."""
    generator = np.random.default_rng(seed)
    steps = np.arange(0.0, schedule.steps + 1, every)
    onset = generator.uniform(0.3, 0.9) * schedule.steps
    values = np.where(steps >= onset, 0.95, 1 / loss.n_pairs)
    curves = pd.DataFrame(dict.fromkeys(MEASURES, values), index=pd.Index(steps, name="step"))
    return as_table(curves + generator.normal(0, _NOISE, curves.shape))


def as_table(curves: pd.DataFrame) -> Table:
    """Returns curves in the form of the tables that `tune` writes, as of a model of one head."""
    long: Any = curves.reset_index().melt("step", var_name="metric")
    of_model = long["metric"] == "accuracy"
    kind, level = np.where(of_model, "first", "all"), np.where(of_model, "model", "head")
    head = np.where(of_model, np.nan, 0)
    frame = long.assign(ood=False, kind=kind, offset=ALL_OFFSETS, level=level, layer=head, head=head)
    return Table(frame.assign(low=np.nan, high=np.nan, n=1), Provenance("simulated"))


def _summarize(config: Forecast, rows: Rows) -> pd.DataFrame:
    (arm,) = config.arms
    loss, schedule = AlignedLogits(_LETTERS, arm.task.get("x_len", 5)), TrainConfig(config.steps, schedule="linear")
    tuned = [Table(run.drop(columns=["arm", "seed"]), Provenance("tune")) for _, run in rows["course"].groupby("seed")]
    frames = forecasts(TUNED, tuned, loss, TuneConfig(**arm.config).train_config())
    for source, make in ((SIMULATED, simulated), (UNINFORMATIVE, uninformative)):
        runs = [make(loss, schedule, config.every, seed) for seed in range(config.simulated)]
        frames += forecasts(source, runs, loss, schedule)
    return pd.concat(frames, ignore_index=True).assign(metric="align_query", low=np.nan, high=np.nan, n=1)


def forecasts(source: str, runs: list[Table], loss: AlignedLogits, schedule: TrainConfig) -> list[pd.DataFrame]:
    """Returns the columns of `forecast` for each run as rows, without a step, and the curve of each run."""
    predicted = forecast(runs, loss, schedule).astype(float).reset_index(names="seed").melt("seed", var_name="of")
    curves = [tuning_curves(run)[["align_query"]].set_axis(["value"], axis=1).reset_index() for run in runs]
    courses = [curve.assign(of="course", seed=seed, source=source) for seed, curve in enumerate(curves)]
    return [predicted.assign(source=source), *courses]


def steps_of(table: Table, source: str) -> pd.DataFrame:
    """Returns the forecasts of one source, seeds down; the columns of `onset_forecast.forecast` across."""
    frame = table.where(source=source).frame
    return frame[frame["of"] != "course"].pivot(index="seed", columns="of", values="value")


def errors(table: Table, source: str, of: str) -> Float[ndarray, " seed"]:
    """Returns by how many steps each seed was missed, by the `"theory"` or by the mean of the `"others"`."""
    steps = steps_of(table, source)
    return (steps[of] - steps["observed"]).abs().to_numpy()


def error_saved(table: Table, source: str) -> Float[ndarray, " seed"]:
    """Returns the error that the theory saves each seed beside the mean of the others, over the mean step."""
    less = errors(table, source, "others") - errors(table, source, "theory")
    return less / steps_of(table, source)["observed"].mean()


def _check(table: Table) -> list[Claim]:
    tuned = steps_of(table, TUNED)

    def before(end: str) -> Float[ndarray, " seed"]:
        return ((tuned["emerged"] > 0) & (tuned[end] < tuned["observed"])).to_numpy(float)

    return [
        Claim(
            "It is a forecast: alignment emerges, and only after the beginning that the theory has seen (share of "
            "tunings)"
        ).at_least(1.0, before("until"), before("others"), "had the beginning ended at the others' mean step"),
        *(
            Claim(
                f"From the beginning of {title} the theory predicts the step at which alignment emerges better than "
                "the mean of the other seeds does (error saved, over the mean step)"
            ).at_least(
                0.1, error_saved(table, source), error_saved(table, UNINFORMATIVE), "runs whose beginning tells nothing"
            )
            for source, title in ((TUNED, "a tuning"), (SIMULATED, "a run of the theory itself"))
        ),
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    names = {"theory": "theory, from the beginning", "others": "mean of the other seeds", "exact": "exact"}
    panels = {}
    for source in (TUNED, SIMULATED, UNINFORMATIVE):
        steps = steps_of(table, source)
        rows = steps.assign(exact=steps["observed"]).rename(columns=names).melt("observed", list(names.values()), "by")
        missed = {of: f"{over_seeds(errors(table, source, of)):.0f}" for of in ("theory", "others")}
        title = f"{source}: off by {missed['theory']} steps,\nthe others' mean by {missed['others']}"
        panels[title] = rows.sort_values("observed").assign(low=np.nan, high=np.nan)
    figure = plots.curves(panels, "observed", "by", "observed step of emergence", value="predicted step")
    figure.update_traces(mode="markers").update_traces(mode="lines", selector={"name": "exact"})
    figure.update_layout(margin={"t": 75}, height=420)  # captions of two lines
    course = seed_courses({"": {"of": "course", "source": TUNED}}, value="align_query")(table)
    return {"predicted steps": figure, "the best aligner's course in each tuning": course}


_SMOKE = Arm("in context", SMOKE_TASK, {**SMOKE, "steps": 8}, seeds=(0, 1, 2))

ONSET = Experiment(
    name="abrupt/onset",
    title="When does alignment emerge? A theory fitted to the beginning",
    source=f"beyond {SOURCE}: Eq. 10 with an alignment logit",
    study=tuned_study(
        "abrupt/onset",
        _summarize,
        smoke=Forecast((_SMOKE,), simulated=3, steps=300),
        cpu=Forecast(),
        paper=Forecast((Arm("in context", TASK, PAPER),)),
    ),
    figures=_draw,
    claims=_check,
    published="Not in the papers.",
    about=About.BEYOND,
)
