"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): other ways to tune, and other alignments to learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Claim, Measured, both, difference_of, extreme_of, mean_of
from align_circuits.papers.icatune.fig_4_tuning import (
    ICA,
    PAPER_ICA,
    SHOWN,
    SMOKE_ICA,
    draw_layers,
    first_token,
    order_checks,
    summarize_courses,
)
from align_circuits.papers.icatune.tuned_models import (
    PAPER,
    SMOKE,
    SMOKE_TASK,
    TASK,
    TOY,
    Arm,
    Tunings,
    as_rows,
    course,
    courses,
    emerged,
    ended,
    ends,
    grouped_over_seeds,
    of_tuned,
    tuned_study,
)
from align_circuits.papers.study import Experiment, Inputs, Rows
from align_circuits.report import plots
from align_circuits.tables.tables import Table

# Figure 6


def _sizes(ica: Arm, standard: Arm, sizes: Sequence[int]) -> tuple[Arm, ...]:
    """Both methods with so many examples to learn from; standard fine-tuning reads at most all of them in a step."""
    arms = []
    for n in sizes:
        batch = min(n, int(standard.config["batch"]))
        arms.append(replace(ica, name=_named("ICA-Tune", n), config={**ica.config, "dataset_size": n}))
        arms.append(
            replace(standard, name=_named("standard", n), config={**standard.config, "dataset_size": n, "batch": batch})
        )
    return tuple(arms)


def _named(method: str, n: int) -> str:
    return f"{method}, N = {n}"


def _compared(task: Mapping[str, Any], config: Mapping[str, Any], batch: int, seeds: tuple[int, ...]) -> dict[str, Arm]:
    """ICA-Tune and standard fine-tuning of one task with fixed automata."""
    task = {**task, "automata": "task"}
    standard = {**config, "method": "standard", "loss_on": "last", "batch": batch}
    return {"ica": Arm("ICA-Tune", task, config, seeds), "standard": Arm("standard", task, standard, seeds)}


SIZES = (20, 50, 100, 800)


def _final(table: Table, method: str, n: int, condition: str = "in distribution", step: int | None = None) -> Table:
    """The row of accuracy on all tokens, at the last step by default."""
    rows = table.where(part="course", arm=_named(method, n), condition=condition, metric="accuracy", kind="all")
    return rows.where(step=int(np.nanmax(rows.frame["step"].to_numpy(dtype=float))) if step is None else step)


def _numbers(table: Table) -> list[int]:
    return sorted({int(arm.rpartition(" ")[2]) for arm in table.frame["arm"]})


def _best_aligner(table: Table, method: str) -> Measured:
    """The highest align_query of any head at the last step, at any N."""
    arms = [_named(method, n) for n in _numbers(table)]
    rows = table.where(part="course", arm=arms, metric="align_query", of="best head")
    return extreme_of(rows.where(step=int(np.nanmax(rows.frame["step"].to_numpy(dtype=float)))), highest=True)


def _check_methods(table: Table) -> list[Check]:
    sizes = _numbers(table)
    few, many = sizes[min(1, len(sizes) - 1)], sizes[-1]

    def final(n: int, method: str, control: str) -> tuple[Measured, Measured]:
        return both(lambda name: mean_of(_final(table, name, n)), method, control)

    def loss_ood(method: str) -> Measured:
        return difference_of(_final(table, method, many), _final(table, method, many, "OOD"))

    return [
        Claim(f"ICA-Tune learns from N = {few} examples (accuracy, all tokens)", "almost 1.0").at_least(
            0.95, *final(few, "ICA-Tune", "standard"), "standard fine-tuning"
        ),
        Claim(f"Standard fine-tuning does not get there from N = {many}", "below 1.0").at_most(
            0.9, *final(many, "standard", "ICA-Tune"), "ICA-Tune"
        ),
        Claim("No head aligns after standard fine-tuning (best align_query, any N)").at_most(
            0.5, _best_aligner(table, "standard"), _best_aligner(table, "ICA-Tune"), "ICA-Tune"
        ),
        Claim(f"ICA-Tune is as good OOD (in distribution minus OOD, N = {many})").at_most(
            0.05, loss_ood("ICA-Tune"), loss_ood("standard"), "standard fine-tuning"
        ),
    ]


