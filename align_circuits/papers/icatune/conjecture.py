"""Can a transformer learn to find alignments in context? Small models, and a fresh alignment in every prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.alignment_oracles import align_by_em
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, rows_along
from align_circuits.papers.statistics import HIGH, mean_rows, rows
from align_circuits.tasks.rng import Rng
from align_circuits.training.loop import TrainConfig, train
from align_circuits.training.toy_llama import Recipe, untrained

SYMBOLS, LETTERS = range(4, 14), range(14, 24)
"""Token ids; 2 and 3 are the colon and the end of an example."""

TESTED = 10**9
"""Added to the seed for the prompts of the test."""


def draw(n: int, x_len: int, n_examples: int, seed: int) -> dict[str, Int[Tensor, "prompt example pos"]]:
    """Draws inputs and outputs of the simplest alignment problem.

    In each prompt m symbols, a letter for each of them (no two alike), and a permutation Ã are drawn anew. An input is
    a uniformly random order of the symbols, and letter j of its output is that of the symbol at Ã(j). Examples are so
    free of noise that little stands between a model and the alignment.
    """
    streams = Rng(seed, "conjecture")
    symbols = streams.order("symbols", n, len(SYMBOLS))[:, :x_len]
    letters = streams.order("letters", n, len(LETTERS))[:, :x_len]
    aligned = streams.order("alignment", n, x_len)
    order = streams.order("order", n, n_examples + 1, x_len)
    which = order.gather(2, aligned[:, None].expand_as(order))
    wide = (n, n_examples + 1, x_len)
    return {
        "x": symbols[:, None].expand(wide).gather(2, order) + SYMBOLS[0],
        "y": letters[:, None].expand(wide).gather(2, which) + LETTERS[0],
        "aligned": aligned[:, None],
    }


def tokens(drawn: Mapping[str, Int[Tensor, "prompt example pos"]]) -> tuple[Tensor, Tensor]:
    """Returns `x1 ... xm : y1 ... ym` and an end for each example, and the positions of all y."""
    x, y = drawn["x"], drawn["y"]
    mark = torch.full_like(x[..., :1], 2)
    ids = torch.cat([x, mark, y, mark + 1], 2)
    m, (_, n_examples, length) = x.shape[2], ids.shape
    places = torch.arange(n_examples * length).view(n_examples, length)
    return ids.flatten(1), places[:, m + 1 : -1].flatten()


def learned(
    *, depth: int, width: int, x_len: int, n_examples: int, steps: int, prompts: int, seed: int
) -> pd.DataFrame:
    """Trains a model from scratch, each step on fresh prompts, and tests it beside EM; the function of a job.

    Args:
        depth: Layers.
        width: Of the residual stream; heads are 16 wide.
        x_len: m.
        n_examples: k.
        steps: Updates, each on 32 prompts; the loss is that of all letters.
        prompts: How many are tested.
        seed: Of weights and prompts.

    Returns:
        By predictor the accuracy on the test example: `model`, `em` (the letter that its alignment and dictionary make
        most probable), and `blind` (knows the prompt's letters, and which are used up).
    """
    size = {"n_layers": depth, "n_heads": max(1, width // 16), "d_model": width, "d_mlp": 4 * width}
    recipe = Recipe(TrainConfig(steps=1), (), **size, n_ctx=(n_examples + 1) * (2 * x_len + 2))
    muon: dict[str, Any] = {"optimizer": "muon", "lr": 0.01, "rest_lr": 0.003, "betas": (0.9, 0.98)}
    config = TrainConfig(steps=steps, **muon, schedule="linear", warmup=min(50, steps - 1), log_every=steps)

    def sample(_: int, batch_seed: int) -> tuple[Tensor, Tensor]:
        return tokens(draw(32, x_len, n_examples, batch_seed))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        ids, positions = batch
        return F.cross_entropy(_logits(model, *batch).float().flatten(0, 1), ids[:, positions].flatten())

    run = train(untrained(recipe, seed), sample, loss, config, seed=seed, progress=False)
    tested = draw(prompts, x_len, n_examples, TESTED + seed)
    ids, positions = tokens(tested)
    positions = positions[-x_len:]
    with torch.no_grad():
        right = {"model": _logits(run.model, ids, positions).argmax(2) == ids[:, positions]}
    right["em"] = torch.stack([by_em(x, y) for x, y in zip(tested["x"], tested["y"], strict=True)])
    right["blind"] = (1 / torch.arange(x_len, 0, -1.0)).expand(prompts, -1)
    values = torch.stack([each.double().mean(1) for each in right.values()]).numpy()
    return mean_rows(pd.DataFrame({"predictor": list(right)}), values)


def _logits(model: Any, ids: Int[Tensor, "prompt pos"], positions: Int[Tensor, " target"]) -> Tensor:
    """What is predicted of the tokens at `positions`."""
    return model(ids, logits_to_keep=positions - 1, use_cache=False).logits


def by_em(x: Int[Tensor, "example pos"], y: Int[Tensor, "example pos"]) -> Tensor:
    """Returns whether EM, given all examples but the last, predicts each letter of the last."""
    em = align_by_em(x[:-1], y[:-1], restarts=16, iterations=30)
    known = em.symbols == x[-1][:, None]  # a symbol that no example has may be any letter
    likely = em.probability @ (known.double() @ em.dictionary)
    return em.letters[likely.argmax(1)] == y[-1]


@dataclass(frozen=True)
class Conjecture:
    """A base, from which depth, width and m vary one at a time."""

    depth: int = 4
    width: int = 64
    x_len: int = 3
    depths: tuple[int, ...] = (1, 2, 4, 8)
    widths: tuple[int, ...] = (32, 64, 128)
    x_lens: tuple[int, ...] = (2, 3, 4, 6)
    n_examples: int = 12
    steps: int = 1500
    prompts: int = 200
    seeds: tuple[int, ...] = (0,)

    @property
    def base(self) -> dict[str, int]:
        """What is varied, and its values elsewhere."""
        return {"depth": self.depth, "width": self.width, "x_len": self.x_len}


def _jobs(config: Conjecture, _: Inputs) -> list[Measurement]:
    """The cheapest model first."""
    varied = {"x_len": config.x_lens, "depth": config.depths, "width": config.widths}
    models = [config.base | {name: value} for name, values in varied.items() for value in values]
    distinct = {tuple(model.values()): model for model in models}.values()
    common = {"n_examples": config.n_examples, "steps": config.steps, "prompts": config.prompts}
    return [
        Measurement(learned, model | common, seed, keys=model)
        for model in sorted(distinct, key=lambda model: model["depth"] * model["width"] * model["x_len"])
        for seed in config.seeds
    ]


def _summarize(config: Conjecture, rows: Rows) -> pd.DataFrame:
    """The rows of each quantity's models, those that have the base's values of the others."""
    frame: Any = rows["learned"]
    same = frame[list(config.base)] == pd.Series(config.base)
    parts = [frame[same.drop(columns=name).all(axis=1)].assign(varied=name, at=frame[name]) for name in config.base]
    return pd.concat(parts, ignore_index=True)


_ACCURACY = rows(varied="x_len")
_LONGEST = _ACCURACY.at(x_len=HIGH)
_ABOVE_BLIND, _EM_ABOVE_BLIND = (_LONGEST.rise("predictor", "blind", name) for name in ("model", "em"))

CONJECTURE = Experiment(
    "icatune/conjecture",
    "Small models trained on prompts with an alignment of their own each, beside EM",
    "Agarwal and Sarawagi (2025), §5",
    Study(
        "icatune/conjecture",
        {
            "smoke": Conjecture(1, 16, 2, (1, 2), (16,), (2, 3), n_examples=2, steps=2, prompts=4),
            "cpu": Conjecture(),
            "paper": Conjecture(
                depths=(1, 2, 4, 8, 16),
                widths=(32, 64, 128, 256),
                x_lens=(2, 3, 4, 5, 6, 8),
                n_examples=30,
                steps=20000,
                prompts=1000,
                seeds=(0, 1, 2),
            ),
        },
        _jobs,
        _summarize,
    ),
    {
        label: rows_along("at", "predictor", {"": {"varied": name}}, label=label)
        for name, label in (("x_len", "m"), ("depth", "layers"), ("width", "width"))
    },
    [
        Claim("EM finds the alignment from the examples (accuracy at m = {x_len.high})").at_least(
            0.9, *_LONGEST.beside("predictor", "em", "blind"), "blind to the input"
        ),
        Claim(
            "The transformer does not, trained this long, at long inputs (above the blind ceiling, m = {x_len.high})"
        ).at_most(0.1, _ABOVE_BLIND, _EM_ABOVE_BLIND, "EM"),
        Claim("It gets worse with m (accuracy at m = {x_len.low} minus m = {x_len.high})").at_least(
            0.2, *_ACCURACY.fall("x_len").beside("predictor", "model", "em"), "EM"
        ),
    ],
    "A conjecture: no in-context learning of arbitrary alignments in a causal transformer of fixed size.",
)
