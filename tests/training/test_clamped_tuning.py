"""Tuning while heads are clamped: the gradient beside attention written out, probes, and bad input."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import align_circuits as ac
from align_circuits.hooks.attention import take_parts
from align_circuits.hooks.compat import bridges
from align_circuits.models.lora import unwrapped, with_adapter
from align_circuits.prompts.relations import Relation
from align_circuits.training.tuning import TuneConfig, _TuningData, tune

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=2)
CONFIG = TuneConfig(steps=3, lr=5e-2, batch=2, probe_every=1, probe_prompts=3, loss_on="all", dropout=0.0)
CLAMPS = [ac.Clamp([(1, 0), (2, 3)], "align_query"), ac.Clamp([(2, 3)], "align_key"), ac.Clamp([(2, 1)], "lookup")]
HEADS, KEY_HEADS, WIDTH = 4, 2, 8

tuning = sys.modules[tune.__module__]


@pytest.fixture(scope="module")
def llama(random_hf_model, char_tokenizer):
    """A small Llama of three layers with grouped-query attention."""
    return ac.load(random_hf_model("llama", num_hidden_layers=3), tokenizer=char_tokenizer)


def adapted(llama):
    """What `tune` trains, with an adapter that is not zero."""
    model = unwrapped(llama)
    names = ("q", "k", "v", "o")
    with_adapter(model, bridges.matrices_of(llama), names=names, layers=None, r=4, alpha=4.0, dropout=0.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    take_parts(model)
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def written_out(prompts, module, query, key, value, _mask, **kwargs):
    """Attention by loops over prompts and heads, with the rows of clamped heads written in."""
    n, _, length, _ = query.shape
    z = []
    for prompt in range(n):
        for head in range(HEADS):
            group = head // (HEADS // KEY_HEADS)
            scores = query[prompt, head] @ key[prompt, group].T * kwargs["scaling"]
            hidden = torch.arange(length)[None] > torch.arange(length)[:, None]
            rows = list(scores.masked_fill(hidden, -torch.inf).softmax(-1))
            for clamp in CLAMPS:
                relation = prompts.relations[clamp.relation]
                for row in range(len(relation)) if (module.layer_idx, head) in clamp.heads else ():
                    if int(relation.prompt[row]) == prompt and int(relation.query[row]) < length:
                        keys = relation.keys_of(row)
                        rows[int(relation.query[row])] = torch.zeros(length).index_fill(
                            0, torch.tensor(keys), 1 / len(keys)
                        )
            z.append(torch.stack(rows) @ value[prompt, group])
    return torch.stack(z).view(n, HEADS, length, WIDTH).transpose(1, 2), None


def test_the_gradient_equals_that_of_attention_written_out(llama):
    model = adapted(llama)
    data = _TuningData.of(llama, TASK, CONFIG, seed=3)
    tensors, prompts = data.clamped_batch(1, 7)
    assert all(torch.equal(one, other) for one, other in zip(tensors, data.batch(1, 7), strict=True))
    loss = tuning._clamped_loss(llama, CLAMPS, model, (tensors, prompts))
    found = gradients(model, loss)
    free = tuning._loss(model, tensors)
    AttentionInterface.register("written_out", lambda *args, **kwargs: written_out(prompts, *args, **kwargs))
    model.set_attn_implementation("written_out")
    expected_loss = tuning._loss(model, tensors)
    expected = gradients(model, expected_loss)
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-5)
    assert abs((loss - free).item()) > 1e-3, "clamps change nothing"
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=1e-3, msg=name)


def test_what_clamped_heads_attend_to_teaches_their_queries_and_keys_nothing(llama):
    """Both heads of the first key head are clamped at every token; their values learn."""
    model = adapted(llama)
    tensors, prompts = _TuningData.of(llama, TASK, CONFIG, seed=3).clamped_batch(1, 7)
    pairs = [(prompt, query, [0]) for prompt in range(2) for query in range(prompts.tokens.shape[1])]
    prompts = prompts.with_relations(everywhere=Relation.from_pairs(pairs, prompts=prompts))
    clamps = [ac.Clamp([(2, 0), (2, 1)], "everywhere")]
    found = gradients(model, tuning._clamped_loss(llama, clamps, model, (tensors, prompts)))
    clamped_rows = {"q": 2 * WIDTH, "k": WIDTH, "v": 0}
    for layer in (1, 2):
        for name, first in clamped_rows.items():
            (grad,) = (found[each] for each in found if f"layers.{layer}.self_attn.{name}_proj.lora_B" in each)
            if layer == 2:
                assert not grad[:first].any()
                grad = grad[first:]
            assert grad.abs().sum(1).min() > 0


def test_attention_dropout_stays_on_while_heads_are_clamped(random_hf_model, char_tokenizer):
    """Elsewhere than in attention this GPT-2 drops nothing."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "num_hidden_layers": 3}
    model = ac.load(random_hf_model("gpt2", attn_pdrop=0.5, **off), tokenizer=char_tokenizer)
    batch = _TuningData.of(model, TASK, CONFIG, seed=3).clamped_batch(1, 7)
    plain = unwrapped(model)
    take_parts(plain)
    clamps = [*CLAMPS, ac.Clamp([(0, 0)], "lookup")]  # in every layer
    with torch.no_grad(), torch.random.fork_rng():
        losses = {
            training: [tuning._clamped_loss(model, clamps, plain.train(training), batch).item() for _ in range(3)]
            for training in (True, False)
        }
    assert len({*losses[True]}) == 3 and len({*losses[False]}) == 1


