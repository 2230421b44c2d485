"""Would recall's small models train faster as an ensemble? Six at once (`torch.func.vmap`) beside six in turn.

Both take the gradients of the same six models of the cpu scale on the same batches, on one thread, without an
optimizer. Ensembles pay where a step is mostly overhead, as for exemplars (`ensembles.py`): so the time of a step by
the number of its sequences is told, too.

    python benchmarks/recall_ensembles.py [--members 6] [--rounds 7]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from align_circuits.papers.recall.figures import figs_13_14_19_24_held_out as attention_only
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.models.training import logits_at

Batch = tuple[Tensor, Tensor]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seconds(function: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(models: Sequence[nn.Module], batches: Sequence[Batch], rounds: int) -> tuple[float, float, float]:
    """Returns the median seconds of the models in turn and at once, and the median ratio from round to round."""
    parameters, buffers = stack_module_state(list(models))
    tokens, labels = (torch.stack(part) for part in zip(*batches, strict=True))

    def in_turn() -> None:
        for model, (own_tokens, own_labels) in zip(models, batches, strict=True):
            loss_of(logits_at(model, own_tokens), own_labels).backward()
            model.zero_grad()

    def loss(own: Any, fixed: Any, own_tokens: Tensor, own_labels: Tensor) -> Tensor:
        out: Any = functional_call(models[0], (own, fixed), (own_tokens,))
        return loss_of(getattr(out, "logits", out), own_labels)

    step = vmap(grad(loss))

    def at_once() -> None:
        step(parameters, buffers, tokens, labels)

    in_turn()
    at_once()
    times = [(seconds(in_turn), seconds(at_once)) for _ in range(rounds)]
    turn, once = zip(*times, strict=True)
    return statistics.median(turn), statistics.median(once), statistics.median(a / b for a, b in times)


def main() -> None:
    """Prints both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.members)
    small, plain = gpt2.CPU, attention_only.CPU
    models: dict[str, tuple[list[Any], Callable[[int, int], Batch], int]] = {
        "GPT-2": (
            [gpt2.initial_gpt2(small, seed) for seed in seeds],
            lambda seed, n: small.facts(seed).batch(seed, n),
            small.batch_size,
        ),
        "attention-only": (
            [plain.model(seed) for seed in seeds],
            lambda seed, n: plain.facts(plain.world(seed)).batch(seed, n),
            plain.batch_size,
        ),
    }
    for model in models["GPT-2"][0]:
        model.config._attn_implementation = "eager"  # the fused attention of Hugging Face does not go through vmap
    print("models          sequences   in turn, s   at once, s   times as fast")
    for name, (members, batch, n) in models.items():
        turn, once, ratio = compare(members, [batch(seed, n) for seed in seeds], arguments.rounds)
        print(f"{name:15} {n:9} {turn:12.3f} {once:12.3f} {ratio:15.2f}")
        for fewer in (n, max(1, n // 4), 1):
            own_tokens, own_labels = batch(0, fewer)
            model = members[0]

            def lone(model: Any = model, tokens: Tensor = own_tokens, labels: Tensor = own_labels) -> None:
                loss_of(logits_at(model, tokens), labels).backward()

            lone()
            once = statistics.median(seconds(lone) for _ in range(arguments.rounds))
            print(f"{'  one of them':15} {fewer:9} {once:12.3f}")


if __name__ == "__main__":
    main()
