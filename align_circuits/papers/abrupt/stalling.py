"""Beyond abrupt learning: as many labels as pairs, over many seeds: which stall, how long, and what moves it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, at_start, by_seed, conditions_of, transitions
from align_circuits.papers.abrupt.grid import CPU, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, training_jobs
from align_circuits.papers.claims import Check, Claim, share_of
from align_circuits.papers.study import Experiment, Rows, Study
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_KEPT = ("icl", "tila2")
_VARIED = ("n_labels", "spread", "noise")


def waiting(table: Table, share: float, **where: Any) -> Bool[ndarray, " seed"]:
    """Returns which seeds still wait after a share of the steps: their accuracy has not crossed one half for good."""
    steps = np.nan_to_num(transitions(table, **where), nan=np.inf)
    last: Any = by_seed(table, "icl", **where).index.max()
    return steps > share * last


def direction(
    tila2: Float[ndarray, " seed"], n_pairs: int, least: float = 0.0
) -> tuple[Bool[ndarray, " seed"], Bool[ndarray, " seed"]]:
    """Returns which seeds attend to the right label more than evenly, and which less.

    Evenly is 1/(2N+1). A seed that differs by less than the share `least` of that is in neither.
    """
    ratio = tila2 * (2 * n_pairs + 1)
    return ratio > 1 + least, ratio < 1 - least


def _conditions(table: Table) -> tuple[dict[str, Any], ...]:
    """L = N as it is, with an initial spread, with noise; and L > N."""
    conditions = conditions_of(table, _VARIED)
    fewest = min(each["n_labels"] for each in conditions)
    equal = [each for each in conditions if each["n_labels"] == fewest]
    (more,) = (each for each in conditions if each["n_labels"] > fewest)
    plain = next(each for each in equal if not each["spread"] and not each["noise"])
    spread = next(each for each in equal if each["spread"] and not each["noise"])
    noisy = next(each for each in equal if each["noise"] and not each["spread"])
    return plain, spread, noisy, more


def _pairs(table: Table) -> int:
    return min(int(each["n_labels"]) for each in conditions_of(table, _VARIED))


def _check(table: Table) -> list[Check]:
    plain, spread, noisy, more = _conditions(table)
    half, end = (waiting(table, share, **plain) for share in (0.5, 1.0))
    even = _pairs(table)
    last = at_end(table, "tila2", **plain)
    right, wrong = direction(last, even, 0.5)
    icl = at_end(table, "icl", **plain)
    there = wrong & ~end
    none = np.zeros(1)  # has no interval, so that nothing is decided
    started, ended = at_start(table, "tila2", **spread), at_end(table, "tila2", **spread)
    gone = np.any(direction(ended, even, 0.5), axis=0)
    as_started = (direction(started, even)[0] == direction(ended, even)[0])[gone]
    as_another = (np.roll(direction(started, even)[0], 1) == direction(ended, even)[0])[gone]
    halves = half[::2].astype(float) - half[1::2].astype(float)

    def fewer(share: float, first: dict[str, Any], second: dict[str, Any]) -> Float[ndarray, " seed"]:
        return waiting(table, share, **first).astype(float) - waiting(table, share, **second).astype(float)

    other_half = halves, "one half of the seeds minus the other, nothing changed"
    return [
        Claim("L = N stalls seeds (share that still waits after half of the steps)", "four of six").at_least(
            1 / 6, half, waiting(table, 0.5, **more), "L > N"
        ),
        Claim("Stalling passes (share that has left by the end, of those that wait after half of the steps)").at_least(
            0.5, ~end[half] if half.any() else none, ~half, "share of all that has left by half of the steps"
        ),
        Claim("Some heads learn to avoid the right label (share with TILA2 below half of even at the end)").at_least(
            0.05, wrong, direction(at_end(table, "tila2", **more), even, 0.5)[1], "L > N"
        ),
        Claim(
            "Those that do are left with the other labels (accuracy at the end of those that no longer wait)"
        ).at_most(0.85, icl[there] if there.any() else none, icl[right] if right.any() else none, "the others"),
        Claim(f"Initial spread shortens the wait (share waiting half way, 0 minus {spread['spread']:g})").at_least(
            0.2, fewer(0.5, plain, spread), *other_half
        ),
        Claim(
            "With spread, the sign at the start decides the direction (share of seeds whose TILA2 keeps it)"
        ).at_least(
            0.75, as_started if gone.any() else none, as_another if gone.any() else none, "the sign of another seed"
        ),
        Claim(f"Noise lengthens the wait (share waiting at the end, ε = {noisy['noise']:g} minus 0)").at_least(
            0.1, fewer(1.0, noisy, plain), *other_half
        ),
    ]


def _left(table: Table, **where: Any) -> pd.DataFrame:
    """The share of seeds that no longer wait at each probe, with its exact interval."""
    at = np.nan_to_num(transitions(table, **where), nan=np.inf)
    steps = by_seed(table, "icl", **where).index
    return pd.DataFrame([{"step": step, **vars(share_of(at <= step))} for step in steps])


def _draw(table: Table) -> dict[str, go.Figure]:
    frames = []
    for each in sorted(conditions_of(table, _VARIED), key=lambda each: [each[name] for name in _VARIED]):
        caption = f"L = {each['n_labels']}, spread {each['spread']:g}, ε = {each['noise']:g}"
        frames.append(_left(table, **each).assign(condition=caption))
    shares = pd.concat(frames, ignore_index=True)
    return {
        "": plots.curves({"": shares}, x="step", by="condition", label="step", value="share of seeds that answer half")
    }


def _summarize(_: Grid, rows: Rows) -> pd.DataFrame:
    (frame,) = rows.values()
    kept: Any = frame[frame["measure"].isin(_KEPT)]
    return kept.round({"value": 4})


def _grid(size: Size, n_labels: int, n_pairs: int, spread: float, noise: float) -> Grid:
    equal = [
        {"n_labels": n_pairs, "spread": each, "noise": noise_} for each in (0.0, spread) for noise_ in (0.0, noise)
    ]
    more = {"n_labels": n_labels, "spread": 0.0, "noise": 0.0}
    return Grid(size.with_task(**PLATEAU), [{"model": "two", **each} for each in (*equal, more)])


_MANY = replace(CPU, steps=5000, seeds=200, first_seed=100, batch_size=32, d_hidden=32, log_every=250, probe=150)

STALLING = Experiment(
    name="abrupt/stalling",
    title="As many labels as pairs, two hundred seeds: how long they wait, and what moves it",
    source=f"beyond {SOURCE}, Fig. 6 (c)",
    study=Study(
        "abrupt/stalling",
        {
            "smoke": _grid(replace(SMOKE, seeds=4), 8, 2, 0.5, 0.4),
            "cpu": _grid(_MANY, 16, 4, 0.5, 0.4),
            "paper": _grid(replace(PAPER, seeds=200).with_task(d_content=64, n_classes=256), 32, 8, 0.5, 0.4),
        },
        train=training_jobs,
        summarize=_summarize,
    ),
    draw=_draw,
    check=_check,
    published="Two of six seeds learn at L = N = 8, and the others converge to a sub-optimal minimum.",
)
