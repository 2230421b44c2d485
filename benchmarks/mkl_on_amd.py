"""How much faster an AMD processor computes once Intel's MKL takes it for one of Intel's.

PyTorch's builds for Linux multiply matrices with MKL, which leaves AVX-512 unused on other processors. A maintainer
names the remedy (github.com/pytorch/builder/pull/1245): a library, loaded before all others, whose function
`mkl_serv_intel_cpu_true` says yes. This script needs a C compiler; on Intel's processors it finds ratios of 1.

    python benchmarks/mkl_on_amd.py [--rounds 3]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from align_circuits.papers.recall.figures.gpt2_models import PAPER_S20, initial_gpt2
from align_circuits.papers.recall.models.training import next_token_loss

SECONDS = 5.0
"""For how long each thing is repeated."""


def rate(work: Callable[[], object]) -> float:
    """Returns how often a second something can be done, after it was done twice."""
    work(), work()
    start, times = time.perf_counter(), 0
    while time.perf_counter() < start + SECONDS:
        work()
        times += 1
    return times / (time.perf_counter() - start)


def rates() -> dict[str, float]:
    """Returns how often a second one thread multiplies two matrices, and trains a GPT-2 of recall for a step."""
    torch.set_num_threads(1)
    tokens, weights = torch.randn(7232, 256), torch.randn(256, 1024)
    model, batch = initial_gpt2(PAPER_S20, seed=0), PAPER_S20.facts(0).batch(0, PAPER_S20.batch_size, "all")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        optimizer.step()

    return {
        "a product [7,232, 256] x [256, 1,024]": rate(lambda: tokens @ weights),
        "a step of recall's GPT-2": rate(step),
    }


def main() -> None:
    """Measures with and without the library in turns, in processes of their own, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(rates()))
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "yes.c"), Path(folder, "yes.so")
        source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n", encoding="utf-8")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        measured = []
        for _ in range(options.rounds):
            for preload in ("", str(library)):
                command = [sys.executable, __file__, "--child"]
                child = subprocess.run(
                    command, env=os.environ | {"LD_PRELOAD": preload}, check=True, capture_output=True
                )
                measured.append(json.loads(child.stdout))
    for name in measured[0]:
        without, preloaded = ([each[name] for each in measured[first::2]] for first in (0, 1))
        ratios = np.divide(preloaded, without)
        print(f"{name}: {np.median(without):.3g} times a second, with the library {np.median(preloaded):.3g}")
        print(f"  {np.median(ratios):.2f} times as fast ({ratios.min():.2f} to {ratios.max():.2f} over rounds)")


if __name__ == "__main__":
    main()
