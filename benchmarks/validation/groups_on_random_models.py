"""Does `localize` find groups where there are none? Models of random weights."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from align_circuits.heads.localize_heads import localize
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models.planted.zoo import zoo_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import the_row
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tasks.task import Task
from align_circuits.validation.localize_ground_truth import FAMILIES, random_model, random_task

PLANTED, ALL = "planted", "all random"


@dataclass(frozen=True)
class RandomGroups:
    """How many models."""

    models: int = 30
    """Of random weights for each family of prompts."""
    families: tuple[str, ...] = FAMILIES
    planted: int = 10
    """Circuits of the zoo, for comparison."""
    first_seed: int = 6000
    """Other models than those of `localize/ground-truth`, other circuits than those of `localizers/zoo`."""
    gains: tuple[float, ...] = (1.0, 4.0)
    """By what the query and key weights of random models are multiplied, in turn."""
    n: int = 24
    """Prompts."""


def groups_of_random(*, family: str, gain: float, n: int, seed: int) -> list[dict[str, Any]]:
    """Looks for groups in one model of random weights; the function of a job.

    Returns:
        How many heads are named one by one, and how many are members of a group.
    """
    return _counts(random_model(family, gain, seed), random_task(family, seed), n, seed)


def groups_of_planted(*, n: int, seed: int) -> list[dict[str, Any]]:
    """Looks for groups in one circuit of the zoo; the function of a job. Rows as of `groups_of_random`."""
    model = zoo_circuit(seed).build()
    return _counts(model, model.task, n, seed)


def _counts(model: HookedModel, task: Task, n: int, seed: int) -> list[dict[str, Any]]:
    found = localize(model, task, n, seed=seed, n_controls=0, redundant=True)
    return [{"named": len(found.named_heads), "members": sum(map(len, found.redundant.values()))}]


def _jobs(config: RandomGroups, _: Inputs) -> list[Measurement]:
    seeds = range(config.first_seed, config.first_seed + config.models)
    random = [
        Measurement(
            groups_of_random,
            {"family": family, "gain": config.gains[seed % len(config.gains)], "n": config.n},
            seed,
            {"models": family},
        )
        for family in config.families
        for seed in seeds
    ]
    planted = [
        Measurement(groups_of_planted, {"n": config.n}, seed, {"models": PLANTED}) for seed in seeds[: config.planted]
    ]
    return [*random, *planted]


def _summarize(_: RandomGroups, rows: Rows) -> pd.DataFrame:
    random: Any = rows["groups_of_random"]
    frame: Any = pd.concat([random, random.assign(models=ALL), rows["groups_of_planted"]])
    shares = []
    for models, part in frame.groupby("models"):
        for metric in ("named", "members"):
            some = int((part[metric] > 0).sum())
            low, high = binomial_interval(some, len(part))
            share = {"value": some / len(part), "low": low, "high": high, "n": len(part)}
            shares.append({"models": models, "metric": metric, **share})
    return pd.DataFrame(shares)


RANDOM_GROUPS = Experiment(
    "localize/groups",
    "Does localize find groups where there are none?",
    "the package's own promise",
    Study(
        "localize/groups",
        {
            "smoke": RandomGroups(models=1, families=("repeated",), planted=1, n=12),
            "cpu": RandomGroups(),
            "paper": RandomGroups(models=400),
        },
        _jobs,
        _summarize,
    ),
    claims=[
        Claim("Random weights: the share of models in which any head joins a group").at_most(
            0.05, *the_row(metric="members").beside("models", ALL, PLANTED), "circuits of the zoo"
        )
    ],
)
