"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): what tuning in context does, step by step and otherwise."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.papers.claims import (
    Check,
    Claim,
    Measured,
    both,
    difference_of,
    extreme_of,
    mean_of,
    over_seeds,
    share_of,
)
from align_circuits.papers.icatune.tuned_models import (
    ATTENDED,
    FRESH_SEEDS,
    ONE_LETTER,
    ONE_LETTER_TASK,
    PAPER,
    SMOKE,
    SMOKE_TASK,
    SMOLLM2,
    SMOLLM2_PAPER,
    SMOLLM2_TASK,
    TASK,
    TOY,
    Arm,
    Tunings,
    as_rows,
    courses,
    emerged,
    ended,
    ends,
    grouped_over_seeds,
    tuned_study,
)
from align_circuits.papers.study import Experiment, Inputs, Rows
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

ICA = Arm("ICA-Tune")
"""The tuning of the bundled model that most figures are about."""

PAPER_ICA = Arm("ICA-Tune", {"x_len": 5, "phrase_len": 2, "n_examples": 15}, {**PAPER, "steps": 200}, (0, 1, 2, 3))
SMOKE_ICA = Arm("ICA-Tune", SMOKE_TASK, SMOKE, (0, 1))

SMOLLM2_ICA = Arm("larger steps", SMOLLM2_TASK, SMOLLM2, (1, 2, 3))
"""The tuning of SmolLM2 that most figures are about. The recipe was tried on seed 0, which is not among these."""

SMOLLM2_ONE_LETTER = Arm("phrases of one letter", ONE_LETTER_TASK, ONE_LETTER, (0, 1, 2))

SMOLLM2_ARMS = (SMOLLM2_ICA, SMOLLM2_ONE_LETTER, Arm("paper's recipe", SMOLLM2_TASK, SMOLLM2_PAPER, (1, 2, 3)))

SHOWN = ("in distribution", "OOD")
"""The conditions that figures show."""


def arms_of(table: Table) -> dict[str, Table]:
    """Returns the rows of each arm by a text for titles: its name, or nothing where there is one arm."""
    arms = [str(arm) for arm in table.frame["arm"].dropna().unique()]
    return {f"{arm}: " if len(arms) > 1 else "": table.where(arm=arm) for arm in arms}


def summarize_courses(config: Tunings, rows: Rows) -> pd.DataFrame:
    """Returns courses, steps of emergence, and what holds before and after, where that was measured."""
    after = [ended(rows["ends"])] if "ends" in rows else []
    return as_rows([courses(rows["course"], config.every), emerged(rows["course"]), *after])


def first_token(
    table: Table, part: str, condition: str = "in distribution", metric: str = "accuracy", kind: str = "first"
) -> Table:
    """Returns the rows of first tokens, or of another `kind`, before or after, one a seed."""
    return table.where(part=part, condition=condition, metric=metric, kind=kind, of="model")


def best_heads(table: Table, part: str, metric: str) -> Table:
    """Returns the rows of the best heads before or after, one a seed."""
    return table.where(part=part, condition="in distribution", metric=metric, of="best head")


def before_in(table: Table, first: str, second: str) -> Measured:
    """Returns in what share of seeds one metric emerged before another, or alone; the interval is exact binomial."""
    rows = table.where(part="emergence").frame
    steps = rows.pivot(index=["arm", "seed"], columns="metric", values="value").reindex(columns=[first, second])
    return share_of((steps[first] < steps[second].fillna(np.inf)).to_numpy())


def layers_apart(table: Table, part: str) -> Measured:
    """Returns by how many layers the best lookup head lies above the best aligner, on average over seeds.

    The best are those that give the right keys the most attention: by their share alone, many tie at 1.
    """
    aligner, lookup = (best_heads(table, part, metric).frame.set_index("seed")["layer"] for metric in ATTENDED)
    return over_seeds((lookup - aligner).to_numpy(float))


def _at_the_end(course: Table) -> Table:
    """The rows of the last step."""
    return course.where(step=course.frame["step"].max())


def by_condition(rows: Any) -> dict[str, pd.DataFrame]:
    """Returns a panel for each of the conditions that figures show."""
    return {condition: rows[rows["condition"] == condition] for condition in SHOWN}


def draw_course(panels: Mapping[str, pd.DataFrame], by: str, value: str = "accuracy") -> go.Figure:
    """Draws values over the steps of tuning; the arguments are those of `plots.curves`."""
    return plots.curves(panels, x="step", by=by, label="step", value=value).update_xaxes(dtick=None)


