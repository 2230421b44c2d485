"""Understanding contextual recall in transformers (Vasudeva et al., 2026): its figures."""

from align_circuits.papers.recall.fig_1_grammar import FIG1
from align_circuits.papers.recall.figs_2_3_4_15_learning import FIG2, FIG3, FIG4, FIG15
from align_circuits.papers.recall.figs_5_6_7_dependence import FIG5, FIG6, FIG7
from align_circuits.papers.recall.figs_8_16_17_18_representations import FIG8, FIG16, FIG17, FIG18
from align_circuits.papers.recall.figs_9_to_12_20_to_26_heads import HEADS
from align_circuits.papers.recall.figs_13_14_19_24_attributes import FIG13, FIG14, FIG19, FIG24
from align_circuits.papers.recall.forced_attention import BRIDGE
from align_circuits.papers.recall.head_exchange import EXCHANGE
from align_circuits.papers.recall.layer_2_attention import CARRIER
from align_circuits.papers.recall.localized_heads import LOCALIZED
from align_circuits.papers.recall.mixed_training import MIXING
from align_circuits.papers.recall.propositions import PROPOSITIONS
from align_circuits.papers.recall.subject_head import STRATEGIES
from align_circuits.papers.recall.theorems import LEMMAS, THEOREM

RECALL = (
    *(FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, HEADS, FIG13, FIG14, FIG15, FIG16, FIG17, FIG18, FIG19),
    *(FIG24, PROPOSITIONS, THEOREM, LEMMAS, BRIDGE, CARRIER, EXCHANGE, LOCALIZED, STRATEGIES, MIXING),
)
"""In the order of the paper; what is of no single figure after it, what goes beyond the paper last."""
