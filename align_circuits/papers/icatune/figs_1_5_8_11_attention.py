"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): attention in induction, by hand, and after tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.head_names import Head, describe
from align_circuits.hooks.names import name_of
from align_circuits.models.planted.planted_model import planted_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.figs_7_10_alignments_and_layers import FIG10, Layers, best_arm
from align_circuits.papers.icatune.tuned_models import (
    FRESH_SEEDS,
    ICA,
    PAPER_ICA,
    SMOKE_ICA,
    SMOLLM2_ICA,
    Arm,
    Tunings,
    at_ends,
    before_and_after,
    best_head,
    loaded,
    of_tuned,
    tuned_study,
)
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.papers.statistics import Statistic, as_rows, mean_rows, rows
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.token_html import readable
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.run.forward_pass import capture
from align_circuits.tables.tables import VALUES, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask


def _pattern(model: Any, prompts: Prompts, head: Head) -> Float[Tensor, "prompt query key"]:
    name = name_of("pattern", head[0])
    return capture(model, prompts, [name])[name][:, head[1]].float()


def _mean_map(weights: Float[Tensor, "prompt query key"]) -> pd.DataFrame:
    """The mean over prompts by query and key."""
    keys = pd.MultiIndex.from_product([range(size) for size in weights.shape[1:]], names=["query", "key"])
    return mean_rows(keys.to_frame(index=False), weights.flatten(1).T.double().numpy())


def _of_head(scores: Table, metric: str, head: Head) -> pd.DataFrame:
    return scores.where(metric=metric, layer=head[0], head=head[1]).frame.assign(of=describe([head]))


def _draw_grids(
    panels: Mapping[str, pd.DataFrame], queries: Sequence[str], keys: Sequence[str], x: str, y: str
) -> go.Figure:
    """Attention with queries down and keys across, by name; a panel for each of the maps."""
    named = {"index": dict(enumerate(queries)), "columns": dict(enumerate(keys))}
    grids = {title: rows.pivot(index="query", columns="key", values="value") for title, rows in panels.items()}
    grids = {title: grid.iloc[::-1].rename(**named) for title, grid in grids.items()}
    return plots.accuracy_grids(grids, x=x, y=y, value="attention")


# Figure 1


@dataclass(frozen=True)
class Pairs:
    """Prompts of labelled symbols, `x1 y1 ... xk yk x`, where x is one of the k; half of them to choose heads by."""

    k: int = 2
    n: int = 2000


REPEATED = 4
"""How often each labelled symbol is shown where it is asked what one showing lacks."""


def _pairs(k: int, n: int, tokenizer: Any, *, known: bool, times: int = 1) -> Prompts:
    """Prompts in which the last symbol was labelled, each symbol equally often; or was not. All are shown `times`."""
    task = Seq2SeqTask(x_len=k + 1, phrase_len=1, n_examples=0)
    drawn = task.sample(n, tokenizer, seed=0, references=False)
    symbols = torch.tensor(drawn.task["symbols"])[drawn.latent["symbols"]]
    labels = drawn.answer_tokens[drawn.latent["phrases"][:, 0, :, 0]]
    pairs = torch.stack([symbols, labels], 2)
    row = torch.arange(n)
    last = pairs[row, row % k if known else k]
    start = torch.full((n, 1), tokenizer.bos_token_id)
    return Prompts.from_tokens(
        torch.cat([start, pairs[:, :k].flatten(1).repeat(1, times), last], 1), tokenizer=tokenizer
    )


