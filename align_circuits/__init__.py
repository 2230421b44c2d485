"""Which attention heads align an output with its input, and which look it up in the examples.

Importing the package imports nothing else: a public name, or a room such as `align_circuits.hooks`, is imported when it
is first asked for. So the command line prints its help at once, and an import alone changes nothing in the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from align_circuits.circuits.attribute import attribute_edges, attribute_heads
    from align_circuits.circuits.direct_effects import direct_logits, function_vectors, head_profile
    from align_circuits.circuits.edge_patching import patch_edges, patch_paths
    from align_circuits.circuits.faithful import faithfulness
    from align_circuits.heads.ablate import ablate_heads, ablation_baseline
    from align_circuits.heads.interchange_interventions import interchange
    from align_circuits.heads.localization import Localization
    from align_circuits.heads.localize_heads import localize
    from align_circuits.heads.patch import patch_heads, patch_sites
    from align_circuits.heads.score import score_heads
    from align_circuits.hooks.edits import Ablate, Clamp, Patch, Steer
    from align_circuits.models.loading import load
    from align_circuits.models.planted.model import planted_circuit
    from align_circuits.prompts.prompts import Prompts
    from align_circuits.prompts.relations import Relation
    from align_circuits.report import plots
    from align_circuits.report.explorer import explore
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

    __version__: str

_MODULES = {
    "Ablate": "align_circuits.hooks.edits",
    "Clamp": "align_circuits.hooks.edits",
    "LexiconTask": "align_circuits.tasks.lexicon",
    "Localization": "align_circuits.heads.localization",
    "Pair": "align_circuits.run.pairs",
    "Patch": "align_circuits.hooks.edits",
    "Prompts": "align_circuits.prompts.prompts",
    "Relation": "align_circuits.prompts.relations",
    "RepeatedTokensTask": "align_circuits.tasks.repeated",
    "RunOptions": "align_circuits.run.options",
    "Seq2SeqTask": "align_circuits.tasks.seq2seq",
    "Steer": "align_circuits.hooks.edits",
    "Table": "align_circuits.tables.tables",
    "Task": "align_circuits.tasks.task",
    "TuneConfig": "align_circuits.training.tuning",
    "ablate_heads": "align_circuits.heads.ablate",
    "ablation_baseline": "align_circuits.heads.ablate",
    "attribute_edges": "align_circuits.circuits.attribute",
    "attribute_heads": "align_circuits.circuits.attribute",
    "direct_logits": "align_circuits.circuits.direct_effects",
    "emergence": "align_circuits.tables.emergence_times",
    "evaluate": "align_circuits.run.evaluation",
    "explore": "align_circuits.report.explorer",
    "faithfulness": "align_circuits.circuits.faithful",
    "function_vectors": "align_circuits.circuits.direct_effects",
    "head_profile": "align_circuits.circuits.direct_effects",
    "interchange": "align_circuits.heads.interchange_interventions",
    "load": "align_circuits.models.loading",
    "localize": "align_circuits.heads.localize_heads",
    "patch_edges": "align_circuits.circuits.edge_patching",
    "patch_heads": "align_circuits.heads.patch",
    "patch_paths": "align_circuits.circuits.edge_patching",
    "patch_sites": "align_circuits.heads.patch",
    "planted_circuit": "align_circuits.models.planted.model",
    "plots": "align_circuits.report",
    "score_heads": "align_circuits.heads.score",
    "tune": "align_circuits.training.tuning",
}
"""Where each public name is defined: the imports above, which only type checkers read, say the same."""

_ROOMS = (
    *("checks", "circuits", "cli", "heads", "hooks", "jobs", "localizers", "models"),
    *("papers", "prompts", "report", "run", "tables", "tasks", "training"),
)

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
    "explore",
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


def __getattr__(name: str) -> Any:
    """Imports a public name, or a room, when it is first asked for (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("align-circuits")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
