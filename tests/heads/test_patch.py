"""Patching beside loops over heads, and beside TransformerLens's own."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from effects_by_hand import changes
from refusals import refused
from torch import Tensor
from transformer_lens import patching

import align_circuits as ac
from align_circuits.heads.patch import patch_heads, position_groups
from align_circuits.hooks.head_names import heads_of
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, name_of
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.run.pairs import check_pair

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=2)
SITES: Any = (*HEAD_SITES, *(site for site in LAYER_SITES if site != "resid_mid"))
"""On a bridge a hook at `hook_resid_mid` changes what the MLP reads alone (tests/heads/test_site_patching.py)."""


@pytest.fixture(scope="module")
def clean(accepting) -> Prompts:
    return accepting(TASK, 4)


@pytest.fixture(scope="module")
def corrupted(clean) -> Prompts:
    return TASK.corrupt(clean, "query", seed=1)


def looped(model: Any, run: Prompts, source: Prompts, site: str, positions: Tensor) -> dict[tuple, float]:
    """What patching each head, or each layer, changes: by layer, head, kind and metric."""
    with torch.no_grad():
        _, cache = model.run_with_cache(source.tokens)
    shared = 2 if site in ("k", "v") and model.cfg.n_key_value_heads == 2 else 1

    def patch(x: Tensor, layer: int, head: Any) -> Tensor:
        here = (positions,) if site in LAYER_SITES else (positions, head // shared)
        cached = cache[name_of(site, layer)]  # pyright: ignore[reportArgumentType]
        new, old = (part.transpose(1, 2) if site == "pattern" else part for part in (x, cached))
        new[here] = old[here]
        return x

    return changes(model, run, site, [None] if site in LAYER_SITES else range(4), patch)


def values_of(table: ac.Table, **keys: Any) -> dict[tuple, float]:
    frame: Any = table.frame
    for column, value in keys.items():
        frame = frame[frame[column] == value]
    assert (frame["level"] == np.where(frame["head"].isna(), "layer", "head")).all()
    return dict(zip(keys_of(frame, ["layer", "head", "kind", "metric"]), frame["value"], strict=True))


def keys_of(frame: Any, columns: list[str]) -> list[tuple]:
    """Each row's keys, None where one is missing."""
    return [tuple(None if pd.isna(key) else key for key in row) for row in frame[columns].itertuples(index=False)]


@pytest.mark.parametrize(
    ("name", "direction"), [("llama", "denoise"), pytest.param("gpt2", "noise", marks=pytest.mark.slow)]
)
def test_equals_a_loop_at_every_site(models, name, direction, clean, corrupted):
    model, everywhere = models[name], torch.ones_like(clean.mask)
    table = patch_heads(
        model, ac.Pair(clean, corrupted, direction=direction), sites=SITES, options=ac.RunOptions(batch_size=3)
    )
    run, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    accuracies = set()
    for site in SITES:
        found = values_of(table, site=site, positions="all")
        assert found == pytest.approx(looped(model, run, source, site, everywhere), abs=1e-5)
        assert len(found) == (12 if site in LAYER_SITES else 48)
        assert max(map(abs, found.values())) > 1e-2
        accuracies |= {value for (*_, metric), value in found.items() if metric == "accuracy"}
    assert len(accuracies) > 2
    assert table.provenance.settings["direction"] == direction
    assert len(table.frame) == 5 * 48 + 5 * 12


