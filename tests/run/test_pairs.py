"""Pairs of prompts: as they show themselves, and in batches."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.jobs.sweeps import SweepParts
from align_circuits.run import pairs

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2)


def test_shown_in_consoles_and_notebooks(char_tokenizer):
    clean = TASK.sample(4, char_tokenizer, seed=0)
    corrupted = TASK.corrupt(clean, "query", seed=1)
    length = clean.inputs.shape[1]
    assert repr(ac.Pair(clean, corrupted)) == f"Pair(4 x {length} seq2seq, direction='denoise', corrupted='query')"
    chosen = ac.Pair(clean, corrupted, metric="prob", kind="first", direction="noise")
    shown = f"Pair(4 x {length} seq2seq, metric='prob', kind='first', direction='noise', corrupted='query')"
    assert repr(chosen) == shown
    odd = dict.fromkeys(clean.token_strings, "<b>")
    page = ac.Pair(replace(clean, token_strings=odd), replace(corrupted, token_strings=odd))._repr_html_()
    differ = int((clean.tokens[0] != corrupted.tokens[0]).sum())
    assert page.count("text-decoration:underline") == 2 * differ > 0
    assert page.count("<b>clean</b>") == page.count("<b>corrupted</b>") == 1
    assert page.count("<b>") == 2 and page.count("&lt;b&gt;") == 2 * length + len(clean[0].targets)


def test_the_target_of_both_prompts_is_said_to_be_the_answer_of_the_clean_one(char_tokenizer):
    halves = ac.Prompts.from_pairs(["ab:"], ["cd:"], char_tokenizer, answer=["ab"], corrupted_answer=["cd"])
    assert (
        ac.Pair(*halves)
        .to_html()
        .endswith("<div>target of both prompts: ab (the right answer of the clean prompt)</div>")
    )


@pytest.mark.parametrize(
    ("tokens", "size", "batches", "parts"),
    [
        (0.1, "auto", [1] * 4, 4),
        (2, "auto", [2, 2], 2),
        (3.9, "auto", [3, 1], 2),
        (4, "auto", [4], 1),
        (9, "auto", [4], 1),
        (1, 3, [3, 1], 2),
    ],
)
def test_batches_hold_as_many_prompts_as_fit(char_tokenizer, tmp_path, monkeypatch, tokens, size, batches, parts):
    """A part that is kept is a batch; without any, all prompts are one part, which memory alone divides."""
    clean = TASK.sample(4, char_tokenizer, seed=0)
    monkeypatch.setattr(pairs, "CPU_TOKENS", int(tokens * clean.mask.shape[1]))
    pair, sizes = ac.Pair(clean, TASK.corrupt(clean, "query", seed=1)), []

    def measure(part: ac.Pair) -> torch.Tensor:
        sizes.append(len(part.base))
        return part.base.tokens.double().sum(1)[None]

    for options in (ac.RunOptions(batch_size=size), ac.RunOptions(batch_size=size, cache_dir=tmp_path)):
        measured = pair.in_batches(measure, SweepParts(options.cache_dir, "sums", {}), options)
        torch.testing.assert_close(measured, pair.base.tokens.double().sum(1)[None])
    assert sizes == 2 * batches
    kept = sorted(path.stem for path in tmp_path.rglob("*.safetensors"))
    assert kept == [f"prompts-{first:05d}" for first in range(0, 4, batches[0])] and len(kept) == parts


def test_pairs_of_vectors_have_no_drawing():
    prompts = ac.Prompts.from_tokens([[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]])
    vectors = replace(prompts, inputs=torch.zeros(2, 5, 4), task={"name": "<made>"})
    assert "<div>Pair(2 x 5 &lt;made&gt;, direction=" in ac.Pair(vectors, vectors)._repr_html_()
    assert vectors._repr_html_().startswith("Prompts(2 x 5 &lt;made&gt;, targets=")


def test_a_kind_or_a_metric_that_does_not_fit_is_refused_at_once(char_tokenizer):
    clean = TASK.sample(4, char_tokenizer, seed=0)
    corrupted = TASK.corrupt(clean, "query", seed=1)
    refused("no targets of kind 'later'", ac.Pair, clean, corrupted, kind="later")
    refused("metric='logit_diff' compares with a wrong answer", ac.Pair, clean, corrupted, metric="logit_diff")
    refused(r"clean= is the corrupted half, as task\.corrupt or Prompts\.from_pairs", ac.Pair, corrupted, clean)
    assert ac.Pair(corrupted, corrupted).clean is corrupted, "a corruption may be corrupted again"


@pytest.mark.parametrize("ids", [[[1, 2, 3]], [[1, 2, 3], [4, 5, 6, 7]], [[1, 2], [4, 5, 6]]])
def test_halves_of_other_shapes_are_refused(ids):
    prompts = ac.Prompts.from_tokens([[1, 2, 3], [4, 5, 6]])
    refused("do not match token by token", ac.Pair, prompts, ac.Prompts.from_tokens(ids))


def test_both_runs_have_the_right_and_wrong_answers_of_the_clean_prompts():
    prompts, tokens = ac.Prompts.from_tokens([[1, 2], [3, 4]]), torch.arange(2)
    clean, other = (replace(prompts, targets=prompts.targets.assign(wrong=wrong)) for wrong in (5, 6))
    clean = replace(clean, answer_tokens=tokens, correct=torch.eye(2).bool())
    metrics = ac.Pair(clean, other, metric="logit_diff").target_metrics
    assert metrics.targets["wrong"].tolist() == [5, 5]
    torch.testing.assert_close(metrics.correct, clean.correct)
    known = replace(other, answer_tokens=tokens + 1, own_correct=torch.eye(2).bool())
    refused("have different answer_tokens, the columns of own_correct", ac.Pair, clean, known)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (None, None, None),
        ([0, 0, 1, 2], [0, 0, 1, 2], [0, 0, 1, 2]),
        ([0, 0, 1, 2], None, [0, 0, 1, 2]),
        (None, [3, 4, 3, 5], [0, 1, 0, 2]),
        ([0, 0, 1, 2], [0, 1, 1, 2], [0, 0, 0, 1]),
        ([0, 0, 7, 8], [5, 6, 9, 9], [0, 0, 1, 1]),
    ],
)
def test_pairs_are_related_where_either_half_is(ours, theirs, expected):
    prompts = ac.Prompts.from_tokens([[1, 2], [2, 3], [3, 4], [4, 5]])
    clean, corrupted = (replace(prompts, group=group and torch.tensor(group)) for group in (ours, theirs))
    pair = ac.Pair(clean, corrupted)
    assert expected is None or pd.factorize(np.asarray(pair.clean.group))[0].tolist() == expected
    groups = [None if half.group is None else half.group.tolist() for half in (pair.clean, pair.corrupted)]
    assert groups[0] == groups[1] and (expected is None) == (groups[0] is None)


def test_activations_between_both_runs():
    pair = pairs.CachedPair({"a": torch.tensor([[[7.0]]])}, {"a": torch.tensor([[[3.0]]])}, torch.zeros(2, 1))
    assert pair.change("a") == -4
    assert [float(pair.between("a", share)) for share in (0.0, 0.25, 1.0)] == [3, 4, 7]
