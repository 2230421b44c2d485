"""One runner for every experiment of every paper: a study measures once, and experiments draw and check its table.

A study names what is measured as jobs, calls of a function with a config and a seed, and says how their rows become
one table. The rest is the same for all, and is done here: `jobs` processes, one file a job, so that what is finished
is never done again, not even for another study; models loaded and told apart by a hash of their weights; provenance.

    def measure(*, task: dict, n: int, seed: int) -> pd.DataFrame: ...      # at the top level of an importable module

    def _jobs(config: Config, inputs: Inputs) -> list[Measurement]:
        return [Measurement(measure, {"task": task, "n": config.n}, seed, keys={"m": task["x_len"]}) for ...]

    def _summarize(config: Config, rows: Rows) -> pd.DataFrame:
        return rows["measure"].drop(columns="kind")

    STUDY = Study("icatune/lengths", {"smoke": Config(n=2), "cpu": Config(), "paper": Config(n=500)}, _jobs, _summarize)
    FIG3 = Experiment("icatune/fig3", title, source, STUDY, _draw, _check)
    FIG4 = Experiment("icatune/fig4", title, source, STUDY, _draw_otherwise)                # shares the study's table

A function that trains goes into `Study.train`: these jobs are finished before the others start, and leave their models
under `training_folder(inputs.trained, ...)`, where the others find them. The path is part of their config, so pass it
on. Studies share the folder, so two that train the same network train it once; a training that is found finished
must cost nothing. Two jobs that train the same network must be one, or two processes train it at the same time.

What a job does in less than a second (an exact formula, one pass over a model) is one job all the same. Rows go
through JSON: numbers come back to the bit.

Files, all below the folder given to `run` (`runs` by default):

    jobs/<function>-<hashes>.json   the rows of one job
    trained/<kind>-<hash>/          log, checkpoints and weights of one training
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.jobs.jobs import Job, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.protocol import model_provenance
from align_circuits.papers.claims import Check, Scale
from align_circuits.tables.tables import Provenance, Table


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
    """The provenance of each model by what `load` takes."""
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
    """The rows of a study with one function."""
    (frame,) = rows.values()
    return frame


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
    """From config and rows to the table; the rows of the only function as they are by default."""
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
        inputs = Inputs({model: model_provenance(self.load(model)) for model in models}, str(folder / "trained"))
        rows: dict[str, list[dict[str, Any]]] = {}
        for stage in (self.train, self.jobs):
            measurements = stage(config, inputs)
            results = run_jobs([each.job for each in measurements], folder / "jobs", executor=executor, processes=jobs)
            results.all_rows()  # raises where one failed
            for each, returned in zip(measurements, results.rows, strict=True):
                plain = [{**each.keys, **each.job.seeded, **row} for row in returned]
                rows.setdefault(each.function.__name__, []).extend(plain)
        frame = self.summarize(config, {name: pd.DataFrame(parts) for name, parts in rows.items()})
        settings = {"study": self.name, "config": json.loads(json.dumps(asdict(config), default=str))}
        about = next(iter(inputs.models.values())) if len(inputs.models) == 1 else inputs.models
        return Table(frame.reset_index(drop=True), Provenance("measure", settings, model=about))


def _no_figures(_: Table) -> Mapping[str, go.Figure]:
    return {}


def _no_checks(_: Table) -> list[Check]:
    return []


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper, reproducible by name."""

    name: str
    """Such as `"icatune/fig3"`."""
    title: str
    source: str
    """Author, year, figure."""
    study: Study
    draw: Callable[[Table], Mapping[str, go.Figure]] = _no_figures
    """From the table alone to figures by panel."""
    check: Callable[[Table], list[Check]] = _no_checks
    """From the table alone to the paper's claims."""
    published: str = ""
    """What the paper reports, in a sentence, beside which ours is read."""

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
        """Whether it is about a figure, a table or a statement of its source, not beyond it or after its manner."""
        return not self.source.lower().startswith(("beyond", "after"))

    @property
    def compares_models(self) -> bool:
        """Whether it takes several models."""
        return self.study.models == "several"

    @property
    def makes_models(self) -> bool:
        """Whether it makes the models that it measures, or measures none: it takes no model."""
        return self.study.models == "none"


def training_folder(trained: str | Path, kind: str, *identity: Any) -> Path:
    """Returns where one training is kept.

    Args:
        trained: `Inputs.trained`.
        kind: What is trained, in a word.
        *identity: All that the training rests on, as JSON.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Path(trained) / f"{kind}-{digest}"


def on_one_thread() -> None:
    """Keeps PyTorch to one thread of this process where there is no GPU.

    Waiting for each other, threads make a small model slower.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
