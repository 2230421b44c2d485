"""Contextual recall, beyond the paper: what finetuning changes, seen by putting one model's heads into the other."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.heads import Head, heads_of
from align_circuits.hooks.names import Site, name_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Experiment, controlled, measured
from align_circuits.papers.recall import figs_13_14_19_24_attributes as attributes
from align_circuits.papers.recall.figs_9_to_12_20_to_26_heads import Training
from align_circuits.papers.recall.tasks import FactsTask
from align_circuits.papers.recall.trainings import CPU, PAPER, SMOKE, SOURCE, Finetuned, Size, finetuned, pretrained
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.evaluation import predict_with_edits
from align_circuits.run.forward_pass import capture
from align_circuits.tables.tables import Provenance, Table

EXCHANGED: tuple[Site, ...] = ("pattern", "v", "z")
"""Where a head looks, what it reads there, and both."""

ROLES = ("subject", "relation")
"""What the heads of the attention-only model attend to after pretraining; the third is `"other"`."""


@dataclass(frozen=True)
class Exchange:
    """Which models."""

    gpt2: Size
    kind: Finetuned
    attention_only: Training
    seeds: int
    """Of the attention-only models."""


def exchanged(receiver: Any, donor: Any, prompts: Prompts) -> list[dict[str, Any]]:
    """Returns how often a model is right with one head's activations taken from another model on the same prompts.

    Rows have `site` (one of `EXCHANGED`), `layer` and `head`; those of the model itself `site = "none"`.
    """
    kept = {
        name: values
        for site in EXCHANGED
        for name, values in capture(
            donor, prompts, [name_of(site, layer) for layer in range(donor.cfg.n_layers)]
        ).items()
    }
    cells: list[list[Edit]] = [[]]
    keys: list[tuple[str, Head]] = [("none", (-1, -1))]
    for site in EXCHANGED:
        for head in heads_of(receiver.cfg):
            cells.append([Patch([head], site=site, values=kept)])
            keys.append((site, head))
    found, _ = predict_with_edits(receiver, prompts, cells)
    return [
        {"site": site, "layer": layer, "head": head, "value": float(predictions.by_target()[0].mean())}
        for (site, (layer, head)), predictions in zip(keys, found, strict=True)
    ]


def parts_of(model: Any, facts: Prompts) -> dict[Head, str]:
    """Returns what each head of an attention-only model is called, by what it attends to on pretraining sequences."""
    scores = score_heads(model, facts, [f"{role}_attention" for role in ROLES])
    attention = np.stack([scores.grid(f"{role}_attention")[0] for role in ROLES])
    roles, heads = linear_sum_assignment(attention, maximize=True)
    names = {(0, int(head)): f"{ROLES[role]} head" for role, head in zip(roles, heads, strict=True)}
    return {head: names.get(head, "other head") for head in heads_of(model.cfg)}


def run(config: Exchange, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    """Exchanges heads between pretrained and finetuned models.

    Returns:
        A table keyed by model, seed, receiver (`"pt"`, `"ft"`), probe (`"pt"`; `"icl"`, about held-out subjects), site,
        layer, head and part (what the head is called): a row a seed, the share of prompts that are answered rightly.
    """
    frames = []
    for seed in range(config.gpt2.seeds):
        size = config.gpt2
        nets = {"pt": pretrained(size, seed, folder).model, "ft": finetuned(size, seed, config.kind, folder).model}
        probes = size.probes(seed)
        asked = {"pt": probes["pt"], "icl": probes["icl_held_out"]}
        bridges = {name: load(copy.deepcopy(net)) for name, net in nets.items()}
        parts = {head: f"layer {head[0] + 1}" for head in heads_of(bridges["pt"].cfg)}
        frames.append(_both_ways(bridges, asked, parts).assign(model="GPT-2", seed=seed, n=size.probe))
    for seed in range(config.seeds):
        size = config.attention_only
        before = attributes.pretrained(size, seed, "relative", folder).model
        after, probes = attributes.finetuned(size, seed, "relative", folder)
        world = replace(size.world(), world_seed=seed)
        facts = FactsTask(world, size.n_facts, size.n_slots, p_grammar=0.0).sample(size.n, seed=seed)
        found = _both_ways(
            {"pt": before, "ft": after.model}, {"pt": facts, "icl": probes["held_out"]}, parts_of(before, facts)
        )
        frames.append(found.assign(model="attention-only", seed=seed, n=size.n))
    frame = pd.concat(frames, ignore_index=True).assign(low=np.nan, high=np.nan)
    return Table(frame, Provenance("recall_exchange", asdict(config)))


def _both_ways(nets: Mapping[str, Any], asked: Mapping[str, Prompts], parts: Mapping[Head, str]) -> pd.DataFrame:
    rows = [
        {"receiver": receiver, "probe": probe, "part": parts.get((row["layer"], row["head"]), "none"), **row}
        for receiver, donor in (("pt", "ft"), ("ft", "pt"))
        for probe, prompts in asked.items()
        for row in exchanged(nets[receiver], nets[donor], prompts)
    ]
    return pd.DataFrame(rows)


def _right(table: Table, **where: Any) -> Float[ndarray, " seed"]:
    return table.where(**where).frame.sort_values("seed")["value"].to_numpy(float)


def _check(table: Table) -> list[Check]:
    checks = []
    for model, key, other in (("GPT-2", "layer 2", "layer 1"), ("attention-only", "relation head", "other head")):
        for receiver, claim in (
            ("ft", "the finetuned model needs its {}: with the pretrained one's it no longer recalls in context"),
            ("pt", "the finetuned {} is enough: with it the pretrained model recalls in context"),
        ):
            asked = {"model": model, "receiver": receiver, "probe": "icl"}
            alone = _right(table, site="none", **asked)
            sign = 1 if receiver == "pt" else -1
            change, control = (sign * (_right(table, site="z", part=part, **asked) - alone) for part in (key, other))
            checks.append(
                Check(
                    f"{model}: {claim.format(key)} ({'gain' if sign > 0 else 'loss'} of exact match, held-out)",
                    relation=">=",
                    threshold=0.5,
                    **measured(change),
                    **controlled(control, f"the {other}"),
                )
            )
    asked = {"model": "attention-only", "receiver": "ft", "probe": "icl", "part": "relation head"}
    alone = _right(table, model="attention-only", receiver="ft", probe="icl", site="none")
    looks, reads = (alone - _right(table, site=site, **asked) for site in ("pattern", "v"))
    checks.append(
        Check(
            "attention-only: finetuning changes where the relation head looks (loss of exact match with the "
            "pretrained one's pattern)",
            relation=">=",
            threshold=0.5,
            **measured(looks),
            **controlled(reads, "with its values"),
            published="W_KQ of both heads, and W_OV of this one",
        )
    )
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    figures = {}
    for model in ("GPT-2", "attention-only"):
        panels = {}
        for receiver, said in (("pt", "pretrained, one head finetuned"), ("ft", "finetuned, one head pretrained")):
            frame: Any = table.where(model=model, receiver=receiver, probe="icl").frame
            panels[said] = frame.groupby(["part", "site"], sort=False)["value"].mean().unstack("site")
        figures[model] = plots.accuracy_grids(panels, x="taken from the other", y="head", value="exact match")
    return figures


EXCHANGE = Experiment(
    name="recall/exchange",
    title="What do pretrained and finetuned models exchange, head by head?",
    source=f"Beyond {SOURCE}",
    scales={
        "smoke": Exchange(SMOKE, "icl", attributes.SMOKE, 1),
        "cpu": Exchange(CPU, "icl", attributes.CPU, 3),
        "paper": Exchange(PAPER, "icl", attributes.PAPER, 3),
    },
    run=run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="The theorem has finetuning change where both heads look, and what the relation head reads.",
)
