"""`align-circuits patch`."""

from dataclasses import dataclass
from typing import Any

from align_circuits.cli.command_base import counted
from align_circuits.cli.effect_command_base import IN_WORDS, EffectVerb, PairDirection, named_heads
from align_circuits.cli.folders import Results
from align_circuits.heads.effects import check_screen
from align_circuits.heads.patch import patch_heads, patch_sites
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, ROTATED_SITES, Site

RESIDUAL = {"resid_pre", "resid_mid", "resid_post"}
"""The sites that hold all of what a layer knows."""

PARTS = {"head": (*HEAD_SITES, *ROTATED_SITES), "layer": LAYER_SITES}
"""What the sites are of."""

UNALIGNED_COLUMNS = """\
The prompts differ in length and are padded on the left, and positions count the padding. A position that is shown \
with a word or a name holds it in all prompts. One with a number alone holds other words in other prompts: name it in \
the file of prompts, and give --positions with the name."""
"""What is said of effects by position where a position is not the same place of all prompts."""


@dataclass(frozen=True)
class Patch(EffectVerb):
    """Patches every head alone with `patch_heads`."""

    sites: tuple[Site, ...] = ("z",)
    """Which activations are patched: of a head, where z is its output before the output matrix, or of a whole layer,
    such as resid_pre, attn_out and mlp_out."""
    heads: tuple[str, ...] | None = None
    """Which heads, such as L2H3 L4H0 or L2H3,L4H0, or at sites of layers the layers of which heads; by default all."""
    positions: tuple[str, ...] | None = None
    """At which tokens: "each", at sites of layers; names of positions in the file of prompts, each patched on its own;
    "groups" for earlier examples, test input and test output; or "all" at once. By default all, but each where all
    sites are the residual stream (resid_pre, resid_mid, resid_post), which at all tokens holds all of the answer."""
    direction: PairDirection = "denoise"
    screen: float | None = None
    """Of all heads only this share, such as .25, is patched: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is patched."""

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        positions = self.positions or (("each",) if {*self.sites} <= RESIDUAL and self.heads is None else ("all",))
        choices: dict[tuple[str, ...], Any] = {("all",): None, ("groups",): "groups", ("each",): "each"}
        chosen = choices.get(positions, positions)
        if chosen == "each" and (self.heads or self.screen or not {*self.sites} <= {*LAYER_SITES}):
            known = ", ".join(LAYER_SITES)
            raise ValueError(
                f"--positions each patches whole layers: leave out --heads and --screen, and give --sites of {known}"
            )
        heads = named_heads(self.heads)
        check_screen(self.screen, self.sites)  # before the model is loaded
        # By default the accuracy, too, which tells whether the model solves the task.
        metric = None if self.metric == "log_prob" else self.metric
        model, pair = self.prepare_pair(metric=metric, direction=self.direction)
        into = "clean into corrupted" if self.direction == "denoise" else "corrupted into clean"
        if chosen == "each":
            table = patch_sites(model, pair, self.sites, options=self.options)
        else:
            table = patch_heads(
                model, pair, sites=self.sites, heads=heads, positions=chosen, screen=self.screen, options=self.options
            )
        site = "the output" if self.sites == ("z",) else ", ".join(self.sites)
        patched_part = " or ".join(name for name, of in PARTS.items() if {*self.sites} & {*of})
        position_text = {None: "", "each": " at each token alone"}.get(chosen, f" at {', '.join(positions)}")
        description = f"{site} of one {patched_part}{position_text}"
        self.write(
            results,
            table,
            pair,
            how=f"{counted(pair.clean, 'pair')}, {self.direction}, change of {self.metric}",
            title=f"{patched_part.replace(' or ', 's and ').capitalize()}s of {self.model} patched",
            what=f"Change of {IN_WORDS[self.metric]} when {description} is patched from {into} prompts",
            but=self.corruption,
            caveats=[UNALIGNED_COLUMNS] if chosen == "each" and not pair.clean.of_one_length else [],
        )
