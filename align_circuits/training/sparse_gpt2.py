"""The recipe of `sparse-gpt2`, a bundled model of few heads: attention is hinted at first, then heads are removed."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from align_circuits.hooks.head_names import Head
from align_circuits.jobs.files import inside, writable_folder
from align_circuits.jobs.folders import replacing_in
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tasks.layout import layout_of
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.loop import TrainConfig, TrainRun, train

PHRASE_LEN = 2
"""Letters in a phrase."""

FEWEST_EXAMPLES = 6
"""Examples in a training prompt at least."""

EMBEDDED = 0.05
"""The standard deviation of fresh embeddings, and the amplitude of those of positions."""

UNSEEN = 2
"""Examples at the start of a prompt whose letters have no loss: little is known of the automata there."""


@dataclass(frozen=True)
class SparseRecipe:
    """A GPT-2, the prompts that it learns from, and what presses on its heads."""

    train: TrainConfig
    x_len: tuple[int, ...] = (5,)
    """Symbols in an input; each update takes one of these lengths."""
    most_examples: int = 15
    """Examples in a prompt at most, before the last line; the model accepts no longer prompts."""
    tokens: int = 3000
    """Tokens in a batch."""
    n_layers: int = 3
    n_heads: int = 8
    d_model: int = 128
    d_mlp: int = 256
    hinted: Mapping[str, Head] = field(
        default_factory=lambda: {
            "align_query": (0, 0),
            "align_key": (0, 1),
            "previous": (0, 2),
            "lookup": (1, 0),
            "lookup, later": (1, 1),
        }
    )
    """The heads that are taught where to attend, at the start (`hints`), and that are left at the end."""
    hint_steps: int = 300
    """The updates with hints."""
    hint_weight: float = 0.3
    """The weight of the hints in the loss; in the second half of these updates it falls to 0."""
    prune_from: int = 400
    """The update from which removals are counted: the first comes `prune_every` later."""
    prune_every: int = 15
    """The updates from one removal to the next."""

    @property
    def n_ctx(self) -> int:
        """The tokens of the longest prompt."""
        return max(layout_of("standard", m, PHRASE_LEN, self.most_examples, True).index.numel() for m in self.x_len)


SPARSE_GPT2 = SparseRecipe(
    TrainConfig(
        steps=900,
        lr=0.01,
        rest_lr=0.003,
        optimizer="muon-fp32",
        weight_decay=0.01,
        betas=(0.9, 0.98),
        schedule="linear",
        warmup=50,
        decay=200,
        clip=None,
        log_every=50,
    )
)
"""The recipe of the bundled weights."""


class _Pruned(nn.Module):
    """The model, and which of its heads are left: the output of the others is 0."""

    kept: Bool[Tensor, "layer head"]

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__()
        self.model = model
        config = model.config
        self.register_buffer("kept", torch.ones(config.n_layer, config.n_head, dtype=torch.bool))
        for layer, writes in enumerate(self.writers()):
            writes.register_forward_pre_hook(lambda _, given, layer=layer: (given[0] * self.of(layer),))

    def writers(self) -> list[Any]:
        """The modules that write the heads' outputs into the residual stream, by layer."""
        model: Any = self.model
        return [block.attn.c_proj for block in model.transformer.h]

    def of(self, layer: int) -> Float[Tensor, " d_model"]:
        """1 at the outputs of the layer's heads that are left, 0 at those of the others."""
        return self.kept[layer].float().repeat_interleave(self.model.config.n_embd // self.model.config.n_head)

    def loss(self, batch: Mapping[str, Any], hinted: Mapping[str, Head]) -> Float[Tensor, ""]:
        """The mean cross-entropy of the letters, and the hints with their weight in this batch."""
        queries = batch["letters"][UNSEEN:].flatten() - 1
        with_hints = bool(hinted) and batch["hint"] > 0
        outputs = self.model(batch["ids"], logits_to_keep=queries, use_cache=False, output_attentions=with_hints)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), batch["ids"][:, queries + 1].flatten())
        return loss + batch["hint"] * hints(outputs.attentions, hinted, batch) if with_hints else loss

    @torch.no_grad()
    def remove_one(self, batch: Mapping[str, Any], hinted: Collection[Head]) -> None:
        """Removes the head without a hint whose removal costs the least loss on a batch; none where none is left."""
        losses: dict[Head, float] = {}
        for layer, head in self.kept.nonzero().tolist():
            if (layer, head) in hinted:
                continue
            self.kept[layer, head] = False
            losses[layer, head] = float(self.loss(batch, {}))
            self.kept[layer, head] = True
        if losses:
            self.kept[min(losses, key=lambda head: losses[head])] = False


