"""Ablation beside loops over heads, tokens and targets."""

import inspect
from typing import Any, cast

import numpy as np
import pytest
import torch
from effects_by_hand import changes, z_of
from refusals import refused
from torch import Tensor

import align_circuits as ac
from align_circuits.heads.ablate import ablate_heads, ablation_baseline
from align_circuits.hooks.edits import default_groups, groups_of
from align_circuits.prompts.prompts import Prompts

TASK = ac.Seq2SeqTask(x_len=2, phrase_len=2, n_examples=3)


@pytest.fixture(scope="module")
def prompts(accepting) -> Prompts:
    return accepting(TASK, 3)


def group_of(prompts: Prompts, by: Any = "kind") -> dict[tuple[int, int], Any]:
    """Of each token its kind, and whether it belongs to the last example; or its position; or its name, if any."""
    kinds, example, last = prompts.token_kinds.tolist(), prompts.example.tolist(), int(prompts.example.max())
    places = [(i, pos) for i in range(len(prompts)) for pos in range(len(kinds[i]))]
    if by == "kind":
        return {(i, pos): (kinds[i][pos], example[i][pos] == last) for i, pos in places}
    if by == "position":
        return {(i, pos): pos for i, pos in places}
    return {(i, pos): [name for name in by if prompts.positions[name][i] == pos] or None for i, pos in places}


