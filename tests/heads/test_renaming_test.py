"""Renaming beside loops, and on heads that know what a permutation of prompts cannot tell apart."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

import align_circuits as ac
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.renaming_test import _Queries, redraws_tokens
from align_circuits.models.tokenizer import char_tokenizer as bundled
from align_circuits.papers.validation.localize_ground_truth import _RANDOM
from align_circuits.training.toy_llama import untrained

MARKED = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=3, style="marked")


def test_which_relations_are_renamed():
    repeated = ac.RepeatedTokensTask(length=6).sample(4, bundled(), seed=0)
    assert [name for name in repeated.relations if redraws_tokens(repeated, name)] == ["induction", "duplicate"]
    expected: dict[Any, list[str]] = {"marked": ["induction", "duplicate"], "standard": [], "pre-aligned": []}
    for style, renamed in expected.items():
        prompts = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=6, style=style).sample(8, bundled(), seed=0)
        assert [name for name in ("align_query", "induction", "duplicate") if redraws_tokens(prompts, name)] == renamed


def test_contexts_are_renamed_and_queries_replaced():
    prompts = MARKED.sample(3, bundled(), seed=0)
    relations = [prompts.relations[name] for name in ("induction", "duplicate")]
    chosen = _Queries(prompts, relations, np.random.default_rng(0))
    tokenizer: Any = bundled()
    length, marker = chosen.prompts.mask.shape[1], tokenizer.convert_tokens_to_ids("!")
    originals = {tuple(row[:at]) for row in prompts.tokens.tolist() for at, token in enumerate(row) if token == marker}
    rows = chosen.prompts.tokens.view(-1, chosen.names, chosen.names, length)
    masks = chosen.prompts.mask.view(*rows.shape)
    for row, mask, kept, induction, duplicate in zip(rows, masks, chosen.kept, *chosen.keys, strict=True):
        tokens = row[0, 0, -1].item(), *row[0, 1:, -1].tolist()
        assert tokens[0] == marker and len(set(tokens)) == chosen.names == 7
        original = row[0, 0, :-1][mask[0, 0, :-1]].tolist()
        assert tuple(original) in originals
        for i, name in enumerate(tokens):
            swap = {marker: name, name: marker}
            for j, at_query in enumerate(tokens):
                expected = [swap.get(token, token) for token in original] + [at_query]
                assert row[i, j][mask[i, j]].tolist() == expected
        shown = row[0, 0]
        assert kept.tolist() == [
            bool(real) and int(token) not in tokens for token, real in zip(shown, mask[0, 0], strict=True)
        ]
        assert duplicate.nonzero()[:, 0].tolist() == [at for at in range(length - 1) if shown[at] == marker]
        assert induction.nonzero()[:, 0].tolist() == [at for at in range(1, length) if shown[at - 1] == marker]
        assert (induction & kept).any(), "keys are left"


def test_tokens_stand_in_for_a_query_the_later_the_more_keys_they_are():
    chosen: Any = _Queries.__new__(_Queries)
    tokens, known = torch.tensor([1, 2, 2, 3, 4, 5, 6, 1]), torch.arange(1, 7)
    for names, expected in ((4, [{4, 5, 6}]), (6, [{4, 5, 6}, {3}, {2}])):
        chosen.names = names
        for seed in range(5):
            query, *others = chosen._chosen(tokens, tokens[1:4], known, np.random.default_rng(seed)).tolist()
            assert query == 1 and [{*others[:3]}, *({other} for other in others[3:])] == expected


def test_keys_are_those_of_the_prompt_itself():
    prompts = ac.Prompts.from_tokens([[1, 5, 2, 6, 1], [3, 1, 5, 6, 1]])
    induction = ac.Relation.from_pairs([(0, 4, [1]), (1, 4, [2])], prompts=prompts, name="induction")
    chosen = _Queries(prompts, [induction], np.random.default_rng(0))
    first_texts = chosen.prompts.tokens.view(-1, chosen.names, chosen.names, 5)[:, 0, 0].tolist()
    keys = [keys.nonzero()[:, 0].tolist() for keys in chosen.keys[0]]
    assert sorted(keys) == [[1], [2]] and len(first_texts) == 2
    for text, at in zip(first_texts, keys, strict=True):
        assert at == [text.index(text[-1]) + 1]


@pytest.mark.parametrize("name", ["induction", "duplicate"])
def test_p_values_beside_a_loop_over_orders(random_hf_model, name):
    model = ac.load(random_hf_model("llama"), tokenizer=bundled())
    prompts = ac.RepeatedTokensTask(length=4, bos=False).sample(6, 8, seed=0)
    found = p_values(model, prompts, [name], seed=3)[name]
    chosen = _Queries(prompts, [prompts.relations[name]], np.random.default_rng(3))
    cube = torch.zeros(chosen.names, chosen.names, *found.shape, dtype=torch.float64)
    for row, (tokens, mask) in enumerate(zip(chosen.prompts.tokens, chosen.prompts.mask, strict=True)):
        query, rest = divmod(row, chosen.names**2)
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens[mask][None])
        for layer in range(found.shape[0]):
            attention = torch.zeros(found.shape[1], len(tokens), dtype=torch.float64)
            attention[:, mask] = cache["pattern", layer][0, :, -1].double()
            on_keys = attention[:, chosen.keys[0][query] & (chosen.kept[query] | (name == "duplicate"))].sum(1)
            whole = attention[:, chosen.kept[query]].sum(1) if name == "induction" else 1
            cube[rest // chosen.names, rest % chosen.names, layer] += on_keys / whole
    every = range(chosen.names)
    scores = np.stack([cube[every, order].sum(0).numpy() for order in permutations(every)])
    expected = (scores >= scores[0] - 1e-6 * abs(scores[0])).mean(0)
    np.testing.assert_allclose(found, expected, atol=2 / len(scores))
    assert name == "duplicate" or (found[0] == 1).all(), "the first layer cannot know what came before"


def test_liking_the_tokens_at_the_keys_is_not_induction():
    """One of the random models in which six heads were named when positions were redrawn."""
    network: Any = untrained(_RANDOM, 200013)
    for layer in network.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(2)
        layer.self_attn.k_proj.weight.data.mul_(2)
    model = ac.load(network, tokenizer=bundled())
    prompts = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4, style="marked").sample(16, bundled(), seed=0)
    p = p_values(model, prompts, ["induction"])["induction"]
    assert (p[0] == 1).all() and (p[1:] > 0.01).all()
