"""What effects are compared with: the same metric on clean and on corrupted prompts, without any edit."""

from collections.abc import Iterator
from math import isnan
from typing import Any

CLEAN, CORRUPTED, CHANCE = "clean", "corrupted", "chance"
"""The runs of baselines: on clean and on corrupted prompts, and what a guess would get."""

GUESS = "a guess ("
"""What a warning has that says that the model does not solve the prompts, or is not shown to."""

GAP = "clean - corrupted"
"""Their paired difference."""


def described(frame: Any) -> Iterator[str]:
    """Yields a line for each metric: its baselines with their intervals."""
    for metric, runs in _by_metric(frame):
        shown = [f"{run} {_shown(row)}" for run, row in runs.items() if run != CHANCE]
        yield f"{metric} without an edit: {', '.join(shown)}"


def warnings_of(frame: Any, n: int | None = None, unit: str = "targets") -> Iterator[str]:
    """Yields what leaves effects without a meaning, or without one that is shown.

    That is a model that only guesses, prompts too few to show that it does not, and a corruption that changes nothing.

    Args:
        frame: Rows of `Table.baselines`.
        n: How many of `unit` each interval is over; by default the targets of its row.
        unit: Their name, such as `"prompts"` or `"groups"`.
    """
    for metric, runs in _by_metric(frame):
        if {CLEAN, CHANCE} <= runs.keys():
            clean, guess = runs[CLEAN], float(runs[CHANCE]["value"])
            if told := unsolved(clean, guess, int(clean["n"]) if n is None else n, unit):
                so = ", so effects do not show how the model finds the answer" if clean["value"] <= guess else ""
                yield f"on the clean prompts {metric} is {_shown(clean)}, {told}{so}"
        if GAP in runs and not is_apart(runs[GAP]):
            yield (
                f"between clean and corrupted prompts {metric} differs by {_shown(runs[GAP])}, which may be 0: these "
                "prompts do not show that the corruption changes it, so its effects are not normalised"
            )
        elif GAP in runs and metric != "kl" and runs[GAP]["value"] < 0:  # a divergence is 0 on clean prompts
            yield (
                f"clean - corrupted is {_shown(runs[GAP])} in {metric}: the corrupted prompts favour the answer, so a "
                "normalised effect of 100% is a loss; look whether clean and corrupted texts are swapped"
            )


def unsolved(row: Any, guess: float, n: int, unit: str) -> str:
    """Returns that the model is no better than a guess, or that this is not known; nothing where it is better.

    Only an interval that ends at or below a guess says that the model does not solve the prompts. One that holds the
    guess below a higher value says that n are too few. Its length shrinks as 1/√n, which tells how many would leave the
    guess out.
    """
    if row["value"] <= guess:
        if row["high"] > guess:
            return f"not above {GUESS}{guess:.3g}); with only {n} {unit} it may still be above"
        return f"no better than {GUESS}{guess:.3g}): the model does not solve these prompts"
    if not row["low"] <= guess:
        return ""
    needed = int(n * ((row["value"] - row["low"]) / (row["value"] - guess)) ** 2) + 1
    return (
        f"but {n} {unit} are too few to show that this is better than {GUESS}{guess:.3g}): at this value about "
        f"{needed:,} would be needed"
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
    """A value and its interval in three digits; an end that is nothing beside the others is 0."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    if isnan(low):
        return f"{value:.3g}"
    largest = max(map(abs, (value, low, high)))
    value, low, high = (0.0 if abs(number) < 1e-6 * largest else number for number in (value, low, high))
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"
