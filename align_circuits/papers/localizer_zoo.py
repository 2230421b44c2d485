"""Which methods find the heads that matter, and which do they miss? A zoo of planted circuits with known roles."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.heads.permutation_tests import p_values
from align_circuits.hooks.head_names import Head
from align_circuits.jobs.identity import told
from align_circuits.localizers.benchmarked_head_methods import FEW, METHODS, named_in
from align_circuits.localizers.comparison import FRACTIONS, agreement, head_faithfulness, names_agreement
from align_circuits.localizers.registry import localizer, scores_of
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, ROLE_OF_KIND, PlantedModel
from align_circuits.models.planted.zoo import HELD_OUT, PUBLIC, zoo_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread
from align_circuits.papers.statistics import Measured, mean_row
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.plots.figure_parts import styled
from align_circuits.run.pairs import Pair
from align_circuits.tables.intervals import t_interval
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import exchanged

GROUPS = "localize, redundant"

NAMING = ("localize", GROUPS)
"""The methods that name heads, beside scoring them."""

BY_SCORE = "attention of .5"
"""The control of names: heads with a standard score of .5 or more."""

ESSENTIAL = ("boundary", "second_previous", "repair")
"""Kinds of heads that matter without a role of their own, or only once others are gone: neither right nor wrong."""

DRAWN = ("attention", "ablation, mean", "patching, noise", "EAP-IG", "learned masks", BY_SCORE, *NAMING)
"""Whose curves are drawn: one of each kind of method, for legibility."""

WITHOUT_ATTENTION = ("inert", "random", "sink", "letter_bias")
"""Kinds of heads that follow no role by attention either: their p-values are to be uniform."""

CONTROLS = {
    BY_SCORE: "names each head whose attention has a standard score of .5 or more, without any test",
    "p-values, with the role": "is the share of heads with a role whose permutation test has a p-value of at most .05",
    "p-values, without the role": "is that share among heads that follow no role; it should be .05",
}
"""The controls that stand among the methods of the table and score no heads, and what each is."""

COLUMNS = {
    "recall_at_size": "R-precision",
    "recall": "recall",
    "false_discoveries": "false discoveries",
    "circuit_performance_ratio": "CPR",
    "circuit_model_distance": "CMD",
    "cost": "cost",
}
"""What the overview shows beside AUROC, by metric."""

MEANING_OF_COLUMNS = """\
AUROC is the probability that a head of the role scores higher than one without a role, .5 in a random order. \
R-precision is the share of a role's n heads among the n that score highest. Methods that also name heads for a role \
have a recall, the share of the role's heads that they name, and false discoveries, the share of named heads that do \
not have it. CPR and CMD (Mueller et al., 2025) tell how faithful circuits of the best heads are: a high CPR, a low \
CMD. Cost is processor time as a clock measured it, divided by that of one pass of the model over all prompts: it \
differs from run to run."""
"""What the columns of the overview are."""

BY_CONTENT = ("align_query", "align_key", "lookup")
"""The roles that a head without content cannot follow: one that prefers late tokens attends one token back."""


@dataclass(frozen=True)
class Zoo:
    """Which circuits, prompts and methods."""

    first: int
    """The seed of the first circuit."""
    circuits: int
    """How many circuits, of consecutive seeds."""
    methods: tuple[str, ...] = tuple(METHODS)
    n: int = 24
    """Prompts for each circuit; some methods take `FEW` of them."""


def benchmark_circuit(
    *,
    methods: Sequence[str],
    n: int,
    seed: int,
    codes: Mapping[str, str] | None = None,  # noqa: ARG001 - tells jobs apart
) -> list[dict[str, Any]]:
    """Measures how every method scores the heads of one circuit; the function of a job.

    The corrupted prompts are other prompts of the task (`exchanged`), so that every part of the circuit differs.

    Args:
        methods: Their names.
        n: Prompts.
        seed: Of the circuit and the prompts.
        codes: The identity of each method of another package.

    Returns:
        By method and role how its scores agree with the circuit (`agreement`, `names_agreement`); by method the
        faithfulness of its best heads and its `cost`, in passes of the model over all prompts.
    """
    on_one_thread()
    model = zoo_circuit(seed).build()
    prompts = model.task.sample(n, model.tokenizer, seed=seed)
    return [*compared(model, prompts, methods), *_p_value_rows(model, prompts, seed)]


def compared(model: PlantedModel, prompts: Prompts, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Returns how every method scores the heads of a model with known kinds: `benchmark_circuit` without p-values."""
    pair = Pair(*exchanged(prompts))
    rows: list[dict[str, Any]] = []

    def add(method: str, role: str, values: Mapping[str, float]) -> None:
        rows.extend({"method": method, "role": role, "metric": name, "value": each} for name, each in values.items())

    a_pass = seconds_of(lambda: model(prompts.tokens))
    grids: dict[str, dict[str, np.ndarray]] = {}
    for method in methods:
        began = time.process_time()
        grids[method] = scores_of(method, model, pair, CIRCUIT_ROLES)
        add(method, "all", {"cost": (time.process_time() - began) / a_pass})
    judged = {head for head, kind in model.kinds.items() if kind not in ESSENTIAL}
    others = [head for head in _heads_of(model, None) if head in judged]
    for role in CIRCUIT_ROLES:
        group = _heads_of(model, role)
        single = [head for head in group if head in judged]
        for method in methods:
            add(method, role, agreement(grids[method][role], single, others))
            if method in NAMING:
                named = named_in(grids[method][role])
                add(method, role, _names(named, single, group))
        if "attention" in methods:
            chosen = {(int(layer), int(head)) for layer, head in np.argwhere(grids["attention"][role] >= 0.5)}
            add(BY_SCORE, role, _names(chosen, single, group))
    few = Pair(prompts[:FEW], pair.corrupted[:FEW])
    best = {method: np.max([_ranks(grid) for grid in by_role.values()], axis=0) for method, by_role in grids.items()}
    for method, areas in head_faithfulness(model, few, best, FRACTIONS).items():
        add(method, "all", areas)
    return rows


