"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): its data, its alignment prior, and its EM. No model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from align_circuits.jobs import Job, run_jobs
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.accuracy import extreme_of, mean_of
from align_circuits.papers.claims import Check, Experiment, Measured
from align_circuits.prompts.prompts import Prompts
from align_circuits.report import plots
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.alignment import PriorForm, alignment_prior
from align_circuits.tasks.automaton import NONE, Automata
from align_circuits.tasks.em import align_by_em, align_by_likelihood, examples_of
from align_circuits.tasks.seq2seq import Seq2SeqTask

# Figure 2


@dataclass(frozen=True)
class Process:
    """The task of Fig. 2: m = 3, c = 2, an alignment that is not monotonic."""

    n: int = 200
    """Prompts, each with its own automata."""
    x_len: int = 3
    phrase_len: int = 2


def _accepted(prompts: Prompts) -> Bool[Tensor, "prompt phrase pos"]:
    """Whether the automaton of the symbol at each input position accepts each phrase of the test example."""
    letter, following = prompts.latent["letter"], prompts.latent["next"]
    automata = Automata(letter, following, (letter != NONE).sum(-1))
    _, probability = automata.follow(prompts.latent["phrases"][:, -1])
    by_symbol = probability[..., -1] > 0
    order = prompts.latent["order"][:, -1]
    return by_symbol.gather(2, order[:, None].expand(-1, by_symbol.shape[1], -1))


def _process(config: Process, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    task = Seq2SeqTask(x_len=config.x_len, phrase_len=config.phrase_len, n_examples=1, alignment="permutation")
    prompts = task.sample(config.n, char_tokenizer(), seed=0, references=False)
    accepted = _accepted(prompts).double().flatten(1).T.numpy()
    keys: Any = pd.DataFrame(
        [(p, q, q == task.aligned[p]) for p in range(config.x_len) for q in range(config.x_len)],
        columns=["phrase", "pos", "aligned"],
    )
    about = Provenance("fig2", {"prompt": prompts.text[0].removeprefix("<bos>"), "aligned": list(task.aligned)})
    return Table.from_prompts(keys, accepted, np.ones_like(accepted), about)


def _check_process(table: Table) -> list[Check]:
    gold, others = (table.where(aligned=aligned) for aligned in (True, False))
    return [
        Check(
            claim="Each phrase is written by the automaton of its aligned symbol (accepted, the worst phrase)",
            measured=extreme_of(gold, highest=False),
            relation=">=",
            threshold=1.0,
            control=extreme_of(others, highest=True),
            control_is="symbols it is not aligned with, the best",
        )
    ]


def _draw_process(table: Table) -> Mapping[str, go.Figure]:
    grid = table.frame.pivot(index="phrase", columns="pos", values="value")
    return {"fig2": plots.accuracy_grids({"": grid}, x="input position", y="phrase", value="accepted")}


FIG2 = Experiment(
    name="icatune/fig2",
    title="How data come about: each phrase is written by the automaton of the symbol it is aligned with",
    source="Agarwal and Sarawagi (2025), Fig. 2",
    scales={"smoke": Process(n=8), "cpu": Process(), "paper": Process()},
    run=_process,
    draw=_draw_process,
    makes_models=True,
    check=_check_process,
)


# The alignment prior of Eq. 2 and Fig. 7


@dataclass(frozen=True)
class Prior:
    """Lengths and λ."""

    x_len: int = 8
    decays: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1000.0)


