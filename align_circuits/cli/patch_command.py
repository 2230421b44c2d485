"""`align-circuits patch`."""

from dataclasses import dataclass
from typing import Literal

from align_circuits.cli.effects import EffectMetric, EffectVerb, PairDirection
from align_circuits.cli.folders import Results
from align_circuits.heads.patch import patch_heads


@dataclass(frozen=True)
class Patch(EffectVerb):
    """Patches every head alone with `patch_heads`."""

    site: Literal["z", "q", "k", "v", "pattern"] = "z"
    """Which activation of a head is patched: z is its output before the output matrix."""
    metric: EffectMetric = "log_prob"
    direction: PairDirection = "denoise"
    screen: float | None = None
    """Of all heads only this share, such as .25, is patched: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is patched."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, pair = self.prepare_pair(metric=self.metric, direction=self.direction)
        into = "clean into corrupted" if self.direction == "denoise" else "corrupted into clean"
        table = patch_heads(model, pair, sites=(self.site,), screen=self.screen, options=self.options)
        self.write(
            results,
            table,
            pair.clean,
            self.metric,
            how=f"{len(pair.clean)} pairs, {self.direction}, change of {self.metric}",
            title=f"Heads of {self.model} patched",
            what=f"Change of {self.metric} when one head's {self.site} is patched from {into} prompts",
            but=self.corruption,
        )
