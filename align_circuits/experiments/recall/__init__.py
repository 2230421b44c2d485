"""Understanding contextual recall in transformers (Vasudeva et al., 2026): its figures."""

from align_circuits.experiments.recall.constructions import PROPOSITIONS
from align_circuits.experiments.recall.heads import HEADS
from align_circuits.experiments.recall.theorem import LEMMAS, THEOREM

RECALL = (PROPOSITIONS, THEOREM, LEMMAS, HEADS)
"""In the order of the paper."""
