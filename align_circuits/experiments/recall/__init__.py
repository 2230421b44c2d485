"""Understanding contextual recall in transformers (Vasudeva et al., 2026): its figures."""

from align_circuits.experiments.recall.dependence import FIG5, FIG6, FIG7
from align_circuits.experiments.recall.grammar import FIG1
from align_circuits.experiments.recall.learning import FIG2, FIG3, FIG4, FIG15

RECALL = (FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG15)
"""In the order of the paper."""
