"""How the toy Llama is made, from nothing to a folder that any Hugging Face program reads."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.files import replacing, writable_folder
from align_circuits.heads.score import score_heads
from align_circuits.models.loading import load
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.evaluation import evaluate
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.loop import TrainConfig, TrainRun, train
from align_circuits.training.toy_llama_text import PAD, Mixture

INDUCTION = {"copies": 0.4, "phrases": 0.3, "pairs": 0.1, "pre-aligned": 0.2}
"""A mixture from which induction heads form soon: short documents, much that repeats."""

LINES = {
    "pre-aligned": 0.4,
    "outputs": 0.26,
    "copies": 0.1,
    "phrases": 0.08,
    "pairs": 0.06,
    "single": 0.06,
    "strings": 0.04,
}
"""Lines of every sort, before counting and looking up have met."""

COUNTING = {"echoes": 0.8, "copies": 0.2}
"""A mixture from which the lower layers learn to count, within 300 steps if nothing else comes first."""

ECHOING = {**INDUCTION, "echoes": 0.3}
"""Induction, while counting is kept."""

ECHOED = {**LINES, "echoes": 0.5}
"""Lines, while counting is kept."""

HALVES = {"halves": 0.7, "pre-aligned": 0.08, "outputs": 0.07, "echoes": 0.15}
"""A mixture that joins counting and looking up; on many symbols or varied phrases it would not start."""

JOINED = {"halves": 0.5, "pre-aligned": 0.3, "outputs": 0.08, "echoes": 0.12}
"""Both in longer documents, as soon as they have met."""

SELDOM = (0.0, 0.15)
"""How much of an echo is symbols, once they can be told."""


@dataclass(frozen=True)
class Stage:
    """What is read from one step on."""

    start: int
    """The first step, from 1."""
    lengths: tuple[int, ...]
    """Tokens in a document; one of these for each step."""
    mixture: Mixture
    early: bool = False
    """Whether the lower layers must tell what documents ask of them."""


@dataclass(frozen=True)
class Recipe:
    """A model, what it reads, and how it is trained."""

    train: TrainConfig
    stages: tuple[Stage, ...]
    """In order; documents get longer and automata harder."""
    tokens: int = 3264
    """Tokens in a batch."""
    n_layers: int = 6
    early_layers: int = 1
    """How many are the lower layers: after them, in early stages, the output matrix must tell what is asked."""
    n_heads: int = 4
    d_model: int = 128
    d_mlp: int = 352
    n_ctx: int = 2048
    """The longest prompt that the model accepts; it has seen none longer than the last stage's."""
    metrics_prompts: int = 24
    """Prompts behind each number of the log."""

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step."""
        return [stage for stage in self.stages if stage.start <= max(step, 1)][-1]


RECIPES: Mapping[str, Recipe] = {
    "toy-llama": Recipe(
        TrainConfig(
            steps=1800,
            lr=0.015,
            rest_lr=0.003,
            optimizer="muon",
            weight_decay=0.01,
            betas=(0.9, 0.98),
            schedule="linear",
            warmup=100,
            decay=300,
            clip=None,
            precision="bf16",
            log_every=50,
            checkpoint_every=20,
        ),
        (
            Stage(1, (64, 128), Mixture(COUNTING), early=True),
            Stage(301, (64,), Mixture(ECHOING, most_symbols=5, most_edges=1), early=True),
            Stage(501, (64, 128), Mixture(ECHOED, most_symbols=5, most_edges=2, heard=SELDOM), early=True),
            Stage(901, (96, 128, 192), Mixture(HALVES, most_symbols=3, most_edges=1, heard=SELDOM)),
            Stage(1241, (128, 192, 256), Mixture(JOINED, most_symbols=6, most_edges=2, heard=SELDOM)),
            Stage(1501, (192, 256, 544), Mixture(JOINED, most_symbols=6, most_edges=2, heard=SELDOM)),
            Stage(1651, (256, 544, 1088), Mixture(JOINED, most_symbols=6, most_edges=2, heard=SELDOM)),
        ),
        n_layers=7,
        early_layers=3,
        n_heads=5,
        d_model=160,
        d_mlp=432,
    ),
    "smoke": Recipe(
        TrainConfig(
            steps=30, lr=0.012, rest_lr=0.002, optimizer="muon", schedule="linear", warmup=5, clip=None, log_every=15
        ),
        (
            Stage(1, (64,), Mixture(ECHOING, most_symbols=3, most_edges=1), early=True),
            Stage(16, (96,), Mixture(LINES, most_symbols=3)),
        ),
        tokens=512,
        n_layers=2,
        n_heads=2,
        d_model=32,
        d_mlp=64,
        n_ctx=512,
        metrics_prompts=4,
    ),
}
"""Recipes by name. `"toy-llama"` made the bundled weights: under the sign `!` it teaches to align, and ICA-Tune brings
that out on prompts without the sign. `"smoke"` takes seconds and teaches nothing."""


def pretrain(recipe: Recipe, *, seed: int = 0, out: str | Path, progress: bool = True) -> TrainRun:
    """Trains a Llama from scratch and writes it to `out/model`; goes on where a killed run stopped.

    Args:
        recipe: What and how.
        seed: Of the weights and the documents.
        out: The folder for checkpoints, `log.csv` and the model.
        progress: Whether to draw a progress bar.

    Returns:
        The run; its log holds, beside the loss, the first-token accuracy on pre-aligned, single-symbol and standard
        prompts, and the best induction, previous-token and `align_query` heads.

    Raises:
        ValueError: `out` cannot be written, or holds another run.
    """
    out = writable_folder(out)
    model = untrained(recipe, seed)

    def sample(step: int, batch_seed: int) -> tuple[Tensor, Tensor, Tensor]:
        stage = recipe.stage(step)
        length = stage.lengths[batch_seed % len(stage.lengths)]
        ids, weights, early = stage.mixture.sample(max(1, recipe.tokens // length), length, batch_seed)
        return ids, weights, early if stage.early else torch.full_like(early, PAD)

    run = train(
        model,
        sample,
        partial(_loss, early_layers=recipe.early_layers),
        recipe.train,
        seed=seed,
        out=out / "training",
        progress=progress,
        recipe=asdict(recipe),
        metrics=lambda network, _: probe(network, recipe.metrics_prompts),
    )
    save(model, out / "model")
    with replacing(out / "log.csv") as path:
        run.log.to_csv(path, index=False)
    return run


def untrained(recipe: Recipe, seed: int) -> LlamaForCausalLM:
    """Returns the recipe's model with fresh weights.

    Matrices have the standard deviation 1/√fan_in, those that write into the residual stream 1/√(2 n_layers) of it;
    embeddings 0.05.
    """
    tokenizer: Any = char_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.n_layers,
        num_attention_heads=recipe.n_heads,
        num_key_value_heads=recipe.n_heads,
        max_position_embeddings=recipe.n_ctx,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weight.normal_(0, 0.05, generator=generator)
            elif weight.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(
                    0, (weight.shape[1] * (2 * recipe.n_layers if writes else 1)) ** -0.5, generator=generator
                )
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes a model as bf16 safetensors with the bundled tokenizer; `config.json` comes last."""
    lean: Any = copy.deepcopy(model)
    lean.to(torch.bfloat16)
    lean.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


