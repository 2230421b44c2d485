"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): at which depth does alignment help, if it is given?

Heads of the untuned model are clamped onto gold alignment, on one side of the lookup or on both:

- *key side*: at the first letter of each phrase in the examples, onto the symbol that it translates, so that lookup
  heads can find the letter by its symbol;
- *query side*: at the positions that predict the first letters of the test example, onto the symbol that comes next, so
  that lookup heads can look for it.

The claims were written after a look at the bundled Llama with prompts of seed 301, and before any run of SmolLM2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.beyond.alignment_given import EveryExample
from align_circuits.checks import Tokenizer
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import BatchContext, Clamp, Edit, changes_of
from align_circuits.hooks.head_names import Head, heads_of
from align_circuits.hooks.replay import Replay, starts_from
from align_circuits.jobs.identity import identity_of
from align_circuits.models.parameters import model_identity
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import FRESH, SMOKE_TASK, SMOLLM2_TASK, TASK, loaded
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, seed_dots
from align_circuits.papers.statistics import Statistic, as_rows, grouped_over_seeds, measured, statistic
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.edited_runs import replaying
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table

KEY, QUERY, LOOKUP = "key", "query", "lookup"

ROLES: Mapping[str, str] = {KEY: "align_key", QUERY: "align_query"}
"""The role whose relation heads are clamped onto on each side."""

UNTUNED, TUNED, GOLD, WRONG, MATCHED, RANDOM = "untuned", "tuned", "gold", "wrong order", "matched scores", "random"

METRICS = ("accuracy", "log_prob")

COLUMNS = ("part", "arm", "seed", "prompt", "of", "draw", "side", "key_layer", "query_layer", "layer", "head", "metric")

TUNED_SEEDS = Path(__file__).parents[2] / "docs/results/icatune-fig4"
"""Where the tables of tuned seeds are kept."""

SIDE_OF: Mapping[str, str] = {"align_key": KEY, "align_query_attention": QUERY, "lookup_attention": LOOKUP}
"""By the metric of that table the side on which its best head works, or that it looks up."""

ALIGNS = 0.8
"""The `align_query` from which a head is an aligner."""

LATE = 0.8
"""From which share of the layers on a layer is late."""

EditSets = Sequence[Sequence[Edit]]


@dataclass(frozen=True)
class Prostheses:
    """How much is measured."""

    tuned: str = "toy-llama-ica"
    """The model after tuning, what `load` takes: what it gains is all that can be brought back."""
    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    seeds: tuple[int, ...] = tuple(range(400, 408))
    """Each has prompts of its own."""
    n: int = 2
    """On how many prompts each seed chooses a pair of layers, and on how many others it tests them."""
    key_heads: int = 1
    """On how many of the latter it clamps single heads on the key side, which takes longest."""
    draws: int = 5
    """Sets of random heads."""
    aligners: str | None = None
    """The scale of `icatune/fig4` whose kept table tells where tuned seeds align."""


def with_alignments(prompts: Prompts, task: EveryExample, shift: int) -> Prompts:
    """Returns prompts with the relations that heads are clamped onto: `"gold key"`, `"gold query"` and wrong ones.

    In the wrong order each phrase is aligned with the symbol `shift` places after its own, cyclically.
    """
    relations = dict(prompts.relations)
    for side, role in ROLES.items():
        everywhere = prompts.relations[f"{GOLD} {role}"]
        # Candidates are labelled by their example, keys by their place among the symbols of all examples.
        in_test = everywhere.candidate_value == task.n_examples
        gold = everywhere.select(in_test if side == QUERY else ~in_test)
        wrong = gold.candidate_value * task.x_len + (gold.key_value + shift) % task.x_len
        relations |= {f"{GOLD} {side}": gold, f"{WRONG} {side}": replace(gold, key_value=wrong)}
    return replace(prompts, relations=relations)


