"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): does lookup wait for alignment, or the reverse?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from align_circuits.checks import Tokenizer
from align_circuits.hooks.edits import Clamp, edits_provenance
from align_circuits.hooks.head_names import Head, describe, heads_of
from align_circuits.jobs.code_versions import code_version
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.tuned_models import PAPER_ICA, SMOKE, SMOKE_TASK, TASK, TOY, Arm, loaded, of_tuned
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, seed_dots, training_folder
from align_circuits.papers.statistics import Statistic, as_rows, grouped_over_seeds, over_seeds, per_seed
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import IGNORE, Relation
from align_circuits.report import plots
from align_circuits.tables.emergence_times import SUSTAINED, best_head, crossing_step, middle_of_rise
from align_circuits.tables.tables import VALUES, Table
from align_circuits.tasks.layout import layout_of
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.probe import PROBED
from align_circuits.training.tuning import TuneConfig, TuneRun, tune

ALIGNMENT, LOOKUP = ("align_query", "align_key"), ("lookup",)

NAMED_AT = {"align_query": 0.8, "align_key": 0.8, "lookup": 0.5}
"""The score from which a head of the plain tuning has a role."""

GOLD, BLIND = "gold", "blind"

ARMS: Mapping[str, tuple[tuple[str, ...], str, bool]] = {
    "aligners on gold": (ALIGNMENT, GOLD, False),
    "aligners blind": (ALIGNMENT, BLIND, False),
    "others on gold alignment": (ALIGNMENT, GOLD, True),
    "lookup heads on gold": (LOOKUP, GOLD, False),
    "lookup heads blind": (LOOKUP, BLIND, False),
    "others on gold lookup": (LOOKUP, GOLD, True),
}
"""By arm: the roles whose heads are clamped in all updates, onto which keys, and whether as many other heads are."""

PLAIN = "plain"

METRICS = ("accuracy", *PROBED)


class EveryExample(Seq2SeqTask):
    """The task with relations of all examples, by which heads can be clamped while all examples teach.

    `lookup` has first letters alone, which need alignment. `gold align_query`, `gold align_key` and `gold lookup` are
    the relations of those names for the first letters of all examples, from the second on for lookup; the `blind` ones
    have all their candidates as keys: the input of the example, or all letters of earlier phrases.
    """

    def sample(self, n: int, tokenizer: Tokenizer | None = None, seed: int = 0, references: bool = True) -> Prompts:
        """Draws the same prompts as the task does."""
        prompts = super().sample(n, tokenizer, seed, references)
        lookup = prompts.relations["lookup"]
        first = torch.from_numpy(prompts.targets["kind"].to_numpy() == "first")
        own = {"lookup": lookup.select(first[lookup.target]), **self._everywhere(prompts)}
        return replace(prompts, relations={**prompts.relations, **own})

    def _everywhere(self, prompts: Prompts) -> dict[str, Relation]:
        n, m, count = len(prompts), self.x_len, self.n_examples + 1
        places = layout_of(self.style, m, self.phrase_len, self.n_examples, prompts.task["bos"])
        symbol = prompts.latent["order"][:, :, list(self.aligned)]  # of each phrase [prompt example phrase]
        prompt, example, phrase = (
            part.flatten() for part in torch.meshgrid(*map(torch.arange, (n, count, m)), indexing="ij")
        )
        unlabelled = torch.full((n, len(places.token_kinds)), IGNORE)
        inputs, letters = unlabelled.clone(), unlabelled.clone()
        inputs[:, places.inputs] = torch.arange(count * m).view(count, m)
        letters[:, places.outputs] = symbol[..., None].expand(-1, -1, -1, self.phrase_len)
        letter = places.outputs[example, phrase, 0]
        aligned = example * m + torch.tensor(self.aligned)[phrase]
        own = {
            "align_query": (letter - 1, aligned, example, inputs, inputs.div(m, rounding_mode="floor")),
            "align_key": (letter, aligned, example, inputs, inputs.div(m, rounding_mode="floor")),
            "lookup": (letter - 1, symbol.flatten(), torch.zeros_like(example), letters, letters.clamp(max=0)),
        }
        relations = {}
        for role, (query, key, candidate, keys, candidates) in own.items():
            gold = Relation(
                f"{GOLD} {role}", prompt * m * self.phrase_len, prompt, query, key, candidate, keys, candidates
            )
            gold = gold.select(example > 0) if role == "lookup" else gold
            blind = replace(gold, name=f"{BLIND} {role}", key_value=gold.candidate_value, key_label=candidates)
            relations |= {relation.name: relation for relation in (gold, blind)}
        return relations


