"""Tiny random decoders of the architectures that people bring: two layers of four heads, attention far from uniform."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 8}
_GPT2 = _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_WINDOW = {"sliding_window": 4}
_GEMMA = _WIDE | _WINDOW | {"query_pre_attn_scalar": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 6.0, 8.0, 12.0],
    "original_max_position_embeddings": 12,
}
_LONG = {"max_position_embeddings": 96, "rope_parameters": _LONG_ROPE}


def _rope(kind: str, **settings: float) -> dict[str, Any]:
    return _GROUPED | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "llama-linear-rope": ("Llama", _rope("linear", factor=2.0)),
    "llama-dynamic-rope": ("Llama", _rope("dynamic", factor=4.0)),
    "llama-yarn-rope": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-llama3-rope": (
        "Llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-long-rope": ("Llama", _GROUPED | _LONG),
    "llama-multi-query": ("Llama", _SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", _GROUPED | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", _GROUPED | _WINDOW),
    "qwen2": ("Qwen2", _GROUPED | _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-moe": ("Qwen2Moe", _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3", _WIDE),
    "qwen3-moe": ("Qwen3Moe", _WIDE | _EXPERTS),
    "gemma": ("Gemma", _WIDE),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA),
    "gpt2": ("GPT2", _GPT2),
    "gpt-bigcode": ("GPTBigCode", _GPT2 | {"multi_query": True}),
    "gpt-neox": ("GPTNeoX", _SIZES),
    "gpt-neox-sequential": ("GPTNeoX", _SIZES | {"use_parallel_residual": False}),
    "gptj": ("GPTJ", _GPT2 | {"rotary_dim": 4}),
    "gpt-neo": (
        "GPTNeo",
        _TOKENS
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "gpt-oss": ("GptOss", _WIDE | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPT", _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "xglm": (
        "XGLM",
        _TOKENS
        | {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
        | {"init_std": 0.3},
    ),
    "phi": ("Phi", _SIZES),
    "phi3": ("Phi3", _GROUPED),
    "phi3-long-rope": ("Phi3", _GROUPED | _LONG | {"original_max_position_embeddings": 12}),
    "olmo": ("Olmo", _GROUPED),
    "olmo2": ("Olmo2", _GROUPED),
    "olmo3": ("Olmo3", _GROUPED | _WINDOW),
    "olmoe": ("Olmoe", _SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", _GROUPED | {"num_local_experts": 4}),
    "cohere": ("Cohere", _GROUPED),
    "cohere-qk-norm": ("Cohere", _GROUPED | {"use_qk_norm": True}),
    "cohere2": ("Cohere2", _GROUPED | _WINDOW | {"logit_scale": 2.0}),
    "stablelm": ("StableLm", _GROUPED),
    "stablelm-parallel": ("StableLm", _GROUPED | {"use_parallel_residual": True, "qk_layernorm": True}),
    "falcon": ("Falcon", _SIZES | {"multi_query": True, "alibi": False}),
    "falcon-alibi": ("Falcon", _SIZES | {"multi_query": False, "alibi": True, "parallel_attn": False}),
    "falcon-sequential": (
        "Falcon",
        _SIZES | {"multi_query": False, "alibi": False, "parallel_attn": False, "bias": True},
    ),
    "falcon-40b": ("Falcon", _SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}),
    "openai-gpt": ("OpenAIGPT", _GPT2),
    "bloom": ("Bloom", _TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("Mpt", _TOKENS | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "granite": (
        "Granite",
        _GROUPED
        | {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0, "attention_multiplier": 0.4},
    ),
    "glm": ("Glm", _WIDE),
    "glm4": ("Glm4", _WIDE),
    "smollm3": ("SmolLM3", _GROUPED),
    "starcoder2": ("Starcoder2", _GROUPED),
    "nemotron": ("Nemotron", _GROUPED),
    "exaone4": ("Exaone4", _GROUPED | _WINDOW | {"sliding_window_pattern": 2}),
    "hunyuan": ("HunYuanDenseV1", _WIDE),
    "ernie4.5": ("Ernie4_5", _WIDE),
    "apertus": ("Apertus", _GROUPED),
    "deepseek-v3": (
        "DeepseekV3",
        _SIZES
        | {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
    ),
}
"""The name of the class in transformers, without its ending, and the arguments of its configuration."""

NOT_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "t5": ("T5", _TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "mamba": (
        "Mamba",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0},
    ),
}
"""What `load` must refuse."""

_HEADS = {"gpt2": "LMHeadModel", "openai-gpt": "LMHeadModel", "bert": "LMHeadModel", "t5": "ForConditionalGeneration"}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a random Hugging Face model of an architecture, in evaluation mode."""
    stem, settings = (ARCHITECTURES | NOT_DECODERS)[name]
    of = {"Gemma3": "Gemma3TextConfig"}.get(stem, f"{stem}Config")
    config_class: Callable[..., Any] = getattr(transformers, of)
    model_class = getattr(transformers, f"{stem}{_HEADS.get(name, 'ForCausalLM')}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**settings)).to(dtype).eval()
        with torch.no_grad():  # larger than at the start of training: attention differs between positions
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
