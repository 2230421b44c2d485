"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): does tuning build its heads, or unmask them?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool
from numpy import ndarray

from align_circuits.heads.effects import effects_table
from align_circuits.heads.localization import Localization
from align_circuits.heads.localize_heads import localize
from align_circuits.hooks.edits import Clamp
from align_circuits.hooks.head_names import describe, heads_of
from align_circuits.models.loading import load
from align_circuits.papers.claims import Check, Claim, checks_of
from align_circuits.papers.icatune.tuned_models import (
    FRESH,
    ICA,
    PAPER_ICA,
    SMOKE_ICA,
    SMOLLM2_ICA,
    Tunings,
    course,
    loaded,
    of_tuned,
    tuned,
)
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, seed_dots
from align_circuits.papers.statistics import NOT_MEASURED, Measured, Statistic, as_rows, rows, statistic
from align_circuits.report import plots
from align_circuits.run.target_metrics import TargetMetrics, by_kind
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import VALUES, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

ROLES = ("align_query", "align_key", "lookup")

TOP = 3
"""A head that tuning makes was there before if it was one of so many."""

COLUMNS = ("arm", "part", "seed", "what", "role", "layer", "head", "of", "metric")
"""The key columns. `what` is "clamped", "named", "ablated" or "interchanged"."""


@dataclass(frozen=True)
class Unmasking(Tunings):
    """As `Tunings`, where `n` is how many prompts `localize` takes."""

    clamped: int = 32
    """Prompts on which heads are clamped, one at a time."""
    before: int | None = None
    """In how many of the seeds heads are localized before tuning, in the same model; in all by default."""
    adapter: str | None = None
    """What the only arm made, as `load` takes it (the name of its base, then `-ica`): measured in place of tuning it
    anew, so that the numbers are those of the model that the package has. By default each arm is tuned here."""


def clamped(*, model: str, task: Mapping[str, Any], role: str, prompts: int, seed: int, **_: str) -> pd.DataFrame:
    """Returns what clamping each head of the untuned model onto gold gains; the function of a job.

    Args:
        model: What `load` takes.
        task: The task's arguments.
        role: The relation that heads are clamped onto.
        prompts: How many.
        seed: Of the task and its prompts.
        **_: The hash of the model's weights.

    Returns:
        A row for each head: by how many nats the log-probability of gold first tokens rises.
    """
    network = loaded(model)
    drawn = Seq2SeqTask(**task, task_seed=seed).sample(prompts, network.tokenizer, FRESH + seed, references=False)
    heads = heads_of(network.cfg)
    targets = TargetMetrics.of(drawn, ["log_prob"])
    values = targets.measure_edited(network, [[], *([Clamp([head], role)] for head in heads)])[0]
    keys = pd.DataFrame(heads, columns=["layer", "head"])
    gains = effects_table(keys, values[:, 1:] - values[:, :1], targets, by_kind(drawn), Provenance("clamped"))
    return gains.where(kind="first").frame.assign(what="clamped", part="before", role=role)


def before(*, model: str, task: Mapping[str, Any], prompts: int, seed: int, **_: str) -> pd.DataFrame:
    """Localizes heads in the untuned model; the function of a job. Arguments as for `clamped`, rows as of `after`."""
    return _localized(loaded(model), task, prompts, seed).assign(part="before")


def after(*, prompts: int, adapter: str | None, **run: Any) -> pd.DataFrame:
    """Localizes heads in a tuned model; the function of a job.

    Args:
        prompts: How many `localize` takes.
        adapter: `Unmasking.adapter`.
        **run: As for `tuned`.

    Returns:
        "named": the score of each head that `localize` names for a role, beside `of="random"`, as many others of the
        same layers for each; "ablated": the accuracy of first tokens without groups of heads, and "interchanged": how
        often patching them brings the other prompt's answer, by group (`of`; random and matched ones once a draw).
    """
    model = load(adapter) if adapter else tuned(**run).model
    return _localized(model, run["task"], prompts, run["seed"]).assign(part="after")


