"""Steps a second of `train` beside a plain minGPT-style loop: same model, same batches, interleaved in one run.

The plain loop is minGPT's trainer without its data loader: forward, zero_grad, backward, clip, AdamW; no checkpoint,
no log. `train` runs once with a checkpoint after every step, once with nothing kept (`out=None`). With `--bfloat16`
both run once more in that precision; on a processor without instructions for it `train` computes its products in
float32, and the plain loop leaves them to PyTorch.

A step's time is the median over the steps of a run; the ratio is the median over rounds.

    python benchmarks/training_loop.py [--steps 20] [--rounds 9] [--threads 1] [--device cuda] [--bfloat16]
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from contest import command_line, ratios, spread
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.training.loop import Precision, TrainConfig, train

SHAPE = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
)
BATCH, LENGTH = 16, 128
PLAIN = "plain minGPT-style loop"
NARROW = ("plain loop, bfloat16", "train, no checkpoints, bfloat16")


def llama(device: str) -> nn.Module:
    """Builds the same model every time."""
    torch.manual_seed(0)
    return nn.Module.to(LlamaForCausalLM(SHAPE), device)


class Batches:
    """Random tokens, repeated once; notes when each was asked for."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, step: int, _seed: int) -> Tensor:
        """Returns the batch of a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        half = torch.randint(64, (BATCH, LENGTH // 2), generator=torch.Generator().manual_seed(step))
        return torch.cat([half, half], dim=1)

    def seconds(self) -> float:
        """Returns the median time from one batch to the next."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.times))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    logits = model(ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain(device: str, steps: int, sample: Batches, *, narrow: bool = False) -> nn.Module:
    """The loop that one writes by hand."""
    model = llama(device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(1, steps + 1):
        batch = sample(step, 0).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            value = loss(model, batch)
        model.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def ours(device: str, steps: int, sample: Batches, out: str | None, precision: Precision = "fp32") -> nn.Module:
    """The same training by `train`."""
    config = TrainConfig(steps, weight_decay=0.1, checkpoint_every=1, precision=precision)
    return train(llama(device), sample, loss, config, out=out, progress=False).model


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, steps = arguments.device, arguments.steps

    runs: dict[str, Callable[[Batches, str], nn.Module]] = {
        PLAIN: lambda sample, _: plain(device, steps, sample),
        "train, checkpoint every step": lambda sample, folder: ours(device, steps, sample, folder),
        "train, no checkpoints": lambda sample, _: ours(device, steps, sample, None),
    }
    if arguments.bfloat16:
        narrow = (
            lambda sample, _: plain(device, steps, sample, narrow=True),
            lambda sample, _: ours(device, steps, sample, None, "bf16"),
        )
        runs |= dict(zip(NARROW, narrow, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    reference = plain(device, steps, Batches())
    for turn in range(arguments.rounds):
        first = turn % len(runs)
        for name in list(runs)[first:] + list(runs)[:first]:
            batches = Batches()
            with tempfile.TemporaryDirectory() as folder:
                model = runs[name](batches, folder)
            seconds[name].append(batches.seconds())
            if name in NARROW:
                continue  # rounded to other numbers
            for one, other in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)  # or the comparison means nothing

    size = sum(parameter.numel() for parameter in reference.parameters())
    print(f"{size:,} parameters, batch {BATCH} x {LENGTH}, {arguments.rounds} rounds of {steps} steps")
    print(f"{arguments.threads} threads, {device}, torch {torch.__version__}")
    for name, taken in seconds.items():
        speed = f"{name:32} {1 / statistics.median(taken):7.2f} steps/s"
        print(f"{speed}   {spread(ratios(seconds[PLAIN], taken), 3)} times the plain loop")


if __name__ == "__main__":
    main()