def pairs(*, model: str, k: int, n: int, **_: str) -> pd.DataFrame:
    """Measures accuracy, the best heads, and their attention; the function of a job. Arguments as of `Pairs`.

    The heads are chosen by the first half of the prompts and measured on the others.
    """
    network, frames = loaded(model), []
    drawn = {part: _pairs(k, n, network.tokenizer, known=part == "known") for part in ("known", "unknown")}
    repeated = _pairs(k, n, network.tokenizer, known=True, times=REPEATED)
    for part, prompts, times in (*((*each, 1) for each in drawn.items()), ("repeated", repeated, REPEATED)):
        right = evaluate(network, prompts).where(metric="accuracy", offset=2 * k * times + 1)
        frames.append(right.frame.assign(part=part, of="model"))
    prompts = drawn["known"]
    chosen, scores = (
        score_heads(network, half, ["induction", "previous"]) for half in (prompts[: n // 2], prompts[n // 2 :])
    )
    heads = {metric: best_head(chosen, metric) for metric in ("induction", "previous")}
    frames += [_of_head(scores, metric, head).assign(part="known") for metric, head in heads.items()]
    frames.append(_of_head(scores, "previous", heads["induction"]).assign(part="induction head"))
    first = scores.where(metric="induction", layer=0).heads().frame
    frames.append(first.nlargest(1, "value").assign(part="first layer", of="best head"))
    for place in range(k):
        those = prompts[torch.arange(n) % k == place]
        for metric, head in heads.items():
            maps = _mean_map(_pattern(network, those, head))
            frames.append(maps.assign(part=f"x = x{place + 1}", metric=metric, of=describe([head])))
    return as_rows(frames, ["part", "metric", "of", "query", "key"])


def _draw_pairs(table: Table) -> Mapping[str, go.Figure]:
    maps: Any = table.frame[table.frame["part"].str.startswith("x = ")]
    k = (int(maps["key"].max()) - 1) // 2
    names = ["start", *(f"{kind}{at + 1}" for at in range(k) for kind in "xy"), "x", "y"]
    panels = {f"{metric}, {part}": rows for (metric, part), rows in maps.groupby(["metric", "part"], sort=False)}
    return {"fig1": _draw_grids(panels, names, names, "to", "from")}


FIG1 = Experiment(
    "icatune/fig1",
    "In-context learning of labels by induction heads",
    "Agarwal and Sarawagi (2025), Fig. 1",
    Study(
        "icatune/fig1",
        {"smoke": Pairs(n=6), "cpu": Pairs(), "paper": Pairs(), "smollm2": Pairs()},
        lambda config, inputs: [Measurement(pairs, {**inputs.model, **asdict(config)}, None)],
        models="one",
        load=loaded,
    ),
    _draw_pairs,
    [
        Claim("A labelled symbol gets its label").at_least(
            0.9, *rows(metric="accuracy").beside("part", "known", "unknown"), "a symbol without a label"
        ),
        Claim("An induction head looks at the label of the symbol (share of its attention)").at_least(
            0.5,
            *rows(metric="induction").beside("part", "known", "first layer"),
            "best head of the first layer, which cannot know what stood before a label",
        ),
        Claim("A head looks at the token before (share of its attention)").at_least(
            0.5, *rows(metric="previous").beside("part", "known", "induction head"), "the induction head"
        ),
    ],
)


# Figures 5 and 11


def attention(*, prompts: int, **run: Any) -> pd.DataFrame:
    """Returns the mean attention of the best aligner and lookup head, before and after; the function of a job.

    `align`: from the position that predicts each letter of the test output to each symbol of the test input. `lookup`:
    from there to each letter of the examples, all examples together, their phrases listed in the order in which the
    test example translates their symbols, so that the aligned ones lie on the diagonal. `score` is how much of a head's
    attention is on those, at first letters; the best head has the most.

    Args:
        prompts: How many the attention is averaged over.
        **run: As for `tuned`.
    """
    models, task, seed = before_and_after(**run)
    drawn = task.sample(prompts, models["after"].tokenizer, seed)
    metrics = {"align": "align_query_attention", "lookup": "lookup_attention"}
    scores = {part: score_heads(model, drawn, list(metrics.values())) for part, model in models.items()}
    frames = []
    for part, model in models.items():
        for what, metric in metrics.items():
            head = best_head(scores["after"], metric)
            about = {"part": part, "what": what, "of": describe([head])}
            frames.append(_of_head(scores[part], metric, head).assign(**about, metric="score"))
            frames.append(_mean_attention(model, drawn, head, what).assign(**about, metric="attention"))
    return as_rows(frames, ["part", "what", "of", "metric", "query", "key"])


def _attention(arms: Sequence[Arm], inputs: Inputs, config: Any) -> list[Measurement]:
    return of_tuned(attention, arms, inputs, prompts=config.n)


def _mean_attention(model: Any, prompts: Prompts, head: Head, what: str) -> pd.DataFrame:
    """The mean over prompts of a head's attention, by query and key as `attention` lists them."""
    queries = prompts.column("query_pos").view(len(prompts), -1)[0]
    places = _keys(prompts, what)
    wide = places.flatten(1)[:, None].expand(-1, len(queries), -1)
    to_places = _pattern(model, prompts, head)[:, queries].gather(2, wide)
    return _mean_map(to_places.unflatten(2, places.shape[1:]).sum(3))


def _keys(prompts: Prompts, what: str) -> Int[Tensor, "prompt key place"]:
    """Where each symbol of the test input stands, or each letter of its translation, in every example."""
    kind, example, last = prompts.token_kinds[0], prompts.example[0], int(prompts.example.max())
    if what == "align":
        return ((kind == TokenKind.INPUT) & (example == last)).nonzero().expand(len(prompts), -1, 1)
    letters = ((kind == TokenKind.OUTPUT) & (example < last)).nonzero()[:, 0]
    # Every example translates its symbols in an order of its own: `same` is the place in an example's output of the
    # phrase for the symbol that each phrase of the test example translates.
    symbol = prompts.latent["order"][:, :, prompts.task["aligned"]]
    same = (symbol[:, -1, None, :, None] == symbol[:, :-1, None]).int().argmax(3)  # [prompt example symbol]
    places = letters.view(last, symbol.shape[2], -1)[torch.arange(last)[:, None], same]
    return places.flatten(2).transpose(1, 2)


def _maps(arm: Arm, frame: pd.DataFrame) -> pd.DataFrame:
    """The scores of all seeds, and the maps of the first."""
    shown = frame[(frame["metric"] == "score") | (frame["seed"] == arm.seeds[0])]
    return shown.loc[:, ["arm", "part", "seed", "what", "of", "metric", "query", "key", *VALUES]]


_MAP_CLAIMS = [
    Claim(f"{claim} (share of its attention, mean over seeds)").at_least(
        0.5, *rows(what=what, metric="score").beside("part", "after", "before"), "the same head before"
    )
    for what, claim in (
        ("align", "The aligner attends from first letters to their symbols"),
        ("lookup", "The lookup head attends to translations of the same symbol"),
    )
]


def _draw_maps(table: Table) -> Mapping[str, go.Figure]:
    maps = table.where(metric="attention")
    aligner: Any = maps.where(what="align").frame
    letters, m = int(aligner["query"].max()) + 1, int(aligner["key"].max()) + 1
    c = letters // m
    symbols = [f"x{at + 1}" for at in range(m)]
    names = [f"y{at // c + 1}{'abcdefgh'[at % c]}" for at in range(letters)]
    across = {
        "align": ("symbol of the test input", symbols),
        "lookup": ("all examples, by the symbols of the test example", names),
    }
    figures = {}
    for what, (title, keys) in across.items():
        rows: Any = maps.where(what=what).frame
        panels = {f"{rows['of'].iloc[0]} {part}": rows[rows["part"] == part] for part in ("before", "after")}
        figures[what] = _draw_grids(panels, names, keys, title, "predicted letter")
    return figures


FIG5 = Experiment(
    "icatune/fig5",
    "Attention of the best aligner and the best lookup head, before and after tuning",
    "Agarwal and Sarawagi (2025), Fig. 5",
    tuned_study(
        "icatune/fig5",
        lambda config, rows: _maps(config.arms[0], rows["attention"]),
        smoke=Tunings((SMOKE_ICA,), n=4),
        cpu=Tunings((ICA,)),
        paper=Tunings((replace(PAPER_ICA, task={"x_len": 3, "phrase_len": 2, "n_examples": 15}),)),
        smollm2=Tunings((replace(SMOLLM2_ICA, seeds=(1, 2, 3, 4, 5)),), n=32),  # three seeds left both claims undecided
        measured=[_attention],
    ),
    _draw_maps,
    _MAP_CLAIMS,
)


def _best_layer(config: Layers, rows: Rows) -> pd.DataFrame:
    frame = rows["attention"]
    return _maps(config.arm, frame[frame["arm"] == best_arm(rows["ends"])])


FIG11 = Experiment(
    "icatune/fig11",
    "The same with the best single layer tuned",
    "Agarwal and Sarawagi (2025), Fig. 11",
    tuned_study("icatune/fig11", _best_layer, [at_ends, _attention], Layers.arms, **FIG10.scales),
    _draw_maps,
    _MAP_CLAIMS,
)


# Figure 8


@dataclass(frozen=True)
class Circuit:
    """The circuit of Fig. 8 on its own prompt (k = 2, m = 2, c = 1), and measured on longer ones."""

    n: int = 100
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 5, "phrase_len": 2, "n_examples": 8})
    seeds: tuple[int, ...] = FRESH_SEEDS
    """Each plants the heads elsewhere."""


