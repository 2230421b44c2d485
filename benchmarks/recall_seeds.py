"""Six seeds of contextual recall's models at the cpu scale beside six plain PyTorch loops.

A plain loop is what one writes by hand: minGPT's model (`recall.py`), or an attention-only model of `nn.Embedding` and
`nn.Linear`; all logits; PyTorch's AdamW and Muon; no checkpoint, no log. Ours is `train_stage` without probes, with a
checkpoint at either end. Both run one after another on all threads, and in processes of one thread each, which is what
`reproduce --jobs` does with ours. They start with the same weights, draw new sequences in each step, and take the same
number of steps; processes are started before their time is taken. Times are wall-clock; a round runs all in turn;
ratios are medians over rounds.

Then, on one thread, attention-only models by `logits`, products of weights, beside `forward`, by the number of their
subjects. Last, on one thread, why there is no class for many models at once, as there is for exemplars
(`ensembles.py`): gradients of all models at once (`torch.func.vmap`) beside one after another, and of fewer sequences.
GPT-2's attention is eager on both sides, since the fused one does not go through vmap.

    python benchmarks/recall_seeds.py [--models GPT-2] [--members 6] [--steps 100] [--rounds 3] [--threads 2]
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from contest import command_line, processor, spread, timed
from ensembles import linear
from recall import PlainGPT
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from align_circuits.papers.recall.figures import gpt2_models as gpt2
from align_circuits.papers.recall.figures.figs_2_to_7_15_training import WITH_ADAMW
from align_circuits.papers.recall.figures.figs_13_14_19_24_held_out import CPU
from align_circuits.papers.recall.models.attention_only import AttentionOnly
from align_circuits.papers.recall.models.training import FINETUNING, PRETRAINING, Stage, logits_at, train_stage
from align_circuits.papers.recall.task.sequences import IGNORED
from align_circuits.training.loop import TrainConfig


class PlainAttention(nn.Module):
    """An attention-only model with relative positions, written by hand, with the weights of ours."""

    def __init__(self, ours: AttentionOnly):
        super().__init__()
        cfg = ours.cfg
        self.n_heads = cfg.n_heads
        self.query, self.key, self.value = (
            nn.Embedding.from_pretrained(
                weight[:, : cfg.d_vocab].detach().transpose(0, 1).flatten(1).clone(), freeze=False
            )
            for weight in (ours.W_Q, ours.W_K, ours.W_V)
        )
        self.out = linear(ours.W_O.flatten(0, 1))
        self.positions = nn.Parameter(ours.W_K[:, cfg.d_vocab :].detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        n, length = tokens.shape
        q, k, v = (
            table(tokens).view(n, length, self.n_heads, -1).transpose(1, 2)
            for table in (self.query, self.key, self.value)
        )
        pos = torch.arange(length)
        distance = pos[:, None] - pos
        of_positions = q @ self.positions[:, :length].mT
        scores = q @ k.mT + of_positions.gather(-1, distance.clamp(min=0).expand_as(of_positions))
        z = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
        return self.out(z.transpose(1, 2).reshape(n, length, -1))


def plain_gpt2(ours: Any) -> PlainGPT:
    """Returns minGPT's model with the weights of ours."""
    body = ours.transformer
    plain = PlainGPT(*body.wte.weight.shape[:1], *body.wpe.weight.shape)
    plain.tokens, plain.positions, plain.ln_f = body.wte, body.wpe, body.ln_f
    for block, theirs in zip(plain.blocks, body.h, strict=True):
        block.ln_1, block.ln_2 = theirs.ln_1, theirs.ln_2
        layers = {
            "qkv": theirs.attn.c_attn,
            "out": theirs.attn.c_proj,
            "up": theirs.mlp.c_fc,
            "down": theirs.mlp.c_proj,
        }
        for name, layer in layers.items():
            setattr(block, name, linear(layer.weight, layer.bias))
    return plain


@dataclass(frozen=True)
class Case:
    """A training of a figure."""

    model: Callable[[int], Any]
    """Ours, of a seed."""
    plain: Callable[[Any], nn.Module]
    """The same model, written by hand."""
    stage: Callable[[int], Stage]
    """Of a seed."""


def gpt2_case(setup: gpt2.GPT2Setup, finetuned: gpt2.Finetuned | None = None) -> Case:
    """Returns pretraining of a setup, or finetuning."""

    def stage(seed: int) -> Stage:
        task = setup.demonstrations(seed, finetuned) if finetuned else setup.facts(seed)
        return Stage(task, setup.finetuning if finetuned else setup.pretraining, setup.batch_size)

    return Case(lambda seed: gpt2.initial_gpt2(setup, seed), plain_gpt2, stage)


