"""`align-circuits ablate`."""

from dataclasses import dataclass, replace
from typing import Literal

from align_circuits.cli.command_base import counted
from align_circuits.cli.effect_command_base import IN_WORDS, EffectVerb, named_heads
from align_circuits.cli.folders import Results
from align_circuits.heads.ablate import ablate_heads
from align_circuits.heads.effects import check_screen
from align_circuits.run.target_metrics import Metric


@dataclass(frozen=True)
class Ablate(EffectVerb):
    """Ablates every head alone with `ablate_heads`, or each of some."""

    how: Literal["mean", "resample", "zero"] = "mean"
    """"mean" over tokens of the same kind, or of aligned texts over those at one position; "resample" from another
    prompt; or "zero"."""
    heads: tuple[str, ...] | None = None
    """Which heads, each alone, such as L2H3 L4H0 or L2H3,L4H0; by default all."""
    screen: float | None = None
    """Of all heads only this share, such as .25, is ablated: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is ablated."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        heads = named_heads(self.heads)
        check_screen(self.screen)  # both before the model is loaded
        model, prompts, _ = self.prepare()
        metrics: list[Metric] = [
            *dict.fromkeys((self.metric, "accuracy"))
        ]  # which tells whether the model solves the task
        table = ablate_heads(
            model, prompts, self.how, heads=heads, metrics=metrics, screen=self.screen, options=self.options
        )
        replaced_by = self.how
        if self.how == "mean":
            of_kinds = "over tokens of one kind" if self.prompts is None else "over all tokens"
            made = table.provenance
            replaced_by = f"mean {of_kinds if made.settings['by'] == 'kind' else 'over one position'}"
            # Not a setting, since it follows from the prompts; `compare` tells where it differs.
            table = replace(table, provenance=replace(made, data={**made.data, "ablated to": replaced_by}))
        self.write(
            results,
            table,
            prompts,
            self.metric,
            how=f"{counted(prompts)}, ablation to {replaced_by}, change of {self.metric}",
            title=f"Heads of {self.model} ablated",
            what=f"Change of {IN_WORDS[self.metric]} when one head is ablated (to {replaced_by})",
            but="A head whose work others take over shows no change: ablate such heads together, in Python by "
            "evaluate(model, prompts, edits=[Ablate(heads)]).",
        )
