"""Redundant circuits: who gets which role, what is exchanged and dropped, the loss, and what is measured of it."""

from collections import Counter
from functools import partial

import pytest
import torch

from align_circuits.models.planted.planted_model import CIRCUIT_ROLES, STAGES, planted_circuit
from align_circuits.tasks.rng import Rng
from align_circuits.validation import redundant_circuits
from align_circuits.validation.circuits_in_trained_models import trained_task
from align_circuits.validation.redundant_circuits import (
    KEPT,
    MEAN,
    NOISE,
    ZERO,
    Assignment,
    _Student,
    add_noise,
    attention_of,
    dropped_outputs,
    gold_keys,
    noise_of,
    train_redundant_circuit,
    what_was_reached,
)
from align_circuits.validation.trained_circuits import answer_queries, paired, prompt_length, run_exchanged

SEED = 1  # three copies of one role, as the first test shows
TASK = trained_task(SEED)


@pytest.fixture(scope="module", autouse=True)
def few_pairs():
    """What a training reached is measured on 8 pairs of prompts, not on 128."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redundant_circuits, "what_was_reached", partial(what_was_reached, n=8))
        yield


@pytest.fixture(scope="module")
def planted():
    return planted_circuit(TASK, SEED, decoys=(), n_layers=STAGES, n_ctx=prompt_length(TASK))


@pytest.fixture(scope="module")
def untrained():
    return train_redundant_circuit(TASK, SEED, steps=0)


def test_24_seeds_have_each_pair_of_roles_with_two_and_with_three_copies():
    designs = Counter()
    for seed in range(50, 74):
        assignment = Assignment.of(seed)
        counts = {role: len(heads) for role, heads in assignment.copies.items()}
        (copied,) = (role for role, count in counts.items() if count > 1)
        (backed,) = assignment.backups
        designs[copied, backed, counts[copied]] += 1
        heads = [*assignment.kinds]
        assert len(heads) == len(set(heads)) == 4 + counts[copied] - 1 + 1 + 2, "no head has two roles"
        for head, kind in assignment.kinds.items():
            if kind.endswith("lookup"):
                assert head[0] >= 2
            elif not kind.startswith("decoy"):
                assert head[0] < 2
    assert len(designs) == 24 and all(copied != backed for copied, backed, _ in designs)
    assert len(Assignment.of(SEED).kinds) == 4 + 2 + 1 + 2
    assert {noise_of(seed) for seed in range(20)} == {0.0, NOISE}


def test_a_dropped_head_writes_nothing_or_the_mean_and_others_what_they_are_given(untrained):
    base, source = paired(TASK, TASK.sample(6, untrained.tokenizer, seed=2))
    _, own = run_exchanged(untrained, base)
    _, others = run_exchanged(untrained, source)
    how = torch.full((3, 4, 4), KEPT)
    how[0, 1, 2], how[1, 1, 2] = ZERO, MEAN
    exchanged = torch.zeros(3, 4, 4, dtype=torch.bool)
    exchanged[:, 1, 2] = True
    _, z = run_exchanged(untrained, base, dropped_outputs(others, how), exchanged)
    assert torch.equal(z[0], own[0])
    assert (z[1][0, :, 2] == 0).all()
    assert torch.allclose(z[1][1, :, 2], others[1][:, :, 2].mean(0))
    assert torch.equal(z[1][2, :, 2], others[1][2, :, 2])


def test_a_batch_leaves_one_copy_and_gives_the_backup_the_role_of_a_dropped_primary(planted, untrained):
    student = _Student(untrained, planted, Rng(0))
    _, _, with_roles, exchanged, dropped, keys, _ = student.batch(3, 1.0)
    heads = untrained.assignment
    ((copied, copies),) = ((role, heads) for role, heads in heads.copies.items() if len(heads) > 1)
    ((backed, backup),) = heads.backups.items()
    of_copies = torch.stack([dropped[:, layer, head] for layer, head in copies], 1) != KEPT
    assert set(of_copies.sum(1).tolist()) == {0, 1, 2}
    primary = dropped[:, *heads.copies[backed][0]] != KEPT
    assert 0.1 < float(primary.float().mean()) < 0.6
    marked = {*copies, heads.copies[backed][0]}
    assert all(
        (dropped[:, layer, head] == KEPT).all()
        for layer in range(4)
        for head in range(4)
        if (layer, head) not in marked
    )
    for place, role in enumerate(CIRCUIT_ROLES):
        for layer, head in heads.copies[role]:
            assert torch.equal(exchanged[:, layer, head], with_roles[:, place])
    with_backed = with_roles[:, CIRCUIT_ROLES.index(backed)]
    assert torch.equal(exchanged[:, *backup][primary], with_backed[primary])
    assert not torch.equal(exchanged[:, *backup][~primary], with_backed[~primary])
    assert set(dropped[dropped != KEPT].tolist()) == {ZERO, MEAN}
    assert keys.shape[:2] == (2, 32) and keys.any((1, 2, 3)).all() and copied != backed


def test_attention_of_queries_and_keys_is_the_pattern(untrained):
    tokens = TASK.sample(2, untrained.tokenizer, seed=2).inputs
    with attention_of(untrained, untrained.assignment.decoys) as attention:
        untrained(tokens)
    _, cache = untrained.run_with_cache(tokens)
    for role, (layer, head) in untrained.assignment.decoys.items():
        assert torch.allclose(attention(role), cache[f"blocks.{layer}.attn.hook_pattern"][:, head], atol=1e-6)


def test_the_loss_asks_for_the_decoys_attention_and_the_answers_alone_without_hints(planted, untrained):
    """By hand, of one prompt without any exchange."""
    student = _Student(untrained, planted, Rng(0))
    prompts = TASK.sample(2, planted.tokenizer, seed=4)
    base, source = paired(TASK, prompts)
    none = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 4, 4, dtype=torch.bool), torch.zeros(1, 4, 4).long()
    keys = gold_keys(prompts[:1], list(untrained.assignment.decoys))
    queries, letters = answer_queries(TASK, base[0], prompts.answer_tokens), prompts.answer_tokens
    with torch.no_grad():
        loss = student.loss(base, source, *none, keys, torch.tensor(0.0))
        hinted = student.loss(base, source, *none, keys, torch.tensor(1.0))
        wanted = planted(base)[0, queries][:, letters].softmax(-1)
        expected = -(wanted * untrained(base)[0, queries].log_softmax(-1)[:, letters]).sum(-1).mean()
        _, cache = untrained.run_with_cache(base)
    for role, (layer, head) in untrained.assignment.decoys.items():
        relation = prompts[:1].relations[role]
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
        given = [
            pattern[query, relation.keys_of(row)].sum()
            for row, query in enumerate(relation.query.tolist())
            if relation.keys_of(row)
        ]
        expected -= 0.3 * torch.stack(given).log().mean()
    assert float(loss) == pytest.approx(float(expected), abs=1e-4)
    assert float(hinted) > float(loss) + 0.1


def test_what_was_reached_tells_a_model_that_does_not_do_the_work(planted, untrained):
    reached = what_was_reached(untrained, planted, n=4, seed=3)
    ((backed, _),) = untrained.assignment.backups.items()
    copied = next(role for role, heads in untrained.assignment.copies.items() if len(heads) > 1)
    wanted = {"accuracy", "invariance", f"backup, {backed}", f"interchange of the backup, {backed}"}
    wanted |= {f"one copy, {copied}", f"interchange of one copy, {copied}"}
    per_role = ("interchange accuracy", "another head", "role dropped")
    wanted |= {f"{name}, {role}" for name in per_role for role in CIRCUIT_ROLES}
    wanted |= {f"attention of the decoy, {role}" for role in untrained.assignment.decoys}
    assert set(reached) == wanted
    assert reached["accuracy"] < 0.5 and all(0 <= share <= 1 for share in reached.values())


def test_noise_is_a_share_of_each_weight():
    model = train_redundant_circuit(TASK, SEED, steps=0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    add_noise(model, 0.1, Rng(3))
    for name, value in model.named_parameters():
        change = (value.detach() - before[name]).square().mean().sqrt()
        assert float(change) == pytest.approx(0.1 * float(before[name].square().mean().sqrt()), rel=0.2)


@pytest.mark.slow
def test_a_seed_gives_the_same_model_a_folder_keeps_it_and_the_loss_falls(planted, tmp_path):
    first = train_redundant_circuit(TASK, SEED, steps=16, out=tmp_path)
    kept = train_redundant_circuit(TASK, SEED, steps=16, out=tmp_path)
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in first.state_dict().items())
    losses = []
    for steps in (0, 16):
        student = _Student(train_redundant_circuit(TASK, SEED, steps=steps), planted, Rng(0))
        with torch.no_grad():
            losses.append(float(student.loss(*student.batch(99, 0.0))))
    assert losses[1] < 0.8 * losses[0]
