"""Abrupt learning (Reddy, 2024): the plateau, the transition and the head's operations, Figs. 3, 4 and 5."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from align_circuits.hooks.names import name_of
from align_circuits.papers.abrupt.curves import aligned_curves, at_start, by_seed, draw_means, half_rises, transitions
from align_circuits.papers.abrupt.grid import (
    CPU,
    NAMES,
    PAPER,
    PLATEAU,
    SMOKE,
    SOURCE,
    Grid,
    Size,
    network,
    train_on_exemplars,
    trained_ensemble,
    training_jobs,
)
from align_circuits.papers.abrupt.interventions import (
    OPERATION_SITES,
    attend_to_label,
    attend_to_previous,
    replace_activation,
)
from align_circuits.papers.abrupt.progress_measures import PROGRESS
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.papers.lab import Claim, Experiment, Inputs, Measurement, Rows, Study, over_seeds
from align_circuits.report import plots
from align_circuits.tables.tables import Table

CHANGED = "icl_changed"
"""The measure of Fig. 5: accuracy in context with one operation changed."""

UNCHANGED = "nothing"

SHARES = (0.0, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
"""At which shares of the way to the first seed's transition its attention is kept."""


def trained_networks(*, ensemble: Mapping[str, Any], trained: str) -> list[dict[str, Any]]:
    """Measures attention on the way to the transition, and each member with its operations changed: the study's job."""
    net, worlds, table = trained_ensemble(ensemble, trained)
    size = Size.from_json(ensemble["size"])
    return [*attention_on_the_way(size, worlds.shape, transitions(table)[0]), *operations(net, worlds, size)]


def attention_on_the_way(size: Size, task: ExemplarTask, transition: float) -> list[dict[str, Any]]:
    """Returns both layers' attention on one sequence of novel classes; of the second, the target's."""
    transition = size.steps if np.isnan(transition) else transition
    seed = size.first_seed
    worlds = Worlds([task], [seed], torch.get_default_device())
    rows = []
    for stop in sorted({min(size.steps, round(share * transition)) for share in SHARES}):
        net: Any = network(size, task, "network", [seed])  # alone it is the first member of the ensemble
        if stop:
            train = replace(size.train, steps=stop, log_every=stop)
            train_on_exemplars(net, worlds, train, batch_size=size.batch_size, probe=size.probe, progress=False)
        _, cache = net.run_with_cache(worlds.batch(0, 1, "icl").inputs)
        for layer, queries in ((0, range(task.length)), (1, [task.length - 1])):
            pattern: Tensor = cache[name_of("pattern", layer)][0, 0]
            about = {"measure": f"attention_{layer + 1}", "step": stop, "seed": seed, "n": 1}
            rows += [
                {"query": query, "key": key, "value": round(pattern[query, key].item(), 6), **about}
                for query in queries
                for key in range(query + 1)
            ]
    return rows


def operations(net: Any, worlds: Worlds, size: Size) -> list[dict[str, Any]]:
    """Returns each seed's accuracy in context with each operation changed, and first, with nothing changed.

    Only attention has a right answer to be overridden with, and a wrong one beside it; what a matrix writes has none.
    """
    rows = []
    for place, seed in enumerate(net.seeds):
        member, batch = net.member(place), worlds.member(place).batch(0, size.probe, "icl")
        changes: list[tuple[str, str, str, Any]] = [(UNCHANGED, UNCHANGED, UNCHANGED, ())]
        changes += [
            (operation, how, at, replace_activation(member, batch.inputs, site, tokens, how).fwd_hooks(member))
            for operation, site in OPERATION_SITES.items()
            for at, tokens in (("operation", site.tokens), ("elsewhere", site.control_tokens))
            for how in ("patched", "ablated")
        ]
        changes += [
            ("look back", "clamped", "operation", attend_to_previous(member, "labels")(batch)),
            ("look back", "clamped", "elsewhere", attend_to_previous(member, "items")(batch)),
            ("match", "clamped", "operation", attend_to_label(member)(batch)),
            ("match", "clamped", "elsewhere", attend_to_label(member, right=False)(batch)),
        ]
        for operation, how, at, hooks in changes:
            with torch.no_grad():
                logits = member.run_with_hooks(batch.inputs, fwd_hooks=list(hooks))
            accuracy = (logits.argmax(-1) == batch.label).float().mean().item()
            about = {"measure": CHANGED, "step": size.steps, "seed": seed, "n": size.probe}
            rows.append({"operation": operation, "how": how, "at": at, "value": accuracy, **about})
    return rows


