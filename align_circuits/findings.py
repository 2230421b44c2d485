"""The report of `localize`: what was found, how sure that is, and how to see it for oneself."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from align_circuits import plots
from align_circuits.drawing import Html
from align_circuits.prompts import KINDS, Prompts
from align_circuits.report import Content, write_report
from align_circuits.tables import Table
from align_circuits.widgets import Attention, Head, label

SHOWN_HEADS = 12
"""Heads in the attention widget at most: the best of each role come first."""

ROLES = {
    "align_query": "looks at the input symbol about to be translated",
    "align_key": "looks at the input symbol just translated",
    "lookup": "looks at earlier translations of the same symbol",
    "induction": "looks at what followed the same token earlier",
    "previous": "looks at the token before",
}
"""What a head of each role does, in words."""


@runtime_checkable
class Found(Protocol):
    """What `localize` returns, as far as its report reads it."""

    table: Table
    """Keyed by layer, head, role and metric: `"score"`, `"mass"`, `"p"`, `"q"`, `"effect"`, `"control"`."""
    named: Mapping[str, Sequence[Head]]
    """The heads named for each role, best first."""
    effects: Table
    """What patching each head restores, keyed by layer, head, kind and metric."""
    damage: Table
    """What ablating each head changes, keyed likewise."""
    verdict: Table
    """Accuracy with heads ablated, as `plots.ablation` draws it."""
    prompts: Prompts
    """What the heads were tested on; the first is drawn."""
    examples: Mapping[Head, Float[Tensor, "row pos"]]
    """Attention of each named head on the first prompt."""
    rows: list[int]
    """The positions that the rows of `examples` stand for."""
    thresholds: Mapping[str, float]
    """What a head needs for its name."""

    @property
    def sentence(self) -> str:
        """The verdict."""
        ...


def localize_report(path: str | Path, found: Found) -> Path:
    """Writes the findings as one self-contained HTML page.

    Args:
        path: The HTML file.
        found: What `localize` returned.

    Returns:
        The path.
    """
    drawn, heads = figures(found), attention_of(found)
    named = sum(map(len, found.named.values()))
    sections: list[tuple[str, str, Content | Sequence[Content]]] = [
        (
            "The heads",
            f"{named} named. Scores and effects with 95% intervals, on prompts that had no part in choosing the heads. "
            "Control: the same score on prompts whose alignment is a fixed permutation, which an aligner should follow "
            "and a fixed-offset head should not.",
            named_heads(found),
        ),
        (
            "What the model gets right without them",
            "Heads are ablated to their mean over other prompts. Each small dot is one draw of as many random "
            "heads of the same layers; bars are 95% intervals over prompts. A found set that matters falls below every "
            "draw; one that suffices keeps its accuracy with all other heads ablated.",
            drawn["ablation"],
        ),
        (
            "Scores of every head",
            "By role; named heads are circled. Hover for the number and its interval. A score says where a head looks, "
            "not that anything depends on it.",
            drawn["scores"],
        ),
        (
            "Effects of every head",
            "In nats of the gold phrase's log-probability. First: what is restored when the head's output is patched "
            "from the clean into the corrupted prompt. Then: the change when it is ablated to its mean.",
            [drawn["patching"], drawn["damage"]],
        ),
    ]
    if heads is not None:
        sections += [
            (
                "Attention on the test example",
                f"From each token (down) to the tokens up to it (across). {plots.EARLIER} stands for all that comes "
                "before the test example.",
                heads,
            ),
            (
                "The prompt, with its gold and with the heads' attention",
                "First the gold: one number for a phrase, its symbol, and where to look it up. Then for the best head "
                "of each role its attention from one token (underlined), gold keys framed.",
                list(_drawings(found, heads)),
            ),
        ]
    sections.append(("Methods", "", _methods(found)))
    title = "Which heads align, which look up, and is it causal?"
    return write_report(
        path, title=title, verdict=found.sentence, sections=sections, provenance=found.table.provenance
    )  # fmt: skip


def figures(found: Found) -> dict[str, go.Figure]:
    """Returns the figures of the report by name; `plots.save` writes each as a picture."""
    table = found.table
    roles = [role for role in ROLES if role in set(table.frame["role"])]
    scores = table.where(metric="score")
    effects = {"patching": (found.effects, "Patched in"), "damage": (found.damage, "Ablated")}
    maps = {
        name: plots.head_maps(
            part.where(metric="log_prob"), [kind for kind in ("all", *KINDS) if kind in set(part.frame["kind"])],
            f"{title}, by target tokens", by="kind", unit="nats",
        )
        for name, (part, title) in effects.items()
    }  # fmt: skip
    return {
        "ablation": plots.ablation(found.verdict),
        "scores": plots.head_maps(scores, roles, by="role", marked=found.named),
        **maps,
    }


def attention_of(found: Found) -> Attention | None:
    """Returns the attention of the named heads on the first prompt, at most `SHOWN_HEADS`; None if there are none."""
    ranks = range(max(map(len, found.named.values()), default=0))
    ordered = [heads[rank] for rank in ranks for heads in found.named.values() if rank < len(heads)]
    shown = list(dict.fromkeys(head for head in ordered if head in found.examples))[:SHOWN_HEADS]
    return Attention(found.prompts[0], found.rows, {head: found.examples[head] for head in shown}) if shown else None


def named_heads(found: Found) -> Html:
    """Returns the named heads with their evidence as an HTML table."""
    columns = {
        "score": "score", "mass": "attention on gold", "effect": "effect (nats)", "q": "corrected p",
        "control": "control",
    }  # fmt: skip
    keys = ["layer", "head", "role", "metric"]
    measured = found.table.frame.set_index(keys)[["value", "low", "high"]]
    at = {key: tuple(row) for key, row in zip(measured.index, measured.to_numpy(dtype=float), strict=True)}
    rows = [
        {"head": label(head), "role": role}
        | {said: _said(at.get((*head, role, metric), (np.nan,) * 3), metric) for metric, said in columns.items()}
        for role, heads in found.named.items()
        for head in heads
    ]
    if not rows:
        return Html("<p>No head met all thresholds.</p>")
    meaning = "; ".join(f"<b>{role}</b> {ROLES[role]}" for role, heads in found.named.items() if heads)
    return Html(f'<div class="wide">{pd.DataFrame(rows).to_html(index=False, border=0)}</div><p>{meaning}.</p>')


def _said(numbers: Sequence[float], metric: str) -> str:
    """A number with its interval, where it has one."""
    value, low, high = numbers
    if np.isnan(value):
        return "–"
    if metric == "q":
        return f"{value:.1g}"
    return f"{value:.2f}" + ("" if np.isnan([low, high]).any() else f" [{low:.2f}, {high:.2f}]")


def _drawings(found: Found, attention: Attention) -> Iterator[Html]:
    """The first prompt with its gold, then shaded by the best head of each role."""
    yield Html(found.prompts[0].drawing())
    for role, heads in found.named.items():
        relation = attention.prompt.relations.get(role)
        asked = set() if relation is None else set(relation.query.tolist())
        if heads and heads[0] in attention.rows and asked & set(found.rows):
            yield Html(f"<h3>{label(heads[0])}, {role}: {ROLES[role]}</h3>")
            yield attention.drawing(heads[0], role)


def _methods(found: Found) -> Html:
    needed = pd.DataFrame(
        [(name.replace("_", " "), f"{value:g}") for name, value in found.thresholds.items()],
        columns=["threshold", "value"],
    )
    return Html(
        "<p>Candidates are found on one half of fresh prompts and tested on the other half; every number here is from "
        "the second. A head is named for a role if its <b>score</b> (how often its most attended candidate is gold, "
        "or the share of its attention that is on gold), its <b>p-value</b> after Benjamini and Hochberg's correction "
        "and its <b>causal effect</b> are all beyond these thresholds, which were fixed beforehand:</p>"
        f"{needed.to_html(index=False, border=0)}"
        "<p>The null keeps each head's attention and redraws the gold among prompts with the same positions, so that a "
        "habit of position earns no small p-value.</p>"
        "<p>Sources: roles of alignment and lookup, Agarwal and Sarawagi (ICML 2025); induction and previous-token "
        "heads, Olsson et al. (2022); activation patching, Meng et al. (2022), Wang et al. (2023); correction, "
        "Benjamini and Hochberg (1995).</p>"
    )