def measure_pairs(
    model: Any, prompts: Prompts, key_sides: EditSets, query_sides: EditSets
) -> Float[ndarray, "metric key_side query_side target"]:
    """Returns the `METRICS` of first letters under each edit of the key side with each of the query side.

    The same as `TargetMetrics.measure_edited` of all pairs, but each edit of the key side runs only once.

    Args:
        model: The model.
        prompts: Of one layout.
        key_sides: Sets of edits before the first query.
        query_sides: Sets of edits from the first query on.
    """
    targets = TargetMetrics.of(prompts, METRICS, "first")
    values = np.full((len(METRICS), len(key_sides), len(query_sides), len(targets.token)), np.nan)
    queries, target = targets.query.unique(), torch.arange(len(targets.token))
    start, end = int(queries[0]), int(queries[-1]) + 1
    places = targets.prompt, torch.searchsorted(queries, targets.query)
    context = BatchContext.all_of(prompts)
    later = replace(context, span=slice(start, end))
    changes = {place: changes_of(edits, model, later) for place, edits in enumerate(query_sides) if edits}
    unedited = [place for place in range(len(query_sides)) if place not in changes]
    with replaying(model) as decoder:
        for key_side, edits in enumerate(key_sides):
            run = Replay.run(
                decoder,
                prompts.tokens[:, :end],
                prompts.mask[:, :end],
                queries=queries,
                keep=starts_from([*changes.values()]),
                starts=[start],
                edits=changes_of(edits, model, replace(context, span=slice(0, end))),
            )
            values[:, key_side, unedited] = targets.numbers(run.logits[places], target)[:, None]
            for place, logits in run.replay([*changes.values()], start) if changes else ():
                values[:, key_side, [*changes][place]] = targets.numbers(logits[places], target)
    return values


def restored(
    *, model: str, task: Mapping[str, Any], prompts: int, key_heads: int, draws: int, seed: int, **_: str
) -> pd.DataFrame:
    """Clamps heads of the untuned model onto gold alignment, and controls; the function of a job.

    Args:
        model: What `load` takes.
        task: The task's arguments.
        prompts: How many choose a pair of layers, and how many others test it.
        key_heads: On how many of the latter single heads are clamped on the key side.
        draws: Sets of random heads.
        seed: Of the task, its prompts and what is drawn.
        **_: The hash of the model's weights.

    Returns:
        Both metrics of first letters, by `part`. On the prompts that choose:

        - `grid`: all heads of a layer clamped on each side, or on one side alone (no layer of the other);
        - `chosen`: the layer of each side in the pair with the highest log-probability.

        On the prompts that test, one row a prompt:

        - `pair`: the chosen layers clamped, or `of` other heads or onto other symbols.

        And their mean over prompts, with the chosen layer of the other side on gold:

        - `layers`, `heads`: each layer, or each head alone, clamped on one side; without a layer and a head, none.
    """
    network, generator = loaded(model), np.random.default_rng(seed)
    choosing, testing = drawn(network.tokenizer, task, prompts, seed)
    everywhere = heads_of(network.cfg)
    layers = [[head for head in everywhere if head[0] == layer] for layer in range(network.cfg.n_layers)]

    def clamps(of: str, side: str, sets: Sequence[Sequence[Head]]) -> list[list[Edit]]:
        return [[Clamp(heads, f"{of} {side}")] for heads in sets]

    grid = measure_pairs(network, choosing, *([[], *clamps(GOLD, side, layers)] for side in ROLES)).mean(-1)
    best = np.unravel_index(grid[METRICS.index("log_prob"), 1:, 1:].argmax(), (len(layers), len(layers)))
    places = [np.nan, *range(len(layers))]
    keys = pd.DataFrame(product(places, places), columns=["key_layer", "query_layer"])
    chosen = {side: layers[layer] for side, layer in zip(ROLES, best, strict=True)}
    parts = [
        _rows(grid, keys, part="grid"),
        pd.DataFrame({"side": [*ROLES], "value": [float(layer) for layer in best]}).assign(part="chosen"),
    ]

    scores: Any = score_heads(network, choosing, [*ROLES.values()]).heads().frame
    random = [{side: elsewhere(heads, everywhere, generator) for side, heads in chosen.items()} for _ in range(draws)]
    alike = {side: matched(heads, scores[scores["metric"] == ROLES[side]]) for side, heads in chosen.items()}
    pairs: list[tuple[str, str, Mapping[str, Sequence[Head]]]] = [
        (UNTUNED, GOLD, {}),
        (GOLD, GOLD, chosen),
        (WRONG, WRONG, chosen),
        *((f"{side} side alone", GOLD, {side: heads}) for side, heads in chosen.items()),
        (MATCHED, GOLD, alike),
        *((RANDOM, GOLD, heads) for heads in random),
    ]
    for draw, (name, of, heads) in enumerate(pairs):
        edits = [clamps(of, side, [heads[side]]) if side in heads else [[]] for side in ROLES]
        values = measure_pairs(network, testing, *edits)[:, 0, 0]
        parts.append(by_prompt(values, testing).assign(of=name, draw=draw))

    singles = [[head] for head in everywhere]
    of_layers = pd.DataFrame({"layer": range(len(layers))})
    of_heads = pd.DataFrame([(np.nan, np.nan), *everywhere], columns=["layer", "head"])
    (on_keys,), (on_queries,) = (clamps(GOLD, side, [heads]) for side, heads in chosen.items())

    def on_one_side(side: str, prompts: Prompts, sets: EditSets) -> Float[ndarray, "metric edit_set"]:
        """The mean of each metric under edits of one side, the other on gold in the chosen layer."""
        if side == QUERY:
            return measure_pairs(network, prompts, [on_keys], sets)[:, 0].mean(-1)
        targets = TargetMetrics.of(prompts, METRICS, "first")
        return targets.measure_edited(network, [[*edits, *on_queries] for edits in sets])[0].mean(-1)

    for side, few in ((KEY, testing[:key_heads]), (QUERY, testing)):
        for of in (GOLD, WRONG):
            values = on_one_side(side, testing, clamps(of, side, layers))
            parts.append(_rows(values, of_layers, part="layers", side=side, of=of))
        values = on_one_side(side, few, [[], *clamps(GOLD, side, singles)])
        parts.append(_rows(values, of_heads, part="heads", side=side, of=GOLD))
    return pd.concat(parts)


