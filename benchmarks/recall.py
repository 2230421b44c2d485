"""Contextual recall: tokens a second of its samplers, and steps a second beside a plain minGPT-style loop.

Both loops train the paper's model (two layers of one head, d_model 256) on the same batches. The plain one is
minGPT's: attention written out as a masked softmax, GELU written out as a formula, all logits, AdamW one tensor after
the other, clipping; without dropout, and without a data loader, so that only what computes is compared. Ours is
`train` with `next_token_loss`: fused attention and GELU, logits where a label is, fused AdamW, and a checkpoint every
100 steps; in fp32 as the plain one, and with `precision="bf16"`, which pays where the processor multiplies bfloat16.
Steps alternate, so that whatever else the machine does meets both; times are those of the process, on one thread.

    python benchmarks/recall.py [--steps 7] [--out FOLDER]
"""

import itertools
import math
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from contest import Row, command_line, keep, ratios, rows_of
from torch import Tensor, nn

from align_circuits.papers.recall.models.gpt2 import small_gpt2
from align_circuits.papers.recall.models.training import FINETUNING, PRETRAINING, Stage, next_token_loss
from align_circuits.papers.recall.task.sequences import IGNORED, DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.training.loop import train


class PlainBlock(nn.Module):
    """A transformer block of minGPT, with one head."""

    def __init__(self, d_model: int, n_ctx: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
        self.register_buffer("causal", torch.ones(n_ctx, n_ctx, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP."""
        length = x.shape[1]
        q, k, v = (part[:, None] for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        causal: Any = self.causal
        scores = scores.masked_fill(~causal[:length, :length], float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v)[:, 0])
        h = self.up(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


class PlainGPT(nn.Module):
    """minGPT's model, its unembedding tied as in ours."""

    def __init__(self, d_vocab: int, n_ctx: int, d_model: int = 256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(d_vocab, d_model), nn.Embedding(n_ctx, d_model)
        self.blocks = nn.ModuleList(PlainBlock(d_model, n_ctx) for _ in range(2))
        self.ln_f = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x) @ self.tokens.weight.T


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """One step of minGPT's trainer."""
    tokens, labels = batch
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED)
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def compare(stage: Stage, steps: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps of the plain loop and of ours, a plain step before each of ours."""
    world, n_ctx = stage.task.world, stage.task.length
    plain, ours = PlainGPT(world.d_vocab, n_ctx), small_gpt2(world.d_vocab, n_ctx)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=1e-3, foreach=False)
    times: list[tuple[float, float]] = []

    def sample(_: int, seed: int) -> tuple[Tensor, Tensor]:
        begin = time.process_time()
        plain_step(plain, optimizer, stage.task.batch(seed, stage.batch_size))
        times.append((begin, time.process_time()))
        return stage.task.batch(seed, stage.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        config = replace(stage.train, steps=steps, log_every=steps)
        train(ours, sample, next_token_loss, config, out=folder, progress=False)
    theirs = [end - begin for begin, end in times]
    mine = [after - end for (_, end), (after, _) in itertools.pairwise(times)]
    return theirs[1:], mine


def tokens_a_second(task: FactsTask | DemonstrationsTask, n: int, batches: int) -> float:
    """Returns the median rate at which a task makes batches."""
    rates = []
    for seed in range(batches):
        begin = time.process_time()
        tokens, _ = task.batch(seed, n)
        rates.append(tokens.numel() / (time.process_time() - begin))
    return statistics.median(rates)


def main() -> None:
    """Prints both."""
    parser = command_line(__doc__, out=True)
    parser.add_argument("--steps", type=int, default=7, help="of each loop, on each kind of sequences")
    parser.add_argument("--batches", type=int, default=20, help="of each sampler")
    parser.add_argument("--sequences", nargs="*", help="which kinds, by their names in the table; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[Row] = []
    world = RecallWorld.paper()
    stages = {
        "PT, S = 80": Stage(FactsTask(world), PRETRAINING),
        "ICL, N = 16": Stage(DemonstrationsTask(world), FINETUNING),
        "ICL+Grm, S_ft = 1..5": Stage(DemonstrationsTask(world, grammar_lens=(1, 5)), FINETUNING),
    }
    for name in arguments.sequences or stages:
        stage = stages[name]
        rate = tokens_a_second(stage.task, stage.batch_size, arguments.batches)
        print(f"{name}: the sampler makes {rate / 1e6:.1f} million tokens a second")
        for precision in ("fp32", "bf16"):
            theirs, mine = compare(replace(stage, train=replace(stage.train, precision=precision)), arguments.steps)
            measured = {
                ("plain loop", "seconds a step"): theirs,
                ("train", "seconds a step"): mine,
                ("train", "times the plain loop's steps a second"): ratios(theirs, mine),
            }
            lines += rows_of(f"{name}, ours in {precision}", measured)
    keep(lines, arguments, width=256)


if __name__ == "__main__":
    main()
