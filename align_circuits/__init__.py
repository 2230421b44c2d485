"""Which attention heads align an output with its input, and which look it up in the examples."""

from align_circuits import plots
from align_circuits.ablation import ablate_heads, reference_of
from align_circuits.attribution import attribute_edges, attribute_heads
from align_circuits.contributions import direct_logits, function_vectors, head_profile
from align_circuits.emergence import emergence
from align_circuits.evaluate import evaluate
from align_circuits.faithfulness import cmd, completeness, cpr, faithfulness, minimality
from align_circuits.graph import Graph
from align_circuits.hooks.edits import Ablate, Clamp, Patch, Steer
from align_circuits.localize import Localization, Thresholds, localize
from align_circuits.models.load import load
from align_circuits.models.planted import planted, planted_rivals
from align_circuits.patching import patch_heads
from align_circuits.paths import patch_edges, patch_paths
from align_circuits.prompts import Prompts, Role
from align_circuits.relations import Relation
from align_circuits.scoring import score_heads
from align_circuits.tables import Provenance, Table
from align_circuits.tasks.exemplars import ExemplarTask
from align_circuits.tasks.recall import RecallWorld
from align_circuits.tasks.recall_tasks import DemonstrationsTask, FactsTask
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.tuning import TuneConfig, TuneRun, tune

__all__ = [
    "Ablate",
    "Clamp",
    "DemonstrationsTask",
    "ExemplarTask",
    "FactsTask",
    "Graph",
    "Localization",
    "Patch",
    "Prompts",
    "Provenance",
    "RecallWorld",
    "Relation",
    "RepeatedTokensTask",
    "Role",
    "Seq2SeqTask",
    "Steer",
    "Table",
    "Thresholds",
    "TuneConfig",
    "TuneRun",
    "ablate_heads",
    "attribute_edges",
    "attribute_heads",
    "cmd",
    "completeness",
    "cpr",
    "direct_logits",
    "emergence",
    "evaluate",
    "faithfulness",
    "function_vectors",
    "head_profile",
    "load",
    "localize",
    "minimality",
    "patch_edges",
    "patch_heads",
    "patch_paths",
    "planted",
    "planted_rivals",
    "plots",
    "reference_of",
    "score_heads",
    "tune",
]
