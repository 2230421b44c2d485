"""Do methods that find heads need prompts? Each on as many as all others, from few to those of the zoo."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from align_circuits.localizers.benchmarked_head_methods import ON_ALL_PROMPTS
from align_circuits.localizers.comparison import agreement
from align_circuits.localizers.registry import scores_by_role
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, ROLE_OF_KIND
from align_circuits.models.planted.zoo import zoo_circuit
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, Inputs, Measurement, Rows, Study, on_one_thread
from align_circuits.papers.localizer_zoo import DRAWN, ESSENTIAL
from align_circuits.papers.statistics import Measured, seed_rows
from align_circuits.report import plots
from align_circuits.run.pairs import Pair
from align_circuits.tables.tables import Table
from align_circuits.tasks.task import exchanged

LEAST = {"localize": 8, "localize, redundant": 8}
"""The prompts that a method needs, if not one."""

RIVALS = ("ablation, mean", "ablation, resample", "patching, denoise", "patching, noise", "EAP-IG", "learned masks")
"""The methods that the zoo lets see fewer prompts than `localize`."""

BY_ROLE = "attention"
"""The control of a lead: it is told what each role attends to, and scores nearly as high as `localize`."""


@dataclass(frozen=True)
class ByPrompts:
    """Which circuits, and how many prompts."""

    first: int = 40_000
    """The seed of the first circuit of the zoo: none of the public and held-out ones."""
    circuits: int = 24
    prompts: tuple[int, ...] = (4, 8, 24)
    methods: tuple[str, ...] = tuple(ON_ALL_PROMPTS)


def agree(*, methods: Sequence[str], prompts: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Scores the heads of one circuit by every method on its first few prompts; the function of a job.

    Returns:
        By method and number of prompts the AUROC, a mean over roles.
    """
    on_one_thread()
    model = zoo_circuit(seed).build()
    whole = Pair(*exchanged(model.task.sample(max(prompts), model.tokenizer, seed=seed)))
    role_of = {head: ROLE_OF_KIND[kind] for head, kind in model.kinds.items() if kind not in ESSENTIAL}
    having = {role: [head for head in role_of if role_of[head] == role] for role in (*CIRCUIT_ROLES, None)}
    rows = []
    for n in prompts:
        pair = Pair(whole.clean[:n], whole.corrupted[:n])
        for method in (name for name in methods if n >= LEAST.get(name, 1)):
            grids = scores_by_role(method, ON_ALL_PROMPTS[method](model, pair), model, CIRCUIT_ROLES)
            found = [agreement(grids[role], having[role], having[None])["auroc"] for role in CIRCUIT_ROLES]
            rows.append({"method": method, "prompts": n, "auroc": float(np.mean(found))})
    return rows


def _jobs(config: ByPrompts, _: Inputs) -> list[Measurement]:
    seeds = range(config.first, config.first + config.circuits)
    common = {"methods": list(config.methods), "prompts": list(config.prompts)}
    return [Measurement(agree, common, seed) for seed in seeds]


def _summarize(_: ByPrompts, rows: Rows) -> pd.DataFrame:
    """Means over circuits, and those of `localize(redundant=True)` minus each method's, on as many prompts."""
    wide: Any = rows["agree"].pivot_table(index=["method", "prompts"], columns="seed", values="auroc")
    lead = wide.xs("localize, redundant").reindex(wide.index, level="prompts") - wide
    parts = [frame.dropna(how="all").assign(metric=metric) for metric, frame in (("auroc", wide), ("lead", lead))]
    both: Any = pd.concat(parts).reset_index()
    keys = both[["method", "prompts", "metric"]]
    return seed_rows(keys, both.drop(columns=keys.columns).to_numpy(float))


def _check(table: Table) -> list[Claim]:
    most = table.frame["prompts"].max()
    frame: Any = table.where(prompts=most, metric="lead").frame.set_index("method")

    def lead(method: str) -> Measured:
        return Measured(*frame.loc[method, ["value", "low", "high"]].astype(float))

    return [
        Claim(f"Groups lead {method} where both see {most} prompts (AUROC, mean over roles, difference)").at_least(
            0.05, lead(method), lead(BY_ROLE), "the lead over attention, which is told the roles"
        )
        for method in RIVALS
        if method in frame.index
    ]


def _draw(table: Table) -> Mapping[str, go.Figure]:
    auroc: Any = table.where(metric="auroc").frame
    drawn = auroc[auroc["method"].isin(DRAWN)]
    figure = plots.curves({"": drawn}, x="prompts", by="method", label="prompts", value="AUROC, mean over roles")
    return {"auroc": figure}


BY_PROMPTS = Experiment(
    "localizers/prompts",
    "Do methods that find heads need more prompts? All on equally many",
    "the package's own benchmark",
    Study(
        "localizers/prompts",
        {
            "smoke": ByPrompts(circuits=1, prompts=(8,), methods=("attention", "EAP-IG", "localize, redundant")),
            "cpu": ByPrompts(),
            "paper": ByPrompts(),
        },
        _jobs,
        _summarize,
    ),
    _draw,
    _check,
)
