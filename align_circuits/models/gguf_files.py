"""Reads GGUF files, llama.cpp's format: quantized weights, configuration and tokenizer in one file.

transformers reads them too, but leaves out without a word what it does not know; here that is refused by name.
"""

import importlib.util
import mmap
import re
import struct
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from align_circuits.hooks.compat import gguf_metadata, stored_weights
from align_circuits.models.folder_checks import check_counts, check_memory, checked_reading, memory_of, outline_of

_BLOCK = r"(attn_norm|attn_q|attn_k|attn_v|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)\.weight"
_ENDS = r"(token_embd|output_norm|output)\.weight"

TENSORS = {
    "llama": rf"{_ENDS}|rope_freqs\.weight|blk\.\d+\.{_BLOCK}",
    "qwen2": rf"{_ENDS}|blk\.\d+\.({_BLOCK}|attn_[qkv]\.bias)",
    "qwen3": rf"{_ENDS}|blk\.\d+\.({_BLOCK}|attn_[qk]_norm\.weight)",
    "gpt2": rf"{_ENDS}|output_norm\.bias|position_embd\.weight"
    r"|blk\.\d+\.(attn_norm|attn_qkv|attn_output|ffn_norm|ffn_up|ffn_down)\.(weight|bias)",
}
"""The tensors that transformers reads, for each architecture of GGUF: of those that it maps, the ones that `load` is
tested on. llama.cpp writes Mistral as "llama"; it has no GPT-NeoX that transformers reads."""

GPT2_PRE_TOKENIZERS = ("gpt-2", "smollm")
"""The names in GGUF of what splits text as GPT-2 does, up to digits; see `gguf_tokenizer`."""

LEFT_OUT = {"qwen3": {"head_dim": "qwen3.attention.key_length"}, "gpt2": {"n_positions": "gpt2.context_length"}}
"""Settings that transformers does not read, and takes from the first model of the architecture: their keys in GGUF."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How every Llama from 3.1 to 3.3 scales its rotary frequencies, but for the factor, which is the largest in the file.

Source: `config.json` of Llama 3.1 (Grattafiori et al., The Llama 3 Herd of Models, 2024)."""

LLAMA3_SPLITS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
"""Ways to split text with which llama.cpp begins every text with BOS, where the file does not say otherwise, and takes
whole words of the vocabulary as they are, without merges.

Source: `llama-vocab.cpp` of llama.cpp."""

MOST_PARTS = 2**21
"""How many texts and numbers the arrays in a file may have: a tokenizer of 260,000 tokens has four times as many."""

MOST_TENSORS = 2**14
"""How many tensors, or settings, a file may have; large models have some thousands."""