def check_methods(config: Zoo) -> None:
    """Runs the methods of other packages and files on `FEW` prompts of the first circuit, before any long work.

    Raises:
        ValueError: One raises an error, or returns what is no score of every head.
    """
    model = zoo_circuit(config.first).build()
    pair = Pair(*exchanged(model.task.sample(FEW, model.tokenizer, seed=config.first)))
    for method in config.methods:
        if method not in METHODS:
            scores_of(method, model, pair, CIRCUIT_ROLES)


def _p_value_rows(model: PlantedModel, prompts: Prompts, seed: int) -> Iterator[dict[str, Any]]:
    """The share of p-values of at most .05, among heads that follow no role and among those of each role."""
    p = p_values(model, prompts, list(CIRCUIT_ROLES), seed=seed)
    idle = [head for head, kind in model.kinds.items() if kind in WITHOUT_ATTENTION]
    for role in CIRCUIT_ROLES:
        following = [head for head, kind in model.kinds.items() if kind == role]
        for of, heads in (("without the role", idle), ("with the role", following)):
            at_most = float(np.mean([p[role][head] <= 0.05 for head in heads]))
            yield {"method": f"p-values, {of}", "role": role, "metric": "p at most .05", "value": at_most}


def _names(named: set[Head], single: Sequence[Head], group: Sequence[Head]) -> dict[str, float]:
    """Recall among the heads that the intact model uses, and that repair; false are those without the role at all."""
    found = {"recall": names_agreement(named, single)["recall"]}
    if repair := set(group).difference(single):
        found["recall of repair"] = len(named & repair)
    return found | {"false_discoveries": names_agreement(named, group)["false_discoveries"]}


def _heads_of(model: PlantedModel, role: str | None) -> list[Head]:
    return [head for head, kind in model.kinds.items() if ROLE_OF_KIND[kind] == role]


def _ranks(grid: np.ndarray) -> np.ndarray:
    """As shares of all heads."""
    return grid.ravel().argsort().argsort().reshape(grid.shape) / grid.size


def seconds_of(run: Any) -> float:
    """The least of three runs, in seconds of the processor."""
    times = []
    for _ in range(3):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def _jobs(config: Zoo, _: Inputs) -> list[Measurement]:
    seeds = range(config.first, config.first + config.circuits)
    common: dict[str, Any] = {"methods": list(config.methods), "n": config.n}
    # A method of another package is known by its name alone; its finished jobs count for its present code only.
    if codes := {
        name: told(f"the code of the method {name!r}", localizer(name))
        for name in config.methods
        if name not in METHODS
    }:
        common["codes"] = codes
    return [Measurement(benchmark_circuit, common, seed, zoo_circuit(seed).traits) for seed in seeds]


