"""What a head, and a set of heads, must reach."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Thresholds:
    """What a head must reach, on prompts that had no part in choosing it, to be named for a role."""

    score: float = 0.5
    """The least standard score (`score.STANDARD`): a hit rate for aligners, a share of attention for others."""
    above_chance: float = 0.15
    """By how much the score must exceed that of a head which attends to all candidates alike: with two candidates .5 is
    what any head reaches that does not tell them apart."""
    attention: float = 0.1
    """The least attention to keys, out of all the head's attention: a high share of very little means nothing."""
    share: float = 0.9
    """The least share of the attention that the head's best role explains: a lookup head also attends to some induction
    keys, which does not make it an induction head."""
    fdr: float = 0.05
    """The highest false discovery rate (Benjamini and Hochberg) over all candidates, heads times roles, of attention
    that positional bias explains or a head that does not matter. Candidates that are scored where their output matters
    (`where_heads_matter`) are corrected on their own."""
    effect: float = 0.01
    """The least effect of mean ablation or of denoising, or of resampling for heads that are scored where their output
    matters, in nats of the targets' mean log-probability; its 95% interval must lie above 0."""
    min_drop: float = 0.1
    """The accuracy that ablating a set of heads must cost at least, with an interval above 0, for the set to be
    necessary."""
    min_retained: float = 0.9
    """The share of the accuracy that must be kept at least when all other heads are ablated, for a set to suffice."""
    alpha: float = 0.05
    """The highest p-value of a set beside random heads of the same layers, and beside heads of similar scores."""

    def __post_init__(self):
        for name in ("score", "attention", "share", "fdr", "min_drop", "min_retained", "alpha"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: give a share from 0 to 1")
        for name in ("above_chance", "effect"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: give a finite number")

    def attends(self, score: Any, attention: Any, best: Any, chance: float = 0.0) -> Any:
        """Returns whether heads attend as a role requires, for numbers or arrays of them.

        Args:
            score: The standard score of the role.
            attention: The attention to the role's keys.
            best: The attention to the keys of the head's best role.
            chance: The score of a head that attends to all candidates alike.
        """
        return (score >= self.least_score(chance)) & (attention >= self.attention) & (attention >= self.share * best)

    def least_score(self, chance: float) -> float:
        """Returns the score that a head needs, given that of a head which attends to all candidates alike."""
        return max(self.score, chance + self.above_chance)

    def least(self, claim: str) -> float:
        """Returns what a `"necessary"` set costs of accuracy at least, or the share that a `"sufficient"` one keeps."""
        return self.min_drop if claim == "necessary" else self.min_retained
