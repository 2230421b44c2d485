"""`align-circuits compare`."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro

from align_circuits.cli.command_base import Verb, distinct
from align_circuits.cli.folders import Results
from align_circuits.report import plots
from align_circuits.report.page import Section
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table, best_end_of, in_common

SHOWN = 10
"""The rows that are printed; the report has more and the table all."""

IN_REPORT = 100
"""The rows of both runs in a report at most."""

IN_SIGHT = 4
"""The columns that a phone shows before A and B; where there are more, A and B come first."""

COST = "cost"
"""The metric of `benchmark` that a clock measures, and that differs between any two runs."""

CHANGE = "B - A"
"""The column of differences as people read it."""

EFFECTS = {"patch", "attribute", "ablate"}
"""The verbs whose numbers are effects of heads."""


@dataclass(frozen=True)
class Compare(Verb):
    """Puts two runs side by side."""

    first: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH_A")]
    """The first run, a folder that a verb wrote."""
    second: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH_B")]
    """The second run, of the same verb; patch, attribute and ablate also stand beside each other."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        runs = [_loaded(folder) for folder in (self.first, self.second)]
        runs = [distinct(run) if run.provenance.verb in {*EFFECTS, "evaluate"} else run for run in runs]
        tables = [run.where(estimated=False) if "estimated" in run.keys else run for run in runs]
        table, has_intervals = differences(*tables)
        settings, claims = (compared(*tables) for compared in (settings_that_differ, claims_of))
        differing = _differing(table)
        of_two_verbs = tables[0].provenance.verb != tables[1].provenance.verb
        if of_two_verbs:
            summary = " ".join([*_agreement(table, *tables), *_in_one_alone(table, *tables)])
        else:
            alone = {name: len(run) - len(table) for name, run in zip("AB", tables, strict=True)}
            left_out = "".join(f" In {name} alone: {count} more." for name, count in alone.items() if count)
            summary = f"{len(table) - len(differing)} of {len(table)} numbers are equal in A and B.{left_out}"
            if has_intervals:
                low, high = (table.frame[end].to_numpy(dtype=float) for end in ("low", "high"))
                apart = np.count_nonzero((low > 0) | (high < 0))
                summary += f" Differences whose interval leaves out 0: {apart}."
        for name, run, measured in zip("AB", runs, tables, strict=True):
            if estimates := len(run) - len(measured):
                summary += f" {estimates} of {len(run)} numbers of {name} are estimates of a screen, and left out."
        # As what ablation takes and what patching brings.
        ends = [{name: best_end_of(run, name) for name in {*table.frame["metric"]}} for run in tables if of_two_verbs]
        opposite = len(ends) == 2 and ends[0] != ends[1]
        if opposite:
            summary += " What one run counts as a loss the other counts as a gain, so no differences are told."
        elif len(differing) or not has_intervals:
            one, other = (each.provenance.data for each in tables)
            same = "the same" if one.get("digest") == other.get("digest") else "independent"
            without = f"without intervals: {in_common(*tables)}".removesuffix(": ")
            intervals = f"with 95% intervals over {same} prompts" if has_intervals else without
            summary += f" Differences are B minus A, {intervals}."
        folders = zip("AB", (self.first, self.second), tables, strict=True)
        shown_runs = {name: f"{folder} ({_measured_by(run)})" for name, folder, run in folders}
        print("\n".join(f"{name}: {run}" for name, run in shown_runs.items()) + f"\n\n{summary}\n")
        numbers = differing.frame
        heading, note = "Numbers that differ", f"The largest differences first; low and high are the ends of {CHANGE}."
        if opposite:
            numbers = numbers.drop(columns=[*VALUES]).sort_values("A", key=abs, ascending=False, kind="stable")
            heading, note = "Numbers of both runs", "The largest of A first."
        if len(numbers) > IN_REPORT:
            note += f" These are {IN_REPORT} of {len(numbers):,}; table.csv has all."
        first_rows = "largest of A" if opposite else "largest differences"
        shown = {"settings that differ": settings, "claims": claims, first_rows: numbers.head(SHOWN)}
        sections: list[Section] = [
            ("Settings that differ", "Of the command, the model, the prompts and the versions.", _html(settings)),
            *([("Claims", "How each claim stands in both runs.", _html(claims))] if len(claims) else []),
        ]
        if len(differing):
            if panels := _of_heads(table):
                axes = {name: f"{name}: {run.provenance.verb}" for name, run in zip("AB", tables, strict=True)}
                drawn = {metric: rows.rename(columns=axes) for metric, rows in panels.items()}
                figure = plots.beside(drawn, axes["A"], axes["B"], "head", opposite=opposite)
                line = "A = -B" if opposite else "A = B"
                sections.append(("Both runs", f"A point for each head; dashed: {line}.", figure))
            in_all, varied = _folded(numbers.head(IN_REPORT))
            names = [*varied]
            if names.index("A") > IN_SIGHT:
                varied = varied.reindex(columns=["A", "B", *(name for name in names if name not in ("A", "B"))])
            sections.append((heading, f"{note} {in_all}".strip(), _html(varied, "wide")))
        if of_two_verbs:  # whose settings differ anyway
            shown, sections = dict(reversed(shown.items())), sections[::-1]
        texts = {name: _printed(rows) for name, rows in shown.items() if len(rows)}
        if texts:
            print("\n\n".join(f"{name}:\n{text}" for name, text in texts.items()))
        self.finish(
            results,
            table,
            settings=table.provenance.settings,
            title=f"{' and '.join(dict.fromkeys(table.provenance.verb for table in tables))}: two runs",
            summary=summary,
            sections=sections,
            facts=shown_runs,
        )


