"""Random models, and prompts of which they are right now and then."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import align_circuits as ac


@pytest.fixture(scope="module")
def models(random_hf_model, char_tokenizer):
    """A grouped-query Llama and a GPT-2, with random weights."""
    return {name: ac.load(random_hf_model(name), tokenizer=char_tokenizer) for name in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


@pytest.fixture(scope="session")
def accepting(char_tokenizer) -> Callable[..., ac.Prompts]:
    """Samples prompts of a task of which any token may be right."""

    def sample(task: ac.Seq2SeqTask, n: int) -> ac.Prompts:
        prompts = task.sample(n, char_tokenizer, seed=0)
        accepted = torch.rand(len(prompts.targets), 64, generator=torch.Generator().manual_seed(0)) < 0.5
        return replace(prompts, answer_tokens=torch.arange(64), correct=accepted)

    return sample
