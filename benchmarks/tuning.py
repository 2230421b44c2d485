"""Tokens a second and peak memory of `tune` beside Hugging Face's `Trainer` with PEFT: same model, prompts and LoRA.

8 layers, width 512, prompts of m = 4, c = 2, k = 15, one a step, the loss on the last example's output. Both train the
same LoRA (r 16 on q, k, v) with AdamW, linear decay and clipping, from one seed without dropout, and end with the same
weights, or the comparison means nothing. Neither writes checkpoints; `tune` takes no probes but the first and the last,
which are not timed. Each runs in a process of its own, in turn; a step's time is the median from batch to batch,
of processor time, which on one thread and a quiet machine is the time on the clock.

Then the share of the time that probes every 10 steps take, at 1, 8 and 16 prompts a step: probes of their default size,
and of 10 prompts where a step has one.

With `--loop`, instead, `tune` as the command line calls it, probes and checkpoints included, beside a plain loop:
`get_peft_model` on the model that transformers loads, the same LoRA and drawn prompts, all logits, AdamW, clipping,
linear decay. Both run in one process, a step of the loop before each of `tune`'s, so that they meet the same machine.
Loading is not counted; all that `tune` does is.

The vocabulary is that of Llama 3 by default, since logits are what `Trainer` computes at all positions; `--vocab 64`
shows what is left of the difference without them.

    python benchmarks/tuning.py [--steps 12] [--rounds 3] [--vocab 128256]
    python benchmarks/tuning.py --loop toy-llama --steps 200
    python benchmarks/tuning.py --loop smollm2 --steps 100
"""

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contest import random_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import align_circuits as ac
from align_circuits.models.loading import BUNDLED
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.training import tuning
from align_circuits.training.loop import _seeds
from align_circuits.training.probe import Probe

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=15)
LR, R, ALPHA = 2e-4, 16, 8


def llama(vocab: int) -> Any:
    """Builds the same model every time."""
    return random_llama(8, 512, key_heads=8, vocabulary=vocab, initializer_range=0.02).train()


def prompts(steps: int) -> Any:
    """The prompts that `tune` draws, one a step."""
    tokenizer = char_tokenizer()
    return [TASK.sample(1, tokenizer, _seeds(0, step)[0], references=False) for step in range(1, steps + 1)]


