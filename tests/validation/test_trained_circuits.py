"""Circuits in trained models: the loss of interchange training, what is measured of it, and what it reaches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, planted_circuit
from align_circuits.prompts.prompts import TokenKind
from align_circuits.tasks.rng import Rng
from align_circuits.validation import trained_circuits
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.trained_circuits import (
    SURE,
    _pairs,
    _Student,
    prompt_length,
    train_circuit,
    what_was_reached,
)

TASK = trained_task(3)


@pytest.fixture(scope="module", autouse=True)
def few_pairs():
    """What a training reached is measured on 8 pairs of prompts, which takes as long as two steps, not on 128."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_circuits, "what_was_reached", partial(what_was_reached, n=8))
        yield


@pytest.fixture(scope="module")
def planted():
    return planted_circuit(TASK, 3, decoys=(), n_layers=4, n_ctx=prompt_length(TASK))


@pytest.fixture(scope="module")
def untrained():
    return train_circuit(TASK, 3, steps=0)


def by_hand(model, base, source, head):
    """The logits of one prompt with the output of one head written into the run by hand."""
    layer, place = head
    name = f"blocks.{layer}.attn.hook_z"
    _, cache = model.run_with_cache(source[None])

    def exchange(z, hook):  # noqa: ARG001
        z = z.clone()
        z[0, :, place] = cache[name][0, :, place]
        return z

    return model.run_with_hooks(base[None], fwd_hooks=[(name, exchange)])[0].detach()


def test_the_planted_circuit_reaches_all_of_itself(planted):
    reached = what_was_reached(planted, planted, n=16, seed=5)
    assert {reached[name] for name in ("accuracy", "invariance")} == {1}
    for role in CIRCUIT_ROLES:
        assert reached[f"interchange accuracy, {role}"] == 1
        assert reached[f"another head, {role}"] < 0.1, "idle heads change nothing"
    assert reached["roles exchanged"] < 0.5


def test_both_prompts_of_a_pair_are_about_the_same_symbols(planted):
    n = 8
    prompts, (bases, sources) = TASK.sample(2 * n, planted.tokenizer, seed=9), _pairs(TASK, planted, n, 9)
    inputs = prompts.token_kinds[0] == TokenKind.INPUT
    assert torch.equal(bases, prompts.inputs[:n])
    renamed = 0
    for base, source, other in zip(bases, sources, prompts.inputs[n:], strict=True):
        assert set(base[inputs].tolist()) == set(source[inputs].tolist())
        assert torch.equal(source[~inputs], other[~inputs])
        names = dict(zip(other[inputs].tolist(), source[inputs].tolist(), strict=True))
        assert len(set(names.values())) == len(names) == TASK.x_len
        assert [names[symbol] for symbol in other[inputs].tolist()] == source[inputs].tolist()
        renamed += sorted(names) != sorted(names.values())
    assert renamed > n / 2


def test_what_is_reached_is_what_a_loop_counts(planted, untrained):
    n, role = 4, "align_key"
    reached = what_was_reached(untrained, planted, n=n, seed=9)
    prompts, (bases, sources) = TASK.sample(2 * n, planted.tokenizer, seed=9), _pairs(TASK, planted, n, 9)
    letters, (own,), (theirs,) = (
        prompts.answer_tokens.tolist(),
        *([head for head, kind in model.kinds.items() if kind == role] for model in (untrained, planted)),
    )
    right = counted = 0
    for row in range(n):
        base, source = bases[row], sources[row]
        plain, moved = planted(base[None])[0].detach(), by_hand(planted, base, source, theirs)
        answers = by_hand(untrained, base, source, own)
        for query in range(len(base) - 1):
            if int(base[query + 1]) in letters and int(prompts.example[row, query + 1]) >= 1:
                best = [
                    sorted((float(each[query, letter]), letter) for letter in letters)[::-1] for each in (plain, moved)
                ]
                sure = all(each[0][0] - each[1][0] >= SURE for each in best)
                if sure and best[0][0][1] != best[1][0][1]:
                    counted += 1
                    right += int(answers[query].argmax()) == best[1][0][1]
    assert counted > 10
    assert reached[f"interchange accuracy, {role}"] == pytest.approx(right / counted)


