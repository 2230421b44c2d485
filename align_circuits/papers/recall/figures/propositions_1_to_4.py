"""Propositions 1 to 4, printed and corrected: the constructions' accuracy position by position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows
from align_circuits.papers.recall.figures.studies import SOURCE, study
from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.task.next_token import PLACES, allowed_after
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import CORRECTIONS, Correction, finetuned, pretrained
from align_circuits.papers.statistics import HIGH, Statistic, of_each, rows
from align_circuits.report import plots
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

FORMS: Mapping[str, Sequence[Correction]] = {
    "printed": (),
    "corrected": CORRECTIONS,
    **{f"corrected, but for '{name}'": tuple(other for other in CORRECTIONS if other != name) for name in CORRECTIONS},
}


@dataclass(frozen=True)
class Constructions:
    """Worlds, and the sequences about them."""

    worlds: Mapping[str, RecallWorld]
    n_slots: int
    n_facts: int
    n_demos: int
    n: int
    """Sequences of each kind."""
    betas: tuple[float, ...]
    """In ascending order; the single corrections and the world of unshared values are measured at the last."""


def all_correct(logits: Float[Tensor, "... d_vocab"], allowed: Bool[Tensor, "... d_vocab"]) -> Bool[Tensor, "..."]:
    """Returns whether every most likely token is allowed; tokens within 1e-4 of the highest logit tie."""
    top = logits >= logits.amax(-1, keepdim=True) - 1e-4
    return ~(top & ~allowed).any(-1)


def _jobs(config: Constructions, _: Inputs) -> list[Measurement]:
    sizes = {name: getattr(config, name) for name in ("n_slots", "n_facts", "n_demos", "n")}
    jobs = []
    for name, world in config.worlds.items():
        betas = config.betas if name == "shared values" else config.betas[-1:]
        for sequences in ("pretraining", "in context"):
            arguments = {"world": asdict(world), "sequences": sequences, "betas": betas, **sizes}
            jobs.append(Measurement(measure_construction, arguments, None, {"world": name, "sequences": sequences}))
    return jobs


def measure_construction(
    *, world: Mapping[str, Any], sequences: str, betas: Sequence[float], **sizes: int
) -> list[dict[str, Any]]:
    """Measures the constructions of one world on one kind of sequences; the function of a job.

    Returns:
        Rows keyed by form and place: with metric `"accuracy"` by beta and part, `values` (of each sequence, the mean
        over positions) and `counts` (of positions); with metric `"coefficient"` the printed and the measured
        coefficients of the grammar head's output at the last separator, times T.
    """
    made = RecallWorld(**world)
    measure = _pretraining if sequences == "pretraining" else _in_context
    found: list[dict[str, Any]] = []
    for form, corrections in FORMS.items():
        for beta in betas if form in ("printed", "corrected") else betas[-1:]:
            for place, part, correct, where in measure(made, corrections, beta, sizes):
                counts = where.sum(1).numpy().astype(float)
                if counts.any():
                    values = (correct & where).sum(1).numpy() / np.maximum(counts, 1)
                    keys = {"form": form, "beta": beta, "place": place, "part": part, "metric": "accuracy"}
                    found.append({**keys, "values": values.tolist(), "counts": counts.tolist()})
    return found + _grammar_output(made, sequences, sizes)


Places = list[tuple[str, str, Bool[Tensor, "prompt pos"], Bool[Tensor, "prompt pos"]]]
"""A place, a part of the sequence, where the model is correct, and the positions of place and part."""


def _pretraining(
    world: RecallWorld, corrections: Sequence[Correction], beta: float, sizes: Mapping[str, int]
) -> Places:
    n_slots = sizes["n_slots"]
    tokens, _ = FactsTask(world, sizes["n_facts"], n_slots, p_grammar=0.0).batch(0, sizes["n"])
    model = pretrained(world, tokens.shape[1], n_slots, beta, corrections).model()
    allowed, kind = allowed_after(world, tokens, n_slots)
    correct = _correct(model, tokens, allowed)
    first = (torch.arange(tokens.shape[1]) < n_slots + 3).expand_as(tokens)
    return [
        (name, part, correct, (kind == place) & inside)
        for place, name in enumerate(PLACES)
        for part, inside in (("first", first), ("later", ~first))
    ]


def _in_context(world: RecallWorld, corrections: Sequence[Correction], beta: float, sizes: Mapping[str, int]) -> Places:
    """Attributes after the first, which nothing before it determines; then with unseen values."""
    tokens, labels = DemonstrationsTask(world, sizes["n_demos"]).batch(0, sizes["n"])
    n_slots, length = sizes["n_slots"], tokens.shape[1]
    allowed = torch.nn.functional.one_hot(labels, world.d_vocab).bool()
    queries = (torch.arange(length) % 3 == 1).expand_as(tokens)
    first = (torch.arange(length) < 3).expand_as(tokens)
    last = queries & (torch.arange(length) == length - 1)
    model = finetuned(world, length, n_slots, beta, corrections).model()
    places = [("attribute", "later", _correct(model, tokens, allowed), queries & ~first)]
    seen, _ = world.split(max(1, world.n_values[0] // 2))
    known = torch.zeros(world.d_vocab, dtype=torch.bool)
    known[torch.from_numpy(world.facts[:, list(seen)]).flatten()] = True
    model = finetuned(world, length, n_slots, beta, corrections, seen=seen).model()
    correct = _correct(model, tokens, allowed)
    shown = known[tokens[:, 2::3]].any(1, keepdim=True)  # the context has an attribute of a known value
    for caption, of in (("a seen one", known[labels]), ("an unseen one", ~known[labels])):
        places.append((f"attribute, some values unseen: {caption}", "last", correct, last & shown & of))
    return places


def _correct(model: AttentionOnly, tokens: Tensor, allowed: Tensor) -> Bool[Tensor, "prompt pos"]:
    with torch.no_grad():
        return torch.cat([all_correct(model(a), b) for a, b in zip(tokens.split(16), allowed.split(16), strict=True)])


def _grammar_output(world: RecallWorld, sequences: str, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """The grammar head's output at the last [sep], with the printed weights and as printed in the proofs, times T."""
    n_slots, n_facts, n_demos = (sizes[name] for name in ("n_slots", "n_facts", "n_demos"))
    if sequences == "pretraining":
        tokens, construct = FactsTask(world, n_facts, n_slots, p_grammar=0.0).batch(0, 1)[0], pretrained
        printed = {"grammar": 1.5 * n_facts, "relation": n_facts, "separator": n_facts}
    else:
        tokens, construct = DemonstrationsTask(world, n_demos).batch(0, 1)[0], finetuned
        printed = {"grammar": n_demos, "relation": n_demos}
    ids = {"grammar": world.grammar_ids[0], "relation": world.relation_ids[0], "separator": world.separator}
    with torch.no_grad():
        grammar_head = construct(world, tokens.shape[1], n_slots, corrections=()).model(["grammar"])
        output = grammar_head.last(tokens)[0] * tokens.shape[1]
    return [
        {"metric": "coefficient", "form": form, "place": name, "part": "last", "value": value}
        for name, coefficient in printed.items()
        for form, value in (("printed", float(coefficient)), ("measured", round(output[ids[name]].item(), 6)))
    ]


