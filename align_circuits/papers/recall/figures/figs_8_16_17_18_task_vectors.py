"""Representations of the type after finetuning: clusters, cosines and steering, Figs. 8 and 16 to 18."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.task_vector_effects import UNSTEERED, representations, steer, task_vectors
from align_circuits.papers.lab import Claim, Inputs, Measurement
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.common import (
    draw_curves,
    drawn_if_facts_are_learned,
    figure,
    key_values,
    measured_after_facts,
    of_common_seeds,
    only_if_facts_are_learned,
    per_seed,
    study,
)
from align_circuits.papers.recall.metrics import group_cosines, silhouette
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
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

    setup: gpt2.GPT2Setup
    divs: tuple[float, ...]
    demos: tuple[int, ...]
    """t, the numbers of demonstrations; steering is with the last."""
    kind: gpt2.Finetuned = "icl+grm"
    contexts: int = 50
    """K, the contexts of each type."""
    betas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    cosines_at: tuple[int, ...] = (0, 2, 10)
    """The t at which cosines of types are measured."""


def _pretrainings(config: TaskVectors, inputs: Inputs) -> list[Measurement]:
    return [
        job
        for div in config.divs
        for job in gpt2.each_seed(gpt2.pretrain, config.setup.changed(div=div), inputs, {"div": div})
    ]


def _jobs(config: TaskVectors, inputs: Inputs) -> list[Measurement]:
    settings = {name: getattr(config, name) for name in ("kind", "demos", "contexts", "betas", "cosines_at")}
    jobs = []
    for div in config.divs:
        setup, keys = config.setup.changed(div=div), {"div": div, "n": config.contexts}
        jobs += gpt2.each_seed(measure_task_vectors, setup, inputs, keys, **settings)
    return jobs


def measure_task_vectors(
    *,
    setup: Mapping[str, Any],
    trained: str,
    kind: gpt2.Finetuned,
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
    made = gpt2.GPT2Setup.from_config(setup)
    models = {"pt": gpt2.model_of(setup, "pt", seed, trained), "ft": gpt2.model_of(setup, kind, seed, trained)}
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
    model: Any, setup: gpt2.GPT2Setup, seed: int, demos: Sequence[int], contexts: int, cosines_at: Sequence[int]
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
                        for type_, other in np.ndindex(*cosines.shape)
                    ]
    return rows


def _steering(
    model: Any, setup: gpt2.GPT2Setup, seed: int, demos: int, contexts: int, betas: Sequence[float]
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
        steered = steer(model, prompts, 1, vectors[type_], vectors[target], answers, betas)
        ranks: Any = steered.where(metric="rank").frame[["beta", "answer", "metric", "value"]]
        rows += [{"queries": queries, **row} for row in ranks.to_dict("records")]
    return rows


def _ranks(div: float, queries: str) -> dict[str, dict[str, Any]]:
    """The keys of the curves of ranks along β; those of the unsteered model are at `UNSTEERED`."""
    keys = {"metric": "rank", "div": div, "queries": queries}
    return {answer: {**keys, "answer": answer} for answer in ("original", "target")}


_STEERED = {"x": "beta", "label": "β (-1: not steered)", "value": "rank of the attribute"}
"""The axes of ranks."""


# Figure 8


def _draw_main(table: Table) -> dict[str, go.Figure]:
    clusters, ranks = {}, {}
    for div in key_values(table, "div"):
        after, before = ({"div": div, "stage": stage} for stage in ("ft", "pt"))
        silhouette_of_layer_2 = {"metric": "silhouette", **LAYER_2_ATTENTION}
        clusters[f"Div {div:g}"] = {
            "exact match, held-out": {"metric": "exact", **after},
            "silhouette, layer 2 attention": silhouette_of_layer_2 | after,
            "silhouette before finetuning": silhouette_of_layer_2 | before,
        }
        ranks[f"Div {div:g}, held-out"] = _ranks(div, "held-out")
    return {
        "left": draw_curves(table, clusters, "demos", label="demonstrations t", value="share, or silhouette"),
        "right": draw_curves(table, ranks, **_STEERED),
    }


def _check_main(table: Table) -> list[Claim]:
    divs, demos = key_values(table, "div"), key_values(table, "demos", metric="exact")
    few, many, high, low = min(t for t in demos if t), demos[-1], divs[-1], divs[0]
    at_high = table.where(div=high)
    paired = of_common_seeds(at_high, table.where(div=low))
    silhouettes = {"metric": "silhouette", **LAYER_2_ATTENTION}

    def gain(**where: Any) -> Float[ndarray, " seed"]:
        return per_seed(at_high, demos=many, **where) - per_seed(at_high, demos=few, **where)

    def difference(**where: Any) -> Float[ndarray, " seed"]:
        of_high, of_low = (per_seed(of_div, demos=many, **where) for of_div in paired)
        return of_high - of_low

    def lead(beta: float) -> Float[ndarray, " seed"]:
        where = {"metric": "rank", "queries": "held-out", "beta": beta}
        return per_seed(at_high, answer="original", **where) - per_seed(at_high, answer="target", **where)

    checks = [
        Claim(
            f"More demonstrations raise accuracy about held-out subjects (t = {many} minus {few}, Div {high:g})"
        ).at_least(0.1, gain(metric="exact", stage="ft"), gain(metric="exact", stage="pt"), "before FT"),
        Claim(
            f"Finding 5: they raise the silhouette of layer-2 attention (t = {many} minus {few}, Div {high:g})"
        ).at_least(
            0.05,
            gain(stage="ft", **silhouettes),
            gain(stage="ft", **silhouettes | {"metric": "shuffled"}),
            "types dealt anew",
        ),
        Claim(
            "Steering: at β = 1 the target's attribute outranks the original's (difference of ranks, held-out)"
        ).at_least(1.0, lead(1.0), lead(0.0), "β = 0"),
    ]
    if low < high:
        claim = f"Finding 5: a larger Div makes clusters stronger (Div {high:g} minus {low:g}, t = {many})"
        before, after = (difference(stage=stage, **silhouettes) for stage in ("pt", "ft"))
        checks.append(Claim(claim).at_least(0.05, after, before, "before FT"))
    return checks


# Figure 16


def _draw_layers(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for div in key_values(table, "div"):
        where = {"metric": "silhouette", "stage": "ft", "div": div}
        panels[f"Div {div:g}"] = {
            f"layer {layer + 1}, {site}": {"layer": layer, "site": site, **where} for layer, site in SITES
        }
    return {"": draw_curves(table, panels, "demos", label="demonstrations t", value="silhouette")}


def _check_layers(table: Table) -> list[Claim]:
    high, many = key_values(table, "div")[-1], key_values(table, "demos", metric="exact")[-1]
    where = {"metric": "silhouette", "div": high, "demos": many, "stage": "ft"}
    values = {(layer, site): per_seed(table, layer=layer, site=site, **where) for layer, site in SITES}
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
    for div in key_values(table, "div"):
        grids = {}
        for demos in key_values(table, "demos", metric="cosine"):
            frame = table.where(metric="cosine", div=div, demos=demos, stage="ft").frame
            grids[f"t = {int(demos)}"] = frame.pivot_table(index="type", columns="other", values="value")
        figures[f"Div {div:g}"] = plots.accuracy_grids(grids, x="type", y="type", value="cosine")
    return figures


def _check_cosines(table: Table) -> list[Claim]:
    high, demos = key_values(table, "div")[-1], key_values(table, "demos", metric="cosine")

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
        f"Div {div:g}, {queries}": _ranks(div, queries)
        for div in key_values(table, "div")
        for queries in ("seen", "held-out")
    }
    return {"": draw_curves(table, panels, **_STEERED)}


def _check_steering(table: Table) -> list[Claim]:
    divs = key_values(table, "div")
    high, low = divs[-1], divs[0]

    def rank(of_div: Table, beta: float, queries: str) -> Float[ndarray, " seed"]:
        return per_seed(of_div, metric="rank", answer="target", beta=beta, queries=queries)

    at_high = table.where(div=high)
    checks = []
    for queries in ("seen", "held-out"):
        unsteered, mean, steered = (rank(at_high, beta, queries) for beta in (UNSTEERED, 0.0, 1.0))
        claim = f"Steering moves the target's attribute up, {queries} (its rank at β = 0 minus at β = 1, Div {high:g})"
        checks.append(Claim(claim).at_least(1.0, mean - steered, unsteered - mean, "unsteered minus β = 0"))
    if low < high:
        beta = sorted(beta for beta in key_values(table, "beta") if 0 < beta < 1)[1]
        of_high, of_low = of_common_seeds(at_high, table.where(div=low))
        steered, unsteered = (rank(of_low, at, "held-out") - rank(of_high, at, "held-out") for at in (beta, UNSTEERED))
        claim = f"A larger Div needs a smaller β (target's rank at β = {beta:g}, Div {low:g} minus {high:g})"
        checks.append(Claim(claim).at_least(0.5, steered, unsteered, "unsteered"))
    return checks


STUDY = study(
    "recall/task-vectors",
    TaskVectors(gpt2.SMOKE, (0.5,), (0, 1, 3), contexts=4, betas=(0.0, 1.0), cosines_at=(0, 3)),
    TaskVectors(gpt2.CPU_TWELVE, (0.2, 0.5), (0, 1, 2, 4, 6, 8), kind="icl", cosines_at=(0, 2, 8)),
    TaskVectors(gpt2.PAPER, (0.2, 0.5), tuple(range(16)), cosines_at=(0, 2, 10, 15)),
    jobs=_jobs,
    train=_pretrainings,
    summarize=measured_after_facts,
)

FIG8 = figure(
    8,
    "Clusters and steering",
    STUDY,
    drawn_if_facts_are_learned(_draw_main),
    only_if_facts_are_learned(_check_main),
    "Accuracy and clusters grow with demonstrations; steering works, at smaller β where Div is larger.",
)
FIG16 = figure(
    16,
    "Clusters by layer",
    STUDY,
    drawn_if_facts_are_learned(_draw_layers),
    only_if_facts_are_learned(_check_layers, said=False),
    "Layer-2 attention clusters most strongly; layer 1 not at all.",
)
FIG17 = figure(
    17,
    "Cosines of types",
    STUDY,
    drawn_if_facts_are_learned(_draw_cosines),
    only_if_facts_are_learned(_check_cosines, said=False),
    "Contexts of one type come to lie together with more demonstrations.",
)
FIG18 = figure(
    18,
    "Steering with seen and held-out subjects",
    STUDY,
    drawn_if_facts_are_learned(_draw_steering),
    only_if_facts_are_learned(_check_steering, said=False),
    "Larger Div gives stronger task vectors, which steer at smaller β.",
)
