"""The paper's figures, and what goes beyond it."""

from align_circuits.papers.abrupt.classifier_depth import DEPTH
from align_circuits.papers.abrupt.figs_1_a1_both_solutions import FIG1, FIGA1
from align_circuits.papers.abrupt.figs_2_a3_data_dependence import FIG2, FIGA3, NOISE
from align_circuits.papers.abrupt.figs_3_4_5_transition import FIG3, FIG4, FIG5
from align_circuits.papers.abrupt.figs_6_a2_a5_reduced_model import FIG6, FIGA2, FIGA5
from align_circuits.papers.abrupt.figs_7_a4_loss_landscape import FIG7, FIGA4

ABRUPT = (*(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIGA1, FIGA2, FIGA3, FIGA4, FIGA5), *(DEPTH, NOISE))
"""In the order of the paper; what goes beyond it last."""
