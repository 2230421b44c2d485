"""Which methods find copies of a head and its backups, and which take decoys for heads that matter? Trained circuits.

Thresholds of the methods are chosen on `localizers/redundancy-tuning` and kept with its table; `localizers/redundancy`
measures other models once, with those thresholds. The claims were written after a look at three models of the former,
those on EAP-IG, on what learned masks name and on roles other than previous after its table; all of them before any of
the latter was measured.

Fifty models were asked for. The table of the first 32 was read before the other 18, of seeds from `ADDED` on, were
measured. In between `localize` learned to look for previous-token heads where their output matters, which was tried on
the models of even seeds among the first 32. After all fifty had been read resampling joined the causal test of these
heads, and they got a correction of their own; so no rows of `localize` are of models that were not looked at.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.localizers.benchmarked_head_methods import METHODS
from align_circuits.localizers.comparison import agreement
from align_circuits.localizers.registry import scores_of
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread, training_folder
from align_circuits.papers.localizer_zoo import GROUPS, NAMING, seconds_of
from align_circuits.papers.statistics import Measured, over_seeds, value_of
from align_circuits.report import plots
from align_circuits.run.pairs import Pair
from align_circuits.tables.intervals import proportion
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import config_of
from align_circuits.tasks.task import exchanged
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.redundant_circuits import RedundantCircuit, noise_of, train_redundant_circuit

ENOUGH: Mapping[str, float] = {
    "accuracy": 0.95,
    "invariance": 0.95,
    "interchange accuracy": 0.7,
    "one copy": 0.9,
    "interchange of one copy": 0.7,
    "backup": 0.9,
    "interchange of the backup": 0.7,
    "attention of the decoy": 0.5,
}
"""What a model must reach, for each role that the measure is taken of, so that its heads count as known.

The three shares of changed answers were .9 until the ten models of the tuning were trained, of which three reached that
and seven reach .7; then they were lowered, before any of the others was measured.
"""

SINGLE, COPY, PRIMARY, BACKUP, DECOY, OTHER = "single", "copy", "primary", "backup", "decoy", "other"

CLASSES = (SINGLE, COPY, PRIMARY, BACKUP, DECOY, OTHER)
"""A head alone in its role; one of its copies; one that has a backup; that backup; and heads without a role."""

MATTER = (SINGLE, COPY, PRIMARY, BACKUP)

BY_ROLE = ("attention", "head detector", *NAMING)
"""Methods that score heads for each role."""

ONE_BY_ONE = ("ablation, zero", "ablation, mean", "ablation, resample", "patching, denoise", "patching, noise")
"""Methods that intervene on one head at a time."""

NAMED, RANKED = "share of each class of heads that is named", "AUROC in planted and in trained circuits"
"""The figures. Methods stand in the order of their F1 on the models on which thresholds were chosen."""

ADDED = 31_032
"""The first seed of the models that were measured after the table of the others was read."""

RESULTS = Path(__file__).parents[2] / "docs/results"
TUNING, HOME = RESULTS / "localizers-redundancy-tuning", RESULTS / "localizers-held-out/cpu"

COLUMNS = ["method", "of", "role", "seed", "metric", "value"]


@dataclass(frozen=True)
class Models:
    """Which models, prompts and methods."""

    first: int
    """The seed of the first model."""
    models: int
    """How many models, of consecutive seeds."""
    tuned: str | None = None
    """The scale of the kept tuning from which thresholds are read; None: they are chosen on these models."""
    steps: int = 800
    """Updates of each."""
    methods: tuple[str, ...] = tuple(METHODS)
    n: int = 24
    """Prompts for the methods, as in the zoo of planted circuits."""
    enough: bool = True
    """Whether only models that reach `ENOUGH` count; at the smoke scale none does."""


def train_one(*, steps: int, trained: str, seed: int) -> list[dict[str, Any]]:
    """Trains one model and returns what it reached; the function of a job."""
    on_one_thread()
    return [{"metric": name, "value": value} for name, value in trained_model(steps, trained, seed).reached.items()]


def score_one(*, steps: int, trained: str, methods: Sequence[str], n: int, seed: int) -> list[dict[str, Any]]:
    """Scores the heads of one model by each method; the function of a job.

    The corrupted prompts are other prompts of the task, as in the zoo.

    Args:
        steps: Of the training.
        trained: The folder of trainings.
        methods: Their names.
        n: Prompts; some methods take a few of them.
        seed: Of the model and the prompts.

    Returns:
        A row for each method, role and head with its `kind` (one of `CLASSES`) and its `role`; and the `cost` of each
        method, in passes of the model over all prompts.
    """
    on_one_thread()
    model = trained_model(steps, trained, seed)
    prompts = model.task.sample(n, model.tokenizer, seed=seed)
    pair = Pair(*exchanged(prompts))
    a_pass = seconds_of(lambda: model(prompts.tokens))
    rows = []
    for method in methods:
        began = time.process_time()
        grids = scores_of(method, model, pair, CIRCUIT_ROLES)
        rows.append({"method": method, "value": (time.process_time() - began) / a_pass})
        rows += rows_of(model, method, grids)
    return rows


def rows_of(
    model: RedundantCircuit, method: str, grids: Mapping[str, Float[ndarray, "layer head"]]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each role and head with the head's score `for` that role, its kind and its own role."""
    for head in heads_of(model.cfg):
        about = {"kind": class_of(model, head), "role": model.roles[head]}
        for role, grid in grids.items():
            yield {"method": method, "head": str(head), "for": role, "value": float(grid[head]), **about}


