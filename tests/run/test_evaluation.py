"""Accuracy beside loops over logits, and beside the references of the task."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.prompts.prompts import REFERENCES
from align_circuits.run import target_metrics
from align_circuits.run.evaluation import ALL_OFFSETS

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=6)


@pytest.fixture(scope="module")
def llama(random_hf_model, char_tokenizer):
    return ac.load(random_hf_model("llama", max_position_embeddings=128), tokenizer=char_tokenizer)


@pytest.fixture(scope="module")
def prompts(char_tokenizer) -> ac.Prompts:
    return TASK.sample(12, char_tokenizer, seed=0)


def looped(model, prompts: ac.Prompts) -> list[dict]:
    """Each target's group and what the model does there, from its logits on the prompt alone."""
    found = []
    letters = prompts.answer_tokens.tolist()
    left = (~prompts.mask).sum(1).tolist()
    with torch.no_grad():
        logits_of = [
            model(tokens[start:][None])[0].double() for tokens, start in zip(prompts.tokens, left, strict=True)
        ]
    for row in prompts.targets.to_dict("records"):
        index = int(row["prompt"])
        logits = logits_of[index][int(row["query_pos"]) - left[index]]
        predicted = int(logits.argmax())
        if prompts.correct is None:
            right = predicted == row["token"]
        else:
            right = predicted in letters and bool(prompts.correct[len(found), letters.index(predicted)])
        log_prob = logits.log_softmax(0)[int(row["token"])].item()
        found.append(row | {"accuracy": float(right), "log_prob": log_prob})
    return found


def frame_of(table: ac.Table, **keys) -> Any:  # pandas' own annotations take every comparison for a Series
    return table.where(**keys).frame


def value(table: ac.Table, **keys) -> float:
    frame = frame_of(table, **keys)
    assert len(frame) == 1
    return float(frame["value"][0])


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("own_token", [False, True])
def test_equal_to_loops_over_logits(llama, prompts, engine, own_token):
    if own_token:
        prompts = replace(prompts, correct=None)
    table = ac.evaluate(llama, prompts, options=ac.RunOptions(engine=engine))
    rows = looped(llama, prompts)
    assert table.provenance.engine == engine
    groups = {("all", ALL_OFFSETS): rows}
    groups |= {(kind, ALL_OFFSETS): [row for row in rows if row["kind"] == kind] for kind in ("first", "later")}
    groups |= {("all", offset): [row for row in rows if row["offset"] == offset] for offset in (0, 1)}
    for (kind, offset), of_group in groups.items():
        keys = {"kind": kind, "offset": offset}
        for metric in ("accuracy", "log_prob"):
            expected = np.mean([row[metric] for row in of_group])
            assert value(table, predictor="model", metric=metric, **keys) == pytest.approx(expected, abs=1e-5)
        for name in REFERENCES:
            expected = np.mean([row[name] for row in of_group])
            assert value(table, predictor=name, metric="accuracy", **keys) == pytest.approx(expected)
        assert (frame_of(table, **keys)["n"] == len(of_group)).all()
    assert len(table) == (2 + len(REFERENCES)) * len(groups)


def test_any_metric(llama, prompts):
    """By name and of one's own; the divergence from the model without the edits."""

    def entropy(logits, targets):  # noqa: ARG001
        log_p = logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    with torch.no_grad():
        logits = llama(prompts.tokens)[prompts.column("prompt"), prompts.column("query_pos")].double()
    log_p = logits.log_softmax(-1)
    token = prompts.column("token")[:, None]
    expected = {"prob": log_p.exp().gather(1, token), "entropy": -(log_p.exp() * log_p).sum(-1), "kl": torch.zeros(1)}
    table = ac.evaluate(llama, prompts, metrics=["prob", entropy, "kl"])
    assert set(table.frame["predictor"]) == {"model"}, "the references are accuracies"
    for metric, values in expected.items():
        found = value(table, predictor="model", metric=metric, kind="all", offset=ALL_OFFSETS)
        assert found == pytest.approx(float(values.mean()), abs=1e-5)
    edited = ac.evaluate(llama, prompts, metrics=["kl"], edits=[ac.Ablate([(0, 0)], how="zero")])
    assert value(edited, metric="kl", kind="all", offset=ALL_OFFSETS) > 1e-4


def test_answers_are_the_most_likely_tokens(llama, prompts):
    found = ac.answers(llama, prompts)
    p = llama(prompts.tokens, attention_mask=prompts.mask.long()).detach().softmax(-1)
    for row, target in zip(found.to_dict("records"), prompts.targets.to_dict("records"), strict=True):
        at = p[target["prompt"], target["query_pos"]]
        assert row["prompt"] == target["prompt"] and row["target"] == prompts.string_of(target["token"])
        assert row["answer"] == llama.tokenizer.decode([int(at.argmax())])
        assert row["p_answer"] == pytest.approx(float(at.max()), abs=1e-5)
        assert row["p"] == pytest.approx(float(at[target["token"]]), abs=1e-5)
    accuracy = ac.evaluate(llama, prompts).where(predictor="model", metric="accuracy", kind="all", offset=None)
    assert found["right"].to_numpy().mean() == pytest.approx(accuracy.frame["value"].item(), abs=1e-6)