def _draw_methods(table: Table) -> Mapping[str, go.Figure]:
    sizes = _numbers(table)
    right: Any = pd.concat(
        [
            _final(table, method, n, condition).frame.assign(N=n, method=method, condition=condition)
            for condition in SHOWN
            for method in ("ICA-Tune", "standard")
            for n in sizes
        ]
    )
    course: Any = table.where(part="course").frame
    totals = course[(course["metric"] == "accuracy") & (course["kind"] == "all")]
    totals = totals[totals["arm"].isin([_named(method, sizes[-1]) for method in ("ICA-Tune", "standard")])]
    aligned: Any = table.where(part="course", metric="align_query", of="best head").frame
    aligned = aligned.loc[aligned.groupby(["arm", "step"])["value"].idxmax()]
    aligned["N"] = aligned["arm"].str.rpartition(" ")[2].astype(int)
    aligned = aligned.sort_values(["N", "step"])
    by_method = {name: aligned[aligned["arm"].str.startswith(name)] for name in ("ICA-Tune", "standard")}
    by_method = {name: rows.assign(arm="N = " + rows["N"].astype(str)) for name, rows in by_method.items()}
    steps = {"x": "step", "by": "arm", "label": "step"}
    return {
        "size": plots.curves(
            {name: right[right["condition"] == name] for name in SHOWN}, x="N", by="method", label="examples N"
        ).update_xaxes(type="log", tickvals=sizes),
        "alignment": plots.curves(by_method, value="best align_query", **steps).update_xaxes(dtick=None),
        "OOD": plots.curves({name: totals[totals["condition"] == name] for name in SHOWN}, **steps).update_xaxes(
            dtick=None
        ),
    }


_SLOW = {**TOY, "probe_every": 50, "probe_prompts": 32}

FIG6 = Experiment(
    "icatune/fig6",
    "ICA-Tune beside standard fine-tuning, from equally many examples",
    "Agarwal and Sarawagi (2025), Fig. 6",
    tuned_study(
        "icatune/fig6",
        smoke=Tunings(_sizes(**_compared(SMOKE_TASK, SMOKE, 4, (0,)), sizes=(5,)), every=1),
        cpu=Tunings(_sizes(**_compared(TASK, _SLOW, 88, (0, 1)), sizes=SIZES), every=1),
        paper=Tunings(
            _sizes(**_compared(PAPER_ICA.task, {**PAPER_ICA.config, "steps": 1000}, 16, (0, 1, 2)), sizes=SIZES),
            every=5,
        ),
        summarize=summarize_courses,
    ),
    _draw_methods,
    _check_methods,
    "Llama 3 8B: ICA-Tune reaches almost 100% from 50 examples, standard fine-tuning not from 800, and then no "
    "layer aligns; OOD accuracy equals that in distribution only for ICA-Tune.",
)


# Figure 7


def _decays(arm: Arm, *decays: int) -> Tunings:
    """Alignments drawn from the prior in its released form at each λ, another one for each seed."""
    prior = {"alignment": "prior", "prior_form": "code"}
    return Tunings(
        tuple(replace(arm, name=f"λ = {decay}", task={**arm.task, **prior, "decay": float(decay)}) for decay in decays)
    )


def _summarize_decays(config: Tunings, rows: Rows) -> pd.DataFrame:
    """The courses of accuracy, and its mean over steps."""
    probes = rows["course"]
    course: Any = courses(probes, config.every)
    first = probes[(probes["metric"] == "accuracy") & (probes["kind"] == "first") & ~probes["ood"]]
    runs: Any = first.groupby(["arm", "seed"], sort=False)[["value", "low", "high"]]
    mean: Any = grouped_over_seeds(runs.mean().reset_index().assign(n=1), ["arm"])
    about = {"part": "mean", "condition": "in distribution", "metric": "accuracy", "kind": "first", "of": "model"}
    return as_rows([course[course["of"] == "model"], mean.assign(**about)])


def _check_decays(table: Table) -> list[Check]:
    names = sorted(map(str, table.frame["arm"].unique()), key=lambda name: float(name.rpartition(" ")[2]))
    weak, strong = names[0], names[-1]
    first = {"metric": "accuracy", "kind": "first", "condition": "in distribution"}

    def at(arm: str, step: int) -> Table:
        return table.where(part="course", arm=arm, step=step, **first)

    last = int(np.nanmax(table.frame["step"].to_numpy(dtype=float)))
    return [
        Claim(
            f"{strong} is learned faster than {weak} (first tokens, mean over steps, difference)",
            "25 steps where 200 are needed",
        ).at_least(
            0.05,
            difference_of(*(table.where(part="mean", arm=arm) for arm in (strong, weak))),
            difference_of(at(strong, 0), at(weak, 0)),
            "before the first step",
        ),
        Claim(f"{strong} is learned (first tokens, at the end)").at_least(
            0.95, mean_of(at(strong, last)), mean_of(at(strong, 0)), "before"
        ),
    ]


