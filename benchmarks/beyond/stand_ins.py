"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): can another layer stand in for a tuned aligner?

In a tuned model the aligners of one side are made blind: they attend evenly to the input of the example. Then other
heads are clamped onto the gold alignment of that side (`align_circuits.beyond.prosthesis` says which positions it has).
If tuning lacked only the attention, any head before the lookup could give it.

The claims were written after a look at SmolLM2 tuned on seed 1, on the query side, with prompts of seed 100; those on
the depth of single heads after a run on the prompts of seeds 400 to 407, on which SmolLM2 has not been tested again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.beyond.prosthesis import (
    GOLD,
    LATE,
    LOOKUP,
    METRICS,
    QUERY,
    RANDOM,
    ROLES,
    WRONG,
    aligners,
    drawn,
    measure_pairs,
)
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Clamp, Edit
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import SMOKE_TASK, SMOLLM2_TASK, TASK, loaded
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, seed_dots
from align_circuits.papers.statistics import Measured, Statistic, as_rows, grouped_over_seeds, measured, statistic
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table

INTACT, BLIND = "intact", "blind"

ALIGNS = 0.75
"""The score of the side's relation from which a head is made blind."""

COLUMNS = ("part", "arm", "seed", "side", "of", "draw", "layer", "head", "own", "metric")


@dataclass(frozen=True)
class StandIns:
    """How much is measured."""

    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    """What the model was tuned on."""
    seeds: tuple[int, ...] = tuple(range(400, 408))
    """Each has prompts of its own."""
    n: int = 2
    """On how many prompts each seed finds the aligners, and on how many others it clamps heads."""
    draws: int = 5
    """Sets of random heads that are made blind instead."""
    aligners: str | None = None
    """The scale of `icatune/fig4` whose kept table tells where other tuned seeds align."""
    own: tuple[str, int] | None = None
    """The arm and the seed there of the model itself, which is left out."""


def stood_in(*, model: str, task: Mapping[str, Any], prompts: int, draws: int, seed: int, **_: str) -> pd.DataFrame:
    """Makes the aligners of a tuned model blind and clamps others onto gold; the function of a job.

    Args:
        model: The tuned model, what `load` takes.
        task: The task's arguments.
        prompts: How many find the aligners, and on how many others heads are clamped.
        draws: Sets of random heads that are made blind.
        seed: Of the task, its prompts and what is drawn.
        **_: The hash of the model's weights.

    Returns:
        Both metrics of first letters, by `side` and `part`:

        - `aligners`: `of` the model as it is (`intact`), with its aligners `blind`, or as many `random` heads; with the
          aligners on `gold` or on a `wrong order`, which must be as good as intact, and bad;
        - `layers`: with the aligners blind and all heads of a layer on gold; `own` tells whether it has an aligner;
        - `heads`: the same for each head alone, on the query side.
    """
    network, generator = loaded(model), np.random.default_rng(seed)
    choosing, testing = drawn(network.tokenizer, task, prompts, seed)
    testing = with_blind(testing, task["n_examples"])
    heads = heads_of(network.cfg)
    scores: Any = score_heads(network, choosing, [*ROLES.values()]).heads().frame
    parts = []
    for side, role in ROLES.items():
        own = aligners_of(scores[scores["metric"] == role])
        others = [head for head in heads if head not in own]
        instead = [[others[at] for at in generator.choice(len(others), len(own), replace=False)] for _ in range(draws)]
        blind = Clamp(own, f"{BLIND} {side}")
        of_aligners: list[tuple[str, list[Edit]]] = [
            (INTACT, []),
            (BLIND, [blind]),
            *((of, [Clamp(own, f"{of} {side}")]) for of in (GOLD, WRONG)),
            *((RANDOM, [Clamp(drawn_heads, f"{BLIND} {side}")]) for drawn_heads in instead),
        ]
        layers = [[head for head in heads if head[0] == layer] for layer in range(network.cfg.n_layers)]
        singles = [[head] for head in heads] if side == QUERY else []
        on_gold = [[blind, Clamp(each, f"{GOLD} {side}")] for each in (*layers, *singles)]
        keys = pd.DataFrame(
            [
                *(("aligners", of, draw, None, None, None) for draw, (of, _) in enumerate(of_aligners)),
                *(("layers", GOLD, None, at, None, any(head in own for head in of)) for at, of in enumerate(layers)),
                *(("heads", GOLD, None, *head, head in own) for (head,) in singles),
            ],
            columns=["part", "of", "draw", "layer", "head", "own"],
        )
        values = _means(network, testing, side, [*(edits for _, edits in of_aligners), *on_gold])
        parts += [
            keys.assign(side=side, metric=metric, value=of_metric)
            for metric, of_metric in zip(METRICS, values, strict=True)
        ]
    return pd.concat(parts).astype({"own": float})


