"""The report of `localize`: what was found, how sure that is, and how to see it for oneself."""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from align_circuits.hooks.heads import Head, describe
from align_circuits.prompts.prompts import KINDS, Prompts
from align_circuits.prompts.token_html import Html
from align_circuits.report import plots
from align_circuits.report.page import Content, write_report
from align_circuits.report.widgets import Attention
from align_circuits.tables.tables import Table

SHOWN_HEADS = 12
"""Heads in the attention widget at most: the best of each role come first."""

ROLES = {
    "align_query": "looks at the input symbol about to be translated",
    "align_key": "looks at the input symbol just translated",
    "lookup": "looks at earlier translations of the same symbol",
    "induction": "looks at what followed the same token earlier",
    "previous": "looks at the token before",
    "duplicate": "looks at earlier copies of its own token",
}
"""What a head of each role does, in words."""

RECALL_ROLES = {
    "subject": "looks at the subject, wherever it stands",
    "query_subject": "looks at the subject where it stands last",
    "relation": "looks at the token that tells the type asked for",
    "same_type": "looks at attributes of the type asked for",
    "grammar": "looks at the grammar of the fact asked for",
    "mark": "looks at the nearest subject or relation token",
}
"""The same for contextual recall."""

_SAID = ROLES | RECALL_ROLES


EVIDENCE = {
    "score": "score",
    "attention": "attention on gold",
    "q": "corrected p",
    "ablation": "ablation costs (nats)",
    "denoising": "patching restores (nats)",
    "control": "score in control",
}
"""The metrics that speak for a head, as the table of named heads calls them."""

NEEDED = {
    "score": "score, at least: how often the most attended candidate is gold, for aligners; the share of the attention "
    "that is on gold, for others",
    "attention": "attention on gold, of all there is, at least",
    "share": "share of the attention that the head's best role explains, at least",
    "fdr": "false discovery rate over all candidates, heads times roles, at most",
    "effect": "effect of ablation or of patching in nats of the gold tokens' log-probability, with a 95% interval "
    "above 0, at least",
}
"""Thresholds in words."""


