"""Models tuned once, and what several experiments measure of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.heads.score import score_heads
from align_circuits.hooks.heads import Head, describe
from align_circuits.jobs import Job, code_version, run_jobs
from align_circuits.models.loading import load
from align_circuits.models.protocol import model_provenance
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.run.evaluation import ALL_OFFSETS, evaluate
from align_circuits.run.forward_pass import forward
from align_circuits.tables.emergence import emergence
from align_circuits.tables.tables import VALUES, Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.probe import WATCHED
from align_circuits.training.tuning import TuneConfig, TuneRun, tune

TASK: Mapping[str, Any] = {"x_len": 5, "phrase_len": 2, "n_examples": 10}
"""What the bundled model is tuned on."""

TOY: Mapping[str, Any] = {
    "loss_on": "all",
    "steps": 200,
    "batch": 8,
    "lr": 3e-3,
    "r": 16,
    "alpha": 64.0,
    "dropout": 0.0,
    "projections": ("q", "k", "v", "o"),
    "probe_every": 5,
    "probe_prompts": 10,
    "checkpoint_every": 20,
}
"""How the bundled model is tuned: at most 5 minutes on two cores."""

PAPER: Mapping[str, Any] = {"precision": "bf16", "checkpointing": True, "probe_prompts": 10}
"""How the paper tunes Llama 3 8B: `TuneConfig`'s defaults, in memory that one GPU has; probes of a readable size."""

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

SMALL = 20_000_000
"""Parameters below which a model is tuned in float32, whatever it is stored as."""

FRESH = 3 * 10**9
"""Added to the seed for prompts that are evaluated before and after, which no tuning and no probe has met."""

ATTENDED = ("align_query_attention", "lookup_attention")
"""How much of all its attention a head gives to gold."""

CONDITIONS = ("in distribution", "OOD", "labels corrupted")
"""Test inputs of the grammar; any permutation of the symbols; examples written by other automata."""


@dataclass(frozen=True)
class Arm:
    """One way to tune, repeated over seeds; each seed has a task of its own."""

    name: str
    """What it is called in the table; not a number."""
    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    """Arguments of `Seq2SeqTask`, without `task_seed`."""
    config: Mapping[str, Any] = field(default_factory=lambda: TOY)
    """Arguments of `TuneConfig`."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def tuned(
    *, model: str, weights: str, task: Mapping[str, Any], config: Mapping[str, Any], runs: str, seed: int
) -> TuneRun:
    """Tunes a model, or reads the run that another experiment left in `runs`.

    Args:
        model: What `load` takes.
        weights: The hash of its weights.
        task: The task's arguments.
        config: The tuning's.
        runs: The folder of all runs; each has its own below it, which a killed run goes on from.
        seed: Of the tuning, and of what the task's prompts share.
    """
    identity = [weights, dict(task), dict(config), seed, code_version("align_circuits.training.tuning:tune")]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    return tune(
        loaded(model), task_of(task, seed), TuneConfig(**plain), seed=seed, out=Path(runs) / digest, progress=False
    )


def task_of(arguments: Mapping[str, Any], seed: int) -> Seq2SeqTask:
    """Returns the task of a seed."""
    return Seq2SeqTask(**arguments, task_seed=seed)


def course(**run: Any) -> pd.DataFrame:
    """Returns all probes of a tuning; the function of a cell. Arguments as for `tuned`."""
    return tuned(**run).table.frame


def ends(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Measures a model before and after tuning on fresh prompts; the function of a cell.

    Args:
        prompts: How many under each of the `CONDITIONS`.
        **run: As for `tuned`.
    """
    after, frames = tuned(**run).model, []
    task, seed = task_of(run["task"], run["seed"]), FRESH + run["seed"]
    for condition in CONDITIONS:
        asked = replace(task, ood=condition == "OOD")
        drawn = asked.sample(prompts, after.tokenizer, seed)
        if condition == "labels corrupted":
            drawn = asked.corrupt(drawn, "labels", seed=seed)
        for part, model in (("before", loaded(run["model"])), ("after", after)):
            right: Any = evaluate(model, drawn).where(metric="accuracy", offset=ALL_OFFSETS).frame
            heads = score_heads(model, drawn, [*WATCHED, *ATTENDED]).heads().frame.assign(kind="all", predictor="model")
            whole = right.assign(level="model", layer=-1, head=-1)
            frames += [frame.assign(part=part, condition=condition) for frame in (whole, heads)]
    return pd.concat(frames, ignore_index=True).drop(columns="offset")


