"""`align-circuits patch`."""

from dataclasses import dataclass
from typing import Any

from align_circuits.cli.effects import EffectMetric, EffectVerb, PairDirection
from align_circuits.cli.folders import Results
from align_circuits.heads.patch import patch_heads, patch_sites
from align_circuits.hooks.names import LAYER_SITES, Site

RESIDUAL = {"resid_pre", "resid_mid", "resid_post"}
"""The sites that hold all of what a layer knows."""


@dataclass(frozen=True)
class Patch(EffectVerb):
    """Patches every head alone with `patch_heads`."""

    sites: tuple[Site, ...] = ("z",)
    """Which activations are patched: of a head, where z is its output before the output matrix, or of a whole layer,
    such as resid_pre, attn_out and mlp_out."""
    heads: tuple[str, ...] | None = None
    """Which heads, such as L2H3 L4H0, or at sites of layers the layers of which heads; by default all."""
    positions: tuple[str, ...] | None = None
    """At which tokens: "each", at sites of layers; names of positions in the file of prompts, each patched on its own;
    "groups" for earlier examples, test input and test output; or "all" at once. By default all, but each where all
    sites are the residual stream (resid_pre, resid_mid, resid_post), all of which would bring all of the answer back."""
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
        positions = self.positions or (("each",) if {*self.sites} <= RESIDUAL else ("all",))
        where: Any = {"all": None, "groups": "groups", "each": "each"}.get(positions[0], positions)
        if where != "each":
            table = patch_heads(
                model,
                pair,
                sites=self.sites,
                heads=self.heads,
                positions=where,
                screen=self.screen,
                options=self.options,
            )
        elif self.heads is None and self.screen is None and {*self.sites} <= {*LAYER_SITES}:
            table = patch_sites(model, pair, self.sites, options=self.options)
        else:
            raise ValueError(
                f"--positions each patches whole layers: leave out --heads and --screen, and give --sites of {', '.join(LAYER_SITES)}"
            )
        site = "the output" if self.sites == ("z",) else ", ".join(self.sites)
        one = (
            "layer"
            if {*self.sites} <= {*LAYER_SITES}
            else "head"
            if not {*self.sites} & {*LAYER_SITES}
            else "head or layer"
        )
        what = f"{site} of one {one}" + (
            "" if where is None else " at each token alone" if where == "each" else f" at {', '.join(positions)}"
        )
        self.write(
            results,
            table,
            pair.clean,
            self.metric,
            how=f"{len(pair.clean)} pairs, {self.direction}, change of {self.metric}",
            title=f"{'Layers' if where == 'each' else 'Heads'} of {self.model} patched",
            what=f"Change of {self.metric} when {what} is patched from {into} prompts",
            but=self.corruption,
        )
