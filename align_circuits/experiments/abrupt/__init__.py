"""The mechanistic basis of data dependence and abrupt learning (Reddy, 2024): its figures."""

from align_circuits.experiments.abrupt.dependence import FIG2, FIGA3
from align_circuits.experiments.abrupt.landscape import FIG7, FIGA4
from align_circuits.experiments.abrupt.mixtures import FIGA1, FIGA5
from align_circuits.experiments.abrupt.network import FIG1, FIG3, FIG4
from align_circuits.experiments.abrupt.onset import ONSET
from align_circuits.experiments.abrupt.operations import CLAMPED, CONFIRMED, FIG5, WITHOUT
from align_circuits.experiments.abrupt.reduced import FIG6, FIGA2

ABRUPT = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIGA1, FIGA2, FIGA3, FIGA4, FIGA5),
    *(CLAMPED, CONFIRMED, WITHOUT, ONSET),
)
"""In the order of the paper; what goes beyond it last."""
