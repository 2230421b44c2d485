"""The heads of trained attention-only models beside the constructions: Figs. 9 to 12 and 20 to 26."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor, nn

from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.names import name_of
from align_circuits.models.loading import chosen_device
from align_circuits.papers.claims import Check, Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows
from align_circuits.papers.recall.figures.attention_only_models import (
    BOTH_POSITIONS,
    PAPER,
    PAPER_LONG,
    SMALLEST,
    AttentionOnlyModels,
    AttentionOnlySetup,
    Positions,
)
from align_circuits.papers.recall.figures.studies import (
    FACTS_LEARNED,
    SOURCE,
    bars,
    know_their_facts,
    of_those_that_know,
    study,
)
from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.models.training import FINETUNING, Stage, probe, train_stage
from align_circuits.papers.recall.task.sequences import DemonstrationsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import Directions
from align_circuits.papers.statistics import Statistic, over_seeds, per_seed
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.forward_pass import capture
from align_circuits.tables.tables import Table

Role = Literal["subject", "relation"]
ROLES: tuple[Role, ...] = get_args(Role)
POSITIONS: tuple[Positions, ...] = get_args(Positions)

RAISED = {
    "subject": ("subject to own", "subject to other values"),
    "relation": ("relation to own", "relation to other values"),
    "value": ("value to its type", "value to other values"),
}
"""Which blocks of W_OV are compared, by the attended token: its own logits and others."""

ATTENDED = ("subject", "query_subject", "relation", "same_type", "grammar")
"""The relations of the last position by which heads are scored."""

VALUES = ", among values"
"""What a cosine among the logits of values alone is called."""

KEYS = ["positions", "seed", "stage", "sequences", "metric", "head", "what", "query", "key"]


def measure_heads(*, seed: int, setup: Mapping[str, Any], shown: bool = True) -> list[dict[str, Any]]:
    """Trains one model in both stages and measures its heads before, between and after; the function of a job.

    All seeds have the facts of one world. Figures show the attention and the W_OV of the seed that is `shown`.
    """
    made = AttentionOnlySetup(**setup)
    world = made.world()
    seen, held_out = world.split(made.n_seen, seed=seed)
    facts, in_context = made.facts(world), DemonstrationsTask(world, made.n_demos, subjects=seen)
    tasks = {"pretraining": facts, "in context": replace(in_context, query_subjects=held_out)}
    probes = {name: task.sample(made.n, seed=1) for name, task in tasks.items()}
    model, every = made.model(seed), {"log_every": 10**6, "checkpoint_every": 10**6}
    pretraining = made.schedule_of_pretraining(**every)
    finetuning = made.schedule(FINETUNING, made.finetuning, **every)
    stages = {
        "untrained": None,
        "pretrained": Stage(facts, pretraining, made.batch_size),
        "finetuned": Stage(in_context, finetuning, made.batch_size, "last"),
    }
    own_tasks = {name: {sequences: tasks[sequences]} for name, (sequences, *_) in _STAGES.items()}
    rows: list[dict[str, Any]] = []
    for name, stage in stages.items():
        if stage is not None:
            train_stage(model, stage, seed=seed, device=chosen_device(None), progress=False)
            model.cpu()  # where the constructions are
        of_stage = [row for sequences, prompts in probes.items() for row in measure(model, world, prompts, sequences)]
        of_stage += blocks(model, world)
        of_stage += localized(model, tasks if stage is None else own_tasks[name], made.n // 4)
        if shown:
            of_stage += [row for which, prompts in probes.items() for row in attention_map(model, prompts[:1], which)]
            of_stage += weight_slices(model, world) if made.positions == "relative" else []
        rows += [{"stage": name, "n": made.n, **row} for row in of_stage]
    return rows


def measure(model: AttentionOnly, world: RecallWorld, prompts: Prompts, sequences: str) -> list[dict[str, Any]]:
    """Returns accuracy, attention and the cosines of each head's output with the constructions', at the last position.

    The cosine with f_subj is dominated by a part that all subjects share, -1 at all values, so that another subject's
    is nearly as high. `f_subj, centred` leaves it out: the mean over subjects is taken from the construction, and that
    over prompts from the output. Each cosine stands beside that with another subject's, or another type's. Those that
    end in `VALUES` leave out logits that no construction touches: of subjects, relations, grammar and separators.
    """
    directions, rows = Directions(world, 1), []
    rows += [{"metric": name, "value": float(x.mean())} for name, x in probe(model, prompts, world).items()]
    relations = [name for name in ATTENDED if name in prompts.relations]
    table = score_heads(model, prompts, [f"{name}_attention" for name in relations]).heads().frame
    rows += [
        {"metric": "attention", "head": head, "what": str(name).removesuffix("_attention"), "value": value}
        for head, name, value in table[["head", "metric", "value"]].itertuples(index=False)
    ]
    site = name_of("z", 0)
    z = capture(model, prompts, [site])[site][:, -1]
    with torch.no_grad():
        outputs = torch.einsum("nhe,hev->nhv", z, model.W_O)
    subject, type_ = (prompts.latent[name][:, -1] for name in ("subject", "type"))
    values = torch.stack(directions.values)
    theory = {
        "f_subj": directions.facts[subject] - directions.value,
        "f_rel": values[type_],
        "f_subj of another": directions.facts[(subject + 1) % world.n_subjects] - directions.value,
        "f_rel of another": values[(type_ + 1) % world.n_types],
        "f_subj, centred": directions.facts[subject] - directions.facts.mean(0),
        "f_subj, centred, of another": directions.facts[(subject + 1) % world.n_subjects] - directions.facts.mean(0),
    }
    for name, direction in theory.items():
        compared = outputs - outputs.mean(0) if "centred" in name else outputs
        for what, logits in ((name, slice(None)), (name + VALUES, directions.value > 0)):
            cosines = nn.functional.cosine_similarity(compared[..., logits], direction[:, None, logits], dim=-1).mean(0)
            rows += [{"metric": "cosine", "head": h, "what": what, "value": v} for h, v in enumerate(cosines.tolist())]
    return [{"sequences": sequences, **row} for row in rows]


def localized(model: AttentionOnly, tasks: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Returns for each role the number of heads that `localize` names, and a 1 for each of these heads."""
    rows: list[dict[str, Any]] = []
    for sequences, task in tasks.items():
        for role, heads in localize(model, task, max(8, n), n_controls=0).heads_by_role.items():
            keys = {"sequences": sequences, "what": role}
            rows.append({"metric": "heads named", **keys, "value": len(heads)})
            rows += [{"metric": "named", **keys, "head": head, "value": 1.0} for _, head in heads]
    return rows


