"""`align-circuits attribute`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from align_circuits.circuits.head_attribution import HeadMethod, attribute_heads
from align_circuits.cli.command_base import counted
from align_circuits.cli.effect_command_base import IN_WORDS, OF_TARGETS, EffectVerb, PairDirection
from align_circuits.cli.folders import Results

METHODS = {
    "atp": "attribution patching",
    "ig_inputs": "integrated gradients between both prompts",
    "atp_star": "attribution patching with exact attention (AtP*)",
}
"""The methods in words."""


@dataclass(frozen=True)
class Attribute(EffectVerb):
    """Scores every head with `attribute_heads`."""

    method: HeadMethod = "atp"
    """"atp" takes the gradient of one run, "ig_inputs" the mean of those at five points between both prompts;
    "atp_star" computes the attention that a patch of queries or keys changes, in place of its gradient."""
    site: Literal["z", "q", "k", "v"] = "z"
    """Which activation of a head is patched: z is its output before the output matrix."""
    metric: Annotated[Literal["log_prob", "logit", "logit_diff", "prob", "kl"], OF_TARGETS] = "log_prob"
    direction: PairDirection = "denoise"

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, pair = self.prepare_pair(metric=self.metric, direction=self.direction)
        table = attribute_heads(model, pair, method=self.method, sites=(self.site,), options=self.options)
        attributed = "output" if self.site == "z" else self.site
        what = f"Change of {IN_WORDS[self.metric]} that patching one head's {attributed} would make"
        self.write(
            results,
            table,
            pair,
            how=f"{counted(pair.clean, 'pair')}, {self.direction}, {self.method} of {self.metric}",
            title=f"Heads of {self.model}: attribution",
            what=f"{what}, estimated by {METHODS[self.method]}",
            but=f"{self.corruption} Check the best ones with align-circuits patch, which is exact.",
        )