STAGES = {
    "boundary": "1: boundary",
    "previous": "1: previous",
    "align_key": "2: align_key",
    "align_query": "2: align_query",
    "lookup": "3: lookup",
}
"""The heads of the circuit by the layer of the figure."""

SCORED = ("previous", "align_key", "align_query", "lookup")
"""Those that have a score."""

ALIGNMENTS = ("monotonic", "permutation")


def circuit_maps() -> pd.DataFrame:
    """Returns the attention of each head of the circuit on the prompt of Fig. 8; the function of a job."""
    task = Seq2SeqTask(x_len=2, phrase_len=1, n_examples=2)
    model = planted_circuit(task, seed=0)
    prompt = task.sample(1, model.tokenizer, seed=0)
    tokens = [readable(prompt.token_strings[int(token)]) for token in prompt.tokens[0]]
    maps = [
        _mean_map(_pattern(model, prompt, head)).assign(metric=STAGES[kind])
        for head, kind in model.kinds.items()
        if kind in STAGES
    ]
    frame = pd.concat(maps, ignore_index=True)
    return frame.assign(part="map", kind="all", token=[tokens[key] for key in frame["key"]])


def circuit_scores(*, task: Mapping[str, Any], strength: float, n: int, seed: int) -> pd.DataFrame:
    """Measures scores of a circuit's heads, and accuracy with nothing and with its aligners ablated: a job's function.

    `strength` is β, how sharply the circuit attends; `seed` that of task, circuit and prompts.
    """
    seq2seq = Seq2SeqTask(**task, task_seed=seed)
    model = planted_circuit(seq2seq, seed=seed, strength=strength)
    prompts = seq2seq.sample(n, model.tokenizer, seed=seed)
    scores = score_heads(model, prompts, SCORED).heads()
    frames = []
    for kind in SCORED:
        head = next(head for head, built in model.kinds.items() if built == kind)
        frames.append(_of_head(scores, kind, head).assign(kind="all"))
    aligners = [head for head, kind in model.kinds.items() if kind in ("align_query", "align_key")]
    ablated = Ablate(aligners, how="mean", baseline=ablation_baseline(model, prompts, "mean"))
    for name, predictors, edits in (
        ("accuracy", ["model", "history", "oracle"], []),
        ("aligners ablated", ["model"], [ablated]),
    ):
        right: Any = evaluate(model, prompts, edits=edits).where(metric="accuracy", offset=None).frame
        right = right[right["predictor"].isin(predictors)]
        frames.append(right.assign(metric=right["predictor"].replace("model", name)))
    return pd.concat(frames, ignore_index=True).loc[:, ["metric", "kind", *VALUES]]


