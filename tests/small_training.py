"""Trainings so small that a test runs many of them."""

from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.training.loop import train

quiet = partial(train, progress=False)


def network(seed=0, width=16, momentum=0.1):
    """Dropout draws random numbers in the forward pass; the batch norm's running mean is a buffer that changes."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers = [
            nn.Linear(8, width),
            nn.BatchNorm1d(width, momentum=momentum),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 8),
        ]
    return nn.Sequential(*layers)


def sample(_step, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": [x.flip(1)]}


def loss(model, batch):
    return (model(batch["x"]) - batch["y"][0]).square().mean()


def norms(model, _step):
    assert not model.training and not torch.is_grad_enabled()
    return {"norm": model[0].weight.norm().item(), "mean": model[1].running_mean.sum().item()}


def same_weights(one, other):
    return all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def llama(**shape):
    """A Llama with dropout and tied embeddings."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LlamaForCausalLM(config)


def tokens(_step, seed):
    return torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(seed))


def next_token(model, ids):
    return nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
