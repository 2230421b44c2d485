"""`align-circuits patch`."""

from dataclasses import dataclass
from typing import Literal

from align_circuits.cli.effects import MetricName, best_heads, sections
from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_verb import SweepVerb
from align_circuits.heads.patch import patch_heads
from align_circuits.run.pairs import Direction


@dataclass(frozen=True)
class Patch(SweepVerb):
    """Patches every head alone with `patch_heads`."""

    site: Literal["z", "q", "k", "v", "pattern"] = "z"
    """Which activation of a head is patched: z is its output before the output matrix."""
    metric: MetricName = "log_prob"
    """What is measured of each target; "logit_diff" needs a file with wrong answers."""
    direction: Direction = "denoise"
    """"denoise" puts clean activations into corrupted runs, "noise" corrupted ones into clean runs. A corrupted prompt
    of the task has another test input, so that another symbol is to be translated at every position."""
    screen: float | None = None
    """Of all heads only this share, such as .25, is patched: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is patched."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, pair = self.prepare_pair(metric=self.metric, direction=self.direction)
        table = patch_heads(model, pair, sites=(self.site,), screen=self.screen, options=self.options)
        best = best_heads(table, self.metric)
        print(f"{self.model}: {len(pair.clean)} pairs, {self.direction}, change of {self.metric}\n\n  {best}")
        into = "clean into corrupted" if self.direction == "denoise" else "corrupted into clean"
        self.finish(
            "patch",
            results,
            table,
            title=f"Heads of {self.model} patched",
            summary=f"Change of {self.metric} when one head's {self.site} is patched from {into} prompts, largest "
            f"first: {best}. {self.corruption}",
            sections=list(sections(table, self.metric, pair.clean)),
        )
