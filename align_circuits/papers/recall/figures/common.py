"""What the experiments of the room share: studies at three scales, statistics over seeds, their checks and curves."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.lab import Check, Claim, Experiment, Rows, Study, checks_of, over_seeds, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SOURCE = "Vasudeva et al. (2026)"

Draw = Callable[[Table], Mapping[str, go.Figure]]
State = Callable[[Table], Sequence[Claim | Check]]
"""From a table to figures by panel, and to the paper's claims."""


def measured(_: Any, rows: Rows) -> pd.DataFrame:
    """Returns the rows of all jobs but `pretrain`, without intervals: the `summarize` of a study."""
    frames = [frame for function, frame in rows.items() if function != "pretrain"]
    return pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan)


def measured_after_facts(_: Any, rows: Rows) -> pd.DataFrame:
    """Returns `measured`, whose rows have the exact match on PT of the pretrained model behind them.

    It stands in the columns `facts` and, of the model before training, `facts_before`.
    """
    frame, log = measured(_, rows), rows["pretrain"]
    log = log[(log["probe"] == "pt") & (log["match"] == "exact")].sort_values("step")
    model = [name for name in ("seed", "div") if name in log]
    exact = log.groupby(model)["value"].agg(["first", "last"]).reset_index()
    return frame.merge(exact.rename(columns={"first": "facts_before", "last": "facts"}), on=model)


def study(name: str, smoke: Any, cpu: Any, paper: Any, **parts: Any) -> Study:
    """Returns a study with a config for each scale; `parts` are arguments of `Study`, where `measured` summarizes."""
    return Study(name, {"smoke": smoke, "cpu": cpu, "paper": paper}, **{"summarize": measured, **parts})


def figure(number: int, title: str, measured_by: Study, draw: Draw, check: State, published: str) -> Experiment:
    """Returns the experiment of one figure of the paper."""
    name, source = f"recall/fig{number}", f"{SOURCE}, Fig. {number}"
    return Experiment(name, title, source, measured_by, draw, check, published)


