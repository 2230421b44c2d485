"""The papers' figures and tables, each reproducible by name."""

from align_circuits.experiments.attribution import EXACT
from align_circuits.experiments.experiment import Experiment
from align_circuits.experiments.ground_truth import GROUND_TRUTH
from align_circuits.experiments.icatune import FIG3, FIG9, TABLE1
from align_circuits.experiments.toy_llama import CRITERIA

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (CRITERIA, GROUND_TRUTH, EXACT, FIG3, FIG9, TABLE1)
}
"""Every experiment by its name, such as `"icatune/fig3"`."""
