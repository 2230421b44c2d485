"""Six networks for exemplars at once beside six plain PyTorch loops one after another, and the price of probing.

The plain loop is what one writes by hand: `nn.Linear`, both layers at all positions, `torch.optim.SGD`; no checkpoint,
no log. Both sides read the same sequences from the same sampler, whose time counts on both, and end with the same
weights but for rounding. Ours is `train_on_exemplars`, a checkpoint every 500 steps. Times are of the process on one
thread, else of the clock; a round runs both, in alternating order; ratios are medians over rounds.

Then the share of a training's time that goes to accuracies and progress measures, at the spacing and with the number of
sequences that the figures of that size take: the time of `measure` over that of the steps between probes and `measure`.

    python benchmarks/ensembles.py [--size paper] [--members 6] [--steps 30] [--rounds 7] [--threads 1] [--device cuda]
        [--out FOLDER]
"""

import tempfile
from dataclasses import replace

import torch
from contest import command_line, keep, now, rows_of
from torch import nn

from align_circuits.papers.abrupt.grid import CPU, PAPER, Size, network, train_on_exemplars
from align_circuits.papers.abrupt.progress_measures import Evaluation, measure
from align_circuits.papers.abrupt.task import Worlds


class Plain(nn.Module):
    """One network, written by hand, with the weights of a member."""

    def __init__(self, member: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(linear(getattr(block.attn, name)[0, 0]) for name in ("W_Q", "W_K", "W_V"))
            for block in member.blocks
        )
        pairs = zip(member.classifier.weights, member.classifier.biases, strict=True)
        parts = [part for weight, bias in pairs for part in (linear(weight[0], bias[0, 0]), nn.ReLU())]
        self.classifier = nn.Sequential(*parts[:-1])

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the last token."""
        later = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool, device=stream.device).triu(1)
        for query, key, value in self.layers:
            scores = query(stream) @ key(stream).mT
            stream = stream + scores.masked_fill(later, -torch.inf).softmax(-1) @ value(stream)
        return self.classifier(stream[:, -1])


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Returns a layer with these weights."""
    layer = nn.Linear(*weight.shape, bias=bias is not None, device=weight.device)
    layer.weight.data = weight.detach().T.clone()
    if bias is not None:
        layer.bias.data = bias.detach().clone()
    return layer


def plain_loops(size: Size, members: int, steps: int, device: str) -> tuple[float, list[Plain]]:
    """Trains the members one after another; returns the seconds and the networks."""
    net = network(size, size.task, "network", range(members)).to(device)
    models = [Plain(net.member(seed)) for seed in range(members)]
    taken = 0.0
    for seed, model in enumerate(models):
        worlds = Worlds([size.task], [seed], device)
        optimizer = torch.optim.SGD(model.parameters(), lr=size.lr)
        start = now(device)
        for step in range(1, steps + 1):
            batch = worlds.batch(step, size.batch_size)
            loss = nn.functional.cross_entropy(model(batch.inputs[0]), batch.label[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        taken += now(device) - start
    return taken, models


def at_once(size: Size, members: int, steps: int, device: str) -> tuple[float, nn.Module]:
    """Trains the members as one ensemble; returns the seconds, without its two probes, and the ensemble."""
    net = network(size, size.task, "network", range(members)).to(device)
    worlds = Worlds([size.task] * members, range(members), device)
    config = replace(size.train, steps=steps, log_every=steps, checkpoint_every=500)
    with tempfile.TemporaryDirectory() as folder:
        start = now(device)
        train_on_exemplars(net, worlds, config, batch_size=size.batch_size, probe=1, out=folder, progress=False)
        return now(device) - start, net


def probing(size: Size, members: int, device: str) -> float:
    """Returns the seconds of one row of measures."""
    net = network(size, size.task, "network", range(members)).to(device)
    evaluation = Evaluation.of(Worlds([size.task] * members, range(members), device), size.probe)
    start = now(device)
    measure(net, evaluation)
    return now(device) - start


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = command_line(__doc__, rounds=7, out=True)
    parser.add_argument("--size", choices=("paper", "cpu"), default="paper")
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = {"paper": PAPER, "cpu": CPU}[arguments.size]
    how = (size, arguments.members, arguments.steps, arguments.device)

    speedups, ours, plains, shares = [], [], [], []
    for turn in range(arguments.rounds):
        runs = [plain_loops, at_once]
        results = {run: run(*how) for run in runs[:: 1 if turn % 2 else -1]}
        (slow, models), (fast, net) = results[plain_loops], results[at_once]
        for seed, model in enumerate(models):
            for one, other in zip(Plain(net.member(seed)).parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)  # or the comparison means nothing
        speedups.append(slow / fast)
        ours.append(arguments.steps / fast)
        plains.append(arguments.steps / slow)
        price = probing(size, arguments.members, arguments.device)
        shares.append(price / (price + size.log_every * fast / arguments.steps))
    about = (
        f"{arguments.members} members of size {arguments.size!r}, batch {size.batch_size}, {arguments.threads} threads"
    )
    print(
        f"{about}, {arguments.device}, torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps"
    )
    print(f"probing: {size.probe} sequences of each kind every {size.log_every} steps")
    measured = {
        ("plain loops", "steps a second"): plains,
        ("one ensemble", "steps a second"): ours,
        ("one ensemble", "times as fast"): speedups,
        ("one ensemble", "share of probing"): shares,
    }
    keep(rows_of(about, measured), arguments, width=size.task.d_in)


if __name__ == "__main__":
    main()
