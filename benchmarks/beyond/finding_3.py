"""Beyond the paper: what decides whether finetuning on ICL+Grm brings recall in context, the paper's finding 3.

Two readings of S_ft, three losses, layer-1 attention as it is or forced, and grammar tokens after the query.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.beyond.forced_attention import with_relation_back
from align_circuits.hooks.edits import Clamp, Edit
from align_circuits.hooks.head_names import heads_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Claim, checks_of
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, on_one_thread
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.studies import FACTS_LEARNED, SOURCE, know_their_facts, study
from align_circuits.papers.recall.metrics import recall_matches
from align_circuits.papers.recall.task.sequences import Predicted, followed_by_grammar
from align_circuits.papers.statistics import NOT_MEASURED, Statistic, levels, per_seed, share_of
from align_circuits.report import plots
from align_circuits.run.edited_runs import run_edited
from align_circuits.tables.tables import Table

LOSSES: dict[Predicted, str] = {
    "all": "next-token loss",
    "attributes": "loss on attributes alone",
    "no first grammar": "no loss on grammar after a subject",
}
"""The loss of finetuning, each with a caption."""

READINGS: dict[gpt2.Finetuned, str] = {"icl+grm": "S_ft from 1", "icl+grm from 0": "S_ft from 0"}

ATTENTION = ("free", "query subject", "separator")
"""What the last token attends to in layer 1: what it does, or one token alone."""

_PT: dict[str, Any] = {"kind": None, "match": "pt"}
"""The exact match of pretrained models on PT."""

_ON_ICL: dict[str, Any] = {"match": "exact", "grammar": 0, "attention": "free"}


@dataclass(frozen=True)
class Obstacles:
    """The finetunings that are compared, of every reading and loss."""

    setup: gpt2.GPT2Setup


def _jobs(config: Obstacles, inputs: Inputs) -> list[Measurement]:
    setup = config.setup
    jobs = gpt2.each_seed(transfer, setup, inputs, {"n": setup.n_prompts}, kind="pt", loss="all")
    for kind in READINGS:
        for loss in LOSSES:
            keys = {"kind": kind, "loss": loss, "n": setup.n_prompts}
            jobs += gpt2.each_seed(transfer, setup, inputs, keys, kind=kind, loss=loss)
    return jobs


def transfer(
    *, setup: Mapping[str, Any], kind: gpt2.Kind, loss: Predicted, trained: str, seed: int
) -> list[dict[str, Any]]:
    """Measures what one model recalls about held-out subjects after demonstrations without grammar: a job's function.

    Returns:
        A row for each number of `grammar` tokens after the query subject (0, 1 and the most of finetuning), `attention`
        (`ATTENTION`) and match, and with match `"pt"` the exact match on PT: shares of prompts.
    """
    on_one_thread()
    made = gpt2.GPT2Setup.from_config(setup)
    if kind == "untrained":
        raise ValueError("an untrained model recalls nothing: give 'pt' or a kind of finetuning")
    run = gpt2.pretrained(made, seed, trained) if kind == "pt" else gpt2.finetuned(made, seed, kind, trained, loss)
    model, world = load(run.model), made.world_of(seed)
    facts, log = torch.from_numpy(world.facts), run.log
    rows: list[dict[str, Any]] = [{"match": "pt", "value": float(log["pt.exact"].iloc[-1])}]
    demonstrations = made.demonstrations(seed, "icl", held_out=True).sample(made.n_prompts, seed=seed)
    subject, type_ = (demonstrations.latent[name][:, -1] for name in ("subject", "type"))
    first_layer = [head for head in heads_of(model.cfg) if head[0] == 0]
    for grammar in (0, 1, made.grammar_lens[1]):
        prompts = followed_by_grammar(demonstrations, world, grammar, seed)
        for name, distance in (("query subject", grammar), ("separator", grammar + 1)):
            prompts = with_relation_back(prompts, name, distance)
        edit_sets: list[list[Edit]] = [
            [] if attention == "free" else [Clamp(first_layer, relation=attention)] for attention in ATTENTION
        ]
        tokens = torch.zeros(len(edit_sets), len(prompts), dtype=torch.long)

        def keep(
            index: int, places: Int[Tensor, " row"], logits: Float[Tensor, "row d_vocab"], tokens: Tensor = tokens
        ) -> None:
            tokens[index, places] = logits.argmax(1).cpu()

        prompt, query = (prompts.column(name) for name in ("prompt", "query_pos"))
        run_edited(model, prompts, edit_sets, prompt=prompt, query=query, on_logits=keep)
        rows += [
            {"grammar": grammar, "attention": attention, "match": match, "value": float(correct.mean())}
            for attention, predicted in zip(ATTENTION, tokens, strict=True)
            for match, correct in recall_matches(predicted, subject, type_, facts).items()
        ]
    return rows


def _exact(kind: str | None, loss: str | None, **where: Any) -> Statistic:
    """Exact match on ICL about held-out subjects."""
    return per_seed(**{**_ON_ICL, **where, "kind": kind, "loss": loss})


def _claims_of_those_that_know(table: Table) -> list[Claim]:
    most = int(max(levels(table, "grammar")))
    ones, zeros = READINGS
    from_one, from_zero = "S_ft from 1", "S_ft from 0"
    claims = [
        Claim(f"{from_zero}: ICL about held-out subjects comes (exact match)", "about 0.9").at_least(
            0.5, _exact(zeros, "all"), _exact(None, None), "before finetuning"
        ),
        Claim(f"{from_one}: it does not (exact match)", "about 0.9").at_most(
            0.2, _exact(ones, "all"), _exact(zeros, "all"), from_zero
        ),
        Claim(f"{from_one}: it comes if {most} grammar tokens follow the query (exact match)").at_least(
            0.5, _exact(ones, "all", grammar=most), _exact(ones, "all"), "none follows"
        ),
    ]
    for loss in ("attributes", "no first grammar"):
        free, of_loss = _exact(ones, loss), f"{from_one}, {LOSSES[loss]}"
        claims += [
            Claim(f"{of_loss}: it does not come by itself (exact match)").at_most(
                0.2, free, _exact(zeros, loss), from_zero
            ),
            Claim(f"{of_loss}: one grammar token after the query suffices (exact match)").at_least(
                0.5, free.at(grammar=1), free, "none"
            ),
            Claim(f"{of_loss}: so does layer 1 made to read the query subject (exact match)").at_least(
                0.5, free.at(attention="query subject"), free.at(attention="separator"), "made to read the separator"
            ),
        ]
    forced = {loss: _exact(ones, loss, attention="query subject") for loss in ("all", "attributes")}
    claim = f"{from_one}, next-token loss: layer 1 made to read the query subject does not suffice (exact match)"
    return [*claims, Claim(claim).at_most(0.2, forced["all"], forced["attributes"], "loss on attributes alone")]


def _check(table: Table) -> list[Check]:
    facts, on_icl = (share_of(per_seed(**keys)(table) >= FACTS_LEARNED) for keys in (_PT, {"kind": None, **_ON_ICL}))
    learned = Claim(
        "Facts are learned in pretraining, as finding 3 presupposes (exact match on PT "
        f"{FACTS_LEARNED:g} or more, share of seeds)"
    ).at_least(0.5, facts, on_icl, "on ICL")
    known, claims = know_their_facts(table, **_PT), _claims_of_those_that_know(table)
    if not len(known):
        claims = [replace(claim, statistic=NOT_MEASURED, control=NOT_MEASURED) for claim in claims]
    return checks_of([learned.check(table), *claims], known)


def _draw(table: Table) -> Mapping[str, go.Figure]:
    learned = know_their_facts(table, **_PT)
    shown: Any = (learned if len(learned) else table).where(match="exact").frame
    captions = {"free": "free", "query subject": "forced"}
    panels = {}
    for kind, reading in READINGS.items():
        rows = shown[shown["kind"] == kind]
        rows = rows.assign(loss=rows["loss"].map(LOSSES))
        for attention, caption in captions.items():
            of_attention = rows[rows["attention"] == attention]
            cells = of_attention.groupby(["loss", "grammar"])["value"].mean().unstack("grammar")
            cells.columns = [str(int(grammar)) for grammar in cells.columns]
            panels[f"{reading}, {caption}"] = cells.loc[[*reversed(LOSSES.values())]]
    return {
        "": plots.accuracy_grids(
            panels, x="grammar tokens after the query", y="loss", value="exact match\non ICL, held out"
        )
    }


FINDING_3 = Experiment(
    "recall/finding3",
    "What decides whether finetuning on ICL+Grm brings recall in context?",
    f"beyond {SOURCE}: its finding 3",
    study(
        "recall/finding3",
        *(Obstacles(setup) for setup in (gpt2.SMOKE, gpt2.CPU_TWELVE, gpt2.PAPER)),
        jobs=_jobs,
        train=gpt2.pretrainings,
    ),
    _draw,
    _check,
    "In the paper ICL follows ICL+Grm by itself (finding 3, Fig. 15). In the panels *forced*, the last token attends "
    "to the query subject alone in layer 1.",
    about=About.BEYOND,
)
