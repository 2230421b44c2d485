"""Attention-only models on held-out subjects: Figs. 13, 14, 19 and 24."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Claim, over_seeds
from align_circuits.papers.recall.figures.attention_only_models import (
    PAPER,
    AttentionOnlySetup,
    Positions,
    finetuned,
    pretrained,
)
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import measure
from align_circuits.papers.recall.figures.gpt2_models import SOURCE, log_rows
from align_circuits.papers.recall.figures.training_curves import at_end, at_start, mean_curves
from align_circuits.papers.recall.metrics import MATCHES
from align_circuits.papers.study import Experiment, Inputs, Measurement, Rows, Study, on_one_thread
from align_circuits.report import plots
from align_circuits.tables.tables import Table


@dataclass(frozen=True)
class Finetunings:
    """The finetuned models of a study, and what differs between them."""

    setup: AttentionOnlySetup
    seeds: int
    changes: tuple[Mapping[str, Any], ...]
    """The key columns of each cell of the grid: numbers of the setup, `positions` (relative by default), and `values`,
    the number of unique values that seen subjects have."""

    def cells(self, inputs: Inputs) -> Iterator[tuple[AttentionOnlySetup, dict[str, Any], Mapping[str, Any]]]:
        """Yields the setup of each cell, the other arguments of its jobs, and its keys."""
        for keys in self.changes:
            numbers = {name: value for name, value in keys.items() if name not in ("positions", "values")}
            settings = {"positions": keys.get("positions", "relative"), "trained": inputs.trained}
            yield replace(self.setup, **numbers), settings, keys


def pretrain_attention_only(
    *, setup: Mapping[str, Any], positions: Positions, trained: str, seed: int
) -> list[dict[str, Any]]:
    """Pretrains one model; the function of a job.

    Returns:
        Rows with `probe` `"cosine"`: the largest cosine over heads of their outputs on PT with those of the
        constructions, `match` being `f_subj`, `f_rel` or those of another subject or type.
    """
    on_one_thread()
    made = AttentionOnlySetup(**setup)
    model: Any = pretrained(made, seed, positions, trained).model
    world = made.world(seed)
    rows: Any = pd.DataFrame(measure(model, world, made.facts(world).sample(made.n, seed=seed + 1), "pretraining"))
    cosines = rows[rows["metric"] == "cosine"].groupby("what")["value"].max()
    return [{"step": 0, "probe": "cosine", "match": what, "value": value} for what, value in cosines.items()]


def finetune_attention_only(
    *, setup: Mapping[str, Any], positions: Positions, n_values: int | None, trained: str, seed: int
) -> pd.DataFrame:
    """Finetunes one model and returns its log; the function of a job."""
    on_one_thread()
    return log_rows(finetuned(AttentionOnlySetup(**setup), seed, positions, trained, n_values))


def _pretrainings(config: Finetunings, inputs: Inputs) -> list[Measurement]:
    return [
        Measurement(pretrain_attention_only, {"setup": asdict(setup), **settings}, seed, keys)
        for full, settings, keys in config.cells(inputs)
        for setup in [replace(full, n_seen=1, finetuning=1)]  # so that cells with the same pretraining share its job
        for seed in range(config.seeds)
    ]


def _finetunings(config: Finetunings, inputs: Inputs) -> list[Measurement]:
    return [
        Measurement(finetune_attention_only, {"setup": asdict(setup), "n_values": n_values, **settings}, seed, keys)
        for setup, settings, keys in config.cells(inputs)
        for n_values in [keys.get("values")]
        for seed in range(config.seeds)
    ]


def _summarize(config: Finetunings, rows: Rows) -> pd.DataFrame:
    return pd.concat(rows.values(), ignore_index=True).assign(low=np.nan, high=np.nan, n=config.setup.n)


def _study(name: str, settings: Sequence[tuple[AttentionOnlySetup, int, tuple[Mapping[str, Any], ...]]]) -> Study:
    smoke, cpu, paper = (Finetunings(*setting) for setting in settings)
    return Study(name, {"smoke": smoke, "cpu": cpu, "paper": paper}, _finetunings, _summarize, _pretrainings)


_HELD_OUT = {"probe": "held_out", "match": "exact"}


# Figures 19 and 24


def _draw_curves(table: Table) -> dict[str, go.Figure]:
    panels = {
        caption: mean_curves(table, {match: {"probe": probe, "match": match} for match in MATCHES})
        for probe, caption in (("seen", "seen query subjects"), ("held_out", "held-out query subjects"))
    }
    return {"": plots.curves(panels, x="step", by="curve", label="steps of finetuning", value="share of prompts")}


def _check_curves(table: Table) -> list[Check]:
    seen = {"probe": "seen", "match": "exact"}
    return [
        Claim("Finetuning brings ICL about seen subjects (exact match)").at_least(
            0.8, at_end(table, **seen), at_start(table, **seen), "before finetuning"
        ),
        Claim("And about held-out subjects (exact match)", "about 1").at_least(
            0.5, at_end(table, **_HELD_OUT), at_start(table, **_HELD_OUT), "before finetuning"
        ),
    ]


# Figures 13 and 14


def _cells_of(table: Table, *names: str) -> list[dict[str, Any]]:
    """The combinations of key columns, in order."""
    cells: Any = table.frame[list(names)].drop_duplicates()
    rows = cells.sort_values(list(names)).to_dict("records")
    return [{name: int(value) for name, value in row.items()} for row in rows]


def _draw_values(table: Table) -> dict[str, go.Figure]:
    rows = [
        {
            **cell,
            "curve": f"M = {cell['n_subjects']}, M_ft = {cell['n_seen']}",
            **vars(over_seeds(at_end(table, **cell, **_HELD_OUT))),
        }
        for cell in _cells_of(table, "n_subjects", "n_seen", "values")
    ]
    panels, label = {"": pd.DataFrame(rows)}, "unique values seen"
    return {"": plots.curves(panels, x="values", by="curve", label=label, value="exact match, held-out")}


def _check_values(table: Table) -> list[Check]:
    checks = []
    for group in _cells_of(table, "n_subjects", "n_seen"):
        few, *_, many = (cell["values"] for cell in _cells_of(table.where(**group), "values"))
        held_out, seen = (
            at_end(table, **group, values=many, probe=probe, match="exact")
            - at_end(table, **group, values=few, probe=probe, match="exact")
            for probe in ("held_out", "seen")
        )
        checks.append(
            Claim(
                f"More values seen raise ICL about held-out subjects ({many} minus {few}, M = {group['n_subjects']}, "
                f"M_ft = {group['n_seen']})"
            ).at_least(0.1, held_out, seen, "about seen ones")
        )
    return checks


def _draw_subjects(table: Table) -> dict[str, go.Figure]:
    cells = _cells_of(table, "n_subjects")
    panels = {
        f"M = {cell['n_subjects']}": mean_curves(
            table, {match: {"probe": "held_out", "match": match, **cell} for match in MATCHES}
        )
        for cell in cells
    }
    rows = [
        {"M": cell["n_subjects"], "curve": what, **vars(over_seeds(at_end(table, probe="cosine", match=what, **cell)))}
        for cell in cells
        for what in ("f_subj", "f_rel", "f_subj of another", "f_rel of another")
    ]
    cosines, label = {"": pd.DataFrame(rows)}, "steps of finetuning"
    return {
        "cosines": plots.curves(cosines, x="M", by="curve", label="subjects M", value="cosine of the best head"),
        "matches": plots.curves(panels, x="step", by="curve", label=label, value="share of prompts"),
    }


def _check_subjects(table: Table) -> list[Check]:
    few, many = (cell["n_subjects"] for cell in _cells_of(table, "n_subjects"))

    def drop(statistic: Any = at_end, **where: Any) -> Float[ndarray, " seed"]:
        return statistic(table, n_subjects=few, **where) - statistic(table, n_subjects=many, **where)

    subject = {"probe": "held_out", "match": "subject"}
    return [
        *(
            Claim(
                f"With few subjects a head is nearer to the construction's {what} (cosine, M = {few} minus {many})"
            ).at_least(
                0.1,
                drop(probe="cosine", match=what),
                drop(probe="cosine", match=f"{what} of another"),
                "with another's",
            )
            for what in ("f_subj", "f_rel")
        ),
        Claim(f"And after finetuning the subject is matched more often (held-out, M = {few} minus {many})").at_least(
            0.1, drop(**subject), drop(at_start, **subject), "before finetuning"
        ),
    ]


SMOKE = AttentionOnlySetup(
    n_subjects=8,
    n_values=2,
    n_types=2,
    n_grammar=4,
    n_slots=3,
    n_facts=2,
    n_demos=2,
    n_seen=4,
    d_head=8,
    pretraining=4,
    finetuning=4,
    batch_size=4,
    lr=1e-2,
    n=8,
)
CPU = AttentionOnlySetup(
    n_subjects=64,
    n_values=8,
    n_types=4,
    n_grammar=10,
    n_slots=6,
    n_facts=4,
    n_demos=5,
    n_seen=32,
    d_head=64,
    pretraining=2000,
    finetuning=500,
    batch_size=32,
    lr=3e-3,
)
_LONGER = replace(PAPER, pretraining=5000, finetuning=2000)


def _values(subjects: Mapping[int, int], seen: Sequence[int], values: Sequence[int]) -> Any:
    """The cells of Fig. 13; `subjects` gives the d_head of each M."""
    return tuple(
        {"n_subjects": m, "d_head": d_head, "n_seen": n_seen, "values": count}
        for m, d_head in subjects.items()
        for n_seen in seen
        for count in values
    )


def _subjects(d_heads: Mapping[int, int]) -> Any:
    """The cells of Fig. 14: M and its d_head."""
    return tuple({"n_subjects": m, "d_head": d_head} for m, d_head in d_heads.items())


FIG13 = Experiment(
    "recall/fig13",
    "Unique values seen in finetuning",
    f"{SOURCE}, Fig. 13",
    _study(
        "recall/fig13",
        [
            (SMOKE, 2, _values({8: 8}, (4,), (3, 4))),
            (CPU, 3, _values({64: 64}, (8,), (18, 22, 26))),
            (_LONGER, 2, _values({256: 256, 2048: 2048}, (32, 64), (160, 180, 200, 220))),
        ],
    ),
    _draw_values,
    _check_values,
    "More unique values raise accuracy about held-out subjects, whatever M and M_ft.",
)

FIG14 = Experiment(
    "recall/fig14",
    "Few and many subjects in pretraining",
    f"{SOURCE}, Fig. 14",
    _study(
        "recall/fig14",
        [
            (SMOKE, 2, _subjects({8: 8, 12: 8})),
            (replace(CPU, n_seen=8), 3, _subjects({64: 64, 256: 256})),
            (replace(_LONGER, n_seen=32), 2, _subjects({256: 256, 2048: 2048})),
        ],
    ),
    _draw_subjects,
    _check_subjects,
    "With 2048 subjects cosines are low after pretraining, and subject match after finetuning.",
)

_BOTH = ({"positions": "relative"}, {"positions": "absolute"})
_POSITIONS_STUDY = _study("recall/positions", [(SMOKE, 2, _BOTH), (CPU, 3, _BOTH), (PAPER, 2, _BOTH)])


def _of_positions(figure: int, positions: Positions) -> Experiment:
    return Experiment(
        f"recall/fig{figure}",
        f"Finetuning an attention-only model, {positions} positions",
        f"{SOURCE}, Fig. {figure}",
        _POSITIONS_STUDY,
        lambda table: _draw_curves(table.where(positions=positions)),
        lambda table: _check_curves(table.where(positions=positions)),
        "ICL comes to about 1 about seen and held-out subjects.",
    )


FIG19 = _of_positions(19, "relative")
FIG24 = _of_positions(24, "absolute")
