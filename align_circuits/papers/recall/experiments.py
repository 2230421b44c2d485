"""The experiments of the room: the figures of the paper and its theory."""

from align_circuits.papers.recall.figures.fig_1_grammar import FIG1
from align_circuits.papers.recall.figures.figs_2_to_7_15_training import FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG15
from align_circuits.papers.recall.figures.figs_8_16_17_18_task_vectors import FIG8, FIG16, FIG17, FIG18
from align_circuits.papers.recall.figures.figs_9_to_12_20_to_26_heads import HEADS
from align_circuits.papers.recall.figures.figs_13_14_19_24_held_out import FIG13, FIG14, FIG19, FIG24
from align_circuits.papers.recall.figures.propositions_1_to_4 import PROPOSITIONS
from align_circuits.papers.recall.figures.theorems_1_and_2 import LEMMAS, THEOREM

RECALL = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, HEADS, FIG13, FIG14, FIG15, FIG16, FIG17, FIG18, FIG19),
    *(FIG24, PROPOSITIONS, THEOREM, LEMMAS),
)
"""In the order of the paper; then those of no single figure."""
