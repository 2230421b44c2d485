"""Representations of the type after finetuning: clusters, cosines and steering, Figs. 8 and 16 to 18."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.task_vector_effects import UNSTEERED, representations, steer, task_vectors
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Claim, over_seeds
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.gpt2_models import SOURCE, Finetuned, GPT2Setup, each_seed
from align_circuits.papers.recall.metrics import group_cosines, silhouette
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.papers.study import Experiment, Inputs, Measurement, Study, on_one_thread
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table

SITES = {(layer, site): f"blocks.{layer}.hook_{site}" for layer in (0, 1) for site in ("attn_out", "resid_post")}
"""A layer's representations: the output of its attention, and the residual stream after it."""

LAYER_2_ATTENTION = {"layer": 1, "site": "attn_out"}
"""In the paper's counting of layers, from 1."""


@dataclass(frozen=True)
class TaskVectors:
    """Models, contexts and strengths of steering."""

    setup: GPT2Setup
    divs: tuple[float, ...]
    demos: tuple[int, ...]
    """t, the numbers of demonstrations; steering is with the last."""
    kind: Finetuned = "icl+grm"
    contexts: int = 50
    """K, the contexts of each type."""
    betas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    cosines_at: tuple[int, ...] = (0, 2, 10)
    """The t at which cosines of types are measured."""

    def setups(self) -> list[tuple[float, GPT2Setup]]:
        """Returns the setup of each diversity."""
        return [(div, self.setup.changed(div=div)) for div in self.divs]


def _pretrainings(config: TaskVectors, inputs: Inputs) -> list[Measurement]:
    return [job for _, setup in config.setups() for job in each_seed(gpt2.pretrain, setup, inputs)]


def _jobs(config: TaskVectors, inputs: Inputs) -> list[Measurement]:
    settings = {name: getattr(config, name) for name in ("kind", "demos", "contexts", "betas", "cosines_at")}
    return [
        job
        for div, setup in config.setups()
        for job in each_seed(measure_task_vectors, setup, inputs, {"div": div, "n": config.contexts}, **settings)
    ]


def measure_task_vectors(
    *,
    setup: Mapping[str, Any],
    trained: str,
    kind: Finetuned,
    demos: Sequence[int],
    contexts: int,
    betas: Sequence[float],
    cosines_at: Sequence[int],
    seed: int,
) -> list[dict[str, Any]]:
    """Measures one pretrained and one finetuned model; the function of a job.

    Returns:
        Rows keyed by stage (`"pt"`, `"ft"`) and metric: by demos `"exact"` (held-out query subjects); by demos, layer
        and site `"silhouette"` and `"shuffled"` (permuted types); with type and other `"cosine"` (as printed) and
        `"cosine_apart"` (without k = k'); by beta, answer, queries and type `"rank"`.
    """
    on_one_thread()
    made = GPT2Setup.from_config(setup)
    models = {
        "pt": load(copy.deepcopy(gpt2.pretrained(made, seed, trained).model)),
        "ft": load(copy.deepcopy(gpt2.finetuned(made, seed, kind, trained).model)),
    }
    rows = [
        {"stage": stage, **row}
        for stage, model in models.items()
        for row in _clusters(model, made, seed, demos, contexts, cosines_at)
    ]
    steered = _steering(models["ft"], made, seed, demos[-1], contexts, betas)
    return rows + [{"stage": "ft", **row} for row in steered]


def by_type(task: DemonstrationsTask, contexts: int, seed: int) -> list[Prompts]:
    """Returns the same number of prompts of each type."""
    n = 2 * contexts
    while True:
        prompts = task.sample(n * task.world.n_types, seed=seed)
        type_ = prompts.latent["type"][:, -1]
        if type_.bincount(minlength=task.world.n_types).min() >= contexts:
            rows = [(type_ == wanted).nonzero()[:contexts, 0] for wanted in range(task.world.n_types)]
            return [prompts[chosen] for chosen in rows]
        n *= 2