def attention(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Returns the mean attention of the best aligner and lookup head, before and after; the function of a cell.

    `align`: from the position that predicts each letter of the test output to each symbol of the test input. `lookup`:
    from there to each letter of the examples, all examples together, their phrases listed in the order in which the
    test example translates their symbols, so that the gold lies on the diagonal. `score` says how much of a head's
    attention is on gold, at first letters; the best head has the most.

    Args:
        prompts: How many the attention is averaged over.
        **run: As for `tuned`.
    """
    after = tuned(**run).model
    drawn = task_of(run["task"], run["seed"]).sample(prompts, after.tokenizer, FRESH + run["seed"])
    asked = {"align": "align_query_attention", "lookup": "lookup_attention"}
    best = score_heads(after, drawn, list(asked.values()))
    heads: dict[str, Head] = {}
    for what, metric in asked.items():
        layer, head = best.top(metric, 1).frame[["layer", "head"]].iloc[0]
        heads[what] = int(layer), int(head)
    frames = []
    for part, model in (("before", loaded(run["model"])), ("after", after)):
        scores = score_heads(model, drawn, list(asked.values()))
        for what, head in heads.items():
            here = scores.where(metric=asked[what], layer=head[0], head=head[1]).frame
            about = {"part": part, "what": what, "of": describe([head])}
            frames.append(here.assign(**about, metric="score", query=-1, key=-1).drop(columns=["layer", "head"]))
            frames.append(_mean_attention(model, drawn, head, what).assign(**about, metric="attention"))
    return pd.concat(frames, ignore_index=True)


def _mean_attention(model: Any, prompts: Prompts, head: Head, what: str) -> pd.DataFrame:
    """The mean over prompts of a head's attention, by query and key as `attention` lists them."""
    n, places = len(prompts), _keys(prompts, what)
    queries = prompts.column("query_pos").view(n, -1)[0]
    rows = torch.zeros(n * len(queries), prompts.mask.shape[1])

    def keep(at: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        if layer == head[0]:
            rows[at] = pattern[:, head[1]].float().cpu()

    prompt = torch.arange(n).repeat_interleave(len(queries))
    forward(model, prompts, prompt=prompt, query=queries.repeat(n), on_pattern=keep)
    wide = places.flatten(1)[:, None].expand(-1, len(queries), -1)
    found = rows.view(n, len(queries), -1).gather(2, wide).view(n, len(queries), *places.shape[1:]).sum(3)
    found = found.flatten(1).T.double().numpy()
    keys = pd.MultiIndex.from_product([range(len(queries)), range(places.shape[1])], names=["query", "key"])
    return Table.from_prompts(keys.to_frame(index=False), found, np.ones_like(found), Provenance("attention")).frame


def _keys(prompts: Prompts, what: str) -> Int[Tensor, "prompt key place"]:
    """Where each symbol of the test input stands, or each letter of its translation, in every example."""
    role, example, last = prompts.roles[0], prompts.example[0], int(prompts.example.max())
    if what == "align":
        return ((role == Role.INPUT) & (example == last)).nonzero().expand(len(prompts), -1, 1)
    letters = ((role == Role.OUTPUT) & (example < last)).nonzero()[:, 0]
    symbol = prompts.latent["order"][:, :, prompts.task["aligned"]]
    same = (symbol[:, -1, None, :, None] == symbol[:, :-1, None]).int().argmax(3)  # [prompt example symbol]
    places = letters.view(last, symbol.shape[2], -1)[torch.arange(last)[:, None], same]
    return places.flatten(2).transpose(1, 2)


def measure_tuned(
    function: str, model: str, arms: Sequence[Arm], *, jobs: int, folder: Path, module: str = __name__, **more: Any
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Runs a cell on every arm and seed, tuning what has not been tuned yet.

    Args:
        function: Of `module`; it takes the arguments of `tuned` and `more`, and returns rows.
        model: What `load` takes.
        arms: What is tuned how.
        jobs: Local processes.
        folder: Of cells and tuned models.
        module: This one by default.
        **more: Further arguments of the function.

    Returns:
        The cells' rows with the columns `arm` and `seed`, and the model's provenance.

    Raises:
        ValueError: The model cannot be loaded, or a cell failed; what is finished stays.
    """
    about = model_provenance(loaded(model))
    plain = [(arm, json.loads(json.dumps({"task": dict(arm.task), "config": dict(arm.config)}))) for arm in arms]
    common = {"model": model, "weights": about["weights"], "runs": str(folder / "tuned"), **more}
    cells = [Job(f"{module}:{function}", common | asked, seed) for arm, asked in plain for seed in arm.seeds]
    found = run_jobs(cells, folder / "cells", jobs=jobs).whole()
    names = {json.dumps(asked, sort_keys=True): arm.name for arm, asked in plain}
    asked = zip(found["task"], found["config"], strict=True)
    arm = [names[json.dumps({"task": task, "config": config}, sort_keys=True)] for task, config in asked]
    return found.drop(columns=[*common, "task", "config"]).assign(arm=arm), about


def grouped_over_seeds(frame: Any, by: Sequence[str]) -> pd.DataFrame:
    """Returns the mean over seeds of each group of rows, with 95% bootstrap intervals over seeds.

    A single seed keeps its interval over prompts.

    Args:
        frame: One row a group and seed.
        by: The columns that tell groups apart.
    """
    if frame["seed"].nunique() == 1:
        return frame[[*by, *VALUES]].reset_index(drop=True)
    wide = frame.pivot(index=list(by), columns="seed", values="value")
    values = wide.to_numpy(dtype=float)
    table = Table.from_prompts(
        wide.index.to_frame(index=False), values, (~np.isnan(values)).astype(float), Provenance("mean over seeds")
    )
    return table.frame


def courses(frame: Any, every: int = 1) -> pd.DataFrame:
    """Returns how accuracy, and each layer's best head and mean attention, went on average over seeds.

    Args:
        frame: What `measure_tuned("course", ...)` returned.
        every: Keep one probe in so many, and the last.

    Returns:
        Rows with `part="course"`, keyed by arm, condition, step, metric (accuracy and the references, or one of
        `WATCHED`, these in distribution), kind, layer (-1 for the whole model), and `of`: `"model"`, `"best head"`, or
        `"layer mean"`.
    """
    steps = sorted(frame["step"].unique())
    frame = frame[frame["step"].isin([*steps[::every], steps[-1]]) & (frame["offset"] == ALL_OFFSETS)]
    frame = frame.assign(condition=np.where(frame["ood"], "OOD", "in distribution"))
    at = ["arm", "condition", "step", "metric", "kind", "layer"]
    heads = frame[(frame["level"] == "head") & frame["value"].notna()]
    best: Any = heads.loc[heads.groupby([*at, "seed"])["value"].idxmax()]
    best, mean = (
        rows[~rows["ood"]] for rows in (best, frame[(frame["level"] == "layer") & frame["metric"].isin(WATCHED)])
    )
    parts = {
        "model": frame[frame["metric"].isin(["accuracy", "history", "oracle"])].fillna({"layer": -1}),
        "best head": best,
        "layer mean": mean,
    }
    found = [grouped_over_seeds(rows, at).assign(of=of) for of, rows in parts.items() if len(rows)]
    return pd.concat(found, ignore_index=True).assign(part="course", seed=ALL_SEEDS)


def ended(frame: Any) -> pd.DataFrame:
    """Returns each seed's accuracy and best heads before and after, with `part="before"` and `part="after"`.

    Args:
        frame: What `measure_tuned("ends", ...)` returned. The `layer` of a metric of heads is the best head's.
    """
    whole = frame[frame["level"] == "model"]
    whole = whole.assign(metric=whole["predictor"].where(whole["predictor"] != "model", "accuracy"), of="model")
    heads = frame[(frame["level"] == "head") & frame["value"].notna()]
    best = heads.loc[heads.groupby(["arm", "seed", "part", "condition", "metric"])["value"].idxmax()]
    found: Any = pd.concat([whole, best.assign(of="best head")], ignore_index=True).assign(step=-1)
    return found[[*KEYS, *VALUES]]


def emerged(frame: Any) -> pd.DataFrame:
    """Returns the step at which accuracy, alignment and lookup emerged in each seed, with `part="emergence"`.

    Args:
        frame: What `measure_tuned("course", ...)` returned.

    Returns:
        `value` is the step, NaN where the metric did not emerge (`emergence`). Followed are first tokens, and the best
        head of the last probes, in distribution.
    """
    rows = []
    for (arm, seed), run in frame.groupby(["arm", "seed"], sort=False):
        table = Table(run.drop(columns=["arm", "seed"]), Provenance("course"))
        for metric, kind in (("accuracy", "first"), *((metric, "all") for metric in WATCHED)):
            if metric in set(run["metric"]):
                when = emergence(table, metric, kind=kind, ood=False, offset=ALL_OFFSETS)
                step = when.where(measure="step").frame["value"].iloc[0]
                rows.append({"arm": arm, "seed": seed, "metric": metric, "kind": kind, "value": step})
    about = {"part": "emergence", "condition": "in distribution", "step": -1, "layer": -1, "of": "step"}
    found: Any = pd.DataFrame(rows).assign(**about, low=np.nan, high=np.nan, n=1)
    return found[[*KEYS, *VALUES]]


KEYS = ("arm", "part", "seed", "condition", "step", "metric", "kind", "layer", "of")
"""The key columns of tables about courses; -1 where one does not apply."""

ALL_SEEDS = -1
"""The `seed` of means over seeds."""


@lru_cache(maxsize=1)
def loaded(model: str) -> Any:
    """Returns a model as it is tuned: a small one in float32."""
    found = load(model)
    return load(model, dtype=torch.float32) if sum(each.numel() for each in found.parameters()) < SMALL else found
