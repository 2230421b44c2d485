"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): attention in induction, by hand, and after tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from align_circuits.models.protocol import model_provenance
from align_circuits.papers.claims import Check, Experiment, difference_of, mean_of
from align_circuits.papers.icatune.fig_4_tuning import ICA, PAPER_ICA, SMOKE_ICA
from align_circuits.papers.icatune.figs_6_7_10_variants import FIG10, Layers, tuned_layers
from align_circuits.papers.icatune.tuned_models import Arm, loaded, measure_tuned
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.token_html import readable
from align_circuits.report import plots
from align_circuits.run.evaluation import ALL_OFFSETS, evaluate
from align_circuits.run.forward_pass import forward
from align_circuits.tables.tables import VALUES, Provenance, Table
from align_circuits.tasks.seq2seq import Seq2SeqTask

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
    asked = torch.arange(config.n) % config.k
    last = pairs[torch.arange(config.n), asked if known else torch.full_like(asked, config.k)]
    start = torch.full((config.n, 1), tokenizer.bos_token_id)
    ids = torch.cat([start, pairs[:, : config.k].flatten(1), last], 1)
    return Prompts.from_tokens(ids, tokenizer=tokenizer)


def _run_pairs(config: Pairs, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - one pass
    model = loaded(models[0])
    frames = []
    prompts = _pairs(config, model.tokenizer, known=True)
    for known in (True, False):
        asked = prompts if known else _pairs(config, model.tokenizer, known=False)
        right = evaluate(model, asked).where(metric="accuracy", offset=2 * config.k + 1)
        frames.append(right.frame.assign(part="known" if known else "unknown", of="model"))
    half = config.n // 2
    chosen, scores = (score_heads(model, some, ["induction", "previous"]) for some in (prompts[:half], prompts[half:]))
    heads: dict[str, Head] = {}
    for metric in ("induction", "previous"):
        best = chosen.top(metric, 1).frame.iloc[0]
        layer, head = heads[metric] = int(best["layer"]), int(best["head"])
        found = scores.where(metric=metric, layer=layer, head=head).frame
        frames.append(found.assign(part="known", of=describe([heads[metric]])))
    layer, head = heads["induction"]
    found = scores.where(metric="previous", layer=layer, head=head).frame
    frames.append(found.assign(part="induction head", of=describe([heads["induction"]])))
    layers: Any = scores.where(metric="induction").heads().frame
    first = layers[layers["layer"] == 0]
    frames.append(first.nlargest(1, "value").assign(part="first layer", of="best head"))
    for place in range(config.k):
        mine = prompts[torch.arange(config.n) % config.k == place]
        for name, head in heads.items():
            frames.append(_map(model, mine, head).assign(part=f"x = x{place + 1}", metric=name, of=describe([head])))
    frame: Any = pd.concat(frames, ignore_index=True)
    frame[["query", "key"]] = frame[["query", "key"]].fillna(-1).astype(int)
    columns = ["part", "metric", "of", "query", "key", *VALUES]
    return Table(frame[columns], Provenance("measure", {"prompts": config.n}, model=model_provenance(model)))


def _map(model: Any, prompts: Prompts, head: Head) -> pd.DataFrame:
    """The mean over prompts of a head's attention from every token to every token."""
    n, length = prompts.mask.shape
    rows = torch.zeros(n * length, length)

    def keep(at: Int[Tensor, " row"], layer: int, pattern: Float[Tensor, "row head pos"]) -> None:
        if layer == head[0]:
            rows[at] = pattern[:, head[1]].float().cpu()

    prompt, query = torch.arange(n).repeat_interleave(length), torch.arange(length).repeat(n)
    forward(model, prompts, prompt=prompt, query=query, on_pattern=keep)
    found = rows.view(n, -1).T.double().numpy()
    keys = pd.MultiIndex.from_product([range(length)] * 2, names=["query", "key"]).to_frame(index=False)
    return Table.from_prompts(keys, found, np.ones_like(found), Provenance("attention")).frame


def _check_pairs(table: Table) -> list[Check]:
    return [
        Check(
            claim="A labelled symbol gets its label",
            measured=mean_of(table.where(part="known", metric="accuracy")),
            relation=">=",
            threshold=0.9,
            control=mean_of(table.where(part="unknown", metric="accuracy")),
            control_is="a symbol without a label",
        ),
        Check(
            claim="An induction head looks at the label of the symbol (share of its attention)",
            measured=mean_of(table.where(part="known", metric="induction")),
            relation=">=",
            threshold=0.5,
            control=mean_of(table.where(part="first layer", metric="induction")),
            control_is="best head of the first layer, which cannot know what stood before a label",
        ),
        Check(
            claim="A head looks at the token before (share of its attention)",
            measured=mean_of(table.where(part="known", metric="previous")),
            relation=">=",
            threshold=0.5,
            control=mean_of(table.where(part="induction head", metric="previous")),
            control_is="the induction head",
        ),
    ]


def _draw_pairs(table: Table) -> Mapping[str, go.Figure]:
    maps: Any = table.frame[table.frame["part"].str.startswith("x = ")]
    size = int(maps["key"].to_numpy().max()) + 1
    names = ["start", *(f"{kind}{at + 1}" for at in range((size - 3) // 2) for kind in "xy"), "x", "y"]
    panels = {
        f"{metric}, {part}": _grid(some, names, names)
        for (metric, part), some in maps.groupby(["metric", "part"], sort=False)
    }
    return {"fig1": plots.accuracy_grids(panels, x="to", y="from", value="attention")}


def _grid(rows: Any, names: Sequence[str], keys: Sequence[str]) -> pd.DataFrame:
    """Attention with queries down and keys across, by name."""
    grid = rows.pivot(index="query", columns="key", values="value").iloc[::-1]
    return grid.set_axis([names[at] for at in grid.index]).set_axis([keys[at] for at in grid.columns], axis=1)


FIG1 = Experiment(
    name="icatune/fig1",
    title="In-context learning of labels by induction heads",
    source="Agarwal and Sarawagi (2025), Fig. 1",
    scales={"smoke": Pairs(n=6), "cpu": Pairs(), "paper": Pairs()},
    run=_run_pairs,
    draw=_draw_pairs,
    check=_check_pairs,
)


# Figures 5 and 11


@dataclass(frozen=True)
class Heatmaps:
    """Attention before and after a tuning."""

    arm: Arm = ICA
    n: int = 64
    """Prompts that attention is averaged over."""


def _run_maps(config: Heatmaps, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    return _maps(config.arm, config.n, models[0], jobs=jobs, folder=folder)


def _maps(arm: Arm, n: int, model: str, **common: Any) -> Table:
    """The scores of all seeds, and the maps of the first."""
    measured, about = measure_tuned("attention", model, [arm], prompts=n, **common)
    frame: Any = measured[(measured["metric"] == "score") | (measured["seed"] == arm.seeds[0])]
    columns = ["arm", "part", "seed", "what", "of", "metric", "query", "key", *VALUES]
    return Table(frame[columns].reset_index(drop=True), Provenance("measure", {"prompts": n}, model=about))


def _check_maps(table: Table) -> list[Check]:
    def score(part: str, what: str) -> Table:
        return table.where(part=part, what=what, metric="score")

    claims = {
        "align": ("The aligner attends from first letters to their symbols", 0.5),
        "lookup": ("The lookup head attends to translations of the same symbol", 0.5),
    }
    return [
        Check(
            claim=f"{claim} (share of its attention, mean over seeds)",
            measured=mean_of(score("after", what)),
            relation=">=",
            threshold=threshold,
            control=mean_of(score("before", what)),
            control_is="the same head before",
        )
        for what, (claim, threshold) in claims.items()
    ]


def _draw_maps(table: Table) -> Mapping[str, go.Figure]:
    maps = table.where(metric="attention")
    size, m = (int(maps.where(what="align").frame[name].to_numpy().max()) + 1 for name in ("query", "key"))
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
    name="icatune/fig5",
    title="Attention of the best aligner and the best lookup head, before and after tuning",
    source="Agarwal and Sarawagi (2025), Fig. 5",
    scales={
        "smoke": Heatmaps(SMOKE_ICA, n=4),
        "cpu": Heatmaps(),
        "paper": Heatmaps(replace(PAPER_ICA, task={"x_len": 3, "phrase_len": 2, "n_examples": 15})),
    },
    run=_run_maps,
    draw=_draw_maps,
    check=_check_maps,
)


def _run_best_layer(config: Layers, *, models: Sequence[str], jobs: int, folder: Path) -> Table:
    _, best = tuned_layers(config, models, jobs=jobs, folder=folder)
    return _maps(best, config.n, models[0], jobs=jobs, folder=folder)


FIG11 = Experiment(
    name="icatune/fig11",
    title="The same with the best single layer tuned",
    source="Agarwal and Sarawagi (2025), Fig. 11",
    scales=FIG10.scales,
    run=_run_best_layer,
    draw=_draw_maps,
    check=_check_maps,
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


def _run_circuit(config: Circuit, *, models: Sequence[str], jobs: int, folder: Path) -> Table:  # noqa: ARG001 - its own
    frames = []
    small = Seq2SeqTask(x_len=2, phrase_len=1, n_examples=2)
    model = planted_circuit(small, seed=0)
    prompt = small.sample(1, model.tokenizer, seed=0)
    tokens = [readable(prompt.token_strings[int(token)]) for token in prompt.tokens[0]]
    for head, kind in model.kinds.items():
        if kind in STAGES:
            drawn = _map(model, prompt, head).assign(part="map", metric=STAGES[kind], seed=-1, kind="all")
            frames.append(drawn.assign(token=[tokens[key] for key in drawn["key"]]))
    for alignment in ("monotonic", "permutation"):
        for strength in (1.0, 0.0):
            for seed in config.seeds:
                about = {"part": f"{alignment}, strength {strength:g}", "seed": seed}
                frames += [rows.assign(**about) for rows in _measured(config, alignment, strength, seed)]
    frame: Any = pd.concat(frames, ignore_index=True)
    frame[["query", "key"]] = frame[["query", "key"]].fillna(-1).astype(int)
    frame["token"] = frame["token"].fillna("-")
    columns = ["part", "seed", "metric", "kind", "query", "key", "token", *VALUES]
    return Table(frame[columns], Provenance("measure", {"prompts": config.n, "task": dict(config.task)}))


def _measured(config: Circuit, alignment: Any, strength: float, seed: int) -> list[pd.DataFrame]:
    """The scores of the circuit's heads, and accuracy with nothing and with the aligners ablated."""
    task = Seq2SeqTask(**config.task, alignment=alignment, task_seed=seed)
    model = planted_circuit(task, seed=seed, strength=strength)
    prompts = task.sample(config.n, model.tokenizer, seed=seed)
    found = []
    scores = score_heads(model, prompts, ["previous", "align_key", "align_query", "lookup"]).heads()
    for kind in ("previous", "align_key", "align_query", "lookup"):
        layer, head = next(head for head, built in model.kinds.items() if built == kind)
        found.append(scores.where(metric=kind, layer=layer, head=head).frame.assign(kind="all"))
    aligners = [head for head, kind in model.kinds.items() if kind in ("align_query", "align_key")]
    ablated = Ablate(aligners, how="mean", reference=ablation_baseline(model, prompts, "mean"))
    for name, edits in (("accuracy", []), ("aligners ablated", [ablated])):
        right: Any = evaluate(model, prompts, edits=edits).where(metric="accuracy", offset=ALL_OFFSETS).frame
        kept = right[right["predictor"].isin(["model", "history", "oracle"] if not edits else ["model"])]
        found.append(kept.assign(metric=kept["predictor"].where(kept["predictor"] != "model", name)))
    return found


def _check_circuit(table: Table) -> list[Check]:
    def of(metric: str, alignment: str, strength: int, kind: str = "all") -> Table:
        return table.where(part=f"{alignment}, strength {strength}", metric=metric, kind=kind)

    def short(alignment: str, strength: int) -> Any:
        return difference_of(of("oracle", alignment, strength), of("accuracy", alignment, strength))

    checks = [
        Check(
            claim=f"{STAGES[role]} heads look where the figure says (score)",
            measured=mean_of(of(role, "monotonic", 1)),
            relation=">=",
            threshold=0.95,
            control=mean_of(of(role, "monotonic", 0)),
            control_is="strength 0",
        )
        for role in ("previous", "align_key", "align_query", "lookup")
    ]
    ceiling = of("history", "monotonic", 1, "first")
    return [
        *checks,
        *(
            Check(
                claim=f"The circuit reaches exact lookup on {alignment} alignments (oracle minus circuit, all tokens)",
                measured=short(alignment, 1),
                relation="<=",
                threshold=0.01,
                control=short(alignment, 0),
                control_is="strength 0",
            )
            for alignment in ("monotonic", "permutation")
        ),
        Check(
            claim="Without its aligners the first token falls to the history ceiling (difference)",
            measured=difference_of(of("aligners ablated", "monotonic", 1, "first"), ceiling),
            relation="<=",
            threshold=0.0,
            control=difference_of(of("accuracy", "monotonic", 1, "first"), ceiling),
            control_is="nothing ablated",
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
    name="icatune/fig8",
    title="The three-layer circuit at work, built by hand",
    source="Agarwal and Sarawagi (2025), Fig. 8",
    scales={
        "smoke": Circuit(n=4, task={"x_len": 3, "phrase_len": 1, "n_examples": 3}, seeds=(0,)),
        "cpu": Circuit(),
        "paper": Circuit(),
    },
    run=_run_circuit,
    draw=_draw_circuit,
    check=_check_circuit,
    makes_models=True,
)
