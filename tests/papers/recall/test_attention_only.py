"""The attention-only model and the recall constructions, beside plain loops."""

import inspect
import math
from typing import Any, cast

import pytest
import torch
from refusals import refused

import align_circuits as ac
from align_circuits.papers.recall.models.attention_only import AttentionOnly, AttentionOnlyConfig
from align_circuits.papers.recall.models.training import logits_at
from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.constructions import CORRECTIONS, HEADS, finetuned, pretrained
from align_circuits.run.forward_pass import capture

WORLD = RecallWorld.small(relation_tokens=True)


def by_loops(kq, ov, tokens: list[int], positions: str = "relative") -> tuple[list, list]:
    """Attention and logits of Eq. 1, number by number."""
    kq, ov, d_vocab = kq.tolist(), ov.tolist(), ov.shape[-1]
    patterns, logits = [], []
    for head in range(len(kq)):
        rows = []
        for t, query in enumerate(tokens):
            scores = []
            for i in range(t + 1):
                position = t - i if positions == "relative" else i
                scores.append(kq[head][tokens[i]][query] + kq[head][d_vocab + position][query])
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            rows.append([weight / sum(weights) for weight in weights])
        patterns.append(rows)
    for t in range(len(tokens)):
        row = [0.0] * d_vocab
        for head in range(len(kq)):
            for i in range(t + 1):
                for u in range(d_vocab):
                    row[u] += patterns[head][t][i] * ov[head][u][tokens[i]]
        logits.append(row)
    return patterns, logits


@pytest.mark.parametrize("positions", ["relative", "absolute"])
def test_attention_and_logits_are_those_of_plain_loops(positions):
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, positions=positions, init=0.8), seed=1).double()
    tokens = torch.tensor([[3, 8, 0, 3, 5, 3]])
    logits, cache = model.run_with_cache(tokens)
    patterns, expected = by_loops(model.kq, model.ov, tokens[0].tolist(), positions)
    for head, rows in enumerate(patterns):
        for t, row in enumerate(rows):
            assert cache["blocks.0.attn.hook_pattern"][0, head, t, : t + 1].tolist() == pytest.approx(row)
    assert torch.allclose(logits[0], torch.tensor(expected, dtype=torch.float64))
    assert torch.allclose(model.last(tokens), logits[:, -1])
    assert torch.equal(cache["blocks.0.hook_attn_out"], logits)


@pytest.mark.parametrize("positions", ["relative", "absolute"])
def test_products_of_weights_first_give_the_same_logits_and_gradients(positions):
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, positions=positions, init=0.8), seed=1).double()
    tokens = torch.tensor([[3, 8, 0, 3, 5, 3], [1, 1, 2, 7, 4, 0]])
    weights = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = []
    for logits in (model(tokens), model.logits(tokens)):
        model.zero_grad()
        (logits.square() * weights).sum().backward()
        gradients.append([cast(torch.Tensor, parameter.grad) for parameter in model.parameters()])
    assert torch.allclose(model.logits(tokens), model(tokens))
    assert all(gradient.any() for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other)


def positions_like(tokens, *true):
    at = torch.zeros_like(tokens, dtype=torch.bool)
    for prompt, position in true:
        at[prompt, position] = True
    return at


FEW = torch.tensor([[3, 8, 0, 3, 5, 3], [1, 1, 2, 7, 4, 0]])
MANY = FEW.repeat(3, 1)


@pytest.mark.parametrize(
    ("form", "tokens", "positions"),
    [
        ("forward", FEW, None),
        ("forward", FEW, positions_like(FEW, (0, -1), (1, -1), (1, 2))),
        ("forward", FEW, positions_like(FEW, (0, -1))),
        ("forward", FEW, positions_like(FEW, (0, -1), (1, 2))),
        ("last", FEW, positions_like(FEW, (0, -1), (1, -1))),
        ("logits", MANY, None),
        ("logits", MANY, positions_like(MANY, (0, -1), (1, 2))),
    ],
)
def test_training_takes_the_cheapest_form(form, tokens, positions, monkeypatch):
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, init=0.8), seed=1)
    expected = model(tokens) if positions is None else model(tokens)[positions]
    for other in {"forward", "logits", "last"} - {form}:
        monkeypatch.delattr(AttentionOnly, other)
    assert torch.allclose(logits_at(model, tokens, positions), expected, atol=1e-6)