def _measure(grid: Grid, inputs: Inputs) -> list[Measurement]:
    (ensemble,) = grid.ensembles()
    job = {"ensemble": ensemble, "trained": inputs.trained}
    return [Measurement(trained_networks, job, seed=None, keys=ensemble["keys"][0])]


def _summarize(_: Grid, rows: Rows) -> pd.DataFrame:
    return pd.concat(rows.values(), ignore_index=True)


def _grid(size: Size) -> Grid:
    size = size.with_task(**PLATEAU)
    return Grid(size, [{name: getattr(size.task, name) for name in ("p_context", "n_labels", "n_pairs")}])


STUDY = Study(
    "abrupt/transition",
    {"smoke": _grid(SMOKE), "cpu": _grid(CPU), "paper": _grid(PAPER.with_task(n_classes=256))},
    train=training_jobs,
    jobs=_measure,
    summarize=_summarize,
)


# Figure 3


def _draw_fig3(table: Table) -> dict[str, go.Figure]:
    attention = {
        name: table.where(measure=measure).frame.astype({"query": int, "key": int})
        for measure, name in (("attention_1", "layer 1"), ("attention_2", "layer 2, the target"))
    }
    return {"a": draw_means(table, {"icl": NAMES["icl"]}, {"": {}}), "b": plots.attention_course(attention)}


def _check_fig3(table: Table) -> list[Claim]:
    n_labels, n_pairs = int(table.frame["n_labels"].iloc[0]), int(table.frame["n_pairs"].iloc[0])
    icl, at = by_seed(table, "icl"), transitions(table)
    steps = icl.index.to_numpy(float)

    def reached(share: float) -> Float[ndarray, " seed"]:
        """IC accuracy at a share of the way to the transition, in units of 1/N; the end where there was none."""
        stops = np.where(np.isnan(at), steps[-1], at) * share
        return n_pairs * np.array([np.interp(stop, steps, icl[seed]) for stop, seed in zip(stops, icl, strict=True)])

    def width(measure: str, floor: float) -> Float[ndarray, " seed"]:
        """Steps from 20% to 80% of the way from a floor to 1, over the step of the transition; 1 without one."""
        first, last = (transitions(table, measure, floor + share * (1 - floor)) for share in (0.2, 0.8))
        return np.nan_to_num((last - first) / at, nan=1.0)

    return [
        Claim(
            f"Before the transition the accuracy has gone from 1/L to 1/N (three quarters of the way, times N; 1/L is "
            f"{n_pairs / n_labels:.2f})"
        ).at_least(0.7, reached(0.75), reached(0.0), "before training"),
        Claim("It waits there: three quarters of the way to the transition, times N").at_most(
            1.5, reached(0.75), reached(1.25), "a quarter after the transition"
        ),
        Claim("The transition is abrupt (steps from 20% to 80% of it, over the step where it is)").at_most(
            0.4, width("icl", 1 / n_pairs), width("cla", n_pairs / n_labels), "CLA, which rises from N/L all along"
        ),
    ]


FIG3 = Experiment(
    name="abrupt/fig3",
    title="The plateau, the transition, and attention before and after",
    source=f"{SOURCE}, Fig. 3",
    study=STUDY,
    figures=_draw_fig3,
    claims=_check_fig3,
    published="A slow phase, then an abrupt transition; attention is patternless before, an induction head's after.",
)


# Figure 4


