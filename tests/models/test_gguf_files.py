"""GGUF files of tiny random models, written as llama.cpp writes them: the same logits and tokens; nothing left out."""

import copy
import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from refusals import raised, refused
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from written_gguf import write_gguf

import align_circuits as ac
from align_circuits.hooks.compat import bridges
from align_circuits.models import gguf_files
from align_circuits.models.gguf_files import TENSORS
from align_circuits.models.loading import load
from align_circuits.models.lora import save_adapter, unwrapped, with_adapter
from align_circuits.prompts.prompts import vocabulary_hash

NAMES = ["llama", "qwen2", "qwen3", "gpt2"]
TOKENS = torch.tensor([[2, 40, 14, 51, 40, 14], [2, 9, 33, 60, 5, 61]])


@pytest.fixture(scope="module")
def models(random_hf_model, byte_bpe_tokenizer):
    """A tiny model for each architecture, of sizes that Q8_0's blocks of 32 divide, with the tokenizer's vocabulary."""
    sizes = {"vocab_size": len(byte_bpe_tokenizer)}
    # Plain transformers takes the head size of Qwen3 and the context length of GPT-2 for granted.
    changes: dict[str, Any] = {name: {"intermediate_size": 64} for name in NAMES}
    changes |= {"gpt2": {"n_positions": 1024}, "qwen3": {"intermediate_size": 64, "head_dim": 128}}
    return {name: random_hf_model(name, **sizes, **changes[name]) for name in NAMES}


@pytest.fixture(scope="module")
def files(models, byte_bpe_tokenizer, tmp_path_factory):
    """A file for each architecture, in a folder of its own."""
    places = {name: tmp_path_factory.mktemp(name) / f"{name}.gguf" for name in models}
    return {name: write_gguf(place, models[name], byte_bpe_tokenizer) for name, place in places.items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return getattr(out, "logits", out)


def plain(path: Path, **settings) -> Any:
    """The same file in plain transformers."""
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **settings)