def pretraining(seed: int) -> Stage:
    """Returns the pretraining of attention-only models."""
    return Stage(CPU.facts(CPU.world(seed)), CPU.schedule(PRETRAINING, CPU.pretraining), CPU.batch_size)


def finetuning(seed: int) -> Stage:
    """Returns their finetuning."""
    return Stage(CPU.demonstrations(seed)[0], CPU.schedule(FINETUNING, CPU.finetuning), CPU.batch_size, "last")


CASES: dict[str, Case] = {
    "GPT-2, pretraining, Muon": gpt2_case(gpt2.CPU),
    "GPT-2, ICL+Grm, AdamW": gpt2_case(gpt2.CPU, "icl+grm"),
    "GPT-2, pretraining, AdamW (Fig. 2)": gpt2_case(WITH_ADAMW),
    "attention-only, pretraining": Case(CPU.model, PlainAttention, pretraining),
    "attention-only, ICL": Case(CPU.model, PlainAttention, finetuning),
}

WHOLE: dict[str, dict[str, int]] = {
    "GPT-2, both stages": {
        "GPT-2, pretraining, Muon": gpt2.CPU.pretraining.steps,
        "GPT-2, ICL+Grm, AdamW": gpt2.CPU.finetuning.steps,
    },
    "attention-only, both stages": {
        "attention-only, pretraining": CPU.pretraining,
        "attention-only, ICL": CPU.finetuning,
    },
}
"""The steps of each stage of a model."""


