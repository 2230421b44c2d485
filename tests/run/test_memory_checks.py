"""Memory that verbs take, estimated before they run, beside what PyTorch holds in a process of its own."""

import re
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from forked import FORK

import align_circuits as ac
from align_circuits.heads.attention import attention_from
from align_circuits.models.tokenizer import char_tokenizer
from align_circuits.run import memory_checks
from align_circuits.tasks.repeated import RepeatedTokensTask

QUIET = ac.RunOptions(progress=False)


def llama(vocabulary: int, layers: int, width: int, inner: int) -> Any:
    sizes: Any = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=4096)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def call_of(verb: str, model: Any, prompts: int, length: int) -> Any:
    """The call of a verb, with prompts of a length; for `tune` and `localize` of so many examples."""
    if verb == "tune":
        task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=length)
        config = ac.TuneConfig(steps=1, batch=prompts, probe_prompts=1, probe_every=1)
        return partial(ac.tune, model, task, config, progress=False)
    if verb == "localize":
        task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=length)
        return partial(ac.localize, model, task, prompts, n_controls=1)
    task = RepeatedTokensTask(length=length // 2, bos=False)
    clean, other = (task.sample(prompts, model.cfg.d_vocab, seed=seed) for seed in range(2))
    if verb == "attention":
        heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
        return partial(attention_from, model, clean, heads, torch.arange(length))
    pair = ac.Pair(clean, replace(other, targets=clean.targets, relations={}))
    if verb == "attribute_heads":
        return partial(ac.attribute_heads, model, pair, options=QUIET)
    return partial(ac.attribute_edges, model, pair, steps=1, options=QUIET)


def measured(answer: Connection, verb: str, prompts: int, length: int, vocabulary: int, *sizes: int) -> None:
    """Sends what was estimated, and what was taken at the most."""
    torch.set_num_threads(1)
    tokenizer = char_tokenizer() if verb in ("tune", "localize") else None
    model = ac.load(llama(len(tokenizer) if tokenizer else vocabulary, *sizes), tokenizer=tokenizer)
    call = call_of(verb, model, prompts, length)
    no_memory = mock.patch.multiple(memory_checks, memory_of_machine=lambda: 0, readable_size=str)
    with no_memory, pytest.raises(ValueError, match="takes some") as refusal:
        call()
    estimated = int(re.findall(r"takes some (\d+)", str(refusal.value))[0])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        call()
    events: Any = profile.profiler
    taken = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    answer.send((estimated, max(accumulate(size for _, size in sorted(taken)))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("attribute_heads", 8, 256, 2000, 4, 256, 1024),
        ("attribute_heads", 1, 2048, 20000, 6, 256, 1536),
        ("attribute_edges", 8, 256, 2000, 4, 256, 1024),
        ("attribute_edges", 1, 2048, 2000, 4, 512, 2048),
        ("attention", 1, 1024, 2000, 4, 256, 1024),
        ("attention", 1, 2048, 2000, 3, 128, 256),
        ("tune", 16, 20, 64, 4, 512, 1024),
        ("tune", 8, 40, 64, 6, 256, 1024),
        ("localize", 16, 10, 64, 4, 256, 1024),
        ("localize", 32, 20, 64, 8, 256, 1024),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}",
)
def test_what_is_estimated_is_taken(case):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=measured, args=(theirs, *case))
    process.start()
    assert ours.poll(300), "the process ended without an answer"
    estimated, taken = ours.recv()
    process.join()
    assert estimated == pytest.approx(taken, rel=0.3), f"{estimated / 1e6:.0f} MB estimated, {taken / 1e6:.0f} taken"


def test_what_does_not_fit_is_refused_and_what_is_said_to_fit_runs(monkeypatch):
    model = ac.load(llama(1000, 2, 16, 32))
    monkeypatch.setattr(memory_checks, "memory_of_machine", lambda: 10**6)
    for verb in ("attribute_heads", "attribute_edges", "attention"):
        message = r"takes some [\d.]+ [GM]B of memory .* machine has 1.0 MB: give shorter"
        with pytest.raises(ValueError, match=message) as told:
            call_of(verb, model, 1, 1000)()
        (fitting,) = re.findall(r"of ([\d,]+) tokens they would fit", str(told.value))
        length = int(fitting.replace(",", "")) // 2 * 2
        assert 10 < length < 1000
        call_of(verb, model, 1, length)()
        with pytest.raises(ValueError, match=message):
            call_of(verb, model, 1, length + 2)()
