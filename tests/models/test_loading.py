"""Loading: from every place, the same model; and one clear line where that cannot be."""

import copy
import json
import shutil
import socket
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import LoraConfig, PeftModel, PromptTuningConfig, XLoraConfig, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file

import align_circuits as ac
from align_circuits.hooks.attention import ARCHITECTURES
from align_circuits.hooks.compat import stored_weights
from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.models import loading
from align_circuits.models.loading import load
from align_circuits.models.parameters import model_provenance
from align_circuits.prompts.prompts import vocabulary_hash
from align_circuits.run.forward_pass import forward
from align_circuits.run.prompt_checks import check_fits

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # inside peft 0.21
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # inside torch.compile
]

NAMES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"]
TOKENS = torch.tensor([[2, 40, 14, 51, 40, 14], [2, 9, 33, 60, 5, 61]])


@torch.no_grad()
def logits(model):
    out = model(TOKENS)
    return getattr(out, "logits", out)


def computes(model, expected):
    torch.testing.assert_close(logits(model), expected, atol=5e-5, rtol=0)


def configure(folder, name="config.json", **changes):
    """Changes settings in a folder's file."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


@pytest.fixture(scope="module")
def folders(random_hf_model, char_tokenizer, tmp_path_factory):
    """A folder for each architecture, in the hub's format, with a tokenizer."""
    made = {}
    for name in NAMES:
        made[name] = tmp_path_factory.mktemp(name)
        random_hf_model(name).save_pretrained(made[name])
        char_tokenizer.save_pretrained(made[name])
    return made


def lora(model, seed=0, targets=("q_proj", "k_proj", "v_proj")):
    """A PeftModel whose adapter changes the model: LoRA starts as the identity, so its second matrix is drawn anew."""
    gpt2 = model.config.model_type == "gpt2"
    targets = ["attn.c_proj"] if gpt2 else [*targets]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=gpt2)
        wrapped = get_peft_model(model, config)
        for name, value in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.5)
    return wrapped.eval()


@pytest.mark.parametrize("name", NAMES)
def test_folder(name, folders, random_hf_model, char_tokenizer):
    model = load(folders[name])
    computes(model, logits(random_hf_model(name)))
    assert model.cfg.architecture in ARCHITECTURES
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_model, model.cfg.d_vocab) == (2, 4, 32, 64)
    assert (model.cfg.d_head, model.cfg.n_ctx, model.cfg.dtype) == (8, 64, torch.float32)
    assert vocabulary_hash(model.tokenizer) == vocabulary_hash(char_tokenizer)
    text = " A C B: r i j\n"
    assert model.tokenizer(text)["input_ids"] == char_tokenizer(text)["input_ids"]
    assert model.to_tokens(text).tolist() == [char_tokenizer(text)["input_ids"]]
    assert isinstance(model, HookedModel)


def test_public_name_and_string(folders):
    assert ac.load is load
    assert load(str(folders["llama"])).cfg.model_name == str(folders["llama"])


def test_model_in_memory_keeps_its_weights_and_finds_its_tokenizer(folders, random_hf_model):
    hf = random_hf_model("llama")
    weight = hf.lm_head.weight
    model = load(hf)
    assert model.tokenizer is None and model.original_model is hf and hf.lm_head.weight is weight
    assert load(type(hf).from_pretrained(folders["llama"])).tokenizer is not None


def test_a_model_in_memory_still_runs_and_its_owner_is_told_once_that_it_is_wrapped(random_hf_model, caplog):
    loading._say_wrapped.cache_clear()
    model, tokens = random_hf_model("llama"), torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
    logits, generated = model(tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)
    load(copy.deepcopy(model))
    load(model)
    (told,) = caplog.messages
    assert (
        told.startswith("load wraps this LlamaForCausalLM in place: use what it returns") and "give load a copy" in told
    )
    torch.testing.assert_close(model(tokens).logits, logits)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), generated)


