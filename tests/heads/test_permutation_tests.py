"""p-values beside loops over every redraw, and on attention that is made up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor

import align_circuits as ac
from align_circuits.heads import permutation_tests as nulls
from align_circuits.heads import redrawn_keys
from align_circuits.heads.attention_metrics import TIE
from align_circuits.heads.permutation_tests import p_values
from align_circuits.heads.redrawn_keys import REDRAWS, fixed_offset
from align_circuits.papers.recall.task.sequences import FactsTask
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import Relation

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=2, alignment="permutation", task_seed=2)
NAMES = ("align_query", "align_key", "previous", "lookup", "induction", "duplicate")


FLOATS = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def prompts(char_tokenizer) -> Prompts:
    return TASK.sample(5, char_tokenizer, seed=0)


@pytest.fixture(scope="module")
def model(random_hf_model, char_tokenizer):
    return ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)


@pytest.fixture(scope="module")
def patterns(model, prompts) -> list[Tensor]:
    return patterns_of(model, prompts)


def patterns_of(model, prompts: Prompts) -> list[Tensor]:
    """Attention [prompt head query key] of each layer."""
    with torch.no_grad():
        _, cache = model.run_with_cache(prompts.tokens)
    return [cache["pattern", layer].double() for layer in range(2)]


def share(scores: list[float]) -> float:
    """The share of redraws that score as high as the first, up to rounding."""
    return sum(score >= scores[0] - 1e-6 * abs(scores[0]) for score in scores) / len(scores)


def looped_alignment(attention: Tensor, prompts: Prompts, name: str) -> float:
    """Every order of the input places, by attention [prompt query key]."""
    relation, scores = prompts.relations[name], []
    m = prompts.task["config"]["x_len"]
    for order in permutations(range(m)):
        hits = []
        for row in range(len(relation)):
            prompt, query = int(relation.prompt[row]), int(relation.query[row])
            tested = (prompts.example[prompt] == prompts.example.max()) & (
                prompts.token_kinds[prompt] == TokenKind.INPUT
            )
            places = tested.nonzero()[:, 0].tolist()
            (gold,) = relation.keys_of(row)
            gold = places[order[places.index(gold)]]
            best = max(float(attention[prompt, query, place]) for place in places)
            tied = [place for place in places if attention[prompt, query, place] >= best * (1 - TIE)]
            hits.append((gold in tied) / len(tied))
        scores.append(float(np.mean(hits)))
    return share(scores)


def looped_distance(attention: Tensor, prompts: Prompts) -> float:
    """Every distance back that all rows have: how far it exceeds both neighbours, without repeated tokens."""
    relation = prompts.relations["previous"]
    rows = list(zip(relation.prompt.tolist(), relation.query.tolist(), strict=True))
    fixed = [int(column[0]) if len(column.unique()) == 1 else None for column in prompts.tokens.T]
    varied = [token is None or fixed.count(token) == 1 for token in fixed]
    furthest = min(query for _, query in rows)
    counts = [sum(varied[query - back] for _, query in rows) for back in range(1, furthest + 1)]
    distances = [back for back, count in enumerate(counts, 1) if count >= counts[0] / 2]
    means: dict[int, float | None] = {}
    levels: list[float] = []
    for back in (0, *distances):
        excess = []
        for prompt, query in rows:
            keys = [query - other for other in distances if varied[query - other]]
            mean = sum(float(attention[prompt, query, key]) for key in keys) / len(keys)
            levels.append(mean)
            if varied[query - back]:
                excess.append(float(attention[prompt, query, query - back]) - mean)
        means[back] = float(np.mean(excess)) if excess else None
    level = float(np.mean(levels))
    values: Any = [None if mean is None else mean + level for mean in means.values()]
    scores = []
    for place in range(1, len(values) if values[0] is not None else len(values) - 2):
        here, behind = values[place], [*values, 0][place + 1]
        if values[0] is not None:
            beside = max(values[place - 1], behind)
        else:  # queries are markers: what a head gets whose attention falls off by one factor
            after = values[place + 2]
            beside = max(behind, min(1, behind**2 / after if after > 0 else 1))
        scores.append((here - beside) / (here + beside + level))
    return sum(score >= scores[0] - 1e-9 for score in scores) / len(scores)


def looped_exchange(attention: Tensor, prompts: Prompts, name: str) -> float:
    """Every permutation of prompts, where `p_values` draws from them."""
    relation, n = prompts.relations[name], len(prompts)
    per = len(prompts.targets) // n
    rows_of = zip(relation.prompt.tolist(), relation.target.tolist(), strict=True)
    gold = {(prompt, target % per): relation.keys_of(row) for row, (prompt, target) in enumerate(rows_of)}
    query = prompts.column("query_pos").tolist()
    allowed: dict[int, set[int]] = {}
    for target, candidates in zip(relation.target.tolist(), relation.expand()[1], strict=True):
        allowed.setdefault(target % per, set()).update(candidates.nonzero()[:, 0].tolist())
    scores = []
    for order in permutations(range(n)):
        score = 0.0
        for prompt in range(n):
            for target in range(per):
                row = attention[prompt, query[prompt * per + target]]
                for key in gold.get((order[prompt], target), []):
                    score += float(row[key] / row[[*allowed[target]]].sum())
        scores.append(score)
    return share(scores)


def looped_symbols(attention: Tensor, prompts: Prompts, draws: int = 20_000) -> float:
    """Symbols of the earlier examples put in place of each other, in each prompt on its own, at random."""
    relation, generator = prompts.relations["lookup"], np.random.default_rng(99)
    aligned, order = list(TASK.aligned), prompts.latent["order"]
    scores = np.zeros(draws + 1)
    for prompt in range(len(prompts)):
        letters = (prompts.token_kinds[prompt] == TokenKind.OUTPUT) & (prompts.example[prompt] >= 0)
        places: dict[int, list[int]] = {}
        for example in range(order.shape[1] - 1):
            at = (letters & (prompts.example[prompt] == example)).nonzero()[:, 0].tolist()
            for phrase, symbol in enumerate(order[prompt, example, aligned].tolist()):
                places.setdefault(symbol, []).extend(at[2 * phrase : 2 * phrase + 2])
        everywhere = [place for of_symbol in places.values() for place in of_symbol]
        symbols, by_symbol = list(places), np.zeros((len(places), len(places)))
        for row in (relation.prompt == prompt).nonzero()[:, 0].tolist():
            (own,) = [number for number, of in enumerate(places.values()) if sorted(of) == relation.keys_of(row)]
            seen = attention[prompt, int(relation.query[row])]
            by_symbol[own] += [float(seen[places[each]].sum() / seen[everywhere].sum()) for each in symbols]
        orders = generator.permuted(np.tile(np.arange(len(symbols)), (draws, 1)), axis=1)
        orders = np.concatenate([np.arange(len(symbols))[None], orders])
        scores += by_symbol[np.arange(len(symbols)), orders].sum(1)
    return share(scores.tolist())


class TestBesideLoops:
    @pytest.mark.parametrize("name", ["align_query", "align_key"])
    def test_alignments(self, model, prompts, patterns, name):
        found = p_values(model, prompts, [name])[name]
        expected = [[looped_alignment(layer[:, head], prompts, name) for head in range(4)] for layer in patterns]
        np.testing.assert_allclose(found, expected)
        assert len(np.unique(found)) > 2 and (found >= 1 / 6 - 1e-12).all()

    @pytest.mark.parametrize("style", ["standard", "marked"])
    def test_distances(self, model, char_tokenizer, style):
        task = ac.Seq2SeqTask(x_len=3, phrase_len=1, n_examples=3, style=style, alignment="permutation", task_seed=1)
        prompts = task.sample(5, char_tokenizer, seed=1)
        patterns = patterns_of(model, prompts)
        found = p_values(model, prompts, ["previous"])["previous"]
        np.testing.assert_allclose(
            found, [[looped_distance(layer[:, head], prompts) for head in range(4)] for layer in patterns]
        )
        assert len(np.unique(found)) > 2

    @pytest.mark.parametrize(("style", "rates"), [("standard", 4), ("pre-aligned", 4), ("marked", 3)])
    def test_late_tokens_are_no_previous_token(self, attending, char_tokenizer, style, rates):
        """A head that favours the latest tokens, weakly or strongly, beside one that looks one token back as well.

        In the marked style no attention to the query can be compared: what falls off like 1 / distance passes there.
        """
        task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=3, style=style, alignment="permutation")
        prompts = task.sample(8, char_tokenizer, seed=0)
        length = prompts.mask.shape[1]

        def attention(prompt: int, query: int) -> Tensor:  # noqa: ARG001 - the same in all prompts
            back = query - torch.arange(length).double()
            late = [(-rate * back).exp() for rate in (0.05, 0.2, 1)] + [1 / (1 + back.clamp(min=0))]
            late = torch.stack(late[:rates]).where(back >= 0, 0)
            late = late / late.sum(1, keepdim=True)
            return torch.cat([late, 0.4 * late[:1] + 0.6 * (back == min(query, 1))])

        *late, looks_back = p_values(attending(attention), prompts, ["previous"])["previous"][0]
        assert min(late) > 0.05 >= looks_back == nulls.smallest_p_values(prompts, ["previous"])["previous"]

    @pytest.mark.parametrize("name", ["lookup", "induction"])
    def test_other_prompts(self, model, prompts, patterns, name):
        edits = [ac.Ablate([(1, 0)], how="zero")] * (name == "induction")  # of the last layer: all attention stays
        found = p_values(model, prompts, [name], edits=edits)[name]
        exact = [[looped_exchange(layer[:, head], prompts, name) for head in range(4)] for layer in patterns]
        if name == "lookup":
            by_symbols = [[looped_symbols(layer[:, head], prompts) for head in range(4)] for layer in patterns]
            assert (np.array(by_symbols) > np.array(exact)).any(), "both are asked"
            exact = np.maximum(exact, by_symbols)
        np.testing.assert_allclose(found, exact, atol=0.02)  # 9,999 draws: four standard errors
        assert len(np.unique(found)) > 2 and found.min() >= 1 / (REDRAWS + 1)

    def test_heads_that_attend_elsewhere_tie_whatever_the_batch(self):
        task = ac.Seq2SeqTask(n_examples=5, alignment="permutation")
        drawn = task.sample(12, (circuit := ac.planted_circuit(task)).tokenizer, seed=1)
        one, other = (p_values(circuit, drawn, ["previous"], options=ac.RunOptions(batch_size=n)) for n in (12, 3))
        np.testing.assert_allclose(other["previous"], one["previous"], atol=1e-3)

    @pytest.mark.slow
    def test_neither_batches_nor_company_nor_precision_change_them(
        self, model, prompts, random_hf_model, char_tokenizer
    ):
        one = p_values(model, prompts, NAMES, seed=3)
        wide = ac.load(random_hf_model("llama"), dtype=torch.float64, tokenizer=char_tokenizer)
        batches = (ac.RunOptions(batch_size=1), ac.RunOptions("reference", batch_size=2), ac.RunOptions())
        for runs, options in zip((model, model, wide), batches, strict=True):
            other = p_values(runs, prompts, NAMES, seed=3, options=options)
            for name in NAMES:
                np.testing.assert_allclose(other[name], one[name], atol=2e-3)
        for name in NAMES:
            np.testing.assert_array_equal(p_values(model, prompts, [name], seed=3)[name], one[name])
        again = p_values(model, prompts, NAMES, seed=4)
        assert any((again[name] != one[name]).any() for name in ("lookup", "induction")), "the seed is used"

    @pytest.mark.parametrize("engine", ["fast", pytest.param("reference", marks=pytest.mark.slow)])
    def test_a_batch_that_fails_counts_once(self, random_hf_model, char_tokenizer, prompts, engine):
        model = ac.load(random_hf_model("llama"), tokenizer=char_tokenizer)
        one = p_values(model, prompts, NAMES, options=ac.RunOptions(engine=engine))

        def small_memory(_module, args):
            if len(args[0]) > 2:
                raise torch.OutOfMemoryError("out of memory, after the layers were handed over")

        model.original_model.lm_head.register_forward_pre_hook(small_memory)
        for name, found in p_values(model, prompts, NAMES, options=ac.RunOptions(engine=engine)).items():
            np.testing.assert_allclose(found, one[name], atol=2e-3)


Attention = Callable[[int, int], Tensor]
"""(prompt, query) -> [head pos]"""


@pytest.fixture
def attending(monkeypatch):
    """Makes a model of one layer that attends as one says."""

    def make(attention: Attention) -> Any:
        def forward(_model, sets, **_):
            (read,) = sets
            pattern = [attention(*row) for row in zip(read.prompt.tolist(), read.query.tolist(), strict=True)]
            for rows in torch.arange(len(read.prompt)).split(len(read.prompt) // 2 + 1):
                read.on_pattern(rows, 0, torch.stack([pattern[row] for row in rows.tolist()]))
            return "fast"

        monkeypatch.setattr(nulls, "forward_alike", forward)
        heads = len(attention(0, 1))
        unused: dict[str, Any] = dict.fromkeys(("hook_dict", "hooks", "run_with_hooks", "__call__"), print)
        return type("Attending", (), unused | {"cfg": SimpleNamespace(n_layers=1, n_heads=heads)})()

    return make


def spread(length: int, keys: list[int]) -> Tensor:
    """Attention [pos] to some keys alike."""
    row = torch.zeros(length)
    row[keys] = 1 / max(1, len(keys))
    return row


class TestMeaning:
    @pytest.mark.parametrize("name", ["align_query", "align_key", "lookup", "previous"])
    @pytest.mark.parametrize("m", [4, 8])
    def test_knowing_is_told_from_habit(self, attending, char_tokenizer, name, m):
        task = ac.Seq2SeqTask(x_len=m, phrase_len=1, n_examples=3, alignment="permutation", task_seed=1)
        prompts = task.sample(12, char_tokenizer, seed=0)
        relation, length = prompts.relations[name], prompts.mask.shape[1]
        places = zip(relation.prompt.tolist(), relation.query.tolist(), strict=True)
        gold = {place: relation.keys_of(row) for row, place in enumerate(places)}
        symbols = (
            (prompts.example[0] == prompts.example.max()) & (prompts.token_kinds[0] == TokenKind.INPUT)
        ).nonzero()[:, 0]

        def attention(prompt: int, query: int) -> Tensor:
            knows = spread(length, gold.get((prompt, query), []))
            everywhere = spread(length, list(range(query + 1)))
            return torch.stack(
                [
                    knows,
                    0.5 * knows + 0.5 * everywhere,
                    everywhere,
                    spread(length, [int(symbols[0])]),
                    spread(length, [int(symbols[0]), 0, 1, 2]),
                    spread(length, [max(0, query - 3)]),
                ]
            )

        knows, partly, *biases = p_values(attending(attention), prompts, [name])[name][0]
        smallest = {"align_query": 24, "align_key": 24, "lookup": REDRAWS + 1}
        if name == "previous":
            assert knows == partly == 1 / int(relation.query.min())
        elif m == 4 or name == "lookup":
            assert knows == partly == pytest.approx(1 / smallest[name], rel=0.5)
        else:
            assert knows == partly <= 3 / (REDRAWS + 1), "of 40,320 orders some are drawn"
        assert min(biases) > 0.04, "a positional bias passes no test, even where it is right"
        assert biases[0] == 1, "what never moves scores the same under every redraw"
        # Distances differ in the rows that count, of which one at most attends to the first symbol.
        assert biases[1] == 1 or (name == "previous" and biases[1] > 0.5)

    @pytest.mark.parametrize("name", ["align_query", "lookup", "previous"])
    def test_chance_is_uniform(self, attending, char_tokenizer, name):
        task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3, alignment="permutation", task_seed=1)
        prompts, generator = task.sample(8, char_tokenizer, seed=0), torch.Generator().manual_seed(0)
        length = prompts.mask.shape[1]
        pos = torch.arange(length)
        noise = torch.rand(8, length, 400, length, generator=generator) ** 4

        def attention(prompt: int, query: int) -> Tensor:
            row = noise[prompt, query].masked_fill(pos > query, 0)
            return row / row.sum(1, keepdim=True)

        p = p_values(attending(attention), prompts, [name])[name][0]
        assert 0.43 < p.mean() < 0.6
        for level in (0.1, 0.3, 0.5, 0.8):
            assert (p <= level).mean() < level + 0.08, "valid"
        assert (p <= 0.5).mean() > 0.35, "and not idle"

    def test_gold_in_one_place(self, attending, char_tokenizer):
        """Where all prompts have it there, the null is other places: who knows the places may know the tokens."""
        prompts = ac.RepeatedTokensTask(length=8).sample(6, char_tokenizer, seed=0)
        relation, length = prompts.relations["induction"], prompts.mask.shape[1]
        prompts = prompts.with_relations(own=relation)
        assert redrawn_keys.in_one_place(relation, prompts)

        def attention(_: int, query: int) -> Tensor:
            knows = spread(length, [query - 7])
            everywhere = spread(length, list(range(query + 1)))
            return torch.stack([knows, 0.3 * knows + 0.7 * everywhere, everywhere, spread(length, [query - 3])])

        found = p_values(attending(attention), prompts, ["own"])["own"][0]
        assert found[:2].tolist() == [1 / (REDRAWS + 1)] * 2
        assert found[2] == 1 and found[3] > 0.2

    def test_rows_that_come_again_count_once(self, char_tokenizer):
        """As after an out-of-memory."""
        prompts = ac.RepeatedTokensTask(length=5).sample(4, char_tokenizer, seed=0)
        relation = prompts.relations["induction"]
        rows = torch.arange(len(relation))
        pattern = torch.rand(len(rows), 2, prompts.mask.shape[1], generator=torch.Generator().manual_seed(0))
        once, again = (redrawn_keys._Positions(relation, prompts, 1, 2) for _ in range(2))
        once.add(rows, 0, pattern)
        for some in (rows[:7], rows):
            again.add(some, 0, pattern[some])
        torch.testing.assert_close(again.attention, once.attention)
        assert once.attention[0, 1, 0, 3] == pytest.approx(float(pattern[1 :: once.targets, 0, 3].sum()))

    def test_a_phrase_without_rows(self, model, prompts):
        relation = prompts.relations["align_query"]
        phrase = prompts.column("phrase")[relation.target]
        some = replace(prompts, relations={"align_query": relation.select(phrase != 0)})
        assert (p_values(model, some, ["align_query"])["align_query"] >= 1 / 6 - 1e-12).all()

    def test_orders_of_seven_places_are_all_listed(self, char_tokenizer):
        task = ac.Seq2SeqTask(x_len=7, phrase_len=1, n_examples=2, alignment="permutation")
        prompts = task.sample(2, char_tokenizer, seed=0)
        relation = prompts.relations["align_query"]
        test = redrawn_keys._Alignments(relation, prompts, 1, 1)
        test.add(torch.arange(len(relation)), 0, relation.expand()[0][:, None].float())
        assert test.p_values(np.random.default_rng(0)).tolist() == [[1 / 5040]] == [[test.smallest]]


def test_answers_of_several_tokens_change_no_p_value_of_a_relation_of_the_first(llama):
    texts = ["abcde", "fagbc", "dcabe", "gfeba", "bacgf", "cbdag", "edbfa", "abgfc"]
    found = []
    for answer in ("e", "ef"):
        prompts = ac.Prompts.from_texts(texts, llama.tokenizer, answer=[answer] * 8, positions={"a": ["a"] * 8})
        prompts = prompts.with_relations(own=ac.Relation.from_positions("END", "a", prompts=prompts))
        found.append(p_values(llama, prompts, ["own"])["own"])
    np.testing.assert_array_equal(*found)


def test_a_head_that_prefers_some_tokens_is_no_lookup_head(attending, char_tokenizer):
    """Letters of the test example that it happens to like take attention from all candidates of a prompt alike."""
    task = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=4, alignment="permutation", task_seed=1)
    prompts = task.sample(24, char_tokenizer, seed=0)
    liking = 3 * torch.randn(8, len(char_tokenizer), generator=torch.Generator().manual_seed(0))

    def attention(prompt: int, query: int) -> Tensor:
        row = torch.zeros(8, prompts.mask.shape[1])
        real = prompts.mask[prompt, : query + 1]
        liked = liking[:, prompts.tokens[prompt, : query + 1]].masked_fill(~real, -torch.inf)
        row[:, : query + 1] = liked.softmax(-1)
        return row

    assert p_values(attending(attention), prompts, ["lookup"])["lookup"].min() > 0.02


def test_heads_that_prefer_pairs_of_tokens_are_seldom_lookup_heads(attending, char_tokenizer):
    """The keys of a symbol hold one letter, which such a head likes or not: other prompts' keys vary less than that."""
    task = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=3, alignment="permutation", task_seed=1)
    prompts, heads = task.sample(32, char_tokenizer, seed=0), 64
    liking = 2 * torch.randn(
        heads, len(char_tokenizer), len(char_tokenizer), generator=torch.Generator().manual_seed(0)
    )

    def attention(prompt: int, query: int) -> Tensor:
        row = torch.zeros(heads, prompts.mask.shape[1])
        tokens = prompts.tokens[prompt]
        real = prompts.mask[prompt, : query + 1]
        row[:, : query + 1] = liking[:, tokens[query], tokens[: query + 1]].masked_fill(~real, -torch.inf).softmax(-1)
        return row

    small = p_values(attending(attention), prompts, ["lookup"])["lookup"] <= 0.05
    assert small.mean() <= 0.08, "by the keys of other prompts alone it is .11"


