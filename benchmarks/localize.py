"""What the main job costs: `localize` on the bundled Llama with 64 prompts, on one thread.

Processor time is counted, so that a busy machine disturbs little.

    python benchmarks/localize.py [--rounds 5]
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, seconds = ac.load("toy-llama"), []
    for _ in range(arguments.rounds):
        started = time.process_time()
        found = ac.localize(model, TASK, n=64, seed=0)
        seconds.append(time.process_time() - started)
    engines = ", ".join(
        f"{name}: {getattr(found, name).provenance.engine}" for name in ("effects", "damage", "verdict")
    )
    print(f"{median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f} in {len(seconds)} rounds; {engines}")
    print(found.sentence)