def _summarize(_: Zoo, rows: Rows) -> pd.DataFrame:
    """Means over circuits, in all of them and in those alike in a trait; by role, and over the roles of a circuit."""
    frame: Any = rows["benchmark_circuit"]
    frame["copies"] = [
        row[f"copies of {row['role']}"] if row["role"] in CIRCUIT_ROLES else np.nan for row in frame.to_dict("records")
    ]
    parts = [means(frame, "circuits", "all")]
    for trait in ("copies", "strength", "grouped", "self_repair", "positional_bias"):
        parts += [means(group, trait, f"{value:g}") for value, group in frame.groupby(trait)]
    parts += [means(group, "noise", "some" if noisy else "none") for noisy, group in frame.groupby(frame["noise"] > 0)]
    parts.append(_lead(frame))
    return pd.concat(parts, ignore_index=True)


def means(frame: Any, trait: str, at: str) -> pd.DataFrame:
    """Returns the mean over circuits of each metric, by role and over the roles, with its t interval."""
    by_role = {"all": frame} | {role: frame[frame["role"] == role] for role in CIRCUIT_ROLES}
    return pd.concat(
        _over_circuits(
            group.groupby(["method", "metric", "seed"])["value"].mean().unstack("seed"), trait=trait, at=at, role=role
        )
        for role, group in by_role.items()
        if len(group)
    )


def _over_circuits(wide: Any, **keys: str) -> pd.DataFrame:
    low, high = t_interval(wide.to_numpy(float))
    mean, n = wide.mean(axis=1).to_numpy(), wide.notna().sum(axis=1).to_numpy()
    return wide.index.to_frame(index=False).assign(**keys, value=mean, low=low, high=high, n=n)


def _lead(frame: Any) -> pd.DataFrame:
    """By how much `localize` with redundant heads exceeds each other method, in the same circuits."""
    wide = frame[frame["metric"] == "auroc"].groupby(["method", "seed"])["value"].mean().unstack("seed")
    if GROUPS not in wide.index:
        return pd.DataFrame()
    lead = wide.loc[GROUPS] - wide.drop(index=GROUPS)
    return _over_circuits(lead, metric="auroc of groups above", trait="circuits", at="all", role="all")


def _check(table: Table) -> list[Claim]:
    methods = table.frame["method"].unique()
    of_three: Any = (table.frame["trait"] == "copies") & (table.frame["at"] == "3")
    if not {GROUPS, "localize"} <= {*methods}:
        return []  # other methods
    if not of_three.any() or "recall of repair" not in set(table.frame["metric"]):
        return []  # too few circuits
    mean = mean_row(trait="circuits", at="all", role="all")
    recall, false, repaired = (mean.at(metric=of) for of in ("recall", "false_discoveries", "recall of repair"))
    small_p, lead = mean.at(metric="p at most .05"), mean.at(metric="auroc of groups above")
    ours = ("method", GROUPS, "localize")
    return [
        Claim("Groups: heads of a role that is split over three are named (recall)").at_least(
            0.9, *recall.at(trait="copies", at="3").beside(*ours), "localize without groups"
        ),
        Claim("Groups: heads named for a role without having it (share)").at_most(
            0.05, *false.beside("method", GROUPS, BY_SCORE), "heads named by their attention alone"
        ),
        Claim("Groups: the head that repairs is named (recall)").at_least(
            0.9, *repaired.beside(*ours), "localize without groups"
        ),
        *(
            Claim(f"The p-values of heads that follow no role, for {role}: at most .05 (share)").at_most(
                0.05,
                *small_p.at(role=role).beside("method", "p-values, without the role", "p-values, with the role"),
                "heads of the role",
            )
            for role in BY_CONTENT
        ),
        *(
            Claim(f"Groups lead {method} (AUROC, mean over roles, difference)").at_least(
                0.0, lead.at(method=method), lead.at(method=method).map(_reverse), "the difference turned round"
            )
            for method in methods
            if method in METHODS and method != GROUPS
        ),
    ]


