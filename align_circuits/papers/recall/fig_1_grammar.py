"""Contextual recall: the data of Fig. 1, measured: how much grammar tells the type."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.papers.recall.posterior import type_ceiling
from align_circuits.papers.recall.trainings import SOURCE
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table


@dataclass(frozen=True)
class Grammar:
    """Which worlds, which lengths."""

    world: RecallWorld
    divs: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    lens: tuple[int, ...] = (1, 2, 3, 4, 5, 10, 20, 40, 80)
    n: int = 1000
    """Subsequences a world."""
    seeds: int = 3


def _run(config: Grammar, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    rows = []
    for div in config.divs:
        for seed in range(config.seeds):
            world = replace(config.world, div=div, world_seed=seed)
            for length in config.lens:
                value = float(type_ceiling(world, length, config.n, seed).mean())
                rows.append({"div": div, "seed": seed, "grammar_len": length, "value": value})
    frame = pd.DataFrame(rows).assign(low=float("nan"), high=float("nan"), n=config.n)
    return Table(frame, Provenance("recall_grammar", asdict(config)))


def _at(table: Table, div: float, length: int) -> Float[ndarray, " seed"]:
    rows = table.where(div=div, grammar_len=length).frame.sort_values("seed")
    return rows["value"].to_numpy(float)


def _draw(table: Table) -> dict[str, go.Figure]:
    keys = table.frame[["div", "grammar_len"]].drop_duplicates().itertuples(index=False)
    rows = [
        {"grammar_len": length, "curve": f"Div {div:g}", **vars(over_seeds(_at(table, div, length)))}
        for div, length in keys
    ]
    figure = plots.curves(
        {"": pd.DataFrame(rows)},
        x="grammar_len",
        by="curve",
        label="grammar tokens S",
        value="best accuracy of the type",
    )
    return {"": figure}


def _check(table: Table) -> list[Check]:
    divs, lens = (sorted(table.frame[name].unique().tolist()) for name in ("div", "grammar_len"))
    low, high, longest = divs[0], divs[-1], lens[-1]
    short = max(length for length in lens if length <= 5)
    middle = lens[len(lens) // 2 + 1] if len(lens) > 3 else longest
    alone = _at(table, high, lens[0])
    return [
        Check(
            f"The grammar of pretraining tells the type (S = {longest}, Div {high:g}: best accuracy)",
            relation=">=",
            threshold=0.95,
            **measured(_at(table, high, longest)),
            **controlled(alone, f"S = {lens[0]}"),
        ),
        Check(
            f"The short grammar of finetuning does not reliably (S_ft = {short}, Div {high:g})",
            relation="<=",
            threshold=0.8,
            **measured(_at(table, high, short)),
            **controlled(_at(table, high, longest), f"S = {longest}"),
            published="insufficient",
        ),
        Check(
            f"A larger Div makes the type easier to tell (Div {high:g} minus {low:g}, S = {middle})",
            relation=">=",
            threshold=0.1,
            **measured(_at(table, high, middle) - _at(table, low, middle)),
            **controlled(alone - _at(table, low, lens[0]), f"S = {lens[0]}"),
        ),
    ]


FIG1 = Experiment(
    name="recall/fig1",
    title="How much grammar tells about the type",
    source=f"{SOURCE}, Fig. 1 and §3.2",
    scales={
        "smoke": Grammar(RecallWorld.small(), (0.2, 0.5), (1, 3, 20), 50, 2),
        "cpu": Grammar(RecallWorld.paper()),
        "paper": Grammar(RecallWorld.paper(), n=20_000, seeds=6),
    },
    run=_run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="Fig. 1 draws the data; §3.2 says that five tokens of grammar tell too little about the type.",
)
