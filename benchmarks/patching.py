"""What patching all heads costs: `patch_heads` beside TransformerLens's own `patching`.

Random Llamas, float32 on the CPU, four prompts of 448 tokens. Both patch z of every head from the clean prompt into the
corrupted one and measure the mean log-probability of the gold tokens; both make their own clean activations.
TransformerLens gets them through a names filter, and its best batch size, found by timing. `patch_heads` also measures
accuracy and computes intervals. Three sweeps: the last 28 tokens edited, in 8 and in 16 layers of 8 heads; and all 448
tokens edited, in prompts that differ from the first example on. Each in several widths: the wider a network, the more
of either's time goes into matrix products that both must make. The vocabulary is one of letters; with `--vocabulary
128256`, Llama 3's, unembedding weighs more than the layers. Every patched run of TransformerLens costs the same, so
with `--sample` it patches evenly spread heads only, and the time of that part is scaled up.

The contestants take turns, and the ratio is the median over rounds of the ratio within a round. On two threads time is
the clock's: leave the machine alone. With `--threads 1` it is the processor's, and a busy machine disturbs little.

    python benchmarks/patching.py [--rounds 5] [--width 128,256] [--prompts 4] [--sample 0] [--out FOLDER]

With `--model smollm2` (or what else `load` takes) that model is patched instead, on prompts of Fig. 4 of The Missing
Alignment Link (m = 5, c = 2, k = 15) with the query corrupted: the last 16 of 272 tokens.
"""

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from transformer_lens import patching
from transformers import LlamaConfig, LlamaForCausalLM

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

TASK = ac.Seq2SeqTask(x_len=13, phrase_len=1, n_examples=15)
EDITED, HEADS = 28, 8
REAL_TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)
"""For a model that is given; its last 16 of 272 tokens differ when the query is corrupted."""

CASES = {
    "8": ("8 layers, width {}, the last 28 of 448 tokens", 8, False),
    "16": ("16 layers, width {}, the last 28 of 448 tokens", 16, False),
    "whole": ("8 layers, width {}, all 448 tokens", 8, True),
}
"""What a sweep is called, its layers, and whether all tokens are edited."""

Metric = Callable[[torch.Tensor], torch.Tensor]
Row = tuple[str, str, str, float, float, float, int]
"""Sweep, contestant, measure; median, least and most of the rounds, and their number."""


def network(layers: int, width: int, vocabulary: int = 64) -> LlamaForCausalLM:
    """Returns the random Llama, its weights large enough that heads differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        initializer_range=width**-0.5,
    )
    return LlamaForCausalLM(config).eval()


def random_model(layers: int, width: int, vocabulary: int) -> Any:
    """Returns the random Llama as `load` does, with a tokenizer of characters."""
    return ac.load(network(layers, width, vocabulary), tokenizer=char_tokenizer())


def processor() -> str:
    """Returns what the machine calls its processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a call took, in seconds, and what it returned."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    result = run()
    return clock() - started, result


