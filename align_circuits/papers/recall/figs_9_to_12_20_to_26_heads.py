"""Contextual recall (Vasudeva et al., 2026): the heads of trained attention-only models, Figs. 9 to 12 and 20 to 26."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import nn

from align_circuits.heads.localize_heads import localize
from align_circuits.heads.score import score_heads
from align_circuits.hooks.names import name_of
from align_circuits.jobs import Job, run_jobs
from align_circuits.papers.claims import Check, Experiment, Measured, over_seeds
from align_circuits.papers.recall.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.papers.recall.constructions import Directions
from align_circuits.papers.recall.pretraining import FINETUNING, PRETRAINING, Stage, probe, train_stage
from align_circuits.papers.recall.propositions import SOURCE
from align_circuits.papers.recall.tasks import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.run.forward_pass import capture
from align_circuits.tables.tables import Provenance, Table

ATTENDED = ("subject", "query_subject", "relation", "same_type", "grammar")
"""The relations of the last position that heads are measured by."""


@dataclass(frozen=True)
class Training:
    """The size of world, model and training."""

    n_subjects: int = 256
    n_values: int = 32
    n_types: int = 8
    n_grammar: int = 20
    n_slots: int = 10
    n_facts: int = 5
    n_demos: int = 5
    n_seen: int = 128
    d_head: int = 256
    pretraining: int = 2000
    """Steps."""
    finetuning: int = 1000
    batch_size: int = 64
    lr: float = 1e-3
    n: int = 256
    """Prompts that are measured."""

    def world(self) -> RecallWorld:
        """Returns the world."""
        values = (self.n_values,) * self.n_types
        return RecallWorld(self.n_subjects, values, self.n_grammar, div=None, relation_tokens=True)


def heads_cell(seed: int, positions: Literal["relative", "absolute"], **size: Any) -> list[dict[str, Any]]:
    """Trains one model in both stages, and returns what its heads do before, between and after."""
    config = Training(**size)
    world = config.world()
    seen, held_out = world.split(config.n_seen, seed=seed)
    facts = FactsTask(world, config.n_facts, config.n_slots, p_grammar=0.0)
    shown = DemonstrationsTask(world, config.n_demos, subjects=seen)
    tested = replace(shown, query_subjects=held_out)
    probes = {"pretraining": facts.sample(config.n, seed=1), "in context": tested.sample(config.n, seed=1)}
    model = AttentionOnly(
        AttentionOnlyConfig(world.d_vocab, facts.length - 1, config.d_head, positions=positions), seed=seed
    )
    common = {"lr": config.lr, "log_every": 10**6, "checkpoint_every": 10**6}
    stages = {
        "untrained": None,
        "pretrained": Stage(
            facts, replace(PRETRAINING, steps=config.pretraining, schedule="cosine", **common), config.batch_size
        ),
        "finetuned": Stage(shown, replace(FINETUNING, steps=config.finetuning, **common), config.batch_size, "last"),
    }
    rows: list[dict[str, Any]] = []
    for name, stage in stages.items():
        if stage is not None:
            train_stage(model, stage, seed=seed, progress=False)
        found = [row for which, prompts in probes.items() for row in measure(model, world, prompts, which)]
        tasks = {"pretraining": facts, "in context": tested}
        read = {"pretrained": ["pretraining"], "finetuned": ["in context"]}.get(name, list(tasks))
        found += blocks(model, world) + localized(model, {which: tasks[which] for which in read}, config.n // 4)
        if seed == 0:
            found += [row for which, prompts in probes.items() for row in attention_map(model, prompts[:1], which)]
            found += weight_slices(model, world) if positions == "relative" else []
        rows += [{"stage": name, "n": config.n, **row} for row in found]
    return rows


def measure(model: AttentionOnly, world: RecallWorld, prompts: Prompts, sequences: str) -> list[dict[str, Any]]:
    """Returns accuracy, attention and the cosines of each head's output with the constructions', at the last position.

    The cosine with f_subj is dominated by what all subjects have in common, a minus at all values; hence beside it that
    with another subject's, and with another type's for f_rel.
    """
    of, rows = Directions(world, 1), []
    accuracy = probe(model, prompts, world)
    rows += [{"metric": name, "value": float(right.mean())} for name, right in accuracy.items()]
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
    subject, type_ = prompts.latent["subject"][:, -1], prompts.latent["type"][:, -1]
    values = torch.stack(of.values)
    theory = {
        "f_subj": of.facts[subject] - of.value,
        "f_rel": values[type_],
        "f_subj of another": of.facts[(subject + 1) % world.n_subjects] - of.value,
        "f_rel of another": values[(type_ + 1) % world.n_types],
    }
    for name, direction in theory.items():
        cosines = nn.functional.cosine_similarity(outputs, direction[:, None], dim=-1).mean(0)
        rows += [{"metric": "cosine", "head": h, "what": name, "value": v} for h, v in enumerate(cosines.tolist())]
    return [{"sequences": sequences, **row} for row in rows]


def localized(model: AttentionOnly, tasks: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Returns for each role how many heads `localize` names, and 1 for each head that it does."""
    rows: list[dict[str, Any]] = []
    for sequences, task in tasks.items():
        for role, heads in localize(model, task, max(8, n), draws=0).heads_by_role.items():
            common = {"sequences": sequences, "what": role}
            rows.append({"metric": "heads named", **common, "value": len(heads)})
            rows += [{"metric": "named", **common, "head": head, "value": 1.0} for _, head in heads]
    return rows