def _summarize(_: Constructions, measurements: Rows) -> pd.DataFrame:
    frame = measurements["measure_construction"]
    coefficients = frame[frame["metric"] == "coefficient"].drop(columns=["values", "counts"])
    accuracy: Any = frame[frame["metric"] == "accuracy"]
    keys = accuracy.drop(columns=["values", "counts", "value"])
    values, counts = (np.array(accuracy[name].tolist()) for name in ("values", "counts"))
    table = Table.from_prompts(keys, values, counts, Provenance("propositions"))
    return pd.concat([table.frame, coefficients.assign(low=np.nan, high=np.nan, n=1)], ignore_index=True)


_AT_LARGE_BETA = {"metric": "accuracy", "beta": HIGH, "world": "shared values"}
_ACCURACY = rows(**_AT_LARGE_BETA)


def _worst(**where: str) -> Statistic:
    """The place with the lowest accuracy, at the largest β."""
    return of_each(**{**_AT_LARGE_BETA, **where})


_ATTRIBUTE = {"sequences": "pretraining", "place": "attribute", "form": "printed"}
_CONTEXT = {"sequences": "in context", "place": "attribute", "part": "later"}
_UNSEEN = {"sequences": "in context", "form": "corrected"}

_FORMS = {form: _worst(form=form, sequences="pretraining") for form in ("corrected", "printed")}
_EVERYWHERE = "'always gives the correct prediction for any token position'"

