"""The first steps of finetuning, beside the gradients of Theorem 2's proof in plain loops."""

import math
from itertools import product

import pytest
import torch
from refusals import refused

from align_circuits.papers.recall.task.world import RecallWorld
from align_circuits.papers.recall.theory.finetuning_steps import Batches, Finetuning, Update

TINY = RecallWorld(n_subjects=4, n_values=(2, 2), n_grammar=2, div=None, relation_tokens=True)


def by_loops(setting: Finetuning, kq, ov) -> dict[str, list]:
    """Minus the expected gradients: u g^T for W_OV, and Eq. 11 for W_KQ, sequence by sequence, token by token."""
    world, d_vocab = setting.world, setting.world.d_vocab
    d_model = d_vocab + setting.length
    rows = [list(draw) for draw in product(setting.seen, repeat=setting.n_demos + 1)]
    cases = [(own, row) for own in world.facts.tolist() for row in rows]
    asked = {head: [0.0] * d_model for head in range(2)}
    outputs = [[0.0] * d_vocab for _ in range(d_vocab)]
    for own, row in cases:
        tokens = [token for j in row for token in (j, world.separator, own[j])]
        answer, tokens = tokens[-1], tokens[:-1]
        attention, logits = [], [0.0] * d_vocab
        for head in range(2):
            scores = [
                kq[head][token][world.separator] + kq[head][d_vocab + len(tokens) - 1 - i][world.separator]
                for i, token in enumerate(tokens)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            attention.append([weight / sum(weights) for weight in weights])
            for token, weight in zip(tokens, attention[head], strict=True):
                for u in range(d_vocab):
                    logits[u] += weight * ov[head][u][token]
        total = sum(math.exp(logit) for logit in logits)
        error = [math.exp(logit) / total - (u == answer) for u, logit in enumerate(logits)]
        for head in range(2):
            r = [sum(error[u] * ov[head][u][token] for u in range(d_vocab)) for token in tokens]
            mean = sum(a * b for a, b in zip(attention[head], r, strict=True))
            for i, token in enumerate(tokens):
                change = -attention[head][i] * (r[i] - mean) / len(cases)
                asked[head][token] += change
                asked[head][d_vocab + len(tokens) - 1 - i] += change
        for u in range(d_vocab):
            for token, weight in zip(tokens, attention[0], strict=True):
                if token != world.separator:
                    outputs[u][token] -= error[u] * weight / len(cases)
    return {"relation KQ": asked[0], "subject KQ": asked[1], "relation OV": outputs}


@pytest.mark.parametrize("n_slots", [8, 3])
def test_updates_are_those_of_plain_loops_at_both_steps(n_slots):
    setting = Finetuning(TINY, (0, 1, 2, 3), n_demos=1, n_slots=n_slots, beta=20.0)
    for model, updates in setting.steps(Batches(size=7)):
        if updates:
            expected = by_loops(setting, model.kq.tolist(), model.ov.tolist())
            for name, update in updates.items():
                assert torch.allclose(update[0], torch.tensor(expected[name]), atol=2e-6), name


def test_autograd_gives_the_same_updates():
    world = RecallWorld(n_subjects=16, n_values=(4, 4), n_grammar=4, div=None, relation_tokens=True)
    setting = Finetuning(world, world.split(8)[0], n_demos=3, n_slots=6, beta=2.0, corrections=())
    model, (tokens, answers) = setting.model(), setting.drawn(0, 50)
    with torch.no_grad():  # anywhere, not only at the construction
        model.W_Q[:, world.separator] += torch.randn(2, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model.last(tokens), answers).backward()
    assert model.W_Q.grad is not None
    assert model.W_O.grad is not None
    found = setting.updates(model, tokens, answers)
    torch.testing.assert_close(found["relation KQ"], -model.W_Q.grad[0, world.separator], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found["subject KQ"], -model.W_Q.grad[1, world.separator], atol=1e-6, rtol=1e-4)
    values = -model.W_O.grad[0, : world.d_vocab].T
    values[:, world.separator] = 0
    torch.testing.assert_close(found["relation OV"], values, atol=1e-6, rtol=1e-4)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / a.norm() / b.norm())


@pytest.mark.parametrize("n_slots", [8, 4])
def test_corrected_closed_forms_meet_the_exact_expectation(n_slots):
    world = RecallWorld(n_subjects=8, n_values=(4, 4), n_grammar=4, div=None, relation_tokens=True)
    setting = Finetuning(world, tuple(range(8)), n_demos=2, n_slots=n_slots)
    (_, first), (_, second), (model, _) = [(model, updates) for model, updates in setting.steps(Batches(size=512))]
    found: dict[Update, torch.Tensor] = {**first, "relation KQ": second["relation KQ"]}
    for name, update in found.items():
        assert cosine(update[0], setting.closed("corrected")[name]) > 0.999, name
    assert cosine(found["subject KQ"][0], setting.closed("printed")["subject KQ"]) == pytest.approx(
        math.sqrt(2 / 3), abs=1e-3
    )
    for name, terms in setting.coefficients("corrected").items():
        scale = setting.n_demos if name == "relation KQ" else 1  # α_2 is 1 / N_ft
        measured = setting.decomposed(name, scale * found[name])
        for term in measured:
            coefficient = terms.get(term, 0.0)
            largest = max(map(abs, terms.values()))
            assert measured[term].item() == pytest.approx(coefficient, rel=0.25, abs=0.05 * largest), (name, term)
    tokens, _ = setting.everything()
    assert model.last(tokens).shape == (len(tokens), world.d_vocab)


def test_terms_are_recovered_from_their_sum():
    world = RecallWorld(n_subjects=16, n_values=(4, 4), n_grammar=4, div=None, relation_tokens=True)
    setting = Finetuning(world, world.split(8)[0], n_demos=5, n_slots=6)
    for form in ("printed", "corrected"):
        for name, direction in setting.closed(form).items():
            wanted = setting.coefficients(form)[name]
            for term, coefficient in setting.decomposed(name, direction[None]).items():
                assert coefficient.item() == pytest.approx(wanted.get(term, 0.0), abs=1e-6), (name, term)


def test_many_subjects_let_two_steps_generalise_and_few_do_not():
    world = RecallWorld(n_subjects=64, n_values=(4, 4), n_grammar=4, div=None, relation_tokens=True)
    accuracy = {}
    for n_seen in (6, 48):
        seen, held_out = world.split(n_seen)
        setting = Finetuning(world, seen, n_demos=2, n_slots=6)
        *_, (model, _) = setting.steps(Batches(2000))
        tokens, answers = setting.drawn(99, 200, held_out)
        accuracy[n_seen] = (model.last(tokens).argmax(1) == answers).float().mean().item()
        by_formula = setting.by_formula("corrected")
        formula = (by_formula.last(tokens).argmax(1) == answers).float().mean().item()
        assert formula == pytest.approx(accuracy[n_seen], abs=0.15)
    assert accuracy[6] < 0.6
    assert accuracy[48] > 0.95


def test_what_the_theorem_is_not_about_is_refused():
    refused("one number U for all types", Finetuning, RecallWorld.small(relation_tokens=True, n_values=(4, 8)), (0, 1))
    refused("n_demos is 0", Finetuning, TINY, (0, 1), n_demos=0)
