"""Beyond the paper: what finetuning changes, by swapping heads between the pretrained and the finetuned model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Edit, Patch
from align_circuits.hooks.heads import Head, heads_of
from align_circuits.hooks.names import Site, name_of
from align_circuits.papers.claims import Check, Claim, share_of
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.attention_only_models import (
    PAPER,
    SMALLEST,
    AttentionOnlyModels,
    AttentionOnlySetup,
    finetuned,
    pretrained,
)
from align_circuits.papers.recall.figures.common import FACTS_LEARNED, SOURCE, know_their_facts, per_seed, study
from align_circuits.papers.recall.figures.figs_13_14_19_24_held_out import CPU, FIRST_SEED
from align_circuits.papers.study import Experiment, Inputs, Measurement, on_one_thread
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.forward_pass import capture
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.tables import Table

SITES: tuple[Site, ...] = ("pattern", "v", "z")
"""A head's attention, its values, and both."""

ROLES = ("subject", "relation")
"""The relations by which heads of the attention-only model are named after pretraining; the third is `"other"`."""


@dataclass(frozen=True)
class Swaps:
    """The models whose heads are swapped."""

    setup: gpt2.GPT2Setup
    kind: gpt2.Finetuned
    attention_only: AttentionOnlyModels


def _jobs(config: Swaps, inputs: Inputs) -> list[Measurement]:
    keys = {"model": "GPT-2", "n": config.setup.n_prompts}
    return [
        *gpt2.each_seed(swap_gpt2, config.setup, inputs, keys, kind=config.kind),
        *config.attention_only.jobs(swap_attention_only, trained=inputs.trained),
    ]


def swap_gpt2(*, setup: Mapping[str, Any], kind: gpt2.Finetuned, trained: str, seed: int) -> list[dict[str, Any]]:
    """Swaps the heads of a GPT-2; the function of a job. Returns the rows of `_both_ways`."""
    models = {"pt": gpt2.model_of(setup, "pt", seed, trained), "ft": gpt2.model_of(setup, kind, seed, trained)}
    parts = {head: f"layer {head[0] + 1}" for head in heads_of(models["pt"].cfg)}
    probes = gpt2.GPT2Setup.from_config(setup).probes(seed)
    return _both_ways(models, {"pt": probes["pt"], "icl": probes["icl_held_out"]}, parts)


def swap_attention_only(*, setup: Mapping[str, Any], trained: str, seed: int) -> list[dict[str, Any]]:
    """Swaps the heads of an attention-only model; the function of a job. Returns the rows of `_both_ways`."""
    on_one_thread()
    made = AttentionOnlySetup(**setup)
    models = {"pt": pretrained(made, seed, trained).model, "ft": finetuned(made, seed, trained).model}
    probes = {"pt": made.facts(made.world(seed)).sample(made.n, seed=seed), "icl": made.in_context(seed)["held_out"]}
    rows = _both_ways(models, probes, parts_of(models["pt"], probes["pt"]))
    return [{"model": "attention-only", "n": made.n, **row} for row in rows]


def _both_ways(
    models: Mapping[str, Any], probes: Mapping[str, Prompts], parts: Mapping[Head, str]
) -> list[dict[str, Any]]:
    """The rows of `swapped` by receiver (`"pt"`, `"ft"`), probe (`"pt"`; `"icl"`, held-out) and the head's name."""
    return [
        {"receiver": receiver, "probe": probe, "part": parts.get((row["layer"], row["head"]), "none"), **row}
        for receiver, donor in (("pt", "ft"), ("ft", "pt"))
        for probe, prompts in probes.items()
        for row in swapped(models[receiver], models[donor], prompts)
    ]


def swapped(receiver: Any, donor: Any, prompts: Prompts) -> list[dict[str, Any]]:
    """Returns a model's accuracy with one head's activations taken from another model on the same prompts.

    Rows have `site` (one of `SITES`), `layer` and `head`; those of the unedited model `site = "none"`.
    """
    names = [name_of(site, layer) for site in SITES for layer in range(donor.cfg.n_layers)]
    activations = capture(donor, prompts, names)
    keys = [("none", None, None), *((site, *head) for site in SITES for head in heads_of(receiver.cfg))]
    edit_sets: list[list[Edit]] = [
        [] if layer is None else [Patch([(layer, head)], site=site, values=activations)] for site, layer, head in keys
    ]
    (accuracy,), _ = TargetMetrics.of(prompts, ("accuracy",)).measure_edited(receiver, edit_sets)
    return [
        {"site": site, "layer": layer, "head": head, "value": float(correct.mean())}
        for (site, layer, head), correct in zip(keys, accuracy, strict=True)
    ]