def _measured_by(run: Table) -> str:
    """The verb of a run, with what of it was measured, where its settings tell."""
    settings = run.provenance.settings
    chosen = [settings.get(name) for name in ("method", "how", "direction", "metric")]
    return ", ".join([run.provenance.verb, *(choice for choice in chosen if isinstance(choice, str))])


def _printed(rows: pd.DataFrame) -> str:
    """Rows in columns, after a line with the keys that are the same in all rows of numbers."""
    in_all, rows = _folded(rows) if "n" in rows or "metric" in rows else ("", rows)
    printed = rows.to_string(index=False, float_format=_digits, na_rep="–")
    return f"{in_all}\n{printed}" if in_all else printed


def _folded(rows: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """A sentence with the keys that are the same in all rows, and the rows without these and without empty columns.

    A head is called by its layer and number in one column.
    """
    rows = _with_names(rows.dropna(axis=1, how="all")).rename(columns={"value": CHANGE})
    keys = [name for name in rows if name not in ("A", "B", CHANGE, *VALUES)] if len(rows) > 1 else []
    same = [name for name in keys if len({*map(str, rows[name])}) == 1]
    in_all = ", ".join(f"{name} {rows[name].iloc[0]}" for name in same)
    return f"In all rows: {in_all}." if same else "", rows.drop(columns=same)


def _with_names(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the names of heads, such as L2H3, in place of their layer and number; of a layer L2, of the model –."""
    if not {"layer", "head"} <= {*rows.columns}:
        return rows
    both = rows[["layer", "head"]].itertuples(index=False, name=None)
    names = ["–" if pd.isna(layer) else f"L{layer}" if pd.isna(head) else f"L{layer}H{head}" for layer, head in both]
    return rows.assign(head=names).drop(columns="layer")


def _of_heads(table: Table) -> dict[str, pd.DataFrame]:
    """The numbers of heads in both runs, by metric, where there is one for each head."""
    if not {"layer", "head", "metric"} <= {*table.keys}:
        return {}
    frame = _with_names(table.of_all_targets().heads().frame.dropna(subset=["A", "B"]))
    by_metric = {str(metric): rows for metric, rows in frame.groupby("metric", sort=False)}
    return {} if any(rows["head"].duplicated().any() for rows in by_metric.values()) else by_metric


def _digits(number: float) -> str:
    return f"{number:.3g}"


def _loaded(folder: Path) -> Table:
    if not (folder / "provenance.json").is_file():
        raise ValueError(f"{str(folder)!r} is no run: give a folder that a verb wrote, which has a provenance.json")
    run = Table.load(folder)
    if run.provenance.verb == "compare":
        raise ValueError(f"{str(folder)!r} holds a comparison: give two of the runs that were compared")
    if not len(run) or run.frame.duplicated(run.keys).any():
        what = "several rows of the same keys, so which to compare cannot be told" if len(run) else "no rows"
        raise ValueError(f"{str(folder)!r} has {what}: give a run as a verb wrote it")
    return run


def differences(first: Table, second: Table) -> tuple[Table, bool]:
    """Returns the rows that both tables have, with the difference second minus first, largest first; costs come last.

    The numbers of both are in the columns `A` and `B`; what is returned beside says whether there are intervals.
    """
    verbs = [table.provenance.verb for table in (first, second)]
    if verbs[0] != verbs[1] and not {*verbs} <= EFFECTS:
        effects = ", ".join(sorted(EFFECTS))
        raise ValueError(f"a run of {verbs[0]} beside one of {verbs[1]}: give two of one verb, or of {effects}")
    keys = [key for key in first.keys if key in second.keys]
    first, second = (table.with_keys(keys) for table in (first, second))
    numbers = [table.frame[[*keys, "value", "n"]].assign(row=np.arange(len(table))) for table in (first, second)]
    # An inner merge: the summary tells how many rows one run has alone.
    both = numbers[0].merge(numbers[1], on=keys, suffixes=("_a", "_b"))
    if not len(both):
        apart = [key for key in keys if not {*first.frame[key]} & {*second.frame[key]}]
        values = [f"{key} ({', '.join(str(table.frame[key].iloc[0]) for table in (first, second))})" for key in apart]
        raise ValueError(
            "the runs have no row in common: compare runs that measure the same heads or targets"
            + (f"; these differ in {', '.join(values)}" if values else "")
        )
    frame = both[keys].assign(A=both["value_a"], B=both["value_b"], value=both["value_b"] - both["value_a"])
    frame = frame.assign(low=float("nan"), high=float("nan"), n=both[["n_a", "n_b"]].min(axis=1))
    try:
        common = [table._rows(both[row].to_numpy()) for table, row in ((first, "row_a"), (second, "row_b"))]
        exact = (common[1] - common[0]).frame[[*keys, "low", "high"]]
        frame = frame.drop(columns=["low", "high"]).merge(exact, on=keys).loc[:, [*keys, "A", "B", *VALUES]]
    except ValueError:
        pass  # such as patches in different directions: no intervals
    is_cost = frame["metric"] == COST if "metric" in frame else pd.Series(False, index=frame.index)
    frame = frame.iloc[np.lexsort((-frame["value"].abs(), is_cost))]  # by the last first; NaN comes last
    provenance = Provenance("compare", {"A": asdict(first.provenance), "B": asdict(second.provenance)})
    return Table(frame.reset_index(drop=True), provenance), bool(frame["low"].notna().any())


def _differing(table: Table) -> Table:
    """The rows whose numbers differ; one that is missing (NaN) in both runs does not."""
    one, other = (table.frame[side].to_numpy(dtype=float) for side in ("A", "B"))
    return replace(table, frame=table.frame[(one != other) & ~(np.isnan(one) & np.isnan(other))])


def _agreement(table: Table, first: Table, second: Table) -> Iterator[str]:
    """Yields how well the effects of two verbs agree in rank, by metric, in sentences."""
    frame: Any = table.of_all_targets().frame.dropna(subset=["A", "B"])
    for metric, rows in frame.groupby("metric", sort=False):
        if rows["A"].nunique() < 2 or rows["B"].nunique() < 2:
            yield f"{metric}: no rank correlation, since all effects of a run are equal."
            continue
        ends = [best_end_of(run, metric) for run in (first, second)]
        rho = rows["A"].corr(rows["B"], method="spearman") * (1 if ends[0] == ends[1] else -1)
        turned = "" if ends[0] == ends[1] else f", the {ends[0]} effects of A beside the {ends[1]} of B"
        of = "rows" if "head" not in rows or rows.duplicated(["layer", "head"]).any() else "heads"
        yield f"{metric}: rank correlation of the effects {rho:.2f} (Spearman, over {len(rows)} {of}{turned})."


def _in_one_alone(table: Table, first: Table, second: Table) -> Iterator[str]:
    """Yields what only one of two runs measured, such as a metric or some heads, in a sentence a run."""
    of_parts = len(table) > len(table.of_all_targets())  # else the runs were compared over all targets
    for name, run, other in (("A", first, second), ("B", second, first)):
        compared = run.frame if of_parts else run.of_all_targets().frame
        alone: list[str] = []
        for key in run.keys:
            if key in ("layer", "head"):
                continue
            both = (other.frame if key in other.keys else compared)[key]
            alone += [f"{key} {value!r}" for value in run.frame[key].dropna().unique() if value not in set(both)]
            compared = compared.loc[compared[key].isin(both)]
        if more := len(compared) - len(table):
            alone.append(f"other heads ({more})")
        if alone:
            yield f"Rows of {name} alone: {', '.join(alone)}."


def settings_that_differ(first: Table, second: Table) -> pd.DataFrame:
    """Returns what differs between two runs' provenances, but for where they were written.

    A single site of `sites` is compared with the `site` of other verbs.
    """
    one, other = (
        {
            name: value
            for entry in ("settings", "model", "data", "versions")
            for name, value in _flat(getattr(table.provenance, entry), entry)
        }
        for table in (first, second)
    )
    names = [name for name in one | other if one.get(name) != other.get(name) and not name.startswith("settings out")]
    rows = [(name, *("–" if run.get(name) is None else str(run[name]) for run in (one, other))) for name in names]
    return pd.DataFrame(rows, columns=["setting", "A", "B"])


def claims_of(first: Table, second: Table) -> pd.DataFrame:
    """Returns how each claim of an experiment stands in two of its runs; nothing for runs of other verbs."""
    columns = ["claim", "A", "verdict A", "B", "verdict B"]
    names = {table.provenance.settings.get("name") for table in (first, second)}
    if first.provenance.verb != "reproduce" or len(names) != 1:
        return pd.DataFrame(columns=columns)
    from align_circuits.cli.experiments_list import experiment_named

    experiment = experiment_named(first.provenance.settings["name"])
    one, other = (
        {check.claim: (str(check.measured), check.verdict) for check in experiment.check(table)}
        for table in (first, second)
    )
    rows = [(claim, *numbers, *other[claim]) for claim, numbers in one.items() if claim in other]
    return pd.DataFrame(rows, columns=columns)


def _flat(part: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} {key}")
        elif key == "sites" and isinstance(value, list) and len(value) == 1:
            yield f"{name} site", value[0]
        else:
            yield f"{name} {key}", value


def _html(rows: pd.DataFrame, style: str = "wide wrapped") -> str:
    table = rows.to_html(index=False, border=0, float_format=_digits, na_rep="–")
    return f'<div class="{style}">{table}</div>' if len(rows) else "<p>None.</p>"
