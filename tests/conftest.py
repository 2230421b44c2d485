"""Fixtures of the whole suite; every shape annotation in the package is checked in every test."""

# ruff: noqa: E402 - what is imported later must find this set
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jaxtyping
from jaxtyping import config, install_import_hook, jaxtyped


def _shapes_checked(*, typechecker):
    """Checks functions with a shape among their annotations: checking all types takes a third of the suite's time."""

    def checked(made):
        annotated = made.__init__ if isinstance(made, type) else made
        has_shapes = "jaxtyping." in repr(getattr(annotated, "__annotations__", None))
        at_the_door = hasattr(annotated, "__wrapped__")  # by `@checked`, whose sentences come first
        return jaxtyped(made, typechecker=typechecker) if has_shapes and not at_the_door else made

    return checked


jaxtyping.jaxtyped = _shapes_checked  # what the hook decorates every function with
install_import_hook("align_circuits", "beartype.beartype")

gc.disable()  # nothing that is imported is garbage: looking for it takes a fifth of the collection of the tests

import importlib.util
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import align_circuits as ac
from align_circuits.models.tokenizer import char_tokenizer as bundled

collect_ignore = ["mutants.py", "soak"]  # programs of their own, with packages that the tests do not need

settings.register_profile("busy", deadline=None)  # on a busy machine an example may take any time
settings.load_profile("busy")

torch.set_num_threads(1)  # tiny models: threads only wait for each other, ten times slower on a busy machine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With PART=1/4 in the environment, the second quarter of the tests, whichever their files.

    It is taken out of the environment: where a test starts pytest, all of that one's tests run.
    """
    part, parts = map(int, os.environ.pop("PART", "0/1").split("/"))
    sides: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        sides[zlib.crc32(item.nodeid.encode()) % parts == part].append(item)
    others, items[:] = sides
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """From here on garbage is collected, but not looked for among half a million objects of modules."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def unchecked_shapes():
    """As for users, who run without checks of shapes, and for flows, which these make ten times as long."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def char_tokenizer():
    return bundled()


@pytest.fixture(scope="session")
def llama_tokenizer(tmp_path_factory):
    """The real Llama 3 vocabulary of 128k tokens, converted from the file that the package `llama-models` carries.

    Once for all workers, in seconds.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with FileLock(shared / "llama3-tokenizer.lock"):
        if not (shared / "llama3-tokenizer").exists():
            _converted().save_pretrained(shared / "llama3-tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(shared / "llama3-tokenizer")


def _converted():
    spec = importlib.util.find_spec("llama_models")
    assert spec is not None, "install the development requirements: make .venv"
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    fast = TikTokenConverter(vocab_file=str(path), extra_special_tokens=special).converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[1],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def byte_bpe_tokenizer(tmp_path_factory):
    """A byte-level BPE of GPT-2's kind, trained here: no BOS token, merges of letters, all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    letters = [chr(code) for case in (65, 97) for code in range(case, case + 26)]
    text = (
        [" " + " ".join(letters)] * 50
        + ["the cat sat on the mat with the dog and the hat"] * 50
        + [" ab cd ri jj"] * 50
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    folder = tmp_path_factory.mktemp("byte-bpe")
    fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(autouse=True)
def unmoved_global_rng():
    """No public call moves the global random state: callers' own experiments stay reproducible."""
    before = torch.get_rng_state()
    yield
    moved = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    assert not moved, "the global torch RNG moved: draw from a torch.Generator instead"


@pytest.fixture(scope="session")
def random_hf_model():
    """Makes a tiny Hugging Face decoder, `random_hf_model("llama")`: all weights random, attention far from uniform."""
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    rope = sizes | {"max_position_embeddings": 64, "initializer_range": 0.3}
    grouped = rope | {"num_key_value_heads": 2}
    configs = {
        "llama": (transformers.LlamaConfig, grouped),
        "qwen2": (transformers.Qwen2Config, grouped),
        "qwen3": (transformers.Qwen3Config, grouped | {"head_dim": 8}),
        "mistral": (transformers.MistralConfig, grouped | {"sliding_window": 5}),
        "gpt2": (
            transformers.GPT2Config,
            {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 64, "n_positions": 64, "initializer_range": 0.3},
        ),
        "gpt_neox": (transformers.GPTNeoXConfig, rope),
        "gpt_oss": (
            transformers.GptOssConfig,
            grouped | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        ),
        "olmo2": (transformers.Olmo2Config, grouped | {"pad_token_id": 0}),
        "gemma2": (transformers.Gemma2Config, grouped | {"head_dim": 8}),
        "phi3": (transformers.Phi3Config, grouped | {"pad_token_id": 0}),
        "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4, "vocab_size": 64, "hidden_size": 32}),
    }

    def make(architecture: str, seed: int = 0, **changes):
        kind, settings = configs[architecture]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(kind(**(settings | changes))).eval()
            for part in model.parameters():
                if part.ndim == 1:  # weights of norms, which begin as ones, and biases, which begin as zeros
                    part.data.add_(torch.randn_like(part), alpha=0.2)
            return model

    return make


@pytest.fixture(scope="session")
def llama(random_hf_model, char_tokenizer):
    """A random grouped-query Llama that reads the bundled vocabulary."""
    return ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)


@pytest.fixture
def exact_arithmetic(monkeypatch):
    """Lifts Hugging Face's softmax and RMSNorm to the weights' own precision: they are float32 whatever the weights."""
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        return plain(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    def norm(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
