"""A small GPT-2 to train from scratch: a Hugging Face model, which `load` gives TransformerLens's hooks."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def small_gpt2(
    d_vocab: int,
    n_ctx: int,
    *,
    d_model: int = 256,
    n_layers: int = 2,
    n_heads: int = 1,
    tied: bool = True,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """Makes a GPT-2 with new weights, without dropout.

    The sizes are the paper's by default; it does not say whether embeddings are tied or dropped out. The initial
    values, which it does not give either, are Hugging Face's: N(0, 0.02²), those that write to the residual stream
    divided by sqrt(2 n_layers). GELU is the tanh form of GPT-2 in PyTorch's fused kernel, attention PyTorch's own. For
    analysis, `align_circuits.load(model)` wraps it in place (give a copy to go on training).

    Source: Vasudeva et al. (2026), App. B: "a 2-layer 1-head GPT-2 type decoder", d_model 256.

    Args:
        d_vocab: Tokens in the vocabulary; it is not padded.
        n_ctx: The longest sequence.
        d_model: The width of the residual stream, a multiple of `n_heads`.
        n_layers: Blocks.
        n_heads: Heads of each.
        tied: Whether embedding and unembedding are one matrix. The first of two is that of the tied model.
        seed: Of the weights; global random state is not changed.

    Raises:
        ValueError: A number below 1, or a width that the heads do not divide.
    """
    sizes = {"d_vocab": d_vocab, "n_ctx": n_ctx, "d_model": d_model, "n_layers": n_layers, "n_heads": n_heads}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    if d_model % n_heads:
        raise ValueError(f"d_model is {d_model}, which {n_heads} heads do not divide: give a multiple")
    config = GPT2Config(
        vocab_size=d_vocab,
        n_positions=n_ctx,
        n_embd=d_model,
        n_layer=n_layers,
        n_head=n_heads,
        activation_function="gelu_pytorch_tanh",
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GPT2LMHeadModel(config)
