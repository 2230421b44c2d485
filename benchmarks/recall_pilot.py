"""Which learning rate, warm-up and G let attention-only models of the paper's size learn their facts?

App. B of Vasudeva et al. (2026) gives M = 256 subjects, d_h = 256 and 5,000 steps of pretraining, but neither the
number G of grammar tokens nor the learning rate of these models. Each cell of the grid below pretrains one model, on a
seed of which no result is kept, and prints the exact match on PT and, of the last position, the largest attention of a
head to the subject and to the relation. The choice is a cell of the highest exact match. The kept table,
`docs/results/recall_pilot.csv`, is of an NVIDIA H200 and 3,000 steps.

    python benchmarks/recall_pilot.py [--jobs 2] [--seed 900] [--steps 5000] [--out FILE]
"""

import argparse
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from align_circuits.models.loading import chosen_device
from align_circuits.papers.recall.figures.attention_only_models import BOTH_POSITIONS, PAPER
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import measure
from align_circuits.papers.recall.models.training import PRETRAINING, Stage, train_stage

GRID = {"n_grammar": (5, 20), "lr": (3e-4, 1e-3, 3e-3, 1e-2), "warmup": (0, 200, 1000)}


def trained(cell: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Pretrains the model of one cell and returns what became of it."""
    torch.set_num_threads(1)
    setup = replace(PAPER, **{name: value for name, value in cell.items() if name != "warmup"})
    world = setup.world(seed)
    task, model = setup.facts(world), setup.model(seed)
    schedule = setup.schedule(
        PRETRAINING, steps, schedule="cosine", warmup=cell["warmup"], log_every=500, checkpoint_every=steps
    )
    probes = {"pt": task.sample(setup.n, seed=seed)}
    stage = Stage(task, schedule, setup.batch_size)
    log = train_stage(model, stage, probes=probes, seed=seed, device=chosen_device(None), progress=False).log
    rows: Any = pd.DataFrame(measure(model.cpu(), world, task.sample(setup.n, seed=seed + 1), "pretraining"))
    attention = rows[rows["metric"] == "attention"].groupby("what")["value"].max()
    course = log.set_index("step")["pt.exact"].round(3).to_dict()
    return {**cell, "facts": log["pt.exact"].iloc[-1], **attention[["subject", "relation"]], "course": course}


def main() -> None:
    """Runs the grid, each cell in a process of one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=900)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--positions", choices=[each["positions"] for each in BOTH_POSITIONS], default="relative")
    parser.add_argument("--out", type=Path, help="a CSV file")
    arguments = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        cells = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
        for cell in cells:
            cell["positions"] = arguments.positions
        futures = [pool.submit(trained, cell, arguments.seed, arguments.steps) for cell in cells]
        for future in as_completed(futures):
            rows.append(future.result())
            print(rows[-1], flush=True)
            if arguments.out:
                pd.DataFrame(rows).to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
