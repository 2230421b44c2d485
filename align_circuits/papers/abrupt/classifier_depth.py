"""How many hidden layers the classifier needs, to learn in weights and for the induction head to form."""

from dataclasses import replace

from align_circuits.papers.abrupt.grid import CPU, PAPER, PLATEAU, SMOKE, SOURCE, Grid, Size, grid_study
from align_circuits.papers.abrupt.progress_measures import FORMED
from align_circuits.papers.claims import Claim
from align_circuits.papers.lab import Experiment, lines
from align_circuits.papers.statistics import late_mean

IN_WEIGHTS = {"burst": 0, "p_context": 0.0}
"""Sequences whose label only the weights know."""

IN_CONTEXT = {"burst": PLATEAU["burst"], "p_context": PLATEAU["p_context"]}

DEPTHS = range(5)

PERFECT = 0.95
"""The accuracy in weights that counts as perfect classification; items are noisy."""

_WEIGHTS = [late_mean("iwl", hidden_layers=depth, **IN_WEIGHTS) for depth in DEPTHS]


def _grid(size: Size) -> Grid:
    return Grid(size, [{"hidden_layers": depth, **task} for depth in DEPTHS for task in (IN_WEIGHTS, IN_CONTEXT)])


_AS_MANY_CLASSES = replace(CPU, steps=9000, first_seed=30, log_every=300).with_task(n_classes=1024)
"""As many classes as in the paper: of 512 two hidden layers learn .99 in 3,000 steps, on seeds 20 to 25."""

DEPTH = Experiment(
    name="abrupt/depth",
    title="How many hidden layers the classifier needs",
    source=f"{SOURCE}, §2",
    study=grid_study("abrupt/depth", _grid(SMOKE), _grid(_AS_MANY_CLASSES), _grid(replace(PAPER, log_every=5000))),
    figures={
        "": lines(
            {
                "accuracy in weights, B = 0": late_mean("iwl", **IN_WEIGHTS),
                "accuracy in context, p_C = 0.8": late_mean("icl", **IN_CONTEXT),
                "share of seeds with an induction head, p_C = 0.8": FORMED.at(**IN_CONTEXT),
            },
            "hidden_layers",
            label="hidden layers of the classifier",
            value="at the end",
        )
    },
    claims=[
        Claim("Three hidden layers learn the classes in weights (accuracy in weights at the end)", "perfect").at_least(
            PERFECT, _WEIGHTS[3], _WEIGHTS[0], "none"
        ),
        *(
            Claim(f"{name} (accuracy in weights at the end)", "at least three layers are needed").at_most(
                PERFECT, _WEIGHTS[depth], _WEIGHTS[3], "three"
            )
            for depth, name in enumerate(("None does not", "One does not", "Two do not"))
        ),
        *(
            Claim(f"The induction head forms with {depth} hidden layers (share of seeds)").at_least(
                0.5,
                FORMED.at(hidden_layers=depth, **IN_CONTEXT),
                FORMED.at(hidden_layers=3, **IN_WEIGHTS),
                "B = 0, three hidden layers",
            )
            for depth in DEPTHS
        ),
    ],
    published="At least three layers were necessary to achieve perfect classification accuracy, as K is far above L.",
)
