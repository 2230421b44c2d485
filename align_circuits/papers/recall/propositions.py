"""Contextual recall (Vasudeva et al., 2026): Propositions 1 to 4, printed and corrected, position by position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.papers.claims import Check, Experiment, Measured
from align_circuits.papers.recall.attention_only import AttentionOnly
from align_circuits.papers.recall.constructions import CORRECTIONS, Correction, RecallWeights, finetuned, pretrained
from align_circuits.papers.recall.slots_task import PLACES, allowed_after
from align_circuits.papers.recall.tasks import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.world import RecallWorld
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table

SOURCE = "Vasudeva et al. (2026)"

FORMS: Mapping[str, Sequence[Correction]] = {
    "printed": (),
    "corrected": CORRECTIONS,
    **{f"corrected, but for '{name}'": tuple(other for other in CORRECTIONS if other != name) for name in CORRECTIONS},
}


@dataclass(frozen=True)
class Constructions:
    """Worlds, and what is written about them."""

    worlds: Mapping[str, RecallWorld]
    n_slots: int
    n_facts: int
    n_demos: int
    n: int
    """Sequences of each kind."""
    betas: tuple[float, ...]
    """In ascending order; the single corrections and the world of unshared values are shown for the last."""


def all_right(logits: Float[Tensor, "... d_vocab"], allowed: Bool[Tensor, "... d_vocab"]) -> Bool[Tensor, "..."]:
    """Returns whether every most likely token is allowed; tokens within 1e-4 of the highest logit tie."""
    top = logits >= logits.amax(-1, keepdim=True) - 1e-4
    return ~(top & ~allowed).any(-1)


def _run(config: Constructions, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    rows: list[pd.DataFrame] = []
    values: list[Float[ndarray, "row prompt"]] = []
    weights: list[Float[ndarray, "row prompt"]] = []

    def add(right: Bool[Tensor, "prompt pos"], where: Bool[Tensor, "prompt pos"], **keys: object) -> None:
        if bool(where.any()):
            count = where.sum(1).numpy().astype(float)
            mean = (right & where).sum(1).numpy() / np.maximum(count, 1)
            rows.append(pd.DataFrame([keys]))
            values.append(mean[None])
            weights.append(count[None])

    coefficients = []
    for name, world in config.worlds.items():
        for sequences, measure in (("pretraining", _pretraining), ("in context", _in_context)):
            for form, corrections in FORMS.items():
                betas = config.betas if form in ("printed", "corrected") else config.betas[-1:]
                for beta in betas if name == "shared values" else config.betas[-1:]:
                    for place, part, right, where in measure(config, world, corrections, beta):
                        keys = {"world": name, "sequences": sequences, "form": form, "beta": beta}
                        add(right, where, **keys, place=place, part=part, metric="accuracy")
        coefficients += [{"world": name, **row} for row in _grammar_output(config, world)]
    table = Table.from_prompts(
        pd.concat(rows), np.concatenate(values), np.concatenate(weights), Provenance("propositions")
    )
    outputs = pd.DataFrame(coefficients).assign(metric="coefficient", low=np.nan, high=np.nan, n=1)
    return Table(pd.concat([table.frame, outputs], ignore_index=True), table.provenance)


Placed = tuple[str, str, Bool[Tensor, "prompt pos"], Bool[Tensor, "prompt pos"]]
"""A place, a part of the sequence, where the model is right, and which positions count."""


def _pretraining(
    config: Constructions, world: RecallWorld, corrections: Sequence[Correction], beta: float
) -> list[Placed]:
    task = FactsTask(world, config.n_facts, config.n_slots, p_grammar=0.0)
    tokens, _ = task.batch(0, config.n)
    model = pretrained(world, tokens.shape[1], config.n_slots, beta, corrections).model()
    allowed, kind = allowed_after(world, tokens, config.n_slots)
    right = _right(model, tokens, allowed)
    first = (torch.arange(tokens.shape[1]) < config.n_slots + 3).expand_as(tokens)
    return [
        (name, part, right, (kind == place) & inside)
        for place, name in enumerate(PLACES)
        for part, inside in (("first", first), ("later", ~first))
    ]


def _in_context(
    config: Constructions, world: RecallWorld, corrections: Sequence[Correction], beta: float
) -> list[Placed]:
    """Attributes after the first, before which nothing tells the type; then with some values unseen."""
    tokens, labels = DemonstrationsTask(world, config.n_demos).batch(0, config.n)
    length = tokens.shape[1]
    allowed = torch.nn.functional.one_hot(labels, world.d_vocab).bool()
    asks = (torch.arange(length) % 3 == 1).expand_as(tokens)
    first = (torch.arange(length) < 3).expand_as(tokens)
    found = []
    seen, _ = world.split(max(1, world.n_values[0] // 2))
    known = torch.zeros(world.d_vocab, dtype=torch.bool)
    known[torch.from_numpy(world.facts[:, list(seen)]).flatten()] = True
    last = asks & (torch.arange(length) == length - 1)
    for name, some in (("attribute", None), ("attribute, some values unseen", seen)):
        model = finetuned(world, length, config.n_slots, beta, corrections, seen=some).model()
        right = _right(model, tokens, allowed)
        if some is None:
            found.append((name, "later", right, asks & ~first))
        else:
            shown = known[tokens[:, 2::3]].any(1, keepdim=True)  # some attribute of a known value is in the context
            found += [
                (f"{name}: {said}", "last", right, last & shown & of)
                for said, of in (("a seen one", known[labels]), ("an unseen one", ~known[labels]))
            ]
    return found


def _right(model: AttentionOnly, tokens: Tensor, allowed: Tensor) -> Bool[Tensor, "prompt pos"]:
    with torch.no_grad():
        return torch.cat([all_right(model(a), b) for a, b in zip(tokens.split(16), allowed.split(16), strict=True)])


def _grammar_output(config: Constructions, world: RecallWorld) -> list[dict[str, object]]:
    """The grammar head's output at the last [sep] as printed weights give it, and as the proofs print it, times T."""
    found = []
    pretraining = FactsTask(world, config.n_facts, config.n_slots, p_grammar=0.0).batch(0, 1)[0]
    in_context = DemonstrationsTask(world, config.n_demos).batch(0, 1)[0]
    makers: list[tuple[str, Tensor, Callable[..., RecallWeights], dict[str, float]]] = [
        (
            "pretraining",
            pretraining,
            pretrained,
            {"grammar": 1.5 * config.n_facts, "relation": config.n_facts, "separator": config.n_facts},
        ),
        ("in context", in_context, finetuned, {"grammar": config.n_demos, "relation": config.n_demos}),
    ]
    ids = {"grammar": world.grammar_ids[0], "relation": world.relation_ids[0], "separator": world.separator}
    for sequences, tokens, make, printed in makers:
        weights = make(world, tokens.shape[1], config.n_slots, corrections=())
        alone = weights.model(["grammar"])
        with torch.no_grad():
            output = alone.last(tokens)[0] * tokens.shape[1]
        found += [
            {"sequences": sequences, "form": form, "place": name, "part": "last", "value": value}
            for name, claimed in printed.items()
            for form, value in (("printed", float(claimed)), ("measured", round(output[ids[name]].item(), 6)))
        ]
    return found


