"""Beyond the paper: does the output of layer-2 attention carry the type? By patching and ablation."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool
from torch import Tensor

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.patch import EVERYWHERE, patch_heads
from align_circuits.hooks.edits import Ablate, Edit
from align_circuits.hooks.heads import heads_of
from align_circuits.papers.claims import Check, Claim, over_seeds
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.common import (
    SOURCE,
    drawn_if_facts_are_learned,
    measured_after_facts,
    only_if_facts_are_learned,
    per_seed,
    study,
)
from align_circuits.papers.study import Experiment, Inputs, Measurement
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.report import plots
from align_circuits.run.pairs import Pair
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table


def _jobs(config: gpt2.FinetunedModels, inputs: Inputs) -> list[Measurement]:
    return gpt2.each_kind(patch_types, config.setup, inputs, config.kinds)


def patch_types(*, setup: Mapping[str, Any], kind: gpt2.Finetuned, trained: str, seed: int) -> pd.DataFrame:
    """Patches and ablates one finetuned model on ICL about held-out subjects; the function of a job.

    Returns:
        The rows of `measure`; in the corrupted prompts the demonstrations are of another type.
    """
    made, model = gpt2.GPT2Setup.from_config(setup), gpt2.model_of(setup, kind, seed, trained)
    task = made.demonstrations(seed, "icl", held_out=True)
    clean = task.sample(made.n_prompts, seed=seed)
    return measure(model, clean, task.corrupt(clean, "type", seed=seed))


def token_groups(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns masks of in-context prompts: the query subject, and the tokens of demonstrations by their role."""
    position = torch.arange(prompts.mask.shape[1]) == prompts.mask.shape[1] - 1
    last = position.expand_as(prompts.mask) & prompts.mask
    roles = {"subjects": Role.INPUT, "attributes": Role.OUTPUT, "separators": Role.SEPARATOR}
    return {"query": last} | {name: (prompts.roles == role) & prompts.mask & ~last for name, role in roles.items()}


def last_demonstrations(prompts: Prompts) -> dict[str, Bool[Tensor, "prompt pos"]]:
    """Returns masks of the last k demonstrations by k, for k = 1, 2, 4, ... and all of them."""
    n = int(prompts.example.max())
    counts = sorted({min(2**power, n) for power in range(n.bit_length() + 1)} - {0})
    return {str(k): prompts.mask & (prompts.example >= n - k) & (prompts.example < n) for k in counts}


def measure(model: Any, clean: Prompts, corrupted: Prompts) -> pd.DataFrame:
    """Returns the changes of one model on the clean prompts' answers.

    Returns:
        Rows keyed by edit (`"denoise"`, `"noise"`: `patch_heads`; `"ablate"`: means over tokens of one role), site,
        layer, positions and metric (`"accuracy"`, `"log_prob"`). Positions are `token_groups`, `"all"`, and for
        `resid_post` of layer 1 also the last k demonstrations. `resid_pre` of layer 0 everywhere is the whole prompt:
        the most that a patch can do. Rows of the edit `"none"` are the model's own numbers on the clean prompts.
    """
    groups = token_groups(clean) | {EVERYWHERE: clean.mask}
    frames: list[Any] = []
    for direction in ("denoise", "noise"):
        pair = Pair(clean, corrupted, direction=direction)
        tables = [
            patch_heads(model, pair, sites=("z", "resid_post"), positions=groups),
            patch_heads(model, pair, sites=("resid_post",), heads=[(0, 0)], positions=last_demonstrations(clean)),
            patch_heads(model, pair, sites=("resid_pre",), heads=[(0, 0)]),
        ]
        frames += [table.where(kind="all").frame.assign(edit=direction) for table in tables]
    frames.append(_ablated(model, clean, groups))
    return pd.concat(frames, ignore_index=True).loc[:, ["edit", "site", "layer", "positions", "metric", "value"]]


