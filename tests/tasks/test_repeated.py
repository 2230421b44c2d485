"""Random tokens, repeated."""

import pytest
import torch
from refusals import refused

from align_circuits.prompts.prompts import TokenKind
from align_circuits.tasks.repeated import RepeatedTokensTask


def test_a_sequence_of_different_tokens_is_repeated():
    prompts = RepeatedTokensTask(length=10, repeats=3).sample(5, 200, seed=1)
    assert prompts.tokens.shape == (5, 30) and not prompts.task["bos"]
    parts = prompts.tokens.view(5, 3, 10)
    assert (parts == parts[:, :1]).all()
    assert all(len(set(row)) == 10 for row in parts[:, 0].tolist())
    assert prompts.example[0].tolist() == [0] * 10 + [1] * 10 + [2] * 10


@pytest.mark.parametrize("repeats", [2, 3])
def test_targets_are_what_induction_can_know(repeats):
    prompts = RepeatedTokensTask(length=4, repeats=repeats).sample(2, 50)
    relation = prompts.relations["induction"]
    assert len(relation) == len(prompts.targets) == 2 * (4 * (repeats - 1) - 1)
    for row in range(len(relation)):
        prompt, target = int(relation.prompt[row]), prompts.targets.iloc[int(relation.target[row])]
        keys = relation.keys_of(row)
        assert keys == [k for k in range(1, target["target_pos"] - 3) if k % 4 == target["target_pos"] % 4]
        assert {int(prompts.tokens[prompt, key]) for key in keys} == {target["token"]}
        assert target["query_pos"] == target["target_pos"] - 1 and target["offset"] == target["target_pos"] % 4
        assert target["phrase"] == target["target_pos"] // 4


@pytest.mark.parametrize("fixture", ["char_tokenizer", "llama_tokenizer", "byte_bpe_tokenizer"])
def test_a_tokenizers_special_tokens_are_left_out_and_bos_is_first(fixture, request):
    tokenizer = request.getfixturevalue(fixture)
    prompts = RepeatedTokensTask(length=20).sample(3, tokenizer)
    has_bos = tokenizer.bos_token_id is not None
    assert prompts.task["bos"] == has_bos == bool((prompts.token_kinds[:, 0] == TokenKind.BOS).all())
    assert not set(prompts.tokens[prompts.token_kinds == TokenKind.TEXT].tolist()) & set(tokenizer.all_special_ids)
    assert prompts.tokenizer_hash is not None and len(prompts.text) == 3
    assert (prompts.tokens[prompts.column("prompt"), prompts.column("target_pos")] == prompts.column("token")).all()


def test_a_seed_fixes_the_prompts_whatever_their_number():
    task = RepeatedTokensTask(length=5)
    assert torch.equal(task.sample(2, 99, seed=3).tokens, task.sample(6, 99, seed=3).tokens[:2])
    assert not torch.equal(task.sample(2, 99, seed=3).tokens, task.sample(2, 99, seed=4).tokens)


def test_a_vocabulary_is_never_listed():
    """A list of so many ids would take 8 GB and half a minute."""
    rows = RepeatedTokensTask(length=9).sample(2, 10**9, seed=3).tokens[:, :9]
    assert rows.min() >= 0 and rows.max() > 10**8
    assert all(len(set(row)) == 9 for row in rows.tolist())


def test_what_cannot_be_repeated_is_refused():
    refused("repeats is 1: give at least 2", RepeatedTokensTask, repeats=1)
    refused("length is 1: give at least 2", RepeatedTokensTask, length=1)
    refused("there are only 10 tokens", RepeatedTokensTask(length=11).sample, 1, 10)
    refused("0 prompts", RepeatedTokensTask().sample, 0, 100)
    refused("the seed is -1", RepeatedTokensTask().sample, 1, 100, seed=-1)
