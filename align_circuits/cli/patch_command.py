"""`align-circuits patch`."""

from dataclasses import dataclass

from align_circuits.cli.effects import EffectMetric, EffectVerb, PairDirection
from align_circuits.cli.folders import Results
from align_circuits.heads.patch import patch_heads
from align_circuits.hooks.names import Site


@dataclass(frozen=True)
class Patch(EffectVerb):
    """Patches every head alone with `patch_heads`."""

    sites: tuple[Site, ...] = ("z",)
    """Which activations are patched: of a head, where z is its output before the output matrix, or of a whole layer,
    such as resid_pre, attn_out and mlp_out."""
    heads: tuple[str, ...] | None = None
    """Which heads, such as L2H3 L4H0, or at sites of layers the layers of which heads; by default all."""
    positions: tuple[str, ...] | None = None
    """At which tokens: names of positions in the file of prompts, each patched on its own, or "groups" for earlier
    examples, test input and test output; by default at all tokens at once."""
    metric: EffectMetric = "log_prob"
    direction: PairDirection = "denoise"
    screen: float | None = None
    """Of all heads only this share, such as .25, is patched: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is patched."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        # By default the accuracy, too, which tells whether the model solves the task.
        metric = None if self.metric == "log_prob" else self.metric
        model, pair = self.prepare_pair(metric=metric, direction=self.direction)
        into = "clean into corrupted" if self.direction == "denoise" else "corrupted into clean"
        table = patch_heads(
            model,
            pair,
            sites=self.sites,
            heads=self.heads,
            positions="groups" if self.positions == ("groups",) else self.positions,
            screen=self.screen,
            options=self.options,
        )
        site = "the output" if self.sites == ("z",) else ", ".join(self.sites)
        what = f"{site} of one head{' or layer' * (self.sites != ('z',))}" + (
            f" at {', '.join(self.positions)}" if self.positions else ""
        )
        self.write(
            results,
            table,
            pair.clean,
            self.metric,
            how=f"{len(pair.clean)} pairs, {self.direction}, change of {self.metric}",
            title=f"Heads of {self.model} patched",
            what=f"Change of {self.metric} when {what} is patched from {into} prompts",
            but=self.corruption,
        )
