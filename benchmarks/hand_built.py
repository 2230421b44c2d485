"""What circuits built by hand cost: a forward pass by the fused kernel beside one whose patterns are read.

A planted circuit, prompts of 272 tokens, one thread. Without a hook on scores or pattern it attends by PyTorch's fused
kernel; with one, as every pass did before, by a softmax of its own. The two take turns and processor time is counted;
the ratio is the median over rounds of the ratio within a round, with the least and the most.

    python benchmarks/hand_built.py [--rounds 7] [--prompts 6,32]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

import align_circuits as ac

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", default="6,32", help="one or more numbers, separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = ac.Seq2SeqTask()
    model = ac.planted_circuit(task)
    hooks = [(name, lambda pattern, hook: pattern) for name in model.hook_dict if name.endswith("hook_pattern")]  # noqa: ARG005

    def seconds(run: Callable[[], object]) -> float:
        """Processor time of a run."""
        began = time.process_time()
        run()
        return time.process_time() - began

    for prompts in (int(number) for number in arguments.prompts.split(",")):
        tokens = task.sample(prompts, model.tokenizer, seed=0).tokens
        with torch.no_grad():
            passes = partial(model, tokens), partial(model.run_with_hooks, tokens, fwd_hooks=hooks)
            for run in passes:
                run()
            rounds = [tuple(seconds(run) for run in passes) for _ in range(arguments.rounds)]
        ratios = [read / fused for fused, read in rounds]
        print(
            f"{prompts} prompts: fused {1000 * median(fused for fused, _ in rounds):.0f} ms, patterns read "
            f"{1000 * median(read for _, read in rounds):.0f} ms, {median(ratios):.2f} times as long "
            f"[{min(ratios):.2f}, {max(ratios):.2f}]"
        )
