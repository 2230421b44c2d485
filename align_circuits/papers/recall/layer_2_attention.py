"""Contextual recall, beyond the paper: is the output of layer-2 attention what carries the type?"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.heads.ablate import ablation_baseline, change
from align_circuits.heads.patch import EVERYWHERE, patch_heads
from align_circuits.hooks.edits import Ablate, Edit
from align_circuits.hooks.heads import heads_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.papers.recall.trainings import CPU, PAPER, SMOKE, SOURCE, Finetuned, Size, finetuned
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.report import plots
from align_circuits.run.evaluation import predict_with_edits
from align_circuits.tables.tables import Provenance, Table

DIRECTIONS = ("denoise", "noise")


@dataclass(frozen=True)
class Carrier:
    """Which finetuned models."""

    size: Size
    kinds: tuple[Finetuned, ...] = ("icl", "icl+grm")


def places_of(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns tokens of in-context prompts by what they are: the query subject, and what stands in demonstrations."""
    tokens = torch.arange(prompts.mask.shape[1]) == prompts.mask.shape[1] - 1
    last = tokens.expand_as(prompts.mask) & prompts.mask
    roles = {"subjects": Role.INPUT, "attributes": Role.OUTPUT, "separators": Role.SEPARATOR}
    return {"query": last} | {name: (prompts.roles == role) & prompts.mask & ~last for name, role in roles.items()}


def last_demonstrations(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns the tokens of the last k demonstrations, by k, for k = 1, 2, 4, ... and all of them."""
    n = int(prompts.example.max())
    counts = sorted({min(2**power, n) for power in range(n.bit_length() + 1)} - {0})
    return {str(k): prompts.mask & (prompts.example >= n - k) & (prompts.example < n) for k in counts}


def run(config: Carrier, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Patches between minimal pairs whose demonstrations are of another type, and ablates, about held-out subjects.

    Returns:
        A table keyed by kind (of finetuning), seed, edit (`"denoise"`, `"noise"`: `patch_heads`; `"ablate"`: means over
        tokens of one role), site, layer, positions and metric (`"accuracy"`, `"log_prob"`): a row a seed, the change on
        the clean prompts' answers. Positions are `places_of`, `"all"`, and for `resid_post` of layer 1 also the last k
        demonstrations. `resid_pre` of layer 0 everywhere is the whole prompt: the most that a patch can do. Rows of the
        edit `"none"` are not changes but the model's own numbers on the clean prompts.
    """
    frames = []
    for kind in config.kinds:
        for seed in range(config.size.seeds):
            size = config.size
            model = load(copy.deepcopy(finetuned(size, seed, kind, folder).model))
            task = size.demonstrations(seed, "icl", held_out=True)
            clean = task.sample(size.probe, seed=seed)
            corrupted = task.corrupt(clean, "type", seed=seed)
            frames.append(measure(model, clean, corrupted).assign(kind=kind, seed=seed, n=size.probe))
    frame = pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan)
    return Table(frame, Provenance("recall_carrier", asdict(config)))


def measure(model: Any, clean: Prompts, corrupted: Prompts) -> pd.DataFrame:
    """Returns the rows of one model: see `run`."""
    places = places_of(clean) | {EVERYWHERE: clean.mask}
    frames: list[Any] = []
    for direction in DIRECTIONS:
        pair: dict[str, Any] = {"clean": clean, "corrupted": corrupted, "direction": direction}
        patched = [
            patch_heads(model, **pair, sites=("z", "resid_post"), positions=places),
            patch_heads(model, **pair, sites=("resid_post",), heads=[(0, 0)], positions=last_demonstrations(clean)),
            patch_heads(model, **pair, sites=("resid_pre",), heads=[(0, 0)]),
        ]
        frames += [table.where(kind="all").frame.assign(edit=direction) for table in patched]
    frames.append(_ablated(model, clean, places))
    return pd.concat(frames, ignore_index=True).loc[:, ["edit", "site", "layer", "positions", "metric", "value"]]


