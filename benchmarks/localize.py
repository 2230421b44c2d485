"""What the main job costs: `localize` on the bundled Llama with 64 prompts, on one thread and on two.

They take turns. The wait is the clock's, so leave the machine alone; processor time is printed beside it. The ratio
is the median over rounds of the ratio within a round.

    python benchmarks/localize.py [--rounds 5] [--threads 1,2]
"""

import argparse
import time
from statistics import median

import torch

import align_circuits as ac

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2", help="one or more, separated by commas")
    arguments = parser.parse_args()
    threads = [int(number) for number in arguments.threads.split(",")]
    model = ac.load("toy-llama")
    waits: dict[int, list[float]] = {number: [] for number in threads}
    works: dict[int, list[float]] = {number: [] for number in threads}
    for _ in range(arguments.rounds):
        for number in threads:
            torch.set_num_threads(number)
            clock, processor = time.perf_counter(), time.process_time()
            found = ac.localize(model, TASK, n=64, seed=0)
            waits[number].append(time.perf_counter() - clock)
            works[number].append(time.process_time() - processor)
    for number, waited in waits.items():
        ratio = median(first / own for first, own in zip(waits[threads[0]], waited, strict=True))
        print(
            f"threads {number}: {median(waited):.1f} s [{min(waited):.1f}, {max(waited):.1f}] on the clock, "
            f"{median(works[number]):.1f} s of the processor; {ratio:.2f} times as fast as with {threads[0]}; "
            f"{len(waited)} rounds"
        )
    print(
        ", ".join(
            f"{name}: {getattr(found, name).provenance.engine}"
            for name in ("patching_effects", "ablation_effects", "group_ablations")
        )
    )
    print(found.summary)