def blocks(model: AttentionOnly, world: RecallWorld) -> list[dict[str, Any]]:
    """Returns the mean entries of blocks of each W_OV, among them those from other tokens of the same kind.

    From a subject to its attributes and to the other values: the first is larger where the head boosts, the second
    smaller where it suppresses. Which of the two it is can be read only beside a zero: the entries to other tokens.
    """
    of = Directions(world, 1)
    with torch.no_grad():
        ov = model.ov
    subjects, other_tokens = torch.outer(of.value, of.subjects), 1 - of.value
    attributes, stated = torch.zeros_like(of.same_type), torch.zeros_like(of.same_type)
    attributes[:, : world.n_subjects] = of.facts.T
    for relation, values in zip(world.relation_ids, of.values, strict=True):
        stated[:, relation] = values
    masks = {
        "subject to own": attributes,
        "subject to other values": subjects - attributes,
        "subject to other tokens": torch.outer(other_tokens, of.subjects),
        "relation to own": stated,
        "relation to other values": torch.outer(of.value, of.relations) - stated,
        "value to its type": of.same_type,
        "value to other values": torch.outer(of.value, of.value) - of.same_type,
    }
    means = [
        {"metric": "weight", "head": head, "what": name, "value": float((ov[head] * mask).sum() / mask.sum())}
        for name, mask in masks.items()
        for head in range(model.cfg.n_heads)
    ]
    raised = [
        {"metric": "raised", "head": head, "what": what, "value": raised_above(ov[head], masks[own], masks[others])}
        for what, (own, others) in RAISED.items()
        for head in range(model.cfg.n_heads)
    ]
    return [*means, *raised]


