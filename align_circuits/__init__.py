"""Which attention heads align an output with its input, and which look it up in the examples."""

from align_circuits.evaluate import evaluate
from align_circuits.models.load import load
from align_circuits.prompts import Prompts, Role
from align_circuits.relations import Relation
from align_circuits.scoring import score_heads
from align_circuits.tables import Provenance, Table

__all__ = ["Prompts", "Provenance", "Relation", "Role", "Table", "evaluate", "load", "score_heads"]
