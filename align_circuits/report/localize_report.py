"""The report of `localize`: the heads that it named, with all evidence, as tables and as one HTML page."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from align_circuits.heads.candidates import ALIGNERS, quoted, remedies
from align_circuits.heads.heads_without_role import LARGE_EFFECT
from align_circuits.heads.interchange_interventions import HEAD
from align_circuits.heads.localization import SHOWN, Localization, elsewhere_sentences, unnamed_sentences
from align_circuits.heads.localization_rows import formatted, named_head_rows, verdict_rows, with_values
from align_circuits.heads.verdicts import Verdict
from align_circuits.hooks.head_names import describe
from align_circuits.jobs.folders import replacing_in
from align_circuits.prompts.token_html import Html, rendered, several
from align_circuits.report import plots
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.page import Content, Section, legend_of, write_report
from align_circuits.report.plots.figure_parts import kinds_of
from align_circuits.tables.baselines import CHANCE, CLEAN, CORRUPTED, GUESS
from align_circuits.tables.tables import FILES, PER_PROMPT, Table

MAX_HEADS = 12
"""Heads in the attention widget at most; the best of each role come first."""

MAX_CELLS = 250_000
"""Cells of all heads in the attention widget at most, or prompts of hundreds of tokens would take more than a page."""

MAX_SINGLE = 5
"""Single heads in the table of interchange interventions at most, the best ones."""

MAX_UNNAMED = 15
"""Heads without a role that are in sight, those of largest effect first; the others are folded."""

_TEXTS = tomllib.loads(
    files("align_circuits.report").joinpath("templates/localization_notes.toml").read_text(encoding="utf-8")
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
    tables = ("patching_effects", "ablation_effects", "set_ablations", "interchanges")
    headline = headline_of(localization)
    summary = "\n\n".join([headline, *(told for told in _caveats(localization) if told not in headline)])
    with replacing_in(
        folder, going=(*FILES, PER_PROMPT, *tables, "group_ablations")
    ) as new:  # the last of an earlier version
        for name in tables:
            if getattr(localization.evidence, name) is not None:
                getattr(localization.evidence, name).save(new / name)
        write_report(
            new / "report.html",
            title=title_of(localization),
            summary=summary,
            sections=list(_sections(localization)),
            provenance=localization.table.provenance,
            facts={**baselines_in_words(localization), **(facts or {})},
            roles=localization.task.roles,
        )
        localization.table.save(new)
    return Path(folder) / "report.html"


def title_of(localization: Localization) -> str:
    """Returns the heading of the report: the model, and the roles that heads were looked for in."""
    *first, last = localization.task.roles
    roles = f"{', '.join(first)} and {last}" if first else last
    return f"Heads of {localization.table.provenance.model.get('name', 'the model')} for {roles}"


def baselines_in_words(localization: Localization) -> dict[str, str]:
    """Returns what the report says on top of the model on clean and on corrupted prompts."""
    baselines = localization.evidence.patching_effects.baselines
    if baselines is None:
        return {}
    among = " among all tokens" if localization.chooses else ""
    tested = f"{len(localization.prompts)} test prompts"
    names = {"accuracy": f"accuracy{among} ({tested})", "log_prob": f"log-probability (nats, {tested})"}
    lines = {}
    if localization.chooses:
        intact = formatted([localization.intact[number] for number in ("value", "low", "high")], "accuracy")
        lines[f"accuracy between the two answers ({tested})"] = f"{CLEAN} {intact}, a guess 0.50"
    for metric, name in names.items():
        rows = baselines.where(kind="all", metric=metric).frame.set_index("run")
        runs = [run for run in (CLEAN, CORRUPTED) if run in rows.index]
        numbers = [f"{run} {formatted(rows.loc[run, ['value', 'low', 'high']].tolist(), metric)}" for run in runs]
        guess = rows.loc[CHANCE, "value"]
        lines[name] = ", ".join([*numbers, "a guess below 0.01" if 0 < guess < 0.01 else f"a guess {guess:.2f}"])
    return lines


def _sections(localization: Localization) -> Iterator[Section]:
    drawn, attention = figures(localization), attention_of(localization)
    rows, heads = sum(map(len, localization.heads_by_role.values())), len(localization.named_heads)
    some = ", some of them for several roles" * (rows > heads)
    count = several(heads, "head") + some if heads else "No head is named"
    table = re.sub(r"<td>(L\d+H\d+)</td>", r'<td><a href="#scores-of-all-heads">\1</a></td>', named_heads(localization))
    control = _part("control", "control" in set(localization.table.frame["metric"]))
    limit = _smallest_p(localization)
    yield _section("The heads", table, found=count, limits=localization.thresholds, control=control, smallest_p=limit)
    if localization.unnamed:
        shares = localization.evidence.patching_effects.normalized().frame["value"].to_numpy(dtype=float)
        no_gap = _part("no_gap", np.isnan(shares).all())
        yield _section("Heads that were not named", unnamed_table(localization), share=LARGE_EFFECT, no_gap=no_gap)
    if localization.redundant:
        yield _section("Redundant heads", redundant_table(localization))
    if heads:  # else all is said by the accuracy at the top
        yield _section("Accuracy without them", drawn["ablation"], unit=localization.table.unit)
    if localization.verdicts:
        verdicts = _table(verdict_rows(localization.verdicts), "wrapped")
        parts = {
            "choice": _part("choice", localization.chooses),
            "smallest": _part("smallest", any(verdict.smallest for verdict in localization.verdicts)),
            "few": _few_controls(localization.verdicts),
        }
        heading = "Are they necessary, and do they suffice?"
        yield _section(heading, verdicts, limits=localization.thresholds, **parts)
    yield _section("Scores of all heads", drawn["scores"])
    effects = [drawn[name] for name in ("patching", "ablation effects") if name in drawn]
    patched = localization.evidence.patching_effects.frame
    estimates = _part("estimates", "estimated" in patched and patched["estimated"].any())
    yield _section("Effects of single heads", effects, estimates=estimates)
    if (interchanges := localization.interchange_verdicts) is not None and len(interchanges):
        yield _section("Interchange interventions", interchange_table(interchanges))
    if heads:
        yield _section("Attention on the test example", attention or "")
    pair, prompt = localization.evidence.example.pair, localization.prompts[0]
    shown, heading = (prompt, "A prompt") if pair is None else (pair, "A pair of prompts")
    drawings = [Html(shown.to_html()), *(_drawings(localization, attention) if attention is not None else ())]
    yield _section(heading, drawings, legend=legend_of(shown), drawings=_part("drawings", drawings[1:]))
    aligners, texts = bool({*ALIGNERS} & {*localization.task.roles}), _TEXTS["thresholds"]
    texts = {**texts, "score": texts["score_aligners"]} if aligners else texts
    thresholds = [(texts[name], f"{value:g}") for name, value in asdict(localization.thresholds).items()]
    yield _section("Methods", rendered("report/templates/methods.html", thresholds=thresholds, aligners=aligners))


def _part(name: str, holds: object) -> str:
    """A sentence of a note, if it holds."""
    return _TEXTS["parts"][name] if holds else ""


def _section(heading: str, content: Content | Sequence[Content], **values: Any) -> Section:
    return heading, _TEXTS["notes"][heading].format(**values), content


def headline_of(localization: Localization) -> str:
    """Returns what was found, whether the model needs it, the largest effect, and the gravest caveat, a line for each.

    After it come the heads scored where their output matters. A line has one or several sentences. That the model is
    not shown to solve the prompts stands before all else. Without a named head, p-values out of reach are told.
    """
    found = [*_found(localization), _largest_effect(localization)]
    told = [sentence for sentence in _caveats(localization) if GUESS in sentence]
    gravest = [sentence for sentence in _caveats(localization) if sentence not in told][:1]
    out_of_reach = [] if localization.named_heads else [*filter(None, [_smallest_p(localization).strip()])]
    after = [*out_of_reach, *dict.fromkeys([*gravest, *elsewhere_sentences(localization)])]
    return "\n".join([*found, *told, *after] if localization.nameless else [*told, *found, *after])


def _caveats(localization: Localization) -> list[str]:
    """What to bear in mind, but for the heads that were not named, which have a table."""
    told = [*unnamed_sentences(localization.unnamed, localization.named_heads)]
    return [sentence for sentence in localization.caveat_sentences if sentence not in told]


def _largest_effect(localization: Localization) -> str:
    """The head whose patch alone brings back or takes away most, and how many without a role have a large effect.

    Heads with a larger effect whose interval holds 0 are named beside it.
    """
    effects = localization.evidence.patching_effects.where(kind="all", metric="log_prob")
    frame = effects.frame.assign(share=effects.normalized().frame["value"].to_numpy())
    measured = frame if "estimated" not in frame else frame.loc[~frame["estimated"].astype(bool)]
    apart = (measured["low"] > 0) | (measured["high"] < 0)
    frame, unclear = measured.loc[apart], measured.loc[~apart].sort_values("value", key=abs, ascending=False)
    if not len(frame):
        return (
            "No single head is shown to change the log-probability of the right answer when it is patched: no interval "
            "leaves out 0."
        )
    row = frame.loc[frame["value"].abs().idxmax()]
    head = (int(row["layer"]), int(row["head"]))
    roles = [role for role, heads in localization.heads_by_role.items() if head in heads]
    does = "brings back" if row["value"] > 0 else "takes away"
    # A fall is told by its size, which turns the ends of its interval round.
    size = formatted((abs(row["value"]), *sorted(abs(row[end]) for end in ("low", "high"))), "denoising")
    of_all = "" if np.isnan(row["share"]) else f", {abs(row['share']):.0%} of the difference to the corrupted prompts"
    unclear = unclear.loc[unclear["value"].abs() > abs(row["value"])]
    shown = [
        f"{describe([(row['layer'], row['head'])])} {formatted((row['value'], row['low'], row['high']), 'denoising')}"
        for row in unclear.head(SHOWN).to_dict("records")
    ]
    more = f" and {len(unclear) - SHOWN} more" if len(unclear) > SHOWN else ""
    larger = f" Larger, but with an interval that holds 0: {', '.join(shown)}{more}." if shown else ""
    of_clear = " whose interval leaves out 0" if shown else ""
    large = sum(unnamed.large for unnamed in localization.unnamed)
    others = f" {large} heads have a large effect and no role." if large > 1 else ""
    return (
        f"The largest effect of a single head{of_clear} is that of {describe([head])} "
        f"({'named for ' + ' and '.join(roles) if roles else 'not named'}), which {does} {size} "
        f"nats of the log-probability on clean prompts{of_all}.{larger}{others}"
    )


def _smallest_p(localization: Localization) -> str:
    """For which roles without a head a single one could hardly be named, since no p-value can be small enough."""
    fdr, table = localization.thresholds.fdr, localization.table.frame
    tested = table["metric"].tolist().count("q") - len(localization.elsewhere)  # which are corrected on their own
    # A single name among the tested candidates needs p <= fdr / tested (Benjamini and Hochberg).
    out_of_reach = {
        role: f"{p:.2g} for {quoted([role])}"
        for role, p in localization.task.smallest_p.items()
        if not localization.heads_by_role[role] and p <= fdr < p * tested
    }
    if not out_of_reach:
        return ""
    values, advice = " and ".join(out_of_reach.values()), remedies(localization.prompts, [*out_of_reach])
    return _TEXTS["parts"]["smallest_p"].format(p=values, tested=tested, fdr=fdr, remedies=advice)


def _few_controls(verdicts: Sequence[Verdict]) -> str:
    """That too few control sets were drawn for p-values to be small enough, if only that keeps a claim from holding."""
    few = [verdict for verdict in verdicts if verdict.too_few]
    if not few:
        return ""
    count, alpha = min(len(draws) for verdict in few for draws in verdict.controls.values()), few[0].alpha
    # p is 1 / (1 + draws) at least. A rounding error above a whole number would ask for a draw too many.
    needed = ceil(1 / alpha - 1e-9) - 1
    return _TEXTS["parts"]["few"].format(count=count, p=1 / (1 + count), alpha=alpha, needed=needed)


def _found(localization: Localization) -> list[str]:
    """The heads of each role in the words of the task, and the verdicts on all of them, or that none is named."""
    roles = {role: heads for role, heads in localization.heads_by_role.items() if heads}
    together = {verdict.claim: verdict for verdict in localization.verdicts if not (verdict.role or verdict.smallest)}
    if not roles or {"necessary", "sufficient"} - together.keys():
        return [localization.nameless or "No head passes all tests of a role.", localization.accuracy]
    needed, enough = together["necessary"], together["sufficient"]
    named = "; ".join(
        f"{describe(heads)} for {role} ({localization.task.roles[role]})" for role, heads in roles.items()
    )
    alone = ", ".join(str(verdict.role) for verdict in localization.verdicts if verdict.role and verdict.holds)
    need = f"is shown to need the heads of {alone}" if alone else "is not shown to need the heads of any"
    single = f" Role by role, the model {need}." if len(roles) > 1 else ""
    apart = ""
    if {*localization.elsewhere} & {*roles.get("previous", ())}:
        apart = "; the same holds separately for previous-token heads that are scored where their output matters"
    return [
        f"{len(needed.heads)} of {needed.total} heads {'is' if len(needed.heads) == 1 else 'are'} named: {named}. Each "
        f"passed its tests on prompts that had no part in choosing it; at most {100 * localization.thresholds.fdr:g}% "
        f"of such names should be false{apart}.",
        f"{localization.accuracy} Without the named heads accuracy is {_number(needed)}"
        f"{_because(needed, 'the model needs them')}.{single}",
        f"With all other heads ablated accuracy is {_number(enough)}{_because(enough, 'the named ones suffice')}.",
    ]


def _number(verdict: Verdict) -> str:
    return f"{verdict.value:.2f} [{verdict.low:.2f}, {verdict.high:.2f}]"


def _because(verdict: Verdict, claim: str) -> str:
    """What the accuracy with a set ablated, or with it alone, says of a claim, beside other sets of as many heads."""
    if verdict.holds:
        beside = "lower than without" if verdict.claim == "necessary" else "higher than with"
        return f", {beside} as many others: {claim}"
    if verdict.unclear:
        return f", {verdict.loss}, which so few prompts do not tell from none: it is not shown that {claim}"
    if not verdict.large:
        little = "too small a loss" if verdict.claim == "necessary" else "too little"
        return f", {little} to show that {claim}"
    why = "other sets of as many heads may do the same" if verdict.controls else verdict.why_no_controls
    if verdict.too_few:
        why = f"so few other sets were ablated that p = {max(verdict.p.values()):.2g}"
    return f", but {why}: it is not shown that {claim}"


def figures(localization: Localization) -> dict[str, go.Figure]:
    """Returns the figures of the report by name; `plots.save` writes each as a picture."""
    scores = localization.table.where(metric="score")
    layers, heads = (int(max(scores.frame[key])) + 1 for key in ("layer", "head"))
    effects = {
        "patching": (localization.evidence.patching_effects, "Gain when patched, nats"),
        "ablation effects": (localization.evidence.ablation_effects, "Change when ablated, nats"),
    }
    large = [unnamed.head for unnamed in localization.unnamed if unnamed.large]
    maps = {}
    for name, (table, title) in effects.items():
        if not len(table):
            continue
        kinds = kinds_of(table.frame)
        frame = table.frame.drop(columns=["estimated"], errors="ignore")  # no estimate is among the largest
        maps[name] = plots.head_maps(
            Table(frame, table.provenance).where(metric="log_prob"),
            kinds,
            title if kinds == ["all"] else f"{title}, by kind of target",
            captions=kinds != ["all"],
            by="kind",
            unit="nats",
            marked=dict.fromkeys(kinds, localization.named_heads),
            noted=dict.fromkeys(kinds, large),
            shape=(layers, heads),
        )
    roles = list(localization.task.roles)
    marked = {"marked": localization.heads_by_role, "noted": dict.fromkeys(roles, large)}
    return {
        "ablation": plots.ablation(localization.evidence.set_ablations),
        "scores": plots.head_maps(scores, roles, by="role", **marked),
        **maps,
    }


def unnamed_table(localization: Localization) -> Html:
    """Returns the heads that stand out and were not named, with the tests that they failed, as an HTML table."""
    roles = {head: role for role, heads in localization.heads_by_role.items() for head in heads}
    rows = [
        {
            "head": describe([unnamed.head]) + (f" (named for {roles[unnamed.head]})" if unnamed.head in roles else ""),
            "stands out by": " and ".join(
                name for name, holds in (("effect", unnamed.large), ("score", unnamed.high)) if holds
            )
            or "best of its role",
            "score": f"{unnamed.score:.2f}",
            "gain by patching (nats)": formatted((unnamed.effect, *unnamed.interval), "denoising")
            + (" (estimated)" if unnamed.estimated else ""),
            "share of the difference clean - corrupted": formatted((unnamed.share, np.nan, np.nan), "share"),
            "role, and failed tests": unnamed.why,  # last, since it is wide: a phone shows the effect beside the head
        }
        for unnamed in localization.unnamed
    ]
    shown, more = _table(rows[:MAX_UNNAMED], "wrapped"), rows[MAX_UNNAMED:]
    folded = f"<details><summary>{len(more)} more</summary>{_table(more, 'wrapped')}</details>" if more else ""
    return Html(f"{shown}{folded}")


def interchange_table(verdicts: pd.DataFrame) -> Html:
    """Returns the sets of heads and the single heads that carry most of the answer, each with a verdict."""
    single = verdicts.loc[verdicts["patched"] == HEAD].nlargest(MAX_SINGLE, "value")
    rows = []
    for row in pd.concat([verdicts.loc[verdicts["patched"] != HEAD], single]).to_dict("records"):
        name = {"named": "all named heads"}.get(row["patched"], row["patched"])
        controls = f"{several(int(row['n_controls']), 'random set')} {row['controls']:.2f} at most, p = {row['p']:.2g}"
        rows.append(
            {
                "patched": describe([(int(row["layer"]), int(row["head"]))]) if name == HEAD else name,
                "carries the answer": "yes" if row["carries"] else "not shown",
                "clean answer given": formatted((row["value"], row["low"], row["high"]), "interchange"),
                "beside": controls if row["n_controls"] else f"unpatched {row['unpatched']:.2f}",
                "corrupted answer kept": f"{row['kept']:.2f}",
            }
        )
    return _table(rows, "wrapped")


def redundant_table(localization: Localization) -> Html:
    """Returns all heads of each role, redundant ones too, as an HTML table."""
    rows = [
        {
            "role": role,
            "head": describe([member.head]),
            "round": member.round,
            "effect (nats)": formatted((member.effect, member.low, member.high), "denoising"),
            "named alone": "yes" if member.single else "no",
        }
        for role, members in localization.redundant.items()
        for member in members
    ]
    return _table(rows) if rows else Html("<p>No role has a head.</p>")


def attention_of(localization: Localization) -> AttentionView | None:
    """Returns the attention of the best named heads on the first prompt; None if there are none, or too many tokens."""
    by_role, example = localization.heads_by_role.values(), localization.evidence.example
    ordered = dict.fromkeys(heads[rank] for rank in range(MAX_HEADS) for heads in by_role if rank < len(heads))
    most = min(MAX_HEADS, MAX_CELLS // max(1, len(example.positions)) ** 2)
    shown = {head: example.attention[head] for head in list(ordered)[:most]}
    return AttentionView(localization.prompts[0], example.positions, shown) if shown else None


def named_heads(localization: Localization) -> Html:
    """Returns the named heads with their evidence as an HTML table."""
    rows = named_head_rows(localization.table, localization.heads_by_role, localization.thresholds)
    if not rows:
        return Html("")
    meaning = "; ".join(
        Markup("<b>{}</b> {}").format(role, localization.task.roles[role])
        for role, heads in localization.heads_by_role.items()
        if heads
    )
    return Html(f"{_table(rows)}<p>{meaning}.</p>")


def _table(rows: Sequence[Mapping[str, str]], kind: str = "") -> Html:
    """Rows as an HTML table, without the columns that have no value in any."""
    table = pd.DataFrame(with_values(rows)).to_html(index=False, border=0)
    return Html(f'<div class="{f"wide {kind}".strip()}">{table}</div>')


def _drawings(localization: Localization, attention: AttentionView) -> Iterator[Html]:
    """The first prompt, shaded by the best head of each role."""
    for role, heads in localization.heads_by_role.items():
        relation = attention.prompt.relations.get(role)
        queries = set() if relation is None else set(relation.query.tolist())
        if heads and heads[0] in attention.rows and queries & set(attention.positions):
            yield Html(Markup("<h3>{}, {}: {}</h3>").format(describe(heads[:1]), role, localization.task.roles[role]))
            yield attention.to_html(heads[0], role)