def draw_layers(course: Table, panels: Mapping[str, str]) -> go.Figure:
    """Draws how the best head of each layer rose, steps across and layers from the bottom.

    Args:
        course: Rows of best heads by step, metric and layer.
        panels: The metric of each panel, by its title.
    """
    grids: Any = {
        title: course.where(metric=metric).frame.pivot(index="layer", columns="step", values="value").map(float)
        for title, metric in panels.items()
    }
    return plots.accuracy_grids(grids, x="step", y="layer", value="score of the best head")


# Figure 4


def _check_emergence(table: Table) -> list[Check]:
    return [
        replace(check, claim=title + check.claim)
        for title, rows in arms_of(table).items()
        for check in _check_emergence_of_arm(rows)
    ]


def _check_emergence_of_arm(table: Table) -> list[Check]:
    def gain(kind: str) -> Measured:
        return difference_of(*(first_token(table, part, kind=kind) for part in ("after", "before")))

    def above_history(part: str, condition: str) -> Measured:
        return difference_of(*(first_token(table, part, condition, metric) for metric in ("accuracy", "history")))

    def extremes(rows: Callable[[str], Table]) -> tuple[Measured, Measured]:
        """The worst seed after, and the best before."""
        return extreme_of(rows("after"), highest=False), extreme_of(rows("before"), highest=True)

    checks: list[Check] = []
    for condition in SHOWN:
        worst_and_best = extremes(lambda part, condition=condition: first_token(table, part, condition))
        checks += [
            Claim(f"Before, {condition}: the first token is no better than the history ceiling (difference)").at_most(
                0.0, above_history("before", condition), above_history("after", condition), "after"
            ),
            Claim(f"After, {condition}: the first token is right, in the worst seed", "about 1.0").at_least(
                0.95, *worst_and_best, "best before"
            ),
        ]
    after, before = extremes(lambda part: best_heads(table, part, "align_query"))
    return [
        *checks,
        Claim("Before, no head aligns (best align_query), in the highest seed").at_most(0.5, before, after, "after"),
        Claim(
            "A head aligns (best align_query), in the worst seed", "layers 15 and 16 about 1.0, layer 14 about .8"
        ).at_least(0.8, after, before, "best before"),
        Claim(
            "It reads the examples: with their labels corrupted the first token falls to the history ceiling"
        ).at_most(
            0.0,
            above_history("after", "labels corrupted"),
            above_history("after", "in distribution"),
            "labels as they are",
        ),
        *(
            [
                Claim("The gain in accuracy is at the first token of a phrase").at_least(
                    0.3, gain("first"), gain("later"), "later tokens"
                )
            ]
            if "later" in set(table.frame["kind"])  # phrases of one letter have none
            else []
        ),
        *order_checks(table),
        *(abruptness_checks(table) if "abruptness" in set(table.frame["part"]) else []),  # not in older results
    ]


_EVEN = Measured(0.1, 0.1, 0.1)
"""The share of a rise at an even pace that comes within a tenth of the steps."""


def abruptness_checks(table: Table) -> list[Check]:
    """Returns the checks that accuracy and alignment rise abruptly."""
    rows = table.where(part="abruptness")

    def steepest(metric: str) -> Measured:
        """On average over the seeds in which it emerged; 0 without an interval, so undecided, where it did in none."""
        shares = rows.where(metric=metric).frame["value"].to_numpy(float)
        return over_seeds(shares) if np.isfinite(shares).any() else Measured(0.0, np.nan, np.nan)

    captions = {
        "accuracy": ("Accuracy of first tokens", "most of it at once"),
        "align_query": ("Alignment, in the head that is best at the end,", "between steps 75 and 90 of 200"),
    }
    return [
        Claim(f"{what} rises abruptly (share of the rise within a tenth of the steps)", published).at_least(
            0.5, steepest(metric), _EVEN, "a rise at an even pace"
        )
        for metric, (what, published) in captions.items()
    ]


def order_checks(table: Table) -> list[Check]:
    """Returns the checks that alignment comes before lookup, and below it."""
    orders = before_in(table, "align_query", "lookup"), before_in(table, "lookup", "align_query")
    return [
        Claim(
            "Alignment emerges before lookup, in the heads that are best at the end (share of seeds)",
            "near steps 85 and 110",
        ).at_least(0.8, *orders, "lookup before alignment"),
        Claim(
            "Lookup heads lie above aligners (layers between the best of each)", "layers 17 to 19 above 14 to 16"
        ).at_least(1.0, layers_apart(table, "after"), layers_apart(table, "before"), "before tuning"),
    ]


