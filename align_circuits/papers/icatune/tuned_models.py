"""Models tuned once, and what several experiments measure of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

from align_circuits.heads.score import score_heads
from align_circuits.hooks.head_names import Head
from align_circuits.jobs.code_versions import code_version
from align_circuits.models.loading import load
from align_circuits.papers.lab import Inputs, Measurement, Rows, Study, training_folder
from align_circuits.papers.statistics import grouped_over_seeds
from align_circuits.run.evaluation import evaluate
from align_circuits.tables.emergence_times import SUSTAINED, steepest_share, sustained_step
from align_circuits.tables.emergence_times import best_head as best_of_last
from align_circuits.tables.tables import VALUES, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.probe import PROBED
from align_circuits.training.tuning import PRESETS, TuneConfig, TuneRun, tune

TASK: Mapping[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 10}
"""What the bundled model is tuned on."""

TOY: Mapping[str, Any] = PRESETS["small"]
"""How the bundled model is tuned: at most 5 minutes on two cores."""

PAPER: Mapping[str, Any] = {"precision": "bf16", "checkpointing": True, "probe_prompts": 10}
"""How the paper tunes Llama 3 8B: `TuneConfig`'s defaults, in memory that one GPU has; probes of a readable size."""

SMOLLM2_TASK: Mapping[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 15}
"""What SmolLM2 is tuned on, as Llama 3 8B: prompts of 272 tokens."""

SMOLLM2: Mapping[str, Any] = {
    "loss_on": "all",
    "steps": 400,
    "batch": 2,
    "lr": 3e-3,
    "warmup": 10,
    "r": 16,
    "alpha": 64.0,
    "dropout": 0.0,
    "projections": ("q", "k", "v", "o"),
    "precision": "bf16",
    "probe_every": 20,
    "probe_prompts": 10,
}
"""A recipe for SmolLM2 that is faster than the paper's: every example teaches, and steps are larger. It was chosen by
short runs of other seeds (`docs/notes/smollm2.md`)."""

ONE_LETTER_TASK: Mapping[str, Any] = {**SMOLLM2_TASK, "phrase_len": 1}
"""Phrases of one letter: the aligned symbol stands at one distance in all prompts, which a head can attend to instead
(`icatune/lengths`)."""

ONE_LETTER: Mapping[str, Any] = {**SMOLLM2, "steps": 240, "probe_every": 10}
"""The recipe for phrases of one letter, which need fewer steps."""

SMOLLM2_PAPER: Mapping[str, Any] = {"precision": "bf16", "probe_every": 50, "probe_prompts": 10}
"""The paper's recipe for SmolLM2: `TuneConfig`'s defaults, with fewer probes."""

SMOKE_TASK: Mapping[str, Any] = {"x_len": 3, "phrase_len": 2, "n_examples": 2}
SMOKE: Mapping[str, Any] = {
    "loss_on": "all",
    "steps": 3,
    "batch": 2,
    "lr": 1e-2,
    "r": 2,
    "alpha": 2.0,
    "probe_every": 1,
    "probe_prompts": 3,
}
"""What takes a second and teaches nothing."""

FRESH_SEEDS = (10, 11, 12, 13, 14, 15)
"""Of which nothing was developed: that was done on seeds from 0 on."""

SMALL = 20_000_000
"""Parameters below which a model is tuned in float32, whatever it is stored as."""

FRESH = 3 * 10**9
"""Added to the seed for prompts that are evaluated before and after, on which no model is tuned or probed."""

ATTENDED = ("align_query_attention", "lookup_attention")
"""The share of all its attention that a head gives to the right keys."""

CONDITIONS = ("in distribution", "OOD", "labels corrupted")
"""Test inputs of the grammar; any permutation of the symbols; examples written by other automata."""

CLAIMED = {"before": ("in distribution",), "after": ("in distribution", "OOD")}
"""The conditions under which claims are about a single seed, the best or the worst, so that they take more prompts."""

OF_TUNING = ("config", "runs")
"""The arguments of `tuned` that a model before tuning does not depend on."""