def test_equals_transformer_lens(models, clean, corrupted):
    """All positions, then single ones."""
    model, targets = models["llama"], (clean.column("prompt"), clean.column("query_pos"))

    def metric(logits: Tensor) -> Tensor:
        return logits[targets].log_softmax(-1).gather(1, clean.column("token")[:, None]).mean()

    with torch.no_grad():
        _, cache = model.run_with_cache(clean.tokens)
        before = metric(model(corrupted.tokens))
        theirs = {
            site: getattr(patching, f"get_act_patch_attn_head_{name}_all_pos")(model, corrupted.tokens, cache, metric)
            for site, name in {"z": "out", "q": "q", "k": "k", "v": "v", "pattern": "pattern"}.items()
        }
    mine = patch_heads(model, ac.Pair(clean, corrupted), sites=HEAD_SITES)  # pyright: ignore[reportArgumentType]
    for site, expected in theirs.items():
        found = values_of(mine, site=site, kind="all", metric="log_prob")
        for (layer, head, *_), value in found.items():
            column = head // 2 if site in ("k", "v") else head
            assert value == pytest.approx(float(expected[layer, column] - before), abs=1e-5)
    assert theirs["k"].shape == (2, 2), "two key heads"

    some = [14, int(targets[1].max()) - 1, int(targets[1].max())]
    masks = {str(pos): (torch.arange(clean.mask.shape[1]) == pos).expand_as(clean.mask) for pos in some}
    mine = patch_heads(model, ac.Pair(clean, corrupted), sites=["z", "resid_pre"], positions=masks)
    heads = pd.DataFrame([(layer, pos, head) for layer in range(2) for pos in some for head in range(4)])
    layers = pd.DataFrame([(layer, pos) for layer in range(2) for pos in some])
    options: dict[str, Any] = {"index_axis_names": None}
    with torch.no_grad():
        by_head = patching.get_act_patch_attn_head_out_by_pos(
            model, corrupted.tokens, cache, metric, index_df=heads, **options
        )
        by_layer = patching.get_act_patch_resid_pre(model, corrupted.tokens, cache, metric, index_df=layers, **options)
    expected = {(layer, head, str(pos)): by_head[i] - before for i, (layer, pos, head) in enumerate(heads.to_numpy())}
    expected |= {(layer, None, str(pos)): by_layer[i] - before for i, (layer, pos) in enumerate(layers.to_numpy())}
    frame = mine.frame[(mine.frame["kind"] == "all") & (mine.frame["metric"] == "log_prob")]
    found = dict(zip(keys_of(frame, ["layer", "head", "positions"]), frame["value"], strict=True))
    assert found == pytest.approx({key: float(value) for key, value in expected.items()}, abs=1e-5)
    assert max(map(abs, found.values())) > 1e-2


@pytest.mark.parametrize("site", ["z", "pattern"])
def test_position_groups_equal_a_loop(models, clean, corrupted, site):
    table = patch_heads(models["llama"], ac.Pair(clean, corrupted, direction="noise"), sites=[site], positions="groups")
    assert table.frame["positions"].unique().tolist() == ["examples", "test input", "test output"]
    for name, mask in position_groups(clean).items():
        expected = looped(models["llama"], clean, corrupted, site, mask)
        assert values_of(table, positions=name) == pytest.approx(expected, abs=1e-5)


def test_position_groups_partition_the_tokens(clean, char_tokenizer):
    for prompts in (clean, ac.Seq2SeqTask(2, 2, 3, style="pre-aligned").sample(2, char_tokenizer)):
        groups = position_groups(prompts)
        assert torch.equal(sum(mask.int() for mask in groups.values()), prompts.mask.int())  # pyright: ignore[reportArgumentType]
        last = prompts.example == prompts.example.max()
        assert torch.equal(groups["test input"], last & (prompts.token_kinds == TokenKind.INPUT))
        assert groups["test output"][prompts.column("prompt"), prompts.column("query_pos")].all()
        assert not (groups["examples"] & last).any()


