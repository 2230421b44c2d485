"""Steps a second of `train` beside a plain minGPT-style loop: same model, same batches, interleaved in one run.

The plain loop is minGPT's trainer without its data loader: forward, zero_grad, backward, clip, AdamW; no checkpoint,
no log. `train` runs once with a checkpoint after every step (its default), once with nothing kept (`out=None`).

    python benchmarks/training_loop.py [--steps 40] [--rounds 5] [--threads 1] [--device cuda]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.training import TrainConfig, train

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=256,
)  # fmt: skip
BATCH, LENGTH = 16, 128


def llama(device: str) -> nn.Module:
    """Builds the same model every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(SHAPE).to(device)


def sample(step: int, _seed: int) -> Tensor:
    """Random tokens, repeated once."""
    half = torch.randint(64, (BATCH, LENGTH // 2), generator=torch.Generator().manual_seed(step))
    return torch.cat([half, half], dim=1)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    logits = model(ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain(device: str, steps: int) -> nn.Module:
    """The loop that one writes by hand."""
    model = llama(device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(1, steps + 1):
        batch = sample(step, 0).to(device)
        value = loss(model, batch)
        model.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def ours(device: str, steps: int, out: str | None) -> nn.Module:
    """The same training by `train`."""
    config = TrainConfig(steps, weight_decay=0.1)
    return train(llama(device), sample, loss, config, out=out, progress=False).model


def seconds(run: Callable[[], nn.Module], device: str) -> tuple[float, nn.Module]:
    """Times one training."""
    begun = time.perf_counter()
    model = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, model


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, steps = arguments.device, arguments.steps

    runs: dict[str, Callable[[str], nn.Module]] = {
        "plain minGPT-style loop": lambda _: plain(device, steps),
        "train, checkpoint every step": lambda folder: ours(device, steps, folder),
        "train, no checkpoints": lambda _: ours(device, steps, None),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    plain(device, 2)
    for turn in range(arguments.rounds):
        models = []
        for name in list(runs)[turn % 3 :] + list(runs)[: turn % 3]:
            with tempfile.TemporaryDirectory() as folder:
                taken, model = seconds(lambda run=runs[name], at=folder: run(at), device)
            times[name].append(taken)
            models.append(model)
        for model in models[1:]:  # the same training, or the comparison means nothing
            for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)

    size = sum(parameter.numel() for parameter in models[0].parameters())
    print(f"{size:,} parameters, batch {BATCH} x {LENGTH}, {steps} steps, {arguments.rounds} rounds")
    print(f"{arguments.threads} threads, {device}, torch {torch.__version__}")
    base = times["plain minGPT-style loop"]
    for name, taken in times.items():
        ratios = sorted(one / other for one, other in zip(base, taken, strict=True))
        speed = f"{name:30} {steps / statistics.median(taken):7.2f} steps/s"
        print(f"{speed}   {statistics.median(ratios):.3f} times the plain loop ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
