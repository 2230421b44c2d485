"""Writes Hugging Face models as GGUF files, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

DECODER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name: str, architecture: str) -> str:
    stem, _, suffix = name.rpartition(".")
    names = GPT2 if architecture == "gpt2" else DECODER
    parts = stem.removeprefix("model.layers.").removeprefix("transformer.h.").split(".", 1)
    if parts[0].isdigit():
        return f"blk.{parts[0]}.{names[parts[1]]}.{suffix}"
    return f"{names[stem]}.{suffix}"


def permuted(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rows of queries and keys in its rotation, where Hugging Face pairs halves."""
    rows = weight.reshape(n_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path: Path, model: Any, tokenizer: Any = None, quantized: Any = None, extra: Any = (), **keys: Any
) -> Path:
    """Writes a model as llama.cpp's converter does; `keys` are added or replaced, and None leaves one out."""
    config = model.config
    kind = config.model_type
    n_heads: int = config.num_attention_heads
    n_kv_heads: int = getattr(config, "num_key_value_heads", n_heads)
    metadata: dict[str, Any] = {
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        f"{kind}.attention.head_count": n_heads,
    }
    if kind == "gpt2":
        metadata[f"{kind}.attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        metadata |= {
            f"{kind}.attention.head_count_kv": n_kv_heads,
            f"{kind}.attention.key_length": getattr(config, "head_dim", config.hidden_size // n_heads),
            f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{kind}.rope.freq_base": config.rope_parameters["rope_theta"],
            f"{kind}.rope.dimension_count": getattr(config, "head_dim", config.hidden_size // n_heads),
        }
    metadata |= {f"{kind}.vocab_size": config.vocab_size}
    if tokenizer is not None:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        special = set(tokenizer.all_special_tokens)
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in backend["merges"]],
            "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        }
    architecture = keys.pop("architecture", kind)
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata | keys).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            kinds[type(value)](key, value)
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = value.float().numpy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, n_heads if "q_proj" in name else n_kv_heads)
        if kind == "gpt2" and ".c_" in name and name.endswith("weight"):
            array = np.ascontiguousarray(array.T)
        if quantized and array.ndim == 2:
            form = GGMLQuantizationType[quantized]
            writer.add_tensor(gguf_name(name, kind), quantize(array, form), raw_dtype=form)
        else:
            writer.add_tensor(gguf_name(name, kind), array)
    for name, array in dict(extra).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
