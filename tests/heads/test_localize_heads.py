"""localize names the heads that have a role, none where there is none, and says what a task cannot establish."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import align_circuits as ac
from align_circuits.heads import localize_heads
from align_circuits.heads.thresholds import Thresholds
from align_circuits.report import save_localization
from align_circuits.tables.p_values import benjamini_hochberg
from align_circuits.validation.localize_ground_truth import of_random

TASK = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4)
ROLES = TASK.roles


@pytest.fixture(scope="module")
def model():
    return ac.planted_circuit(TASK, seed=3)


@pytest.fixture(scope="module")
def circuit(model):
    # With three draws the smallest p-value is a quarter.
    return model, ac.localize(
        model, TASK, n=24, seed=1, n_controls=3, minimal_sets=True, thresholds=Thresholds(alpha=0.25)
    )


def test_every_planted_role_is_named_and_no_decoy(circuit):
    model, result = circuit
    for role in ROLES:
        assert set(result.heads(role)) == {head for head, true in model.roles.items() if true == role}, role


def test_named_heads_are_ablated_beside_as_many_others(circuit):
    _, result = circuit
    first = result.evidence.set_ablations.where(kind="first").frame.set_index("ablated")["value"]
    assert first["nothing"] == 1
    assert first["named"] < 0.5
    assert (first["random"] > 0.9).all()
    assert len(first["random"]) == 3
    assert first["rest"] < 1, "the boundary head has no role and is needed"
    assert {"align_query", "align_key", "lookup", "previous"} < set(first.index)
    assert (first["matched"] > 0.9).all() and len(first["matched"]) == 3
    assert not {"rest of random", "rest of matched"} & set(first.index), "the named heads keep too little by themselves"


def test_necessity_and_sufficiency_are_two_verdicts(circuit):
    """The boundary head has no role and is needed: the named heads are necessary, and suffice only together with it."""
    model, result = circuit
    named, boundary = set(result.named_heads), {head for head, kind in model.kinds.items() if kind == "boundary"}
    verdicts = {(verdict.claim, verdict.smallest): verdict for verdict in result.verdicts if verdict.role is None}
    necessary, sufficient = verdicts["necessary", False], verdicts["sufficient", False]
    assert set(necessary.heads) == set(sufficient.heads) == named
    assert necessary.holds and necessary.value < 0.5 < min(necessary.controls["layers"])
    assert not sufficient.holds and sufficient.value < 0.5
    smaller, enough = verdicts["necessary", True], verdicts["sufficient", True]
    assert smaller.holds and set(smaller.heads) < named
    assert enough.holds and enough.value > 0.9 and named | boundary <= set(enough.heads)
    assert "Necessary: with the named 5 of 24 heads ablated" in result.summary
    assert "Not shown to be sufficient: with all but the named 5 of 24 heads ablated" in result.summary


def test_the_heads_of_each_role_are_tested_alone(circuit):
    _, result = circuit
    of_roles = {verdict.role: verdict for verdict in result.verdicts if verdict.role is not None}
    assert set(of_roles) == {role for role, heads in result.heads_by_role.items() if heads}
    first = result.evidence.set_ablations.where(kind="first", draw=None).frame.set_index("ablated")["value"]
    for role, verdict in of_roles.items():
        assert verdict.claim == "necessary" and list(verdict.heads) == result.heads(role)
        assert verdict.value == pytest.approx(first[role]), role
    assert of_roles["align_query"].holds and min(of_roles["align_query"].controls["unnamed"]) > 0.9
    assert "Necessary, role by role: align_query (accuracy 0." in result.summary


def test_the_table_holds_every_head_and_the_tests_of_candidates(circuit):
    model, result = circuit
    heads = model.cfg.n_layers * model.cfg.n_heads
    for metric in ("score", "attention", "p", "control"):
        assert len(result.table.where(metric=metric)) == heads * len(ROLES)
    keys = ["layer", "head", "role"]
    of: Any = {name: part.set_index(keys)["value"] for name, part in result.table.frame.groupby("metric")}
    mattered = of["q"] < 1  # on the prompts that choose
    assert 0 < mattered.sum() < len(mattered)
    both = np.maximum(of["p"][of["q"].index], of["causal_p"])[mattered].to_numpy(dtype=float)
    assert of["q"][mattered].to_numpy() == pytest.approx(benjamini_hochberg(both))
    tested = result.table.where(metric="q").frame
    assert {("align_query", *result.heads("align_query")[0])} <= set(
        zip(tested["role"], tested["layer"], tested["head"], strict=True)
    )
    decoy = next(head for head, kind in model.kinds.items() if kind == "gold_without_output")
    rows = result.table.where(layer=decoy[0], head=decoy[1], role="align_query").frame.set_index("metric")["value"]
    assert rows["score"] == 1 and rows["p"] <= 0.05
    assert rows["causal_p"] > 0.05 and rows["q"] == 1
    assert abs(rows["ablation"]) < 1e-6, "it looks like an aligner, and nothing depends on it"
    assert decoy not in result.named_heads


def test_numbers_come_from_prompts_that_had_no_part_in_the_search(circuit):
    model, result = circuit
    prompts = TASK.sample(24, model.tokenizer, seed=1)
    assert result.prompts.digest == prompts[12:].digest
    score = ac.score_heads(model, prompts[12:], ["lookup"]).to_array("lookup")
    np.testing.assert_allclose(result.table.where(role="lookup", metric="score").to_array("score"), score, rtol=1e-5)


def test_attention_of_named_heads_is_kept_for_the_first_prompt(circuit):
    _, result = circuit
    assert set(result.evidence.example.attention) == set(result.named_heads)
    head = result.heads("align_query")[0]
    relation = result.prompts[:1].relations["align_query"]
    for row, query in enumerate(relation.query.tolist()):
        attention = result.evidence.example.attention[head][result.evidence.example.positions.index(query)]
        assert attention.argmax() in relation.keys_of(row)
        torch.testing.assert_close(attention.sum(), torch.tensor(1.0))


def test_an_example_is_drawn_with_the_token_before_it():
    prompts = ac.Prompts.from_tokens([[5, 6, 7, 8, 9], [5, 6]])
    for column, positions in ((0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (3, [2, 3, 4])):
        example = torch.zeros_like(prompts.example)
        example[:, column:] = 1
        assert localize_heads.example_positions(replace(prompts, example=example)[:1]).tolist() == positions
    padded = replace(prompts, example=torch.zeros_like(prompts.example))[1:]
    assert localize_heads.example_positions(padded).tolist() == [3, 4], "no padding"


def test_a_localization_is_written_completely(circuit, tmp_path):
    _, result = circuit
    report = save_localization(result, tmp_path / "run")
    assert report == tmp_path / "run" / "report.html"
    assert result.accuracy.split(" is ")[1] in report.read_text(encoding="utf-8"), "the rest has links"
    again = ac.Table.load(tmp_path / "run")
    assert len(again) == len(result.table)
    assert again.provenance.settings["thresholds"]["fdr"] == 0.05
    assert len(ac.Table.load(tmp_path / "run" / "set_ablations")) == len(result.evidence.set_ablations)
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["verb"] == "localize"


def test_no_head_is_named_among_random_weights():
    rows = of_random(family="standard", gain=4.0, n=16, seed=0)
    assert sum(row["named"] for row in rows) == 0
    assert {row["role"] for row in rows} == set(ROLES)
    assert all(0 < row["p"] <= 1 for row in rows)


def test_thresholds_decide(circuit):
    model, _ = circuit
    strict = ac.localize(model, TASK, n=8, n_controls=0, thresholds=Thresholds(effect=100.0))
    assert strict.named_heads == []
    assert strict.summary.startswith("No head passes every test. Nearest: ")
    assert "no effect of 100 nats with an interval above 0" in strict.summary
    assert len(strict.evidence.example.attention) == 0


def test_one_distance_cannot_tell_an_aligner():
    """With one letter a phrase, a monotonic aligner looks a fixed distance back; a permuted one does not."""
    task = replace(TASK, phrase_len=1, n_examples=3)
    monotonic = ac.localize(ac.planted_circuit(task, seed=1), task, n=12, n_controls=0)
    assert monotonic.heads("align_query") == []
    assert monotonic.heads("lookup")
    assert "one distance" in monotonic.summary
    permuted = replace(task, alignment="permutation")
    model = ac.planted_circuit(permuted, seed=1)
    result = ac.localize(model, permuted, n=12, n_controls=0)
    assert result.heads("align_query") == [head for head, role in model.roles.items() if role == "align_query"]


def test_induction_heads_are_named_on_repeated_tokens():
    """The bundled model's; all prompts have their keys at the same positions, so tokens are renamed."""
    model, task = ac.load("toy-llama"), ac.RepeatedTokensTask(length=20)
    result = ac.localize(model, task, n=16, n_controls=0)
    scores = ac.score_heads(model, task.sample(16, model.tokenizer, seed=7), ["induction_attention"])
    best = scores.top("induction_attention", 1).frame.iloc[0]
    assert (best["layer"], best["head"]) in result.heads("induction")
    assert "same positions" not in result.summary
    assert not any(verdict.smallest for verdict in result.verdicts), "the smallest sets are looked for on request"


