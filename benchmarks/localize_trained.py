"""Which heads with a role `localize` names in planted and in trained circuits, with 24 prompts and with 64.

Three families: planted circuits of full strength; circuits that interchange training put into random heads
(`localizers/trained`); and those with copies, backups and decoys (`localizers/redundancy`), of which those count that
reached what was asked. `localize` looks for where a previous-token head works (`where_heads_matter`). This was
developed on redundant circuits of even seeds below 31,032, which are left out; resampling joined its causal test after
a look at the other ones and at the models of `localizers/trained`, so the trained circuits here are fresh.

    python benchmarks/localize_trained.py OUT [--trained FOLDER] [--redundant FOLDER]

`--redundant` is what was given as `--out` to `reproduce localizers/redundancy`, with the trained models in it; without,
models are trained, 100 seconds each. Half of the prompts choose candidates, half test them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import align_circuits as ac
from align_circuits.jobs.files import replacing
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, planted_circuit
from align_circuits.tables.intervals import binomial_interval
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import exchanged
from align_circuits.validation import circuits_in_trained_models as one_head_a_role
from align_circuits.validation import redundancy

KEPT = Path(__file__).parents[1] / "docs/results/localizers-redundancy/cpu"

PROMPTS = (24, 64)


def models_of(family: str, trained: Path) -> Iterator[Any]:
    """The models of a family, with their `task`."""
    if family == "planted":
        yield from (
            planted_circuit(one_head_a_role.trained_task(seed), seed, n_layers=4) for seed in range(22_000, 22_020)
        )
    elif family == "trained":
        yield from (one_head_a_role.trained_model(800, str(trained), seed) for seed in range(24_000, 24_008))
    else:
        frame: Any = Table.load(KEPT).frame
        reached = sorted({int(seed) for seed in frame.loc[frame["metric"] == "precision", "seed"]})
        fresh = [seed for seed in reached if seed >= redundancy.ADDED or seed % 2]
        yield from (redundancy.trained_model(800, str(trained), seed) for seed in fresh)


def measured(family: str, trained: Path) -> Iterator[dict[str, Any]]:
    """A row for each model, number of prompts and role: heads that have it, named heads, false names, their effects."""
    for model in models_of(family, trained):
        for n in PROMPTS:
            prompts = model.task.sample(n, model.tokenizer, seed=7)
            clean, corrupted = exchanged(prompts)
            roles = [*CIRCUIT_ROLES]
            found = ac.localize(model, clean, corrupted=corrupted, roles=roles, n_controls=0, redundant=True)
            for role in CIRCUIT_ROLES:
                heads = {head for head, own in model.roles.items() if own == role}
                effects = {member.head: member.effect for member in found.redundant.get(role, ())}
                named = {*found.redundant_heads(role)}
                of_false, of_true = ([effects[head] for head in some & {*effects}] for some in (named - heads, heads))
                yield {
                    "family": family,
                    "prompts": n,
                    "role": role,
                    "heads": len(heads),
                    "named": len(heads & named),
                    "false": len(named - heads),
                    "decoys": sum("decoy" in model.kinds[head] for head in named - heads),
                    "false, most nats": max(of_false, default=np.nan),
                    "strongest true, least nats": max(of_true, default=np.nan),
                    "models": 1,
                }


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a CSV file")
    for family in ("trained", "redundant"):
        parser.add_argument(f"--{family}", type=Path, default=Path("runs") / f"localize-{family}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"planted": Path(), **{name: getattr(arguments, name) / "trained" for name in ("trained", "redundant")}}
    rows = pd.DataFrame(row for family, folder in folders.items() for row in measured(family, folder))
    how = dict.fromkeys(("heads", "named", "false", "decoys", "models"), "sum")
    how |= {
        "false, most nats": "max",
        "strongest true, least nats": "min",
    }  # of a false name, and of a model's strongest head
    sums: Any = rows.groupby(["family", "prompts", "role"], sort=False).agg(how).reset_index()
    sums["share"] = sums["named"] / sums["heads"]
    sums[["low", "high"]] = [binomial_interval(*pair) for pair in zip(sums["named"], sums["heads"], strict=True)]
    print(sums.round(2).to_string(index=False))
    with replacing(arguments.out) as new:
        sums.round(4).to_csv(new, index=False)


if __name__ == "__main__":
    main()
