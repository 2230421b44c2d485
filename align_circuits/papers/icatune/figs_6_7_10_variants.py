"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): other ways to tune, and other alignments to learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import Check, Experiment, Measured, difference_of, extreme_of, mean_of
from align_circuits.papers.icatune.fig_4_tuning import (
    ICA,
    PAPER_ICA,
    SHOWN,
    SMOKE_ICA,
    Courses,
    draw_layers,
    first_token,
    order_checks,
    run_courses,
)
from align_circuits.papers.icatune.tuned_models import (
    ALL_SEEDS,
    KEYS,
    PAPER,
    SMOKE,
    SMOKE_TASK,
    TASK,
    TOY,
    Arm,
    courses,
    emerged,
    ended,
    grouped_over_seeds,
    loaded,
    measure_tuned,
)
from align_circuits.report import plots
from align_circuits.tables.tables import VALUES, Provenance, Table

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
    return rows.where(step=int(rows.frame["step"].to_numpy().max()) if step is None else step)


def _numbers(table: Table) -> list[int]:
    return sorted({int(arm.rpartition(" ")[2]) for arm in table.frame["arm"]})


def _best_aligner(table: Table, method: str) -> Measured:
    """The highest align_query of any head at the last step, at any N."""
    arms = [_named(method, n) for n in _numbers(table)]
    rows = table.where(part="course", arm=arms, metric="align_query", of="best head")
    return extreme_of(rows.where(step=int(rows.frame["step"].to_numpy().max())), highest=True)