def after(*, tuned: str, task: Mapping[str, Any], prompts: int, seed: int, **_: str) -> pd.DataFrame:
    """Measures the tuned model on the prompts that test; the function of a job. Arguments and rows as of `restored`."""
    network = loaded(tuned)
    testing = drawn(network.tokenizer, task, prompts, seed)[1]
    return by_prompt(measure_pairs(network, testing, [[]], [[]])[:, 0, 0], testing).assign(of=TUNED)


def drawn(tokenizer: Tokenizer, task: Mapping[str, Any], prompts: int, seed: int) -> tuple[Prompts, Prompts]:
    """Returns the prompts that choose and the prompts that test, with the relations of `with_alignments`."""
    of_seed = EveryExample(**{**task, "task_seed": seed})
    both: Prompts = of_seed.sample(2 * prompts, tokenizer, FRESH + seed, references=False)
    both = with_alignments(both, of_seed, shift=1 + seed % (of_seed.x_len - 1))
    return both[:prompts], both[prompts:]


def matched(heads: Sequence[Head], scores: pd.DataFrame) -> list[Head]:
    """Returns for each head, all of one layer, the head of another layer whose score is nearest; each head once."""
    values = scores.set_index(["layer", "head"])["value"]
    others = values.drop(index=heads[0][0], level="layer")
    nearest = []
    for head in heads:
        nearest.append((others - values.loc[head]).abs().idxmin())
        others = others.drop(index=[nearest[-1]])
    return [(int(layer), int(head)) for layer, head in nearest]


def elsewhere(heads: Sequence[Head], among: Sequence[Head], generator: np.random.Generator) -> list[Head]:
    """Returns as many random heads of other layers than that of `heads`."""
    others = [head for head in among if head[0] != heads[0][0]]
    return [others[place] for place in generator.choice(len(others), len(heads), replace=False)]


