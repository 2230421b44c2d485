"""Beyond The Missing Alignment Link (Agarwal and Sarawagi, 2025): what does in-context alignment need of a transformer?

`icatune/conjecture` gives each prompt a dictionary of its own, and nothing is learned there in 1,500 steps. Here the
dictionary is the same in all prompts and the tokens tell their place in the example: what is left to find in the
context is the alignment alone, and small Llamas learn it in minutes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from align_circuits.jobs.code_versions import code_version
from align_circuits.papers.claims import Claim
from align_circuits.papers.icatune.conjecture import by_em
from align_circuits.papers.icatune.tuned_models import FRESH_SEEDS
from align_circuits.papers.lab import About, Experiment, Inputs, Measurement, Rows, Study, training_folder
from align_circuits.papers.statistics import Statistic, mean_rows, per_seed
from align_circuits.report import plots
from align_circuits.tables.tables import Table
from align_circuits.tasks.rng import Rng
from align_circuits.training.loop import TrainConfig, train
from align_circuits.training.toy_llama import Recipe, untrained

SYMBOLS = 3
"""Symbols of the alphabet, and letters: letter s translates symbol s in every prompt."""

LONGEST = 8
"""The longest input whose tokens fit into the vocabulary."""

TESTED = 10**9
"""Added to the seed for the prompts of the test."""

Drawn = Mapping[str, Int[Tensor, "prompt _ place"]]


@dataclass(frozen=True)
class Learning:
    """How a model is trained: first on inputs of the first length alone; then each of the others joins in turn."""

    x_lens: tuple[int, ...] = (2, 3, 4)
    """Each has an equal part of the steps, in which half of the batches have it and the others a shorter one."""
    n_examples: int = 8
    steps: int = 600
    tokens: int = 1000
    """In a batch."""
    lr: float = 0.01
    """Muon's; AdamW's is 0.3 of it."""


@dataclass(frozen=True)
class Architecture:
    """`blocks` layers, applied `loops` times one after another, as deep as blocks * loops layers."""

    blocks: int
    loops: int = 1
    width: int = 64
    """Of the residual stream; heads are 16 wide, MLPs twice as wide as the stream."""

    @property
    def name(self) -> str:
        """Such as `"4 layers, width 32"`."""
        looped = f" x {self.loops} loops" if self.loops > 1 else ""
        return f"{self.blocks} layer{'s' if self.blocks > 1 else ''}{looped}, width {self.width}"


def draw(n: int, x_len: int, n_examples: int, seed: int, *, shuffled: bool = False) -> Drawn:
    """Draws inputs and outputs: letter j of an output translates the symbol at Ã(j).

    Symbols are uniform and independent, so that one example rarely tells the alignment; Ã is a permutation, drawn anew
    for each prompt (`aligned`), or where `shuffled` for each example, so that there is nothing to learn from examples.
    """
    streams = Rng(seed, "needs")
    x = streams.below("symbols", torch.full((n, n_examples + 1, x_len), SYMBOLS))
    aligned = streams.order("alignment", n, n_examples + 1 if shuffled else 1, x_len)
    return {"x": x, "y": x.gather(2, aligned.expand_as(x)), "aligned": aligned}


def tokens(drawn: Drawn) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, "example letter"]]:
    """Returns `x1 ... xm : y1 ... ym` and an end for each example, and the columns of all y.

    A symbol or letter has a token of its own at each of its places.
    """
    x, y = drawn["x"], drawn["y"]
    m, n_examples = x.shape[2], x.shape[1]
    first = 4 + SYMBOLS * torch.arange(m)
    mark = torch.full_like(x[..., :1], 2)
    ids = torch.cat([x + first, mark, y + first + SYMBOLS * LONGEST, mark + 1], 2)
    columns = torch.arange(n_examples * ids.shape[2]).view(n_examples, ids.shape[2])
    return ids.flatten(1), columns[:, m + 1 : -1]


def posterior(x: Int[Tensor, "prompt example place"], y: Int[Tensor, "prompt example place"]) -> Tensor:
    """Returns P(Ã(j) = p | the first i examples) for i = 0, 1, ...: [prompt i j p].

    All permutations that translate each of these examples rightly are equally probable.
    """
    m = x.shape[2]
    listed = torch.tensor(list(permutations(range(m))))
    fits = (x[..., listed] == y[:, :, None]).all(3)  # [prompt example permutation]
    none = torch.ones_like(fits[:, :1])
    so_far = torch.cat([none, fits], 1).double().cumprod(1)
    one_hot = F.one_hot(listed, m).double()
    return torch.einsum("nia,ajp->nijp", so_far / so_far.sum(2, keepdim=True), one_hot)


def network(architecture: Architecture, learning: Learning, seed: int) -> nn.Module:
    """Returns the Llama with fresh weights; its loops are the same layers again."""
    width, depth = architecture.width, architecture.blocks * architecture.loops
    size = {"n_layers": depth, "n_heads": max(1, width // 16), "d_model": width, "d_mlp": 2 * width}
    n_ctx = (learning.n_examples + 1) * (2 * max(learning.x_lens) + 2)
    model: Any = untrained(Recipe(TrainConfig(steps=1), (), **size, n_ctx=n_ctx), seed)
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[index % architecture.blocks] for index in range(depth)])
    return model


def trained(
    architecture: Architecture, learning: Learning, seed: int, folder: str, *, shuffled: bool = False
) -> nn.Module:
    """Trains a model, or reads it where it has been trained."""
    identity = [asdict(architecture), asdict(learning), seed, shuffled, code_version(f"{__name__}:trained")]
    steps = learning.steps
    config = TrainConfig(
        steps=steps,
        optimizer="muon",
        lr=learning.lr,
        rest_lr=0.3 * learning.lr,
        betas=(0.9, 0.98),
        schedule="linear",
        warmup=min(30, steps // 4),
        decay=steps // 5,
        log_every=steps,
        checkpoint_every=100,
    )

    def sample(step: int, batch_seed: int) -> tuple[Tensor, Tensor]:
        stage = (step - 1) * len(learning.x_lens) // steps
        # Half of the batches are of the longest input so far.
        m = learning.x_lens[stage if batch_seed % 2 else batch_seed // 2 % (stage + 1)]
        n = max(4, learning.tokens // ((learning.n_examples + 1) * (2 * m + 2)))
        return tokens(draw(n, m, learning.n_examples, batch_seed, shuffled=shuffled))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        ids, columns = batch
        return F.cross_entropy(logits_of(model, ids, columns).flatten(0, 1), ids[:, columns.flatten()].flatten())

    return train(
        network(architecture, learning, seed),
        sample,
        loss,
        config,
        seed=seed,
        out=training_folder(folder, "aligner", *identity),
        progress=False,
    ).model


def logits_of(model: Any, ids: Int[Tensor, "prompt pos"], columns: Int[Tensor, "*target"]) -> Tensor:
    """What is predicted of the tokens at these columns: [prompt target token]."""
    return model(ids, logits_to_keep=columns.flatten() - 1, use_cache=False).logits.float()


def learned(
    *,
    architecture: Mapping[str, Any],
    learning: Mapping[str, Any],
    shuffled: bool,
    prompts: int,
    trained_in: str,
    seed: int,
) -> pd.DataFrame:
    """Trains a model and tests it at each length; the function of a job.

    Args:
        architecture: `Architecture`.
        learning: `Learning`.
        shuffled: Whether each example of the training has an alignment of its own.
        prompts: How many are tested at each length.
        trained_in: The folder of all trainings.
        seed: Of weights and prompts.

    Returns:
        By `x_len` the accuracy on the test example of the model.
    """
    how = Learning(**{**learning, "x_lens": tuple(learning["x_lens"])})
    model = trained(Architecture(**architecture), how, seed, trained_in, shuffled=shuffled)
    rows = []
    for m in how.x_lens:
        ids, columns = tokens(draw(prompts, m, how.n_examples, TESTED + seed))
        with torch.no_grad():
            right = logits_of(model, ids, columns[-1]).argmax(2) == ids[:, columns[-1]]
        rows.append(mean_rows(pd.DataFrame({"x_len": [m]}), right.double().mean(1)[None].numpy()))
    return pd.concat(rows, ignore_index=True)


def references(*, x_len: int, n_examples: int, prompts: int, seed: int) -> pd.DataFrame:
    """Tests predictors without weights on the prompts that the models are tested on; the function of a job.

    Returns:
        By `predictor` the accuracy on the test example: `em` (`align_by_em`, which knows neither dictionary nor
        permutations), `bayes` (the exact posterior over permutations, with the dictionary), `retrieval` (the letter of
        an example whose input is like the test input in most places) and `blind` (the most frequent letter of those
        that are left of the input, without the examples). Where several are as good, one of them at random.
    """
    drawn = draw(prompts, x_len, n_examples, TESTED + seed)
    x, y = drawn["x"], drawn["y"]
    given, answer = F.one_hot(x[:, -1], SYMBOLS).double(), y[:, -1]
    like = (x[:, :-1] == x[:, -1:]).sum(2)
    likest = (like == like.amax(1, keepdim=True)).double()
    of_examples = F.one_hot(y[:, :-1], SYMBOLS).double()
    left = given.sum(1, keepdim=True) - F.one_hot(answer, SYMBOLS).double().cumsum(1).roll(1, 1)
    left[:, 0] = given.sum(1)
    accuracy = {
        "em": torch.stack([by_em(*each) for each in zip(x, y, strict=True)]),
        "bayes": _right(posterior(x[:, :-1], y[:, :-1])[:, -1] @ given, answer),
        "retrieval": (torch.einsum("ni,nijs->njs", likest, of_examples) / likest.sum(1)[:, None, None])
        .gather(2, answer[..., None])
        .squeeze(2),
        "blind": _right(left, answer),
    }
    values = torch.stack([each.double().mean(1) for each in accuracy.values()]).numpy()
    return mean_rows(pd.DataFrame({"predictor": list(accuracy)}), values)


def _right(scores: Float[Tensor, "prompt letter symbol"], answer: Int[Tensor, "prompt letter"]) -> Tensor:
    """The probability that one of the highest scores, at random, is that of the answer."""
    best = (scores >= scores.amax(2, keepdim=True) - 1e-9).double()
    return best.gather(2, answer[..., None]).squeeze(2) / best.sum(2)


@dataclass(frozen=True)
class Needs:
    """Architectures in the order in which they run."""

    architectures: tuple[Architecture, ...] = (
        Architecture(4),
        Architecture(2),
        Architecture(8),
        Architecture(12),
        Architecture(1),
        Architecture(1, 4),
        Architecture(4, width=32),
        Architecture(4, width=16),
    )
    """The first is the base, which is also trained on shuffled alignments."""
    learning: Learning = Learning()
    prompts: int = 200
    """Of each length."""
    seeds: tuple[int, ...] = FRESH_SEEDS


def _train(config: Needs, inputs: Inputs) -> list[Measurement]:
    """A seed of all architectures before the next one."""
    arms = [(each, False) for each in config.architectures] + [(config.architectures[0], True)]
    common = {"learning": asdict(config.learning), "prompts": config.prompts, "trained_in": inputs.trained}
    return [
        Measurement(
            learned,
            {"architecture": asdict(each), "shuffled": shuffled} | common,
            seed,
            keys={"model": each.name + (SHUFFLED if shuffled else ""), **asdict(each), "shuffled": shuffled},
        )
        for seed in config.seeds
        for each, shuffled in arms
    ]


SHUFFLED = ", shuffled"
"""The end of the name of a model that was trained on shuffled alignments."""


def _jobs(config: Needs, _: Inputs) -> list[Measurement]:
    about = {"n_examples": config.learning.n_examples, "prompts": config.prompts}
    return [
        Measurement(references, {"x_len": m} | about, seed, keys={"x_len": m})
        for seed in config.seeds
        for m in config.learning.x_lens
    ]


NEAR = 0.1
"""How far below EM an accuracy may lie for a length to count as reached."""


def _summarize(config: Needs, rows: Rows) -> pd.DataFrame:
    """Accuracies, and the largest m up to which each model (or predictor) is within `NEAR` of EM, 1 for none."""
    frame: Any = rows["references"].rename(columns={"predictor": "model"})
    frame = pd.concat([rows["learned"], frame], ignore_index=True).assign(metric="accuracy")
    em = frame[frame["model"] == "em"].set_index(["seed", "x_len"])["value"]
    reached = []
    for (_, seed), part in frame.groupby(["model", "seed"], sort=False):
        values = part.set_index("x_len")["value"]
        near = [values[m] >= em[seed, m] - NEAR for m in config.learning.x_lens]
        largest = ([1, *config.learning.x_lens])[int(np.cumprod(near).sum())]
        first = part.iloc[:1].assign(metric="largest m", value=float(largest), low=np.nan, high=np.nan)
        reached.append(first.assign(x_len=None))
    return pd.concat([frame, *reached], ignore_index=True)


LARGEST, ACCURACY = per_seed(metric="largest m"), per_seed(metric="accuracy")


def _check(table: Table) -> list[Claim]:
    config = table.provenance.settings["config"]
    base, *others = architectures = [Architecture(**each) for each in config["architectures"]]
    x_lens = config["learning"]["x_lens"]
    middle, longest = x_lens[len(x_lens) // 2], x_lens[-1]
    plain = sorted(
        (each for each in architectures if each.loops == 1 and each.width == base.width), key=lambda each: each.blocks
    )
    several = [each for each in plain if each.blocks > 1]
    shallow, deep = several[0].name, several[-1].name
    widths = sorted(
        (each for each in architectures if each.loops == 1 and each.blocks == base.blocks), key=lambda each: each.width
    )
    narrow, wide = widths[0].name, widths[-1].name

    def gain(larger: str, smaller: str) -> Statistic:
        """By seed, of the accuracy, the mean over lengths."""
        first, *rest = (ACCURACY.at(x_len=m).rise("model", smaller, larger) for m in x_lens)
        return first.map(lambda *gains: np.mean(gains, axis=0), *rest)

    below_em = [ACCURACY.at(x_len=longest).rise("model", "em", each.name) for each in architectures]
    claims = [
        Claim(
            f"A small transformer aligns in context ({base.name}: accuracy at m = {middle} above the blind ceiling)"
        ).at_least(
            0.1,
            *(ACCURACY.at(x_len=middle).rise("model", "blind", base.name + of) for of in ("", SHUFFLED)),
            "trained on shuffled alignments",
        ),
        Claim(f"Deeper models reach longer inputs (largest m within {NEAR} of EM: {deep} minus {shallow})").at_least(
            1.0, LARGEST.rise("model", shallow, deep), LARGEST.rise("model", "blind", "blind"), "blind to the examples"
        ),
        Claim(
            f"Depth matters more than width (gain in accuracy from {shallow} to {deep} minus that from {narrow} to "
            f"{wide})"
        ).at_least(0.05, gain(deep, shallow) - gain(wide, narrow), gain("blind", "blind"), "blind to the examples"),
        Claim(f"None reaches EM at long inputs (highest mean accuracy at m = {longest} minus EM's)").at_most(
            -NEAR,
            max((below(table) for below in below_em), key=lambda below: np.nanmean(below)),
            ACCURACY.at(x_len=longest).rise("model", "em", "bayes"),
            "the exact posterior",
        ),
    ]
    for looped in (each for each in others if each.loops > 1):
        same = next(other for other in plain if other.blocks == looped.blocks * looped.loops)
        alone = next((other for other in plain if other.blocks == looped.blocks), plain[0])
        claims.append(
            Claim(
                f"Looped layers do what as many layers do (accuracy of {looped.name} minus that of {same.name})"
            ).at_least(
                -0.05, gain(looped.name, same.name), gain(alone.name, same.name), f"as many weights, {alone.name}"
            )
        )
    return claims


def seed_ranges(frame: Any, keys: Sequence[str]) -> pd.DataFrame:
    """Returns the mean over seeds of rows that are alike in `keys`, from the lowest to the highest seed."""
    ranges = frame.groupby([*keys], sort=False, dropna=False)["value"].agg(["mean", "min", "max"]).reset_index()
    return ranges.rename(columns={"mean": "value", "min": "low", "max": "high"})


def _draw(table: Table) -> go.Figure:
    mean = seed_ranges(table.where(metric="accuracy").frame, ["model", "x_len"])
    return plots.curves({"bars: all seeds": mean}, x="x_len", by="model", label="input length m")


NEEDS = Experiment(
    "icatune/needs",
    "What in-context alignment needs: depth, width and loops of small models, beside EM",
    "beyond Agarwal and Sarawagi (2025), §5",
    Study(
        "icatune/needs",
        {
            "smoke": Needs(
                (
                    Architecture(2, width=16),
                    Architecture(1, width=16),
                    Architecture(1, 2, 16),
                    Architecture(4, width=16),
                ),
                Learning((2, 3), n_examples=2, steps=4, tokens=60),
                prompts=4,
                seeds=(0, 1),
            ),
            "cpu": Needs(),
            "paper": Needs(
                learning=Learning((2, 3, 4, 5, 6, 8), n_examples=16, steps=20000, tokens=8000),
                prompts=1000,
                seeds=(0, 1, 2, 3, 4, 5),
            ),
        },
        _jobs,
        _summarize,
        _train,
    ),
    {"accuracy": _draw},
    _check,
    about=About.BEYOND,
)
