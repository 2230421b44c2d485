"""Interventions beside the attention and logits that they leave."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from align_circuits.hooks.names import name_of
from align_circuits.papers.abrupt.grid import train_on_exemplars
from align_circuits.papers.abrupt.interventions import (
    INTERVENTIONS,
    OPERATION_SITES,
    Intervention,
    attend_to_label,
    attend_to_previous,
    fix_attention_to_labels,
    remove_operation,
    restrict_to_context,
)
from align_circuits.papers.abrupt.models import ExemplarNet, ExemplarNetConfig, InductionHead, InductionHeadConfig
from align_circuits.papers.abrupt.task import ExemplarTask, Worlds
from align_circuits.training.loop import TrainConfig

TASK = ExemplarTask(n_classes=12, n_labels=6, n_pairs=3, d_content=8, n_positions=9)
WORLDS = Worlds([TASK, replace(TASK, burst=3)], [0, 1])
BATCH = WORLDS.batch(0, 4, "icl")
ITEMS, LABELS = [0, 2, 4, 6], [1, 3, 5]


def network() -> ExemplarNet:
    return ExemplarNet(ExemplarNetConfig(6, TASK.d_in, d_head=5, d_hidden=7, init=0.5), [0, 1])


def patterns(net: ExemplarNet, intervention: Intervention | None = None) -> list[torch.Tensor]:
    """Both layers' attention `[prompt query key]`, of the second the target's alone; then the logits."""
    seen: list[torch.Tensor] = []
    probes = [(name_of("pattern", layer), lambda pattern, hook: seen.append(pattern[:, 0])) for layer in range(2)]  # noqa: ARG005
    with net.hooks(fwd_hooks=[*(intervention(BATCH) if intervention else ()), *probes]):
        logits = net.logits(BATCH.inputs)
    return [seen[0].detach(), seen[1].detach(), logits.detach()]


def test_the_first_layer_attends_to_the_previous_token():
    for tokens, rows in (("all", range(1, 7)), ("labels", LABELS), ("items", ITEMS[1:])):
        net = network()
        first = patterns(net, attend_to_previous(net, tokens))[0]
        before = first.diagonal(-1, 1, 2)
        assert (before[:, [row - 1 for row in rows]] == 1).all()
        assert (before[:, [row - 1 for row in range(1, 7) if row not in rows]] < 0.999).all()
        torch.testing.assert_close(first.sum(-1), torch.ones(8, 7))
    refused("tokens='even': choose 'all', 'labels' or 'items'", attend_to_previous, network(), "even")


@pytest.mark.parametrize("right", [True, False])
def test_the_target_attends_to_its_label(right):
    net = network()
    second = patterns(net, attend_to_label(net, right))[1][:, 0]
    for row, chosen in zip(second, (BATCH.right == right).flatten(0, 1), strict=True):
        if chosen.any():
            expected = torch.zeros(7)
            expected[1::2] = chosen.float() / chosen.sum()
            torch.testing.assert_close(row, expected)
    own = patterns(net)[1][:, 0]
    none = ~(BATCH.right == right).flatten(0, 1).any(-1)
    assert none.any() == (not right)  # where B = N there is no wrong label
    torch.testing.assert_close(second[none], own[none])


def test_labels_get_no_more_than_their_share():
    net = network()
    second, own = (patterns(net, intervention)[1][:, 0] for intervention in (fix_attention_to_labels(net), None))
    torch.testing.assert_close(second[:, LABELS].sum(-1), torch.full((8,), 3 / 7))
    torch.testing.assert_close(second.sum(-1), torch.ones(8))
    torch.testing.assert_close(second[:, 1] / second[:, 3], own[:, 1] / own[:, 3])


def test_labels_outside_the_context_are_ruled_out():
    net = network()
    logits, own = (patterns(net, intervention)[2] for intervention in (restrict_to_context(net), None))
    for member in range(2):
        for prompt in range(4):
            for label in range(6):
                present = label in BATCH.context[member, prompt].tolist()
                expected = own[member, prompt, label] if present else torch.tensor(-torch.inf)
                torch.testing.assert_close(logits[member, prompt, label], expected)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("operation", OPERATION_SITES)
def test_an_operation_is_removed_and_nothing_else(operation, control):
    net = network()
    own, left = patterns(net), patterns(net, remove_operation(net, operation, control))
    layer = 0 if operation in ("look back", "write") else 1
    ones, others = (ITEMS, LABELS) if control else (LABELS, ITEMS)
    expected = [pattern.clone() for pattern in own[:2]]
    for prompt in range(8):
        if operation == "look back":
            for query in ones:
                expected[0][prompt, query] = 0
                expected[0][prompt, query, : query + 1] = 1 / (query + 1)
        elif operation == "write":
            for query in ones:
                expected[0][prompt, query, others] = 0
        elif operation == "match":
            expected[1][prompt, 0, ones] = own[1][prompt, 0, ones].mean()
        else:
            expected[1][prompt, 0, ones] = 0
    torch.testing.assert_close(left[layer], expected[layer])
    assert not torch.allclose(left[2], own[2])
    if layer:
        torch.testing.assert_close(left[0], own[0])
    refused("operation='guess': choose one of look back, write, match, read", remove_operation, net, "guess")


def trained_under(net, worlds, intervention):
    config = TrainConfig(3, lr=0.1, optimizer="sgd", clip=None, log_every=3)
    how: Any = {"batch_size": 8, "probe": 20, "intervention": intervention, "progress": False}
    return train_on_exemplars(net, worlds, config, **how)


FIXED_MEASURES = {
    "previous": ("ila1", 1),
    "TLA2 fixed": ("tla2", 3 / 7),
    "CLA fixed": ("cla", 1),
    "target's label": ("tila2", 1),
}


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_a_network_trains_under_every_intervention(name):
    net = network()
    table = trained_under(net, WORLDS, INTERVENTIONS[name](net))
    if name in FIXED_MEASURES:
        measure, value = FIXED_MEASURES[name]
        values = table.where(measure=measure).frame["value"].to_numpy()
        assert values == pytest.approx([value] * len(values), abs=1e-5)


def test_a_reduced_head_is_overridden_alike():
    net = InductionHead(InductionHeadConfig(6, 8, d_hidden=7), [0, 1])
    table = trained_under(net, Worlds([replace(TASK, n_positions=0)] * 2, [0, 1]), attend_to_label(net))
    assert table.where(measure="tila2").frame["value"].to_numpy() == pytest.approx([1] * 4)