def class_of(model: RedundantCircuit, head: Head) -> str:
    """Returns which of `CLASSES` a head is."""
    role, kind = model.roles[head], model.kinds[head]
    if role is None or kind != role:
        return kind.partition(" ")[0]
    return COPY if len(model.assignment.copies[role]) > 1 else PRIMARY if role in model.assignment.backups else SINGLE


def trained_model(steps: int, trained: str, seed: int) -> RedundantCircuit:
    """Trains a model, or reads it from the folder of trainings."""
    task = trained_task(seed)
    folder = training_folder(trained, "redundant-circuit", config_of(task), steps, seed)
    return train_redundant_circuit(task, seed, steps=steps, out=folder)


def reached_enough(reached: Mapping[str, float]) -> bool:
    """Returns whether all measures of a model meet `ENOUGH`."""
    return all(value >= ENOUGH.get(name.partition(", ")[0], -np.inf) for name, value in reached.items())


def _trainings(config: Models, inputs: Inputs) -> list[Measurement]:
    return [Measurement(train_one, {"steps": config.steps, "trained": inputs.trained}, seed) for seed in _seeds(config)]


def _jobs(config: Models, inputs: Inputs) -> list[Measurement]:
    common = {"steps": config.steps, "trained": inputs.trained, "methods": list(config.methods), "n": config.n}
    return [Measurement(score_one, common, seed) for seed in _seeds(config)]


def _seeds(config: Models) -> range:
    return range(config.first, config.first + config.models)


def _summarize(config: Models, rows: Rows) -> pd.DataFrame:
    """What each training reached; then of models that reached enough the metrics of each method, and its threshold."""
    training, scores = rows["train_one"], rows["score_one"]
    known = [
        seed
        for seed, part in training.groupby("seed")
        if not config.enough or reached_enough(dict(zip(part["metric"], part["value"], strict=True)))
    ]
    scores = scores[scores["seed"].isin(known)]
    costs, of_heads = scores[scores["head"].isna()], scores[scores["head"].notna()]
    chosen = thresholds_on(of_heads) if config.tuned is None else kept_thresholds(config.tuned, config.methods)
    kept = training.assign(method="training", of="all", role="all")
    noise = pd.DataFrame({"seed": [*_seeds(config)], "value": [noise_of(seed) for seed in _seeds(config)]})
    parts = [
        kept,
        noise.assign(method="training", metric="noise", of="all", role="all"),
        costs.assign(metric="cost", of="all", role="all"),
        chosen.assign(of="all", role="all", seed=-1),
        *(measured_by_model(part, chosen) for _, part in of_heads.groupby("seed")),
    ]
    return pd.concat(parts)[COLUMNS].assign(low=np.nan, high=np.nan, n=1)


def thresholds_on(of_heads: Any) -> pd.DataFrame:
    """Returns the threshold of each method by which its mean F1 over models is highest, and that `f1`.

    A head counts as named if its highest score for any role reaches the threshold. `localize` names heads by itself:
    its threshold stays 1, from which on its scores mean a name.
    """
    rows = []
    for method, part in of_heads.groupby("method", sort=False):
        best = part.groupby(["seed", "head", "kind"])["value"].max().reset_index()
        values = best.groupby(["seed", "head"])["value"].first().unstack("seed").to_numpy(float)
        matters = best.assign(yes=best["kind"].isin(MATTER)).groupby(["seed", "head"])["yes"].first().unstack("seed")
        candidates = np.array([1.0]) if method in NAMING else np.unique(values)
        named = values >= candidates[:, None, None]
        true = matters.to_numpy(bool)
        f1 = (2 * (named & true).sum(1) / (named.sum(1) + true.sum(0))).mean(1)
        at = int(f1.argmax())
        rows += [{"method": method, "metric": "threshold", "value": candidates[at]}]
        rows += [{"method": method, "metric": "f1", "value": f1[at]}]
    return pd.DataFrame(rows)


