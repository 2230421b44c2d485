"""What circuits built by hand cost: passes by hooks, by the fused kernel and by parts, and all of `localize`.

Planted circuits, prompts of 272 tokens, one thread, processor time. Passes take turns: one by the model's `forward`,
which attends by PyTorch's fused kernel unless a hook reads scores or pattern; the same with patterns read; and one that
scores all heads by the reference engine (hooks) and by the fast one (parts without hooks, zeros left out). The ratio
is the median over rounds of the ratio within a round, with the least and the most. Then `localize` runs at its defaults
under `engine="reference"` and `"auto"`, with how many prompts passed an attention layer, and whether both give the same
summary.

    python benchmarks/hand_built.py [--rounds 7] [--prompts 6,32] [--seeds 0,1,2,3,4,5]
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from contest import command_line, in_turn, ratios, spread, timed

import align_circuits as ac
from align_circuits.models.planted.hand_built_transformer import HandBuiltAttention, HandBuiltDecoder


def compare(name: str, slow: Callable[[], object], fast: Callable[[], object], rounds: int) -> None:
    """Prints the times of two runs that take turns."""
    slow(), fast()
    one, other = in_turn({"slow": slow, "fast": fast}, rounds).values()
    print(
        f"{name}: {1000 * median(other):.0f} ms beside {1000 * median(one):.0f} ms, "
        f"{spread(ratios(one, other))} times as fast"
    )


@contextmanager
def counted(kind: type, name: str, place: int) -> Iterator[list[int]]:
    """Counts the prompts in the argument at a place of a method, over all calls."""
    method, prompts = getattr(kind, name), [0]

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompts[0] += len(args[place])
        return method(self, *args, **kwargs)

    with patch.object(kind, name, counting):
        yield prompts


def localized(seed: int) -> None:
    """Prints what `localize` costs by both engines on one circuit, and whether they agree."""
    task = ac.Seq2SeqTask()
    summaries = []
    for engine, (kind, name, place) in (
        ("reference", (HandBuiltAttention, "forward", 0)),
        ("auto", (HandBuiltDecoder, "attend", 1)),
    ):
        model = ac.planted_circuit(task, seed)
        with counted(kind, name, place) as prompts:
            taken, found = timed(partial(ac.localize, model, task, options=ac.RunOptions(engine)))
        passes = prompts[0] / model.cfg.n_layers
        print(f"seed {seed}, {engine}: {taken:.1f} s, {passes:,.0f} prompts through the layers")
        summaries.append(found.summary)
    print("the same summary" if len(set(summaries)) == 1 else f"DIFFERENT: {summaries}", summaries[0], sep="\n")


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--prompts", default="6,32", help="one or more numbers, separated by commas")
    parser.add_argument("--seeds", default="0", help="the circuits that `localize` runs on, separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = ac.Seq2SeqTask()
    model = ac.planted_circuit(task)
    hooks = [(name, lambda pattern, hook: pattern) for name in model.hook_dict if name.endswith("hook_pattern")]  # noqa: ARG005
    for number in (int(number) for number in arguments.prompts.split(",")):
        prompts = task.sample(number, model.tokenizer, seed=0)
        with torch.no_grad():
            read = partial(model.run_with_hooks, prompts.tokens, fwd_hooks=hooks)
            compare(
                f"{number} prompts, fused beside patterns read", read, partial(model, prompts.tokens), arguments.rounds
            )
        score = {
            engine: partial(ac.score_heads, model, prompts, options=ac.RunOptions(engine))
            for engine in ("reference", "auto")
        }
        compare(f"{number} prompts, scored by parts beside hooks", *score.values(), arguments.rounds)
    ac.localize(model, task, n=8, n_controls=0)  # what is loaded on first use
    for seed in arguments.seeds.split(","):
        localized(int(seed))
