"""What the pages of results show of the tables that are kept in the folder `results`."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from IPython.display import HTML, Markdown, display

from align_circuits.cli.experiments_list import kept_verdicts
from align_circuits.papers.claims import Check, Verdict, checks_html, kept_checks, verdicts
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.lab import Experiment
from align_circuits.papers.statistics import Measured
from align_circuits.tables.tables import Table

CAUSES = Path("results/causes.toml")
"""Why claims fail."""

FRESH = Path("results/fresh_seeds.toml")
"""Which claims about emergence were tested on fresh seeds."""

ARCHIVE = Path("results/archive")
"""The results of experiments whose code has gone."""

PAPERS = ("icatune", "recall", "abrupt")
VERDICTS = [*get_args(Verdict)]


def kept(paper: str) -> Iterator[tuple[Experiment, Path]]:
    """Yields the experiments of a paper, or of "validation", each with a folder of its results."""
    for name, experiment in EXPERIMENTS.items():
        part = name.partition("/")[0]
        if paper == (part if part in PAPERS else "validation"):
            for folder in sorted(Path("results").glob(f"{experiment.study.name.replace('/', '-')}/*")):
                yield experiment, folder


@cache
def archived() -> dict[str, dict[str, str]]:
    """Returns what is known of each archived experiment."""
    return tomllib.loads((ARCHIVE / "experiments.toml").read_text(encoding="utf-8"))


def results_of(paper: str) -> list[tuple[str, str, Path]]:
    """Returns name, title and folder of each result of a paper, of "validation" or of the "archive"."""
    if paper != "archive":
        return [(experiment.name, experiment.title, folder) for experiment, folder in kept(paper)]
    folders = {name: sorted((ARCHIVE / name.replace("/", "-")).iterdir()) for name in archived()}
    return [(name, archived()[name]["title"], folder) for name, of_name in folders.items() for folder in of_name]


@cache
def checked(name: str, folder: Path) -> list[Check]:
    """Returns the checks of an experiment on the results in a folder, made once; of an archived one, those it left."""
    if name not in archived():
        return list(EXPERIMENTS[name].check(Table.load(folder)))
    return kept_checks(folder / "claims.csv")


def show(paper: str, *, beyond: bool = False) -> None:
    """Shows how many claims hold in each experiment of a paper, or `beyond` it, then each with claims and figures."""
    wanted = [name for name, each in EXPERIMENTS.items() if paper not in PAPERS or each.of_its_paper != beyond]
    counts = overview(paper).query("experiment in @wanted")
    verdicts_of = counts[VERDICTS].astype(str).agg(" / ".join, axis=1)
    shown = counts[["experiment", "what", "scale"]].assign(**{" / ".join(VERDICTS): verdicts_of})
    display(HTML(f'<div style="overflow-x:auto">{shown.to_html(index=False, border=0)}</div>'))
    for experiment, folder in kept(paper):
        if experiment.name not in wanted:
            continue
        table = Table.load(folder)
        models = table.provenance.settings["models"]
        about = f"{experiment.source}; scale `{folder.name}`{', models: ' + ', '.join(models) if models else ''}."
        display(HTML(f'<span id="{experiment.name.replace("/", "-")}"></span>'))
        display(Markdown(f"## {experiment.name}: {experiment.title}\n\n{about} {experiment.published}"))
        if checks := checked(experiment.name, folder):
            display(Markdown(f"{verdicts(checks)} {preregistered(experiment.name, folder.name)}"))
            display(HTML(checks_html(checks)))
        for name, figure in experiment.draw(table).items():
            if name:
                display(Markdown(f"*{name}*"))
            display(figure)


def folder_of(name: str, scale: str) -> Path:
    """Returns where the results of an experiment are kept."""
    if name in archived():
        return ARCHIVE / name.replace("/", "-") / scale
    return Path("results") / EXPERIMENTS[name].study.name.replace("/", "-") / scale


def kept_table(name: str, scale: str) -> Table:
    """Returns the kept table of an experiment."""
    return Table.load(folder_of(name, scale))


def claims_of(name: str, scale: str) -> None:
    """Shows the claims of an experiment, and whether they stood in the code before."""
    checks = checked(name, folder_of(name, scale))
    display(Markdown(f"`{name}`, scale `{scale}`: {verdicts(checks)} {preregistered(name, scale)}"))
    display(HTML(checks_html(checks)))


def show_archived(name: str) -> None:
    """Shows the claims of an archived experiment, why some fail, and where its table and its code are."""
    about = archived()[name]
    display(Markdown(f"*{about['title']}* ({about['source']}). {about['published']}"))
    for result in results_of("archive"):
        if result[0] == name:
            claims_of(name, result[2].name)
            if len(causes := causes_of([result])):
                display(HTML(f'<div style="overflow-x:auto">{causes.to_html(index=False, border=0)}</div>'))
            display(Markdown(f"Kept table: `docs/{result[2]}/table.csv.xz`, with its provenance and `claims.csv`."))
    code = f"`{about['code']}`, last changed in commit {about['commit']}"
    display(Markdown(f"Code: {code}. There `align-circuits reproduce {name}` runs it again."))


def all_verdicts() -> pd.DataFrame:
    """Returns `kept_verdicts`, and the same of archived experiments."""
    return pd.concat([kept_verdicts(), pd.read_csv(ARCHIVE / "kept_results.csv", dtype={"commit": str})])


def preregistered(name: str, scale: str) -> str:
    """Returns, as a sentence, whether the thresholds of an experiment stood in the code before its result was kept."""
    known = all_verdicts()
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
    for name, title, folder in results_of(paper):
        found = [check.verdict for check in checked(name, folder)]
        counts = {verdict: found.count(verdict) for verdict in VERDICTS}
        rows.append({"experiment": name, "what": title, "scale": folder.name, **counts})
    return pd.DataFrame(rows)


def failing(results: list[tuple[str, str, Path]]) -> Iterator[tuple[str, str, str, str]]:
    """Yields experiment, scale, claim and measured number of every claim that fails."""
    for name, _, folder in results:
        for check in checked(name, folder):
            if check.verdict == "fails":
                yield name, folder.name, check.claim, check.row()["measured"]


def why(paper: str) -> pd.DataFrame:
    """Returns the causes of the claims of a paper that fail, as `causes_of`."""
    return causes_of(results_of(paper))


def causes_of(results: list[tuple[str, str, Path]]) -> pd.DataFrame:
    """Returns the causes of the claims that fail in some results, with the claims and the experiment that shows it.

    Raises:
        LookupError: A failing claim without a cause, or with several; or a cause of a claim that does not fail.
    """
    causes = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["cause"]
    left = {(place, *claim) for place, cause in enumerate(causes) for claim in map(tuple, cause["claims"])}
    left = {key for key in left if key[1] in {name for name, _, _ in results}}
    claims: dict[int, list[str]] = {}
    for name, scale, claim, measured in failing(results):
        found = [key for key in left if key[1:3] == (name, scale) and claim.startswith(key[3])]
        if len(found) != 1:
            raise LookupError(f"{name}, {scale}: {len(found)} causes for {claim!r}")
        left.remove(found[0])
        claims.setdefault(found[0][0], []).append(f"{name} ({scale}): {claim}: {measured}")
    if left:
        raise LookupError(f"causes of claims that do not fail: {sorted(left)}")
    rows = [
        {
            "why": causes[place]["what"],
            "shown by": causes[place].get("shown_by", "not shown"),
            "claims that fail": len(own),
            "which": "; ".join(own),
        }
        for place, own in sorted(claims.items())
    ]
    return pd.DataFrame(rows, columns=["why", "shown by", "claims that fail", "which"])


def seeds_of(table: Table) -> list[int]:
    """Returns the seeds of a table, or of the arms that it is the mean of."""
    if "seed" in table.frame and table.frame["seed"].notna().any():
        return sorted({int(seed) for seed in table.frame["seed"].dropna()})
    return sorted({seed for arm in table.provenance.settings["config"]["arms"] for seed in arm["seeds"]})


def fresh_seeds() -> pd.DataFrame:
    """Returns the claims about emergence with the seeds that they were developed and tested on, and the verdicts."""
    rows = []
    for entry in tomllib.loads(FRESH.read_text(encoding="utf-8"))["claim"]:
        name, scale = entry["experiment"], entry["scale"]
        found = [check.verdict for check in checked(name, folder_of(name, scale))]
        tested = seeds_of(kept_table(name, scale))
        seeds, developed = ([str(seed) for seed in of] for of in (tested, entry["developed_on"]))
        rows.append(
            {
                "what emerges": entry["what"],
                "experiment": name,
                "developed on": ", ".join(developed),
                "tested on": ", ".join(seeds),
                **{verdict: found.count(verdict) for verdict in VERDICTS},
            }
        )
    return pd.DataFrame(rows)


def summary(paper: str) -> pd.DataFrame:
    """Returns the verdicts on the paper's own claims and on those beyond it."""
    counts = overview(paper)
    own = [EXPERIMENTS[name].of_its_paper for name in counts["experiment"]]
    of_paper = pd.Series(own, counts.index).map({True: "of the paper", False: "beyond the paper"})
    whose = of_paper if paper in PAPERS else pd.Series("of the package", counts.index)
    return counts.groupby([whose.rename("claims"), "scale"], sort=False)[VERDICTS].sum()


def measured_for(name: str, scale: str, claim: str) -> Measured:
    """Returns what was measured for the only claim of an experiment that begins so."""
    (check,) = (check for check in checked(name, folder_of(name, scale)) if check.claim.startswith(claim))
    return check.measured


def printed(number: Measured | float | str) -> str:
    """Returns a number as pages write it, with its interval: .83 [.78, .88]. A text stays as it is."""
    if isinstance(number, str):
        return number
    if isinstance(number, float):
        return re.sub(r"\b0\.", ".", f"{number:.2f}")
    return re.sub(r"\b0\.", ".", f"{number:.2f}".replace(" [no interval]", ""))


def put(**numbers: Measured | float | str) -> None:
    """Makes numbers known to the text of a page, which shows them by {glue:text}`name`."""
    from myst_nb import glue  # of the documentation's environment alone; tests read this file without it

    for name, number in numbers.items():
        glue(name, printed(number), display=False)
