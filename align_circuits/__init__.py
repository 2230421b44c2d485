"""Which attention heads align an output with its input, and which look it up in the examples."""

from align_circuits.circuits.attribute import attribute_edges, attribute_heads
from align_circuits.circuits.direct_effects import direct_logits, function_vectors, head_profile
from align_circuits.circuits.edge_patching import patch_edges, patch_paths
from align_circuits.circuits.faithful import (
    circuit_model_distance,
    circuit_performance_ratio,
    completeness,
    faithfulness,
    minimality,
)
from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.heads.localize_heads import Localization, Thresholds, localize
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.score import score_heads
from align_circuits.hooks.edits import Ablate, Clamp, Patch, Steer
from align_circuits.hooks.graph import Graph
from align_circuits.models.loading import load
from align_circuits.models.planted.model import planted_circuit, planted_competitors
from align_circuits.papers.abrupt.task import ExemplarTask
from align_circuits.papers.recall.task.next_token import SlotsTask
from align_circuits.papers.recall.task.sequences import DemonstrationsTask, FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.prompts.prompts import Prompts, Role
from align_circuits.prompts.relations import Relation
from align_circuits.report import plots
from align_circuits.run.evaluation import evaluate
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.tables.emergence import emergence
from align_circuits.tables.tables import Provenance, Table
from align_circuits.tasks.repeated import RepeatedTokensTask
from align_circuits.tasks.seq2seq import Seq2SeqTask
from align_circuits.training.tuning import TuneConfig, TuneRun, tune

__all__ = [
    "Ablate",
    "Clamp",
    "DemonstrationsTask",
    "ExemplarTask",
    "FactsTask",
    "Graph",
    "Localization",
    "Pair",
    "Patch",
    "Prompts",
    "Provenance",
    "RecallWorld",
    "Relation",
    "RepeatedTokensTask",
    "Role",
    "RunOptions",
    "Seq2SeqTask",
    "SlotsTask",
    "Steer",
    "Table",
    "Thresholds",
    "TuneConfig",
    "TuneRun",
    "ablate_heads",
    "ablation_baseline",
    "attribute_edges",
    "attribute_heads",
    "circuit_model_distance",
    "circuit_performance_ratio",
    "completeness",
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
    "planted_circuit",
    "planted_competitors",
    "plots",
    "score_heads",
    "tune",
]