def plain_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Returns PyTorch's optimizers with their own defaults."""
    parameters, given = dict(model.named_parameters()), {"weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=config.lr, **given)]
    inside = {name: each for name, each in parameters.items() if name.startswith("blocks.") and each.ndim == 2}
    rest = [each for name, each in parameters.items() if name not in inside]
    return [
        torch.optim.Muon(inside.values(), lr=config.lr, **given),
        torch.optim.AdamW(rest, lr=config.rest_lr or config.lr, **given),
    ]


def plain_loop(name: str, seed: int, steps: int) -> None:
    """Trains a model written by hand."""
    case = CASES[name]
    stage, model = case.stage(seed), case.plain(case.model(seed))
    optimizers = plain_optimizers(model, stage.train)
    for step in range(steps):
        tokens, labels = stage.task.batch(step, stage.batch_size, stage.predict)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def our_loop(name: str, seed: int, steps: int) -> None:
    """Trains a model with `train_stage`."""
    case = CASES[name]
    stage = case.stage(seed)
    config = replace(stage.train, steps=steps, warmup=0, log_every=steps, checkpoint_every=None)
    with tempfile.TemporaryDirectory() as folder:
        train_stage(case.model(seed), replace(stage, train=config), seed=seed, out=folder, progress=False)


def seconds(function: Callable[[], object]) -> float:
    """Returns how long a call takes by the clock: others run in processes of their own."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare_trainings(
    name: str, seeds: Sequence[int], steps: int, rounds: int, pool: ProcessPoolExecutor
) -> list[list[float]]:
    """Returns how long a step of one model takes, in milliseconds: of each contestant in each round."""
    case = CASES[name]
    ours, stage = case.model(0), case.stage(0)
    tokens, labels = stage.task.batch(0, stage.batch_size, stage.predict)
    at = labels != IGNORED
    same = logits_at(ours, tokens, None if at.all() else at)
    torch.testing.assert_close(case.plain(ours)(tokens)[at], same.view(-1, same.shape[-1]))  # or it means nothing

    def in_turn(loop: Callable[[str, int, int], None]) -> None:
        for seed in seeds:
            loop(name, seed, steps)

    def in_processes(loop: Callable[[str, int, int], None]) -> None:
        for training in [pool.submit(loop, name, seed, steps) for seed in seeds]:
            training.result()

    contestants = [partial(how, loop) for how in (in_turn, in_processes) for loop in (plain_loop, our_loop)]
    for contestant in contestants:
        contestant()
    each = 1000 / (steps * len(seeds))
    return [[each * seconds(contestant) for contestant in contestants] for _ in range(rounds)]


def show(name: str, times: Sequence[Sequence[float]]) -> None:
    """Prints the medians of the contestants' times, and how many times as fast ours are as plain loops in turn."""
    medians = "".join(f"{statistics.median(column):9.1f}" for column in zip(*times, strict=True))
    line = f"{name:48}{medians}"
    for ours in (1, 3):
        line += f"   {spread([row[0] / row[ours] for row in times])}"
    print(line, flush=True)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compare_forms(n_subjects: int, rounds: int) -> None:
    """Prints the times of gradients by `forward` and by `logits`."""
    setup = replace(CPU, n_subjects=n_subjects)
    model = setup.model(0)
    tokens, labels = setup.facts(setup.world(0)).batch(0, setup.batch_size)

    def gradients(form: Callable[[Tensor], Tensor]) -> None:
        model.zero_grad()
        loss_of(form(tokens), labels).backward()

    gradients(model)
    gradients(model.logits)
    times = [
        [timed(lambda form=form: gradients(form))[0] for form in (model, model.logits)] for _ in range(10 * rounds)
    ]
    one, other = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(first / second for first, second in times)
    share = f"{tokens.numel() / model.cfg.d_vocab:.1f} times as many tokens as the vocabulary of {model.cfg.d_vocab}"
    print(f"{share}: {one:.1f} ms by `forward`, {other:.1f} ms by `logits`, {ratio:.2f} times as fast", flush=True)


class Trained(nn.Module):
    """A model whose forward pass is that of training."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        return logits_at(self.model, tokens)


def compare_gradients(name: str, seeds: Sequence[int], rounds: int) -> None:
    """Prints the times of gradients at once and in turn, and of one model by the number of its sequences."""
    case = CASES[name]
    models = [Trained(case.model(seed)) for seed in seeds]
    batches = [case.stage(seed).task.batch(seed, case.stage(seed).batch_size) for seed in seeds]
    for each in models:
        if not isinstance(each.model, AttentionOnly):
            each.model.config._attn_implementation = "eager"  # the fused attention does not go through vmap
    parameters, buffers = stack_module_state(models)
    tokens, labels = (torch.stack(part) for part in zip(*batches, strict=True))

    def in_turn() -> None:
        for model, (own_tokens, own_labels) in zip(models, batches, strict=True):
            loss_of(model(own_tokens), own_labels).backward()
            model.zero_grad()

    def loss(own: Any, fixed: Any, own_tokens: Tensor, own_labels: Tensor) -> Tensor:
        return loss_of(functional_call(models[0], (own, fixed), (own_tokens,)), own_labels)

    at_once = vmap(grad(loss))
    in_turn()
    at_once(parameters, buffers, tokens, labels)
    times = [(timed(in_turn)[0], timed(lambda: at_once(parameters, buffers, tokens, labels))[0]) for _ in range(rounds)]
    ratio = statistics.median(one / other for one, other in times)
    model, (own_tokens, own_labels) = models[0], batches[0]
    few = []
    for n in (len(own_tokens), len(own_tokens) // 4, 1):

        def lone(n: int = n) -> None:
            loss_of(model(own_tokens[:n]), own_labels[:n]).backward()

        lone()
        few.append(f"{1000 * statistics.median(timed(lone)[0] for _ in range(rounds)):.1f} ms for {n}")
    print(f"{name:28} at once {ratio:.2f} times as fast as in turn; one model takes " + ", ".join(few))


def main() -> None:
    """Prints the comparisons."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--models", nargs="+", choices=("GPT-2", "attention-only"), default=("GPT-2", "attention-only"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="and as many processes")
    arguments = parser.parse_args()
    seeds = range(arguments.members)
    torch.set_num_threads(arguments.threads)
    print(f"{processor()}, torch {torch.__version__}, {arguments.threads} threads or as many processes of one thread")
    print(f"{arguments.members} seeds of {arguments.steps} steps, {arguments.rounds} rounds; ms a step of one model")
    print(f"{'':48}{'in turn':>18}{'processes':>18}   times as fast as plain loops in turn")
    print(f"{'':48}{'plain':>9}{'ours':>9}{'plain':>9}{'ours':>9}   {'ours in turn':20}   in processes")
    context, measured = multiprocessing.get_context("spawn"), {}
    with ProcessPoolExecutor(arguments.threads, context, torch.set_num_threads, (1,)) as pool:
        for name in (each for each in CASES if each.startswith(tuple(arguments.models))):
            measured[name] = compare_trainings(name, seeds, arguments.steps, arguments.rounds, pool)
            show(name, measured[name])
    for name, stages in WHOLE.items():
        if not name.startswith(tuple(arguments.models)):
            continue
        total = sum(stages.values())
        rounds = zip(*(measured[stage] for stage in stages), strict=True)
        steps = [count / total for count in stages.values()]
        means = [
            [sum(share * time for share, time in zip(steps, column, strict=True)) for column in zip(*each, strict=True)]
            for each in rounds
        ]
        show(f"{name} ({' + '.join(f'{count:,}' for count in stages.values())} steps)", means)
    torch.set_num_threads(1)
    print("\nGradients of one attention-only model, on one thread")
    for n_subjects in (64, 128, 256, 512):
        compare_forms(n_subjects, arguments.rounds)
    print(f"\nGradients of {arguments.members} models by vmap, on one thread")
    for name in ("GPT-2, pretraining, AdamW (Fig. 2)", "attention-only, pretraining"):
        compare_gradients(name, seeds, arguments.rounds)


if __name__ == "__main__":
    main()