def test_masks_of_ones_own(models, clean, corrupted):
    model, last = models["llama"], torch.arange(clean.mask.shape[1]) == clean.mask.shape[1] - 2
    one = last.expand_as(clean.mask)
    pair: dict[str, Any] = {"pair": ac.Pair(clean, corrupted), "heads": [(0, 1)]}
    table = patch_heads(model, **pair, positions={"all": one, "one": one, "none": one & ~one})
    assert values_of(table, positions="all") == pytest.approx(values_of(table, positions="one"), abs=1e-5)
    assert values_of(table, positions="one") != values_of(patch_heads(model, **pair))
    assert set(values_of(table, positions="none").values()) == {0.0}


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("how", ["END", "first", "none", "pattern", "reference"])
def test_baselines_are_those_of_evaluate_whatever_is_patched(models, char_tokenizer, how, direction):
    """Patches that begin before the prompts differ, behind that, and nowhere."""
    texts = ["kABmnopA", "xkCDmnopC", "kEFmnopE"], ["kBAmnopA", "xkDCmnopC", "kFEmnopE"]
    halves = Prompts.from_pairs(*texts, char_tokenizer, answer=["B", "D", "F"], positions={"first": 2})
    options = ac.RunOptions("reference" if how == "reference" else "auto")
    positions = (
        {"none": torch.zeros_like(halves[0].mask)} if how == "none" else [how] if how in ("END", "first") else None
    )
    sites: Any = ["pattern"] if how == "pattern" else ["z"]
    pair = ac.Pair(*halves, direction=direction, metric="log_prob")
    table = patch_heads(models["llama"], pair, sites=sites, heads=[(1, 0)], positions=positions, options=options)
    assert table.baselines is not None
    for run, prompts in zip(("clean", "corrupted"), halves, strict=True):
        expected: Any = ac.evaluate(models["llama"], prompts, metrics=["log_prob"]).where(kind="all", offset=None).frame
        found: Any = table.baselines.where(run=run, kind="all").frame
        assert found["value"].item() == pytest.approx(expected["value"].item(), abs=1e-5)
        assert (found["low"].item(), found["high"].item()) == pytest.approx(
            tuple(expected[["low", "high"]].iloc[0]), abs=1e-4
        )


def test_heads_that_share_keys_have_equal_rows(models, clean, corrupted):
    table = patch_heads(models["llama"], ac.Pair(clean, corrupted), sites=["k", "v"], heads=[(1, 0), (1, 3)])
    for site in ("k", "v"):
        found = values_of(table, site=site)
        assert {key[:2] for key in found} == {(1, head) for head in range(4)}
        for first, second in ((0, 1), (2, 3)):
            assert all(found[1, first, *key[2:]] == found[key] for key in found if key[1] == second)
        assert found[1, 0, "all", "log_prob"] != found[1, 2, "all", "log_prob"]


def test_intervals_and_engines(models, clean, corrupted):
    table = patch_heads(models["llama"], ac.Pair(clean, corrupted), heads=[(1, 0), (0, 3)])
    frame: Any = table.frame
    assert np.isfinite(frame[["low", "value", "high"]]).all(axis=None)
    assert ((frame["low"] <= frame["value"]) & (frame["value"] <= frame["high"])).all()
    assert (frame["low"] < frame["high"])[frame["metric"] == "log_prob"].all()
    assert frame.set_index("kind")["n"].to_dict() == {"all": 24, "first": 12, "later": 12}
    assert table.provenance.engine == "replay" and table.provenance.data["digest"] == clean.digest
    assert table.provenance.settings["corrupted_digest"] == corrupted.digest != clean.digest
    for options in (ac.RunOptions("reference"), ac.RunOptions(batch_size=1)):
        other = patch_heads(models["llama"], ac.Pair(clean, corrupted), heads=[(1, 0), (0, 3)], options=options)
        pd.testing.assert_frame_equal(other.frame, frame, atol=1e-5)
    pair: dict[str, Any] = {"pair": ac.Pair(clean, corrupted), "heads": [(0, 0)]}
    ran = {
        (name, site): patch_heads(models[name], **pair, sites=[site]).provenance.engine
        for name in ("llama", "gpt2")
        for site in ("z", "q", "pattern")
    }
    assert ran == {
        ("llama", "z"): "replay",
        ("llama", "q"): "replay",
        ("llama", "pattern"): "fast",
        ("gpt2", "z"): "replay",
        ("gpt2", "q"): "reference",
        ("gpt2", "pattern"): "fast",
    }


