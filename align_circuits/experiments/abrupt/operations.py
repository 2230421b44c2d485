"""Abrupt learning (Reddy, 2024): the four operations of an induction head, Fig. 5, and what happens without them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits import plots
from align_circuits.experiments.abrupt.network import NAMES, SOURCE, controlled, measured, on
from align_circuits.experiments.abrupt.sweeps import (
    CPU,
    PAPER,
    SMOKE,
    Size,
    Sweep,
    at_end,
    curves_only,
    mean_curves,
    over_seeds,
    train_sweep,
    transitions,
)  # fmt: skip
from align_circuits.experiments.experiment import Check, Experiment
from align_circuits.hooks.edits import Patch
from align_circuits.hooks.names import HeadSite, name_of
from align_circuits.tables import Table

NOTHING = "nothing"


@dataclass(frozen=True)
class Operation:
    """One of the four, and the activation that carries it."""

    said: str
    site: HeadSite
    layer: int
    tokens: str
    """At which tokens: labels, items, or the target."""
    others: str
    """At which tokens the same activation should not matter: the control."""


OPERATIONS = (
    Operation("(i) labels attend to the item before", "pattern", 0, "labels", "items"),
    Operation("(ii) the item's content is written to its label", "v", 0, "items", "labels"),
    Operation("(iii) the target matches what was written", "q", 1, "target", "items"),
    Operation("(iv) the label's content is written to the target", "v", 1, "labels", "items"),
)


def accuracy_without(net: Any, inputs: Float[Tensor, "prompt pos d_in"], label: Tensor, operation: Operation,
                     tokens: str) -> float:  # fmt: skip
    """Returns the accuracy when one activation comes from another sequence: the next one.

    For the pattern of layer 1 it is even attention instead, since all sequences share theirs.
    """
    name = name_of(operation.site, operation.layer)
    with torch.no_grad():
        _, cache = net.run_with_cache(inputs)
        values = cache[name].roll(1, 0)
        if operation.site == "pattern":
            even = torch.ones_like(values).tril()
            values = even / even.sum(-1, keepdim=True)
        positions = _positions(inputs, tokens)
        edit = Patch(heads=[(operation.layer, 0)], site=operation.site, positions=positions, values={name: values})
        logits = net.run_with_hooks(inputs, fwd_hooks=edit.fwd_hooks(net))
    return (logits.argmax(-1) == label).float().mean().item()


def _positions(inputs: Float[Tensor, "prompt pos d_in"], tokens: str) -> Bool[Tensor, "prompt pos"]:
    pos = torch.arange(inputs.shape[1], device=inputs.device)
    target = pos == len(pos) - 1
    chosen = {"labels": pos % 2 == 1, "items": (pos % 2 == 0) & ~target, "target": target}[tokens]
    return chosen.expand(inputs.shape[:2])


def _run_fig5(config: Sweep, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    table, (trained,) = train_sweep(config, folder)
    batch = trained.worlds.batch(0, config.size.probe, "icl")
    rows = []
    for seed in range(config.size.seeds):
        net, inputs, label = trained.net.member(seed), batch.inputs[seed], batch.label[seed]
        with torch.no_grad():
            whole = (net.logits(inputs).argmax(-1) == label).float().mean().item()
        rows.append({"operation": NOTHING, "at": NOTHING, "seed": seed, "value": whole})
        for operation in OPERATIONS:
            for at, tokens in (("operation", operation.tokens), ("elsewhere", operation.others)):
                value = accuracy_without(net, inputs, label, operation, tokens)
                rows.append({"operation": operation.said, "at": at, "seed": seed, "value": value})
    frame = pd.DataFrame(rows).assign(measure="icl", low=np.nan, high=np.nan, n=config.size.probe)
    return replace(table, frame=frame)


def _loss_of(table: Table, operation: str, at: str) -> Float[ndarray, " seed"]:
    """How much accuracy each seed loses."""
    whole, left = (
        table.where(operation=name, at=where).frame.sort_values("seed")["value"].to_numpy()
        for name, where in ((NOTHING, NOTHING), (operation, at))
    )
    return whole - left


def _draw_fig5(table: Table) -> dict[str, go.Figure]:
    rows = []
    for place, operation in enumerate(OPERATIONS, start=1):
        for at in ("operation", "elsewhere"):
            values = table.where(operation=operation.said, at=at).frame["value"].to_numpy()
            said = "where the operation is" if at == "operation" else "the same activation elsewhere"
            rows.append({"operation": place, "patched": said, **vars(over_seeds(values))})
    frame = pd.DataFrame(rows)
    return {
        "accuracy in context with one operation taken away": plots.curves(
            {"": frame}, x="operation", by="patched", label="operation (i) to (iv)"
        )
    }


def _check_fig5(table: Table) -> list[Check]:
    return [
        Check(
            f"Without it the answer is lost: {operation.said} (accuracy lost)", relation=">=", threshold=0.4,
            **measured(_loss_of(table, operation.said, "operation")),
            **controlled(_loss_of(table, operation.said, "elsewhere"), f"the same activation at {operation.others}"),
        )
        for operation in OPERATIONS
    ]  # fmt: skip


def _base(size: Size, n_classes: int) -> Size:
    return on(size, n_classes=n_classes, burst=1, noise=0.0, p_context=0.8)


def _fig5(size: Size, n_classes: int) -> Sweep:
    return Sweep(_base(size, n_classes), ({"p_context": 0.8},))


FIG5 = Experiment(
    name="abrupt/fig5",
    title="The four operations of an induction head, each taken away by a patch",
    source=f"{SOURCE}, Fig. 5",
    scales={"smoke": _fig5(SMOKE, 16), "cpu": _fig5(CPU, 64), "paper": _fig5(PAPER, 256)},
    run=_run_fig5, draw=_draw_fig5, check=_check_fig5, makes_models=True,
    published="A drawing; here each operation is tested on trained networks.",
)  # fmt: skip


# Beyond the paper: the same operations held fixed while the network trains.


def _draw_clamped(table: Table) -> dict[str, go.Figure]:
    shown = {"icl": NAMES["icl"], "tila2": NAMES["tila2"], "tla2": NAMES["tla2"]}
    panels = {clamp: mean_curves(table, shown, clamp=clamp) for clamp in table.frame["clamp"].unique()}
    return {"held while training": plots.curves(panels, x="step", by="measure", label="step", value="measure")}


def _check_clamped(table: Table) -> list[Check]:
    last = float(table.frame["step"].to_numpy().max())

    def sooner(clamp: str) -> Float[ndarray, " seed"]:
        """How much sooner the transition comes, as a share of its step; without one it counts at the end."""
        free, held = (np.nan_to_num(transitions(table, clamp=name), nan=last) for name in (NOTHING, clamp))
        return (free - held) / free

    return [
        Check(
            "Layer 1 clamped to the previous token from the start brings the transition forward (share of its step)",
            relation=">=", threshold=0.2, **measured(sooner("previous")),
            **controlled(sooner("previous, items"), "only items clamped"),
        ),
        Check(
            "It is the labels' attention that matters (only labels clamped; share of its step)", relation=">=",
            threshold=0.2, **measured(sooner("previous, labels")),
            **controlled(sooner("previous, items"), "only items clamped"),
        ),
        Check(
            "TLA2 is not needed (accuracy at the end while the target cannot prefer labels): H1 and H2 are excluded",
            relation=">=", threshold=0.9, **measured(at_end(table, "icl", clamp="labels")),
            **controlled(at_end(table, "tla2", clamp="labels"), "TLA2 there, which must stay low"),
        ),
    ]  # fmt: skip


def _clamped(size: Size, n_classes: int) -> Sweep:
    clamps = (NOTHING, "previous", "previous, labels", "previous, items", "labels")
    return Sweep(_base(size, n_classes), tuple({"clamp": clamp} for clamp in clamps))


CLAMPED = Experiment(
    name="abrupt/clamped",
    title="Operations held fixed while the network trains",
    source=f"beyond {SOURCE}: its hypotheses H1 and H2 by intervention",
    scales={"smoke": _clamped(SMOKE, 16), "cpu": _clamped(CPU, 64), "paper": _clamped(PAPER, 256)},
    run=curves_only, draw=_draw_clamped, check=_check_clamped, makes_models=True,
    published="Not in the paper, which tests H2 by holding beta_2 = 0 in the reduced model (Fig. 6 b).",
)  # fmt: skip