def test_the_architectures_are_those_that_the_suite_covers():
    assert set(TENSORS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits_as_the_weights_and_as_plain_transformers(name, files, models):
    model = load(files[name])
    torch.testing.assert_close(logits(model), logits(models[name]), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(model), logits(plain(files[name])), atol=1e-5, rtol=0)
    assert model.cfg.architecture == type(models[name]).__name__ and model.cfg.dtype == torch.float32
    assert model.cfg.model_name == str(files[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_as_the_tokenizer_and_as_plain_transformers(name, files, byte_bpe_tokenizer):
    tokenizer = load(files[name]).tokenizer
    auto = AutoTokenizer.from_pretrained(files[name].parent, gguf_file=files[name].name)
    assert vocabulary_hash(tokenizer) == vocabulary_hash(byte_bpe_tokenizer)
    for text in ("the cat sat\n on 12 mats", " ab  cd<|endoftext|>ri", "don't", "\n\n1"):
        ids = byte_bpe_tokenizer(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == auto(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", None)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q5_1", "F16"])
def test_quantized_weights(form, models, byte_bpe_tokenizer, tmp_path):
    path = write_gguf(tmp_path / "small.gguf", models["llama"], byte_bpe_tokenizer, quantized=form)
    model = load(path)
    torch.testing.assert_close(logits(model), logits(plain(path)), atol=1e-5, rtol=0)
    stored = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "blk.1.ffn_up.weight")
    expected = torch.tensor(dequantize(stored.data, stored.tensor_type))
    assert torch.equal(model.original_model.state_dict()[_inner("model.layers.1.mlp.up_proj.weight", model)], expected)
    assert not torch.allclose(logits(model), logits(models["llama"]), atol=1e-5)


def _inner(name: str, model: Any) -> str:
    return next(key for key in model.original_model.state_dict() if bridges.parameter_name(key) == name)


@pytest.mark.parametrize(("name", "change"), [("qwen3", {"head_dim": 16}), ("gpt2", {"n_positions": 48})])
def test_sizes_that_plain_transformers_takes_for_granted(name, change, random_hf_model, byte_bpe_tokenizer, tmp_path):
    model = random_hf_model(name, vocab_size=len(byte_bpe_tokenizer), **change)
    path = write_gguf(tmp_path / "a.gguf", model, byte_bpe_tokenizer)
    torch.testing.assert_close(logits(load(path)), logits(model), atol=1e-5, rtol=0)


def test_dtype_and_gguf_file_in_a_folder(files):
    folder, name = files["llama"].parent, files["llama"].name
    model = load(folder, gguf_file=name, dtype=torch.bfloat16)
    assert model.cfg.dtype == torch.bfloat16 == next(model.original_model.parameters()).dtype
    refused(r"no GGUF file 'other\.gguf' in .*, which has llama\.gguf: give", load, folder, gguf_file="other.gguf")
    refused(r"no config\.json in .*: name its GGUF file with gguf_file=", load, folder)
    refused(r"gguf_file='x\.gguf' goes with a folder or a name on the hub", load, "toy-llama", gguf_file="x.gguf")
    for source in (folder / "other.gguf", "other.gguf"):
        refused(r"no folder '.*other\.gguf': give an existing folder .* a GGUF file", load, source)


def test_gguf_file_on_the_hub(files, monkeypatch):
    asked = {}

    def download(name, **settings):
        asked.update(name=name, **settings)
        return str(files["llama"].parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load("someone/a-llama", gguf_file="llama.gguf", revision="v1")
    patterns = {"allow_patterns": ["llama.gguf"], "ignore_patterns": []}
    assert asked == {"name": "someone/a-llama", "revision": "v1"} | patterns


@pytest.mark.parametrize("tied", [False, True])
def test_it_can_be_saved_and_stays_tied(tied, random_hf_model, byte_bpe_tokenizer, tmp_path):
    sizes = {"vocab_size": len(byte_bpe_tokenizer), "tie_word_embeddings": tied}
    path = write_gguf(tmp_path / "a.gguf", random_hf_model("llama", **sizes), byte_bpe_tokenizer)
    read = gguf_files.read_gguf(path)
    assert not hasattr(read.config, "quantization_config") and not hasattr(read, "hf_quantizer")
    read.save_pretrained(tmp_path / "saved")
    tokenizer = gguf_files.gguf_tokenizer(path)
    assert tokenizer is not None
    tokenizer.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(load(path)))
    assert again.tokenizer("the cat 12")["input_ids"] == byte_bpe_tokenizer("the cat 12")["input_ids"]
    model: Any
    for model in (read, LlamaForCausalLM.from_pretrained(tmp_path / "saved")):
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_an_adapter_finds_its_gguf_file(files, tmp_path, monkeypatch):
    monkeypatch.chdir(files["llama"].parent)
    model = load("llama.gguf")
    settings: Any = {"layers": None, "r": 2, "alpha": 2.0, "dropout": 0.0, "seed": 0}
    adapted = with_adapter(unwrapped(model), bridges.matrices_of(model), names=("q",), **settings)
    save_adapter(adapted, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    again = load("adapter")
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=0)
    assert vocabulary_hash(again.tokenizer) == vocabulary_hash(model.tokenizer)


def test_llama_3_scales_its_rotary_frequencies(random_hf_model, tmp_path):
    """llama.cpp stores the factors, and plain transformers leaves them out: compare with the original instead."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = scaling | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    original = random_hf_model("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=512)
    plain_frequencies = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = plain_frequencies / original.model.rotary_emb.inv_freq
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    path = write_gguf(tmp_path / "a.gguf", original, extra={"rope_freqs.weight": factors.numpy()})
    tokens = torch.arange(400)[None] % 64
    with torch.no_grad():
        expected = original(tokens).logits
        torch.testing.assert_close(load(path)(tokens), expected, atol=1e-4, rtol=0)
        assert (plain(path)(tokens).logits - expected).abs().max() > 0.1
    wrong = {"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}
    with pytest.raises(ValueError, match=r"scales its rotary frequencies otherwise than Llama 3\.1"):
        load(write_gguf(tmp_path / "b.gguf", original, extra=wrong))


def test_what_would_be_left_out_is_refused(models, tmp_path):
    llama = models["llama"]
    with pytest.raises(ValueError, match="architecture 'bert': of GGUF files, llama, qwen2, qwen3, gpt2 can be loaded"):
        load(write_gguf(tmp_path / "a.gguf", llama, architecture="bert"))
    experts = {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), dtype=np.float32)}
    with pytest.raises(ValueError, match=r"holds 1 tensors that no plain llama has, such as 'blk\.0\.ffn_gate_inp"):
        load(write_gguf(tmp_path / "b.gguf", llama, extra=experts))
    with pytest.raises(ValueError, match=r"scales its rotary frequencies \(yarn\), which would be left out"):
        load(write_gguf(tmp_path / "c.gguf", llama, **{"llama.rope.scaling.type": "yarn"}))
    with pytest.raises(ValueError, match=r"lacks 9 tensors, such as 'model\.layers\.2\."):
        load(write_gguf(tmp_path / "d.gguf", llama, **{"llama.block_count": 3}))
    for keys, message in (
        ({"split.count": 3}, "is one of 3 parts of a model: merge them into one file"),
        ({"llama.rope.scaling.factor": 4.0}, r"scales its rotary frequencies \(by 4\), which would be left out"),
        ({"llama.rope.scale_linear": 2.0}, r"scales its rotary frequencies \(by 2\), which would be left out"),
        ({"llama.attention.head_count_kv": None}, r"does not say how many heads of keys there are"),
        ({"llama.block_count": 1}, "has a block_count of 1, and tensors of block 1: download it again"),
    ):
        refused(message, load, write_gguf(tmp_path / "e.gguf", llama, **keys))


def test_llama_3_begins_texts_and_takes_words_whole(models, byte_bpe_tokenizer, tmp_path):
    """As llama.cpp does for its way to split, of which a file need not say it."""
    begins = byte_bpe_tokenizer.eos_token_id
    keys = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": begins}
    tokenizer = load(write_gguf(tmp_path / "a.gguf", models["llama"], byte_bpe_tokenizer, **keys)).tokenizer
    assert tokenizer("the cat")["input_ids"] == [begins, *byte_bpe_tokenizer("the cat")["input_ids"]]
    assert tokenizer.backend_tokenizer.model.ignore_merges
    keys |= {"tokenizer.ggml.add_bos_token": False}
    tokenizer = load(write_gguf(tmp_path / "b.gguf", models["llama"], byte_bpe_tokenizer, **keys)).tokenizer
    assert tokenizer("the cat")["input_ids"] == byte_bpe_tokenizer("the cat")["input_ids"]


def test_tokenizers_that_transformers_would_misread(models, random_hf_model, byte_bpe_tokenizer, tmp_path):
    llama = models["llama"]
    path = write_gguf(tmp_path / "a.gguf", llama, byte_bpe_tokenizer, **{"tokenizer.ggml.pre": "viking"})
    refused(r"that transformers does not know \(viking\), and .* give tokenizer=", load, path)
    with pytest.raises(ValueError, match=r"does not know \(None\)"):
        load(write_gguf(tmp_path / "b.gguf", llama, byte_bpe_tokenizer, **{"tokenizer.ggml.pre": None}))
    assert vocabulary_hash(load(path, tokenizer=byte_bpe_tokenizer).tokenizer) == vocabulary_hash(byte_bpe_tokenizer)
    digits = write_gguf(tmp_path / "c.gguf", llama, byte_bpe_tokenizer, **{"tokenizer.ggml.pre": "smollm"})
    tokenizer = load(digits).tokenizer
    split = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12 b")]
    assert split == ["a", "ĊĊ", "1", "2", "Ġb"]
    marked = copy.deepcopy(byte_bpe_tokenizer)
    marked.add_tokens(["é猫"], special_tokens=True)
    tokens = marked.convert_ids_to_tokens(range(len(marked)))
    kinds = [3 if token in ("é猫", "<|endoftext|>") else 1 for token in tokens]
    larger = random_hf_model("llama", vocab_size=len(marked))
    path = write_gguf(tmp_path / "f.gguf", larger, marked, **{"tokenizer.ggml.token_type": kinds})
    refused("has tokens that transformers would cut or give other ids, such as 'é猫': give tokenizer=", load, path)
    assert load(write_gguf(tmp_path / "d.gguf", llama)).tokenizer is None
    assert load(write_gguf(tmp_path / "e.gguf", llama), tokenizer=path.parent / "c.gguf").tokenizer is not None


def test_a_tokenizer_beside_the_file_is_another_models(files, char_tokenizer, byte_bpe_tokenizer, tmp_path):
    shutil.copy(files["llama"], tmp_path / "llama.gguf")
    char_tokenizer.save_pretrained(tmp_path)
    assert vocabulary_hash(load(tmp_path / "llama.gguf").tokenizer) == vocabulary_hash(byte_bpe_tokenizer)


def test_broken_files(files, tmp_path):
    whole = files["llama"].read_bytes()
    for length in (3, 40, 2000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(r"cut\.gguf' cannot be read as a GGUF file \(.*\): download it again", load, tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("no model" * 100)
    refused(r"text\.gguf' cannot be read as a GGUF file", load, tmp_path / "text.gguf")


def text(letters: bytes) -> bytes:
    return struct.pack("<Q", len(letters)) + letters


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
NO_TEXTS = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 5_000_000) + bytes(8 * 5_000_000)
NO_TENSOR = text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("tensors", "settings", "rest"),
    [
        (0, 2, ARCHITECTURE + NO_TEXTS),
        (0, 2, ARCHITECTURE + text(b"a") + struct.pack("<IIQ", 9, 0, 2**60)),
        (400_000, 1, ARCHITECTURE + 400_000 * NO_TENSOR),
        (0, 400_000, ARCHITECTURE + 400_000 * (text(b"a") + struct.pack("<IB", 0, 0))),
    ],
)
def test_a_file_that_counts_millions_is_refused_at_once(tensors, settings, rest, tmp_path):
    (tmp_path / "large.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, tensors, settings) + rest)
    started = time.process_time()
    refused("parts of arrays, more than any model has", load, tmp_path / "large.gguf")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 10**9), ("embedding_length", 2**31), ("vocab_size", 2**31), ("attention.head_count", 2**31)],
)
def test_sizes_that_no_weights_have_are_refused_at_once(key, value, models, byte_bpe_tokenizer, tmp_path):
    place = write_gguf(tmp_path / "large.gguf", models["llama"], byte_bpe_tokenizer, **{f"llama.{key}": value})
    started = time.process_time()
    refused("download it again|correct config.json", load, place)
    assert time.process_time() - started < 2


def test_without_the_package_gguf(files, monkeypatch):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda _name: None)
    raised(ImportError, "needs the package gguf, which is not installed: pip install gguf", load, files["llama"])


def test_scores_from_a_gguf_file(files):
    model = load(files["llama"])
    prompts = ac.RepeatedTokensTask(length=10).sample(4, model.tokenizer, seed=0)
    assert len(ac.score_heads(model, prompts).top("induction", 1)) == 1
