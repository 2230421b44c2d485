"""Ensembles train each member as it would train alone; progress measures beside loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from align_circuits.papers.abrupt.grid import train_on_exemplars
from align_circuits.papers.abrupt.models import ExemplarNet, ExemplarNetConfig, InductionHead, InductionHeadConfig
from align_circuits.papers.abrupt.progress_measures import MEASURES, Evaluation, measure, progress
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.training.loop import TrainConfig

TASK = ExemplarTask(n_classes=12, n_labels=6, n_pairs=3, d_content=8, n_positions=9)
TASKS = [TASK, replace(TASK, burst=3, zipf=1.0), replace(TASK, n_classes=24, p_context=0.5)]
SEEDS = (0, 0, 5)
CONFIG = TrainConfig(100, lr=0.1, optimizer="sgd", clip=None, log_every=50, checkpoint_every=20)


in_each_type = pytest.mark.parametrize(
    ("dtype", "near"), [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-10)]
)


def trained(tasks, seeds, dtype, config=CONFIG, **how):
    net = ExemplarNet(ExemplarNetConfig(6, TASK.d_in, d_head=5, d_hidden=7, init=0.5), seeds).to(dtype)
    worlds = Worlds(tasks, seeds, dtype=dtype)
    return net, train_on_exemplars(net, worlds, config, batch_size=16, probe=40, progress=False, **how)


class Plain(nn.Module):
    """One network as one writes it by hand, all positions of both layers."""

    def __init__(self, member: ExemplarNet):
        super().__init__()
        self.layers = nn.ModuleList()
        for block in member.blocks:
            layer = nn.ModuleDict()
            for name in ("W_Q", "W_K", "W_V"):
                weight = getattr(block.attn, name)[0, 0].detach()
                layer[name] = nn.Linear(*weight.shape, bias=False, dtype=weight.dtype)
                layer[name].weight.data = weight.T.clone()
            self.layers.append(layer)
        parts = []
        for weight, bias in zip(member.classifier.weights, member.classifier.biases, strict=True):
            linear = nn.Linear(*weight.shape[1:], dtype=weight.dtype)
            linear.weight.data, linear.bias.data = weight[0].detach().T.clone(), bias[0, 0].detach().clone()
            parts += [linear, nn.ReLU()]
        self.classifier = nn.Sequential(*parts[:-1])

    def forward(self, stream):
        hidden = torch.ones(stream.shape[1], stream.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = (layer[name](stream) for name in ("W_Q", "W_K", "W_V"))
            stream = stream + (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.classifier(stream[:, -1])


def plain_of(member: Any) -> Plain:
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws weights, which are then replaced
        return Plain(member)


@in_each_type
def test_each_member_trains_as_alone_and_as_a_plain_loop_does(dtype, near):
    config = replace(CONFIG, weight_decay=0.05)  # of weights, not of biases
    together, _ = trained(TASKS, SEEDS, dtype, config)
    for index, (task, seed) in enumerate(zip(TASKS, SEEDS, strict=True)):
        alone, _ = trained([task], [seed], dtype, config)
        start = ExemplarNet(ExemplarNetConfig(6, TASK.d_in, d_head=5, d_hidden=7, init=0.5), [seed]).to(dtype)
        plain, worlds = plain_of(start), Worlds([task], [seed], dtype=dtype)
        biases = [weight for weight in plain.parameters() if weight.ndim == 1]
        weights = [weight for weight in plain.parameters() if weight.ndim == 2]
        optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.05}, {"params": biases}], lr=0.1)
        for step in range(1, 101):
            batch = worlds.batch(step, 16)
            loss = nn.functional.cross_entropy(plain(batch.inputs[0]), batch.label[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for one, other in zip(together.member(index).parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=near, rtol=0)
        for one, other in zip(plain_of(together.member(index)).parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=near, rtol=0)
        assert not torch.allclose(start.blocks[0].attn.W_Q, alone.blocks[0].attn.W_Q, atol=1e-3)


@in_each_type
def test_reduced_heads_train_as_alone(dtype, near):
    tasks = [replace(task, n_positions=0) for task in TASKS]

    def head(tasks, seeds):
        net = InductionHead(InductionHeadConfig(6, TASK.d_content, d_hidden=7), seeds, fixed=["beta_2"]).to(dtype)
        train_on_exemplars(net, Worlds(tasks, seeds, dtype=dtype), CONFIG, batch_size=16, probe=4, progress=False)
        return net

    together = head(tasks, SEEDS)
    assert (together.alpha.detach().diff().abs() > 1e-4).all()  # each went its own way
    for index, (task, seed) in enumerate(zip(tasks, SEEDS, strict=True)):
        for one, other in zip(together.member(index).parameters(), head([task], [seed]).parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=near, rtol=0)


def test_a_killed_ensemble_goes_on_where_it_was(tmp_path, monkeypatch):
    net, table = trained(TASKS, SEEDS, torch.float32)
    original, calls = Worlds.numbers, []

    def dies(self, step, n, kind="train"):
        if kind == "train":
            calls.append(step)
            if step == 77 and len(calls) < 80:
                raise KeyboardInterrupt
        return original(self, step, n, kind)

    monkeypatch.setattr(Worlds, "numbers", dies)
    with pytest.raises(KeyboardInterrupt):
        trained(TASKS, SEEDS, torch.float32, out=tmp_path)
    resumed, same = trained(TASKS, SEEDS, torch.float32, out=tmp_path)
    assert calls[77] == 61  # the checkpoint of step 60
    for one, other in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert table.frame.equals(same.frame)
    refused("another", trained, TASKS[:1], SEEDS[:1], torch.float32, out=tmp_path)


def test_the_table_has_every_measure_of_every_member():
    net, table = trained(TASKS, SEEDS, torch.float32, replace(CONFIG, steps=4, log_every=2))
    assert len(table) == 3 * 3 * len(MEASURES)
    row = table.where(member=1, step=4, measure="ila1").frame["value"].item()
    assert row == pytest.approx(float(measure(net, Evaluation.of(Worlds(TASKS, SEEDS), 40))["ila1"][1]), abs=1e-6)


def test_progress_measures_beside_loops():
    worlds = Worlds([TASK, replace(TASK, burst=3)], [0, 1])
    batch = worlds.batch(0, 6, "icl")
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(2, 6, 7, 7, generator=generator)
    second, logits = torch.rand(2, 6, 7, generator=generator), torch.randn(2, 6, 6, generator=generator)
    measures = progress(first, second, logits, batch)
    for member in range(2):
        ila1, tila2, cla, tla2 = [], [], [], []
        for prompt in range(6):
            ila1 += [float(first[member, prompt, i, i - 1]) for i in range(1, 7)]
            right = [pair for pair in range(3) if batch.right[member, prompt, pair]]
            tila2.append(sum(float(second[member, prompt, 2 * pair + 1]) for pair in right))
            tla2.append(sum(float(second[member, prompt, position]) for position in (1, 3, 5)))
            guess = np.exp(logits[member, prompt].numpy())
            cla.append(sum(guess[label] for label in set(batch.context[member, prompt].tolist())) / guess.sum())
        for name, values in (("ila1", ila1), ("tila2", tila2), ("cla", cla), ("tla2", tla2)):
            assert float(measures[name][member]) == pytest.approx(np.mean(values), abs=1e-6), name


def test_measures_of_an_untrained_network_are_at_chance():
    net = ExemplarNet(ExemplarNetConfig(6, TASK.d_in, d_head=5, d_hidden=7, init=1e-4), [0, 1])
    measures = measure(net, Evaluation.of(Worlds([TASK, TASK], [0, 1]), 400))
    assert measures["ila1"].tolist() == pytest.approx([np.mean([1 / (i + 1) for i in range(1, 7)])] * 2, abs=1e-3)
    assert measures["tla2"].tolist() == pytest.approx([3 / 7] * 2, abs=1e-3)
    assert measures["tila2"].tolist() == pytest.approx([1 / 7] * 2, abs=1e-3)
    assert measures["cla"].tolist() == pytest.approx([1 / 2] * 2, abs=0.1)
    assert measures["icl"].mean().item() < 0.4


def test_what_ties_members_together_is_refused():
    refused("would tie them together", trained, TASKS, SEEDS, torch.float32, replace(CONFIG, clip=1.0))
    net = ExemplarNet(ExemplarNetConfig(6, TASK.d_in), [0])
    refused("1 members, 2 worlds", train_on_exemplars, net, Worlds([TASK, TASK], [0, 1]), CONFIG)