def test_tokenizer_given(folders, random_hf_model, byte_bpe_tokenizer):
    before = vocabulary_hash(byte_bpe_tokenizer)
    model = load(random_hf_model("gpt2", vocab_size=600), tokenizer=byte_bpe_tokenizer)
    assert vocabulary_hash(model.tokenizer) == before == vocabulary_hash(byte_bpe_tokenizer)
    assert byte_bpe_tokenizer.pad_token is None, "the caller's tokenizer is left alone"
    assert model.to_tokens(["the cat", "the"]).shape[0] == 2
    ids = byte_bpe_tokenizer("the cat")["input_ids"]
    assert model.to_tokens("the cat").tolist() == [ids], "no BOS where there is none"
    again = load(folders["gpt2"], tokenizer=folders["llama"])
    assert vocabulary_hash(again.tokenizer) == vocabulary_hash(load(folders["llama"]).tokenizer)


def test_tokenizer_in_memory_only(random_hf_model):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<bos>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    model = load(random_hf_model("llama"), tokenizer=tokenizer)
    assert model.tokenizer.get_vocab() == {"<bos>": 0, "a": 1, "b": 2}, "no token is added"
    assert model.to_tokens("b").tolist() == [[0, 2]]


def test_real_llama_3_vocabulary(random_hf_model, llama_tokenizer, tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": len(llama_tokenizer), "num_hidden_layers": 1}
    random_hf_model("llama", **small).save_pretrained(tmp_path)
    llama_tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path)
    text = " A C B: r i j"
    ids = model.tokenizer(text)["input_ids"]
    assert ids == llama_tokenizer(text)["input_ids"] and model.cfg.d_vocab == len(llama_tokenizer)
    prompts = ac.Prompts.from_tokens([ids], tokenizer=llama_tokenizer)
    seen = {}
    rows: dict[str, Any] = {"prompt": prompts.column("prompt"), "query": prompts.column("query_pos")}
    forward(model, prompts, **rows, on_logits=lambda _rows, logits: seen.update(logits=logits))
    with torch.no_grad():
        torch.testing.assert_close(seen["logits"], model(prompts.tokens)[0, :-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_bf16_stays_where_the_device_has_instructions_for_it(
    fast, named, adapted, random_hf_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(stored_weights, "has_fast_bfloat16", lambda device: fast and device.type == "cpu")
    random_hf_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    if not named:  # then the dtype is that of the tensors
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    folder = tmp_path
    if adapted:
        folder = tmp_path / "adapter"
        lora(type(random_hf_model("llama")).from_pretrained(tmp_path)).save_pretrained(folder)
    model = load(folder)
    expected = torch.bfloat16 if fast else torch.float32
    assert model.cfg.dtype == expected == next(model.original_model.parameters()).dtype
    provenance = model_provenance(model)
    assert provenance["dtype"] == str(expected).removeprefix("torch.")
    assert provenance.get("stored_dtype") == (None if fast else "bfloat16")
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert load(folder, dtype=dtype).cfg.dtype == dtype


def test_other_dtypes_are_kept(random_hf_model, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_weights, "has_fast_bfloat16", lambda _: False)
    for dtype in (torch.float16, torch.float32, torch.float64):
        random_hf_model("llama").to(dtype).save_pretrained(tmp_path)
        assert load(tmp_path).cfg.dtype == dtype
    assert load(random_hf_model("llama"), dtype=torch.float64).cfg.dtype == torch.float64
    assert load(random_hf_model("llama").bfloat16()).cfg.dtype == torch.bfloat16  # its owner's choice


@pytest.mark.parametrize("fast", [True, False])
def test_bundled_models_are_float32_on_every_device(fast, monkeypatch):
    monkeypatch.setattr(stored_weights, "has_fast_bfloat16", lambda _: fast)
    for name in ("toy-llama", "toy-llama-ica"):
        provenance = model_provenance(load(name))
        assert (provenance["dtype"], provenance["stored_dtype"]) == ("float32", "bfloat16")
    assert load("toy-llama", dtype=torch.bfloat16).cfg.dtype == torch.bfloat16


@pytest.mark.parametrize("active", [True, False])
def test_small_models_are_read_without_a_progress_bar(folders, monkeypatch, capfd, active):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", active)
    load(folders["llama"])
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled() == active
    monkeypatch.setattr(loading, "LARGE", 0)
    load(folders["llama"])
    assert ("Loading weights" in capfd.readouterr().err) == active, "large ones with one, unless it is off"


def test_cuda_where_there_is_one(folders):
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert next(load(folders["llama"]).original_model.parameters()).device.type == expected
    assert load(folders["llama"], device="cpu").cfg.device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(folders):
    refused("no CUDA device", load, folders["llama"], device="cuda")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_model_and_adapter_folder(name, folders, random_hf_model, tmp_path):
    wrapped = lora(type(random_hf_model(name)).from_pretrained(folders[name]))
    expected = logits(wrapped)
    with wrapped.disable_adapter():
        plain = logits(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    assert not torch.allclose(expected, plain, atol=1e-2)
    read, model = load(tmp_path / "adapter"), load(wrapped)
    assert isinstance(wrapped, PeftModel), "it stays the caller's"
    computes(read, expected)
    computes(model, expected)
    with wrapped.disable_adapter():
        computes(model, plain)
    assert read.tokenizer is not None, "an adapter without a tokenizer of its own reads its base's"


def test_adapter_names_its_base_relative_to_itself(random_hf_model, tmp_path):
    wrapped = lora(random_hf_model("llama"))
    random_hf_model("llama").save_pretrained(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter")
    configure(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path="../base")
    computes(load(tmp_path / "adapter"), logits(wrapped))
    configure(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path=None)
    refused("does not name its base", load, tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_with_tokens_of_its_own_extends_its_base(random_hf_model, tmp_path):
    base = random_hf_model("llama")
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    rows = base.config.vocab_size + 2
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    with torch.random.fork_rng(devices=[]):
        base.resize_token_embeddings(rows, mean_resizing=False)
        wrapped = get_peft_model(base, config).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "adapter")
    assert model.cfg.d_vocab == rows
    computes(model, logits(wrapped))


def test_adapter_that_would_be_lost_in_silence(folders, random_hf_model, tmp_path):
    lora(type(random_hf_model("llama")).from_pretrained(folders["llama"])).save_pretrained(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    inside, saved = ".self_attn._original_component.", load_file(weights)
    save_file({name.replace(".layers.1", ".layers.9"): value + 0 for name, value in saved.items()} | saved, weights)
    refused(r"6 tensors of the adapter in .* have no place in its base .*\.layers\.9\.", load, tmp_path)
    save_file({name.replace(".self_attn.", inside): value for name, value in saved.items()}, weights)
    refused("its tensors have other names", load, tmp_path)


def test_an_adapter_names_the_revision_of_its_base_and_provenance_its_commit(random_hf_model, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    random_hf_model("llama").save_pretrained(tmp_path / "models--an--llm" / "snapshots" / (commit := "b" * 40))
    assert model_provenance(load("an/llm", revision=commit))["revision"] == commit
    prompts, config = ac.Prompts.from_tokens(TOKENS.tolist() * 3), ac.TuneConfig(steps=1)
    run = ac.tune(load("an/llm", revision=commit), prompts, config, out=tmp_path / "run", progress=False)
    computes(load(tmp_path / "run" / "adapter"), logits(run.model))


@pytest.mark.parametrize(("name", "fused"), [("gpt2", "c_attn"), ("gpt_neox", "query_key_value")])
def test_adapter_on_a_fused_projection_is_refused_and_merged_is_right(name, fused, random_hf_model):
    with torch.random.fork_rng(devices=[]):
        config = LoraConfig(r=2, target_modules=[fused], init_lora_weights=False, fan_in_fan_out=name == "gpt2")
        wrapped = get_peft_model(random_hf_model(name), config).eval()
    refused(f"an adapter on .*{fused} would be lost", load, wrapped)
    expected = logits(wrapped)
    computes(load(wrapped.merge_and_unload()), expected)


def test_adapter_beside_the_model_is_refused(random_hf_model):
    with torch.random.fork_rng(devices=[]):
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        beside = get_peft_model(random_hf_model("llama"), config)
    refused("PROMPT_TUNING adapter works beside the model", load, beside)


def test_an_adapter_that_needs_more_than_its_own_layers_is_refused(random_hf_model, tmp_path):
    base = random_hf_model("llama")
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[60, 61])
    with torch.random.fork_rng(devices=[]):
        invoked = get_peft_model(base, config)
    invoked.save_pretrained(tmp_path / "invoked")
    lora(random_hf_model("llama")).save_pretrained(tmp_path / "expert")
    base = random_hf_model("llama")
    base.config.use_cache = False
    mixed = XLoraConfig("CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(tmp_path / "expert")})
    with torch.random.fork_rng(devices=[]):
        mixture = get_peft_model(base, mixed)
    for source, kind in ((invoked, "aLoRA"), (tmp_path / "invoked", "aLoRA"), (mixture, "X-LoRA")):
        refused(f"an {kind} adapter needs what PEFT computes around the model", load, source)


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], ["o_proj"]])
def test_an_adapter_of_an_adapter_adds_to_it(targets, random_hf_model, tmp_path):
    random_hf_model("llama").save_pretrained(tmp_path / "base")
    first = lora(type(random_hf_model("llama")).from_pretrained(tmp_path / "base"))
    first.save_pretrained(tmp_path / "first")
    second = lora(first.merge_and_unload(), seed=1, targets=targets)
    second.save_pretrained(tmp_path / "second")
    configure(tmp_path / "second", "adapter_config.json", base_model_name_or_path="../first")
    computes(load(tmp_path / "second"), logits(second))
    files = [load_file(path) for path in tmp_path.glob("*/*.safetensors")]
    assert loading.parameters_in(tmp_path / "second") == sum(len(each.flatten()) for f in files for each in f.values())


def test_what_transformer_lens_cannot_run_is_told(random_hf_model):
    refused("TransformerLens cannot run this GPT2", load, random_hf_model("gpt2", add_cross_attention=True))


def test_transformer_lens_model_as_it_is(random_hf_model, char_tokenizer):
    model = load(random_hf_model("llama"))
    assert load(model) is model
    refused("returned unchanged", load, model, tokenizer=char_tokenizer)
    refused("already wrapped", load, model.original_model)


def test_pickle_is_refused(folders, random_hf_model, tmp_path):
    random_hf_model("llama").config.save_pretrained(tmp_path)
    torch.save(random_hf_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    refused(r"no safetensors weights .* convert them once: AutoModelForCausalLM", load, tmp_path)
    wrapped = lora(type(random_hf_model("llama")).from_pretrained(folders["llama"]))
    wrapped.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink(missing_ok=True)
    refused("no safetensors weights", load, tmp_path / "adapter")


def hub_error(kind: type[Any]) -> Any:
    return kind("as the library says it", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))


@pytest.mark.parametrize(
    ("error", "offline", "message"),
    [
        (LocalEntryNotFoundError("Cannot find"), True, "while HF_HUB_OFFLINE=1 forbids a download: unset it"),
        (LocalEntryNotFoundError("Cannot find"), False, "the hub cannot be reached .* connect to the network"),
        (hub_error(GatedRepoError), False, "is gated: ask for access on its page"),
        (hub_error(RevisionNotFoundError), False, "has no such revision: give one of its branches"),
        (hub_error(RepositoryNotFoundError), False, "no public model of this name on the hub: check it, or `hf auth"),
        (OSError("disk full.\nmore"), False, r"no model of this name on the hub \(disk full\)"),
    ],
)
def test_why_a_model_cannot_be_downloaded_comes_first(monkeypatch, error, offline, message):
    monkeypatch.setattr("align_circuits.models.loading.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    refused(f"^no folder 'a/b', and .*{message}", load, "a/b")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((folder, "^no folder") for folder in ("/no/such/folder", "./nowhere", "a/b/c")),
        *(
            (name, rf"^no folder '{name}', and no .*These need no hub: toy-llama")
            for name in ("a/b", "nothing", "not a!")
        ),
        ("toy-lama-ica", r"Did you mean 'toy-llama-ica'\? These need no hub: toy-llama, "),
        ("planted", r"planted_circuit\(task\) builds such a model"),
    ],
)
def test_names_of_nothing_are_answered_in_one_line_at_once(source, message):
    started = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        load(source)
    assert time.monotonic() - started < 5 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, r"lack 9 tensors that config\.json requires, such as 'model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"hold 9 tensors of layers that config\.json does not have, such as 'model\.lay"),
        ({"num_key_value_heads": 4}, "cannot be read"),
        ({"num_hidden_layers": 10**9}, r"says num_hidden_layers=1,000,000,000, but the weights are \d+ tensors"),
        ({"vocab_size": 10**9}, r"takes 256\.0 GB of memory, but its weights' files have 0?\.?\d+\.?\d* MB and"),
        ({"intermediate_size": 10**8}, r"takes 76\.8 GB of memory, but"),
        ({"vocab_size": -5}, r"config\.json in .* cannot be used \(.*: correct it"),
        ({"hidden_act": "nonesuch"}, r"config\.json in .* cannot be used \(.*: correct it"),
    ],
)
def test_weights_of_another_configuration_are_refused(folders, tmp_path, change, message):
    """What a checkpoint lacks would be drawn at random, and the rest left out, without a word."""
    folder = shutil.copytree(folders["llama"], tmp_path / "llama")
    configure(folder, **change)
    refused(message, load, folder)


def test_weights_of_a_model_that_predicts_no_token_are_told_as_such(folders, tmp_path):
    config = transformers.AutoConfig.from_pretrained(folders["llama"], tie_word_embeddings=False)
    with torch.random.fork_rng():
        transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    message = "such as 'lm_head.weight': they are of a LlamaForSequenceClassification, and a LlamaForCausalLM is needed"
    refused(message, load, tmp_path / "classifier")


def test_an_encoder_is_refused_however_little_its_logits_depend_on_tokens_to_come(tmp_path):
    """Drawn with so small weights that logits differ by half a thousandth."""
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng():
        transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes)).save_pretrained(tmp_path)
    refused("BertLMHeadModel is no decoder: its logits depend on tokens to come", load, tmp_path)