def test_heads_that_prefer_relation_tokens_and_late_places_are_no_relation_heads(attending):
    """A sum of both in log attention, drawn for each head, beside heads that look for the last relation token."""
    world = RecallWorld.small(relation_tokens=True, n_grammar=3)
    task = FactsTask(world, 4, 5, p_grammar=0.0)
    prompts = task.sample(24, seed=0)
    relation, length = prompts.relations["relation"], prompts.mask.shape[1]
    generator = torch.Generator().manual_seed(0)
    tokens, places = (2 * torch.randn(40, size, generator=generator) for size in (world.d_vocab, length))
    share = torch.tensor([0.3, 0.6, 0.9])

    def attention(prompt: int, query: int) -> Tensor:
        scores = tokens[:, prompts.tokens[prompt]] + places
        back = torch.arange(length) <= query
        prefer = scores.masked_fill(~back, -torch.inf).softmax(-1)
        (key,) = relation.keys_of(prompt)
        look = prefer[:3] * (1 - share[:, None]) + share[:, None] * (torch.arange(length) == min(key, query))
        return torch.cat([prefer, look * back / (look * back).sum(1, keepdim=True)])

    found = p_values(attending(attention), prompts, ["relation"])["relation"][0]
    assert (found[:40] <= 0.05).mean() <= 0.1, "among the keys of other prompts alone it is .30"
    assert (found[40:] <= 0.001).all()