def check_alignment(table: Table, **where: Any) -> list[Claim]:
    """Returns the claims about the order of the progress measures."""
    at = transitions(table, **where)
    lead = {measure: (at - half_rises(table, measure, **where)) / at for measure in PROGRESS}
    early = {measure: np.nan_to_num(lead[measure]) for measure in PROGRESS}
    distance = {measure: np.nan_to_num(np.abs(lead[measure]), nan=1.0) for measure in PROGRESS}  # 1 if either lacks

    def at_transition(measure: str, other: str) -> Claim:
        claim = Claim(f"{NAMES[measure]} makes half of its rise at the transition (distance, over its step)")
        return claim.at_most(0.1, distance[measure], distance[other], NAMES[other])

    def before_it(measure: str) -> Claim:
        claim = Claim(f"{NAMES[measure]} rises before it (lead, over its step)")
        return claim.at_least(0.1, early[measure], early["tila2"], NAMES["tila2"])

    return [at_transition("ila1", "tla2"), at_transition("tila2", "cla"), before_it("cla"), before_it("tla2")]


def _check_fig4(table: Table) -> list[Claim]:
    learned = ~np.isnan(transitions(table))
    untrained = at_start(table, "icl") >= 0.5
    every = Claim("Every seed makes the transition (share of seeds)")
    return [every.at_least(1.0, learned, untrained, "before training"), *check_alignment(table)]


def draw_measures(table: Table, **where: Any) -> go.Figure:
    """Returns the progress measures aligned at the transition."""
    frame = aligned_curves(table, {name: NAMES[name] for name in (*PROGRESS, "icl")}, **where)
    return plots.curves({"": frame}, x="step", by="measure", label="steps from 50% IC accuracy", value="measure")


FIG4 = Experiment(
    name="abrupt/fig4",
    title="Four progress measures, aligned where accuracy in context crosses one half",
    source=f"{SOURCE}, Fig. 4",
    study=STUDY,
    figures=lambda table: {f"measures, aligned at step {over_seeds(transitions(table)):.0f}": draw_measures(table)},
    claims=_check_fig4,
    published="ILA1 and TILA2 rise at the transition, CLA and TLA2 before it, alike in all six seeds.",
)


# Figure 5


def _draw_fig5(table: Table) -> dict[str, go.Figure]:
    panels = {}
    for at, title in (("operation", "where the operation is"), ("elsewhere", "the same elsewhere")):
        changed: Any = table.where(at=at).frame
        rows = [
            {"operation": list(OPERATION_SITES).index(name) + 1, "how": how, **vars(over_seeds(values.to_numpy()))}
            for (name, how), values in changed.groupby(["operation", "how"], sort=False)["value"]
        ]
        panels[title] = pd.DataFrame(rows).sort_values(["how", "operation"])
    figure = plots.curves(panels, x="operation", by="how", label="operation (i) to (iv)")
    return {"accuracy in context with one operation changed": figure}


def _check_fig5(table: Table) -> list[Claim]:
    frame = table.where(measure=CHANGED).frame
    accuracy = frame.pivot(index="seed", columns=["operation", "how", "at"], values="value")

    def lost(operation: str, how: str, at: str = "operation") -> Float[ndarray, " seed"]:
        """How much accuracy each seed loses."""
        return (accuracy[UNCHANGED, UNCHANGED, UNCHANGED] - accuracy[operation, how, at]).to_numpy()

    even = lost("look back", "ablated")
    return [
        *(
            Claim(f"Without it the answer is lost: {site.description} ({how}; accuracy lost)").at_least(
                0.4,
                lost(operation, how),
                lost(operation, how, "elsewhere"),
                f"the same activation at {site.control_tokens}",
            )
            for operation, site in OPERATION_SITES.items()
            for how in ("patched", "ablated")
            if (operation, how) != ("look back", "patched")
        ),
        Claim("(i) goes by position: the attention of another sequence does as well (accuracy lost)").at_most(
            0.1, lost("look back", "patched"), even, "even attention"
        ),
        Claim("(i) is to attend to the item before: clamped to it the answer stays (accuracy lost)").at_most(
            0.05, lost("look back", "clamped"), even, "even attention"
        ),
        Claim("(iii) is to attend to the right label: clamped to it the answer stays (accuracy lost)").at_most(
            0.05, lost("match", "clamped"), lost("match", "clamped", "elsewhere"), "clamped to the other labels"
        ),
    ]


FIG5 = Experiment(
    name="abrupt/fig5",
    title="The four operations of an induction head, each patched, ablated and clamped",
    source=f"{SOURCE}, Fig. 5",
    study=STUDY,
    figures=_draw_fig5,
    claims=_check_fig5,
    published="A drawing; here each operation is tested on trained networks.",
)