def peak() -> float:
    """Returns the most memory that this process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(vocab: int, steps: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """Tunes with `tune`."""
    model = ac.load(llama(vocab), tokenizer=char_tokenizer())
    before, times, real = peak(), [], tuning._loss

    def timed(*given: Any, **options: Any) -> Tensor:
        times.append(time.process_time())
        return real(*given, **options)

    tuning._loss = timed
    config = ac.TuneConfig(steps=steps, lr=LR, r=R, alpha=ALPHA, dropout=0.0, probe_every=steps, probe_prompts=1)
    run = tuning.tune(model, TASK, config, progress=False)
    weights = {name: value for name, value in run.model.original_model.named_parameters() if "lora" in name}
    return times, peak() - before, {name.replace("._original_component", ""): value for name, value in weights.items()}


def share_of_probes(vocab: int, batch: int, size: int | None) -> float:
    """Returns the part of the time that probes every 10 steps take: the last of two beside 10 mean steps."""
    spent, real = [], Probe.measure

    def timed(*given: Any) -> dict[str, float]:
        start = time.process_time()
        row = real(*given)
        spent.append(time.process_time() - start)
        return row

    model = ac.load(llama(vocab), tokenizer=char_tokenizer())
    config = ac.TuneConfig(steps=10, batch=batch, lr=LR, r=R, alpha=ALPHA, probe_every=10, probe_prompts=size)
    Probe.measure, start = timed, time.process_time()
    tuning.tune(model, TASK, config, progress=False)
    whole, Probe.measure = time.process_time() - start, real
    return spent[-1] / (whole - spent[0])


def theirs(vocab: int, steps: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """Tunes with `Trainer`."""
    base = llama(vocab)
    before, times = peak(), []
    names = ["q_proj", "k_proj", "v_proj"]
    torch.manual_seed(0)  # as `tune` draws the adapter
    model = get_peft_model(base, LoraConfig(r=R, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM"))
    examples = []
    for one in prompts(steps):
        labels = torch.full_like(one.tokens[0], -100)
        labels[one.column("target_pos")] = one.column("token")
        examples.append({"input_ids": one.tokens[0], "labels": labels})

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=LR,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_strategy="no",
            train_sampling_strategy="sequential",
        )
        Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Clock()]).train()
    weights = {name: value for name, value in model.base_model.model.named_parameters() if "lora" in name}
    return times, peak() - before, weights


def looped(name: str, config: ac.TuneConfig) -> Iterator[float]:
    """Runs the plain loop; yields the loss of each step."""
    data = tuning._TuningData.of(ac.load(name, dtype=torch.float32), ac.Seq2SeqTask(), config, 0)
    base = AutoModelForCausalLM.from_pretrained(BUNDLED[name](), dtype=torch.float32)
    torch.manual_seed(0)
    names = [f"{matrix}_proj" for matrix in config.matrices]
    lora = LoraConfig(r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names)
    model = get_peft_model(base, lora).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.steps)
    yield math.nan  # all of this is not counted
    for step in range(1, config.steps + 1):
        drawn = data._drawn(_seeds(0, step)[0])
        _, positions, tokens = data._tensors(drawn)
        labels = torch.full_like(drawn.tokens, -100)
        labels[:, positions + 1] = tokens
        loss = model(input_ids=drawn.tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, config.clip or math.inf)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def beside_a_loop(name: str, steps: int) -> None:
    """Prints how much longer `tune` takes than the loop, a step of which is run before each of its own."""
    config = replace(ac.TuneConfig.preset("small" if name == "toy-llama" else "paper"), steps=steps)
    model, loop, losses, plain, probes = ac.load(name, dtype=torch.float32), looped(name, config), [], [], []
    next(loop)
    real, probed = tuning._loss, Probe.measure

    def timed(call: Callable[[], Any], spent: list[float]) -> Any:
        start = time.process_time()
        result = call()
        spent.append(time.process_time() - start)
        return result

    def step(*given: Any, **options: Any) -> Tensor:
        losses.append(timed(lambda: next(loop), plain))
        return real(*given, **options)

    tuning._loss, Probe.measure = step, lambda *given: timed(lambda: probed(*given), probes)
    whole: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = timed(lambda: tuning.tune(model, ac.Seq2SeqTask(), config, out=folder, progress=False), whole)
    ours = whole[0] - sum(plain)
    print(f"{name}, {steps} steps as on the command line, one thread, torch {torch.__version__}")
    print(f"loop {sum(plain):.1f} s, tune {ours:.1f} s, of which {len(probes)} probes take {sum(probes):.1f} s")
    print(
        f"loss of the last steps {statistics.mean(losses[-config.probe_every :]):.4f}, {run.log['loss'].iloc[-1]:.4f}"
    )
    print(f"tune takes {ours / sum(plain):.2f} times the loop, {(ours - sum(probes)) / sum(plain):.2f} without probes")


def main() -> None:
    """Runs both in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--loop", choices=["toy-llama", "smollm2"], help="the bundled Llama, or SmolLM2")
    parser.add_argument("--only", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--probes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.loop:
        beside_a_loop(arguments.loop, arguments.steps)
        return
    if arguments.probes:
        print(share_of_probes(arguments.vocab, arguments.probes, arguments.size))
        return
    if arguments.only:
        times, memory, weights = (ours if arguments.only == "ours" else theirs)(arguments.vocab, arguments.steps)
        seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
        save_file({name: value.detach().contiguous() for name, value in weights.items()}, arguments.weights)
        print(json.dumps({"seconds": seconds, "memory": memory}))
        return
    found: dict[str, list[dict[str, float]]] = {"theirs": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        for _, name in itertools.product(range(arguments.rounds), found):
            command = [sys.executable, __file__, "--only", name, "--weights", str(Path(folder) / name)]
            command += ["--steps", str(arguments.steps), "--vocab", str(arguments.vocab)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
        one, other = (load_file(Path(folder) / name) for name in found)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-2, atol=1e-5)  # or the comparison means nothing
    length = prompts(1)[0].tokens.shape[1]
    print(
        f"8 layers, width 512, {arguments.vocab:,} tokens; prompts of {length}, one thread, torch {torch.__version__}"
    )
    for name, title in (("theirs", "Trainer + PEFT"), ("ours", "tune")):
        seconds = statistics.median(run["seconds"] for run in found[name])
        memory = statistics.median(run["memory"] for run in found[name])
        print(f"{title:16} {length / seconds:8.0f} tokens/s   {memory:6.0f} MB above the model")
    ratios = sorted(one["seconds"] / other["seconds"] for one, other in zip(*found.values(), strict=True))
    print(f"{statistics.median(ratios):.2f} times the tokens a second ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    for batch, size in ((1, None), (1, 10), (8, None), (16, None)):
        command = [sys.executable, __file__, "--probes", str(batch), "--vocab", str(arguments.vocab)]
        command += ["--size", str(size)] if size else []
        shares = []
        for _ in range(arguments.rounds):
            shares.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]))
        what = f"probes of {size} prompts" if size else "probes"
        print(
            f"{what} every 10 steps of {batch} take {100 * statistics.median(shares):.1f}% of the time "
            f"({100 * min(shares):.1f} to {100 * max(shares):.1f})"
        )


if __name__ == "__main__":
    main()
