"""The list that `align-circuits reproduce --list` prints: experiments by paper, and what became of those that ran."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from align_circuits.papers.claims import verdicts
from align_circuits.papers.study import Experiment
from align_circuits.tables.tables import Table


def listing(experiments: Iterable[Experiment], folder: Path, scale: str) -> str:
    """Returns the experiments as text, grouped by the part of their names before the slash.

    Args:
        experiments: What can be reproduced.
        folder: Where results of earlier runs stand, as NAME/SCALE.
        scale: The scale whose results are looked for.
    """
    lines = ["smoke takes seconds, cpu up to 30 minutes on two cores, paper hours or days. No durations are kept."]
    ordered = sorted(experiments, key=lambda each: _paper(each.name))  # stable: within a paper as they stand
    for paper, group in groupby(ordered, key=lambda each: _paper(each.name)):
        lines.append(f"\n{paper}:")
        for each in group:
            lines.append(f"  {each.name:<22} {each.title} [{each.source}]")
            if (status := _status(each, folder / each.name / scale)) is not None:
                lines.append(f"  {'':<22} kept at scale {scale}: {status}")
    return "\n".join(lines)


def _paper(name: str) -> str:
    return name.partition("/")[0] if "/" in name else "validation"


def _status(experiment: Experiment, folder: Path) -> str | None:
    """How the claims stand in the results that a folder keeps; None if it keeps none."""
    if not (folder / "provenance.json").is_file():
        return None
    checks = experiment.check(Table.load(folder))
    return verdicts(checks) if checks else "no claims."
