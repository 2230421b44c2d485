"""The training loop: what it computes, and what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from small_training import llama, loss, network, next_token, norms, quiet, same_weights, sample, tokens
from torch import nn

from align_circuits.training.loop import TrainConfig, learning_rate


def linear():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(8, 8)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_it_computes_what_a_plain_loop_computes(optimizer):
    config = TrainConfig(
        steps=12,
        lr=0.05,
        optimizer=optimizer,
        momentum=0.9,
        weight_decay=0.1,
        clip=0.5,
        schedule="cosine",
        warmup=3,
        final=0.1,
    )
    batches = []

    def recorded(step, seed):
        batches.append(sample(step, seed))
        return batches[-1]

    model, plain = linear(), linear()
    run = quiet(model, recorded, loss, replace(config, log_every=1), seed=3)

    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    plain_optimizer = torch.optim.AdamW(groups) if optimizer == "adamw" else torch.optim.SGD(groups, momentum=0.9)
    losses, lengths = [], []
    for number, batch in enumerate(batches, start=1):
        for group in plain_optimizer.param_groups:
            group["lr"] = learning_rate(config, number)
        plain_optimizer.zero_grad()
        value = loss(plain, batch)
        value.backward()
        lengths.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        plain_optimizer.step()
        losses.append(value.item())
    assert len(batches) == 12
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    np.testing.assert_allclose(run.log["loss"][1:], losses, rtol=1e-5)
    np.testing.assert_allclose(run.log["grad_norm"][1:], lengths, rtol=1e-5)
    assert max(lengths) > 0.5, "clipping never acted"


def test_a_llama_decays_its_matrices_to_the_bit_and_no_vectors():
    """Beside PyTorch's own AdamW with the groups written out by name."""
    model, plain = (llama(attention_bias=True, mlp_bias=True).train() for _ in range(2))
    vectors = [weight for name, weight in plain.named_parameters() if "norm" in name or name.endswith("bias")]
    matrices = [weight for weight in plain.parameters() if not any(weight is vector for vector in vectors)]
    assert len(vectors) == 10
    assert len(matrices) == 8
    drawn = []

    def recorded(step, seed):
        drawn.append(tokens(step, seed))
        return drawn[-1]

    def without_dropout(model, ids):
        return next_token(model.eval(), ids)

    quiet(model, recorded, without_dropout, TrainConfig(5, lr=0.01, weight_decay=0.5, clip=None))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    for ids in drawn:
        optimizer.zero_grad()
        without_dropout(plain, ids).backward()
        optimizer.step()
    assert same_weights(model, plain)


def test_without_a_limit_nothing_is_clipped():
    models = [linear(), linear()]
    for model, clip in zip(models, (None, 1e9), strict=True):
        quiet(model, sample, loss, TrainConfig(steps=2, optimizer="sgd", clip=clip))
    assert same_weights(*models)


def test_it_learns_in_bf16_and_keeps_fp32_weights():
    model = linear()
    run = quiet(model, sample, loss, TrainConfig(steps=200, lr=0.02, precision="bf16", log_every=50))
    assert run.log["loss"].iloc[-1] < 0.3 * run.log["loss"].iloc[1]
    assert model.weight.dtype == torch.float32


def test_compiled_it_computes_the_same(monkeypatch):
    models, compiled, original = [network(), network()], [], torch.compile

    def eager(model):  # without a C++ compiler
        compiled.append(model)
        return original(model, backend="eager")

    monkeypatch.setattr(torch, "compile", eager)
    for model, compile in zip(models, (False, True), strict=True):
        quiet(model, sample, loss, TrainConfig(steps=3, compile=compile))
    assert compiled == models[1:]
    assert same_weights(*models)


def test_the_log_has_the_mean_loss_between_rows():
    every = quiet(network(), sample, loss, TrainConfig(steps=10, log_every=1)).log
    every_fourth = quiet(network(), sample, loss, TrainConfig(steps=10, log_every=4), metrics=norms).log
    assert list(every_fourth.columns) == ["step", "loss", "lr", "grad_norm", "norm", "mean"]
    assert list(every_fourth["step"]) == [0, 4, 8, 10]
    assert np.isnan(every_fourth["loss"].to_numpy()[0])
    means = [every["loss"][first:last].mean() for first, last in ((1, 5), (5, 9), (9, 11))]
    np.testing.assert_allclose(every_fourth["loss"][1:], means, rtol=1e-6)


def test_a_batch_is_a_function_of_seed_and_step():
    drawn = []

    def recorded(step, seed):
        drawn.append((step, seed))
        return sample(step, seed)

    for seed in (0, 1, 0):
        quiet(network(), recorded, loss, TrainConfig(steps=5), seed=seed)
    assert drawn[:5] == drawn[10:]
    assert len({seed for _, seed in drawn}) == 10


