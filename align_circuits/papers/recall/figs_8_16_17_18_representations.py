"""Contextual recall: what finetuning makes of the types, Figs. 8 and 16 to 18: clusters, cosines, steering."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray

from align_circuits.heads.metrics import group_cosines, silhouette
from align_circuits.heads.task_vectors import UNSTEERED, representations, steer, task_vectors
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.papers.recall.tasks import DemonstrationsTask
from align_circuits.papers.recall.trainings import CPU, PAPER, SMOKE, SOURCE, Finetuned, Size, finetuned, pretrained
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.evaluation import predict
from align_circuits.tables.tables import Provenance, Table

SITES = {(layer, site): f"blocks.{layer}.hook_{site}" for layer in (0, 1) for site in ("attn_out", "resid_post")}
"""What is called a layer's representation: what its attention adds, and the residual stream behind it."""

CARRIER = {"layer": 1, "site": "attn_out"}
"""Layer 2's attention, in the paper's counting."""


@dataclass(frozen=True)
class Clusters:
    """Which models, and how they are looked at."""

    size: Size
    divs: tuple[float, ...]
    demos: tuple[int, ...]
    """t, the numbers of demonstrations; the last is the one that is steered at."""
    kind: Finetuned = "icl+grm"
    contexts: int = 50
    """K, the contexts of each type."""
    betas: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    shown: tuple[int, ...] = field(default=(0, 2, 10))
    """The t whose cosines of types are kept."""