def _draw_emergence(table: Table) -> Mapping[str, go.Figure]:
    return {
        title + name: figure
        for title, rows in arms_of(table).items()
        for name, figure in _draw_emergence_of_arm(rows).items()
    }


def _draw_emergence_of_arm(table: Table) -> Mapping[str, go.Figure]:
    course = table.where(part="course")
    right: Any = course.where(of="model").frame
    right = right[(right["kind"] != "all") & (right["metric"] != "oracle")]
    which = right["kind"].where(right["metric"] == "accuracy", "history ceiling, " + right["kind"])
    layers = course.where(of="best head", condition="in distribution")
    return {
        "steps of emergence": _draw_steps(table.where(part="emergence")),
        "accuracy": draw_course(by_condition(right.assign(of=which)), "of"),
        "layers": draw_layers(layers, {metric: metric for metric in ("align_query", "align_key", "lookup")}),
    }


def _draw_steps(table: Table) -> go.Figure:
    """Draws when what emerged, seed by seed and on average over those in which it did."""
    steps: Any = table.frame.assign(what=table.frame["metric"].replace("accuracy", "first token"))
    mean = pd.DataFrame(
        {"what": what, "seed": "mean", **asdict(over_seeds(rows.to_numpy(float)))}
        for what, rows in steps.groupby("what", sort=False)["value"]
    )
    seeds = steps.assign(seed="seed " + steps["seed"].astype(str))
    return plots.dots(pd.concat([seeds, mean]), "what", "seed", "step of emergence")


FIG4 = Experiment(
    "icatune/fig4",
    "How accuracy, alignment and lookup emerge in context",
    "Agarwal and Sarawagi (2025), Fig. 4",
    tuned_study(
        "icatune/fig4",
        summarize_courses,
        smoke=Tunings((SMOKE_ICA,), n=4, every=1),
        cpu=Tunings((ICA,)),
        paper=Tunings((PAPER_ICA,)),
        smollm2=Tunings(SMOLLM2_ARMS, n=32, every=1),
        measured=[ends],
    ),
    _draw_emergence,
    _check_emergence,
    "Llama 3 8B: accuracy jumps most at the first token of a phrase; alignment accuracy rises abruptly near step "
    "85 in layers 14 to 16 (counted from 1), lookup near step 110 in layers 17 to 19.",
)


# Figure 6


def _methods(
    task: Mapping[str, Any], config: Mapping[str, Any], batch: int, seeds: tuple[int, ...], sizes: Sequence[int]
) -> tuple[Arm, ...]:
    """ICA-Tune and standard fine-tuning of one task with fixed automata, with so many examples to learn from.

    Standard fine-tuning reads `batch` examples in a step, and at most all there are.
    """
    task = {**task, "automata": "task"}
    arms = []
    for n in sizes:
        ica = {**config, "dataset_size": n}
        standard = {**ica, "method": "standard", "loss_on": "last", "batch": min(n, batch)}
        arms += [Arm(f"ICA-Tune, N = {n}", task, ica, seeds), Arm(f"standard, N = {n}", task, standard, seeds)]
    return tuple(arms)


def _by_method(table: Table) -> Table:
    """The courses by `method` and `N`, in this order."""
    course: Any = table.where(part="course").frame
    parts = course["arm"].str.split(", N = ")
    course = course.assign(method=parts.str[0], N=parts.str[1].astype(int))
    return Table(course.sort_values(["method", "N"], kind="stable"), table.provenance)


