"""Whether a model can read prompts: its vocabulary, the ids of tokens, its context."""

from functools import partial

import torch

from align_circuits.hooks.hooked_model import HookedModel
from align_circuits.hooks.left_as_found import once_a_call
from align_circuits.prompts.prompts import Prompts, vocabulary_hash


def check_fits(model: HookedModel, prompts: Prompts) -> None:
    """Raises unless the model can read the prompts.

    Raises:
        ValueError: The prompts were written with another vocabulary, have token ids outside the model's vocabulary, or
            are longer than its context.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None and prompts.tokenizer_hash is not None:
        model_hash = once_a_call(model, "vocabulary", partial(vocabulary_hash, tokenizer))
        if model_hash != prompts.tokenizer_hash:
            raise ValueError(
                f"these prompts were written with another tokenizer ({prompts.tokenizer_hash}; the model's is "
                f"{model_hash}): sample them with model.tokenizer"
            )
    tokens = torch.cat([prompts.tokens[prompts.mask], prompts.column("token")])  # a target need not be its prompt's own
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.cfg.d_vocab:
        raise ValueError(
            f"token ids from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary has "
            f"{model.cfg.d_vocab}: sample the prompts with model.tokenizer"
        )
    # Padding does not count: positions begin at the first real token.
    lengths = prompts.mask.sum(1)
    if len(too_long := (lengths > model.cfg.n_ctx).nonzero()[:, 0]):
        first, others = int(too_long[0]), f" and {len(too_long) - 1} others" if len(too_long) > 1 else ""
        raise ValueError(
            f"prompt {first} (counted from 0){others}: {int(lengths[first])} tokens, but the model's context is "
            f"{model.cfg.n_ctx}: give shorter prompts, or fewer examples in each"
        )
