"""Products in bfloat16 on a processor without instructions for it: as PyTorch computes them, in float32's time."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from align_circuits.training import bfloat16
from align_circuits.training.bfloat16 import WidenedProducts, fast_bfloat16
from align_circuits.training.loop import TrainConfig, train

DRAWN = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=DRAWN).bfloat16()


def products():
    a, b, c = drawn(5, 7), drawn(7, 6), drawn(5, 6)
    many = drawn(3, 5, 7)
    return [
        a @ b,
        torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        torch.addmm(c[0], a, b),
        many @ b,
        torch.bmm(many, many.mT),
        torch.baddbmm(drawn(3, 5, 5), many, many.mT, beta=2.0, alpha=0.5),
        torch.nn.functional.linear(many, b.T, c[0]),
        a.float() @ b.float(),
        a[0] * b[:, 0],
    ]


def test_each_product_is_pytorchs_in_the_same_type():
    state = DRAWN.get_state()
    plain = products()
    DRAWN.set_state(state)
    with WidenedProducts():
        widened = products()
    for one, other in zip(plain, widened, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)  # half of bfloat16's last digit, rounded twice


def test_a_product_is_the_exact_one_rounded_once():
    a, b = drawn(40, 300), drawn(300, 40)
    with WidenedProducts():
        widened = a @ b
    exact = (a.double() @ b.double()).bfloat16()
    differing = widened != exact  # where float32's additions lie across the middle of two neighbours
    assert differing.float().mean() < 0.01
    torch.testing.assert_close(widened, exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("settings", [{"is_causal": True}, {}, {"attn_mask": drawn(11, 11)}])
def test_attention_and_its_gradients_are_pytorchs(settings):
    drawings, results = [drawn(2, 3, 11, 8) for _ in range(3)], []
    for context in (nullcontext(), WidenedProducts()):
        query, key, value = inputs = [each.clone().requires_grad_() for each in drawings]
        with context:
            output = scaled_dot_product_attention(query, key, value, **settings)
            (output.float() ** 2).sum().backward()
        results.append([output, *(each.grad for each in inputs)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)  # PyTorch rounds the attention weights
    query, key, value = (each.double() for each in drawings)
    wide: Any = {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in settings.items()}
    exact = scaled_dot_product_attention(query, key, value, **wide)
    off = [(result[0].double() - exact).norm() for result in results]
    assert off[1] <= off[0] * 1.01


@pytest.mark.parametrize(("narrow", "fast"), [(True, True), (True, False), (False, False)])
def test_only_bfloat16_on_a_device_without_instructions_needs_it(monkeypatch, narrow, fast):
    monkeypatch.setattr(bfloat16, "has_fast_bfloat16", lambda _: fast)
    expected = WidenedProducts if narrow and not fast else nullcontext
    assert isinstance(fast_bfloat16(narrow, torch.device("cpu")), expected)


def trained(**settings):
    shape = LlamaConfig(vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape)

    def sample(step, _):
        return torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(step)).repeat(1, 2)

    def loss(network, ids):
        logits = network(ids).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return train(model, sample, loss, TrainConfig(40, lr=3e-3, log_every=1, **settings), progress=False)


MUON = pytest.param(
    {"optimizer": "muon", "rest_lr": 3e-3},
    marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 brought Muon"),
    id="muon",
)


@pytest.mark.parametrize("settings", [pytest.param({"precision": "bf16"}, id="bf16"), MUON])
def test_a_training_takes_the_course_that_pytorchs_own_products_give(monkeypatch, settings):
    courses = {}
    for fast in (True, False):
        monkeypatch.setattr(bfloat16, "has_fast_bfloat16", lambda _, fast=fast: fast)
        courses[fast] = trained(**settings).log["loss"][1:]
    assert list(courses[True]) != list(courses[False])  # so both ways were taken
    assert (courses[True] - courses[False]).abs().max() < 0.01