def test_broken_files_are_named(folders, tmp_path):
    cut = shutil.copytree(folders["llama"], tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(r"weights in '.*cut' cannot be read .*: a file is missing, truncated", load, cut)
    garbled = shutil.copytree(folders["llama"], tmp_path / "garbled")
    (garbled / "config.json").write_text("{")
    refused(r"config\.json in '.*garbled' is no JSON", load, garbled)


def test_unknown_device(folders):
    refused("device='gpu': give 'cpu', 'cuda'", load, folders["llama"], device="gpu")


def test_unknown_architecture(tmp_path, random_hf_model):
    for settings in ({"model_type": "nonesuch"}, {"model_type": "t5"}, {}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        refused("unknown architecture", load, tmp_path)
    (tmp_path / "config.json").unlink()
    refused(r"no config\.json", load, tmp_path)
    from transformers import LlamaForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        classifier = LlamaForSequenceClassification(random_hf_model("llama").config)
    refused("unknown architecture 'LlamaForSequenceClassification'", load, classifier)


def test_other_things(folders):
    refused("a dict cannot be loaded", load, {})
    refused("no tokenizer in", load, folders["llama"], tokenizer="/no/such/folder")


def test_nan_weights(random_hf_model):
    broken = random_hf_model("llama")
    broken.lm_head.weight.data[3, 4] = float("nan")
    refused(r"1 of the weights' tensors hold NaN, the first is lm_head\.weight", load, broken)


def compiled(model):
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp)


def called(model):
    model.compile()


def replaced(model):
    model.forward = torch.compile(model.forward)


def without_numbers(model):
    model.model.layers[1].mlp.to("meta")


def of_two_types(model):
    model.lm_head.double()


def embedded_in_bf16(model):
    model.model.embed_tokens.bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compiled, r"model\.layers\.1\.mlp is compiled \(torch\.compile\)"),
        (called, "this LlamaForCausalLM is compiled"),
        (replaced, "this LlamaForCausalLM is compiled"),
        (without_numbers, r"3 tensors are on the meta device, .* model\.layers\.1\.mlp\.gate_proj\.weight"),
        (of_two_types, r"Hugging Face cannot run .* of types torch\.float32 and torch\.float64: choose one by dtype="),
        (embedded_in_bf16, r"TransformerLens cannot run .* of types torch\.bfloat16 and torch\.float32"),
    ],
)
def test_what_cannot_run_is_refused_at_once(random_hf_model, change, message):
    broken = random_hf_model("llama")
    change(broken)
    start = time.process_time()
    refused(message, load, broken)
    assert time.process_time() - start < 1


