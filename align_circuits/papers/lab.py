"""The laboratory of the papers: measure once, draw many figures, judge claims. A figure is data.

A study names what is measured, as calls of functions with a config and a seed, and at which scales; its rows become one
table. An experiment draws that table and states claims. A statistic is an expression on the table, evaluated when a
claim is judged or a figure drawn:

    iwl, icl = at_end("iwl", burst=1), at_end("icl", burst=1)      # a number for each seed

    NOISE = Experiment(
        "abrupt/noise", title, source, STUDY,
        {"": lines({"in weights": iwl, "in context": icl}, x="noise", label="noise")},
        [Claim("Noise lowers learning in weights (from {noise.low:g} to {noise.high:g})").at_least(
            0.3, iwl.fall("noise"), icl.fall("noise"), "accuracy in context")],
    )

What is finished is never measured again, not even for another study: `jobs` keeps one file a job. A function that
trains goes into `Study.train`: these jobs are finished before the others start, and leave their models under
`training_folder(inputs.trained, ...)`, where the others find them. The path is part of their config, so pass it on. Two
jobs that train the same network must be one, or two processes train it at the same time.

Rows go through JSON: numbers come back to the bit. Files, all below the folder given to `run` (`runs` by default):

    jobs/<function>-<hashes>.json   the rows of one job
    trained/<kind>-<hash>/          log, checkpoints and weights of one training
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.jobs.files import inside
from align_circuits.jobs.identity import identity_of
from align_circuits.jobs.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.parameters import model_identity
from align_circuits.papers.claims import Check, Claims, checks_of
from align_circuits.papers.statistics import Statistic, levels, measured, over_seeds, rows
from align_circuits.report import plots
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

Scale = Literal[
    "smoke",
    "cpu",
    "cpu-untied",
    "paper",
    "paper-cells",
    "paper-long",
    "paper-s20",
    "paper-s20-untied",
    "smollm2",
    "smollm2-two-letters",
]
"""`smoke` takes seconds, `cpu` at most 30 minutes on two cores, `paper` is the paper's own setting, `paper-cells`
that of the conditions of a large grid that its claims speak of, `paper-long` with more steps, `paper-s20` with
sentences of 20 grammar tokens; `-untied` is with an unembedding of its own beside the embedding, and takes hours;
`smollm2` is made for the model of that name, a pretrained Llama, and takes hours on two cores, `smollm2-two-letters`
with phrases of two letters where `smollm2` has one."""

SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
"""Those that every experiment has."""

# What is measured


@dataclass(frozen=True)
class Measurement:
    """One job of a study."""

    function: Callable[..., Any]
    """Of an importable module; called as `function(**config, seed=seed)`, it returns rows: a DataFrame or mappings."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON; with function, seed and code it tells the job from others."""
    seed: int | None = 0
    """None for a function that draws nothing and takes none."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Columns that its rows have in the table, beside `seed` and those they come with, which stand in for them."""

    @property
    def job(self) -> Job:
        """The function by its name."""
        return Job(f"{self.function.__module__}:{self.function.__qualname__}", self.config, self.seed)


@dataclass(frozen=True)
class Inputs:
    """What a run of a study is given beside its config."""

    models: Mapping[str, Mapping[str, Any]]
    """The provenance of each model by what `load` takes; its `weights` are a hash of the settings and the tokenizer
    too, of all that its numbers rest on."""
    trained: str
    """The folder of all trainings; see `training_folder`."""

    @property
    def model(self) -> dict[str, str]:
        """The only model, as jobs take it: `model`, and the hash of its `weights`, as a name can get other weights."""
        ((name, about),) = self.models.items()
        return {"model": name, "weights": about["weights"]}


Rows = Mapping[str, Any]
"""A data frame of the rows of all jobs, in their order, by the name of the function that returned them."""


def _nothing(_: Any, __: Inputs) -> list[Measurement]:
    return []


def _all_rows(_: Any, rows: Rows) -> pd.DataFrame:
    return pd.concat(rows.values(), ignore_index=True)


@lru_cache(maxsize=1)
def stored(model: str) -> Any:
    """Returns a model as it is stored, kept until another one is asked for."""
    return load(model)