def _localized(model: Any, task: Mapping[str, Any], prompts: int, seed: int) -> pd.DataFrame:
    found = localize(model, Seq2SeqTask(**task, task_seed=seed), prompts, seed=FRESH + seed)
    groups = found.evidence.set_ablations.where(kind="first").frame.rename(columns={"ablated": "of"})
    frames = [_named(found, model, seed), groups.assign(what="ablated", metric="accuracy")]
    if found.evidence.interchanges is not None:
        patched = found.evidence.interchanges.where(metric="interchange").frame.rename(columns={"patched": "of"})
        frames.append(patched.assign(what="interchanged"))
    keys = [column for column in COLUMNS if column not in ("arm", "part", "seed")]  # the job's own
    return pd.concat([frame.reindex(columns=[*keys, *VALUES]) for frame in frames])


def _named(found: Localization, model: Any, seed: int) -> pd.DataFrame:
    """The named heads with their scores, each beside another head of its layer that was not named for the role."""
    generator, rows = np.random.default_rng(seed), []
    for role, heads in found.heads_by_role.items():
        if role not in ROLES:
            continue
        for head in heads:
            others = [other for other in heads_of(model.cfg) if other[0] == head[0] and other not in heads]
            chosen = {"named": head} | ({"random": others[generator.integers(len(others))]} if others else {})
            for of, (layer, at) in chosen.items():
                score = found.table.where(role=role, metric="score", layer=layer, head=at).frame
                rows.append(score.assign(what="named", of=of, role=role))
    return pd.concat(rows) if rows else pd.DataFrame(columns=list(COLUMNS))


def _train(config: Unmasking, inputs: Inputs) -> list[Measurement]:
    if config.adapter is None:
        return of_tuned(course, config.arms, inputs)
    model = inputs.model["model"]
    if config.adapter != f"{model}-ica":
        raise ValueError(
            f"{config.adapter!r}, which is measured here, was not tuned from {model!r}: give --model "
            f"{config.adapter.removesuffix('-ica')}"
        )
    return []


def _jobs(config: Unmasking, inputs: Inputs) -> list[Measurement]:
    """What is measured before tuning is so once for all arms of one task."""
    tasks = {str(arm.task): arm for arm in config.arms}
    untuned = [
        Measurement(function, {**inputs.model, "task": dict(arm.task), "prompts": n, **more}, seed)
        for arm in tasks.values()
        for function, n, seeds, parts in (
            (clamped, config.clamped, arm.seeds[:1], [{"role": role} for role in ROLES]),
            (before, config.n, arm.seeds[: config.before], [{}]),
        )
        for seed in seeds
        for more in parts
    ]
    return [*untuned, *of_tuned(after, config.arms, inputs, prompts=config.n, adapter=config.adapter)]


def _summarize(_: Unmasking, rows: Rows) -> pd.DataFrame:
    return as_rows([rows[name] for name in ("clamped", "before", "after")], COLUMNS)


_GAINS = rows(what="clamped")


def _among_the_top(of: str) -> Statistic:
    """The share of heads named after tuning, or of random ones of their layers, that were among the `TOP` before.

    0 without an interval, so undecided, where there is none.
    """

    def among(table: Table) -> Measured | Bool[ndarray, " head"]:
        frame: Any = table.frame
        heads = frame[(frame["what"] == "named") & (frame["part"] == "after") & (frame["of"] == of)]
        if not len(heads):
            return NOT_MEASURED
        gains = frame[frame["what"] == "clamped"].set_index(["role", "layer", "head"])["value"]
        ranks = gains.groupby("role").rank(ascending=False, method="first")
        return ranks.loc[list(zip(heads["role"], heads["layer"], heads["head"], strict=True))].to_numpy() <= TOP

    return statistic(among)


