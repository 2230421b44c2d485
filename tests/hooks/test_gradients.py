"""Gradients behind a prefix that runs without one, beside those of whole prompts."""

from typing import Any

import pytest
import torch
from torch import Tensor

import align_circuits as ac
from align_circuits.hooks.gradients import gradients_at
from align_circuits.hooks.names import name_of

FIRST = 9


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox"])
def test_a_prefix_is_run_once_and_changes_no_number(architecture: str, random_hf_model: Any):
    model = ac.load(random_hf_model(architecture))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 64, (2, 14), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, :3] = False  # a padded prompt
    names = [name_of("attn_out", layer) for layer in range(2)]
    seen: list[int] = []

    def scalar(logits: Tensor) -> Tensor:
        seen.append(logits.shape[1])
        return logits.log_softmax(-1)[:, :, 5].sum(0)

    arguments = model, tokens, mask, names, torch.tensor([10, 13]), scalar
    whole, behind = gradients_at(*arguments, fast=True), gradients_at(*arguments, fast=True, first=FIRST)
    assert seen == [2, 2]
    for name in names:
        (activation, gradient), (activation_behind, gradient_behind) = whole[name], behind[name]
        assert gradient[:, :, FIRST:].abs().max() > 1e-4
        torch.testing.assert_close(activation_behind, activation[:, FIRST:], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradient_behind, gradient[:, :, FIRST:], atol=1e-5, rtol=1e-4)