def test_some_predictions_of_each_sort_are_there(llama, prompts):
    """The loop above could not tell right from wrong if all predictions were one of them."""
    biased = replace(
        prompts, correct=torch.arange(len(prompts.answer_tokens)).expand(len(prompts.targets), -1) % 2 == 0
    )
    assert (
        0 < value(ac.evaluate(llama, biased), predictor="model", metric="accuracy", kind="all", offset=ALL_OFFSETS) < 1
    )


def test_the_planted_circuit_is_as_good_as_the_oracle(char_tokenizer):
    for phrase_len in (1, 2):
        task = ac.Seq2SeqTask(x_len=3, phrase_len=phrase_len, n_examples=10)
        table = ac.evaluate(ac.planted_circuit(task, seed=0), task.sample(40, char_tokenizer, seed=1))
        kinds = table.where(metric="accuracy", offset=ALL_OFFSETS).frame.pivot(
            index="kind", columns="predictor", values="value"
        )
        assert kinds.loc["all", "model"] == pytest.approx(kinds.loc["all", "oracle"], abs=0.03)
        assert kinds.loc["first", "chance"] < kinds.loc["first", "memoryless"] <= kinds.loc["first", "history"]
        assert kinds.loc["first", "history"] < kinds.loc["first", "oracle"]
        assert ("later" in kinds.index) == (phrase_len > 1), "at c=1 there are no later tokens"


def test_a_model_that_is_always_right_has_an_interval(char_tokenizer):
    task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=10)
    row = ac.evaluate(ac.planted_circuit(task, seed=0), task.sample(30, char_tokenizer, seed=0)).frame.iloc[0]
    assert row["value"] == row["high"] == 1
    assert row["low"] == pytest.approx(0.025 ** (1 / 30)), "thirty prompts right do not show that all are"


def test_batches_chunks_and_repeats_change_nothing(llama, prompts, monkeypatch):
    whole = ac.evaluate(llama, prompts, options=ac.RunOptions(batch_size=12))
    real = target_metrics.forward

    def twice(*args, on_logits, **kwargs):
        def stutter(rows, logits):
            on_logits(rows[:1], logits[:1])
            on_logits(rows, logits)

        return real(*args, on_logits=stutter, **kwargs)

    monkeypatch.setattr(target_metrics, "forward", twice)
    monkeypatch.setattr(target_metrics, "_LOGITS_AT_ONCE", 130)
    columns = ["value", "low", "high", "n"]
    np.testing.assert_allclose(
        ac.evaluate(llama, prompts, options=ac.RunOptions(batch_size=5)).frame[columns], whole.frame[columns], atol=1e-5
    )


def test_own_text_has_no_references(llama):
    table = ac.evaluate(llama, ac.Prompts.from_tokens([[1, 20, 21, 20], [1, 30]]))
    assert set(table.frame["predictor"]) == {"model"}
    assert table.where(offset=[0, 1, 2], metric="accuracy").frame["n"].tolist() == [2, 1, 1]
    assert table.provenance.data["digest"]


def test_two_models_are_compared_by_prompt(llama, prompts):
    task = prompts
    better, worse = ac.evaluate(ac.planted_circuit(TASK, seed=0), task), ac.evaluate(llama, task)
    gain = better - worse
    assert gain.where(predictor="model", metric="accuracy", kind="all", offset=ALL_OFFSETS).frame.iloc[0]["low"] > 0
    assert frame_of(gain, predictor="oracle")["value"].abs().max() == 0


def test_nothing_to_evaluate(llama, prompts):
    refused("nothing to evaluate", ac.evaluate, llama, prompts[:0])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        ac.evaluate(llama, replace(prompts, targets=prompts.targets[:0], correct=None, relations={}))


def test_prompts_of_another_tokenizer(llama, byte_bpe_tokenizer):
    refused("another tokenizer", ac.evaluate, llama, ac.Prompts.from_tokens([[5, 6, 5]], tokenizer=byte_bpe_tokenizer))


def test_two_targets_may_be_asked_for_at_one_position(llama):
    """An answer and a foil."""
    prompts = ac.Prompts.from_tokens([[5, 6, 7, 8], [9, 6, 5, 8]])
    last = prompts.targets.groupby("prompt").tail(1)
    both = pd.concat([last, last.assign(token=11)]).sort_values(["prompt", "token"]).reset_index(drop=True)
    rescored = replace(prompts, targets=both, relations={})
    found = ac.evaluate(llama, rescored).where(metric="log_prob").frame["value"].iloc[0]
    with torch.no_grad():
        expected = llama(prompts.tokens)[:, 2].log_softmax(-1)
    assert found == pytest.approx(float(expected[:, [8, 11]].mean()), abs=1e-5)