@dataclass(frozen=True)
class Arm:
    """One way to tune, repeated over seeds; each seed has a task of its own."""

    name: str
    """What it is called in the table; not a number."""
    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    """Arguments of `Seq2SeqTask`, without `task_seed`."""
    config: Mapping[str, Any] = field(default_factory=lambda: TOY)
    """Arguments of `TuneConfig`."""
    seeds: tuple[int, ...] = FRESH_SEEDS


ICA = Arm("ICA-Tune")
"""The tuning of the bundled model that most figures are about."""

PAPER_ICA = Arm("ICA-Tune", {"x_len": 5, "phrase_len": 2, "n_examples": 15}, {**PAPER, "steps": 200}, (0, 1, 2, 3))
SMOKE_ICA = Arm("ICA-Tune", SMOKE_TASK, SMOKE, (0, 1))

SMOLLM2_ICA = Arm("larger steps", SMOLLM2_TASK, SMOLLM2, (1, 2, 3))
"""The tuning of SmolLM2 that most figures are about. The recipe was tried on seed 0, which is not among these."""

SMOLLM2_ONE_LETTER = Arm("phrases of one letter", ONE_LETTER_TASK, ONE_LETTER, tuple(range(9)))
"""Seeds 3 to 5 were registered after 0 to 2 were seen, and 6 to 8 after these, since claims were undecided."""

SMOLLM2_BY_PAPER = Arm("paper's recipe", SMOLLM2_TASK, SMOLLM2_PAPER, (1, 2, 3))

SMOLLM2_MORE = Arm("six more seeds", SMOLLM2_TASK, {**SMOLLM2, "probe_every": 5}, (4, 5, 6, 7, 8, 9))
"""As `SMOLLM2_ICA`, probed every five steps; registered after the three arms before it were seen."""

SMOLLM2_STILL_MORE = replace(SMOLLM2_MORE, name="another six seeds", seeds=(10, 11, 12, 13, 14, 15))
"""Registered after nine seeds were seen, by which it was undecided whether alignment emerges before lookup."""

SMOLLM2_BY_PAPER_MORE = replace(SMOLLM2_BY_PAPER, name="paper's recipe, three more seeds", seeds=(4, 5, 6))
"""Registered after all arms above were seen, since a verdict takes more than three seeds."""

SAME_RECIPE = {
    SMOLLM2_MORE.name: SMOLLM2_ICA.name,
    SMOLLM2_STILL_MORE.name: SMOLLM2_ICA.name,
    SMOLLM2_BY_PAPER_MORE.name: SMOLLM2_BY_PAPER.name,
}
"""Arms whose seeds are judged together with those of another, from which they differ in probes alone, if at all."""

SMOLLM2_ARMS = (
    SMOLLM2_ICA,
    SMOLLM2_ONE_LETTER,
    SMOLLM2_BY_PAPER,
    SMOLLM2_MORE,
    SMOLLM2_STILL_MORE,
    SMOLLM2_BY_PAPER_MORE,
)


@dataclass(frozen=True)
class Tunings:
    """What most figures of tuned models rest on."""

    arms: tuple[Arm, ...]
    n: int = 64
    """Fresh prompts for what is measured before and after."""
    n_claimed: int | None = None
    """As many under the conditions of `CLAIMED`, the first `n` among them; `n` by default."""
    every: int = 2
    """The table keeps one probe in so many."""


def tuned_study(
    name: str,
    summarize: Callable[[Any, Rows], pd.DataFrame],
    measured: Sequence[Callable[[Sequence[Arm], Inputs, Any], list[Measurement]]] = (),
    arms: Callable[[Any, Inputs], Sequence[Arm]] = lambda config, _: config.arms,
    **scales: Any,
) -> Study:
    """Returns the study of a model that is tuned, with a config such as `Tunings` for each of the `scales`.

    `measured` make its jobs, such as `at_ends`; `summarize` is given their rows and those of `course`.
    """

    def jobs(config: Any, inputs: Inputs) -> list[Measurement]:
        of = arms(config, inputs)
        return [job for make in measured for job in make(of, inputs, config)]

    def train(config: Any, inputs: Inputs) -> list[Measurement]:
        return of_tuned(course, arms(config, inputs), inputs)

    return Study(name, cast(Any, scales), jobs, summarize, train, models="one", load=loaded)