def _means(
    model: Any, prompts: Prompts, side: str, sets: Sequence[Sequence[Edit]]
) -> Float[ndarray, "metric edit_set"]:
    """The mean of each metric over first letters under each set of edits."""
    if side == QUERY:
        return measure_pairs(model, prompts, [[]], sets)[:, 0].mean(-1)
    return TargetMetrics.of(prompts, METRICS, "first").measure_edited(model, sets)[0].mean(-1)


def with_blind(prompts: Prompts, test: int) -> Prompts:
    """Returns prompts with `"blind key"` and `"blind query"`: from the queries of gold to the example's whole input.

    Args:
        prompts: With the relations of `EveryExample`.
        test: The number of the test example.
    """
    relations = dict(prompts.relations)
    for side, role in ROLES.items():
        blind = relations[f"{BLIND} {role}"]
        in_test = blind.candidate_value == test
        relations[f"{BLIND} {side}"] = blind.select(in_test if side == QUERY else ~in_test)
    return replace(prompts, relations=relations)


def aligners_of(scores: pd.DataFrame) -> list[Head]:
    """Returns the heads that score `ALIGNS`, or else the best one."""
    values: Any = scores.set_index(["layer", "head"])["value"]
    named = values[values >= ALIGNS] if (values >= ALIGNS).any() else values.nlargest(1)
    return [(int(layer), int(head)) for layer, head in named.index]


def _jobs(config: StandIns, inputs: Inputs) -> list[Measurement]:
    about = {**inputs.model, "task": dict(config.task), "prompts": config.n, "draws": config.draws}
    return [Measurement(stood_in, about, seed) for seed in config.seeds]


def _summarize(config: StandIns, rows: Rows) -> pd.DataFrame:
    frames = [rows["stood_in"]]
    if config.aligners is not None:
        tuned = aligners(config.aligners)
        frames.append(tuned[[seed != config.own for seed in zip(tuned["arm"], tuned["seed"], strict=True)]])
    return as_rows(frames, COLUMNS).assign(n=1)


def _by_seed(table: Table) -> Float[ndarray, " seed"]:
    frame: Any = table.frame
    return frame.groupby("seed")["value"].mean().to_numpy(float)


_ALIGNERS = statistic(_by_seed).at(part="aligners", metric="accuracy")


def state(table: Table, side: str, of: str) -> Measured:
    """Returns the accuracy with the aligners of a side `INTACT`, `BLIND`, or as `stood_in` lists."""
    return measured(_ALIGNERS.at(side=side, of=of)(table))


def _stand_ins(table: Table, part: str, first: float = 0, last: float = 1) -> Any:
    """The accuracy with each layer, or head, that is or has no aligner in any seed; seeds across.

    Only those in a part of the layers, from 0 to 1.
    """
    frame: Any = table.frame
    place = ["layer"] if part == "layers" else ["layer", "head"]
    wide = frame.pivot(index=place, columns="seed", values="value")
    depth = (wide.index.get_level_values("layer") + 0.5) / (frame["layer"].max() + 1)
    return wide[(frame.groupby(place)["own"].max() == 0) & (first <= depth) & (depth < last)]


def best_stand_in(part: str, side: str, first: float = 0, last: float = 1) -> Statistic:
    """Returns the accuracy in each seed with the layer, or head, without an aligner that is best in the other seeds.

    Args:
        part: `"layers"` or `"heads"`.
        side: Where it is clamped.
        first: Where its part of the layers begins, from 0 to 1.
        last: Where it ends.
    """

    def best(table: Table) -> Float[ndarray, " seed"]:
        others = _stand_ins(table, part, first, last)
        if others.empty:
            return np.full(others.shape[1], np.nan)
        return np.array([others.loc[others.drop(columns=seed).mean(axis=1).idxmax(), seed] for seed in others])

    return statistic(best).at(part=part, side=side, metric="accuracy")


def by_layer(table: Table) -> Any:
    """Returns the accuracy with the best single head of each layer that is no aligner, its mean over seeds."""
    heads = _stand_ins(table.where(part="heads", side=QUERY, metric="accuracy"), "heads")
    return heads.mean(axis=1).groupby("layer").max()


def rank_of_layers(of: str) -> Statistic:
    """Returns how high the layers of other tuned seeds' heads rank by `by_layer`.

    The share of the other layers whose best head is worse, 0.5 by chance.
    """

    def ranks(table: Table) -> Float[ndarray, " tuned"]:
        best, layers = by_layer(table), table.where(part="aligner", side=of).frame["layer"]
        return np.array([(best < best.loc[layer]).sum() / (len(best) - 1) for layer in layers])

    return statistic(ranks)