def _clusters(
    model: Any, setup: GPT2Setup, seed: int, demos: Sequence[int], contexts: int, cosines_at: Sequence[int]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    rng = torch.Generator().manual_seed(seed)
    for t in demos:
        groups = by_type(setup.demonstrations(seed, "icl", held_out=True, n_demos=t), contexts, seed)
        correct = [TargetMetrics.of(prompts, ("accuracy",)).measure(model)[0] for prompts in groups]
        rows.append({"demos": t, "metric": "exact", "value": float(np.concatenate(correct, 2).mean())})
        activations = [representations(model, prompts, list(SITES.values())) for prompts in groups]
        for (layer, site), name in SITES.items():
            vectors = torch.stack([group[name] for group in activations])
            order = torch.randperm(vectors.shape[0] * vectors.shape[1], generator=rng)
            shuffled = vectors.flatten(0, 1)[order].view_as(vectors)
            keys = {"demos": t, "layer": layer, "site": site}
            for metric, clusters in (("silhouette", vectors), ("shuffled", shuffled)):
                rows.append({**keys, "metric": metric, "value": float(silhouette(clusters).mean())})
            if t in cosines_at and keys.items() >= LAYER_2_ATTENTION.items():
                for metric, with_itself in (("cosine", True), ("cosine_apart", False)):
                    cosines = group_cosines(vectors, with_itself=with_itself)
                    rows += [
                        {**keys, "metric": metric, "type": type_, "other": other, "value": float(cosines[type_, other])}
                        for type_ in range(len(cosines))
                        for other in range(len(cosines))
                    ]
    return rows


def _steering(
    model: Any, setup: GPT2Setup, seed: int, demos: int, contexts: int, betas: Sequence[float]
) -> list[dict[str, Any]]:
    """The ranks of answers after steering; task vectors are of other prompts, about seen subjects."""
    world = setup.world_of(seed)
    facts = torch.from_numpy(world.facts)
    vectors = task_vectors(model, by_type(setup.demonstrations(seed, "icl", n_demos=demos), contexts, seed + 1000), 1)
    rows = []
    for queries in ("seen", "held-out"):
        task = setup.demonstrations(seed, "icl", held_out=queries == "held-out", n_demos=demos)
        prompts = task.sample(contexts * world.n_types, seed=seed)
        type_, subject = prompts.latent["type"][:, -1], prompts.latent["subject"][:, -1]
        shift = torch.arange(len(prompts)) % (world.n_types - 1) + 1
        target = (type_ + shift) % world.n_types
        answers = {"original": facts[type_, subject], "target": facts[target, subject]}
        ranks: Any = (
            steer(model, prompts, 1, vectors[type_], vectors[target], answers, betas).where(metric="rank").frame
        )
        columns = ["beta", "answer", "metric", "value"]
        rows += [{"queries": queries, **row} for row in ranks[columns].to_dict("records")]
    return rows


def _values(table: Table, metric: str, **where: Any) -> Float[ndarray, " seed"]:
    return table.where(metric=metric, **where).frame.sort_values("seed")["value"].to_numpy(float)


def _sorted(table: Table, column: str, **where: Any) -> list[Any]:
    return sorted(table.where(**where).frame[column].dropna().unique().tolist())


def _curves(table: Table, x: str, curves: dict[str, tuple[str, dict[str, Any]]]) -> pd.DataFrame:
    """Means over seeds along x, with a metric and its keys for each curve."""
    rows = []
    for name, (metric, where) in curves.items():
        for at in _sorted(table, x, metric=metric, **where):
            rows.append({x: at, "curve": name, **vars(over_seeds(_values(table, metric, **where, **{x: at})))})
    return pd.DataFrame(rows)


def _ranks(table: Table, div: float, queries: str) -> pd.DataFrame:
    """Ranks along β; those of the unsteered model are at `UNSTEERED`."""
    curves = {answer: ("rank", {"div": div, "queries": queries, "answer": answer}) for answer in ("original", "target")}
    return _curves(table, "beta", curves)


# Figure 8


def _draw_main(table: Table) -> dict[str, go.Figure]:
    clusters, ranks = {}, {}
    for div in _sorted(table, "div"):
        after, before = ({"div": div, "stage": stage} for stage in ("ft", "pt"))
        curves = {
            "exact match, held-out": ("exact", after),
            "silhouette, layer 2 attention": ("silhouette", {**LAYER_2_ATTENTION, **after}),
            "silhouette before finetuning": ("silhouette", {**LAYER_2_ATTENTION, **before}),
        }
        clusters[f"Div {div:g}"] = _curves(table, "demos", curves)
        ranks[f"Div {div:g}, held-out"] = _ranks(table, div, "held-out")
    return {
        "left": plots.curves(clusters, x="demos", by="curve", label="demonstrations t", value="share, or silhouette"),
        "right": plots.curves(ranks, x="beta", by="curve", label="β (-1: not steered)", value="rank of the attribute"),
    }


def _check_main(table: Table) -> list[Check]:
    divs, demos = _sorted(table, "div"), _sorted(table, "demos", metric="exact")
    few, many, high, low = min(t for t in demos if t), demos[-1], divs[-1], divs[0]

    def gain(metric: str, stage: str, **where: Any) -> Float[ndarray, " seed"]:
        where |= {"div": high, "stage": stage}
        return _values(table, metric, demos=many, **where) - _values(table, metric, demos=few, **where)

    def difference(stage: str) -> Float[ndarray, " seed"]:
        where = {"demos": many, "stage": stage, **LAYER_2_ATTENTION}
        return _values(table, "silhouette", div=high, **where) - _values(table, "silhouette", div=low, **where)

    def lead(beta: float) -> Float[ndarray, " seed"]:
        where = {"div": high, "queries": "held-out", "beta": beta}
        return _values(table, "rank", answer="original", **where) - _values(table, "rank", answer="target", **where)

    return [
        Claim(
            f"More demonstrations raise accuracy about held-out subjects (t = {many} minus {few}, Div {high:g})"
        ).at_least(0.1, gain("exact", "ft"), gain("exact", "pt"), "before FT"),
        Claim(
            f"Finding 5: they raise the silhouette of layer-2 attention (t = {many} minus {few}, Div {high:g})"
        ).at_least(
            0.05,
            gain("silhouette", "ft", **LAYER_2_ATTENTION),
            gain("shuffled", "ft", **LAYER_2_ATTENTION),
            "types dealt anew",
        ),
        Claim(f"Finding 5: a larger Div makes clusters stronger (Div {high:g} minus {low:g}, t = {many})").at_least(
            0.05, difference("ft"), difference("pt"), "before FT"
        ),
        Claim(
            "Steering: at β = 1 the target's attribute outranks the original's (difference of ranks, held-out)"
        ).at_least(1.0, lead(1.0), lead(0.0), "β = 0"),
    ]


# Figure 16


def _draw_layers(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for div in _sorted(table, "div"):
        curves = {
            f"layer {layer + 1}, {site}": ("silhouette", {"div": div, "layer": layer, "site": site, "stage": "ft"})
            for layer, site in SITES
        }
        panels[f"Div {div:g}"] = _curves(table, "demos", curves)
    return {"": plots.curves(panels, x="demos", by="curve", label="demonstrations t", value="silhouette")}


def _check_layers(table: Table) -> list[Check]:
    high, many = _sorted(table, "div")[-1], _sorted(table, "demos", metric="exact")[-1]
    values = {
        keys: _values(table, "silhouette", div=high, demos=many, stage="ft", layer=keys[0], site=keys[1])
        for keys in SITES
    }
    layer_1, layer_2 = values[0, "attn_out"], values.pop((1, "attn_out"))
    others = list(values.values())
    return [
        Claim(
            f"Layer-2 attention clusters most strongly (its silhouette minus the largest other, t = {many})"
        ).at_least(0.0, layer_2 - np.max(others, axis=0), np.min(others, axis=0) - layer_2, "the weakest minus it"),
        Claim("Layer-1 representations show no clusters (silhouette of attention)").at_most(
            0.1, layer_1, layer_2, "layer-2 attention"
        ),
    ]


# Figure 17


def _draw_cosines(table: Table) -> dict[str, go.Figure]:
    figures = {}
    for div in _sorted(table, "div"):
        grids = {}
        for demos in _sorted(table, "demos", metric="cosine"):
            frame = table.where(metric="cosine", div=div, demos=demos, stage="ft").frame
            grids[f"t = {int(demos)}"] = frame.pivot_table(index="type", columns="other", values="value")
        figures[f"Div {div:g}"] = plots.accuracy_grids(grids, x="type", y="type", value="cosine")
    return figures


def _check_cosines(table: Table) -> list[Check]:
    high, demos = _sorted(table, "div")[-1], _sorted(table, "demos", metric="cosine")

    def difference(t: float) -> Float[ndarray, " seed"]:
        frame: Any = table.where(metric="cosine_apart", div=high, demos=t, stage="ft").frame
        same = frame["type"] == frame["other"]
        within, between = (frame[rows].groupby("seed")["value"].mean() for rows in (same, ~same))
        return (within - between).to_numpy(float)

    return [
        Claim(
            f"Contexts of one type come to lie together (cosine within minus between types, t = {int(demos[-1])})"
        ).at_least(0.1, difference(demos[-1]), difference(demos[0]), f"t = {int(demos[0])}")
    ]


# Figure 18


def _draw_steering(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"Div {div:g}, {queries}": _ranks(table, div, queries)
        for div in _sorted(table, "div")
        for queries in ("seen", "held-out")
    }
    figure = plots.curves(panels, x="beta", by="curve", label="β (-1: not steered)", value="rank of the attribute")
    return {"": figure}


def _check_steering(table: Table) -> list[Check]:
    divs = _sorted(table, "div")
    high, low = divs[-1], divs[0]

    def rank(beta: float, div: float, queries: str) -> Float[ndarray, " seed"]:
        return _values(table, "rank", answer="target", beta=beta, div=div, queries=queries)

    checks = []
    for queries in ("seen", "held-out"):
        unsteered, mean, steered = (rank(beta, high, queries) for beta in (UNSTEERED, 0.0, 1.0))
        claim = f"Steering moves the target's attribute up, {queries} (its rank at β = 0 minus at β = 1, Div {high:g})"
        checks.append(Claim(claim).at_least(1.0, mean - steered, unsteered - mean, "unsteered minus β = 0"))
    if low < high:
        beta = sorted(beta for beta in _sorted(table, "beta") if 0 < beta < 1)[1]
        steered, unsteered = (rank(at, low, "held-out") - rank(at, high, "held-out") for at in (beta, UNSTEERED))
        claim = f"A larger Div needs a smaller β (target's rank at β = {beta:g}, Div {low:g} minus {high:g})"
        checks.append(Claim(claim).at_least(0.5, steered, unsteered, "unsteered"))
    return checks


STUDY = Study(
    "recall/task-vectors",
    {
        "smoke": TaskVectors(gpt2.SMOKE, (0.5,), (0, 1, 3), contexts=4, betas=(0.0, 1.0), cosines_at=(0, 3)),
        "cpu": TaskVectors(gpt2.CPU, (0.2, 0.5), (0, 1, 2, 4, 6, 8), kind="icl", cosines_at=(0, 2, 8)),
        "paper": TaskVectors(gpt2.PAPER, (0.2, 0.5), tuple(range(16)), cosines_at=(0, 2, 10, 15)),
    },
    _jobs,
    lambda _, rows: rows["measure_task_vectors"].assign(low=np.nan, high=np.nan),
    _pretrainings,
)

FIG8 = Experiment(
    "recall/fig8",
    "Clusters and steering",
    f"{SOURCE}, Fig. 8",
    STUDY,
    _draw_main,
    _check_main,
    "Accuracy and clusters grow with demonstrations; steering works, at smaller β where Div is larger.",
)
FIG16 = Experiment(
    "recall/fig16",
    "Clusters by layer",
    f"{SOURCE}, Fig. 16",
    STUDY,
    _draw_layers,
    _check_layers,
    "Layer-2 attention clusters most strongly; layer 1 not at all.",
)
FIG17 = Experiment(
    "recall/fig17",
    "Cosines of types",
    f"{SOURCE}, Fig. 17",
    STUDY,
    _draw_cosines,
    _check_cosines,
    "Contexts of one type come to lie together with more demonstrations.",
)
FIG18 = Experiment(
    "recall/fig18",
    "Steering with seen and held-out subjects",
    f"{SOURCE}, Fig. 18",
    STUDY,
    _draw_steering,
    _check_steering,
    "Larger Div gives stronger task vectors, which steer at smaller β.",
)
