"""Fig. 7 of The Missing Alignment Link (Agarwal and Sarawagi, 2025): alignments that are more or less monotonic."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.icatune.tuned_models import (
    ICA,
    ONE_LETTER,
    PAPER_ICA,
    SMOKE_ICA,
    SMOLLM2_ONE_LETTER,
    Arm,
    Tunings,
    courses,
    tuned_study,
)
from align_circuits.papers.icatune.tuning_courses import KEYS, draw_course
from align_circuits.papers.lab import HIGH, Claim, Experiment, Rows, as_rows, grouped_over_seeds, rows
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask


def _decays(arm: Arm, *decays: int) -> Tunings:
    """Alignments drawn from the prior in its released form at each λ, another one for each seed."""
    tasks = {decay: {**arm.task, "alignment": "prior", "prior_form": "code", "decay": float(decay)} for decay in decays}
    return Tunings(tuple(replace(arm, name=f"λ = {decay}", task=task) for decay, task in tasks.items()))


def _not_monotonic(decays: Tunings, count: int) -> Tunings:
    """The first seeds from the arms' own first one on whose alignments are monotonic at no λ.

    At λ = 16 most are monotonic, and the bundled model has learned such alignments in pretraining.
    """

    def monotonic(task: Mapping[str, Any], seed: int) -> bool:
        drawn = Seq2SeqTask(**task, task_seed=seed)
        return drawn.aligned == tuple(range(drawn.x_len))

    seeds = (
        seed
        for seed in itertools.count(decays.arms[0].seeds[0])
        if not any(monotonic(arm.task, seed) for arm in decays.arms)
    )
    chosen = tuple(itertools.islice(seeds, count))
    return replace(decays, arms=tuple(replace(arm, seeds=chosen) for arm in decays.arms))


def _summarize_decays(config: Tunings, rows: Rows) -> pd.DataFrame:
    """The courses of accuracy, and its mean over steps."""
    probes = rows["course"]
    course: Any = courses(probes, config.every)
    first = probes[(probes["metric"] == "accuracy") & (probes["kind"] == "first") & ~probes["ood"]]
    runs: Any = first.groupby(["arm", "seed"], sort=False)[["value", "low", "high"]]
    mean: Any = grouped_over_seeds(runs.mean().reset_index().assign(n=1), ["arm"])
    about = {"part": "mean", "condition": "in distribution", "metric": "accuracy", "kind": "first", "of": "model"}
    return as_rows([course[course["of"] == "model"], mean.assign(**about)], KEYS)


_FIRST = rows(metric="accuracy", kind="first", condition="in distribution")
_MEAN, _COURSE = _FIRST.at(part="mean"), _FIRST.at(part="course")


def _decay(arm: str) -> float:
    return float(arm.rpartition(" ")[2])


def _check_decays(table: Table) -> list[Claim]:
    weak, *between, strong = sorted(map(str, table.frame["arm"].unique()), key=_decay)
    return [
        Claim(
            f"{strong} is learned faster than {weak} (first tokens, mean over steps, difference)",
            "25 steps where 200 are needed",
        ).at_least(
            0.05, _MEAN.rise("arm", weak, strong), _COURSE.at(step=0).rise("arm", weak, strong), "before the first step"
        ),
        Claim(f"{strong} is learned (first tokens, at the end)").at_least(
            0.95, *_COURSE.at(arm=strong).beside("step", HIGH, 0), "before"
        ),
        *(
            Claim(f"{arm} is ahead of {over} on average over steps (first tokens, difference)").at_least(
                0.0, _MEAN.rise("arm", over, arm), _MEAN.rise("arm", arm, over), "the other way round"
            )
            for middle in between
            for over, arm in ((weak, middle), (middle, strong))
        ),
    ]


def _draw_decays(table: Table) -> Mapping[str, go.Figure]:
    course: Any = table.where(part="course", metric="accuracy", kind="first").frame
    course = course.assign(decay=course["arm"].map(_decay)).sort_values(["decay", "step"])
    return {"fig7": draw_course(course, "arm")}


FIG7 = Experiment(
    "icatune/fig7",
    "Alignments that are less and less monotonic take longer to learn (prior as released)",
    "Agarwal and Sarawagi (2025), Fig. 7",
    tuned_study(
        "icatune/fig7",
        _summarize_decays,
        smoke=_decays(replace(SMOKE_ICA, seeds=(0,)), 1, 16),
        cpu=_not_monotonic(_decays(ICA, 1, 4, 16), 6),
        paper=_decays(
            replace(PAPER_ICA, task={"x_len": 8, "phrase_len": 1, "n_examples": 15}, seeds=(0, 1, 2)), 1, 4, 16
        ),
        smollm2=_decays(replace(SMOLLM2_ONE_LETTER, config={**ONE_LETTER, "probe_every": 20}), 1, 16),
    ),
    _draw_decays,
    _check_decays,
    "Llama 3 8B, m = 8, c = 1: about 25 steps at λ = 16, up to 200 at λ = 1, where convergence is worst.",
)
