"""Direct logits beside the model's own last norm, and function vectors beside a loop of hooks."""

import copy
import string
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from legs import slow_but
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.direct_effects import direct_logit_attribution, function_vectors, head_profile
from align_circuits.models.planted.planted_model import planted_competitors
from align_circuits.tables.intervals import mean_interval, proportion_change, unpaired_difference

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2, automata="task")


@pytest.fixture(scope="module")
def prompts(char_tokenizer):
    return TASK.sample(3, char_tokenizer, seed=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_direct_logits_equal_transformer_lens(random_hf_model, char_tokenizer, prompts, name):
    """Its cache divides what heads and MLPs wrote by the last norm's scale."""
    model = ac.load(random_hf_model(name), tokenizer=char_tokenizer)
    table: Any = direct_logit_attribution(model, prompts).frame.set_index("sender")["value"]
    at_targets = (prompts.column("prompt"), prompts.column("query_pos"))
    gold = prompts.column("token")
    with torch.no_grad():
        logits, cache = model.run_with_cache(prompts.tokens)
        scale = cache["ln_final.hook_scale"][at_targets]
        norm = model.ln_final.original_component
        direction = (model.W_U[:, gold] - model.W_U.mean(1, keepdim=True)).T
        for sender in ("L0H2", "L1H3", "M1", "input"):
            layer = int(sender[1]) if sender != "input" else 0
            if "H" in sender:
                head = int(sender[3])
                written = cache[f"blocks.{layer}.attn.hook_z"][:, :, head] @ model.blocks[layer].attn.W_O[head]
            else:
                written = cache["blocks.1.hook_mlp_out" if sender == "M1" else "blocks.0.hook_resid_pre"]
            written = written[at_targets]
            written = written - written.mean(-1, keepdim=True) if name == "gpt2" else written
            expected = float(((written / scale * norm.weight) * direction).sum(-1).mean())
            assert table[sender] == pytest.approx(expected, abs=1e-5)
        above = logits[at_targets].gather(1, gold[:, None])[:, 0] - logits[at_targets].mean(1)
    assert table.sum() == pytest.approx(float(above.mean()), abs=1e-4)


def test_dropout_stays_off_where_parts_run_outside_the_model(random_hf_model, char_tokenizer, prompts):
    model = ac.load(random_hf_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5), tokenizer=char_tokenizer)
    pair = ac.Pair(prompts, TASK.corrupt(prompts, "labels", seed=1))
    of_mode = []
    for training in (False, True):
        model.train(training)
        edges = ac.attribute_edges(model, pair), ac.patch_edges(model, pair, edges=[("M0", "M1")])
        of_mode.append([table.frame["value"] for table in (*edges, direct_logit_attribution(model, prompts))])
        assert model.blocks[0].mlp.training == training
    for evaluated, trained in zip(*of_mode, strict=True):
        np.testing.assert_allclose(trained, evaluated, atol=1e-6)


def test_function_vectors_equal_a_loop(random_hf_model, char_tokenizer, prompts):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    prompts = replace(prompts, group=torch.tensor([0, 0, 1]))
    other = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2, automata="task", task_seed=1)
    pairs = [
        ac.Pair(clean, task.corrupt(clean, "labels", seed=1))
        for task, clean in ((TASK, prompts), (other, other.sample(2, char_tokenizer, seed=3)))
    ]
    heads = [(0, 1), (1, 3)]
    table = function_vectors(model, pairs, heads=heads)
    expected = np.zeros((2, 2))
    for t, (clean, corrupted) in enumerate((pair.clean, pair.corrupted) for pair in pairs):
        prompt, query, token = (corrupted.column(name) for name in ("prompt", "query_pos", "token"))

        def probability(hooks: list) -> torch.Tensor:
            with torch.no_grad():
                logits = model.run_with_hooks(corrupted.tokens, fwd_hooks=hooks)  # noqa: B023
            return logits[prompt, query].softmax(-1).gather(1, token[:, None])[:, 0]  # noqa: B023

        with torch.no_grad():
            _, cache = model.run_with_cache(clean.tokens)
        for h, (layer, head) in enumerate(heads):
            name = f"blocks.{layer}.attn.hook_z"
            mean = cache[name][prompt, query, head].mean(0)

            def put(x: torch.Tensor, **_: Any) -> torch.Tensor:
                x = x.clone()
                x[prompt, query, head] = mean  # noqa: B023
                return x

            expected[h, t] = float((probability([(name, put)]) - probability([])).mean())
    np.testing.assert_allclose(table.frame["value"], expected.mean(1), atol=1e-6)
    assert set(table.frame["n"]) == {2}
    assert np.abs(expected).max() > 1e-3
    alone = function_vectors(model, pairs[:1], heads=heads)
    np.testing.assert_allclose(alone.frame["value"], expected[:, 0], atol=1e-6)
    assert (table.unit, alone.unit) == ("prompts", "groups")
    twice: Any = function_vectors(model, pairs[:1] * 2, heads=heads)
    ends = (each.frame[["value", "low", "high"]].to_numpy(float) for each in (twice, table))
    np.testing.assert_allclose((twice - table).frame[["low", "high"]], np.stack(unpaired_difference(*ends), 1))
    assert np.isnan((alone - table).frame["low"].to_numpy()).all(), "of groups and of tasks"
    for each in (table, alone):  # whose effects may be below 0
        assert each.values is not None and each.weights is not None
        low, high = mean_interval(each.values, each.weights)
        np.testing.assert_allclose(each.frame[["low", "high"]], np.stack([low, high], 1))
    shares: Any = function_vectors(model, [replace(pairs[0], metric="accuracy")], heads=heads)
    np.testing.assert_array_equal(shares.frame["low"], proportion_change(shares.values, shares.weights)[0])


