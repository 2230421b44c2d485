"""Previous-token heads that attend so where their output matters, and not where the model predicts."""

from typing import Any

import numpy as np
import pytest
import torch

import align_circuits as ac
from align_circuits.heads.permutation_tests import Distances
from align_circuits.heads.where_heads_matter import previous_where_heads_matter, sizes_of_effects
from align_circuits.prompts.relations import Relation, previous_token

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
    torch.testing.assert_close(
        torch.from_numpy(sizes_of_effects(model, prompts)).float(), expected, rtol=1e-3, atol=1e-5
    )


def test_the_score_is_the_weighted_attention_to_the_token_before(circuit):
    model, prompts = circuit
    table, _ = previous_where_heads_matter(model, prompts)
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

    kept = relation.prompt % 2 == 0
    ones = torch.ones(layers, len(relation), heads)
    some, fewer = p_of(relation, 0.3 * ones * kept[:, None]), p_of(relation.select(kept), ones[:, kept])
    np.testing.assert_array_equal(some, fewer)
    assert (some != p_of(relation, ones)).any(), "the rows make no difference"


def elsewhere_alone(prompts):
    """The prompts with keys of `previous` two tokens back, to which a previous-token head does not attend."""
    old = prompts.relations["previous"]
    rows = [(int(p), int(q), [int(q) - 2]) for p, q in zip(old.prompt, old.query, strict=True)]
    return prompts.with_relations(previous=Relation.from_pairs(rows, prompts=prompts, name="previous"))


def test_localize_names_a_head_by_where_its_output_matters(circuit):
    model, _ = circuit
    (previous,) = (head for head, role in model.roles.items() if role == "previous")
    prompts = elsewhere_alone(TASK.sample(40, model.tokenizer, seed=6))
    found = ac.localize(model, prompts, roles=["previous"], n_controls=0)
    assert found.heads("previous") == [previous] and found.elsewhere == (previous,)
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


def test_candidates_elsewhere_do_not_weigh_on_the_others(circuit):
    """Which else would lose their names where p-values cannot be small: four symbols allow 1/24."""
    model, _ = circuit
    prompts = TASK.sample(40, model.tokenizer, seed=6)
    roles = ["align_query", "align_key", "lookup"]
    alone = ac.localize(model, prompts, roles=roles, n_controls=0)
    found = ac.localize(model, elsewhere_alone(prompts), roles=[*roles, "previous"], n_controls=0)
    assert found.elsewhere and alone.named_heads
    for role in roles:
        assert found.heads(role) == alone.heads(role)
        for metric in ("causal_p", "q"):
            together, apart = (of.table.where(role=role, metric=metric).to_array(metric) for of in (found, alone))
            np.testing.assert_array_equal(together, apart)
