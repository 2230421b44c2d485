"""The papers' figures and tables, each reproducible by name."""

from align_circuits.experiments.abrupt import ABRUPT
from align_circuits.experiments.attribution import EXACT
from align_circuits.experiments.conjecture import CONJECTURE
from align_circuits.experiments.experiment import Experiment
from align_circuits.experiments.ground_truth import GROUND_TRUTH
from align_circuits.experiments.icatune import FIG3, FIG9, TABLE1
from align_circuits.experiments.icatune_attention import FIG1, FIG5, FIG8, FIG11
from align_circuits.experiments.icatune_causal import CAUSAL
from align_circuits.experiments.icatune_data import APPF, FIG2, PRIOR
from align_circuits.experiments.icatune_tuning import FIG4
from align_circuits.experiments.icatune_variants import FIG6, FIG7, FIG10
from align_circuits.experiments.recall import RECALL
from align_circuits.experiments.toy_llama import CRITERIA

_PAPER_1 = (TABLE1, FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, FIG9, FIG10, FIG11, PRIOR, APPF, CAUSAL, CONJECTURE)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (CRITERIA, GROUND_TRUTH, EXACT, *_PAPER_1, *ABRUPT, *RECALL)
}
"""Every experiment by its name, such as `"icatune/fig3"`."""