_CLAIMS = [
    Claim(
        "Propositions 1 and 3, corrected: right at every position (accuracy where it is least)", _EVERYWHERE
    ).at_least(1.0, _FORMS["corrected"], _FORMS["printed"], "as printed"),
    # Added after its number, the control above, had been seen: what the paper itself says.
    Claim(
        "As printed it is right at every position, where subjects share values (accuracy where it is least)",
        _EVERYWHERE,
    ).at_least(1.0, _FORMS["printed"], _FORMS["corrected"], "corrected"),
    Claim(
        "As printed the attribute is right if no value is shared (accuracy)", "'correctly predicts the last token'"
    ).at_least(1.0, _worst(world="unshared values", **_ATTRIBUTE), _worst(**_ATTRIBUTE), "shared values"),
    Claim(
        "Propositions 2 and 4, corrected: the attribute is right after any demonstration (accuracy)",
        "'always gives the correct prediction for the last token position'",
    ).at_least(1.0, _worst(form="corrected", **_CONTEXT), _worst(form="printed", **_CONTEXT), "as printed"),
    Claim("A value is recalled only if finetuning has seen it (accuracy on unseen values)").at_most(
        0.0,
        _worst(place="attribute, some values unseen: an unseen one", **_UNSEEN),
        _worst(place="attribute, some values unseen: a seen one", **_UNSEEN),
        "seen values",
    ),
]


def _draw_positions(sequences: str) -> Callable[[Table], go.Figure]:
    def draw(table: Table) -> go.Figure:
        accuracy = _ACCURACY.at(sequences=sequences)(table).frame
        named = accuracy.assign(position=accuracy["place"] + ", " + accuracy["part"])
        cells = named.pivot(index="form", columns="position", values="value").loc[list(FORMS)]
        heat = go.Heatmap(
            z=cells.to_numpy(),
            x=cells.columns,
            y=cells.index,
            zmin=0,
            zmax=1,
            colorscale=plots.SEQUENTIAL,
            text=cells.round(2).astype(str).to_numpy(),
            texttemplate="%{text}",
            colorbar={"title": "accuracy"},
        )
        return plots.styled(go.Figure(heat), "", height=340)

    return draw


def _draw_betas(table: Table) -> go.Figure:
    """The lowest accuracy at positions that the propositions are about."""
    accuracy = table.where(metric="accuracy", world="shared values", form=["printed", "corrected"]).frame
    covered = (accuracy["sequences"] == "pretraining") | (accuracy["part"] == "later")
    accuracy = accuracy[covered & ~accuracy["place"].str.contains("unseen")]
    worst = accuracy.loc[accuracy.groupby(["sequences", "form", "beta"])["value"].idxmin()]
    worst["log_beta"] = np.log10(worst["beta"].astype(float))
    panels, label = dict(iter(worst.groupby("sequences"))), "accuracy where it is least"
    return plots.curves(panels, x="log_beta", by="form", label="log10 β", value=label)


def _worlds(n_subjects: int, n_values: int, n_types: int, n_grammar: int) -> dict[str, RecallWorld]:
    counts = {"shared values": n_values, "unshared values": n_subjects}
    return {
        name: RecallWorld(n_subjects, (count,) * n_types, n_grammar, div=None, relation_tokens=True)
        for name, count in counts.items()
    }


_BETAS = (1.0, 3.0, 10.0, 30.0, 100.0)

PROPOSITIONS = Experiment(
    "recall/propositions",
    "The constructions of Propositions 1 to 4, printed and corrected",
    f"{SOURCE}, Propositions 1 to 4",
    study(
        "recall/propositions",
        Constructions(_worlds(16, 4, 3, 6), 5, 3, 3, 12, (10.0, 100.0)),
        Constructions(_worlds(16, 4, 3, 6), 5, 4, 4, 64, _BETAS),
        Constructions(_worlds(256, 32, 8, 20), 10, 5, 5, 64, _BETAS),
        jobs=_jobs,
        summarize=_summarize,
    ),
    {name: _draw_positions(name) for name in ("pretraining", "in context")} | {"beta": _draw_betas},
    _CLAIMS,
    "'When the scalar β → ∞, it always gives the correct prediction for any token position.'",
)
