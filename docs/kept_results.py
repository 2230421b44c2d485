"""What the pages of results show of the tables that are kept in the folder `results`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from IPython.display import HTML, Markdown, display

from align_circuits.papers.claims import Verdict, checks_html, verdicts
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.study import Experiment
from align_circuits.tables.tables import Table

PREREGISTERED = Path("results/preregistered.csv")
"""What `benchmarks/preregistered.py` read from the history of git."""

PAPERS = ("icatune", "recall", "abrupt")
VERDICTS = [*get_args(Verdict)]


def kept(paper: str) -> Iterator[tuple[Experiment, Path]]:
    """Yields the experiments of a paper, or of "validation", each with a folder of its results."""
    for name, experiment in EXPERIMENTS.items():
        part = name.partition("/")[0]
        if paper == (part if part in PAPERS else "validation"):
            for folder in sorted(Path("results").glob(f"{experiment.study.name.replace('/', '-')}/*")):
                yield experiment, folder


def show(paper: str) -> None:
    """Shows how many claims hold in each experiment, then every experiment with its claims and figures."""
    counts = overview(paper)
    verdicts_of = counts[VERDICTS].astype(str).agg(" / ".join, axis=1)
    shown = counts[["experiment", "what", "scale"]].assign(**{" / ".join(VERDICTS): verdicts_of})
    display(HTML(f'<div style="overflow-x:auto">{shown.to_html(index=False, border=0)}</div>'))
    for experiment, folder in kept(paper):
        table = Table.load(folder)
        models = table.provenance.settings["models"]
        about = f"{experiment.source}; scale `{folder.name}`{', models: ' + ', '.join(models) if models else ''}."
        display(Markdown(f"## {experiment.name}: {experiment.title}\n\n{about} {experiment.published}"))
        if checks := experiment.check(table):
            display(Markdown(f"{verdicts(checks)} {preregistered(experiment.name, folder.name)}"))
            display(HTML(checks_html(checks)))
        for figure in experiment.draw(table).values():
            display(figure)


def preregistered(name: str, scale: str) -> str:
    """Returns, as a sentence, whether the thresholds of an experiment stood in the code before its result was kept."""
    known = pd.read_csv(PREREGISTERED)
    row: Any = next(known[(known["experiment"] == name) & (known["scale"] == scale)].itertuples(), None)
    if row is None:
        return "*Preregistered: not known.*"
    kept = f"the result (commit {row.commit}, {row.date})"
    if row.before == row.claims:
        return f"*Preregistered: yes.* All thresholds stood in the code before {kept} was kept."
    others = {"had another value": row.changed, "are new or worded anew": row.new}
    counts = ", ".join(f"{count} {what}" for what, count in others.items() if count)
    there = f"{row.before} of {row.claims} thresholds stood in the code before {kept} was kept"
    return f"*Preregistered: no.* {there}; {counts}."


def overview(paper: str) -> pd.DataFrame:
    """Returns how many claims of each experiment have which verdict."""
    rows = []
    for experiment, folder in kept(paper):
        found = [check.verdict for check in experiment.check(Table.load(folder))]
        counts = {verdict: found.count(verdict) for verdict in VERDICTS}
        rows.append({"experiment": experiment.name, "what": experiment.title, "scale": folder.name, **counts})
    return pd.DataFrame(rows)
