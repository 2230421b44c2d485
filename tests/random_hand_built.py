"""Models of the class of planted circuits whose weights are random."""

from typing import Any

import torch

from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig


def hand_built(kind: type[HandBuilt] = HandBuilt, *, zeros: bool = False, **changes: Any) -> HandBuilt:
    """A model; with `zeros` each head uses some columns of its matrices, and one none, and each MLP some units."""
    sizes = {"n_layers": 3, "n_heads": 4, "d_model": 32, "d_head": 8, "d_mlp": 48, "d_vocab": 64, "n_ctx": 20}
    model, generator = kind(HandBuiltConfig(**{**sizes, **changes})), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        for layer, block in enumerate(model.blocks if zeros else ()):
            attention = block.attn
            for place, weight in enumerate([attention.W_Q, attention.W_K, attention.W_V, attention.W_O.mT]):
                for head, columns in enumerate(weight.mT):
                    columns[: 7 * head + place], columns[9 * (head + 1) + layer + 2 * place :] = 0, 0
            (attention.W_V if layer == 1 else attention.W_Q)[1] = 0
            block.mlp.W_out[10 * layer : 10 * layer + 20] = 0
    return model
