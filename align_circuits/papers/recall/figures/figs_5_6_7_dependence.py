"""What recall in context depends on: Figs. 5 to 7: subjects of finetuning, grammar length, diversity, subjects."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Claim, over_seeds
from align_circuits.papers.recall.figures.figs_2_3_4_15_learning import CAPTIONS
from align_circuits.papers.recall.figures.gpt2_models import CPU, PAPER, SMOKE, SOURCE
from align_circuits.papers.recall.figures.training_curves import Trainings, at_end, best, curves_study, grid
from align_circuits.papers.study import Experiment
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_HELD_OUT = {"stage": "icl+grm", "probe": "icl_held_out", "match": "exact"}
_PT = {"stage": "pt", "probe": "pt", "match": "exact"}


def _values(table: Table, name: str) -> list[Any]:
    """The values of a key column, in order."""
    return sorted(table.frame[name].unique().tolist())


def _draw_seen(table: Table) -> dict[str, go.Figure]:
    rows = [
        {"n_seen": n, "curve": curve, **vars(over_seeds(best(table, n_seen=n, **_HELD_OUT | {"stage": stage})))}
        for stage, curve in CAPTIONS.items()
        for n in _values(table, "n_seen")
    ]
    label = "subjects finetuned on"
    return {"": plots.curves({"": pd.DataFrame(rows)}, x="n_seen", by="curve", label=label, value="exact match on ICL")}


def _check_seen(table: Table) -> list[Check]:
    few, *_, many = _values(table, "n_seen")
    checks = []
    for stage, name in CAPTIONS.items():
        held_out, control = _HELD_OUT | {"stage": stage}, {"stage": stage, "probe": "pt", "match": "attribute"}
        claim = f"More subjects in finetuning on {name} raise ICL about held-out ones ({many} minus {few}, best step)"
        checks.append(
            Claim(claim).at_least(
                0.15,
                best(table, n_seen=many, **held_out) - best(table, n_seen=few, **held_out),
                at_end(table, n_seen=many, **control) - at_end(table, n_seen=few, **control),
                "attribute match on PT, which does not need them",
            )
        )
    return checks


def _grid(table: Table, columns: str, where: dict[str, Any]) -> pd.DataFrame:
    """Means over seeds at the end, with diversities as rows."""
    values = {
        (str(div), str(column)): at_end(table, **{"div": div, columns: column}, **where).mean()
        for div in _values(table, "div")
        for column in _values(table, columns)
    }
    return pd.Series(values).unstack(sort=False)


def _draw_grid(table: Table, columns: str, label: str) -> dict[str, go.Figure]:
    panels = {
        "PT, after pretraining": _grid(table, columns, _PT),
        "ICL, held-out, after ICL+Grm": _grid(table, columns, _HELD_OUT),
    }
    return {"": plots.accuracy_grids(panels, x=label, y="Div", value="exact match")}


def _check_grid(table: Table, columns: str, label: str) -> list[Check]:
    (low, *_, high), (small, *_, large) = _values(table, "div"), _values(table, columns)

    def end(where: dict[str, Any], div: float, column: int) -> Float[ndarray, " seed"]:
        return at_end(table, div=div, **{columns: column}, **where)

    checks = []
    for where, name in ((_PT, "PT"), (_HELD_OUT, "ICL about held-out subjects")):
        if columns == "n_subjects" and where is _PT:
            continue
        control = _PT | {"match": "attribute"}
        for claim, more, less in (
            (f"A larger {label} raises {name} ({large} minus {small}, Div {high})", (high, large), (high, small)),
            (f"A larger Div raises {name} ({high} minus {low}, {label} {small})", (high, small), (low, small)),
        ):
            values, controls = (end(keys, *more) - end(keys, *less) for keys in (where, control))
            checks.append(Claim(claim).at_least(0.1, values, controls, "attribute match on PT, which needs neither"))
    return checks


def _lengths(divs: tuple[float, ...], lens: tuple[int, ...], shorter: dict[int, tuple[int, int]]) -> Any:
    """S x Div; short sequences have another S_ft, as in App. B."""
    return tuple(
        keys | ({"grammar_lens": shorter[keys["grammar_len"]]} if keys["grammar_len"] in shorter else {})
        for keys in grid(div=divs, grammar_len=lens)
    )


FIG5 = Experiment(
    "recall/fig5",
    "Held-out accuracy against the number of subjects in finetuning",
    f"{SOURCE}, Fig. 5",
    curves_study(
        "recall/fig5",
        Trainings(SMOKE, ("icl", "icl+grm"), grid(n_seen=(4, 12))),
        Trainings(CPU, ("icl", "icl+grm"), grid(n_seen=(12, 48, 72))),
        Trainings(PAPER, ("icl", "icl+grm"), grid(n_seen=(16, 32, 64, 128, 192))),
    ),
    _draw_seen,
    _check_seen,
    "Accuracy rises with the number of subjects, comparably for ICL and ICL+Grm.",
)

FIG6 = Experiment(
    "recall/fig6",
    "Grammar length and diversity of the chains",
    f"{SOURCE}, Fig. 6",
    curves_study(
        "recall/fig6",
        Trainings(SMOKE, ("pt", "icl+grm"), _lengths((0.2, 0.5), (3, 5), {})),
        Trainings(CPU, ("pt", "icl+grm"), _lengths((0.2, 0.5), (6, 20), {})),
        Trainings(PAPER, ("pt", "icl+grm"), _lengths((0.1, 0.3, 0.5), (20, 40, 80), {20: (1, 4)})),
    ),
    lambda table: _draw_grid(table, "grammar_len", "S"),
    lambda table: _check_grid(table, "grammar_len", "S"),
    "Both raise PT and ICL about held-out subjects.",
)

FIG7 = Experiment(
    "recall/fig7",
    "Subjects in pretraining",
    f"{SOURCE}, Fig. 7",
    curves_study(
        "recall/fig7",
        Trainings(SMOKE, ("pt", "icl+grm"), grid(div=(0.2, 0.5), n_subjects=(8, 16))),
        Trainings(CPU, ("pt", "icl+grm"), grid(div=(0.2, 0.5), n_subjects=(24, 96))),
        Trainings(PAPER, ("pt", "icl+grm"), grid(div=(0.1, 0.3, 0.5), n_subjects=(64, 128, 256))),
    ),
    lambda table: _draw_grid(table, "n_subjects", "M"),
    lambda table: _check_grid(table, "n_subjects", "M"),
    "More subjects raise ICL about held-out ones.",
)
