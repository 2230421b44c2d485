"""The networks for exemplars beside slow loops over their equations."""

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

from align_circuits.hooks.edits import Ablate, Clamp, Patch
from align_circuits.hooks.names import name_of
from align_circuits.papers.abrupt.models import ExemplarNet, ExemplarNetConfig, InductionHead, InductionHeadConfig
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.papers.abrupt.theory import NestedLogits

TASK = ExemplarTask(n_classes=24, n_labels=6, n_pairs=3, d_content=8, n_positions=9)
PLAIN = ExemplarTask(n_classes=24, n_labels=6, n_pairs=3, d_content=8, n_positions=0)


def net_of(seeds=(0, 1), init=0.6) -> ExemplarNet:
    return ExemplarNet(ExemplarNetConfig(6, TASK.d_in, d_head=5, d_hidden=7, init=init), seeds).double()


def head_of(seeds=(0, 1), fixed=()) -> InductionHead:
    net = InductionHead(InductionHeadConfig(6, 8, d_hidden=7), seeds, fixed).double()
    with torch.no_grad():
        for parameter, value in zip((net.alpha, net.beta_1, net.beta_2), (2.0, 1.5, 0.7), strict=True):
            parameter.add_(value)
    return net


def tokens_of(task, members=2, n=5):
    return Worlds([task] * members, range(members), dtype=torch.float64).batch(0, n).inputs


def classified(net, member, read):
    """The classifier, neuron by neuron."""
    hidden = read.tolist()
    layers = list(zip(net.classifier.weights, net.classifier.biases, strict=True))
    for place, (weight, bias) in enumerate(layers):
        w, b = weight[member].tolist(), bias[member, 0].tolist()
        hidden = [sum(h * row[out] for h, row in zip(hidden, w, strict=True)) + b[out] for out in range(len(b))]
        hidden = [max(0.0, h) for h in hidden] if place < len(layers) - 1 else hidden
    return torch.tensor(hidden, dtype=torch.float64)


def attention_layer(net, layer, member, stream):
    """Eqs. 2 and 3, token by token."""
    q, k, v = (getattr(net.blocks[layer].attn, name)[member, 0] for name in ("W_Q", "W_K", "W_V"))
    out, patterns = [], []
    for i in range(len(stream)):
        weights = torch.stack([torch.exp((stream[j] @ k) @ (stream[i] @ q)) for j in range(i + 1)])
        weights = weights / weights.sum()
        patterns.append(weights)
        out.append(stream[i] + sum(weights[j] * stream[j] for j in range(i + 1)) @ v)
    return out, patterns


def test_the_network_is_its_equations():
    net, inputs = net_of(), tokens_of(TASK)
    patterns = {}
    hooks: Any = [(name_of("pattern", layer), lambda p, hook: patterns.__setitem__(hook.name, p)) for layer in (0, 1)]
    with torch.no_grad():
        logits = net.run_with_hooks(inputs, fwd_hooks=hooks)
        for member in range(2):
            for prompt in range(5):
                stream = list(inputs[member, prompt])
                for layer in (0, 1):
                    stream, expected = attention_layer(net, layer, member, stream)
                    fired = patterns[name_of("pattern", layer)].view(2, 5, 7, 7)[member, prompt]
                    for i, row in enumerate(expected):
                        torch.testing.assert_close(fired[i, : i + 1], row, atol=1e-10, rtol=0)
                        assert (fired[i, i + 1 :] == 0).all()
                expected = classified(net, member, stream[-1])
                torch.testing.assert_close(logits[member, prompt], expected, atol=1e-10, rtol=0)


