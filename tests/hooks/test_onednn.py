"""Linear layers by oneDNN, beside PyTorch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import align_circuits as ac
from align_circuits.hooks.compat import onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what oneDNN is given, which here serves processors without AVX-512 too."""
    given: list[torch.Size] = []
    apply: Callable[..., Tensor] = onednn._Linear.apply

    def counted(activation: Tensor, *others: Any) -> Tensor:
        given.append(activation.shape)
        return apply(activation, *others)

    monkeypatch.setattr(onednn._Linear, "apply", counted)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return given


@pytest.mark.parametrize("kind", ["linear", "linear without bias", "Conv1D"])
def test_outputs_and_gradients_are_those_of_pytorch(kind: str, products: list[torch.Size]):
    generator = torch.Generator().manual_seed(0)
    matrix, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)

    def layer(activation: Tensor) -> Tensor:
        if kind == "Conv1D":
            return torch.addmm(bias, activation, transposed)
        return nn.functional.linear(activation, weight, None if kind == "linear without bias" else bias)

    weight, transposed = nn.Parameter(matrix), nn.Parameter(matrix.mT.contiguous())
    activation = torch.randn(7, 24, generator=generator).requires_grad_()
    factors = torch.randn(7, 40, generator=generator)
    expected = layer(activation)
    (gradient,) = torch.autograd.grad((expected * factors).sum(), activation)
    with onednn.linear_layers():
        output = layer(activation)
    assert len(products) == 1
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad((output * factors).sum(), activation)[0], gradient)


def test_other_types_are_left_to_pytorch(products: list[torch.Size]):
    class Own(nn.Parameter):
        """A weight of a user's own type."""

    activation, weight = torch.ones(2, 4), torch.ones(3, 4)
    with onednn.linear_layers():
        nn.functional.linear(activation.double(), nn.Parameter(weight.double()))
        nn.functional.linear(activation, Own(weight))
        nn.functional.linear(activation, weight)
    assert not products


@pytest.mark.parametrize("off", ["no AVX-512", "oneDNN", "autocast"])
def test_it_is_left_out_where_it_does_not_apply(off: str, products: list[torch.Size], monkeypatch: pytest.MonkeyPatch):
    if off == "no AVX-512":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    if off == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with torch.autocast("cpu", enabled=off == "autocast"), onednn.linear_layers():
        nn.functional.linear(torch.ones(2, 4), nn.Parameter(torch.ones(3, 4)))
    assert not products


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_pass_runs_every_linear_layer_by_it(architecture: str, random_hf_model: Any, products: list[torch.Size]):
    model = ac.load(random_hf_model(architecture))
    ac.score_heads(model, ac.RepeatedTokensTask(length=4).sample(2, model.cfg.d_vocab), ["induction"])
    products_of_a_layer = {"llama": 7, "gpt2": 4}[architecture]
    assert len(products) == products_of_a_layer * model.cfg.n_layers + 1  # and the unembedding