def blocks(model: AttentionOnly, world: RecallWorld) -> list[dict[str, Any]]:
    """Returns the mean entries of parts of each W_OV, over what attending to other tokens of the kind gives there.

    From a subject to its attributes and to the other values: positive and negative where the head boosts, zero and
    negative where it suppresses, which needs a zero to be told apart: other tokens are it.
    """
    of = Directions(world, 1)
    with torch.no_grad():
        ov = model.ov
    same = torch.stack([torch.outer(v, v) for v in of.values]).sum(0)
    subjects, rest = torch.outer(of.value, of.subjects), 1 - of.value
    own = torch.zeros_like(same)
    own[:, : world.n_subjects] = of.facts.T
    told = torch.zeros_like(same)
    for relation, values in zip(world.relation_ids, of.values, strict=True):
        told[:, relation] = values
    masks = {
        "subject to own": own,
        "subject to other values": subjects - own,
        "subject to other tokens": torch.outer(rest, of.subjects),
        "relation to own": told,
        "relation to other values": torch.outer(of.value, of.relations) - told,
        "value to its type": same,
        "value to other values": torch.outer(of.value, of.value) - same,
    }
    return [
        {"metric": "weight", "head": head, "what": name, "value": float((ov[head] * mask).sum() / mask.sum())}
        for name, mask in masks.items()
        for head in range(model.cfg.n_heads)
    ]


def attention_map(model: AttentionOnly, prompt: Prompts, sequences: str) -> list[dict[str, Any]]:
    """Returns every head's attention on one prompt."""
    site = name_of("pattern", 0)
    pattern = capture(model, prompt, [site])[site][0]
    return [
        {
            "metric": "map",
            "sequences": sequences,
            "head": head,
            "query": query,
            "key": key,
            "value": pattern[head, query, key].item(),
        }
        for head in range(len(pattern))
        for query in range(pattern.shape[1])
        for key in range(query + 1)
    ]


def weight_slices(model: AttentionOnly, world: RecallWorld) -> list[dict[str, Any]]:
    """Returns W_OV on the first eight subjects, eight values of two types, four grammar tokens, [sep], relations."""
    ids = [
        *world.subject_ids[:8],
        *world.value_ids[0][:8],
        *world.value_ids[1][:8],
        *world.grammar_ids[:4],
        world.separator,
        *world.relation_ids,
    ]
    with torch.no_grad():
        ov = model.ov[:, ids][:, :, ids]
    return [
        {"metric": "slice", "head": head, "query": into, "key": source, "value": ov[head, into, source].item()}
        for head in range(len(ov))
        for into in range(len(ids))
        for source in range(len(ids))
    ]


@dataclass(frozen=True)
class Trainings:
    """One size, both kinds of positions, several seeds."""

    size: Training
    seeds: int


KEYS = ["positions", "seed", "stage", "sequences", "metric", "head", "what", "query", "key"]