def test_the_short_way_gives_the_same_logits_gradients_and_patterns():
    found = {}
    for way in ("forward", "logits"):
        net, inputs, patterns = net_of(), tokens_of(TASK), {}
        hooks: Any = [
            (name_of("pattern", layer), lambda p, hook, kept=patterns: kept.__setitem__(hook.name, p))
            for layer in (0, 1)
        ]
        with net.hooks(fwd_hooks=hooks):
            logits = net(inputs) if way == "forward" else net.logits(inputs)
        logits.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        found[way] = logits, gradients, patterns[name_of("pattern", 0)], patterns[name_of("pattern", 1)][:, :, -1:]
    torch.testing.assert_close(found["forward"], found["logits"], atol=1e-9, rtol=1e-9)


def test_hook_points_have_transformer_lens_names_and_shapes():
    net = net_of([0])
    _, cache = net.run_with_cache(tokens_of(TASK, 1))
    for layer in (0, 1):
        assert cache[f"blocks.{layer}.attn.hook_pattern"].shape == (5, 1, 7, 7)
        assert cache[f"blocks.{layer}.attn.hook_q"].shape == (5, 7, 1, 5)
        assert cache[f"blocks.{layer}.attn.hook_v"].shape == (5, 7, 1, 17)
        assert cache[f"blocks.{layer}.attn.hook_z"].shape == (5, 7, 1, 17)
        assert cache[f"blocks.{layer}.hook_resid_post"].shape == (5, 7, 17)
    assert set(net.hook_dict) == set(cache)


def test_edits_work_on_vectors_and_leave_nothing_behind():
    net, prompts = net_of([0]).float(), TASK.sample(5)
    before = net(prompts.inputs)
    labels = torch.arange(7).expand(5, 7) % 2 == 1
    _, cache = net.run_with_cache(prompts.inputs.roll(1, 0))
    name = name_of("z", 0)
    edits = [
        Ablate([(1, 0)], site="z", how="zero"),
        Clamp([(0, 0)], "item_of_label"),
        Patch([(0, 0)], site="z", positions=labels, values={name: cache[name]}),
    ]
    for edit in edits:
        with net.hooks(fwd_hooks=edit.fwd_hooks(net, prompts)):
            assert (net(prompts.inputs) - before).abs().max() > 1e-4
    assert torch.equal(net(prompts.inputs), before)
    seen = []
    with net.hooks(
        fwd_hooks=[*edits[1].fwd_hooks(net, prompts), (name_of("pattern", 0), lambda p, hook: seen.append((p, hook)))]
    ):
        net.logits(prompts.inputs)
    assert torch.equal(seen[0][0][:, 0, 1::2].argmax(-1), torch.tensor([0, 2, 4]).expand(5, 3))


