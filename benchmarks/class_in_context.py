"""Where frequencies are skewed, what does accuracy in weights owe to contexts that hold the target's class?

Trains the cell of `abrupt/figA3` at `cpu` in which α = 1 keeps both solutions, on the seeds of its kept table, and
measures the most frequent eighth of the classes on all contexts, as the paper does, on those with the target's class,
and on those without it, where each class counts by its frequency. The lower of this and the accuracy in context is what
the claim is about.

    python benchmarks/class_in_context.py [--model two] [--seeds 30 ... 41] [--n 8000]
"""

import argparse

import pandas as pd
import torch

from align_circuits.papers.abrupt.grid import CPU, network, train_on_exemplars
from align_circuits.papers.abrupt.progress_measures import Evaluation, measure
from align_circuits.papers.abrupt.task import Worlds
from align_circuits.papers.statistics import over_seeds


def main() -> None:
    """Prints means over seeds with 95% intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="two", choices=["network", "three", "two"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(30, 42)])
    parser.add_argument("--n", type=int, default=8000, help="sequences a seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    size = CPU.with_task(n_classes=512, burst=1, zipf=1.0)
    if arguments.model != "network":
        size = size.with_task(n_positions=0)  # reduced models have no positions
    task = size.task
    worlds = Worlds([task] * len(arguments.seeds), arguments.seeds)
    net = network(size, task, arguments.model, arguments.seeds)
    train_on_exemplars(net, worlds, size.train, batch_size=size.batch_size, probe=size.probe)

    evaluation = Evaluation.of(worlds, arguments.n)
    batch = evaluation.batches["iwl"]
    with torch.no_grad():
        correct = net.logits(batch.inputs).argmax(-1) == batch.label
    frame = pd.DataFrame(
        {
            "seed": torch.tensor(arguments.seeds)[:, None].expand_as(correct).flatten(),
            "rank": batch.rank.flatten(),
            "within": batch.right.any(-1).flatten(),
            "correct": correct.double().flatten(),
        }
    )
    frame = frame[evaluation.common.flatten().numpy()]
    apart = frame[~frame["within"]].groupby(["seed", "rank"])["correct"].mean().unstack()
    weight = apart.notna() / (1.0 + apart.columns.to_numpy()) ** task.zipf
    icl = measure(net, evaluation)["icl"].numpy()
    in_weights = {
        "all contexts": frame.groupby("seed")["correct"].mean(),
        "with the target's class": frame[frame["within"]].groupby("seed")["correct"].mean(),
        "without it": (apart * weight).sum(axis=1) / weight.sum(axis=1),
    }
    print(f"{frame['within'].mean():.3f} of the contexts hold the target's class")
    print(f"in context: {over_seeds(icl)}")
    for name, values in in_weights.items():
        lower = over_seeds(values.clip(upper=icl).to_numpy())
        print(f"in weights, {name}: {over_seeds(values.to_numpy())}; the lower of both {lower}")


if __name__ == "__main__":
    main()