def _middle(table: Table) -> Table:
    """Of each role the head in the middle of the ranking."""
    gains: Any = table.frame
    middle = gains.sort_values("value").groupby("role")["value"].apply(lambda of: of.index[len(of) // 2])
    return Table(gains.loc[middle], table.provenance)


def _names(role: str) -> Statistic:
    """In which seeds any head is named for a role."""

    def named(table: Table) -> Bool[ndarray, " seed"]:
        frame: Any = table.frame
        seeds = frame.loc[frame["what"] == "ablated", "seed"].unique()
        return np.isin(seeds, frame.loc[(frame["what"] == "named") & (frame["role"] == role), "seed"])

    return statistic(named)


def _check(table: Table) -> list[Claim | Check]:
    checks: list[Claim | Check] = [
        Claim("Clamping a single head onto gold lifts the untuned model's first tokens (nats, the best head)").at_least(
            0.1, _GAINS.highest(), _GAINS.map(_middle), "heads in the middle of the ranking"
        )
    ]
    frame: Any = table.frame
    for arm in frame["arm"].dropna().unique():
        # What was measured before tuning has no arm: it is the same for all.
        own = Table(frame[frame["arm"].isna() | (frame["arm"] == arm)], table.provenance)
        checks += checks_of(_claims_of(own, arm), own)
    return checks


def _claims_of(table: Table, arm: str) -> list[Claim]:
    ablated, interchanged = (rows(part="after", what=what) for what in ("ablated", "interchanged"))
    frame: Any = table.frame
    measured = frame[frame["part"] == "after"].groupby("what")["of"].agg(set).to_dict()
    claims = [
        Claim(
            f"{arm}: tuning unmasks heads: of those named after it, these were among the {TOP} whose clamping gains "
            "most before it (share)"
        ).at_least(0.5, _among_the_top("named"), _among_the_top("random"), "random heads of their layers"),
        *(
            Claim(f"{arm}: localize names {role} heads (share of seeds)").at_least(
                0.5, *_names(role).beside("part", "after", "before"), "before tuning"
            )
            for role in ROLES
        ),
    ]
    if {"named", "random"} <= measured.get("ablated", set()):
        claims.append(
            Claim(f"{arm}: without the named heads the first token is lost (difference of accuracy)").at_most(
                -0.2, *(ablated.rise("of", "nothing", of) for of in ("named", "random")), "random heads of their layers"
            )
        )
    if {"named", "random 0"} <= measured.get("interchanged", set()):
        claims.append(
            Claim(f"{arm}: the named heads carry the answer (interchange accuracy)").at_least(
                0.5, *interchanged.beside("of", "named", "random 0"), "random heads"
            )
        )
    return claims


def _draw(table: Table) -> Mapping[str, go.Figure]:
    gains: Any = table.where(what="clamped").frame
    best = gains.loc[gains.groupby("role")["value"].nlargest(12).index.get_level_values(1)]
    best = best.assign(head=[describe([head]) for head in zip(best["layer"], best["head"], strict=True)])
    groups: Any = table.where(what=["ablated", "interchanged"]).frame
    groups = groups[groups["of"].isin(["nothing", *ROLES, "named", "random", "random 0"])]
    groups = groups.assign(when=groups["part"] + (", " + groups["arm"]).fillna(""))
    groups = groups.groupby(["what", "when", "seed", "of"], as_index=False)[[*VALUES]].mean()
    figures = {
        f"{what} {when}": seed_dots(of_group, "of", what) for (what, when), of_group in groups.groupby(["what", "when"])
    }
    return {"clamped": plots.dots(best, "head", "role", "gain by clamping (nats)"), **figures}


UNMASK = Experiment(
    "icatune/unmask",
    "Build or unmask: were the heads that tuning makes there before?",
    "beyond Agarwal and Sarawagi (2025)",
    Study(
        "icatune/unmask",
        {
            "smoke": Unmasking((SMOKE_ICA,), n=8, clamped=4),
            "cpu": Unmasking((ICA,)),
            "paper": Unmasking((PAPER_ICA,)),
            "smollm2": Unmasking((replace(SMOLLM2_ICA, seeds=(1,)),), n=32, clamped=16, adapter="smollm2-ica"),
        },
        _jobs,
        _summarize,
        _train,
        models="one",
        load=loaded,
    ),
    _draw,
    _check,
    about=About.BEYOND,
)