@dataclass(frozen=True)
class Study:
    """What is measured together, and gives one table."""

    name: str
    """Such as `"icatune/accuracy"`; of its only experiment, where it has one."""
    scales: Mapping[Scale, Any]
    """A frozen config, a dataclass, for each scale."""
    jobs: Callable[[Any, Inputs], Sequence[Measurement]] = _nothing
    """What to measure."""
    summarize: Callable[[Any, Rows], pd.DataFrame] = _all_rows
    """From config and rows to the table; all rows as they are by default."""
    train: Callable[[Any, Inputs], Sequence[Measurement]] = _nothing
    """What must be finished before the jobs start; its rows are given to `summarize` too."""
    models: Literal["none", "one", "several"] = "none"
    """How many models it is given; those it makes itself are none."""
    load: Callable[[str], Any] = stored
    """How they are loaded, for their provenance."""

    def run(
        self,
        config: Any,
        *,
        models: Sequence[str] = (),
        jobs: int = 1,
        folder: str | Path,
        executor: Executor | None = None,
    ) -> Table:
        """Measures what has not been measured yet.

        Args:
            config: One of `scales`, or another of its kind.
            models: What `load` takes.
            jobs: Local processes.
            folder: Of all studies; see above.
            executor: Runs the jobs in place of local processes, as in `run_jobs`.

        Raises:
            ValueError: A model cannot be loaded, or a job failed; what is finished stays, and the next call goes on
                from there.
        """
        folder = Path(folder)
        identities = {model: model_identity(self.load(model)) for model in models}
        provenances = {model: identity["provenance"] for model, identity in identities.items()}
        told = {model: {**provenances[model], "weights": identity_of(identities[model])} for model in models}
        inputs = Inputs(told, str(inside(folder, "trained")))
        rows: dict[str, list[dict[str, Any]]] = {}
        for stage in (self.train, self.jobs):
            measurements = stage(config, inputs)
            results = run_jobs(
                [each.job for each in measurements], inside(folder, "jobs"), executor=executor, processes=jobs
            )
            results.all_rows()  # raises where one failed
            for each, returned in zip(measurements, results.rows, strict=True):
                plain = [{**each.keys, **each.job.seeded, **row} for row in returned]
                rows.setdefault(each.function.__name__, []).extend(plain)
        frame = self.summarize(config, {name: pd.DataFrame(parts) for name, parts in rows.items()})
        settings = {"study": self.name, "config": json.loads(json.dumps(asdict(config), default=str))}
        about = next(iter(provenances.values())) if len(provenances) == 1 else provenances
        return Table(frame.reset_index(drop=True), Provenance("measure", settings, model=about))


def training_folder(trained: str | Path, kind: str, *identity: Any) -> Path:
    """Returns where one training is kept.

    Args:
        trained: `Inputs.trained`.
        kind: What is trained, in a word.
        *identity: All that the training rests on, the version of its code among it (`code_version`), as JSON: with
            changed code it begins anew.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return inside(trained, f"{kind}-{digest}")


def on_one_thread() -> None:
    """Keeps PyTorch to one thread of this process where there is no GPU.

    Waiting for each other, threads make a small model slower.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


Figures: TypeAlias = Mapping[str, Callable[[Table], go.Figure]] | Callable[[Table], Mapping[str, go.Figure]]
"""Functions that draw a table, by panel, or a function that returns all figures."""

# Figures


def drawn_by(figures: Figures, table: Table) -> Mapping[str, go.Figure]:
    """Returns the figures of a table by panel."""
    return figures(table) if callable(figures) else {name: draw(table) for name, draw in figures.items()}


def lines(
    curves: Mapping[str, Statistic],
    x: str,
    panels: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    label: str,
    value: str = "accuracy",
) -> Callable[[Table], go.Figure]:
    """Returns what draws statistics along a key column, means over seeds with their intervals.

    Args:
        curves: The statistic of each curve by its name.
        x: The key column.
        panels: The keys of each panel by its caption; one panel of all rows by default.
        label: The title of the x axis.
        value: The title of the y axis.
    """

    def draw(table: Table) -> go.Figure:
        frames = {
            caption: pd.DataFrame(
                {x: at, "curve": name, **measured(curve.at(**keys, **{x: at})(table)).row}
                for at in levels(table, x)
                for name, curve in curves.items()
            )
            for caption, keys in (panels or {"": {}}).items()
        }
        return plots.curves(frames, x=x, by="curve", label=label, value=value)

    return draw


