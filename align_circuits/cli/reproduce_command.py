"""`align-circuits reproduce`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from align_circuits.cli.command_base import Verb, command_line
from align_circuits.cli.experiments_list import experiment_named, listing
from align_circuits.cli.folders import Results
from align_circuits.cli.workers import Workers
from align_circuits.papers.claims import checks_html, verdicts
from align_circuits.papers.lab import Scale

SMOKE = "The scale smoke only tests that the code runs: its numbers and verdicts mean nothing."
"""Said of every result at that scale."""


@dataclass(frozen=True)
class Reproduce(Verb):
    """Runs an experiment of `papers`."""

    name: tyro.conf.Positional[str] = ""
    """Such as icatune/fig3; see --list."""
    list: bool = False
    """List all experiments and stop."""
    scale: Scale = "cpu"
    """smoke takes seconds to minutes and tests the code, cpu takes up to 30 minutes on two cores, paper is the paper's
    setting, -untied has embedding and unembedding apart. smollm2 is for --model smollm2, and the default there if the
    experiment has it. It takes hours on two cores, as cpu-untied does: repeat the command to resume."""
    model: tuple[str, ...] = ("toy-llama",)
    """The model that is measured, or several if the figure compares models: names, folders or GGUF files, as `load`
    takes them."""
    workers: tyro.conf.OmitArgPrefixes[Workers] = field(default_factory=Workers)
    """Who runs the jobs; `status` and `collect` follow them from elsewhere."""
    out: Path | None = field(default=None, kw_only=True)
    """The folder for the results and intermediate files. By default results go to runs/NAME/SCALE and intermediate
    files to runs, so that experiments share the models that they tune."""

    def with_defaults(self, arguments: Sequence[str]) -> "Reproduce":
        """Returns the verb at the scale made for its model, if the experiment has one and no other is given."""
        from align_circuits.papers.experiments import EXPERIMENTS

        experiment = EXPERIMENTS.get(self.name)
        if "smollm2" not in self.model or experiment is None or "smollm2" not in experiment.scales:
            return self
        return tyro.cli(Reproduce, args=arguments, default=Reproduce(scale="smollm2"), prog="align-circuits reproduce")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], out: Path) -> "Reproduce":
        """Makes the verb from the settings of its table."""
        model = tuple(settings["models"]) or cls.model
        return cls(settings["name"], scale=settings["scale"], model=model, out=out)

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return self.out or Path("runs") / self.name / self.scale

    @property
    def renews(self) -> dict[str, Any]:
        """Its own of the same experiment: what was measured is kept, so that they are made again in seconds."""
        from align_circuits.papers.experiments import EXPERIMENTS

        experiment = EXPERIMENTS.get(self.name)
        if experiment is None:  # a list
            return {"verb": "reproduce"}
        models = [] if experiment.makes_models else [*self.model]
        return {"verb": "reproduce", "name": self.name, "scale": self.scale, "models": models}

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        from align_circuits.papers.experiments import EXPERIMENTS

        if self.list:
            print(listing(EXPERIMENTS.values(), self.out or Path("runs"), self.scale))
            return
        experiment = experiment_named(self.name)
        if self.scale not in experiment.scales:
            raise ValueError(f"{self.name} has no scale {self.scale!r}: give --scale {', '.join(experiment.scales)}")
        config = experiment.scales[self.scale]
        if len(self.model) != 1 and not experiment.compares_models:
            raise ValueError(
                f"{self.name} measures one model, but {len(self.model)} were given: {', '.join(self.model)}"
            )
        if experiment.makes_models and self.model != Reproduce.model:
            raise ValueError(f"{self.name} makes its own models and takes none: leave out --model")
        models = () if experiment.makes_models else self.model
        folder = self.out or Path("runs")
        with self.workers.executor(folder) as executor:
            table = experiment.run(config, models=models, jobs=self.workers.jobs, folder=folder, executor=executor)
        checks = experiment.check(table)
        for check in checks:
            print("\n".join(f"  {key}: {value}" for key, value in check.row().items() if value), end="\n\n")
        answer = " ".join([*([SMOKE] if self.scale == "smoke" else []), verdicts(checks)])
        print(f"  {answer}")
        self.finish(
            results,
            replace(table, values=None, weights=None),  # what is kept stays small
            settings={"name": self.name, "scale": self.scale, "models": [*models], **table.provenance.settings},
            title=f"{experiment.name}: {experiment.title}",
            facts={"scale": self.scale, "command": command_line(f"reproduce {self.name}", self, Reproduce(self.name))},
            summary=f"{answer} {experiment.published}",
            sections=[
                ("Claims", f"Thresholds were fixed before the run; {experiment.source}.", checks_html(checks)),
                *[(name, "", figure) for name, figure in experiment.draw(table).items()],
                ("All numbers", "", table),
            ],
        )
