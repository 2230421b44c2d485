"""`align-circuits score`."""

from dataclasses import dataclass

from align_circuits.cli.folders import Results
from align_circuits.cli.verb import METRICS, PromptVerb, accuracy_sections, first_token, head_value
from align_circuits.heads.one_pass import score_and_evaluate
from align_circuits.report import plots
from align_circuits.report.page import legend_of
from align_circuits.tasks.own_prompts import as_task


@dataclass(frozen=True)
class Score(PromptVerb):
    """Scores every head, as `score_heads` does, and evaluates the model in the same pass."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        model, prompts, _ = self.prepare()
        table, accuracy = score_and_evaluate(model, prompts, options=self.options)
        known = table.frame[table.frame["value"].notna()]
        of_file = [name for name in prompts.relations if name not in METRICS]  # of a file: what the reader asks about
        metrics = [metric for metric in (*of_file, *METRICS) if metric in set(known["metric"])]
        best = {metric: table.top(metric, 3).frame for metric in metrics}
        roles = getattr(model, "roles", None)
        print(
            f"{self.model}: {len(prompts)} prompts of {prompts.inputs.shape[1]} tokens, "
            f"{table.provenance.engine} engine"
        )
        print(f"\n  {'metric':<12} best heads (95% interval over prompts{'; planted role' if roles else ''})")
        for metric, rows in best.items():
            print(f"  {metric:<12} " + "   ".join(head_value(row, roles) for _, row in rows.iterrows()))
        leaders = ", ".join(f"{name} {head_value(rows.iloc[0])}" for name, rows in [*best.items()][:3])
        task = self.source if self.prompts is None else as_task(prompts)
        right = f"{task.target_name} is correct in {first_token(accuracy)} of cases."
        references = [name for name in dict.fromkeys(accuracy.frame["predictor"]) if name != "model"]
        note = f"With 95% intervals over prompts, beside references: {', '.join(references)}." if references else ""
        self.finish(
            results,
            table,
            title=f"Attention heads of {self.model}",
            summary=f"Highest scores: {leaders or 'none, since no relation has a row'}. {right} Scores describe where "
            "heads attend, not what the model uses: no head was ablated.",
            roles=task.roles,
            sections=[
                *accuracy_sections(accuracy, note),
                (
                    "The best heads",
                    "The highest scores of each relation, from 0 to 1, with 95% intervals over prompts.",
                    plots.top_heads(table, metrics),
                ),
                ("All heads", "The same scores. Hover for one and its interval.", plots.head_maps(table, metrics)),
                ("A prompt", legend_of(prompts), prompts.to_html(0)),
            ],
        )
