"""Sets of prompts that begin alike, beside a forward pass over each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.hooks.replay import Replay
from align_circuits.run.alike_prompts import Rows, forward_alike
from align_circuits.run.forward_pass import forward

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4)
LENGTH, FIRST = 51, 40


@pytest.fixture(scope="module")
def sets(char_tokenizer: Any) -> list[ac.Prompts]:
    return [replace(TASK, ood=ood).sample(5, char_tokenizer, references=False) for ood in (False, True)]


class Read:
    """Keeps what a pass gives of some rows, not the same ones in every prompt and set."""

    def __init__(self, prompts: ac.Prompts, model: Any, first: int = FIRST):
        length = prompts.tokens.shape[1]
        rows = [(i, at) for i in range(len(prompts)) for at in range(first + 3 + i % 2, length, 2 + i % 3)]
        prompt, query = torch.tensor(rows).T.contiguous()
        self.patterns = torch.full((model.cfg.n_layers, len(rows), model.cfg.n_heads, length), torch.nan)
        self.logits = torch.full((len(rows), model.cfg.d_vocab), torch.nan)
        self.rows = Rows(prompts, prompt, query, self.on_pattern, self.on_logits)

    def on_pattern(self, row: Any, layer: int, pattern: Any) -> None:
        self.patterns[layer, row] = pattern

    def on_logits(self, row: Any, logits: Any) -> None:
        self.logits[row] = logits


def both_ways(model: Any, sets: list[ac.Prompts], first: int = FIRST, **settings: Any) -> list[Read]:
    """Runs the sets alike, compares each with a pass of its own, and returns what was read."""
    alike = [Read(prompts, model, first) for prompts in sets]
    forward_alike(model, [read.rows for read in alike], **settings)
    for read in alike:
        alone = Read(read.rows.prompts, model, first)
        places = {"prompt": alone.rows.prompt, "query": alone.rows.query}
        forward(model, alone.rows.prompts, **places, on_pattern=alone.on_pattern, on_logits=alone.on_logits, **settings)
        torch.testing.assert_close(read.patterns, alone.patterns, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(read.logits, alone.logits, atol=2e-5, rtol=1e-4)
    return alike


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many prompts and columns were run once for all sets."""
    run, found = Replay.run.__func__, []

    def counted(cls: Any, decoder: Any, tokens: Any, *given: Any, **more: Any) -> Any:
        if more["starts"] != [0]:  # `forward` runs whole prompts
            found.append(tuple(tokens.shape))
        return run(cls, decoder, tokens, *given, **more)

    monkeypatch.setattr(Replay, "run", classmethod(counted))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"])
def test_it_gives_what_a_pass_over_each_gives(
    name: str, random_hf_model: Any, sets: Any, char_tokenizer: Any, shared: Any
):
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    both_ways(model, sets)
    differ = int((sets[0].tokens != sets[1].tokens).any(0).nonzero()[0])
    assert shared == [(5, min(differ, FIRST + 3))], "the beginnings were not run once"


def test_adapters_are_merged_for_the_pass_alone(random_hf_model: Any, sets: Any, char_tokenizer: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    config = ac.TuneConfig(steps=2, lr=5e-2, batch=2, probe_prompts=1)
    tuned = ac.tune(model, replace(TASK, n_examples=2), config, progress=False).model
    before = {name: value.clone() for name, value in tuned.original_model.named_parameters()}
    both_ways(tuned, sets)
    assert all(torch.equal(value, before[name]) for name, value in tuned.original_model.named_parameters())


def test_batches_change_nothing(random_hf_model: Any, sets: Any, char_tokenizer: Any, shared: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    whole, parts = both_ways(model, sets), both_ways(model, sets, options=ac.RunOptions(batch_size=2))
    assert [prompts for prompts, _ in shared] == [5, 2, 2, 1]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.patterns, other.patterns, atol=1e-5, rtol=1e-5)


def test_where_nothing_is_shared_each_set_is_run(random_hf_model: Any, sets: Any, char_tokenizer: Any, shared: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    other = TASK.sample(5, char_tokenizer, seed=1, references=False)
    both_ways(model, [sets[0], other])
    both_ways(model, sets, first=10)
    both_ways(model, sets, options=ac.RunOptions("reference"))
    both_ways(model, sets, edits=[ac.Ablate([(0, 1)], how="zero")])
    both_ways(model, sets[:1])
    both_ways(model, [sets[0], sets[1][:4]])
    both_ways(model, [sets[0], padded(sets[1], 1)])
    assert not shared


def padded(prompts: ac.Prompts, *lengths: int) -> ac.Prompts:
    """Prompts of which the first ones begin with padding."""
    mask = prompts.mask.clone()
    for row, length in enumerate(lengths):
        mask[row, :length] = False
    return replace(prompts, mask=mask)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("batch_size", ["auto", 2])
def test_padding_is_attended_to_by_none(
    name: str, batch_size: Any, random_hf_model: Any, sets: Any, char_tokenizer: Any, shared: Any
):
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    some = [padded(prompts, 3, 7, 30, 30, 31) for prompts in sets]
    both_ways(model, some, options=ac.RunOptions(batch_size=batch_size))
    assert len(shared) == (1 if batch_size == "auto" else 3)
    read = Read(some[0], model)
    forward_alike(model, [replace(read.rows, on_logits=None)] * 2)
    assert read.patterns.isfinite().all() and read.logits.isnan().all(), "no logits were asked for"
    both_ways(model, [padded(prompts, FIRST + 3) for prompts in sets])
    assert len(shared) == (2 if batch_size == "auto" else 4), "a prompt without a beginning"


def test_broken_weights_are_refused(random_hf_model: Any, sets: Any, char_tokenizer: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    with torch.no_grad():
        model.original_model.model.norm.weight.fill_(torch.nan)
    refused("logits are NaN", forward_alike, model, [Read(prompts, model).rows for prompts in sets])


def test_prompts_of_another_tokenizer_are_refused(random_hf_model: Any, sets: Any, char_tokenizer: Any):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    odd = [replace(prompts, tokenizer_hash="0" * 16) for prompts in sets]
    refused("another tokenizer", forward_alike, model, [Read(prompts, model).rows for prompts in odd])