def _check_methods(table: Table) -> list[Check]:
    sizes = _numbers(table)
    few, many = sizes[min(1, len(sizes) - 1)], sizes[-1]

    def loss_ood(method: str) -> Measured:
        return difference_of(_final(table, method, many), _final(table, method, many, "OOD"))

    return [
        Check(
            claim=f"ICA-Tune learns from N = {few} examples (accuracy, all tokens)",
            measured=mean_of(_final(table, "ICA-Tune", few)),
            relation=">=",
            threshold=0.95,
            control=mean_of(_final(table, "standard", few)),
            control_is="standard fine-tuning",
            published="almost 1.0",
        ),
        Check(
            claim=f"Standard fine-tuning does not get there from N = {many}",
            measured=mean_of(_final(table, "standard", many)),
            relation="<=",
            threshold=0.9,
            control=mean_of(_final(table, "ICA-Tune", many)),
            control_is="ICA-Tune",
            published="below 1.0",
        ),
        Check(
            claim="No head aligns after standard fine-tuning (best align_query, any N)",
            measured=_best_aligner(table, "standard"),
            relation="<=",
            threshold=0.5,
            control=_best_aligner(table, "ICA-Tune"),
            control_is="ICA-Tune",
        ),
        Check(
            claim=f"ICA-Tune is as good OOD (in distribution minus OOD, N = {many})",
            measured=loss_ood("ICA-Tune"),
            relation="<=",
            threshold=0.05,
            control=loss_ood("standard"),
            control_is="standard fine-tuning",
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
    whole = course[(course["metric"] == "accuracy") & (course["kind"] == "all")]
    whole = whole[whole["arm"].isin([_named(method, sizes[-1]) for method in ("ICA-Tune", "standard")])]
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
        "OOD": plots.curves({name: whole[whole["condition"] == name] for name in SHOWN}, **steps).update_xaxes(
            dtick=None
        ),
    }


_SLOW = {**TOY, "probe_every": 50, "probe_prompts": 32}

FIG6 = Experiment(
    name="icatune/fig6",
    title="ICA-Tune beside standard fine-tuning, from equally many examples",
    source="Agarwal and Sarawagi (2025), Fig. 6",
    scales={
        "smoke": Courses(_sizes(**_compared(SMOKE_TASK, SMOKE, 4, (0,)), sizes=(5,)), n=0, every=1),
        "cpu": Courses(_sizes(**_compared(TASK, _SLOW, 88, (0, 1)), sizes=SIZES), n=0, every=1),
        "paper": Courses(
            _sizes(**_compared(PAPER_ICA.task, {**PAPER_ICA.config, "steps": 1000}, 16, (0, 1, 2)), sizes=SIZES),
            n=0,
            every=5,
        ),
    },
    run=run_courses,
    draw=_draw_methods,
    check=_check_methods,
    published=(
        "Llama 3 8B: ICA-Tune reaches almost 100% from 50 examples, standard fine-tuning not from 800, and then no "
        "layer aligns; OOD accuracy equals that in distribution only for ICA-Tune."
    ),
)


# Figure 7


@dataclass(frozen=True)
class Decays:
    """Alignments drawn from the prior in its released form, another one for each seed."""

    arm: Arm = field(default_factory=lambda: replace(ICA, seeds=(0, 1, 2)))
    decays: tuple[float, ...] = (1.0, 4.0, 16.0)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """One for each λ."""
        prior = {"alignment": "prior", "prior_form": "code"}
        return tuple(
            replace(self.arm, name=f"λ = {decay:g}", task={**self.arm.task, **prior, "decay": decay})
            for decay in self.decays
        )


def _run_decays(config: Decays, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    probes, about = measure_tuned("course", models[0], config.arms, jobs=jobs, folder=folder)
    course = courses(probes, 2)
    first = probes[(probes["metric"] == "accuracy") & (probes["kind"] == "first") & ~probes["ood"]]
    runs: Any = first.groupby(["arm", "seed"], sort=False)[["value", "low", "high"]]
    mean = runs.mean().reset_index()
    about_mean = {"part": "mean", "condition": "in distribution", "step": -1, "layer": -1, "of": "model"}
    area = grouped_over_seeds(mean.assign(n=1, metric="accuracy", kind="first"), ["arm", "metric", "kind"])
    parts = [course[course["of"] == "model"], area.assign(**about_mean, seed=ALL_SEEDS)]
    frame = pd.concat([part[[*KEYS, *VALUES]] for part in parts], ignore_index=True)
    return Table(frame, Provenance("measure", {"arms": [arm.name for arm in config.arms]}, model=about))


def _check_decays(table: Table) -> list[Check]:
    names = sorted(map(str, table.frame["arm"].unique()), key=lambda name: float(name.rpartition(" ")[2]))
    weak, strong = names[0], names[-1]
    first = {"metric": "accuracy", "kind": "first", "condition": "in distribution"}

    def at(arm: str, step: int) -> Table:
        return table.where(part="course", arm=arm, step=step, **first)

    last = int(table.frame["step"].to_numpy().max())
    return [
        Check(
            claim=f"{strong} is learned faster than {weak} (first tokens, mean over steps, difference)",
            measured=difference_of(*(table.where(part="mean", arm=arm) for arm in (strong, weak))),
            relation=">=",
            threshold=0.05,
            control=difference_of(at(strong, 0), at(weak, 0)),
            control_is="before the first step",
            published="25 steps where 200 are needed",
        ),
        Check(
            claim=f"{strong} is learned (first tokens, at the end)",
            measured=mean_of(at(strong, last)),
            relation=">=",
            threshold=0.95,
            control=mean_of(at(strong, 0)),
            control_is="before",
        ),
    ]


def _draw_decays(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.where(part="course", metric="accuracy", kind="first").frame
    rows = rows.assign(decay=rows["arm"].str.rpartition(" ")[2].astype(float)).sort_values(["decay", "step"])
    panels = {condition: rows[rows["condition"] == condition] for condition in SHOWN}
    return {"fig7": plots.curves(panels, x="step", by="arm", label="step").update_xaxes(dtick=None)}


FIG7 = Experiment(
    name="icatune/fig7",
    title="Alignments that are less and less monotonic take longer to learn (prior as released)",
    source="Agarwal and Sarawagi (2025), Fig. 7",
    scales={
        "smoke": Decays(replace(SMOKE_ICA, seeds=(0,)), (1.0, 16.0)),
        "cpu": Decays(),
        "paper": Decays(replace(PAPER_ICA, task={"x_len": 8, "phrase_len": 1, "n_examples": 15}, seeds=(0, 1, 2))),
    },
    run=_run_decays,
    draw=_draw_decays,
    check=_check_decays,
    published="Llama 3 8B, m = 8, c = 1: about 25 steps at λ = 16, up to 200 at λ = 1, where convergence is worst.",
)


# Figure 10


@dataclass(frozen=True)
class Layers:
    """Queries and keys of a single layer are tuned."""

    arm: Arm = field(default_factory=lambda: replace(ICA, config={**TOY, "projections": ("q", "k")}, seeds=(0, 1)))
    layers: tuple[int, ...] | None = None
    """Which, one at a time; all by default."""
    n: int = 64

    def arms(self, depth: int) -> tuple[Arm, ...]:
        """One for each layer."""
        return tuple(
            replace(self.arm, name=f"layer {layer}", config={**self.arm.config, "layers": layer})
            for layer in self.layers or range(depth)
        )


def tuned_layers(config: Layers, models: Sequence[str], **common: Any) -> tuple[pd.DataFrame, Arm]:
    """Returns what each layer's tuning achieves, as `ended` does, and the arm of the best layer."""
    arms = config.arms(loaded(models[0]).cfg.n_layers)
    after = ended(measure_tuned("ends", models[0], arms, prompts=config.n, **common)[0])
    first: Any = first_token(Table(after, Provenance("ended")), "after").frame.groupby("arm")["value"].mean()
    return after, next(arm for arm in arms if arm.name == first.idxmax())


def _run_layers(config: Layers, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    common: dict[str, Any] = {"jobs": jobs, "folder": folder}
    arms = config.arms(loaded(models[0]).cfg.n_layers)
    probes, about = measure_tuned("course", models[0], arms, **common)
    after, best = tuned_layers(config, models, **common)
    course = courses(probes, 2)
    shown = ((course["of"] == "model") & (course["kind"] == "first")) | (course["arm"] == best.name)
    parts = [course[shown], emerged(probes), after]
    frame = pd.concat([part[[*KEYS, *VALUES]] for part in parts], ignore_index=True)
    return Table(frame, Provenance("measure", {"best": best.name, "prompts": config.n}, model=about))


def _check_layers(table: Table) -> list[Check]:
    after: Any = first_token(table, "after").frame
    mean: Any = after.groupby("arm", sort=False)["value"].mean()
    best, names = str(mean.idxmax()), [str(name) for name in mean.index]
    third = max(1, len(names) // 3)

    def of(arms: Sequence[str]) -> Table:
        return first_token(table, "after").where(arm=list(arms))

    only = table.where(arm=best)
    return [
        Check(
            claim="Tuning queries and keys of one layer suffices (first token, the best layer)",
            measured=mean_of(of([best])),
            relation=">=",
            threshold=0.95,
            control=mean_of(of(names[-1:])),
            control_is="the highest layer",
        ),
        Check(
            claim="The best layer is a middle one (its gain over the mean of the first and the last)",
            measured=difference_of(of([best]), of([names[0], names[-1]])),
            relation=">=",
            threshold=0.1,
            control=difference_of(of(names[::2]), of(names[1::2] or names)),
            control_is="even minus odd layers",
            published="layer 13 of 32",
        ),
        Check(
            claim="Early layers help more than high ones (first third minus last third)",
            measured=difference_of(of(names[:third]), of(names[-third:])),
            relation=">=",
            threshold=0.05,
            control=difference_of(of(names[::2]), of(names[1::2] or names)),
            control_is="even minus odd layers",
        ),
        *order_checks(only),
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
    name="icatune/fig10",
    title="Tuning a single layer",
    source="Agarwal and Sarawagi (2025), Fig. 10 and App. E.2",
    scales={
        "smoke": Layers(replace(SMOKE_ICA, config={**SMOKE, "projections": ("q", "k")}, seeds=(0,)), n=4),
        "cpu": Layers(),
        "paper": Layers(
            replace(PAPER_ICA, config={**PAPER, "steps": 1000}, seeds=(0,)), (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31)
        ),
    },
    run=_run_layers,
    draw=_draw_layers,
    check=_check_layers,
    published=(
        "Llama 3 8B: layer 13 is best; layers below 5 help more than high ones; alignment emerges near step 430, "
        "lookup near 470."
    ),
)
