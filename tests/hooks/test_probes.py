"""What touches a live activation: names that exist, probes that must fire, and a bridge left as it was."""

import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.hooks.attention import ATTENTION, PatternProbe, raw_attention, why_not_fast
from align_circuits.hooks.names import HEAD_SITES, LAYER_SITES, name_of
from align_circuits.hooks.probes import Probes, check_hook_points, dry_run, firing

TOKENS = torch.tensor([[2, 40, 14, 51, 40, 14], [2, 9, 33, 60, 5, 61]])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_names_are_hook_points_and_fire(name, random_hf_model):
    model = ac.load(random_hf_model(name))
    shapes = {}
    probes = Probes(
        model,
        {
            name_of(site, 1): lambda x, site=site: shapes.update({site: tuple(x.shape)})
            for site in (*HEAD_SITES, *LAYER_SITES)
            if (name, site) != ("gpt_neox", "resid_mid")
        },
    )
    with torch.no_grad():
        model.run_with_hooks(TOKENS, fwd_hooks=probes.fwd_hooks)
    probes.check()
    keys = 2 if name == "llama" else 4
    between = {} if name == "gpt_neox" else {"resid_mid": (2, 6, 32)}
    assert shapes == between | {
        "pattern": (2, 4, 6, 6),
        "q": (2, 6, 4, 8),
        "k": (2, 6, keys, 8),
        "v": (2, 6, keys, 8),
        "z": (2, 6, 4, 8),
        "resid_pre": (2, 6, 32),
        "resid_post": (2, 6, 32),
        "attn_out": (2, 6, 32),
        "mlp_post": (2, 6, 128 if name == "gpt2" else 48),
        "mlp_out": (2, 6, 32),
    }


def test_probes_say_what_is_wrong(random_hf_model):
    model = ac.load(random_hf_model("llama"))
    with pytest.raises(ValueError, match=r"no hook point 'blocks.2.attn.hook_pattern' in this TransformerBridge"):
        Probes(model, {name_of("pattern", 2): print})
    probes = Probes(model, {name_of("pattern", 0): lambda _: None, name_of("z", 0): lambda _: None})
    refused("silent are 2 of 2", probes.check)
    with torch.no_grad(), raw_attention(model):
        model.run_with_hooks(TOKENS, fwd_hooks=probes.fwd_hooks)
    refused(r"'blocks.0.attn.hook_pattern' never fired.* silent are 1 of 2", probes.check)


def test_the_first_name_that_is_not_there_is_told(random_hf_model):
    model, between, other = ac.load(random_hf_model("gpt_neox")), name_of("resid_mid", 1), name_of("z", 2)
    check_hook_points(model, [name_of("z", 1)])
    for names, message in (
        ([name_of("z", 1), between, other], f"no hook point '{between}' .*read the same stream"),
        ([other, between], f"no hook point '{other}' in this TransformerBridge: it has .*blocks.1.attn.hook_z"),
    ):
        refused(message, check_hook_points, model, names)