def tuned(
    *, model: str, weights: str, task: Mapping[str, Any], config: Mapping[str, Any], runs: str, seed: int
) -> TuneRun:
    """Tunes a model, or reads the run that another job left.

    Args:
        model: What `load` takes.
        weights: The hash of its weights.
        task: The task's arguments.
        config: The tuning's.
        runs: `Inputs.trained`; a killed run goes on from its folder there.
        seed: Of the tuning, and of what the task's prompts share.
    """
    version = code_version("align_circuits.training.tuning:tune")
    out = training_folder(runs, "tuned", weights, task, config, seed, version)
    of_seed = Seq2SeqTask(**task, task_seed=seed)
    return tune(loaded(model), of_seed, TuneConfig(**config), seed=seed, out=out, progress=False)


def before_and_after(**run: Any) -> tuple[dict[str, Any], Seq2SeqTask, int]:
    """Returns the model before and after tuning, its task, and the seed of fresh prompts. Arguments as for `tuned`."""
    models = {"before": loaded(run["model"]), "after": tuned(**run).model}
    return models, Seq2SeqTask(**run["task"], task_seed=run["seed"]), FRESH + run["seed"]


@lru_cache(maxsize=1)
def loaded(model: str) -> Any:
    """Returns a model as it is tuned, a small one in float32: `Study.load`."""
    stored = load(model)
    return load(model, dtype=torch.float32) if sum(each.numel() for each in stored.parameters()) < SMALL else stored


def best_head(scores: Table, metric: str) -> Head:
    """Returns the head with the highest score, of what `score_heads` returned."""
    best = scores.top(metric, 1).frame.iloc[0]
    return int(best["layer"]), int(best["head"])


def of_tuned(function: Callable[..., Any], arms: Sequence[Arm], inputs: Inputs, **more: Any) -> list[Measurement]:
    """Returns a measurement of each arm and seed by a function of the arguments of `tuned`, and of `more`."""
    return [
        Measurement(
            function,
            {**inputs.model, "task": dict(arm.task), "config": dict(arm.config), "runs": inputs.trained, **more},
            seed,
            {"arm": arm.name},
        )
        for arm in arms
        for seed in arm.seeds
    ]


def at_ends(arms: Sequence[Arm], inputs: Inputs, config: Any) -> list[Measurement]:
    """Returns the jobs of `ends` before and after each tuning, for a config with `n` and `n_claimed`.

    Before tuning, arms on the same task share one.
    """
    found = []
    for part, conditions in CLAIMED.items():
        n = {**dict.fromkeys(CONDITIONS, config.n), **dict.fromkeys(conditions, config.n_claimed or config.n)}
        for each in of_tuned(ends, arms, inputs, part=part, n=n):
            given = {name: value for name, value in each.config.items() if part == "after" or name not in OF_TUNING}
            found.append(replace(each, config=given, keys={**each.keys, "part": part}))
    return found


def course(**run: Any) -> pd.DataFrame:
    """Returns all probes of a tuning; the function of a job. Arguments as for `tuned`."""
    return tuned(**run).table.frame


def ends(*, part: str, n: Mapping[str, int], **run: Any) -> pd.DataFrame:
    """Measures a model before or after tuning on fresh prompts under each of the `CONDITIONS`; the function of a job.

    Args:
        part: `"before"` or `"after"`.
        n: How many prompts under each.
        **run: As for `tuned`; before, without what tells how it is tuned.
    """
    model = tuned(**run).model if part == "after" else loaded(run["model"])
    task, seed = Seq2SeqTask(**run["task"], task_seed=run["seed"]), FRESH + run["seed"]
    frames = []
    for condition in CONDITIONS:
        changed = replace(task, ood=condition == "OOD")
        drawn = changed.sample(n[condition], model.tokenizer, seed)
        if condition == "labels corrupted":
            drawn = changed.corrupt(drawn, "labels", seed=seed)
        right = evaluate(model, drawn).where(metric="accuracy", offset=None).frame
        heads = score_heads(model, drawn, [*PROBED, *ATTENDED]).heads().frame.assign(kind="all", predictor="model")
        frames += [frame.assign(condition=condition) for frame in (right, heads)]
    columns = ["condition", "predictor", "metric", "kind", "layer", "head", *VALUES]
    return pd.concat(frames, ignore_index=True).loc[:, columns]


