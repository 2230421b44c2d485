"""What the package relies on inside of transformers, TransformerLens and PyTorch is still there, and means the same."""

import copy
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch.nn.utils import skip_init
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.vaultgemma.modeling_vaultgemma import VaultGemmaRMSNorm

import align_circuits as ac
from align_circuits.hooks import compat
from align_circuits.hooks.compat import architectures, attention_functions, bridges, stored_weights, unhooked, user_code

PACKAGE = Path(ac.__file__).parent
INSIDES = re.compile(
    r"\b(original_(component|model)|_original_component|_attn_implementation|_global_mapping|compatibility_mode|layer_idx"
    r"|variance_epsilon|use_parallel_residual|_buffers|GeneralizedComponent|(aten|mkldnn)\._\w+)\b"
)


@pytest.fixture(scope="module")
def bridge(random_hf_model):
    return ac.load(random_hf_model("llama"))


def test_the_tested_versions_are_installed_and_allowed():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    allowed = {entry.name: entry.specifier for entry in map(Requirement, project["dependencies"])}
    for package, tested in compat.TESTED.items():
        assert Version(version(package)).release == Version(tested).release, f"run the suite, then update {package}"
        assert Version(tested) in allowed[package]
    for package in ("transformers", "transformer-lens"):
        assert f"{Version(compat.TESTED[package]).major + 1}.0" not in allowed[package]


def test_a_bridge_has_the_parts_that_replay_calls(bridge, random_hf_model):
    block = bridge.blocks[0]
    for part in (bridge.embed, bridge.unembed, bridge.ln_final, bridge.rotary_emb, block.attn.o):
        assert bridges.component(part) is part.original_component
    assert all(isinstance(bridges.component(norm), LlamaRMSNorm) for norm in (block.ln1, block.ln2))
    assert isinstance(bridges.component(block.mlp), LlamaMLP)
    assert bridges.layer_of(bridges.component(bridge.blocks[1].attn)) == 1
    assert bridges.wrapped(bridge).config._attn_implementation == "eager"
    assert bridges.component(block.attn).config is bridges.wrapped(bridge).config
    assert bridge.compatibility_mode is False and not bridges.has_changed_weights(bridge)
    assert hasattr(ac.load(random_hf_model("gpt2")), "pos_embed")
    neox = ac.load(random_hf_model("gpt_neox")), ac.load(random_hf_model("gpt_neox", use_parallel_residual=False))
    assert [architectures.is_parallel(model.blocks[0]) for model in neox] == [True, False]


@pytest.mark.parametrize(
    ("capability", "fast"),
    [("avx512_bf16", True), ("amx_bf16", True), ("bf16", True), ("sve_bf16", True), ("avx512_f", False), ("", False)],
)
def test_fast_bfloat16_is_asked_of_the_processor(capability, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, capability: True})
    assert stored_weights.has_fast_bfloat16(torch.device("cpu")) is fast
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # PyTorch 2.6 answers by single questions
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: capability == "avx512_bf16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert stored_weights.has_fast_bfloat16(torch.device("cpu")) is (capability == "avx512_bf16")


def test_fast_bfloat16_is_asked_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not stored_weights.has_fast_bfloat16(torch.device("cuda"))  # emulated


def test_names_of_parameters_are_hugging_faces(bridge, random_hf_model):
    inserted = dict(bridges.wrapped(bridge).named_parameters())
    assert {bridges.parameter_name(name) for name in inserted} == set(dict(random_hf_model("llama").named_parameters()))
    assert any("._original_component" in name for name in inserted)


def test_nothing_of_a_bridge_remains_around_a_module(bridge):
    modules = list(bridges.wrapped(bridge).modules())
    parts = [module for module in modules if bridges.without_bridge(module) is not module]
    assert any(bridges.without_bridge(part) is bridge.embed.original_component for part in parts)
    assert not any(isinstance(bridges.without_bridge(part), GeneralizedComponent) for part in parts)


def test_weights_have_a_row_for_each_key_head(bridge):
    attention = bridge.blocks[0].attn
    weights: Any = [stored_weights.head_weight(attention, name, 8) for name in ("W_Q", "W_K", "W_V", "W_O")]
    assert [len(weight) for weight in weights] == [4, 2, 2, 4]
    attention = torch.nn.Module()
    attention.W_K, attention._W_K = torch.ones(4, 3, 2), torch.ones(2, 3, 2)
    assert (
        stored_weights.head_weight(attention, "W_K", 2) is not None
        and stored_weights.head_weight(attention, "b_K", 2) is None
    )
    weight = stored_weights.head_weight(attention, "W_K", 2)
    assert weight is not None and weight.shape == (2, 3, 2)


def test_weights_of_heads_are_the_same_from_a_layer_of_codes(bridge, monkeypatch):
    """With bitsandbytes' function replaced by one that looks the weights up."""
    library: Any = ModuleType("bitsandbytes.functional")
    library.dequantize_4bit = lambda codes, state: state[codes]
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", library)
    attention = bridge.blocks[0].attn
    for letter in "QKVO":
        plain = bridges.component(getattr(attention, letter.lower()))
        layer = copy.deepcopy(plain)
        codes: Any = torch.nn.Parameter(torch.arange(len(plain.weight), dtype=torch.int32), requires_grad=False)
        codes.quant_state, layer.weight = plain.weight.detach(), codes
        quantised = SimpleNamespace(**{letter.lower(): layer})
        weight, expected = (stored_weights.head_weight(each, f"W_{letter}", 8) for each in (quantised, attention))
        assert weight is not None and expected is not None and torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes"}, "4bit"),
        ({"load_in_4bit": False, "load_in_8bit": True, "quant_method": "bitsandbytes"}, "8bit"),
        ({"quant_method": "gptq"}, "gptq"),
        ({}, "SimpleNamespace"),
    ],
)
def test_quantisation_has_a_name(settings, name):
    quantised = SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=SimpleNamespace(**settings)))
    for model in (quantised, SimpleNamespace(original_model=quantised)):
        assert stored_weights.quantization_of(model) == name


