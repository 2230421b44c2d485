"""`align-circuits localize`."""

from dataclasses import dataclass, replace
from typing import Any

from align_circuits.cli.command_base import counted, head_value
from align_circuits.cli.folders import Results
from align_circuits.cli.sweep_command_base import SweepVerb
from align_circuits.heads.candidates import hopeless_notes
from align_circuits.heads.localize_heads import check_count, localize
from align_circuits.heads.permutation_tests import smallest_p_values
from align_circuits.heads.thresholds import Thresholds
from align_circuits.prompts.prompts import Prompts
from align_circuits.report.localize_report import baselines_in_words, headline_of, save_localization
from align_circuits.tasks.own_prompts import as_task, first_half

MAX_UNNAMED = 10
"""Heads without a role that are printed at most."""


@dataclass(frozen=True)
class Localize(SweepVerb):
    """Names heads with `localize`."""

    n_controls: int = 20
    """How many control sets of each kind are ablated at most, to compare with the named heads; with fewer than 19 no
    set of heads can be called necessary or sufficient."""
    minimal_sets: bool = False
    """Whether the smallest necessary and sufficient sets are looked for, which takes several times as long."""
    redundant: bool = False
    """Whether redundant heads are looked for, which single ablations miss; this takes up to three times as long."""

    def notes(self, clean: Prompts, corrupted: Prompts | None) -> list[str]:
        """Returns for which roles no head can be named: said before the run, which takes minutes."""
        check_count(len(clean))  # a refusal by `localize` would follow notes about so few prompts
        return hopeless_notes(*self._smallest_p_values(clean, corrupted), Thresholds().fdr)

    def _smallest_p_values(self, prompts: Prompts, corrupted: Prompts | None) -> tuple[Prompts, dict[str, float]]:
        """The prompts that test, and the smallest p-values that they allow, by role."""
        task = self.source
        if self.prompts is not None:
            task = as_task(prompts, corrupted)
            prompts = task.sample(len(prompts), seed=self.seed)  # in the order that `localize` halves
        tested = prompts[first_half(prompts) :]
        return tested, smallest_p_values(tested, [role for role in task.roles if len(tested.relations.get(role, ()))])

    def measure(self, results: Results) -> None:
        """Measures and writes."""
        model, prompts, corrupted = self.prepare(with_corrupted=True)
        tested, limits = self._smallest_p_values(prompts, corrupted)
        print(f"{self.model}: {counted(prompts)}, half to choose candidates, half to test them")
        print(
            "smallest p-values that these allow: " + ", ".join(f"{role} {p:.2g}" for role, p in limits.items()),
            flush=True,
        )
        asked: dict[str, Any] = {
            "n_controls": self.n_controls,
            "minimal_sets": self.minimal_sets,
            "redundant": self.redundant,
            "options": self.options,
        }
        if self.prompts is None:
            result = localize(model, self.source, self.count, self.seed, **asked)
        else:
            result = localize(model, prompts, seed=self.seed, corrupted=corrupted, **asked)
        roles = getattr(model, "roles", None)
        print()
        for role, heads in result.heads_by_role.items():
            scores = result.table.where(role=role, metric="score")
            rows = [scores.where(layer=layer, head=head).frame.iloc[0] for layer, head in heads]
            print(f"  {role:<12} " + ("   ".join(head_value(row, roles) for row in rows) or "none"))
        print(f"\n  not named, and the tests that failed{'' if result.unnamed else ': no head stands out'}")
        for unnamed in result.unnamed[:MAX_UNNAMED]:
            roles_of_head = [role for role, heads in result.heads_by_role.items() if unnamed.head in heads]
            print(f"  {unnamed}" + (f" (it is named for {' and '.join(roles_of_head)})" if roles_of_head else ""))
        if (more := len(result.unnamed) - MAX_UNNAMED) > 0:
            print(f"  and {more} more, which the report names")
        print("\n" + "\n".join(f"{name}: {numbers}" for name, numbers in baselines_in_words(result).items()))
        told = hopeless_notes(tested, limits, Thresholds().fdr)  # before the run
        print("\n" + "\n".join(line for line in headline_of(result).split("\n") if line not in told))
        result = replace(result, table=replace(result.table, provenance=self.provenance_of(result.table)))
        halves = f"{len(prompts) - len(tested)} to choose candidates, {len(tested)} to test them"
        facts = {**self.facts, "prompts": f"{self.facts['prompts']}: {halves}"}
        save_localization(result, results.new, facts=facts)
        print(f"\nreport: {results.folder / 'report.html'}")