def _check_methods(table: Table) -> list[Check]:
    end = _at_the_end(_by_method(table))
    sizes = end.frame["N"].unique().tolist()
    few, many = sizes[min(1, len(sizes) - 1)], max(sizes)

    def right(method: str, n: int, condition: str = "in distribution") -> Table:
        return end.where(method=method, N=n, condition=condition, metric="accuracy", kind="all")

    def final(n: int, method: str, control: str) -> tuple[Measured, Measured]:
        return both(lambda name: mean_of(right(name, n)), method, control)

    def loss_ood(method: str, n: int) -> Measured:
        return difference_of(right(method, n), right(method, n, "OOD"))

    def best_aligner(method: str) -> Measured:
        return extreme_of(end.where(method=method, metric="align_query", of="best head"), highest=True)

    return [
        Claim(f"ICA-Tune learns from N = {few} examples (accuracy, all tokens)", "almost 1.0").at_least(
            0.95, *final(few, "ICA-Tune", "standard"), "standard fine-tuning"
        ),
        Claim(f"Standard fine-tuning does not get there from N = {many}", "below 1.0").at_most(
            0.9, *final(many, "standard", "ICA-Tune"), "ICA-Tune"
        ),
        Claim("No head aligns after standard fine-tuning (best align_query, any N)").at_most(
            0.5, best_aligner("standard"), best_aligner("ICA-Tune"), "ICA-Tune"
        ),
        *(
            Claim(f"ICA-Tune is as good OOD (in distribution minus OOD, N = {n})").at_most(
                0.05, loss_ood("ICA-Tune", n), loss_ood("standard", n), "standard fine-tuning"
            )
            for n in sizes
        ),
    ]


def _draw_methods(table: Table) -> Mapping[str, go.Figure]:
    course = _by_method(table)
    totals: Any = course.where(metric="accuracy", kind="all").frame
    final = by_condition(totals[totals["step"] == totals["step"].max()])
    heads: Any = course.where(metric="align_query", of="best head").frame
    best = heads.loc[heads.groupby(["method", "N", "step"])["value"].idxmax()]
    best = best.assign(size="N = " + best["N"].astype(str))
    sizes = totals["N"].unique()
    return {
        "size": plots.curves(final, "N", "method", "examples N").update_xaxes(type="log", tickvals=sizes.tolist()),
        "alignment": draw_course(dict(iter(best.groupby("method"))), "size", "best align_query"),
        "OOD": draw_course(by_condition(totals[totals["N"] == sizes.max()]), "arm"),
    }


_SIZES = (20, 50, 100, 800)

FIG6 = Experiment(
    "icatune/fig6",
    "ICA-Tune beside standard fine-tuning, from equally many examples",
    "Agarwal and Sarawagi (2025), Fig. 6",
    tuned_study(
        "icatune/fig6",
        summarize_courses,
        smoke=Tunings(_methods(SMOKE_TASK, SMOKE, 4, (0,), (5,)), every=1),
        cpu=Tunings(_methods(TASK, {**TOY, "probe_every": 50, "probe_prompts": 32}, 16, FRESH_SEEDS, _SIZES), every=1),
        paper=Tunings(_methods(PAPER_ICA.task, {**PAPER_ICA.config, "steps": 1000}, 16, (0, 1, 2), _SIZES), every=5),
        smollm2=Tunings(_methods(ONE_LETTER_TASK, {**ONE_LETTER, "probe_every": 40}, 16, (0,), (50, 800)), every=1),
    ),
    _draw_methods,
    _check_methods,
    "Llama 3 8B: ICA-Tune reaches almost 100% from 50 examples, standard fine-tuning not from 800, and then no "
    "layer aligns; OOD accuracy equals that in distribution only for ICA-Tune.",
)


# Figure 7


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
    return as_rows([course[course["of"] == "model"], mean.assign(**about)])


def _check_decays(table: Table) -> list[Check]:
    weak, *between, strong = sorted(map(str, table.frame["arm"].unique()), key=_decay)
    rows = table.where(metric="accuracy", kind="first", condition="in distribution")
    course, mean = rows.where(part="course"), rows.where(part="mean")
    start, end = course.where(step=0), _at_the_end(course)

    def ahead(rows: Table, over: str = weak, arm: str = strong) -> Measured:
        return difference_of(rows.where(arm=arm), rows.where(arm=over))

    return [
        Claim(
            f"{strong} is learned faster than {weak} (first tokens, mean over steps, difference)",
            "25 steps where 200 are needed",
        ).at_least(0.05, ahead(mean), ahead(start), "before the first step"),
        Claim(f"{strong} is learned (first tokens, at the end)").at_least(
            0.95, mean_of(end.where(arm=strong)), mean_of(start.where(arm=strong)), "before"
        ),
        *(
            Claim(f"{arm} is ahead of {over} on average over steps (first tokens, difference)").at_least(
                0.0, ahead(mean, over, arm), ahead(mean, arm, over), "the other way round"
            )
            for middle in between
            for over, arm in ((weak, middle), (middle, strong))
        ),
    ]


