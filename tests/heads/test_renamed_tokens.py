"""Renaming beside loops, and on heads that know what a permutation of prompts cannot tell apart."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from legs import slow_but

import align_circuits as ac
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.renamed_tokens import EQUALITIES, _Queries, redraws_tokens, share_at_least_first
from align_circuits.models.tokenizer import char_tokenizer as bundled
from align_circuits.training.toy_llama import untrained
from align_circuits.validation.localize_ground_truth import _RANDOM


def every_pair(chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and the mask of every renamed context with every token at the query: `[query context token pos]`."""
    tokens, mask = (
        part.unflatten(0, (-1, chosen.names))[:, :, None].repeat(1, 1, chosen.names, 1)
        for part in (chosen.prompts.tokens, chosen.prompts.mask)
    )
    tokens[..., -1] = chosen.tokens
    return tokens, mask


MARKED = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=3, style="marked")


def test_which_relations_are_renamed():
    repeated = ac.RepeatedTokensTask(length=6).sample(4, bundled(), seed=0)
    assert [name for name in repeated.relations if redraws_tokens(repeated, name)] == ["induction", "duplicate"]
    for style in ("marked", "standard"):
        prompts = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=6, style=style).sample(8, bundled(), seed=0)
        assert [name for name in prompts.relations if redraws_tokens(prompts, name)] == ["induction", "duplicate"]
        assert redraws_tokens(prompts, "induction", edited=True) == (style == "marked")
    drawn = torch.randint(7, (6, 40), generator=torch.Generator().manual_seed(0))
    for tokens, renamed in ((drawn, True), (drawn % 6, False)):  # six tokens allow no p-value below 1/720
        assert redraws_tokens(ac.Prompts.from_tokens(tokens.tolist()), "duplicate") == renamed
    texts = [f"{'abcdefgh'[at:]}{end}x{'abcdefgh'[:at]}{end}" for at, end in enumerate(":z:z:z:z")]  # at two tokens
    assert redraws_tokens(ac.Prompts.from_texts(texts, bundled(), answer=["x"] * 8), "induction", edited=True)


def test_relations_without_a_common_query_are_renamed_apart(random_hf_model):
    """As relations of your own may be: each is tested at its own queries."""
    model, prompts = ac.load(random_hf_model("llama"), tokenizer=bundled()), MARKED.sample(3, bundled(), seed=0)
    relations = {name: prompts.relations[name] for name in ("induction", "duplicate")}
    late = {
        name: (of.query > int(of.query.float().median())) == (name == "induction") for name, of in relations.items()
    }
    apart = prompts.with_relations(**{name: of.select(late[name]) for name, of in relations.items()})
    together = p_values(model, apart, [*relations])
    for name in relations:
        np.testing.assert_array_equal(together[name], p_values(model, apart, [name])[name])


def test_contexts_are_renamed_and_queries_replaced():
    prompts = MARKED.sample(3, bundled(), seed=0)
    relations = [prompts.relations[name] for name in ("induction", "duplicate")]
    chosen = _Queries(prompts, relations, np.random.default_rng(0))
    tokenizer: Any = bundled()
    length, marker = chosen.prompts.mask.shape[1], tokenizer.convert_tokens_to_ids("!")
    originals = {tuple(row[:at]) for row in prompts.tokens.tolist() for at, token in enumerate(row) if token == marker}
    rows, masks = every_pair(chosen)
    names = rows[0, 0, :, -1].tolist()
    assert len(set(names)) == chosen.names == 7
    for row, mask, kept, induction, duplicate in zip(rows, masks, chosen.kept, *chosen.keys, strict=True):
        unnamed = row[0, 0, :-1][mask[0, 0, :-1]].tolist()
        swap = {marker: names[0], names[0]: marker}
        original = [swap.get(token, token) for token in unnamed]
        assert tuple(original) in originals
        for i, name in enumerate(names):
            swap = {marker: name, name: marker}
            for j, at_query in enumerate(names):
                expected = [swap.get(token, token) for token in original] + [at_query]
                assert row[i, j][mask[i, j]].tolist() == expected
        shown = [*[0] * (length - 1 - len(original)), *original, marker]
        real = mask[0, 0].tolist()
        assert kept.tolist() == [at and token not in (*names, marker) for token, at in zip(shown, real, strict=True)]
        assert duplicate.nonzero()[:, 0].tolist() == [
            at for at in range(length - 1) if real[at] and shown[at] == marker
        ]
        assert induction.nonzero()[:, 0].tolist() == [
            at for at in range(1, length) if real[at - 1] and shown[at - 1] == marker
        ]
        assert (induction & kept).any(), "keys are left"


