"""Which attention heads align an output with its input, and which look it up in the examples.

Importing the package imports nothing else: a public name, or a room such as `align_circuits.hooks`, is imported when it
is first asked for. So the command line prints its help at once, and an import alone changes nothing in the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from align_circuits.circuits.direct_effects import direct_logit_attribution as direct_logit_attribution
    from align_circuits.circuits.direct_effects import function_vectors as function_vectors
    from align_circuits.circuits.direct_effects import head_profile as head_profile
    from align_circuits.circuits.edge_attribution import attribute_edges as attribute_edges
    from align_circuits.circuits.edge_patching import patch_edges as patch_edges
    from align_circuits.circuits.edge_patching import patch_paths as patch_paths
    from align_circuits.circuits.faithful import faithfulness as faithfulness
    from align_circuits.circuits.head_attribution import attribute_heads as attribute_heads
    from align_circuits.heads.ablate import ablate_heads as ablate_heads
    from align_circuits.heads.ablate import ablation_baseline as ablation_baseline
    from align_circuits.heads.head_sets import ablate_together as ablate_together
    from align_circuits.heads.interchange_interventions import interchange_accuracy as interchange_accuracy
    from align_circuits.heads.localization import Localization as Localization
    from align_circuits.heads.localize_heads import localize as localize
    from align_circuits.heads.patch import patch_heads as patch_heads
    from align_circuits.heads.patch import patch_sites as patch_sites
    from align_circuits.heads.score import score_heads as score_heads
    from align_circuits.hooks.edits import Ablate as Ablate
    from align_circuits.hooks.edits import Clamp as Clamp
    from align_circuits.hooks.edits import Patch as Patch
    from align_circuits.hooks.edits import Steer as Steer
    from align_circuits.models.loading import load as load
    from align_circuits.models.planted.planted_model import planted_circuit as planted_circuit
    from align_circuits.prompts.prompts import Prompts as Prompts
    from align_circuits.prompts.relations import Relation as Relation
    from align_circuits.report import plots as plots
    from align_circuits.report.explorer import explore as explore
    from align_circuits.run.evaluation import answers as answers
    from align_circuits.run.evaluation import evaluate as evaluate
    from align_circuits.run.options import RunOptions as RunOptions
    from align_circuits.run.pairs import Pair as Pair
    from align_circuits.tables.emergence_times import emergence_step as emergence_step
    from align_circuits.tables.tables import Table as Table
    from align_circuits.tasks.lexicon import LexiconTask as LexiconTask
    from align_circuits.tasks.repeated import RepeatedTokensTask as RepeatedTokensTask
    from align_circuits.tasks.seq2seq import Seq2SeqTask as Seq2SeqTask
    from align_circuits.tasks.task import Task as Task
    from align_circuits.training.tuning import TuneConfig as TuneConfig
    from align_circuits.training.tuning import tune as tune

    __version__: str

_PUBLIC = {
    "circuits.direct_effects": ("direct_logit_attribution", "function_vectors", "head_profile"),
    "circuits.edge_attribution": ("attribute_edges",),
    "circuits.edge_patching": ("patch_edges", "patch_paths"),
    "circuits.faithful": ("faithfulness",),
    "circuits.head_attribution": ("attribute_heads",),
    "heads.ablate": ("ablate_heads", "ablation_baseline"),
    "heads.head_sets": ("ablate_together",),
    "heads.interchange_interventions": ("interchange_accuracy",),
    "heads.localization": ("Localization",),
    "heads.localize_heads": ("localize",),
    "heads.patch": ("patch_heads", "patch_sites"),
    "heads.score": ("score_heads",),
    "hooks.edits": ("Ablate", "Clamp", "Patch", "Steer"),
    "models.loading": ("load",),
    "models.planted.planted_model": ("planted_circuit",),
    "prompts.prompts": ("Prompts",),
    "prompts.relations": ("Relation",),
    "report": ("plots",),
    "report.explorer": ("explore",),
    "run.evaluation": ("answers", "evaluate"),
    "run.options": ("RunOptions",),
    "run.pairs": ("Pair",),
    "tables.emergence_times": ("emergence_step",),
    "tables.tables": ("Table",),
    "tasks.lexicon": ("LexiconTask",),
    "tasks.repeated": ("RepeatedTokensTask",),
    "tasks.seq2seq": ("Seq2SeqTask",),
    "tasks.task": ("Task",),
    "training.tuning": ("TuneConfig", "tune"),
}
"""The public names by the module that defines them: the imports above, which only type checkers read, say the same."""

_MODULES = {name: f"align_circuits.{module}" for module, names in _PUBLIC.items() for name in names}

_ROOMS = (
    *("checks", "circuits", "cli", "heads", "hooks", "jobs", "localizers", "models"),
    *("papers", "prompts", "report", "run", "tables", "tasks", "training"),
)

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll] - it reads the imports


def __getattr__(name: str) -> Any:
    """Imports a public name, or a room, when it is first asked for (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value = version("align-circuits")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    else:
        from align_circuits.jobs.similar_names import did_you_mean

        meant = did_you_mean(name, __dir__()).rstrip()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {meant}" if meant else ""))
    # Found without this function from now on.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})
