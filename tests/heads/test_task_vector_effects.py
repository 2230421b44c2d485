"""Task vectors beside hooks written by hand."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.heads import task_vector_effects
from align_circuits.heads.task_vector_effects import UNSTEERED, replaced, representations, steer, task_vectors
from align_circuits.tables.intervals import mean_interval

PROMPTS = ac.Prompts.from_tokens([[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]])
ZERO = torch.zeros(3, 4, 8)
NAME = "blocks.1.attn.hook_z"


@pytest.fixture(scope="module")
def model(random_hf_model):
    return ac.load(random_hf_model("llama"))


def alone(model: Any, prompt: int, hook: Any) -> torch.Tensor:
    """The logits at the last token of one prompt, without padding."""
    tokens = PROMPTS.tokens[prompt][PROMPTS.mask[prompt]][None]
    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(NAME, hook)])[0, -1].double()


def last_z(model: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for prompt in range(3):
        alone(model, prompt, lambda z, **_: found.append(z[0, -1].clone()))
    return torch.stack(found)


def test_vectors_are_means_at_the_last_token(model):
    z = last_z(model)
    found = representations(model, PROMPTS, [NAME, "blocks.0.hook_mlp_out"])
    torch.testing.assert_close(found[NAME], z.flatten(1), atol=1e-5, rtol=0)
    assert found["blocks.0.hook_mlp_out"].shape == (3, 32)
    vectors = task_vectors(model, [PROMPTS, PROMPTS[[2]]], 1)
    torch.testing.assert_close(vectors, torch.stack([z.mean(0), z[2]]), atol=1e-5, rtol=0)


def test_steering_mixes_two_vectors(model):
    source, target = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    answers = {"own": torch.tensor([3, 4, 5]), "other": torch.tensor([6, 7, 8])}
    table = steer(model, PROMPTS, 1, source, target, answers, (0.0, 0.25))
    assert table.provenance.settings == {"layer": 1, "betas": [0.0, 0.25]} and len(table) == 3 * 2 * 2
    for beta in (UNSTEERED, 0.0, 0.25):
        for answer, tokens in answers.items():
            ranks, log_probs = [], []
            for prompt, token in enumerate(tokens.tolist()):

                def put(z: torch.Tensor, prompt: int = prompt, beta: float = beta, **_: Any) -> torch.Tensor:
                    z = z.clone()
                    if beta != UNSTEERED:
                        z[0, -1] = (1 - beta) * source[prompt] + beta * target[prompt]
                    return z

                logits = alone(model, prompt, put)
                ranks.append(sum(other > logits[token] for other in logits))
                log_probs.append(logits.log_softmax(0)[token])
            rows: Any = table.where(beta=beta, answer=answer).frame.set_index("metric")["value"]
            assert rows["rank"] == pytest.approx(float(sum(ranks)) / 3)
            assert rows["log_prob"] == pytest.approx(float(sum(log_probs)) / 3, abs=1e-4)
    assert table.values is not None and table.weights is not None
    ends = np.stack(mean_interval(table.values, table.weights), 1)
    most = np.where(table.frame["metric"] == "log_prob", 0, np.inf)
    np.testing.assert_allclose(table.frame[["low", "high"]], np.minimum(ends, most[:, None]))
    defaults = steer(model, PROMPTS, 1, source, target, {"own": answers["own"]})
    assert sorted(defaults.frame["beta"].unique()) == [UNSTEERED, 0, 0.25, 0.5, 0.75, 1]


def test_ties_count_one_half(model, monkeypatch):
    logits = torch.tensor([[2.0, 2.0, 1.0, 0.0], [2.0, 2.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    monkeypatch.setattr(task_vector_effects, "_last_logits", lambda *_: (logits, "fast"))
    table = steer(model, PROMPTS, 1, ZERO, ZERO, {"a": torch.tensor([1, 1, 1])}, ())
    assert table.where(metric="rank").frame["value"].tolist() == [(0.5 + 2 + 2) / 3]


def test_the_edit_replaces_all_heads_at_the_last_token():
    edit = replaced(PROMPTS, 2, torch.ones(4, 8))
    assert edit.heads == [(2, 0), (2, 1), (2, 2), (2, 3)] and edit.site == "z"
    assert isinstance(edit.positions, torch.Tensor) and edit.positions.nonzero().tolist() == [[0, 3], [1, 3], [2, 3]]
    (values,) = edit.values.values()
    assert [*edit.values] == ["blocks.2.attn.hook_z"] and (values[:, -1] == 1).all() and (values[:, :-1] == 0).all()


def test_refusals(model):
    for prompts, answers in ((PROMPTS[:0], {"a": torch.zeros(0, dtype=torch.long)}), (PROMPTS, {})):
        with pytest.raises(ValueError, match=rf"{len(prompts)} prompts, {len(answers)} answers: give at least one"):
            steer(model, prompts, 1, ZERO[: len(prompts)], ZERO[: len(prompts)], answers)
    with pytest.raises(ValueError, match="a beta of -1, which in the table marks the model as it is"):
        steer(model, PROMPTS, 1, ZERO, ZERO, {"a": torch.tensor([1, 1, 1])}, (0.5, -1.0))
    unchecked: Any = inspect.unwrap(steer)
    one, most = torch.tensor([1, 1, 1]), model.cfg.d_vocab
    refused(r"target has shape \(2, 4, 8\): give \(3, 4, 8\)", unchecked, model, PROMPTS, 1, ZERO, ZERO[:2], {"a": one})
    for tokens in (one[:2], torch.tensor([1, 1, most]), torch.tensor([-1, 1, 1])):
        refused(
            f"one token for each of 3 prompts, below {most}", unchecked, model, PROMPTS, 1, ZERO, ZERO, {"a": tokens}
        )
    refused("0 groups of", task_vectors, model, [], 1)
    refused(r"2 groups of \[3, 0\] prompts", task_vectors, model, [PROMPTS, PROMPTS[:0]], 1)
