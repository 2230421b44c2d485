"""`align-circuits benchmark`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from align_circuits.cli.command_base import Verb, command_line
from align_circuits.cli.folders import Results
from align_circuits.cli.workers import Workers
from align_circuits.localizers.benchmarked_head_methods import METHODS
from align_circuits.localizers.registry import is_own, localizer, method_names
from align_circuits.tables.tables import Table

FEWEST_WITH_INTERVAL = 5
"""Circuits below which a mean has no interval: Student's is then wider than the range of the metrics."""

ALL_NUMBERS = f"""\
The columns trait and at say over which circuits a mean is; recall_at_size is the R-precision. A mean over fewer than \
{FEWEST_WITH_INTERVAL} circuits has no interval."""


METHODS_IN_WORDS = (
    "The methods that are compared: names, or functions of your own as path/file.py:function, whose code is run. By "
    "default all names, those of other packages too (entry points of the group align_circuits.localizers). Names of "
    f"this package: {'; '.join(METHODS)}."
)


@dataclass(frozen=True)
class Benchmark(Verb):
    """Compares methods on circuits of the zoo."""

    methods: Annotated[tuple[str, ...], tyro.conf.arg(help=METHODS_IN_WORDS)] = ()
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
        if own := [method for method in settings["methods"] if is_own(method)]:
            raise ValueError(f"--methods {own[0]} is code, which is run only if you name it")
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
        from align_circuits.papers import localizer_zoo as zoo

        methods = self.methods or tuple(method_names())
        for method in methods:
            localizer(method)  # raises before any long work
        experiment = zoo.HELD_OUT_ZOO if self.held_out else zoo.PUBLIC_ZOO
        whole = experiment.scales["paper"]
        if not 1 <= self.circuits <= whole.circuits:
            raise ValueError(f"--circuits {self.circuits}: give 1 to {whole.circuits}")
        config = zoo.Zoo(whole.first, self.circuits, methods)
        zoo.check_methods(config)
        with self.workers.executor(self.folder) as executor:
            table = experiment.run(config, jobs=self.workers.jobs, folder=self.folder, executor=executor)
        table = _without_wide_intervals(table)
        means = zoo.overview(table)
        summary = answer(table, self.circuits)
        print(f"{summary}\n\n{_printed(means)}\n\n{fill(zoo.MEANING_OF_COLUMNS, 100)}")
        rows = means.reset_index().to_html(index=False, float_format="{:.2f}".format, na_rep="–", border=0)
        controls = [f"'{name}' {what}." for name, what in zoo.CONTROLS.items() if name in set(table.frame["method"])]
        self.finish(
            results,
            table,
            settings={**self.settings, **table.provenance.settings},
            title=experiment.title,
            facts={"circuits": str(self.circuits), "command": command_line("benchmark", self, Benchmark())},
            summary=f"{summary}\n\nControls in the figures and tables: {' '.join(controls)}",
            sections=[
                ("Overview", f"Means over circuits. {zoo.MEANING_OF_COLUMNS}", f'<div class="wide">{rows}</div>'),
                *((name, "", figure) for name, figure in experiment.draw(table).items()),
                ("All numbers", ALL_NUMBERS, table),
            ],
        )


def _without_wide_intervals(table: Table) -> Table:
    """The table without intervals of means over fewer than `FEWEST_WITH_INTERVAL` circuits."""
    frame = table.frame.copy()
    frame.loc[frame["n"] < FEWEST_WITH_INTERVAL, ["low", "high"]] = np.nan
    return replace(table, frame=frame)


def _printed(means: pd.DataFrame) -> str:
    """The overview in two tables, since one would be wider than a terminal: AUROC by role, and all else."""
    shown = means.rename_axis(None).astype(object).map("{:.2f}".format, na_action="ignore")
    by_role = shown.filter(like="AUROC, ")
    tables = {
        "AUROC by role": by_role.rename(columns=lambda name: str(name).removeprefix("AUROC, ")),
        "Over all roles": shown.drop(columns=by_role.columns),
    }
    return "\n\n".join(f"{heading}\n{of.to_string(na_rep='–')}" for heading, of in tables.items() if len(of.columns))


def answer(table: Table, circuits: int) -> str:
    """Which method ranks heads best, with its mean AUROC, and which comes next; of few circuits which are ahead."""
    over_roles = table.where(trait="circuits", at="all", role="all", metric="auroc").frame
    best, *others = over_roles.sort_values("value", ascending=False, kind="stable").to_dict("records")
    value = f"{best['value']:.2f}"
    if isnan(best["low"]):  # so a rank would be told by chance
        ahead = " and ".join(repr(row["method"]) for row in (best, *others) if f"{row['value']:.2f}" == value)
        return (
            f"No ranking: means over fewer than {FEWEST_WITH_INTERVAL} circuits, here {circuits}, have no interval. "
            f"The highest mean AUROC is {value}, of {ahead}."
        )
    rank = f" best of {len(over_roles)} methods" if others else ""
    following = f"; next is '{others[0]['method']}' with {others[0]['value']:.2f}" if others else ""
    return (
        f"'{best['method']}' tells the heads of a role from other heads{rank}: its mean AUROC is "
        f"{value} [{best['low']:.2f}, {best['high']:.2f}] over {circuits} circuits whose heads are known{following}."
    )