def probe(model: nn.Module, n: int, seed: int = 1) -> dict[str, float]:
    """Returns what the log says about a model in training: a few accuracies, and its best heads."""
    bridge = load(copy.deepcopy(model), tokenizer=char_tokenizer())
    kinds: dict[str, tuple[int, Literal["standard", "pre-aligned"]]] = {
        "pre_aligned": (4, "pre-aligned"),
        "single": (1, "standard"),
        "standard": (5, "standard"),
    }
    found: dict[str, float] = {}
    for name, (m, style) in kinds.items():
        prompts = Seq2SeqTask(x_len=m, style=style).sample(n, bridge.tokenizer, seed, references=False)
        right = evaluate(bridge, prompts).where(predictor="model", metric="accuracy", kind=["first", "later"]).frame
        found |= {f"{name}_{kind}": value for kind, value in zip(right["kind"], right["value"], strict=True)}
        if name == "standard":
            found |= _best(score_heads(bridge, prompts, ["align_query"]), "align_query")
    words = torch.randint(4, len(bridge.tokenizer), (n, 40), generator=torch.Generator().manual_seed(seed))
    repeated = Prompts.from_tokens(torch.cat([words, words], 1))
    scores = score_heads(bridge, repeated, ["induction", "previous"])
    return found | _best(scores, "induction") | _best(scores, "previous")


def _best(scores: Any, metric: str) -> dict[str, float]:
    row = scores.top(metric, 1).frame.iloc[0]
    return {metric: float(row["value"]), f"{metric}_layer": float(row["layer"]), f"{metric}_head": float(row["head"])}


def _loss(model: Any, batch: tuple[Tensor, Tensor, Tensor], early_layers: int) -> Float[Tensor, ""]:
    ids, weights, early = (part[:, 1:] for part in batch)
    asked = early != PAD
    out = model.model(batch[0][:, :-1], use_cache=False, output_hidden_states=bool(asked.any()))
    logits = model.lm_head(out.last_hidden_state).float()
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    loss = (each * weights.flatten()).sum()
    if out.hidden_states is not None:
        logits = model.lm_head(model.model.norm(out.hidden_states[early_layers][asked])).float()
        loss = loss + F.cross_entropy(logits, early[asked], reduction="sum")
    return loss / weights.sum()
