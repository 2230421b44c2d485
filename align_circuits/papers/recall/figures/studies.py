"""What the studies of the room share, and of which models their claims are judged: those that know their facts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim, Claims, checks_of
from align_circuits.papers.lab import Experiment, Figures, Rows, Scale, Study, drawn_by
from align_circuits.papers.statistics import NOT_MEASURED, at_end, at_start, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

SOURCE = "Vasudeva et al. (2026)"

FACTS_LEARNED = 0.95
"""Exact match on PT from which a pretrained model knows its facts, which claims about recall and heads presuppose."""

FACTS_ARE_LEARNED = (
    f"Facts are learned, as this presupposes (share of models with an exact match on PT of {FACTS_LEARNED:g})"
)


def measured(_: Any, rows: Rows) -> pd.DataFrame:
    """Returns the rows of all jobs but `pretrain`, without intervals: the `summarize` of a study."""
    frames = [frame for function, frame in rows.items() if function != "pretrain"]
    return pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan)


def measured_after_facts(_: Any, rows: Rows) -> pd.DataFrame:
    """Returns `measured` with the exact match on PT of the pretrained model behind each row.

    It is in the columns `facts` and, of the model before training, `facts_before`.
    """
    frame, log = measured(_, rows), rows["pretrain"]
    log = log[(log["probe"] == "pt") & (log["match"] == "exact")].sort_values("step")
    model = [name for name in ("seed", "div") if name in log]
    exact = log.groupby(model)["value"].agg(["first", "last"]).reset_index()
    return frame.merge(exact.rename(columns={"first": "facts_before", "last": "facts"}), on=model)


def study(
    name: str,
    smoke: Any,
    cpu: Any,
    paper: Any,
    *,
    cpu_untied: Any = None,
    paper_s20: Any = None,
    paper_s20_untied: Any = None,
    paper_long: Any = None,
    **parts: Any,
) -> Study:
    """Returns a study with a config for each scale; `parts` are arguments of `Study`, where `measured` summarizes."""
    configs: dict[Scale, Any] = {
        "smoke": smoke,
        "cpu": cpu,
        "cpu-untied": cpu_untied,
        "paper-s20": paper_s20,
        "paper-s20-untied": paper_s20_untied,
        "paper": paper,
        "paper-long": paper_long,
    }
    scales: dict[Scale, Any] = {scale: config for scale, config in configs.items() if config is not None}
    return Study(name, scales, **{"summarize": measured, **parts})


def figure(number: int, title: str, measured_by: Study, figures: Figures, claims: Claims, published: str) -> Experiment:
    """Returns the experiment of one figure of the paper."""
    name, source = f"recall/fig{number}", f"{SOURCE}, Fig. {number}"
    return Experiment(name, title, source, measured_by, figures, claims, published)


def grid(**values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Returns every combination of values, by name."""
    return tuple(dict(zip(values, combination, strict=True)) for combination in product(*values.values()))


def learned(claim: str, level: float, before: str, published: str = "", **where: Any) -> Claim:
    """Returns the claim that a measure is at `level` or above when training ends; the control is its start.

    Args:
        claim: What is learned.
        level: The threshold.
        before: What the control is, such as `"before finetuning"`.
        published: The paper's own number, where it gives one.
        **where: The keys of the measure's rows.
    """
    return Claim(claim, published).at_least(level, at_end(**where), at_start(**where), before)


def bars(
    groups: Mapping[str, pd.DataFrame], axes: Sequence[str], label: str, limits: tuple[float, float], height: int
) -> go.Figure:
    """Draws values with their intervals as bars.

    Args:
        groups: A colour for each: rows with the columns `axes`, value, low and high.
        axes: The columns that tell bars of a colour apart.
        label: The title of the values.
        limits: The lowest and the highest drawn value.
        height: In pixels.
    """
    figure = go.Figure()
    for place, (name, rows) in enumerate(groups.items()):
        reach = {"array": rows["high"] - rows["value"], "arrayminus": rows["value"] - rows["low"]}
        columns = [rows[axis] for axis in axes]
        figure.add_bar(x=columns, y=rows["value"], name=name, marker_color=plots.COLOURS[place], error_y=reach)
    figure.update_yaxes(title=label, range=limits)
    return plots.styled(figure, "", height=height)


def know_their_facts(table: Table, **pretrained: Any) -> Table:
    """Returns the rows of seeds whose pretrained model knows its facts; `pretrained` selects its exact match on PT."""
    facts = table.where(**pretrained).frame
    known = facts.loc[facts["value"] >= FACTS_LEARNED, "seed"]
    return _only(table, table.frame["seed"].isin(known))


def of_common_seeds(one: Table, other: Table) -> tuple[Table, Table]:
    """Returns the rows of both tables that are of seeds which both have, so that values by seed can be compared."""
    seeds: Any = np.intersect1d(one.frame["seed"], other.frame["seed"])
    return _only(one, one.frame["seed"].isin(seeds)), _only(other, other.frame["seed"].isin(seeds))


def _with_facts(table: Table) -> Table:
    """The rows of models that know their facts, of a table of `measured_after_facts`."""
    return _only(table, table.frame["facts"] >= FACTS_LEARNED)


def _only(table: Table, wanted: Any) -> Table:
    frame: Any = table.frame[wanted]
    return Table(frame, table.provenance)


def facts_learned(table: Table) -> Check:
    """Returns how many pretrained models know their facts; `table` is of `measured_after_facts`."""
    models = table.frame.drop_duplicates([name for name in ("seed", "div") if name in table.frame])
    after, before = (share_of(models[name].to_numpy(float) >= FACTS_LEARNED) for name in ("facts", "facts_before"))
    return Claim(FACTS_ARE_LEARNED).at_least(0.5, after, before, "before training").check(table)


def of_those_that_know(claims: Claims, known: Table, table: Table) -> list[Check]:
    """Returns claims about the models that know their facts; what none of these can tell is not testable.

    Args:
        claims: About any of the tables.
        known: The rows of those models; there may be none.
        table: The rows of all models.
    """
    checks = checks_of(claims, known) if len(known) else []
    judged = {check.claim for check in checks}
    others = (check for check in checks_of(claims, table) if check.claim not in judged)
    return [*checks, *(replace(check, measured=NOT_MEASURED) for check in others)]


def only_if_facts_are_learned(claims: Claims, *, said: bool = True) -> Claims:
    """Returns claims about the models that know their facts, by `of_those_that_know`.

    First comes how many do, if it is to be `said` here: one figure of a table says it.
    """

    def of_those(table: Table) -> list[Check]:
        checks = of_those_that_know(claims, _with_facts(table), table)
        return [facts_learned(table), *checks] if said else checks

    return of_those


def drawn_if_facts_are_learned(figures: Figures) -> Figures:
    """Returns the figures of models that know their facts; of all, with captions that say so, where none does."""

    def of_those(table: Table) -> Mapping[str, go.Figure]:
        known = _with_facts(table)
        if len(known):
            return drawn_by(figures, known)
        drawn = drawn_by(figures, table)
        return {f"{name}{', ' * bool(name)}no model knows its facts": picture for name, picture in drawn.items()}

    return of_those
