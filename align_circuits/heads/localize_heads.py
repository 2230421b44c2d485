"""Finds the attention heads that have a role in a task, and tests whether the model needs them: `localize`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.checks import checked
from align_circuits.heads.ablate import ablate_heads
from align_circuits.heads.attention import attention_from
from align_circuits.heads.candidates import (
    attending,
    attending_diffusely,
    chance_of,
    confounded_roles,
    limits,
    mattering,
)
from align_circuits.heads.control_sets import check_controls
from align_circuits.heads.evidence import Evidence, Example, check_names, evidence_table
from align_circuits.heads.head_sets import HeadSets, judged, smallest_sets
from align_circuits.heads.heads_without_role import effects_of_others, unnamed_heads
from align_circuits.heads.interchange_interventions import answers_differ, interchange_accuracy
from align_circuits.heads.localization import Localization, TaskFacts
from align_circuits.heads.one_pass import score_and_test
from align_circuits.heads.patch import patch_heads
from align_circuits.heads.permutation_tests import smallest_p_values
from align_circuits.heads.redundant_heads import RedundantHeadSearch
from align_circuits.heads.role_tests import RoleTests, diffuse_aligners, named_heads
from align_circuits.heads.score import score_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.where_heads_matter import (
    CHOOSING,
    ROLE,
    Elsewhere,
    previous_where_heads_matter,
    resampling_effects,
    spread,
    with_rows_of,
)
from align_circuits.hooks.head_names import Head
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import leaves_as_found
from align_circuits.models.parameters import provenance_of
from align_circuits.prompts.prompts import Prompts
from align_circuits.run.memory_checks import check_memory, of_sweeps
from align_circuits.run.options import RunOptions
from align_circuits.run.pairs import Pair
from align_circuits.run.unedited_runs import shared_runs
from align_circuits.tasks.own_prompts import OwnPrompts, as_task, first_half
from align_circuits.tasks.task import Task, sampled


@checked
@leaves_as_found
def localize(
    model: HookedModel,
    task: Task | Prompts,
    n: int | None = None,
    seed: int = 0,
    *,
    corrupted: Prompts | None = None,
    roles: Mapping[str, str] | Sequence[str] | None = None,
    thresholds: Thresholds = Thresholds(),
    n_controls: int = 20,
    minimal_sets: bool = False,
    redundant: bool = False,
    options: RunOptions = RunOptions(),
) -> Localization:
    """Finds the heads that have a role in a task, and tests whether the model needs them.

    The roles are those of `task.roles` that the task's prompts have as relations. Candidates are chosen on one half of
    fresh prompts; every number that is returned comes from the other half. A head is named for a role if

    - it attends as the role requires (score, attention),
    - more than its positional bias explains (`permutation_tests`),
    - and the model needs it (mean ablation), or it carries the answer (patching from clean prompts into corrupted
      ones: `task.pairs`).

    The p-value of a candidate, a head in a role, is that of the hypothesis that it fails one of the last two: the
    larger of that of its attention and twice the smaller one of its two effects. Corrected over all candidates
    (Benjamini and Hochberg, 1995) it bounds the false discovery rate: the share of false names among all. Candidates
    attend as the role requires, and have an effect, on the half that chooses.

    A head that does not attend to the token before at the positions that predict may do so where its output matters
    (`where_heads_matter`), as the previous-token head of an induction circuit does. Its score, attention and p-value
    for `previous` are then averages over all positions, weighted by what its output there changes to first order; and
    it may also matter by resample ablation, where the prompts have one length: its causal p-value is three times the
    smallest of three. These candidates are corrected on their own, so that the bound holds for each kind of names.
    They have no score on the control. A relation of that name with other keys is scored where the model predicts alone.

    Then all named heads are ablated together, those of each role, and all heads but those named, beside as many other
    heads of the same layers and of similar scores.

    If the task has a control (`task.control`), as `Seq2SeqTask` has, heads are scored on it too. A head that keeps its
    score there reads the alignment from the prompt; one that loses it knows this alignment only. Where all keys lie at
    one distance (monotonic, phrases of one letter) an aligner must keep its score on the control, since a head that
    attends at a fixed distance would score as high.

    Args:
        model: What `align_circuits.load` returns, or any model with TransformerLens's hooks.
        task: Prompts, or a task that they are sampled from. A role without named candidates, but for induction,
            previous and duplicate, needs its queries at the same positions from the end in all prompts. Related
            prompts (`Prompts.group`) stay in one half.
        n: How many prompts, half to choose candidates and half to test them; by default 64 of a task, or all prompts.
        seed: Of the prompts, the permutation tests and the random heads.
        corrupted: With prompts: a partner for each, for activation patching; by default another of the prompts.
        roles: With prompts: the relations that a head can be named for, as a list, or with what such a head does; by
            default those that were added to the prompts (`OwnPrompts`).
        thresholds: What a head must reach.
        n_controls: How many control sets of each kind are drawn; none where the effect of the named heads is too
            small. They are measured until enough do as well for the claim to be lost. With d of them no p-value is
            below 1/(1 + d), so at `thresholds.alpha` = .05 a verdict needs at least 19.
        minimal_sets: Whether the smallest necessary and the smallest sufficient set are looked for on the first half
            and tested on the second; takes several times as long.
        redundant: Whether redundant heads are looked for, which do the same work, so that the model misses none of them
            alone: those that share a role, and backups (`redundant_heads`). Takes up to three times as long. Each
            round of a role is corrected by itself, so that no rate is promised for all these names together. Aligners
            are not looked for so where all keys lie at one distance.
        options: How the model is run.

    Raises:
        TypeError: Neither prompts nor a task, or `corrupted` or `roles` beside a task.
        ValueError: Fewer than 8 prompts, prompts without any of the roles, a role with the name of a row of the results
            (such as `"random"` or `"named"`), related prompts that cannot be halved, queries at different positions, a
            negative number of controls, or a model without the tokenizer that the task needs.
    """
    task = as_task(task, corrupted, roles)
    if n is None:
        n = len(task.prompts) if isinstance(task, OwnPrompts) else 64
    check_count(n)
    check_controls(n_controls)
    with shared_runs(model):
        tokenizer = getattr(model, "tokenizer", None)
        prompts = sampled(task, n, tokenizer, seed)
        half = first_half(prompts)
        discovery, tested = prompts[:half], prompts[half:]
        roles = [role for role in task.roles if len(prompts.relations.get(role, ()))]
        if not roles:
            raise ValueError(
                f"no role to name heads for: the prompts have no row of {', '.join(task.roles)}; add a relation of "
                "that name to them, prompts.with_relations(name=Relation...)"
            )
        check_names(roles)
        metrics = [*roles, *(f"{role}_attention" for role in roles)]
        pair = Pair(*task.pairs(tested, seed))
        _check_memory(model, n, pair, options)

        # Candidates, on the prompts that choose.
        discovered = score_heads(model, discovery, metrics, options=options)
        chance = chance_of(prompts, roles)
        candidates = attending(discovered, roles, thresholds, chance)
        diffuse = attending_diffusely(discovered, roles, thresholds, chance)
        heads = sorted({head for head, _ in [*candidates, *diffuse]})
        # Heads that attend to the token before where their output matters, and not where the model predicts.
        elsewhere: list[Head] = []
        by = "position" if prompts.of_one_length and half > 1 else None
        if ROLE in roles:
            where = previous_where_heads_matter(model, spread(discovery, CHOOSING), by=by, options=options)
            there = np.argwhere(where.attending(discovered, roles, thresholds)).tolist()
            elsewhere = [(layer, head) for layer, head in there if ((layer, head), ROLE) not in candidates]

        # Heads without an effect here would only weigh on the correction of the others. Either effect is enough, and
        # patches rerun a few positions where ablations rerun all: only the heads that these leave open are ablated.
        chosen = Pair(*task.pairs(discovery, seed))
        all_heads = sorted({*heads, *elsewhere})
        matters = mattering(patch_heads(model, chosen, heads=all_heads, options=options), thresholds)
        quiet = [head for head in all_heads if head not in matters]
        matters |= mattering(ablate_heads(model, discovery, "mean", heads=quiet, options=options), thresholds, sign=-1)
        mattered = {(head, role) for head, role in [*candidates, *diffuse] if head in matters}
        quiet = [head for head in elsewhere if head not in matters]
        matters |= mattering(resampling_effects(model, discovery, quiet, options), thresholds, sign=-1)
        elsewhere = [head for head in elsewhere if head in matters]
        mattered |= {(head, ROLE) for head in elsewhere}
        heads = sorted({*heads, *elsewhere})

        # Evidence for single heads, on the prompts that test, and the names that it gives.
        scores, p = score_and_test(model, tested, metrics, roles, seed=seed, options=options)
        smallest_p = smallest_p_values(tested, roles)
        judged_elsewhere: dict[Head, Elsewhere] = {}
        attending_elsewhere: set[Head] = set()
        shown = scores
        if elsewhere:
            there = previous_where_heads_matter(model, tested, elsewhere, by=by, options=options)
            shown, plain = with_rows_of(scores, there.table, elsewhere), scores.to_array(f"{ROLE}_attention")
            p[ROLE][tuple(np.transpose(elsewhere))] = [there.p[head] for head in elsewhere]
            smallest_p[ROLE] = min(smallest_p[ROLE], *there.smallest_p.values())
            judged_elsewhere = {
                head: Elsewhere(float(there.chance[head]), there.smallest_p[head], float(plain[head]))
                for head in elsewhere
            }
            attends = there.attending(scores, roles, thresholds)
            attending_elsewhere = {head for head in elsewhere if attends[head]}
        other = task.control()
        control = other and score_heads(model, sampled(other, len(tested), tokenizer, seed), roles, options=options)
        ablation_effects = ablate_heads(model, tested, "mean", heads=heads, options=options)
        patching_effects = patch_heads(model, pair, heads=heads, options=options)
        settings = {
            "n": n,
            "seed": seed,
            "n_controls": n_controls,
            "minimal_sets": minimal_sets,
            "thresholds": asdict(thresholds),
        }
        settings |= {"redundant": True} if redundant else {}
        provenance = provenance_of("localize", model, tested, scores.provenance.engine, settings)
        # A p-value of previous is seldom below .01. In one family it would raise those of all other candidates.
        apart = [(head, ROLE) for head in elsewhere]
        resampled = resampling_effects(model, tested, elsewhere, options)
        of_heads = (ablation_effects, patching_effects, resampled)
        table = evidence_table(shown, control, p, [candidates, diffuse], apart, mattered, *of_heads, provenance)

        confounded = confounded_roles(tested, roles)
        tests = RoleTests(table, roles, thresholds, confounded, chance, smallest_p, judged_elsewhere)
        heads_by_role = named_heads(tests, [*candidates, *apart])
        aligners = diffuse_aligners(tests, [*candidates, *diffuse], heads_by_role)
        named = sorted({head for of_role in heads_by_role.values() for head in of_role})
        # All heads by their effect, also those that attend as no role requires.
        patching_effects = effects_of_others(model, pair, patching_effects, options)
        members = {}
        if redundant:
            of_halves = {discovery: discovered, tested: scores}
            found = {discovery: elsewhere, tested: attending_elsewhere}
            search = RedundantHeadSearch(model, of_halves, p, found, thresholds, seed, options)
            # Where a fixed distance does as well as the alignment, only the control tells them apart, which is not run.
            members = {role: search.heads(role, heads_by_role[role]) for role in roles if role not in tests.confounded}
        of_roles = {
            role: (*of_role, *(m.head for m in members.get(role, ()))) for role, of_role in heads_by_role.items()
        }
        hopeless = [role for role, p in smallest_p.items() if p > thresholds.fdr]
        unnamed = unnamed_heads(tests, of_roles, patching_effects, hopeless)
        of_redundant = {f"{role}, redundant": [member.head for member in heads] for role, heads in members.items()}

        # Evidence for sets of heads, and the verdicts.
        grids = {role: scores.to_array(role) for role in roles}
        deciding, metric = judged(prompts)
        sets = HeadSets(model, deciding[half:], grids, thresholds, n_controls, seed, options, metric)
        controls = sets.controls(named)
        set_ablations, verdicts = sets.test(
            named, ("necessary", "sufficient") if named else (), controls, {**heads_by_role, **of_redundant}
        )
        verdicts += sets.test_roles(heads_by_role)
        if minimal_sets and named:
            smallest_by_claim = smallest_sets(model, deciding[:half], named, sets.kind, thresholds, options, metric)
            for claim, smallest in smallest_by_claim.items():
                verdicts += sets.test(smallest, (claim,), sets.controls(smallest), smallest=True)[1]
        interchanges = None
        if answers_differ(pair).any():
            patched = {role: of_role for role, of_role in heads_by_role.items() if of_role}
            patched |= {"named": named} if named else {}
            patched |= {f"random {draw}": drawn for draw, drawn in enumerate(controls["layers"] if named else ())}
            interchanges = interchange_accuracy(model, pair, heads=heads, sets=patched, options=options)

        first = tested[:1]
        positions = example_positions(first)
        example = Example(
            attention_from(model, first, named, positions, options),
            positions.tolist(),
            Pair(pair.clean[:1], pair.corrupted[:1]),
        )
        return Localization(
            table,
            heads_by_role,
            Evidence(patching_effects, ablation_effects, set_ablations, interchanges, example),
            tested,
            thresholds,
            TaskFacts(
                {role: task.roles[role] for role in roles},
                task.target_name,
                limits(task, tested, roles, smallest_p, thresholds.fdr),
                smallest_p,
                task.control_lesson,
            ),
            tuple(verdicts),
            aligners,
            members,
            unnamed,
            tuple(elsewhere),
        )


def check_count(n: int) -> None:
    """Raises a ValueError if there are too few prompts to choose candidates and to test them."""
    if n < 8:
        raise ValueError(f"{n} prompts: give at least 8, half to choose candidates and half to test them")


def example_positions(prompt: Prompts) -> Int[Tensor, " row"]:
    """Returns the positions of a prompt's test example, and the one before."""
    positions = (prompt.mask & (prompt.example == prompt.example.max()))[0].nonzero()[:, 0]
    # The token before it predicts its first one; before a text there may be padding.
    if int(positions[0]) > 0 and prompt.mask[0, positions[0] - 1]:
        positions = torch.cat([positions[:1] - 1, positions])
    return positions


def _check_memory(model: HookedModel, n: int, pair: Pair, options: RunOptions) -> None:
    """Raises a ValueError unless all runs fit into memory, of which the first-order effects come late."""
    whole = pair.base.mask.shape[1]

    def needed(length: int) -> float:
        tokens = length * pair.prompts_at_once(length, options)
        logits = tokens * len(pair.queries) // whole * model.cfg.d_vocab
        return of_sweeps(model, 2 * n, length, tokens, logits)

    check_memory("localize", model, needed, whole, ", fewer of them")