def _prior(config: Prior, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    orders = np.array(list(permutations(range(config.x_len))))
    rows = []
    for form in get_args(PriorForm):
        for decay in config.decays:
            prior = alignment_prior(config.x_len, decay, form).numpy()
            phrases = np.arange(config.x_len)
            monotonic = float(prior.diagonal().prod())
            shuffled = float(prior[phrases, orders].prod(1).sum()) - monotonic
            for metric, value in (
                ("phrase in place", prior.diagonal().mean()),
                ("monotonic", monotonic),
                ("shuffled", shuffled),
            ):
                rows.append({"form": form, "decay": decay, "metric": metric, "value": float(value), "n": 1})
    frame = pd.DataFrame(rows)
    settings = {"x_len": config.x_len}
    return Table(frame.assign(low=frame["value"], high=frame["value"]), Provenance("prior", settings))


def _check_prior(table: Table) -> list[Check]:
    def at(form: PriorForm, decay: float, metric: str) -> float:
        return float(table.where(form=form, decay=decay, metric=metric).frame["value"].iloc[0])

    def exact(value: float) -> Measured:
        return Measured(value, value, value)

    def apart(form: PriorForm) -> Measured:
        return exact(at(form, 16.0, "phrase in place") - at(form, 4.0, "phrase in place"))

    return [
        Check(
            claim="λ = 4 and λ = 16 differ (phrases in their own place, difference), in the released form",
            measured=apart("code"),
            relation=">=",
            threshold=0.2,
            control=apart("text"),
            control_is="Eq. 2 as printed",
        ),
        Check(
            claim="At λ = 1 the released form is almost a random permutation (share of draws that permute)",
            measured=exact(at("code", 1.0, "shuffled")),
            relation=">=",
            threshold=0.5,
            control=exact(at("code", 1000.0, "shuffled")),
            control_is="λ = 1000",
        ),
    ]


def _draw_prior(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.where(metric=["phrase in place", "monotonic", "shuffled"]).frame
    rows = rows[rows["decay"] <= 32]
    titles = {"text": "Eq. 2 as printed", "code": "as released: positions divided by m"}
    panels = {title: rows[rows["form"] == form] for form, title in titles.items()}
    return {"prior": plots.curves(panels, x="decay", by="metric", label="λ", value="probability")}


PRIOR = Experiment(
    name="icatune/prior",
    title="The alignment prior, as printed and as released",
    source="Agarwal and Sarawagi (2025), Eq. 2 and Fig. 7; exact, by summing over permutations",
    scales={"smoke": Prior(x_len=4), "cpu": Prior(), "paper": Prior()},
    run=_prior,
    draw=_draw_prior,
    makes_models=True,
    check=_check_prior,
    published="λ = 1, 4 and 16 are told apart; small λ is 'almost a random permutation'.",
)


# Appendix F


Update = Literal["true", "printed"]


@dataclass(frozen=True)
class EM:
    """Prompts of one letter a phrase, with an alignment of their own each."""

    x_lens: tuple[int, ...] = (3, 5, 8)
    n_examples: tuple[int, ...] = (5, 15, 50)
    n: int = 60
    """Prompts a cell."""
    exhaustive: int = 5
    """The longest input for which all permutations are tried too."""


def em(*, x_len: int, n_examples: int, prompts: int, exhaustive: bool, seed: int) -> pd.DataFrame:
    """Aligns the examples of prompts by each method; the function of a cell.

    Args:
        x_len: m.
        n_examples: k.
        prompts: How many; each is of another task, with an alignment of its own.
        exhaustive: Whether sequential maximum likelihood tries all permutations.
        seed: Of the tasks.

    Returns:
        For each method `recovered` (the whole alignment is gold) and `positions` (the share of it); for both updates
        of EM `falls`, the share of updates under which the likelihood falls, and `log_likelihood` at the end, in nats a
        letter. `shuffled` is true EM on examples whose phrases changed places, each example on its own.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for at in range(seed * prompts, (seed + 1) * prompts):
        task = Seq2SeqTask(x_len=x_len, phrase_len=1, n_examples=n_examples, alignment="permutation", task_seed=at)
        drawn = task.sample(1, char_tokenizer(), seed=at, references=False)
        x, y = examples_of(drawn, 0)
        gold = np.array(task.aligned)
        alignments: dict[str, Any] = {}
        for update in get_args(Update):
            result = align_by_em(x, y, update=update, seed=at)
            change = result.log_likelihood.diff()
            alignments[update] = result.alignment
            found.setdefault((update, "falls"), []).append(float((change < -1e-9).double().mean()))
            found.setdefault((update, "log_likelihood"), []).append(float(result.log_likelihood[-1]) / y.numel())
        alignments["shuffled"] = align_by_em(*examples_of(task.corrupt(drawn, "alignment", seed=at), 0)).alignment
        if exhaustive:
            alignments["sequential likelihood"] = align_by_likelihood(x, y).alignment
        for method, aligned in alignments.items():
            right = np.array(aligned) == gold
            found.setdefault((method, "recovered"), []).append(float(right.all()))
            found.setdefault((method, "positions"), []).append(float(right.mean()))
    keys: Any = pd.DataFrame(list(found), columns=["method", "metric"])
    values: Float[ndarray, "row prompt"] = np.array(list(found.values()))
    bounded = (keys["metric"] != "log_likelihood").to_numpy()
    return Table.from_prompts(keys, values, np.ones_like(values), Provenance("em"), bounded=bounded).frame


def _em(config: EM, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - the protocol's
    cells = [
        Job(f"{__name__}:em", {"x_len": m, "n_examples": k, "prompts": config.n, "exhaustive": m <= config.exhaustive})
        for m in config.x_lens
        for k in config.n_examples
    ]
    found = run_jobs(cells, folder / "cells", processes=jobs).all_rows()
    return Table(found.drop(columns=["prompts", "exhaustive", "seed"]), Provenance("em", {"n": config.n}))


def _check_em(table: Table) -> list[Check]:
    k = int(table.frame["n_examples"].to_numpy().max())

    def recovered(method: str) -> Measured:
        return mean_of(table.where(method=method, metric="recovered", n_examples=k))

    falls = {update: mean_of(table.where(method=update, metric="falls")) for update in get_args(Update)}
    return [
        Check(
            claim="True EM never lowers the likelihood (share of updates that do)",
            measured=falls["true"],
            relation="<=",
            threshold=0.0,
            control=falls["printed"],
            control_is="the update as printed",
        ),
        Check(
            claim=f"True EM recovers the whole alignment from k = {k} examples (mean over m)",
            measured=recovered("true"),
            relation=">=",
            threshold=0.9,
            control=recovered("shuffled"),
            control_is="examples without a common alignment",
        ),
        Check(
            claim=f"So does the update as printed (k = {k})",
            measured=recovered("printed"),
            relation=">=",
            threshold=0.9,
            control=recovered("shuffled"),
            control_is="examples without a common alignment",
        ),
    ]


def _draw_em(table: Table) -> Mapping[str, go.Figure]:
    rows: Any = table.where(metric="recovered").frame
    names = {"true": "EM", "printed": "EM as printed", "shuffled": "EM, no common alignment"}
    rows = rows.assign(method=rows["method"].replace(names))
    panels = {f"m = {m}": some for m, some in rows.groupby("x_len")}
    return {"appF": plots.curves(panels, x="n_examples", by="method", label="examples k", value="alignment recovered")}


APPF = Experiment(
    name="icatune/appF",
    title="EM finds the alignment from the examples; the printed update is no EM",
    source="Agarwal and Sarawagi (2025), App. F and §5",
    scales={"smoke": EM(x_lens=(3,), n_examples=(2, 6), n=3, exhaustive=3), "cpu": EM(), "paper": EM(n=200)},
    run=_em,
    draw=_draw_em,
    check=_check_em,
    makes_models=True,
)