def test_the_loss_is_least_where_the_model_is_the_planted_circuit(planted, untrained):
    """By its letters alone: a planted circuit leaves some probability to other tokens."""
    twin = planted_circuit(TASK, 3, decoys=(), n_layers=4, n_ctx=prompt_length(TASK))
    base, source = _pairs(TASK, planted, 8, 2)
    rng = Rng(0)
    roles, others = rng.uniform("roles", 8, 4) < 0.5, rng.uniform("others", 8, 4, 4) < 0.5
    batch = (base, source, roles, others, torch.tensor(0.0))
    student = _Student(twin, planted, Rng(0))
    with torch.no_grad():
        own = float(student.loss(*batch))
        heads = dict(student.own)
        student.own = {**heads, "previous": heads["lookup"], "lookup": heads["previous"]}  # the wrong heads
        wrong = float(student.loss(*batch))
        random = float(_Student(untrained, planted, Rng(0)).loss(*batch))
    letters = planted(base)[:, :, student.letters].logsumexp(-1) - planted(base).logsumexp(-1)
    assert own < wrong - 0.1 and own < random - 0.1
    assert own < 1 - float(letters.mean()), "entropy of the letters, and what other tokens have"


def test_hints_ask_for_what_the_planted_heads_carry(planted, untrained):
    tokens = TASK.sample(8, planted.tokenizer, seed=2).inputs
    none = torch.zeros(4, 4, dtype=torch.bool), torch.zeros(4, 4, 4, dtype=torch.bool)
    every = torch.ones(4, 4, dtype=torch.bool), none[1]
    student = _Student(untrained, planted, Rng(0))
    with torch.no_grad():
        for (roles, others), asks in ((none, True), (every, False)):
            without, hinted = (
                float(student.loss(tokens[:4], tokens[4:], roles, others, torch.tensor(weight)))
                for weight in (0.0, 1.0)
            )
            assert (hinted > without + 0.1) == asks, "an exchanged head carries another prompt's"


class TestTraining:
    def test_a_seed_gives_the_same_model_and_a_folder_keeps_it(self, tmp_path):
        first = train_circuit(TASK, 4, steps=2, out=tmp_path / "a")
        again = train_circuit(TASK, 4, steps=2)
        kept = train_circuit(TASK, 4, steps=2, out=tmp_path / "a")  # finished
        other = train_circuit(TASK, 5, steps=2)
        for model in (again, kept):
            assert all(torch.equal(value, model.state_dict()[name]) for name, value in first.state_dict().items())
            assert model.reached == first.reached and model.kinds == first.kinds
        assert not torch.equal(other.W_Q, first.W_Q)
        assert not any("planted" in name for name in load_file(tmp_path / "a" / "checkpoint.safetensors"))

    def test_every_role_has_one_head_and_the_lookup_comes_last(self):
        placed = set()
        for seed in range(4):
            model = train_circuit(TASK, seed, steps=0)
            heads = {kind: head for head, kind in model.kinds.items() if kind != "other"}
            assert set(heads) == set(CIRCUIT_ROLES) and len(model.kinds) == 16
            assert max(layer for layer, _ in heads.values()) == heads["lookup"][0]
            assert sum(layer == heads["lookup"][0] for layer, _ in heads.values()) == 1
            assert all(model.roles[head] == (None if kind == "other" else kind) for head, kind in model.kinds.items())
            assert all((parameter != 0).all() for name, parameter in model.named_parameters() if ".b_" not in name)
            placed.add(tuple(heads.values()))
        assert len(placed) == 4

    @pytest.mark.slow
    def test_the_loss_falls(self, planted):
        prompts = TASK.sample(64, planted.tokenizer, seed=11)
        losses = []
        for steps in (0, 16):
            model = train_circuit(TASK, 3, steps=steps)
            none = torch.zeros(32, 4, dtype=torch.bool), torch.zeros(32, 4, 4, dtype=torch.bool)
            with torch.no_grad():
                loss = _Student(model, planted, Rng(0)).loss(
                    prompts.inputs[:32], prompts.inputs[32:], *none, torch.tensor(0.0)
                )
            losses.append(float(loss))
        assert losses[1] < 0.8 * losses[0]

    @pytest.mark.parametrize(
        ("task", "settings", "message"),
        [
            ({"phrase_len": 1}, {}, "phrase_len=1"),
            ({"n_examples": 0}, {}, "n_examples=0"),
            ({"style": "marked"}, {}, "for the standard style only"),
            ({}, {"n_layers": 1}, "1 layers of 4 heads"),
            ({}, {"n_layers": 2, "n_heads": 2}, "2 layers of 2 heads"),
            ({}, {"d_model": 30}, "give a multiple of 4"),
            ({}, {"steps": -1}, "give 0 or more"),
            ({}, {"n_layers": 10**8}, "100,000,000 layers of 4 heads"),
            ({}, {"d_model": 10**8}, "100,000,000 wide.* a smaller width"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, task, settings, message):
        with pytest.raises(ValueError, match=message):
            train_circuit(replace(TASK, **task), **{"steps": 0, **settings})
