import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from legs import slow_but
from refusals import raised, refused
from transformer_lens import head_detector

from align_circuits.models.planted.hand_built_transformer import HandBuilt
from align_circuits.models.planted.planted_model import DECOYS, ROLE_OF_KIND, planted_circuit
from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.tasks.seq2seq import Seq2SeqTask

TASK = Seq2SeqTask(x_len=4, phrase_len=2, n_examples=8)
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module", autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def at_targets(prompts: Prompts, logits: torch.Tensor) -> torch.Tensor:
    return logits[prompts.column("prompt"), prompts.column("query_pos")]


def run(model: HandBuilt, prompts: Prompts) -> torch.Tensor:
    return at_targets(prompts, model(prompts.tokens))


def right(prompts: Prompts, logits: torch.Tensor) -> torch.Tensor:
    """Which targets are predicted by a correct letter."""
    assert prompts.correct is not None
    return (prompts.correct & (prompts.answer_tokens == logits.argmax(-1, keepdim=True))).any(1)


def accuracy(prompts: Prompts, logits: torch.Tensor) -> float:
    return right(prompts, logits).double().mean().item()


def best_letters(task: Seq2SeqTask, prompts: Prompts) -> list[set[int]]:
    """What the oracle may predict at each target, by a slow, obvious loop."""
    order, phrases = prompts.latent["order"].tolist(), prompts.latent["phrases"].tolist()
    best_by_target = []
    for prompt, phrase, offset in prompts.targets[["prompt", "phrase", "offset"]].itertuples(index=False):
        symbols = [[example[place] for place in task.aligned] for example in order[prompt]]
        prefix = phrases[prompt][-1][phrase][:offset][::-1]
        votes: dict[tuple[bool, ...], Counter] = {}
        for example, p in itertools.product(range(task.n_examples), range(task.x_len)):
            if symbols[example][p] == symbols[-1][phrase]:
                seen = phrases[prompt][example][p]
                agreement = tuple(a == b for a, b in zip(seen[:offset][::-1], prefix, strict=True))
                votes.setdefault(agreement, Counter())[seen[offset]] += 1
        best = votes[max(votes)]
        modes = {letter for letter, count in best.items() if count == max(best.values())}
        best_by_target.append({int(prompts.answer_tokens[letter]) for letter in modes})
    return best_by_target


def assert_is_oracle(task: Seq2SeqTask, prompts: Prompts, logits: torch.Tensor) -> None:
    best, predicted = best_letters(task, prompts), logits.argmax(-1).tolist()
    assert all(letter in letters for letter, letters in zip(predicted, best, strict=True))
    unique = torch.tensor([len(letters) == 1 for letters in best])
    assert torch.equal(right(prompts, logits).double()[unique], prompts.column("oracle")[unique])


@pytest.fixture(scope="module")
def prompts(char_tokenizer):
    return TASK.sample(8, char_tokenizer, seed=5)


@pytest.fixture(scope="module", params=slow_but([0], SEEDS))
def cached(request, prompts):
    """A model, its logits at the targets, and its activations."""
    model = planted_circuit(TASK, seed=request.param)
    logits, cache = model.run_with_cache(prompts.tokens)
    return model, at_targets(prompts, logits), cache


def head_of_kind(model, kind: str) -> tuple[int, int]:
    return next(head for head, own_kind in model.kinds.items() if own_kind == kind)