def parts_of(model: Any, facts: Prompts) -> dict[Head, str]:
    """Returns the name of each head of an attention-only model, by its attention on pretraining sequences."""
    scores = score_heads(model, facts, [f"{role}_attention" for role in ROLES])
    attention = np.stack([scores.grid(f"{role}_attention")[0] for role in ROLES])
    roles, heads = linear_sum_assignment(attention, maximize=True)
    names = {(0, int(head)): f"{ROLES[role]} head" for role, head in zip(roles, heads, strict=True)}
    return {head: names.get(head, "other head") for head in heads_of(model.cfg)}


_FACTS: dict[str, Any] = {"receiver": "pt", "site": "none"}
"""The pretrained model as it is."""


def _check(table: Table) -> list[Check]:
    checks = []
    for model, key, other in (("GPT-2", "layer 2", "layer 1"), ("attention-only", "relation head", "other head")):
        of_model = table.where(model=model)
        on_facts, on_icl = (per_seed(of_model, probe=probe, **_FACTS) >= FACTS_LEARNED for probe in ("pt", "icl"))
        claim = f"{model}: facts are learned, as this presupposes (share of models with an exact match on PT of "
        checks.append(Claim(f"{claim}{FACTS_LEARNED:g})").at_least(0.5, share_of(on_facts), share_of(on_icl), "on ICL"))
        known = know_their_facts(of_model, probe="pt", **_FACTS)
        if len(known):
            checks += _checks(known, model, key, other)
    return checks


def _checks(table: Table, model: str, key: str, other: str) -> list[Check]:
    """The claims about one kind of model, of which `key` and `other` are heads."""

    def change(receiver: str, site: str, part: str) -> Float[ndarray, " seed"]:
        """The gain of the pretrained model, the loss of the finetuned one."""
        rows = table.where(receiver=receiver, probe="icl")
        gain = per_seed(rows, site=site, part=part) - per_seed(rows, site="none")
        return gain if receiver == "pt" else -gain

    checks = []
    for receiver, claim, measure in (
        (
            "ft",
            f"the finetuned model needs its {key}: with the pretrained one's it no longer recalls in context",
            "loss",
        ),
        ("pt", f"the finetuned {key} is enough: with it the pretrained model recalls in context", "gain"),
    ):
        of_key, of_other = (change(receiver, "z", part) for part in (key, other))
        claim = f"{model}: {claim} ({measure} of exact match, held-out)"
        checks.append(Claim(claim).at_least(0.5, of_key, of_other, f"the {other}"))
    if model == "attention-only":
        attention, values = (change("ft", site, key) for site in ("pattern", "v"))
        checks.append(
            Claim(
                "attention-only: finetuning changes where the relation head looks (loss of exact match with the "
                "pretrained one's pattern)",
                "W_KQ of both heads, and W_OV of this one",
            ).at_least(0.5, attention, values, "with its values")
        )
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    figures = {}
    for model in ("GPT-2", "attention-only"):
        panels = {}
        for receiver, caption in (("pt", "pretrained, one head finetuned"), ("ft", "finetuned, one head pretrained")):
            frame: Any = table.where(model=model, receiver=receiver, probe="icl").frame
            panels[caption] = frame.groupby(["part", "site"], sort=False)["value"].mean().unstack("site")
        figures[model] = plots.accuracy_grids(panels, x="taken from the other", y="head", value="exact match")
    return figures


EXCHANGE = Experiment(
    "recall/exchange",
    "What do heads contribute when swapped between pretrained and finetuned models?",
    f"Beyond {SOURCE}",
    study(
        "recall/exchange",
        Swaps(gpt2.SMOKE, "icl", AttentionOnlyModels(SMALLEST, 1)),
        Swaps(gpt2.CPU_TWELVE, "icl", AttentionOnlyModels(CPU, 12, first_seed=FIRST_SEED)),
        Swaps(gpt2.PAPER, "icl", AttentionOnlyModels(PAPER, 3)),
        jobs=_jobs,
        train=gpt2.pretrainings,
    ),
    _draw,
    _check,
    "The theorem has finetuning change where both heads look, and what the relation head reads.",
)
