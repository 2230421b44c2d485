"""What the verbs of effects (ablate, patch, attribute) share: options, what they print and what they draw."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from align_circuits.cli.command_base import distinct, head_value
from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_command_base import SweepVerb
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.report.page import Section, legend_of
from align_circuits.report.plots.figure_parts import UNITS, kinds_of
from align_circuits.report.plots.position_figures import position_labels
from align_circuits.run.pairs import Direction, Pair
from align_circuits.tables.intervals import COVERAGE
from align_circuits.tables.tables import Table, best_end_of

NORMALISED = (
    " In brackets, and below as normalised, (patched - corrupted) / (clean - corrupted): 0% is the metric of the "
    "corrupted prompts, 100% that of the clean ones."
)
"""What normalised effects mean, where they are shown."""

IN_WORDS = {
    "log_prob": "the target's log-probability (nats)",
    "logit": "the target's logit",
    "logit_diff": "the target's logit minus that of the wrong answer",
    "prob": "the target's probability",
    "kl": "the KL divergence from the prediction on the clean prompts (nats)",
    "accuracy": "accuracy",
}
"""What each metric measures."""

LEAST_SHARE = 0.01
"""Effects below this share of the largest are not listed among those that matter."""

LISTED = "those whose interval leaves out 0, largest first"
"""Which effects `best_of` lists."""

LISTED_ALONE = "largest first; a single prompt tells no interval, so take dozens"
"""Which it lists of a single prompt, or of prompts of one group."""

ROUNDING = 1e-5
"""Effects below this, in nats or logits, may be rounding: float32 has steps of 1e-6 at logits of 10 to 30. Of a metric
that is a share, this times the metric itself."""

MOST_LISTED = 6
"""The largest effects that `best_of` lists, up and down."""

MOST_DRAWN = 10
"""The largest effects in the figure of those that matter."""

_SITE_KEYS = ("site", "positions")
"""The keys of what is patched beside layer and head."""

OF_TARGETS = tyro.conf.arg(help='What is measured of each target; "logit_diff" needs a file with wrong answers.')
EffectMetric = Annotated[Literal["log_prob", "logit", "logit_diff", "prob", "kl", "accuracy"], OF_TARGETS]
PairDirection = Annotated[
    Direction,
    tyro.conf.arg(
        help='"denoise" puts clean activations into corrupted runs, "noise" corrupted ones into clean runs. A '
        "corrupted prompt is the text in the file of prompts, or one of the task with another test input."
    ),
]


def named_heads(heads: Sequence[str] | None) -> list[str] | None:
    """Returns the heads that `--heads` names, one or several in a word; None, which is all, where it is not given.

    Raises:
        ValueError: A word that names no head.
    """
    names = None if heads is None else " ".join(heads).replace(",", " ").split()
    if wrong := [name for name in names or () if not re.fullmatch(r"L\d+H\d+", name)]:
        raise ValueError(
            f"--heads {wrong[0]}: write layer 2, head 3 as L2H3, both counted from 0, and several as --heads L2H3 L4H0"
        )
    return names


@dataclass(frozen=True)
class EffectVerb(SweepVerb):
    """A verb that measures an effect of every head."""

    metric: EffectMetric = "log_prob"

    @property
    def wrong_for(self) -> str | None:
        """The option that needs wrong answers."""
        return "--metric logit_diff" if self.metric == "logit_diff" else None

    def write(
        self,
        results: Results,
        table: Table,
        prompts: Prompts | Pair,
        how: str,
        title: str,
        what: str,
        but: str,
        caveats: Sequence[str] = (),
    ) -> None:
        """Prints how it was measured and the heads that matter most; writes the results, with `what` and `but`."""
        metric = self.metric
        by_site = _of_sites(_measured(table).where(metric=metric).of_all_targets())
        tables = dict(sorted(by_site, key=lambda site: -_largest(site[1])))
        clean = prompts.clean if isinstance(prompts, Pair) else prompts
        named = {site: _with_labels(of_site, clean) for site, of_site in tables.items()}
        lines = [(f"{site}: " if site else "") + best_of(of_site, metric) for site, of_site in named.items()]
        screened = _screened(table)
        told = [f"  {line}" for line in [*lines, *screened]]
        listed = LISTED if has_intervals(table) else LISTED_ALONE
        caveats = [*self._of_later_tokens(clean), *caveats]
        noted = [*table.remarks, *(f"Note: {caveat}" for caveat in caveats)]
        print("\n".join([f"{self.model}: {how}, {listed}\n", *told, "", *noted]))
        warnings = [warning.replace("log_prob", "log-probability") for warning in table.where(metric=metric).warnings]
        warned = [f"{warning[0].upper()}{warning[1:]}." for warning in warnings]
        found = f"{what}:" if all(line.startswith("no effect") for line in lines) else f"{what}, {listed}:"
        answer = [f"{found} {lines[0]}. {but}"] if len(lines) == 1 else [found, *lines, but]
        summary = "\n\n".join(["\n".join([*answer, *warned]), *screened, *caveats])
        sections = list(_sections(table, tables, metric, prompts))
        self.finish(results, table, title=title, summary=summary, sections=sections)

    def _of_later_tokens(self, prompts: Prompts) -> list[str]:
        """What is to be known of answers of several tokens beside wrong ones."""
        several = int((prompts.column("prompt").bincount() > 1).sum())
        if self.metric != "logit_diff" or self.prompts is None or not several:
            return []
        return [
            f"{several} of {len(prompts)} answers have several tokens, and effects are means over all of them. Once a "
            "right answer has begun, a wrong one may have no chance: --targets first compares first tokens alone."
        ]


def _sections(table: Table, tables: Mapping[str, Table], metric: str, source: Prompts | Pair) -> Iterator[Section]:
    """Yields the sections of a report: the heads that matter most, maps of all heads, a prompt, the table."""
    prompts = source.clean if isinstance(source, Pair) else source
    unit = UNITS.get(metric, "share")
    is_screened = "estimated" in table.keys and True in set(table.frame["estimated"])
    for site, of_all in tables.items():
        if _largest(of_all) < _rounding(of_all, metric):
            continue
        ending = f", {site}" if site else ""
        shares = of_all.normalized().frame["value"] if table.is_paired else None
        told = shares is not None and bool(shares.notna().any())
        skew = f"(corrected for skew: long on one side where one of the {table.unit} is far out)"
        intervals = f", with 95% intervals over {table.unit} {skew}" if has_intervals(of_all) else ""
        note = f"The largest effects, up or down{intervals}.{NORMALISED if told else ''}"
        named = _with_labels(of_all, prompts)
        drawn = plots.top_heads(named, [metric], _count_apart(of_all), by="absolute", normalized=told)
        yield f"What matters most{ending}", note, drawn
        of_heads = "head" in set(of_all.frame["level"])
        maps = [plots.position_map(of_all, prompts=prompts)] if "position" in table.keys else []
        if of_heads and "kind" in table.keys:
            kinds = kinds_of(table.frame)
            same = {key: of_all.frame[key].iloc[0] for key in _SITE_KEYS if key in table.keys}
            maps = [
                plots.head_maps(
                    _measured(table).where(metric=metric, **same),
                    kinds,
                    captions=kinds != ["all"],
                    by="kind",
                    unit=unit,
                )
            ]
        elif of_heads:
            maps = [plots.head_maps(of_all, [metric], unit=unit)]
        if maps:
            heading = f"All {'heads' if of_heads else 'positions'}{ending}"
            grey = " Grey: not run, see Estimates." if is_screened else ""
            columns = "" if of_heads else " At columns with a number below them the tokens of the prompts differ."
            yield heading, f"Tap or hover for a number and its interval.{columns}{grey}", maps
    if table.baselines is not None:
        yield (
            "Without an edit",
            "Each metric on the prompts as they are, and what a guess would get.",
            distinct(table.baselines),
        )
    if is_screened:
        screened = table.where(metric=metric, kind="all", estimated=True)
        largest, bound = _largest(screened), _largest(table.where(metric=metric))
        most = f"at most {largest:.2g} {unit}"
        note = (
            f"To first order, of the heads that were screened out and not run: {most}. Colours are those of All heads."
        )
        maps = [plots.head_map(of, metric, f"Estimates, {most}", unit) for _, of in _of_sites(screened) if largest > 0]
        # On a scale of its own noise would look like an effect.
        yield "Estimates", note, [drawn.update_coloraxes(cmin=-bound, cmax=bound) for drawn in maps] or ""
    heading = "A pair of prompts" if isinstance(source, Pair) else "A prompt"
    yield heading, legend_of(source), source.to_html()
    shown = distinct(table)
    if is_screened:  # accuracy has no gradient, so no estimate
        shown = shown._rows(np.flatnonzero(shown.frame["value"].notna() | ~shown.frame["estimated"].astype(bool)))
    if table.is_paired:
        columns = shown.normalized().frame[["value", "low", "high"]].add_prefix("normalised ")
        shown = Table(shown.frame.join(columns), shown.provenance)
    yield "All numbers", "", shown


def _screened(table: Table) -> list[str]:
    """How many heads were run, in a sentence, if a gradient screened out the others."""
    if "estimated" not in table.keys:
        return []
    heads: Any = table.frame.drop_duplicates(["layer", "head"])
    return [f"{int((~heads['estimated']).sum())} of {len(heads)} heads were run; any others have an estimate alone."]


def _of_sites(table: Table) -> Iterator[tuple[str, Table]]:
    """Yields the rows of each site and each group of positions, by a name; no name where there is one of each."""
    keys = [key for key in _SITE_KEYS if key in table.keys]
    if not keys:  # of ablations
        yield "", table
        return
    frame: Any = table.frame
    several = [key for key in keys if frame[key].nunique() > 1]
    for _, row in frame[keys].drop_duplicates().iterrows():
        yield " at ".join(str(row[key]) for key in several), table.where(**row.to_dict())


def best_of(table: Table, metric: str) -> str:
    """Returns the largest effects, those in the expected direction first, and how many smaller ones there are.

    The `MOST_LISTED` largest of both directions are listed; where all of them are in the other direction, the largest
    in the expected one too. Rows whose interval holds 0 are left out; those of the five largest are named in the end.
    Heads that share the keys or values of one that is listed are left out.
    """
    if not _largest(table):
        return "no effect (all are 0)"
    if _largest(table) < (least_size := _rounding(table, metric)):
        return f"no effect (all are below {least_size:.1g}, which rounding may make)"
    largest: Any = table.top(metric, len(table), by="absolute").frame
    largest = largest.loc[largest["value"].abs() >= least_size]
    sign = 1 if best_end_of(table, metric) == "highest" else -1
    apart = _apart_from_zero(largest)
    best = [row for row in apart[:MOST_LISTED] if row["value"] * sign > 0]
    best = best or [row for row in apart if row["value"] * sign > 0][:1]
    others = [row for row in apart[:MOST_LISTED] if row["value"] * sign < 0]
    smaller = len(apart) - len(best) - len(others)
    against = f". In the other direction: {', '.join(map(head_value, others))}" if others else ""
    top: Any = table.top(metric, 1).frame.iloc[0]
    nearest = f"; the largest is {head_value(top)}" if top["value"] * sign > 0 else ""
    none = f"no effect in the expected direction has an interval that leaves out 0{nearest}"
    least = min((abs(row["value"]) for row in [*best, *others]), default=np.inf)
    first: Any = largest[:5]
    unclear = [head_value(row) for _, row in first[_holds_zero(first) & (first["value"].abs() > least)].iterrows()]
    larger = f". Larger than some of these, but with an interval that holds 0: {', '.join(unclear)}"
    # An edit that changes nothing, as of a token before the first that differs, has an interval of no length.
    low, high = table.frame[["low", "high"]].to_numpy(dtype=float).T
    intervals = int((high - low > least_size).sum())
    by_chance = round((1 - COVERAGE) * intervals)
    chance = f" (about {by_chance} of {intervals} intervals would leave out 0 by chance alone)" if by_chance else ""
    more = f". Smaller: {smaller} more" if smaller else ""
    told = (", ".join(map(head_value, best)) or none) + against + more
    return told + (chance if best or others else "") + (larger if unclear else "")


def _largest(table: Table) -> float:
    """The size of the largest effect."""
    return float(np.nanmax(np.abs(table.frame["value"].to_numpy(dtype=float)), initial=0))


def _rounding(table: Table, metric: str) -> float:
    """The size below which an effect may be rounding alone (`ROUNDING`)."""
    if metric in UNITS:
        return ROUNDING
    if table.baselines is None:
        return 0.0
    frame = table.baselines.frame
    values = frame.loc[(frame["metric"] == metric) & (frame["run"] != "chance"), "value"].to_numpy(dtype=float)
    return ROUNDING * float(np.nanmax(np.abs(values), initial=0))


def _with_labels(table: Table, prompts: Prompts) -> Table:
    """The table with the token or the name of each numbered position, where all prompts have the same, behind it."""
    if "position" not in table.keys:
        return table
    positions = list(dict.fromkeys(table.frame["position"]))
    shown: dict[Any, Any] = {
        position: position if isinstance(position, str) or label == str(position) else f"{position} ({label})"
        for position, label in zip(positions, position_labels(positions, prompts), strict=True)
    }
    return replace(table, frame=table.frame.assign(position=[shown[given] for given in table.frame["position"]]))


def has_intervals(table: Table) -> bool:
    """Whether any effect that was measured has an interval, for which it takes two prompts or groups of them."""
    return bool(_measured(table).frame["low"].notna().any())


def _holds_zero(rows: Any) -> Any:
    """Which rows have an interval with 0 in it."""
    return (rows["low"] <= 0) & (rows["high"] >= 0)


def _count_apart(table: Table) -> int:
    """How many effects are not nothing beside the largest, from 1 to `MOST_DRAWN`."""
    frame: Any = table.frame
    apart = frame["value"].abs() >= LEAST_SHARE * _largest(table)
    return max(1, min(MOST_DRAWN, int(apart.sum())))


def _apart_from_zero(rows: Any) -> list[Any]:
    """The rows whose interval leaves out 0, but for effects that are nothing beside the largest.

    Of heads with one effect, since they share keys and values, the first.
    """
    shown = rows[~_holds_zero(rows)]
    # 0 is no less than a share of 0: without the first test effects that are all nothing would be listed.
    shown = shown[(shown["value"] != 0) & (shown["value"].abs() >= LEAST_SHARE * rows["value"].abs().max())]
    shared = [key for key in ("site", "layer", "position", "positions", "value", "low", "high") if key in rows]
    return [row for _, row in shown.drop_duplicates(shared).iterrows()]


def _measured(table: Table) -> Table:
    """The rows that are no estimates of a screen."""
    return table.where(estimated=False) if "estimated" in table.keys else table