def test_a_name_that_never_fires_is_answered_by_names_that_do(random_hf_model):
    model = ac.load(random_hf_model("llama"))
    names = firing(model)
    assert "blocks.1.hook_resid_mid" in names and "hook_embed" in names and "hook_pos_embed" not in names
    assert "blocks.0.attn.hook_result" not in names, "to be switched on first"
    assert all(not dry_run(model, [name]).silent for name in ("ln_final.hook_normalized", "blocks.0.mlp.hook_pre"))
    with pytest.raises(ValueError, match=r"'hook_pos_embed' never fired.*Among those that fire are .*hook_embed"):
        dry_run(model, ["hook_pos_embed"]).check()
    with pytest.raises(ValueError, match=r"no hook point 'ln_final.hook_norm' .*: it has .*ln_final.hook_normalized"):
        Probes(model, {"ln_final.hook_norm": print})
    with pytest.raises(ValueError) as error:
        Probes(model, {"blocks.0.hook_mlp_ou": print})
    assert str(error.value).split(": it has ")[1].count(", ") == 8, "of eight names and the rest"
    with pytest.raises(ValueError, match="its attention and its MLP read the same stream, so there is none between"):
        Probes(ac.load(random_hf_model("gpt_neox")), {name_of("resid_mid", 0): print})


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"])
def test_bridge_is_bit_identical_afterwards(name, random_hf_model):
    model = ac.load(random_hf_model(name))
    implementation = model.original_model.config._attn_implementation
    with torch.no_grad():
        before = model(TOKENS)
        with raw_attention(model):
            inside = model(TOKENS)
            with raw_attention(model):
                pass
            assert torch.equal(model(TOKENS), inside), "one within another"
            assert model.original_model.config._attn_implementation == ATTENTION
        assert torch.equal(model(TOKENS), before)
        with pytest.raises(RuntimeError, match="in the middle"), raw_attention(model):
            raise RuntimeError("in the middle")
        assert torch.equal(model(TOKENS), before)
    torch.testing.assert_close(inside, before, atol=5e-5, rtol=0)
    assert model.original_model.config._attn_implementation == implementation == "eager"
    assert not any("forward" in vars(block.attn) for block in model.blocks)


def test_probing_leaves_the_logits_as_they_are(random_hf_model):
    model = ac.load(random_hf_model("llama"))
    probe = PatternProbe(torch.tensor([0, 1, 1]), torch.tensor([5, 0, 3]), lambda *_: None)
    with torch.no_grad(), raw_attention(model):
        assert torch.equal(model(TOKENS, attention_probe=probe), model(TOKENS))
    assert probe.layers_read == 2


def test_gradients_flow(random_hf_model):
    model = ac.load(random_hf_model("llama"))
    gradients = []
    for fast in (True, False):
        model.zero_grad()
        if fast:
            with raw_attention(model):
                model(TOKENS).logsumexp(-1).sum().backward()
        else:
            model(TOKENS).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.original_model.parameters()])
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])


def test_rows_beside_a_slow_twin():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 3, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 2, 7, 3, generator=generator, dtype=torch.float64)
    visible = (torch.rand(2, 1, 7, 7, generator=generator) < 0.5) | torch.eye(7, dtype=torch.bool)
    prompt, query = torch.tensor([0, 1, 1, 1]), torch.tensor([6, 2, 0, 5])
    for mask in (None, visible):
        rows = PatternProbe(prompt, query, lambda *_: None).rows(q, k, mask, 0.7)
        for row, (p, at) in enumerate(zip(prompt.tolist(), query.tolist(), strict=True)):
            for head in range(4):
                seen = [key for key in range(7) if (key <= at if mask is None else mask[p, 0, at, key])]
                weights = torch.stack([(q[p, head, at] @ k[p, head // 2, key] * 0.7).exp() for key in seen])
                expected = torch.zeros(7, dtype=torch.float64)
                expected[seen] = weights / weights.sum()
                torch.testing.assert_close(rows[row, head], expected)


def test_models_that_fused_attention_would_get_wrong(random_hf_model):
    capped = ac.load(random_hf_model("gemma2"))
    refused("Gemma2ForCausalLM caps its attention scores", raw_attention(capped).__enter__)
    plain = ac.load(random_hf_model("llama"))
    assert why_not_fast(plain) is None
    for direction in ("fwd", "bwd"):
        for layer in (1, 0):
            plain.hook_dict[name_of("z", layer)].add_hook(lambda *_, **__: None, dir=direction)
        assert "hooks are attached (blocks.0.attn.hook_z), which" in (why_not_fast(plain) or ""), "the first by name"
        plain.reset_hooks()
    assert "attention sinks" in (why_not_fast(ac.load(random_hf_model("gpt_oss"))) or "")
    folded = ac.load(random_hf_model("gpt2"))
    folded.enable_compatibility_mode()
    assert "compatibility mode" in (why_not_fast(folded) or "")
