"""The report of `localize`: the heads that it named, with all evidence, as tables and as one HTML page."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from align_circuits.heads.localization import Localization
from align_circuits.heads.verdicts import Verdict
from align_circuits.hooks.heads import describe
from align_circuits.jobs.folders import replacing_in
from align_circuits.prompts.prompts import KINDS
from align_circuits.prompts.token_html import Html, rendered
from align_circuits.report import plots
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.page import Content, Section, write_report
from align_circuits.tables.tables import FILES, PER_PROMPT

MAX_HEADS = 12
"""Heads in the attention widget at most; the best of each role come first."""

EVIDENCE = {
    "score": "score",
    "attention": "attention to keys",
    "q": "corrected p",
    "ablation": "loss by ablation (nats)",
    "denoising": "gain by patching (nats)",
    "control": "score on control",
}
"""The columns of the table of named heads, by metric."""

_TEXTS = tomllib.loads(
    files("align_circuits.report").joinpath("templates/localization.toml").read_text(encoding="utf-8")
)


def save_localization(
    localization: Localization, folder: str | Path, *, facts: Mapping[str, str] | None = None
) -> Path:
    """Writes `table.csv` with `provenance.json`, the other tables in folders of their own, and `report.html`.

    An earlier result there is replaced as a whole; other files stay.

    Args:
        localization: What `localize` returned.
        folder: Where it is written.
        facts: What the report says on top beside model, task and seed, such as `{"command": "..."}`.

    Returns:
        The path of the report.

    Raises:
        ValueError: The folder cannot be written, or holds other folders where the tables go.
    """
    others = ("patching_effects", "ablation_effects", "set_ablations", "interchanges")
    answer = answer_of(localization)
    with replacing_in(folder, going=(*FILES, PER_PROMPT, *others)) as new:
        for name in others:
            if getattr(localization.evidence, name) is not None:
                getattr(localization.evidence, name).save(new / name)
        write_report(
            new / "report.html",
            title="Alignment and lookup heads, and their causal role",
            summary=f"{answer}\n\n{localization.caveats}" if answer else localization.summary,
            sections=list(_sections(localization)),
            provenance=localization.table.provenance,
            facts=facts,
        )
        localization.table.save(new)
    return Path(folder) / "report.html"


def _sections(localization: Localization) -> Iterator[Section]:
    drawn, attention = figures(localization), attention_of(localization)
    rows, heads = sum(map(len, localization.heads_by_role.values())), len(localization.named_heads)
    table = re.sub(r"<td>(L\d+H\d+)</td>", r'<td><a href="#scores-of-all-heads">\1</a></td>', named_heads(localization))
    whole = Markup("<details><summary>The whole result in words</summary><p>{}</p></details>")
    content = f"{table}{whole.format(localization.summary)}"
    yield _section("The heads", content, heads=heads, rows=rows, limits=localization.thresholds)
    if localization.redundant:
        yield _section("Heads that stand in for each other", redundant_table(localization))
    yield _section("Accuracy without them", drawn["ablation"])
    if localization.verdicts:
        verdicts = verdicts_table(localization.verdicts)
        yield _section("Are they necessary, and do they suffice?", verdicts, limits=localization.thresholds)
    yield _section("Scores of all heads", drawn["scores"])
    effects = [drawn[name] for name in ("patching", "ablation effects") if name in drawn]
    yield _section("Effects of single heads", effects or "<p>No head was a candidate.</p>")
    if localization.evidence.interchanges is not None:
        yield _section("Interchange interventions", localization.evidence.interchanges)
    if attention is not None:
        yield _section("Attention on the test example", attention)
        drawings = list(_drawings(localization, attention))
        yield _section("The prompt, with the gold alignment and the heads' attention", drawings)
    thresholds = [(_TEXTS["thresholds"][name], f"{value:g}") for name, value in asdict(localization.thresholds).items()]
    yield _section("Methods", rendered("report/templates/methods.html", thresholds=thresholds))


def _section(heading: str, content: Content | Sequence[Content], **values: Any) -> Section:
    return heading, _TEXTS["notes"][heading].format(**values), content


def answer_of(localization: Localization) -> str:
    """Returns the answer in a few sentences: which heads are named, and if the model needs them; "" without names."""
    named = "; ".join(f"{role}: {describe(heads)}" for role, heads in localization.heads_by_role.items() if heads)
    together = {verdict.claim: verdict for verdict in localization.verdicts if not (verdict.role or verdict.smallest)}
    if not named or {"necessary", "sufficient"} - together.keys():
        return ""  # nothing to shorten
    needed, enough = together["necessary"], together["sufficient"]
    roles = [verdict for verdict in localization.verdicts if verdict.role and verdict.claim == "necessary"]
    alone = ", ".join(verdict.role for verdict in roles if verdict.role and verdict.holds)
    return (
        f"{len(needed.heads)} of {needed.total} heads are named ({named}). Together they are "
        f"{'' if needed.holds else 'not shown to be '}necessary (accuracy {needed.value:.2f} without them, "
        f"{needed.intact:.2f} in the intact model) and {'' if enough.holds else 'not shown to be '}sufficient "
        f"({enough.value:.2f} with all other heads ablated)."
        + (f" Role by role, necessary: {alone or 'none is shown to be'}." if roles else "")
    )


def figures(localization: Localization) -> dict[str, go.Figure]:
    """Returns the figures of the report by name; `plots.save` writes each as a picture."""
    scores = localization.table.where(metric="score")
    layers, heads = (int(max(scores.frame[key])) + 1 for key in ("layer", "head"))
    effects = {
        "patching": (localization.evidence.patching_effects, "Patched"),
        "ablation effects": (localization.evidence.ablation_effects, "Ablated"),
    }
    maps = {
        name: plots.head_maps(
            table.where(metric="log_prob"),
            [kind for kind in ("all", *KINDS) if kind in set(table.frame["kind"])],
            f"{title}, by kind of target",
            by="kind",
            unit="nats",
            shape=(layers, heads),
        )
        for name, (table, title) in effects.items()
        if len(table)
    }
    return {
        "ablation": plots.ablation(localization.evidence.set_ablations),
        "scores": plots.head_maps(scores, list(localization.task.roles), by="role", marked=localization.heads_by_role),
        **maps,
    }


def redundant_table(localization: Localization) -> Html:
    """Returns all heads of each role, redundant ones too, as an HTML table."""
    rows = [
        {
            "role": role,
            "head": describe([member.head]),
            "round": member.round,
            "effect (nats)": f"{member.effect:.2f} [{member.low:.2f}, {member.high:.2f}]",
            "named alone": "yes" if member.single else "no",
        }
        for role, members in localization.redundant.items()
        for member in members
    ]
    return Html(pd.DataFrame(rows).to_html(index=False, border=0) if rows else "<p>No role has a head.</p>")


def attention_of(localization: Localization) -> AttentionView | None:
    """Returns the attention of the named heads on the first prompt, at most `MAX_HEADS`; None if there are none."""
    by_role, patterns = localization.heads_by_role.values(), localization.example.attention
    ranks = range(max(map(len, by_role), default=0))
    ordered = dict.fromkeys(heads[rank] for rank in ranks for heads in by_role if rank < len(heads))
    shown = {head: patterns[head] for head in list(ordered)[:MAX_HEADS]}
    return AttentionView(localization.prompts[0], localization.example.positions, shown) if shown else None


def named_heads(localization: Localization) -> Html:
    """Returns the named heads with their evidence as an HTML table."""
    measured = localization.table.frame.set_index(["layer", "head", "role", "metric"])[["value", "low", "high"]]
    numbers = {key: tuple(row) for key, row in zip(measured.index, measured.to_numpy(dtype=float), strict=True)}
    rows = [
        {"head": describe([head]), "role": role}
        | {
            column: _formatted(numbers.get((*head, role, metric), (np.nan,) * 3), metric)
            for metric, column in EVIDENCE.items()
        }
        | {"named by": " and ".join(_named_by(localization, (*head, role), numbers))}
        for role, heads in localization.heads_by_role.items()
        for head in heads
    ]
    if not rows:
        return Html("<p>No head reached all thresholds.</p>")
    meaning = "; ".join(
        Markup("<b>{}</b> {}").format(role, localization.task.roles[role])
        for role, heads in localization.heads_by_role.items()
        if heads
    )
    return Html(f'<div class="wide">{pd.DataFrame(rows).to_html(index=False, border=0)}</div><p>{meaning}.</p>')


def _named_by(
    localization: Localization, key: tuple[int, int, str], numbers: Mapping[tuple, tuple[float, ...]]
) -> Iterator[str]:
    """Which causal tests a head passed: one is enough."""
    for metric, name in (("ablation", "ablation"), ("denoising", "patching")):
        value, low, _ = numbers.get((*key, metric), (np.nan,) * 3)
        if value >= localization.thresholds.effect and low > 0:
            yield name


def verdicts_table(verdicts: Sequence[Verdict]) -> Html:
    """Returns the verdicts as an HTML table, those that do not hold as well."""
    rows = [
        {
            "set": f"{'smallest found' if verdict.smallest else verdict.role or 'named'}: {describe(verdict.heads)}",
            "heads": f"{len(verdict.heads)} of {verdict.total}",
            "claim": verdict.claim,
            "accuracy": f"{verdict.value:.2f} [{verdict.low:.2f}, {verdict.high:.2f}]",
            "intact": f"{verdict.intact:.2f}",
            "controls": "; ".join(verdict.beside) or verdict.why_no_controls,
            "holds": "yes" if verdict.holds else "not shown",
        }
        for verdict in verdicts
    ]
    return Html(f'<div class="wide wrapped">{pd.DataFrame(rows).to_html(index=False, border=0, na_rep="–")}</div>')


def _formatted(numbers: Sequence[float], metric: str) -> str:
    """A number with its interval, if it has one."""
    value, low, high = numbers
    if np.isnan(value):
        return "–"
    if metric == "q":
        return f"{value:.1g}"
    return f"{value:.2f}" + ("" if np.isnan([low, high]).any() else f" [{low:.2f}, {high:.2f}]")


def _drawings(localization: Localization, attention: AttentionView) -> Iterator[Html]:
    """The first prompt with its gold alignment, then shaded by the best head of each role."""
    yield Html(localization.prompts[0].to_html())
    for role, heads in localization.heads_by_role.items():
        relation = attention.prompt.relations.get(role)
        queries = set() if relation is None else set(relation.query.tolist())
        if heads and heads[0] in attention.rows and queries & set(attention.positions):
            heading = Markup("<h3>{}, {}: {}</h3>")
            yield Html(heading.format(describe(heads[:1]), role, localization.task.roles[role]))
            yield attention.to_html(heads[0], role)