def looped(model: Any, prompts: Prompts, how: str, reference: Prompts, by: Any = "kind") -> dict[tuple, float]:
    """What ablating each head changes, by layer, head, kind and metric."""
    cached, groups, alike = z_of(model, reference), group_of(prompts, by), group_of(reference, by)
    answers = {(i, pos) for i, pos in reference.targets[["prompt", "target_pos"]].to_numpy().tolist()}
    if "END" in reference.positions:  # own texts, whose answer nothing is read from
        alike = {token: its for token, its in alike.items() if token not in answers}

    def ablate(z: Tensor, layer: int, head: int) -> Tensor:
        values = cached[layer][:, :, head]
        means = {
            str(group): torch.stack([values[token] for token, its in alike.items() if its == group]).mean(0)
            for group in alike.values()
        }
        for (i, pos), group in groups.items():
            if how == "zero":
                z[i, pos, head] = 0
            elif how == "resample":
                z[i, pos, head] = values[(i + 1) % len(prompts), pos]
            else:
                z[i, pos, head] = means.get(str(group), 0)  # 0 at the answer, which nothing reads
        return z

    return changes(model, prompts, "z", range(4), ablate)


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equals_a_loop(models, name, prompts, how, char_tokenizer):
    model, others = models[name], TASK.sample(3, char_tokenizer, seed=8)
    for reference in (None, others) if how == "mean" else (None,):
        table = ablate_heads(model, prompts, how, baseline=reference, options=ac.RunOptions(batch_size=2))
        expected = looped(model, prompts, how, reference or prompts)
        value = table.frame.set_index(["layer", "head", "kind", "metric"])["value"].to_dict()
        assert value == pytest.approx(expected, abs=1e-5) and len(value) == 2 * 4 * 3 * 2
        assert max(map(abs, value.values())) > 0.1
        assert {v for (*_, metric), v in expected.items() if metric == "accuracy"} != {0.0}


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("by", [None, "position", "kind", ("second",)])
def test_means_over_own_texts_equal_a_loop(models, char_tokenizer, by, engine):
    model, texts = models["llama"], ["abcd:", "bcda:", "acbd:", "dcba:", "abdc:", "cdab:", "badc:", "cadb:"]
    at = {"second": [1, 1, 1, 1, 1, 1, 1, 2 if by == "kind" else 1]}  # named there, they are not aligned
    prompts = Prompts.from_texts(texts, char_tokenizer, answer=[text[1] for text in texts], positions=at)
    assert default_groups(prompts) == ("kind" if by == "kind" else "position") and default_groups(prompts[:7]) == "kind"
    options = ac.RunOptions(engine=engine)
    table = ablate_heads(model, prompts, by=None if by == "kind" else by, options=options)
    expected = looped(model, prompts, "mean", prompts, by or "position")
    value = table.frame.set_index(["layer", "head", "kind", "metric"])["value"].to_dict()
    assert {key: value[key] for key in value if key[2] == "all"} == pytest.approx(
        {key: expected[key] for key in value if key[2] == "all"}, abs=1e-5
    )
    assert table.provenance.settings["by"] == (list(by) if isinstance(by, tuple) else by or "position")


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_texts_of_which_nothing_is_read_are_ablated_by_both_engines(models, char_tokenizer, how):
    """A target that the first token predicts: means of the tokens after it matter to no target."""
    prompts = Prompts.from_texts(["ab:cd\n", "ba:dc\n", "cc:ab\n"], char_tokenizer)
    first = prompts.select_targets(lambda targets: targets.offset == targets.offset.min())
    one, other = (
        ablate_heads(models["llama"], first, how, options=ac.RunOptions(engine=engine)).frame["value"].to_numpy()
        for engine in ("fast", "reference")
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_intervals_and_provenance(llama, prompts):
    table = ablate_heads(llama, prompts, heads=[(1, 2), (0, 1)])
    frame: Any = table.frame
    assert frame[["low", "value", "high"]].notna().all(axis=None)
    assert ((frame["low"] <= frame["value"]) & (frame["value"] <= frame["high"])).all()
    assert (frame["low"] < frame["high"])[frame["metric"] == "log_prob"].all()
    assert frame.set_index("kind")["n"].to_dict() == {"all": 12, "first": 6, "later": 6}
    assert set(zip(frame["layer"], frame["head"], strict=True)) == {(1, 2), (0, 1)}
    provenance = table.provenance
    assert (provenance.verb, provenance.engine) == ("ablate_heads", "replay")
    assert provenance.settings == {
        **{"how": "mean", "by": "kind", "baseline": prompts.digest, "metrics": ["log_prob", "accuracy"]}
    }
    assert provenance.data["digest"] == prompts.digest
    assert ac.ablate_heads(llama, prompts, heads=[]).frame.empty


def test_padding_changes_nothing(llama):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(64, (n,), generator=generator).tolist() for n in (9, 5, 7)]
    padded, value = Prompts.from_tokens(ids), {}
    frame: Any = ablate_heads(llama, padded, "zero", heads=[(0, 1)]).frame
    assert frame["kind"].unique().tolist() == ["all", "later"]
    for index, row in enumerate(ids):
        one = ablate_heads(llama, Prompts.from_tokens([row]), "zero", heads=[(0, 1)])
        value[index] = one.frame.set_index(["kind", "metric"])["value"]["all", "log_prob"]
    lengths = [len(row) - 1 for row in ids]
    expected = np.average(list(value.values()), weights=lengths)
    assert frame.set_index(["kind", "metric"])["value"]["all", "log_prob"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_batch_that_fails_is_averaged_once(random_hf_model, char_tokenizer, prompts, engine):
    model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
    expected = ablation_baseline(model, prompts, options=ac.RunOptions(engine=engine)).means

    def small_memory(_module, args):
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("out of memory, after the layers were handed over")

    model.original_model.lm_head.register_forward_pre_hook(small_memory)
    found = ablation_baseline(model, prompts, options=ac.RunOptions(engine=engine)).means
    assert found.keys() == expected.keys() == {"blocks.0.attn.hook_z", "blocks.1.attn.hook_z"}
    for name, mean in found.items():
        torch.testing.assert_close(mean, expected[name], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_rotated_keys_have_means_too(llama, prompts):
    (name, means), *_ = ablation_baseline(llama, prompts, site="rot_k", layers=[1]).means.items()
    _, cache = llama.run_with_cache(prompts.tokens)
    kind = groups_of(prompts, "kind")
    for each in kind[prompts.mask & (prompts.example < prompts.example.amax())].unique():
        expected = cache[name][(kind == each) & prompts.mask].mean(0)
        torch.testing.assert_close(means[each], expected, atol=1e-5, rtol=0)


def test_refusals(llama, prompts, char_tokenizer):
    padded = Prompts.from_tokens([[1, 2, 3], [4, 5]])
    how, site = cast(Any, ("median", "attn"))
    refer = inspect.unwrap(ablation_baseline)  # without the checks of annotations
    for run, message in [
        (lambda: ablate_heads(llama, prompts, heads=[(0, 4)]), "no head L0H4"),
        (lambda: refer(llama, prompts, how), "how='median': choose 'mean', 'resample' or 'zero'"),
        (lambda: ablate_heads(llama, prompts[:1], "resample"), "1 prompts of .* resampling takes at least two"),
        (lambda: ablate_heads(llama, padded, "resample"), "2 prompts of 2 to 3 tokens: .* of one length"),
        (lambda: ablate_heads(llama, prompts, "resample", baseline=prompts[:2]), "must match, prompt by prompt"),
        (lambda: ablation_baseline(llama, prompts, site="pattern"), "a pattern has no mean over tokens of a kind"),
        (lambda: refer(llama, prompts, site=site), "site='attn': choose one of z, q"),
        (
            lambda: ablate_heads(llama, prompts, baseline=Prompts.from_tokens([[1, 2, 3], [4, 5, 6]])),
            "tokens of a kind that the reference prompts lack",
        ),
        (
            lambda: ablate_heads(llama, prompts, baseline=Prompts.from_tokens([[1, 2, 3]] * 2), by="position"),
            "tokens at a position that the reference prompts lack",
        ),
        (lambda: ablate_heads(llama, prompts[:1], by="position"), "a position occurs in a single one of the 1 prompts"),
        (lambda: ablation_baseline(llama, padded, by="position"), "a position occurs in a single one of the 2 prompts"),
        (lambda: ablate_heads(llama, prompts, "resample", by="kind"), "groups of tokens are for 'mean' alone"),
        (lambda: ablate_heads(llama, prompts, "zero", baseline=prompts), "zeros are taken from no prompts"),
    ]:
        refused(message, run)
    nothing = ac.Seq2SeqTask(x_len=2, phrase_len=2, n_examples=3).sample(2, char_tokenizer)
    object.__setattr__(nothing, "targets", nothing.targets[:0])
    refused("no targets at all", ablate_heads, llama, nothing)


@pytest.mark.parametrize("how", ["mean", "resample"])
def test_prompts_selected_from_longer_ones_are_ablated_as_alone(llama, char_tokenizer, how):
    texts = [f"{first}{second}:" for first, second in zip("abcdefghij", "jihgfedcba", strict=True)]

    def made(texts: list[str]) -> Prompts:
        return ac.Prompts.from_texts(texts, char_tokenizer, answer=[text[0] for text in texts], positions={"A": 1})

    alone, selected = made(texts), made([*texts, "abcdefgh:"])[: len(texts)]
    assert not selected.mask.all() and alone.mask.all()
    one, other = (ablate_heads(llama, prompts, how) for prompts in (alone, selected))
    np.testing.assert_allclose(one.frame["value"], other.frame["value"], atol=1e-5)
    assert one.provenance.settings.get("by") == other.provenance.settings.get("by")
