"""Contextual recall: what it depends on, Figs. 5 to 7: finetuning subjects, grammar length, diversity, subjects."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.claims import Check, Experiment, controlled, measured, over_seeds
from align_circuits.papers.recall.trainings import CPU, PAPER, SMOKE, SOURCE, Study, at_end, best, study
from align_circuits.report import plots
from align_circuits.tables.tables import Table

_HELD_OUT = {"stage": "icl+grm", "probe": "icl_held_out", "match": "exact"}
_PT = {"stage": "pt", "probe": "pt", "match": "exact"}
_FORM = _PT | {"match": "attribute"}
_FORM_IS = "attribute match on PT, which needs neither"


def _values(table: Table, name: str) -> list[Any]:
    """The values that a cell's number takes, in order."""
    return sorted(table.frame[name].unique().tolist())


def _draw_seen(table: Table) -> dict[str, go.Figure]:
    rows = [
        {
            "n_seen": n_seen,
            "curve": said,
            **vars(over_seeds(best(table, n_seen=n_seen, **_HELD_OUT | {"stage": stage}))),
        }
        for stage, said in (("icl", "ICL"), ("icl+grm", "ICL+Grm"))
        for n_seen in _values(table, "n_seen")
    ]
    label = "subjects finetuned on"
    return {"": plots.curves({"": pd.DataFrame(rows)}, x="n_seen", by="curve", label=label, value="exact match on ICL")}


def _check_seen(table: Table) -> list[Check]:
    few, many = _values(table, "n_seen")[0], _values(table, "n_seen")[-1]
    checks = []
    for stage, said in (("icl", "ICL"), ("icl+grm", "ICL+Grm")):
        asked = _HELD_OUT | {"stage": stage}
        at_most, at_least = (best(table, n_seen=n_seen, **asked) for n_seen in (many, few))
        checks.append(
            Check(
                f"More subjects in finetuning on {said} raise ICL about held-out ones ({many} minus {few}, best step)",
                relation=">=",
                threshold=0.15,
                **measured(at_most - at_least),
                **controlled(
                    at_end(table, n_seen=many, stage=stage, probe="pt", match="attribute")
                    - at_end(table, n_seen=few, stage=stage, probe="pt", match="attribute"),
                    "attribute match on PT, which does not need them",
                ),
            )
        )
    return checks


def _grid(table: Table, rows: str, columns: str, where: dict[str, Any]) -> pd.DataFrame:
    """Means over seeds at the end."""
    found = {
        (str(row), str(column)): at_end(table, **{rows: row, columns: column}, **where).mean()
        for row in _values(table, rows)
        for column in _values(table, columns)
    }
    return pd.Series(found).unstack(sort=False)


def _draw_grid(columns: str, label: str) -> Any:
    def draw(table: Table) -> dict[str, go.Figure]:
        panels = {
            "PT, after pretraining": _grid(table, "div", columns, _PT),
            "ICL, held-out, after ICL+Grm": _grid(table, "div", columns, _HELD_OUT),
        }
        return {"": plots.accuracy_grids(panels, x=label, y="Div", value="exact match")}

    return draw


def _check_grid(columns: str, said: str) -> Any:
    def check(table: Table) -> list[Check]:
        divs, others = _values(table, "div"), _values(table, columns)

        def end(where: dict[str, Any], div: float, other: int) -> Float[ndarray, " seed"]:
            return at_end(table, div=div, **{columns: other}, **where)

        checks = []
        for where, what in ((_PT, "PT"), (_HELD_OUT, "ICL about held-out subjects")):
            if columns == "n_subjects" and where is _PT:
                continue
            gain = end(where, divs[-1], others[-1]) - end(where, divs[-1], others[0])
            form = end(_FORM, divs[-1], others[-1]) - end(_FORM, divs[-1], others[0])
            checks.append(
                Check(
                    f"A larger {said} raises {what} ({others[-1]} minus {others[0]}, Div {divs[-1]})",
                    relation=">=",
                    threshold=0.1,
                    **measured(gain),
                    **controlled(form, _FORM_IS),
                )
            )
            gain = end(where, divs[-1], others[0]) - end(where, divs[0], others[0])
            form = end(_FORM, divs[-1], others[0]) - end(_FORM, divs[0], others[0])
            checks.append(
                Check(
                    f"A larger Div raises {what} ({divs[-1]} minus {divs[0]}, {said} {others[0]})",
                    relation=">=",
                    threshold=0.1,
                    **measured(gain),
                    **controlled(form, _FORM_IS),
                )
            )
        return checks

    return check


def _cells(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Every combination."""
    cells: list[dict[str, Any]] = [{}]
    for name, some in values.items():
        cells = [{**cell, name: value} for cell in cells for value in some]
    return tuple(cells)


def _lengths(divs: tuple[float, ...], lens: tuple[int, ...], shorter: dict[int, tuple[int, int]]) -> Any:
    """S x Div; short sequences have another S_ft, as in App. B."""
    return tuple(
        cell | ({"grammar_lens": shorter[cell["grammar_len"]]} if cell["grammar_len"] in shorter else {})
        for cell in _cells(div=divs, grammar_len=lens)
    )


FIG5 = Experiment(
    name="recall/fig5",
    title="CachedPair-out accuracy against the subjects finetuned on",
    source=f"{SOURCE}, Fig. 5",
    scales={
        "smoke": Study(SMOKE, ("icl", "icl+grm"), _cells(n_seen=(4, 12))),
        "cpu": Study(CPU, ("icl", "icl+grm"), _cells(n_seen=(12, 48, 72))),
        "paper": Study(PAPER, ("icl", "icl+grm"), _cells(n_seen=(16, 32, 64, 128, 192))),
    },
    run=study,
    draw=_draw_seen,
    check=_check_seen,
    makes_models=True,
    published="Accuracy rises with the number of subjects, comparably for ICL and ICL+Grm.",
)

FIG6 = Experiment(
    name="recall/fig6",
    title="Grammar length and diversity of the chains",
    source=f"{SOURCE}, Fig. 6",
    scales={
        "smoke": Study(SMOKE, ("pt", "icl+grm"), _lengths((0.2, 0.5), (3, 5), {})),
        "cpu": Study(CPU, ("pt", "icl+grm"), _lengths((0.2, 0.5), (6, 20), {})),
        "paper": Study(PAPER, ("pt", "icl+grm"), _lengths((0.1, 0.3, 0.5), (20, 40, 80), {20: (1, 4)})),
    },
    run=study,
    draw=_draw_grid("grammar_len", "S"),
    check=_check_grid("grammar_len", "S"),
    makes_models=True,
    published="Both raise PT and ICL about held-out subjects.",
)

FIG7 = Experiment(
    name="recall/fig7",
    title="Subjects in pretraining",
    source=f"{SOURCE}, Fig. 7",
    scales={
        "smoke": Study(SMOKE, ("pt", "icl+grm"), _cells(div=(0.2, 0.5), n_subjects=(8, 16))),
        "cpu": Study(CPU, ("pt", "icl+grm"), _cells(div=(0.2, 0.5), n_subjects=(24, 96))),
        "paper": Study(PAPER, ("pt", "icl+grm"), _cells(div=(0.1, 0.3, 0.5), n_subjects=(64, 128, 256))),
    },
    run=study,
    draw=_draw_grid("n_subjects", "M"),
    check=_check_grid("n_subjects", "M"),
    makes_models=True,
    published="More subjects raise ICL about held-out ones.",
)