def by_prompt(values: Float[ndarray, "metric target"], prompts: Prompts) -> pd.DataFrame:
    """Returns the mean of each metric over the first letters of each prompt, as rows with `part="pair"`."""
    prompt = TargetMetrics.of(prompts, METRICS, "first").prompt.numpy()
    of_targets: Any = pd.DataFrame(values.T, columns=[*METRICS])
    mean = of_targets.groupby(prompt).mean().rename_axis("prompt")
    return mean.reset_index().melt("prompt", var_name="metric").assign(part="pair")


def _rows(values: Float[ndarray, "metric ..."], keys: pd.DataFrame, **about: Any) -> pd.DataFrame:
    """Each metric at each row of `keys`."""
    return pd.concat(
        [keys.assign(metric=name, value=of.ravel(), **about) for name, of in zip(METRICS, values, strict=True)]
    )


def aligners(scale: str) -> pd.DataFrame:
    """Returns the layers in which tuned seeds align and look up, by the kept table of `icatune/fig4` at a scale.

    They are those of the head with the highest `align_key`, and of those that give the right tokens most of their
    attention at the positions that predict. Seeds in which no head aligns queries are left out; until one of six more
    seeds of SmolLM2 came out so (.79), all seeds of such a recipe were.
    """
    ends: Any = Table.load(TUNED_SEEDS / scale).where(part="after", of="best head", condition="in distribution").frame
    best = ends[ends["metric"] == "align_query"].set_index(["arm", "seed"])["value"]
    is_aligned = pd.MultiIndex.from_frame(ends[["arm", "seed"]]).isin(best.index[best >= ALIGNS])
    ends = ends[is_aligned & ends["metric"].isin(SIDE_OF).to_numpy()]
    return ends.assign(part="aligner", side=ends["metric"].map(SIDE_OF), of="best head")[
        ["part", "arm", "seed", "of", "side", "layer", "metric", "value"]
    ]


def _jobs(config: Prostheses, inputs: Inputs) -> list[Measurement]:
    about = {"task": dict(config.task), "prompts": config.n}
    untuned = {**inputs.model, **about, "key_heads": config.key_heads, "draws": config.draws}
    weights = identity_of(model_identity(loaded(config.tuned)))
    of_tuned = {"tuned": config.tuned, "weights": weights, **about}
    return [
        Measurement(function, given, seed)
        for function, given in ((restored, untuned), (after, of_tuned))
        for seed in config.seeds
    ]


def _summarize(config: Prostheses, rows: Rows) -> pd.DataFrame:
    kept = [] if config.aligners is None else [aligners(config.aligners)]
    return as_rows([rows["restored"], rows["after"], *kept], COLUMNS).assign(n=1)


# Numbers of each seed of prompts


def _by_seed(table: Table) -> Any:
    frame: Any = table.frame
    return frame.groupby("seed")["value"].mean()


_ACCURACY = statistic(lambda table: _by_seed(table).to_numpy(float)).at(metric="accuracy")
_PAIR = _ACCURACY.at(part="pair")
_UNTUNED = _PAIR.at(of=UNTUNED)
_WHOLE = _PAIR.at(of=TUNED) - _UNTUNED


def _other_alone(side: str) -> Statistic:
    """Accuracy with the chosen layer of the other side alone on gold."""
    return _PAIR.at(of=f"{QUERY if side == KEY else KEY} side alone")


def share(accuracy: Statistic, without: Statistic = _UNTUNED) -> Statistic:
    """Returns by how much accuracy rises in each seed, as a share of what tuning gains on average over seeds."""
    return _of_tuning(accuracy - without)


def _of_tuning(rise: Statistic) -> Statistic:
    return rise.map(lambda rises, whole: rises / whole.mean(), _WHOLE)


def in_layers(side: str, first: float, last: float) -> Statistic:
    """Returns the accuracy with one side clamped in a layer, the mean over a part of the layers (from 0 to 1)."""

    def mean(table: Table) -> Float[ndarray, " seed"]:
        frame: Any = table.frame
        place = (frame["layer"] + 0.5) / (frame["layer"].max() + 1)
        inside = frame["value"].where((first <= place) & (place < last))
        return inside.groupby(frame["seed"]).mean().to_numpy(float)

    return statistic(mean).at(part="layers", side=side, of=GOLD, metric="accuracy")


