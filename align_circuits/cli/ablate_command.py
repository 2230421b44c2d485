"""`align-circuits ablate`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from align_circuits.cli.command_base import counted, distinct
from align_circuits.cli.effect_command_base import IN_WORDS, EffectVerb, named_heads
from align_circuits.cli.folders import Results
from align_circuits.cli.workers import Workers
from align_circuits.heads.ablate import ablate_heads
from align_circuits.heads.effects import check_screen
from align_circuits.heads.head_sets import ablate_together
from align_circuits.heads.localization import share_sentences
from align_circuits.report import plots
from align_circuits.report.page import legend_of
from align_circuits.run.target_metrics import CHOICE_ACCURACY, Metric
from align_circuits.tables.baselines import unsolved


@dataclass(frozen=True)
class Ablate(EffectVerb):
    """Ablates every head alone with `ablate_heads`, or each of some; or some together with `ablate_together`."""

    how: Literal["mean", "resample", "zero"] = "mean"
    """"mean" over tokens of the same kind, or of aligned texts over those at one position; "resample" from another
    prompt; or "zero"."""
    heads: tuple[str, ...] | None = None
    """Which heads, each alone, such as L2H3 L4H0 or L2H3,L4H0; by default all."""
    screen: float | None = None
    """Of all heads only this share, such as .25, is ablated: those whose effect is largest as a gradient estimates it.
    The others' estimates are marked as such. By default every head is ablated."""
    together: bool = False
    """Whether the heads of --heads are ablated together to their means, and then all others, beside as many random
    heads: does the model need them, and do they suffice?"""
    n_controls: int | None = None
    """With --together: how many random sets of the same layers are drawn, and of similar scores, by default 20; 19 at
    least for a p-value of .05."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        if self.together and self.workers != Workers():
            raise ValueError("--together is no sweep that processes share: leave out --jobs and --on")
        if self.n_controls is not None and not self.together:
            raise ValueError("--n-controls is for --together: give both, or neither")
        super().__call__(results)

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        heads = named_heads(self.heads)
        check_screen(self.screen)  # both before the model is loaded
        if self.together:
            self._measure_together(results, heads)
        else:
            self._measure_each(results, heads)

    def _measure_each(self, results: Results, heads: Sequence[str] | None) -> None:
        model, prompts, _ = self.prepare()
        # Accuracy tells whether the model solves the task.
        metrics: list[Metric] = [*dict.fromkeys((self.metric, "accuracy"))]
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
            replaced_by = replaced_by.replace("all tokens", "all tokens that a prediction reads, BOS left out")
        self.write(
            results,
            table,
            prompts,
            how=f"{counted(prompts)}, ablation to {replaced_by}, change of {self.metric}",
            title=f"Heads of {self.model} ablated",
            what=f"Change of {IN_WORDS[self.metric]} when one head is ablated (to {replaced_by})",
            but="A head whose work others take over shows no change: ablate such heads together, with --together.",
        )

    def _measure_together(self, results: Results, heads: Sequence[str] | None) -> None:
        if heads is None:
            raise ValueError("--together: name the heads that are ablated together, as --heads L2H3 L4H0")
        if (self.how, self.screen, self.metric) != ("mean", None, "log_prob"):
            raise ValueError("--together takes means, and accuracy: leave out --how, --screen and --metric")
        model, prompts, _ = self.prepare()
        count = 20 if self.n_controls is None else self.n_controls
        table, verdicts = ablate_together(model, prompts, heads, n_controls=count, seed=self.seed, options=self.options)
        verdict_sentences = [*(verdict.sentence for verdict in verdicts), *share_sentences(verdicts)]
        accuracy, guesses = "accuracy", ""
        if CHOICE_ACCURACY in set(table.frame["metric"]):
            accuracy = "choice accuracy (how often the right answer is more likely than the wrong one)"
            guesses = unsolved(table.where(ablated="nothing").frame.iloc[0], 0.5, prompts.n_groups, table.unit)
        intact = f"{accuracy} is {verdicts[0].intact:.2f}" + f", {guesses}" * bool(guesses)
        print(f"{self.model}: {counted(prompts)}; intact, {intact}\n")
        print("\n".join(f"  {sentence}" for sentence in verdict_sentences))
        drawn = any(verdict.controls for verdict in verdicts)
        dots = "Each set of other heads is a dot; they are measured until it is clear whether they do as well."
        self.finish(
            results,
            table,
            settings={name: value for name, value in self.settings.items() if name not in ("how", "screen", "metric")},
            title=f"Heads of {self.model} ablated together",
            summary=f"Intact, {intact}. " + "\n\n".join(verdict_sentences),
            sections=[
                ("Accuracy without them", dots if drawn else "", plots.ablation(table)),
                ("A prompt", legend_of(prompts), prompts.to_html()),
                ("All numbers", "", distinct(table)),
            ],
        )