def _decay(arm: str) -> float:
    return float(arm.rpartition(" ")[2])


def _draw_decays(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.where(part="course", metric="accuracy", kind="first").frame
    rows = rows.assign(decay=rows["arm"].map(_decay)).sort_values(["decay", "step"])
    return {"fig7": draw_course(by_condition(rows), "arm")}


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


# Figure 10


@dataclass(frozen=True)
class Layers:
    """Queries and keys of a single layer are tuned."""

    arm: Arm = field(default_factory=lambda: replace(ICA, config={**TOY, "projections": ("q", "k")}))
    layers: tuple[int, ...] | None = None
    """Which, one at a time; all by default."""
    n: int = 64

    def arms(self, inputs: Inputs) -> list[Arm]:
        """One for each layer."""
        ((_, model),) = inputs.models.items()
        return [
            replace(self.arm, name=f"layer {layer}", config={**self.arm.config, "layers": layer})
            for layer in self.layers or range(model["n_layers"])
        ]


def best_arm(frame: pd.DataFrame) -> str:
    """Returns the arm whose first tokens are best after tuning, of the rows of `ends`, on average over seeds."""
    after: Any = first_token(Table(ended(frame), Provenance("ended")), "after").frame
    return str(after.groupby("arm")["value"].mean().idxmax())


def _summarize_layers(_: Layers, rows: Rows) -> pd.DataFrame:
    """The courses of first tokens, and of heads in the best layer; steps of emergence; what holds before and after."""
    course: Any = courses(rows["course"], 2)
    shown = ((course["of"] == "model") & (course["kind"] == "first")) | (course["arm"] == best_arm(rows["ends"]))
    return as_rows([course[shown], emerged(rows["course"]), ended(rows["ends"])])


def _check_layers(table: Table) -> list[Check]:
    after = first_token(table, "after")
    means: Any = after.frame.groupby("arm", sort=False)["value"].mean()
    best, names = str(means.idxmax()), [str(name) for name in means.index]
    third = max(1, len(names) // 3)

    def gain(arms: list[str], over: list[str]) -> Measured:
        return difference_of(after.where(arm=arms), after.where(arm=over))

    even_and_odd = gain(names[::2], names[1::2] or names), "even minus odd layers"
    return [
        Claim("Tuning queries and keys of one layer suffices (first token, the best layer)").at_least(
            0.95, mean_of(after.where(arm=best)), mean_of(after.where(arm=names[-1])), "the highest layer"
        ),
        Claim(
            "The best layer is a middle one (its gain over the mean of the first and the last)", "layer 13 of 32"
        ).at_least(0.1, gain([best], [names[0], names[-1]]), *even_and_odd),
        Claim("Early layers help more than high ones (first third minus last third)").at_least(
            0.05, gain(names[:third], names[-third:]), *even_and_odd
        ),
        *order_checks(table.where(arm=best)),
    ]


def _draw_layers(table: Table) -> Mapping[str, go.Figure]:
    course = table.where(part="course")
    layers = course.where(of="best head")
    best = layers.frame["arm"].iloc[0]
    return {
        "accuracy": draw_course(by_condition(course.where(metric="accuracy", kind="first", of="model").frame), "arm"),
        "layers": draw_layers(layers, {f"{best} tuned, {metric}": metric for metric in ("align_query", "lookup")}),
    }


FIG10 = Experiment(
    "icatune/fig10",
    "Tuning a single layer",
    "Agarwal and Sarawagi (2025), Fig. 10 and App. E.2",
    tuned_study(
        "icatune/fig10",
        _summarize_layers,
        smoke=Layers(replace(SMOKE_ICA, config={**SMOKE, "projections": ("q", "k")}, seeds=(0,)), n=4),
        cpu=Layers(),
        paper=Layers(
            replace(PAPER_ICA, config={**PAPER, "steps": 1000}, seeds=(0,)), (1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31)
        ),
        smollm2=Layers(
            replace(SMOLLM2_ICA, config={**SMOLLM2, "projections": ("q", "k")}, seeds=(0,)), (4, 8, 12, 16, 20), n=32
        ),
        measured=[ends],
        arms=Layers.arms,
    ),
    _draw_layers,
    _check_layers,
    "Llama 3 8B: layer 13 is best; layers below 5 help more than high ones; alignment emerges near step 430, "
    "lookup near 470.",
)