def _reverse(lead: Measured) -> Measured:
    return Measured(-lead.value, -lead.high, -lead.low)


def overview(table: Table, at: str = "all") -> pd.DataFrame:
    """Returns a row for each method: its AUROC over the roles and by role, and over the roles the other `COLUMNS`."""
    frame: Any = table.where(trait="circuits", at=at).frame
    auroc = frame[frame["metric"] == "auroc"].pivot_table(index="method", columns="role", values="value")
    rest = frame[(frame["role"] == "all") & frame["metric"].isin(COLUMNS)]
    rest = rest.pivot_table(index="method", columns="metric", values="value").rename(columns=COLUMNS)
    auroc = auroc[[role for role in ("all", *CIRCUIT_ROLES) if role in auroc]]
    auroc = auroc.rename(columns=lambda role: f"AUROC, {role.replace('_', ' ')}")
    joined = auroc.join(rest.reindex(columns=[name for name in COLUMNS.values() if name in rest]))
    return joined.loc[_methods(table)].dropna(axis=1, how="all")


def _methods(table: Table) -> list[str]:
    """The methods that scored heads: ours in their order, then others."""
    scored = dict.fromkeys(table.where(metric="auroc").frame["method"])
    return [method for method in METHODS if method in scored] + [method for method in scored if method not in METHODS]


def auroc_figure(table: Table, at: str = "all") -> go.Figure:
    """Returns the mean AUROC of each method, by role and over the roles."""
    heat = table.where(trait="circuits", at=at, metric="auroc").frame
    wide = heat.pivot_table(index="method", columns="role", values="value")
    wide = wide.loc[_methods(table), [*CIRCUIT_ROLES, "all"]]
    return auroc_map(wide.rename(columns=lambda role: role.replace("_", " ")), "role", 110 + 26 * len(wide))


def auroc_map(wide: pd.DataFrame, label: str, height: int) -> go.Figure:
    """Returns AUROC as a map, a row for each method and a column for each case.

    Args:
        wide: The values by method and case.
        label: What the cases are.
        height: In pixels.
    """
    grid = go.Figure(
        go.Heatmap(
            z=wide.to_numpy(),
            x=list(wide.columns),
            y=list(wide.index),
            zmin=0.5,
            zmax=1,
            colorscale="Viridis",
            texttemplate="%{z:.2f}",
            showscale=False,  # the cells have numbers, and a bar would be as low as few rows are
        )
    )
    grid.update_layout(yaxis={"autorange": "reversed"}, xaxis_title=label)
    return styled(grid, "", height)


def _draw(table: Table) -> Mapping[str, go.Figure]:
    split: Any = table.where(trait="copies", role="all").frame
    if len(_methods(table)) > len(DRAWN):
        split = split[split["method"].isin(DRAWN) | ~split["method"].isin(METHODS)]  # and methods of other packages
    panels = {"R-precision": "recall_at_size", "recall of named heads": "recall"}
    parts = {title: split[split["metric"] == metric] for title, metric in panels.items()}
    blind = plots.curves(
        {title: part.assign(at=part["at"].astype(float)) for title, part in parts.items() if len(part)},
        x="at",
        by="method",
        label="heads that share a role",
        value="share of them found",
    )
    return {"AUROC by role": auroc_figure(table), "Recall of roles that several heads share": blind}


def _experiment(name: str, title: str, seeds: range, tried: tuple[str, ...]) -> Experiment:
    smoke = Zoo(seeds.start, 1, tried, n=12)
    whole = Zoo(seeds.start, len(seeds))
    study = Study(name, {"smoke": smoke, "cpu": whole, "paper": whole}, _jobs, _summarize)
    return Experiment(name, title, "the package's own benchmark", study, _draw, _check)


PUBLIC_ZOO = _experiment(
    "localizers/zoo", "Which methods find the heads that matter? The public zoo", PUBLIC, ("attention", "EAP", GROUPS)
)

HELD_OUT_ZOO = _experiment(
    "localizers/held-out", "Which methods find the heads that matter? Held-out circuits", HELD_OUT, ("attention", "EAP")
)
"""Measured once, with the methods as they were finished on the public zoo."""
