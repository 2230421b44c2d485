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

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from contest import Row, command_line, keep, random_llama, ratios, rows_of, timed
from transformer_lens import patching

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer

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


def random_model(layers: int, width: int, vocabulary: int = 64) -> Any:
    """Returns the random Llama as `load` does, with a tokenizer of characters."""
    return ac.load(random_llama(layers, width, HEADS, vocabulary=vocabulary), tokenizer=char_tokenizer())


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
        rounds_of_both = [(theirs(best), timed(mine)) for _ in range(rounds)]
    apart = max(float((theirs[1].double() - own[1].double()).abs().max()) for theirs, own in rounds_of_both)
    patched = f"TransformerLens ({len(some)} of {len(every)} heads)" if sample else "TransformerLens"
    their_times, times = ([one[0] for one in contestant] for contestant in zip(*rounds_of_both, strict=True))
    measured = {
        (patched, "seconds"): their_times,
        ("patch_heads", "seconds"): times,
        ("patch_heads", "times as fast"): ratios(their_times, times),
        ("patch_heads", "furthest apart, nats"): [apart],
    }
    return rows_of(name, measured)


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5, out=True)
    parser.add_argument("--width", default="128,256", help="one or more, separated by commas")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--sample", type=int, default=0, help="heads that TransformerLens patches; 0 for all")
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
    about: dict[str, Any] = {"time": "of the processor" if arguments.threads == 1 else "on the clock"}
    if arguments.model:
        title = f"{arguments.model}, the last 16 of 272 tokens"
        sweeps = [(title, partial(ac.load, arguments.model), {"task": REAL_TASK, "last": 16})]
        about |= {"width": "the model's", "cases": "", "vocabulary": "the model's"}
    lines: list[Row] = []
    for title, made, how in sweeps:
        lines += compare(title, made(), arguments.prompts, arguments.rounds, arguments.sample, **how)
        keep(lines, arguments, **about)