def _ablated(model: Any, clean: Prompts, groups: Mapping[str, Bool[Tensor, "prompt pos"]]) -> pd.DataFrame:
    """The changes by ablating each head at some tokens, and the model's own numbers."""
    baseline = ablation_baseline(model, clean)
    keys = [(head, name) for head in heads_of(model.cfg) for name in groups]
    edit_sets: list[list[Edit]] = [
        [Ablate([head], how="mean", reference=baseline, positions=groups[name])] for head, name in keys
    ]
    targets = TargetMetrics.of(clean, ("accuracy", "log_prob"))
    values, _ = targets.measure_edited(model, [[], *edit_sets])
    rows: list[dict[str, Any]] = []
    for metric, (intact, *ablated) in zip(targets.metrics, values, strict=True):
        own = {"edit": "none", "site": "none", "layer": None, "positions": "clean", "value": intact.mean()}
        changes = [
            {"edit": "ablate", "site": "z", "layer": layer, "positions": name, "value": (after - intact).mean()}
            for ((layer, _), name), after in zip(keys, ablated, strict=True)
        ]
        rows += [{**row, "metric": metric} for row in (own, *changes)]
    return pd.DataFrame(rows)


_AT_QUERY = {
    "denoise": "layer-2 attention at the query subject brings the answer back where demonstrations tell another type",
    "noise": "and takes it away where it comes from demonstrations of another type",
    "ablate": "and so does its mean over types",
}
"""What each edit of attention at the query subject shows."""


def _check(table: Table) -> list[Check]:
    accuracy = table.where(metric="accuracy")
    checks = []
    for kind in accuracy.frame["kind"].unique():
        after, of_kind = f"After {gpt2.CAPTIONS[kind]}", accuracy.where(kind=kind)
        for edit, claim in _AT_QUERY.items():
            sign, measure = (1, "gain") if edit == "denoise" else (-1, "loss")
            layer_2, layer_1 = (
                sign * per_seed(of_kind, edit=edit, site="z", layer=layer, positions="query") for layer in (1, 0)
            )
            claim = f"{after}, {claim} ({measure} of exact match, held-out)"
            checks.append(Claim(claim).at_least(0.5, layer_2, layer_1, "layer-1 attention there"))
        attributes, subjects = (
            per_seed(of_kind, edit="denoise", site="resid_post", layer=0, positions=positions)
            for positions in ("attributes", "subjects")
        )
        claim = (
            f"{after}, it reads the type where the attributes of demonstrations stand (gain of exact match "
            "from the residual stream between the layers, there)"
        )
        checks.append(Claim(claim).at_least(0.5, attributes, subjects, "at the demonstrations' subjects"))
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    groups = ["query", "attributes", "subjects", "separators", EVERYWHERE]
    grids, curves = {}, {}
    for kind in table.frame["kind"].unique():
        rows: Any = table.where(kind=kind, metric="accuracy", edit="denoise").frame
        limit = rows["site"] == "resid_pre"
        in_groups = rows["positions"].isin(groups)
        grouped = rows[~limit & in_groups]
        name = "layer " + (grouped["layer"] + 1).astype(str) + ", " + grouped["site"]
        grid = grouped.assign(name=name).groupby(["name", "positions"])["value"].mean().unstack("positions")
        grids[f"after {kind}"] = grid[groups].clip(lower=0)
        by_count = {
            int(k): over_seeds(of_k["value"].to_numpy(float)) for k, of_k in rows[~in_groups].groupby("positions")
        }
        whole_prompt = over_seeds(rows[limit]["value"].to_numpy(float))
        points = [{"k": k, "curve": "last k demonstrations", **vars(value)} for k, value in by_count.items()]
        points += [{"k": k, "curve": "the whole prompt", **vars(whole_prompt)} for k in by_count]
        curves[f"after {kind}"] = pd.DataFrame(points).sort_values(["curve", "k"])
    value = "exact match that a patch brings back"
    return {
        "where": plots.accuracy_grids(grids, x="patched at", y="", value=value),
        "how many": plots.curves(curves, x="k", by="curve", label="demonstrations patched", value=value),
    }


CARRIER = Experiment(
    "recall/carrier",
    "Does layer-2 attention carry the task vector?",
    f"Beyond {SOURCE}",
    study(
        "recall/carrier",
        gpt2.FinetunedModels(gpt2.SMOKE),
        gpt2.FinetunedModels(gpt2.CPU_TWELVE, ("icl",)),
        gpt2.FinetunedModels(gpt2.PAPER),
        jobs=_jobs,
        train=gpt2.pretrainings,
        summarize=measured_after_facts,
    ),
    drawn_if_facts_are_learned(_draw),
    only_if_facts_are_learned(_check),
    "§3.4 steers with this output; whether the model itself uses it so is not tested there.",
)
