"""Every experiment by its name, such as `icatune/fig3`."""

from align_circuits.papers.abrupt.figures import ABRUPT
from align_circuits.papers.icatune.figures import ICATUNE
from align_circuits.papers.onset_of_alignment import ONSET
from align_circuits.papers.recall.experiments import RECALL
from align_circuits.papers.study import Experiment
from align_circuits.papers.validation.attribution_exactness import EXACT
from align_circuits.papers.validation.circuits_in_trained_models import TRAINED_ZOO
from align_circuits.papers.validation.groups_on_random_models import RANDOM_GROUPS
from align_circuits.papers.validation.induction_in_the_wild import WILD
from align_circuits.papers.validation.localize_ground_truth import GROUND_TRUTH
from align_circuits.papers.validation.localize_null import NULL
from align_circuits.papers.validation.localize_power import POWER
from align_circuits.papers.validation.localizer_edges import EDGE_ZOO
from align_circuits.papers.validation.localizer_zoo import HELD_OUT_ZOO, PUBLIC_ZOO
from align_circuits.papers.validation.localizers_by_prompts import BY_PROMPTS
from align_circuits.papers.validation.toy_llama_criteria import CRITERIA

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        CRITERIA,
        GROUND_TRUTH,
        NULL,
        POWER,
        PUBLIC_ZOO,
        HELD_OUT_ZOO,
        BY_PROMPTS,
        TRAINED_ZOO,
        EDGE_ZOO,
        RANDOM_GROUPS,
        EXACT,
        WILD,
        *ICATUNE,
        *ABRUPT,
        ONSET,
        *RECALL,
    )
}
