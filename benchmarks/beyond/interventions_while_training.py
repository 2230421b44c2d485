"""Beyond abrupt learning: operations of the head given, removed, or their suspected causes fixed, from the start."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from numpy import ndarray

from align_circuits.papers.abrupt.curves import at_end, at_start, draw_means, has_formed, transitions
from align_circuits.papers.abrupt.grid import CPU, NAMES, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.interventions import INTERVENTIONS, OPERATION_SITES
from align_circuits.papers.lab import About, Claim, Experiment, Study, over_seeds, share_of
from align_circuits.tables.tables import Table

NOTHING = "nothing"

HYPOTHESES = (
    ("H1: CLA → TLA2 → ILA1 and TILA2", "TLA2"),
    ("H1: CLA → TLA2 → ILA1 and TILA2", "CLA"),
    ("H2: TLA2 → ILA1 and TILA2", "TLA2"),
    ("H3: CLA → ILA1 and TILA2", "CLA"),
)
"""What the paper considers as the cause of the transition, and a measure that, fixed, cannot cause it."""


def brought_forward(table: Table, intervention: str) -> Float[ndarray, " seed"]:
    """Returns how much earlier the transition comes, as a share of its step; without one it counts at the end."""
    last = float(table.frame["step"].to_numpy().max())
    free, changed = (np.nan_to_num(transitions(table, intervention=name), nan=last) for name in (NOTHING, intervention))
    return (free - changed) / free


def hypotheses(table: Table) -> pd.DataFrame:
    """Returns which of H1 to H3 the interventions exclude.

    A hypothesis is excluded if a cause that it names was fixed from the start and the head formed in every seed all the
    same (`curves.has_formed`). The bound on TILA2 was set after the kept results of `abrupt/clamped` were seen; the
    first, one half, cannot be reached while TLA2 is fixed. `abrupt/confirmed` repeats the test on fresh seeds.

    Args:
        table: Of `abrupt/clamped` or `abrupt/confirmed`.
    """
    rows = []
    for hypothesis, cause in HYPOTHESES:
        formed = has_formed(table, intervention=f"{cause} fixed")
        steps = [over_seeds(transitions(table, intervention=name)) for name in (f"{cause} fixed", NOTHING)]
        rows.append(
            {
                "hypothesis": hypothesis,
                "fixed": cause,
                "seeds in which the head forms": str(share_of(formed)),
                "step": f"{steps[0]:.0f}",
                "step, nothing fixed": f"{steps[1]:.0f}",
                "excluded": "yes" if formed.all() else "no",
            }
        )
    return pd.DataFrame(rows)


def _study(name: str, interventions: Iterable[str], *sizes: Size) -> Study:
    conditions = [{"intervention": each} for each in interventions]
    return grid_study(name, *(Grid(size.with_task(**PLATEAU), conditions) for size in sizes))


def _draw(table: Table, shown: Sequence[str], families: Mapping[str, Sequence[str]]) -> dict[str, go.Figure]:
    """One figure for each family of interventions, a panel for each of them."""
    names = {measure: NAMES[measure] for measure in shown}
    return {
        title: draw_means(table, names, {each: {"intervention": each} for each in (NOTHING, *family)}, "measure")
        for title, family in families.items()
    }


_PAPER = PAPER.with_task(n_classes=256)

STUDY = _study("abrupt/interventions", INTERVENTIONS, SMOKE, replace(CPU, first_seed=40, steps=2000), _PAPER)

# Operations given, causes fixed


def _draw_given(table: Table) -> dict[str, go.Figure]:
    families = {
        "given while training": ("previous", "previous, labels", "previous, items", "target's label"),
        "fixed while training": ("TLA2 fixed", "CLA fixed"),
    }
    return _draw(table, ("icl", "tila2", "tla2"), families)


def _check_given(table: Table) -> list[Claim]:
    items = brought_forward(table, "previous, items"), "only items clamped"
    tla2, cla = {"intervention": "TLA2 fixed"}, {"intervention": "CLA fixed"}
    return [
        Claim(
            "Layer 1 clamped to the previous token from the start brings the transition forward (share of its step)"
        ).at_least(0.2, brought_forward(table, "previous"), *items),
        Claim("It is the labels' attention that matters (only labels clamped; share of its step)").at_least(
            0.2, brought_forward(table, "previous, labels"), *items
        ),
        Claim(
            "TLA2 is not needed (accuracy at the end while the target cannot prefer labels): H1 and H2 are excluded"
        ).at_least(0.9, at_end(table, "icl", **tla2), at_end(table, "tla2", **tla2), "TLA2 there, which must stay low"),
        Claim(
            "CLA need not be learned (accuracy at the end while labels outside the context are ruled out): H1 and H3 "
            "are excluded"
        ).at_least(0.9, at_end(table, "icl", **cla), at_start(table, "icl", **cla), "there before training"),
    ]


CLAMPED = Experiment(
    name="abrupt/clamped",
    title="Operations given, and their suspected causes fixed, while the network trains",
    source=f"beyond {SOURCE}: its hypotheses H1 to H3 by intervention",
    study=STUDY,
    figures=_draw_given,
    claims=_check_given,
    published="Not in the paper, which holds beta_2 = 0 in the reduced model (Fig. 6 b) and sets L = N (Fig. 6 c).",
    about=About.BEYOND,
)


# Operations removed


def _draw_removed(table: Table) -> dict[str, go.Figure]:
    families = {
        "removed while training": tuple(f"no {operation}" for operation in OPERATION_SITES),
        "the same elsewhere": tuple(f"no {operation}, elsewhere" for operation in OPERATION_SITES),
    }
    return _draw(table, ("icl", "tila2", "tla2"), families)


def _check_removed(table: Table) -> list[Claim]:
    def lost(intervention: str) -> Float[ndarray, " seed"]:
        free, changed = (at_end(table, "icl", intervention=name) for name in (NOTHING, intervention))
        return free - changed

    return [
        Claim(
            f"Taken away from the start, nothing takes its place: {site.description} (accuracy lost at the end)"
        ).at_least(
            0.4, lost(f"no {operation}"), lost(f"no {operation}, elsewhere"), "the same where the operation is not"
        )
        for operation, site in OPERATION_SITES.items()
    ]


WITHOUT = Experiment(
    name="abrupt/without",
    title="Each operation removed while the network trains",
    source=f"beyond {SOURCE}: Fig. 5 by intervention",
    study=STUDY,
    figures=_draw_removed,
    claims=_check_removed,
    published="Not in the paper.",
    about=About.BEYOND,
)


# Causes fixed once more, by a criterion that was fixed before the seeds were seen

_CONFIRMED = ("TLA2 fixed", "CLA fixed", "no match")
"""Last, the control of the criterion: a network that cannot have the third operation."""

_FRESH = (replace(CPU, first_seed=6), replace(_PAPER, first_seed=6))


def _check_confirmed(table: Table) -> list[Claim]:
    shares = {each: share_of(has_formed(table, intervention=each)) for each in (NOTHING, *_CONFIRMED)}
    cannot_match = shares["no match"], "the target cannot match"
    return [
        Claim("With nothing held the head forms in every seed (share of seeds)").at_least(
            1.0, shares[NOTHING], *cannot_match
        ),
        Claim("With TLA2 held the head forms in every seed: H1 and H2 are excluded (share of seeds)").at_least(
            1.0, shares["TLA2 fixed"], *cannot_match
        ),
        Claim("With CLA held the head forms in no seed: H3 is not excluded (share of seeds)").at_most(
            0.0, shares["CLA fixed"], shares[NOTHING], "nothing held"
        ),
    ]


def _draw_confirmed(table: Table) -> dict[str, go.Figure]:
    return _draw(table, ("icl", "ila1", "tila2", "tla2", "cla"), {"fixed from the start": _CONFIRMED})


CONFIRMED = Experiment(
    name="abrupt/confirmed",
    title="TLA2 and CLA fixed, on fresh seeds and by a criterion set beforehand",
    source=f"beyond {SOURCE}: its hypotheses H1 to H3 by intervention",
    study=_study("abrupt/confirmed", (NOTHING, *_CONFIRMED), replace(SMOKE, first_seed=2), *_FRESH),
    figures=_draw_confirmed,
    claims=_check_confirmed,
    published="Not in the paper. What abrupt/clamped found, stated as claims before these seeds were trained.",
    about=About.BEYOND,
)
