"""Previous-token heads that attend so where their output matters, and not where the model predicts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import align_circuits as ac
from align_circuits.heads import where_heads_matter
from align_circuits.heads.ablate import ablation_baseline
from align_circuits.heads.redrawn_keys import Distances
from align_circuits.heads.role_tests import RoleTests
from align_circuits.heads.thresholds import Thresholds
from align_circuits.heads.where_heads_matter import Elsewhere, previous_where_heads_matter, sizes_of_effects, spread
from align_circuits.hooks.edits import Ablate
from align_circuits.prompts.relations import previous_token
from align_circuits.run.first_order import first_order_effects
from align_circuits.run.target_metrics import TargetMetrics
from align_circuits.tables.provenance import Provenance
from align_circuits.tasks.task import exchanged

TASK = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=3)


@pytest.fixture(scope="module")
def circuit():
    model = ac.planted_circuit(TASK, seed=3, n_heads=4)
    return model, TASK.sample(16, model.tokenizer, seed=5)


def slow_sizes(model, prompts):
    """By the gradient of the mean log-probability, from hooks; means over prompts at each position."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    seen = {}

    def keep(activation, hook):
        activation = activation.detach().requires_grad_() if hook.name == names[0] else activation
        activation.retain_grad()
        seen[hook.name] = activation
        return activation

    with torch.enable_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        log_probs = model(prompts.tokens).log_softmax(-1)
        targets = prompts.targets
        rows = [torch.tensor(targets[name].to_numpy()) for name in ("prompt", "query_pos", "token")]
        log_probs[tuple(rows)].sum().backward()
    sizes = []
    for name in names:
        z, per_prompt = seen[name], len(targets) / len(prompts)
        change = z.detach().mean(0) - z.detach()
        sizes.append((change * z.grad).sum(-1).abs() / per_prompt)
    return torch.stack(sizes).permute(0, 3, 1, 2)


def test_sizes_are_those_of_a_slow_twin(circuit):
    model, prompts = circuit
    expected = slow_sizes(model, prompts)
    assert float(expected.max()) > 1e-3
    means = ablation_baseline(model, prompts, "mean", by="position")
    found = torch.from_numpy(sizes_of_effects(model, prompts, means)).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    targets, edit = TargetMetrics.of(prompts, ("log_prob",)), Ablate([(0, 0)], how="zero")
    of_z: Any = {("z", 0, ""): edit}
    of_queries: Any = {("q", 0, ""): edit}
    for edits, source in ((of_z, prompts), (of_queries, None)):
        with pytest.raises(ValueError, match="by_position"):
            first_order_effects(model, targets, {}, edits, source=source, by_position=True)


@pytest.mark.parametrize("at_once", [64, 3])
def test_the_score_is_the_weighted_attention_to_the_token_before(circuit, at_once, monkeypatch):
    monkeypatch.setattr(where_heads_matter, "AT_ONCE", at_once)
    model, prompts = circuit
    table = previous_where_heads_matter(model, prompts, by="position").table
    sizes, (_, cache) = slow_sizes(model, prompts), model.run_with_cache(prompts.tokens)
    compared = 0
    for layer in range(model.cfg.n_layers):
        pattern = cache["pattern", layer]
        for head in range(model.cfg.n_heads):
            weights = sizes[layer, head, :, 1:]
            if weights.max() < 1e-3:
                continue  # rounding is all there is
            compared += 1
            before = pattern[:, head].diagonal(offset=-1, dim1=1, dim2=2)
            by_prompt = (weights * before).sum(1) / weights.sum(1)
            value = table.where(layer=layer, head=head, metric="previous").frame["value"].item()
            assert np.isclose(value, by_prompt.mean(), atol=1e-3), (layer, head)
    assert compared >= 4


def test_rows_of_weight_0_do_not_count(circuit):
    """P-values with weights of 0 and 1 are those of the rows of weight 1 alone, and their size does not matter."""
    model, prompts = circuit
    prompt, query = prompts.mask[:, 1:].nonzero().T
    rows = {"target": torch.zeros_like(prompt), "prompt": prompt, "query": query + 1}
    relation = previous_token(prompts.inputs, prompts.mask, **rows)
    _, cache = model.run_with_cache(prompts.tokens)
    layers, heads = model.cfg.n_layers, model.cfg.n_heads

    def p_of(relation, weights):
        test = Distances(relation, prompts, layers, heads, weights)
        for layer in range(layers):
            pattern = cache["pattern", layer][relation.prompt, :, relation.query]
            test.add(torch.arange(len(relation)), layer, pattern)
        return test.p_values(np.random.default_rng())

    ones = torch.ones(layers, len(relation), heads)
    for kept in (relation.prompt % 2 == 0, relation.query <= 20):
        some, fewer = p_of(relation, 0.3 * ones * kept[:, None]), p_of(relation.select(kept), ones[:, kept])
        np.testing.assert_allclose(some, fewer, rtol=1e-6)
        assert (some != p_of(relation, ones)).any(), "the rows make no difference"


def test_distances_that_hardly_any_weight_reaches_do_not_make_p_small(circuit):
    """Attention at random, all weight at the first positions: p is among few distances, and no smaller than that."""
    _, prompts = circuit
    prompt, query = prompts.mask[:, 1:].nonzero().T
    rows = {"target": torch.zeros_like(prompt), "prompt": prompt, "query": query + 1}
    relation = previous_token(prompts.inputs, prompts.mask, **rows)
    length, heads = prompts.mask.shape[1], 400
    generator = torch.Generator().manual_seed(1)
    pattern = torch.rand(heads, length, length, generator=generator).pow(4).tril()  # the same in all prompts
    pattern = (pattern / pattern.sum(-1, keepdim=True))[:, relation.query].transpose(0, 1)
    for last in (3, 6, length):
        weights = (relation.query <= last).float()[None, :, None].expand(1, -1, heads)
        test = Distances(relation, prompts, 1, heads, weights)
        test.add(torch.arange(len(relation)), 0, pattern)
        p, smallest = test.p_values(np.random.default_rng(0)), test.smallest_of_heads()
        assert (smallest > 1 / (last + 1)).all() and (p >= smallest - 1e-9).all()
        assert (p <= 0.05).mean() <= 0.07