def test_a_member_is_the_network_of_its_seed_alone():
    several, alone = net_of([3, 8]), net_of([8])
    for (name, one), (_, other) in zip(several.member(1).named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert several.member(0).cfg.dtype == torch.float64
    assert not torch.equal(several.blocks[0].attn.W_Q[0], several.blocks[0].attn.W_Q[1])


def test_the_induction_head_is_its_equations():
    net, inputs = head_of(), tokens_of(PLAIN)
    with torch.no_grad():
        net.alpha[1], net.beta_2[1] = 0.4, -1.0
        logits = net(inputs)
        for member in range(2):
            alpha, beta_1, beta_2 = (float(value[member]) for value in (net.alpha, net.beta_1, net.beta_2))
            for prompt in range(5):
                c = inputs[member, prompt]
                buffers = []
                for i in range(7):
                    weights = torch.tensor([np.exp(beta_1 * (j == i - 1)) for j in range(i + 1)], dtype=torch.float64)
                    buffers.append(torch.stack([w * c[j] for j, w in enumerate(weights / weights.sum())]).sum(0))
                scores = [np.exp(alpha * float(buffers[j] @ c[-1]) + beta_2 * ((6 - j) % 2)) for j in range(7)]
                read = torch.stack([score / sum(scores) * c[j] for j, score in enumerate(scores)]).sum(0)
                expected = classified(net, member, torch.cat([c[-1], read]))
                torch.testing.assert_close(logits[member, prompt], expected, atol=1e-10, rtol=0)


def test_a_fixed_strength_is_not_trained():
    net = head_of(fixed=("beta_2",))
    net(tokens_of(PLAIN)).square().sum().backward()
    assert net.beta_2.grad is None
    assert net.alpha.grad is not None
    assert (net.alpha.grad != 0).all()
    refused("no 'gamma'; choose among alpha, beta_1, beta_2", head_of, fixed=("gamma",))


@pytest.mark.parametrize("layers", [0, 1, 4])
def test_the_classifier_has_as_many_hidden_layers_as_asked(layers):
    net: Any = InductionHead(InductionHeadConfig(6, 8, d_hidden=7, hidden_layers=layers), [0, 1]).double()
    assert len(net.classifier.weights) == layers + 1
    read = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = net.classifier(read)
    for member in range(2):
        torch.testing.assert_close(logits[member, 0], classified(net, member, read[member, 0]), atol=1e-10, rtol=0)


def test_wrong_inputs_are_refused():
    net = net_of()
    refused(r"for 2 members that read 17 dimensions", net, tokens_of(TASK, 1))
    refused(r"for 2 members that read 17 dimensions", net.logits, tokens_of(PLAIN))
    refused("no seeds", net_of, [])


def nested_by_hand(n_labels, n_pairs, xi, alpha, beta_1):
    """Eqs. 7 and 8 with explicit labels: orthonormal vectors, γ_i·l_i = ξ, γ_i·l_j = 0."""
    y = alpha * np.exp(beta_1) / (np.exp(beta_1) + n_pairs)
    total = np.exp(y) + 2 * n_pairs
    read = np.zeros(n_labels)
    read[:n_pairs] = 1 / total
    read[0] = np.exp(y) / total
    logits = xi * read
    return -np.log(np.exp(logits[0]) / np.exp(logits).sum())


@pytest.mark.parametrize(("n_labels", "n_pairs"), [(32, 8), (8, 8), (5, 2)])
def test_the_nested_loss_is_a_softmax_over_labels(n_labels, n_pairs):
    loss = NestedLogits(n_labels, n_pairs)
    for parameters in np.random.default_rng(0).normal(0, 2, (20, 3)):
        assert loss(parameters) == pytest.approx(nested_by_hand(n_labels, n_pairs, *parameters), abs=1e-12)
        steps = 1e-5 * np.eye(3)
        numeric = np.array([loss(parameters + step) - loss(parameters - step) for step in steps]) / 2e-5
        np.testing.assert_allclose(loss.gradient(parameters), numeric, atol=1e-7)


def test_the_slope_at_the_origin_is_the_papers():
    slope = NestedLogits(32, 8).gradient(np.zeros(3))
    np.testing.assert_allclose(slope, [-(32 - 8) / (32 * 17), 0, 0], atol=1e-15)
    np.testing.assert_array_equal(NestedLogits(8, 8).gradient(np.zeros(3)), 0)


def test_the_flow_is_the_limit_of_gradient_descent():
    loss, times = NestedLogits(16, 4), np.array([0.0, 10.0, 20.0])
    at = np.zeros(3)
    for _ in range(20_000):
        at = at - 1e-3 * loss.gradient(at)
    np.testing.assert_allclose(loss.gradient_flow(times)[-1], at, rtol=1e-2, atol=1e-3)
    assert (np.diff(loss(loss.gradient_flow(np.linspace(0, 200, 50)))) < 0).all()


def test_the_slow_valley_keeps_falling():
    loss = NestedLogits(8, 8)
    path: Any = loss(loss.gradient_flow(np.array([0.0, 1e3, 3e3, 1e5]), np.full(3, -0.1)))
    np.testing.assert_allclose(path[1:], [0.94, 0.15, 0.0026], rtol=0.01)


def test_bad_flows_are_refused():
    refused("give at least 2 pairs and as many labels", NestedLogits, 4, 8)
    refused("give ascending times that start at 0", NestedLogits().gradient_flow, np.array([1.0, 2.0]))