def test_clamps_hold_in_every_probe(llama):
    plain, clamped = (
        tune(llama, TASK, CONFIG, clamps=clamps, progress=False) for clamps in ((), [CLAMPS[0], CLAMPS[2]])
    )
    rows: Any = clamped.table.heads().frame
    for metric, heads in (("align_query", CLAMPS[0].heads), ("lookup", CLAMPS[2].heads)):
        for layer, head in heads:
            held = rows[(rows["metric"] == metric) & (rows["layer"] == layer) & (rows["head"] == head)]
            np.testing.assert_allclose(held["value"], 1, atol=1e-6)
            assert len(held) == 2 * 4, "in distribution and out of it, at four probes"
    first = {"metric": "align_query", "step": 0, "ood": False, "level": "head", "layer": 0}
    np.testing.assert_allclose(plain.table.where(**first).frame["value"], clamped.table.where(**first).frame["value"])
    assert [record["edit"] for record in clamped.table.provenance.settings["edits"]] == ["Clamp", "Clamp"]
    assert "edits" not in plain.table.provenance.settings


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_the_loss_is_what_evaluate_finds_with_fused_projections(name, random_hf_model, char_tokenizer):
    model = ac.load(random_hf_model(name, num_hidden_layers=3), tokenizer=char_tokenizer)
    data = _TuningData.of(model, TASK, replace(CONFIG, loss_on="last"), seed=3)
    tensors, prompts = data.clamped_batch(1, 7)
    plain = unwrapped(model)
    take_parts(plain)
    for clamps in (CLAMPS, []):
        found = ac.evaluate(model, prompts, edits=clamps).where(metric="log_prob", kind="all", offset=None).frame
        loss = tuning._clamped_loss(model, clamps, plain, (tensors, prompts))
        assert float(loss) == pytest.approx(-found["value"].iloc[0], abs=1e-5)


def test_clamps_need_the_fast_engine(random_hf_model, char_tokenizer):
    model = ac.load(random_hf_model("gemma2", num_hidden_layers=3), tokenizer=char_tokenizer)
    with pytest.raises(ValueError, match="cannot be clamped while it is tuned: Gemma2ForCausalLM caps"):
        tune(model, TASK, CONFIG, clamps=CLAMPS, progress=False)


@pytest.mark.slow
def test_a_run_with_other_clamps_is_another_run(llama, tmp_path):
    tune(llama, TASK, CONFIG, clamps=CLAMPS, out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="edits"):
        tune(llama, TASK, CONFIG, clamps=CLAMPS[:1], out=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("clamp", "error", "message"),
    [
        (ac.Clamp([(0, 0)], "aligned"), KeyError, "no relation 'aligned'"),
        (ac.Clamp([(3, 0)], "lookup"), ValueError, "layer"),
    ],
)
def test_wrong_clamps_are_refused_before_anything_is_written(llama, tmp_path, clamp, error, message):
    with pytest.raises(error, match=message):
        tune(llama, TASK, CONFIG, clamps=[clamp], out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_checkpointing_recomputes_clamped_attention(llama):
    whole, again = (
        tune(llama, TASK, replace(CONFIG, checkpointing=checkpointing), clamps=CLAMPS, progress=False).log["loss"]
        for checkpointing in (False, True)
    )
    np.testing.assert_allclose(whole, again, rtol=1e-5)
