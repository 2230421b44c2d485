"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): its data, its alignment prior, and its EM. No model."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool
from torch import Tensor

from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.alignment_oracles import align_by_em, align_by_likelihood, examples_of
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Study, grids, rows_along
from align_circuits.papers.statistics import (
    HIGH,
    Measured,
    Statistic,
    Values,
    exact,
    levels,
    mean_rows,
    measured,
    of_each,
    rows,
    statistic,
)
from align_circuits.prompts.prompts import Prompts
from align_circuits.tables.tables import Table
from align_circuits.tasks.alignment_priors import PriorForm, alignment_prior
from align_circuits.tasks.automaton import NONE, Automata
from align_circuits.tasks.seq2seq import Seq2SeqTask

# Table 1


@dataclass(frozen=True)
class Example:
    """Prompts of m = 3, c = 2 and three examples."""

    seed: int = 0


def examples(*, seed: int) -> list[dict[str, Any]]:
    """Returns a prompt of each style; the function of a job."""
    rows = []
    for style in ("standard", "pre-aligned"):
        prompts = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=3, style=style).sample(1, char_tokenizer(), seed)
        text = prompts.text[0].removeprefix("<bos>")
        rows.append({"style": style, "prompt": text, "value": prompts.inputs.shape[1], "n": 1})
    return rows