def run(config: Clusters, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Measures pretrained and finetuned models of each diversity and seed.

    Returns:
        A table keyed by div, seed, stage (`"pt"`, `"ft"`) and metric: by demos `"exact"` (held-out query subjects);
        by demos, layer and site `"silhouette"` and `"shuffled"` (types dealt anew); with type and other `"cosine"` (as
        printed) and `"cosine_apart"` (without k = k'); by beta, answer, queries and type `"rank"`.
    """
    rows: list[dict[str, Any]] = []
    for div in config.divs:
        size = config.size.changed(div=div)
        for seed in range(size.seeds):
            nets = {"pt": pretrained(size, seed, folder).model, "ft": finetuned(size, seed, config.kind, folder).model}
            for stage, net in nets.items():
                model = load(copy.deepcopy(net))
                found = _clusters(model, config, size, seed) + (
                    _steering(model, config, size, seed) if stage == "ft" else []
                )
                rows += [{"div": div, "seed": seed, "stage": stage, **row} for row in found]
    frame = pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=config.contexts)
    return Table(frame, Provenance("recall_clusters", asdict(config)))


def by_type(task: DemonstrationsTask, contexts: int, seed: int) -> list[Prompts]:
    """Returns as many prompts of each type."""
    n = 2 * contexts
    while True:
        prompts = task.sample(n * task.world.n_types, seed=seed)
        type_ = prompts.latent["type"][:, -1]
        if type_.bincount(minlength=task.world.n_types).min() >= contexts:
            chosen = [(type_ == place).nonzero()[:contexts, 0] for place in range(task.world.n_types)]
            return [prompts[rows] for rows in chosen]
        n *= 2


def _clusters(model: Any, config: Clusters, size: Size, seed: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    draws = torch.Generator().manual_seed(seed)
    for demos in config.demos:
        groups = by_type(size.demonstrations(seed, "icl", held_out=True, n_demos=demos), config.contexts, seed)
        right = np.concatenate([predict(model, prompts)[0].by_target()[0] for prompts in groups])
        rows.append({"demos": demos, "metric": "exact", "value": right.mean()})
        found = [representations(model, prompts, list(SITES.values())) for prompts in groups]
        for (layer, site), name in SITES.items():
            vectors = torch.stack([group[name] for group in found])
            order = torch.randperm(vectors.shape[0] * vectors.shape[1], generator=draws)
            where = {"demos": demos, "layer": layer, "site": site}
            for metric, some in (("silhouette", vectors), ("shuffled", vectors.flatten(0, 1)[order].view_as(vectors))):
                rows.append({**where, "metric": metric, "value": float(silhouette(some).mean())})
            if demos in config.shown and (layer, site) == (1, "attn_out"):
                for metric, itself in (("cosine", True), ("cosine_apart", False)):
                    grid = group_cosines(vectors, with_itself=itself)
                    rows += [
                        {**where, "metric": metric, "type": one, "other": other, "value": float(grid[one, other])}
                        for one in range(len(grid))
                        for other in range(len(grid))
                    ]
    return rows


def _steering(model: Any, config: Clusters, size: Size, seed: int) -> list[dict[str, Any]]:
    """Vectors from prompts about seen subjects; steered are others, about seen and about held-out ones."""
    world, demos = size.of(seed), config.demos[-1]
    own = by_type(size.demonstrations(seed, "icl", n_demos=demos), config.contexts, seed + 1000)
    vectors = task_vectors(model, own, 1)
    rows = []
    for queries in ("seen", "held-out"):
        task = size.demonstrations(seed, "icl", held_out=queries == "held-out", n_demos=demos)
        prompts = task.sample(config.contexts * world.n_types, seed=seed)
        type_, subject = prompts.latent["type"][:, -1], prompts.latent["subject"][:, -1]
        shift = torch.arange(len(prompts)) % (world.n_types - 1) + 1
        target = (type_ + shift) % world.n_types
        facts = torch.from_numpy(world.facts)
        answers = {"original": facts[type_, subject], "target": facts[target, subject]}
        frame = (
            steer(model, prompts, 1, vectors[type_], vectors[target], answers, config.betas).where(metric="rank").frame
        )
        rows += [
            {"queries": queries, **{name: row[name] for name in ("beta", "answer", "metric", "value")}}
            for row in frame.to_dict("records")
        ]
    return rows


def _values(table: Table, metric: str, **where: Any) -> Float[ndarray, " seed"]:
    return table.where(metric=metric, **where).frame.sort_values("seed")["value"].to_numpy(float)


def _sorted(table: Table, name: str, **where: Any) -> list[Any]:
    return sorted(table.where(**where).frame[name].dropna().unique().tolist())


def _course(table: Table, x: str, curves: dict[str, tuple[str, dict[str, Any]]]) -> pd.DataFrame:
    """Means over seeds along x, a curve for each metric and its keys."""
    rows = []
    for name, (metric, where) in curves.items():
        for at in _sorted(table, x, metric=metric, **where):
            rows.append({x: at, "curve": name, **vars(over_seeds(_values(table, metric, **where, **{x: at})))})
    return pd.DataFrame(rows)


def _steered(table: Table, div: float, queries: str) -> pd.DataFrame:
    """Ranks along β; the unsteered model stands at `UNSTEERED`."""
    curves = {answer: ("rank", {"div": div, "queries": queries, "answer": answer}) for answer in ("original", "target")}
    return _course(table, "beta", curves)


def _draw_main(table: Table) -> dict[str, go.Figure]:
    divs = _sorted(table, "div")
    ft = {"stage": "ft"}
    learned = {
        f"Div {div:g}": _course(
            table,
            "demos",
            {
                "exact match, held-out": ("exact", {"div": div, **ft}),
                "silhouette, layer 2 attention": ("silhouette", {"div": div, **CARRIER, **ft}),
                "silhouette before finetuning": ("silhouette", {"div": div, **CARRIER, "stage": "pt"}),
            },
        )
        for div in divs
    }
    ranks = {f"Div {div:g}, held-out": _steered(table, div, "held-out") for div in divs}
    return {
        "left": plots.curves(learned, x="demos", by="curve", label="demonstrations t", value="share, or silhouette"),
        "right": plots.curves(ranks, x="beta", by="curve", label="β (-1: not steered)", value="rank of the attribute"),
    }


def _check_main(table: Table) -> list[Check]:
    divs, demos = _sorted(table, "div"), _sorted(table, "demos", metric="exact")
    few, many, high, low = min(t for t in demos if t), demos[-1], divs[-1], divs[0]

    def gain(metric: str, stage: str, **where: Any) -> Float[ndarray, " seed"]:
        asked = {"div": high, "stage": stage, **where}
        return _values(table, metric, demos=many, **asked) - _values(table, metric, demos=few, **asked)

    def apart(stage: str) -> Float[ndarray, " seed"]:
        asked = {"demos": many, "stage": stage, **CARRIER}
        return _values(table, "silhouette", div=high, **asked) - _values(table, "silhouette", div=low, **asked)

    def lead(beta: float) -> Float[ndarray, " seed"]:
        asked = {"div": high, "queries": "held-out", "beta": beta}
        return _values(table, "rank", answer="original", **asked) - _values(table, "rank", answer="target", **asked)

    return [
        Check(
            f"More demonstrations raise accuracy about held-out subjects (t = {many} minus {few}, Div {high:g})",
            relation=">=",
            threshold=0.1,
            **measured(gain("exact", "ft")),
            **controlled(gain("exact", "pt"), "before FT"),
        ),
        Check(
            f"Finding 5: they raise the silhouette of layer-2 attention (t = {many} minus {few}, Div {high:g})",
            relation=">=",
            threshold=0.05,
            **measured(gain("silhouette", "ft", **CARRIER)),
            **controlled(gain("shuffled", "ft", **CARRIER), "types dealt anew"),
        ),
        Check(
            f"Finding 5: a larger Div makes clusters stronger (Div {high:g} minus {low:g}, t = {many})",
            relation=">=",
            threshold=0.05,
            **measured(apart("ft")),
            **controlled(apart("pt"), "before FT"),
        ),
        Check(
            "Steering: at β = 1 the target's attribute outranks the original's (difference of ranks, held-out)",
            relation=">=",
            threshold=1.0,
            **measured(lead(1.0)),
            **controlled(lead(0.0), "β = 0"),
        ),
    ]


def _draw_layers(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"Div {div:g}": _course(
            table,
            "demos",
            {
                f"layer {layer + 1}, {site}": ("silhouette", {"div": div, "layer": layer, "site": site, "stage": "ft"})
                for layer, site in SITES
            },
        )
        for div in _sorted(table, "div")
    }
    return {"": plots.curves(panels, x="demos", by="curve", label="demonstrations t", value="silhouette")}


def _check_layers(table: Table) -> list[Check]:
    high, many = _sorted(table, "div")[-1], _sorted(table, "demos", metric="exact")[-1]
    asked = {"div": high, "demos": many, "stage": "ft"}
    carrier = _values(table, "silhouette", **asked, **CARRIER)
    others = [
        _values(table, "silhouette", layer=layer, site=site, **asked)
        for layer, site in SITES
        if {"layer": layer, "site": site} != CARRIER
    ]
    return [
        Check(
            f"Layer-2 attention clusters most strongly (its silhouette minus the largest other, t = {many})",
            relation=">=",
            threshold=0.0,
            **measured(carrier - np.max(others, axis=0)),
            **controlled(np.min(others, axis=0) - carrier, "the weakest minus it"),
        ),
        Check(
            "Layer-1 representations show no clusters (silhouette of attention)",
            relation="<=",
            threshold=0.1,
            **measured(_values(table, "silhouette", layer=0, site="attn_out", **asked)),
            **controlled(carrier, "layer-2 attention"),
        ),
    ]


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

    def apart(t: float) -> Float[ndarray, " seed"]:
        frame: Any = table.where(metric="cosine_apart", div=high, demos=t, stage="ft").frame
        same = frame["type"] == frame["other"]
        within, between = (frame[rows].groupby("seed")["value"].mean() for rows in (same, ~same))
        return (within - between).to_numpy(float)

    return [
        Check(
            f"Contexts of one type come to lie together (cosine within minus between types, t = {int(demos[-1])})",
            relation=">=",
            threshold=0.1,
            **measured(apart(demos[-1])),
            **controlled(apart(demos[0]), f"t = {int(demos[0])}"),
        )
    ]


def _draw_steering(table: Table) -> dict[str, go.Figure]:
    panels = {
        f"Div {div:g}, {queries}": _steered(table, div, queries)
        for div in _sorted(table, "div")
        for queries in ("seen", "held-out")
    }
    figure = plots.curves(panels, x="beta", by="curve", label="β (-1: not steered)", value="rank of the attribute")
    return {"": figure}


def _check_steering(table: Table) -> list[Check]:
    divs = _sorted(table, "div")

    def rank(beta: float, answer: str, div: float, queries: str) -> Float[ndarray, " seed"]:
        return _values(table, "rank", beta=beta, answer=answer, div=div, queries=queries)

    high, low = divs[-1], divs[0]
    checks = []
    for queries in ("seen", "held-out"):
        unsteered, mean, all_of_it = (rank(beta, "target", high, queries) for beta in (UNSTEERED, 0.0, 1.0))
        checks.append(
            Check(
                f"Steering moves the target's attribute up, {queries} (its rank at β = 0 minus at β = 1, Div {high:g})",
                relation=">=",
                threshold=1.0,
                **measured(mean - all_of_it),
                **controlled(unsteered - mean, "unsteered minus β = 0"),
            )
        )
    if low < high:
        some = sorted(beta for beta in _sorted(table, "beta") if 0 < beta < 1)[1]
        ranks = {
            (beta, div): rank(beta, "target", div, "held-out") for beta in (UNSTEERED, some) for div in (low, high)
        }
        checks.append(
            Check(
                f"A larger Div needs a smaller β (target's rank at β = {some:g}, Div {low:g} minus {high:g})",
                relation=">=",
                threshold=0.5,
                **measured(ranks[some, low] - ranks[some, high]),
                **controlled(ranks[UNSTEERED, low] - ranks[UNSTEERED, high], "unsteered"),
            )
        )
    return checks


def _experiment(
    name: str, title: str, draw: Callable[..., Any], check: Callable[..., Any], published: str
) -> Experiment:
    return Experiment(
        name=f"recall/{name}",
        title=title,
        source=f"{SOURCE}, Fig. {name.removeprefix('fig')}",
        scales=_SCALES,
        run=run,
        draw=draw,
        check=check,
        makes_models=True,
        published=published,
    )


_SCALES: dict[Literal["smoke", "cpu", "paper"], Clusters] = {
    "smoke": Clusters(SMOKE, (0.5,), (0, 1, 3), contexts=4, betas=(0.0, 1.0), shown=(0, 3)),
    "cpu": Clusters(CPU, (0.2, 0.5), (0, 1, 2, 4, 6, 8), kind="icl", shown=(0, 2, 8)),
    "paper": Clusters(PAPER, (0.2, 0.5), tuple(range(16)), shown=(0, 2, 10, 15)),
}

FIG8 = _experiment(
    "fig8",
    "Clusters and steering",
    _draw_main,
    _check_main,
    "Accuracy and clusters grow with demonstrations; steering works, at smaller β where Div is larger.",
)
FIG16 = _experiment(
    "fig16",
    "Clusters by layer",
    _draw_layers,
    _check_layers,
    "Layer-2 attention clusters most strongly; layer 1 not at all.",
)
FIG17 = _experiment(
    "fig17",
    "Cosines of types",
    _draw_cosines,
    _check_cosines,
    "Contexts of one type come to lie together with more demonstrations.",
)
FIG18 = _experiment(
    "fig18",
    "Steering with seen and held-out subjects",
    _draw_steering,
    _check_steering,
    "Larger Div gives stronger task vectors, which steer at smaller β.",
)