def test_the_profile_of_planted_heads(char_tokenizer):
    """Lookup heads attend, write, and carry no task; there are no function-vector heads here."""
    task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=4)
    model, prompts = ac.planted_circuit(task, seed=0), task.sample(6, char_tokenizer, seed=1)
    found = head_profile(model, prompts, [ac.Pair(prompts, task.corrupt(prompts, "labels", seed=2))])
    assert found.frame.index.tolist() == [*range(len(found))]
    grid = {metric: found.to_array(metric) for metric in found.frame["metric"].unique()}
    assert list(grid) == ["lookup_attention", "induction_attention", "direct_logit", "function_vector"]
    lookup = [place for place, role in model.roles.items() if role == "lookup"]
    for place in lookup:
        assert grid["lookup_attention"][place] > 0.9 and grid["direct_logit"][place] > 1
    aligner = next(place for place, role in model.roles.items() if role == "align_query")
    assert grid["direct_logit"][aligner] == pytest.approx(0, abs=1e-5)


def test_lookup_induction_and_function_vector_heads_are_told_apart():
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=6, alphabet_range=(4, 8))
    model = planted_competitors(task, seed=0)
    letters = task.sample(1, model.tokenizer, references=False).answer_tokens
    other_half = torch.arange(model.cfg.d_vocab)
    other_half[letters] = letters.roll(13)

    def pair(half: str, seed: int) -> ac.Pair:
        """Prompts in one half of the letters, and the same with examples in both."""
        clean = replace(task, letters=half).sample(6, model.tokenizer, seed=seed, references=False)
        changed = (clean.example < clean.example.amax(1, keepdim=True)) & (torch.arange(clean.tokens.shape[1]) % 2 == 0)
        return ac.Pair(clean, replace(clean, inputs=torch.where(changed, other_half[clean.tokens], clean.tokens)))

    pairs = [pair(string.ascii_lowercase[:13], 1), pair(string.ascii_lowercase[13:], 2)]
    found = head_profile(model, pairs[0].clean, pairs)
    place = {kind: place for place, kind in model.kinds.items()}
    grid = {metric: found.to_array(metric) for metric in found.frame["metric"].unique()}
    best = {metric: model.kinds[divmod(int(values.argmax()), model.cfg.n_heads)] for metric, values in grid.items()}
    assert best["lookup_attention"] == best["direct_logit"] == "lookup"
    assert best["induction_attention"] == "induction"
    assert best["function_vector"] == "function_vector"
    vector = found.where(metric="function_vector").frame.set_index(["layer", "head"])
    assert vector.loc[place["function_vector"], "low"] > 2 * vector["value"].drop(place["function_vector"]).abs().max()
    assert grid["direct_logit"][place["function_vector"]] == pytest.approx(0, abs=1e-5)


def test_refusals(random_hf_model, char_tokenizer, prompts):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    refused("phrases of one letter leave nothing to induction", planted_competitors, TASK)
    refused("no tasks", function_vectors, model, [])
    pair = ac.Pair(prompts, TASK.corrupt(prompts, "labels"))
    two = [replace(pair, metric=metric) for metric in (None, "logit")]
    refused("metrics logit and prob: a mean over tasks takes one metric", function_vectors, model, two)
    refused("no targets of kind 'later'", direct_logit_attribution, model, prompts, kind="later")


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float64, torch.bfloat16]))
def test_direct_logits_sum_to_the_logit_in_every_dtype(random_hf_model, char_tokenizer, dtype):
    """A gold logit near zero is a small sum of large parts."""
    model = ac.load(copy.deepcopy(random_hf_model("llama")).to(dtype), tokenizer=char_tokenizer)
    one = ac.Seq2SeqTask(x_len=1, phrase_len=1, n_examples=2).sample(60, char_tokenizer, seed=0)
    for prompt in range(0, 60, 4):
        assert direct_logit_attribution(model, one[prompt]).provenance.engine