def _behind_its_symbol(table: Table) -> Measured:
    """In what share of a prompt's phrases the letters stand behind the symbol that they translate; exact."""
    pairs = [line.split(":") for line in table.frame["prompt"].iloc[0].splitlines()]
    phrases = [(x[place], y[place * len(y) // len(x) :]) for x, y in pairs for place in range(len(x))]
    share = sum(y.startswith(symbol) for symbol, y in phrases) / len(phrases)
    return exact(share)


TABLE1 = Experiment(
    "icatune/table1",
    "A standard and a pre-aligned prompt (value: tokens)",
    "Agarwal and Sarawagi (2025), Table 1",
    Study(
        "icatune/table1",
        {"smoke": Example(), "cpu": Example(), "paper": Example()},
        lambda config, _: [Measurement(examples, seed=config.seed)],
        lambda _, rows: rows["examples"].drop(columns="seed").assign(low=float("nan"), high=float("nan")),
    ),
    claims=[
        Claim("Pre-aligned: each phrase stands behind its symbol (share)").at_least(
            1.0, *statistic(_behind_its_symbol).beside("style", "pre-aligned", "standard"), "standard"
        )
    ],
)


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


def process(*, n: int, x_len: int, phrase_len: int) -> pd.DataFrame:
    """Returns how often each symbol's automaton accepts each phrase; the function of a job. Arguments of `Process`."""
    task = Seq2SeqTask(x_len=x_len, phrase_len=phrase_len, n_examples=1, alignment="permutation")
    prompts = task.sample(n, char_tokenizer(), seed=0, references=False)
    accepted = _accepted(prompts).double().flatten(1).T.numpy()
    keys = [(phrase, at, at == task.aligned[phrase]) for phrase in range(x_len) for at in range(x_len)]
    return mean_rows(pd.DataFrame(keys, columns=["phrase", "pos", "aligned"]), accepted)


FIG2 = Experiment(
    "icatune/fig2",
    "How the data are generated: each phrase is written by the automaton of the symbol it is aligned with",
    "Agarwal and Sarawagi (2025), Fig. 2",
    Study(
        "icatune/fig2",
        {"smoke": Process(n=8), "cpu": Process(), "paper": Process()},
        lambda config, _: [Measurement(process, asdict(config), None)],
    ),
    {"fig2": grids("pos", "phrase", {"": {}}, x="input position", value="accepted")},
    [
        Claim("Each phrase is written by the automaton of its aligned symbol (accepted, the worst phrase)").at_least(
            1.0, of_each(aligned=True), rows(aligned=False).highest(), "symbols it is not aligned with, the best"
        )
    ],
)


# The alignment prior of Eq. 2 and Fig. 7


@dataclass(frozen=True)
class Prior:
    """Lengths and λ."""

    x_len: int = 8
    decays: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1000.0)


def prior(*, x_len: int, decays: Sequence[float]) -> list[dict[str, Any]]:
    """Returns what the prior makes probable, summed over all permutations; the function of a job."""
    orders, phrases = np.array(list(permutations(range(x_len)))), np.arange(x_len)
    rows = []
    for form in get_args(PriorForm):
        for decay in decays:
            probability = alignment_prior(x_len, decay, form).numpy()
            in_place, monotonic = probability.diagonal().mean(), float(probability.diagonal().prod())
            shuffled = float(probability[phrases, orders].prod(1).sum()) - monotonic
            values = {"phrase in place": in_place, "monotonic": monotonic, "shuffled": shuffled}
            rows += [{"form": form, "decay": decay, "metric": name, "value": float(of)} for name, of in values.items()]
    return rows


def _draw_prior(table: Table) -> go.Figure:
    shown = {"decay": [decay for decay in levels(table, "decay") if decay <= 32]}
    panels = {"Eq. 2 as printed": {"form": "text"}, "as released: positions divided by m": {"form": "code"}}
    return rows_along(
        "decay", "metric", {title: keys | shown for title, keys in panels.items()}, label="λ", value="probability"
    )(table)


def _exactly(values: Values) -> Measured:
    return exact(measured(values).value)


PRIOR = Experiment(
    "icatune/prior",
    "The alignment prior, as printed and as released",
    "Agarwal and Sarawagi (2025), Eq. 2 and Fig. 7; exact, by summing over permutations",
    Study(
        "icatune/prior",
        {"smoke": Prior(x_len=4), "cpu": Prior(), "paper": Prior()},
        lambda config, _: [Measurement(prior, asdict(config), None)],
        lambda _, rows: rows["prior"].assign(n=1, low=rows["prior"]["value"], high=rows["prior"]["value"]),
    ),
    {"prior": _draw_prior},
    [
        Claim("λ = 4 and λ = 16 differ (phrases in their own place, difference), in the released form").at_least(
            0.2,
            *rows(metric="phrase in place").rise("decay", 4.0, 16.0).map(_exactly).beside("form", "code", "text"),
            "Eq. 2 as printed",
        ),
        Claim("At λ = 0 Eq. 2 draws almost random permutations (share of draws that are permutations)").at_least(
            0.5, *rows(form="text", metric="shuffled").map(_exactly).beside("decay", 0.0, 1000.0), "λ = 1000"
        ),
    ],
    "λ = 1, 4 and 16 are told apart; small λ is 'almost a random permutation'.",
)


# Appendix F


UPDATES: tuple[Literal["true", "printed"], ...] = ("true", "printed")


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
        For each method `recovered` (the entire alignment is right) and `positions` (the share of it); for both updates
        of EM `falls`, the share of updates under which the likelihood falls, and `log_likelihood` at the end, in nats a
        letter. `shuffled` is true EM on examples whose phrases changed places, each example on its own.
    """
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for at in range(seed * prompts, (seed + 1) * prompts):
        task = Seq2SeqTask(x_len=x_len, phrase_len=1, n_examples=n_examples, alignment="permutation", task_seed=at)
        drawn = task.sample(1, char_tokenizer(), seed=at, references=False)
        x, y = examples_of(drawn, 0)
        alignments: dict[str, Any] = {}
        for update in UPDATES:
            result = align_by_em(x, y, update=update, seed=at)
            alignments[update] = result.alignment
            results[update, "falls"].append(float((result.log_likelihood.diff() < -1e-9).double().mean()))
            results[update, "log_likelihood"].append(float(result.log_likelihood[-1]) / y.numel())
        alignments["shuffled"] = align_by_em(*examples_of(task.corrupt(drawn, "alignment", seed=at), 0)).alignment
        if exhaustive:
            alignments["sequential likelihood"] = align_by_likelihood(x, y).alignment
        for method, aligned in alignments.items():
            right = np.array(aligned) == np.array(task.aligned)
            results[method, "recovered"].append(float(right.all()))
            results[method, "positions"].append(float(right.mean()))
    keys: Any = pd.DataFrame(list(results), columns=["method", "metric"])
    bounded = (keys["metric"] != "log_likelihood").to_numpy()
    return mean_rows(keys, np.array(list(results.values())), bounded=bounded)


def _em_jobs(config: EM, _: Inputs) -> list[Measurement]:
    sizes = [{"x_len": m, "n_examples": k} for m in config.x_lens for k in config.n_examples]
    return [
        Measurement(em, {**size, "prompts": config.n, "exhaustive": size["x_len"] <= config.exhaustive}, keys=size)
        for size in sizes
    ]


_RECOVERED = rows(metric="recovered", n_examples=HIGH)


def _recovered(method: str) -> tuple[Statistic, Statistic, str]:
    return *_RECOVERED.beside("method", method, "shuffled"), "examples without a common alignment"


def _draw_em(table: Table) -> go.Figure:
    names = {"true": "EM", "printed": "EM as printed", "shuffled": "EM, no common alignment"}
    named = Table(table.frame.replace({"method": names}), table.provenance)
    panels = {f"m = {m}": {"metric": "recovered", "x_len": m} for m in levels(table, "x_len")}
    return rows_along("n_examples", "method", panels, label="examples k", value="alignment recovered")(named)


APPF = Experiment(
    "icatune/appF",
    "EM finds the alignment from the examples; the printed update is no EM",
    "Agarwal and Sarawagi (2025), App. F and §5",
    Study(
        "icatune/appF",
        {"smoke": EM(x_lens=(3,), n_examples=(2, 6), n=3, exhaustive=3), "cpu": EM(), "paper": EM(n=200)},
        _em_jobs,
        lambda _, rows: rows["em"].drop(columns="seed"),
    ),
    {"appF": _draw_em},
    [
        Claim("True EM never lowers the likelihood (share of updates that do)").at_most(
            0.0, *of_each(metric="falls").beside("method", *UPDATES), "the update as printed"
        ),
        Claim("The update as printed lowers it in most (share of updates)").at_least(
            0.5, *of_each(metric="falls").beside("method", *reversed(UPDATES)), "true EM"
        ),
        Claim("True EM recovers the whole alignment from k = {n_examples.high} examples (mean over m)").at_least(
            0.9, *_recovered("true")
        ),
        Claim("So does the update as printed (k = {n_examples.high})").at_least(0.9, *_recovered("printed")),
    ],
)
