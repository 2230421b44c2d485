"""The experiments that validate the package, in the order in which `align-circuits reproduce --list` names them."""

from align_circuits.papers.lab import Experiment
from align_circuits.papers.localizer_zoo import HELD_OUT_ZOO, PUBLIC_ZOO
from align_circuits.validation.attribution_exactness import EXACT
from align_circuits.validation.circuits_in_trained_models import TRAINED_ZOO
from align_circuits.validation.groups_on_random_models import RANDOM_GROUPS
from align_circuits.validation.induction_in_the_wild import WILD
from align_circuits.validation.localize_ground_truth import GROUND_TRUTH
from align_circuits.validation.localize_null import NULL
from align_circuits.validation.localize_power import POWER
from align_circuits.validation.localizer_edges import EDGE_ZOO
from align_circuits.validation.localizers_by_prompts import BY_PROMPTS
from align_circuits.validation.redundancy import REDUNDANCY, REDUNDANCY_TUNING
from align_circuits.validation.toy_llama_criteria import CRITERIA

EXPERIMENTS: tuple[Experiment, ...] = (
    CRITERIA,
    GROUND_TRUTH,
    NULL,
    POWER,
    PUBLIC_ZOO,
    HELD_OUT_ZOO,
    BY_PROMPTS,
    TRAINED_ZOO,
    REDUNDANCY_TUNING,
    REDUNDANCY,
    EDGE_ZOO,
    RANDOM_GROUPS,
    EXACT,
    WILD,
)
"""With the zoo, which every installation has, since `align-circuits benchmark` measures on it."""