def test_training_with_hooks_takes_the_form_that_fires_them():
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, init=0.8), seed=1)
    for tokens, positions in ((MANY, None), (FEW, positions_like(FEW, (0, -1), (1, -1)))):
        with model.hooks([("blocks.0.attn.hook_z", lambda z, hook: z * 0)]):  # noqa: ARG005 - TransformerLens names it
            assert not logits_at(model, tokens, positions).any()
        assert logits_at(model, tokens, positions).any()


def test_gradients_of_looked_up_products_are_summed_in_the_type_of_the_weights():
    model = AttentionOnly(AttentionOnlyConfig(9, 64, d_head=4, init=0.8), seed=1)
    tokens = torch.full((64, 64), 3)
    gradients = []
    for precision in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            logits = model.logits(tokens)
        logits[..., 0].sum().backward()
        gradients.append(cast(torch.Tensor, model.W_O.grad))
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("positions", ["relative", "absolute"])
def test_padding_changes_nothing(positions):
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, positions=positions, init=0.8), seed=1)
    tokens = torch.tensor([[3, 8, 0, 5]])
    padded, mask = torch.tensor([[0, 0, 3, 8, 0, 5]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert torch.allclose(model(padded, attention_mask=mask)[:, 2:], model(tokens), atol=1e-6)


def test_products_give_the_same_model_and_its_gradients():
    model = AttentionOnly(AttentionOnlyConfig(9, 7, d_head=4, init=0.8), seed=1)
    same = AttentionOnly.of_products(model.kq.detach(), model.ov.detach())
    tokens = torch.tensor([[3, 8, 0, 3, 5], [1, 1, 2, 7, 4]])
    assert torch.allclose(same(tokens), model(tokens), atol=1e-6)
    assert torch.allclose(
        capture_z(same, tokens).sum(-1), torch.ones(2, 5, 3)
    )  # what is attended to, a mean of one-hots
    same.last(tokens).square().sum().backward()
    step, kq = 1e-3, same.kq.detach()
    nudged = kq.clone()
    nudged[1, 3, 5] += step
    change = (
        AttentionOnly.of_products(nudged, same.ov.detach()).last(tokens).square().sum()
        - same.last(tokens).square().sum()
    )
    assert same.W_Q.grad is not None
    assert change.item() / step == pytest.approx(same.W_Q.grad[1, 5, 3].item(), rel=0.02, abs=1e-4)


def capture_z(model, tokens):
    return model.run_with_cache(tokens)[1]["blocks.0.attn.hook_z"]


def test_what_does_not_fit_is_refused():
    config = AttentionOnlyConfig(9, 7)
    object.__setattr__(config, "positions", "rotary")  # annotations unchecked
    refused("choose 'relative' or 'absolute'", config.__post_init__)
    refused("d_head is 0", AttentionOnlyConfig, 9, 7, d_head=0)
    short = AttentionOnly(AttentionOnlyConfig(9, 4, d_head=4))
    for logits in (short, short.logits, short.last):
        refused("the model's context is 4", logits, torch.zeros(1, 5, dtype=torch.long))
    refused("no relation tokens", pretrained, RecallWorld.small(), 20, 3)
    unchecked: Any = inspect.unwrap(pretrained)
    refused("unknown corrections", unchecked, WORLD, 20, 3, corrections=["all"])


def test_the_verbs_work_on_it():
    rows = [[0, 31, 32, 0, 31, 5], [2, 31, 32, 2, 31, 7], [4, 31, 30, 4, 31, 9], [6, 31, 29, 6, 31, 11]]
    prompts = ac.Prompts.from_tokens(rows)
    model = AttentionOnly(AttentionOnlyConfig(WORLD.d_vocab, 8, d_head=4, init=0.8), seed=1)
    assert set(ac.score_heads(model, prompts).heads().frame["head"]) == {0, 1, 2}
    intact = ac.evaluate(model, prompts)
    zero = ac.Ablate([(0, 0), (0, 1), (0, 2)], how="zero")
    silent = ac.evaluate(model, prompts, edits=[zero]).where(metric="log_prob", kind="all", offset=None).frame["value"]
    assert silent.item() == pytest.approx(-math.log(WORLD.d_vocab), rel=1e-5)  # nothing else writes the logits
    assert intact.provenance.engine == "reference"
    assert len(ac.ablate_heads(model, prompts, "mean")) == 3 * 2 * 2
    corrupted = ac.Prompts.from_tokens([rows[1], rows[0], rows[3], rows[2]])
    corrupted = ac.Prompts(**{**vars(corrupted), "targets": prompts.targets})
    patched = ac.patch_heads(model, ac.Pair(prompts, corrupted), sites=("z", "q", "k", "v", "pattern"))
    assert patched.frame["value"].to_numpy(float).any()
    assert capture(model, prompts, ["blocks.0.attn.hook_pattern"])["blocks.0.attn.hook_pattern"].shape == (4, 3, 6, 6)


# The constructions


def sequence(n_slots: int, place: int, type_: int, subject: int, parts: int) -> list[int]:
    """A pretraining sequence; the second half of the subsequences has its relation token late."""
    row: list[int] = []
    for part in range(parts):
        inner = [WORLD.grammar_ids[(part + slot) % WORLD.n_grammar] for slot in range(n_slots)]
        kind = (type_ + part) % WORLD.n_types
        inner[place if part % 2 == 0 else n_slots - 1] = WORLD.relation_ids[kind]
        row += [subject, *inner, WORLD.separator, int(WORLD.facts[kind, subject])]
    return row


def allowed(row: list[int], n_slots: int, at: int) -> set[int]:
    """What the data allow after position `at` of a pretraining sequence."""
    part, place = divmod(at, n_slots + 3)
    own = row[part * (n_slots + 3) : at + 1]
    relation = [token for token in own if token in WORLD.relation_ids]
    if place < n_slots:
        grammar, relations = set(WORLD.grammar_ids), set(WORLD.relation_ids)
        return grammar if relation else relations if place == n_slots - 1 else grammar | relations
    if place == n_slots:
        return {WORLD.separator}
    if place == n_slots + 1:
        return {int(WORLD.facts[relation[0] - WORLD.relation_ids.start, own[0]])}
    return {own[0]}


def wrong_places(weights, n_slots: int) -> set[str]:
    """The positions at which some argmax is not what the data allow, counted with the loops."""
    names = {n_slots: "separator", n_slots + 1: "attribute", n_slots + 2: "subject"}
    wrong = set()
    for place, subject in ((0, 3), (n_slots - 1, 7)):
        row = sequence(n_slots, place, 1, subject, 3)
        _, logits = by_loops(weights.kq, weights.ov, row)
        for at, values in enumerate(logits):
            top = {token for token, value in enumerate(values) if value >= max(values) - 1e-6}
            if not top <= allowed(row, n_slots, at):
                wrong.add(names.get(at % (n_slots + 3), "slot"))
    return wrong


@pytest.mark.parametrize(
    ("without", "wrong"), [(None, set()), ("values", {"attribute"}), ("owner", {"subject"}), ("slots", {"slot"})]
)
def test_each_correction_mends_what_it_says(without, wrong):
    made: Any = [name for name in CORRECTIONS if name != without]
    assert wrong_places(pretrained(WORLD, 18, 3, beta=60.0, corrections=made), 3) == wrong


def test_the_printed_weights_fail_on_shared_values_alone_where_the_paper_says_they_work():
    assert wrong_places(pretrained(WORLD, 18, 3, corrections=()), 3) == {"attribute", "slot", "subject"}
    unshared = RecallWorld.small(relation_tokens=True, n_values=(16, 16, 16))
    tokens = torch.tensor([[2, unshared.grammar_ids[0], unshared.relation_ids[1], unshared.separator]])
    assert int(pretrained(unshared, 18, 2, corrections=()).model().last(tokens).argmax()) == unshared.facts[1, 2]


@pytest.mark.parametrize("beta", [30.0, 300.0])
def test_finetuned_weights_answer_by_the_type_in_context(beta):
    subjects, type_ = [3, 9, 12, 5], 2
    row = [token for j in subjects for token in (j, WORLD.separator, int(WORLD.facts[type_, j]))][:-1]
    for seen, right in (
        (None, True),
        ([j for j in range(16) if WORLD.facts[type_, j] != WORLD.facts[type_, 5]], False),
    ):
        weights = finetuned(WORLD, 18, 3, beta, seen=seen)
        patterns, logits = by_loops(weights.kq, weights.ov, row)
        answer = max(range(WORLD.d_vocab), key=logits[-1].__getitem__)
        assert (answer == WORLD.facts[type_, 5]) == right
        query = patterns[HEADS.index("subject")][-1]
        assert query[-2] > 0.99  # the query subject
        if right:
            assert sum(patterns[HEADS.index("relation")][-1][2::3]) > 0.99  # the attributes
