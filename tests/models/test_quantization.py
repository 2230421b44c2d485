"""Models of 4 and 8 bits: every verb gives the numbers of the weights with which they compute."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from refusals import refused
from test_device_maps import VERBS, pair
from torch import nn

import align_circuits as ac
from align_circuits.circuits.direct_effects import direct_logit_attribution
from align_circuits.cli import main
from align_circuits.hooks.compat import stored_weights
from align_circuits.models import quantization
from align_circuits.models.quantization import dequantised, keep_exact

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes here: make test-four-bit"
)
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request, random_hf_model, char_tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    # Rows that fill whole blocks of 64: on a CPU with AVX-512, bitsandbytes 0.50 dequantises others wrongly.
    random_hf_model(request.param, hidden_size=64, intermediate_size=128).save_pretrained(place)
    char_tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def models(folder):
    """A model of 4 bits, and one with the same weights, dequantised, in float32."""
    narrow, wide = ac.load(folder, device="cpu", quantization="4bit"), ac.load(folder, device="cpu")
    codes = dict(narrow.original_model.named_modules())
    changed = 0
    for name, module in wide.original_model.named_modules():
        if isinstance(module, nn.Linear) and stored_weights.is_quantised(codes[name]):
            assert not torch.equal(module.weight, dequantised(codes[name]))
            module.weight.data = dequantised(codes[name]).clone()
            changed += 1
    assert changed == 7 * wide.cfg.n_layers
    return narrow, wide


@needs_bitsandbytes
@pytest.mark.parametrize("verb", VERBS)
def test_quantization_to_4_bits_gives_the_numbers_of_the_dequantised_weights(models, verb):
    one, other = (VERBS[verb](model) for model in models)
    assert one.provenance.model["quantization"] == "4bit" and "quantization" not in other.provenance.model
    assert one.provenance.engine == other.provenance.engine
    ends = ["low", "high"]  # over four prompts corrections for skew magnify rounding many times
    pd.testing.assert_frame_equal(one.frame.drop(columns=ends), other.frame.drop(columns=ends), atol=1e-5, rtol=1e-5)


@needs_bitsandbytes
@pytest.mark.parametrize("verb", ["score", "evaluate", "patch", "ablate", "attribute heads", "localize"])
def test_quantization_to_8_bits_runs_alike_in_both_engines(folder, verb):
    model: Any = ac.load(folder, device="cpu", quantization="8bit")
    table = VERBS[verb](model)
    assert table.provenance.model["quantization"] == "8bit"
    if verb == "patch":  # by replay, which has other batches
        by_hooks = ac.patch_heads(model, pair(model), options=ac.RunOptions("reference"))
        assert table.provenance.engine == "replay"
        assert (table.frame["value"] - by_hooks.frame["value"]).abs().max() < 0.05  # activations are rounded to 8 bits


@needs_bitsandbytes
def test_quantization_to_8_bits_has_no_weights_of_heads(folder):
    model = ac.load(folder, device="cpu", quantization="8bit")
    refused("load it with quantization='4bit', or without", direct_logit_attribution, model, pair(model).clean)


@needs_bitsandbytes
def test_quantization_is_no_base_to_tune(folder):
    model = ac.load(folder, device="cpu", quantization="4bit")
    with pytest.raises(ValueError, match="tune takes a model whose weights are whole, not 4bit: load it without"):
        ac.tune(model, ac.Seq2SeqTask(x_len=2, n_examples=2), ac.TuneConfig(steps=1))


@needs_bitsandbytes
def test_quantization_on_the_command_line(folder, tmp_path):
    command = ["score", "--model", str(folder), "--n", "4", "--x-len", "2", "--n-examples", "2", "--device", "cpu"]
    assert main([*command, "--quantization", "4bit", "--out", str(tmp_path / "run")]) == 0
    assert ac.Table.load(tmp_path / "run").provenance.model["quantization"] == "4bit"


@needs_bitsandbytes
def test_quantization_that_a_cpu_dequantises_wrongly_is_refused(folder, monkeypatch):
    model = ac.load(folder, device="cpu", quantization="4bit").original_model
    keep_exact(model)
    monkeypatch.setattr(quantization, "dequantised", lambda module: dequantised(module).roll(1))
    refused(r"dequantises .*q_proj \(\d+x\d+\) wrongly on this CPU: take a GPU", keep_exact, model)


def test_quantization_without_its_package_says_what_to_install(random_hf_model, tmp_path, monkeypatch):
    random_hf_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(quantization, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    with pytest.raises(ImportError, match=r"needs bitsandbytes: pip install 'align-circuits\[four-bit\]'"):
        ac.load(tmp_path, quantization="8bit")


def test_quantization_that_does_not_exist_or_fit_is_refused(random_hf_model, tmp_path, capsys):
    model = random_hf_model("llama")
    for kind in ("5bit", "4 bit"):
        refused(f"quantization='{kind}': choose '4bit' or '8bit'", ac.load, "toy-llama", quantization=kind)
    message = "quantization goes with a folder or a name on the hub: a model in memory"
    refused(message, ac.load, model, quantization="4bit")
    (tmp_path / "adapter_config.json").write_text("{}")
    message = "quantization goes with a folder of whole weights, not with an adapter"
    refused(message, ac.load, tmp_path, quantization="4bit")
    assert main(["score", "--model", "planted", "--quantization", "4bit", "--device-map", "auto"]) == 2
    assert "leave out --device-map, --quantization" in capsys.readouterr().err
    assert "bitsandbytes" not in sys.modules or importlib.util.find_spec("bitsandbytes")
