"""The experiments beyond the papers, in the order in which `align-circuits reproduce --list` names them."""

from align_circuits.beyond.alignment_given import ORDER
from align_circuits.beyond.alignment_probes import POSTERIOR
from align_circuits.beyond.build_or_unmask import UNMASK
from align_circuits.beyond.finding_3 import FINDING_3
from align_circuits.beyond.forced_attention import BRIDGE
from align_circuits.beyond.interventions_while_training import CLAMPED, CONFIRMED, WITHOUT
from align_circuits.beyond.known_lexicons import LEXICON
from align_circuits.beyond.needs import NEEDS
from align_circuits.beyond.onset_of_alignment import ONSET
from align_circuits.beyond.other_lengths import LENGTHS
from align_circuits.beyond.prosthesis import PROSTHESIS
from align_circuits.beyond.share_of_icl import SHARE
from align_circuits.beyond.stand_ins import STAND_INS
from align_circuits.beyond.tied_embeddings import TIED_EMBEDDINGS
from align_circuits.beyond.tuning_recipes import RECIPE, SINGLE_LAYER
from align_circuits.papers.lab import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    *(UNMASK, PROSTHESIS, STAND_INS, ORDER, LENGTHS, NEEDS, POSTERIOR, LEXICON, SINGLE_LAYER, RECIPE),
    *(FINDING_3, SHARE, BRIDGE, TIED_EMBEDDINGS),
    *(CLAMPED, CONFIRMED, WITHOUT, ONSET),
)
"""Those of ICA-Tune, of contextual recall, of abrupt learning."""
