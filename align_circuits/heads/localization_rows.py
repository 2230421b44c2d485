"""The evidence for named heads and the verdicts as rows of texts, for notebooks and for the report of `localize`."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log10

import numpy as np

from align_circuits.heads.role_tests import CAUSAL
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.verdicts import Verdict
from align_circuits.hooks.head_names import Head, describe
from align_circuits.tables.tables import Table

MISSING = "–"
"""What stands in a cell without a value."""

EVIDENCE = {
    "score": "score",
    "attention": "attention to keys",
    "q": "corrected p",
    "ablation": "loss by ablation (nats)",
    "denoising": "gain by patching (nats)",
    "control": "score on control",
}
"""The columns of the table of named heads, by metric. The loss by resampling, of few heads, is in `named by` alone."""


def named_head_rows(
    table: Table, heads_by_role: Mapping[str, Sequence[Head]], thresholds: Thresholds
) -> list[dict[str, str]]:
    """Returns a row for each named head of each role, with its evidence (`Localization.table`), best score first."""
    measured = table.frame.set_index(["layer", "head", "role", "metric"])[["value", "low", "high"]]
    numbers = {key: tuple(row) for key, row in zip(measured.index, measured.to_numpy(dtype=float), strict=True)}
    rows = [
        {"head": describe([head]), "role": role}
        | {
            column: formatted(numbers.get((*head, role, metric), (np.nan,) * 3), metric)
            for metric, column in EVIDENCE.items()
        }
        | {"named by": " and ".join(_named_by(thresholds, (*head, role), numbers))}
        for role, heads in heads_by_role.items()
        for head in heads
    ]
    return with_values(rows)


def _named_by(
    thresholds: Thresholds, key: tuple[int, int, str], numbers: Mapping[tuple, tuple[float, ...]]
) -> Iterator[str]:
    """Which causal tests a head passed: one is enough."""
    for metric, name in CAUSAL.items():
        value, low, _ = numbers.get((*key, metric), (np.nan,) * 3)
        if value >= thresholds.effect and low > 0:
            yield name


def verdict_rows(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """Returns a row for each verdict, those that do not hold as well."""
    return [
        {
            "set": "smallest found" if verdict.smallest else verdict.role or "all named",
            "verdict": verdict.claim if verdict.holds else f"not shown to be {verdict.claim}",
            "ablated": "the set" if verdict.claim == "necessary" else "all others",
            "accuracy": f"{verdict.value:.2f} [{verdict.low:.2f}, {verdict.high:.2f}]",
            "intact": f"{verdict.intact:.2f}",
            "controls": "; ".join(verdict.beside) or verdict.why_no_controls,
            "heads": f"{len(verdict.heads)} of {verdict.total}: {describe(verdict.heads)}",
        }
        for verdict in verdicts
    ]


def with_values(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns rows without the columns that have no value in any."""
    kept = [column for column in (rows[0] if rows else ()) if any(row[column] not in (MISSING, "") for row in rows)]
    return [{column: row[column] for column in kept} for row in rows]


def formatted(numbers: Sequence[float], metric: str) -> str:
    """Returns a number with its interval, if it has one: two decimals, or as many as show that it leaves out 0.

    >>> formatted((0.5, -0.004, 0.9), "accuracy"), formatted((2e-3, 4e-4, 0.02), "denoising")
    ('0.50 [-0.00, 0.90]', '0.0020 [0.0004, 0.0200]')
    """
    value, low, high = numbers
    if np.isnan(value):
        return MISSING
    if metric == "q":
        return f"{value:.1g}"
    alone = np.isnan([low, high]).any()
    ends = [value] if alone else [value, low, high] if low * high > 0 else []
    decimals = max([2, *(min(8, ceil(-log10(abs(end)))) for end in ends if end)])
    return f"{value:.{decimals}f}" + ("" if alone else f" [{low:.{decimals}f}, {high:.{decimals}f}]")
