"""localize names the heads that have a role, none where there is none, and says what a task cannot establish."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import align_circuits as ac
from align_circuits.heads.localize_heads import Thresholds
from align_circuits.papers.validation.localize_ground_truth import GROUND_TRUTH, of_random
from align_circuits.report import save_localization

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)
ROLES = TASK.roles


@pytest.fixture(scope="module")
def circuit():
    model = ac.planted_circuit(TASK, seed=3)
    return model, ac.localize(model, TASK, n=24, seed=1, draws=3)


def test_every_planted_role_is_named_and_no_decoy(circuit):
    model, result = circuit
    for role in ROLES:
        assert set(result.heads(role)) == {head for head, true in model.roles.items() if true == role}, role


def test_named_heads_are_ablated_beside_as_many_others(circuit):
    _, result = circuit
    first = result.group_ablations.where(kind="first").frame.set_index("ablated")["value"]
    assert first["nothing"] == 1
    assert first["named"] < 0.5
    assert (first["random"] > 0.9).all()
    assert len(first["random"]) == 3
    assert first["rest"] < 1, "the boundary head has no role and is needed"
    assert {"align_query", "align_key", "lookup", "previous"} < set(first.index)
    assert "with these 5 heads ablated" in result.summary


def test_the_table_holds_every_head_and_the_tests_of_candidates(circuit):
    model, result = circuit
    heads = model.cfg.n_layers * model.cfg.n_heads
    for metric in ("score", "attention", "p", "control"):
        assert len(result.table.where(metric=metric)) == heads * len(ROLES)
    tested = result.table.where(metric="q").frame
    assert {("align_query", *result.heads("align_query")[0])} <= set(
        zip(tested["role"], tested["layer"], tested["head"], strict=True)
    )
    decoy = next(head for head, kind in model.kinds.items() if kind == "gold_without_output")
    rows = result.table.where(layer=decoy[0], head=decoy[1], role="align_query").frame.set_index("metric")["value"]
    assert rows["score"] == 1
    assert rows["q"] <= 0.05
    assert abs(rows["ablation"]) < 1e-6, "it looks like an aligner, and nothing depends on it"
    assert decoy not in result.named_heads


def test_numbers_come_from_prompts_that_had_no_part_in_the_search(circuit):
    model, result = circuit
    prompts = TASK.sample(24, model.tokenizer, seed=1)
    assert result.prompts.digest == prompts[12:].digest
    score = ac.score_heads(model, prompts[12:], ["lookup"]).grid("lookup")
    np.testing.assert_allclose(result.table.where(role="lookup", metric="score").grid("score"), score, rtol=1e-5)


def test_attention_of_named_heads_is_kept_for_the_first_prompt(circuit):
    _, result = circuit
    assert set(result.example_attention) == set(result.named_heads)
    head = result.heads("align_query")[0]
    relation = result.prompts[:1].relations["align_query"]
    for row, query in enumerate(relation.query.tolist()):
        attention = result.example_attention[head][result.example_positions.index(query)]
        assert attention.argmax() in relation.keys_of(row)
        torch.testing.assert_close(attention.sum(), torch.tensor(1.0))


def test_a_localization_is_written_completely(circuit, tmp_path):
    _, result = circuit
    report = save_localization(result, tmp_path / "run")
    assert report == tmp_path / "run" / "report.html"
    assert result.summary[:40] in report.read_text(encoding="utf-8")
    again = ac.Table.load(tmp_path / "run")
    assert len(again) == len(result.table)
    assert again.provenance.settings["thresholds"]["fdr"] == 0.05
    assert len(ac.Table.load(tmp_path / "run" / "group_ablations")) == len(result.group_ablations)
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["verb"] == "localize"


def test_no_head_is_named_among_random_weights():
    rows = of_random(task={"x_len": 5, "phrase_len": 2, "n_examples": 3}, gain=4.0, n=16, seed=0)
    assert sum(row["named"] for row in rows) == 0
    assert {row["role"] for row in rows} == set(ROLES)
    assert all(0 < row["p"] <= 1 for row in rows)


def test_thresholds_decide(circuit):
    model, _ = circuit
    strict = ac.localize(model, TASK, n=16, draws=0, thresholds=Thresholds(effect=100.0))
    assert strict.named_heads == []
    assert strict.summary == "No head passes every test."
    assert len(strict.example_attention) == 0


def test_one_distance_cannot_tell_an_aligner():
    """With one letter a phrase, a monotonic aligner looks a fixed distance back; a permuted one does not."""
    task = replace(TASK, phrase_len=1, n_examples=8)
    monotonic = ac.localize(ac.planted_circuit(task, seed=1), task, n=16, draws=0)
    assert monotonic.heads("align_query") == []
    assert monotonic.heads("lookup")
    assert "one distance" in monotonic.summary
    permuted = replace(task, alignment="permutation")
    model = ac.planted_circuit(permuted, seed=1)
    result = ac.localize(model, permuted, n=16, draws=0)
    assert result.heads("align_query") == [head for head, role in model.roles.items() if role == "align_query"]


def test_induction_heads_are_named_on_repeated_tokens():
    """The bundled model's; all prompts have their keys at the same positions, and the report says so."""
    model, task = ac.load("toy-llama"), ac.RepeatedTokensTask(length=20)
    result = ac.localize(model, task, n=16, draws=0)
    scores = ac.score_heads(model, task.sample(16, model.tokenizer, seed=7), ["induction_attention"])
    best = scores.top("induction_attention", 1).frame.iloc[0]
    assert (best["layer"], best["head"]) in result.heads("induction")
    assert "same positions" in result.summary


def test_few_symbols_cannot_establish_an_aligner():
    task = replace(TASK, x_len=3)
    result = ac.localize(ac.planted_circuit(task, seed=0), task, n=16, draws=0)
    assert result.heads("align_query") == []
    assert "3 input symbols have 6 orders" in result.summary


def test_bad_input_is_refused(circuit):
    model, result = circuit
    with pytest.raises(ValueError, match="n=4: give at least 8"):
        ac.localize(model, TASK, n=4)
    with pytest.raises(ValueError, match="draws=-1: give the number of sets"):
        ac.localize(model, TASK, n=8, draws=-1)
    with pytest.raises(KeyError, match="no role 'copying'"):
        result.heads("copying")


def test_the_experiment_compares_names_with_true_roles(tmp_path):
    table = GROUND_TRUTH.run(GROUND_TRUTH.scales["smoke"], models=[], jobs=1, folder=tmp_path)
    recall = table.where(models="planted", metric="recall").frame
    assert set(recall["value"][recall["at"] == 1]) == {1}
    assert set(recall["value"][recall["at"] == 0]) == {0}
    checks = GROUND_TRUTH.check(table)
    assert all(check.control_fails for check in checks)
    assert not checks[-1].met, "two models say little about a share"
    assert set(GROUND_TRUTH.draw(table)) == {"strength", "p-values"}