def grid(**values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Returns every combination of values, by name."""
    return tuple(dict(zip(values, combination, strict=True)) for combination in product(*values.values()))


def key_values(table: Table, column: str, **where: Any) -> list[Any]:
    """Returns the values of a key column in ascending order, without missing ones."""
    return sorted(table.where(**where).frame[column].dropna().unique().tolist())


def per_seed(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's value of a measure that has one row a seed."""
    return table.where(**where).frame.sort_values("seed")["value"].to_numpy(float)


FACTS_LEARNED = 0.95
"""Exact match on PT from which a pretrained model knows its facts, which claims about recall and heads presuppose."""

FACTS_ARE_LEARNED = (
    f"Facts are learned, as this presupposes (share of models with an exact match on PT of {FACTS_LEARNED:g})"
)


def know_their_facts(table: Table, **pretrained: Any) -> Table:
    """Returns the rows of seeds whose pretrained model knows its facts; `pretrained` selects its exact match on PT."""
    facts: Any = table.where(**pretrained).frame
    known: Any = table.frame[table.frame["seed"].isin(facts.loc[facts["value"] >= FACTS_LEARNED, "seed"])]
    return Table(known, table.provenance)


def facts_learned(table: Table) -> Claim:
    """Returns the check that pretrained models know their facts; `table` is of `measured_after_facts`."""
    frame: Any = table.frame
    models = frame.drop_duplicates([name for name in ("seed", "div") if name in frame])
    after, before = (models[name].to_numpy(float) >= FACTS_LEARNED for name in ("facts", "facts_before"))
    return Claim(FACTS_ARE_LEARNED).at_least(0.5, share_of(after), share_of(before), "before training")


def _with_facts(table: Table) -> Table:
    """The rows of models that know their facts."""
    frame: Any = table.frame
    return Table(frame[frame["facts"] >= FACTS_LEARNED], table.provenance)


def only_if_facts_are_learned(claims: State, *, said: bool = True) -> State:
    """Returns the checks of a table of `measured_after_facts` in the models that know their facts, if there are any.

    First comes how many do, if it is to be `said` here: one figure of a table says it.
    """

    def of_those(table: Table) -> list[Check]:
        known = _with_facts(table)
        checks = checks_of(claims, known) if len(known) else []
        return [facts_learned(table).check(table), *checks] if said else checks

    return of_those


def drawn_if_facts_are_learned(draw: Draw) -> Draw:
    """Returns the figures of models that know their facts; of all, with captions that say so, where none does."""

    def of_those(table: Table) -> Mapping[str, go.Figure]:
        known = _with_facts(table)
        if len(known):
            return draw(known)
        return {f"{name}{', ' * bool(name)}no model knows its facts": drawn for name, drawn in draw(table).items()}

    return of_those


def of_common_seeds(one: Table, other: Table) -> tuple[Table, Table]:
    """Returns the rows of both tables that are of seeds which both have, so that values by seed can be compared."""
    seeds: Any = np.intersect1d(one.frame["seed"], other.frame["seed"])
    parts: list[Any] = [table.frame[table.frame["seed"].isin(seeds)] for table in (one, other)]
    return Table(parts[0], one.provenance), Table(parts[1], other.provenance)


def by_seed(table: Table, **where: Any) -> pd.DataFrame:
    """Returns the training curves of one measure, with steps as rows and seeds as columns."""
    return table.where(**where).frame.pivot(index="step", columns="seed", values="value").sort_index()


def at_end(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's last value."""
    return by_seed(table, **where).iloc[-1].to_numpy(float)


def at_start(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's value at step 0."""
    return by_seed(table, **where).iloc[0].to_numpy(float)


def best(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Returns each seed's highest value, as in Fig. 5."""
    return by_seed(table, **where).max().to_numpy(float)


def reached(table: Table, level: float, **where: Any) -> Float[ndarray, " seed"]:
    """Returns the first logged step at which each seed is at `level` or above; infinite where there is none."""
    curves = by_seed(table, **where)
    steps, above = curves.index.to_numpy(float), curves.to_numpy(float) >= level
    return np.where(above.any(0), steps[above.argmax(0)], np.inf)


def learned(table: Table, claim: str, level: float, before: str, published: str = "", **where: Any) -> Claim:
    """Returns the check that a measure is at `level` or above when training ends; the control is its start.

    Args:
        table: Of training curves.
        claim: What is learned.
        level: The threshold.
        before: What the control is, such as `"before finetuning"`.
        published: The paper's own number, where it gives one.
        **where: The keys of the measure's rows.
    """
    return Claim(claim, published).at_least(level, at_end(table, **where), at_start(table, **where), before)


def mean_curves(table: Table, curves: Mapping[str, Mapping[str, Any]], x: str = "step") -> pd.DataFrame:
    """Returns means over seeds along a key column with intervals, as `plots.curves` draws them.

    Args:
        table: With one row a seed for each value of `x` on a curve.
        curves: The keys of each curve's rows, by its caption.
        x: The column; rows without a value of it are left out.
    """
    rows = [
        {x: at, "curve": name, **vars(over_seeds(of_seeds.sort_values("seed")["value"].to_numpy(float)))}
        for name, where in curves.items()
        for at, of_seeds in table.where(**where).frame.groupby(x)
    ]
    return pd.DataFrame(rows)


def draw_curves(
    table: Table, panels: Mapping[str, Mapping[str, Mapping[str, Any]]], x: str = "step", *, label: str, value: str
) -> go.Figure:
    """Returns `mean_curves` of each panel side by side; `label` and `value` are the titles of the axes."""
    frames = {caption: mean_curves(table, curves, x) for caption, curves in panels.items()}
    return plots.curves(frames, x=x, by="curve", label=label, value=value)