def kept_thresholds(scale: str, methods: Sequence[str]) -> pd.DataFrame:
    """Returns the thresholds that were kept by `localizers/redundancy-tuning`."""
    kept: Any = Table.load(TUNING / scale).frame
    kept = kept[kept["metric"].isin(["threshold", "f1"]) & kept["method"].isin(methods)]
    return kept[["method", "metric", "value"]]


def measured_by_model(of_heads: Any, thresholds: pd.DataFrame) -> pd.DataFrame:
    """Returns the metrics of each method in one model.

    - `named`: the share of the heads of a class and role that are named; for roles `"all"` those of a class.
    - `named of n`: the same of the copies of a role with n of them.
    - `precision`: the share of named heads that have a role; NaN where none is named.
    - `false_discoveries`: the share of names, a head for a role, whose head does not have that role.
    - `auroc`: as in the zoo, of the heads of a role beside those without any.
    """
    limits = thresholds[thresholds["metric"] == "threshold"].set_index("method")["value"]
    rows: list[dict[str, Any]] = []
    for method, part in of_heads.groupby("method", sort=False):
        part = part.assign(role=part["role"].where(part["role"].notna(), "none"), named=part["value"] >= limits[method])
        heads = part.groupby(["head", "kind", "role"], as_index=False)["named"].any()

        def add(metric: str, value: float, of: str = "all", role: str = "all", method: Any = method) -> None:
            rows.append({"method": method, "metric": metric, "of": of, "role": role, "value": value})

        for kind, of_kind in heads.groupby("kind"):
            add("named", of_kind["named"].mean(), str(kind))
            for role, of_role in of_kind.groupby("role") if kind in MATTER else ():
                add("named", of_role["named"].mean(), str(kind), str(role))
            if kind == COPY:
                add(f"named of {len(of_kind)}", of_kind["named"].mean(), COPY)
        named, names = heads[heads["named"]], part[part["named"]]
        add("precision", named["kind"].isin(MATTER).mean())
        if method in BY_ROLE:
            add("false_discoveries", (names["role"] != names["for"]).mean())
        for role, of_role in part.groupby("for"):
            values = of_role.set_index("head")["value"]
            positive = of_role.loc[of_role["role"] == role, "head"]
            negative = of_role.loc[of_role["role"] == "none", "head"]
            add("auroc", agreement(values.to_dict(), list(positive), list(negative))["auroc"], role=str(role))
    return pd.DataFrame(rows).assign(seed=of_heads["seed"].iloc[0])


# What is claimed


def by_model(table: Table, method: str, metric: str, of: str = "all", role: str = "all") -> Float[ndarray, " model"]:
    """Returns a metric in each model that reached enough; NaN where it has none.

    Of each class or each role it is the mean over those that the model has.
    """
    frame: Any = table.frame
    models = sorted(set(frame.loc[frame["metric"] == "precision", "seed"]))
    rows = frame[(frame["method"] == method) & (frame["metric"] == metric)]
    for column, wanted in (("of", of), ("role", role)):
        rows = rows[rows[column] == wanted] if wanted != "each" else rows
    return rows.groupby("seed")["value"].mean().reindex(models).to_numpy(float)


def over_models(shares: Float[ndarray, " model"]) -> Measured:
    """Returns the mean of shares, with a 95% interval over models inside [0, 1]; models without any are left out."""
    known = shares[~np.isnan(shares)][None]
    (low,), (high,) = proportion(known, np.ones_like(known))
    return Measured(float(known.mean()), float(low), float(high), tuple(known[0].tolist()))


def recall(table: Table, method: str) -> Float[ndarray, " model"]:
    """Returns the share of a model's heads with a role that a method names."""
    of_copies = {n: by_model(table, method, f"named of {n}", COPY) for n in (2, 3)}
    counts = {**dict.fromkeys((SINGLE, PRIMARY, BACKUP), 1), COPY: np.where(np.isnan(of_copies[2]), 3, 2)}
    counts[SINGLE] = len(CIRCUIT_ROLES) - 2  # of the others one has copies and one a backup
    named = sum(counts[of] * by_model(table, method, "named", of) for of in MATTER)
    return named / sum(counts.values())