def _run(config: Trainings, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    cells = [
        Job(f"{__name__}:heads_cell", {"positions": positions, **asdict(config.size)}, seed)
        for positions in ("relative", "absolute")
        for seed in range(config.seeds)
    ]
    frame: Any = run_jobs(cells, folder, jobs=jobs).whole().reindex(columns=[*KEYS, "value", "n"])
    frame["value"] = frame["value"].astype(float).round(4)
    for column in ("head", "query", "key"):
        frame[column] = frame[column].fillna(-1).astype(int)
    return Table(frame.assign(low=np.nan, high=np.nan), Provenance("heads", asdict(config)))


def _by_head(table: Table, **where: Any) -> Float[ndarray, "seed head"]:
    return table.where(**where).frame.pivot(index="seed", columns="head", values="value").to_numpy(float)


def named(table: Table, role: Literal["subject", "relation"], positions: str) -> Int[ndarray, " seed"]:
    """Returns which head of each seed has the role after pretraining: the one that attends most as it says.

    The relation head is another than the subject head.
    """
    where = {"positions": positions, "stage": "pretrained", "sequences": "pretraining", "metric": "attention"}
    subject = _by_head(table, what="subject", **where).argmax(1)
    if role == "subject":
        return subject
    relation = _by_head(table, what="relation", **where)
    return np.where(np.arange(relation.shape[1]) == subject[:, None], -1.0, relation).argmax(1)


def _of(table: Table, role: Literal["subject", "relation"], positions: str, **where: Any) -> Measured:
    """A number of the head that has a role, over seeds."""
    heads = named(table, role, positions)
    return over_seeds(_by_head(table, positions=positions, **where)[np.arange(len(heads)), heads])


def _check(table: Table) -> list[Check]:
    checks = []
    for positions in ("relative", "absolute"):
        before, after = ({"stage": stage} for stage in ("pretrained", "finetuned"))
        untrained = {"stage": "untrained"}
        accuracy = {"positions": positions, "sequences": "in context", "metric": "exact"}

        def right(stage: str, accuracy: Mapping[str, Any] = accuracy) -> Measured:
            return over_seeds(table.where(stage=stage, **accuracy).frame["value"].to_numpy(float))

        def found(stage: str, sequences: str, role: str, positions: str = positions) -> Measured:
            where = {"stage": stage, "sequences": sequences, "what": role, "metric": "heads named"}
            counts = table.where(positions=positions, **where).frame["value"].to_numpy(float)
            return over_seeds((counts > 0).astype(float))

        def one(
            claim: str,
            role: Literal["subject", "relation"],
            where: Mapping[str, Any],
            then: Mapping[str, Any],
            control: Mapping[str, Any],
            control_is: str,
            positions: str = positions,
        ) -> Check:
            return Check(
                f"{positions.capitalize()} positions: {claim}",
                relation=">=",
                threshold=0.8,
                measured=_of(table, role, positions, **where, **then),
                control=_of(table, role, positions, **where, **control),
                control_is=control_is,
            )

        facts, context = {"sequences": "pretraining"}, {"sequences": "in context"}
        attends = {"metric": "attention"}
        cosine = {"metric": "cosine"}
        checks += [
            one(
                "after pretraining a head attends to the subject",
                "subject",
                {**facts, **attends, "what": "subject"},
                before,
                untrained,
                "before training",
            ),
            one(
                "another attends to the latest relation token",
                "relation",
                {**facts, **attends, "what": "relation"},
                before,
                untrained,
                "before training",
            ),
            one(
                "the subject head's output is f_subj (cosine)",
                "subject",
                {**facts, **cosine, "what": "f_subj"},
                before,
                untrained,
                "before training",
            ),
            one(
                "the relation head's output is f_rel (cosine)",
                "relation",
                {**facts, **cosine},
                {**before, "what": "f_rel"},
                {**before, "what": "f_rel of another"},
                "another type's",
            ),
            one(
                "after finetuning the subject head attends to the query subject",
                "subject",
                {**context, **attends, "what": "query_subject"},
                after,
                before,
                "before finetuning",
            ),
            one(
                "and the relation head to attributes",
                "relation",
                {**context, **attends, "what": "same_type"},
                after,
                before,
                "before finetuning",
            ),
            one(
                "whose output is then f_rel (cosine)",
                "relation",
                {**context, **cosine, "what": "f_rel"},
                after,
                before,
                "before finetuning",
            ),
            *(
                Check(
                    f"{positions.capitalize()} positions: localize names a head for {role!r}, {stage} (share of seeds)",
                    relation=">=",
                    threshold=1.0,
                    measured=found(stage, sequences, role),
                    control=found("untrained", sequences, role),
                    control_is="before training",
                )
                for stage, sequences, role in (
                    ("pretrained", "pretraining", "subject"),
                    ("pretrained", "pretraining", "relation"),
                    ("finetuned", "in context", "same_type"),
                )
            ),
            Check(
                f"{positions.capitalize()} positions: held-out subjects are recalled (exact match)",
                relation=">=",
                threshold=0.8,
                measured=right("finetuned"),
                control=right("pretrained"),
                control_is="before finetuning",
            ),
        ]
    return checks


def _draw(table: Table) -> dict[str, go.Figure]:
    drawn: dict[str, go.Figure] = {}
    for positions in ("relative", "absolute"):
        for stage, sequences in (("pretrained", "pretraining"), ("finetuned", "in context")):
            rows: Any = table.where(positions=positions, stage=stage, sequences=sequences, metric="map").frame
            maps = {f"head {head}": some.assign(step=0) for head, some in rows.groupby("head")}
            drawn[f"{positions}, {stage}: attention"] = plots.attention_course(maps)
        figure = go.Figure()
        bars: list[tuple[str, str, Literal["subject", "relation"]]] = [
            ("pretrained", "pretraining", "subject"),
            ("pretrained", "pretraining", "relation"),
            ("finetuned", "in context", "subject"),
            ("finetuned", "in context", "relation"),
        ]
        for place, what in enumerate(dict.fromkeys(table.where(positions=positions, metric="cosine").frame["what"])):
            found = [
                _of(table, role, positions, stage=stage, sequences=sequences, metric="cosine", what=what)
                for stage, sequences, role in bars
            ]
            figure.add_bar(
                x=[[stage for stage, _, _ in bars], [f"{role} head" for _, _, role in bars]],
                y=[each.value for each in found],
                name=str(what),
                marker_color=plots.COLOURS[place],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [each.high - each.value for each in found],
                    "arrayminus": [each.value - each.low for each in found],
                },
            )
        figure.update_yaxes(title="cosine, mean over seeds", range=[-1, 1])
        drawn[f"{positions}: cosines with the constructions"] = plots.styled(figure, "", height=420)
    for stage in ("pretrained", "finetuned"):
        rows = table.where(stage=stage, metric="slice").frame
        for role in ("subject", "relation"):
            head = int(named(table, role, "relative")[0])
            grid = rows[rows["head"] == head].pivot(index="query", columns="key", values="value")
            bound = float(np.abs(grid.to_numpy()).max())
            heat = go.Heatmap(z=grid.to_numpy(), colorscale=plots.DIVERGING, zmin=-bound, zmax=bound)
            figure = go.Figure(heat).update_yaxes(autorange="reversed", title="logit of")
            drawn[f"{stage}: W_OV of the {role} head"] = plots.styled(
                figure.update_xaxes(title="attended token"), "", height=460
            )
    return drawn


CPU = Training(
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

SMOKE = Training(
    n_subjects=8,
    n_values=4,
    n_types=2,
    n_grammar=4,
    n_slots=2,
    n_facts=2,
    n_demos=2,
    n_seen=4,
    d_head=8,
    pretraining=6,
    finetuning=3,
    batch_size=4,
    n=12,
)

HEADS = Experiment(
    name="recall/heads",
    title="The heads of trained attention-only models beside the constructions",
    source=f"{SOURCE}, Figs. 9 to 12, 20 to 23, 25, 26",
    scales={"smoke": Trainings(SMOKE, 1), "cpu": Trainings(CPU, 3), "paper": Trainings(Training(), 3)},
    run=_run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="One head 'closely matches f_subj', one 'matches f_rel', before and after finetuning; one seed is shown.",
)