def raised_above(
    ov: Float[Tensor, "logit token"], own: Float[Tensor, "logit token"], others: Float[Tensor, "logit token"]
) -> float:
    """Returns how often a token raises one of its own logits above another one: 0 to 1, chance .5, ties half.

    Args:
        ov: W_OV of a head, from the attended token to logits.
        own: 1 at each token's own logits; tokens without any are left out.
        others: 1 at the logits that they are compared with.
    """
    shares = []
    for token in own.any(0).nonzero()[:, 0]:
        high, low = ov[own[:, token] > 0, token], ov[others[:, token] > 0, token]
        difference = high[:, None] - low
        shares.append(((difference > 0).double() + (difference == 0).double() / 2).mean())
    return float(torch.stack(shares).mean())


def attention_map(model: AttentionOnly, prompt: Prompts, sequences: str) -> list[dict[str, Any]]:
    """Returns every head's attention on one prompt."""
    site = name_of("pattern", 0)
    pattern = capture(model, prompt, [site])[site][0]
    keys = {"metric": "map", "sequences": sequences}
    return [
        {**keys, "head": head, "query": query, "key": key, "value": pattern[head, query, key].item()}
        for head, query, key in np.ndindex(*pattern.shape)
        if key <= query
    ]


def weight_slices(model: AttentionOnly, world: RecallWorld) -> list[dict[str, Any]]:
    """Returns W_OV on the first eight subjects, eight values of two types, four grammar tokens, [sep], relations."""
    parts = (world.subject_ids[:8], world.value_ids[0][:8], world.value_ids[1][:8], world.grammar_ids[:4])
    ids = [token for part in (*parts, [world.separator], world.relation_ids) for token in part]
    with torch.no_grad():
        ov = model.ov[:, ids][:, :, ids]
    return [
        {"metric": "slice", "head": head, "query": row, "key": column, "value": ov[head, row, column].item()}
        for head, row, column in np.ndindex(*ov.shape)
    ]


def _jobs(config: AttentionOnlyModels, _: Inputs) -> list[Measurement]:
    jobs = config.jobs(measure_heads)
    return [replace(job, config={**job.config, "shown": job.seed == config.first_seed}) for job in jobs]


def heads_table(_: AttentionOnlyModels, measurements: Rows) -> pd.DataFrame:
    """Returns all rows with values to four digits."""
    frame = measurements["measure_heads"].reindex(columns=[*KEYS, "value", "n"])
    return frame.assign(value=frame["value"].astype(float).round(4), low=np.nan, high=np.nan)


def _by_head(table: Table, **where: Any) -> Float[ndarray, "seed head"]:
    return table.where(**where).frame.pivot(index="seed", columns="head", values="value").to_numpy(float)


def head_of(table: Table, role: Role) -> Int[ndarray, " seed"]:
    """Returns each seed's head of a role: that with the most attention to the role's tokens after pretraining.

    The relation head is not the subject head. The table is about one kind of positions.
    """
    where = {"stage": "pretrained", "sequences": "pretraining", "metric": "attention"}
    subject = _by_head(table, what="subject", **where).argmax(1)
    if role == "subject":
        return subject
    relation = _by_head(table, what="relation", **where)
    return np.where(np.arange(relation.shape[1]) == subject[:, None], -1.0, relation).argmax(1)


def _of(role: Role, **where: Any) -> Statistic:
    """A measure of the head that has a role."""

    def of_heads(table: Table, keys: Mapping[str, Any]) -> Float[ndarray, " seed"]:
        heads = head_of(table, role)
        return _by_head(table, **keys)[np.arange(len(heads)), heads]

    return Statistic(of_heads, where)


_STAGES = {
    "pretrained": ("pretraining", "untrained", "before training"),
    "finetuned": ("in context", "pretrained", "before finetuning"),
}
"""The sequences of each stage, the stage before it, and its caption."""

