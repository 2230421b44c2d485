"""The scoreboard: a row for each figure and table of the papers, whose verdict follows from those of its claims.

`results/scoreboard.toml` says what each row claims and which experiment tests it; everything measured comes from the
kept tables.
"""

import base64
import html
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import kaleido
import kept_results
import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.cli.experiments_list import told
from align_circuits.papers.claims import Check, Verdict
from align_circuits.papers.experiments import EXPERIMENTS
from align_circuits.papers.icatune.tuned_models import SAME_RECIPE
from align_circuits.papers.statistics import Measured, over_seeds, share_of
from align_circuits.report import plots
from align_circuits.tables.tables import Table

ROWS = Path("results/scoreboard.toml")

Outcome = Literal["reproduced", "not reproduced", "the paper is wrong", "too small to say", "not testable here"]
"""The verdict of a row."""

TITLES = {"icatune": "The Missing Alignment Link", "recall": "Contextual Recall", "abrupt": "Abrupt Learning"}

# Verdicts of rows


def outcome(verdicts: Sequence[Verdict], *, refuted: bool = False) -> Outcome:
    """Returns the verdict of a row from those of its claims, at the largest size that was kept.

    In this order: no claim, or none that is testable, is *not testable here*. A claim that refutes the paper's own
    argument makes it *the paper is wrong*. One claim that fails makes it *not reproduced*, whatever the others say. One
    that is undecided, or whose control is not shown to miss the threshold (no evidence), makes it *too small to say*.
    Else all that is testable holds, or is without exception: *reproduced*.

    Args:
        verdicts: Those of all claims of the row.
        refuted: Whether the claim named by `wrong` in `results/scoreboard.toml` has the verdict that it names.

    >>> outcome(["holds", "no exception", "not testable"]), outcome(["holds", "undecided"])
    ('reproduced', 'too small to say')
    >>> outcome(["holds", "undecided", "fails"]), outcome(["not testable"])
    ('not reproduced', 'not testable here')
    """
    testable = set(verdicts) - {"not testable"}
    if not testable:
        return "not testable here"
    if refuted:
        return "the paper is wrong"
    if "fails" in testable:
        return "not reproduced"
    return "too small to say" if testable & {"undecided", "no evidence"} else "reproduced"


# What would decide a claim

MOST = 200
"""Seeds at most that `would_decide` names."""


def would_decide(check: Check) -> str:
    """Returns how many seeds, or how many times the prompts, would decide an undecided claim.

    It is the smallest number whose verdict, by the rule of `Check` itself, is another than undecided if more seeds are
    spread as those that were measured: their quantiles, or their share of yes. Where seeds are not known one by one,
    the interval shrinks with the square root of the number until it leaves the threshold. It promises nothing: seeds
    not yet seen may lie elsewhere, and the mean's own error is not in it.

    Args:
        check: A claim whose verdict is undecided.
    """
    of = check.measured
    seeds = np.array(of.seeds)
    if len(seeds) == 1 or (math.isnan(of.low) and not len(seeds)):
        return "more than one seed: one tells no spread"
    if len(seeds):
        for n in range(max(len(seeds) + 1, 5), MOST + 1):
            if replace(check, measured=_as_if(seeds, n)).verdict != "undecided":
                return f"{n} seeds"
        return f"more than {MOST} seeds: what was measured lies at the threshold"
    gap = abs(of.value - check.threshold)
    reach = of.value - of.low if of.value > check.threshold else of.high - of.value
    if gap * MOST**0.5 < reach:
        return f"more than {MOST} times the seeds or prompts: what was measured lies at the threshold"
    return f"{math.ceil(10 * (reach / gap) ** 2 - 1e-9) / 10:g} times the seeds or prompts"


def _as_if(seeds: np.ndarray, n: int) -> Measured:
    """What `n` seeds would say that are spread as these."""
    if seeds.dtype == bool:
        return share_of(np.arange(n) < round(n * seeds.mean()))
    known = seeds[~np.isnan(seeds)]
    values = np.quantile(known, (np.arange(n) + 0.5) / n, method="hazen")
    values[: round(n * (1 - len(known) / len(seeds)))] = np.nan
    return over_seeds(values)


# Sizes

