"""The list that `align-circuits reproduce --list` prints: experiments by paper, what they take, what became of them."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from align_circuits.jobs.similar_names import did_you_mean
from align_circuits.papers.claims import Verdict, verdicts
from align_circuits.papers.lab import Experiment
from align_circuits.tables.tables import Table

PAPERS = {
    "icatune": "The missing alignment link (Agarwal and Sarawagi, 2025)",
    "recall": "Contextual recall (Vasudeva et al., 2026)",
    "abrupt": "Abrupt learning (Reddy, 2024)",
}
"""The papers, by the part of an experiment's name before the slash."""

VALIDATION, OTHERS = "validation", "others"
"""What is listed after the papers."""

TITLES = PAPERS | {VALIDATION: "Validation of this package", OTHERS: "Experiments of other packages"}
"""The headings of the list, in its order."""

_VALIDATED = ("attribution", "localize", "localizers", "toy-llama", "wild")
"""The parts before the slash of what validates this package."""

DURATIONS = files("align_circuits.papers") / "durations.csv"
"""What `benchmarks/experiments.py` measured."""

KEPT = files("align_circuits.papers") / "kept_results.csv"
"""What `benchmarks/preregistered.py` read from the results that the repository keeps, and from its history."""

_SHORT = {
    "holds": "hold",
    "no exception": "without exception",
    "fails": "fail",
    "undecided": "undecided",
    "no evidence": "without evidence",
    "not testable": "not testable",
}


def durations() -> dict[tuple[str, str], float]:
    """Returns how many seconds of one processor core a study takes at a scale, as far as that was measured."""
    with DURATIONS.open(encoding="utf-8") as lines:
        return pd.read_csv(lines, index_col=["study", "scale"])["seconds"].to_dict()


def kept_verdicts() -> pd.DataFrame:
    """Returns the number of claims with each verdict, by experiment and scale, in the results that are kept."""
    with KEPT.open(encoding="utf-8") as lines:
        return pd.read_csv(lines, dtype={"commit": str})


def experiment_named(name: str) -> Experiment:
    """Returns an experiment by its name, or raises: there is none, or it is run from a checkout and not a wheel."""
    from align_circuits.papers.experiments import EXPERIMENTS

    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if name in kept_verdicts()["experiment"].values:
        raise ValueError(
            f"no experiment {name!r} in this installation: what validates the package, and what goes beyond the "
            "papers, is run from a checkout of its repository; align-circuits reproduce --list names the others"
        )
    raise ValueError(
        f"no experiment {name!r}: {did_you_mean(name, EXPERIMENTS)}align-circuits reproduce --list names all"
    )


def listing(experiments: Iterable[Experiment], folder: Path, scale: str) -> str:
    """Returns the experiments as text, by paper, with the verdicts of earlier runs at a scale, in folder/NAME/SCALE."""
    taken, kept = durations(), kept_verdicts()
    lines = [
        "Scales: smoke tests the code in seconds to minutes; cpu, which most stored results use, takes up to 30",
        "minutes on two cores; paper takes hours or days. Times, where measured, are for one core, the bundled model",
        "and no earlier results. Claims are those of the results that the project keeps; its documentation says which",
        "fail, and why.",
    ]
    ordered = sorted(experiments, key=lambda entry: [*TITLES].index(part_of(entry.name)))  # stable: else as they stand
    for heading, in_order in groupby(ordered, key=lambda entry: part_of(entry.name)):
        group = list(in_order)
        paper = heading in PAPERS
        lines.append(f"\n{TITLES[heading]}:")
        of_paper = [entry.name for entry in group if entry.of_its_paper or not paper]
        beyond = [entry.name for entry in group if entry.name not in of_paper]
        for whose, of in (("claims of the paper" if paper else "claims", of_paper), ("claims beyond it", beyond)):
            lines += [f"  {whose}, {counts}" for counts in _counted(kept, of)]
        for entry in group:
            times = [f"{size} {_duration(taken.get((entry.study.name, size)))}" for size in ("smoke", "cpu")]
            lines.append(f"  {entry.name:<22} {entry.title} [{entry.source}]")
            lines.append(f"  {'':<22} takes: {', '.join(times)}")
            lines += [f"  {'':<22} claims, {of}" for of in _counted(kept, [entry.name])]
            if (status := _status(entry, folder / entry.name / scale)) is not None:
                lines.append(f"  {'':<22} done at scale {scale}: {status}")
    return "\n".join(lines)


def _counted(kept: pd.DataFrame, experiments: Sequence[str]) -> list[str]:
    """Returns the verdicts of the kept results of some experiments, a text for each scale."""
    by_scale: Any = kept[kept["experiment"].isin(experiments)].groupby("scale", sort=False)[[*get_args(Verdict)]].sum()
    return [f"{scale}: {told(row.to_dict())}" for scale, row in by_scale.iterrows()]


def told(counts: Mapping[Any, int]) -> str:
    """Returns how many claims have which verdict, in words."""
    return ", ".join(f"{number} {_SHORT[verdict]}" for verdict, number in counts.items() if number)


def part_of(name: str) -> str:
    """Returns under which of `TITLES` an experiment of this name is listed."""
    prefix = name.partition("/")[0]
    return prefix if prefix in PAPERS else VALIDATION if prefix in _VALIDATED else OTHERS


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "not measured"
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _status(experiment: Experiment, folder: Path) -> str | None:
    """How the claims stand in the results that a folder keeps; None if it keeps none."""
    if not (folder / "provenance.json").is_file():
        return None
    checks = experiment.check(Table.load(folder))
    return verdicts(checks) if checks else "no claims."
