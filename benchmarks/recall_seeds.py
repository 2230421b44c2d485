"""Would recall's small models train faster as an ensemble? Six at once (`torch.func.vmap`) beside six in turn.

Both take the gradients of the same six models of the cpu scale on the same batches, on one thread, without an
optimizer. Ensembles pay where a step is mostly overhead, as for exemplars (`ensembles.py`): so the time of a step by
the number of its sequences is told, too. What pays on two cores is told last: six trainings in two processes of one
thread each (`--jobs 2`) beside six in turn on two threads.

    python benchmarks/recall_ensembles.py [--members 6] [--rounds 7]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from align_circuits.papers.recall.figures import figs_13_14_19_24_held_out as attention_only
from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.models.training import logits_at

Batch = tuple[Tensor, Tensor]

STEPS = 50
"""Of each training on two cores."""


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


def gpt2_case(seed: int) -> tuple[Any, Batch]:
    """Returns a model and a batch of its world."""
    return gpt2.initial_gpt2(gpt2.CPU, seed), gpt2.CPU.facts(seed).batch(seed, gpt2.CPU.batch_size)


def attention_only_case(seed: int) -> tuple[Any, Batch]:
    """Returns a model and a batch of its world."""
    setup = attention_only.CPU
    return setup.model(seed), setup.facts(setup.world(seed)).batch(seed, setup.batch_size)


CASES: dict[str, Callable[[int], tuple[Any, Batch]]] = {"GPT-2": gpt2_case, "attention-only": attention_only_case}


def train(name: str, seed: int, steps: int) -> None:
    """Takes steps of AdamW."""
    model, (tokens, labels) = CASES[name](seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(steps):
        loss_of(logits_at(model, tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_two_cores(name: str, seeds: Sequence[int], steps: int, rounds: int) -> tuple[float, float, float]:
    """Returns the median seconds of trainings in turn on two threads and in two processes, and the median ratio."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as pool:

        def at_once() -> None:
            for training in [pool.submit(train, name, seed, steps) for seed in seeds]:
                training.result()

        def in_turn() -> None:
            for seed in seeds:
                train(name, seed, steps)

        torch.set_num_threads(2)
        in_turn()
        at_once()
        times = [(seconds(in_turn), seconds(at_once)) for _ in range(rounds)]
        torch.set_num_threads(1)
    turn, once = zip(*times, strict=True)
    return statistics.median(turn), statistics.median(once), statistics.median(a / b for a, b in times)


def main() -> None:
    """Prints the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.members)
    print("models          sequences   in turn, s   at once, s   times as fast")
    for name, case in CASES.items():
        models, batches = zip(*map(case, seeds), strict=True)
        model, (tokens, labels) = models[0], batches[0]
        if name == "GPT-2":
            for each in models:
                each.config._attn_implementation = "eager"  # the fused attention does not go through vmap
        turn, once, ratio = compare(models, batches, arguments.rounds)
        print(f"{name:15} {len(tokens):9} {turn:12.3f} {once:12.3f} {ratio:15.2f}")
        for n in (len(tokens), len(tokens) // 4, 1):

            def lone(model: Any = model, tokens: Tensor = tokens[:n], labels: Tensor = labels[:n]) -> None:
                loss_of(logits_at(model, tokens), labels).backward()

            lone()
            once = statistics.median(seconds(lone) for _ in range(arguments.rounds))
            print(f"{'  one of them':15} {n:9} {once:12.3f}")
    print("models          steps each   two threads, s   two processes, s   times as fast")
    for name in CASES:
        turn, once, ratio = on_two_cores(name, seeds, STEPS, max(3, arguments.rounds // 2))
        print(f"{name:15} {STEPS:10} {turn:16.2f} {once:18.2f} {ratio:15.2f}")


if __name__ == "__main__":
    main()
