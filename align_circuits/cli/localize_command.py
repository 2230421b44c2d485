"""`align-circuits localize`."""

from dataclasses import dataclass, replace

from align_circuits.cli.folders import Results
from align_circuits.cli.verb import PromptVerb, as_json, head_value
from align_circuits.heads.localize_heads import localize
from align_circuits.report.localize_report import save_localization


@dataclass(frozen=True)
class Localize(PromptVerb):
    """Names heads with `localize`."""

    model: str = "toy-llama-ica"
    """A folder, a GGUF file, a hub name, "toy-llama", "toy-llama-ica" (the same tuned in context), "smollm2" (a
    pretrained Llama, if its package is installed), or "planted": a circuit built by hand for the task."""
    draws: int = 20
    """How many sets of random heads are ablated, to compare with the named heads."""

    def __call__(self, results: Results) -> None:
        """Runs the verb."""
        model, prompts, corrupted = self.prepare()
        if self.prompts is None:
            result = localize(model, self.task, self.count, self.seed, draws=self.draws, options=self.options)
        else:
            result = localize(
                model, prompts, seed=self.seed, corrupted=corrupted, draws=self.draws, options=self.options
            )
        roles = getattr(model, "roles", None)
        print(f"{self.model}: {len(prompts)} prompts, half to choose candidates, half to test them\n")
        for role, heads in result.heads_by_role.items():
            scores = result.table.where(role=role, metric="score")
            rows = [scores.where(layer=layer, head=head).frame.iloc[0] for layer, head in heads]
            print(f"  {role:<12} " + ("   ".join(head_value(row, roles) for row in rows) or "none"))
        print(f"\n{result.summary}")
        provenance = replace(result.table.provenance, settings=as_json(self))
        save_localization(replace(result, table=replace(result.table, provenance=provenance)), results.new)
        print(f"\nreport: {results.folder / 'report.html'}")