def _accuracy(table: Table, **where: object) -> pd.DataFrame:
    return table.where(metric="accuracy", beta=table.frame["beta"].max(), **where).frame


def _worst(rows: pd.DataFrame) -> Measured:
    """The place where least is right."""
    row = rows.loc[rows["value"].idxmin()]
    return Measured(float(row["value"]), float(row["low"]), float(row["high"]))


def _check(table: Table) -> list[Check]:
    pretraining = {"sequences": "pretraining", "world": "shared values"}
    context = {"sequences": "in context", "world": "shared values", "place": "attribute", "part": "later"}
    unseen = {"sequences": "in context", "world": "shared values", "form": "corrected"}
    attribute = {"sequences": "pretraining", "place": "attribute", "form": "printed"}
    return [
        Check(
            "Propositions 1 and 3, corrected: right at every position (accuracy where it is least)",
            relation=">=",
            threshold=1.0,
            measured=_worst(_accuracy(table, form="corrected", **pretraining)),
            control=_worst(_accuracy(table, form="printed", **pretraining)),
            control_is="as printed",
            published="'always gives the correct prediction for any token position'",
        ),
        Check(
            "As printed the attribute is right if no value is shared (accuracy)",
            relation=">=",
            threshold=1.0,
            measured=_worst(_accuracy(table, world="unshared values", **attribute)),
            control=_worst(_accuracy(table, world="shared values", **attribute)),
            control_is="shared values",
            published="'correctly predicts the last token'",
        ),
        Check(
            "Propositions 2 and 4, corrected: the attribute is right after any demonstration (accuracy)",
            relation=">=",
            threshold=1.0,
            measured=_worst(_accuracy(table, form="corrected", **context)),
            control=_worst(_accuracy(table, form="printed", **context)),
            control_is="as printed",
            published="'always gives the correct prediction for the last token position'",
        ),
        Check(
            "A value is recalled only if finetuning has seen it (accuracy on unseen values)",
            relation="<=",
            threshold=0.0,
            measured=_worst(_accuracy(table, place="attribute, some values unseen: an unseen one", **unseen)),
            control=_worst(_accuracy(table, place="attribute, some values unseen: a seen one", **unseen)),
            control_is="seen values",
        ),
    ]