@pytest.mark.parametrize(
    ("metric", "kind"), [("log_prob", "first"), ("accuracy", None), (None, "later"), ("prob", "all")]
)
def test_a_pair_may_name_a_metric_and_a_kind(models, clean, corrupted, metric, kind):
    heads = [(1, 0), (0, 3)]
    both = values_of(patch_heads(models["llama"], ac.Pair(clean, corrupted), heads=heads))
    found = values_of(patch_heads(models["llama"], ac.Pair(clean, corrupted, metric, kind), heads=heads))
    metrics = {"log_prob", "accuracy"} if metric is None else {metric}
    assert {key[2:] for key in found} == {
        (which, name) for which in ([kind] if kind else ["all", "first", "later"]) for name in metrics
    }
    for key, value in found.items():
        assert key not in both or value == pytest.approx(both[key], abs=1e-6)
    assert metric != "prob" or max(map(abs, found.values())) > 1e-4


def test_pairs_that_do_not_match_are_refused(clean, corrupted, char_tokenizer):
    longer = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=3).sample(4, char_tokenizer)
    full, padded, other = (
        Prompts.from_tokens(ids) for ids in ([[1, 2, 3]] * 2, [[1, 2, 3], [4, 5]], [[4, 5], [1, 2, 3]])
    )
    for one, two, message in [
        (clean, corrupted[:3], r"clean prompts \(4, \d+\) and corrupted ones \(3, \d+\) do not match"),
        (clean, longer, "do not match token by token"),
        (clean, TASK.sample(4, char_tokenizer, seed=5), "have different targets"),
        *((one, two, "do not match token by token") for one, two in [(padded, other), (full, padded), (padded, full)]),
    ]:
        for refuse in (ac.Pair, check_pair):
            refused(message, refuse, one, two)
    check_pair(padded, padded)


def test_refusals(llama, clean, corrupted):
    pair, masks = ac.Pair(clean, corrupted), r"positions\['some'\] is torch.bool of "
    cases: Any = [
        *(({"sites": [site], "heads": [(0, 4), (2, 0)]}, "no head L0H4") for site in ("z", "k", "pattern", "mlp_out")),
        ({"positions": {"some": clean.mask[:, :5]}}, masks + r"\(4, 5\): give a boolean mask"),
        ({"positions": {"some": clean.mask.repeat(2, 1)}}, masks + r"\(8, "),
        ({"positions": {}}, "positions={}: give masks by name, 'groups', or nothing"),
    ]
    for arguments, message in cases:
        refused(message, patch_heads, llama, pair, **arguments)


def test_heads_may_be_a_tensor_and_named_twice(llama, clean, corrupted):
    pair = ac.Pair(clean, corrupted)
    twice = inspect.unwrap(heads_of)(llama.cfg, torch.tensor([[1, 2], [0, 3], [1, 2]]))
    assert twice == [(1, 2), (0, 3)]
    tables = [patch_heads(llama, pair, heads=heads) for heads in (twice, [*twice, *twice])]
    pd.testing.assert_frame_equal(tables[0].frame, tables[1].frame)


def test_a_pair_of_equal_prompts_alone_in_a_batch_has_no_effect(models):
    """Where no token of a batch differs nothing is run anew, and the baselines are those of one run."""
    clean = ac.Prompts.from_tokens([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    inputs = clean.inputs.clone()
    inputs[1, 2] = 20
    pair = ac.Pair(clean, replace(clean, inputs=inputs, relations={}))
    for engine in ("fast", "reference"):
        table = patch_heads(models["llama"], pair, options=ac.RunOptions(engine=engine, batch_size=1))
        assert table.values is not None and table.baselines is not None and table.baselines.values is not None
        assert not table.values[:, 0].any() and table.values[:, 1].any()
        gap = table.baselines.values[(table.baselines.frame["run"] == "clean - corrupted").to_numpy()]
        assert not gap[:, 0].any() and gap[:, 1].any()