def tuned_clamped(
    *,
    model: str,
    weights: str,
    task: Mapping[str, Any],
    config: Mapping[str, Any],
    runs: str,
    seed: int,
    clamps: Sequence[Clamp] = (),
) -> TuneRun:
    """Tunes a model while heads are clamped, or reads the run; arguments as for `tuned_models.tuned`."""
    version = code_version("align_circuits.training.tuning:tune")
    out = training_folder(runs, "clamped", weights, task, config, seed, version, edits_provenance(clamps))
    of_seed = EveryExample(**task, task_seed=seed)
    return tune(loaded(model), of_seed, TuneConfig(**config), clamps=clamps, seed=seed, out=out, progress=False)


@dataclass(frozen=True)
class Orders:
    """How the model is tuned, once plainly and once for each of `ARMS`, in every seed."""

    arm: Arm


def plain(**run: Any) -> pd.DataFrame:
    """Returns the course of the plain tuning; the function of a job. Arguments as for `tuned_clamped`."""
    return _course(tuned_clamped(**run), [])


def clamped(*, how: str, **run: Any) -> pd.DataFrame:
    """Returns the course of a tuning in which heads are clamped; the function of a job.

    Args:
        how: One of `ARMS`.
        **run: As for `tuned_clamped`.
    """
    roles, keys, others = ARMS[how]
    named = named_heads(tuned_clamped(**run))
    heads = {role: named[role] for role in roles}
    if others:
        instead = in_place_of(heads, named, heads_of(loaded(run["model"]).cfg), run["seed"])
        heads = {role: [instead[head] for head in of_role if head in instead] for role, of_role in heads.items()}
    clamps = [Clamp(of_role, f"{keys} {role}") for role, of_role in heads.items() if of_role]
    about = [
        {"part": "clamped", "metric": role, "of": describe(of_role) or "none", "value": len(of_role)}
        for role, of_role in heads.items()
    ]
    edited = sorted({head for of_role in heads.values() for head in of_role})
    return pd.concat([_course(tuned_clamped(**run, clamps=clamps), edited), pd.DataFrame(about)])


def named_heads(run: TuneRun) -> dict[str, list[Head]]:
    """Returns the heads of each role at the end of a tuning: those that score `NAMED_AT`, or else the best one.

    A head of a role of alignment has no other kind of role.
    """
    frame: Any = run.table.where(ood=False).heads().frame
    late = frame[frame["step"].isin(sorted(frame["step"].unique())[-SUSTAINED:])]
    scores = late.groupby(["metric", "layer", "head"])["value"].mean()
    named: dict[str, list[Head]] = {}
    for role, least in NAMED_AT.items():
        taken = {head for of_role in named.values() for head in of_role} if role in LOOKUP else set()
        own = scores[role][[head not in taken for head in scores[role].index]]
        own = own[own >= least] if (own >= least).any() else own.nlargest(1)
        named[role] = [(int(layer), int(head)) for layer, head in own.index]
    return named


def in_place_of(
    heads: Mapping[str, Sequence[Head]], named: Mapping[str, Sequence[Head]], among: Sequence[Head], seed: int
) -> dict[Head, Head]:
    """Returns another head for each of `heads`, without a role in `named`, as long as there are any."""
    free = [head for head in among if not any(head in of_role for of_role in named.values())]
    drawn = [free[at] for at in np.random.default_rng(seed).permutation(len(free))]
    return dict(zip(sorted({head for of_role in heads.values() for head in of_role}), drawn, strict=False))


def _course(run: TuneRun, edited: Sequence[Head]) -> pd.DataFrame:
    """Accuracy of first letters, and of each role the head that is best at the end among those not clamped, by step."""
    frame: Any = run.table.where(ood=False).frame
    first = frame[(frame["metric"] == "accuracy") & (frame["kind"] == "first") & frame["offset"].isna()]
    rows = [first.assign(of="model")]
    free = frame[frame["level"] == "head"]
    free = free[[head not in edited for head in zip(free["layer"], free["head"], strict=True)]]
    for role in PROBED:
        best = best_head(free[free["metric"] == role], SUSTAINED)
        rows.append(best.assign(of=describe([(int(best["layer"].iloc[0]), int(best["head"].iloc[0]))])))
    return pd.concat(rows).assign(part="course").loc[:, ["part", "step", "metric", "of", *VALUES]]


def _train(config: Orders, inputs: Inputs) -> list[Measurement]:
    return of_tuned(plain, [replace(config.arm, name=PLAIN)], inputs)


def _jobs(config: Orders, inputs: Inputs) -> list[Measurement]:
    return [job for how in ARMS for job in of_tuned(clamped, [replace(config.arm, name=how)], inputs, how=how)]


COLUMNS = ("part", "arm", "seed", "step", "metric", "of")


def _summarize(_: Orders, rows: Rows) -> pd.DataFrame:
    frame = as_rows([rows["plain"], rows["clamped"]], COLUMNS)
    return pd.concat([frame, reached(frame[frame["part"] == "course"])], ignore_index=True)