def _draw_decays(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.where(part="course", metric="accuracy", kind="first").frame
    rows = rows.assign(decay=rows["arm"].str.rpartition(" ")[2].astype(float)).sort_values(["decay", "step"])
    panels = {condition: rows[rows["condition"] == condition] for condition in SHOWN}
    return {"fig7": plots.curves(panels, x="step", by="arm", label="step").update_xaxes(dtick=None)}


FIG7 = Experiment(
    "icatune/fig7",
    "Alignments that are less and less monotonic take longer to learn (prior as released)",
    "Agarwal and Sarawagi (2025), Fig. 7",
    tuned_study(
        "icatune/fig7",
        smoke=_decays(replace(SMOKE_ICA, seeds=(0,)), 1, 16),
        cpu=_decays(replace(ICA, seeds=(0, 1, 2)), 1, 4, 16),
        paper=_decays(
            replace(PAPER_ICA, task={"x_len": 8, "phrase_len": 1, "n_examples": 15}, seeds=(0, 1, 2)), 1, 4, 16
        ),
        summarize=_summarize_decays,
    ),
    _draw_decays,
    _check_decays,
    "Llama 3 8B, m = 8, c = 1: about 25 steps at λ = 16, up to 200 at λ = 1, where convergence is worst.",
)


# Figure 10


@dataclass(frozen=True)
class Layers:
    """Queries and keys of a single layer are tuned."""

    arm: Arm = field(default_factory=lambda: replace(ICA, config={**TOY, "projections": ("q", "k")}, seeds=(0, 1)))
    layers: tuple[int, ...] | None = None
    """Which, one at a time; all by default."""
    n: int = 64

    def arms(self, inputs: Inputs) -> tuple[Arm, ...]:
        """One for each layer."""
        ((_, model),) = inputs.models.items()
        return tuple(
            replace(self.arm, name=f"layer {layer}", config={**self.arm.config, "layers": layer})
            for layer in self.layers or range(model["n_layers"])
        )


def best_arm(frame: pd.DataFrame) -> str:
    """Returns the arm whose first tokens are best after tuning, of the rows of `ends`, on average over seeds."""
    after = as_rows([ended(frame)])
    first = (after["part"] == "after") & (after["condition"] == "in distribution") & (after["metric"] == "accuracy")
    right: Any = after[first & (after["kind"] == "first")].groupby("arm")["value"]
    return str(right.mean().idxmax())


def _summarize_layers(_: Layers, rows: Rows) -> pd.DataFrame:
    """The courses of first tokens, and of heads in the best layer; steps of emergence; what holds before and after."""
    course: Any = courses(rows["course"], 2)
    shown = ((course["of"] == "model") & (course["kind"] == "first")) | (course["arm"] == best_arm(rows["ends"]))
    return as_rows([course[shown], emerged(rows["course"]), ended(rows["ends"])])


def _check_layers(table: Table) -> list[Check]:
    after: Any = first_token(table, "after").frame
    mean: Any = after.groupby("arm", sort=False)["value"].mean()
    best, names = str(mean.idxmax()), [str(name) for name in mean.index]
    third = max(1, len(names) // 3)

    def of(arms: Sequence[str]) -> Table:
        return first_token(table, "after").where(arm=list(arms))

    even_and_odd = difference_of(of(names[::2]), of(names[1::2] or names)), "even minus odd layers"
    return [
        Claim("Tuning queries and keys of one layer suffices (first token, the best layer)").at_least(
            0.95, mean_of(of([best])), mean_of(of(names[-1:])), "the highest layer"
        ),
        Claim(
            "The best layer is a middle one (its gain over the mean of the first and the last)", "layer 13 of 32"
        ).at_least(0.1, difference_of(of([best]), of([names[0], names[-1]])), *even_and_odd),
        Claim("Early layers help more than high ones (first third minus last third)").at_least(
            0.05, difference_of(of(names[:third]), of(names[-third:])), *even_and_odd
        ),
        *order_checks(table.where(arm=best)),
    ]


def _draw_layers(table: Table) -> Mapping[str, go.Figure]:
    course = table.where(part="course")
    rows: Any = course.where(metric="accuracy", kind="first", of="model").frame
    panels = {condition: rows[rows["condition"] == condition] for condition in SHOWN}
    layers = course.where(of="best head")
    best = layers.frame["arm"].iloc[0]
    return {
        "accuracy": plots.curves(panels, by="arm", x="step", label="step").update_xaxes(dtick=None),
        "layers": draw_layers(layers, {f"{best} tuned, {metric}": metric for metric in ("align_query", "lookup")}),
    }


FIG10 = Experiment(
    "icatune/fig10",
    "Tuning a single layer",
    "Agarwal and Sarawagi (2025), Fig. 10 and App. E.2",
    tuned_study(
        "icatune/fig10",
        smoke=Layers(replace(SMOKE_ICA, config={**SMOKE, "projections": ("q", "k")}, seeds=(0,)), n=4),
        cpu=Layers(),
        paper=Layers(
            replace(PAPER_ICA, config={**PAPER, "steps": 1000}, seeds=(0,)), (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31)
        ),
        train=lambda config, inputs: of_tuned(course, config.arms(inputs), inputs),
        jobs=lambda config, inputs: of_tuned(ends, config.arms(inputs), inputs, prompts=config.n),
        summarize=_summarize_layers,
    ),
    _draw_layers,
    _check_layers,
    "Llama 3 8B: layer 13 is best; layers below 5 help more than high ones; alignment emerges near step 430, "
    "lookup near 470.",
)
