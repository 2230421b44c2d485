"""The Missing Alignment Link (Agarwal and Sarawagi, 2025): its figures."""

from align_circuits.papers.icatune.conjecture import CONJECTURE
from align_circuits.papers.icatune.fig_2_data import APPF, FIG2, PRIOR, TABLE1
from align_circuits.papers.icatune.fig_4_emergence import FIG4
from align_circuits.papers.icatune.fig_6_standard_tuning import FIG6, STANDARD
from align_circuits.papers.icatune.figs_1_5_8_11_attention import FIG1, FIG5, FIG8, FIG11
from align_circuits.papers.icatune.figs_3_9_accuracy import FIG3, FIG9, SYMBOLS_OF_TABLE1
from align_circuits.papers.icatune.figs_7_10_alignments_and_layers import FIG7, FIG10

ICATUNE = (
    *(TABLE1, SYMBOLS_OF_TABLE1, FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, FIG9, FIG10, FIG11),
    *(PRIOR, APPF, STANDARD, CONJECTURE),
)
"""In the order of the paper; what goes beyond it last."""
