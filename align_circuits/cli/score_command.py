"""`align-circuits score`."""

from dataclasses import dataclass
from typing import Any

from align_circuits.cli.folders import Results
from align_circuits.cli.verb import METRICS, PromptVerb, first_token, head_value
from align_circuits.heads.one_pass import score_and_evaluate
from align_circuits.report import plots


@dataclass(frozen=True)
class Score(PromptVerb):
    """Scores every head, as `score_heads` does, and evaluates the model in the same pass."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        model, prompts, _ = self.prepare()
        table, accuracy = score_and_evaluate(model, prompts, options=self.options)
        known: Any = table.frame[table.frame["value"].notna()]
        metrics = [metric for metric in METRICS if metric in set(known["metric"])]
        best = {metric: table.top(metric, 3).frame for metric in metrics}
        roles = getattr(model, "roles", None)
        print(
            f"{self.model}: {len(prompts)} prompts of {prompts.inputs.shape[1]} tokens, "
            f"{table.provenance.engine} engine"
        )
        print(f"\n  {'metric':<12} best heads (95% interval over prompts{'; planted role' if roles else ''})")
        for metric, rows in best.items():
            print(f"  {metric:<12} " + "   ".join(head_value(row, roles) for _, row in rows.iterrows()))
        leaders = ", ".join(f"{name} {head_value(best[name].iloc[0])}" for name in METRICS[:3] if name in best)
        self.finish(
            results,
            table,
            title=f"Attention heads of {self.model}",
            summary=f"Highest scores: {leaders}. The first token of a phrase is correct in {first_token(accuracy)} of "
            "cases. Scores describe where heads attend, not what the model uses: no head was ablated.",
            sections=[
                ("Accuracy", "With reference accuracies that need no alignment.", plots.accuracy(accuracy)),
                ("The best heads", "By each metric, with 95% intervals over prompts.", plots.top_heads(table, metrics)),
                ("All heads", "Hover for a number and its interval.", plots.head_maps(table, metrics)),
                ("A prompt", "A phrase, its symbol and its earlier translations share a number.", prompts.to_html(0)),
            ],
        )
