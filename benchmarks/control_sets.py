"""`localize` with the control sets of all roles measured together, beside one role after another: processor time.

They take turns; the ratio is the median over rounds of the ratio within a round.

    python benchmarks/control_sets.py [--model toy-llama-ica] [--n 64] [--rounds 3]
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import align_circuits as ac
from align_circuits.heads.head_sets import HeadSets

together: Any = HeadSets._together


def one_by_one(sets: HeadSets, tests: Sequence[Any]) -> list[Any]:
    """Returns what each test returns, run alone."""
    return [together(sets, [test])[0] for test in tests]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="toy-llama-ica", help="what `load` takes")
    parser.add_argument("--n", type=int, default=64, help="prompts")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, task = ac.load(arguments.model), ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)
    works: dict[str, list[float]] = {"together": [], "one by one": []}
    for _ in range(arguments.rounds):
        summaries = set()
        for how, run in (("together", together), ("one by one", one_by_one)):
            start = time.process_time()
            with patch.object(HeadSets, "_together", run):
                summaries.add(ac.localize(model, task, n=arguments.n, seed=0).summary)
            works[how].append(time.process_time() - start)
        assert len(summaries) == 1, "both ways must give the same verdicts"
    ratios = sorted(alone / joint for joint, alone in zip(*works.values(), strict=True))
    for how, seconds in works.items():
        print(f"{how}: {median(seconds):.1f} s of the processor")
    ends = f"[{ratios[0]:.2f}, {ratios[-1]:.2f}], {len(ratios)} rounds"
    print(f"one by one takes {median(ratios):.2f} times as long {ends}")