@pytest.mark.parametrize(("kinds", "rows"), [(17, 1), (32, 2), (4, 2)])
def test_heads_that_prefer_some_tokens_are_seldom_named_where_keys_hold_them_again(attending, kinds, rows):
    """By all prompts alike .18 of heads that prefer tokens are, with 17 kinds; the last three look for keys."""
    rng, heads, n, length = np.random.default_rng(0), 83, 64, 12
    tokens, key = rng.integers(100, 3000, (n, length)), rng.integers(1, 9, n)
    tokens[:, 0], tokens[:, 9:] = 60, [61, 62, 63]
    tokens[np.arange(n), key] = rng.permutation(np.resize(np.arange(kinds), n))
    prompts = ac.Prompts.from_tokens(tokens.tolist())
    pairs = [(prompt, 10 - row, [int(key[prompt])]) for prompt in range(n) for row in range(rows)[::-1]]
    prompts = prompts.with_relations(own=ac.Relation.from_pairs(pairs, prompts=prompts))
    liking = torch.from_numpy(1.5 * rng.normal(size=(heads, 3000))).float()

    def attention(prompt: int, query: int) -> Tensor:
        scores = liking[:, prompts.tokens[prompt]]
        scores[-3:, key[prompt]] += 5
        return scores.masked_fill(torch.arange(length) > query, -torch.inf).softmax(-1)

    found = p_values(attending(attention), prompts, ["own"])["own"][0]
    assert (found[:-3] <= 0.05).mean() <= 0.1
    assert kinds == 4 or (found[-3:] <= 0.001).all()