def attention(cached, prompts: Prompts, kind: str, relation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head's attention at the rows of a relation, with the keys and the candidates of each."""
    model, _, cache = cached
    layer, head = head_of_kind(model, kind)
    rows = prompts.relations[relation]
    return cache["pattern", layer][rows.prompt, head, rows.query], *rows.expand()


def on_keys(cached, prompts: Prompts, kind: str, relation: str) -> float:
    pattern, keys, _ = attention(cached, prompts, kind, relation)
    return (pattern * keys).sum(1).min().item()


def effect(cached, prompts: Prompts, place: tuple[int, int]) -> float:
    """By how many nats replacing a head's output by its mean over each role lowers the answers' log-probability."""
    model, before, cache = cached
    layer, head = place
    z = cache["z", layer][:, :, head]
    mean = torch.zeros_like(z)
    for role in prompts.token_kinds.unique():
        mean[prompts.token_kinds == role] = z[prompts.token_kinds == role].mean(0)

    def ablate(z, **_):
        z[:, :, head] = mean
        return z

    logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", ablate)])
    labels = prompts.column("token")[:, None]
    change = before.log_softmax(-1) - at_targets(prompts, logits).log_softmax(-1)
    return change.gather(1, labels).mean().item()


class TestPredictions:
    @pytest.mark.parametrize("phrase_len", slow_but([2], [1, 2, 3]))
    def test_are_the_oracles(self, char_tokenizer, phrase_len):
        for m in range(1, 7):
            task = Seq2SeqTask(x_len=m, phrase_len=phrase_len, n_examples=10)
            prompts = task.sample(24 if phrase_len == 3 else 40, char_tokenizer, seed=m)
            logits = run(planted_circuit(task, seed=m), prompts)
            assert_is_oracle(task, prompts, logits)
            if phrase_len == 1:
                assert accuracy(prompts, logits) == 1

    @pytest.mark.parametrize(
        "task",
        [
            *(Seq2SeqTask(m, c, 10, alignment="permutation", task_seed=m) for m, c in [(3, 3), (4, 2), (5, 1), (6, 2)]),
            Seq2SeqTask(5, 2, 10, ood=True),
            Seq2SeqTask(5, 2, 15, automata="task"),
            Seq2SeqTask(3, 2, 4, bos=False, colon="|", separator=";", spaced=False),
            Seq2SeqTask(3, 2, 5, alphabet="abcdefgh", letters="PQRSTUV", alphabet_range=(4, 6)),
        ],
    )
    def test_are_the_oracles_on_other_tasks(self, char_tokenizer, task):
        prompts = task.sample(20, char_tokenizer, seed=1)
        assert_is_oracle(task, prompts, run(planted_circuit(task, seed=3), prompts))

    def test_shared_symbols_are_looked_up_too(self, char_tokenizer):
        task = Seq2SeqTask(5, 1, 10, alignment="prior", decay=0.3, task_seed=1)
        assert len(set(task.aligned)) < 5
        prompts = task.sample(20, char_tokenizer, seed=1)
        seen = prompts.column("oracle") == 1  # a symbol that no phrase translated cannot be looked up
        assert right(prompts, run(planted_circuit(task), prompts))[seen].all()

    def test_do_not_fit_another_style(self, char_tokenizer):
        other = replace(TASK, style="pre-aligned").sample(20, char_tokenizer, seed=1)
        assert accuracy(other, run(planted_circuit(TASK), other)) < 0.6

    def test_do_not_depend_on_padding(self, prompts):
        model = planted_circuit(TASK)
        tokens, mask = prompts.tokens[:4], prompts.mask[:4]
        plain = model(tokens)
        for width in (1, 40):
            padded = torch.nn.functional.pad(tokens, (width, 0))
            logits = model(padded, attention_mask=torch.nn.functional.pad(mask, (width, 0)))
            assert torch.allclose(logits[:, width:], plain, atol=1e-4)
            assert logits.isfinite().all()

    def test_do_not_depend_on_decoys(self, prompts):
        bare = run(planted_circuit(TASK, seed=1, decoys=()), prompts)
        idle = run(planted_circuit(TASK, seed=1, decoys=set(DECOYS) - {"diffuse"}), prompts)
        assert torch.allclose(bare, idle, atol=1e-4)
        assert accuracy(prompts, bare) == accuracy(prompts, run(planted_circuit(TASK, seed=1), prompts))


class TestHeads:
    def test_lie_in_order_at_places_that_the_seed_draws(self):
        places = set()
        for seed in range(50):
            model = planted_circuit(Seq2SeqTask(x_len=3, phrase_len=3, n_examples=4), seed=seed)
            kinds = Counter(model.kinds.values())
            once = {"boundary", "previous", "second_previous", "align_query", "align_key", "lookup"} | set(DECOYS)
            assert all(kinds[kind] == 1 for kind in once - {"random"})
            assert sum(kinds.values()) == len(model.roles) == model.cfg.n_layers * model.cfg.n_heads
            assert kinds["inert"] + kinds["random"] == len(model.roles) - len(once) + 1
            assert all(model.roles[place] == ROLE_OF_KIND[kind] for place, kind in model.kinds.items())
            layer = {kind: head_of_kind(model, kind)[0] for kind in once - {"random"}}
            assert layer["boundary"] < layer["previous"] < layer["align_key"] < layer["lookup"] == layer["backup"]
            assert layer["align_query"] == layer["align_key"] and layer["diffuse"] < layer["lookup"]
            places.add((head_of_kind(model, "align_query"), head_of_kind(model, "lookup")))
        assert len(places) > 30

    @pytest.mark.parametrize("kind", ["previous", "align_query", "align_key"])
    def test_true_heads_attend_to_the_gold(self, cached, prompts, kind):
        assert on_keys(cached, prompts, kind, kind) > 0.999

    @pytest.mark.parametrize("kind", ["lookup", "backup"])
    def test_lookup_heads_share_the_gold(self, cached, prompts, kind):
        assert on_keys(cached, prompts, kind, "lookup") > 0.999
        pattern, _, _ = attention(cached, prompts, kind, "lookup")
        assert torch.equal(pattern, attention(cached, prompts, "lookup", "lookup")[0])

    def test_the_two_sides_of_alignment_are_two_heads(self, cached, prompts):
        for kind, other in (("align_query", "align_key"), ("align_key", "align_query")):
            pattern, keys, candidates = attention(cached, prompts, kind, other)
            assert (pattern * keys).sum(1).max() < 0.01
            assert (pattern * candidates).sum(1).mean() < 0.9

    def test_every_true_head_has_an_effect(self, cached, prompts):
        model = cached[0]
        for place, role in model.roles.items():
            if role:
                assert effect(cached, prompts, place) > 0.2, (model.kinds[place], place)

    def test_the_alignment_of_the_query_carries_the_effect_of_the_query(self, cached, prompts):
        model, before, _ = cached
        corrupted = TASK.corrupt(prompts, "query", seed=1)
        labels = prompts.column("token")[:, None]
        _, other = model.run_with_cache(corrupted.tokens)
        for place, role in model.roles.items():
            layer, head = place

            def patch(z, layer=layer, head=head, **_):
                z[:, :, head] = other["z", layer][:, :, head]
                return z

            logits = model.run_with_hooks(prompts.tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", patch)])
            fall = (before - at_targets(prompts, logits).log_softmax(-1)).gather(1, labels)
            fall = (fall - before.logsumexp(-1, keepdim=True)).mean().item()
            if role in ("align_query", "align_key", "lookup"):
                assert fall > 0.2, (role, place)
            else:
                assert abs(fall) < 1e-4, (model.kinds[place], place)


class TestDecoys:
    def test_that_write_nothing_readable_have_no_effect(self, cached, prompts):
        model, _, _ = cached
        idle = {"inert", "random", "gold_without_output", "off_by_one", "positional_lookup"}
        for place, kind in model.kinds.items():
            if kind in idle:
                assert abs(effect(cached, prompts, place)) < 1e-5, kind

    def test_gold_without_output(self, cached, prompts):
        assert on_keys(cached, prompts, "gold_without_output", "align_query") > 0.999
        layer, head = head_of_kind(cached[0], "gold_without_output")
        assert not cached[0].W_V[layer, head].any() and not cached[0].W_O[layer, head].any()

    def test_off_by_one(self, cached, prompts):
        pattern, keys, candidates = attention(cached, prompts, "off_by_one", "align_query")
        first = candidates.int().argmax(1)
        place = keys.int().argmax(1) - first
        expected = first + (place + 1) % TASK.x_len
        assert (pattern.gather(1, expected[:, None]) > 0.999).all()

    def test_positional_lookup(self, cached, prompts):
        pattern, _, candidates = attention(cached, prompts, "positional_lookup", "lookup")
        rows = prompts.relations["lookup"]
        columns = torch.arange(pattern.shape[1])
        colon = torch.where(prompts.token_kinds == TokenKind.COLON, columns, 0).cummax(1).values
        same_place = candidates & (
            columns - colon[rows.prompt] == (rows.query - colon[rows.prompt, rows.query])[:, None] + 1
        )
        assert torch.equal(same_place.sum(1), torch.full((len(rows),), TASK.n_examples))
        assert torch.allclose(pattern[same_place], torch.tensor(1 / TASK.n_examples), atol=0.01)

    def test_diffuse_matters_though_its_attention_is_spread(self, cached, prompts):
        assert effect(cached, prompts, head_of_kind(cached[0], "diffuse")) > 0.05
        pattern, _, _ = attention(cached, prompts, "diffuse", "lookup")
        assert (pattern.max(1).values * (pattern > 0).sum(1) < torch.e**2).all()

    def test_inert_heads_are_uniform(self, cached, prompts):
        pattern, _, _ = attention(cached, prompts, "inert", "lookup")
        seen = pattern > 0
        assert torch.allclose(pattern, seen / seen.sum(1, keepdim=True))


class TestStrength:
    def test_weakens_the_circuit_continuously(self, char_tokenizer):
        task = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=8)
        prompts = task.sample(24, char_tokenizer, seed=2)
        labels = prompts.column("token")[:, None]
        accuracies, likelihoods = [], []
        for strength in (0.0, 0.33, 0.38, 0.42, 0.46, 1.0):
            logits = [run(planted_circuit(task, seed=seed, strength=strength), prompts) for seed in SEEDS]
            accuracies.append(sum(accuracy(prompts, of_seed) for of_seed in logits) / len(SEEDS))
            likelihoods.append(sum(of_seed.log_softmax(-1).gather(1, labels).mean().item() for of_seed in logits))
        assert likelihoods == sorted(likelihoods)
        assert accuracies == sorted(accuracies)
        assert max(after - before for before, after in itertools.pairwise(accuracies)) < 0.35
        assert accuracies[0] < 0.45
        assert accuracies[-1] == pytest.approx(prompts.targets["oracle"].mean(), abs=0.01)

    def test_nothing_is_left_at_zero(self, prompts):
        model = planted_circuit(TASK, strength=0.0)
        assert set(model.roles.values()) == {None}
        _, cache = model.run_with_cache(prompts.tokens[:2])
        layer, head = head_of_kind(model, "align_key")
        assert torch.allclose(cache["pattern", layer][0, head, 9, :10], torch.tensor(0.1))


class TestModel:
    def test_is_a_plain_transformer(self, cached, prompts):
        """The same numbers by loops over heads and positions, from the weights."""
        model, _, cache = cached
        tokens = prompts.tokens[0]
        residual = model.W_E[tokens] + model.W_pos[: len(tokens)]
        for layer, block in enumerate(model.blocks):
            added = torch.zeros_like(residual)
            for head in range(model.cfg.n_heads):
                q, k, v = (residual @ weight[layer, head] for weight in (model.W_Q, model.W_K, model.W_V))
                for pos in range(len(tokens)):
                    pattern = (k[: pos + 1] @ q[pos] / model.cfg.d_head**0.5).softmax(0)
                    if pos % 50 == 0:
                        assert torch.allclose(pattern, cache["pattern", layer][0, head, pos, : pos + 1], atol=1e-4)
                    added[pos] += pattern @ v[: pos + 1] @ model.W_O[layer, head]
            residual = residual + added
            hidden = (residual @ block.mlp.W_in + block.mlp.b_in).clamp(min=0)
            residual = residual + hidden @ block.mlp.W_out + block.mlp.b_out
            assert torch.allclose(residual, cache["resid_post", layer][0], atol=2e-3)
        assert torch.allclose(residual @ model.W_U, model(tokens[None])[0], atol=1e-3)

    def test_hooks_fire_and_leave_nothing_behind(self, prompts):
        model: Any = planted_circuit(TASK)
        tokens = prompts.tokens[:2]
        before = model(tokens)
        fired = []
        hooks = [(name, lambda _, hook: fired.append(hook.name)) for name in model.hook_dict]
        # Without a hook on the pattern a fused kernel attends.
        torch.testing.assert_close(model.run_with_hooks(tokens, fwd_hooks=hooks), before, atol=1e-4, rtol=1e-5)
        assert sorted(fired) == sorted(model.hook_dict)

        def fail(*_, **__):
            raise RuntimeError("stop")

        raised(RuntimeError, "stop", model.run_with_hooks, tokens, fwd_hooks=[("blocks.0.attn.hook_z", fail)])
        assert torch.equal(model(tokens), before)

    def test_shapes_are_transformer_lens_s(self, prompts):
        model = planted_circuit(TASK)
        cfg, (n, length) = model.cfg, prompts.tokens[:2].shape
        logits, cache = model.run_with_cache(prompts.tokens[:2])
        assert logits.shape == (n, length, cfg.d_vocab)
        assert len(model.tokenizer) == cfg.d_vocab
        for name in ("q", "k", "v", "z"):
            assert cache[name, 0].shape == (n, length, cfg.n_heads, cfg.d_head)
        for name in ("pattern", "attn_scores"):
            assert cache[name, 0].shape == (n, cfg.n_heads, length, length)
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            assert cache[name, 0].shape == (n, length, cfg.d_model)
        assert model.W_Q.shape == model.W_V.shape == (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head)
        assert model.W_O.shape == (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model)
        assert model.double().cfg.dtype == torch.float64

    def test_transformer_lens_finds_the_previous_token_head(self, prompts):
        model: Any = planted_circuit(TASK, seed=4)
        text = "".join(prompts.token_text[0][1:])
        assert torch.equal(model.to_tokens(text), prompts.tokens[:1])
        scores = head_detector.detect_head(model, text, "previous_token_head")
        assert scores[head_of_kind(model, "previous")] > 0.99
        assert scores.flatten().topk(2).values[1] < 0.5


class TestRefuses:
    @pytest.mark.parametrize(
        ("config", "arguments", "match"),
        [
            ({"style": "pre-aligned"}, {}, "standard style"),
            ({"style": "marked"}, {}, "standard style"),
            ({"phrase_len": 4}, {}, "give 1 to 3"),
            ({"x_len": 12, "phrase_len": 3}, {}, "n_ctx=800"),
            ({"separator": "€"}, {}, "one known token"),
            ({}, {"strength": 1.5}, "from 0"),
            ({}, {"strength": -0.1}, "from 0"),
            ({}, {"strength": float("nan")}, "from 0"),
            ({}, {"decoys": ("quiet",)}, "unknown decoys"),
            ({}, {"n_layers": 3}, "at least 4 layers"),
            ({}, {"n_heads": 3}, "at least 4 layers of 4 heads"),
            ({}, {"n_layers": 10**8}, "100,000,000 layers of 4 heads.* give fewer layers"),
            ({}, {"n_heads": 10**8}, "GB of memory, but this machine has"),
            ({}, {"n_ctx": 10**11}, "prompts of 100,000,000,000 tokens"),
        ],
    )
    def test_what_the_circuit_is_not_made_for(self, config, arguments, match):
        refused(match, planted_circuit, Seq2SeqTask(**config), **arguments)

    def test_prompts_longer_than_the_context(self, prompts):
        model = planted_circuit(Seq2SeqTask(x_len=2, phrase_len=1, n_examples=2), n_ctx=64)
        refused("context is 64", model, prompts.tokens)

    def test_text_without_a_tokenizer(self):
        refused("no tokenizer", HandBuilt(planted_circuit(TASK).cfg).to_tokens, "A:b")
