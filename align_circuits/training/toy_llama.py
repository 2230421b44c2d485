"""The recipe of the toy Llama, from random weights to a folder in the Hugging Face format."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.heads.score import score_heads
from align_circuits.jobs.files import inside, writable_folder
from align_circuits.jobs.folders import replacing_in
from align_circuits.models.loading import wrapped_in_place
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.evaluation import evaluate
from align_circuits.tables.tables import Table
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.loop import TrainConfig, TrainRun, train
from align_circuits.training.toy_llama_text import PAD, Mixture

INDUCTION = {"copies": 0.4, "phrases": 0.3, "pairs": 0.1, "pre-aligned": 0.2}
"""A mixture from which induction heads form early: short documents with many repetitions."""

LINES = {
    "pre-aligned": 0.4,
    "outputs": 0.26,
    "copies": 0.1,
    "phrases": 0.08,
    "pairs": 0.06,
    "single": 0.06,
    "strings": 0.04,
}
"""Lines of every kind, before counting and lookup are combined."""

COUNTING = {"echoes": 0.8, "copies": 0.2}
"""A mixture from which the lower layers learn to count, within 300 steps if they have learned nothing else before."""

ECHOING = {**INDUCTION, "echoes": 0.3}
"""Induction, and enough echoes that counting is not forgotten."""

ECHOED = {**LINES, "echoes": 0.5}
"""Lines, and enough echoes that counting is not forgotten."""

HALVES = {"halves": 0.7, "pre-aligned": 0.08, "outputs": 0.07, "echoes": 0.15}
"""A mixture that combines counting and lookup; with many symbols or varied phrases learning would not start."""

JOINED = {"halves": 0.5, "pre-aligned": 0.3, "outputs": 0.08, "echoes": 0.12}
"""Counting and lookup in longer documents, once they are combined."""

UNMARKED = {"pre-aligned": 0.5, "outputs": 0.12, "copies": 0.13, "phrases": 0.1, "pairs": 0.07, "single": 0.08}
"""Lines without a sign that asks for an alignment: induction and lookup, and no counting."""

FEW_ECHOES = (0.0, 0.15)
"""The share of echoed symbols in an echo, once the lower layers can identify them."""


@dataclass(frozen=True)
class Stage:
    """What the model is trained on from one step on."""

    start: int
    """The first step, from 1."""
    lengths: tuple[int, ...]
    """Tokens in a document; each step takes one of these lengths."""
    mixture: Mixture
    early: bool = False
    """Whether the lower layers have a loss of their own, on the documents' early labels."""