SIZES = {
    "d_model": "width",
    "d_head": "width",
    "d_hidden": "width",
    "widths": "width",
    "depths": "depth",
    "n_subjects": "subjects",
    "n_types": "types",
    "grammar_len": "grammar length",
    "n_slots": "slots",
    "n_classes": "classes",
    "n_labels": "labels",
    "n_pairs": "pairs",
    "d_content": "dimensions",
    "x_lens": "input length",
}
"""The fields of configs that are a size of the model or of its data. Steps are none, as learning rates differ."""

LLAMA_3_8B = 32 * 4096**2
"""Layers times width squared of the model of Agarwal and Sarawagi: its number of weights, but for a factor."""


def size_of(name: str, table: Table) -> tuple[float, str]:
    """Returns the size of a kept result in percent of the paper's, and of what: the smallest ratio of a size.

    Of a pretrained model that is layers times width squared, beside Llama 3 8B. A result that trained nothing, and drew
    or computed what the paper draws or computes, has 100.
    """
    models = table.provenance.model or {}
    if "n_layers" in models:
        models = {"": models}
    ratios = [(of["n_layers"] * of["d_model"] ** 2 / LLAMA_3_8B, "of its weights") for of in models.values()]
    paper = asdict(EXPERIMENTS[name].scales["paper"])
    own, full = _sizes(table.provenance.settings.get("config")), _sizes(json.loads(json.dumps(paper, default=str)))
    ratios += [(own[of] / full[of], SIZES[of]) for of in own.keys() & full.keys() if own[of] < full[of]]
    ratio, of = min(ratios, default=(1.0, ""))
    return 100 * ratio, of


def _sizes(config: Any, found: dict[str, float] | None = None, of: str = "") -> dict[str, float]:
    """The largest value of each size anywhere in a config."""
    found = {} if found is None else found
    for key, value in config.items() if isinstance(config, dict) else ((of, each) for each in config or ()):
        if isinstance(value, dict | list | tuple):
            _sizes(value, found, key)
        elif key in SIZES and isinstance(value, int | float):
            found[key] = max(found.get(key, 0), value)
    return found


# Rows


@dataclass(frozen=True, eq=False)
class Row:
    """A figure, a table or a statement of a paper, as `results/scoreboard.toml` has it."""

    paper: str
    of: str
    says: str
    experiment: str
    claims: Sequence[str] = ()
    number: str = ""
    panel: str = ""
    besides: Sequence[str] = ()
    note: str = ""
    untested: str = ""
    wrong: dict[str, str] = field(default_factory=dict)
    size: dict[str, Any] = field(default_factory=dict)
    unit: str = ""
    """What its statements were tried on one by one, where these are no seeds."""


@dataclass(frozen=True)
class Kept:
    """What one kept result says of a row."""

    row: Row
    folder: Path
    table: Table
    checks: list[Check]
    percent: float
    of: str

    @property
    def claims(self) -> list[str]:
        """Their texts."""
        return [check.claim for check in self.checks]

    @property
    def judged(self) -> list[Check]:
        """Those that the verdict follows from."""
        return [check for check in self.checks if not any(part in check.claim for part in self.row.besides)]

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        if self.row.untested:
            return "not testable here"
        wrong = self.row.wrong
        refuted = any(
            wrong["claim"] in each.claim and each.verdict == wrong["verdict"] for each in self.checks if wrong
        )
        return outcome([check.verdict for check in self.judged], refuted=refuted)

    @property
    def shown(self) -> Check:
        """The claim whose number is shown."""
        return next(check for check in self.checks if self.row.number in check.claim)

    @property
    def n(self) -> str:
        """What the shown number is the mean of."""
        if of_each := self.shown.measured.seeds:
            return _many(len(of_each), self.row.unit or "seed")
        worst = "the worst of " * ("in the worst seed" in self.shown.claim)
        if self.shown.measured.exact:
            return "exact"
        config = self.table.provenance.settings.get("config") or {}
        recipes: Counter[str] = Counter()
        for arm in config.get("arms", ()):
            recipes[SAME_RECIPE.get(arm["name"], arm["name"])] += len(arm["seeds"])
        alone = self.table.frame["seed"].nunique() if "seed" in self.table.frame else 0
        seeds = max(recipes.values(), default=alone)
        prompts = config.get("n", int(self.table.frame["n"].max()))
        return worst + _many(seeds, "seed") if seeds else _many(prompts, "prompt")


