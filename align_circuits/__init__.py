"""Which attention heads align an output with its input, and which look it up in the examples."""

from importlib.metadata import version

from align_circuits.circuits.attribute import attribute_edges, attribute_heads
from align_circuits.circuits.direct_effects import direct_logits, function_vectors, head_profile
from align_circuits.circuits.edge_patching import patch_edges, patch_paths
from align_circuits.circuits.faithful import faithfulness
from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.interchange_interventions import interchange
from align_circuits.heads.localize_heads import Localization, localize
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.score import score_heads
from align_circuits.heads.site_patching import patch_sites
from align_circuits.hooks.edits import Ablate, Clamp, Patch, Steer
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.relations import Relation
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.emergence_times import emergence
from align_circuits.tables.tables import Table
from align_circuits.tasks.lexicon import LexiconTask
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tasks.task import Task
from align_circuits.training.tuning import TuneConfig, tune

__version__ = version("align-circuits")

__all__ = [
    "Ablate",
    "Clamp",
    "LexiconTask",
    "Localization",
    "Pair",
    "Patch",
    "Prompts",
    "Relation",
    "RepeatedTokensTask",
    "RunOptions",
    "Seq2SeqTask",
    "Steer",
    "Table",
    "Task",
    "TuneConfig",
    "__version__",
    "ablate_heads",
    "ablation_baseline",
    "attribute_edges",
    "attribute_heads",
    "direct_logits",
    "emergence",
    "evaluate",
    "faithfulness",
    "function_vectors",
    "head_profile",
    "interchange",
    "load",
    "localize",
    "patch_edges",
    "patch_heads",
    "patch_paths",
    "patch_sites",
    "planted_circuit",
    "plots",
    "score_heads",
    "tune",
]