@dataclass(frozen=True)
class Recipe:
    """A model, its training text, and how it is trained."""

    train: TrainConfig
    stages: tuple[Stage, ...]
    """In order of their first steps; documents get longer and automata harder."""
    tokens: int = 3264
    """Tokens in a batch."""
    n_layers: int = 6
    early_layers: int = 1
    """The number of lower layers: in early stages, their output is decoded by the output matrix and has a loss."""
    n_heads: int = 4
    d_model: int = 128
    d_mlp: int = 352
    n_ctx: int = 2048
    """The longest prompt that the model accepts; in training it reads none longer than those of the last stage."""
    metrics_prompts: int = 24
    """Prompts behind each number of the log."""

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step."""
        return [stage for stage in self.stages if stage.start <= max(step, 1)][-1]


TOY_LLAMA = Recipe(
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
        Stage(501, (64, 128), Mixture(ECHOED, most_symbols=5, most_edges=2, echoed=FEW_ECHOES), early=True),
        Stage(901, (96, 128, 192), Mixture(HALVES, most_symbols=3, most_edges=1, echoed=FEW_ECHOES)),
        Stage(1241, (128, 192, 256), Mixture(JOINED, most_symbols=6, most_edges=2, echoed=FEW_ECHOES)),
        Stage(1501, (192, 256, 544), Mixture(JOINED, most_symbols=6, most_edges=2, echoed=FEW_ECHOES)),
        Stage(1651, (256, 544, 1088), Mixture(JOINED, most_symbols=6, most_edges=2, echoed=FEW_ECHOES)),
    ),
    n_layers=7,
    early_layers=3,
    n_heads=5,
    d_model=160,
    d_mlp=432,
)
"""The recipe of the bundled weights."""

RECIPES: Mapping[str, Recipe] = {
    "toy-llama": TOY_LLAMA,
    "unmarked": replace(
        TOY_LLAMA,
        stages=(
            Stage(1, (64, 128), Mixture(INDUCTION, most_symbols=5, most_edges=1)),
            Stage(501, (64, 128), Mixture(UNMARKED, most_symbols=5, most_edges=2)),
            Stage(1241, (128, 192, 256), Mixture(UNMARKED, most_symbols=6, most_edges=2)),
            Stage(1501, (192, 256, 544), Mixture(UNMARKED, most_symbols=6, most_edges=2)),
            Stage(1651, (256, 544, 1088), Mixture(UNMARKED, most_symbols=6, most_edges=2)),
        ),
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
"""Recipes by name. `"toy-llama"` made the bundled weights: it teaches the model to align after the sign `!`, and
ICA-Tune makes it align without the sign. `"unmarked"` is the same but for its text, in which nothing asks for an
alignment: does tuning then build what it unmasks in the other (`icatune/unmask`)? `"smoke"` takes seconds and teaches
nothing."""


def pretrain(
    recipe: Recipe, *, seed: int = 0, out: str | Path, state: str | Path | None = None, progress: bool = True
) -> TrainRun:
    """Trains a Llama from scratch and writes it to `out/model`; goes on from the last checkpoint of a killed run.

    Args:
        recipe: The model, its text and its training.
        seed: Fixes the weights and the documents.
        out: The folder for checkpoints, `log.csv` and the model; the last two are moved in together, at the end.
        state: The folder for checkpoints, from which a killed run goes on, if it is not `out`.
        progress: Whether to draw a progress bar.

    Returns:
        The run; its log holds, beside the loss, the first-token accuracy on pre-aligned, single-symbol and standard
        prompts, and the best induction, previous-token and `align_query` heads.

    Raises:
        ValueError: `out` cannot be written, or holds another run.
    """
    out = writable_folder(out)
    kept = out if state is None else writable_folder(state)
    model = untrained(recipe, seed)

    def sample(step: int, batch_seed: int) -> tuple[Tensor, Tensor, Tensor]:
        stage = recipe.stage(step)
        # One length for all documents of a batch, so that none is padded.
        length = stage.lengths[batch_seed % len(stage.lengths)]
        ids, weights, early = stage.mixture.sample(max(1, recipe.tokens // length), length, batch_seed)
        return ids, weights, early if stage.early else torch.full_like(early, PAD)

    run = train(
        model,
        sample,
        partial(_loss, early_layers=recipe.early_layers),
        recipe.train,
        seed=seed,
        out=inside(kept, "training"),
        progress=progress,
        recipe=asdict(recipe),
        metrics=lambda network, _: measure(network, recipe.metrics_prompts),
    )
    with replacing_in(out) as new:
        save(model, new / "model")
        run.log.to_csv(new / "log.csv", index=False)
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
    # Hugging Face draws weights, all replaced below, from the global generator, which must not move.
    with torch.random.fork_rng(devices=[]):
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
    """Writes a model as bf16 safetensors with the bundled tokenizer; it is moved to the folder once it is complete."""
    # Half the bytes, since the bundled weights travel with the package; a copy, since training may go on.
    narrow = copy.deepcopy(model).bfloat16()
    with replacing_in(folder) as new:
        narrow.save_pretrained(new)
        char_tokenizer().save_pretrained(new)


def measure(model: nn.Module, n: int, seed: int = 1) -> dict[str, float]:
    """Returns the metrics of the log: a few accuracies, and the scores and places of the best heads."""
    # A bridge wraps in place, and this model is being trained.
    copied: Any = copy.deepcopy(model)
    bridge = wrapped_in_place(copied, char_tokenizer())
    kinds: dict[str, tuple[int, Literal["standard", "pre-aligned"]]] = {
        "pre_aligned": (4, "pre-aligned"),
        "single": (1, "standard"),
        "standard": (5, "standard"),
    }
    metrics: dict[str, float] = {}
    for name, (m, style) in kinds.items():
        prompts = Seq2SeqTask(x_len=m, style=style).sample(n, bridge.tokenizer, seed, references=False)
        accuracy = evaluate(bridge, prompts).where(predictor="model", metric="accuracy", kind=["first", "later"]).frame
        metrics |= {f"{name}_{kind}": value for kind, value in zip(accuracy["kind"], accuracy["value"], strict=True)}
        if name == "standard":
            metrics |= _best(score_heads(bridge, prompts, ["align_query"]), "align_query")
    # The first four ids are special tokens.
    tokens = torch.randint(4, len(bridge.tokenizer), (n, 40), generator=torch.Generator().manual_seed(seed))
    repeated = Prompts.from_tokens(torch.cat([tokens, tokens], 1))
    scores = score_heads(bridge, repeated, ["induction", "previous"])
    return metrics | _best(scores, "induction") | _best(scores, "previous")


def _best(scores: Table, metric: str) -> dict[str, float]:
    row = scores.top(metric, 1).frame.iloc[0]
    return {metric: float(row["value"]), f"{metric}_layer": float(row["layer"]), f"{metric}_head": float(row["head"])}


def _loss(model: Any, batch: tuple[Tensor, Tensor, Tensor], early_layers: int) -> Float[Tensor, ""]:
    """The weighted loss of the next token, plus that of the early labels after the lower layers, if there are any."""
    labels, weights, early_labels = (column[:, 1:] for column in batch)
    has_early = early_labels != PAD
    outputs = model.model(batch[0][:, :-1], use_cache=False, output_hidden_states=bool(has_early.any()))
    # The 8 significant bits of bf16 are too few for a loss.
    logits = model.lm_head(outputs.last_hidden_state).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum()
    if outputs.hidden_states is not None:
        # Hidden states begin with the embeddings, and transformers norms the last of them alone.
        logits = model.lm_head(model.model.norm(outputs.hidden_states[early_layers][has_early])).float()
        loss = loss + F.cross_entropy(logits, early_labels[has_early], reduction="sum")
    return loss / weights.sum()