def brought_back(side: str, first: float, last: float) -> Statistic:
    """Returns what the layers from `first` to `last`, from 0 to 1, bring back beyond the other side alone, on average.

    As a share of what tuning gains.
    """
    return share(in_layers(side, first, last), _other_alone(side))


def last_layer(table: Table, side: str) -> Float[ndarray, " seed"]:
    """Returns the last layer in which one side brings back half of what it does in the best layer, in each seed.

    NaN where no layer brings anything back.
    """
    layers: Any = table.where(part="layers", side=side, of=GOLD, metric="accuracy").frame
    wide = layers.pivot(index="layer", columns="seed", values="value").sort_index()
    rise = wide - _other_alone(side)(table)
    helps = (rise > 0) & (rise >= rise.max() / 2)
    return helps.mul(helps.index, axis=0).max().where(helps.any()).to_numpy(float)


def rank_of_layers(side: str, of: str) -> Statistic:
    """Returns how high the layers of a tuned seed's heads rank by what they bring back on one side.

    The share of the other layers that bring back less (log-probability, mean over seeds of prompts), 0.5 by chance.
    """

    def ranks(table: Table) -> Float[ndarray, " tuned"]:
        layers: Any = table.where(part="layers", side=side, of=GOLD, metric="log_prob").frame
        gains = layers.groupby("layer")["value"].mean()
        heads: Any = table.where(part="aligner", side=of).frame
        return np.array([(gains < gains.loc[layer]).sum() / (len(gains) - 1) for layer in heads["layer"]])

    return statistic(ranks)


def of_single_head(side: str, quantile: float) -> Statistic:
    """Returns what a single head brings back beyond the other side alone, as a share of what tuning gains.

    For each seed the head is chosen by the other seeds.

    Args:
        side: Where it is clamped.
        quantile: Which head of the ranking by accuracy: 1 for the best, 0.5 for the middle.
    """

    def gain(table: Table) -> Float[ndarray, " seed"]:
        heads: Any = table.where(part="heads", side=side, of=GOLD, metric="accuracy").frame
        intact = heads["layer"].isna()
        wide = heads[~intact].pivot(index=["layer", "head"], columns="seed", values="value")
        rise = wide - heads[intact].set_index("seed")["value"]
        ranked = {seed: rise.drop(columns=seed).mean(axis=1).sort_values(kind="stable").index for seed in rise}
        return np.array([rise.loc[heads[int(quantile * (len(heads) - 1))], seed] for seed, heads in ranked.items()])

    return _of_tuning(statistic(gain))


def overview(table: Table) -> pd.DataFrame:
    """Returns what was brought back by what was clamped, as shares of what tuning gains with their intervals."""
    clamped = {
        "both sides": GOLD,
        **{f"{side} side alone": f"{side} side alone" for side in ROLES},
        "both sides, wrong order": WRONG,
        "other heads with the same scores": MATCHED,
        "random other heads": RANDOM,
    }
    accuracy = {"untuned": _UNTUNED, "tuned": _PAIR.at(of=TUNED)}
    shares = {name: share(_PAIR.at(of=of)) for name, of in clamped.items()}
    numbers = {f"accuracy, {name}": of for name, of in accuracy.items()} | shares
    return pd.DataFrame({name: [str(measured(of(table)))] for name, of in numbers.items()}).T


# What is claimed


