"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): attention in induction, by hand, and after tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate
from align_circuits.hooks.heads import Head, describe
from align_circuits.models.planted.model import planted_circuit
from align_circuits.papers.claims import Check, Claim, Measured, difference_of, mean_of
from align_circuits.papers.icatune.fig_4_tuning import ICA, PAPER_ICA, SMOKE_ICA
from align_circuits.papers.icatune.figs_6_7_10_variants import FIG10, Layers, best_arm
from align_circuits.papers.icatune.tuned_models import (
    FRESH,
    Arm,
    Tunings,
    ends,
    loaded,
    of_tuned,
    task_of,
    tuned,
    tuned_study,
)
from align_circuits.papers.study import Experiment, Inputs, Measurement, Rows, Study
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.prompts.token_html import readable
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.run.forward_pass import forward
from align_circuits.tables.tables import VALUES, Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask


def _patterns(
    model: Any, prompts: Prompts, head: Head, prompt: Int[Tensor, " row"], query: Int[Tensor, " row"]
) -> Float[Tensor, "row pos"]:
    """The attention of one head from each query."""
    patterns = torch.zeros(len(prompt), prompts.mask.shape[1])

    def keep(at: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        if layer == head[0]:
            patterns[at] = pattern[:, head[1]].float().cpu()

    forward(model, prompts, prompt=prompt, query=query, on_pattern=keep)
    return patterns


def _mean_map(weights: Float[Tensor, "prompt query key"]) -> pd.DataFrame:
    """The mean over prompts by query and key."""
    values = weights.flatten(1).T.double().numpy()
    keys = pd.MultiIndex.from_product([range(size) for size in weights.shape[1:]], names=["query", "key"])
    return Table.from_prompts(keys.to_frame(index=False), values, np.ones_like(values), Provenance("attention")).frame


def _attention_map(model: Any, prompts: Prompts, head: Head) -> pd.DataFrame:
    """The mean over prompts of a head's attention from every token to every token."""
    n, length = prompts.mask.shape
    prompt, query = torch.arange(n).repeat_interleave(length), torch.arange(length).repeat(n)
    return _mean_map(_patterns(model, prompts, head, prompt, query).view(n, length, length))


def _map_rows(frames: Sequence[pd.DataFrame], keys: Sequence[str]) -> pd.DataFrame:
    """Frames as one, with `keys` and `VALUES`; rows that are no map have no query and no key."""
    return pd.concat([part.reindex(columns=[*keys, *VALUES]) for part in frames])


def _grid(rows: Any, names: Sequence[str], keys: Sequence[str]) -> pd.DataFrame:
    """Attention with queries down and keys across, by name."""
    grid = rows.pivot(index="query", columns="key", values="value").iloc[::-1]
    return grid.set_axis([names[at] for at in grid.index]).set_axis([keys[at] for at in grid.columns], axis=1)


# Figure 1


@dataclass(frozen=True)
class Pairs:
    """Prompts of labelled symbols, `x1 y1 ... xk yk x`, where x is one of the k; half of them to choose heads by."""

    k: int = 2
    n: int = 200


def _pairs(config: Pairs, tokenizer: Any, *, known: bool) -> Prompts:
    """Prompts in which the last symbol was labelled, each symbol equally often; or was not."""
    task = Seq2SeqTask(x_len=config.k + 1, phrase_len=1, n_examples=0)
    drawn = task.sample(config.n, tokenizer, seed=0, references=False)
    symbols = torch.tensor(drawn.task["symbols"])[drawn.latent["symbols"]]
    labels = drawn.answer_tokens[drawn.latent["phrases"][:, 0, :, 0]]
    pairs = torch.stack([symbols, labels], 2)
    queried = torch.arange(config.n) % config.k
    last = pairs[torch.arange(config.n), queried if known else torch.full_like(queried, config.k)]
    start = torch.full((config.n, 1), tokenizer.bos_token_id)
    ids = torch.cat([start, pairs[:, : config.k].flatten(1), last], 1)
    return Prompts.from_tokens(ids, tokenizer=tokenizer)


def pairs(*, model: str, k: int, n: int, **_: str) -> pd.DataFrame:
    """Measures accuracy, the best heads, and their attention; the function of a job.

    Args:
        model: What `load` takes.
        k: Labelled symbols.
        n: Prompts; the heads are chosen by the first half of them and measured on the others.
        **_: The hash of the model's weights.
    """
    network, config, frames = loaded(model), Pairs(k, n), []
    prompts, unlabelled = (_pairs(config, network.tokenizer, known=known) for known in (True, False))
    for part, drawn in (("known", prompts), ("unknown", unlabelled)):
        right = evaluate(network, drawn).where(metric="accuracy", offset=2 * k + 1)
        frames.append(right.frame.assign(part=part, of="model"))
    halves = prompts[: n // 2], prompts[n // 2 :]
    chosen, scores = (score_heads(network, half, ["induction", "previous"]) for half in halves)
    best = {metric: chosen.top(metric, 1).frame.iloc[0] for metric in ("induction", "previous")}
    heads: dict[str, Head] = {metric: (int(row["layer"]), int(row["head"])) for metric, row in best.items()}

    def score(part: str, metric: str, head: Head) -> pd.DataFrame:
        return scores.where(metric=metric, layer=head[0], head=head[1]).frame.assign(part=part, of=describe([head]))

    frames += [score("known", metric, head) for metric, head in heads.items()]
    frames.append(score("induction head", "previous", heads["induction"]))
    first = scores.where(metric="induction", layer=0).heads().frame
    frames.append(first.nlargest(1, "value").assign(part="first layer", of="best head"))
    for place in range(k):
        those = prompts[torch.arange(n) % k == place]
        for name, head in heads.items():
            maps = _attention_map(network, those, head)
            frames.append(maps.assign(part=f"x = x{place + 1}", metric=name, of=describe([head])))
    return _map_rows(frames, ["part", "metric", "of", "query", "key"])


def _check_pairs(table: Table) -> list[Check]:
    def mean(part: str, metric: str) -> Measured:
        return mean_of(table.where(part=part, metric=metric))

    return [
        Claim("A labelled symbol gets its label").at_least(
            0.9, mean("known", "accuracy"), mean("unknown", "accuracy"), "a symbol without a label"
        ),
        Claim("An induction head looks at the label of the symbol (share of its attention)").at_least(
            0.5,
            mean("known", "induction"),
            mean("first layer", "induction"),
            "best head of the first layer, which cannot know what stood before a label",
        ),
        Claim("A head looks at the token before (share of its attention)").at_least(
            0.5, mean("known", "previous"), mean("induction head", "previous"), "the induction head"
        ),
    ]


def _draw_pairs(table: Table) -> Mapping[str, go.Figure]:
    maps: Any = table.frame[table.frame["part"].str.startswith("x = ")]
    size = int(maps["key"].max()) + 1
    names = ["start", *(f"{kind}{at + 1}" for at in range((size - 3) // 2) for kind in "xy"), "x", "y"]
    panels = {
        f"{metric}, {part}": _grid(rows, names, names)
        for (metric, part), rows in maps.groupby(["metric", "part"], sort=False)
    }
    return {"fig1": plots.accuracy_grids(panels, x="to", y="from", value="attention")}


FIG1 = Experiment(
    "icatune/fig1",
    "In-context learning of labels by induction heads",
    "Agarwal and Sarawagi (2025), Fig. 1",
    tuned_study(
        "icatune/fig1",
        smoke=Pairs(n=6),
        cpu=Pairs(),
        paper=Pairs(),
        train=lambda *_: [],
        jobs=lambda config, inputs: [Measurement(pairs, {**inputs.model, **asdict(config)}, None)],
    ),
    _draw_pairs,
    _check_pairs,
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
    after = tuned(**run).model
    drawn = task_of(run["task"], run["seed"]).sample(prompts, after.tokenizer, FRESH + run["seed"])
    metrics = {"align": "align_query_attention", "lookup": "lookup_attention"}
    best = score_heads(after, drawn, list(metrics.values()))
    frames = []
    for part, model in (("before", loaded(run["model"])), ("after", after)):
        scores = score_heads(model, drawn, list(metrics.values()))
        for what, metric in metrics.items():
            layer, head = map(int, best.top(metric, 1).frame[["layer", "head"]].iloc[0])
            about = {"part": part, "what": what, "of": describe([(layer, head)])}
            score = scores.where(metric=metric, layer=layer, head=head).frame
            frames.append(score.assign(**about, metric="score"))
            frames.append(_mean_attention(model, drawn, (layer, head), what).assign(**about, metric="attention"))
    return _map_rows(frames, ["part", "what", "of", "metric", "query", "key"])


def _mean_attention(model: Any, prompts: Prompts, head: Head, what: str) -> pd.DataFrame:
    """The mean over prompts of a head's attention, by query and key as `attention` lists them."""
    n, places = len(prompts), _keys(prompts, what)
    queries = prompts.column("query_pos").view(n, -1)[0]
    size = len(queries)
    patterns = _patterns(model, prompts, head, torch.arange(n).repeat_interleave(size), queries.repeat(n))
    wide = places.flatten(1)[:, None].expand(-1, size, -1)
    return _mean_map(patterns.view(n, size, -1).gather(2, wide).view(n, size, *places.shape[1:]).sum(3))


def _keys(prompts: Prompts, what: str) -> Int[Tensor, "prompt key place"]:
    """Where each symbol of the test input stands, or each letter of its translation, in every example."""
    role, example, last = prompts.roles[0], prompts.example[0], int(prompts.example.max())
    if what == "align":
        return ((role == Role.INPUT) & (example == last)).nonzero().expand(len(prompts), -1, 1)
    letters = ((role == Role.OUTPUT) & (example < last)).nonzero()[:, 0]
    symbol = prompts.latent["order"][:, :, prompts.task["aligned"]]
    same = (symbol[:, -1, None, :, None] == symbol[:, :-1, None]).int().argmax(3)  # [prompt example symbol]
    places = letters.view(last, symbol.shape[2], -1)[torch.arange(last)[:, None], same]
    return places.flatten(2).transpose(1, 2)


def _maps(arm: Arm, frame: pd.DataFrame) -> pd.DataFrame:
    """The scores of all seeds, and the maps of the first."""
    shown = frame[(frame["metric"] == "score") | (frame["seed"] == arm.seeds[0])]
    return shown.loc[:, ["arm", "part", "seed", "what", "of", "metric", "query", "key", *VALUES]]


def _check_maps(table: Table) -> list[Check]:
    def score(part: str, what: str) -> Table:
        return table.where(part=part, what=what, metric="score")

    claims = {
        "align": "The aligner attends from first letters to their symbols",
        "lookup": "The lookup head attends to translations of the same symbol",
    }
    return [
        Claim(f"{claim} (share of its attention, mean over seeds)").at_least(
            0.5, mean_of(score("after", what)), mean_of(score("before", what)), "the same head before"
        )
        for what, claim in claims.items()
    ]


def _draw_maps(table: Table) -> Mapping[str, go.Figure]:
    maps = table.where(metric="attention")
    aligner = maps.where(what="align").frame
    size, m = (int(np.nanmax(aligner[name].to_numpy(dtype=float))) + 1 for name in ("query", "key"))
    c, figures = size // m, {}
    for what in ("align", "lookup"):
        rows: Any = maps.where(what=what).frame
        names = [f"y{at // c + 1}{'abcdefgh'[at % c]}" for at in range(size)]
        wide = [f"x{at + 1}" for at in range(m)] if what == "align" else names
        panels = {
            f"{rows['of'].iloc[0]} {part}": _grid(rows[rows["part"] == part], names, wide)
            for part in ("before", "after")
        }
        across = "symbol of the test input" if what == "align" else "all examples, by the symbols of the test example"
        figures[what] = plots.accuracy_grids(panels, x=across, y="predicted letter", value="attention")
    return figures


FIG5 = Experiment(
    "icatune/fig5",
    "Attention of the best aligner and the best lookup head, before and after tuning",
    "Agarwal and Sarawagi (2025), Fig. 5",
    tuned_study(
        "icatune/fig5",
        smoke=Tunings((SMOKE_ICA,), n=4),
        cpu=Tunings((ICA,)),
        paper=Tunings((replace(PAPER_ICA, task={"x_len": 3, "phrase_len": 2, "n_examples": 15}),)),
        jobs=lambda config, inputs: of_tuned(attention, config.arms, inputs, prompts=config.n),
        summarize=lambda config, rows: _maps(config.arms[0], rows["attention"]),
    ),
    _draw_maps,
    _check_maps,
)


def _layer_jobs(config: Layers, inputs: Inputs) -> list[Measurement]:
    arms = config.arms(inputs)
    return [each for function in (ends, attention) for each in of_tuned(function, arms, inputs, prompts=config.n)]


def _best_layer(config: Layers, rows: Rows) -> pd.DataFrame:
    best, frame = best_arm(rows["ends"]), rows["attention"]
    return _maps(config.arm, frame[frame["arm"] == best])


FIG11 = Experiment(
    "icatune/fig11",
    "The same with the best single layer tuned",
    "Agarwal and Sarawagi (2025), Fig. 11",
    replace(FIG10.study, name="icatune/fig11", jobs=_layer_jobs, summarize=_best_layer),
    _draw_maps,
    _check_maps,
)


# Figure 8


@dataclass(frozen=True)
class Circuit:
    """The circuit of Fig. 8 on its own prompt (k = 2, m = 2, c = 1), and measured on longer ones."""

    n: int = 100
    task: Mapping[str, Any] = field(default_factory=lambda: {"x_len": 5, "phrase_len": 2, "n_examples": 8})
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Each plants the heads elsewhere."""


STAGES = {
    "boundary": "1: boundary",
    "previous": "1: previous",
    "align_key": "2: align_key",
    "align_query": "2: align_query",
    "lookup": "3: lookup",
}
"""The heads of the circuit by the layer of the figure."""


def circuit_maps() -> pd.DataFrame:
    """Returns the attention of each head of the circuit on the prompt of Fig. 8; the function of a job."""
    task = Seq2SeqTask(x_len=2, phrase_len=1, n_examples=2)
    model = planted_circuit(task, seed=0)
    prompt = task.sample(1, model.tokenizer, seed=0)
    tokens = [readable(prompt.token_strings[int(token)]) for token in prompt.tokens[0]]
    maps = [
        _attention_map(model, prompt, head).assign(metric=STAGES[kind])
        for head, kind in model.kinds.items()
        if kind in STAGES
    ]
    frame = pd.concat(maps, ignore_index=True)
    return frame.assign(part="map", kind="all", token=[tokens[key] for key in frame["key"]])


def circuit_scores(*, task: Mapping[str, Any], strength: float, n: int, seed: int) -> pd.DataFrame:
    """Measures scores of a circuit's heads, and accuracy with nothing and with its aligners ablated: a job's function.

    Args:
        task: The task's arguments.
        strength: β, how sharply the circuit attends.
        n: Prompts.
        seed: Of task, circuit and prompts.
    """
    seq2seq = Seq2SeqTask(**task, task_seed=seed)
    model = planted_circuit(seq2seq, seed=seed, strength=strength)
    prompts = seq2seq.sample(n, model.tokenizer, seed=seed)
    frames = []
    scores = score_heads(model, prompts, ["previous", "align_key", "align_query", "lookup"]).heads()
    for kind in ("previous", "align_key", "align_query", "lookup"):
        layer, head = next(head for head, built in model.kinds.items() if built == kind)
        frames.append(scores.where(metric=kind, layer=layer, head=head).frame.assign(kind="all"))
    aligners = [head for head, kind in model.kinds.items() if kind in ("align_query", "align_key")]
    ablated = Ablate(aligners, how="mean", reference=ablation_baseline(model, prompts, "mean"))
    for name, edits in (("accuracy", []), ("aligners ablated", [ablated])):
        right: Any = evaluate(model, prompts, edits=edits).where(metric="accuracy", offset=None).frame
        kept = right[right["predictor"].isin(["model", "history", "oracle"] if not edits else ["model"])]
        frames.append(kept.assign(metric=kept["predictor"].where(kept["predictor"] != "model", name)))
    return pd.concat(frames, ignore_index=True).loc[:, ["metric", "kind", *VALUES]]


def _circuit_jobs(config: Circuit, _: Inputs) -> list[Measurement]:
    return [
        Measurement(circuit_maps, seed=None),
        *(
            Measurement(
                circuit_scores,
                {"task": {**config.task, "alignment": alignment}, "strength": strength, "n": config.n},
                seed,
                {"part": f"{alignment}, strength {strength:g}"},
            )
            for alignment in ("monotonic", "permutation")
            for strength in (1.0, 0.0)
            for seed in config.seeds
        ),
    ]


def _summarize_circuit(_: Circuit, rows: Rows) -> pd.DataFrame:
    return _map_rows(list(rows.values()), ["part", "seed", "metric", "kind", "query", "key", "token"])


def _check_circuit(table: Table) -> list[Check]:
    def of(metric: str, alignment: str, strength: int, kind: str = "all") -> Table:
        return table.where(part=f"{alignment}, strength {strength}", metric=metric, kind=kind)

    def short(alignment: str, strength: int) -> Any:
        return difference_of(of("oracle", alignment, strength), of("accuracy", alignment, strength))

    ceiling = of("history", "monotonic", 1, "first")
    return [
        *(
            Claim(f"{STAGES[role]} heads look where the figure says (score)").at_least(
                0.95, mean_of(of(role, "monotonic", 1)), mean_of(of(role, "monotonic", 0)), "strength 0"
            )
            for role in ("previous", "align_key", "align_query", "lookup")
        ),
        *(
            Claim(
                f"The circuit reaches exact lookup on {alignment} alignments (oracle minus circuit, all tokens)"
            ).at_most(0.01, short(alignment, 1), short(alignment, 0), "strength 0")
            for alignment in ("monotonic", "permutation")
        ),
        Claim("Without its aligners the first token falls to the history ceiling (difference)").at_most(
            0.0,
            difference_of(of("aligners ablated", "monotonic", 1, "first"), ceiling),
            difference_of(of("accuracy", "monotonic", 1, "first"), ceiling),
            "nothing ablated",
        ),
    ]


def _draw_circuit(table: Table) -> Mapping[str, go.Figure]:
    maps = table.where(part="map")
    tokens = maps.frame.drop_duplicates("key").sort_values("key")["token"]
    names = [f"{at} {token}" for at, token in enumerate(tokens)]
    heads = {str(name): maps.where(metric=name).frame for name in STAGES.values()}
    return {
        f"{stage} layer of Fig. 8": plots.accuracy_grids(
            {name: _grid(rows, names, names) for name, rows in heads.items() if name.startswith(str(number))},
            x="to token",
            y="from token",
            value="attention",
        )
        for number, stage in enumerate(("first", "second", "third"), start=1)
    }


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
    _check_circuit,
)