def courses(frame: Any, every: int = 1) -> pd.DataFrame:
    """Returns how accuracy, and each layer's best head and mean attention, went on average over seeds.

    Args:
        frame: The rows of `course`.
        every: Keep one probe in so many, and the last.

    Returns:
        Rows with `part="course"`; `of` is `"model"`, or in distribution `"best head"` or `"layer mean"`.
    """
    steps = sorted(frame["step"].unique())
    frame = frame[frame["step"].isin([*steps[::every], steps[-1]]) & frame["offset"].isna()]
    frame = frame.assign(condition=np.where(frame["ood"], "OOD", "in distribution"))
    by = ["arm", "condition", "step", "metric", "kind"]
    heads, means = (frame[(frame["level"] == level) & ~frame["ood"]] for level in ("head", "layer"))
    best = heads.loc[heads[heads["value"].notna()].groupby([*by, "layer", "seed"])["value"].idxmax()]
    parts = {
        "model": (frame[frame["metric"].isin(["accuracy", "history", "oracle"])], by),
        "best head": (best, [*by, "layer"]),
        "layer mean": (means, [*by, "layer"]),
    }
    grouped = [grouped_over_seeds(rows, keys).assign(of=of) for of, (rows, keys) in parts.items() if len(rows)]
    return pd.concat(grouped, ignore_index=True).assign(part="course")


def ended(frame: Any) -> pd.DataFrame:
    """Returns each seed's accuracy and best heads before and after, with `part="before"` and `part="after"`.

    Args:
        frame: The rows of `ends`. The `layer` of a metric of heads is the best head's.
    """
    right, heads = frame[frame["layer"].isna()], frame[frame["layer"].notna() & frame["value"].notna()]
    right = right.assign(metric=right["predictor"].where(right["predictor"] != "model", "accuracy"), of="model")
    best = heads.loc[heads.groupby(["arm", "seed", "part", "condition", "metric"])["value"].idxmax()]
    return pd.concat([right, best.assign(of="best head")], ignore_index=True)


def emerged(frame: Any) -> pd.DataFrame:
    """Returns when accuracy, alignment and lookup emerged in each seed, and how abruptly.

    Args:
        frame: The rows of `course`.

    Returns:
        With `part="emergence"`, `value` is the step, NaN where the metric did not emerge (`emergence`); with
        `part="abruptness"` the share of its rise that comes within a tenth of the steps (`steepest_share`). Followed
        are first tokens, and the best head of the last probes, in distribution.
    """
    rows = []
    for (arm, seed), run in frame.groupby(["arm", "seed"], sort=False):
        within = 0.1 * float(run["step"].max())  # of its own steps: another arm may have more
        own: Any = run[~run["ood"] & run["offset"].isna()]
        for metric, kind in (("accuracy", "first"), *((metric, "all") for metric in PROBED)):
            followed = own[(own["metric"] == metric) & (own["kind"] == kind)]
            if not len(followed):
                continue
            if metric in PROBED:
                followed = best_of_last(followed[followed["level"] == "head"].drop(columns=["arm", "seed"]), SUSTAINED)
            course = followed.sort_values("step")
            steps, values = course["step"].to_numpy(float), course["value"].to_numpy(float)
            keys = {"arm": arm, "seed": seed, "metric": metric, "kind": kind}
            rows.append({**keys, "part": "emergence", "of": "step", "value": sustained_step(steps, values)})
            rows.append({**keys, "part": "abruptness", "of": "share", "value": steepest_share(steps, values, within)})
    return pd.DataFrame(rows).assign(condition="in distribution", n=1)