def test_diffuse_aligners_are_told():
    """At this strength the head that aligns keys keeps .07 of its attention on the aligned symbol, and has effect."""
    task = replace(TASK, n_examples=3)
    model = ac.planted_circuit(task, seed=0, strength=0.35)
    result = ac.localize(model, task, n=16, n_controls=0)
    (aligner,) = (head for head, role in model.roles.items() if role == "align_key")
    assert aligner in result.diffuse_aligners["align_key"] and aligner not in result.heads("align_key")
    assert f"Aligned but diffuse (align_key): L{aligner[0]}H{aligner[1]}" in result.summary
    attention = result.table.where(metric="attention", role="align_key").to_array("attention")
    assert attention[aligner] < result.thresholds.attention


def test_few_symbols_cannot_establish_an_aligner():
    task = replace(TASK, x_len=3, n_examples=2)
    result = ac.localize(ac.planted_circuit(task, seed=0), task, n=8, n_controls=0)
    assert result.heads("align_query") == []
    assert "3 input symbols have 6 orders" in result.summary


def test_64_prompts_are_sampled_by_default(model, monkeypatch):
    asked = []

    def sample(_, n: int, *__: Any, **___: Any) -> None:
        asked.append(n)
        raise InterruptedError

    monkeypatch.setattr(ac.Seq2SeqTask, "sample", sample)
    with pytest.raises(InterruptedError):
        ac.localize(model, TASK)
    assert asked == [64]


def test_bad_input_is_refused(model):
    cases: Any = [
        ({"n": 4}, "4 prompts: give at least 8"),
        ({"n": 7}, "7 prompts: give at least 8"),
        ({"n": 8, "n_controls": -1}, "n_controls=-1: give the number of sets"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            ac.localize(model, TASK, **arguments)
