"""Beyond the paper: what finetuning on ICL+Grm leaves missing on ICL, by forcing the attention of one layer.

The claims were formed on seeds 0 and 1 at the cpu scale; its twelve seeds are new to them, and there they fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Clamp, Edit
from align_circuits.hooks.head_names import heads_of
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.studies import (
    SOURCE,
    drawn_if_facts_are_learned,
    measured_after_facts,
    only_if_facts_are_learned,
    study,
)
from align_circuits.papers.recall.metrics import recall_matches
from align_circuits.papers.recall.task.sequences import from_last_token
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.statistics import Statistic, per_seed
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.edited_runs import run_edited
from align_circuits.tables.tables import Table

DISTANCES = {"itself": 0, "separator": 1, "subject before": 3}
"""The tokens that the last token of an ICL prompt is made to attend to, by their distance."""

INTACT = "as it is"
"""The place of rows without an edit."""


@dataclass(frozen=True)
class FinetunedModels:
    """The finetuned models of the study."""

    setup: gpt2.GPT2Setup
    kinds: tuple[gpt2.Finetuned, ...] = ("icl", "icl+grm")


def _jobs(config: FinetunedModels, inputs: Inputs) -> list[Measurement]:
    return [
        job
        for kind in ("pt", *config.kinds)
        for job in gpt2.each_seed(force, config.setup, inputs, {"kind": kind, "n": config.setup.n_prompts}, kind=kind)
    ]


def force(*, setup: Mapping[str, Any], kind: gpt2.Kind, trained: str, seed: int) -> list[dict[str, Any]]:
    """Forces the attention of one model on ICL about held-out subjects; the function of a job.

    Returns:
        The rows of `forced`; and with match `"attention"` the share of attention that each layer gives the query
        subject at the last position, on `"ICL"` and on `"ICL+Grm"` with one grammar token, in the column of places.
    """
    made, model = gpt2.GPT2Setup.from_config(setup), gpt2.model_of(setup, kind, seed, trained)
    tasks = {
        "ICL": made.demonstrations(seed, "icl", held_out=True),
        "ICL+Grm": made.demonstrations(seed, "icl+grm", held_out=True, grammar_lens=(1, 1)),
    }
    prompts = {name: task.sample(made.n_prompts, seed=seed) for name, task in tasks.items()}
    rows = forced(model, prompts["ICL"], made.world_of(seed))
    for name, batch in prompts.items():
        shares = score_heads(model, batch).where(metric="query_subject", level="layer").frame
        rows += [
            {"layer": layer, "place": name, "match": "attention", "value": share}
            for layer, share in zip(shares["layer"], shares["value"], strict=True)
        ]
    return rows


def with_relation_back(prompts: Prompts, name: str, distance: int) -> Prompts:
    """Returns prompts with another relation: from the last token of each to the token at some distance before it."""
    key = prompts.mask.shape[1] - 1 - distance
    keys = (torch.arange(prompts.mask.shape[1]) == key).expand_as(prompts.mask)
    return replace(prompts, relations={**prompts.relations, name: from_last_token(name, keys, prompts.mask)})


def forced(model: Any, prompts: Prompts, world: RecallWorld) -> list[dict[str, Any]]:
    """Returns what ICL prompts recall where the last token attends to one token alone, in one layer.

    Returns:
        A row for each layer, place (`DISTANCES`; no layer and `INTACT` without an edit) and match (`"exact"`,
        `"type"`, `"subject"`, `"attribute"`): the share of prompts.
    """
    for name, distance in DISTANCES.items():
        prompts = with_relation_back(prompts, name, distance)
    keys = [(None, INTACT), *((layer, name) for layer in range(model.cfg.n_layers) for name in DISTANCES)]
    edit_sets: list[list[Edit]] = [
        [] if layer is None else [Clamp([head for head in heads_of(model.cfg) if head[0] == layer], relation=name)]
        for layer, name in keys
    ]
    tokens = torch.zeros(len(edit_sets), len(prompts), dtype=torch.long)

    def keep(index: int, rows: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"]) -> None:
        tokens[index, rows] = logits.argmax(1).cpu()

    prompt, query = (prompts.column(name) for name in ("prompt", "query_pos"))
    run_edited(model, prompts, edit_sets, prompt=prompt, query=query, on_logits=keep)
    subject, type_ = (prompts.latent[name][:, -1] for name in ("subject", "type"))
    facts = torch.from_numpy(world.facts)
    return [
        {"layer": layer, "place": name, "match": match, "value": float(correct.mean())}
        for (layer, name), predicted in zip(keys, tokens, strict=True)
        for match, correct in recall_matches(predicted, subject, type_, facts).items()
    ]


def _gain(kind: str, layer: int, place: str) -> Statistic:
    exact = per_seed(kind=kind, match="exact")
    return exact.at(layer=layer, place=place) - exact.at(place=INTACT)


_FORCED = _gain("icl+grm", 0, "itself")
_MORE_ATTENTION = per_seed(match="attention", layer=0).rise("place", "ICL", "ICL+Grm")

_CLAIMS = [
    Claim(
        "After ICL+Grm, layer 1 reads the subject where an attribute is due after grammar, and hardly on ICL "
        "(its attention there, ICL+Grm minus ICL)"
    ).at_least(0.3, _MORE_ATTENTION.at(kind="icl+grm"), _MORE_ATTENTION.at(kind="icl"), "after ICL"),
    Claim(
        "That is what is missing: made to read the query subject, it recalls in context (gain of exact match, held-out)"
    ).at_least(0.5, _FORCED, _gain("icl+grm", 0, "separator"), "made to read the separator"),
    Claim("It is that layer's doing (gain of exact match)").at_least(
        0.5, _FORCED, _gain("icl+grm", 1, "itself"), "layer 2 made to read it"
    ),
    Claim("Finetuning has learned the rest (gain of exact match)").at_least(
        0.5, _FORCED, _gain("pt", 0, "itself"), "the pretrained model so made"
    ),
]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    captions = {"pt": "pretrained", "icl": "after ICL", "icl+grm": "after ICL+Grm"}
    frame: Any = table.where(match="exact").frame
    panels = {}
    for kind, of_kind in frame.groupby("kind", sort=False):
        grid = of_kind.groupby(["layer", "place"])["value"].mean().unstack("layer")
        grid.columns = [f"layer {int(layer) + 1}" for layer in grid.columns]
        grid.loc[INTACT] = of_kind[of_kind["place"] == INTACT]["value"].mean()
        panels[captions[kind]] = grid.loc[[*reversed(DISTANCES), INTACT]]
    value = "exact match\non ICL, held out"
    return {"": plots.accuracy_grids(panels, x="forced in", y="the query subject reads", value=value)}


BRIDGE = Experiment(
    "recall/bridge",
    "What does ICL lack after finetuning on ICL+Grm?",
    f"beyond {SOURCE}",
    study(
        "recall/bridge",
        *(FinetunedModels(setup) for setup in (gpt2.SMOKE, gpt2.CPU_TWELVE, gpt2.PAPER)),
        jobs=_jobs,
        train=gpt2.pretrainings,
        summarize=measured_after_facts,
    ),
    drawn_if_facts_are_learned(_draw),
    only_if_facts_are_learned(_CLAIMS),
    "In the paper ICL follows ICL+Grm by itself (finding 3, Fig. 15).",
    about=About.BEYOND,
)
