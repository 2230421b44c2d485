"""The papers' figures and tables, each reproducible by name."""

from align_circuits.experiments.abrupt.dependence import FIG2, FIGA3
from align_circuits.experiments.abrupt.landscape import FIG7, FIGA4
from align_circuits.experiments.abrupt.network import FIG1, FIG3, FIG4, FIGA1, FIGA5
from align_circuits.experiments.abrupt.operations import CLAMPED, FIG5
from align_circuits.experiments.abrupt.reduced import FIG6, FIGA2
from align_circuits.experiments.experiment import Experiment
from align_circuits.experiments.ground_truth import GROUND_TRUTH
from align_circuits.experiments.icatune import FIG3 as ICATUNE_FIG3
from align_circuits.experiments.icatune import FIG9, TABLE1
from align_circuits.experiments.toy_llama import CRITERIA

ABRUPT = (FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIGA1, FIGA2, FIGA3, FIGA4, FIGA5, CLAMPED)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (CRITERIA, GROUND_TRUTH, ICATUNE_FIG3, FIG9, TABLE1, *ABRUPT)
}
"""Every experiment by its name, such as `"icatune/fig3"`."""
