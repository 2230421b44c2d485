"""Understanding contextual recall in transformers (Vasudeva et al., 2026): its figures."""

from align_circuits.experiments.recall.attributes import FIG13, FIG14, FIG19, FIG24
from align_circuits.experiments.recall.bridge import BRIDGE
from align_circuits.experiments.recall.carrier import CARRIER
from align_circuits.experiments.recall.constructions import PROPOSITIONS
from align_circuits.experiments.recall.dependence import FIG5, FIG6, FIG7
from align_circuits.experiments.recall.exchange import EXCHANGE
from align_circuits.experiments.recall.grammar import FIG1
from align_circuits.experiments.recall.heads import HEADS
from align_circuits.experiments.recall.learning import FIG2, FIG3, FIG4, FIG15
from align_circuits.experiments.recall.localized import LOCALIZED
from align_circuits.experiments.recall.mixing import MIXING
from align_circuits.experiments.recall.representations import FIG8, FIG16, FIG17, FIG18
from align_circuits.experiments.recall.strategies import STRATEGIES
from align_circuits.experiments.recall.theorem import LEMMAS, THEOREM

RECALL = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, HEADS, FIG13, FIG14, FIG15, FIG16, FIG17, FIG18, FIG19),
    *(FIG24, PROPOSITIONS, THEOREM, LEMMAS, BRIDGE, CARRIER, EXCHANGE, LOCALIZED, STRATEGIES, MIXING),
)
"""In the order of the paper; what is of no single figure after it, what goes beyond the paper last."""
