"""Attribution beside finite differences of runs that hooks freeze by hand, and beside exact patches."""

import copy
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from effects_by_hand import by_edge
from frozen import Twin, of_lengths
from refusals import refused

import align_circuits as ac
from align_circuits.circuits.edge_attribution import attribute_edges
from align_circuits.circuits.edge_patching import patch_edges, patch_paths
from align_circuits.circuits.head_attribution import attribute_heads
from align_circuits.heads.patch import patch_heads

STEP = 1e-4
SITES: Any = {
    "z": "attn.hook_z",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}


@pytest.fixture
def model(random_hf_model, exact_arithmetic):  # noqa: ARG001
    return ac.load(random_hf_model("llama", seed=2).double())


@pytest.fixture
def pair():
    return {"clean": of_lengths((8, 8, 8), 0), "corrupted": of_lengths((8, 8, 8), 1)}


@pytest.fixture
def noise(pair) -> ac.Pair:
    return ac.Pair(**pair, direction="noise")


def slope(effect: Any) -> float:
    """The derivative at 0 of an effect by the share of the way that an activation is moved, to the fourth order."""
    near, far = (effect(step) - effect(-step) for step in (STEP, 2 * STEP))
    return (8 * near - far) / (12 * STEP)


def by_head(table: ac.Table) -> dict[tuple[str, int, int], float]:
    frame: Any = table.frame
    return frame.set_index(["site", "layer", "head"])["value"].to_dict()


def test_heads_equal_finite_differences(model, pair, noise):
    found = by_head(attribute_heads(model, noise, sites=list(SITES)))
    twin = Twin(model, *pair.values())
    for (site, layer, head), value in found.items():
        column = head // 2 if site in ("k", "v") else None if pd.isna(head) else head
        name = f"blocks.{layer}.{SITES[site]}"
        assert value == pytest.approx(slope(lambda share: twin.patched(name, share, column)), abs=1e-6)  # noqa: B023
    assert len(found) == 2 * (4 * 4 + 2)
    assert len({round(abs(value), 5) for value in found.values()}) > 20


def test_outputs_have_the_scores_of_what_they_are_made_of(model, noise):
    """Attention's output is linear in z, and the MLP's in its neurons."""
    sites: Any = ["z", "attn_out", "mlp_post", "mlp_out"]
    frame: Any = attribute_heads(model, noise, sites=sites).frame
    score: Any = frame.groupby(["site", "layer"])["value"].sum()
    for one, other in (("z", "attn_out"), ("mlp_post", "mlp_out")):
        assert score[one].to_numpy() == pytest.approx(score[other].to_numpy(), abs=1e-6)
    assert score.abs().min() > 1e-4