def _check(table: Table) -> list[Claim]:
    both, wrong = (share(_PAIR.at(of=of)) for of in (GOLD, WRONG))
    claims = [
        Claim(
            "Alignment given in one layer on each side brings back first letters (share of what tuning gains; the "
            "layers chosen on other prompts)"
        ).at_least(0.5, both, wrong, "the same heads on a wrong order"),
        *(
            Claim(f"It brings back more than {others} (share, difference)").at_least(
                0.25, share(_PAIR.at(of=GOLD), other), share(_PAIR.at(of=WRONG), other), "on a wrong order"
            )
            for other, others in (
                (_PAIR.at(of=MATCHED), "heads of other layers with the same scores"),
                (_PAIR.at(of=RANDOM), "as many random heads of other layers"),
            )
        ),
    ]
    claims += [
        Claim(f"Given on the {side} side alone, it brings back little (share)").at_most(
            0.2, share(_PAIR.at(of=f"{side} side alone")), both, "on both sides"
        )
        for side in ROLES
    ]
    for side in ROLES:
        alone = _other_alone(side)
        early, middle, high = (in_layers(side, third / 3, (third + 1) / 3) for third in range(3))
        claims += [
            Claim(
                f"Too late: on the {side} side, given in the last fifth of the layers, it brings back nothing (share "
                "beyond that of the other side alone, mean over layers)"
            ).at_most(0.1, share(in_layers(side, LATE, 1), alone), share(_PAIR.at(of=GOLD), alone), "the chosen layer"),
            Claim(
                f"On the {side} side the middle third of the layers brings back more than the first (share, "
                "difference of means)"
            ).at_least(0.1, share(middle, early), share(high, early), "the last third"),
        ]
    claims += [
        Claim(
            f"A single head on the {side} side brings back a quarter (share beyond that of the other side alone; the "
            "head that is best in the other seeds of prompts)"
        ).at_least(0.25, of_single_head(side, 1.0), of_single_head(side, 0.5), "the head in the middle of the ranking")
        for side in ROLES
    ]
    if "aligner" in set(table.frame["part"]):
        claims += [
            Claim(
                f"Tuned seeds align where it helps: the layer of their best {ROLES[side]} head ranks high by what it "
                "brings back (share of the other layers that bring back less)"
            ).at_least(
                0.75, rank_of_layers(side, side), rank_of_layers(side, LOOKUP), "the layers of their lookup heads"
            )
            for side in ROLES
        ]
    return claims


def _draw(table: Table) -> Mapping[str, go.Figure]:
    untuned, whole = (float(np.mean(of(table))) for of in (_UNTUNED, _WHOLE))

    def shares(part: str) -> Any:
        frame: Any = table.where(part=part, metric="accuracy").frame
        return frame.assign(value=(frame["value"] - untuned) / whole)

    value = "share of the gain"
    grid = shares("grid").groupby(["key_layer", "query_layer"])["value"].mean().unstack("query_layer")
    layers = {
        f"{side} side (the other in its chosen layer)": grouped_over_seeds(of_side, ["of", "layer"])
        for side, of_side in shares("layers").groupby("side")
    }
    heads = {
        f"{side} side": of_side.groupby(["layer", "head"])["value"].mean().unstack("head")
        for side, of_side in shares("heads").groupby("side")
    }
    pairs = shares("pair").groupby(["of", "seed"], sort=False, as_index=False)["value"].mean()
    grids = {"": grid}, heads
    as_panels = [
        {name: of.rename(index=int, columns=int).clip(0, 1) for name, of in panels.items()} for panels in grids
    ]
    return {
        "both sides, by layer": plots.accuracy_grids(
            as_panels[0], x="layer on the query side", y="layer on the key side", value=value
        ),
        "one side, by layer": plots.curves(layers, "layer", "of", "layer", value=value),
        "the chosen layers and controls": seed_dots(pairs.assign(low=np.nan, high=np.nan), "of", value),
        "one side, by head": plots.accuracy_grids(as_panels[1], x="head", y="layer", value=value),
    }


PROSTHESIS = Experiment(
    "icatune/prosthesis",
    "At which depth does alignment help the untuned model, if it is given?",
    "beyond Agarwal and Sarawagi (2025)",
    Study(
        "icatune/prosthesis",
        {
            "smoke": Prostheses(task=SMOKE_TASK, seeds=(0, 1), draws=1),
            "cpu": Prostheses(n=8, key_heads=8, aligners="cpu"),
            "paper": Prostheses(),
            "smollm2": Prostheses("smollm2-ica", SMOLLM2_TASK, aligners="smollm2"),
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