_OUTPUTS: list[tuple[str, Role, str]] = [
    ("the subject head's output is f_subj (cosine, centred)", "subject", "f_subj, centred"),
    ("the relation head's output is f_rel (cosine)", "relation", "f_rel"),
]
_OF_HEADS: list[tuple[str, Role, str, str, str]] = [
    ("after pretraining a head attends to the subject", "subject", "attention", "subject", "pretrained"),
    ("another attends to the latest relation token", "relation", "attention", "relation", "pretrained"),
    ("the subject head's output is f_subj (cosine, centred)", "subject", "cosine", "f_subj, centred", "pretrained"),
    ("the relation head's output is f_rel (cosine)", "relation", "cosine", "f_rel", "pretrained"),
    (
        "W_OV of the subject head raises a subject's values above others (share of pairs)",
        *("subject", "raised", "subject", "pretrained"),
    ),
    (
        "W_OV of the relation head raises a type's values above others (share of pairs)",
        *("relation", "raised", "relation", "pretrained"),
    ),
    (
        "after finetuning the subject head attends to the query subject",
        *("subject", "attention", "query_subject", "finetuned"),
    ),
    ("and the relation head to attributes", "relation", "attention", "same_type", "finetuned"),
    ("whose output is then f_rel (cosine)", "relation", "cosine", "f_rel", "finetuned"),
    ("and the subject head's still f_subj (cosine, centred)", "subject", "cosine", "f_subj, centred", "finetuned"),
    (
        "W_OV of the relation head then raises values of an attribute's type above others (share of pairs)",
        *("relation", "raised", "value", "finetuned"),
    ),
    *(
        (f"{stage}, among the logits of values alone: {claim}", role, "cosine", what + VALUES, stage)
        for stage in _STAGES
        for claim, role, what in _OUTPUTS
    ),
]
"""Claims about the head of a role: the role, the metric, of what, and the stage."""


def _claim_of_head(claim: str, role: Role, metric: str, what: str, stage: str) -> Claim:
    sequences, before, control_is = _STAGES[stage]
    control = {"stage": before}
    if "centred" in what or (what.removesuffix(VALUES), stage) == ("f_rel", "pretrained"):
        other = "f_subj, centred, of another" if "centred" in what else "f_rel of another"
        control, control_is = {"what": other + VALUES if what.endswith(VALUES) else other}, "another's"
    measured = _of(role, stage=stage, metric=metric, sequences=None if metric == "raised" else sequences, what=what)
    return Claim(claim).at_least(0.8, measured, measured.at(**control), control_is)


def _checks(table: Table, positions: Positions) -> list[Check]:
    table, name = table.where(positions=positions), f"{positions.capitalize()} positions"
    exact: dict[str, Any] = {"sequences": "pretraining", "metric": "exact"}
    knows = per_seed(**exact) >= FACTS_LEARNED
    learned = Claim(
        f"{name}: facts are learned, as all that follows presupposes "
        f"(share of seeds with an exact match of {FACTS_LEARNED:g} or more)"
    ).at_least(0.5, knows.at(stage="pretrained"), knows.at(stage="untrained"), "before training")
    known = know_their_facts(table, stage="pretrained", **exact)
    return [learned.check(table), *of_those_that_know(lambda of: _claims_about_heads(of, name), known, table)]


def _claims_about_heads(table: Table, name: str) -> list[Claim]:
    # a result may have been kept before all of this was measured
    measured = set(zip(table.frame["metric"], table.frame["what"], strict=True))
    claims = [
        _claim_of_head(f"{name}: {claim}", role, metric, what, stage)
        for claim, role, metric, what, stage in _OF_HEADS
        if (metric, what) in measured
    ]
    for stage, role in (("pretrained", "subject"), ("pretrained", "relation"), ("finetuned", "same_type")):
        named = per_seed(metric="heads named", sequences=_STAGES[stage][0], what=role) > 0
        claim = f"{name}: localize names a head for {role!r}, {stage} (share of seeds)"
        claims.append(Claim(claim).at_least(1.0, named.at(stage=stage), named.at(stage="untrained"), "before training"))
    recalled = per_seed(sequences="in context", metric="exact")
    after, before = (recalled.at(stage=stage) for stage in ("finetuned", "pretrained"))
    claim = Claim(f"{name}: held-out subjects are recalled (exact match)")
    return [*claims, claim.at_least(0.8, after, before, "before finetuning")]