def _draw(table: Table) -> dict[str, go.Figure]:
    drawn = {}
    for sequences in ("pretraining", "in context"):
        rows = _accuracy(table, world="shared values", sequences=sequences)
        grid = rows.assign(at=rows["place"] + ", " + rows["part"]).pivot(index="form", columns="at", values="value")
        grid = grid.loc[list(FORMS)]
        heat = go.Heatmap(
            z=grid.to_numpy(),
            x=grid.columns,
            y=grid.index,
            zmin=0,
            zmax=1,
            colorscale=plots.SEQUENTIAL,
            text=grid.round(2).astype(str).to_numpy(),
            texttemplate="%{text}",
            colorbar={"title": "accuracy"},
        )
        drawn[sequences] = plots.styled(go.Figure(heat), "", height=340)
    rows = table.where(metric="accuracy", world="shared values", form=["printed", "corrected"]).frame
    claimed = (rows["sequences"] == "pretraining") | (rows["part"] == "later")
    worst = rows[claimed & ~rows["place"].str.contains("unseen")]
    worst = worst.loc[worst.groupby(["sequences", "form", "beta"])["value"].idxmin()]
    worst["log_beta"] = np.log10(worst["beta"].astype(float))
    drawn["beta"] = plots.curves(
        dict(iter(worst.groupby("sequences"))),
        x="log_beta",
        by="form",
        label="log10 β",
        value="accuracy where it is least",
    )
    return drawn


def _worlds(n_subjects: int, n_values: int, n_types: int, n_grammar: int) -> dict[str, RecallWorld]:
    common = {"n_subjects": n_subjects, "n_grammar": n_grammar, "div": None, "relation_tokens": True}
    return {
        "shared values": RecallWorld(n_values=(n_values,) * n_types, **common),
        "unshared values": RecallWorld(n_values=(n_subjects,) * n_types, **common),
    }


_BETAS = (1.0, 3.0, 10.0, 30.0, 100.0)

PROPOSITIONS = Experiment(
    name="recall/propositions",
    title="The constructions of Propositions 1 to 4, printed and corrected",
    source=f"{SOURCE}, Propositions 1 to 4",
    scales={
        "smoke": Constructions(_worlds(16, 4, 3, 6), 5, 3, 3, 12, (10.0, 100.0)),
        "cpu": Constructions(_worlds(16, 4, 3, 6), 5, 4, 4, 64, _BETAS),
        "paper": Constructions(_worlds(256, 32, 8, 20), 10, 5, 5, 64, _BETAS),
    },
    run=_run,
    draw=_draw,
    check=_check,
    makes_models=True,
    published="'When the scalar β → ∞, it always gives the correct prediction for any token position.'",
)