def pretrain_sparse(
    recipe: SparseRecipe, *, seed: int = 0, out: str | Path, state: str | Path | None = None, progress: bool = True
) -> TrainRun:
    """Trains a GPT-2 of few heads from scratch and writes it to `out/model`; a killed run goes on.

    It learns standard prompts of `Seq2SeqTask` with automata fresh for every prompt. At the start five heads are taught
    where to attend (`hints`); then they learn from the letters alone. Later all other heads are removed one by one,
    each time that whose removal costs the least. The weights that would write the output of a removed head are 0; where
    it attends is left.

    Source: pruning of the least important heads, step by step: Michel et al. (2019), "Are Sixteen Heads Really Better
    than One?", §4; there importance is a gradient, here the loss itself.

    Args:
        recipe: The model, its prompts and its training.
        seed: Fixes weights and prompts.
        out: The folder for `log.csv` and the model.
        state: The folder for checkpoints, if it is not `out`.
        progress: Whether to draw a progress bar.

    Returns:
        The run; its log holds, beside the loss, the number of heads left.

    Raises:
        ValueError: `out` cannot be written, or holds another run.
    """
    out = writable_folder(out)
    kept = out if state is None else writable_folder(state)
    network = _Pruned(_untrained(recipe, seed))
    run = train(
        network,
        lambda step, batch_seed: _batch(recipe, step, batch_seed),
        partial(_loss, hinted=recipe.hinted),
        recipe.train,
        seed=seed,
        out=inside(kept, "training"),
        progress=progress,
        recipe=asdict(recipe),
        metrics=lambda *_: {"heads": float(network.kept.sum())},
    )
    with replacing_in(out) as new, torch.no_grad():
        for layer, writer in enumerate(network.writers()):
            # GPT-2's Conv1D has a row for each input.
            writer.weight *= network.of(layer)[:, None]
        network.model.save_pretrained(new / "model")
        char_tokenizer().save_pretrained(new / "model")
        run.log.to_csv(new / "log.csv", index=False)
    return run


def hints(
    attention: Sequence[Float[Tensor, "prompt head query key"]], hinted: Mapping[str, Head], batch: Mapping[str, Any]
) -> Float[Tensor, ""]:
    """Returns the loss that teaches heads where to attend: for each, mean -log of its attention to the right tokens.

    - `align_query`: from the position before a phrase, to the symbol that the phrase translates;
    - `align_key`: from each letter, to the symbol that it translates;
    - `previous`: from each letter, to the token before;
    - `lookup`: from the position before a phrase, to the first letters of earlier phrases of the same symbol;
    - `"lookup, later"`: from its first letter, to the second letters of those that begin with that letter.
    """
    letters, symbols = batch["letters"], batch["inputs"]
    symbol, first = batch["order"].flatten(1), batch["phrases"][..., 0].flatten(1)
    example = torch.arange(len(letters)).repeat_interleave(letters.shape[1])
    earlier = (symbol[:, :, None] == symbol[:, None]) & (example[:, None] > example)
    identity = torch.eye(letters.numel(), dtype=torch.bool)
    phrase = torch.eye(symbols.numel(), dtype=torch.bool)
    wanted = {
        "align_query": (letters[..., 0] - 1, symbols, phrase),
        "align_key": (letters, symbols, phrase.repeat_interleave(PHRASE_LEN, 0)),
        "previous": (letters, letters - 1, identity),
        "lookup": (letters[..., 0] - 1, letters[..., 0], earlier),
        "lookup, later": (letters[..., 0], letters[..., 1], earlier & (first[:, :, None] == first[:, None])),
    }
    losses = []
    for role, (layer, head) in hinted.items():
        queries, keys, gold = wanted[role]
        share = (attention[layer][:, head, queries.flatten()][..., keys.flatten()] * gold).sum(-1)
        # A share near 0, as at the start, would have a gradient without bound.
        losses.append(-(share + 1e-4).log()[gold.any(-1).expand_as(share)].mean())
    return torch.stack(losses).sum()