def _circuit_jobs(config: Circuit, _: Inputs) -> list[Measurement]:
    scores = [
        Measurement(
            circuit_scores,
            {"task": {**config.task, "alignment": alignment}, "strength": strength, "n": config.n},
            seed,
            {"part": f"{alignment}, strength {strength:g}"},
        )
        for alignment in ALIGNMENTS
        for strength in (1.0, 0.0)
        for seed in config.seeds
    ]
    return [Measurement(circuit_maps, seed=None), *scores]


def _summarize_circuit(_: Circuit, rows: Rows) -> pd.DataFrame:
    return as_rows(rows.values(), ["part", "seed", "metric", "kind", "query", "key", "token"])


def _of(metric: str, alignment: str = "monotonic", strength: int = 1, kind: str = "all") -> Statistic:
    return rows(part=f"{alignment}, strength {strength}", metric=metric, kind=kind)


def _short(alignment: str, strength: int = 1) -> Statistic:
    return _of("oracle", alignment, strength) - _of("accuracy", alignment, strength)


def _above_history(metric: str) -> Statistic:
    return _of(metric, kind="first") - _of("history", kind="first")


def _draw_circuit(table: Table) -> Mapping[str, go.Figure]:
    maps: Any = table.where(part="map").frame
    tokens = maps.drop_duplicates("key").sort_values("key")["token"]
    names = [f"{at} {token}" for at, token in enumerate(tokens)]
    figures = {}
    for number, stage in enumerate(("first", "second", "third"), start=1):
        panels = {name: maps[maps["metric"] == name] for name in STAGES.values() if name.startswith(str(number))}
        figures[f"{stage} layer of Fig. 8"] = _draw_grids(panels, names, names, "to token", "from token")
    return figures


FIG8 = Experiment(
    "icatune/fig8",
    "The three-layer circuit at work, built by hand",
    "Agarwal and Sarawagi (2025), Fig. 8",
    Study(
        "icatune/fig8",
        {
            "smoke": Circuit(n=4, task={"x_len": 3, "phrase_len": 1, "n_examples": 3}, seeds=(0,)),
            "cpu": Circuit(),
            "paper": Circuit(),
        },
        _circuit_jobs,
        _summarize_circuit,
    ),
    _draw_circuit,
    [
        *(
            Claim(f"{STAGES[role]} heads look where the figure says (score)").at_least(
                0.95, _of(role), _of(role, strength=0), "strength 0"
            )
            for role in SCORED
        ),
        *(
            Claim(
                f"The circuit reaches exact lookup on {alignment} alignments (oracle minus circuit, all tokens)"
            ).at_most(0.01, _short(alignment), _short(alignment, strength=0), "strength 0")
            for alignment in ALIGNMENTS
        ),
        Claim("Without its aligners the first token falls to the history ceiling (difference)").at_most(
            0.0, _above_history("aligners ablated"), _above_history("accuracy"), "nothing ablated"
        ),
    ],
)
