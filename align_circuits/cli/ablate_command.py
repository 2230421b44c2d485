"""`align-circuits ablate`."""

from dataclasses import dataclass
from typing import Literal

from align_circuits.cli.effects import MetricName, best_heads, sections
from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_verb import SweepVerb
from align_circuits.heads.ablate import ablate_heads


@dataclass(frozen=True)
class Ablate(SweepVerb):
    """Ablates every head alone with `ablate_heads`."""

    how: Literal["mean", "resample", "zero"] = "mean"
    """"mean" over tokens of the same kind, "resample" from another prompt, or "zero"."""
    metric: MetricName = "log_prob"
    """What is measured of each target; "logit_diff" needs a file with wrong answers."""
    screen: float | None = None
    """Of all heads only this share, such as .25, is ablated: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is ablated."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, prompts, _ = self.prepare()
        table = ablate_heads(model, prompts, self.how, metrics=(self.metric,), screen=self.screen, options=self.options)
        best = best_heads(table, self.metric)
        print(f"{self.model}: {len(prompts)} prompts, {self.how} ablation, change of {self.metric}\n\n  {best}")
        self.finish(
            "ablate",
            results,
            table,
            title=f"Heads of {self.model} ablated",
            summary=f"Change of {self.metric} when one head is ablated ({self.how}), largest first: {best}. A head "
            "whose work others take over shows no change: ablate such heads together.",
            sections=list(sections(table, self.metric, prompts)),
        )
