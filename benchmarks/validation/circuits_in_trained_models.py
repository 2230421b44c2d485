"""Which methods find the heads that matter where weights were trained? Circuits that interchange training put there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.localizers.benchmarked_head_methods import METHODS
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES
from align_circuits.models.planted.zoo import alignment_seed
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread, training_folder
from align_circuits.papers.localizer_zoo import BY_SCORE, NAMING, auroc_figure, compared, means
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask, config_of
from align_circuits.validation.trained_circuits import TrainedCircuit, train_circuit

ENOUGH: Mapping[str, float] = {
    "accuracy": 0.95,
    **{f"interchange accuracy, {role}": 0.9 for role in CIRCUIT_ROLES},
    "invariance": 0.95,
}
"""What a model must reach for its heads to count as known; see `what_was_reached`."""

REACHED, MISSED, BEFORE = "reached", "not reached", "before training"
"""Models that reached `ENOUGH`, those that did not, and all of them with their first, random weights."""

BY_ROLE = "direct effect"
"""The method that can see the lookup only, since no other head writes what is predicted."""


@dataclass(frozen=True)
class TrainedZoo:
    """Which models, prompts and methods."""

    first: int = 21_000
    """The seed of the first model. With seeds from 20,000 on, the four symbols of an input were the whole alphabet, so
    that aligners could attend to the three others, and three examples told too little of the letters that follow, so
    that ablating the circuit made the answers likelier; then `trained_task` was changed."""
    models: int = 8
    """How many models, of consecutive seeds."""
    steps: int = 800
    """Updates of each."""
    methods: tuple[str, ...] = tuple(METHODS)
    n: int = 24
    """Prompts for the methods, as in the zoo of planted circuits."""


def trained_task(seed: int) -> Seq2SeqTask:
    """Returns the task of one model: four symbols of eight, phrases of two letters, an alignment of no fixed distance.

    Many states have two edges, so that the second letter of a phrase depends on the first.
    """
    task = Seq2SeqTask(
        x_len=4,
        phrase_len=2,
        n_examples=4,
        alphabet="ABCDEFGH",
        letters="abcdef",
        alphabet_range=(4, 6),
        edge_range=(1, 3),
        alignment="permutation",
    )
    return replace(task, task_seed=alignment_seed(task, seed))


def train_one(*, steps: int, trained: str, seed: int) -> list[dict[str, Any]]:
    """Trains one model and returns what it reached; the function of a job."""
    on_one_thread()
    rows = []
    for name, value in trained_model(steps, trained, seed).reached.items():
        metric, _, role = name.partition(", ")
        rows.append({"method": "training", "metric": metric, "role": role or "all", "value": value})
    return rows


def compare_trained(*, steps: int, trained: str, methods: Sequence[str], n: int, seed: int) -> list[dict[str, Any]]:
    """Measures how every method scores the heads of one model; the function of a job. Rows as of `benchmark_circuit`.

    Args:
        steps: Of the training; 0 for the model before it.
        trained: The folder of trainings.
        methods: Their names.
        n: Prompts.
        seed: Of the model and the prompts.
    """
    on_one_thread()
    model = trained_model(steps, trained, seed)
    return compared(model, model.task.sample(n, model.tokenizer, seed=seed), methods)


def trained_model(steps: int, trained: str, seed: int) -> TrainedCircuit:
    """Trains a model, or reads it from the folder of trainings; with no steps it has its first weights."""
    task = trained_task(seed)
    folder = training_folder(trained, "trained-circuit", config_of(task), steps, seed)
    return train_circuit(task, seed, steps=steps, out=folder if steps else None)


def _trainings(config: TrainedZoo, inputs: Inputs) -> list[Measurement]:
    return [Measurement(train_one, {"steps": config.steps, "trained": inputs.trained}, seed) for seed in _seeds(config)]


def _jobs(config: TrainedZoo, inputs: Inputs) -> list[Measurement]:
    common = {"trained": inputs.trained, "methods": list(config.methods), "n": config.n}
    return [
        Measurement(compare_trained, common | {"steps": steps}, seed, {"steps": steps})
        for steps in (config.steps, 0)
        for seed in _seeds(config)
    ]


def _seeds(config: TrainedZoo) -> range:
    return range(config.first, config.first + config.models)


def _summarize(_: TrainedZoo, rows: Rows) -> pd.DataFrame:
    """Means over models that reached `ENOUGH`, over the others, and over all before training; then model by model."""
    training, scored = rows["train_one"], rows["compare_trained"]
    missed = [seed for seed, part in training.groupby("seed") if not _enough(part)]
    groups = {
        REACHED: pd.concat([part[~part["seed"].isin(missed)] for part in (training, scored[scored["steps"] > 0])]),
        MISSED: pd.concat([part[part["seed"].isin(missed)] for part in (training, scored[scored["steps"] > 0])]),
        BEFORE: scored[scored["steps"] == 0],
    }
    parts = []
    for name, group in groups.items():
        parts += [means(group, "circuits", name)] if len(group) else []
        parts += [means(part, name, str(seed)) for seed, part in group.groupby("seed")]
    return pd.concat(parts, ignore_index=True)


def _enough(reached: Any) -> bool:
    values = {
        row["metric"] if row["role"] == "all" else f"{row['metric']}, {row['role']}": row["value"]
        for row in reached.to_dict("records")
    }
    return all(values[name] >= least for name, least in ENOUGH.items())


def _check(table: Table) -> list[Claim]:
    """The training over all models; the methods over those that reached `ENOUGH`. A model is the independent case."""
    checks = []
    for name, least in ENOUGH.items():
        metric, _, role = name.partition(", ")
        if name == "accuracy":
            continue  # what is trained; a claim of circuits is the others
        control, control_is = (
            ("another head", "another head exchanged in its place")
            if role
            else ("roles exchanged", "the heads of roles")
        )
        text = (
            f"Exchanging the head of {role} does what it does in the planted circuit, in {least:g} of the answers"
            if role
            else f"Exchanging all other heads leaves {least:g} of the answers"
        )
        values, of_control = (
            _by_model(table, (REACHED, MISSED), "training", each, [role or "all"]) for each in (metric, control)
        )
        checks.append(
            Claim(f"{text} (share of models)").at_least(
                0.5, np.all(values >= least, axis=1), np.all(of_control >= least, axis=1), control_is
            )
        )
    if REACHED not in set(table.frame["trait"]):
        return checks
    scored = [method for method in METHODS if method in set(table.where(metric="auroc").frame["method"])]
    for method in scored:
        roles = ("lookup",) if method == BY_ROLE else CIRCUIT_ROLES
        first, before = (_by_model(table, (each,), method, "recall_at_size", roles) >= 1 for each in (REACHED, BEFORE))
        what = "the lookup head" if method == BY_ROLE else "the heads of all four roles"
        checks.append(
            Claim(f"By {method}, {what} rank above all heads without a role (share of models)").at_least(
                0.5, np.all(first, axis=1), np.all(before, axis=1), "the same heads before training"
            )
        )
    for method in (each for each in NAMING if each in scored):
        named, before = (_by_model(table, (each,), method, "recall", CIRCUIT_ROLES) >= 1 for each in (REACHED, BEFORE))
        false, by_score = (
            _by_model(table, (REACHED,), each, "false_discoveries", CIRCUIT_ROLES) > 0 for each in (method, BY_SCORE)
        )
        checks += [
            Claim(f"{method} names the heads of all four roles (share of models)").at_least(
                0.5, np.all(named, axis=1), np.all(before, axis=1), "the same heads before training"
            ),
            Claim(f"{method} names a head for a role that it does not have (share of models)").at_most(
                0.5, np.any(false, axis=1), np.any(by_score, axis=1), "heads named by their attention alone"
            ),
        ]
    return checks


def _by_model(
    table: Table, groups: Sequence[str], method: str, metric: str, roles: Sequence[str]
) -> Float[ndarray, "model role"]:
    """A metric of each model of some groups by role; NaN where it has none, such as false names where none is named."""
    frame: Any = table.where(method=method, metric=metric).frame
    models = sorted(set(table.frame.loc[table.frame["trait"].isin(groups), "at"]))
    wide = frame[frame["trait"].isin(groups)].pivot_table(index="at", columns="role", values="value")
    return wide.reindex(index=models, columns=list(roles)).to_numpy(float)


def _draw(table: Table) -> Mapping[str, go.Figure]:
    figure = go.Figure()
    names = [*ENOUGH, *(f"another head, {role}" for role in CIRCUIT_ROLES), "roles exchanged"]
    for group in (REACHED, MISSED):
        frame: Any = table.frame[(table.frame["trait"] == group) & (table.frame["method"] == "training")]
        for model, part in frame.groupby("at"):
            values = part.set_index(["metric", "role"])["value"]
            pairs = [tuple(name.split(", ")) if ", " in name else (name, "all") for name in names]
            figure.add_scatter(
                x=[name.replace("_", " ") for name in names],
                y=[values[pair] for pair in pairs],
                mode="markers",
                name=f"{model}, {group}",
                marker={"symbol": "circle" if group == REACHED else "x"},
            )
    figure.update_layout(yaxis_title="share of answers", height=480)
    at = REACHED if REACHED in set(table.frame["trait"]) else MISSED
    return {f"auroc, {at}": auroc_figure(table, at), "what training reached": figure}


TRAINED_ZOO = Experiment(
    "localizers/trained",
    "Which methods find the heads that matter in trained models?",
    "the package's own benchmark; Gupta et al. (2024), InterpBench",
    Study(
        "localizers/trained",
        {
            "smoke": TrainedZoo(models=1, steps=2, methods=("attention", "EAP", "localize, redundant"), n=12),
            "cpu": TrainedZoo(),
            "paper": TrainedZoo(),
        },
        _jobs,
        _summarize,
        _trainings,
    ),
    _draw,
    _check,
)