def read_gguf(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Reads the model in a GGUF file, with its weights dequantized.

    Args:
        path: The file.
        dtype: The dtype of the weights; float32 by default, since a dequantized weight is exact in it.

    Returns:
        A plain Hugging Face model, which can be saved: nothing in it recalls the quantization. Its logits are those of
        `AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)`, but for Llama 3.1 and later, whose scaled
        rotary frequencies that leaves out.

    Raises:
        ImportError: The package `gguf` is missing.
        ValueError: The file is broken, its architecture is unknown, or it holds what transformers would leave out.
    """
    metadata, names = _header(path)
    architecture = metadata["general.architecture"]
    if architecture not in TENSORS:
        raise ValueError(
            f"{str(path)!r} holds the architecture {architecture!r}: of GGUF files, {', '.join(TENSORS)} can be loaded "
            "(Mistral is stored as llama); for others give a folder in the Hugging Face format"
        )
    if unknown := [name for name in names if not re.fullmatch(TENSORS[architecture], name)]:
        raise ValueError(
            f"{str(path)!r} holds {len(unknown)} tensors that no plain {architecture} has, such as {unknown[0]!r}, and "
            "they would be left out: give the model's folder in the Hugging Face format"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling == "none":  # a factor without a type scales all frequencies in llama.cpp
        linear = [metadata.get(f"{architecture}.rope.{key}", 0) for key in ("scaling.factor", "scale_linear")]
        scaling = next((f"by {factor:g}" for factor in linear if factor not in (0, 1)), "none")
    if scaling != "none":
        raise ValueError(
            f"{str(path)!r} scales its rotary frequencies ({scaling}), which would be left out: give the model's "
            "folder in the Hugging Face format"
        )
    if architecture != "gpt2" and f"{architecture}.attention.head_count_kv" not in metadata:
        raise ValueError(
            f"{str(path)!r} does not say how many heads of keys there are (attention.head_count_kv), without which "
            "transformers reads their rows in another order: give the model's folder in the Hugging Face format"
        )
    blocks = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
    counted = metadata.get(f"{architecture}.block_count")
    if isinstance(counted, int) and blocks and max(blocks) >= counted:
        raise ValueError(
            f"{str(path)!r} has a block_count of {counted}, and tensors of block {max(blocks)}: download it again"
        )
    check_counts(path, {"block_count": counted}, len(names))
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    with _reading(path):
        config = AutoConfig.from_pretrained(path.parent, **source)
        for name, key in LEFT_OUT.get(architecture, {}).items():
            setattr(config, name, metadata.get(key, getattr(config, name)))
        check_memory(path, memory_of(outline_of(config, dtype or torch.float32)), path.stat().st_size)
        factors = _rope_factors(path) if "rope_freqs.weight" in names else None
        if factors is not None:
            scaled = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
            # The file holds the factors themselves, transformers only a rule for them: `_check_rope` compares.
            config.rope_parameters = config.rope_parameters | scaled
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            dtype=dtype or torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            **source,
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{str(path)!r} lacks {len(missing)} tensors, such as {missing[0]!r}: download it again")
    if factors is not None:
        _check_rope(path, model, factors)
    stored_weights.forget_quantization(model)
    model.name_or_path = str(path)
    return model


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer in a GGUF file, or None if it has none.

    SmolLM2's splits off every digit before it splits as GPT-2's does. transformers knows the latter step only, and
    reads a run of spaces or newlines before a digit as other tokens than the model was trained on; here it is right.

    Raises:
        ImportError: The package `gguf` is missing.
        ValueError: The file is broken, or names a way to split text that transformers does not know: it would take
            GPT-2's.
    """
    metadata, _ = _header(path)
    if metadata.get("tokenizer.ggml.model", "none") == "none":
        return None
    older = "gpt-2" if metadata["general.architecture"] == "gpt2" else None  # files from before the key existed
    splits = metadata.get("tokenizer.ggml.pre", older)
    by_bytes = metadata["tokenizer.ggml.model"] == "gpt2"
    if by_bytes and splits not in GPT2_PRE_TOKENIZERS and splits not in gguf_metadata.gguf_pre_tokenizers():
        raise ValueError(
            f"the tokenizer in {str(path)!r} splits text in a way that transformers does not know ({splits}), and "
            "would read it as other tokens: give tokenizer=, the model's Hugging Face tokenizer or a folder with it"
        )
    if not by_bytes and metadata.get("tokenizer.ggml.add_space_prefix") is False:
        raise ValueError(
            f"the tokenizer in {str(path)!r} begins texts without a space, which transformers would add: give "
            "tokenizer=, the model's Hugging Face tokenizer or a folder with it"
        )
    how = {"digits_apart": by_bytes and splits == "smollm", "as_llama3": by_bytes and splits in LLAMA3_SPLITS}
    with _reading(path):
        tokenizer = gguf_metadata.gguf_tokenizer(path, **how)
        unlike = gguf_metadata.tokens_of_other_ids(path, tokenizer)
    if unlike:
        raise ValueError(
            f"the tokenizer in {str(path)!r} has tokens that transformers would cut or give other ids, such as "
            f"{unlike[0]!r}: give tokenizer=, the model's Hugging Face tokenizer or a folder with it"
        )
    return tokenizer


def gguf_parameters(path: Path) -> int:
    """Returns how many weights a GGUF file holds, from its header.

    Raises:
        ImportError: The package `gguf` is missing.
        ValueError: The file is broken.
    """
    _header(path)
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def _header(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a file's metadata, with the length of every array in its place, and the names of its tensors."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading a GGUF file needs the package gguf, which is not installed: pip install gguf")
    with _reading(path):
        _check_counts(path)
        metadata, names = gguf_metadata.gguf_header(path)
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ValueError(
            f"{str(path)!r} is one of {parts} parts of a model: merge them into one file (llama-gguf-split --merge "
            "FIRST WHOLE), or give the model's folder in the Hugging Face format"
        )
    return metadata, names


def _check_counts(path: Path) -> None:
    """Raises a ValueError if a file counts more than any model has: its reader goes through them one by one."""
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as file:
        # After the magic and the version, 4 bytes each.
        tensors, settings = struct.unpack_from("<QQ", file, 8)
        offset, entries = 24, 0
        for _ in range(settings if max(tensors, settings) <= MOST_TENSORS else 0):
            (length,) = struct.unpack_from("<Q", file, offset)
            (kind,) = struct.unpack_from("<I", file, offset + 8 + length)
            offset, count = offset + 12 + length, 1
            if kind == _ARRAY:
                kind, count = struct.unpack_from("<IQ", file, offset)
                offset, entries = offset + 12, entries + count
            if entries > MOST_PARTS:
                break
            if kind in _WIDTHS:
                offset += count * _WIDTHS[kind]
                continue
            for _ in range(count):  # texts
                offset += 8 + struct.unpack_from("<Q", file, offset)[0]
    if max(tensors, settings) > MOST_TENSORS or entries > MOST_PARTS:
        raise ValueError(
            f"it counts {tensors:,} tensors, {settings:,} settings and {entries:,} parts of arrays, more than any "
            "model has"
        )


_ARRAY, _WIDTHS = 9, {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}
"""The types of values in the format: of arrays, and the bytes of each kind of number; all others are texts."""


def _reading(path: Path) -> AbstractContextManager[None]:
    return checked_reading(f"{str(path)!r} cannot be read as a GGUF file", "download it again")


def _rope_factors(path: Path) -> Tensor:
    """Returns by how much each rotary frequency is divided: (d_head / 2,), from 1 up."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    return torch.tensor(tensors["rope_freqs.weight"])


def _check_rope(path: Path, model: Any, factors: Tensor) -> None:
    """Raises unless the model divides its rotary frequencies by the factors in the file."""
    actual = model.model.rotary_emb.inv_freq
    base = model.config.rope_parameters["rope_theta"]
    expected = base ** (-torch.arange(len(actual)) / len(actual)) / factors
    if not torch.allclose(actual, expected, rtol=1e-4, atol=0):
        raise ValueError(
            f"{str(path)!r} scales its rotary frequencies otherwise than Llama 3.1 does: give the model's folder in "
            "the Hugging Face format"
        )