@runtime_checkable
class Found(Protocol):
    """What `localize` returns, as far as its report reads it."""

    @property
    def table(self) -> Table:
        """Keyed by layer, head, role and metric, those of `EVIDENCE`."""
        ...

    @property
    def heads_by_role(self) -> Mapping[str, Sequence[Head]]:
        """The heads named for each role, best first."""
        ...

    @property
    def patching_effects(self) -> Table:
        """What patching each candidate restores, keyed by layer, head, kind and metric."""
        ...

    @property
    def ablation_effects(self) -> Table:
        """What ablating each candidate changes, keyed likewise."""
        ...

    @property
    def group_ablations(self) -> Table:
        """Accuracy with heads ablated, as `plots.ablation` draws it."""
        ...

    @property
    def prompts(self) -> Prompts:
        """What the heads were tested on; the first is drawn."""
        ...

    @property
    def examples(self) -> Mapping[Head, Float[Tensor, "row pos"]]:
        """Attention of each named head on the first prompt."""
        ...

    @property
    def rows(self) -> list[int]:
        """The positions that the rows of `examples` stand for."""
        ...

    @property
    def thresholds(self) -> Mapping[str, float]:
        """What a head needs for its name."""
        ...

    @property
    def summary(self) -> str:
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
    named = sum(map(len, found.heads_by_role.values()))
    sections: list[tuple[str, str, Content | Sequence[Content]]] = [
        (
            "The heads",
            f"{named} named. All numbers are from prompts that had no part in choosing the heads, with 95% intervals. "
            "Control: the score on prompts with another alignment (a permuted one, if the task's is monotonic). A head "
            "that keeps its score there reads the alignment off the prompt; one that loses it knows this alignment.",
            named_heads(found),
        ),
        (
            "What the model gets right without them",
            "Heads are ablated to their mean over tokens of the same kind. Each small dot is one draw of as many "
            "random heads of the same layers; bars are 95% intervals over prompts. A found set that matters falls "
            "below every draw; one that suffices keeps its accuracy with all other heads ablated. Grey: the heads of "
            "one role alone.",
            drawn["ablation"],
        ),
        (
            "Scores of every head",
            "By role; named heads are circled. Hover for the number and its interval. A score says where a head looks, "
            "not that anything depends on it.",
            drawn["scores"],
        ),
        (
            "Effects of single heads",
            "Of the candidates, in nats of the gold tokens' log-probability; heads that were none are grey. First: "
            "what is restored when the head's output on the clean prompt is patched into a corrupted one, with another "
            "test input. Then: the change when the head is ablated to its mean.",
            [drawn[name] for name in ("patching", "damage") if name in drawn] or "<p>No head was a candidate.</p>",
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
    return write_report(path, title=title, verdict=found.summary, sections=sections, provenance=found.table.provenance)


def figures(found: Found) -> dict[str, go.Figure]:
    """Returns the figures of the report by name; `plots.save` writes each as a picture."""
    table = found.table
    roles = [role for role in _SAID if role in set(table.frame["role"])]
    scores = table.where(metric="score")
    layers, heads = (int(max(scores.frame[key])) + 1 for key in ("layer", "head"))
    effects = {"patching": (found.patching_effects, "Patched in"), "damage": (found.ablation_effects, "Ablated")}
    maps = {
        name: plots.head_maps(
            part.where(metric="log_prob"),
            [kind for kind in ("all", *KINDS) if kind in set(part.frame["kind"])],
            f"{title}, by target tokens",
            by="kind",
            unit="nats",
            shape=(layers, heads),
        )
        for name, (part, title) in effects.items()
        if len(part)
    }
    return {
        "ablation": plots.ablation(found.group_ablations),
        "scores": plots.head_maps(scores, roles, by="role", marked=found.heads_by_role),
        **maps,
    }


def attention_of(found: Found) -> Attention | None:
    """Returns the attention of the named heads on the first prompt, at most `SHOWN_HEADS`; None if there are none."""
    ranks = range(max(map(len, found.heads_by_role.values()), default=0))
    ordered = [heads[rank] for rank in ranks for heads in found.heads_by_role.values() if rank < len(heads)]
    shown = list(dict.fromkeys(head for head in ordered if head in found.examples))[:SHOWN_HEADS]
    return Attention(found.prompts[0], found.rows, {head: found.examples[head] for head in shown}) if shown else None


def named_heads(found: Found) -> Html:
    """Returns the named heads with their evidence as an HTML table."""
    measured = found.table.frame.set_index(["layer", "head", "role", "metric"])[["value", "low", "high"]]
    at = {key: tuple(row) for key, row in zip(measured.index, measured.to_numpy(dtype=float), strict=True)}
    rows = [
        {"head": describe([head]), "role": role}
        | {said: _said(at.get((*head, role, metric), (np.nan,) * 3), metric) for metric, said in EVIDENCE.items()}
        for role, heads in found.heads_by_role.items()
        for head in heads
    ]
    if not rows:
        return Html("<p>No head met all thresholds.</p>")
    meaning = "; ".join(f"<b>{role}</b> {_SAID[role]}" for role, heads in found.heads_by_role.items() if heads)
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
    for role, heads in found.heads_by_role.items():
        relation = attention.prompt.relations.get(role)
        asked = set() if relation is None else set(relation.query.tolist())
        if heads and heads[0] in attention.rows and asked & set(found.rows):
            yield Html(f"<h3>{describe(heads[:1])}, {role}: {_SAID[role]}</h3>")
            yield attention.drawing(heads[0], role)


def _methods(found: Found) -> Html:
    needed = "".join(
        f"<tr><td style='text-align:left'>{NEEDED.get(name, html.escape(name))}</td><td>{value:g}</td></tr>"
        for name, value in found.thresholds.items()
    )
    return Html(
        "<p>Candidates are found by their scores on one half of fresh prompts and tested on the other half. A head is "
        "named for a role if on that other half it is beyond all these thresholds, which were fixed beforehand:</p>"
        f"<table>{needed}</table>"
        "<p>The p-values keep each head's attention as it is and redraw the gold so that every position is gold as "
        "often as before: a habit of position earns no small p-value, unless a note says that the gold stands in the "
        "same places in all prompts. They are corrected over all candidates.</p>"
        "<p>Sources: alignment and lookup heads, Agarwal and Sarawagi (ICML 2025); induction and previous-token heads, "
        "Olsson et al. (2022); duplicate-token heads and mean ablation, Wang et al. (2023); patching, Zhang and Nanda "
        "(2024); permutation tests, Phipson and Smyth (2010); correction, Benjamini and Hochberg (1995).</p>"
    )
