"""A folder from elsewhere runs no code, takes no memory that its weights do not need, and holds nobody up."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from refusals import refused

import align_circuits as ac
from align_circuits.jobs.checkpoint_files import NAME
from align_circuits.models.folder_checks import _tensors_in, check_adapter
from align_circuits.models.gguf_files import read_gguf
from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # inside peft 0.21

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig as Own, LlamaForCausalLM as OwnModel, PreTrainedTokenizerFast as OwnTokenizer
"""


SLOW = "(([a-z_.0-9]+)+)+!"
"""Takes forever on the names of modules."""


class Malicious:
    """A pickle of it makes a folder when it is opened."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """What exists once code of the folder has run; a pickle that is opened makes it."""
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Malicious(mark)))
    mark.rmdir()
    yield mark
    assert not mark.exists(), "code of the folder ran"


@pytest.fixture
def folder(random_hf_model, char_tokenizer, tmp_path):
    random_hf_model("llama").save_pretrained(tmp_path / "llama")
    char_tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def adapter(random_hf_model, folder, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped: Any = get_peft_model(random_hf_model("llama"), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    change(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    assert ac.load(tmp_path / "adapter") is not None
    return tmp_path / "adapter"


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_no_weights_are_unpickled(folder, adapter, mark):
    torch.save(Malicious(mark), folder / "pytorch_model.bin")
    torch.save(Malicious(mark), adapter / "adapter_model.bin")
    assert ac.load(folder) is not None, "beside safetensors a pickle is left alone"
    assert ac.load(adapter) is not None
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refused("cannot be read", ac.load, folder)
    (folder / "other.safetensors").rename(folder / "model.safetensors")
    (adapter / "adapter_model.safetensors").rename(adapter / "other.safetensors")
    refused(r"no safetensors weights .* since they can run code", ac.load, adapter)
    for place, name in ((folder, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        torch.save(Malicious(mark), place / name)
        refused("cannot be read", ac.load, place)


@pytest.mark.parametrize("kind", ["llama", "nonesuch"])
def test_no_code_of_a_model_runs(folder, mark, kind):
    for name in ("own.py", "__init__.py", "modeling.py"):
        (folder / name).write_text(CODE.format(mark=str(mark)))
    change(
        folder / "config.json",
        model_type=kind,
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"},
        trust_remote_code=True,
        attn_implementation="nobody/kernel",
        _attn_implementation="nobody/kernel",
    )
    if kind == "llama":
        assert ac.load(folder).cfg.n_layers == 2, "transformers' own code reads it"
    else:
        refused("unknown architecture 'nonesuch'", ac.load, folder)


def test_no_code_of_a_tokenizer_runs(folder, mark):
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    change(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
        tokenizer_class="OwnTokenizer",
        trust_remote_code=True,
    )
    refused(r"tokenizer in .* cannot be used \(.*custom code.*give another as tokenizer=", ac.load, folder)


def test_what_the_package_keeps_is_never_unpickled(tmp_path, mark):
    frame = pd.DataFrame({"metric": ["a"], "value": [0.5], "low": [0.4], "high": [0.6], "n": [1]})
    Table(frame, Provenance("t")).save(tmp_path / "kept")
    prompts = tmp_path / "prompts.safetensors"
    checkpoint = tmp_path / "training" / NAME
    checkpoint.parent.mkdir()
    for file in (tmp_path / "kept" / "values.safetensors", checkpoint, prompts, tmp_path / "cut.gguf"):
        torch.save(Malicious(mark), file)
    refused(r"values\.safetensors", Table.load, tmp_path / "kept")
    task, config = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=2), ac.TuneConfig(steps=1, batch=1, layers=1)
    refused("broken or no checkpoint", ac.tune, ac.load("toy-llama"), task, config, out=tmp_path)
    refused("holds no prompts", ac.Prompts.load, prompts)
    refused("cannot be read as a GGUF file", read_gguf, tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": SLOW}, r"regular expressions that cannot be used \(matching .* 0.5 s\)"),
        ({"exclude_modules": "(.*)*(.*)*!"}, r"regular expressions that cannot be used \(matching .* 0.5 s\)"),
        ({"rank_pattern": {SLOW: 2}}, r"regular expressions that cannot be used \(matching .* 0.5 s\)"),
        ({"target_modules": "(q_proj"}, r"cannot be used \(re\.error: missing \)"),
        ({"r": 10**9}, "says r=1,000,000,000, but its weights have at most 32 rows"),
        ({"rank_pattern": {"q_proj": 10**9}}, "says rank_pattern.q_proj=1,000,000,000, but its weights"),
        ({"r": "many"}, r"adapter in .* cannot be used \(.*: correct adapter_config\.json"),
    ],
)
def test_a_spiteful_adapter_is_refused_in_time(adapter, settings, message, monkeypatch):
    monkeypatch.setattr("align_circuits.models.folder_checks.PATIENCE_S", 0.5)
    change(adapter / "adapter_config.json", **settings)
    started = time.monotonic()
    refused(message, ac.load, adapter)
    assert time.monotonic() - started < 5


def test_a_schedule_is_no_size(adapter):
    check_adapter(adapter, {"tinit": 200, "tfinal": 300, "deltaT": 100, "total_step": 900}, ())  # AdaLoRA's


def test_an_index_names_safetensors_of_its_folder_alone(folder, tmp_path, mark):
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    torch.save(Malicious(mark), folder / "w.bin")
    shutil.copy(folder / "decoy.safetensors", tmp_path / "w.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "w.safetensors")
    index = folder / "model.safetensors.index.json"
    for name, message in (
        ("w.bin", r"names 'w\.bin': weights are read from safetensors"),
        ("gone.safetensors", "which is missing"),
        ("../w.safetensors", "which lies outside"),
        (str(tmp_path / "w.safetensors"), "which lies outside"),
        ("link.safetensors", "which lies outside"),
        (["decoy.safetensors"], "has no weight_map"),
    ):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
        refused(message, ac.load, folder)
    names = [name for name, _ in _tensors_in(folder)]
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "decoy.safetensors")}))
    (folder / "link.safetensors").unlink()
    assert ac.load(folder) is not None
    change(folder / "config.json", transformers_weights="link.safetensors")
    refused("another name for the file of the weights", ac.load, folder)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def with_names(file: Path, count: int) -> None:
    """Adds empty tensors to a safetensors file."""
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    data = file.read_bytes()[8 + int.from_bytes(file.read_bytes()[:8], "little") :]
    header |= {f"t{at}": {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2} for at in range(count)}
    names = json.dumps(header).encode()
    file.write_bytes(len(names).to_bytes(8, "little") + names + data)


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def with_tokenizer(folder: Path, **parts: Any) -> None:
    change(folder / "tokenizer.json", **parts)


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PADDING = {"direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "0"}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"{name} of {count:,}": (
            lambda folder, name=name, count=count: change(folder / "config.json", **{name: count}),
            "download the folder again|correct config.json",
        )
        for name in ("num_labels", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        for count in (10**8, 10**15)
    },
    "attention heads": (
        lambda folder: change(folder / "config.json", num_attention_heads=10**8),
        "not a multiple of the number of attention heads",
    ),
    "experts": (
        lambda folder: change(folder / "config.json", model_type="mixtral", num_local_experts=10**8),
        "takes .* GB of memory",
    ),
    "deep settings": (lambda folder: (folder / "config.json").write_text(nested(10**5)), "config.json .* is no JSON"),
    "long settings": (lambda folder: (folder / "config.json").write_text(" " * 2**25), "which are no settings"),
    "names": (lambda folder: with_names(folder / "model.safetensors", 400_000), "names with hardly any weights"),
    "a pipe": (lambda folder: as_pipe(folder / "model.safetensors"), "is no file"),
    "a normalizer": (
        lambda folder: with_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40}),
        "normalizer .* makes 1,099,511,627,776 characters of one",
    ),
    "padding": (
        lambda folder: with_tokenizer(folder, padding=PADDING | {"strategy": {"Fixed": 10**9}}),
        "pads every text to 1,000,000,000 tokens",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_folder_that_would_take_all_time_or_memory_is_refused_at_once(folder, case):
    spoil, message = HOSTILE[case]
    ac.load(folder)  # what is imported once
    spoil(folder)
    started = time.process_time()
    refused(message, ac.load, folder)
    assert time.process_time() - started < 2


def test_an_adapter_of_itself_is_refused(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "other")
    for base, name in ((adapter, "adapter"), (tmp_path / "other", "adapter"), (adapter, "other")):
        change(tmp_path / name / "adapter_config.json", base_model_name_or_path=str(base))
    refused("is an adapter of itself", ac.load, adapter)
    change(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    refused("is an adapter of itself", ac.load, adapter)


def test_nobody_trusts_the_code_of_a_folder():
    texts = {path: path.read_text(encoding="utf-8") for path in Path(ac.__file__).parent.rglob("*.py")}
    assert len(texts) > 100 and not [path for path, text in texts.items() if "trust_remote_code=True" in text]


def test_an_adapter_may_name_its_modules_by_a_sane_expression(adapter):
    named = ac.load(adapter)
    change(adapter / "adapter_config.json", target_modules=r".*\.self_attn\.(q|nonesuch)_proj")
    again = ac.load(adapter)
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(named(tokens), again(tokens))
