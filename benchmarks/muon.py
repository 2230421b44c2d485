"""A step of Muon beside `torch.optim.Muon`, whose products are in bfloat16 everywhere; ours are in float32 on a CPU.

Eight matrices a width, as two layers have: queries, keys and values in one, outputs, and the two of an MLP. Each round
runs both; the ratio is the median over rounds. Processors that multiply bfloat16 in hardware have smaller ratios.

    python benchmarks/muon.py [--widths 64 128 256] [--rounds 5] [--threads 1] [--device cuda]
"""

import argparse
import statistics
import time

import torch
from patching import processor
from torch import nn

from align_circuits.training.muon import Muon


def matrices(width: int, device: str) -> list[nn.Parameter]:
    """Returns matrices with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * 2
    found = [nn.Parameter(torch.randn(*shape, generator=generator).to(device)) for shape in shapes]
    for matrix in found:
        matrix.grad = torch.randn(*matrix.shape, generator=generator).to(device)
    return found


def seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Returns how long a step takes."""
    begin = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Prints a row for each width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{processor()}, torch {torch.__version__}, {arguments.threads} threads, {arguments.device}")
    print("width  torch.optim.Muon, ms  ours, ms  times as fast")
    for width in arguments.widths:
        theirs = torch.optim.Muon(matrices(width, arguments.device), lr=1e-3, weight_decay=0.0)
        ours = Muon(matrices(width, arguments.device), lr=1e-3)
        both = (theirs, ours)
        times = [[seconds(optimizer, arguments.device) for optimizer in both] for _ in range(arguments.rounds + 1)][1:]
        one, other = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(a / b for a, b in times)
        spread = f"({ratios[0]:.1f} to {ratios[-1]:.1f})"
        print(f"{width:5} {one:21.1f} {other:9.1f} {statistics.median(ratios):14.1f} {spread}")


if __name__ == "__main__":
    main()
