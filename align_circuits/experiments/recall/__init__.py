"""Understanding contextual recall in transformers (Vasudeva et al., 2026): its figures."""

from align_circuits.experiments.recall.constructions import PROPOSITIONS
from align_circuits.experiments.recall.dependence import FIG5, FIG6, FIG7
from align_circuits.experiments.recall.grammar import FIG1
from align_circuits.experiments.recall.heads import HEADS
from align_circuits.experiments.recall.learning import FIG2, FIG3, FIG4, FIG15
from align_circuits.experiments.recall.representations import FIG8, FIG16, FIG17, FIG18
from align_circuits.experiments.recall.theorem import LEMMAS, THEOREM

RECALL = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, HEADS, FIG15, FIG16, FIG17, FIG18),
    *(PROPOSITIONS, THEOREM, LEMMAS),
)
"""In the order of the paper; what is of no single figure last."""