def test_training_mode_and_frozen_parameters_stay():
    model = network().eval()
    first = model[0].requires_grad_(False)
    before = first.state_dict()["weight"].clone()
    with torch.no_grad():
        quiet(model, sample, loss, TrainConfig(steps=3))
        assert not torch.is_grad_enabled()
    assert not model.training
    assert torch.equal(before, first.state_dict()["weight"])


@given(
    steps=st.integers(1, 40),
    warmup=st.integers(0, 40),
    decay=st.none() | st.integers(0, 40),
    final=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
@settings(max_examples=200, deadline=None)
def test_every_schedule_rises_stays_and_falls(steps, warmup, decay, final, schedule):
    try:
        config = TrainConfig(steps, lr=2.0, schedule=schedule, warmup=warmup, decay=decay, final=final)
    except ValueError:
        assert warmup + (decay or 0) > steps
        return
    rates = np.array([learning_rate(config, step) for step in range(1, steps + 1)])
    assert (rates > 0).all() and (rates <= 2.0).all()
    assert (np.diff(rates[:warmup]) > 0).all()
    assert (np.diff(rates[warmup:]) <= 1e-12).all()
    assert rates[max(warmup, 1) - 1] == 2.0 or schedule != "constant"
    if schedule != "constant" and config.decay_steps:
        assert learning_rate(config, steps + 1) == pytest.approx(2.0 * final)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_by_name(tmp_path, value):
    def broken(model, batch):
        return loss(model, batch) * (value if batch["step"] == 6 else 1.0)

    model = network(momentum=0.0)
    with pytest.raises(FloatingPointError, match=r"step 6: the loss is (nan|inf).*as step 5 left it"):
        quiet(model, lambda step, seed: sample(step, seed) | {"step": step}, broken, TrainConfig(10), out=tmp_path)
    five = network(momentum=0.0)
    quiet(five, sample, loss, TrainConfig(5))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), five.parameters(), strict=True))
    assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    assert quiet(network(momentum=0.0), sample, loss, TrainConfig(10), out=tmp_path).log["step"].iloc[-1] == 10


def test_metrics_keep_their_columns():
    with pytest.raises(ValueError, match=r"'at_0'\], step 1 gives .*'at_1'"):
        quiet(network(), sample, loss, TrainConfig(2, log_every=1), metrics=lambda _, step: {f"at_{step}": 1.0})


def test_nothing_to_train_is_refused():
    refused("nothing to train", quiet, network().requires_grad_(False), sample, loss, TrainConfig(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps=0: give at least 1"),
        ({"steps": 5, "log_every": 0}, "log_every=0"),
        ({"steps": 5, "checkpoint_every": 0}, "checkpoint_every=0"),
        ({"steps": 5, "warmup": 6}, "do not fit into steps=5"),
        ({"steps": 5, "warmup": 3, "decay": 3}, "warmup=3 and decay=3 do not fit"),
        ({"steps": 5, "final": 1.5}, "final=1.5: give a fraction"),
        ({"steps": 5, "optimizer": "muon"}, "rest_lr=None, optimizer='muon': Muon needs rest_lr"),
        ({"steps": 5, "optimizer": "muon-fp32"}, "rest_lr=None, optimizer='muon-fp32': Muon needs rest_lr"),
        ({"steps": 5, "rest_lr": 0.1}, "no other has it"),
        ({"steps": 5, "lr": 0.0}, "must be finite and above 0"),
        ({"steps": 5, "lr": math.nan}, "must be finite and above 0"),
        ({"steps": 5, "clip": 0.0}, "clip=None does not clip"),
    ],
)
def test_bad_configs_are_refused(wrong, message):
    refused(message, TrainConfig, **wrong)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("schedule", "step", "schedule='step': choose 'constant' or 'linear' or 'cosine'"),
        ("optimizer", "muon_fp32", "optimizer='muon_fp32': choose 'adamw' or 'sgd' or 'muon' or 'muon-fp32'"),
        ("precision", "fp16", "precision='fp16': choose 'fp32' or 'bf16'"),
    ],
)
def test_unknown_names_are_refused(name, value, message):
    config = TrainConfig(5)
    object.__setattr__(config, name, value)  # annotations unchecked
    refused(message, config.__post_init__)


def test_batches_drawn_ahead_are_the_same(tmp_path):
    config = TrainConfig(steps=7, log_every=2)
    plain, ahead = network(), network()
    quiet(plain, sample, loss, config)
    quiet(ahead, sample, loss, replace(config, steps=7), ahead=3, out=tmp_path)
    assert same_weights(plain, ahead)


def test_an_error_in_a_batch_drawn_ahead_is_raised():
    def fails(step, seed):
        if step == 3:
            raise OSError("no such file")
        return sample(step, seed)

    with pytest.raises(OSError, match="no such file"):
        quiet(network(), fails, loss, TrainConfig(steps=7), ahead=3)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ValueError, match="the model is on 'cpu'"):
        quiet(network(), sample, loss, TrainConfig(steps=1), graph=True)
