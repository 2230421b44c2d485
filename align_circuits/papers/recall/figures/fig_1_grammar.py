"""How much grammar determines the type, exactly: the data of Fig. 1."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import plotly.graph_objects as go

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, courses
from align_circuits.papers.recall.figures.studies import SOURCE, study
from align_circuits.papers.recall.task.posterior import type_ceiling
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.statistics import HIGH, LOW, levels, per_seed
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Grammar:
    """Worlds and grammar lengths."""

    world: RecallWorld
    divs: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    lens: tuple[int, ...] = (1, 2, 3, 4, 5, 10, 20, 40, 80)
    n: int = 1000
    """Subsequences a world."""
    seeds: int = 6


def best_type_accuracy(*, world: Mapping[str, Any], lens: Sequence[int], n: int, seed: int) -> list[dict[str, Any]]:
    """Returns the highest accuracy of the type that each length allows; the function of a job."""
    made = RecallWorld(**{**world, "world_seed": seed})
    return [{"grammar_len": s, "value": float(type_ceiling(made, s, n, seed).mean()), "n": n} for s in lens]


def _jobs(config: Grammar, _: Inputs) -> list[Measurement]:
    jobs = []
    for div in config.divs:
        settings = {"world": asdict(replace(config.world, div=div)), "lens": config.lens, "n": config.n}
        jobs += [Measurement(best_type_accuracy, settings, seed, {"div": div}) for seed in range(config.seeds)]
    return jobs


def _draw(table: Table) -> Mapping[str, go.Figure]:
    curves = {f"Div {div:g}": {"div": div} for div in table.frame["div"].unique()}
    draw = courses({"": curves}, "grammar_len", label="grammar tokens S", value="best accuracy of the type")
    return {"": draw(table)}


def _claims(table: Table) -> list[Claim]:
    lens, accuracy = levels(table, "grammar_len"), per_seed(div=HIGH)
    short = max(length for length in lens if length <= 5)
    middle = lens[len(lens) // 2 + 1] if len(lens) > 3 else lens[-1]
    alone, most = accuracy.at(grammar_len=LOW), accuracy.at(grammar_len=HIGH)
    difference = per_seed().rise("div")
    return [
        Claim(
            "The grammar of pretraining tells the type (S = {grammar_len.high}, Div {div.high:g}: best accuracy)"
        ).at_least(0.95, most, alone, "S = {grammar_len.low}"),
        Claim(
            f"The short grammar of finetuning does not reliably (S_ft = {short}, Div {{div.high:g}})", "insufficient"
        ).at_most(0.8, accuracy.at(grammar_len=short), most, "S = {grammar_len.high}"),
        Claim(
            f"A larger Div makes the type easier to tell (Div {{div.high:g}} minus {{div.low:g}}, S = {middle})"
        ).at_least(0.1, difference.at(grammar_len=middle), difference.at(grammar_len=LOW), "S = {grammar_len.low}"),
    ]


FIG1 = Experiment(
    "recall/fig1",
    "How much grammar determines the type",
    f"{SOURCE}, Fig. 1 and §3.2",
    study(
        "recall/fig1",
        Grammar(RecallWorld.small(), (0.2, 0.5), (1, 3, 20), 50, 2),
        Grammar(RecallWorld.paper()),
        Grammar(RecallWorld.paper(), n=20_000),
        jobs=_jobs,
    ),
    _draw,
    _claims,
    "Fig. 1 draws the data; §3.2 says that five tokens of grammar tell too little about the type.",
)