def test_keys_are_those_of_the_prompt_itself():
    prompts = ac.Prompts.from_tokens([[1, 5, 2, 6, 1], [3, 1, 5, 6, 1]])
    induction = ac.Relation.from_pairs([(0, 4, [1]), (1, 4, [2])], prompts=prompts, name="induction")
    chosen = _Queries(prompts, [induction], np.random.default_rng(0))
    first_texts = every_pair(chosen)[0][:, 0, 0].tolist()
    keys = [keys.nonzero()[:, 0].tolist() for keys in chosen.keys[0]]
    assert sorted(keys) == [[1], [2]] and len(first_texts) == 2
    for text, at in zip(first_texts, keys, strict=True):
        assert at == [text.index(text[-1]) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["marked", "standard"])
def test_a_liking_for_pairs_of_tokens_passes_as_often_as_chance(style):
    """Heads that attend by a random number for each pair of tokens, whether or not all queries are one token."""
    prompts = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4, style=style).sample(12, bundled(), seed=0)
    rng = np.random.default_rng(0)
    chosen = _Queries(prompts, [prompts.relations["duplicate"]], rng)
    texts, _ = every_pair(chosen)
    keys = chosen.keys[0].double()
    liking = rng.standard_normal((2000, 64, 64))
    by_query = zip(texts.numpy(), keys.numpy(), strict=True)
    cube = np.sum([liking[:, text[..., -1:], text] @ on_keys for text, on_keys in by_query], axis=0)
    orders = np.array(list(permutations(range(chosen.names))))
    scores = np.sum([cube[:, i, order] for i, order in enumerate(orders.T)], axis=0)
    p = share_at_least_first(scores[None])
    for level in (0.01, 0.05, 0.3):
        assert abs((p <= level).mean() - level) < 3.5 * (level / 2000) ** 0.5


@pytest.mark.parametrize("name", slow_but(["induction"], ["induction", "duplicate"]))
def test_p_values_beside_a_loop_over_orders(random_hf_model, name):
    model = ac.load(random_hf_model("llama"), tokenizer=bundled())
    prompts = ac.RepeatedTokensTask(length=4, bos=False).sample(6, 20, seed=0)
    found = p_values(model, prompts, [name], seed=3)[name]
    chosen = _Queries(prompts, [prompts.relations[each] for each in EQUALITIES], np.random.default_rng(3))
    keys, cube = dict(zip(EQUALITIES, chosen.keys, strict=True))[name], torch.zeros(7, 7, *found.shape).double()
    pairs = (part.flatten(0, 2) for part in every_pair(chosen))
    for row, (tokens, mask) in enumerate(zip(*pairs, strict=True)):
        query, rest = divmod(row, chosen.names**2)
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens[mask][None])
        for layer in range(found.shape[0]):
            attention = torch.zeros(found.shape[1], len(tokens), dtype=torch.float64)
            attention[:, mask] = cache["pattern", layer][0, :, -1].double()
            on_keys = attention[:, keys[query] & (chosen.kept[query] | (name == "duplicate"))].sum(1)
            whole = attention[:, chosen.kept[query]].sum(1) if name == "induction" else 1
            cube[rest // chosen.names, rest % chosen.names, layer] += on_keys / whole
    every = range(chosen.names)
    scores = np.stack([cube[every, order].sum(0).numpy() for order in permutations(every)])
    np.testing.assert_allclose(found, (scores >= scores[0] - 1e-6 * abs(scores[0])).mean(0), atol=2 / len(scores))
    assert name == "duplicate" or (found[0] == 1).all(), "the first layer cannot know what came before"


@pytest.mark.parametrize("style", ["marked", "pre-aligned"])
def test_liking_the_tokens_at_the_keys_is_not_induction(style):
    """One of the random models in which six heads were named when positions were redrawn."""
    network: Any = untrained(_RANDOM, 200013)
    for layer in network.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(2)
        layer.self_attn.k_proj.weight.data.mul_(2)
    prompts = ac.Seq2SeqTask(x_len=5, phrase_len=2, n_examples=4, style=style).sample(16, bundled(), seed=0)
    p = p_values(ac.load(network, tokenizer=bundled()), prompts, ["induction"])["induction"]
    assert (p[0] == 1).all() and (p[1:] > 0.01).all()