@pytest.mark.parametrize(
    ("before", "after"), [("past", ["past"]), (["past", "mask"], ["past", "mask"]), (None, []), ([], [])]
)
def test_indices_stay_where_they_are_beside_what_stayed_before(random_hf_model, before, after):
    model = random_hf_model("llama", num_hidden_layers=1)
    model._hf_hook = SimpleNamespace(skip_keys=before)
    stored_weights.leave_indices(model)
    assert model._hf_hook.skip_keys == [*after, "logits_to_keep"]


def test_weights_that_are_offloaded_are_brought_while_they_are_read():
    model = torch.nn.Sequential(skip_init(torch.nn.Linear, 2, 3), torch.nn.LayerNorm(3))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number)
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not stored_weights.is_spread(model) and stored_weights.device_of(model) == torch.device("cpu")
    weight = model.get_parameter("0.weight")
    assert stored_weights.parameter_value(model, "0.weight", weight) is weight
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert stored_weights.is_spread(model) and stored_weights.device_of(model) == torch.device("cpu")
    for name, parameter in model.named_parameters():
        assert parameter.is_meta and torch.equal(stored_weights.parameter_value(model, name, parameter), plain[name])
    with stored_weights.onloaded(None, model[1]):
        bridged: Any = SimpleNamespace(w=torch.empty(3, device="meta"), b=None, original_component=model[1])
        scale, shift = stored_weights.norm_weights(bridged)
        assert scale is not None and torch.equal(scale, plain["1.weight"])
        assert shift is not None and torch.equal(shift, plain["1.bias"])
        assert model[0].weight.is_meta, "no other is"
    assert model[1].weight.is_meta


def test_where_modules_of_an_offloaded_model_run():
    module = torch.nn.Sequential(*(skip_init(torch.nn.Linear, 1, 1, device="meta") for _ in range(3)))
    for part, (offload, device) in zip([*module][1:], ((False, "cpu"), (True, "cuda:3")), strict=True):
        part.__dict__["_hf_hook"] = SimpleNamespace(offload=offload, execution_device=device)
    assert stored_weights.device_of(module) == torch.device("cuda:3")
    assert stored_weights.device_of(torch.nn.LayerNorm(1)) == torch.device("cpu")


def test_weights_of_norms_as_they_stand():
    norm = torch.nn.LayerNorm(2)
    assert stored_weights.norm_weights(SimpleNamespace(w=norm.weight, b=norm.bias)) == (norm.weight, norm.bias)
    assert stored_weights.norm_weights(SimpleNamespace(w=norm.weight)) == (norm.weight, None)
    assert stored_weights.norm_weights(SimpleNamespace()) == (None, None)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, VaultGemmaRMSNorm, NemotronLayerNorm1P])
def test_scales_of_norms_are_those_that_they_multiply_by(kind):
    norm, signs = kind(4), torch.tensor([1.0, -1.0, 1.0, -1.0])  # of mean 0 and square 1
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    scale, _ = stored_weights.norm_weights(SimpleNamespace(w=norm.weight, original_component=norm))
    torch.testing.assert_close(scale, norm(signs) * signs, atol=1e-4, rtol=1e-4)


def test_8_bit_codes_stand_for_no_weights():
    layer = skip_init(torch.nn.Linear, 2, 2)
    assert not stored_weights.is_quantised(layer) and not stored_weights.is_quantised(torch.nn.ReLU())
    layer.weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert stored_weights.is_quantised(layer)
    with pytest.raises(ValueError, match="this model computes with 8-bit codes of its activations"):
        stored_weights.head_weight(SimpleNamespace(q=layer), "W_Q", 1)


def test_norms_and_mlps_are_hugging_faces(bridge):
    residual = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0))
    block = bridge.blocks[0]
    with torch.no_grad():
        torch.testing.assert_close(unhooked.norm(block.ln1, residual), block.ln1.original_component(residual))
        torch.testing.assert_close(unhooked.mlp(block.mlp, residual), block.mlp.original_component(residual))
        for dtype in (torch.bfloat16, torch.float64):  # where transformers rounds in between
            norm, narrow = copy.deepcopy(block.ln1.original_component).to(dtype), residual.to(dtype)
            torch.testing.assert_close(unhooked.norm(norm, narrow), norm(narrow), rtol=0, atol=0)


def test_attention_functions_are_registered_where_transformers_looks():
    assert callable(AttentionInterface()["sdpa"]) and callable(AttentionMaskInterface()["sdpa"])
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    z, total = attention_functions.fused_attention(query, key, value, 0.3, None)
    scores = query @ key.mT * 0.3
    torch.testing.assert_close(z, scores.softmax(-1) @ value)
    torch.testing.assert_close(total, scores.logsumexp(-1))


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_every_kind_of_hook_is_seen(kind):
    point = HookPoint()
    assert not user_code.is_hooked(point)
    handle = getattr(point, f"register_{kind}_hook")(lambda *_: None)
    assert user_code.is_hooked(point)
    handle.remove()
    assert not user_code.is_hooked(point)


def test_no_other_module_names_these_insides():
    linked = [file for room in ("hooks", "validation") for file in (PACKAGE / room).glob("*.py")]  # rglob follows none
    for file in [*PACKAGE.rglob("*.py"), *linked]:
        code = re.sub(r'("""|")(?s:.*?)\1', "", file.read_text())
        assert not (name := INSIDES.search(code)), f"{file} names {name and name[0]}: let hooks/compat do it"