def _ablated(model: Any, clean: Prompts, places: Mapping[str, Bool[Tensor, "prompt pos"]]) -> pd.DataFrame:
    """What ablating each head at some tokens changes; and how good the model is."""
    held = ablation_baseline(model, clean)
    heads = heads_of(model.cfg)
    cells: list[list[Edit]] = [[]]
    keys: list[tuple[int, str]] = []
    for head in heads:
        for name, mask in places.items():
            cells.append([Ablate([head], how="mean", reference=held, positions=mask)])
            keys.append((head[0], name))
    (intact, *after), _ = predict_with_edits(model, clean, cells)
    right, log_prob = intact.by_target()
    rows = [
        {"edit": "none", "site": "none", "layer": -1, "positions": "clean", "metric": metric, "value": value.mean()}
        for metric, value in (("accuracy", right), ("log_prob", log_prob))
    ]
    for (layer, name), found in zip(keys, after, strict=True):
        changes = dict(zip(("log_prob", "accuracy"), change(intact, found), strict=True))
        rows += [
            {"edit": "ablate", "site": "z", "layer": layer, "positions": name, "metric": metric, "value": value.mean()}
            for metric, value in changes.items()
        ]
    return pd.DataFrame(rows)


def _change(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    """Each seed's change of accuracy."""
    return table.where(metric="accuracy", **where).frame.sort_values("seed")["value"].to_numpy(float)


def _kinds(table: Table) -> list[str]:
    return list(table.frame["kind"].unique())


def _check(table: Table) -> list[Check]:
    checks = []
    for kind in _kinds(table):
        said = {"icl": "ICL", "icl+grm": "ICL+Grm"}[kind]
        at_query = {"kind": kind, "site": "z", "positions": "query"}
        for edit, sign, claim in (
            (
                "denoise",
                1,
                "layer-2 attention at the query subject brings the answer back where demonstrations tell another type",
            ),
            ("noise", -1, "and takes it away where it comes from demonstrations of another type"),
            ("ablate", -1, "and so does its mean over types"),
        ):
            carrier, control = (sign * _change(table, edit=edit, layer=layer, **at_query) for layer in (1, 0))
            checks.append(
                Check(
                    f"After {said}, {claim} ({'gain' if sign > 0 else 'loss'} of exact match, held-out)",
                    relation=">=",
                    threshold=0.5,
                    **measured(carrier),
                    **controlled(control, "layer-1 attention there"),
                )
            )
        into = {"kind": kind, "edit": "denoise", "site": "resid_post", "layer": 0}
        checks.append(
            Check(
                f"After {said}, it reads the type where the attributes of demonstrations stand (gain of exact match "
                "from the residual stream between the layers, there)",
                relation=">=",
                threshold=0.5,
                **measured(_change(table, positions="attributes", **into)),
                **controlled(_change(table, positions="subjects", **into), "at the demonstrations' subjects"),
            )
        )
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    places = ["query", "attributes", "subjects", "separators", EVERYWHERE]
    grids, courses = {}, {}
    for kind in _kinds(table):
        found: Any = table.where(kind=kind, metric="accuracy", edit="denoise").frame
        whole = found["site"] == "resid_pre"
        rows = found[~whole & found["positions"].isin(places)]
        name = "layer " + (rows["layer"] + 1).astype(str) + ", " + rows["site"]
        grid = rows.assign(name=name).groupby(["name", "positions"])["value"].mean().unstack("positions")
        grids[f"after {kind}"] = grid[places].clip(lower=0)
        by_count = found[~found["positions"].isin(places)]
        curves = [
            {"k": int(k), "curve": "last k demonstrations", **vars(over_seeds(some["value"].to_numpy(float)))}
            for k, some in by_count.groupby("positions")
        ]
        limit = vars(over_seeds(found[whole]["value"].to_numpy(float)))
        curves += [{"k": row["k"], "curve": "the whole prompt", **limit} for row in curves]
        courses[f"after {kind}"] = pd.DataFrame(curves).sort_values(["curve", "k"])
    said = "exact match that a patch brings back"
    return {
        "where": plots.accuracy_grids(grids, x="patched at", y="", value=said),
        "how many": plots.curves(courses, x="k", by="curve", label="demonstrations patched", value=said),
    }


CARRIER = Experiment(
    name="recall/carrier",
    title="Is layer-2 attention the task vector's carrier?",
    source=f"Beyond {SOURCE}",
    scales={"smoke": Carrier(SMOKE), "cpu": Carrier(CPU, ("icl",)), "paper": Carrier(PAPER)},
    run=run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="§3.4 steers with this output; whether the model itself uses it so is not tested there.",
)