@pytest.fixture(scope="module")
def elsewhere():
    """A planted circuit whose previous-token head attends to the first token where the model predicts."""
    model = ac.planted_circuit(TASK, seed=3, n_heads=4)
    ((layer, head),) = (head for head, role in model.roles.items() if role == "previous")
    prompts = TASK.sample(40, model.tokenizer, seed=6)
    first = int(prompts.column("query_pos").min())

    def away(tensor, *, hook):  # noqa: ARG001 - called by name
        there = torch.zeros_like(tensor[:, head, first:])
        there[..., 0] = 1
        changed = tensor.clone()
        changed[:, head, first:] = there
        return changed

    model.add_perma_hook(f"blocks.{layer}.attn.hook_pattern", away)
    return model, prompts, (layer, head)


def test_localize_names_a_head_by_where_its_output_matters(elsewhere):
    model, prompts, previous = elsewhere
    found = ac.localize(model, prompts, roles=["previous"], n_controls=0, redundant=True)
    assert found.heads("previous") == [previous] and found.elsewhere == (previous,)
    assert found.redundant_heads("previous") == [previous]
    layer, head = previous
    frame: Any = found.table.where(layer=layer, head=head, role="previous").frame
    row = frame.set_index("metric")["value"]
    assert row["score"] > 0.9 and row["score"] == row["attention"] and row["p"] <= 0.05
    assert f"not by where the model predicts: L{layer}H{head}. The score" in found.summary
    # Others keep their own rows, a decoy that writes nothing among them.
    plain = ac.score_heads(model, found.prompts, "previous").to_array("previous")
    scores = found.table.where(metric="score").to_array("score")
    others = [head for head in np.ndindex(*scores.shape) if head != previous]
    assert all(np.isclose(scores[head], plain[head]) for head in others)


def test_a_head_that_attends_so_where_the_model_predicts_is_scored_there(circuit):
    model, _ = circuit
    found = ac.localize(model, TASK, 24, n_controls=0)
    (previous,) = (head for head, role in model.roles.items() if role == "previous")
    assert previous in found.heads("previous") and previous not in found.elsewhere
    assert "not by where the model predicts" not in found.summary


def test_candidates_elsewhere_do_not_weigh_on_the_others(elsewhere):
    """Which else would lose their names where p-values cannot be small: four symbols allow 1/24."""
    model, prompts, previous = elsewhere
    roles = ["align_query", "align_key", "lookup"]
    alone = ac.localize(model, prompts, roles=roles, n_controls=0)
    found = ac.localize(model, prompts, roles=[*roles, "previous"], n_controls=0)
    assert found.elsewhere == (previous,) and alone.named_heads
    for role in roles:
        assert found.heads(role) == alone.heads(role)
        together, apart = (of.table.where(role=role).frame.reset_index(drop=True) for of in (found, alone))
        pd.testing.assert_frame_equal(together, apart)


def test_a_head_elsewhere_keeps_its_other_roles_and_has_limits_of_its_own():
    values = {"induction": {"score": 0.6, "attention": 0.6}, "previous": {"score": 0.7, "attention": 0.7, "p": 0.06}}
    rows = [
        {"layer": 4, "head": 2, "role": role, "metric": metric, "value": value, "low": np.nan}
        for role, of_role in values.items()
        for metric, value in (of_role | {"q": 0.06, "causal_p": 0.01}).items()
    ]
    table = ac.Table(pd.DataFrame(rows).assign(high=np.nan, n=1), Provenance("test"))
    roles = ["induction", "previous"]
    at_floor = {(4, 2): Elsewhere(chance=0.3, smallest_p=0.06, attention=0.05)}
    tests = RoleTests(table, roles, Thresholds(), smallest_p={"previous": 0.01}, elsewhere=at_floor)
    assert not any("more attention" in reason for reason in tests.failed((4, 2), "induction"))
    assert "no p-value on these prompts is smaller" in tests.failed((4, 2), "previous")[0]
    near_chance = {(4, 2): Elsewhere(chance=0.6, smallest_p=0.06, attention=0.05)}
    tests = RoleTests(table, roles, Thresholds(), elsewhere=near_chance)
    assert tests.failed((4, 2), "previous") == ("score 0.70, below 0.75",)
    assert tests.least_score((4, 2), "induction") == 0.5


def test_prompts_that_choose_are_spread_over_groups(circuit):
    _, prompts = circuit
    assert spread(prompts, 4).tokens.equal(prompts[[0, 5, 10, 15]].tokens)
    assert spread(prompts, 99).tokens.equal(prompts.tokens)


def test_a_single_prompt_that_chooses_is_enough(circuit):
    model, _ = circuit
    clean, corrupted = exchanged(TASK.sample(24, model.tokenizer, seed=6))
    related = replace(clean, group=torch.tensor([0] + [1] * 23))
    for roles in (["lookup"], ["previous", "lookup"]):
        found = ac.localize(model, related, corrupted=corrupted, roles=roles, n_controls=0)
        assert len(found.prompts) == 23 and set(found.heads_by_role) == set(roles)