def test_graddrop_equals_finite_differences_with_a_layer_held_still(model):
    pair: Any = {"clean": of_lengths((9,), 0), "corrupted": of_lengths((9,), 1)}
    noise = ac.Pair(**pair, direction="noise")
    found = by_head(attribute_heads(model, noise, sites=["z", "v", "mlp_out", "resid_post"], grad_drop=True))
    twin = Twin(model, *pair.values())
    for (site, layer, head), value in found.items():
        name, column = f"blocks.{layer}.{SITES[site]}", {"v": head // 2, "z": head}.get(site)
        expected = 0.0
        for dropped in range(2):
            still = [f"blocks.{dropped}.{SITES[what]}" for what in ("z", "mlp_out")]
            if name not in still:
                expected += abs(slope(lambda share: twin.patched(name, share, column, still)))  # noqa: B023
        layers = 2 if site == "resid_post" else 1  # a head's own layer is left out
        assert value == pytest.approx(expected / layers, abs=1e-6)


@pytest.mark.parametrize("site", ["q", "k"])
def test_the_qk_fix_multiplies_the_change_of_attention_by_its_gradient(model, pair, noise, site):
    found = by_head(attribute_heads(model, noise, sites=[site, "z"], method="atp_star"))
    plain = by_head(attribute_heads(model, noise, sites=[site, "z"]))
    twin = Twin(model, *pair.values())
    for (at, layer, head), value in found.items():
        if at == "z":
            assert value == pytest.approx(plain[at, layer, head])
            continue
        heads = [head] if site == "q" else [head // 2 * 2, head // 2 * 2 + 1]
        captured = {f"blocks.{layer}.attn.hook_pattern": torch.empty(0)}
        edited = f"blocks.{layer}.attn.hook_{site}"
        twin.outcome({edited: lambda _, edited=edited: twin.other[edited]}, captured)
        ((name, pattern),) = captured.items()
        before = twin.base[name]
        change = torch.zeros_like(before)
        change[:, heads] = (pattern - before)[:, heads]

        def effect(share: float) -> float:
            return float((twin.outcome({name: lambda _: before + share * change}) - twin.before).mean())  # noqa: B023

        assert value == pytest.approx(slope(effect), abs=1e-6)
        assert value != pytest.approx(plain[at, layer, head], abs=1e-4)


def test_rotated_queries_and_keys_have_a_row_for_each_head(model, pair, noise):
    """By gradients that are taken by hand, at `rot_k` those of the key head that two heads share."""
    found = by_head(attribute_heads(model, noise, sites=["rot_q", "rot_k"]))
    assert len(found) == 2 * 2 * 4
    names = [f"blocks.{layer}.attn.hook_{site}" for site in ("rot_q", "rot_k") for layer in range(2)]
    _, other = model.run_with_cache(pair["corrupted"].tokens, names_filter=names)
    kept = {}

    def keep(activation, hook):
        kept[hook.name] = activation.requires_grad_()
        return kept[hook.name]

    with torch.enable_grad():
        logits = model.run_with_hooks(pair["clean"].tokens, fwd_hooks=[(name, keep) for name in names])
        outcome = logits[:, 7].log_softmax(-1)[:, 7].mean()
        gradients = torch.autograd.grad(outcome, [kept[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        expected = ((other[name] - kept[name]) * gradient).sum((0, 1, 3))
        layer, site = int(name.split(".")[1]), name.split("hook_")[1]
        mine = [found[site, layer, head] for head in range(4)]
        assert mine == pytest.approx(expected.repeat_interleave(4 // len(expected)).tolist(), abs=1e-9)


def test_where_hooks_are_silent_under_the_fast_engine_the_reference_runs(random_hf_model, noise):
    gpt2 = ac.load(random_hf_model("gpt2", seed=2))
    found = attribute_heads(gpt2, noise)
    assert found.provenance.engine == "reference"
    expected = attribute_heads(gpt2, noise, options=ac.RunOptions(engine="reference"))
    np.testing.assert_array_equal(found.frame["value"], expected.frame["value"])
    fast = ac.RunOptions(engine="fast")
    refused("hook_z does not fire under it; leave the engine at 'auto'", attribute_heads, gpt2, noise, options=fast)


def test_a_sure_model_in_bfloat16_has_gradients(random_hf_model, pair, noise):
    """Near a probability of 1 a softmax in bfloat16 rounds what is left to nothing."""
    sure = copy.deepcopy(random_hf_model("llama", seed=2))
    with torch.no_grad():
        hidden = sure.model(pair["clean"].tokens).last_hidden_state[:, 7].mean(0)
        sure.lm_head.weight[7] += 16 * hidden / hidden.square().sum()
        assert (sure(pair["clean"].tokens).logits[:, 7].softmax(-1)[:, 7] > 0.98).all()
    narrow = copy.deepcopy(sure).bfloat16()
    wide, rounded = (attribute_heads(ac.load(some), noise).frame["value"] for some in (sure, narrow))
    assert np.abs(wide - rounded).max() < 0.2 * np.abs(wide).max()


def test_nothing_passes_through_an_mlp_whose_output_is_replaced(model, pair, noise):
    """The mean over runs in which one output is moved, by a displacement of what the MLP reads and autograd."""
    steps = 3
    found = by_edge(attribute_edges(model, noise, method="eap_ig_all_activations", steps=steps))
    twin = Twin(model, *pair.values())
    embedded = "blocks.0.hook_resid_pre"
    names = [embedded, *(f"blocks.{layer}.{SITES[site]}" for layer in range(2) for site in ("z", "mlp_out"))]
    for layer in range(2):
        total = 0.0
        for name in names:
            for step in range(1, steps + 1):
                between = torch.lerp(twin.other[name], twin.base[name], step / steps)
                moved = torch.zeros((), dtype=torch.float64, requires_grad=True)
                handle = model.blocks[layer].ln2.original_component.register_forward_pre_hook(
                    lambda _, read: (read[0] + moved * (twin.other[embedded] - twin.base[embedded]),)  # noqa: B023
                )
                with torch.enable_grad():
                    hooks = [(name, lambda *_, **__: between)]  # noqa: B023
                    logits = model.run_with_hooks(pair["clean"].tokens, fwd_hooks=hooks)
                    outcome = logits[:, 7].log_softmax(-1)[:, 7].mean()
                    (gradient,) = torch.autograd.grad(outcome, moved, allow_unused=True)
                handle.remove()
                total += 0.0 if gradient is None else float(gradient) / steps / len(names)
        assert found["input", f"M{layer}"] == pytest.approx(total, abs=1e-9)


def test_edges_equal_finite_differences(model, pair, noise):
    found = by_edge(attribute_edges(model, noise, method="eap", options=ac.RunOptions(batch_size=2)))
    fixed = by_edge(attribute_edges(model, noise, method="atp_star"))
    twin = Twin(model, *pair.values())
    for edge, value in list(found.items())[::7]:
        effect = slope(lambda share: twin.effect(*edge, freeze_mlps=True, share=share))  # noqa: B023
        assert value == pytest.approx(effect, abs=1e-6)
    for edge, value in fixed.items():
        assert (value == pytest.approx(found[edge], abs=1e-9)) != edge[1].endswith((".q", ".k"))


@pytest.mark.parametrize(("attribute", "method"), [(attribute_heads, "ig_inputs"), (attribute_edges, "eap_ig_inputs")])
def test_a_batch_that_runs_out_of_memory_is_halved(model, noise, attribute: Any, method):
    """It runs out in the second of two passes with gradients, after the first has added to the scores."""
    sizes, enough = [], 10**6

    def small_memory(_: Any, args: Any) -> None:
        if args[0].requires_grad:
            sizes.append(len(args[0]))
            if len(sizes) == enough:
                raise torch.OutOfMemoryError("out of memory")

    expected = attribute(model, noise, method=method, steps=2).frame["value"]
    model.blocks[1].mlp.original_component.register_forward_pre_hook(small_memory)
    attribute(model, noise, method=method, steps=2)
    enough = len(sizes)
    assert sizes == enough * [3]
    sizes.clear()
    found = attribute(model, noise, method=method, steps=2).frame["value"]
    assert sizes == enough * [3] + 3 * enough * [1]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    sizes.clear()
    with pytest.raises(torch.OutOfMemoryError):
        attribute(model, noise, method=method, steps=2, options=ac.RunOptions(batch_size=3))


def test_the_qk_fix_of_an_edge(model, noise):
    """An edge that brings all that another run says to a query changes attention as patching the query does."""
    edges = by_edge(attribute_edges(model, noise, method="atp_star"))
    heads = by_head(attribute_heads(model, noise, sites=["q", "k"], method="atp_star"))
    for head in range(4):  # of layer 0, which reads the embedding alone
        assert edges["input", f"L0H{head}.q"] == pytest.approx(heads["q", 0, head], abs=1e-9)
        assert edges["input", f"L0KV{head // 2}.k"] == pytest.approx(heads["k", 0, head], abs=1e-9)


def test_integrated_gradients_are_means_over_runs_between(model, pair, noise):
    clean, corrupted = pair.values()
    steps = 3
    heads = by_head(attribute_heads(model, noise, method="ig_inputs", steps=steps))
    inputs, activations, every = (
        by_edge(attribute_edges(model, noise, method=method, steps=steps))
        for method in ("eap_ig_inputs", "eap_ig_activations", "eap_ig_all_activations")
    )
    whole = Twin(model, clean, corrupted)
    name, first = "blocks.0.attn.hook_z", "blocks.0.hook_resid_pre"
    change = {head: whole.other[name][:, :, head] - whole.base[name][:, :, head] for head in range(4)}
    senders = [first, *(f"blocks.{layer}.{site}" for layer in (0, 1) for site in ("attn.hook_z", "hook_mlp_out"))]
    of_head, of_input, of_activation, of_every = 0.0, 0.0, 0.0, 0.0
    for step in range(1, steps + 1):
        between = Twin(model, clean, corrupted, start=whole.moved(first, 1 - step / steps))

        def move(share: float) -> float:
            new = between.base[name].clone()  # noqa: B023
            new[:, :, 2] += share * change[2]
            return float((between.outcome({name: lambda _: new}) - between.before).mean())  # noqa: B023

        def last(share: float) -> float:
            """Head 2 to the logits, beside a run whose last residual stream is as in this one."""
            wide = torch.zeros_like(whole.base[name])
            wide[:, :, 2] = share * change[2]
            added = torch.einsum("nphe,hed->npd", wide, model.blocks[0].attn.W_O.detach())
            return float((between.outcome({"blocks.1.hook_resid_post": lambda x: x + added}) - between.before).mean())  # noqa: B023

        of_head += slope(move) / steps
        of_input += slope(last) / steps
        for sender in senders:
            halfway = whole.moved(sender, 1 - step / steps)
            base = whole.outcome({sender: lambda _: halfway})  # noqa: B023

            def after(share: float) -> float:
                wide = torch.zeros_like(whole.base[name])
                wide[:, :, 2] = share * change[2]
                added = torch.einsum("nphe,hed->npd", wide, model.blocks[0].attn.W_O.detach())
                frozen = {sender: lambda _: halfway, "blocks.1.hook_resid_post": lambda x: x + added}  # noqa: B023
                return float((whole.outcome(frozen) - base).mean())  # noqa: B023

            found = slope(after) / steps
            of_activation += found if sender == name else 0.0
            of_every += found / len(senders)
    assert heads["z", 0, 2] == pytest.approx(of_head, abs=1e-6)
    assert inputs["L0H2", "logits"] == pytest.approx(of_input, abs=1e-6)
    assert activations["L0H2", "logits"] == pytest.approx(of_activation, abs=1e-6)
    assert every["L0H2", "logits"] == pytest.approx(of_every, abs=1e-6)
    assert len({round(value, 6) for value in (of_input, of_activation, of_every)}) == 3


def test_on_padded_prompts_with_both_engines(random_hf_model):
    """One prompt at a time needs no padding."""
    model = ac.load(random_hf_model("llama", seed=2))
    clean, corrupted = of_lengths((9, 6, 11), 0), of_lengths((9, 6, 11), 1)
    padded = attribute_edges(model, ac.Pair(clean, corrupted, direction="noise"), method="eap")
    assert padded.provenance.engine == "fast"
    reference = attribute_edges(
        model, ac.Pair(clean, corrupted, direction="noise"), method="eap", options=ac.RunOptions(engine="reference")
    )
    np.testing.assert_allclose(reference.frame["value"], padded.frame["value"], atol=1e-5)
    alone, together = (
        attribute_edges(
            model, ac.Pair(clean, corrupted), method="atp_star", options=ac.RunOptions(batch_size=size)
        ).frame["value"]
        for size in (1, 3)
    )
    np.testing.assert_allclose(alone, together, atol=1e-5, err_msg="alone, a prompt runs without its padding")
    assert padded.values is not None
    for prompt, length in enumerate((9, 6, 11)):
        cut = [ac.Prompts.from_tokens(some.tokens[[prompt], -length - 1 :].tolist()) for some in (clean, corrupted)]
        pair = [some._take(torch.tensor([0])) for some in cut]
        pair = [replace(some, targets=some.targets.tail(1).reset_index(drop=True), relations={}) for some in cut]
        cropped = attribute_edges(model, ac.Pair(pair[0], pair[1], direction="noise"), method="eap")
        np.testing.assert_allclose(cropped.frame["value"], padded.values[:, prompt], atol=1e-5)


def test_tables_of_pairs_name_the_direction(model, pair):
    kept = {}
    for direction in ("noise", "denoise"):
        asked = ac.Pair(**pair, direction=direction)
        kept[direction] = [
            patch_heads(model, asked),
            attribute_heads(model, asked),
            attribute_edges(model, asked, method="eap"),
            patch_edges(model, asked, edges=[("L0H1", "logits")]),
            patch_paths(model, asked, senders=["L0H1"]),
        ]
        for table in kept[direction]:
            assert table.frame["direction"].eq(direction).all() and "direction" in table.keys
            assert len(table.where(direction=direction)) == len(table)
    for one, other in zip(*kept.values(), strict=True):
        with pytest.raises(ValueError, match="tables of direction 'noise' and of 'denoise'"):
            _ = one - other


def test_refusals(model, pair, noise, random_hf_model):
    one_layer = ac.load(random_hf_model("llama", num_hidden_layers=1))
    refused("this model has one: leave it off", attribute_heads, one_layer, ac.Pair(**pair), grad_drop=True)
    for verb, wrong, message in (
        (attribute_heads, {"method": "eap"}, "method='eap': choose one of 'atp', 'atp_star', 'ig_inputs'"),
        (attribute_edges, {"method": "atp"}, "method='atp': choose one of 'eap'"),
        (attribute_edges, {"steps": 0}, "steps=0: integrated gradients take at least 1"),
        (attribute_heads, {"sites": ["o"]}, "site='o': choose one of"),
        (attribute_heads, {"sites": ["resid_mid"]}, "no gradient at site='resid_mid': .* patch_sites measures it"),
        (attribute_heads, {"sites": ["attn_out"], "grad_drop": True}, "no scores without a sign at site='attn_out'"),
    ):
        refused(message, inspect.unwrap(verb), model, noise, **wrong)  # annotations unchecked
    refused("metric='accuracy' has no gradient", attribute_heads, model, ac.Pair(**pair, metric="accuracy"))
    refused("no targets of kind 'first'", ac.Pair, **pair, kind="first")
    star: Any = {"sites": ["q"], "method": "atp_star", "options": ac.RunOptions(engine="fast")}
    refused("hook_pattern does not fire under it; leave the engine at 'auto'", attribute_heads, model, noise, **star)


def test_a_divergence_has_no_slope_where_it_is_least(model, pair):
    """In the clean run the divergence from the clean prediction is 0, and gradients there are rounding."""
    noise, back = (ac.Pair(**pair, metric="kl", direction=direction) for direction in ("noise", "denoise"))
    for method in ("atp", "atp_star"):
        refused(
            f"metric='kl' has its minimum in the clean run, where method='{method}'",
            attribute_heads,
            model,
            noise,
            method=method,
        )
        assert by_head(attribute_heads(model, back, method=method))
    for method in ("eap", "atp_star"):
        refused("direction='denoise', or another metric", attribute_edges, model, noise, method=method)
    path = by_head(attribute_heads(model, noise, method="ig_inputs"))
    assert max(map(abs, path.values())) > 1e-4, "on the way to the corrupted prompts it has"