def seed_courses(
    panels: Mapping[str, Mapping[str, Any]], *, label: str = "step", value: str
) -> Callable[[Table], go.Figure]:
    """Returns what draws the course of each seed by itself: the keys of each panel's rows."""

    def draw(table: Table) -> go.Figure:
        frames = {caption: rows(**keys)(table).frame.sort_values(["seed", "step"]) for caption, keys in panels.items()}
        return plots.curves(frames, x="step", by="seed", label=label, value=value)

    return draw


def courses(
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]], x: str = "step", *, label: str, value: str
) -> Callable[[Table], go.Figure]:
    """Returns what draws means over seeds along a column, mostly `step`: the keys of each curve's rows, by panel."""

    def draw(table: Table) -> go.Figure:
        frames = {
            caption: pd.DataFrame(
                {x: at, "curve": name, **over_seeds(of_seeds.sort_values("seed")["value"].to_numpy(float)).row}
                for name, where in curves.items()
                for at, of_seeds in rows(**where)(table).frame.groupby(x)
            )
            for caption, curves in panels.items()
        }
        return plots.curves(frames, x=x, by="curve", label=label, value=value)

    return draw


def rows_along(
    x: str, by: str, panels: Mapping[str, Mapping[str, Any]], *, label: str, value: str = "accuracy"
) -> Callable[[Table], go.Figure]:
    """Returns what draws rows with their own intervals along a key column.

    Args:
        x: The key column.
        by: The key column that tells curves apart.
        panels: The keys of each panel's rows by its caption.
        label: The title of the x axis.
        value: The title of the y axis.
    """

    def draw(table: Table) -> go.Figure:
        ordered = Table(table.frame.sort_values(x, kind="stable"), table.provenance)
        frames = {caption: ordered.where(**keys).frame for caption, keys in panels.items()}
        return plots.curves(frames, x=x, by=by, label=label, value=value)

    return draw


def grids(
    columns: str,
    index: str,
    panels: Mapping[str, Mapping[str, Any]],
    *,
    x: str | None = None,
    y: str | None = None,
    value: str = "accuracy",
) -> Callable[[Table], go.Figure]:
    """Returns what draws rows as grids of shares.

    Args:
        columns: The key column along x.
        index: The key column along y.
        panels: The keys of each panel's rows by its caption.
        x: The title of the columns, if not their name.
        y: The title of the rows, if not their name.
        value: The title of the scale.
    """

    def draw(table: Table) -> go.Figure:
        frames = {
            caption: table.where(**keys).frame.pivot(index=index, columns=columns, values="value").astype(float)
            for caption, keys in panels.items()
        }
        return plots.accuracy_grids(frames, x=x or columns, y=y or index, value=value)

    return draw


def seed_dots(frame: Any, row: str, label: str, mean: pd.DataFrame | None = None) -> go.Figure:
    """Draws each seed's values in labelled rows, and `mean` with its own intervals (`plots.dots`)."""
    seeds = frame.assign(seed="seed " + frame["seed"].astype(str))
    return plots.dots(seeds if mean is None else pd.concat([seeds, mean]), row, "seed", label)


# Experiments


class About(Enum):
    """Whose statement an experiment is about."""

    PAPER = "paper"
    """A figure, a table or a statement of its source."""
    BEYOND = "beyond"
    """Beyond its source, or after its manner."""


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper, reproducible by name."""

    name: str
    """Such as `"icatune/fig3"`."""
    title: str
    source: str
    """Author, year, figure."""
    study: Study
    figures: Figures = field(default_factory=dict)
    """From the table alone to figures by panel."""
    claims: Claims = ()
    """The paper's, judged by the table alone."""
    published: str = ""
    """What the paper reports, in a sentence, beside which ours is read."""
    about: About = About.PAPER

    def draw(self, table: Table) -> Mapping[str, go.Figure]:
        """Returns its figures by panel."""
        return drawn_by(self.figures, table)

    def check(self, table: Table) -> list[Check]:
        """Returns its claims beside what a table says."""
        return checks_of(self.claims, table)

    @property
    def scales(self) -> Mapping[Scale, Any]:
        """Those of its study."""
        return self.study.scales

    @property
    def run(self) -> Callable[..., Table]:
        """That of its study."""
        return self.study.run

    @property
    def of_its_paper(self) -> bool:
        """Whether it is about a figure, a table or a statement of its source."""
        return self.about is About.PAPER

    @property
    def compares_models(self) -> bool:
        """Whether it takes several models."""
        return self.study.models == "several"

    @property
    def makes_models(self) -> bool:
        """Whether it makes the models that it measures, or measures none: it takes no model."""
        return self.study.models == "none"