def f1(table: Table, method: str) -> Float[ndarray, " model"]:
    """Returns the harmonic mean of precision and recall in each model, 0 where nothing is named."""
    precision, found = np.nan_to_num(by_model(table, method, "precision")), recall(table, method)
    return 2 * precision * found / np.maximum(precision + found, 1e-12)


def difference(one: Float[ndarray, " model"], other: Float[ndarray, " model"]) -> Measured:
    """Returns the mean difference over the models that have both, with its 95% interval."""
    return over_seeds(one - other)


def of_seeds_from(table: Table, first: int) -> Table:
    """Returns the rows of models from a seed on, with the thresholds."""
    frame: Any = table.frame
    return Table(frame[(frame["seed"] >= first) | (frame["seed"] < 0)], table.provenance)


def named_but_previous(table: Table, method: str, of: str) -> Float[ndarray, " model"]:
    """Returns the share of a class of heads that is named, in roles other than `previous`; models without are left out.

    In trained circuits the previous-token head attends to the token before only in part (`localizers/trained`).
    """
    values = [by_model(table, method, "named", of, role) for role in CIRCUIT_ROLES if role != "previous"]
    wide = np.stack(values)
    return np.nanmean(wide[:, ~np.isnan(wide).all(0)], axis=0)


def best_of(table: Table, methods: Sequence[str]) -> str:
    """Returns the method with the highest F1 on the models on which thresholds were chosen."""
    tuned: Any = table.where(metric="f1").frame
    return str(tuned[tuned["method"].isin(methods)].set_index("method")["value"].idxmax())


def _check(table: Table) -> list[Claim]:
    scored = set(table.where(metric="f1").frame["method"])
    if not set(METHODS) <= scored:
        return []  # other methods
    single = best_of(table, ONE_BY_ONE)
    others = best_of(table, [method for method in METHODS if method != GROUPS])

    def more(method: str, of: str, than: str = single) -> Float[ndarray, " model"]:
        return by_model(table, method, "named", of) - by_model(table, than, "named", of)

    def auroc(method: str) -> Float[ndarray, " model"]:
        return by_model(table, method, "auroc", role="each")

    return [
        *(
            Claim(
                f"localize with redundant heads names more of the {what} than interventions on one head (share)"
            ).at_least(0.2, more(GROUPS, of), more(GROUPS, SINGLE), "of heads alone in their role")
            for of, what in ((COPY, "copies"), (BACKUP, "backups"))
        ),
        *(
            Claim(f"{method} names more of the copies than interventions on one head (share)").at_least(
                0.1, more(method, COPY), more(method, SINGLE), "of heads alone in their role"
            )
            for method in ("pruning", "learned masks")
        ),
        Claim("localize with redundant heads names the backups (share)").at_least(
            0.5,
            by_model(table, GROUPS, "named", BACKUP),
            by_model(table, "localize", "named", BACKUP),
            "localize alone",
        ),
        *(
            Claim(f"Of roles other than previous, localize with redundant heads names the {what} (share)").at_least(
                0.9, named_but_previous(table, GROUPS, of), named_but_previous(table, "localize", of), "localize alone"
            )
            for of, what in ((COPY, "copies"), (BACKUP, "backups"))
        ),
        Claim("Interventions on one head name the heads that are alone in their role (share)").at_least(
            0.9, by_model(table, single, "named", SINGLE), by_model(table, single, "named", BACKUP), "the backups"
        ),
        *(
            Claim(f"{method} keeps the false discovery rate that it promises (share of names)").at_most(
                0.05,
                by_model(table, method, "false_discoveries"),
                by_model(table, "attention", "false_discoveries"),
                "heads named by their attention alone",
            )
            for method in NAMING
        ),
        Claim("localize with redundant heads names decoys (share)").at_most(
            0.05, by_model(table, GROUPS, "named", DECOY), by_model(table, "attention", "named", DECOY), "attention"
        ),
        Claim("Attention names decoys (share)").at_least(
            0.5, by_model(table, "attention", "named", DECOY), by_model(table, "attention", "named", OTHER), "others"
        ),
        *(
            Claim(f"{method} ranks heads better in planted circuits than in trained ones (AUROC, difference)").at_least(
                0.05, home_minus(auroc(method), method), home_minus(auroc(single), single), "interventions on one head"
            )
            for method in ("attention", "head detector", GROUPS)
        ),
        *(
            Claim(f"{method} names the {what} (share)").at_least(
                0.9,
                by_model(table, method, "named", of),
                by_model(table, single, "named", of),
                "interventions on one head",
            )
            for method in ("EAP-IG", "learned masks")
            for of, what in ((COPY, "copies"), (BACKUP, "backups"))
        ),
        Claim("EAP-IG ranks heads worse in planted circuits than in trained ones (AUROC, difference)").at_most(
            -0.05, home_minus(auroc("EAP-IG"), "EAP-IG"), home_minus(auroc(GROUPS), GROUPS), GROUPS
        ),
        Claim(
            "localize with redundant heads ranks heads better than the best other method (AUROC, difference)"
        ).at_least(0.0, auroc(GROUPS) - auroc(others), auroc(others) - auroc(GROUPS), "the difference turned round"),
    ]