def compare(
    name: str,
    model: Any,
    count: int,
    rounds: int,
    sample: int,
    *,
    task: ac.Seq2SeqTask = TASK,
    last: int = EDITED,
    whole: bool = False,
) -> list[Row]:
    """Prints what each contestant costs and how far their results lie apart, and returns it."""
    clean = task.sample(count, model.tokenizer, references=False)
    corrupted = task.corrupt(clean, "labels" if whole else "query")
    gold = clean.column("token")
    edited = torch.arange(clean.mask.shape[1]) >= (0 if whole else clean.mask.shape[1] - last)
    masks = {"edited": edited.expand_as(clean.mask)}

    def metric_of(first: int, size: int) -> Metric:
        mine = (clean.column("prompt") >= first) & (clean.column("prompt") < first + size)
        rows, queries = clean.column("prompt")[mine] - first, clean.column("query_pos")[mine]
        return lambda logits: logits[rows, queries].log_softmax(-1).gather(1, gold[mine, None]).sum() / len(gold)

    every = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    some = every[:: max(1, len(every) // sample)] if sample else every
    index = pd.DataFrame(some, columns=["layer", "head"])

    def theirs(size: int) -> tuple[float, torch.Tensor]:
        spent, total = 0.0, torch.zeros(len(some))
        for first in range(0, count, size):
            tokens, other = clean.tokens[first : first + size], corrupted.tokens[first : first + size]
            metric = metric_of(first, size)

            def before(tokens: torch.Tensor = tokens, other: torch.Tensor = other, metric: Metric = metric) -> Any:
                _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_z"))
                return cache, metric(model(other))

            seconds, (cache, unpatched) = timed(before)
            spent += seconds
            options: Any = {"index_axis_names": None, "index_df": index}
            seconds, patched = timed(
                lambda other=other, cache=cache, metric=metric, options=options: (
                    patching.get_act_patch_attn_head_out_all_pos(model, other, cache, metric, **options)
                )
            )
            spent += seconds * len(every) / len(some)
            total += patched - unpatched
        return spent, total

    def mine() -> torch.Tensor:
        table = ac.patch_heads(model, ac.Pair(clean, corrupted), positions=masks)
        if table.provenance.engine != "replay":
            raise RuntimeError(f"the {table.provenance.engine} engine ran, not replay")
        values = table.where(kind="all", metric="log_prob").frame.sort_values(["layer", "head"])["value"]
        return torch.tensor(values.to_numpy())[[every.index(head) for head in some]]

    with torch.no_grad():
        sizes = [size for size in (1, 2, 4, 8) if count % size == 0]
        cost = {
            size: min(timed(lambda size=size: model(corrupted.tokens[:size]))[0] for _ in range(3)) / size
            for size in sizes
        }
        best = min(sizes, key=cost.__getitem__)
        mine()
        rows = [(theirs(best), timed(mine)) for _ in range(rounds)]
    apart = max(float((theirs[1].double() - own[1].double()).abs().max()) for theirs, own in rows)
    patched = f"TransformerLens ({len(some)} of {len(every)} heads)" if sample else "TransformerLens"
    measured = {
        (patched, "seconds"): [theirs[0] for theirs, _ in rows],
        ("patch_heads", "seconds"): [own[0] for _, own in rows],
        ("patch_heads", "times as fast"): [theirs[0] / own[0] for theirs, own in rows],
        ("patch_heads", "furthest apart, nats"): [apart],
    }
    found = [(name, *key, median(v), min(v), max(v), len(v)) for key, v in measured.items()]
    for row in found:
        print("{:50s} {:36s} {:22s} {:10.3g} [{:.3g}, {:.3g}], {} rounds".format(*row), flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", default="128,256", help="one or more, separated by commas")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--sample", type=int, default=0, help="heads that TransformerLens patches; 0 for all")
    parser.add_argument("--out", help="a folder for the table; low and high are the least and the most of the rounds")
    parser.add_argument("--cases", default="8,16,whole")
    parser.add_argument("--model", help="what `load` takes, in place of the random Llamas")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sweeps: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        (title.format(width), partial(random_model, depth, width, arguments.vocabulary), {"whole": whole})
        for case in arguments.cases.split(",")
        for title, depth, whole in [CASES[case]]
        for width in map(int, arguments.width.split(","))
    ]

    if arguments.model:
        title = f"{arguments.model}, the last 16 of 272 tokens"
        sweeps = [(title, partial(ac.load, arguments.model), {"task": REAL_TASK, "last": 16})]
    lines: list[Row] = []
    for title, made, about in sweeps:
        lines += compare(title, made(), arguments.prompts, arguments.rounds, arguments.sample, **about)
        if arguments.out:
            columns = ["sweep", "contestant", "measure", "value", "low", "high", "n"]
            given = {name: value for name, value in vars(arguments).items() if name != "out"}
            time_is = "of the processor" if arguments.threads == 1 else "on the clock"
            settings = {**given, "processor": processor(), "time": time_is}
            if arguments.model:  # which has all of these itself
                settings = {**settings, "width": "the model's", "cases": "", "vocabulary": "the model's"}
            Table(pd.DataFrame(lines, columns=columns), Provenance("benchmark", settings)).save(arguments.out)