def _check(table: Table) -> list[Claim]:
    claims = []
    for side in ROLES:
        intact, blind, random, gold, wrong = (
            _ALIGNERS.at(side=side, of=of) for of in (INTACT, BLIND, RANDOM, GOLD, WRONG)
        )
        own = gold - intact
        claims += [
            Claim(f"{side} side: with its aligners blind, first letters are lost (difference of accuracy)").at_least(
                0.2, intact - blind, intact - random, "as many random heads blind"
            ),
            Claim(f"{side} side: with its aligners on gold, they are as good as before (difference)").at_least(
                -0.1, own, wrong - intact, "on a wrong order"
            ),
            *(
                Claim(
                    f"{side} side: no other {place} stands in for its aligners (what is still lost, difference; the "
                    f"{place} that is best in the other seeds)"
                ).at_most(-0.15, best_stand_in(part, side) - intact, own, "the aligners themselves")
                for part, place in (("layers", "layer"), *([("heads", "head")] if side == QUERY else []))
            ),
        ]
    intact, best = _ALIGNERS.at(side=QUERY, of=INTACT), best_stand_in("heads", QUERY)
    for when, first, last in (("late: the last fifth", LATE, 1), ("early: the first half", 0, 0.5)):
        claims.append(
            Claim(
                f"query side: too {when} of the layers has no head that stands in for its aligners (what is still "
                "lost, difference; the head that is best in the other seeds)"
            ).at_most(
                -0.25, best_stand_in("heads", QUERY, first, last) - intact, best - intact, "the best of all layers"
            )
        )
    if "aligner" in set(table.frame["part"]):
        claims.append(
            Claim(
                "query side: other tuned seeds align where a single head can stand in (share of the other layers whose "
                "best head is worse)"
            ).at_least(0.75, rank_of_layers(QUERY), rank_of_layers(LOOKUP), "the layers of their lookup heads")
        )
    return claims


def _draw(table: Table) -> Mapping[str, go.Figure]:
    accuracy: Any = table.where(metric="accuracy").frame
    layers = accuracy[accuracy["part"] == "layers"].assign(clamped="all heads of a layer")
    heads = accuracy[accuracy["part"] == "heads"]
    others = _stand_ins(table.where(part="heads", side=QUERY, metric="accuracy"), "heads").mean(axis=1)
    best = others.groupby("layer").idxmax()
    single = heads[pd.MultiIndex.from_frame(heads[["layer", "head"]]).isin([*best])]
    shown = pd.concat([layers, single.assign(clamped="its best single head that is no aligner")])
    panels = {f"{side} side": grouped_over_seeds(of, ["clamped", "layer"]) for side, of in shown.groupby("side")}
    figure: Any = plots.curves(panels, "layer", "clamped", "layer", value="first letters")
    frame: Any = table.frame
    for layer in frame.loc[(frame["part"] == "aligner") & (frame["side"] == QUERY), "layer"].unique():
        figure.add_vline(x=layer, line={"dash": "dot", "width": 1}, row=1, col=2)
    grid = heads.groupby(["layer", "head"])["value"].mean().unstack("head")
    states = accuracy[accuracy["part"] == "aligners"].groupby(["side", "of", "seed"], sort=False, as_index=False)
    states = states["value"].mean().assign(low=np.nan, high=np.nan)
    return {
        "others on gold, aligners blind": figure,
        "single heads on gold, aligners blind": plots.accuracy_grids(
            {"query side": grid.rename(index=int, columns=int)}, x="head", y="layer", value="first letters"
        ),
        **{f"{side} side": seed_dots(of, "of", "first letters") for side, of in states.groupby("side")},
    }


STAND_INS = Experiment(
    "icatune/stand-ins",
    "Can another layer stand in for a tuned aligner?",
    "beyond Agarwal and Sarawagi (2025)",
    Study(
        "icatune/stand-ins",
        {
            "smoke": StandIns(SMOKE_TASK, (0, 1), draws=1),
            "cpu": StandIns(n=8, aligners="cpu"),
            "paper": StandIns(SMOLLM2_TASK),
            "smollm2": StandIns(
                SMOLLM2_TASK, seeds=tuple(range(408, 416)), aligners="smollm2", own=("larger steps", 1)
            ),
        },
        _jobs,
        _summarize,
        models="one",
        load=loaded,
    ),
    _draw,
    _check,
    about=About.BEYOND,
)
