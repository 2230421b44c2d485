"""The mechanistic basis of data dependence and abrupt learning (Reddy, 2024): its figures."""

from align_circuits.papers.abrupt.fig_5_operations import CLAMPED, CONFIRMED, FIG5, WITHOUT
from align_circuits.papers.abrupt.figs_1_3_4_network import FIG1, FIG3, FIG4
from align_circuits.papers.abrupt.figs_2_a3_data_dependence import FIG2, FIGA3
from align_circuits.papers.abrupt.figs_6_a2_reduced_model import FIG6, FIGA2
from align_circuits.papers.abrupt.figs_7_a4_loss_landscape import FIG7, FIGA4
from align_circuits.papers.abrupt.figs_a1_a5_mixtures import FIGA1, FIGA5
from align_circuits.papers.abrupt.onset_of_alignment import ONSET

ABRUPT = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIGA1, FIGA2, FIGA3, FIGA4, FIGA5),
    *(CLAMPED, CONFIRMED, WITHOUT, ONSET),
)
"""In the order of the paper; what goes beyond it last."""
