"""The papers' figures and tables, each reproducible by name."""

from align_circuits.experiments.experiment import Experiment
from align_circuits.experiments.ground_truth import GROUND_TRUTH
from align_circuits.experiments.icatune import FIG3, FIG9, TABLE1
from align_circuits.experiments.icatune_data import APPF, FIG2, PRIOR
from align_circuits.experiments.icatune_tuning import FIG4
from align_circuits.experiments.toy_llama import CRITERIA

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (CRITERIA, GROUND_TRUTH, TABLE1, FIG2, FIG3, FIG4, FIG9, PRIOR, APPF)
}
"""Every experiment by its name, such as `"icatune/fig3"`."""
