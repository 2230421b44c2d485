"""What exact attention rows cost: the fast engine beside the ways one would get them otherwise.

A random Llama of 8 layers, width 512, 8 heads (4 key heads), prompts of 630 tokens, or of 1,302 with `--examples 30`,
float32 on the CPU. The rows are the 32 predicting positions, reduced as a metric reduces them; `score_heads` asks at 8
more, and computes all its metrics and intervals. The contestants take turns on one thread, and processor time is
counted, so that a busy machine disturbs little; the ratio is the median over rounds of the ratio within a round. Then
the peak memory of scoring more and more prompts.

    python benchmarks/probe_rows.py [--rounds 7] [--prompts 12] [--batch 4] [--examples 14]
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contest import command_line, in_turn, random_llama, ratios

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.run.forward_pass import forward

EXAMPLES = int(sys.argv[sys.argv.index("--examples") + 1]) if "--examples" in sys.argv else 14
TASK = ac.Seq2SeqTask(x_len=8, phrase_len=4, n_examples=EXAMPLES)
LENGTH, ROWS, LAYERS, HEADS = 42 * (EXAMPLES + 1), 32, 8, 8


def network(attention: str) -> Any:
    """Returns the random Llama."""
    more: dict[str, Any] = {"intermediate_size": 1536, "initializer_range": 0.02, "attn_implementation": attention}
    return random_llama(LAYERS, 512, HEADS, vocabulary=1000, max_position_embeddings=LENGTH, **more)


def prompts_of(count: int) -> ac.Prompts:
    """Returns prompts of the task, in the bundled vocabulary."""
    return TASK.sample(count, char_tokenizer(), references=False)


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompt and query of every row."""
    return torch.arange(count).repeat_interleave(ROWS), torch.arange(LENGTH - ROWS - 1, LENGTH - 1).repeat(count)


def reduced(model: object, prompts: ac.Prompts, engine: str, batch: int | str = "auto") -> torch.Tensor:
    """Returns each row's attention on the 100 first positions, and finds its strongest position."""
    prompt, query = rows_of(len(prompts))
    mass = torch.zeros(LAYERS, len(prompt), HEADS)
    best = torch.zeros(LAYERS, len(prompt), HEADS, dtype=torch.long)

    def on_pattern(rows: torch.Tensor, layer: int, pattern: torch.Tensor) -> None:
        mass[layer, rows] = pattern[..., :100].sum(-1)
        best[layer, rows] = pattern.argmax(-1)

    forward(model, prompts, prompt=prompt, query=query, on_pattern=on_pattern, options=ac.RunOptions(engine, batch))
    return mass


def compare(rounds: int, count: int, batch: int) -> None:
    """Prints what each contestant costs."""
    prompts = prompts_of(count)
    bare, eager, bridge = network("sdpa"), network("eager"), ac.load(network("sdpa"))

    def in_batches(run: Callable[..., object], **options: object) -> None:
        for tokens in prompts.tokens.split(batch):
            run(tokens, logits_to_keep=rows_of(1)[1], use_cache=False, **options)

    contestants: dict[str, Callable[[], object]] = {
        "bare Hugging Face forward (SDPA)": lambda: in_batches(bare),
        "fast engine, rows reduced": lambda: reduced(bridge, prompts, "fast", batch),
        "score_heads, all metrics": lambda: ac.score_heads(bridge, prompts, options=ac.RunOptions("fast", batch)),
        "Hugging Face, output_attentions": lambda: in_batches(eager, output_attentions=True),
        "bridge, run_with_cache(hook_pattern)": lambda: in_batches(
            bridge.run_with_cache, names_filter=lambda name: name.endswith("hook_pattern")
        ),
        "reference engine, rows reduced": lambda: reduced(bridge, prompts, "reference", batch),
    }
    with torch.no_grad():
        times = in_turn(contestants, rounds + 1)  # the first warms up
    first = next(iter(times.values()))
    print(
        f"{count} prompts of {LENGTH} tokens in batches of {batch}, {ROWS} rows each, one thread, "
        f"median of {rounds} rounds"
    )
    for name, seconds in times.items():
        ratio = median(ratios(seconds[1:], first[1:]))
        print(f"  {name:38s} {1000 * median(seconds[1:]):8.0f} ms   {ratio:5.2f}x")


def memory(counts: tuple[int, ...]) -> None:
    """Prints the peak memory of fresh processes that score more and more prompts."""
    for count in counts:
        done = subprocess.run(
            [sys.executable, __file__, "--peak", str(count), "--examples", str(EXAMPLES)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(f"  {count:5d} prompts: {done.stdout.strip()}")


def peak(count: int) -> None:
    """Prints how far memory rises above what the model and its prompts take."""
    model, prompts = ac.load(network("sdpa")), prompts_of(count)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Linux: the peak starts anew
    before = resident("VmRSS")
    reduced(model, prompts, "fast")
    print(f"{resident('VmHWM') - before:5.0f} MB above the {before:.0f} MB of the model and its prompts")


def resident(field: str) -> float:
    """Returns a field of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="in a prompt, of 42 tokens each")
    parser.add_argument("--peak", type=int, help="score so many prompts and print the peak memory only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        peak(arguments.peak)
    else:
        compare(arguments.rounds, arguments.prompts, arguments.batch)
        memory((3, 12, 48))