def reached(course: Any) -> pd.DataFrame:
    """Returns the step at which each run comes to the middle of the plain run's rise, by metric and seed.

    Args:
        course: Rows by arm, seed, step and metric.

    Returns:
        With `part="step"` the step; the last one where a run never comes there, so that it is later than this says.
        With `part="reached"` whether it does. Both are missing where the plain run has no rise.
    """
    last, rows = float(course["step"].max()), []
    for (seed, metric), runs in course.groupby(["seed", "metric"], sort=False):
        wide = runs.pivot(index="step", columns="arm", values="value").sort_index()
        steps = wide.index.to_numpy(float)
        level = middle_of_rise(steps, wide[PLAIN].to_numpy(float))
        for arm in wide.columns:
            crossed = crossing_step(steps, wide[arm].to_numpy(float), level)
            about = {"arm": arm, "seed": seed, "metric": metric}
            known = not np.isnan(level)
            step = crossed if not (known and np.isnan(crossed)) else last
            rows.append({**about, "part": "step", "value": step})
            rows.append({**about, "part": "reached", "value": float(not np.isnan(crossed)) if known else np.nan})
    return pd.DataFrame(rows).assign(low=np.nan, high=np.nan, n=1)


EARLIER = 5.0
"""By how many steps a difference counts as one."""

SAME = 2.0
"""By how many steps runs may differ that count as alike: one probe."""

GIVEN = "aligners on gold"


def _advance(metric: str, arm: str) -> Statistic:
    """By how many steps an arm is ahead of the plain run of its seed; not measured where none can be compared.

    A run that never comes there counts with the last step, so it is further behind than this says.
    """
    return per_seed(part="step", metric=metric).fall("arm", PLAIN, arm).map(over_seeds)


_ELSEWHERE, _ON_GOLD = "others on gold alignment", "lookup heads on gold"

_CLAIMS = [
    *(
        Claim(f"With aligners on gold, {learned} earlier (steps before the plain run)").at_least(
            EARLIER, *(_advance(metric, arm) for arm in (GIVEN, _ELSEWHERE)), _ELSEWHERE
        )
        for metric, learned in (("lookup", "lookup emerges"), ("accuracy", "first letters are learned"))
    ),
    Claim("With aligners on gold, a head looks up before any update (best lookup at step 0)").at_least(
        0.6, *per_seed(part="course", step=0, metric="lookup").beside("arm", GIVEN, _ELSEWHERE), _ELSEWHERE
    ),
    *(
        Claim(f"With {arm}, lookup emerges no earlier (steps before the plain run)").at_most(
            SAME, *(_advance("lookup", of) for of in (arm, GIVEN)), GIVEN
        )
        for arm in ("aligners blind", _ELSEWHERE)
    ),
    *(
        Claim(f"With {arm}, {role} emerges no earlier (steps before the plain run)").at_most(
            SAME, _advance(role, arm), _advance("lookup", GIVEN), "lookup, with aligners on gold"
        )
        for arm in (_ON_GOLD, "others on gold lookup")
        for role in ALIGNMENT
    ),
    *(
        Claim(f"With lookup heads on gold, {role} emerges later, if at all (steps before the plain run)").at_most(
            -EARLIER, _advance(role, _ON_GOLD), _advance(role, "lookup heads blind"), "lookup heads blind"
        )
        for role in ALIGNMENT
    ),
]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    captions = {metric: metric for metric in METRICS} | {"accuracy": "first letters"}
    mean: Any = grouped_over_seeds(table.where(part="course").frame, ["metric", "arm", "step"])
    panels = {caption: mean[mean["metric"] == metric] for metric, caption in captions.items()}
    drawn = {"courses": plots.curves(panels, "step", "arm", "step", value="accuracy or score")}
    for metric, caption in captions.items():
        steps: Any = table.where(part="step", metric=metric).frame.dropna(subset=["value"])
        if len(steps):
            drawn[f"step, {caption}"] = seed_dots(steps, "arm", "step")
    return drawn


ORDER = Experiment(
    "icatune/order",
    "Does lookup wait for alignment, or alignment for lookup?",
    "beyond Agarwal and Sarawagi (2025)",
    Study(
        "icatune/order",
        {
            "smoke": Orders(Arm(PLAIN, SMOKE_TASK, SMOKE, (0, 1))),
            "cpu": Orders(Arm(PLAIN, TASK, {**TOY, "steps": 60, "probe_every": 2}, tuple(range(30, 36)))),
            "paper": Orders(replace(PAPER_ICA, name=PLAIN)),
        },
        _jobs,
        _summarize,
        _train,
        models="one",
        load=loaded,
    ),
    _draw,
    _CLAIMS,
    about=About.BEYOND,
)
