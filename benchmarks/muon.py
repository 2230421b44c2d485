"""A step of Muon in float32 beside `torch.optim.Muon`, which takes bfloat16, and how far their updates differ.

Eight matrices a width, as two layers have: queries, keys and values in one, outputs, and the two of an MLP. Each round
runs PyTorch's as it is, PyTorch's with its products in float32 (as trainings do on a processor without instructions for
bfloat16), and ours. Times are medians over rounds; in brackets, how many times as long as ours it took. Processors with
such instructions have smaller ratios. Updates are of random gradients, and of such whose rank is a quarter of the
width: the norm of the difference, relative to the norm of ours, the mean over matrices.

    python benchmarks/muon.py [--widths 64 128 256] [--rounds 5] [--threads 1] [--device cuda]
"""

import statistics
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from contest import command_line, processor, seconds
from torch import nn

from align_circuits.training.bfloat16 import WidenedProducts
from align_circuits.training.muon import Muon


def matrices(width: int, device: str) -> list[nn.Parameter]:
    """Returns matrices with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * 2
    found = [nn.Parameter(torch.randn(*shape, generator=generator).to(device)) for shape in shapes]
    for matrix in found:
        matrix.grad = torch.randn(*matrix.shape, generator=generator).to(device)
    return found


def of_a_step(optimizer: torch.optim.Optimizer, device: str, context: AbstractContextManager[Any]) -> float:
    """Returns how long a step takes within a context."""
    with context:
        return seconds(optimizer.step, device)


def difference(width: int, rank: int, device: str) -> float:
    """Returns how far the first updates differ, from gradients of a rank."""
    changes = []
    for make in (torch.optim.Muon, Muon):
        given = matrices(width, device)
        generator = torch.Generator().manual_seed(1)
        for matrix in given:
            n_rows, n_columns = matrix.shape
            left = torch.randn(n_rows, rank, generator=generator)
            matrix.grad = (left @ torch.randn(rank, n_columns, generator=generator)).to(device)
        before = [matrix.detach().clone() for matrix in given]
        make(given, lr=1.0, weight_decay=0.0).step()
        changes.append([matrix.detach() - start for matrix, start in zip(given, before, strict=True)])
    theirs, ours = changes
    return statistics.mean(float((a - b).norm() / b.norm()) for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    """Prints a row for each width."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{processor()}, torch {torch.__version__}, {arguments.threads} threads, {arguments.device}")
    print("width   torch.optim.Muon, ms   in float32, ms   ours, ms   difference, full rank   of rank width/4")
    for width in arguments.widths:
        theirs = torch.optim.Muon(matrices(width, arguments.device), lr=1e-3, weight_decay=0.0)
        ours = Muon(matrices(width, arguments.device), lr=1e-3)
        three = ((theirs, nullcontext()), (theirs, WidenedProducts()), (ours, nullcontext()))
        times = [
            [of_a_step(optimizer, arguments.device, context) for optimizer, context in three]
            for _ in range(arguments.rounds + 1)
        ][1:]
        cells = [f"{1000 * statistics.median(column):.1f}" for column in zip(*times, strict=True)]
        for place in (0, 1):
            ratios = sorted(row[place] / row[2] for row in times)
            cells[place] += f" ({ratios[0]:.1f} to {ratios[-1]:.1f} x)"
        full, low = (difference(width, rank, arguments.device) for rank in (width, width // 4))
        print(f"{width:5} {cells[0]:>22} {cells[1]:>16} {cells[2]:>10} {full:>23.3f} {low:>17.3f}", flush=True)


if __name__ == "__main__":
    main()
