"""`align-circuits attribute`."""

from dataclasses import dataclass
from typing import Literal

from align_circuits.circuits.attribute import HeadMethod, attribute_heads
from align_circuits.cli.effects import best_heads, sections
from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_verb import SweepVerb
from align_circuits.run.pairs import Direction


@dataclass(frozen=True)
class Attribute(SweepVerb):
    """Scores every head with `attribute_heads`."""

    method: HeadMethod = "atp"
    """"atp" takes the gradient of one run, "ig_inputs" the mean of those at five points between both prompts;
    "atp_star" computes the attention that a patch of queries or keys changes, in place of its gradient."""
    site: Literal["z", "q", "k", "v"] = "z"
    """Which activation of a head is patched: z is its output before the output matrix."""
    metric: Literal["log_prob", "logit", "logit_diff", "prob", "kl"] = "log_prob"
    """What is measured of each target; "logit_diff" needs a file with wrong answers."""
    direction: Direction = "denoise"
    """"denoise" puts clean activations into corrupted runs, "noise" corrupted ones into clean runs. A corrupted prompt
    of the task has another test input, so that another symbol is to be translated at every position."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, pair = self.prepare_pair(metric=self.metric, direction=self.direction)
        table = attribute_heads(model, pair, method=self.method, sites=(self.site,), options=self.options)
        best = best_heads(table, self.metric)
        print(f"{self.model}: {len(pair.clean)} pairs, {self.direction}, {self.method} of {self.metric}\n\n  {best}")
        self.finish(
            "attribute",
            results,
            table,
            title=f"Heads of {self.model}: attribution",
            summary=f"What patching one head's {self.site} would change, estimated by {self.method}, largest first: "
            f"{best}. {self.corruption} The control is align-circuits patch.",
            sections=list(sections(table, self.metric, pair.clean)),
        )
