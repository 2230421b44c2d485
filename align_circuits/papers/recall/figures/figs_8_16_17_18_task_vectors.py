"""Representations of the type after finetuning: clusters, cosines and steering, Figs. 8 and 16 to 18."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.task_vector_effects import UNSTEERED, representations, steer, task_vectors
from align_circuits.papers.claims import Claim, Claims
from align_circuits.papers.lab import Experiment, Figures, Inputs, Measurement, courses
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.studies import (
    drawn_if_facts_are_learned,
    figure,
    measured_after_facts,
    of_common_seeds,
    only_if_facts_are_learned,
    study,
)
from align_circuits.papers.recall.metrics import group_cosines, silhouette
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.papers.statistics import HIGH, Statistic, levels, per_seed, statistic
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
        `"cosine_apart"` (without k = k'); by beta, answer and queries `"rank"`.
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


STUDY = study(
    "recall/task-vectors",
    TaskVectors(gpt2.SMOKE, (0.5,), (0, 1, 3), contexts=4, betas=(0.0, 1.0), cosines_at=(0, 3)),
    TaskVectors(gpt2.CPU_TWELVE, (0.2, 0.5), (0, 1, 2, 4, 6, 8), kind="icl", cosines_at=(0, 2, 8)),
    TaskVectors(gpt2.PAPER, (0.2, 0.5), tuple(range(16)), cosines_at=(0, 2, 10, 15)),
    cpu_untied=TaskVectors(
        gpt2.CPU_UNTIED_TWELVE, (0.5,), (0, 1, 2, 4, 6, 8), kind="icl+grm from 0", cosines_at=(0, 2, 8)
    ),
    paper_s20=TaskVectors(gpt2.PAPER_S20, (0.5,), (0, 1, 2, 4, 8, 10, 15), cosines_at=(0, 2, 10, 15)),
    paper_s20_untied=TaskVectors(
        gpt2.PAPER_S20_UNTIED, (0.5,), (0, 1, 2, 4, 8, 10, 15), kind="icl+grm from 0", cosines_at=(0, 2, 10, 15)
    ),
    jobs=_jobs,
    train=_pretrainings,
    summarize=measured_after_facts,
)


def _figure(
    number: int, title: str, figures: Figures, claims: Claims, published: str, *, said: bool = False
) -> Experiment:
    judged = only_if_facts_are_learned(claims, said=said)
    return figure(number, title, STUDY, drawn_if_facts_are_learned(figures), judged, published)


_SILHOUETTE = {"metric": "silhouette", "stage": "ft"}


def _by_div(table: Table) -> dict[str, dict[str, Any]]:
    return {f"Div {div:g}": {"div": div} for div in levels(table, "div")}


def _drawn_ranks(panels: Mapping[str, Mapping[str, Any]]) -> Callable[[Table], go.Figure]:
    """Ranks along β; those of the unsteered model are at `UNSTEERED`."""
    curves = {
        caption: {answer: {"metric": "rank", "answer": answer, **keys} for answer in ("original", "target")}
        for caption, keys in panels.items()
    }
    return courses(curves, "beta", label="β (-1: not steered)", value="rank of the attribute")


# Figure 8


def _draw_main(table: Table) -> dict[str, go.Figure]:
    layer_2 = {"metric": "silhouette", **LAYER_2_ATTENTION}
    clusters = {
        caption: {
            "exact match, held-out": {"metric": "exact", "stage": "ft", **keys},
            "silhouette, layer 2 attention": {**layer_2, "stage": "ft", **keys},
            "silhouette before finetuning": {**layer_2, "stage": "pt", **keys},
        }
        for caption, keys in _by_div(table).items()
    }
    ranks = {f"{caption}, held-out": {**keys, "queries": "held-out"} for caption, keys in _by_div(table).items()}
    left = courses(clusters, "demos", label="demonstrations t", value="share, or silhouette")
    return {"left": left(table), "right": _drawn_ranks(ranks)(table)}


def _main_claims(table: Table) -> list[Claim]:
    divs, demos = levels(table, "div"), levels(table, "demos", metric="exact")
    few, many = min(t for t in demos if t), demos[-1]
    exact, clusters = (per_seed(metric=metric, div=HIGH).rise("demos", few, many) for metric in ("exact", "silhouette"))
    layer_2 = clusters.at(stage="ft", **LAYER_2_ATTENTION)
    lead = per_seed(metric="rank", queries="held-out", div=HIGH).rise("answer", "target", "original")
    claims = [
        Claim(
            f"More demonstrations raise accuracy about held-out subjects (t = {many} minus {few}, Div {{div.high:g}})"
        ).at_least(0.1, exact.at(stage="ft"), exact.at(stage="pt"), "before FT"),
        Claim(
            f"Finding 5: they raise the silhouette of layer-2 attention (t = {many} minus {few}, Div {{div.high:g}})"
        ).at_least(0.05, layer_2, layer_2.at(metric="shuffled"), "types dealt anew"),
        Claim(
            "Steering: at β = 1 the target's attribute outranks the original's (difference of ranks, held-out)"
        ).at_least(1.0, lead.at(beta=1.0), lead.at(beta=0.0), "β = 0"),
    ]
    if len(divs) > 1:
        claim = f"Finding 5: a larger Div makes clusters stronger (Div {{div.high:g}} minus {{div.low:g}}, t = {many})"
        at_many = per_seed(metric="silhouette", demos=many, **LAYER_2_ATTENTION)
        before, after = (_beyond_low_div(at_many.at(stage=stage), table) for stage in ("pt", "ft"))
        claims.append(Claim(claim).at_least(0.05, after, before, "before FT"))
    return claims


def _beyond_low_div(measure: Statistic, table: Table) -> Float[ndarray, " seed"]:
    """How much higher a measure is at the highest Div than at the lowest, on the seeds that both have."""
    low, *_, high = levels(table, "div")
    of_high, of_low = of_common_seeds(table.where(div=high), table.where(div=low))
    return measure(of_high) - measure(of_low)


FIG8 = _figure(
    8,
    "Clusters and steering",
    _draw_main,
    _main_claims,
    "Accuracy and clusters grow with demonstrations; steering works, at smaller β where Div is larger.",
    said=True,
)


# Figure 16


def _draw_layers(table: Table) -> dict[str, go.Figure]:
    panels = {
        caption: {
            f"layer {layer + 1}, {site}": {"layer": layer, "site": site, **_SILHOUETTE, **keys} for layer, site in SITES
        }
        for caption, keys in _by_div(table).items()
    }
    return {"": courses(panels, "demos", label="demonstrations t", value="silhouette")(table)}


def _layers_claims(table: Table) -> list[Claim]:
    many = levels(table, "demos", metric="exact")[-1]
    of_site = {keys: per_seed(**_SILHOUETTE, div=HIGH, demos=many, layer=keys[0], site=keys[1]) for keys in SITES}
    layer_1, layer_2 = of_site[0, "attn_out"], of_site.pop((1, "attn_out"))
    return [
        Claim(
            f"Layer-2 attention clusters most strongly (its silhouette minus the largest other, t = {many})"
        ).at_least(
            0.0,
            layer_2.map(lambda value, *others: value - np.max(others, axis=0), *of_site.values()),
            layer_2.map(lambda value, *others: np.min(others, axis=0) - value, *of_site.values()),
            "the weakest minus it",
        ),
        Claim("Layer-1 representations show no clusters (silhouette of attention)").at_most(
            0.1, layer_1, layer_2, "layer-2 attention"
        ),
    ]


FIG16 = _figure(
    16,
    "Clusters by layer",
    _draw_layers,
    _layers_claims,
    "Layer-2 attention clusters most strongly; layer 1 not at all.",
)


# Figure 17


def _draw_cosines(table: Table) -> dict[str, go.Figure]:
    figures = {}
    for caption, keys in _by_div(table).items():
        grids = {}
        for demos in levels(table, "demos", metric="cosine"):
            frame = table.where(metric="cosine", demos=demos, stage="ft", **keys).frame
            grids[f"t = {int(demos)}"] = frame.pivot_table(index="type", columns="other", values="value")
        figures[caption] = plots.accuracy_grids(grids, x="type", y="type", value="cosine")
    return figures


@statistic
def _within_minus_between(table: Table) -> Float[ndarray, " seed"]:
    """The mean cosine of contexts of one type minus that of two."""
    frame: Any = table.frame
    same = frame["type"] == frame["other"]
    within, between = (frame[pairs].groupby("seed")["value"].mean() for pairs in (same, ~same))
    return (within - between).to_numpy(float)


def _cosines_claims(table: Table) -> list[Claim]:
    few, *_, many = levels(table, "demos", metric="cosine")
    together = _within_minus_between.at(metric="cosine_apart", div=HIGH, stage="ft")
    return [
        Claim(
            f"Contexts of one type come to lie together (cosine within minus between types, t = {int(many)})"
        ).at_least(0.1, together.at(demos=many), together.at(demos=few), f"t = {int(few)}")
    ]


FIG17 = _figure(
    17,
    "Cosines of types",
    _draw_cosines,
    _cosines_claims,
    "Contexts of one type come to lie together with more demonstrations.",
)


# Figure 18


def _draw_steering(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"{caption}, {queries}": {"queries": queries, **keys}
        for caption, keys in _by_div(table).items()
        for queries in ("seen", "held-out")
    }
    return {"": _drawn_ranks(panels)(table)}


def _steering_claims(table: Table) -> list[Claim]:
    target = per_seed(metric="rank", answer="target")
    claims = []
    for queries in ("seen", "held-out"):
        rank = target.at(queries=queries, div=HIGH)
        claim = (
            f"Steering moves the target's attribute up, {queries} "
            "(its rank at β = 0 minus at β = 1, Div {div.high:g})"
        )
        steered, unsteered = rank.fall("beta", 0.0, 1.0), rank.fall("beta", UNSTEERED, 0.0)
        claims.append(Claim(claim).at_least(1.0, steered, unsteered, "unsteered minus β = 0"))
    if len(levels(table, "div")) > 1:
        beta = [beta for beta in levels(table, "beta") if 0 < beta < 1][1]
        held_out = target.at(queries="held-out")
        steered, unsteered = (-_beyond_low_div(held_out.at(beta=at), table) for at in (beta, UNSTEERED))
        claim = (
            f"A larger Div needs a smaller β (target's rank at β = {beta:g}, Div {{div.low:g}} minus {{div.high:g}})"
        )
        claims.append(Claim(claim).at_least(0.5, steered, unsteered, "unsteered"))
    return claims


FIG18 = _figure(
    18,
    "Steering with seen and held-out subjects",
    _draw_steering,
    _steering_claims,
    "Larger Div gives stronger task vectors, which steer at smaller β.",
)
