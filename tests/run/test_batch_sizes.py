"""Batches of prompts, and smaller ones when memory runs out."""

from types import SimpleNamespace

import pytest
import torch

import align_circuits as ac
from align_circuits.models.planted.hand_built_transformer import HandBuilt, HandBuiltConfig
from align_circuits.run import batch_sizes
from align_circuits.run.batch_sizes import in_batches


def batches_of(tokens: int, *, halve_to: int | None, fits: int, error: type[RuntimeError] | str) -> list[list[int]]:
    """The batches of seven prompts of three tokens that ran, where more than `fits` tokens at once raise an error."""
    ran = []

    def run(batch: torch.Tensor, budget: int) -> None:
        if budget > fits:
            raise RuntimeError(error) if isinstance(error, str) else error("too much")
        ran.append([*batch.tolist(), budget])

    in_batches(run, torch.arange(10, 17), 3, tokens, halve_to=halve_to)
    return ran


ON_A_CPU = (
    "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"
)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ON_A_CPU])
def test_the_same_prompts_come_again_in_halves(error):
    assert batches_of(13, halve_to=None, fits=13, error=error) == [[10, 11, 12, 13, 13], [14, 15, 16, 13]]
    halves = [[10, 11, 6], [12, 13, 6], [14, 15, 6], [16, 6]]
    assert batches_of(13, halve_to=1, fits=1, error=error) == [[prompt, 1] for prompt in range(10, 17)]
    with pytest.raises(RuntimeError):
        batches_of(13, halve_to=1, fits=0, error=error)
    assert batches_of(13, halve_to=6, fits=6, error=error) == halves, "down to the limit itself"
    with pytest.raises(RuntimeError):
        batches_of(13, halve_to=7, fits=6, error=error)
    with pytest.raises(RuntimeError):
        batches_of(13, halve_to=None, fits=6, error=error)


def test_prompts_that_are_longer_than_a_batch_come_one_by_one():
    assert batches_of(2, halve_to=1, fits=1, error=ON_A_CPU) == [[prompt, 1] for prompt in range(10, 17)]


def test_other_errors_are_passed_on():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        batches_of(13, halve_to=1, fits=6, error="shapes do not match")


def test_a_cpu_takes_at_least_one_prompt(monkeypatch):
    model = HandBuilt(HandBuiltConfig(n_layers=1, n_heads=1, d_model=4, d_head=4, d_mlp=4, d_vocab=9, n_ctx=8))
    prompts, cpu = ac.Prompts.from_tokens([[1, 2, 3, 4, 5]]), torch.device("cpu")
    for tokens, fit in [(3, 1), (9, 1), (10, 2)]:
        monkeypatch.setattr(batch_sizes, "CPU_TOKENS", tokens)
        assert batch_sizes.fitting_prompts(model, prompts, cpu, "fast") == fit
        assert batch_sizes.fitting_tokens(model, prompts, cpu) == tokens


def test_an_mlp_of_unknown_width_is_four_times_as_wide_as_the_stream():
    assert batch_sizes.mlp_width(SimpleNamespace(d_model=7)) == 28
    assert batch_sizes.mlp_width(SimpleNamespace(d_model=7, d_mlp=5)) == 5


def test_batches_on_a_gpu_fill_half_of_its_free_memory(random_hf_model, monkeypatch):
    """Prompts of 20 tokens and 4-byte numbers; per token 12 and 4 numbers for each dimension of the stream and MLP, 2
    for each token of the vocabulary, and 4 for each head and each of its scores."""
    model, gpu, numbers = ac.load(random_hf_model("llama")), torch.device("cuda"), 12 * 32 + 4 * 48 + 2 * 64
    prompts, free = ac.Prompts.from_tokens([[1] * 20]), [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 0))
    for engine, scores in [("fast", 4 * 4 * 64), ("reference", 4 * 4 * 20)]:
        for free[0], fit in [
            (0, 1),
            (2 * 3 * 20 * 4 * (numbers + scores), 3),
            (2 * 3 * 20 * 4 * (numbers + scores) - 1, 2),
        ]:
            assert batch_sizes.fitting_prompts(model, prompts, gpu, engine) == fit
    # Beside it, for edited runs: of the unedited one 4 numbers for each layer and dimension of the stream.
    numbers = 4 * 2 * 32 + 16 * 32 + 4 * 48 + 4 * 4 * 20 + 2 * 64
    for free[0], fit in [(0, 20), (2 * 25 * 4 * numbers, 25), (2 * 25 * 4 * numbers - 1, 24)]:
        assert batch_sizes.fitting_tokens(model, prompts, gpu) == fit
