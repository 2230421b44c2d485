"""`align-circuits benchmark`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from align_circuits.cli.folders import Results
from align_circuits.cli.verb import Verb, command_line
from align_circuits.cli.workers import Workers


@dataclass(frozen=True)
class Benchmark(Verb):
    """Compares methods on circuits of the zoo."""

    methods: tuple[str, ...] = ()
    """The methods that are compared; all by default, those of other packages too (entry points of the group
    align_circuits.localizers)."""
    circuits: int = 20
    """How many circuits of the zoo, from the first on; each takes some 15 seconds of a processor core with all
    methods."""
    held_out: bool = False
    """Whether the held-out circuits are taken in place of the public ones: for a method that is finished."""
    workers: tyro.conf.OmitArgPrefixes[Workers] = field(default_factory=Workers)
    """Who runs the jobs; `status` and `collect` follow them from elsewhere."""
    out: Path | None = field(default=None, kw_only=True)
    """The folder for the results; by default runs/benchmark."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], out: Path) -> "Benchmark":
        """Makes the verb from the settings of its table."""
        return cls(tuple(settings["methods"]), settings["circuits"], settings["held_out"], out=out)

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return self.out or Path("runs/benchmark")

    @property
    def renews(self) -> dict[str, Any]:
        """Its own of the same zoo: circuits that were measured are kept, so that more of them can be added."""
        return {"verb": "benchmark", "held_out": self.held_out}

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        from align_circuits.localizers.registry import localizer, method_names
        from align_circuits.papers.localizer_zoo import HELD_OUT_ZOO, PUBLIC_ZOO, Zoo, overview

        methods = self.methods or tuple(method_names())
        for method in methods:
            localizer(method)  # raises before any long work
        experiment = HELD_OUT_ZOO if self.held_out else PUBLIC_ZOO
        whole = experiment.scales["paper"]
        if not 1 <= self.circuits <= whole.circuits:
            raise ValueError(f"--circuits {self.circuits}: give 1 to {whole.circuits}")
        config = Zoo(whole.first, self.circuits, methods)
        with self.workers.executor(self.folder) as executor:
            table = experiment.run(config, jobs=self.workers.jobs, folder=self.folder, executor=executor)
        means = overview(table)
        print(f"{self.circuits} circuits; means over them\n\n{means.to_string(float_format='{:.2f}'.format)}")
        self.finish(
            results,
            table,
            settings={**self.settings, **table.provenance.settings},
            title=experiment.title,
            facts={"circuits": str(self.circuits), "command": command_line("benchmark", self, Benchmark())},
            summary="Means over circuits whose heads are known. A cost is in passes of the model over all prompts.",
            sections=[
                ("Overview", "", means.reset_index().to_html(index=False, float_format="{:.2f}".format, na_rep="")),
                *((name, "", figure) for name, figure in experiment.draw(table).items()),
                ("All numbers", "", table),
            ],
        )
