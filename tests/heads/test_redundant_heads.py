"""Groups of heads: those that share a role and backups are found, decoys are not."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import align_circuits as ac
from align_circuits.heads import redundant_heads
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.redundant_heads import RedundantHeadSearch
from align_circuits.heads.thresholds import Thresholds
from align_circuits.hooks.edits import Ablate
from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, planted_circuit
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.provenance import Provenance

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=1, n_examples=3, alignment="permutation")


@pytest.fixture(scope="module")
def split():
    """Roles of three heads each, which single ablation misses, and a lookup head that repairs."""
    model = planted_circuit(
        TASK, seed=2, n_heads=6, n_layers=5, strength=0.7, copies=dict.fromkeys(CIRCUIT_ROLES, 3), self_repair=True
    )
    return model, ac.localize(model, TASK, 20, seed=1, n_controls=0, redundant=True)


def test_heads_that_stand_in_for_each_other_are_found_together(split):
    model, result = split
    missed = 0
    for role in CIRCUIT_ROLES:
        true = {head for head, own in model.roles.items() if own == role}
        assert set(result.redundant_heads(role)) == true, role
        missed += len(true - set(result.heads(role)))
    assert missed >= 3, "single heads would have done"
    assert result.redundant_heads("induction") == [] and result.redundant["duplicate"] == ()
    with pytest.raises(KeyError, match="no role 'sink'"):
        result.redundant_heads("sink")


def test_the_head_that_repairs_comes_in_a_later_round(split):
    model, result = split
    (repair,) = (head for head, kind in model.kinds.items() if kind == "repair")
    rounds = {member.head: member.round for member in result.redundant["lookup"]}
    assert rounds[repair] == 2 and {rounds[head] for head, kind in model.kinds.items() if kind == "lookup"} == {1}
    assert f"Backups of lookup, once the others are ablated: L{repair[0]}H{repair[1]}." in result.summary
    assert "one for another" in result.summary


def test_the_group_is_ablated_as_a_whole(split):
    _, result = split
    first = result.evidence.set_ablations.where(kind="first").frame.set_index("ablated")["value"]
    assert first["nothing"] > 0.9 and first["lookup, redundant"] < 0.5 < first["lookup"]


def test_an_effect_is_what_the_head_brings_back_alone(split):
    """Beside a slow twin: all of them ablated, and all of it but one head."""
    model, result = split
    tested = result.prompts
    baseline = ac.ablation_baseline(model, tested)
    members = [member for member in result.redundant["align_key"] if member.round == 1]
    group = [member.head for member in members]
    targets = TargetMetrics.of(tested, ("log_prob",))

    def mean(heads):
        edits = [Ablate(heads, how="mean", baseline=baseline)] if heads else []
        values = targets.measure_edited(model, [edits])[0][0, 0]
        return np.array([values[(targets.prompt == prompt).numpy()].mean() for prompt in range(len(tested))]).mean()

    for member in members:
        back = mean([head for head in group if head != member.head]) - mean(group)
        cost = mean([]) - mean([member.head])
        assert member.effect == pytest.approx(max(back, cost), abs=1e-6)
        assert member.low < member.effect < member.high


@pytest.mark.slow
def test_without_heads_that_share_a_role_groups_are_the_named_heads():
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=2)
    result = ac.localize(planted_circuit(task, seed=3), task, 12, seed=1, n_controls=0, redundant=True)
    assert {role: set(result.redundant_heads(role)) for role in result.heads_by_role} == {
        role: set(heads) for role, heads in result.heads_by_role.items()
    }
    assert result.named_heads and "one for another" not in result.summary


@pytest.mark.slow
def test_aligners_have_no_group_where_a_fixed_distance_does_as_well():
    task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=4)
    result = ac.localize(planted_circuit(task, seed=0), task, 16, n_controls=0, redundant=True)
    assert "align_query" not in result.redundant and "lookup" in result.redundant


def test_roles_that_are_tested_by_renaming_have_one_round(split):
    model, _ = split
    prompts = ac.RepeatedTokensTask(length=8).sample(12, model.tokenizer, seed=0)
    result = ac.localize(model, prompts, roles=["duplicate", "previous"], n_controls=0, redundant=True)
    assert {member.round for member in result.redundant["duplicate"]} <= {1}
    edit = Ablate([(0, 0)], how="zero")
    with pytest.raises(ValueError, match="tested by renaming tokens"):
        p_values(model, prompts, ["duplicate"], edits=[edit])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("by_renaming", "rounds"), [(False, [1, 2, 3]), (True, [1])])
def test_heads_are_looked_for_in_few_rounds(monkeypatch, by_renaming, rounds):
    """In each another head attends; one that was named alone is a member whether or not it does."""

    class Search(RedundantHeadSearch):
        effect, low = Thresholds().effect, 1e-6

        def attending(self, role, prompts, ablated):  # noqa: ARG002 - one interface
            return {*[(0, number) for number in range(9) if (0, number) not in ablated][:2]}

        def significant(self, role, ablated, matters):  # noqa: ARG002
            return {head for head in matters if head[1] != 1}

        def effects(self, candidates, ablated, prompts):  # noqa: ARG002
            keys = pd.DataFrame(candidates, columns=["layer", "head"]).assign(
                level="head", kind="all", metric="log_prob"
            )
            frame = keys.assign(value=Search.effect, low=Search.low, high=1.0, n=4)
            changes = np.ones((len(candidates), 4))
            table = ac.Table(frame, Provenance("redundant heads"), changes, changes)
            return table, table

    halves: Any = {ac.Prompts.from_tokens([[1, token]]): None for token in (1, 2)}
    monkeypatch.setattr(redundant_heads, "redraws_tokens", lambda *_, **__: by_renaming)
    search = Search(Any, halves, {}, {}, Thresholds(), 0, ac.RunOptions())  # pyright: ignore[reportArgumentType]
    members = search.heads("lookup", [(1, 0)])
    assert [member.round for member in members if not member.single] == rounds
    assert [(member.head, member.round) for member in members if member.single] == [((1, 0), 1)]
    assert (0, 1) not in [member.head for member in members]
    for Search.effect, Search.low in ((Thresholds().effect - 1e-6, 1e-6), (1.0, 0.0)):
        assert [member.head for member in search.heads("lookup", [(1, 0)])] == [(1, 0)], "others count for too little"
        assert search.heads("lookup", []) == ()