def home_minus(trained: Float[ndarray, " model"], method: str) -> Measured:
    """Returns by how much the mean AUROC in held-out planted circuits exceeds that in trained models."""
    home, here = home_auroc(method), over_seeds(trained)
    value = home.value - here.value
    below, above = np.hypot([home.value - home.low, home.high - home.value], [here.high - here.value] * 2)
    return Measured(value, value - float(below), value + float(above))


@cache
def home_auroc(method: str, metric: str = "auroc") -> Measured:
    """Returns the mean AUROC over roles in held-out planted circuits, whose roles are defined by attention.

    Or another `metric` of `localizers/held-out`, such as the `recall` of names.
    """
    return value_of(Table.load(HOME), trait="circuits", at="all", metric=metric, role="all", method=method)


# What is shown


def overview(table: Table) -> pd.DataFrame:
    """Returns what each method names by class and by role, its precision, false discoveries, AUROC and cost."""
    rows = {}
    for method in table.where(metric="f1").frame["method"]:
        named = {of: by_model(table, method, "named", of) for of in CLASSES}
        named |= {f"{COPY}, {n} in a role": by_model(table, method, f"named of {n}", COPY) for n in (2, 3)}
        named |= {role: by_model(table, method, "named", "each", role) for role in CIRCUIT_ROLES}
        other = {"precision": "precision", "false discoveries": "false_discoveries", "cost": "cost"}
        values = named | {name: by_model(table, method, metric) for name, metric in other.items()}
        values |= {"recall": recall(table, method), "F1": f1(table, method)}
        values["AUROC"] = by_model(table, method, "auroc", role="each")
        rows[method] = {
            name: float(np.nanmean(of)) if not np.isnan(of).all() else np.nan for name, of in values.items()
        }
    return pd.DataFrame(rows).T


def _draw(table: Table) -> Mapping[str, go.Figure]:
    means = overview(table)
    tuned: Any = table.where(metric="f1").frame
    best_first = [*tuned.set_index("method")["value"].sort_values(ascending=False, kind="stable").index]
    shares = means.loc[best_first, [*CLASSES, "precision", "recall", "F1"]]
    named = go.Figure(
        go.Heatmap(
            z=shares.to_numpy(),
            x=list(shares.columns),
            y=best_first,
            zmin=0,
            zmax=1,
            colorscale="Viridis",
            texttemplate="%{z:.2f}",
            colorbar={"title": "share"},
        )
    )
    named.update_yaxes(autorange="reversed")
    places = {
        "planted": home_auroc,
        "trained": lambda method: over_seeds(by_model(table, method, "auroc", role="each")),
    }
    areas = pd.DataFrame(
        {"method": method, "circuits": place, **of(method).row}
        for method in best_first
        if method in METHODS
        for place, of in places.items()
    )
    ranks = plots.dots(areas, "method", "circuits", "AUROC").update_xaxes(range=[0.45, 1.05])
    ranks.update_layout(height=130 + 22 * areas["method"].nunique())
    return {NAMED: plots.styled(named, "", height=80 + 24 * len(best_first)), RANKED: ranks}


def _experiment(name: str, title: str, config: Models, claims: Any = ()) -> Experiment:
    smoke = Models(config.first, 1, steps=2, methods=("attention", "ablation, mean", GROUPS), n=12, enough=False)
    study = Study(name, {"smoke": smoke, "cpu": config, "paper": config}, _jobs, _summarize, _trainings)
    return Experiment(
        name, title, "the package's own benchmark; Gupta et al. (2024), InterpBench", study, _draw, claims
    )


REDUNDANCY_TUNING = _experiment(
    "localizers/redundancy-tuning",
    "Redundancy in trained circuits: the models on which the methods' thresholds are chosen",
    Models(30_000, 10),
)

REDUNDANCY = _experiment(
    "localizers/redundancy",
    "Which methods find redundant heads of trained circuits, and which take decoys for them?",
    Models(31_000, 50, tuned="cpu"),
    _check,
)
"""With the thresholds of `localizers/redundancy-tuning`."""