def _loss(network: Any, batch: Mapping[str, Any], hinted: Mapping[str, Head]) -> Float[Tensor, ""]:
    if batch["prunes"]:
        network.remove_one(batch, hinted.values())
    return network.loss(batch, hinted)


def _batch(recipe: SparseRecipe, step: int, seed: int) -> dict[str, Any]:
    """Prompts as token ids, where their symbols and letters stand, and what the step asks for."""
    rng, is_hinted = np.random.default_rng(seed), step <= recipe.hint_steps
    m, k = int(rng.choice(recipe.x_len)), int(rng.integers(FEWEST_EXAMPLES, recipe.most_examples + 1))
    most_edges = int(rng.integers(1, 4)) if is_hinted else 4  # easier automata while attention is taught
    task = Seq2SeqTask(x_len=m, phrase_len=PHRASE_LEN, n_examples=k, edge_range=(1, most_edges))
    layout = layout_of("standard", m, PHRASE_LEN, k, bos=True)
    length = len(layout.index)
    prompts = task.sample(max(1, recipe.tokens // length), char_tokenizer(), seed, references=False)
    since = step - recipe.prune_from
    return {
        "ids": prompts.inputs,
        "inputs": layout.inputs,
        "letters": layout.outputs,
        "order": prompts.latent["order"],
        "phrases": prompts.latent["phrases"],
        "hint": recipe.hint_weight * min(1.0, 2 - 2 * step / recipe.hint_steps) if is_hinted else 0.0,
        "prunes": since > 0 and since % recipe.prune_every == 0,
    }


def _untrained(recipe: SparseRecipe, seed: int) -> GPT2LMHeadModel:
    """The model with fresh weights: matrices as in the toy Llama, positions as sinusoids (Vaswani et al., 2017)."""
    tokenizer: Any = char_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=recipe.n_ctx,
        n_embd=recipe.d_model,
        n_layer=recipe.n_layers,
        n_head=recipe.n_heads,
        n_inner=recipe.d_mlp,
        # No dropout: every batch is fresh, so there is nothing to learn by heart.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # Hugging Face draws weights, all replaced below
        model = GPT2LMHeadModel(config)
    model.set_attn_implementation("eager")  # which returns the attention that hints read
    generator = torch.Generator().manual_seed(seed)
    frequency = math.pi * recipe.n_ctx ** -(torch.arange(recipe.d_model // 2) / (recipe.d_model // 2))
    angle = torch.arange(recipe.n_ctx)[:, None] * frequency
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("wpe.weight"):
                weight.copy_(EMBEDDED * torch.cat([angle.sin(), angle.cos()], 1))
            elif name.endswith("wte.weight"):
                weight.normal_(0, EMBEDDED, generator=generator)
            elif weight.ndim == 2:
                writes = 2 * recipe.n_layers if "c_proj" in name else 1
                weight.normal_(0, (weight.shape[0] * writes) ** -0.5, generator=generator)
    return model