def _many(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


@cache
def written() -> dict[str, Any]:
    """Returns `results/scoreboard.toml`."""
    return tomllib.loads(ROWS.read_text(encoding="utf-8"))


@cache
def rows(paper: str) -> list[Row]:
    """Returns the rows of a paper."""
    return [Row(**each) for each in written()["row"] if each["paper"] == paper]


@cache
def kept(row: Row) -> list[Kept]:
    """Returns what all kept results say of a row that have its number, the largest first.

    Of equal sizes that comes first whose scale stands later in its study, such as more steps at the paper's sizes.
    """
    folders = [folder for experiment, folder in kept_results.kept(row.paper) if experiment.name == row.experiment]
    having = [
        each for each in (_at(row, folder) for folder in folders) if any(row.number in claim for claim in each.claims)
    ]
    scales: list[str] = [*EXPERIMENTS[row.experiment].scales]
    later = {scale: place for place, scale in enumerate(scales)}
    return sorted(having, key=lambda each: (each.percent, later.get(each.folder.name, -1)), reverse=True)


def rows_changed_by_besides() -> int:
    """Returns how many rows would have another verdict if the claims in `besides` counted, too."""
    shown = [results[0] for paper in TITLES for row in rows(paper) if (results := kept(row))]
    return sum(each.outcome != replace(each, row=replace(each.row, besides=())).outcome for each in shown)


def _at(row: Row, folder: Path) -> Kept:
    found = published_checks(row.experiment, folder)
    checks = [check for check in found if not row.claims or any(part in check.claim for part in row.claims)]
    table = Table.load(folder)
    percent, of = (row.size["percent"], row.size["why"]) if row.size else size_of(row.experiment, table)
    return Kept(row, folder, table, checks, percent, of)


def published_of(name: str, claim: str) -> tuple[float, float, str] | None:
    """Returns the range of what a paper prints or plots for a claim, and its source; None where there is nothing.

    Raises:
        LookupError: Several entries fit.
    """
    found = [value for part, value in written()["published"].get(name, {}).items() if part in claim]
    if len(found) > 1:
        raise LookupError(f"{name}: several published numbers for {claim!r}")
    return None if not found else (float(found[0][0]), float(found[0][-2]), found[0][-1])


def published_checks(name: str, folder: Path) -> list[Check]:
    """Returns the checks of an experiment, with what the paper prints or plots where the claim itself does not say."""
    checks = []
    for check in kept_results.checked(name, folder):
        known = published_of(name, check.claim)
        checks.append(replace(check, published=_printed(known)) if known and not check.published else check)
    return checks


def _printed(known: tuple[float, float, str]) -> str:
    low, high, source = known
    return f"{low:g} ({source})" if low == high else f"{low:g} to {high:g} ({source})"


# What the pages show


def scoreboard(paper: str) -> str:
    """Returns the table of a paper as HTML; its thumbnails are drawn by one headless Chromium."""
    kaleido.start_sync_server(n=1, mathjax=False, silence_warnings=True)
    try:
        body = "".join(map(_row, rows(paper)))
    finally:
        kaleido.stop_sync_server(silence_warnings=True)
    heads = ("", "verdict", "the paper says, in our words", "its number", "ours", "n, size")
    head = "".join(f"<th>{each}</th>" for each in heads)
    return f'<table class="scoreboard"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _row(row: Row) -> str:
    largest, *others = kept(row)
    shown = largest.shown
    known = published_of(row.experiment, shown.claim)
    claims = f"<br><small>claims: {_told(largest.judged)}</small>"
    if besides := [check for check in largest.checks if check not in largest.judged]:
        claims += f"<br><small>besides: {_told(besides)}</small>"
    page = row.wrong.get("page") if largest.outcome == "the paper is wrong" else None
    verdict = f'<a href="{page}.html">{largest.outcome}</a>' if page else largest.outcome
    why = "".join(f"<br><small>{html.escape(each)}</small>" for each in (row.untested, row.note) if each)
    smaller = "".join(f"<br><small>{each.folder.name}, {_percent(each)}: {each.outcome}</small>" for each in others)
    anchor = f"results-{row.paper}.html#{row.experiment.replace('/', '-')}"
    cells = {
        "": f'<a href="{anchor}">{_thumbnail(row, largest)}{html.escape(row.of)}</a>',
        "verdict": f'<b class="{largest.outcome.split()[0]}">{verdict}</b>{why}{claims}{smaller}',
        "the paper says, in our words": html.escape(row.says),
        "its number": "–" if known is None else html.escape(_printed(known)),
        "ours": f"{html.escape(_number(shown.measured))}<br><small>{html.escape(shown.claim)}</small>",
        "n, size": f"{largest.n}, {_percent(largest)}<br><small>{html.escape(largest.of)}</small>",
    }
    return "<tr>" + "".join(f'<td data-of="{of}">{cell}</td>' for of, cell in cells.items()) + "</tr>"


def _told(checks: Sequence[Check]) -> str:
    verdicts = [check.verdict for check in checks]
    return told({each: verdicts.count(each) for each in get_args(Verdict)})


def _number(measured: Measured) -> str:
    return "none" if math.isnan(measured.value) else str(measured)


def _percent(of: Kept) -> str:
    return f"{of.percent:.2g}%" if of.percent < 99.5 else "100%"


def _thumbnail(row: Row, of: Kept) -> str:
    drawn = EXPERIMENTS[row.experiment].draw(of.table)
    figure = next((figure for name, figure in drawn.items() if row.panel in name), None)
    if figure is None:
        return ""
    size = {"width": 640, "height": figure.layout["height"] or 450, "scale": 0.4}
    data = base64.b64encode(kaleido.calc_fig_sync(figure, opts={"format": "png", **size})).decode()
    return f'<img alt="{html.escape(row.of)}, drawn from the kept table" src="data:image/png;base64,{data}"><br>'


def counts() -> pd.DataFrame:
    """Returns how many rows of each paper have which verdict."""
    found = {TITLES[paper]: [kept(row)[0].outcome for row in rows(paper)] for paper in TITLES}
    return pd.DataFrame({each: [of.count(each) for of in found.values()] for each in get_args(Outcome)}, index=[*found])


def checks_at_largest(paper: str) -> Iterator[tuple[Row, Check]]:
    """Yields the claims of a paper at the largest kept size, each once, with the first row that it is in."""
    seen = set()
    for row in rows(paper):
        for check in kept(row)[0].checks:
            if (row.experiment, check.claim) not in seen:
                seen.add((row.experiment, check.claim))
                yield row, check


def forest(paper: str) -> go.Figure:
    """Draws what a paper prints or plots beside ours, for every claim for which it gives a number within [-1, 1]."""
    printed = written()["published"]
    parts: dict[str, list[tuple[Check, Sequence[float]]]] = {}
    for row, check in checks_at_largest(paper):
        for part, known in printed.get(row.experiment, {}).items():
            if part in check.claim and not math.isnan(check.measured.value) and max(map(abs, known[:-1])) <= 1:
                parts.setdefault(f"{row.of}: {part}", []).append((check, known[:-1]))
    points: list[dict[str, Any]] = []
    for part, pairs in parts.items():
        for (check, known), which in zip(pairs, _differing([check.claim for check, _ in pairs]), strict=True):
            low, high = min(known), max(known)
            row = {"claim": f"{part}{', ' * bool(which)}{which}"}
            points.append({**row, "whose": "ours", **check.measured.row})
            points.append({**row, "whose": "the paper's", "value": (low + high) / 2, "low": low, "high": high})
    return plots.dots(pd.DataFrame(points), "claim", "whose", "value")


def _differing(texts: Sequence[str]) -> list[str]:
    """The words of each of several texts that not all of them have, in at most 24 letters."""
    common = set.intersection(*(set(text.split()) for text in texts)) if len(texts) > 1 else set(texts[0].split())
    words = (" ".join(word for word in text.split() if word not in common) for text in texts)
    return [own[:24].strip("():, ") for own in words]


def undecided(paper: str) -> pd.DataFrame:
    """Returns the undecided claims of a paper at its largest kept size, and what would decide each."""
    return pd.DataFrame(
        {
            "figure": row.of,
            "claim": check.claim,
            "measured": str(check.measured),
            "needed": f"{check.relation} {check.threshold:g}",
            "would decide it": would_decide(check),
        }
        for row, check in checks_at_largest(paper)
        if check.verdict == "undecided"
    )