def test_models_in_float64_have_the_same_p_values(random_hf_model, char_tokenizer, prompts):
    models = [ac.load(random_hf_model("llama").to(dtype), tokenizer=char_tokenizer) for dtype in FLOATS]
    narrow, wide = (p_values(model, prompts, NAMES) for model in models)
    for name in NAMES:
        np.testing.assert_allclose(narrow[name], wide[name], atol=1e-3)


def test_reordered_prompts_are_tested_alike(model, prompts):
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    there = prompts[order]
    assert all((relation.prompt.diff() >= 0).all() for relation in there.relations.values())
    for name in ("previous", "align_query"):
        np.testing.assert_allclose(p_values(model, there, [name])[name], p_values(model, prompts, [name])[name])


def test_previous_can_be_established_where_every_token_is_a_target():
    prompts = ac.Prompts.from_tokens([[*range(60)]] * 3)
    assert nulls.smallest_p_values(prompts, ["previous"])["previous"] == 1 / 29, "half of the queries reach so far"


class TestSmallest:
    """What prompts allow is known before a model runs."""

    def test_by_hand(self, prompts, char_tokenizer):
        found = nulls.smallest_p_values(prompts, NAMES)
        assert found["align_query"] == found["align_key"] == 1 / 6
        assert found["lookup"] == 1 / 120, "orders of five prompts"
        assert found["previous"] == 1 / int(prompts.relations["previous"].query.min())
        five = replace(TASK, x_len=5).sample(16, char_tokenizer, seed=0)
        assert nulls.smallest_p_values(five, ["align_key"]) == {"align_key": pytest.approx(1 / 120)}
        assert nulls.smallest_p_values(five, ["lookup"]) == {"lookup": 1 / (REDRAWS + 1)}
        repeated = ac.RepeatedTokensTask(length=6).sample(3, char_tokenizer, seed=0)
        assert nulls.smallest_p_values(repeated, ["induction"]) == {"induction": pytest.approx(1 / 5040)}
        one = repeated[:2].with_relations(own=repeated[:2].relations["induction"])
        per_target = [int(query) + 1 for query in one.relations["own"].query[: len(one.relations["own"]) // 2]]
        assert nulls.smallest_p_values(one, ["own"])["own"] == max(1e-4, 1 / np.prod(per_target))

    def test_the_page_on_reports_has_these(self, char_tokenizer):
        """The numbers in `docs/read-a-report.md`."""
        page = (Path(__file__).parents[2] / "docs/read-a-report.md").read_text(encoding="utf-8")

        def of(name: str, x_len: int, n_examples: int = 2) -> str:
            return smallest(replace(TASK, x_len=x_len, n_examples=n_examples).sample(8, char_tokenizer, seed=0), name)

        def smallest(prompts: Prompts, name: str) -> str:
            return f"{nulls.smallest_p_values(prompts, [name])[name]:.2g}".removeprefix("0")

        def named(n: int) -> str:
            texts = [f"{other}{('ab', 'ba')[row % 2]}:" for row, other in enumerate("cdefghij"[:n])]
            letters = {"a": ["a"] * n, "b": ["b"] * n}
            prompts = Prompts.from_texts(texts, char_tokenizer, answer=letters["a"], positions=letters)
            finds = Relation.from_positions("END", "a", prompts=prompts, candidates=["a", "b"])
            return smallest(prompts.with_relations(finds=finds), "finds")

        three, four, five, six = (of("align_query", x_len) for x_len in (3, 4, 5, 6))
        assert f"1/m!: {three} for three symbols, {four} for four, {five} for five, {six} for six |" in page

        def apart(n: int) -> str:
            prompts = Prompts.from_tokens([[1, 2, 3, 4, 5, 6, 7]] * n)
            pairs = [(prompt, 6, [prompt]) for prompt in range(n)]
            relation = Relation.from_pairs(pairs, prompts=prompts, candidates=list(range(6)))
            return smallest(prompts.with_relations(finds=relation), "finds")

        four, five, six = map(apart, (4, 5, 6))
        assert f"all differ, 1/n!: {four} for eight prompts in all, {five} for ten, {six} for twelve." in page
        four, five, six, eight = map(named, (4, 5, 6, 8))
        assert f"half of the prompts, {four} for eight, {five} for ten, {six} for twelve, {eight} for sixteen." in page
        assert of("lookup", 3) == ".0001" and "| .0001 from 16 prompts and three symbols on |" in page
        assert f"have: {of('previous', 5, n_examples=15)} in prompts of 272 tokens |" in page

    def test_of_named_candidates_by_hand(self):
        prompts = ac.Prompts.from_tokens([[1, 2, 3, 4, 5, 6]] * 3)

        def smallest(*pairs: tuple[int, int, list[int]]) -> float:
            relation = ac.Relation.from_pairs(pairs, prompts=prompts, candidates=[0, 1, 2, 3])
            return nulls.smallest_p_values(prompts.with_relations(own=relation), ["own"])["own"]

        assert smallest((0, 4, [0]), (1, 4, [1]), (2, 4, [2])) == 1 / 6, "orders of three prompts"
        assert smallest((0, 4, [0]), (1, 4, [1]), (2, 4, [0])) == 1 / 3, "two of them are the same"
        assert smallest((0, 4, [0, 2]), (1, 4, [0, 2]), (2, 4, [0, 2])) == 1 / 6, "two of four candidates"
        assert smallest((0, 4, [1])) == 1 / 4, "one of them, in one row"

    def test_a_perfect_head_among_two_candidates_has_the_smallest(self):
        """Where prompts have the same key, to exchange them changes nothing."""
        prompts = ac.Prompts.from_tokens([[1, 2, 3]] * 6)
        relation = ac.Relation.from_pairs(
            [(prompt, 2, [prompt % 2]) for prompt in range(6)], prompts=prompts, candidates=[0, 1]
        )
        prompts = prompts.with_relations(own=relation)
        test = redrawn_keys.redraws_of("own", prompts, 1, 1)
        test.add(torch.arange(6), 0, relation.expand()[0][:, None].float())
        assert test.smallest == 1 / 20
        assert test.p_values(np.random.default_rng(0)) == pytest.approx(1 / 20, rel=0.1)

    def test_no_p_value_is_smaller(self, model, prompts):
        found, least = p_values(model, prompts, NAMES), nulls.smallest_p_values(prompts, NAMES)
        assert all((found[name] >= least[name] - 1e-4).all() for name in NAMES)  # redraws may hit the truth seldom


class TestRefusals:
    def test_what_is_asked(self, model, prompts):
        with pytest.raises(KeyError, match=r"no relation 'sink' in these prompts; they have .*lookup"):
            p_values(model, prompts, ["lookup", "sink", "other"])
        refused("1 prompt: a permutation test takes at least two", p_values, model, prompts[:1], ["lookup"])

    def test_alignments_that_differ(self, model, prompts):
        relation = prompts.relations["align_query"]
        key_value = relation.key_value.where(relation.prompt != 1, relation.key_value.roll(1))
        mixed = replace(prompts, relations={"align_query": replace(relation, key_value=key_value)})
        refused("'align_query': the alignment differs between prompts", p_values, model, mixed, ["align_query"])

    @pytest.mark.parametrize("lengths", [(6, 8), (6, 7, 8)])
    def test_layouts_that_differ(self, model, lengths):
        padded = Prompts.from_tokens([[1, 2, 3, 1, 2, 3, 1, 2][:length] for length in lengths])
        padded = padded.with_relations(own=padded.relations["induction"])
        refused("targets at different positions: test prompts of one layout", p_values, model, padded, ["own"])
        assert p_values(model, padded, ["previous"])["previous"].shape == (2, 4)


def test_a_head_that_leaves_separators_out_does_not_seem_to_look_for_the_rest():
    """Words at odd places, "," at even ones; the keys are every second word."""
    rows = torch.arange(100, 120).view(2, 10).repeat_interleave(2, 1)
    rows[:, ::2] = 7
    drawn = Prompts.from_tokens(rows.tolist())
    keys = list(range(1, 19, 4))
    words = Relation.from_pairs([(prompt, 18, keys) for prompt in range(2)], prompts=drawn)
    test = redrawn_keys._Positions(words, drawn, 1, 3)
    pattern = torch.zeros(2, 3, 20)
    pattern[:, 0, 1:18:2] = 1 / 9  # all words alike
    pattern[:, 1, keys] = 1 / 5
    pattern[:, 2, keys[:2]] = 1 / 2
    test.add(torch.arange(2), 0, pattern)
    p = test.p_values(np.random.default_rng(0))[0]
    assert p[0] == 1
    assert p[1] == pytest.approx(1 / comb(9, 5), abs=0.003)
    assert p[2] == pytest.approx(comb(7, 3) / comb(9, 5), abs=0.02)


def test_where_the_same_candidate_is_always_right_others_are_drawn_for_all_rows():
    prompts = ac.Prompts.from_tokens([[1, 2, 3, 4, 5, 6]] * 3)
    pairs: Any = [(prompt, 4, [0]) for prompt in range(3)]
    relation = ac.Relation.from_pairs(pairs, prompts=prompts, candidates=[0, 1, 2, 3])
    test = redrawn_keys._Ranks(relation, prompts, 1, 3)
    pattern = torch.zeros(3, 3, 6)
    pattern[:, 0, 0] = 1
    pattern[0, 1, 0] = pattern[1:, 1, 2] = 1  # a third of the time at the first, else at the third
    pattern[:, 2, 1:4] = 1 / 3
    test.add(torch.arange(3), 0, pattern)
    first, mixed, others = test.p_values(np.random.default_rng(0))[0]
    assert first == pytest.approx(1 / 4, abs=0.02) and mixed == pytest.approx(2 / 4, abs=0.02) and others == 1


def test_where_only_separators_are_one_token_back_they_count():
    prompts = Prompts.from_tokens([[7, 1, 7, 2, 7, 3, 8], [7, 4, 7, 5, 7, 6, 9]])
    previous = prompts.relations["previous"]
    previous = previous.select((previous.query == 3) | (previous.query == 5))
    test = redrawn_keys.Distances(previous, prompts, 1, 3)
    pattern = torch.full((4, 3, 7), 1 / 7)
    for row, query in enumerate(previous.query.tolist()):
        for head, back in ((0, 1), (1, 2)):
            pattern[row, head] = torch.eye(7)[query - back]
    test.add(torch.arange(4), 0, pattern)
    assert test.smallest == 1 / 3
    assert test.p_values(np.random.default_rng(0))[0].tolist() == [1 / 3, 1, 1]


def test_fixed_offset(char_tokenizer, prompts):
    monotonic = ac.Seq2SeqTask(x_len=4, phrase_len=1, n_examples=2).sample(3, char_tokenizer)
    assert fixed_offset(monotonic.relations["align_query"]) == 1
    for name in ("align_query", "lookup", "previous", "induction"):
        relation = prompts.relations[name]
        rows = [{int(relation.query[row]) - key for key in relation.keys_of(row)} for row in range(len(relation))]
        most = Counter(back for row in rows for back in row).most_common(1)[0][1]
        assert fixed_offset(relation) == pytest.approx(most / len(rows))
    assert fixed_offset(prompts.relations["align_query"]) < 1 == fixed_offset(prompts.relations["previous"])
    far = ac.Prompts.from_tokens([[*range(20)]] * 2)
    assert fixed_offset(Relation.from_pairs([(0, 9, [2]), (1, 12, [5])], prompts=far)) == 1
    empty = prompts.relations["lookup"].select(torch.zeros(len(prompts.relations["lookup"]), dtype=torch.bool))
    assert fixed_offset(empty) == 0


def test_prompts_too_short_to_compare_distances_have_no_previous_token(model):
    """The queries are separators, which are no keys: two distances are left, of which the further one compares none."""
    prompts = ac.Prompts.from_tokens([[1, 9, 2, 9], [3, 9, 4, 9]])
    back = Relation.from_pairs([(0, 3, [2]), (1, 3, [2])], prompts=prompts)
    prompts = prompts.with_relations(previous=replace(back, name="previous"))
    assert (p_values(model, prompts, ["previous"])["previous"] == 1).all()


@pytest.mark.parametrize(("keys", "fixed"), [(([2], [2]), True), (([2], [3]), False), (([2], [2, 3]), False)])
def test_the_same_candidate_is_right_in_all_rows_or_not(keys, fixed):
    prompts = ac.Prompts.from_tokens([[*range(9)]] * 2)
    rows = [(prompt, 8, right) for prompt, right in enumerate(keys)]
    assert redrawn_keys.fixed_rank(Relation.from_pairs(rows, prompts=prompts, candidates=[2, 3])) == fixed


def test_nothing_is_established_of_a_relation_without_rows(char_tokenizer, llama):
    prompts = ac.Prompts.from_texts(["abcd", "efgh", "bdca"], char_tokenizer, answer=list("xyz"))
    assert not len(prompts.relations["duplicate"])
    assert nulls.smallest_p_values(prompts, ["duplicate"]) == {"duplicate": 1.0}
    assert (p_values(llama, prompts, ["duplicate"])["duplicate"] == 1).all()
