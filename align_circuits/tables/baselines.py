"""What effects are compared with: the same metric on clean and on corrupted prompts, without any edit."""

from collections.abc import Iterator
from typing import Any

CLEAN, CORRUPTED, CHANCE = "clean", "corrupted", "chance"
"""The runs of baselines: on clean and on corrupted prompts, and what a guess would get."""

GAP = "clean - corrupted"
"""Their paired difference."""


def described(frame: Any) -> Iterator[str]:
    """Yields a line for each metric: its baselines with their intervals."""
    for metric, runs in _by_metric(frame):
        shown = [f"{run} {_shown(row)}" for run, row in runs.items() if run != CHANCE]
        yield f"{metric} without an edit: {', '.join(shown)}"


def warnings_of(frame: Any) -> Iterator[str]:
    """Yields what leaves effects without a meaning: a model that only guesses, a corruption that changes nothing."""
    for metric, runs in _by_metric(frame):
        if {CLEAN, CHANCE} <= runs.keys() and runs[CLEAN]["low"] <= runs[CHANCE]["value"]:
            yield (
                f"on the clean prompts {metric} is {_shown(runs[CLEAN])}, no better than a guess "
                f"({runs[CHANCE]['value']:.3g}): the model does not solve these prompts, so effects on {metric} do not "
                "show how it would"
            )
        if GAP in runs and not is_apart(runs[GAP]):
            yield (
                f"between clean and corrupted prompts {metric} differs by {_shown(runs[GAP])}, which may be 0: these "
                "prompts do not show that the corruption changes it, so its effects are not normalised"
            )


def is_apart(row: Any) -> bool:
    """Returns whether a difference has an interval without 0, or none at all."""
    return not row["low"] <= 0 <= row["high"]


def _by_metric(frame: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each metric and its rows over all targets, by run."""
    frame = frame[frame["kind"] == "all"] if "kind" in frame and "all" in set(frame["kind"]) else frame
    for metric, rows in frame.groupby("metric", sort=False):
        yield metric, {row["run"]: row for _, row in rows.iterrows()}


def _shown(row: Any) -> str:
    return f"{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"