def test_compiled_models_are_refused_before_they_are_called(random_hf_model):
    refused("this LlamaForCausalLM is compiled", load, torch.compile(random_hf_model("llama")))
    refused("this TransformerBridge is compiled", load, torch.compile(load(random_hf_model("llama"))))


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_types_that_mix_well_are_read(random_hf_model, part):
    model = random_hf_model("qwen3")
    for layer in model.model.layers:
        getattr(layer.self_attn, part).bfloat16()
    computes(load(model), logits(model))


def test_nothing_touches_the_network(folders, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    model = load(folders["qwen3"])
    prompts = ac.Prompts.from_tokens(TOKENS, tokenizer=model.tokenizer)
    prompt, query = prompts.column("prompt"), prompts.column("query_pos")
    assert forward(model, prompts, prompt=prompt, query=query, on_pattern=lambda *_: None) == "fast"


def test_what_does_not_fit(folders, byte_bpe_tokenizer):
    model = load(folders["llama"])
    refused("another tokenizer", check_fits, model, ac.Prompts.from_tokens(TOKENS, tokenizer=byte_bpe_tokenizer))
    refused("vocabulary has 64", check_fits, model, ac.Prompts.from_tokens([[3, 64]]))
    others = (prompts := ac.Prompts.from_tokens([[3, 5]])).targets.assign(token=64)
    refused("from 3 to 64, but .* vocabulary has 64", check_fits, model, replace(prompts, targets=others))
    with pytest.raises(ValueError, match=r"prompt 0 \(counted from 0\): 65 tokens, but the model's context is 64"):
        check_fits(model, ac.Prompts.from_tokens([[3] * 65]))
    check_fits(model, ac.Prompts.from_tokens([[3] * 64, [63, 2]]))


def test_provenance_tells_models_apart(folders, random_hf_model):
    first = model_provenance(load(folders["llama"]))
    assert first == model_provenance(load(folders["llama"])) and json.dumps(first)
    assert first["architecture"] == "LlamaForCausalLM" and first["n_layers"] == 2
    assert first["weights"] == model_provenance(load(random_hf_model("llama")))["weights"], "the same weights in memory"
    swapped, nudged = random_hf_model("llama"), random_hf_model("llama")
    q = swapped.model.layers[1].self_attn.q_proj.weight.data
    q[:16] = q[:16].roll(8, 0)
    nudged.model.layers[0].mlp.up_proj.weight.data[7, 7] += 1e-4
    hashes = {first["weights"], *(model_provenance(load(model))["weights"] for model in (swapped, nudged))}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("architecture", "change"), [("gpt2", {"scale_attn_weights": False}), ("gpt_neox", {"attention_bias": False})]
)
def test_what_transformer_lens_would_get_wrong_is_refused(random_hf_model, architecture, change):
    refused(f"{next(iter(change))}=False", ac.load, random_hf_model(architecture, **change))


def test_what_transformer_lens_asserts_not_to_meet_is_refused():
    with torch.random.fork_rng(devices=[]):
        sizes: Any = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 64}
        many = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**sizes, multi_query=False))
    refused("cannot wrap this GPTBigCodeForCausalLM: GPTBigCode.* only supports multi_query=True", load, many)