def _draw_cosines(table: Table) -> go.Figure:
    cosines = {
        what: pd.DataFrame(
            {"stage": stage, "role": f"{role} head", **over_seeds(of_head(table)).row}
            for stage, (sequences, *_) in _STAGES.items()
            for role in ROLES
            for of_head in [_of(role, stage=stage, sequences=sequences, metric="cosine", what=what)]
        )
        for what in table.where(metric="cosine").frame["what"].unique()
        if not what.endswith(VALUES)
    }
    return bars(cosines, ["stage", "role"], "cosine, mean over seeds", (-1.0, 1.0), height=420)


def _draw_weights(table: Table, stage: str, role: Role) -> go.Figure:
    slices = table.where(stage=stage, metric="slice", head=int(head_of(table, role)[0])).frame
    entries = slices.pivot(index="query", columns="key", values="value").to_numpy(float)
    bound = float(np.abs(entries).max())
    figure = go.Figure(go.Heatmap(z=entries, colorscale=plots.DIVERGING, zmin=-bound, zmax=bound))
    figure.update_yaxes(autorange="reversed", title="logit of").update_xaxes(title="attended token")
    return plots.styled(figure, "", height=460)


def _draw(table: Table) -> dict[str, go.Figure]:
    figures: dict[str, go.Figure] = {}
    for positions in POSITIONS:
        models = table.where(positions=positions)
        for stage, (sequences, *_) in _STAGES.items():
            attention: Any = models.where(stage=stage, sequences=sequences, metric="map").frame
            maps = {f"head {int(head)}": of_head.assign(step=0) for head, of_head in attention.groupby("head")}
            figures[f"{positions}, {stage}: attention"] = plots.attention_course(maps)
        figures[f"{positions}: cosines with the constructions"] = _draw_cosines(models)
    relative = table.where(positions="relative")
    weights = {
        f"{stage}: W_OV of the {role} head": _draw_weights(relative, stage, role) for stage in _STAGES for role in ROLES
    }
    return figures | weights


CPU = AttentionOnlySetup(
    n_subjects=32,
    n_values=4,
    n_types=3,
    n_grammar=6,
    n_slots=4,
    n_facts=3,
    n_demos=5,
    n_seen=16,
    d_head=64,
    pretraining=1200,
    finetuning=400,
    lr=5e-3,
)
"""At the paper's learning rate, 0.001, so small a model had learned the type after 1,500 steps and no subject yet."""

CPU_EIGHT_TYPES = replace(
    CPU, n_subjects=64, n_values=8, n_types=8, n_facts=5, n_seen=32, d_head=128, pretraining=3000, finetuning=600
)
"""As many types and facts as in the paper: of three types, as in `CPU`, a head seldom writes f_subj or f_rel alone."""

SMOKE = replace(SMALLEST, n_values=4, n_slots=2, pretraining=6, finetuning=3, lr=1e-3, n=12)

HEADS = Experiment(
    "recall/heads",
    "The heads of trained attention-only models beside the constructions",
    f"{SOURCE}, Figs. 9 to 12, 20 to 23, 25, 26",
    study(
        "recall/heads",
        *(
            AttentionOnlyModels(setup, seeds, BOTH_POSITIONS)
            for setup, seeds in ((SMOKE, 1), (CPU_EIGHT_TYPES, 12), (PAPER, 6))
        ),
        paper_long=AttentionOnlyModels(PAPER_LONG, 65, BOTH_POSITIONS),  # see PAPER_LONG
        jobs=_jobs,
        summarize=heads_table,
    ),
    _draw,
    lambda table: [check for positions in POSITIONS for check in _checks(table, positions)],
    "One head 'closely matches f_subj', one 'matches f_rel', before and after finetuning; one seed is shown.",
)
